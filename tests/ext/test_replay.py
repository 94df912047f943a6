"""Agents that lose their process at every frame come to the same end, with the same journal."""

import asyncio

import pytest
from pydantic_ai import Agent, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.exceptions import UserError
from pydantic_ai.messages import ModelMessage
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.models.test import TestModel
from pydantic_ai.toolsets import FunctionToolset

from holdfast.ext.pydantic_ai import HoldfastDurability
from holdfast.sdk import Context, Service, TerminalError, current_context, durable_tool
from tests.ext.test_pydantic_ai import Script, call, run
from tests.sdk.crashing import in_every_attempt
from tests.sdk.fake_node import FakeNode


async def approve(ctx: Context, tool_call: ToolCallPart) -> bool:
    await ctx.sleep(0.01)
    return await ctx.run("decide", bool, tool_call.args_as_dict()["n"])


def agent_of(script: FunctionModel | TestModel) -> Agent[None, str]:
    agent = Agent(script, name="scout", capabilities=[HoldfastDurability(approve=approve)])

    @agent.tool_plain
    async def quick(n: int) -> int:
        return n

    @agent.tool_plain
    def sync(n: int) -> int:
        return n

    @agent.tool_plain(requires_approval=True)
    async def careful(n: int) -> int:
        return n

    @agent.tool_plain
    @durable_tool
    async def long(n: int) -> int:
        ctx = current_context()
        assert ctx is not None
        await ctx.sleep(0.01)
        return await ctx.run("half", lambda: n // 2)

    return agent


async def test_parallel_runs_with_every_kind_of_tool() -> None:
    service = Service("agents")
    turns = [
        [call("quick", "c1", n=1), call("sync", "c2", n=2), call("careful", "c3", n=0), call("long", "c4", n=4)],
        [call("careful", "c1", n=1)],
    ]
    agent = agent_of(FunctionModel(Script(*turns, "done")))

    @service.handler
    async def ask(ctx: Context) -> list[str]:
        first, second = await asyncio.gather(agent.run("a"), agent.run("b"))
        async with agent.iter("c") as nodes:
            async for _ in nodes:
                await ctx.run("node", str)
        assert nodes.result is not None
        return [first.output, second.output, nodes.result.output]

    result, invocation = await in_every_attempt([service], lambda node: node.invoke("agents", "ask"))
    assert result == b'["done","done","done"]'
    keys = [key for _, key in invocation.journal()]
    assert "@agent scout/1/c4@tool long:half" in keys
    assert "@agent scout/1/approve c3:decide" in keys


async def test_a_streamed_run() -> None:
    service = Service("agents")
    agent = agent_of(TestModel(call_tools=["quick", "long"], custom_output_text="seen it all"))

    @service.handler
    async def ask(ctx: Context) -> str:
        async with agent.run_stream("?") as stream:
            return "".join([text async for text in stream.stream_text(delta=True)])

    result, _ = await in_every_attempt([service], lambda node: node.invoke("agents", "ask"))
    assert result == b'"seen it all"'


async def test_toolsets_and_models_of_one_run_are_refused_in_a_handler() -> None:
    agent = agent_of(FunctionModel(Script("done")))
    other = FunctionModel(Script("other"))

    async def with_toolset(ctx: Context) -> str:
        return (await agent.run("?", toolsets=[FunctionToolset()])).output

    async def with_model(ctx: Context) -> str:
        return (await agent.run("?", model=other)).output

    for code in (with_toolset, with_model):
        with pytest.raises(TerminalError) as failed:
            await run(code)
        assert failed.value.kind == UserError.__name__


async def test_a_result_of_a_tool_that_is_no_json_pauses_the_invocation_until_the_code_is_corrected() -> None:
    class Odd:
        pass

    service = Service("agents")
    agent = Agent(FunctionModel(Script([call("odd", "c1")], "done")), name="scout", capabilities=[HoldfastDurability()])

    @agent.tool_plain
    async def odd() -> Odd:
        return Odd()

    @service.handler
    async def ask(ctx: Context) -> str:
        return (await agent.run("?")).output

    node = FakeNode()
    node.connect([service])
    invocation = node.invoke("agents", "ask")
    async with asyncio.timeout(20):
        await invocation.paused.wait()
    assert "Odd" in invocation.errors[-1].message


async def test_a_model_that_a_run_selects_is_registered() -> None:
    def says(text: str) -> FunctionModel:
        def model(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
            return ModelResponse(parts=[TextPart(text)])

        return FunctionModel(model)

    second = says("second")
    agent = Agent(says("first"), name="scout", capabilities=[HoldfastDurability(models={"second": second})])

    async def code(ctx: Context) -> str:
        return (await agent.run("?")).output + " " + (await agent.run("?", model=second)).output

    assert (await run(code))[0] == "first second"
