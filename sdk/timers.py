"""Plain timers of a handler: asyncio.sleep, asyncio.timeout, wait_for, wait(timeout=), and other users of the loop's
timers.

A timer decides: code that waits for a step "for at most a second" takes another path when the second is over. A later
attempt must take the same path, so the firing of a timer is a step of the journal, and reaches the code in log order
like any outcome. A timer that is cancelled before it fires is not journaled, so a timeout that does not expire costs
nothing.

The hooks below replace methods of the event loop. They act only on calls from a task of an attempt, under its scope:
servers, clients, and functions of steps use the loop's own timers (ADR 9).
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import sys
from collections.abc import Callable
from typing import Any, Final, Protocol

from holdfast.sdk import primitives, scopes

logger = logging.getLogger("holdfast.sdk")

#: The name of the steps that record that a timer fired.
NAME: Final = "plain timer"
#: A plain timer is held in memory and starts over after a crash: a longer one is usually a mistake.
LONG_S: Final = 60.0
#: A timer this far in the future is not meant to fire.
FOREVER_S: Final = 100 * 366 * 24 * 3600.0


class Owner(Protocol):
    """The attempt, as far as timers know it."""

    ended: bool
    tasks: set[asyncio.Task[Any]]
    time_floor: float
    name: str

    def plain_timer(self, timer: PlainTimer, delay: float) -> None: ...


class PlainTimer(asyncio.TimerHandle):
    """The result of `call_later` in a handler. The attempt arms it, and fires it when it is the turn of its step."""

    __slots__ = ("armed", "forget")

    def __init__(
        self,
        when: float,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        loop: asyncio.AbstractEventLoop,
        context: contextvars.Context | None,
    ) -> None:
        super().__init__(when, callback, args, loop, context=context)
        self.armed: asyncio.TimerHandle | None = None
        self.forget: Callable[[PlainTimer], None] | None = None

    def cancel(self) -> None:
        self.disarm()
        asyncio.Handle.cancel(self)

    def disarm(self) -> None:
        """Stop it: it fired, it was cancelled, or its attempt ended."""
        armed, self.armed = self.armed, None
        if armed is not None:
            armed.cancel()
        forget, self.forget = self.forget, None
        if forget is not None:
            forget(self)

    def fire(self) -> None:
        self.disarm()
        if not self.cancelled():
            self._run()

    def futures(self) -> list[asyncio.Future[Any]]:
        """The futures that it completes, as asyncio.sleep and asyncio.wait use it."""
        return [each for each in self._args or () if isinstance(each, asyncio.Future)]


def place(skipped: tuple[str, ...] = ("asyncio", "anyio", "holdfast", "contextlib")) -> str:
    """File and line of the running code, without the frames of libraries."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in skipped:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


_warned: set[str] = set()
WARNED_MAX: Final = 1000


def warn_once(text: str, *args: object, at: str) -> None:
    """Log a warning about code at one place, the first time only."""
    if at not in _warned and len(_warned) < WARNED_MAX:
        _warned.add(at)
        logger.warning(text, *args)


def _owner() -> Any:
    """The attempt of the running task, if this is handler code and not the function of a step."""
    scope = scopes.current_scope()
    if scope is None or scope.owner.ended:
        return None
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return None
    return scope.owner if task in scope.owner.tasks else None


_fired = False  # Whether a timer of a handler ever fired in this process.


def fired(timer: PlainTimer, owner: Owner) -> None:
    """A timer of this attempt fires: the time of the loop, as the code sees it, has come."""
    global _fired
    _fired = True
    owner.time_floor = max(owner.time_floor, timer.when())
    timer.fire()


#: Methods of a loop that communicate outside the process.
_OUTSIDE: Final = (
    "create_connection", "create_unix_connection", "create_datagram_endpoint", "subprocess_exec", "subprocess_shell",
)  # fmt: skip


class _Hooks:
    """The methods of one loop that behave differently in handlers."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._time = loop.time
        self._call_later = loop.call_later
        self._call_at = loop.call_at

    def time(self) -> float:
        """A timer that fired in an earlier attempt fires at once, so its time has come, whatever the clock says."""
        if not _fired:
            return self._time()  # Loops ask in each turn.
        scope = scopes.current_scope()
        return self._time() if scope is None else max(self._time(), scope.owner.time_floor)

    def call_later(
        self, delay: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        owner = _owner() if 0 < delay < FOREVER_S else None
        if owner is None:
            return self._call_later(delay, callback, *args, context=context)
        if delay > LONG_S:
            at = place()
            warn_once(
                "%s: a plain asyncio timer of %.0f s at %s keeps the invocation in memory and starts over after a crash: "
                "use ctx.sleep, ctx.timeout or ctx.select",
                owner.name, delay, at, at=at,
            )  # fmt: skip
        timer = PlainTimer(self.time() + delay, callback, args, loop=self.loop, context=context)
        owner.plain_timer(timer, delay)
        return timer

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        if _owner() is None or when - self.time() >= FOREVER_S:  # The loop's own call_later calls this.
            return self._call_at(when, callback, *args, context=context)
        return self.call_later(when - self.time(), callback, *args, context=context)

    def outside(self, name: str) -> Callable[..., Any]:
        inner = getattr(self.loop, name)

        def method(*args: Any, **options: Any) -> Any:
            owner = _owner()
            if owner is not None:
                at = place()
                warn_once(
                    "%s: the handler opens a connection or a process at %s, outside a step: every attempt repeats it and "
                    "may get another answer. Move it to a function and call that with ctx.run",
                    owner.name, at, at=at,
                )  # fmt: skip
            return inner(*args, **options)

        return method


def install(loop: asyncio.AbstractEventLoop) -> None:
    """Make the timers of handlers on this loop steps of their journals, and mark their locks and queues. May be repeated."""
    if isinstance(getattr(loop.call_later, "__self__", None), _Hooks):
        return
    primitives.install()
    hooks = _Hooks(loop)
    for name in _OUTSIDE:
        setattr(loop, name, hooks.outside(name))
    loop.time = hooks.time  # type: ignore[method-assign]
    loop.call_at = hooks.call_at  # type: ignore[method-assign, assignment]
    loop.call_later = hooks.call_later  # type: ignore[method-assign, assignment]
