"""Suspension sees through what frameworks put between a handler and its steps: async generators, events, queues, locks,
streams and task groups, of asyncio and of anyio."""

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from typing import Any

import anyio
import pytest

from holdfast.sdk import Context, Service
from tests.sdk.fake_node import FakeNode, Invocation

Code = Callable[[Context, Awaitable[str]], Awaitable[str]]
CODES: dict[str, Code] = {}


def code(function: Code) -> Code:
    CODES[getattr(function, "__name__", "")] = function
    return function


@code
async def async_generator(ctx: Context, answer: Awaitable[str]) -> str:
    async def inner() -> AsyncIterator[str]:
        yield await answer

    async def outer() -> AsyncIterator[str]:
        async for each in inner():
            yield each

    async for each in outer():
        return each
    raise AssertionError


@code
async def anext_with_default(ctx: Context, answer: Awaitable[str]) -> str:
    async def inner() -> AsyncIterator[str]:
        yield await answer

    return await anext(inner(), "nothing")


@code
async def closing_a_generator(ctx: Context, answer: Awaitable[str]) -> str:
    found: list[str] = []

    async def inner() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            found.append(await answer)

    async with contextlib.aclosing(inner()) as numbers:  # type: ignore[type-var]
        await anext(numbers)
    return found[0]


@code
async def shield(ctx: Context, answer: Awaitable[str]) -> str:
    return await asyncio.shield(asyncio.ensure_future(answer))


@code
async def shield_in_gather(ctx: Context, answer: Awaitable[str]) -> str:
    found, _ = await asyncio.gather(asyncio.shield(asyncio.ensure_future(answer)), ctx.run("quick", str))
    return found


@code
async def context_manager(ctx: Context, answer: Awaitable[str]) -> str:
    @contextlib.asynccontextmanager
    async def manager() -> AsyncIterator[str]:
        yield await answer

    async with manager() as found:
        return found


@code
async def awaitable_object(ctx: Context, answer: Awaitable[str]) -> str:
    async def inner() -> str:
        return await answer

    class Wrapped:
        def __await__(self) -> Generator[Any, Any, str]:
            return inner().__await__()

    return await Wrapped()


@code
async def event(ctx: Context, answer: Awaitable[str]) -> str:
    ready = asyncio.Event()
    found: list[str] = []

    async def waiter() -> None:
        found.append(await answer)
        ready.set()

    task = asyncio.create_task(waiter())
    await ready.wait()
    await task
    return found[0]


@code
async def queue(ctx: Context, answer: Awaitable[str]) -> str:
    items: asyncio.Queue[str] = asyncio.Queue(1)

    async def producer() -> None:
        await items.put("first")
        await items.put("second")  # Waits until there is room.
        await items.put(await answer)

    async def late() -> str:
        task = asyncio.create_task(producer())
        found = [await items.get() for _ in range(3)]
        await task
        return found[-1]

    return await late()


@code
async def queue_join(ctx: Context, answer: Awaitable[str]) -> str:
    items: asyncio.Queue[int] = asyncio.Queue()
    found: list[str] = []

    async def worker() -> None:
        await items.get()
        found.append(await answer)
        items.task_done()

    items.put_nowait(1)
    task = asyncio.create_task(worker())
    await items.join()
    await task
    return found[0]


@code
async def lock_semaphore_and_condition(ctx: Context, answer: Awaitable[str]) -> str:
    lock, semaphore, condition = asyncio.Lock(), asyncio.Semaphore(1), asyncio.Condition()
    found: list[str] = []

    async def holder() -> None:
        async with lock, semaphore:
            found.append(await answer)
            async with condition:
                condition.notify_all()

    async def second(of: Any) -> None:
        async with of:
            pass

    async def third() -> None:
        async with condition:
            await condition.wait()

    waiting = asyncio.create_task(third())
    await asyncio.sleep(0)
    await asyncio.gather(holder(), second(lock), second(semaphore), waiting)
    return found[0]


