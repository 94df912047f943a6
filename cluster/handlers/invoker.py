"""From effects to handlers and back: which attempts run, at which endpoint, and what their frames ask for.

One `Endpoint` per deployment has its own stream, queue and bound, so that a slow or dead one slows nobody else. Everything
between two awaits is synchronous: an effect becomes a frame in the outbox of a stream, a frame becomes a command in the
batch of a partition, and both leave once per turn of the loop. There is no task per attempt and none per step.

Whatever is lost on the way costs an attempt, never an invocation: the state says that it should run, so the leader
dispatches it again, with a higher epoch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable
from random import Random
from typing import Any, Final

import aiohttp

from holdfast.cluster.clock import Clock
from holdfast.cluster.handlers.attempts import Attempt, Carrier, Opening, Owner, Ticket
from holdfast.cluster.handlers.dispatch import Limits, Timing
from holdfast.cluster.handlers.endpoint import Endpoint
from holdfast.cluster.handlers.failures import Failures
from holdfast.cluster.handlers.queue import suspects_max
from holdfast.cluster.partition.door import Partition
from holdfast.cluster.registry.machine import Target
from holdfast.cluster.registry.registry import Registry
from holdfast.cluster.tasks import Tasks
from holdfast.cluster.values.shared_store import Objects, StoreDown, ValueLost
from holdfast.cluster.values.staging import Put, Stager, digested
from holdfast.log.errors import Overloaded, ProposalError
from holdfast.sdk.ids import format_id, object_id
from holdfast.sdk.journal import (
    INT_MAX,
    PAYLOAD_BYTES_MAX,
    cut_text,
)
from holdfast.statemachine import queries, refs
from holdfast.statemachine.commands import Command, FailAttempt, Mode, PostponeAttempt, Retry
from holdfast.statemachine.effects import (
    AbortAttempt,
    Acknowledge,
    First,
    Result,
    SendCancelled,
    SendCompletion,
    SendRetry,
    StartAttempt,
    Status,
)
from holdfast.statemachine.txn import ReadTxn

logger = logging.getLogger(__name__)

EAGER_STATE_BYTES: Final = 64 * 1024
_SWEEP_S: Final = 1.0
_ASK_AGAIN_S: Final = 0.1
#: Large values that are being staged for handlers: while there is more, no stream is read.
STAGING_BYTES_MAX: Final = 64 * 1024 * 1024
_STAGE_AGAIN_S: Final = 0.02


class Invoker:
    def __init__(
        self,
        registry: Registry,
        clock: Clock,
        *,
        limits: Limits | None = None,
        timing: Timing | None = None,
        rng: Random | None = None,
        stager: Stager | None = None,
    ) -> None:
        self.registry = registry
        self.clock = clock
        self.limits = limits or Limits()
        self.timing = timing or Timing()
        self.rng = rng or Random()
        self._failures = Failures(self.rng)
        self.attempts: dict[bytes, Attempt] = {}
        self.endpoints: dict[str, Endpoint] = {}
        self.started = 0
        self.frames_in = 0
        self.stager = stager or Stager()
        self.objects: Objects  # Large values in the shared store; the node sets it.
        self.staging_bytes = 0  # Of values that handlers gave us and that no log has yet.
        self._staging = Tasks()
        self.partitions: Collection[Partition] = ()  # That may be led here; the node fills it.
        #: Returns when every deployment is known here that was registered before the call; the node sets it.
        self.fresh: Callable[[], Awaitable[None]] = _at_once
        self._doubtful: list[tuple[Owner, StartAttempt]] = []  # Pinned to deployments that nobody here knows.
        self._asking: asyncio.Task[None] | None = None
        self.stopping = False
        self._loop = asyncio.get_running_loop()
        self._session: aiohttp.ClientSession | None = None
        self._deployments: set[str] = set()
        self._closing = Tasks()
        self._sweeper = self._loop.call_later(_SWEEP_S, self._sweep)

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=10),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.timing.connect_s),
                auto_decompress=False,
                trace_configs=[no_redirects()],
            )
        return self._session

    # -- effects -----------------------------------------------------------------------------------------------------

    def start(self, owner: Owner, effect: StartAttempt, *, is_fresh: bool = False) -> None:
        """Send the invocation to its handler, now or when its endpoint has room.

        `is_fresh`: every deployment is known here that it may be pinned to, or that may offer its handler.
        """
        old = self.attempts.get(effect.id)
        if old is not None:
            if old.epoch >= effect.epoch:
                return
            self.drop(old, "a newer attempt begins")
        if self.stopping:
            return
        first = effect.first
        deployment = None
        losses = 0
        if first is not None:
            service, handler = first.service, first.handler
        else:
            with owner.partition.state.read() as txn:
                record = queries.load(txn, effect.id)
            if record is None or record.epoch != effect.epoch or record.status != Status.RUNNING:
                return
            service, handler, deployment = record.service, record.handler, record.deployment
            losses = record.losses
        target = self.find(service, handler, deployment)
        if target is not None:
            self.endpoint(target.deployment).enqueue(Ticket(owner, effect.id, effect.epoch, first, losses))
        elif is_fresh:
            self._refuse(owner, effect.id, effect.epoch, service, handler, deployment)
        else:
            self._doubtful.append((owner, effect))
            if self._asking is None:
                self._asking = self._loop.create_task(self._ask())

    async def _ask(self) -> None:
        """Other nodes may know deployments that we have yet to hear of. All who wait for that ask once."""
        while self._doubtful:
            doubtful, self._doubtful = self._doubtful, []
            try:
                await self.fresh()
            except ProposalError as error:
                logger.warning(
                    "whether the deployments of %d invocations are gone cannot be read: %s", len(doubtful), error
                )
                doubtful = [(owner, effect) for owner, effect in doubtful if not owner.ended]
                self._doubtful = doubtful + self._doubtful
                await asyncio.sleep(_ASK_AGAIN_S)
                continue
            for owner, effect in doubtful:
                if not owner.ended:
                    self.start(owner, effect, is_fresh=True)
        self._asking = None

    def acknowledge(self, effect: Acknowledge) -> None:
        attempt = self.attempts.get(effect.id)
        if attempt is not None and attempt.epoch == effect.epoch and attempt.length <= effect.length:
            attempt.length = effect.length  # The same once more is an answer too: to a step that was there already.
            attempt.carrier.acknowledge(attempt)

    def complete(self, effect: SendCompletion) -> None:
        attempt = self.attempts.get(effect.id)
        if attempt is not None and attempt.epoch == effect.epoch and effect.order > attempt.order:
            attempt.carrier.complete(attempt, effect.step, effect.order, effect.outcome)

    def retry(self, effect: SendRetry) -> None:
        attempt = self.attempts.get(effect.id)
        if attempt is not None and attempt.epoch == effect.epoch and effect.order > attempt.order:
            attempt.carrier.retry(attempt, effect.step)

    def cancel(self, effect: SendCancelled) -> None:
        attempt = self.attempts.get(effect.id)
        if attempt is not None and attempt.epoch == effect.epoch and effect.order > attempt.order:
            attempt.carrier.cancelled(attempt)

    def abort(self, effect: AbortAttempt) -> None:
        attempt = self.attempts.get(effect.id)
        if attempt is not None and attempt.epoch == effect.epoch:
            self.drop(attempt, effect.reason)

    def knows(self, invocation: bytes, epoch: int) -> bool:
        """Whether this attempt runs or waits for its turn here."""
        attempt = self.attempts.get(invocation)
        if attempt is not None and attempt.epoch >= epoch:
            return True
        return any(endpoint.queued(invocation, epoch) for endpoint in self.endpoints.values())

    @property
    def congested(self) -> bool:
        """Whether frames come faster than the logs take them."""
        return self.staging_bytes >= STAGING_BYTES_MAX or any(partition.busy for partition in self.partitions)

    # -- attempts ----------------------------------------------------------------------------------------------------

    def find(self, service: str, handler: str, deployment: str | None) -> Target | None:
        """The handler where the invocation is pinned, or else where new ones go."""
        if deployment is None:
            return self.registry.find(service, handler)
        return self.registry.target(deployment, service, handler)

    def endpoint(self, deployment: str) -> Endpoint:
        found = self.endpoints.get(deployment)
        if found is None:
            found = self.endpoints[deployment] = Endpoint(self, deployment)
        return found

    def deployments_changed(self) -> None:
        """Some were registered, or removed."""
        if self.registry.state.deployments.keys() != self._deployments:
            self._deployments = set(self.registry.state.deployments)
            for endpoint in list(self.endpoints.values()):
                endpoint.deployments_changed()

    def belongs_elsewhere(self, ticket: Ticket, deployment: str) -> bool:
        with ticket.owner.partition.state.read() as txn:
            record = queries.load(txn, ticket.id)
        if record is None:
            return False  # Found out when its turn comes.
        target = self.find(record.service, record.handler, record.deployment)
        return target is None or target.deployment != deployment

    def retire(self, deployment: str, endpoint: object) -> None:
        """Its deployment was removed, and nothing runs there any more."""
        found = self.endpoints.get(deployment)
        if found is not None and found is endpoint:
            del self.endpoints[deployment]
            self._closing.keep(self._loop.create_task(found.close()))

    def build(self, ticket: Ticket, carrier: Carrier, deployment: str) -> tuple[Attempt, Opening] | None:
        """The attempt and what it begins with; None if it is not wanted any more, or belongs elsewhere."""
        owner, ident, epoch, first, losses = ticket
        if owner.ended or owner.held:
            return None
        if first is not None:
            target = self.registry.find(first.service, first.handler)
            if target is not None and target.deployment == deployment:
                return self._build_first(ticket, first, target, carrier)
        with owner.partition.state.read() as txn:
            record = queries.load(txn, ident)
            if record is None or record.epoch != epoch or record.status != Status.RUNNING:
                return None
            target = self.find(record.service, record.handler, record.deployment)
            if target is None or target.deployment != deployment:
                # A deployment came or went while it waited for its turn.
                self._loop.call_soon(self.start, owner, StartAttempt(ident, epoch))
                return None
            state, complete = None, False
            if record.mode != Mode.PLAIN:
                state, complete = _eager_state(txn, record.oid)
            steps = queries.journal(txn, ident, 0, record.length)
        attempt = Attempt(
            self,
            ticket,
            target,
            carrier,
            pinned=record.deployment is not None,
            order=record.order,
            length=record.length,
            now=self._loop.time(),
        )
        # A step that refers to large values is as large as they are where it is going.
        sizes = [queries.whole_step_size(raw) for raw in steps] if record.blobs else [len(raw) for raw in steps]
        opening = Opening(
            record.service, record.handler, record.key, self.clock.now_ms(), record.seed, steps, sizes, state, complete,
            record.cancelled, suspects_max(losses), *owner.partition.journal_limits,
        )  # fmt: skip
        return self._register(attempt), opening

    def _build_first(self, ticket: Ticket, first: First, target: Target, carrier: Carrier) -> tuple[Attempt, Opening]:
        """The effect has all that the record and the journal could say."""
        state, complete = None, False
        if first.key is not None:
            with ticket.owner.partition.state.read() as txn:
                state, complete = _eager_state(txn, object_id(first.service, first.key))
        attempt = Attempt(self, ticket, target, carrier, pinned=False, order=1, length=1, now=self._loop.time())
        opening = Opening(
            first.service, first.handler, first.key, self.clock.now_ms(), _seed(ticket.id), [first.input],
            [len(first.input) + first.large], state, complete, False, 0, *ticket.owner.partition.journal_limits,
        )  # fmt: skip
        return self._register(attempt), opening

    def _register(self, attempt: Attempt) -> Attempt:
        self.attempts[attempt.id] = attempt
        self.started += 1
        return attempt

    # -- what attempts say -------------------------------------------------------------------------------------------

    def heard(self, carrier: Carrier, invocation: bytes, epoch: int) -> Attempt | None:
        self.frames_in += 1
        attempt = self.attempts.get(invocation)
        if attempt is None or attempt.epoch != epoch or attempt.carrier is not carrier:
            return None
        attempt.last_frame_at = self._loop.time()
        return attempt

    def submit(self, attempt: Attempt, wanted: Command, *, last: bool) -> None:
        if attempt.backlog or self.stager.large(wanted):
            self._stage(attempt, wanted, last=last)
        else:
            self._submit(attempt, wanted, last=last)

    def ask_directory(self, attempt: Attempt, again: Callable[[bool], None], weight: int) -> None:
        attempt.unresolved.append((again, weight))
        self.staging_bytes += weight
        if len(attempt.unresolved) == 1:
            self._staging.keep(self._loop.create_task(self._resolve(attempt)))

    async def _resolve(self, attempt: Attempt) -> None:
        while not attempt.over:
            try:
                await self.fresh()
                break
            except ProposalError as error:
                logger.warning(
                    "%s waits: a handler that it calls cannot be looked up: %s", format_id(attempt.id), error
                )
                await asyncio.sleep(_ASK_AGAIN_S)
        said, attempt.unresolved = attempt.unresolved, []
        self.staging_bytes -= sum(weight for _, weight in said)
        for offset, (again, weight) in enumerate(said):
            if attempt.over:
                return
            attempt.last_frame_at = self._loop.time()
            if attempt.unresolved:
                self.ask_directory(attempt, again, weight)
            else:
                again(
                    offset == 0
                )  # Later ones came after the read began: if they call somebody unknown, they ask anew.

    def blame(self, attempt: Attempt, why: str) -> None:
        """It was said in its name what no correct SDK says. That rarely goes away: it waits for an operator before long."""
        logger.error("%s: %s", format_id(attempt.id), why)
        self.drop(attempt, cut_text(why))
        if not attempt.owner.ended:
            attempt.partition.submit(self._failures.of_protocol(attempt, why), attempt.answered)

    def _submit(self, attempt: Attempt, wanted: Command, *, last: bool) -> None:
        if last:
            self._end(attempt)
        elif type(wanted) is FailAttempt:
            self.drop(attempt, wanted.failure[2])  # It asked for what cannot be.
        if not attempt.partition.submit(wanted, attempt.answered):
            self.drop(attempt, "what it did could not be journaled")  # Nothing behind a gap: `answered` says why.

    # -- large values ------------------------------------------------------------------------------------------------

    def _stage(self, attempt: Attempt, wanted: Command, *, last: bool) -> None:
        """Whatever the attempt says from here on waits in its turn until the large value in front is in the state."""
        if any(refs.size_of(payload) > PAYLOAD_BYTES_MAX for payload in refs.payloads(wanted)):
            text = f"a value has at most {PAYLOAD_BYTES_MAX} bytes: keep larger ones elsewhere"
            self.fail(attempt, [1, 413, text, "TooLarge"], pause=True)
            return
        self.staging_bytes += self.stager.large(wanted)
        attempt.backlog.append((wanted, last))
        if len(attempt.backlog) == 1:
            task = self._loop.create_task(self._work_off(attempt))
            self._staging.keep(task)

    async def _work_off(self, attempt: Attempt) -> None:
        """One after the other, as they were said. What an attempt has said that is over is void."""
        backlog = attempt.backlog
        try:
            while backlog and not attempt.over:
                wanted, last = backlog[0]
                light = await self._detached(attempt, wanted)
                if light is None:
                    return
                attempt.last_frame_at = self._loop.time()
                self._submit(attempt, light, last=last)
                self.staging_bytes -= self.stager.large(wanted)
                backlog.popleft()
        except ProposalError as error:
            attempt.answered(error)
        except Exception:
            logger.exception("a large value of %s could not be staged", format_id(attempt.id))
            self.lost(attempt, "an error of this node")
        finally:
            self.staging_bytes -= sum(self.stager.large(wanted) for wanted, _ in backlog)
            backlog.clear()

    async def _detached(self, attempt: Attempt, wanted: Command) -> Command | None:
        """None: the attempt is over meanwhile."""
        if self.stager.large(wanted):
            wanted = await digested(wanted, attempt.level)
            wanted = await self.stager.detach(attempt.partition.number, wanted, self._put_for(attempt))
        return None if attempt.over else wanted

    def _put_for(self, attempt: Attempt) -> Put:
        async def put(command: Command) -> Result:
            while True:
                try:
                    return await attempt.partition.submit_and_wait(command)
                except Overloaded:
                    if attempt.over:
                        raise
                await asyncio.sleep(_STAGE_AGAIN_S)  # The log is busy; the streams are not read meanwhile.

        return put

    def _end(self, attempt: Attempt) -> None:
        attempt.over = True
        if self.attempts.get(attempt.id) is attempt:
            del self.attempts[attempt.id]
        attempt.carrier.let_go(attempt)

    def drop(self, attempt: Attempt, reason: str) -> None:
        """Stop it at its handler, and forget it."""
        if not attempt.over:
            attempt.carrier.abort(attempt, reason)
            self._end(attempt)

    def lost(self, attempt: Attempt, why: str) -> None:
        """Nobody can go on with it: the next one must. Harmless if the state knows better."""
        if not attempt.over:
            logger.debug("%s: attempt %d is lost: %s", format_id(attempt.id), attempt.epoch, why)
            self.drop(attempt, why)
        if not attempt.owner.ended:
            attempt.owner.redispatch(attempt.id, attempt.epoch)

    def fail(self, attempt: Attempt, failure: list[Any], *, pause: bool = False) -> None:
        """It is the handler's fault, or the endpoint's: counted, and tried again later."""
        self.drop(attempt, failure[2])
        if not attempt.owner.ended:
            command = self._failures.of_attempt(attempt, failure, pause=pause)
            attempt.partition.submit(command, attempt.answered)

    def unreadable(self, attempt: Attempt, error: StoreDown | ValueLost) -> None:
        """A value that it needs cannot be fetched, which is nobody's fault at the handler: the next one comes later. If the
        value is lost, it waits for an operator."""
        if isinstance(error, ValueLost):
            self.objects.report(error, format_id(attempt.id))
            self.fail(attempt, [1, 500, cut_text(f"{error}; {error.hint}"), "ValueLost"], pause=True)
            return
        self.drop(attempt, str(error))
        if not attempt.owner.ended:
            failure = [1, 503, cut_text(str(error)), "StoreDown"]
            command = PostponeAttempt(attempt.id, attempt.epoch, failure, self.objects.delay_ms(self.rng))
            attempt.partition.submit(command, attempt.answered)

    def crashed(self, attempt: Attempt, why: str, *, kind: str = "ProcessLost") -> None:
        """The process of its handler ended while it ran, and may have ended because of it. Counted in the state: the first
        time it is dispatched again at once, later ones after a while, and in the end it waits for an operator."""
        if not (attempt.begun and attempt.partition.level >= 2):
            self.lost(attempt, why)
            return
        self.drop(attempt, why)
        if not attempt.owner.ended:
            command = self._failures.of_attempt(attempt, [1, 503, cut_text(why), kind])._replace(lost=True)
            attempt.partition.submit(command, attempt.answered)

    def break_off(
        self,
        attempts: Iterable[Attempt],
        why: str,
        *,
        blame: str | None = None,
        blamed: bytes | None = None,
        crashed: bool = False,
    ) -> None:
        """The carrier of these attempts is gone. `blame`: the endpoint spoke nonsense, in the name of `blamed`. If nobody can
        tell in whose, all of them are suspects. `crashed`: its process may have been ended by one of them."""
        attempts = list(attempts)
        if blame is not None and blamed not in [attempt.id for attempt in attempts]:
            blamed = attempts[0].id if len(attempts) == 1 else None
        # Suspects that ran for long are believed when there are others that just began.
        just_began = any(each.begun and not each.trusted and suspects_max(each.losses) for each in attempts)
        for attempt in attempts:
            attempt.over = True
            if self.attempts.get(attempt.id) is attempt:
                del self.attempts[attempt.id]
            if blame is None:
                if crashed and not (attempt.trusted and just_began):
                    self.crashed(attempt, why)
                else:
                    self.lost(attempt, why)
            elif blamed is None and attempt.partition.level >= 2:
                attempt.begun = True  # Who speaks nonsense is not believed when it says that it has not begun.
                self.crashed(attempt, blame, kind="ProtocolError")
            elif blamed in (None, attempt.id) and not attempt.owner.ended:
                attempt.partition.submit(self._failures.of_protocol(attempt, blame), attempt.answered)
            else:
                self.lost(attempt, why)

    def _refuse(
        self, owner: Owner, ident: bytes, epoch: int, service: str, handler: str, deployment: str | None
    ) -> None:
        """There is nowhere to send it. One that is pinned waits for an operator, others for a deployment."""
        where = f"deployment {deployment}" if deployment is not None else "any registered deployment"
        text = f"{service}/{handler} is not offered by {where}"
        retry = Retry(initial_ms=1000, max_interval_ms=60_000, max_attempts=0)
        failure = [1, 503, text, "NoDeployment"]
        command = FailAttempt(ident, epoch, failure, retry, self.rng.getrandbits(31), 0, pause=deployment is not None)

        def answered(answer: Result | ProposalError) -> None:
            if isinstance(answer, ProposalError) and not owner.ended:
                owner.redispatch(ident, epoch)  # Nobody else would think of it again while we lead.

        owner.partition.submit(command, answered)

    # -- time, leadership, life ----------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        """Attempts that are silent for too long are asked to suspend, and then given up."""
        self._sweeper = self._loop.call_later(self.timing.sweep_s, self._sweep)
        now = self._loop.time()
        for attempt in list(self.attempts.values()):
            if attempt.backlog or attempt.unresolved or attempt.unsent or not attempt.begun:
                continue  # It is not the handler that lets us wait.
            silent = now - attempt.last_frame_at
            options = attempt.target.options
            if silent * 1000 < options.inactivity_ms:
                attempt.asked_at = 0.0
            elif not attempt.asked_at:
                attempt.asked_at = now
                attempt.ask_back()
            elif (now - attempt.asked_at) * 1000 >= options.abort_ms:
                text = (
                    f"the handler sent nothing for {silent:.1f} s, and did not suspend when it was asked to "
                    f"(inactivity timeout {options.inactivity_ms} ms, abort timeout {options.abort_ms} ms)"
                )
                self.fail(attempt, [1, 504, text, "Timeout"])

    def suspend(self, owner: Owner) -> None:
        """Ask the attempts of one partition to hand themselves back."""
        for attempt in [each for each in self.attempts.values() if each.owner is owner]:
            attempt.ask_back()

    def runs(self, owner: Owner) -> bool:
        return any(attempt.owner is owner for attempt in self.attempts.values())

    def end(self, owner: Owner) -> None:
        """This node no longer leads the partition: whoever does starts its attempts again."""
        for attempt in [each for each in self.attempts.values() if each.owner is owner]:
            self.drop(attempt, "the partition has another leader")
        for endpoint in self.endpoints.values():
            endpoint.forget(owner)

    def refuse_all(self) -> None:
        """Start nothing any more."""
        self.stopping = True
        self._sweeper.cancel()

    async def stop(self, grace_s: float) -> None:
        """Ask every attempt to hand itself back, and let go of the endpoints when they have, or when time is up."""
        self.refuse_all()
        for attempt in list(self.attempts.values()):
            attempt.ask_back()
        deadline = self._loop.time() + grace_s
        while self.attempts and self._loop.time() < deadline:  # noqa: ASYNC110 - bounded, and nobody tells us
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        tasks = [*self._staging, *([self._asking] if self._asking is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(endpoint.close() for endpoint in self.endpoints.values()), *self._closing)
        if self._session is not None:
            await self._session.close()
            self._session = None


async def _at_once() -> None: ...


def no_redirects() -> aiohttp.TraceConfig:
    """Work goes to the registered address and nowhere else: whoever can answer there must not send it on to a third party,
    or to an address that only nodes can reach. `ws_connect` has no option for that."""

    async def refuse(_: aiohttp.ClientSession, __: object, found: aiohttp.TraceRequestRedirectParams) -> None:
        where = found.response.headers.get("Location", "")
        raise aiohttp.ClientError(
            f"{found.url} redirects to {where:.200}, and redirects are not followed: register the address itself"
        )

    tracing = aiohttp.TraceConfig()
    tracing.on_request_redirect.append(refuse)
    return tracing


def _eager_state(txn: ReadTxn, oid: bytes) -> tuple[dict[str, bytes], bool]:
    """What is sent along, and whether that is all. What would have to be fetched first is not: the code may not need it."""
    found, complete = queries.eager_state(txn, oid, EAGER_STATE_BYTES)
    here = {name: payload for name, payload in found.items() if isinstance(payload, bytes)}
    return here, complete and len(here) == len(found)


def _seed(ident: bytes) -> int:
    seed = int.from_bytes(ident[8:16], "big") >> 1
    assert seed <= INT_MAX
    return seed
