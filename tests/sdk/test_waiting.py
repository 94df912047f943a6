"""Suspension, resumption, abort, plain asyncio timeouts, and code that changed."""

import asyncio
import gc
import logging
import os
import weakref
from typing import Any

import pytest

from holdfast.sdk import AttemptEnded, Context, Service, TerminalError, Workflow, WorkflowContext
from holdfast.sdk.endpoint import Endpoint
from holdfast.sdk.frames import Abort, Intent
from holdfast.sdk.ids import format_id
from tests.sdk.fake_node import FakeNode, Invocation
from tests.sdk.until import until


def waiting_service(waits: str) -> Service:
    service = Service("waiting")

    @service.handler
    async def wait(ctx: Context) -> str:
        approval = ctx.awakeable(str)
        match waits:
            case "await":
                return await approval.future
            case "gather":
                return "".join(await asyncio.gather(approval.future, ctx.run("quick", lambda: "")))
            case "task group":
                async with asyncio.TaskGroup() as group:
                    task = group.create_task(approval.future)
                return task.result()
            case "nested":
                return await outer(ctx, approval.future)
            case "wait":
                task = asyncio.create_task(approval.future)
                await asyncio.wait({task})
                return task.result()
            case "race":
                return str(await ctx.race(approval.future, ctx.sleep(days=300)))
            case "task":
                return await asyncio.create_task(approval.future)
        raise AssertionError(waits)

    async def outer(ctx: Context, future: Any) -> str:
        async def inner() -> str:
            found: str = await future
            return found

        (found,) = await asyncio.gather(asyncio.create_task(inner()))
        return found

    return service


@pytest.mark.parametrize("waits", ["await", "gather", "task group", "nested", "wait", "race", "task"])
def test_an_attempt_that_only_waits_is_dropped_and_comes_back(waits: str) -> None:
    async def main() -> None:
        service = waiting_service(waits)
        node = FakeNode()
        endpoint = node.connect([service], suspend_after=0.05)
        invocation = node.invoke("waiting", "wait")
        async with asyncio.timeout(30):
            await invocation.suspended.wait()

        attempts = list(endpoint.attempts)
        assert attempts == []
        assert 1 in invocation.waiting
        node.complete(invocation, 1, [0, b'"yes"'])
        assert await node.result(invocation) == b'"yes"'
        assert invocation.epoch == 2

    asyncio.run(main())


def test_a_suspended_attempt_frees_everything() -> None:
    class Payload:
        pass

    kept: list[weakref.ref[Payload]] = []
    service = Service("memory")

    @service.handler
    async def wait(ctx: Context) -> None:
        payload = Payload()
        kept.append(weakref.ref(payload))
        try:
            await ctx.sleep(days=300)
        finally:
            del payload

    async def main() -> None:
        node = FakeNode()
        node.connect([service], suspend_after=0.02)
        invocations = [node.invoke("memory", "wait") for _ in range(20)]
        for invocation in invocations:
            async with asyncio.timeout(30):
                await invocation.suspended.wait()
        await asyncio.sleep(0.05)
        gc.collect()

        assert [ref() for ref in kept] == [None] * 20

    asyncio.run(main())


@pytest.mark.parametrize("ends", ["returns", "runs a step", "waits", "gathers", "raises", "is aborted"])
def test_an_attempt_is_freed_when_it_ends_without_the_garbage_collector(ends: str) -> None:
    """Thousands end per second, and a garbage collection pauses everything else."""
    kept: list[weakref.ref[Any]] = []
    service = Service("memory")

    @service.handler
    async def handle(ctx: Context) -> str:
        kept.append(weakref.ref(ctx._attempt))
        match ends:
            case "runs a step":
                return await ctx.run("step", str)
            case "waits":
                await ctx.sleep(days=300)
            case "gathers":
                await asyncio.gather(ctx.sleep(days=300), ctx.sleep(days=200))
            case "raises":
                raise TerminalError("no")
            case "is aborted":
                await asyncio.Event().wait()
        return ""

    async def main() -> None:
        node = FakeNode()
        endpoint = node.connect([service], suspend_after=0.02)
        invocation = node.invoke("memory", "handle")
        await until(lambda: kept)
        if ends == "is aborted":
            node.send(Abort(invocation.id, invocation.epoch, "so we wish"))
        await until(lambda: not endpoint.attempts)
        await until(lambda: kept[0]() is None, seconds=10)

    gc.collect()
    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()


