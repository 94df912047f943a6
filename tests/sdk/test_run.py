"""Steps that fail: retries that survive crashes, terminal errors, effects with unknown outcome."""

import asyncio
import functools
import threading
from datetime import timedelta
from typing import Any

import pytest

from holdfast.sdk import Context, RetriesExhausted, RetryableError, RetryPolicy, Service, TerminalError, current_step
from holdfast.sdk.frames import Ack, Frame, RunDone, RunFailed, StepFrame, Suspend
from tests.sdk.fake_node import FakeNode, Invocation


async def finish(node: FakeNode, services: list[Any], invocation: Invocation) -> bytes:
    """Reconnect after each crash until it is done."""
    while not invocation.done.is_set():
        if node.link is None:
            node.connect(services)
        await asyncio.sleep(0.001)
    return await node.result(invocation)


def test_a_failing_step_is_retried_until_it_succeeds() -> None:
    tries: list[int] = []
    service = Service("flaky")

    def flaky() -> str:
        tries.append(current_step().number)
        if len(tries) < 4:
            raise ConnectionError("not yet")
        return "worked"

    @service.handler
    async def handler(ctx: Context) -> str:
        return await ctx.run("flaky", flaky)

    async def main() -> None:
        node = FakeNode()
        node.connect([service])
        invocation = node.invoke("flaky", "handler")

        assert await node.result(invocation) == b'"worked"'
        assert len(invocation.steps) == 2
        assert invocation.steps[1].argument[1] == 3

    asyncio.run(main())

    assert len(tries) == 4


def test_a_function_that_runs_out_of_items_fails_its_step() -> None:
    tries: list[int] = []
    service = Service("first")

    def first() -> str:
        tries.append(current_step().number)
        return next(iter(["worked"][: len(tries) - 1]))  # StopIteration, the first time.

    @service.handler
    async def handler(ctx: Context) -> str:
        return await ctx.run("first", first)

    async def main() -> list[RunFailed]:
        node = FakeNode()
        node.connect([service])
        invocation = node.invoke("first", "handler")

        assert await asyncio.wait_for(node.result(invocation), 30) == b'"worked"'
        return [frame for frame in node.frames if isinstance(frame, RunFailed)]

    (failed,) = asyncio.run(main())

    assert failed.failure[2].startswith("RuntimeError: the function raised StopIteration")
    assert failed.failure[4]["trace"][-1].endswith(".<locals>.first")


@pytest.mark.parametrize("after", [2.5, timedelta(seconds=2.5)])
def test_a_step_can_set_the_delay_of_its_retry(after: float | timedelta) -> None:
    tries: list[int] = []
    service = Service("busy")

    def ask() -> str:
        tries.append(current_step().number)
        if len(tries) < 2:
            raise RetryableError("the model is overloaded", retry_after=after)
        return "worked"

    @service.handler
    async def handler(ctx: Context) -> str:
        return await ctx.run("ask", ask)

    async def main(version: int) -> list[int]:
        tries.clear()
        node = FakeNode(version=version)
        node.connect([service])
        assert await node.call("busy", "handler") == b'"worked"'
        return [frame.retry_after_ms for frame in node.frames if isinstance(frame, RunFailed)]

    assert asyncio.run(main(2)) == [2500]
    assert asyncio.run(main(1)) == [0], "a node of before does not know the field"


def test_a_step_gives_up_after_its_attempts_even_across_crashes() -> None:
    tries: list[int] = []
    service = Service("hopeless")

    async def hopeless() -> str:
        tries.append(1)
        raise ConnectionError("down")

    @service.handler
    async def handler(ctx: Context) -> str:
        try:
            return await ctx.run("hopeless", hopeless, retry=RetryPolicy(initial=0.1, max_attempts=5))
        except RetriesExhausted as error:
            return f"gave up: {error}"

    async def main() -> None:
        node = FakeNode()
        node.crash_at = lambda frame: "after" if isinstance(frame, RunFailed) and len(tries) % 2 else None
        node.connect([service])
        invocation = node.invoke("hopeless", "handler")
        result = await finish(node, [service], invocation)

        assert result.startswith(b'"gave up: step')
        assert b"ConnectionError: down" in result

    asyncio.run(main())

    assert len(tries) == 5


