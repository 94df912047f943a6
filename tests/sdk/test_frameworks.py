"""What agent frameworks do with errors: they replace them, or turn them into text for the model."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from holdfast.sdk import BadPayload, Context, InvocationCancelled, Service, TerminalError
from holdfast.sdk.errors import find_terminal, never_works
from tests.sdk import framework
from tests.sdk.fake_node import FakeNode, Invocation
from tests.sdk.until import until


async def raised(by: Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]], error: Exception) -> Exception:
    async def tool() -> None:
        raise error

    try:
        await by(tool)
    except Exception as found:
        return found
    raise AssertionError


@pytest.mark.parametrize("by", [framework.with_cause, framework.with_context, framework.unchanged])
async def test_a_terminal_error_behind_the_error_of_a_framework_is_found(by: Any) -> None:
    terminal = TerminalError("no seats", code=409)

    found = await raised(by, terminal)

    assert find_terminal(found) is terminal
    assert find_terminal(ExceptionGroup("tools", [found])) is terminal
    assert find_terminal(ExceptionGroup("tools", [found, ValueError()])) is None
    assert not never_works(found)
    assert never_works(await raised(by, BadPayload("not JSON")))


async def test_what_the_code_of_the_user_makes_of_an_error_is_retried() -> None:
    async def by_user(tool: Callable[[], Awaitable[Any]]) -> None:
        try:
            await tool()
        except TerminalError:
            str(None.no_such_attribute)  # type: ignore[attr-defined]

    assert find_terminal(await raised(by_user, TerminalError("no"))) is None

    async def of_framework(tool: Callable[[], Awaitable[Any]]) -> None:
        try:
            await framework.with_cause(tool)
        except framework.FrameworkError as error:
            raise ValueError("mine") from error

    assert find_terminal(await raised(of_framework, TerminalError("no"))) is None


async def test_errors_that_cause_each_other_are_no_endless_search() -> None:
    first, second = await raised(framework.unchanged, ValueError()), await raised(framework.unchanged, ValueError())
    first.__cause__, second.__cause__ = second, first

    assert find_terminal(first) is None


async def test_an_invocation_fails_with_the_terminal_error_behind_that_of_a_framework() -> None:
    service = Service("agents")

    @service.handler
    async def ask(ctx: Context) -> None:
        async def tool() -> None:
            raise TerminalError("no seats", code=409)

        await framework.with_cause(tool)

    @service.handler
    async def in_a_step(ctx: Context) -> None:
        async def tool() -> None:
            raise TerminalError("no seats", code=410)

        await ctx.run("framework", framework.with_cause, tool)

    node = FakeNode()
    node.connect([service])
    for name, code in (("ask", 409), ("in_a_step", 410)):
        with pytest.raises(TerminalError) as failed:
            await node.call("agents", name)
        assert failed.value.code == code


def service_of(code: Callable[[Context], Awaitable[str]]) -> Service:
    service = Service("agents")

    @service.handler
    async def ask(ctx: Context) -> str:
        return await code(ctx)

    return service


async def cancelled(code: Callable[[Context], Awaitable[str]], waits: int = 1) -> tuple[FakeNode, Invocation]:
    """An invocation that is cancelled while it waits for its first step."""
    node = FakeNode()
    node.connect([service_of(code)])
    invocation = node.invoke("agents", "ask")
    await until(lambda: len(invocation.steps) > waits)
    node.cancel(invocation)
    return node, invocation


@pytest.mark.parametrize("then", ["run", "sleep", "awakeable"])
async def test_a_cancellation_that_a_framework_swallowed_is_raised_again_at_the_next_step(then: str) -> None:
    ran: list[str] = []
    told: list[str] = []

    async def code(ctx: Context) -> str:
        async def tool() -> None:
            await ctx.sleep(days=100)

        told.append(await framework.with_text(tool))
        ctx.send("agents/other")  # Does not wait, so it never notices a cancellation.
        match then:
            case "run":
                await ctx.run("model", ran.append, "model")
            case "sleep":
                await ctx.sleep(days=1)
            case "awakeable":
                await ctx.awakeable().future
        return "went on"

    node, invocation = await cancelled(code)
    with pytest.raises(InvocationCancelled):
        await node.result(invocation)
    assert told == ["An error occurred: the invocation was cancelled"]
    assert ran == []


async def test_a_framework_that_swallows_it_each_time_gets_nowhere_and_replays() -> None:
    ran: list[str] = []

    async def code(ctx: Context) -> str:
        async def waits() -> None:
            await ctx.sleep(days=100)

        async def runs() -> None:
            await ctx.run("tool", ran.append, "tool")

        texts = [await framework.with_text(waits), await framework.with_text(runs), await framework.with_text(runs)]
        assert all("cancelled" in text for text in texts)
        await ctx.run("model", ran.append, "model")
        return "went on"

    node, invocation = await cancelled(code)
    crashed: list[bool] = []

    def crash(frame: Any) -> str | None:
        if getattr(frame, "key", "") == "tool#1" and not crashed:
            crashed.append(True)
            return "after"
        return None

    node.crash_at = crash
    async with asyncio.timeout(20):
        await node.crashed.wait()
    node.connect([service_of(code)])
    with pytest.raises(InvocationCancelled):
        await node.result(invocation)
    assert ran == []


@pytest.mark.parametrize("by", ["itself", "with_cause", "unchanged"])
async def test_code_of_the_user_compensates_also_behind_a_framework(by: str) -> None:
    undone: list[str] = []

    async def code(ctx: Context) -> str:
        async def tool() -> None:
            try:
                await ctx.sleep(days=100)
            except InvocationCancelled:
                if by == "itself":
                    await ctx.run("undo", undone.append, "in the tool")
                    return
                raise

        try:
            await getattr(framework, "with_text" if by == "itself" else by)(tool)
        except Exception:
            await ctx.run("undo", undone.append, "in the handler")
            await ctx.sleep(0.01)
        await ctx.run("after", undone.append, "after")
        return "compensated"

    node, invocation = await cancelled(code)
    assert await node.result(invocation) == b'"compensated"'
    assert undone == ["in the tool" if by == "itself" else "in the handler", "after"]


async def test_a_failure_of_a_called_invocation_is_no_cancellation_of_ours() -> None:
    """The callee was cancelled: a framework may tell the model so."""
    service = Service("agents")

    @service.handler
    async def ask(ctx: Context) -> str:
        async def tool() -> None:
            await ctx.call(waits)

        text = await framework.with_text(tool)
        return await ctx.run("model", str, text)

    @service.handler
    async def waits(ctx: Context) -> None:
        await ctx.sleep(days=100)

    node = FakeNode()
    node.connect([service])
    invocation = node.invoke("agents", "ask")
    await until(lambda: any(each.handler == "waits" and len(each.steps) > 1 for each in node.invocations.values()))
    node.cancel(next(each for each in node.invocations.values() if each.handler == "waits"))
    assert b"An error occurred" in await node.result(invocation)
