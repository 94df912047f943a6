"""Tools of agents whose body is handler code: it may call, sleep and wait, where a step may not."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Final, ParamSpec, TypeVar

from holdfast.sdk.errors import BadDefinition, MisusedContext
from holdfast.sdk.here import current_context
from holdfast.sdk.run import running_step

P = ParamSpec("P")
R = TypeVar("R")

_MARK: Final = "__holdfast_durable_tool__"


def durable_tool(function: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, Coroutine[Any, Any, R]]:
    """Make an async function a tool whose body is handler code instead of one step::

        @agent.tool_plain
        @durable_tool
        async def book(city: str) -> str:
            ctx = current_context()
            approval = ctx.awakeable(bool)
            await ctx.run("ask", mail_boss, approval.id)
            return await ctx.call(trips.book, city) if await approval.future else "refused"

    The integrations of agent frameworks run other tools as a step each. The steps of this one are in a named scope of
    their own. Everything outside its steps runs again in each attempt. Outside of handlers it is an ordinary function.
    """
    if not inspect.iscoroutinefunction(function):
        raise BadDefinition(f"a durable tool must be an async function: write `async def {function.__name__}(...)`")

    @functools.wraps(function)
    async def tool(*args: P.args, **kwargs: P.kwargs) -> R:
        context = current_context()
        if context is None:
            if running_step()[0] is not None:
                raise MisusedContext(
                    f"durable tool {function.__name__!r} was called inside a step, where it cannot have steps of its own"
                )
            return await function(*args, **kwargs)
        with context.scope(context._attempt.check_here().place(f"tool {function.__name__}")):
            return await function(*args, **kwargs)

    setattr(tool, _MARK, True)
    return tool


def is_durable_tool(function: object) -> bool:
    return getattr(function, _MARK, False) is True
