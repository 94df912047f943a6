"""Every operation of a context, live and in replay."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from holdfast.sdk import (
    Context,
    InvocationCancelled,
    MisusedContext,
    ObjectContext,
    Service,
    ServiceRef,
    TerminalError,
    VirtualObject,
    Workflow,
    WorkflowContext,
    protocol,
)
from tests.sdk.fake_node import FakeNode, Invocation


@dataclass
class Order:
    item: str
    amount: int = 1


async def in_every_attempt(
    services: list[Any], begin: Callable[[FakeNode], Invocation], *, eager_state: bool = True
) -> tuple[bytes, Invocation]:
    """Run once without a crash; then once for every frame, crashing behind it. All results must be equal."""
    node = FakeNode(eager_state=eager_state)
    node.connect(services)
    invocation = begin(node)
    result = await node.result(invocation)
    frames = node.applied
    for at in range(2, frames):
        for when in ("before", "after"):
            again = FakeNode(eager_state=eager_state)
            seen = 0

            def crash_at(frame: protocol.Frame, at: int = at, when: str = when) -> str | None:
                nonlocal seen
                seen += 1
                return when if seen == at else None

            again.crash_at = crash_at
            again.connect(services)
            second = begin(again)
            while not second.done.is_set():
                if again.link is None:
                    again.connect(services)
                await asyncio.sleep(0.001)
            assert not second.errors, (at, when, second.errors)
            assert second.outcome == [0, result], (at, when)
    return result, invocation


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
        assert [step.op for step in invocation.steps].count(protocol.Op.CALL) == 4

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
        main = node.invoke("approval", "main", b'"ann"', key="k", id=protocol.workflow_id("approval", "k"))
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


def test_race_select_gather_and_timeout_decide_by_the_log() -> None:
    service = Service("combine")

    async def slow() -> str:
        await asyncio.sleep(0.005)
        return "slow"

    @service.handler
    async def combine(ctx: Context) -> list[Any]:
        async def two_steps() -> str:
            await ctx.sleep(0.1)
            return await ctx.run("second", lambda: "two steps")

        async def never() -> str:
            await ctx.sleep(days=300)
            return await ctx.run("never", lambda: "never")

        raced = await ctx.race(ctx.run("slow", slow), ctx.sleep(days=300), never())
        name, _ = await ctx.select(late=ctx.sleep(hours=300), soon=ctx.sleep(0.1))
        gathered = await ctx.gather(ctx.run("a", lambda: 1), ctx.sleep(0.1), two_steps())
        try:
            await ctx.timeout(ctx.awakeable().future, 0.2)
        except TimeoutError:
            timed_out = True
        in_time = await ctx.timeout(ctx.run("quick", lambda: "quick"), timedelta(days=1))
        return [raced, name, gathered, timed_out, in_time]

    async def main() -> None:
        result, _ = await in_every_attempt([service], lambda node: node.invoke("combine", "combine"))

        assert result == b'["slow","soon",[1,null,"two steps"],true,"quick"]'

    asyncio.run(main())


def test_a_race_has_the_same_winner_in_replay_when_both_are_there() -> None:
    winners: list[str] = []
    service = Service("winner")

    @service.handler
    async def race(ctx: Context) -> str:
        first, second = ctx.awakeable(str), ctx.awakeable(str)
        winner = await ctx.race(first.future, second.future)
        winners.append(winner)
        await ctx.run("end", lambda: None)
        return winner

    async def main() -> None:
        node = FakeNode()
        node.crash_at = lambda frame: "before" if getattr(frame, "key", "") == "end" else None
        node.connect([service])
        invocation = node.invoke("winner", "race")
        while len(invocation.steps) < 3:
            await asyncio.sleep(0.001)
        node.complete(invocation, 2, [0, b'"second"'])
        node.complete(invocation, 1, [0, b'"first"'])
        await node.crashed.wait()
        node.crash_at = None
        node.connect([service])

        assert await node.result(invocation) == b'"second"'

    asyncio.run(main())

    assert winners == ["second", "second"]


def test_an_operation_may_be_awaited_twice_and_by_two_tasks() -> None:
    service = Service("twice")

    @service.handler
    async def twice(ctx: Context) -> list[Any]:
        async def wait() -> str:
            return await operation

        operation = ctx.run("once", lambda: "once")
        both = await asyncio.gather(wait(), wait())
        return [*both, await operation, operation.done()]

    async def main() -> None:
        node = FakeNode()
        node.connect([service])
        invocation = node.invoke("twice", "twice")

        assert await node.result(invocation) == b'["once","once","once",true]'
        assert invocation.journal() == [("run", "once")]

    asyncio.run(main())


def test_a_context_works_only_in_its_handler() -> None:
    service = Service("misuse")
    kept: list[Context] = []

    async def inside(ctx: Context) -> str:
        try:
            await ctx.sleep(1)
        except MisusedContext as error:
            return str(error)
        return "nothing happened"

    @service.handler
    async def misuse(ctx: Context) -> list[str]:
        kept.append(ctx)
        in_step = await ctx.run("step", inside, ctx)
        in_thread = await ctx.run("thread", lambda: asyncio.run(inside(ctx)))
        return [in_step, in_thread]

    async def main() -> None:
        node = FakeNode()
        node.connect([service])
        result = await node.call("misuse", "misuse")

        assert result.count(b"a context works only in its handler") == 2
        with pytest.raises((MisusedContext, BaseException)):
            kept[0].sleep(1)

    asyncio.run(main())


def test_names_and_arguments_that_cannot_be_are_refused_at_the_call() -> None:
    service = Service("wrong")
    refused: list[str] = []

    @service.handler
    async def wrong(ctx: Context) -> None:
        async def refuses(act: Callable[[], Awaitable[Any] | Any]) -> None:
            try:
                act()
            except (ValueError, TypeError) as error:
                refused.append(str(error))

        await refuses(lambda: ctx.run("", lambda: None))
        await refuses(lambda: ctx.run("n" * 129, lambda: None))
        await refuses(lambda: ctx.run("\ud800", lambda: None))
        await refuses(lambda: ctx.run("a", lambda: None, effect="twice"))  # type: ignore[call-overload, call-arg]
        await refuses(lambda: ctx.run("a", lambda: None, reconcile=lambda key: None))
        await refuses(lambda: ctx.sleep(-1))
        await refuses(lambda: ctx.sleep(days=400_000_000))
        await refuses(lambda: ctx.call("nobody"))
        await refuses(lambda: ctx.call("kv/put", 1, key=""))
        await refuses(lambda: ctx.call("k" * 129 + "/put", 1))
        await refuses(lambda: ctx.send("kv/" + "p" * 129, 1))
        await refuses(lambda: ctx.send("\ud800/put", 1))
        await refuses(lambda: ctx.call(ServiceRef("").handler("put"), 1))
        await refuses(lambda: ctx.call(wrong, key="k"))  # type: ignore[call-overload]
        await refuses(lambda: ctx.attach("inv_12"))
        await refuses(lambda: ctx.resolve_awakeable("awk_12"))

    async def main() -> None:
        node = FakeNode()
        node.connect([service])
        invocation = node.invoke("wrong", "wrong")
        await node.result(invocation)

        assert len(refused) == 16
        assert invocation.journal() == []

    asyncio.run(main())


def test_cancellation_is_noticed_where_the_code_waits_and_compensation_works() -> None:
    service = Service("cancelled")
    undone: list[str] = []

    @service.handler
    async def book(ctx: Context) -> str:
        try:
            await ctx.sleep(days=100)
        except InvocationCancelled as error:
            await ctx.run("undo", undone.append, "flight")
            return f"compensated: {error.code}"
        return "booked"

    async def main() -> None:
        node = FakeNode()
        node.connect([service])
        invocation = node.invoke("cancelled", "book")
        while len(invocation.steps) < 2:
            await asyncio.sleep(0.001)
        node.cancel(invocation)

        assert await node.result(invocation) == b'"compensated: 409"'

    asyncio.run(main())

    assert undone == ["flight"]


def test_cancellation_that_finds_nothing_waiting_fails_the_next_step_without_running_it() -> None:
    service = Service("cancelled")
    ran: list[str] = []
    gate = asyncio.Event()

    async def first() -> None:
        ran.append("first")
        await gate.wait()

    @service.handler
    async def book(ctx: Context) -> str:
        await ctx.run("first", first)
        try:
            await ctx.run("second", ran.append, "second")
        except InvocationCancelled:
            await ctx.run("third", ran.append, "third")
            return "cancelled"
        return "booked"

    async def main() -> None:
        node = FakeNode()
        node.connect([service])
        invocation = node.invoke("cancelled", "book")
        while not ran:
            await asyncio.sleep(0.001)
        node.cancel(invocation)
        await asyncio.sleep(0.01)
        gate.set()

        assert await node.result(invocation) == b'"cancelled"'

    asyncio.run(main())

    assert ran == ["first", "third"]


def test_one_cancellation_that_crosses_a_step_on_its_way_does_not_hit_the_compensation_too() -> None:
    service = Service("cancelled")
    ran: list[str] = []

    @service.handler
    async def sleeps(ctx: Context) -> str:
        try:
            await ctx.sleep(days=100)
        except InvocationCancelled:
            await ctx.run("undo", ran.append, "sleeps")
        return "over"

    def broken() -> None:
        raise OSError("no network")

    @service.handler
    async def retries(ctx: Context) -> str:
        try:
            await ctx.run("book", broken)
        except InvocationCancelled:
            await ctx.run("undo", ran.append, "retries")
        return "over"

    async def main() -> None:
        for handler, crossed in (("sleeps", protocol.StepFrame), ("retries", protocol.RunFailed)):
            node = FakeNode()
            node.connect([service])
            invocation = node.invoke("cancelled", handler)

            def crosses(
                frame: protocol.Frame, kind: type = crossed, at: FakeNode = node, found: Invocation = invocation
            ) -> None:
                if type(frame) is kind and len(found.steps) == 1:
                    at.cancel(found)  # The SDK has sent the step; the node hears of the cancellation first.

            node.on_frame = crosses

            assert await node.result(invocation) == b'"over"'

    asyncio.run(main())

    assert ran == ["sleeps", "retries"]


def test_a_shared_handler_cannot_write_state() -> None:
    thing = VirtualObject("thing")

    @thing.handler(shared=True)
    async def peek(ctx: ObjectContext) -> str:
        try:
            ctx.set("a", 1)
        except MisusedContext as error:
            return str(error)
        return "written"

    async def main() -> None:
        node = FakeNode()
        node.connect([thing])

        assert b"shared" in await node.call("thing", "peek", key="k")

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
