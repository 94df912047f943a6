"""Scopes: where step keys come from, under frameworks that copy context variables and make helper tasks."""

import asyncio
import contextvars
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from holdfast.sdk import AttemptEnded, Context, MisusedContext, Service, current_context
from holdfast.sdk.scopes import _by_task
from tests.sdk.fake_node import FakeNode


async def keys_of(code: Callable[[Context], Awaitable[Any]]) -> list[str]:
    """The keys of the journal after one attempt of this code, and the same after a replay of it."""
    service = Service("scopes")

    @service.handler
    async def handler(ctx: Context) -> None:
        await code(ctx)
        await ctx.run("last", str)

    node = FakeNode()
    node.crash_at = lambda frame: "after" if getattr(frame, "key", "") == "last" else None
    node.connect([service])
    invocation = node.invoke("scopes", "handler")
    async with asyncio.timeout(20):
        await node.crashed.wait()
    found = [key for _, key in invocation.journal()]
    node.crash_at = None
    node.connect([service])
    await node.result(invocation)
    assert [key for _, key in invocation.journal()] == found, "replay finds every step"
    return found[:-1]


async def test_keys_of_tasks_are_what_they_always_were() -> None:
    """Journals of earlier releases have these keys."""

    async def code(ctx: Context) -> None:
        await ctx.run("step", str)
        await ctx.run("step", str)
        await ctx.run("a:b#c", str)
        await ctx.run("given", str, key="mine")

        async def child() -> None:
            await ctx.run("step", str)
            await asyncio.create_task(grandchild())

        async def grandchild() -> None:
            await ctx.run("step", str)
            await ctx.run("given", str, key="mine too")

        await asyncio.gather(child(), child_of_another_context())
        async with asyncio.TaskGroup() as group:
            group.create_task(ctx.run("op", str))

    async def child_of_another_context() -> None:
        ctx = current_context()
        assert ctx is not None
        await asyncio.get_running_loop().create_task(once(ctx), context=contextvars.copy_context())

    async def once(ctx: Context) -> None:
        await ctx.run("step", str)

    assert sorted(await keys_of(code)) == sorted(
        ["step", "step#1", ":a:b##c", "=mine", "1:step", "1.1:step", "=mine too", "2.1:step", "op"]
    )


async def test_copied_context_variables_do_not_move_a_scope() -> None:
    """As Pydantic AI does it: each variable that a helper task changed is set in the task that waits for it."""

    async def code(ctx: Context) -> None:
        await ctx.run("before", str)
        found: list[contextvars.Context] = []

        async def helper() -> None:
            found.append(contextvars.copy_context())

        await asyncio.create_task(helper())
        for variable, value in found[0].items():
            variable.set(value)
        await ctx.run("inside", str)
        await asyncio.create_task(nested(ctx))

    async def nested(ctx: Context) -> None:
        await ctx.run("nested", str)

    assert await keys_of(code) == ["before", "inside", "2:nested"]


async def test_a_copied_variable_does_not_make_the_function_of_a_step_part_of_the_handler() -> None:
    async def code(ctx: Context) -> None:
        of_handler = contextvars.copy_context()

        async def function() -> bool:
            for variable, value in of_handler.items():
                variable.set(value)
            return current_context() is None

        assert await ctx.run("step", function)

    assert await keys_of(code) == ["step"]


async def test_current_context_is_found_where_a_context_works_and_nowhere_else() -> None:
    seen: dict[str, bool] = {}

    async def code(ctx: Context) -> None:
        seen["handler"] = current_context() is ctx

        async def child() -> None:
            seen["task"] = current_context() is ctx

        async def function() -> None:
            seen["step"] = current_context() is None
            await asyncio.create_task(in_step())

        async def in_step() -> None:
            seen["task of a step"] = current_context() is None

        def in_thread() -> None:
            seen["thread"] = current_context() is None

        await asyncio.create_task(child())
        await ctx.run("async", function)
        await ctx.run("sync", in_thread)
        await asyncio.to_thread(in_thread)
        called = asyncio.Event()

        def callback() -> None:
            seen["callback"] = current_context() is ctx
            called.set()

        asyncio.get_running_loop().call_soon(callback)
        await called.wait()
        seen["after a step"] = current_context() is ctx

    assert current_context() is None
    await keys_of(code)
    assert seen == dict.fromkeys(
        ["handler", "task", "step", "task of a step", "thread", "callback", "after a step"], True
    )