@code
async def as_completed(ctx: Context, answer: Awaitable[str]) -> str:
    async def inner() -> str:
        return await answer

    for each in asyncio.as_completed([asyncio.create_task(inner())]):
        return await each
    raise AssertionError


@code
async def wait_of_gathered(ctx: Context, answer: Awaitable[str]) -> str:
    async def inner() -> str:
        return await answer

    gathered = asyncio.gather(inner(), asyncio.create_task(inner_two()))
    await asyncio.wait([gathered])
    return gathered.result()[0]


async def inner_two() -> str:
    return ""


@code
async def anyio_task_group(ctx: Context, answer: Awaitable[str]) -> str:
    found: list[str] = []

    async def inner(*, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        found.append(await answer)
        task_status.started()

    async with anyio.create_task_group() as group:
        await group.start(inner)
    return found[0]


@code
async def anyio_group_with_a_task_that_waits_for_ever(ctx: Context, answer: Awaitable[str]) -> str:
    found: list[str] = []

    async def inner() -> None:
        found.append(await answer)
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(anyio.sleep_forever)
        group.start_soon(anyio.Event().wait)
        group.start_soon(inner)
    return found[0]


@code
async def anyio_streams(ctx: Context, answer: Awaitable[str]) -> str:
    send, receive = anyio.create_memory_object_stream[str](0)

    async def producer() -> None:
        async with send:
            await send.send("first")
            await send.send(await answer)

    found: list[str] = []
    with anyio.CancelScope(), receive:
        async with anyio.create_task_group() as group:
            group.start_soon(producer)
            async for each in receive:
                found.append(each)
    return found[1]


@code
async def anyio_locks(ctx: Context, answer: Awaitable[str]) -> str:
    lock, semaphore, limiter, condition = anyio.Lock(), anyio.Semaphore(1), anyio.CapacityLimiter(1), anyio.Condition()
    found: list[str] = []

    async def holder() -> None:
        async with lock, semaphore, limiter:
            found.append(await answer)
            async with condition:
                condition.notify_all()

    async def second(of: Any) -> None:
        async with of:
            pass

    async def third() -> None:
        async with condition:
            await condition.wait()

    async with anyio.create_task_group() as group:
        group.start_soon(third)
        await anyio.lowlevel.checkpoint()
        group.start_soon(holder)
        for each in (lock, semaphore, limiter):
            group.start_soon(second, each)
    return found[0]


async def start(function: Code, **options: Any) -> tuple[FakeNode, Invocation, Any]:
    service = Service("waits", **options)

    @service.handler
    async def handler(ctx: Context) -> str:
        return await function(ctx, ctx.awakeable(str).future)

    node = FakeNode()
    endpoint = node.connect([service], suspend_after=0.05)
    return node, node.invoke("waits", "handler"), endpoint


@pytest.mark.parametrize("name", sorted(CODES))
async def test_an_attempt_is_suspended_behind(name: str) -> None:
    if name == "as_completed" and sys.version_info < (3, 13):
        pytest.skip("as_completed hides its futures before Python 3.13, so the attempt stays in memory")
    node, invocation, endpoint = await start(CODES[name])
    async with asyncio.timeout(20):
        await invocation.suspended.wait()

    assert not endpoint.attempts
    assert invocation.waiting == [1]
    node.complete(invocation, 1, [0, b'"yes"'])
    assert await node.result(invocation) == b'"yes"'
    assert invocation.epoch == 2


async def stays(node: FakeNode, invocation: Invocation) -> bool:
    await asyncio.sleep(0.5)  # Ten times suspend_after.
    return invocation.epoch == 1 and not invocation.suspended.is_set()


async def test_what_is_not_recognised_keeps_the_attempt_in_memory() -> None:
    outside = asyncio.get_running_loop().create_future()
    foreign = asyncio.get_running_loop().create_task(asyncio.sleep(3600))

    async def future(ctx: Context, answer: Awaitable[str]) -> str:
        async def inner() -> AsyncIterator[str]:
            yield await outside

        task = asyncio.ensure_future(anext(inner()))
        return await answer + await task

    async def completed(ctx: Context, answer: Awaitable[str]) -> str:
        async def inner() -> str:
            for each in asyncio.as_completed([foreign]):
                await each
            return ""

        task = asyncio.create_task(inner())
        return await answer + await task

    async def thread(ctx: Context, answer: Awaitable[str]) -> str:
        release = threading.Event()
        try:
            task = asyncio.create_task(anyio.to_thread.run_sync(release.wait, abandon_on_cancel=True))
            return await answer + str(await task)
        finally:
            release.set()

    async def shielded(ctx: Context, answer: Awaitable[str]) -> str:
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(anext(inner(asyncio.shield(future))))
        return await answer + await task

    async def inner(future: Awaitable[str]) -> AsyncIterator[str]:
        yield await future

    for function in (future, completed, thread, shielded):
        node, invocation, endpoint = await start(function)
        assert await stays(node, invocation), function.__name__
        await endpoint.stop(0)
    foreign.cancel()


async def test_local_waits_without_a_step_keep_the_attempt_in_memory() -> None:
    set_from_outside: list[asyncio.Event] = []

    async def function(ctx: Context, answer: Awaitable[str]) -> str:
        set_from_outside.append(asyncio.Event())
        await set_from_outside[0].wait()
        return "set"

    node, invocation, _ = await start(function)
    assert await stays(node, invocation)
    set_from_outside[0].set()
    assert await node.result(invocation) == b'"set"'


async def test_the_function_of_a_step_keeps_the_attempt_in_memory() -> None:
    release: list[asyncio.Event] = []

    async def function(ctx: Context, answer: Awaitable[str]) -> str:
        async def work() -> str:
            release.append(asyncio.Event())
            await release[0].wait()
            return "worked"

        async with asyncio.TaskGroup() as group:
            task = group.create_task(ctx.run("work", work))
            group.create_task(answer)  # type: ignore[arg-type]
        return task.result()

    node, invocation, _ = await start(function)
    assert await stays(node, invocation)
    release[0].set()
    async with asyncio.timeout(20):
        await invocation.suspended.wait()
    node.complete(invocation, 1, [0, b'"yes"'])
    assert await node.result(invocation) == b'"worked"'
    assert len(release) == 1


@pytest.mark.parametrize("of", ["service", "handler"])
async def test_suspend_false_keeps_an_attempt_that_something_outside_moves(of: str) -> None:
    from_thread = asyncio.Event()
    service = Service("waits", suspend=False if of == "service" else None)

    @service.handler(suspend=False if of == "handler" else None)
    async def handler(ctx: Context) -> str:
        approval = asyncio.create_task(ctx.awakeable(str).future)
        await from_thread.wait()
        approval.cancel()
        return "set"

    node = FakeNode()
    node.connect([service], suspend_after=0.05)
    invocation = node.invoke("waits", "handler")
    assert await stays(node, invocation)
    loop = asyncio.get_running_loop()
    threading.Thread(target=loop.call_soon_threadsafe, args=(from_thread.set,)).start()
    assert await node.result(invocation) == b'"set"'
    assert invocation.epoch == 1


async def test_a_callback_on_its_way_is_awaited_before_an_attempt_is_handed_back() -> None:
    async def function(ctx: Context, answer: Awaitable[str]) -> str:
        """Most of the time every task waits for an event that a callback is about to set."""
        loop, done = asyncio.get_running_loop(), False

        async def busy() -> None:
            while not done:
                turn = asyncio.Event()
                loop.call_soon(loop.call_soon, loop.call_soon, turn.set)
                await turn.wait()

        task = asyncio.create_task(busy())
        found = await answer
        done = True
        await task
        return found

    node, invocation, _ = await start(function)
    assert await stays(node, invocation)
    node.complete(invocation, 1, [0, b'"yes"'])
    assert await node.result(invocation) == b'"yes"'
