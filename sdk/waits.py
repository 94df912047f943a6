"""Whether the tasks of an attempt wait for steps only, or also for something of this process.

An attempt may be dropped from memory when only the completion of a step could move it. asyncio does not say what a task
waits for, so this inspects the future that a task awaits, and the coroutines and generators in between.

Frameworks put helper tasks between a handler and its steps, and connect them by events, queues, locks and streams. Such
a primitive is taken for *local* if the code of the attempt created it (`primitives`): only tasks of the attempt move it.
If all of them wait, nothing moves until a step completes. That is a guess, because the code may have passed it on to a
thread or to a task outside; the option `suspend=False` of a handler turns it off. Everything unrecognised counts as
something of this process. The attempt then stays in memory, which costs memory and nothing else.

Plain timers are not covered here: an attempt knows the timers of its code (`timers`).
"""

from __future__ import annotations

import asyncio
import enum
import gc
import types
from collections.abc import Collection
from typing import Any, Final

from holdfast.sdk import primitives
from holdfast.sdk.timers import FOREVER_S


class Wait(asyncio.Future[None]):
    """A future that only a frame of the node completes. `never`: not even that, because the step was abandoned."""

    never = False


class Waits(enum.IntEnum):
    """What tasks wait for. Of several tasks, the least counts."""

    OTHER = 0  # Something of this process, or nothing: the task is about to run.
    LOCAL = 1  # Something that other tasks of the attempt do.
    STEPS = 2


#: The code that waits in local primitives, by module and qualified name. It awaits a bare future, and its frame says what for.
_LOCAL: Final = frozenset({
    ("asyncio.locks", "Event.wait"), ("asyncio.locks", "Lock.acquire"), ("asyncio.locks", "Condition.wait"),
    ("asyncio.locks", "Semaphore.acquire"), ("asyncio.queues", "Queue.get"), ("asyncio.queues", "Queue.put"),
    ("anyio._backends._asyncio", "TaskGroup.start"), ("anyio._backends._asyncio", "Lock.acquire"),
    ("anyio._backends._asyncio", "Semaphore.acquire"),
})  # fmt: skip
_GROUPS: Final = frozenset({
    ("asyncio.taskgroups", "TaskGroup.__aexit__"), ("anyio._backends._asyncio", "TaskGroup.__aexit__"),
})  # fmt: skip
# asyncio.wait and, before Python 3.12, wait_for await a bare future; their frames say which futures they wait for.
_WAIT: Final = ("asyncio.tasks", "_wait")
_SHIELD: Final = ("asyncio.tasks", "shield.<locals>._outer_done_callback")
_SLEEP: Final = ("asyncio.tasks", "sleep")
#: asyncio.as_completed waits for a queue that its futures fill. From Python 3.13 on it says which futures those are.
_WAIT_FOR_ONE: Final = "_wait_for_one"
#: Iterators of the interpreter that show what they await only to the garbage collector.
_OPAQUE: Final = frozenset({"async_generator_asend", "async_generator_athrow", "anext_awaitable", "coroutine_wrapper"})
_LIBRARIES: Final = ("asyncio.", "anyio.")
_CHAIN_MAX: Final = 10_000


def waits_of(tasks: Collection[asyncio.Task[Any]], owner: object, timed: Collection[asyncio.Future[Any]] = ()) -> Waits:
    """What the tasks of an attempt, the `owner`, wait for. Not OTHER: none of them can move before the node completes a step
    (or the attempt is given up), or one of `timed` is done."""
    least = Waits.STEPS
    for task in tasks:
        least = min(least, _waits_of(task, tasks, owner, timed))
        if least is Waits.OTHER:
            break
    return least


