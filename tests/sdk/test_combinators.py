"""Combinators: race, select, gather, any, settle and timeout decide by log order, live and in replay."""

import asyncio
import json
from datetime import timedelta
from typing import Any

import pytest

from holdfast.sdk import (
    Context,
    Service,
    TerminalError,
)
from tests.sdk.crashing import in_every_attempt
from tests.sdk.fake_node import FakeNode


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


def test_a_race_has_the_same_winner_in_replay_when_both_are_complete() -> None:
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


def test_any_takes_the_first_success_and_settle_takes_every_outcome() -> None:
    service = Service("many")
    refused: asyncio.Event

    async def after(ctx: Context, ms: int, text: str) -> str:
        await ctx.sleep(milliseconds=ms)
        return text

    async def refuse(ctx: Context, code: int, after: asyncio.Event | None = None) -> str:
        if after is not None:
            await after.wait()
        await ctx.sleep(milliseconds=10)
        refused.set()
        raise TerminalError("no", code=code)

    def fail() -> str:
        raise TerminalError("no", code=404)

    @service.handler
    async def handler(ctx: Context) -> list[Any]:
        first = await ctx.any(ctx.run("fails", fail), after(ctx, 60_000, "slow"), after(ctx, 10, "quick"))
        nonlocal refused
        refused = asyncio.Event()
        try:
            await ctx.any(refuse(ctx, 410, refused), refuse(ctx, 409))
        except TerminalError as error:
            none = error.code
        settled = await ctx.settle(ctx.run("works", lambda: 7), ctx.run("fails too", fail), after(ctx, 100, "late"))
        shown = [outcome.value if outcome.ok else outcome.error and outcome.error.code for outcome in settled]
        return [first, none, shown, list(await ctx.settle())]

    async def main() -> None:
        result, _ = await in_every_attempt([service], lambda node: node.invoke("many", "handler"))
        assert json.loads(result) == ["quick", 409, [7, 404, "late"], []]

    asyncio.run(main())


def test_a_bug_in_a_branch_is_not_an_outcome_of_settle() -> None:
    service = Service("many")
    tries: list[int] = []

    async def buggy() -> str:
        tries.append(1)
        if len(tries) == 1:
            raise KeyError("a bug")
        return "fixed"

    @service.handler
    async def handler(ctx: Context) -> list[str | None]:
        return [outcome.value for outcome in await ctx.settle(buggy())]

    async def main() -> None:
        node = FakeNode()
        node.connect([service])
        assert json.loads(await node.call("many", "handler")) == ["fixed"]

    asyncio.run(main())


def test_a_sleep_that_loses_a_race_in_replay_is_not_reported_as_never_awaited(
    caplog: pytest.LogCaptureFixture,
) -> None:
    service = Service("racers")

    @service.handler
    async def race(ctx: Context) -> str:
        return str(await ctx.race(ctx.awakeable(str).future, ctx.sleep(days=300)))

    async def main() -> None:
        node = FakeNode()
        node.connect([service])
        invocation = node.invoke("racers", "race")
        async with asyncio.timeout(30):
            await invocation.suspended.wait()
        node.complete(invocation, 1, [0, b'"first"'])

        assert await node.result(invocation) == b'"first"' and invocation.epoch == 2
        assert "never awaited" not in caplog.text

    asyncio.run(main())
