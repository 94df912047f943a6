"""Plain asyncio and anyio in handlers: every attempt makes the same decisions.

docs/handlers.md lists what is tested here.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import pytest
import uvloop

from holdfast.sdk import Context, MisusedContext, Service, timers
from holdfast.sdk.endpoint import Endpoint
from tests.sdk.fake_node import FakeNode
from tests.sdk.test_requests import drive

Body = Callable[[Context], Awaitable[Any]]
BODIES: dict[str, Body] = {}


def body(function: Body) -> Body:
    BODIES[function.__name__.replace("_", " ").strip()] = function
    return function


async def work(name: str) -> str:
    return name


def quick(ctx: Context, name: str = "quick") -> Awaitable[str]:
    return ctx.run(name, work, name)


async def later(ctx: Context, seconds: float) -> str:
    """A step that takes a while: FakeNode's time is a hundred times as fast."""
    await ctx.sleep(seconds)
    return f"after {seconds}"


@body
async def gather(ctx: Context) -> Any:
    return await asyncio.gather(later(ctx, 2), quick(ctx), later(ctx, 1))


@body
async def gather_with_exceptions(ctx: Context) -> Any:
    async def fails() -> None:
        await ctx.sleep(1)
        raise ValueError("no")

    found = await asyncio.gather(fails(), quick(ctx), return_exceptions=True)
    return [str(each) for each in found]


@body
async def wait_for_all(ctx: Context) -> Any:
    done, pending = await asyncio.wait([asyncio.create_task(later(ctx, n)) for n in (2, 1)])
    return [len(done), len(pending)]


@body
async def wait_for_the_first(ctx: Context) -> Any:
    tasks = {asyncio.create_task(later(ctx, n)): n for n in (5, 1)}
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    return [sorted(tasks[each] for each in done), sorted(tasks[each] for each in pending)]


@body
async def wait_for_the_first_exception(ctx: Context) -> Any:
    async def fails() -> None:
        await ctx.sleep(1)
        raise ValueError("no")

    tasks = [asyncio.create_task(fails()), asyncio.create_task(later(ctx, 100))]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    return [str(task.exception()) for task in done] + [len(pending)]


@body
async def wait_with_a_timeout_that_is_hit(ctx: Context) -> Any:
    task = asyncio.create_task(later(ctx, 5))
    done, _ = await asyncio.wait([task], timeout=0.01)
    return {"late": not done, "value": await task}


@body
async def wait_with_a_timeout_that_is_not_hit(ctx: Context) -> Any:
    task = asyncio.create_task(later(ctx, 1))
    done, _ = await asyncio.wait([task], timeout=30)
    return {"late": not done, "value": await task}


@body
async def wait_for_a_shielded_task(ctx: Context) -> Any:
    task = asyncio.create_task(later(ctx, 5))
    try:
        await asyncio.wait_for(asyncio.shield(task), 0.01)
        late = False
    except TimeoutError:
        late = True
    return {"late": late, "value": await task}


@body
async def wait_for_that_gives_up(ctx: Context) -> Any:
    try:
        return await asyncio.wait_for(later(ctx, 1000), 0.01)
    except TimeoutError:
        return await quick(ctx, "late")


@body
async def timeout(ctx: Context) -> Any:
    found = []
    for seconds in (1000, 0.1):
        try:
            async with asyncio.timeout(0.03 if seconds == 1000 else 30):
                found.append(await later(ctx, seconds))
        except TimeoutError:
            found.append("late")
    return found


@body
async def timeout_that_is_moved(ctx: Context) -> Any:
    try:
        async with asyncio.timeout(None) as scope:
            await quick(ctx)
            scope.reschedule(asyncio.get_running_loop().time() + 0.01)
            await ctx.awakeable().future
    except TimeoutError:
        return "late"


@body
async def nested_timeouts(ctx: Context) -> Any:
    found = []
    try:
        async with asyncio.timeout(30):
            try:
                async with asyncio.timeout(0.01):
                    await ctx.awakeable().future
            except TimeoutError:
                found.append("inner")
            found.append(await quick(ctx))
    except TimeoutError:
        found.append("outer")
    return found