@pytest.mark.parametrize("waits", ["timeout", "wait_for", "sleep", "event", "run"])
def test_an_attempt_that_waits_for_something_of_its_own_stays(waits: str) -> None:
    service = Service("busy")
    event = asyncio.Event()
    stepping = asyncio.Event()

    @service.handler
    async def busy(ctx: Context) -> str:
        approval = ctx.awakeable(str)
        try:
            match waits:
                case "timeout":
                    async with asyncio.timeout(0.4):
                        await approval.future
                case "wait_for":
                    await asyncio.wait_for(approval.future, 0.4)
                case "sleep":
                    await asyncio.gather(asyncio.sleep(0.4), asyncio.shield(asyncio.sleep(0.4)))
                case "event":
                    await event.wait()
                case "run":
                    await ctx.run("busy", stepping.wait)
        except TimeoutError:
            return "timed out"
        return "done"

    async def main() -> None:
        node = FakeNode()
        node.connect([service], suspend_after=0.02)
        invocation = node.invoke("busy", "busy")
        await asyncio.sleep(0.2)

        assert invocation.status == "running"
        assert invocation.epoch == 1
        event.set()
        stepping.set()
        assert await node.result(invocation) in (b'"timed out"', b'"done"')
        assert invocation.epoch == 1

    asyncio.run(main())


def test_except_exception_does_not_catch_the_end_of_an_attempt() -> None:
    caught: list[BaseException] = []
    left: list[str] = []
    service = Service("stubborn")

    @service.handler
    async def wait(ctx: Context) -> None:
        try:
            await ctx.sleep(days=300)
        except Exception as error:
            caught.append(error)
        except AttemptEnded:
            left.append("ended")
            raise
        finally:
            left.append("finally")

    async def main() -> None:
        node = FakeNode()
        node.connect([service], suspend_after=0.02)
        invocation = node.invoke("stubborn", "wait")
        async with asyncio.timeout(30):
            await invocation.suspended.wait()
        await until(lambda: len(left) == 2)

    asyncio.run(main())

    assert caught == []
    assert left == ["ended", "finally"]


def test_code_that_swallows_the_end_of_its_attempt_cannot_do_anything_any_more() -> None:
    done: list[str] = []
    service = Service("zombie")

    @service.handler
    async def wait(ctx: Context) -> str:
        while True:
            try:
                await ctx.sleep(days=300)
            except BaseException:
                try:
                    await ctx.run("zombie", done.append, "zombie")
                except BaseException:
                    return "gave up"

    async def main() -> None:
        node = FakeNode()
        node.connect([service], suspend_after=0.02)
        invocation = node.invoke("zombie", "wait")
        async with asyncio.timeout(30):
            await invocation.suspended.wait()
        frames = len(node.frames)
        await asyncio.sleep(0.1)

        assert len(node.frames) == frames
        assert invocation.journal() == [("sleep", "sleep")]

    asyncio.run(main())

    assert done == []


