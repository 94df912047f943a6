"""The delivery of outcomes to the code: one at a time, in log order, live and in replay.

- The code settles between two outcomes. So "which was first?" has the same answer in every attempt, also for plain
`asyncio.wait`.
- An outcome is held back until the code has claimed every step that was journaled before it.
- A result that was made here (a RUN) gets its place in that order when its step is acknowledged: an `await` returns
after the step is durable. Only a step with the option to run ahead is used earlier, if nothing else can complete; the
next effect then waits for the acknowledgement.

A cancellation is an outcome too: exactly one operation notices it, and it is the same one in every attempt.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final, Protocol

from holdfast.sdk import timers
from holdfast.sdk.attempt.claims import Claims, bytes_in
from holdfast.sdk.attempt.operation import ONLY_OURS, PENDING, Event, Operation, is_cancellation
from holdfast.sdk.attempt.tasks import QUIET_TURNS
from holdfast.sdk.errors import TerminalError, from_failure, is_being_handled, is_caught_by_framework
from holdfast.sdk.journal import AWAITED, CANCELLED, SIGNATURES, Failure, Op, Outcome
from holdfast.sdk.replay import Recorded

#: Operations whose outcome eager state may have had when the code asked for it.
_EAGER: Final = frozenset(op for op, signature in SIGNATURES.items() if signature.eager)
_RUN: Final = Op.RUN
_VALUE: Final = Op.VALUE


class Interruptible(Protocol):
    """A run whose function can be interrupted."""

    def interrupt(self) -> None: ...


class Outcomes(Claims):
    """Outcomes that are not delivered yet, and cancellations that the code has not noticed yet."""

    unsettled: int  # Operations that are not delivered yet: those in `open`, and runs that have not begun.
    delivered: int
    settling: bool
    quiet: int
    seen: int
    pumping: bool
    last: int  # The last step that the code passed.
    open: dict[int, Operation[Any]]  # Operations without an outcome, by index.
    events: deque[Event]
    unacked: deque[Event]  # Results made here. Their acks will determine their place.
    cancelled: bool  # A cancellation that the code has not noticed yet.
    cancelled_after: dict[int, int]  # Steps at which every attempt notices a cancellation, and since which order.
    noticed: TerminalError | None  # The cancellation that the code was told last.
    interruptible: dict[Interruptible, None]  # Runs whose function a cancellation interrupts.

    __slots__ = tuple(__annotations__)

    def _walked(self) -> None:
        if self.events:
            self.pump_soon()

    # -- delivery

    def want(self, operation: Operation[Any]) -> None:
        """The code is about to wait for this operation. Deliver its outcome at once if that is possible."""
        self.activity += 1
        events = self.events
        if not events:
            return
        if self.settling or len(self.tasks) > 1:
            self.pump_soon()
            return
        # There is only the current task: no other task can observe in how many turns outcomes arrive.
        while events and self._may_deliver(events[0]):
            if self._is_firing(events[0]):
                self.pump_soon()  # It may cancel the current task, which has to wait for that.
                return
            if self._deliver(events.popleft()) is operation:
                return

    def _may_deliver(self, event: Event) -> bool:
        """Whether the code has claimed every step that was journaled before this outcome."""
        low = self.low
        if low >= len(self.steps):
            return True
        return event.order is not None and self.steps[low].made > event.order

    def _deliver(self, event: Event) -> Operation[Any] | None:
        operation = event.operation or self.open.pop(event.index, None)
        if operation is None or operation.state != PENDING:  # It has been abandoned since.
            return None
        self.delivered += 1
        self.unsettled -= 1
        self.touched = True
        operation.sequence = self.delivered
        self._overlooked(event, operation)
        # Tasks that have not begun yet may be about to wait for it: they too must find it before the next outcome.
        if operation.settle(event.outcome) or len(self.tasks) > 1:
            self.settling = True
            self.quiet = 0
            self.seen = self.activity
            self.loop.call_soon(self._settle)
        return operation

    def pump_soon(self) -> None:
        if not self.pumping:
            self.pumping = True
            self.loop.call_soon(self.pump)

    def pump(self) -> None:
        """Deliver the next outcome, unless the code is still reacting to the last one."""
        self.pumping = False
        while self.events and not self.settling and not self.ended and self._may_deliver(self.events[0]):
            self._deliver(self.events.popleft())

    def _settle(self) -> None:
        if self.activity != self.seen:
            self.seen = self.activity
            self.quiet = 0
        self.quiet += 1
        if len(self.tasks) <= 1 or self.quiet > QUIET_TURNS:
            self.settling = False
            self.pump()
        else:
            self.loop.call_soon(self._settle)

    def _is_firing(self, event: Event) -> bool:
        operation = event.operation or self.open.get(event.index)
        return operation is not None and operation.code == _VALUE

    def on_completion(self, index: int, order: int, outcome: Outcome) -> None:
        if self.cancelled and is_cancellation(outcome):
            # The node let a step of ours notice the cancellation while CANCELLED was in transit. Once is enough: the
            # code's reaction to it must not be cancelled too.
            self.cancelled = False
        self._grow(bytes_in(outcome))
        self.events.append(Event(order, index, outcome))
        self.touched = True
        self.pump()

    def is_alone(self) -> bool:
        """Whether nothing else can complete and no other task can observe the order: a result may then run ahead."""
        return len(self.tasks) == 1 and not self.open and not self.events and not self.keys and not self.unacked

    def result_sent(self, operation: Operation[Any], outcome: Outcome, *, ahead: bool) -> None:
        """The result of a RUN was sent with its step. Deliver it in its place, which the ack determines.

        `ahead`: the code may use it before the ack, unless another outcome could arrive first.
        """
        event = Event(None, operation.index, outcome, operation)
        if not ahead or self.unacked or (self.is_live and (self.open or self.keys)):
            self.unacked.append(event)
        else:
            self.events.append(event)
            self.pump_soon()

    # -- cancellation

    def passes(self, index: int) -> None:
        """The code takes the outcome of a step and continues. Raises if a cancellation was noticed here."""
        self.last = index
        if index in self.cancelled_after:
            self.cancelled = False
            raise self.cancellation()

    def cancellation(self, failure: Failure = CANCELLED) -> TerminalError:
        """The error that tells the code of the cancellation."""
        self.noticed = from_failure(failure)
        return self.noticed

    def was_swallowed(self) -> bool:
        """Whether a framework caught the cancellation, and the code goes on as if nothing had happened.

        Code of the user may catch it to compensate, and the steps of the compensation work.
        """
        if self.noticed is None:
            return False
        if is_being_handled(self.noticed):
            self.noticed = None
            return False
        return is_caught_by_framework(self.noticed)

    def _overlooked(self, event: Event, operation: Operation[Any]) -> None:
        """If a cancellation failed a step that no task waits for, such as the loser of a race, the next step notices it
        instead."""
        if operation.code in ONLY_OURS and not operation.is_awaited() and is_cancellation(event.outcome):
            noticed = max(self.cancelled_after.values(), default=0)
            self.cancelled = event.order is None or event.order > noticed

    def take_cancellation(self) -> bool:
        """Whether the next RUN must fail instead of running. Returns True once per cancellation."""
        found, self.cancelled = self.cancelled, False
        return found

    def on_cancelled(self) -> None:
        self.cancelled = True
        for run in list(self.interruptible):
            run.interrupt()


def is_delivered(step: Recorded) -> bool:
    """Whether the outcome of a step is delivered in its turn, instead of being returned by the call that made the step."""
    if step.op in _EAGER:
        return step.done != step.made
    return step.op == _RUN or step.op in AWAITED or (step.op == _VALUE and step.argument == [timers.NAME])
