"""Waiting: for outcomes, for acknowledgements, and the suspension of an attempt that does nothing else."""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from typing import Any, Final

from holdfast.sdk import timers
from holdfast.sdk.attempt.operation import ABANDONED, Operation
from holdfast.sdk.attempt.outcomes import Outcomes
from holdfast.sdk.attempt.tasks import QUIET_TURNS
from holdfast.sdk.errors import AttemptEnded
from holdfast.sdk.frames import Waiting
from holdfast.sdk.waits import Wait, Waits, waits_of

#: How long an attempt that the node wants back but that cannot be handed back starts no function. Plain timeouts of the
#: code continue meanwhile.
PARKED_S: Final = 0.5


class Suspension(Outcomes):
    """What the code waits for, and when the attempt can be handed back because of that."""

    check: asyncio.Handle | None  # The next check whether the attempt can be handed back.
    functions: int  # Functions of runs that are running now.
    stays: bool  # The option `suspend=False`: it stays in memory while its node lets it.
    starts_runs: bool  # False once the node wants the attempt back: the next effect is left to the next attempt.
    waits: set[Wait]
    ack_waits: deque[tuple[int, Wait]]
    timers: set[timers.PlainTimer]  # Plain timers that have not fired in any attempt.
    parked: list[Wait]  # Runs that wait for the end of the attempt instead of starting an effect.

    __slots__ = tuple(__annotations__)

    def end(self) -> None:
        """Drop everything. No frame is sent after this, and the code ends with `AttemptEnded`."""
        if self.ended:
            return
        self.ended = True
        self.noticed = None  # Its traceback refers to the frames of the code.
        self.on_ended(self)
        for wait in list(self.waits):
            if not wait.done():
                wait.set_exception(AttemptEnded())
                wait.exception()
        for held in (self.open, self.events, self.unacked, self.ack_waits, self.parked):
            held.clear()  # Operations refer to their attempt: without this, only the garbage collector would free them.
        for timer in list(self.timers):
            timer.disarm()
        if self.tasks:
            self.loop.call_soon(self._cancel_tasks, 0)

    def wait(self, operation: Operation[Any] | None) -> Wait:
        """A future that the end of the attempt ends. `operation` is None for a wait for something other than one step:
        an ack or a combinator.

        The caller removes it from `waits` afterwards.
        """
        if self.ended:
            raise AttemptEnded
        self.activity += 1
        wait = Wait(loop=self.loop)
        wait.never = operation is not None and operation.state == ABANDONED
        self.waits.add(wait)
        if self.eager:
            self.check_soon()
        return wait

    def acknowledged(self) -> Wait | None:
        """The wait that must end before an effect may start: until all steps so far are durable. None if they are."""
        if self.acked >= self.length:
            return None
        wait = self.wait(None)
        self.ack_waits.append((self.length, wait))
        return wait

    def on_ack(self, length: int) -> None:
        if length <= self.acked:
            return
        self.acked = min(length, self.length)
        self.touched = True
        while self.ack_waits and self.ack_waits[0][0] <= self.acked:
            wait = self.ack_waits.popleft()[1]
            if not wait.done():
                wait.set_result(None)
        if self.unacked:
            while self.unacked and self.unacked[0].index < self.acked:
                self.events.append(self.unacked.popleft())
            self.pump()

    async def park(self) -> None:
        """Wait for the end of this attempt instead of starting an effect, or until the attempt turns out to continue."""
        wait = self.wait(None)
        if not self.parked:
            # Soon and outside all scopes: a timer that the task itself requests would count as one of the code's.
            self.loop.call_soon(self.loop.call_later, PARKED_S, self.unpark, context=contextvars.Context())
        self.parked.append(wait)
        try:
            await wait
        finally:
            self.waits.discard(wait)

    def unpark(self) -> None:
        self.starts_runs = True
        parked, self.parked = self.parked, []
        for wait in parked:
            if not wait.done():
                wait.set_result(None)

    # -- suspension

    def on_suspend(self) -> None:
        """The node wants the attempt back: running functions may finish, and no other function starts."""
        self.starts_runs = not self.is_live
        self.hurry()

    def hurry(self) -> None:
        """From now on, hand the attempt back as soon as it only waits."""
        self.eager = True
        self.check_soon()

    def check_soon(self) -> None:
        """Hand the attempt back as soon as it only waits."""
        if self.ended or (self.check is not None and not isinstance(self.check, asyncio.TimerHandle)):
            return
        if self.check is not None:
            self.check.cancel()
        self.check = self.loop.call_soon(self._check, self.activity, 0, 0.005)

    def _check(self, seen: int, quiet: int, pause: float) -> None:
        self.check = None
        if self.ended:
            return
        if self.activity != seen or self.settling:
            self.check = self.loop.call_soon(self._check, self.activity, 0, 0.005)
        elif quiet < QUIET_TURNS:
            self.check = self.loop.call_soon(self._check, seen, quiet + 1, pause)
        elif not self.maybe_suspend():
            if self.parked and not self.functions and self.acked >= self.length:
                self.unpark()  # It waits for something other than a step, so it cannot be handed back.
            # It waits for something other than a step, such as a function or a plain timer. No event announces the end
            # of that.
            self.check = self.loop.call_later(pause, self._check, seen, QUIET_TURNS, min(pause * 2, 0.5))

    def look(self) -> None:
        """The attempt did nothing for a while: hand it back if it only waits."""
        if self.ended or self.stays or self.functions:
            return
        waits = waits_of(self.tasks, self)
        if waits is Waits.STEPS:
            self.maybe_suspend()
        elif waits is Waits.LOCAL:
            # Callbacks may be about to move a task. They have a few turns for that.
            self.loop.call_soon(self._look_again, self.activity, 0)

    def _look_again(self, seen: int, quiet: int) -> None:
        if self.ended or self.functions or self.activity != seen or waits_of(self.tasks, self) is Waits.OTHER:
            return
        if quiet < QUIET_TURNS:
            self.loop.call_soon(self._look_again, seen, quiet + 1)
        else:
            self.maybe_suspend()

    def maybe_suspend(self) -> bool:
        """Hand the attempt back if its tasks only wait for steps and for each other. Returns whether it did."""
        if self.ended or self.settling or self.functions:
            return False
        needs_ack = bool(self.unacked) or any(not wait.done() for _, wait in self.ack_waits)
        if needs_ack and self.is_live:
            return False
        if self.timers and not needs_ack:
            return False  # Their decisions are not in the journal yet.
        timed = [future for timer in self.timers for future in timer.futures()]
        if waits_of(self.tasks, self, timed) < (Waits.STEPS if self.stays else Waits.LOCAL):
            return False
        if self.events and not self.parked and not self._may_deliver(self.events[0]):
            self.fail_nondeterministic(self.low, "nothing: it waits, and did not ask for this step")
            return True
        if self.events and self._may_deliver(self.events[0]):
            return False
        steps = sorted(index for index, operation in self.open.items() if operation.is_awaited())
        if needs_ack or self.parked:
            steps = []
        elif not steps:
            return False
        self.send(Waiting(self.id, self.epoch, steps))
        self.end()
        return True
