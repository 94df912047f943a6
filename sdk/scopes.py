"""Identifies the running task of an attempt: scopes make step keys independent of timing.

A scope is one task of a handler. Its children are numbered when they are created, by a task factory, so a step of the
third child has the same key in every attempt, whichever branch happens to run first. A named scope (`ctx.scope`) starts
the numbers afresh, so its keys do not depend on the tasks around it.

The scope of a task is stored by task. Agent frameworks copy context variables from one task to another, which must not
move a scope. A context variable has a copy of it for code that runs in no task: callbacks and threads inherit it.

The factory wraps the loop's previous factory, and leaves tasks outside of handlers alone.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import random
import sys
from collections.abc import Coroutine, Generator
from hashlib import blake2b
from typing import Any, Final, Protocol

from holdfast.sdk.errors import MisusedContext, exit_raised, is_from_terminal

_CLOSER: Final = "\ud800"  # No name of a step: those are valid Unicode.
PATH_BYTES_MAX: Final = 200  # A longer path of nested tasks is hashed, so that keys stay within their bound.


class Owner(Protocol):
    """The attempt, as far as a scope knows it: it is informed of its tasks."""

    seed: int
    ended: bool
    tasks: set[asyncio.Task[Any]]
    time_floor: float

    def adopt(self, task: asyncio.Task[Any]) -> None: ...


class Scope:
    """One task of an attempt, or a named part of one, and the counters of the names and children in it.

    `name` is the path of the named scope that it belongs to; empty outside of named scopes.
    """

    __slots__ = ("children", "name", "names", "owner", "path", "random", "shared")

    def __init__(self, owner: Owner, path: str, name: str = "") -> None:
        self.owner = owner
        self.path = path
        self.name = name
        self.shared = False  # Whether other tasks may share the context variables of its task.
        self.names: dict[str, int] = {}
        self.children = 0
        self.random: random.Random | None = None

    def child(self) -> Scope:
        self.children += 1
        number = str(self.children)
        if self.path:
            number = f"{self.path}{'>' if self.path == self.name else '.'}{number}"
            if len(number) > PATH_BYTES_MAX:
                number = "~" + blake2b(number.encode(), digest_size=16).hexdigest()
        return Scope(self.owner, number, self.name)

    def closer(self) -> Scope:
        """For a task in which the loop closes an abandoned async generator of this named scope. It takes no number from the
        other tasks: when it starts depends on the garbage collector."""
        count = self.names[_CLOSER] = self.names.get(_CLOSER, 0) + 1
        return Scope(self.owner, f"{self.path}>close{count}", self.name)

    def named(self, name: str) -> Scope:
        """The named scope `name` in the named scope that this one belongs to, whatever tasks lie between."""
        path = f"{self.name}@{escaped(name)}"
        if len(path.encode()) > PATH_BYTES_MAX:
            path = shortened(path, PATH_BYTES_MAX)
        found = Scope(self.owner, path, path)
        found.shared = self.shared
        return found

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

    def place(self, name: str) -> str:
        """A name with the place of the running code, relative to the named scope: what the next step key is made of."""
        return self.key(name).removeprefix(self.name).lstrip(":>")

    def explicit_key(self, key: str) -> str:
        """The step key of an explicit `key=`: relative to the named scope.

        In a positional key no letter follows a single number sign, so the two kinds never meet.
        """
        return f"{self.name}:#={key}" if self.name else f"={key}"

    def draw(self) -> random.Random:
        """Random numbers of this scope, the same in every attempt."""
        if self.random is None:
            self.random = random.Random(f"{self.owner.seed}/{self.path}")
        return self.random


#: The scope of the code that runs now; None outside of handlers and inside the function of a step.
current: contextvars.ContextVar[Scope | None] = contextvars.ContextVar("holdfast_scope", default=None)

# The scope of each task of a handler; None while the task runs the function of a step. Tasks leave it when they are done.
_by_task: dict[asyncio.Task[Any], Scope | None] = {}
_ABSENT: Final[Any] = object()
_any_shared = (
    False  # Whether a task of a handler ever shared its context: most programs have none, and every step asks.
)


if sys.version_info >= (3, 12):

    def running_task() -> asyncio.Task[Any] | None:
        """None also without a running loop: in a thread, or when a closing loop creates its last tasks."""
        try:
            return asyncio.current_task()
        except RuntimeError:
            return None

    def current_scope() -> Scope | None:
        """The scope of the running code. None outside of handlers and inside the function of a step."""
        try:
            scope: Scope | None = _by_task.get(asyncio.current_task(), _ABSENT)  # type: ignore[arg-type]
        except RuntimeError:
            return current.get()
        return current.get() if scope is _ABSENT else scope

else:
    # Every operation asks, and asyncio.current_task is not in C before Python 3.12.
    _running_loop: Final = asyncio._get_running_loop
    _task_of: Final = asyncio.tasks._current_tasks.get  # type: ignore[attr-defined]

    def running_task() -> asyncio.Task[Any] | None:
        """None also without a running loop: in a thread, or when a closing loop creates its last tasks."""
        task: asyncio.Task[Any] | None = _task_of(_running_loop())
        return task

    def current_scope() -> Scope | None:
        """The scope of the running code. None outside of handlers and inside the function of a step."""
        scope: Scope | None = _by_task.get(_task_of(_running_loop()), _ABSENT)
        return current.get() if scope is _ABSENT else scope


def shares_context() -> bool:
    """Whether the running task has a context that other tasks may share: its variables are not its own."""
    if not _any_shared:
        return False
    scope = current_scope()
    return scope is not None and scope.shared


def begin(scope: Scope) -> None:
    """Give the running task this scope. The task must be adopted by the owner, which makes it `forget`."""
    current.set(scope)
    enter(running_task(), scope)


def enter(task: asyncio.Task[Any] | None, scope: Scope | None) -> Scope | None:
    """Put the running task into a scope. None: into the function of a step. Returns what `leave` needs to go back."""
    if task is None:
        return None
    before: Scope | None = _by_task.get(task, _ABSENT)
    _by_task[task] = scope
    return before


def leave(task: asyncio.Task[Any] | None, before: Scope | None) -> None:
    if task is None:
        return
    if before is _ABSENT:
        _by_task.pop(task, None)
    else:
        _by_task[task] = before


def scope_of(task: asyncio.Task[Any]) -> Scope | None:
    return _by_task.get(task)


def forget(task: asyncio.Task[Any]) -> None:
    """The task is done."""
    _by_task.pop(task, None)


_ESCAPES: Final = str.maketrans({each: f"%{ord(each):02X}" for each in "%:@>~"})


def escaped(name: str) -> str:
    """A name without the characters that separate the parts of a path."""
    return name.translate(_ESCAPES)


def shortened(text: str, limit: int) -> str:
    """A generated text cut to `limit` bytes, with a hash of all of it: the same in every process."""
    raw = text.encode()
    if len(raw) <= limit:
        return text
    tail = "~" + blake2b(raw, digest_size=16).hexdigest()
    return raw[: limit - len(tail)].decode(errors="ignore") + tail


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
        # Outside of named scopes it has always taken a number, so keys in existing journals count it.
        is_closer = parent.name and type(coro).__name__ == "async_generator_athrow"
        scope = parent.closer() if is_closer else parent.child()
        coro = Contained(coro) if inspect.iscoroutine(coro) else coro
        if options.get("context") is not None:
            self._shares(scope)
            task = self._make(loop, coro, options)
        else:
            context = contextvars.copy_context()
            context.run(current.set, scope)
            options.pop("context", None)
            task = context.run(self._make, loop, coro, options)  # A task copies the context it is made in.
        _by_task.setdefault(task, scope)  # A task that starts eagerly may have entered a named scope already.
        scope.owner.adopt(task)
        return task

    def _shares(self, scope: Scope) -> None:
        global _any_shared
        scope.shared = _any_shared = True

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
    create = functools.partial(context.run, functools.partial(loop.create_task, coro, name=name))
    here = running_task()
    if here not in _by_task:
        return create()
    before = enter(here, None)  # Or the factory would number it as a child of the running task.
    try:
        return create()
    finally:
        leave(here, before)
