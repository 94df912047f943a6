"""Mistakes in user code: each is an error that says what to do, and none of them harms another invocation."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from holdfast.sdk import (
    Context,
    JournalTooLong,
    MisusedContext,
    ObjectContext,
    Service,
    ServiceRef,
    TerminalError,
    VirtualObject,
    Workflow,
    WorkflowContext,
)
from holdfast.sdk.definition import AnyService
from holdfast.sdk.frames import Blocked, Credit, Error, Frame, Goaway, Piece, RunFailed
from holdfast.sdk.journal import Failure, Op
from tests.sdk.fake_node import FakeNode, Invocation


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


def test_invalid_names_and_arguments_are_refused_at_the_call() -> None:
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


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("what", ["run", "send", "sleep", "now", "bytes", "tasks"])
def test_at_the_limit_of_its_journal_the_code_gets_one_error_and_compensates(what: str, crash: bool) -> None:
    service = Service("long")
    ran: list[str] = []

    async def one(ctx: Context, n: int) -> None:
        match what:
            case "run" | "tasks":
                await ctx.run("one", ran.append, f"one {n}")
            case "send":
                ctx.send("long/quiet")
            case "sleep":
                await ctx.sleep(milliseconds=1)
            case "now":
                ctx.now()
            case "bytes":
                await ctx.run("one", lambda: "x" * 1000)

    @service.handler
    async def quiet(ctx: Context) -> None: ...

    @service.handler
    async def loop(ctx: Context) -> str:
        done = 0
        try:
            if what == "tasks":
                try:
                    async with asyncio.TaskGroup() as group:
                        for n in range(30):
                            group.create_task(one(ctx, n))
                except BaseExceptionGroup as failed:
                    raise failed.exceptions[0] from None
            for done in range(1000):
                await one(ctx, done)
        except JournalTooLong as error:
            for n in range(3):
                await ctx.run("undo", ran.append, f"undo {n}")
            raise TerminalError(f"{error.code} after {done}", code=413) from None
        return "never"

    async def main() -> Invocation:
        node = FakeNode(limits=(12, 0) if what != "bytes" else (0, 5000))
        node.connect([service])
        invocation = node.invoke("long", "loop")

        def look(frame: Frame) -> str | None:
            if isinstance(frame, Credit | Goaway | Piece | Blocked):
                return None
            return "after" if crash and frame.invocation == invocation.id else None

        node.crash_at = look
        async with asyncio.timeout(60):
            while not invocation.done.is_set():
                if node.link is None:
                    node.connect([service])
                await asyncio.sleep(0.001)
        return invocation

    invocation = asyncio.run(main())

    told = [step for step in invocation.steps if step.outcome and step.outcome[3:] == ["JournalTooLong"]]
    assert len(told) == 1 and told[0].op == Op.RUN
    assert invocation.outcome is not None and invocation.outcome[0] == 1 and invocation.outcome[2].startswith("413")
    assert [text for text in ran if text.startswith("undo")] == ["undo 0", "undo 1", "undo 2"]


def test_the_handlers_log_warns_once_before_a_journal_is_too_long(caplog: pytest.LogCaptureFixture) -> None:
    service = Service("long")

    @service.handler
    async def loop(ctx: Context) -> None:
        for _ in range(9):
            await ctx.run("one", str)

    async def main(limit: int) -> None:
        node = FakeNode(limits=(limit, 0))
        node.connect([service])
        await node.call("long", "loop")

    asyncio.run(main(20))
    assert not caplog.records
    asyncio.run(main(11))

    [record] = caplog.records
    assert "80 % of its limit (11 steps" in record.getMessage() and "long/loop" in record.getMessage()


def pauses_at_once(service: AnyService, handler: str, *, key: str | None = None) -> Failure:
    """The error for which a handler pauses in its first attempt."""

    async def main() -> Failure:
        node = FakeNode()
        node.connect([service])
        invocation = node.invoke(service.name, handler, key=key)
        async with asyncio.timeout(60):
            await invocation.paused.wait()
        assert invocation.epoch == 1 and len(invocation.errors) == 1
        return invocation.errors[0]

    return asyncio.run(main())


def test_a_step_inside_a_step_pauses_at_once() -> None:
    service = Service("wrong")

    @service.handler
    async def nested(ctx: Context) -> None:
        async def outer() -> None:
            await ctx.run("inner", str)

        await ctx.run("outer", outer)

    assert "not inside a function given to ctx.run" in pauses_at_once(service, "nested").message


def test_state_in_a_service_without_keys_pauses_at_once_with_the_reason() -> None:
    service = Service("wrong")

    @service.handler
    async def state(ctx: Context) -> None:
        await ctx.get("count")  # type: ignore[attr-defined]

    assert "define the service as a VirtualObject" in pauses_at_once(service, "state").message


def test_a_promise_of_an_object_pauses_at_once_with_the_reason() -> None:
    service = VirtualObject("wrong")

    @service.handler
    async def promise(ctx: ObjectContext) -> None:
        ctx.promise("p")  # type: ignore[attr-defined]

    assert "define the service as a Workflow" in pauses_at_once(service, "promise", key="k").message


@pytest.mark.parametrize(
    "wrong",
    [
        lambda ctx: ctx.sleep(-1),
        lambda ctx: ctx.sleep("1h"),
        lambda ctx: ctx.sleep(days=1e12),
        lambda ctx: ctx.sleep(hours="1"),
        lambda ctx: ctx.sleep(float("nan")),
        lambda ctx: ctx.timeout(ctx.awakeable().future, "1h"),
        lambda ctx: ctx.run("", str),
        lambda ctx: ctx.run(7, str),
    ],
)
def test_arguments_that_an_operation_cannot_take_pause_at_once(wrong: Callable[[Any], Any]) -> None:
    service = Service("wrong")

    @service.handler
    async def argument(ctx: Context) -> None:
        await wrong(ctx)

    assert pauses_at_once(service, "argument").kind == "BadArgument"


@pytest.mark.parametrize(
    "use",
    [
        lambda ctx: ctx.now(),
        lambda ctx: ctx.random,
        lambda ctx: ctx.awakeable(str),
        lambda ctx: ctx.run("step", print),
    ],
)
def test_a_context_does_not_work_in_a_thread_of_its_handler(use: Callable[[Context], object]) -> None:
    service = Service("threads")

    @service.handler
    async def handler(ctx: Context) -> None:
        await asyncio.to_thread(use, ctx)

    failure = pauses_at_once(service, "handler")
    assert failure.kind == "MisusedContext" and "not in another thread" in failure.message


@pytest.mark.parametrize("where", ["handler", "step", "thread", "task"])
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_an_exit_raised_by_code_fails_its_attempt_and_nothing_else(where: str, kind: type[BaseException]) -> None:
    service = Service("exits")
    tries: list[int] = []

    def leave() -> str:
        tries.append(1)
        if len(tries) == 1:
            raise kind(3)
        return "stayed"

    async def leave_async() -> str:
        await asyncio.sleep(0)
        return leave()

    @service.handler
    async def handler(ctx: Context) -> str:
        match where:
            case "handler":
                return leave()
            case "step":
                return await ctx.run("leave", leave_async)
            case "thread":
                return await ctx.run("leave", leave)
            case _:
                return await asyncio.create_task(leave_async())

    async def main() -> None:
        node = FakeNode()
        node.connect([service])
        invocation = node.invoke("exits", "handler")
        assert await node.result(invocation) == b'"stayed"'
        failures = [frame for frame in node.frames if isinstance(frame, Error | RunFailed)]
        assert [frame.failure[3] for frame in failures] == ["ExitRaised"]
        assert f"{kind.__name__}(3)" in failures[0].failure[2]
        assert failures[0].failure[4]["trace"][-1].endswith("<locals>.leave")

    asyncio.run(main())


@pytest.mark.parametrize("which", ["awakeable", "promise", "peek"])
def test_a_value_of_the_wrong_type_is_an_error_that_the_code_can_handle(which: str) -> None:
    flow = Workflow("flow")

    @flow.main
    async def main_handler(ctx: WorkflowContext) -> str:
        try:
            match which:
                case "awakeable":
                    awakeable = ctx.awakeable(int)
                    ctx.resolve_awakeable(awakeable.id, "seven")
                    await awakeable.future
                case "promise":
                    await ctx.promise("p").resolve("seven")
                    await ctx.promise("p", int)
                case "peek":
                    await ctx.promise("p").resolve("seven")
                    await ctx.promise("p", int).peek()
        except TerminalError as error:
            return f"{error.code} {error.kind}"
        return "read"

    async def main() -> None:
        node = FakeNode()
        node.connect([flow])
        assert json.loads(await node.call("flow", "main_handler", key="k")) == "400 BadValue"

    asyncio.run(main())


def test_an_option_meant_for_the_function_is_an_error_with_a_hint() -> None:
    service = Service("words")

    def put(key: str, value: int) -> None: ...

    @service.handler
    async def handler(ctx: Context) -> None:
        await ctx.run("put", put, value=7, key="a")

    assert "functools.partial(put, key=...)" in pauses_at_once(service, "handler").message


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


@pytest.mark.parametrize("forgets", ["run", "kept run", "sleep", "nothing"])
def test_a_forgotten_await_is_logged_once_with_its_place(forgets: str, caplog: pytest.LogCaptureFixture) -> None:
    service = Service(f"forgetful-{forgets.replace(' ', '-')}")
    ran: list[int] = []

    @service.handler
    async def handle(ctx: Context) -> int:
        match forgets:
            case "run":
                ctx.run("charge", ran.append, 1)
            case "kept run":
                kept = ctx.run("charge", ran.append, 1)
                assert not kept.done()
            case "sleep":
                ctx.sleep(5)
            case "nothing":
                await ctx.race(ctx.sleep(1000), ctx.run("charge", ran.append, 1))
                await asyncio.gather(ctx.run("again", ran.append, 2), ctx.sleep(1))
        return await ctx.run("after", lambda: 7)

    async def main() -> None:
        node = FakeNode()
        node.connect([service])
        for _ in range(2):
            assert await node.call(service.name, "handle") == b"7"

    with caplog.at_level("WARNING", "holdfast.sdk"):
        asyncio.run(main())

    texts = [record.getMessage() for record in caplog.records]
    if forgets == "nothing":
        assert texts == []
        return
    (text,) = texts
    assert f"{service.name}/handle inv_" in text and "never awaited" in text
    assert "sleep" in text if forgets == "sleep" else ("ctx.run('charge'" in text and "test_mistakes.py:" in text)
