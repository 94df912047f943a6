"""Handlers share locks, queues and streams with each other: an attempt that another one moves stays in memory."""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from holdfast.sdk import Context, Service
from tests.sdk.fake_node import FakeNode


class Limit:
    """Any kind of lock: the holder has it until it is done."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.lock = make()

    async def hold(self, work: Awaitable[None]) -> None:
        async with self.lock:
            await work

    async def wait(self) -> None:
        async with self.lock:
            pass


class LazyLimit(Limit):
    """The first invocation that needs the lock creates it."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    @functools.cached_property
    def lock(self) -> Any:
        return self.make()


class Events:
    def __init__(self) -> None:
        self.event = asyncio.Event()

    async def hold(self, work: Awaitable[None]) -> None:
        await work
        self.event.set()

    async def wait(self) -> None:
        await self.event.wait()


class Conditions:
    def __init__(self, make: Callable[[], Any]) -> None:
        self.condition = make()

    async def hold(self, work: Awaitable[None]) -> None:
        await work
        async with self.condition:
            self.condition.notify_all()

    async def wait(self) -> None:
        async with self.condition:
            await self.condition.wait()


class Queues:
    def __init__(self) -> None:
        self.queue: asyncio.Queue[int] = asyncio.Queue()

    async def hold(self, work: Awaitable[None]) -> None:
        await work
        await self.queue.put(1)

    async def wait(self) -> None:
        await self.queue.get()


class Joins(Queues):
    async def hold(self, work: Awaitable[None]) -> None:
        self.queue.put_nowait(1)
        await work
        self.queue.task_done()

    async def wait(self) -> None:
        await self.queue.join()


class Streams:
    def __init__(self) -> None:
        self.send, self.receive = anyio.create_memory_object_stream[int]()

    async def hold(self, work: Awaitable[None]) -> None:
        await work
        await self.send.send(1)

    async def wait(self) -> None:
        await self.receive.receive()


SHARED: dict[str, Callable[[], Any]] = {
    "semaphore": lambda: Limit(lambda: asyncio.BoundedSemaphore(1)),
    "lock": lambda: Limit(asyncio.Lock),
    "anyio lock": lambda: Limit(anyio.Lock),
    "anyio semaphore": lambda: Limit(lambda: anyio.Semaphore(1)),
    "anyio limiter": lambda: Limit(lambda: anyio.CapacityLimiter(1)),
    "lazy anyio lock": lambda: LazyLimit(anyio.Lock),
    "lazy anyio limiter": lambda: LazyLimit(lambda: anyio.CapacityLimiter(1)),
    "lazy lock": lambda: LazyLimit(asyncio.Lock),
    "event": Events,
    "condition": lambda: Conditions(asyncio.Condition),
    "anyio condition": lambda: Conditions(anyio.Condition),
    "queue": Queues,
    "join": Joins,
    "anyio stream": Streams,
}

# Made before there is a loop, as in a module.
ADAPTERS: dict[str, Any] = {
    "adapted anyio lock": Limit(anyio.Lock),
    "adapted anyio semaphore": Limit(lambda: anyio.Semaphore(1)),
    "adapted anyio limiter": Limit(lambda: anyio.CapacityLimiter(1)),
}


@pytest.mark.parametrize("name", [*SHARED, *ADAPTERS])
async def test_an_attempt_that_another_one_moves_stays_in_memory(name: str) -> None:
    """The second invocation tells the id of its awakeable only when the first lets it: suspended, it never would."""
    shared = ADAPTERS[name] if name in ADAPTERS else SHARED[name]()
    release = asyncio.Event()
    service = Service("shared")

    @service.handler
    async def first(ctx: Context) -> None:
        await shared.hold(ctx.run("work", release.wait))

    @service.handler
    async def second(ctx: Context) -> str:
        awakeable = ctx.awakeable(str)

        async def ask() -> None:
            await shared.wait()
            await ctx.run("ask", str)

        task = asyncio.create_task(ask())
        found = await awakeable.future
        await task
        return found

    node = FakeNode()
    node.connect([service], suspend_after=0.05)
    holder = node.invoke("shared", "first")
    await asyncio.sleep(0.1)
    waiter = node.invoke("shared", "second")
    await asyncio.sleep(0.5)  # Ten times suspend_after.

    assert not waiter.suspended.is_set()
    release.set()
    await node.result(holder)
    async with asyncio.timeout(20):
        while len(waiter.journal()) < 2:
            await asyncio.sleep(0.01)
    node.complete(waiter, 1, [0, b'"yes"'])
    assert await node.result(waiter) == b'"yes"'
    assert waiter.epoch == 1


async def test_a_task_group_with_tasks_of_a_step_keeps_the_attempt_in_memory() -> None:
    release = asyncio.Event()
    service = Service("groups")

    @service.handler
    async def handler(ctx: Context) -> str:
        answer = ctx.awakeable(str).future
        found: list[str] = []

        async def poll() -> None:
            await release.wait()
            answered.cancel()

        async def begin() -> None:
            group.create_task(poll())

        async with asyncio.TaskGroup() as group:
            answered = group.create_task(answer)
            await ctx.run("begin", begin)
        return "".join(found)

    node = FakeNode()
    node.connect([service], suspend_after=0.05)
    invocation = node.invoke("groups", "handler")
    await asyncio.sleep(0.5)
    assert not invocation.suspended.is_set()
    release.set()
    assert await node.result(invocation) == b'""'


async def test_a_queue_that_cannot_be_hashed_keeps_the_attempt_in_memory() -> None:
    class Same(asyncio.Queue[int]):
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            return True

    service = Service("queues")

    @service.handler
    async def handler(ctx: Context) -> str:
        queue = Same()
        task = asyncio.create_task(queue.get())
        found = await ctx.awakeable(str).future
        queue.put_nowait(1)
        return found + str(await task)

    node = FakeNode()
    node.connect([service], suspend_after=0.05)
    invocation = node.invoke("queues", "handler")
    await asyncio.sleep(0.3)
    assert not invocation.suspended.is_set()
    node.complete(invocation, 1, [0, b'"yes"'])
    assert await node.result(invocation) == b'"yes1"'