def test_a_terminal_error_of_a_step_is_not_retried_and_replays_unchanged() -> None:
    tries: list[int] = []
    seen: list[tuple[str, int, str]] = []
    service = Service("terminal")

    def refuse() -> None:
        tries.append(1)
        raise TerminalError("card declined", code=402, kind="Declined")

    @service.handler
    async def handler(ctx: Context) -> str:
        try:
            await ctx.run("charge", refuse)
        except TerminalError as error:
            seen.append((error.message, error.code, error.kind))
        return await ctx.run("after", lambda: "compensated")

    async def main() -> None:
        node = FakeNode()
        once = ["before"]
        node.crash_at = lambda frame: once.pop() if getattr(frame, "key", "") == "after" and once else None
        node.connect([service])
        invocation = node.invoke("terminal", "handler")

        assert await finish(node, [service], invocation) == b'"compensated"'

    asyncio.run(main())

    assert tries == [1]
    assert seen == [("card declined", 402, "Declined")] * 2


def test_exceptions_named_terminal_by_the_policy_fail_the_step() -> None:
    service = Service("terminal")

    def wrong() -> None:
        raise KeyError("no such card")

    @service.handler
    async def handler(ctx: Context) -> None:
        await ctx.run("wrong", wrong, retry=RetryPolicy(terminal=(LookupError,)))

    async def main() -> None:
        node = FakeNode()
        node.connect([service])
        with pytest.raises(TerminalError) as caught:
            await node.call("terminal", "handler")

        assert caught.value.kind == "KeyError"

    asyncio.run(main())


def test_effect_keys_are_stable_over_tries_and_crashes_and_differ_between_steps() -> None:
    keys: list[tuple[str, str]] = []
    service = Service("keys")

    def effect(fail: bool) -> None:
        step = current_step()
        keys.append((step.name, step.effect_key))
        if fail and len(keys) == 1:
            raise OSError("once")

    @service.handler
    async def handler(ctx: Context) -> None:
        await ctx.run("first", effect, True)
        await asyncio.gather(ctx.run("second", effect, False), ctx.run("second", effect, False))
        await ctx.run("named", effect, False, key="order-17")

    async def main() -> None:
        node = FakeNode()
        once = ["before"]
        node.crash_at = lambda frame: once.pop() if isinstance(frame, RunDone) and once else None
        node.connect([service])
        invocation = node.invoke("keys", "handler")
        await finish(node, [service], invocation)

        assert invocation.journal()[-1] == ("run", "=order-17")

    asyncio.run(main())

    first = [key for name, key in keys if name == "first"]
    assert len(first) == 3
    assert len(set(first)) == 1
    assert len({key for _, key in keys}) == 4


def test_a_terminal_error_from_a_task_group_is_not_retried() -> None:
    service = Service("grouped")
    tries: list[int] = []

    async def refuse() -> None:
        raise TerminalError("no seats", code=409)

    async def book() -> None:
        tries.append(1)
        async with asyncio.TaskGroup() as group:
            group.create_task(refuse())

    @service.handler
    async def trip(ctx: Context) -> None:
        await ctx.run("book", book, retry=RetryPolicy(max_attempts=3))

    async def main() -> None:
        node = FakeNode()
        node.connect([service])

        with pytest.raises(TerminalError, match="no seats"):
            await node.call("grouped", "trip")

    asyncio.run(main())

    assert tries == [1]


