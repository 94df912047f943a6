"""Every operation of a context, live and in replay."""

import asyncio
import json
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from holdfast.sdk import (
    Context,
    ObjectContext,
    Service,
    ServiceRef,
    TerminalError,
    VirtualObject,
    Workflow,
    WorkflowContext,
)
from holdfast.sdk.ids import InvocationId, format_awakeable, parse_awakeable, workflow_id
from holdfast.sdk.journal import Op
from tests.sdk.crashing import in_every_attempt
from tests.sdk.fake_node import FakeNode


@dataclass
class Order:
    item: str
    amount: int = 1


def test_state_is_read_and_written_the_same_in_every_attempt() -> None:
    things = VirtualObject("things")

    @things.handler
    async def work(ctx: ObjectContext, name: str) -> list[Any]:
        before = await ctx.get("count", int)
        ctx.set("count", (before or 0) + 1)
        ctx.set("order", Order("book"))
        ctx.set("gone", 1)
        ctx.clear("gone")
        names = await ctx.keys()
        order = await ctx.get("order", Order)
        await ctx.run("pause", asyncio.sleep, 0)
        found = [before, await ctx.get("count", int), names, order, await ctx.get("gone"), ctx.key]
        ctx.clear_all()
        return [*found, await ctx.keys(), await ctx.get("count")]

    async def main(eager: bool) -> None:
        result, _ = await in_every_attempt(
            [things], lambda node: node.invoke("things", "work", b'"x"', key="k"), eager_state=eager
        )

        assert result == b'[null,1,["count","order"],{"item":"book","amount":1},null,"k",[],null]'

    asyncio.run(main(True))
    asyncio.run(main(False))


def test_calls_sends_and_awakeables_work_in_every_attempt() -> None:
    caller = Service("caller")
    counter = VirtualObject("counter")
    got: list[str] = []

    @counter.handler
    async def add(ctx: ObjectContext, amount: int) -> int:
        value = (await ctx.get("value", int) or 0) + amount
        ctx.set("value", value)
        return value

    @caller.handler
    async def note(ctx: Context, text: str) -> None:
        await ctx.run("note", got.append, text)

    @caller.handler
    async def fail(ctx: Context) -> None:
        raise TerminalError("no seats", code=409, kind="NoSeats")

    @caller.handler
    async def awaken(ctx: Context, awakeable: str) -> None:
        ctx.resolve_awakeable(awakeable, {"approved": True})

    @caller.handler
    async def refuse(ctx: Context, awakeable: str) -> None:
        ctx.reject_awakeable(awakeable, "no", code=403)

    @caller.handler
    async def main(ctx: Context) -> list[Any]:
        call = ctx.call(add, 5, key="a")
        sent = ctx.send(note, "hello", delay=timedelta(seconds=1))
        approval, denial = ctx.awakeable(), ctx.awakeable(bool)
        ctx.send("caller/awaken", approval.id)
        ctx.send(refuse, denial.id)
        total = await call
        try:
            await ctx.call(fail)
        except TerminalError as error:
            failure = [str(error), error.code, error.kind]
        try:
            await denial.future
        except TerminalError as error:
            denied = [str(error), error.code]
        by_name = await ctx.call("counter/add", 2, key="b")
        by_ref = await ctx.call(ServiceRef("counter").handler("add", int, int), 3, key="c")
        attached = await ctx.attach(call.invocation_id, int)
        return [total, failure, denied, by_name, by_ref, attached, await approval.future, sent.invocation_id[:4]]

    async def run() -> None:
        result, invocation = await in_every_attempt([caller, counter], lambda node: node.invoke("caller", "main"))

        assert result == (b'[5,["no seats",409,"NoSeats"],["no",403],2,3,5,{"approved":true},"inv_"]')
        assert [step.op for step in invocation.steps].count(Op.CALL) == 4

    asyncio.run(run())


def test_a_workflow_waits_for_promises_that_others_resolve() -> None:
    approval = Workflow("approval")

    @approval.main(name="main")
    async def approve(ctx: WorkflowContext, who: str) -> list[Any]:
        early = await ctx.promise("decision", str).peek()
        ctx.set("asked", who)
        decision = await ctx.promise("decision", str)
        try:
            await ctx.promise("veto")
        except TerminalError as error:
            veto = str(error)
        return [early, decision, veto, await ctx.promise("decision").peek()]

    @approval.handler
    async def decide(ctx: WorkflowContext, what: str) -> str | None:
        asked = await ctx.get("asked", str)
        await ctx.promise("decision", str).resolve(what)
        await ctx.promise("veto").reject("vetoed")
        try:
            await ctx.promise("decision").resolve("other")
        except TerminalError as error:
            assert error.code == 409
        return asked

    async def main() -> None:
        node = FakeNode()
        node.connect([approval])
        main = node.invoke("approval", "main", b'"ann"', key="k", id=workflow_id("approval", "k"))
        while len(main.steps) < 4:
            await asyncio.sleep(0.001)

        assert await node.call("approval", "decide", b'"yes"', key="k") == b'"ann"'
        assert await node.result(main) == b'[null,"yes","vetoed","yes"]'

    asyncio.run(main())