@body
async def as_completed(ctx: Context) -> Any:
    operations = [ctx.sleep(3), quick(ctx), asyncio.create_task(later(ctx, 1))]
    return [await each for each in asyncio.as_completed(operations)]


@body
async def as_completed_with_a_timeout(ctx: Context) -> Any:
    found: list[Any] = []
    try:
        for each in asyncio.as_completed([ctx.sleep(1), ctx.sleep(1000)], timeout=0.05):
            await each
            found.append("in time")
    except TimeoutError:
        found.append("late")
    return found


@body
async def operations_as_tasks(ctx: Context) -> Any:
    tasks = {asyncio.create_task(ctx.sleep(n)): n for n in (3, 1, 2)}
    order = []
    while tasks:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        order.append(sorted(tasks.pop(each) for each in done))
    return order


@body
async def task_group(ctx: Context) -> Any:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(later(ctx, n)) for n in (2, 1)]
    return [task.result() for task in tasks]


@body
async def task_group_that_fails(ctx: Context) -> Any:
    async def fails() -> None:
        await ctx.sleep(1)
        raise ValueError("no")

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(later(ctx, 1000))
            group.create_task(fails())
    except ExceptionGroup as errors:
        return [str(error) for error in errors.exceptions]


@body
async def event(ctx: Context) -> Any:
    found, ready = [], asyncio.Event()

    async def waits() -> None:
        await ready.wait()
        found.append(await quick(ctx))

    task = asyncio.create_task(waits())
    await ctx.sleep(1)
    ready.set()
    await task
    return found


@body
async def queue(ctx: Context) -> Any:
    found, todo = [], asyncio.Queue[int](maxsize=2)

    async def worker() -> None:
        while (n := await todo.get()) >= 0:
            found.append([n, await later(ctx, n)])
            todo.task_done()

    workers = [asyncio.create_task(worker()) for _ in range(2)]
    for n in (3, 1, 2, 1, -1, -1):
        await todo.put(n)
    await asyncio.gather(*workers)
    return found


@body
async def lock_and_semaphore(ctx: Context) -> Any:
    found, lock, few = [], asyncio.Lock(), asyncio.Semaphore(2)

    async def one(n: int) -> None:
        async with few:
            await ctx.sleep(3 - n)
            async with lock:
                found.append([n, await quick(ctx, f"step{n}")])

    await asyncio.gather(*(one(n) for n in range(3)))
    return found


@body
async def condition(ctx: Context) -> Any:
    found, changed, numbers = [], asyncio.Condition(), list[int]()

    async def waits() -> None:
        async with changed:
            await changed.wait_for(lambda: len(numbers) == 2)
            found.append(await quick(ctx))

    task = asyncio.create_task(waits())
    for n in range(2):
        await ctx.sleep(1)
        async with changed:
            numbers.append(n)
            changed.notify_all()
    await task
    return found


@body
async def barrier(ctx: Context) -> Any:
    found, together = [], asyncio.Barrier(3)

    async def one(n: int) -> None:
        await ctx.sleep(n)
        await together.wait()
        found.append(await quick(ctx, f"step{n}"))

    await asyncio.gather(*(one(n) for n in range(3)))
    return found


@body
async def thread(ctx: Context) -> Any:
    return [await asyncio.to_thread(lambda: "computed"), await quick(ctx)]


@body
async def turns(ctx: Context) -> Any:
    found = []

    async def one(n: int) -> None:
        for _ in range(n):
            await asyncio.sleep(0)
        found.append(await quick(ctx, f"step{n}"))

    await asyncio.gather(*(one(n) for n in range(3)))
    return found


@body
async def sleep(ctx: Context) -> Any:
    found = []

    async def one(n: int) -> None:
        await asyncio.sleep(0.01 * n)
        found.append(await quick(ctx, f"step{n}"))

    await asyncio.gather(*(one(n) for n in (3, 1, 2)))
    return found


