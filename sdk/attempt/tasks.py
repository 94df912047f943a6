"""The tasks of an attempt and their end: the lowest layer of the machine.

An attempt ends once. After that it sends nothing, and every wait of its code raises `AttemptEnded`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from threading import get_ident
from typing import Any, Final, Protocol

from holdfast.sdk import scopes
from holdfast.sdk.errors import AttemptEnded, MisusedContext, retry_after_ms, to_failure
from holdfast.sdk.frames import Error, Frame, Start
from holdfast.sdk.ids import InvocationId, format_id
from holdfast.sdk.journal import pack_outcome

logger = logging.getLogger("holdfast.sdk")

#: The code has reacted to an outcome after this many turns of the loop without activity. A level of gather, TaskGroup or
#: wait_for takes two turns, so this allows for nested ones between two steps.
QUIET_TURNS: Final = 6
#: A task that continues after being told this often that its attempt has ended catches everything in a loop.
TOLD_MAX: Final = 100


class Shuttable(Protocol):
    """A context, as its attempt sees it."""

    def _shut(self) -> None:
        """Make all operations from now on wait for ever."""


def no_context() -> None:
    return None


class Tasks:
    """The identity of the attempt, the tasks of its code, and how they end."""

    ended: bool
    time_floor: float  # The time of the loop at which the last plain timer of the code fired.
    activity: int  # Counts what the code does.
    touched: bool  # For the sweep that finds attempts that only wait.
    id: InvocationId
    epoch: int
    start: Start
    seed: int
    name: str  # for logs
    loop: asyncio.AbstractEventLoop
    thread: int  # The loop's thread.
    send: Callable[[Frame], None]
    on_ended: Callable[[Any], None]
    eager: bool
    is_live: bool
    version: int
    tasks: set[asyncio.Task[Any]]
    told: dict[asyncio.Task[Any] | None, int]  # How often tasks were told that the attempt has ended.
    context: Callable[[], Shuttable | None]  # A weak reference: the context holds the attempt.

    __slots__ = (*__annotations__, "__weakref__")

    def check_here(self) -> scopes.Scope:
        """The scope of the code that uses the context now."""
        if self.ended:
            self._count_told()
            raise AttemptEnded
        scope = scopes.current_scope()
        if get_ident() != self.thread:
            scope = None  # `asyncio.to_thread` passes it on; attempts and streams are not thread-safe.
        if scope is None or scope.owner is not self:
            raise MisusedContext(_misuse(scope))
        return scope

    def _count_told(self) -> None:
        """Code that catches everything in a loop would block the event loop for ever, so it is stopped at an `await`."""
        task = asyncio.current_task(self.loop)
        count = self.told[task] = self.told.get(task, 0) + 1
        if count == TOLD_MAX and (context := self.context()) is not None:
            context._shut()
            logger.error(
                "%s: the handler catches AttemptEnded in a loop and does not end: it catches every BaseException. "
                "Write `except Exception:`, or raise AttemptEnded again",
                self.name, extra={"invocation_id": format_id(self.id)},
            )  # fmt: skip

    def adopt(self, task: asyncio.Task[Any]) -> None:
        """Count a task of the code. It ends with the attempt."""
        self.activity += 1
        self.tasks.add(task)
        task.add_done_callback(self._task_done)
        if self.ended:
            task.cancel()

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self.activity += 1
        self.tasks.discard(task)
        self.told.pop(task, None)
        if self.ended and not task.cancelled():
            error = task.exception()  # Otherwise asyncio would log it as never retrieved.
            if isinstance(error, AttemptEnded):
                forget_frames(error)

    def fail(self, error: BaseException, *, pause: bool) -> None:
        """Report that this attempt cannot continue, and end it. The code cannot catch this."""
        if self.ended:
            return
        after_ms = retry_after_ms(error)
        self.send(Error(self.id, self.epoch, pack_outcome(to_failure(error)), retry_after_ms=after_ms, pause=pause))
        self.end()

    def end(self) -> None:
        """Defined by `suspension`, which knows everything that an attempt holds."""
        raise NotImplementedError

    def _cancel_tasks(self, turn: int) -> None:
        """Cancel the remaining tasks after a few turns, in which tasks that waited for steps could end by themselves."""
        if not self.tasks:
            return
        if turn < QUIET_TURNS:
            self.loop.call_soon(self._cancel_tasks, turn + 1)
            return
        for task in list(self.tasks):
            task.cancel()
        if turn < QUIET_TURNS + 10:
            self.loop.call_later(1.0, self._cancel_tasks, turn + 1)
        else:
            logger.error(
                "%s: %d tasks of an attempt that ended ignore cancellation: %r",
                format_id(self.id), len(self.tasks), next(iter(self.tasks)),
            )  # fmt: skip


def forget_frames(ended: AttemptEnded) -> None:
    """Break the cycle between the future that raised it and its traceback, which only the garbage collector would find."""
    ended.__traceback__ = None


def _misuse(scope: scopes.Scope | None) -> str:
    if scope is not None:
        return "this context belongs to another invocation"
    return (
        "a context works only in its handler and in the tasks of that handler: not inside a function given to ctx.run, "
        "not in another thread, and not after the handler returned"
    )