async def test_current_context_does_not_let_code_go_on_after_its_attempt() -> None:
    ended: list[bool] = []
    service = Service("scopes")

    @service.handler
    async def handler(ctx: Context) -> None:
        try:
            await ctx.sleep(days=1)
        finally:
            try:
                current_context()
            except AttemptEnded:
                ended.append(True)

    node = FakeNode()
    node.connect([service], suspend_after=0.02)
    invocation = node.invoke("scopes", "handler")
    async with asyncio.timeout(30):
        await invocation.suspended.wait()
        while not ended:
            await asyncio.sleep(0.01)


async def test_scopes_leave_nothing_behind() -> None:
    async def code(ctx: Context) -> None:
        with ctx.scope("name"):
            await asyncio.gather(ctx.run("a", str), asyncio.create_task(asyncio.sleep(0)))

    before = set(_by_task)
    await keys_of(code)
    for _ in range(10):
        await asyncio.sleep(0)

    assert set(_by_task) <= before


# -- named scopes


async def test_steps_of_a_named_scope_have_keys_under_its_name_whatever_tasks_lie_between() -> None:
    async def tool(ctx: Context) -> None:
        with ctx.scope("agent/1/call_7"):
            await ctx.run("look", str)
            await ctx.run("look", str)
            await ctx.run("look", str, key="mine")
            await asyncio.gather(ctx.run("op", str), in_task(ctx))

    async def in_task(ctx: Context) -> None:
        await ctx.run("look", str)
        await asyncio.create_task(deeper(ctx))

    async def deeper(ctx: Context) -> None:
        async with ctx.scope("inner"):
            await ctx.run("look", str)

    async def wrapped(ctx: Context) -> None:
        async def helper() -> None:
            await asyncio.create_task(tool(ctx))

        await asyncio.create_task(helper())

    expected = [
        "@agent/1/call_7:look", "@agent/1/call_7:look#1", "@agent/1/call_7:#=mine", "@agent/1/call_7:op",
        "@agent/1/call_7>2:look", "@agent/1/call_7@inner:look",
    ]  # fmt: skip
    assert sorted(await keys_of(tool)) == sorted(expected)
    assert sorted(await keys_of(wrapped)) == sorted(expected)


async def test_the_second_use_of_a_name_in_one_scope_is_an_error() -> None:
    async def code(ctx: Context) -> None:
        with ctx.scope("a"):
            with ctx.scope("a"):  # Not the same: it is in another scope.
                await ctx.run("step", str)
            with pytest.raises(MisusedContext, match="scope 'a' is already in use in scope 'a'"):
                ctx.scope("a").__enter__()
            await ctx.run("step", str, key="k")
            with pytest.raises(MisusedContext, match="key 'k' is already in use in scope 'a'"):
                ctx.run("step", str, key="k")
        with pytest.raises(MisusedContext, match="scope 'a' is already in use in this invocation"):
            ctx.scope("a").__enter__()
        await ctx.run("step", str, key="k")

    assert await keys_of(code) == ["@a@a:step", "@a:#=k", "=k"]