def test_time_randomness_and_ids_are_the_same_in_every_attempt() -> None:
    seen: list[tuple[datetime, float, float, uuid.UUID, uuid.UUID]] = []
    service = Service("deterministic")

    @service.handler
    async def draw(ctx: Context) -> None:
        async def branch() -> float:
            await ctx.sleep(0.01)
            return ctx.random.random()

        branches = await asyncio.gather(branch(), branch())
        assert branches[0] != branches[1]
        seen.append((ctx.now(), ctx.random.random(), branches[1], ctx.uuid(), ctx.uuid()))
        await ctx.run("crash here", lambda: None)

    async def main() -> None:
        node = FakeNode()
        node.crash_at = lambda frame: "before" if getattr(frame, "key", "") == "crash here" else None
        node.connect([service])
        invocation = node.invoke("deterministic", "draw")
        for _ in range(2):
            await node.crashed.wait()
            node.connect([service])
        await node.crashed.wait()
        node.crash_at = None
        node.connect([service])
        await node.result(invocation)

    asyncio.run(main())

    assert len(seen) == 4
    assert len(set(seen)) == 1
    assert abs((datetime.now(UTC) - seen[0][0]).total_seconds()) < 60
    assert seen[0][3].version == 4 and seen[0][3] != seen[0][4]


def test_keyword_arguments_go_to_the_function_of_a_step() -> None:
    service = Service("words")

    async def greet(greeting: str, *, name: str) -> str:
        return f"{greeting}, {name}!"

    def put(key: str, value: int) -> str:
        return f"{key}={value}"

    @service.handler
    async def handler(ctx: Context) -> list[str]:
        first = await ctx.run("greet", greet, "Hello", name="Ada")
        second = await ctx.run("put", put, "a", value=7)
        third = await ctx.run("put again", put, "a", 7, key="an explicit step key")
        return [first, second, third]

    async def main() -> None:
        node = FakeNode()
        node.connect([service])
        assert json.loads(await node.call("words", "handler")) == ["Hello, Ada!", "a=7", "a=7"]

    asyncio.run(main())


def test_an_input_with_a_default_may_be_left_out() -> None:
    service = Service("defaults")

    @service.handler
    async def add(ctx: Context, amount: int = 5) -> int:
        return amount

    @service.handler
    async def maybe(ctx: Context, order: Order | None = None) -> str:
        return "none" if order is None else order.item

    @service.handler
    async def calls(ctx: Context) -> list[Any]:
        return [await ctx.call("defaults/add"), await ctx.call("defaults/add", 7), await ctx.call("defaults/maybe")]

    async def main() -> None:
        node = FakeNode()
        node.connect([service])
        assert json.loads(await node.call("defaults", "calls")) == [5, 7, "none"]
        with pytest.raises(TerminalError, match="does not fit"):
            await node.call("defaults", "add", b'"seven"')

    asyncio.run(main())
    schema = add.manifest()["input"]["schema"]
    assert schema == {"type": "integer", "default": 5}
    assert maybe.manifest()["input"]["schema"]["default"] is None


def test_trace_headers_are_passed_on_with_calls_and_sends() -> None:
    service = Service("traced")

    @service.handler
    async def callee(ctx: Context) -> dict[str, str]:
        return ctx.headers

    @service.handler
    async def caller(ctx: Context) -> list[dict[str, str]]:
        ctx.send(callee)
        return [
            await ctx.call(callee),
            await ctx.call(callee, headers={"TraceParent": "mine", "x-other": "1"}),
        ]

    trace = {"traceparent": "00-1", "tracestate": "a=b", "baggage": "user=ada"}

    async def main() -> None:
        node = FakeNode()
        node.connect([service])
        result = await node.call("traced", "caller", headers={**trace, "authorization": "secret"})
        assert json.loads(result) == [
            trace,
            {"tracestate": "a=b", "baggage": "user=ada", "TraceParent": "mine", "x-other": "1"},
        ]
        sent = [each for each in node.invocations.values() if each.handler == "callee"]
        assert [each.headers for each in sent].count(trace) == 2

    asyncio.run(main())


def test_bytes_pass_as_they_are() -> None:
    blobs = Service("blobs")

    @blobs.handler
    async def echo(ctx: Context, data: bytes) -> bytes:
        return await ctx.run("echo", keep, data)

    def keep(data: bytes) -> bytes:
        return data

    async def main() -> None:
        node = FakeNode()
        node.connect([blobs])

        assert await node.call("blobs", "echo", b"\x00\xff") == b"\x00\xff"

    asyncio.run(main())


async def ids_of_awakeables(*, secrets: bool) -> tuple[InvocationId, list[list[str]], list[list[Any]]]:
    """(its id, the ids in each of two attempts, the arguments in the journal) of an invocation with two awakeables."""
    seen: list[list[str]] = []
    service = Service("approvals")

    @service.handler
    async def ask(ctx: Context) -> str:
        first, second = ctx.awakeable(), ctx.awakeable()
        seen.append([first.id, second.id])
        await ctx.run("handed out", lambda: None)
        await first.future
        return "done"

    node = FakeNode(secrets=secrets)
    node.connect([service])
    invocation = node.invoke("approvals", "ask")
    async with asyncio.timeout(30):
        while len(invocation.steps) < 4:
            await asyncio.sleep(0.001)
        await node.crash()
        node.connect([service])
        while len(seen) < 2:
            await asyncio.sleep(0.001)
    return invocation.id, seen, [step.argument for step in invocation.steps if step.op == Op.AWAKEABLE]


def test_the_id_of_an_awakeable_has_a_secret_that_later_attempts_find_in_the_journal() -> None:
    invocation, [before, after], arguments = asyncio.run(ids_of_awakeables(secrets=True))

    secrets = [parse_awakeable(text).secret for text in before]
    assert before == after and arguments == [[secret] for secret in secrets]
    assert len({*secrets}) == 2 and all(len(secret) == 8 for secret in secrets)
    assert [parse_awakeable(text)[:2] for text in before] == [(invocation, 1), (invocation, 2)]


def test_a_node_that_takes_no_secrets_gets_none() -> None:
    invocation, [before, after], arguments = asyncio.run(ids_of_awakeables(secrets=False))

    assert before == after == [format_awakeable(invocation, 1), format_awakeable(invocation, 2)]
    assert arguments == [[], []]
