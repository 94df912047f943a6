"""Runs attempts: turns effects into frames to endpoints, and frames of attempts into commands.

One `Endpoint` per deployment has its own stream, queue and bounds, so that a slow or dead one does not slow others.
Everything between two awaits is synchronous: an effect becomes a frame in the outbox of a stream, a frame becomes a command
in the batch of a partition, and both leave once per turn of the loop. There is no task per attempt or step.

A loss on the way costs an attempt, never an invocation: the state says that it should run, so the leader dispatches it
again with a higher epoch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable
from random import Random
from time import perf_counter
from typing import Any, Final

from holdfast.cluster.clock import Clock
from holdfast.cluster.handlers.attempts import Attempt, Carrier, Opening, Owner, Ticket
from holdfast.cluster.handlers.dispatch import Limits, Timing
from holdfast.cluster.handlers.endpoint import Endpoint
from holdfast.cluster.handlers.failures import Failures, refuse
from holdfast.cluster.handlers.large import LargeOutcome
from holdfast.cluster.handlers.openings import NO_STATE, eager_state, opening_of, opening_of_first
from holdfast.cluster.handlers.pauses import Withholding
from holdfast.cluster.handlers.protocols.table import Protocols
from holdfast.cluster.handlers.queue import ALONE
from holdfast.cluster.handlers.timings import Timings
from holdfast.cluster.partition.door import Partition
from holdfast.cluster.registry.machine import Target
from holdfast.cluster.registry.registry import Registry
from holdfast.cluster.tasks import Tasks
from holdfast.cluster.values.shared_store import Objects, StoreDown, ValueLost
from holdfast.cluster.values.staging import Put, Stager, digested
from holdfast.log.errors import Overloaded, ProposalError
from holdfast.sdk.ids import DeploymentId, InvocationId, format_id, object_id
from holdfast.sdk.journal import PAYLOAD_BYTES_MAX, cut_text
from holdfast.statemachine import queries, refs
from holdfast.statemachine.attempts import LOSSES_MAX
from holdfast.statemachine.commands import Command, FailAttempt, Mode, PostponeAttempt
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
from holdfast.statemachine.outcomes import failed, message_of

logger = logging.getLogger(__name__)

_SWEEP_S: Final = 1.0
_ASK_AGAIN_S: Final = 0.1
#: Bound on large values being staged for handlers. Above it, no stream is read.
STAGING_BYTES_MAX: Final = 64 * 1024 * 1024
_STAGE_AGAIN_S: Final = 0.02
#: Delay before an invocation that would be paused for one more lost process gets a chance to run alone.
_ANOTHER_CHANCE_MS: Final = 2000, 4000


class Invoker:
    def __init__(
        self,
        registry: Registry,
        protocols: Protocols,
        clock: Clock,
        *,
        objects: Objects,
        fresh: Callable[[], Awaitable[None]],
        rng: Random,
        partitions: Collection[Partition] = (),
        limits: Limits | None = None,
        timing: Timing | None = None,
        stager: Stager | None = None,
    ) -> None:
        """`partitions` may be led here. `fresh` returns when every deployment registered before the call is known here."""
        self.registry = registry
        self._protocols = protocols
        self.clock = clock
        self.limits = limits or Limits()
        self.timing = timing or Timing()
        self.rng = rng
        self._failures = Failures(self.rng)
        self.attempts: dict[InvocationId, Attempt] = {}
        self.endpoints: dict[DeploymentId, Endpoint] = {}
        self.started = 0
        self.timings = Timings()
        self.frames_in = 0
        self.stager = stager or Stager()
        self.objects = objects
        self.staging_bytes = 0  # Size of values received from handlers that are not in a log yet.
        self._staging = Tasks()
        self._partitions = partitions
        self.fresh = fresh
        self._doubtful: list[tuple[Owner, StartAttempt]] = []  # Pinned to deployments that this node does not know.
        self._asking: asyncio.Task[None] | None = None
        self.stopping = False
        self._loop = asyncio.get_running_loop()
        self._deployments: set[DeploymentId] = set()
        self._closing = Tasks()
        self.pauses = Withholding(self, lambda: registry.state.pauses)
        self._sweeper = self._loop.call_later(_SWEEP_S, self._sweep)

    # -- effects -----------------------------------------------------------------------------------------------------

    def start(self, owner: Owner, effect: StartAttempt, *, is_fresh: bool = False) -> None:
        """Send the invocation to its handler, now or when its endpoint has room.

        `is_fresh`: this node knows every deployment that it may be pinned to, or that may offer its handler.
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
            service, handler, key = first.service, first.handler, first.key
        else:
            with owner.partition.state.read() as txn:
                record = queries.load(txn, effect.id)
            if record is None or record.epoch != effect.epoch or record.status != Status.RUNNING:
                return
            service, handler, key, deployment = record.service, record.handler, record.key, record.deployment
            losses = record.losses
        if self.pauses.withholds(owner, effect, service, key):
            return
        target = self.find(service, handler, deployment)
        if target is not None:
            names = service, handler
            ticket = Ticket(owner, effect.id, effect.epoch, first, handler=names, losses=losses, since=perf_counter())
            self.endpoint(target.deployment).enqueue(ticket)
        elif is_fresh:
            refusal = self._failures.unoffered(
                effect.id, effect.epoch, service=service, handler=handler, deployment=deployment
            )
            refuse(owner, refusal)
        else:
            self._doubtful.append((owner, effect))
            if self._asking is None:
                self._asking = self._loop.create_task(self._ask())

    async def _ask(self) -> None:
        """Ask the cluster for deployments that this node does not know yet, once for all waiting attempts."""
        while self._doubtful:
            doubtful, self._doubtful = self._doubtful, []
            try:
                await self.fresh()
            except ProposalError as error:
                logger.warning(
                    "cannot determine whether the deployments of %d invocations are gone: %s", len(doubtful), error
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
            attempt.acknowledged(effect.length)

    def complete(self, effect: SendCompletion) -> None:
        attempt = self.attempts.get(effect.id)
        if attempt is not None and attempt.epoch == effect.epoch and effect.order > attempt.order:
            ref = refs.in_outcome(effect.outcome)
            outcome = effect.outcome if ref is None else LargeOutcome(attempt.partition, ref)
            attempt.carrier.complete(attempt, effect.step, effect.order, outcome)

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

    def knows(self, invocation: InvocationId, epoch: int) -> bool:
        """Whether this attempt runs or waits here."""
        attempt = self.attempts.get(invocation)
        if attempt is not None and attempt.epoch >= epoch:
            return True
        queued = any(endpoint.queued(invocation, epoch) for endpoint in self.endpoints.values())
        return queued or self.pauses.has(invocation, epoch)

    @property
    def congested(self) -> bool:
        """Whether frames arrive faster than the logs accept them."""
        return self.staging_bytes >= STAGING_BYTES_MAX or any(partition.busy for partition in self._partitions)

    # -- attempts ----------------------------------------------------------------------------------------------------

    def find(self, service: str, handler: str, deployment: DeploymentId | None) -> Target | None:
        """The handler at the invocation's pinned deployment, or else where new invocations go."""
        if deployment is None:
            return self.registry.find(service, handler)
        return self.registry.target(deployment, service, handler)

    def endpoint(self, deployment: DeploymentId) -> Endpoint:
        found = self.endpoints.get(deployment)
        if found is None:
            found = self.endpoints[deployment] = Endpoint(self, deployment, self._protocols)
        return found

    def deployments_changed(self) -> None:
        """Deployments were registered or removed."""
        if self.registry.state.deployments.keys() != self._deployments:
            self._deployments = set(self.registry.state.deployments)
            for endpoint in list(self.endpoints.values()):
                endpoint.deployments_changed()

    def belongs_elsewhere(self, ticket: Ticket, deployment: DeploymentId) -> bool:
        with ticket.owner.partition.state.read() as txn:
            record = queries.load(txn, ticket.id)
        if record is None:
            return False  # This is decided when its turn comes.
        target = self.find(record.service, record.handler, record.deployment)
        return target is None or target.deployment != deployment

    def retire(self, deployment: DeploymentId, endpoint: object) -> None:
        """The endpoint's deployment was removed, and nothing runs there any more."""
        found = self.endpoints.get(deployment)
        if found is not None and found is endpoint:
            del self.endpoints[deployment]
            self._closing.keep(self._loop.create_task(found.close()))

    def build(
        self, ticket: Ticket, carrier: Carrier, deployment: DeploymentId, *, beside: int
    ) -> tuple[Attempt, Opening] | None:
        """The attempt and what it starts with; None if it is no longer needed, or belongs elsewhere."""
        owner, ident, epoch, first, *_ = ticket
        if owner.ended or owner.held:
            return None
        if first is not None:
            target = self.registry.find(first.service, first.handler)
            if target is not None and target.deployment == deployment:
                return self._build_first(ticket, first, target, carrier, beside=beside)
        with owner.partition.state.read() as txn:
            record = queries.load(txn, ident)
            if record is None or record.epoch != epoch or record.status != Status.RUNNING:
                return None
            if self.pauses.withholds(owner, StartAttempt(ident, epoch), record.service, record.key):
                return None  # The pause began while it waited.
            target = self.find(record.service, record.handler, record.deployment)
            if target is None or target.deployment != deployment:
                # A deployment came or went while it waited.
                self._loop.call_soon(self.start, owner, StartAttempt(ident, epoch))
                return None
            eager = eager_state(txn, record.oid) if record.mode != Mode.PLAIN else NO_STATE
            steps = queries.journal(txn, ident, 0, record.length)
        attempt = Attempt(
            self,
            ticket,
            target,
            carrier,
            beside=beside,
            pinned=record.deployment is not None,
            order=record.order,
            length=record.length,
            now=self._loop.time(),
        )
        opening = opening_of(
            record,
            steps,
            eager,
            now_ms=self.clock.now_ms(),
            suspects_max=beside,
            journal_limits=owner.partition.journal_limits,
        )
        return self._register(attempt, ticket.since), opening

    def _build_first(
        self, ticket: Ticket, first: First, target: Target, carrier: Carrier, *, beside: int
    ) -> tuple[Attempt, Opening]:
        """Build a first attempt from the effect alone."""
        eager = NO_STATE
        if first.key is not None:
            with ticket.owner.partition.state.read() as txn:
                eager = eager_state(txn, object_id(first.service, first.key))
        attempt = Attempt(
            self, ticket, target, carrier, beside=beside, pinned=False, order=1, length=1, now=self._loop.time()
        )
        opening = opening_of_first(
            ticket.id,
            first,
            eager,
            now_ms=self.clock.now_ms(),
            suspects_max=beside,
            journal_limits=ticket.owner.partition.journal_limits,
        )
        return self._register(attempt, ticket.since), opening

    def _register(self, attempt: Attempt, since: float) -> Attempt:
        self.attempts[attempt.id] = attempt
        self.started += 1
        self.timings.start.observe(attempt.began_at - since)
        return attempt

    # -- what attempts send ------------------------------------------------------------------------------------------

    def heard(self, carrier: Carrier, invocation: InvocationId, epoch: int) -> Attempt | None:
        self.frames_in += 1
        attempt = self.attempts.get(invocation)
        if attempt is None or attempt.epoch != epoch or attempt.carrier is not carrier:
            return None
        attempt.last_frame_at = self._loop.time()
        return attempt

    def submit(self, attempt: Attempt, wanted: Command, *, last: bool) -> None:
        if attempt.sent > attempt.length and not attempt.waits_since:
            attempt.waits_since = perf_counter()
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
                logger.warning("%s waits for a lookup: %s", format_id(attempt.id), error, extra=attempt.log_fields)
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
                again(offset == 0)  # Later ones arrived after the read began: an unknown handler makes them ask again.

    def blame(self, attempt: Attempt, why: str) -> None:
        """The attempt's SDK violated the protocol. A retry rarely helps, so the invocation soon waits for an operator."""
        logger.error("%s: %s", format_id(attempt.id), why, extra=attempt.log_fields)
        self.drop(attempt, cut_text(why))
        if not attempt.owner.ended:
            attempt.partition.submit(self._failures.of_protocol(attempt, why), attempt.answered)

    def _submit(self, attempt: Attempt, wanted: Command, *, last: bool) -> None:
        if last:
            attempt.measure(self.timings)
            self._end(attempt)
        elif type(wanted) is FailAttempt:
            self.drop(attempt, message_of(wanted.failure))  # It made an invalid request.
        if not attempt.partition.submit(wanted, attempt.answered):
            # Nothing may follow a gap. `answered` gets the reason.
            self.drop(attempt, "its step could not be journaled")

    # -- large values ------------------------------------------------------------------------------------------------

    def _stage(self, attempt: Attempt, wanted: Command, *, last: bool) -> None:
        """Stage a large value. Everything the attempt sends after it waits until the value is in the state."""
        if any(refs.size_of(payload) > PAYLOAD_BYTES_MAX for payload in refs.payloads(wanted)):
            text = f"a value must have at most {PAYLOAD_BYTES_MAX} bytes: keep larger ones elsewhere"
            self.fail(attempt, failed(413, text, "TooLarge"), pause=True)
            return
        self.staging_bytes += self.stager.large(wanted)
        attempt.backlog.append((wanted, last))
        if len(attempt.backlog) == 1:
            task = self._loop.create_task(self._work_off(attempt))
            self._staging.keep(task)

    async def _work_off(self, attempt: Attempt) -> None:
        """Process the backlog in order. If the attempt is over, the rest is dropped."""
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
            logger.exception("staging a large value of %s failed", format_id(attempt.id), extra=attempt.log_fields)
            self.lost(attempt, "internal error of this node")
        finally:
            self.staging_bytes -= sum(self.stager.large(wanted) for wanted, _ in backlog)
            backlog.clear()

    async def _detached(self, attempt: Attempt, wanted: Command) -> Command | None:
        """None if the attempt has ended meanwhile."""
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
        """Abort the attempt at its handler, and forget it."""
        if not attempt.over:
            attempt.carrier.abort(attempt, reason)
            self._end(attempt)

    def lost(self, attempt: Attempt, why: str) -> None:
        """The attempt cannot continue, so the next one must. Harmless if the state has already moved on."""
        logger.debug("%s lost an attempt: %s", format_id(attempt.id), why, extra=attempt.log_fields)
        self.drop(attempt, why)
        if not attempt.owner.ended:
            attempt.owner.redispatch(attempt.id, attempt.epoch)

    def fail(self, attempt: Attempt, failure: list[Any], *, pause: bool = False) -> None:
        """The handler or the endpoint is at fault: the failure counts, and the invocation is retried later."""
        self.drop(attempt, message_of(failure))
        if not attempt.owner.ended:
            command = self._failures.of_attempt(attempt, failure, pause=pause)
            attempt.partition.submit(command, attempt.answered)

    def unreadable(self, attempt: Attempt, error: Exception) -> None:
        """A value that the attempt needs cannot be had.

        If the store is down, the handler is not at fault, and the next attempt comes later. If the value is lost, the
        invocation waits for an operator. A reference to nothing must not happen, and counts against the invocation."""
        if isinstance(error, ValueLost):
            self.objects.report(error, format_id(attempt.id))
            self.fail(attempt, failed(500, cut_text(f"{error}; {error.hint}"), "ValueLost"), pause=True)
            return
        if not isinstance(error, StoreDown):
            logger.error("%s: reading a large value failed", format_id(attempt.id), exc_info=error)
            if isinstance(error, queries.Gone):
                self.fail(attempt, failed(500, str(error), "ValueGone"))
            else:
                self.lost(attempt, "internal error of this node")
            return
        self.drop(attempt, str(error))
        if not attempt.owner.ended:
            failure = failed(503, cut_text(str(error)), "StoreDown")
            command = PostponeAttempt(attempt.id, attempt.epoch, failure, self.objects.delay_ms(self.rng))
            attempt.partition.submit(command, attempt.answered)

    def crashed(self, attempt: Attempt, why: str, *, kind: str = "ProcessLost") -> None:
        """The process of its handler ended while it ran, possibly because of it.

        The state counts this. The first time the invocation is dispatched again at once, later after a delay. In the
        end it waits for an operator, but not before it ended the process while it ran alone."""
        if not (attempt.begun and attempt.partition.level >= 2):
            self.lost(attempt, why)
            return
        self.drop(attempt, why)
        if attempt.owner.ended:
            return
        failure = failed(503, cut_text(why), kind)
        command: Command
        if attempt.losses >= LOSSES_MAX - 1 and attempt.beside != ALONE:
            command = PostponeAttempt(attempt.id, attempt.epoch, failure, self.rng.randint(*_ANOTHER_CHANCE_MS))
        else:
            command = self._failures.of_attempt(attempt, failure)._replace(lost=True)
        attempt.partition.submit(command, attempt.answered)

    def break_off(
        self,
        attempts: Iterable[Attempt],
        why: str,
        *,
        blame: str | None = None,
        blamed: InvocationId | None = None,
        crashed: bool = False,
        culprit: InvocationId | None = None,
    ) -> None:
        """The carrier of these attempts is gone.

        `blame`: the endpoint violated the protocol, on behalf of `blamed`. If that is unknown, all of them are
        suspects. `crashed`: one of them may have ended the process, or `culprit` did."""
        attempts = list(attempts)
        if blame is not None and blamed not in [attempt.id for attempt in attempts]:
            blamed = attempts[0].id if len(attempts) == 1 else None
        # Attempts that ran for long are trusted if others are watched and have just begun.
        just_began = any(each.begun and not each.trusted and each.beside for each in attempts)
        for attempt in attempts:
            attempt.over = True
            if self.attempts.get(attempt.id) is attempt:
                del self.attempts[attempt.id]
            if blame is None:
                innocent = attempt.id != culprit if culprit is not None else attempt.trusted and just_began
                if crashed and not innocent:
                    self.crashed(attempt, why)
                else:
                    self.lost(attempt, why)
            elif blamed is None and attempt.partition.level >= 2:
                attempt.begun = True  # Whatever it says: it violates the protocol.
                self.crashed(attempt, blame, kind="ProtocolError")
            elif blamed in (None, attempt.id) and not attempt.owner.ended:
                attempt.partition.submit(self._failures.of_protocol(attempt, blame), attempt.answered)
            else:
                self.lost(attempt, why)

    # -- time, leadership, life ----------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        """Ask attempts that are silent for too long to suspend, and then abort them."""
        self._sweeper = self._loop.call_later(self.timing.sweep_s, self._sweep)
        now = self._loop.time()
        for attempt in list(self.attempts.values()):
            if attempt.backlog or attempt.unresolved or not attempt.begun or attempt.carrier.owes(attempt):
                continue  # The handler is not the cause of the silence.
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
                self.fail(attempt, failed(504, text, "Timeout"))

    def suspend(self, owner: Owner) -> None:
        """Ask the attempts of one partition to suspend."""
        for attempt in [each for each in self.attempts.values() if each.owner is owner]:
            attempt.ask_back()

    def runs(self, owner: Owner) -> bool:
        return any(attempt.owner is owner for attempt in self.attempts.values())

    def end(self, owner: Owner) -> None:
        """This node no longer leads the partition: the new leader starts its attempts again."""
        for attempt in [each for each in self.attempts.values() if each.owner is owner]:
            self.drop(attempt, "the partition has another leader")
        for endpoint in self.endpoints.values():
            endpoint.forget(owner)
        self.pauses.forget(owner)

    def refuse_all(self) -> None:
        """Start no more attempts."""
        self.stopping = True
        self._sweeper.cancel()

    async def stop(self, grace_s: float) -> None:
        """Ask every attempt to suspend, and close the endpoints when all have, or when time is up."""
        self.refuse_all()
        for attempt in list(self.attempts.values()):
            attempt.ask_back()
        deadline = self._loop.time() + grace_s
        while self.attempts and self._loop.time() < deadline:  # noqa: ASYNC110 - bounded, and there is no event
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        tasks = [*self._staging, *([self._asking] if self._asking is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(endpoint.close() for endpoint in self.endpoints.values()), *self._closing)
