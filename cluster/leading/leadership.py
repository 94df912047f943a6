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
from typing import TYPE_CHECKING, Any, Final, get_args

from holdfast.cluster.handlers.queue import Search
from holdfast.cluster.leading.courier import Courier
from holdfast.cluster.leading.notices import Notices
from holdfast.cluster.leading.outbox import Outbox
from holdfast.cluster.leading.timers import Alarm
from holdfast.cluster.partition.door import Partition
from holdfast.cluster.values.janitor import Janitor
from holdfast.cluster.values.shared_store import Objects
from holdfast.log.errors import ProposalError
from holdfast.sdk.ids import NO_INVOCATION, DeploymentId, InvocationId, PartitionNumber
from holdfast.statemachine import queries
from holdfast.statemachine.commands import (
    CALL_DEPTH_MAX,
    Announce,
    RaiseLevel,
    Redispatch,
    SetLimits,
)
from holdfast.statemachine.effects import (
    AbortAttempt,
    Acknowledge,
    ArmTimer,
    DeleteObjects,
    DeliverNotices,
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
    from holdfast.cluster.traces import Tracer

logger = logging.getLogger(__name__)

REDISPATCHES_MAX: Final = 512  # In flight at a time.
SLICE: Final = 512  # Invocations examined per turn of the event loop.
RETRY_S: Final = 0.05
RETRY_S_MAX: Final = 2.0


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
        courier: Courier,
        *,
        limits: SetLimits | None = None,
        level: int = FIRST,
        tracer: Tracer | None = None,
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
        self._search = Search()
        self._alarm = Alarm(partition)
        self._outboxes: dict[PartitionNumber, Outbox] = {}
        self._objects = objects
        self._janitor = Janitor(partition, objects)
        self._notices = Notices(partition, courier)
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
            ArmTimer: lambda effect: self._alarm.set(effect.due_ms),
            DeleteObjects: lambda _: self._janitor.wake(),
            DeliverNotices: lambda _: self._notices.wake(),
        }
        assert self._carry.keys() == {*get_args(Effect)}, "every effect is carried out by somebody"
        if tracer is not None:
            settle, traced = self._carry[Reply], tracer.completed

            def reply(effect: Reply) -> None:
                settle(effect)
                traced(partition.state, effect.id)

            self._carry[Reply] = reply

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
        self._notices.start()
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

    def webhooks_changed(self) -> None:
        self._notices.changed()

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
        if self._redispatch_timer is not None:
            self._redispatch_timer.cancel()
        self._alarm.end()
        for outbox in self._outboxes.values():
            outbox.end()
        self._janitor.end()
        self._notices.end()
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

    def scan(self, first: InvocationId = NO_INVOCATION, only: DeploymentId | None = None) -> None:
        """Derive pending work from the state again: all of it, or the attempts from an id on, at one deployment.

        An attempt for an endpoint whose queue is full is skipped and does not delay the others. The endpoint remembers
        the smallest skipped id, and requests a scan from there when it has room.
        """
        self._search.want(first, only)
        if not self._scanning and not self.ended:
            self._begin_scan()

    def _begin_scan(self) -> None:
        self._scanning = True
        self._scan_slice(_just_before(self._search.begin()))

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
        if following is not None and not self._search.is_in_vain:
            self._loop.call_soon(self._scan_slice, following)
            return
        self._scanning = False
        if self._search.is_wanted:
            self._begin_scan()

    def _recover(self, effect: RecoverAttempt) -> None:
        if self._invoker.pauses.skips(self, effect):
            return
        target = self._invoker.find(effect.service, effect.handler, effect.deployment)
        if not self._search.covers(None if target is None else target.deployment):
            return
        if self._invoker.knows(effect.id, effect.epoch):
            return
        if target is None or self._has_place(target.deployment, effect.id):
            self.redispatch(effect.id, effect.epoch)

    def _has_place(self, deployment: DeploymentId, invocation: InvocationId) -> bool:
        endpoint = self._invoker.endpoint(deployment)
        if self._search.take_place(deployment, endpoint.queue):
            return True
        endpoint.pass_over(self, invocation)
        return False

    # -- outboxes ------------------------------------------------------------------------------------------------------

    def flush(self, target: PartitionNumber) -> None:
        outbox = self._outboxes.get(target)
        if outbox is None:
            outbox = self._outboxes[target] = Outbox(self.partition, self._router, self._objects, target)
        outbox.flush()

    @property
    def undelivered(self) -> int:
        """Number of outboxes whose target does not accept messages."""
        return sum(outbox.failures > 0 for outbox in self._outboxes.values())


def limits_of(kept: Meta | Config) -> SetLimits:
    """The limits in a partition's state, or those in a node's configuration."""
    return SetLimits(*(getattr(kept, name) for name in SetLimits._fields))


def _just_before(invocation: InvocationId) -> bytes:
    """The position just before this id; empty before the first."""
    number = int.from_bytes(invocation, "big")
    return (number - 1).to_bytes(len(invocation), "big") if number else b""