async def test_names_of_scopes_never_make_two_steps_one() -> None:
    names = ["a@b", "a%40b", "a:x", "a>1", "a~b", "1.1", "ü", "a#=b"]

    async def code(ctx: Context) -> None:
        for name in names:
            with ctx.scope(name):
                await ctx.run("#=k", str)
                await ctx.run("step", str, key="k")
        with ctx.scope("a"):
            with ctx.scope("b"):
                await ctx.run("#=k", str)
            await asyncio.create_task(once(ctx))

    async def once(ctx: Context) -> None:
        await ctx.run("#=k", str)

    found = await keys_of(code)
    assert len(set(found)) == len(found) == 2 * len(names) + 2


async def test_long_names_are_cut_and_stay_apart() -> None:
    async def code(ctx: Context) -> None:
        for last in "xy":
            with ctx.scope("agent/" + "n" * 700 + last):
                await ctx.run("s" * 128, str)
                await ctx.run("step", str, key="k" * 511)
                with ctx.scope("ü" * 300):
                    await asyncio.create_task(once(ctx))

    async def once(ctx: Context) -> None:
        await ctx.run("#" * 128, str)
        await ctx.run("#" * 128, str)

    found = await keys_of(code)
    assert len(set(found)) == len(found) == 8
    assert all(len(key.encode()) <= 512 for key in found)
    assert found[0].startswith("@agent/nnnn")


async def test_a_scope_ends_with_its_block() -> None:
    async def code(ctx: Context) -> None:
        with pytest.raises(RuntimeError), ctx.scope("a"):
            raise RuntimeError
        await ctx.run("root", str)
        scope = ctx.scope("b")
        with scope:
            task = asyncio.create_task(late(ctx))
        with pytest.raises(MisusedContext, match="entered before"):
            scope.__enter__()
        await task

    async def late(ctx: Context) -> None:
        await ctx.run("late", str)

    assert await keys_of(code) == ["root", "@b>1:late"]


async def test_scopes_work_in_tasks_that_start_eagerly() -> None:
    if not hasattr(asyncio, "eager_task_factory"):
        pytest.skip("tasks start eagerly from Python 3.12 on")

    async def code(ctx: Context) -> None:
        loop = asyncio.get_running_loop()

        async def child() -> None:
            with ctx.scope("a"):
                await ctx.run("one", str)
                await ctx.run("two", str)
            await ctx.run("out", str)

        await asyncio.Task(child(), loop=loop)  # Past the factory, so it belongs to the scope of its creator.
        await loop.create_task(child_two(ctx))

    async def child_two(ctx: Context) -> None:
        await ctx.run("next", str)

    asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)
    assert await keys_of(code) == ["@a:one", "@a:two", "out", "1:next"]


@pytest.mark.parametrize("between", ["step", "sleep", "nothing"])
async def test_an_abandoned_generator_with_a_scope_gives_the_same_keys_in_replay(between: str) -> None:
    """The loop closes it in a task of its own, which starts earlier or later in relation to the steps behind it."""
    service = Service("generators")

    @service.handler
    async def handler(ctx: Context) -> str:
        async def numbers() -> AsyncIterator[int]:
            with ctx.scope("numbers"):
                for number in range(2):
                    await ctx.run("number", str)
                    yield number

        async def branch() -> None:
            await ctx.run("branch", str)

        async for _ in numbers():
            break
        if between == "step":
            await ctx.run("step", str)
        elif between == "sleep":
            await ctx.sleep(0.01)
        await asyncio.gather(branch(), branch())
        return await ctx.awakeable(str).future

    node = FakeNode()
    node.connect([service], suspend_after=0.05)
    invocation = node.invoke("generators", "handler")
    async with asyncio.timeout(20):
        while [op for op, _ in invocation.journal()][-1:] != ["awakeable"] or invocation.status != "suspended":
            await asyncio.sleep(0.01)
    node.complete(invocation, len(invocation.steps) - 1, [0, b'"yes"'])

    assert await node.result(invocation) == b'"yes"'
    keys = [key for _, key in invocation.journal()]
    assert [key for key in keys if "branch" in key] == ["@numbers>1:branch", "@numbers>2:branch"]
    assert keys[-1] == "@numbers:awakeable"
