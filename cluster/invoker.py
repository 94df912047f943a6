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
from typing import Any, Final, NamedTuple

import aiohttp

from holdfast.cluster.attempts import Attempt, Carrier, Deferred, Owner, Ticket
from holdfast.cluster.blobs import Put, Stager
from holdfast.cluster.clock import Clock
from holdfast.cluster.endpoint import Endpoint, Timing
from holdfast.cluster.frames import LAST, Translator
from holdfast.cluster.objects import Objects, StoreDown, ValueLost
from holdfast.cluster.partition import Partition
from holdfast.cluster.registry import Registry, Target
from holdfast.cluster.tasks import Tasks
from holdfast.log.errors import Overloaded, ProposalError
from holdfast.sdk.protocol import (
    INT_MAX,
    PAYLOAD_BYTES_MAX,
    Abort,
    Cancelled,
    Completion,
    Frame,
    Journal,
    ProtocolError,
    RetryRun,
    Start,
    Suspend,
    cut_text,
    format_id,
    object_id,
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
JOURNAL_FRAME_BYTES: Final = 1024 * 1024  # A longer journal is spread over several frames.
_SWEEP_S: Final = 1.0
_ASK_AGAIN_S: Final = 0.1
#: Large values that are being staged for handlers: while there is more, no stream is read.
STAGING_BYTES_MAX: Final = 64 * 1024 * 1024
_STAGE_AGAIN_S: Final = 0.02


class Limits(NamedTuple):
    """Per deployment."""

    streamed: int = 10_000  # attempts at a time
    requested: int = 200  # the same, where each is a request of its own
    waiting: int = 50_000  # ids in its queue; the rest is found in the state again


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
        self.translator = Translator(registry, self.rng)
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
            )
        return self._session

    # -- effects -----------------------------------------------------------------------------------------------------

    def start(self, owner: Owner, effect: StartAttempt, *, is_fresh: bool = False) -> None:
        """Send the invocation to its handler, now or when its endpoint has room.

        `is_fresh`: every deployment is known here that an invocation may be pinned to.
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
        if first is not None:
            service, handler = first.service, first.handler
        else:
            with owner.partition.state.read() as txn:
                record = queries.load(txn, effect.id)
            if record is None or record.epoch != effect.epoch or record.status != Status.RUNNING:
                return
            service, handler, deployment = record.service, record.handler, record.deployment
        target = self.find(service, handler, deployment)
        if target is not None:
            self.endpoint(target.deployment).enqueue(Ticket(owner, effect.id, effect.epoch, first))
        elif deployment is None or is_fresh:
            self._refuse(owner, effect.id, effect.epoch, service, handler, deployment)
        else:
            self._doubtful.append((owner, effect))
            if self._asking is None:
                self._asking = self._loop.create_task(self._ask())

    async def _ask(self) -> None:
        """Who led before us may have known deployments that we have yet to hear of. All who wait for that ask once."""
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
            if attempt.ack_waits is None:
                attempt.carrier.acknowledge(attempt)
            else:
                attempt.ack_waits.length = effect.length

    def complete(self, effect: SendCompletion) -> None:
        attempt = self.attempts.get(effect.id)
        if attempt is not None and attempt.epoch == effect.epoch and effect.order > attempt.order:
            attempt.ack_waits = None  # It stays where it is; what is acknowledged from now on comes behind this.
            frame = Completion(effect.id, effect.epoch, effect.step, effect.order, effect.outcome)
            ref = refs.in_outcome(effect.outcome)
            attempt.carrier.send(frame if ref is None else Deferred(attempt, frame, 64 + refs.size_of(ref)))

    def retry(self, effect: SendRetry) -> None:
        attempt = self.attempts.get(effect.id)
        if attempt is not None and attempt.epoch == effect.epoch and effect.order > attempt.order:
            attempt.carrier.send(RetryRun(effect.id, effect.epoch, effect.step))

    def cancel(self, effect: SendCancelled) -> None:
        attempt = self.attempts.get(effect.id)
        if attempt is not None and attempt.epoch == effect.epoch and effect.order > attempt.order:
            attempt.carrier.send(Cancelled(effect.id, effect.epoch))

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

    def retire(self, endpoint: Endpoint) -> None:
        """Its deployment was removed, and nothing runs there any more."""
        if self.endpoints.get(endpoint.deployment) is endpoint:
            del self.endpoints[endpoint.deployment]
            closing = self._loop.create_task(endpoint.close())
            self._closing.keep(closing)

    def build(self, ticket: Ticket, carrier: Carrier, deployment: str) -> tuple[Attempt, list[Frame | Deferred]] | None:
        """The attempt and its first frames; None if it is not wanted any more, or belongs elsewhere."""
        owner, ident, epoch, first = ticket
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
        pieces, large = _split(steps, sizes)
        start = Start(
            ident, epoch, record.service, record.handler, record.key, epoch, self.clock.now_ms(), record.seed,
            pieces[0], len(pieces) > 1, state, complete, record.cancelled,
        )  # fmt: skip
        plain: list[Start | Journal] = [start]
        plain += [Journal(ident, epoch, piece, more=piece is not pieces[-1]) for piece in pieces[1:]]
        frames: list[Frame | Deferred] = [*plain]
        for offset, size in large.items():
            frames[offset] = Deferred(attempt, plain[offset], size)
        return self._register(attempt), frames

    def _build_first(
        self, ticket: Ticket, first: First, target: Target, carrier: Carrier
    ) -> tuple[Attempt, list[Frame | Deferred]]:
        """The effect has all that the record and the journal could say."""
        state, complete = None, False
        if first.key is not None:
            with ticket.owner.partition.state.read() as txn:
                state, complete = _eager_state(txn, object_id(first.service, first.key))
        attempt = Attempt(self, ticket, target, carrier, pinned=False, order=1, length=1, now=self._loop.time())
        start = Start(
            ticket.id, ticket.epoch, first.service, first.handler, first.key, ticket.epoch, self.clock.now_ms(),
            _seed(ticket.id), [first.input], False, state, complete, False,
        )  # fmt: skip
        size = len(first.input) + first.large
        return self._register(attempt), [Deferred(attempt, start, size) if first.large else start]

    def _register(self, attempt: Attempt) -> Attempt:
        self.attempts[attempt.id] = attempt
        self.started += 1
        return attempt

    def receive(self, carrier: Carrier, frames: list[Frame]) -> None:
        """Frames of attempts on this carrier, in order. Those of attempts that are over are dropped. Raises ProtocolError."""
        now = self._loop.time()
        attempts = self.attempts
        command = self.translator.command
        self.frames_in += len(frames)
        for frame in frames:
            attempt = attempts.get(frame.invocation)  # type: ignore[union-attr]
            if attempt is None or attempt.epoch != frame.epoch or attempt.carrier is not carrier:  # type: ignore[union-attr]
                continue
            attempt.last_frame_at = now
            wanted = command(attempt, frame)
            if attempt.backlog or self.stager.large(wanted):
                self._stage(attempt, wanted, last=type(frame) in LAST)
            else:
                self._submit(attempt, wanted, last=type(frame) in LAST)

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
            attempt.carrier.send(Abort(attempt.id, attempt.epoch, reason))
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
            command = self.translator.failure(attempt, failure, pause=pause)
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

    def break_off(self, attempts: Iterable[Attempt], why: str, *, blame: str | None = None) -> None:
        """The carrier of these attempts is gone. `blame`: the endpoint spoke nonsense, so each counts as failed."""
        for attempt in list(attempts):
            attempt.over = True
            if self.attempts.get(attempt.id) is attempt:
                del self.attempts[attempt.id]
            if blame is not None and not attempt.owner.ended:
                command = self.translator.failure(attempt, [1, 500, blame, "ProtocolError"])
                attempt.partition.submit(command, attempt.answered)
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
            if attempt.backlog or attempt.unsent:
                continue  # It is we who let it wait.
            silent = now - attempt.last_frame_at
            options = attempt.target.options
            if silent * 1000 < options.inactivity_ms:
                attempt.asked_at = 0.0
            elif not attempt.asked_at:
                attempt.asked_at = now
                attempt.carrier.send(Suspend(attempt.id, attempt.epoch))
            elif (now - attempt.asked_at) * 1000 >= options.abort_ms:
                text = (
                    f"the handler sent nothing for {silent:.1f} s, and did not suspend when it was asked to "
                    f"(inactivity timeout {options.inactivity_ms} ms, abort timeout {options.abort_ms} ms)"
                )
                self.fail(attempt, [1, 504, text, "Timeout"])

    def suspend(self, owner: Owner) -> None:
        """Ask the attempts of one partition to hand themselves back."""
        for attempt in [each for each in self.attempts.values() if each.owner is owner]:
            attempt.carrier.send(Suspend(attempt.id, attempt.epoch))

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
            attempt.carrier.send(Suspend(attempt.id, attempt.epoch))
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


def _eager_state(txn: ReadTxn, oid: bytes) -> tuple[dict[str, bytes], bool]:
    """What is sent along, and whether that is all. What would have to be fetched first is not: the code may not need it."""
    found, complete = queries.eager_state(txn, oid, EAGER_STATE_BYTES)
    here = {name: payload for name, payload in found.items() if isinstance(payload, bytes)}
    return here, complete and len(here) == len(found)


def _seed(ident: bytes) -> int:
    seed = int.from_bytes(ident[8:16], "big") >> 1
    assert seed <= INT_MAX
    return seed


def _split(steps: list[bytes], sizes: list[int]) -> tuple[list[list[bytes]], dict[int, int]]:
    """Pieces of about JOURNAL_FRAME_BYTES, at least one; and the sizes of those that refer to large values."""
    pieces: list[list[bytes]] = [[]]
    large: dict[int, int] = {}
    size = 0
    for step, whole in zip(steps, sizes, strict=True):
        if size and size + whole > JOURNAL_FRAME_BYTES:
            pieces.append([])
            size = 0
        pieces[-1].append(step)
        size += whole
        if whole > len(step) or len(pieces) - 1 in large:
            large[len(pieces) - 1] = size
    return pieces, large


__all__ = ["Invoker", "Limits", "ProtocolError", "Timing"]