@pytest.mark.parametrize("what", ["operation", "same operation", "promise"])
def test_code_that_catches_everything_in_a_loop_does_not_block_the_process(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[BaseException] = []
    is_over: list[bool] = []
    service = Workflow("stubborn")

    @service.main
    async def wait(ctx: WorkflowContext) -> str:
        operation = ctx.sleep(days=300)
        while True:
            try:
                match what:
                    case "operation":
                        await ctx.sleep(days=300)
                    case "same operation":
                        await operation
                    case _:
                        await ctx.promise("approved")
            except BaseException as error:
                told.append(error)
                if is_over:
                    raise
                if len(told) == 100_000:
                    os._exit(3)  # Nothing else can end this process.

    async def main() -> None:
        node = FakeNode()
        endpoint = node.connect([service], suspend_after=0.02)
        invocation = node.invoke("stubborn", "wait", key="k")
        async with asyncio.timeout(30):
            await invocation.suspended.wait()
        await until(lambda: "Write `except Exception:`" in caplog.text)
        assert not endpoint.attempts

    asyncio.run(main())  # It does not wait for the task that cannot be ended.

    assert 100 <= len(told) < 200
    is_over.append(True)
    gc.collect()


def test_a_newer_attempt_ends_an_older_one_of_the_same_process() -> None:
    running: list[int] = []
    cancelled: list[int] = []
    service = Service("twice")

    @service.handler
    async def work(ctx: Context) -> int:
        running.append(ctx.attempt)
        if ctx.attempt == 1:
            try:
                await ctx.run("slow", asyncio.sleep, 3600)
            except asyncio.CancelledError:
                cancelled.append(ctx.attempt)
                raise
        return ctx.attempt

    async def main() -> None:
        node = FakeNode()
        node.connect([service])
        invocation = node.invoke("twice", "work")
        await until(lambda: running)
        node._begin(invocation)

        assert await node.result(invocation) == b"2"
        await until(lambda: cancelled)
        # A START that was overtaken has no effect.
        endpoint = node.link.endpoint  # type: ignore[union-attr]
        assert not endpoint.attempts

    asyncio.run(main())

    assert running == [1, 2]
    assert cancelled == [1]


def test_a_plain_timeout_abandons_the_step_in_replay_too() -> None:
    service = Service("plain")
    ran: list[str] = []

    async def slow() -> str:
        ran.append("slow")
        await asyncio.sleep(3600)
        return "slow"

    @service.handler
    async def race(ctx: Context) -> list[str]:
        found = []
        for name, operation in (("call", ctx.awakeable().future), ("run", ctx.run("slow", slow))):
            try:
                await asyncio.wait_for(operation, 0.03)
            except TimeoutError:
                found.append(name)
            await ctx.run(f"after {name}", lambda: None)
        return found

    async def main() -> None:
        node = FakeNode()
        once = ["after"]
        node.crash_at = lambda frame: once.pop() if getattr(frame, "key", "") == "after run" and once else None
        node.connect([service])
        invocation = node.invoke("plain", "race")
        await node.crashed.wait()
        node.complete(invocation, 1, [0, b'"too late"'])
        node.connect([service])

        assert await node.result(invocation) == b'["call","run"]'
        abandoned = {step.key: step.abandoned for step in invocation.steps[1:]}
        assert abandoned == {
            "awakeable": True, "plain timer": False, "after call": False,
            "plain timer#1": False, "slow": True, "after run": False,
        }  # fmt: skip
        assert not invocation.errors

    asyncio.run(main())

    assert ran == ["slow"]


def test_an_error_of_the_handler_is_retried() -> None:
    service = Service("errors")
    tries: list[int] = []

    @service.handler
    async def work(ctx: Context) -> str:
        tries.append(ctx.attempt)
        if len(tries) < 3:
            raise ValueError("not yet")
        return "done"

    @service.handler
    async def group(ctx: Context) -> None:
        async def fail() -> None:
            raise TerminalError("in a group", code=418)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fail())

    async def main() -> None:
        node = FakeNode()
        node.connect([service])
        invocation = node.invoke("errors", "work")

        assert await node.result(invocation) == b'"done"'
        assert [error.message for error in invocation.errors] == ["ValueError: not yet"] * 2
        with pytest.raises(TerminalError, match="in a group") as caught:
            await node.call("errors", "group")
        assert caught.value.code == 418

    asyncio.run(main())


