"""Tools whose body is handler code."""

import asyncio

import pytest

from holdfast.sdk import BadDefinition, Context, MisusedContext, Service, current_context, durable_tool
from tests.sdk.fake_node import FakeNode


@durable_tool
async def book(city: str) -> str:
    """Book a hotel."""
    ctx = current_context()
    if ctx is None:
        return "outside"
    await ctx.sleep(0.01)
    return await ctx.run("book", str.upper, city)


async def test_the_steps_of_a_durable_tool_are_in_a_scope_of_its_own() -> None:
    service = Service("tools")

    @service.handler
    async def run(ctx: Context) -> list[str]:
        with ctx.scope("call/7"):
            found = [await book("rome"), *await asyncio.gather(book("oslo"), book("bonn"))]
        return [*found, await book("cork")]

    node = FakeNode()
    node.connect([service])
    invocation = node.invoke("tools", "run")
    assert await node.result(invocation) == b'["ROME","OSLO","BONN","CORK"]'
    assert {key for _, key in invocation.journal() if key.endswith(":book")} == {
        "@call/7@tool book:book", "@call/7@1%3Atool book:book", "@call/7@2%3Atool book:book", "@tool book:book",
    }  # fmt: skip


async def test_outside_of_handlers_a_durable_tool_is_an_ordinary_function() -> None:
    assert await book("rome") == "outside"
    assert book.__doc__ == "Book a hotel."


async def test_a_durable_tool_inside_a_step_is_a_mistake() -> None:
    caught: list[str] = []
    service = Service("tools")

    async def step() -> None:
        try:
            await book("rome")
        except MisusedContext as error:
            caught.append(str(error))

    @service.handler
    async def run(ctx: Context) -> None:
        await ctx.run("step", step)

    node = FakeNode()
    node.connect([service])
    await node.call("tools", "run")
    assert "durable tool 'book' was called inside a step" in caught[0]


def test_a_durable_tool_is_async() -> None:
    def sync() -> None: ...

    with pytest.raises(BadDefinition, match="must be an async function"):
        durable_tool(sync)  # type: ignore[arg-type]