@body
async def sleep_against_a_step(ctx: Context) -> Any:
    tasks = [asyncio.create_task(asyncio.sleep(0.02, "timer")), asyncio.create_task(later(ctx, 3))]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    first = [str(task.result()) for task in done]
    return first + [str(await task) for task in tasks]


@body
async def async_generator(ctx: Context) -> Any:
    async def numbers() -> AsyncIterator[str]:
        for n in range(3):
            await asyncio.sleep(0.001)
            yield await quick(ctx, f"step{n}")

    return [each async for each in numbers()]


@body
async def call_later(ctx: Context) -> Any:
    loop, future = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
    handle = loop.call_later(0.01, future.set_result, "called")
    other = loop.call_at(loop.time() + 30, future.set_result, "never")
    assert handle.when() < other.when()
    found = await future
    other.cancel()
    return [found, other.cancelled()]


@body
async def anyio_task_group(ctx: Context) -> Any:
    found = []

    async def one(n: int) -> None:
        found.append(await later(ctx, n))

    async with anyio.create_task_group() as group:
        for n in (2, 1):
            group.start_soon(one, n)
    return found


@body
async def anyio_move_on_after(ctx: Context) -> Any:
    found: list[Any] = []
    for seconds in (1000, 0.1):
        with anyio.move_on_after(0.02 if seconds == 1000 else 30) as scope:
            found.append(await later(ctx, seconds))
        found.append(scope.cancelled_caught)
    return found


@body
async def anyio_fail_after(ctx: Context) -> Any:
    try:
        with anyio.fail_after(0.01):
            await ctx.awakeable().future
    except TimeoutError:
        return await quick(ctx, "late")


@body
async def anyio_event_and_streams(ctx: Context) -> Any:
    found, ready = [], anyio.Event()
    send, receive = anyio.create_memory_object_stream[str](2)

    async def produce() -> None:
        async with send:
            for n in (2, 1):
                await send.send(await later(ctx, n))
        ready.set()

    async with anyio.create_task_group() as group:
        group.start_soon(produce)
        async with receive:
            async for each in receive:
                found.append(each)
        await ready.wait()
    await anyio.sleep(0.001)
    return found


async def attempts_of(name: str) -> tuple[list[Any], Any]:
    """The decisions of two attempts; the second one has the whole journal of the first."""
    seen: list[Any] = []
    service = Service("plain")

    @service.handler
    async def handle(ctx: Context) -> int:
        found = await BODIES[name](ctx)
        pause = ctx.sleep(10)  # Raises in an attempt that has ended: asyncio.wait does not inform its code.
        seen.append(found)
        await pause  # It is suspended here.
        return 0

    node = FakeNode()
    node.connect([service], suspend_after=0.02)
    invocation = node.invoke("plain", "handle")
    ends = [asyncio.ensure_future(event.wait()) for event in (invocation.done, invocation.paused)]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED, timeout=30)
    for end in ends:
        end.cancel()
    assert not invocation.errors
    assert invocation.done.is_set()
    return seen, invocation


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("name", BODIES)
def test_code_decides_the_same_in_every_attempt(name: str, run: Any) -> None:
    seen, invocation = run(attempts_of(name))

    assert invocation.epoch >= len(seen) >= 2
    assert all(each == seen[0] for each in seen), seen


def test_a_timer_that_fired_decides_in_replay_too() -> None:
    """Its step had completed when the next attempt began; without the journal, it would no longer be late."""
    seen, invocation = asyncio.run(attempts_of("wait with a timeout that is hit"))

    assert seen == [{"late": True, "value": "after 5"}] * len(seen)
    assert ("value", "plain timer") in invocation.journal()


def test_as_completed_of_coroutines_is_refused_because_it_starts_them_in_any_order() -> None:
    service = Service("plain")

    @service.handler
    async def handle(ctx: Context) -> int:
        with pytest.raises(MisusedContext, match="create_task"):
            for each in asyncio.as_completed([later(ctx, 1)]):
                await each
        return 0

    async def main() -> None:
        node = FakeNode()
        node.connect([service])
        assert await node.call("plain", "handle") == b"0"

    asyncio.run(main())