def _waits_of(
    task: asyncio.Task[Any],
    tasks: Collection[asyncio.Task[Any]],
    owner: object,
    timed: Collection[asyncio.Future[Any]],
) -> Waits:
    waiter = getattr(task, "_fut_waiter", None)
    if waiter is None or waiter.done():
        return Waits.OTHER
    if _is_ours(waiter, tasks) or waiter in timed:
        return Waits.STEPS if type(waiter) is Wait or waiter in timed else Waits.LOCAL
    framed = [each for each in _chain(task.get_coro()) if isinstance(each, _FRAMED)]
    innermost = framed[-1] if framed else None
    if not isinstance(innermost, types.CoroutineType) or innermost.cr_frame is None:
        return Waits.OTHER
    frame = innermost.cr_frame
    where = (frame.f_globals.get("__name__"), innermost.cr_code.co_qualname)
    if where in _LOCAL:
        return Waits.LOCAL if all(_is_local(each, tasks, owner) for each in framed) else Waits.OTHER
    if where in _GROUPS:
        # Tasks of the attempt are inspected themselves. The function of a step may have started others.
        return Waits.LOCAL if all(child in tasks for child in frame.f_locals["self"]._tasks) else Waits.OTHER
    if where == _WAIT:
        return (
            Waits.LOCAL if all(each.done() or _is_ours(each, tasks) for each in frame.f_locals["fs"]) else Waits.OTHER
        )
    if where == _SLEEP and frame.f_locals["delay"] >= FOREVER_S:
        return Waits.LOCAL  # anyio.sleep_forever
    return Waits.OTHER


def _is_local(framed: Any, tasks: Collection[asyncio.Task[Any]], owner: object) -> bool:
    """Whether a coroutine around a primitive, or of one, does not say that something else moves that."""
    if not isinstance(framed, types.CoroutineType) or framed.cr_frame is None:
        return True
    if not str(framed.cr_frame.f_globals.get("__name__")).startswith(_LIBRARIES):
        return True
    names = framed.cr_frame.f_locals
    if not framed.__name__.endswith(_WAIT_FOR_ONE):
        return primitives.is_local(names.get("self"), owner, tasks)
    todo = getattr(names.get("self"), "_todo", None)
    return todo is not None and all(each.done() or _is_ours(each, tasks) for each in todo)


def _is_ours(future: Any, tasks: Collection[asyncio.Task[Any]]) -> bool:
    """Whether only steps and tasks of the attempt can complete this future, as far as can be seen."""
    if isinstance(future, Wait):
        return not future.never
    if isinstance(future, asyncio.Task):
        return future in tasks
    children = getattr(future, "_children", None)  # set by gather
    if isinstance(children, list):
        return all(child.done() or _is_ours(child, tasks) for child in children)
    inner = _shielded(future)
    return inner is not None and _is_ours(inner, tasks)


def _shielded(future: Any) -> Any:
    """The future inside asyncio.shield, if this one is its result. Only a callback says so."""
    for callback, _ in getattr(future, "_callbacks", None) or ():
        code = getattr(callback, "__code__", None)
        if code is not None and (callback.__module__, code.co_qualname) == _SHIELD and "inner" in code.co_freevars:
            return callback.__closure__[code.co_freevars.index("inner")].cell_contents
    return None


_FRAMED: Final = (types.CoroutineType, types.GeneratorType, types.AsyncGeneratorType)


def _chain(awaitable: Any) -> list[Any]:
    """The coroutines and generators between a task and the future that it awaits, outermost first."""
    found: list[Any] = []
    while awaitable is not None and len(found) < _CHAIN_MAX:
        found.append(awaitable)
        if isinstance(awaitable, types.CoroutineType):
            awaitable = awaitable.cr_await
        elif isinstance(awaitable, types.GeneratorType):
            awaitable = awaitable.gi_yieldfrom
        elif isinstance(awaitable, types.AsyncGeneratorType):
            awaitable = awaitable.ag_await
        elif type(awaitable).__name__ in _OPAQUE:
            awaitable = next((each for each in gc.get_referents(awaitable) if _is_link(each)), None)
        else:
            awaitable = getattr(awaitable, "_iterator", None)  # an operation that was made a task
    return found


def _is_link(each: Any) -> bool:
    return isinstance(each, _FRAMED) or type(each).__name__ in _OPAQUE
