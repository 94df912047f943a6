"""Identifies the running task of an attempt: scopes make step keys independent of timing.

A scope is one task of a handler. Its children are numbered when they are created, by a task factory, so a step of the
third child has the same key in every attempt, whichever branch happens to run first. The scope is stored in a context
variable, which every task, callback and thread inherits; the factory gives each new task a scope of its own.

The factory wraps the loop's previous factory, and leaves tasks outside of handlers alone.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import random
import sys
import weakref
from collections.abc import Coroutine, Generator
from hashlib import blake2b
from typing import Any, Final, Protocol

from holdfast.sdk.errors import MisusedContext, exit_raised, is_from_terminal

PATH_BYTES_MAX: Final = 200  # A longer path of nested tasks is hashed, so that keys stay within their bound.


class Owner(Protocol):
    """The attempt, as far as a scope knows it: it is informed of its tasks."""

    seed: int
    ended: bool
    tasks: set[asyncio.Task[Any]]
    time_floor: float

    def adopt(self, task: asyncio.Task[Any]) -> None: ...


class Scope:
    """One task of an attempt, and the counters of the names and children in it."""

    __slots__ = ("children", "names", "owner", "path", "random")

    def __init__(self, owner: Owner, path: str) -> None:
        self.owner = owner
        self.path = path
        self.names: dict[str, int] = {}
        self.children = 0
        self.random: random.Random | None = None

    def child(self) -> Scope:
        self.children += 1
        path = f"{self.path}.{self.children}" if self.path else str(self.children)
        if len(path) > PATH_BYTES_MAX:
            path = "~" + blake2b(path.encode(), digest_size=16).hexdigest()
        return Scope(self.owner, path)

    def key(self, name: str) -> str:
        """The next step key for `name` in this scope: unique, whatever characters a name has.

        The first colon ends the scope, and a number sign in a name is doubled, so `#n` can only be an ordinal.
        """
        count = self.names.get(name, 0)
        self.names[name] = count + 1
        text = name.replace("#", "##") if "#" in name else name
        if self.path or ":" in text:
            text = f"{self.path}:{text}"
        return f"{text}#{count}" if count else text

    def draw(self) -> random.Random:
        """Random numbers of this scope, the same in every attempt."""
        if self.random is None:
            self.random = random.Random(f"{self.owner.seed}/{self.path}")
        return self.random


#: The scope of the code that runs now; None outside of handlers and inside the function of a step.
current: contextvars.ContextVar[Scope | None] = contextvars.ContextVar("holdfast_scope", default=None)

# A task with an explicit context shares that context with others, so its scope is stored here.
_by_task: weakref.WeakKeyDictionary[asyncio.Task[Any], Scope] = weakref.WeakKeyDictionary()
_any_by_task = False  # Whether there ever was one: most programs have none, and every operation checks.


def current_scope() -> Scope | None:
    if _any_by_task:
        task = _current_task()
        scope = _by_task.get(task) if task is not None else None
        if scope is not None:
            return scope
    return current.get()


def shares_context() -> bool:
    """Whether the running task has a context that other tasks may share: its variables are not its own."""
    task = _current_task() if _any_by_task else None
    return task is not None and task in _by_task


def _current_task() -> asyncio.Task[Any] | None:
    """None also without a running loop: in a thread, or when a closing loop creates its last tasks."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def _remember(task: asyncio.Task[Any], scope: Scope) -> None:
    global _any_by_task
    _any_by_task = True
    _by_task[task] = scope


class Contained(Coroutine[Any, Any, Any]):
    """A coroutine of a handler's task, in which SystemExit is an error like any other.

    A task would pass it to the loop, which would end, and with it the server and all other attempts.
    """

    __slots__ = ("_iterator",)  # `waits` looks through it by this name.

    def __init__(self, inner: Coroutine[Any, Any, Any]) -> None:
        self._iterator = inner

    def send(self, value: Any) -> Any:
        try:
            return self._iterator.send(value)
        except (SystemExit, KeyboardInterrupt) as error:
            if is_from_terminal(error):
                raise
            raise exit_raised(error) from error

    def throw(self, *details: Any) -> Any:
        try:
            return self._iterator.throw(*details)
        except (SystemExit, KeyboardInterrupt) as error:
            if is_from_terminal(error):
                raise
            raise exit_raised(error) from error

    def close(self) -> None:
        self._iterator.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._iterator.__await__()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)  # Names and frames, for tools that show the task.


def _starts_in_any_order() -> bool:
    """Whether asyncio.as_completed is about to start a coroutine, from a set in arbitrary order."""
    frame = sys._getframe(2)
    for _ in range(6):  # create_task, ensure_future, possibly a comprehension and a class of its own
        if frame is None or not frame.f_globals.get("__name__", "").startswith(("asyncio.", "uvloop")):
            return False
        if "as_completed" in frame.f_code.co_name or "AsCompleted" in frame.f_code.co_qualname:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class _Factory:
    """A task factory that gives children of a scoped task a scope. One per loop, around the loop's previous factory."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(
        self, loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], **options: Any
    ) -> asyncio.Task[Any]:
        parent = current_scope()
        if parent is None:
            return self._make(loop, coro, options)
        if inspect.iscoroutine(coro) and _starts_in_any_order():
            coro.close()
            raise MisusedContext(
                "asyncio.as_completed starts coroutines in a different order in each process, so replay could not find their "
                "steps: pass it tasks made with asyncio.create_task, or operations of the context"
            )
        scope = parent.child()
        coro = Contained(coro) if inspect.iscoroutine(coro) else coro
        if options.get("context") is not None:
            task = self._make(loop, coro, options)
            _remember(task, scope)
        else:
            context = contextvars.copy_context()
            context.run(current.set, scope)
            options.pop("context", None)
            task = context.run(self._make, loop, coro, options)  # A task copies the context it is made in.
        scope.owner.adopt(task)
        return task

    def _make(
        self, loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], options: dict[str, Any]
    ) -> asyncio.Task[Any]:
        if self.inner is None:
            return asyncio.Task(coro, loop=loop, **options)
        task: asyncio.Task[Any] = self.inner(loop, coro, **options)
        return task


def install_factory(loop: asyncio.AbstractEventLoop) -> None:
    """Make `loop` number the tasks of handlers. May be repeated, also after a user set another factory."""
    factory = loop.get_task_factory()
    if not isinstance(factory, _Factory):
        loop.set_task_factory(_Factory(factory))  # type: ignore[arg-type]


def unscoped_task(
    loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], *, name: str | None = None
) -> asyncio.Task[Any]:
    """A task outside of all scopes, which takes no number from the scope of the code that starts it."""
    context = contextvars.copy_context()
    context.run(current.set, None)

    def make() -> asyncio.Task[Any]:
        return loop.create_task(coro, name=name)

    return context.run(make)
