"""Cancellation: exactly one operation notices it, the same one in every attempt, and the code may compensate."""

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from holdfast.sdk import (
    Context,
    InvocationCancelled,
    Service,
)
from holdfast.sdk.frames import Blocked, Credit, Frame, Goaway, Output, Piece, RunFailed, StepFrame
from holdfast.sdk.journal import CANCELLED, pack_outcome
from tests.sdk.fake_node import FakeNode, Invocation


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


def test_a_cancellation_without_a_waiting_step_fails_the_next_step_without_running_it() -> None:
    service = Service("cancelled")
    ran: list[str] = []
    gate = threading.Event()

    def first() -> None:
        ran.append("first")
        assert gate.wait(60), "nothing interrupts a thread"

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


def test_cancellation_interrupts_a_function_that_runs() -> None:
    service = Service("cancelled")
    ran: list[str] = []

    async def slow() -> None:
        ran.append("slow")
        try:
            await asyncio.sleep(3600)
        finally:
            ran.append("interrupted")

    @service.handler
    async def book(ctx: Context) -> str:
        try:
            await ctx.run("slow", slow)
        except InvocationCancelled:
            await ctx.run("undo", ran.append, "undo")
            return "cancelled"
        return "booked"

    async def main() -> None:
        node = FakeNode()
        node.connect([service])
        invocation = node.invoke("cancelled", "book")
        while not ran:
            await asyncio.sleep(0.001)
        node.cancel(invocation)

        assert await node.result(invocation) == b'"cancelled"'
        assert invocation.steps[1].outcome == pack_outcome(CANCELLED)

    asyncio.run(main())

    assert ran == ["slow", "interrupted", "undo"]


def test_a_function_that_swallows_its_interruption_keeps_its_result_and_the_next_step_notices() -> None:
    service = Service("cancelled")
    ran: list[str] = []

    async def stubborn() -> str:
        ran.append("stubborn")
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            return "done nevertheless"
        return "slept"

    @service.handler
    async def book(ctx: Context) -> list[str]:
        first = await ctx.run("stubborn", stubborn)
        try:
            await ctx.run("second", ran.append, "second")
        except InvocationCancelled:
            return [first, "cancelled"]
        return [first]

    async def main() -> None:
        node = FakeNode()
        node.connect([service])
        invocation = node.invoke("cancelled", "book")
        while not ran:
            await asyncio.sleep(0.001)
        node.cancel(invocation)

        assert json.loads(await node.result(invocation)) == ["done nevertheless", "cancelled"]

    asyncio.run(main())

    assert ran == ["stubborn"]


def test_a_step_that_runs_at_most_once_is_not_interrupted() -> None:
    service = Service("cancelled")
    ran: list[str] = []

    async def charge() -> str:
        ran.append("charge")
        await asyncio.sleep(0.05)
        return "charged"

    @service.handler
    async def book(ctx: Context) -> list[str]:
        charged = await ctx.run("charge", charge, effect="at_most_once")
        try:
            await ctx.sleep(days=1)
        except InvocationCancelled:
            return [charged, "cancelled"]
        return [charged]

    async def main() -> None:
        node = FakeNode()
        node.connect([service])
        invocation = node.invoke("cancelled", "book")
        while not ran:
            await asyncio.sleep(0.001)
        node.cancel(invocation)

        assert json.loads(await node.result(invocation)) == ["charged", "cancelled"]

    asyncio.run(main())


def cancelled_at_the_end(handler: Callable[[Context], Coroutine[Any, Any, str]], *, crash: bool) -> tuple[Any, Any]:
    """The outcome of a handler that is cancelled while its output is in transit. `crash`: after every frame from then
    on."""
    service = Service("late")
    service.handler(name="book")(handler)

    async def main() -> tuple[Any, Any]:
        node = FakeNode()
        cancelled = False

        def look(frame: Frame) -> str | None:
            nonlocal cancelled
            if isinstance(frame, Credit | Goaway | Piece | Blocked) or frame.invocation != invocation.id:
                return None
            if isinstance(frame, Output) and not cancelled:
                cancelled = True
                node.cancel(invocation)
            return "after" if cancelled and crash else None

        node.crash_at = look
        node.connect([service])
        invocation = node.invoke("late", "book")
        async with asyncio.timeout(60):
            while not invocation.done.is_set():
                if node.link is None:
                    node.connect([service])
                await asyncio.sleep(0.001)
        assert cancelled
        return invocation.outcome, invocation

    return asyncio.run(main())


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("last", ["run", "set", "now", "gather"])
def test_a_cancellation_that_comes_before_the_output_is_noticed_at_the_last_operation(last: str, crash: bool) -> None:
    ran: list[str] = []

    async def book(ctx: Context) -> str:
        try:
            await ctx.run("flight", ran.append, "flight")
            match last:
                case "run":
                    await ctx.run("hotel", ran.append, "hotel")
                case "set":
                    ctx.send("mailer/tell")
                case "now":
                    ctx.now()
                case "gather":
                    await asyncio.gather(ctx.run("hotel", ran.append, "hotel"), ctx.run("car", ran.append, "car"))
        except InvocationCancelled:
            ran.append("noticed")
            await ctx.run("undo", ran.append, "undo")
            raise
        return "booked"

    outcome, invocation = cancelled_at_the_end(book, crash=crash)

    assert outcome == pack_outcome(CANCELLED)
    assert ran.count("flight") == ran.count("undo") == 1 and "noticed" in ran
    assert ran.count("hotel") == (last in ("run", "gather")), "what was done is not done again"
    assert not invocation.cancelled


def test_a_cancelled_invocation_that_did_nothing_durable_ends_as_cancelled() -> None:
    async def book(ctx: Context) -> str:
        return "booked"

    outcome, _ = cancelled_at_the_end(book, crash=False)

    assert outcome == pack_outcome(CANCELLED)


def test_code_that_catches_a_late_cancellation_chooses_its_outcome() -> None:
    async def book(ctx: Context) -> str:
        try:
            await ctx.run("flight", str)
        except InvocationCancelled:
            return "kept"
        return "booked"

    outcome, _ = cancelled_at_the_end(book, crash=True)

    assert outcome == [0, b'"kept"']


@pytest.mark.parametrize("then", ["run", "return"])
def test_a_cancellation_that_fails_only_the_loser_of_a_race_is_noticed_by_the_next_operation(then: str) -> None:
    service = Service("cancelled")
    ran: list[str] = []
    gate = threading.Event()

    def hold() -> None:
        ran.append("hold")
        assert gate.wait(60)

    @service.handler
    async def book(ctx: Context) -> str:
        try:
            await ctx.race(ctx.sleep(days=300), ctx.run("quick", str))
            await ctx.run("hold", hold)
            if then == "run":
                await ctx.run("more", ran.append, "more")
        except InvocationCancelled:
            await ctx.run("undo", ran.append, "undo")
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

    assert ran == ["hold", "undo"]


def test_a_cancellation_that_crosses_a_step_in_transit_does_not_cancel_the_compensation_too() -> None:
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
        for handler, crossed in (("sleeps", StepFrame), ("retries", RunFailed)):
            node = FakeNode()
            node.connect([service])
            invocation = node.invoke("cancelled", handler)

            def crosses(
                frame: Frame, kind: type = crossed, at: FakeNode = node, found: Invocation = invocation
            ) -> None:
                if type(frame) is kind and len(found.steps) == 1:
                    at.cancel(found)  # The SDK has sent the step; the node learns of the cancellation first.

            node.on_frame = crosses

            assert await node.result(invocation) == b'"over"'

    asyncio.run(main())

    assert ran == ["sleeps", "retries"]
