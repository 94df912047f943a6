"""Whether the tasks of an attempt wait for steps only, or also for something of this process.

An attempt may be dropped from memory when only the completion of a step could move it. asyncio does not say what a task
waits for, so this inspects the future that a task awaits, and the coroutines in between. Everything unrecognised counts
as something of this process. The attempt then stays in memory, which costs memory and nothing else. Plain timers are
not covered here: an attempt knows the timers of its code (`timers`).
"""

from __future__ import annotations

import asyncio
import inspect
import types
from collections.abc import Collection
from typing import Any, Final


class Wait(asyncio.Future[None]):
    """A future that only a frame of the node completes. `never`: not even that, because the step was abandoned."""

    never = False


_TASK_GROUP: Final = asyncio.TaskGroup.__aexit__.__code__
# asyncio.wait and, before Python 3.12, wait_for await a bare future; their frames say which futures they wait for.
_WAIT: Final = asyncio.tasks._wait.__code__  # type: ignore[attr-defined]


def waits_only_for_steps(tasks: Collection[asyncio.Task[Any]], timed: Collection[asyncio.Future[Any]] = ()) -> bool:
    """Whether no task can move before the node completes a step (or the attempt is given up), or one of `timed` is done."""
    return all(_is_durable(task, tasks, timed) for task in tasks)


def _is_durable(
    task: asyncio.Task[Any], tasks: Collection[asyncio.Task[Any]], timed: Collection[asyncio.Future[Any]]
) -> bool:
    waiter = getattr(task, "_fut_waiter", None)
    if waiter is None or waiter.done():
        return False
    if _is_ours(waiter, tasks) or waiter in timed:
        return True
    chain = _chain(task.get_coro())
    innermost = next((each for each in reversed(chain) if isinstance(each, types.CoroutineType)), None)
    if innermost is None:
        return False
    if innermost.cr_code is _TASK_GROUP:
        return True  # Its children are tasks of the attempt and are inspected themselves.
    if innermost.cr_code is _WAIT and innermost.cr_frame is not None:
        return all(each.done() or _is_ours(each, tasks) for each in innermost.cr_frame.f_locals["fs"])
    return False


def _is_ours(future: Any, tasks: Collection[asyncio.Task[Any]]) -> bool:
    """Whether only steps can complete this future, as far as can be seen."""
    if isinstance(future, Wait):
        return not future.never
    if isinstance(future, asyncio.Task):
        return future in tasks
    children = getattr(future, "_children", None)  # set by gather
    if isinstance(children, list):
        return all(child.done() or _is_ours(child, tasks) for child in children)
    return False


def _chain(awaitable: Any) -> list[Any]:
    """The coroutines between a task and the future that it awaits, outermost first."""
    found = []
    while awaitable is not None:
        found.append(awaitable)
        if inspect.iscoroutine(awaitable):
            awaitable = awaitable.cr_await
        elif inspect.isgenerator(awaitable):
            awaitable = awaitable.gi_yieldfrom
        else:
            awaitable = getattr(awaitable, "_iterator", None)  # an operation that was made a task
    return found
