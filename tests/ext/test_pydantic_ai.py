"""Agents of Pydantic AI in handlers, with the framework's own scripted models."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from pydantic_ai import Agent, ModelResponse, ModelRetry, RunContext, TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.messages import ModelMessage
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.models.test import TestModel

from holdfast.ext.pydantic_ai import HoldfastDurability, inbox
from holdfast.sdk import Context, RetryPolicy, Service, TerminalError, current_context, durable_tool
from holdfast.sdk.journal import Decided, Op
from tests.sdk.fake_node import FakeNode, Invocation
from tests.sdk.until import until

Turn = list[ToolCallPart] | str


class Script:
    """A model that follows a script, and counts its requests."""

    def __init__(self, *turns: Turn) -> None:
        self.turns = turns
        self.requests = 0
        self.seen: list[list[ModelMessage]] = []

    def __call__(self, messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        self.requests += 1
        self.seen.append(messages)
        turn = self.turns[sum(isinstance(each, ModelResponse) for each in messages)]
        return ModelResponse(parts=[TextPart(turn)] if isinstance(turn, str) else list(turn))

    def agent(self, **options: Any) -> Agent[None, str]:
        durability = options.pop("durability", None) or HoldfastDurability()
        return Agent(FunctionModel(self), name="scout", capabilities=[durability], **options)


def call(name: str, id: str, **args: Any) -> ToolCallPart:
    return ToolCallPart(name, args, id)


def service_of(code: Callable[[Context], Any]) -> Service:
    service = Service("agents")

    @service.handler
    async def ask(ctx: Context) -> str:
        found: str = await code(ctx)
        return found

    return service


async def run(code: Callable[[Context], Any], **options: Any) -> tuple[str, Invocation]:
    node = FakeNode(**options)
    node.connect([service_of(code)])
    invocation = node.invoke("agents", "ask")
    return json.loads(await node.result(invocation, seconds=20)), invocation


async def crash_and_recover(
    code: Callable[[Context], Any], when: Callable[[list[str]], bool]
) -> tuple[str, list[str], Invocation]:
    """Run it, lose the process when the journal is as `when` says, and run it again. Returns the keys of the journal then."""
    node = FakeNode()
    invocation: Invocation | None = None

    def crash_at(frame: Any) -> str | None:
        assert invocation is not None
        return "after" if when([*(key for _, key in invocation.journal()), getattr(frame, "key", "")]) else None

    node.connect([service_of(code)])
    invocation = node.invoke("agents", "ask")
    node.crash_at = crash_at
    async with asyncio.timeout(20):
        await node.crashed.wait()
    journal = [key for _, key in invocation.journal()]
    node.crash_at = None
    node.connect([service_of(code)])
    return json.loads(await node.result(invocation, seconds=20)), journal, invocation


async def test_requests_and_tools_are_steps_with_keys_of_run_turn_and_call() -> None:
    script = Script([call("look", "c1", city="Rome")], "sunny")
    agent = script.agent()
    looked: list[str] = []

    @agent.tool_plain
    async def look(city: str) -> str:
        assert current_context() is None, "a tool is a step"
        looked.append(city)
        return f"sun in {city}"

    async def code(ctx: Context) -> str:
        await ctx.run("before", str)
        found = (await agent.run("weather?")).output
        await ctx.run("after", str)
        return found

    found, journal, invocation = await crash_and_recover(code, lambda keys: any("call" in key for key in keys[-1:]))
    assert found == "sunny"
    assert [key for _, key in invocation.journal()] == [
        "before", "=agent scout/1/scout__model.request", "@agent scout/1/c1:#=call",
        "=agent scout/2/scout__model.request", "after",
    ]  # fmt: skip
    assert journal == [key for _, key in invocation.journal()][:3]
    assert (script.requests, looked) == (2, ["Rome"])


async def test_outside_of_a_handler_nothing_changes() -> None:
    script = Script([call("look", "c1")], "done")
    agent = script.agent()

    @agent.tool
    async def look(ctx: RunContext[None]) -> str:
        return "seen"

    assert (await agent.run("?")).output == "done"


async def test_an_agent_in_a_thread_of_a_handler_runs_without_steps_and_a_warning_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    script = Script("done", "done")
    agent = script.agent()

    def in_a_thread() -> str:
        return agent.run_sync("go").output

    async def thread(ctx: Context) -> str:
        return await asyncio.to_thread(in_a_thread)

    async def step(ctx: Context) -> str:
        return await ctx.run("agent", in_a_thread)

    found, invocation = await run(step)
    assert (found, invocation.journal()) == ("done", [("run", "agent")])
    assert "in a thread of a handler" not in caplog.text, "it is a step"
    found, invocation = await run(thread)
    assert (found, invocation.journal()) == ("done", [])
    assert "agent 'scout' runs in a thread of a handler" in caplog.text
    assert "test_pydantic_ai.py:" in caplog.text


async def test_tools_of_one_turn_run_at_once_and_finished_ones_once() -> None:
    script = Script([call("look", f"c{n}", n=n) for n in range(4)], "done")
    agent = script.agent()
    began: list[int] = []
    first = True
    gate = asyncio.Event()

    @agent.tool_plain
    async def look(n: int) -> int:
        began.append(n)
        if len(began) == 4:
            gate.set()
        if first:
            await gate.wait()  # Only if all four run at once does one of them end.
            if n >= 2:
                await asyncio.sleep(3600)
        return n

    def two_are_done(keys: list[str]) -> bool:
        nonlocal first
        if sum(key.endswith("call") for key in set(keys)) == 2:
            first = False
        return not first

    async def code(ctx: Context) -> str:
        return (await agent.run("?")).output

    found, journal, _ = await crash_and_recover(code, two_are_done)
    assert found == "done"
    assert sorted(began) == [0, 1, 2, 2, 3, 3]
    assert script.requests == 2
    assert sorted(journal[1:]) == ["@agent scout/1/c0:#=call", "@agent scout/1/c1:#=call"]


async def test_the_same_call_id_in_two_turns_and_in_two_runs_are_different_steps() -> None:
    script = Script([call("look", "c1", n=1)], [call("look", "c1", n=2), call("look", "c2", n=3)], "done")
    agent = script.agent()
    looked: list[int] = []

    @agent.tool_plain
    def look(n: int) -> int:
        looked.append(n)
        return n

    async def code(ctx: Context) -> str:
        results = [*await asyncio.gather(agent.run("a"), agent.run("b")), await agent.run("c")]
        return " ".join(each.output for each in results)

    found, invocation = await run(code)
    assert found == "done done done"
    assert sorted(looked) == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    keys = [key for _, key in invocation.journal()]
    assert {"@1%3Aagent scout/1/c1:#=call", "@2%3Aagent scout/2/c1:#=call", "@agent scout/2/c1:#=call"} <= set(keys)


async def test_a_step_inside_agent_iter_keeps_its_key() -> None:
    agent = Script([call("look", "c1")], "done").agent()

    @agent.tool_plain
    async def look() -> str:
        return "seen"

    async def code(ctx: Context) -> str:
        async with agent.iter("?") as nodes:
            await ctx.run("inside", str)
            async for _ in nodes:
                await ctx.run("inside", str)
        await ctx.run("behind", str)
        assert nodes.result is not None
        return nodes.result.output

    _, invocation = await run(code)
    own = [key for _, key in invocation.journal() if "scout" not in key]
    assert own == ["inside", *(f"inside#{n}" for n in range(1, len(own) - 1)), "behind"]


async def test_a_tool_that_fails_three_times_is_reported_to_the_model_and_siblings_are_kept() -> None:
    script = Script([call("broken", "c1"), call("look", "c2")], "sorry")
    agent = script.agent()
    tries: list[int] = []
    looked: list[int] = []

    @agent.tool_plain
    async def broken() -> str:
        tries.append(1)
        raise RuntimeError("the provider is down")

    @agent.tool_plain
    async def look() -> str:
        looked.append(1)
        return "seen"

    async def code(ctx: Context) -> str:
        return (await agent.run("?")).output

    found, _ = await run(code)
    assert found == "sorry"
    assert (len(tries), len(looked)) == (3, 1)
    parts = script.seen[-1][-1].parts
    told = {part.tool_name: str(part.content) for part in parts if isinstance(part, ToolReturnPart)}
    assert told["look"] == "seen"
    assert "the provider is down" in told["broken"]


async def test_options_of_one_tool() -> None:
    script = Script([call("once", "c1"), call("inline", "c2")], "done")
    agent = script.agent()
    tries: list[str] = []

    @agent.tool_plain(metadata={"holdfast": {"retry": RetryPolicy(max_attempts=1)}})
    async def once() -> str:
        tries.append("once")
        raise RuntimeError

    @agent.tool_plain(metadata={"holdfast": False})
    async def inline() -> str:
        ctx = current_context()
        assert ctx is not None
        return await ctx.run("own step", lambda: "own")

    async def code(ctx: Context) -> str:
        return (await agent.run("?")).output

    _, invocation = await run(code)
    assert tries == ["once"]
    assert "@agent scout/1/c2:own step" in [key for _, key in invocation.journal()]


async def test_the_body_of_a_durable_tool_is_handler_code() -> None:
    script = Script([call("book", "c1", city="Rome"), call("book", "c2", city="Oslo")], "done")
    agent = script.agent()
    booked: list[str] = []

    @agent.tool_plain
    @durable_tool
    async def book(city: str) -> str:
        ctx = current_context()
        assert ctx is not None
        await ctx.sleep(0.01)
        await ctx.run("book", booked.append, city)
        helper = Script("nice").agent()
        return f"{city} {(await helper.run('?')).output}"

    async def code(ctx: Context) -> str:
        return (await agent.run("?")).output

    _, invocation = await run(code)
    assert sorted(booked) == ["Oslo", "Rome"]
    assert {
        "@agent scout/1/c1@tool book:sleep", "@agent scout/1/c1@tool book:book", "@agent scout/1/c2@tool book:book",
        "@agent scout/1/c1@tool book:#=agent scout/1/scout__model.request",
    } <= {key for _, key in invocation.journal()}  # fmt: skip


async def test_an_agent_that_waits_for_an_approval_is_suspended_and_acts_once() -> None:
    script = Script([call("pay", "c1", eur=5), call("pay", "c2", eur=900)], "done")
    paid: list[int] = []
    asked: list[str] = []

    async def approve(ctx: Context, tool_call: ToolCallPart) -> bool:
        answer = ctx.awakeable(bool)
        await ctx.run("ask", asked.append, tool_call.tool_call_id)
        return await answer.future

    agent = script.agent(durability=HoldfastDurability(approve=approve))

    @agent.tool_plain(requires_approval=True)
    async def pay(eur: int) -> str:
        paid.append(eur)
        return f"paid {eur}"

    async def code(ctx: Context) -> str:
        return (await agent.run("?")).output

    node = FakeNode()
    endpoint = node.connect([service_of(code)], suspend_after=0.05)
    invocation = node.invoke("agents", "ask")
    async with asyncio.timeout(20):
        await invocation.suspended.wait()
    assert not endpoint.attempts
    await node.crash()
    node.connect([service_of(code)], suspend_after=0.05)
    awakeables = [index for index, step in enumerate(invocation.steps) if step.key.endswith(":awakeable")]
    assert len(awakeables) == 2
    node.complete(invocation, awakeables[0], [0, b"true"])
    node.complete(invocation, awakeables[1], [0, b"false"])

    assert json.loads(await node.result(invocation)) == "done"
    assert (sorted(asked), paid, script.requests) == (["c1", "c2"], [5], 2)
    assert invocation.epoch >= 2


async def test_people_decide_about_calls_of_tools_in_the_inbox() -> None:
    calls = [call("pay", f"c{number}", eur=number) for number in range(1, 5)]
    script = Script([*calls], "done")
    paid: list[int] = []
    agent = script.agent(durability=HoldfastDurability(approve=inbox(assignee="finance", timeout=60)))

    @agent.tool_plain(requires_approval=True)
    async def pay(eur: int) -> str:
        paid.append(eur)
        return f"paid {eur}"

    async def code(ctx: Context) -> str:
        return (await agent.run("?")).output

    node = FakeNode()
    node.connect([service_of(code)])
    invocation = node.invoke("agents", "ask")

    def asked() -> dict[int, int]:
        """The steps of approvals that wait, by the number of their call."""
        return {
            json.loads(step.argument[1])["eur"]: index
            for index, step in enumerate(invocation.steps)
            if step.op == Op.APPROVAL and step.outcome is None
        }

    await until(lambda: len(asked()) == 4)
    waiting = asked()
    assert invocation.steps[waiting[1]].argument[0] == "Call the tool pay?"
    approved = Decided("approve", by="Ann", at_ms=1)
    node.decide(invocation, waiting[1], approved)
    node.decide(invocation, waiting[2], approved._replace(payload=b'{"eur": 20}'))
    node.decide(invocation, waiting[3], Decided("reject", by="Ann", comment="too dear", at_ms=1))
    node.decide(invocation, waiting[4], Decided(None, at_ms=1))

    assert json.loads(await node.result(invocation)) == "done"
    assert sorted(paid) == [1, 20]
    answers = {
        part.tool_call_id: part.content for part in script.seen[-1][-1].parts if isinstance(part, ToolReturnPart)
    }
    assert answers == {
        "c1": "paid 1", "c2": "paid 20", "c3": "too dear", "c4": "Nobody decided about the call in time.",
    }  # fmt: skip


async def test_a_cancellation_ends_the_run() -> None:
    script = Script([call("wait", "c1")], "went on")
    agent = script.agent()

    @agent.tool_plain
    @durable_tool
    async def wait() -> str:
        ctx = current_context()
        assert ctx is not None
        await ctx.sleep(days=1)
        return "waited"

    async def code(ctx: Context) -> str:
        return (await agent.run("?")).output

    node = FakeNode()
    node.connect([service_of(code)])
    invocation = node.invoke("agents", "ask")
    await until(lambda: any(key.endswith("sleep") for _, key in invocation.journal()))
    node.cancel(invocation)
    with pytest.raises(TerminalError, match="cancelled"):
        await node.result(invocation)
    assert script.requests == 1


@pytest.mark.parametrize(("status", "tries"), [(400, 1), (429, 2), (503, 2)])
async def test_errors_of_the_provider_are_retried_if_another_try_may_help(status: int, tries: int) -> None:
    requests: list[int] = []

    def model(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        requests.append(1)
        if len(requests) == 1:
            raise ModelHTTPError(status, "scripted")
        return ModelResponse(parts=[TextPart("done")])

    agent = Agent(FunctionModel(model), name="scout", capabilities=[HoldfastDurability()])

    async def code(ctx: Context) -> str:
        return (await agent.run("?")).output

    if tries == 1:
        with pytest.raises(TerminalError, match="400"):
            await run(code)
    else:
        assert (await run(code))[0] == "done"
    assert len(requests) == tries


async def test_a_model_of_tests_and_a_retry_that_the_tool_asks_for() -> None:
    script = Script([call("look", "c1", n=1)], [call("look", "c1", n=2)], "done")
    agent = script.agent()

    @agent.tool_plain(retries=2)
    async def look(n: int) -> int:
        if n == 1:
            raise ModelRetry("try two")
        return n

    plain = Agent(TestModel(), name="plain", capabilities=[HoldfastDurability()])

    async def code(ctx: Context) -> str:
        assert (await plain.run("?")).output == "success (no tool calls)"
        return (await agent.run("?")).output

    assert (await run(code))[0] == "done"
    assert "try two" in [getattr(part, "content", "") for part in script.seen[1][-1].parts]


async def test_a_failure_of_the_run_is_not_tried_again_because_it_would_replay() -> None:
    script = Script([call("look", "c1"), call("look", "c1")])
    agent = script.agent()

    @agent.tool_plain
    async def look() -> str:
        return "seen"

    async def code(ctx: Context) -> str:
        return (await agent.run("?")).output

    with pytest.raises(TerminalError, match="unique `tool_call_id`") as failed:
        await run(code)
    assert failed.value.kind == "UnexpectedModelBehavior"
    assert script.requests == 1