def test_a_timer_that_did_not_fire_leaves_no_step() -> None:
    _, invocation = asyncio.run(attempts_of("wait with a timeout that is not hit"))

    assert [op for op, _ in invocation.journal()] == ["sleep", "sleep"]


def test_requests_fire_timers_too() -> None:
    service = Service("plain")

    @service.handler
    async def handle(ctx: Context) -> list[Any]:
        first = await asyncio.gather(asyncio.sleep(0.02, "slept"), quick(ctx))
        return [*first, await sleep_against_a_step(ctx)]

    async def main() -> None:
        node = FakeNode()
        invocation = node.invoke("plain", "handle")
        async with asyncio.timeout(30):
            await drive(node, Endpoint([service]), invocation)

        assert invocation.outcome is not None
        assert invocation.outcome[1].startswith(b'["slept","quick",[')

    asyncio.run(main())


def test_a_journal_without_records_of_timers_is_replayed_as_before() -> None:
    """An SDK that did not record timers wrote it: the timer runs again, and the code finds its next step."""
    service = Service("plain")
    ran: list[str] = []

    @service.handler
    async def handle(ctx: Context) -> str:
        await ctx.run("first", ran.append, "first")
        await asyncio.sleep(0.01)
        try:
            async with asyncio.timeout(0.01):
                await ctx.awakeable().future
        except TimeoutError:
            await ctx.run("late", ran.append, "late")
        await ctx.sleep(10)
        return "done"

    async def main() -> None:
        node = FakeNode()
        node.connect([service], suspend_after=0.02)
        invocation = node.invoke("plain", "handle")
        async with asyncio.timeout(30):
            await invocation.suspended.wait()
            await node.crash()
            kept = [step for step in invocation.steps if not step.key.startswith(timers.NAME)]
            assert len(kept) == len(invocation.steps) - 2
            invocation.steps[:] = kept
            node.complete(invocation, 4, [0, b""])
            node.connect([service], suspend_after=0.02)
            node._begin(invocation)

            assert await node.result(invocation) == b'"done"'

    asyncio.run(main())

    assert ran == ["first", "late"]


def test_timers_of_functions_of_steps_and_of_the_rest_of_the_process_are_left_alone() -> None:
    service = Service("plain")

    async def slow() -> str:
        async with asyncio.timeout(30):
            await asyncio.sleep(0.01)
        return await asyncio.wait_for(asyncio.sleep(0.01, "slept"), 30)

    @service.handler
    async def handle(ctx: Context) -> str:
        return await ctx.run("slow", slow)

    async def main() -> None:
        node = FakeNode()
        node.connect([service])
        invocation = node.invoke("plain", "handle")

        assert await node.result(invocation) == b'"slept"'
        assert invocation.journal() == [("run", "slow")]
        handle = asyncio.get_running_loop().call_later(1, lambda: None)
        assert not isinstance(handle, timers.PlainTimer)
        handle.cancel()

    asyncio.run(main())


def test_long_plain_timers_and_connections_outside_of_steps_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    service = Service("plain")

    @service.handler
    async def handle(ctx: Context) -> None:
        for _ in range(2):
            async with asyncio.timeout(3600):
                await quick(ctx)
            with pytest.raises(OSError):
                await asyncio.open_connection("127.0.0.1", 1)

    async def main() -> None:
        node = FakeNode()
        node.connect([service])
        for _ in range(2):
            await node.call("plain", "handle")

    with caplog.at_level(logging.WARNING, "holdfast.sdk"):
        asyncio.run(main())

    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2
    assert "plain/handle inv_" in texts[0] and "timer of 3600 s" in texts[0] and "test_timers.py:" in texts[0]
    assert (
        "opens a connection or a process" in texts[1]
        and "outside a step" in texts[1]
        and "ctx.run" in texts[1]
        and "test_timers.py:" in texts[1]
    )
