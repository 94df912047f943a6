"""The leader's duties for one partition: carry out effects, fire timers, empty outboxes, redispatch lost attempts.

There is one `Leadership` per term. It begins with an announcement in the log. The work pending at that point is derived
from the state, in slices (`queries.pending_effects`); entries applied later produce effects. When another leader appears,
or this node steps down, the object is discarded with everything in it, because all of it can be derived again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from holdfast.cluster.backoff import backoff
from holdfast.cluster.partition.door import Partition
from holdfast.cluster.values.janitor import Janitor
from holdfast.cluster.values.shared_store import Objects, StoreDown, ValueLost
from holdfast.cluster.values.staging import Chunk, pieces_of
from holdfast.log.errors import ProposalError
from holdfast.sdk.ids import NO_INVOCATION, InvocationId
from holdfast.statemachine import queries, refs
from holdfast.statemachine.commands import (
    CALL_DEPTH_MAX,
    Announce,
    Deliver,
    FireTimers,
    RaiseLevel,
    Redispatch,
    Ref,
    SetLimits,
    TrimOutbox,
)
from holdfast.statemachine.effects import (
    AbortAttempt,
    Acknowledge,
    ArmTimer,
    Code,
    DeleteObjects,
    Effect,
    FlushOutbox,
    RecoverAttempt,
    Reply,
    Result,
    SendCancelled,
    SendCompletion,
    SendRetry,
    StartAttempt,
)
from holdfast.statemachine.levels import FIRST
from holdfast.statemachine.records import Meta

if TYPE_CHECKING:
    from holdfast.cluster.config import Config
    from holdfast.cluster.handlers.invoker import Invoker
    from holdfast.cluster.routing.replies import Replies
    from holdfast.cluster.routing.router import Router

logger = logging.getLogger(__name__)

REDISPATCHES_MAX: Final = 512  # In flight at a time.
SLICE: Final = 512  # Invocations examined per turn of the event loop.
TIMERS_PER_COMMAND: Final = 256
DELIVERY_MESSAGES: Final = 512
DELIVERY_BYTES: Final = 512 * 1024
#: Size of the large values staged for one delivery. They must not expire before the delivery arrives.
DELIVERY_BLOB_BYTES: Final = 64 * 1024 * 1024
RETRY_S: Final = 0.05
RETRY_S_MAX: Final = 2.0
TIMER_S_MAX: Final = 3600.0  # A timer further away is checked again, because clocks drift.


class Leadership:
    def __init__(
        self,
        partition: Partition,
        term: int,
        node: str,
        invoker: Invoker,
        router: Router,
        replies: Replies,
        objects: Objects,
        *,
        limits: SetLimits | None = None,
        level: int = FIRST,
    ) -> None:
        self.partition = partition
        self.term = term
        self.ended = False
        self.announced = False
        self.held = False  # No attempt is started, because the partition is about to be handed over.
        self._last_words: int | None = None  # Commands entered once the last attempt had ended.
        self._node = node
        self._limits = limits
        self._level = level  # The cluster's: see `statemachine.levels`.
        self._invoker = invoker
        self._router = router
        self._loop = asyncio.get_running_loop()
        self._lost: dict[InvocationId, int] = {}  # Attempts to dispatch again: id -> epoch,
        self._redispatching = 0  # and how many of them are in flight.
        self._redispatch_timer: asyncio.TimerHandle | None = None
        self._scanning = False
        self._scans: dict[str | None, InvocationId] = {}  # Pending scans: deployment (None: all) -> first id.
        self._scanned: set[str] | None = None  # The deployments that the current scan looks for; None: all.
        self._places: dict[str, int] = {}  # Free places at endpoints for the current scan.
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms = 0
        self._firing = False
        self._outboxes: dict[int, Outbox] = {}
        self._objects = objects
        self._janitor = Janitor(partition, objects)
        # One lookup per effect. The most frequent effects go to the invoker directly.
        self._carry: dict[type[Any], Callable[[Any], None]] = {
            StartAttempt: self._start,
            RecoverAttempt: self._recover,
            Acknowledge: invoker.acknowledge,
            SendCompletion: invoker.complete,
            SendRetry: invoker.retry,
            SendCancelled: invoker.cancel,
            AbortAttempt: invoker.abort,
            Reply: lambda effect: replies.settle(effect.id, effect.outcome),
            FlushOutbox: lambda effect: self.flush(effect.target),
            ArmTimer: lambda effect: self._arm(effect.due_ms),
            DeleteObjects: lambda _: self._janitor.wake(),
        }

    # -- life --------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Announce this leadership. It takes effect when the announcement, and so everything before it, is applied."""
        if not self.ended:
            self.partition.submit(Announce(self.term, self._node), self._on_announced)
            self._raise_level()

    def _on_announced(self, answer: Result | ProposalError) -> None:
        if self.ended:
            return
        if isinstance(answer, ProposalError):
            self._loop.call_later(RETRY_S, self.begin)
            return
        self.announced = True
        logger.info("partition %d: %s leads in term %d", self.partition.number, self._node, self.term)
        with self.partition.state.read() as txn:
            meta = queries.meta(txn)
        self.partition.keep_up_with(meta.now_ms)
        self._set_limits()
        self._janitor.start()
        # Scan after the effects applied with the announcement: they start attempts that the scan would consider lost.
        self._loop.call_soon(self.scan)

    def _set_limits(self) -> None:
        """Propose the configured limits, if they differ from those in the state."""

        def answered(answer: Result | ProposalError) -> None:
            if isinstance(answer, ProposalError) and not self.ended:
                self._loop.call_later(RETRY_S, self._set_limits)

        if self._limits is None or self.ended:
            return
        limits = self._limits
        if self.partition.level < 2:
            limits = limits._replace(call_depth_max=CALL_DEPTH_MAX)  # Older nodes do not know this limit.
        with self.partition.state.read() as txn:
            known = limits_of(queries.meta(txn))
        if limits != known:
            self.partition.submit(limits, answered)

    def raise_level(self, level: int) -> None:
        """Raise the partition's level to the cluster's."""
        if level > self._level:
            self._level = level
            if self.announced:
                self._raise_level()

    def _raise_level(self) -> None:
        def answered(answer: Result | ProposalError) -> None:
            if isinstance(answer, ProposalError):
                if not self.ended:
                    self._loop.call_later(RETRY_S, self._raise_level)
            elif self.announced:
                self._set_limits()  # Those that the level before did not know.

        if self.partition.level < self._level and not self.ended:
            self.partition.submit(RaiseLevel(self._level), answered)

    def end(self) -> None:
        if self.ended:
            return
        self.ended = True
        for handle in (self._timer, self._redispatch_timer):
            if handle is not None:
                handle.cancel()
        for outbox in self._outboxes.values():
            outbox.end()
        self._janitor.end()
        self._lost.clear()
        self._invoker.end(self)

    def hold(self) -> None:
        """Start no more attempts and suspend the running ones, because another node is about to lead."""
        self.held = True
        self._last_words = None
        self._invoker.suspend(self)

    def quiet(self) -> bool:
        if self.ended:
            return True
        if self._invoker.runs(self):
            return False
        if self._last_words is None:
            # The last steps of attempts may not be proposed yet. A log that hands over refuses them, so they would run
            # again.
            self._last_words = self.partition.entered
        return self.partition.landed(self._last_words)

    def release(self) -> None:
        """Continue to lead. Attempts that were not started during the hold are found in the state."""
        self.held = False
        if not self.ended:
            self._redispatch_more()
            self.scan()

    def carry_out(self, effects: list[Effect]) -> None:
        carry = self._carry
        for effect in effects:
            try:
                carry[type(effect)](effect)
            except Exception:  # The state is the truth: a failing effect must not stop the others.
                logger.exception("partition %d: carrying out an effect failed: %r", self.partition.number, effect)
                if isinstance(effect, StartAttempt | RecoverAttempt):  # While we lead, nothing else would start it.
                    self._loop.call_later(RETRY_S_MAX, self.redispatch, effect.id, effect.epoch)

    # -- attempts ----------------------------------------------------------------------------------------------------

    def _start(self, effect: StartAttempt) -> None:
        if not self.held:
            self._invoker.start(self, effect)

    def redispatch(self, invocation: InvocationId, epoch: int) -> None:
        """Redispatch a lost attempt. A bounded number is in flight; the others wait."""
        if not self.ended:
            self._lost[invocation] = epoch
            self._redispatch_more()

    def _redispatch_more(self) -> None:
        while (
            self._lost and self._redispatching < REDISPATCHES_MAX and self._redispatch_timer is None and not self.held
        ):
            invocation, epoch = self._lost.popitem()
            self._redispatching += 1
            command = Redispatch(invocation, epoch)
            self.partition.submit(command, partial(self._redispatched, command))

    def _redispatched(self, command: Redispatch, answer: Result | ProposalError) -> None:
        self._redispatching -= 1
        if self.ended:
            return
        if isinstance(answer, ProposalError):
            self._lost.setdefault(command.id, command.epoch)
            if self._redispatch_timer is None:
                self._redispatch_timer = self._loop.call_later(RETRY_S, self._redispatch_later)
        else:
            self._redispatch_more()

    def _redispatch_later(self) -> None:
        self._redispatch_timer = None
        self._redispatch_more()

    def scan(self, first: InvocationId = NO_INVOCATION, only: str | None = None) -> None:
        """Derive pending work from the state again: all of it, or the attempts from an id on, at one deployment.

        An attempt for an endpoint whose queue is full is skipped and does not delay the others. The endpoint remembers
        the smallest skipped id, and requests a scan from there when it has room.
        """
        self._scans[only] = min(first, self._scans.get(only, first))
        if not self._scanning and not self.ended:
            self._begin_scan()

    def _begin_scan(self) -> None:
        scans, self._scans, self._places = self._scans, {}, {}
        self._scanning = True
        self._scanned = None if None in scans else {only for only in scans if only}
        self._scan_slice(_just_before(min(scans.values())))

    def _scan_slice(self, after: bytes) -> None:
        self.partition.react()  # An attempt that was just applied may be about to start; it is not lost.
        if self.ended:
            return
        if len(self._lost) > SLICE:
            self._loop.call_later(0.01, self._scan_slice, after)  # Redispatch those found so far first.
            return
        with self.partition.state.read() as txn:
            effects, following = queries.pending_effects(txn, after, SLICE)
        self.carry_out(effects)
        in_vain = self._scanned is not None and all(self._places.get(each, 1) <= 0 for each in self._scanned)
        if following is not None and not in_vain:
            self._loop.call_soon(self._scan_slice, following)
            return
        self._scanning = False
        if self._scans:
            self._begin_scan()

    def _recover(self, effect: RecoverAttempt) -> None:
        target = self._invoker.find(effect.service, effect.handler, effect.deployment)
        if self._scanned is not None and (target is None or target.deployment not in self._scanned):
            return
        if self._invoker.knows(effect.id, effect.epoch):
            return
        if target is None or self._has_place(target.deployment, effect.id):
            self.redispatch(effect.id, effect.epoch)

    def _has_place(self, deployment: str, invocation: InvocationId) -> bool:
        """Whether the endpoint can take one more. Earlier offers may still be on their way through the log."""
        endpoint = self._invoker.endpoint(deployment)
        places = self._places.get(deployment)
        if places is None:
            places = endpoint.places
        if places <= 0:
            endpoint.pass_over(self, invocation)
        self._places[deployment] = places - 1
        return places > 0

    # -- timers --------------------------------------------------------------------------------------------------------

    def _arm(self, due_ms: int) -> None:
        """Set one alarm for the earliest timer. Apply decides which timers are due, by the time of the batch."""
        if self._timer is not None:
            if self._timer_ms <= due_ms:
                return
            self._timer.cancel()
        self._timer_ms = due_ms
        delay_s = max(due_ms - self.partition.now_ms(), 0) / 1000
        self._timer = self._loop.call_later(min(delay_s, TIMER_S_MAX), self._ring)

    def _ring(self) -> None:
        self._timer = None
        if self.ended or self._firing:
            return
        if self.partition.now_ms() < self._timer_ms:
            self._arm(self._timer_ms)  # The event loop's clock differs from ours.
            return
        self._firing = True
        self.partition.submit(FireTimers(TIMERS_PER_COMMAND), self._fired)

    def _fired(self, answer: Result | ProposalError) -> None:
        self._firing = False
        if self.ended:
            return
        with self.partition.state.read() as txn:
            due_ms = queries.next_due(txn)
        if isinstance(answer, ProposalError):
            due_ms = self.partition.now_ms() + int(RETRY_S * 1000)
        if due_ms is not None:
            self._arm(due_ms)

    # -- outboxes ------------------------------------------------------------------------------------------------------

    def flush(self, target: int) -> None:
        outbox = self._outboxes.get(target)
        if outbox is None:
            outbox = self._outboxes[target] = Outbox(self.partition, self._router, self._objects, target)
        outbox.flush()

    @property
    def undelivered(self) -> int:
        """Number of outboxes whose target does not accept messages."""
        return sum(outbox.failures > 0 for outbox in self._outboxes.values())


