"""What leading a partition means on this node: carry out effects, wake timers, empty outboxes, dispatch what was lost.

One `Leadership` per term. It begins with an announcement in the log. What the state asks for at that moment is derived from
it, in slices; what is applied behind it comes as effects. When another leader is heard of, or we step down, the object is
thrown away with everything in it: none of it is worth keeping, because all of it can be derived again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from holdfast.cluster.partition.door import Partition
from holdfast.cluster.values.janitor import Janitor
from holdfast.cluster.values.shared_store import Objects, StoreDown, ValueLost
from holdfast.cluster.values.staging import Chunk, pieces_of
from holdfast.log.errors import ProposalError
from holdfast.statemachine import queries, refs
from holdfast.statemachine.blobs import MISSING
from holdfast.statemachine.commands import (
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
    DeleteObjects,
    Effect,
    FlushOutbox,
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

REDISPATCHES_MAX: Final = 512  # Under way at a time.
SLICE: Final = 512  # Invocations that are looked at between two turns of the loop.
TIMERS_PER_COMMAND: Final = 256
DELIVERY_MESSAGES: Final = 512
DELIVERY_BYTES: Final = 512 * 1024
#: Of large values that are staged for one delivery: they must not be gone again before it comes.
DELIVERY_BLOB_BYTES: Final = 64 * 1024 * 1024
RETRY_S: Final = 0.05
RETRY_S_MAX: Final = 2.0
TIMER_S_MAX: Final = 3600.0  # A further one is looked at again: clocks drift.


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
        self.held = False  # Nothing is started: the partition is about to be handed over.
        self._last_words: int | None = None  # What the attempts asked for was then all entered.
        self._node = node
        self._limits = limits
        self._level = level  # The cluster's: see `statemachine.levels`.
        self._invoker = invoker
        self._router = router
        self._loop = asyncio.get_running_loop()
        self._lost: dict[bytes, int] = {}  # Attempts to dispatch again: id -> epoch,
        self._redispatching = 0  # and how many of them are under way.
        self._redispatch_timer: asyncio.TimerHandle | None = None
        self._scanning = False
        self._scans: dict[str | None, bytes] = {}  # To be done: of which deployment (None: all), from which id on.
        self._places: dict[str, int] = {}  # What endpoints can still be offered by the scan under way.
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms = 0
        self._firing = False
        self._outboxes: dict[int, Outbox] = {}
        self._objects = objects
        self._janitor = Janitor(partition, objects)
        # One lookup per effect; those that are most frequent pass on what they are given.
        self._carry: dict[type[Any], Callable[[Any], None]] = {
            StartAttempt: self._start,
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
        """Nothing of ours counts before this is applied; then everything before it is."""
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
            standing: list[Effect] = [*queries.standing_effects(txn)]
            meta = queries.meta(txn)
        self.partition.keep_up_with(meta.now_ms)
        if self._limits is not None and self._limits != limits_of(meta):
            self._set_limits()
        self._janitor.start()
        self.carry_out(standing)
        # After the effects that were applied together with the announcement: they start what the scan would find lost.
        self._loop.call_soon(self.scan)

    def _set_limits(self) -> None:
        """The state has others than we were told to keep."""

        def answered(answer: Result | ProposalError) -> None:
            if isinstance(answer, ProposalError) and not self.ended:
                self._loop.call_later(RETRY_S, self._set_limits)

        if self._limits is not None and not self.ended:
            self.partition.submit(self._limits, answered)

    def raise_level(self, level: int) -> None:
        """The cluster's level, which the partition's follows."""
        if level > self._level:
            self._level = level
            if self.announced:
                self._raise_level()

    def _raise_level(self) -> None:
        def answered(answer: Result | ProposalError) -> None:
            if isinstance(answer, ProposalError) and not self.ended:
                self._loop.call_later(RETRY_S, self._raise_level)

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
        """Start nothing more, and let what runs hand itself back: another node is about to lead."""
        self.held = True
        self._last_words = None
        self._invoker.suspend(self)

    def quiet(self) -> bool:
        if self.ended:
            return True
        if self._invoker.runs(self):
            return False
        if self._last_words is None:
            # The last steps of attempts may not even be proposed. A log that hands over refuses them: they would run again.
            self._last_words = self.partition.entered
        return self.partition.landed(self._last_words)

    def release(self) -> None:
        """We go on leading. What was not started meanwhile is found in the state."""
        self.held = False
        if not self.ended:
            self._redispatch_more()
            self.scan()

    def carry_out(self, effects: list[Effect]) -> None:
        carry = self._carry
        for effect in effects:
            try:
                carry[type(effect)](effect)
            except Exception:  # State is the truth: one effect that goes wrong must not take the others along.
                logger.exception("partition %d: an effect could not be carried out: %r", self.partition.number, effect)
                if type(effect) is StartAttempt:  # Nothing else reminds us of it while we lead.
                    self._loop.call_later(RETRY_S_MAX, self.redispatch, effect.id, effect.epoch)

    # -- attempts ----------------------------------------------------------------------------------------------------

    def _start(self, effect: StartAttempt) -> None:
        if not self.held:
            self._invoker.start(self, effect)

    def redispatch(self, invocation: bytes, epoch: int) -> None:
        """This attempt is lost. A bounded number at a time; none is forgotten while we lead."""
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

    def scan(self, first: bytes = b"", only: str | None = None) -> None:
        """Find what should run and is not known to the invoker: from an id on, at one deployment or at any.

        What is meant for an endpoint whose queue is full is passed over, and does not hold up the others. The endpoint keeps
        the smallest of those ids, and asks for a scan from there when it has room.
        """
        self._scans[only] = min(first, self._scans.get(only, first))
        if not self._scanning and not self.ended:
            self._begin_scan()

    def _begin_scan(self) -> None:
        scans, self._scans, self._places = self._scans, {}, {}
        self._scanning = True
        self._scan_slice(_just_before(min(scans.values())), None if None in scans else {only for only in scans if only})

    def _scan_slice(self, after: bytes, only: set[str] | None) -> None:
        self.partition.react()  # What was just applied may be about to begin here, and is not lost.
        if self.ended:
            return
        if len(self._lost) > SLICE:
            self._loop.call_later(0.01, self._scan_slice, after, only)  # First things first.
            return
        with self.partition.state.read() as txn:
            found, following = queries.running(txn, after, SLICE)
        for record in found:
            target = self._invoker.find(record.service, record.handler, record.deployment)
            if only is not None and (target is None or target.deployment not in only):
                continue
            if self._invoker.knows(record.id, record.epoch):
                continue
            if target is None or self._has_place(target.deployment, record.id):
                self.redispatch(record.id, record.epoch)
        in_vain = only is not None and all(self._places.get(each, 1) <= 0 for each in only)
        if following is not None and not in_vain:
            self._loop.call_soon(self._scan_slice, following, only)
            return
        self._scanning = False
        if self._scans:
            self._begin_scan()

    def _has_place(self, deployment: str, invocation: bytes) -> bool:
        """Whether its endpoint can take one more. What was offered to it may not have come through the log yet."""
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
        """One alarm for the earliest. Which timers are due is decided at apply, by the time of the batch."""
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
            self._arm(self._timer_ms)  # The loop's clock and ours are not the same.
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
        """Outboxes whose target does not take what we send."""
        return sum(outbox.failures > 0 for outbox in self._outboxes.values())


class Outbox:
    """Messages to one other partition: one batch under way at a time, again and again until it is taken.

    Exactly once: the receiver counts, takes each number once and refuses gaps. Only what it took is trimmed here.
    """

    def __init__(self, partition: Partition, router: Router, objects: Objects, target: int) -> None:
        self.failures = 0  # In a row.
        self._partition = partition
        self._router = router
        self._objects = objects
        self._target = target
        self._taken = 0  # The receiver has everything up to this one, as far as we know.
        self._more = False
        self._task: asyncio.Task[None] | None = None

    def flush(self) -> None:
        """There is something new."""
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
        except Exception as error:  # Whatever it is, what is in the outbox must not wait for the next message.
            logger.exception("partition %d: delivering to %d failed", self._partition.number, self._target)
            await self._pause(str(error))
            return True

    async def _deliver(self) -> bool:
        """The next batch. False when there is nothing left."""
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
            # Messages are taken in order, so those behind it wait too. It goes on when the object is back.
            self._objects.report(error, f"partition {self._partition.number}: messages to {self._target} wait")
            await self._pause(str(error))
            return True
        if result.code == 409:
            # The receiver misses some that we believed to be taken: begin again with all we have.
            self._taken = 0
            await self._pause(result.message)
            return True
        if result.code == MISSING:
            await self._pause(result.message)  # And stage it again.
            return True
        self.failures = 0
        self._taken = last
        await self._partition.messages.over()
        self._partition.submit(TrimOutbox(self._target, last))
        return True

    async def _source(self, ref: Ref) -> Chunk:
        """The message keeps it here until it is taken there."""
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
        logger.log(level, "partition %d: %d takes no messages: %s", self._partition.number, self._target, why)
        await asyncio.sleep(min(RETRY_S * 2 ** min(self.failures, 10), RETRY_S_MAX))
        self.failures += 1


def limits_of(kept: Meta | Config) -> SetLimits:
    """Those that a partition keeps, or those that a node is told to have kept."""
    return SetLimits(*(getattr(kept, name) for name in SetLimits._fields))


def _just_before(invocation: bytes) -> bytes:
    """Of ids in order, what comes right before this one; nothing before the first."""
    number = int.from_bytes(invocation, "big")
    return (number - 1).to_bytes(len(invocation), "big") if number else b""


def _fit(messages: list[bytes]) -> list[bytes]:
    """As many as fit one command; at least one."""
    size = 0
    for offset, message in enumerate(messages):
        size += len(message)
        if size > DELIVERY_BYTES and offset:
            return messages[:offset]
    return messages


def _fit_parcels(
    first: int, messages: list[bytes], parcels: list[tuple[int, list[Ref]]]
) -> tuple[list[bytes], list[Ref]]:
    """As many as bring not too much with them, at least one; and what they bring."""
    large: list[Ref] = []
    size = 0
    for sequence, found in parcels:
        size += sum(map(refs.size_of, found))
        if size > DELIVERY_BLOB_BYTES and sequence > first:
            return messages[: sequence - first], large
        large += found
    return messages, large