def test_an_error_without_a_text_still_fails_its_attempt() -> None:
    service = Service("speechless")
    raised: list[int] = []

    class Speechless(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    def step() -> None:
        raised.append(len(raised))
        if len(raised) == 1:
            raise Speechless

    @service.handler
    async def speak(ctx: Context) -> str:
        await ctx.run("step", step)
        if ctx.attempt == 1:
            raise Speechless
        return "said"

    async def main() -> None:
        node = FakeNode()
        node.connect([service])
        invocation = node.invoke("speechless", "speak")

        assert await node.result(invocation) == b'"said"'
        assert [failure.kind for failure in invocation.errors] == ["Speechless"]

    asyncio.run(main())


def test_a_result_has_its_declared_type_live_as_in_replay() -> None:
    service = Service("typed")
    seen: list[str] = []

    def price() -> float:
        return 3

    @service.handler
    async def ask(ctx: Context) -> None:
        seen.append(repr(await ctx.run("price", price)))
        await ctx.sleep(1)

    async def main() -> None:
        node = FakeNode()
        node.crash_at = lambda frame: "after" if len(seen) == 1 and isinstance(frame, StepFrame) else None
        node.connect([service])
        await finish(node, [service], node.invoke("typed", "ask"))

    asyncio.run(main())

    assert seen == ["3.0", "3.0"]


def test_sync_functions_run_concurrently_in_threads() -> None:
    service = Service("threads")
    barrier = threading.Barrier(20)

    def meet(n: int) -> int:
        barrier.wait(30)
        return n

    @service.handler
    async def handler(ctx: Context) -> list[int]:
        return await asyncio.gather(*(ctx.run(f"meet {n}", meet, n) for n in range(20)))

    async def main() -> None:
        node = FakeNode()
        node.connect([service])

        assert await node.call("threads", "handler") == str(list(range(20))).replace(" ", "").encode()

    asyncio.run(main())


def test_any_callable_can_be_a_step() -> None:
    service = Service("callables")

    class Adder:
        def __init__(self, n: int) -> None:
            self.n = n

        def __call__(self, m: int) -> int:
            return self.n + m

        async def method(self, m: int) -> int:
            return self.n * m

    async def plus(a: int, b: int) -> int:
        return a + b

    @service.handler
    async def handler(ctx: Context) -> list[int]:
        return [
            await ctx.run("object", Adder(1), 2),
            await ctx.run("method", Adder(2).method, 3),
            await ctx.run("partial", functools.partial(plus, 3), 4),
            await ctx.run("lambda", lambda: plus(4, 5)),
            await ctx.run("builtin", len, [1, 2]),
        ]

    async def main() -> None:
        node = FakeNode()
        node.connect([service])

        assert await node.call("callables", "handler") == b"[3,6,7,9,2]"

    asyncio.run(main())


def test_a_result_is_the_same_live_and_in_replay() -> None:
    """A value that JSON would change is changed at once, not only after a crash."""
    seen: list[Any] = []
    service = Service("same")

    def pair() -> tuple[int, str]:
        return (1, "a")

    @service.handler
    async def handler(ctx: Context) -> None:
        typed = await ctx.run("typed", pair)
        untyped = await ctx.run("untyped", lambda: (1, {2: "b"}))
        seen.append((typed, untyped))
        await ctx.run("crash", lambda: None)

    async def main() -> None:
        node = FakeNode()
        once = ["before"]
        node.crash_at = lambda frame: once.pop() if getattr(frame, "key", "") == "crash" and once else None
        node.connect([service])
        await finish(node, [service], node.invoke("same", "handler"))

    asyncio.run(main())

    assert seen == [((1, "a"), [1, {"2": "b"}])] * 2


def test_an_unstorable_result_pauses_the_invocation() -> None:
    service = Service("unkept")

    @service.handler
    async def handler(ctx: Context) -> None:
        try:
            await ctx.run("socket", object)
        except Exception:
            await ctx.run("swallowed", lambda: None)

    async def main() -> None:
        node = FakeNode()
        node.connect([service])
        invocation = node.invoke("unkept", "handler")
        async with asyncio.timeout(30):
            await invocation.paused.wait()

        assert "the result of step 'socket'" in invocation.errors[0].message
        assert invocation.journal() == []

    asyncio.run(main())


def test_the_next_effect_waits_for_the_record_of_the_one_before() -> None:
    """While a step is not acknowledged, no further function starts; if it may run ahead, the output travels with it."""
    started: list[str] = []
    service = Service("ahead", run_ahead=True)

    @service.handler
    async def handler(ctx: Context) -> str:
        await ctx.run("first", started.append, "first")
        ctx.send("ahead/other")
        await ctx.run("second", started.append, "second")
        return "done"

    async def main() -> None:
        node = FakeNode()
        held: list[Frame] = []
        send = node.send

        def hold(frame: Frame) -> None:
            if isinstance(frame, Ack):
                held.append(frame)
            else:
                send(frame)

        node.send = hold  # type: ignore[method-assign]
        node.connect([service])
        invocation = node.invoke("ahead", "handler")
        while len(invocation.steps) < 3:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        assert started == ["first"]

        node.send = send  # type: ignore[method-assign]
        for frame in held:
            send(frame)
        assert await node.result(invocation) == b'"done"'
        frames = [frame for frame in node.frames if getattr(frame, "invocation", None) == invocation.id]
        assert [type(frame).__name__ for frame in frames[-2:]] == ["StepFrame", "Output"]

    asyncio.run(main())

    assert started == ["first", "second"]


def test_a_suspending_attempt_finishes_its_step_and_begins_no_other() -> None:
    """The running step is journaled before the attempt ends, so the next attempt continues after it."""
    ran: list[str] = []
    service = Service("moves")

    async def main() -> None:
        gate = asyncio.Event()

        async def slow() -> str:
            ran.append("slow")
            await gate.wait()
            return "slow"

        @service.handler
        async def handler(ctx: Context) -> str:
            first = asyncio.create_task(ctx.run("slow", slow))
            await ctx.run("quick", ran.append, "quick")
            await ctx.run("later", ran.append, "later")
            return await first

        node = FakeNode()
        node.connect([service], suspend_after=60.0)
        journal_then = asyncio.Event()

        def on_frame(frame: Frame) -> None:
            if isinstance(frame, StepFrame) and frame.key == "quick":
                # SUSPEND arrives while one function runs, and before the next one may start.
                node.send(Suspend(invocation.id, 1))
                journal_then.set()

        node.on_frame = on_frame
        invocation = node.invoke("moves", "handler")
        await journal_then.wait()
        await asyncio.sleep(0.05)
        assert sorted(ran) == ["quick", "slow"] and invocation.epoch == 1

        gate.set()
        assert await node.result(invocation) == b'"slow"'

        assert invocation.epoch == 2
        assert sorted(ran) == ["later", "quick", "slow"]

    asyncio.run(main())


@pytest.mark.parametrize("waits", ["timeout", "sleep"])
def test_an_attempt_that_cannot_be_handed_back_continues_after_suspend(waits: str) -> None:
    """It waits for a timer of its own process. Its step runs, and being delayed does not trigger a timeout."""
    ran: list[str] = []
    service = Service("stays")

    @service.handler
    async def handler(ctx: Context) -> str:
        await ctx.run("first", ran.append, "first")
        if waits == "timeout":
            async with asyncio.timeout(60):
                await ctx.run("second", ran.append, "second")
        else:
            clock = asyncio.create_task(asyncio.sleep(0.2))
            await ctx.run("second", ran.append, "second")
            await clock
        return "done"

    async def main() -> None:
        node = FakeNode()
        node.connect([service], suspend_after=60.0)

        def on_frame(frame: Frame) -> None:
            if isinstance(frame, StepFrame) and frame.key == "first":
                node.send(Suspend(invocation.id, 1))

        node.on_frame = on_frame
        invocation = node.invoke("stays", "handler")
        assert await node.result(invocation) == b'"done"'

        assert invocation.epoch == 1
        assert ran == ["first", "second"]

    asyncio.run(main())