class Outbox:
    """Messages to one other partition: one batch in flight at a time, repeated until it is accepted.

    Delivery is exactly once: the receiver accepts each number once and refuses gaps. Only accepted messages are
    trimmed.
    """

    def __init__(self, partition: Partition, router: Router, objects: Objects, target: int) -> None:
        self.failures = 0  # Consecutive.
        self._partition = partition
        self._router = router
        self._objects = objects
        self._target = target
        self._taken = 0  # Newest message that the receiver is known to have.
        self._more = False
        self._task: asyncio.Task[None] | None = None

    def flush(self) -> None:
        """Deliver new messages."""
        self._more = True
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def end(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            while self._more:
                self._more = False
                while await self._deliver_or_pause():
                    pass
        finally:
            self._task = None

    async def _deliver_or_pause(self) -> bool:
        try:
            return await self._deliver()
        except Exception as error:  # After any error, the outbox must not wait for the next message.
            logger.exception("partition %d: delivering to %d failed", self._partition.number, self._target)
            await self._pause(str(error))
            return True

    async def _deliver(self) -> bool:
        """Deliver the next batch. False when there is nothing left."""
        await self._partition.messages.over()
        with self._partition.state.read() as txn:
            first, messages = queries.outbox(txn, self._target, self._taken, DELIVERY_MESSAGES)
        if not messages:
            return False
        messages = _fit(messages)
        with self._partition.state.read() as txn:
            parcels = queries.parcels(txn, self._target, first, first + len(messages) - 1)
        messages, large = _fit_parcels(first, messages, parcels)
        last = first + len(messages) - 1
        try:
            for ref in large:
                await self._router.stage(self._target, ref, partial(self._source, ref))
            command = Deliver(self._partition.number, first, messages)
            result = await self._router.submit_to(self._target, command)
        except (ProposalError, StoreDown) as error:
            await self._pause(str(error))
            return True
        except ValueLost as error:
            # Messages are accepted in order, so the later ones wait too, until the object is restored.
            self._objects.report(
                error, f"partition {self._partition.number}: messages to partition {self._target} are waiting"
            )
            await self._pause(str(error))
            return True
        if result.code == Code.CONFLICT:
            # The receiver lacks messages that we assumed it had: start again with all we have.
            self._taken = 0
            await self._pause(result.message)
            return True
        if result.code == Code.VALUE_MISSING:
            await self._pause(result.message)  # Then stage it again.
            return True
        self.failures = 0
        self._taken = last
        await self._partition.messages.over()
        self._partition.submit(TrimOutbox(self._target, last))
        return True

    async def _source(self, ref: Ref) -> Chunk:
        """The message keeps the value here until the receiver has it."""
        with self._partition.state.read() as txn:
            name = queries.place(txn, ref.data)
        if not name:
            return partial(self._chunk, ref)
        return pieces_of(await self._objects.get(self._partition.number, ref.data, name))

    def _chunk(self, ref: Ref, index: int) -> bytes:
        with self._partition.state.read() as txn:
            return queries.chunk(txn, ref.data, index)

    async def _pause(self, why: str) -> None:
        level = logging.WARNING if self.failures == 5 else logging.DEBUG
        logger.log(
            level, "partition %d: partition %d accepts no messages: %s", self._partition.number, self._target, why
        )
        await asyncio.sleep(backoff(RETRY_S, self.failures, RETRY_S_MAX))
        self.failures += 1


def limits_of(kept: Meta | Config) -> SetLimits:
    """The limits in a partition's state, or those in a node's configuration."""
    return SetLimits(*(getattr(kept, name) for name in SetLimits._fields))


def _just_before(invocation: InvocationId) -> bytes:
    """The position just before this id; empty before the first."""
    number = int.from_bytes(invocation, "big")
    return (number - 1).to_bytes(len(invocation), "big") if number else b""


def _fit(messages: list[bytes]) -> list[bytes]:
    """As many messages as fit one command; at least one."""
    size = 0
    for offset, message in enumerate(messages):
        size += len(message)
        if size > DELIVERY_BYTES and offset:
            return messages[:offset]
    return messages


def _fit_parcels(
    first: int, messages: list[bytes], parcels: list[tuple[int, list[Ref]]]
) -> tuple[list[bytes], list[Ref]]:
    """As many messages as the bound on their large values permits, at least one; and those values."""
    large: list[Ref] = []
    size = 0
    for sequence, found in parcels:
        size += sum(map(refs.size_of, found))
        if size > DELIVERY_BLOB_BYTES and sequence > first:
            return messages[: sequence - first], large
        large += found
    return messages, large
