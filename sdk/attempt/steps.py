"""The operations of a context: journal a step, or find it in the journal.

The plain timers of the code are steps as well. A timer decides once: the journal records that it fired (`timers`).
"""

from __future__ import annotations

import contextvars
import os
from collections.abc import Callable
from typing import Any, Final, TypeVar

from holdfast.sdk import replay, timers
from holdfast.sdk.attempt.operation import ABANDONED, Event, Operation
from holdfast.sdk.attempt.outcomes import is_delivered
from holdfast.sdk.attempt.suspension import Suspension
from holdfast.sdk.errors import AttemptEnded
from holdfast.sdk.frames import Abandon
from holdfast.sdk.ids import SECRET_BYTES
from holdfast.sdk.journal import SIGNATURES, Op, Success

T = TypeVar("T")

#: How often, and for how long each time, a due plain timer waits for the code to claim the rest of its journal. Only
#: journals of an SDK that did not record timers have steps that depend on a timer.
REPLAY_LOOKS: Final = 20
REPLAY_LOOK_S: Final = 0.05

#: Operations that the node completes as cancelled while a cancellation is pending.
_NOTICES_CANCELLATION: Final = frozenset(op for op, signature in SIGNATURES.items() if signature.cancellable)


class Steps(Suspension):
    """The steps that contexts and plain timers make."""

    __slots__ = ()

    def note(self, code: int, key: str, argument: list[Any]) -> tuple[int, bool]:
        """Journal a step that the code does not wait for (SET, SEND, ...), unless it exists. Returns its index, and
        whether it is new."""
        index = self.find(key, code, argument)
        if index >= 0:
            self.passes(index)
            return index, False
        self.check_room(key)
        self.check_new(code, argument, key, others=self.unsettled)
        self.last = self.journal(code, key, argument, None)
        return self.last, True

    def awaited(self, code: int, key: str, argument: list[Any], load: Callable[[bytes], T]) -> Operation[T]:
        """Journal a step whose outcome comes from the node."""
        operation: Operation[T] = Operation(self, code, key, load)
        self.open_step(operation, argument)
        return operation

    def awakeable(self, key: str, load: Callable[[bytes], T]) -> tuple[Operation[T], bytes]:
        """A step that is completed from outside, and the secret of its id, which the journal keeps for later attempts."""
        argument = [os.urandom(SECRET_BYTES)] if self.start.secrets else []
        operation = self.awaited(Op.AWAKEABLE, key, argument, load)
        if operation.index < len(self.steps):
            argument = self.steps[operation.index].argument
        return operation, argument[0] if argument else b""

    def approval(self, operation: Operation[Any], argument: list[Any]) -> bytes:
        """A step that people decide about. Returns the secret of its id, like that of an awakeable."""
        secret = os.urandom(SECRET_BYTES)
        self.open_step(operation, [*argument, secret])
        if operation.index >= len(self.steps):
            return secret
        kept: bytes = self.steps[operation.index].argument[len(argument)]
        return kept

    def open_step(self, operation: Operation[Any], argument: list[Any]) -> None:
        code, key = operation.code, operation.key
        index = self.find(key, code, argument)
        if index >= 0:
            self.replay_step(operation, index)
            return
        if self.noticed is not None and code in _NOTICES_CANCELLATION and self.was_swallowed():
            raise self.cancellation()
        self.check_room(key)
        self.check_new(code, argument, key, others=self.unsettled)
        operation.index = self.journal(code, key, argument, None)
        self.open[operation.index] = operation
        self.unsettled += 1
        if code in _NOTICES_CANCELLATION:
            self.cancelled = False

    def replay_step(self, operation: Operation[Any], index: int) -> None:
        """An earlier attempt journaled `operation` as step `index`."""
        step = self.steps[index]
        operation.index = index
        if step.abandoned:
            operation.state = ABANDONED
        elif step.outcome is not None and not is_delivered(step):
            self.delivered += 1
            operation.sequence = self.delivered
            operation.settle(step.outcome)
        else:
            self.open[index] = operation
            self.unsettled += 1
            if self.events:
                self.pump_soon()

    def given(self, code: int, key: str, argument: list[Any], draw: Callable[[], bytes]) -> bytes:
        """A step whose value is drawn here when it is new (VALUE). Returns the value."""
        index = self.find(key, code, argument)
        if index < 0:
            self.check_room(key)
            self.check_new(code, argument, key, others=self.unsettled)
            drawn = draw()
            self.last = self.journal(code, key, argument, Success(drawn))
            return drawn
        self.passes(index)
        outcome = self.steps[index].outcome
        if not isinstance(outcome, Success):
            self.fail_nondeterministic(index, replay.describe(code, argument, key))
            raise AttemptEnded
        return outcome.payload

    def abandon(self, operation: Operation[Any]) -> None:
        """The code stopped waiting for this operation."""
        if operation.index >= 0:
            self.open.pop(operation.index, None)
            self.send(Abandon(self.id, self.epoch, operation.index))

    def on_retry(self, index: int) -> None:
        operation = self.open.get(index)
        if operation is not None:
            self.touched = True
            operation.retry()

    # -- plain timers of the code

    def plain_timer(self, timer: timers.PlainTimer, delay: float) -> None:
        """The code asked the loop for a timer. If the timer fired in an earlier attempt, it fires in its turn."""
        key = self.next_key(timers.NAME)
        index = self.find(key, Op.VALUE, [timers.NAME])
        if index >= 0:
            operation = self._firing(timer, key, index)
            self.open[index] = operation
            if self.events:
                self.pump_soon()
            return
        self.timers.add(timer)
        timer.forget = self.timers.discard
        # Soon and outside all scopes, so that it is the loop's own timer: this runs in a task of the code.
        self.loop.call_soon(self._arm_timer, timer, key, delay, context=contextvars.Context())

    def _arm_timer(self, timer: timers.PlainTimer, key: str, delay: float) -> None:
        if timer in self.timers:
            timer.armed = self.loop.call_later(delay, self._timer_due, timer, key, -1, REPLAY_LOOKS)

    def _firing(self, timer: timers.PlainTimer, key: str, index: int) -> Operation[None]:
        """The step that records that the timer fired, on its way to the code."""
        operation: Operation[None] = Operation(self, Op.VALUE, key, lambda _: None)
        operation.index = index
        self.unsettled += 1

        operation.listen(lambda: timers.fired(timer, self))
        return operation

    def _timer_due(self, timer: timers.PlainTimer, key: str, seen: int, looks: int) -> None:
        if self.ended or timer not in self.timers:
            return
        if self.keys:
            # An earlier attempt went further before this timer fired, if it fired at all: let the code get there first.
            looks = looks - 1 if self.activity == seen else REPLAY_LOOKS
            if looks:
                timer.armed = self.loop.call_later(
                    REPLAY_LOOK_S, self._timer_due, timer, key, self.activity, looks
                )  # fmt: skip
            else:
                timers.fired(timer, self)
            return
        fired = Success(b"")
        index = self.journal(Op.VALUE, key, [timers.NAME], fired)
        self.unacked.append(Event(None, index, fired, self._firing(timer, key, index)))
        if not self.is_live:
            self.check_soon()