def test_input_that_does_not_fit_fails_with_400() -> None:
    service = Service("strict")

    @service.handler
    async def work(ctx: Context, numbers: list[int]) -> int:
        return sum(numbers)

    async def main() -> None:
        node = FakeNode()
        node.connect([service])
        assert await node.call("strict", "work", b"[1,2]") == b"3"
        for wrong in (b"{", b'"x"', b'[1,"x"]', b"", b"\xff"):
            with pytest.raises(TerminalError) as caught:
                await node.call("strict", "work", wrong)
            assert caught.value.code == 400

    asyncio.run(main())


def test_an_unknown_handler_is_an_error_of_the_attempt() -> None:
    service = Service("known")

    @service.handler
    async def work(ctx: Context) -> None: ...

    async def main() -> None:
        node = FakeNode()
        node.connect([service])
        invocation = node.invoke("unknown", "work")
        await until(lambda: invocation.errors)

        assert invocation.errors[0].code == 404

    asyncio.run(main())


def test_a_log_line_appears_once_over_all_attempts(caplog: pytest.LogCaptureFixture) -> None:
    service = Service("logs")

    @service.handler
    async def work(ctx: Context) -> None:
        ctx.log.info("before %s", "first")
        await ctx.run("first", lambda: None)
        ctx.log.info("after first")
        await ctx.run("second", lambda: None)
        ctx.log.info("after second", extra={"mine": 1})

    async def main() -> Invocation:
        node = FakeNode()
        node.crash_at = lambda frame: "after" if getattr(frame, "key", "") == "first" else None
        node.connect([service])
        invocation = node.invoke("logs", "work")
        await node.crashed.wait()
        node.crash_at = None
        node.connect([service])
        await node.result(invocation)
        return invocation

    with caplog.at_level(logging.INFO, "holdfast.service.logs"):
        invocation = asyncio.run(main())

    messages = [record.getMessage() for record in caplog.records]
    assert messages.count("before first") == 1
    assert messages.count("after second") == 1
    last = caplog.records[-1]
    assert last.__dict__["invocation_id"] == format_id(invocation.id)
    assert last.__dict__["mine"] == 1


def test_shutdown_hands_back_waiting_attempts_and_finishes_running_ones() -> None:
    service = Service("down")
    gate = asyncio.Event()
    running: list[str] = []

    async def hold() -> str:
        running.append("hold")
        await gate.wait()
        return "finished"

    @service.handler
    async def waits(ctx: Context) -> None:
        await ctx.sleep(days=300)

    @service.handler
    async def runs(ctx: Context) -> str:
        return await ctx.run("hold", hold)

    async def main() -> None:
        node = FakeNode()
        endpoint: Endpoint = node.connect([service], suspend_after=60.0)
        waiting, busy = node.invoke("down", "waits"), node.invoke("down", "runs")
        await until(lambda: running and len(waiting.steps) == 2)
        stopping = asyncio.ensure_future(endpoint.stop(grace=30.0))
        await until(lambda: waiting.status == "suspended")
        assert node.goaway
        gate.set()
        await stopping

        assert await node.result(busy) == b'"finished"'
        assert not endpoint.attempts

    asyncio.run(main())


def test_a_crash_between_intent_and_abandon_does_not_undo_the_timeout() -> None:
    """The firing of the timer is recorded before the code learns of it."""
    service = Service("plain")
    ran: list[str] = []

    async def slow() -> str:
        ran.append("slow")
        if len(ran) == 1:
            await asyncio.sleep(3600)
        return "slow"

    @service.handler
    async def race(ctx: Context) -> str:
        try:
            return await asyncio.wait_for(ctx.run("slow", slow), 0.03)
        except TimeoutError:
            return "timed out"

    async def main() -> None:
        node = FakeNode()
        node.crash_at = lambda frame: "after" if isinstance(frame, Intent) else None
        node.connect([service])
        invocation = node.invoke("plain", "race")
        await node.crashed.wait()
        node.crash_at = None
        node.connect([service])

        assert await node.result(invocation) == b'"timed out"'
        assert invocation.journal()[0] == ("value", "plain timer")

    asyncio.run(main())
