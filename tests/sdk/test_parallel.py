"""Plain asyncio around steps: whichever finishes first, and wherever the process dies, replay takes the same path."""

import asyncio
import random
from collections import Counter
from typing import Any

import pytest
import uvloop

from holdfast.sdk import Context, Service
from holdfast.sdk.definition import AnyService
from tests.sdk.fake_node import FakeNode, run_with_crashes


class Effects:
    """The effects of steps, by name; a journaled step must not take effect again."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.done: Counter[str] = Counter()

    async def do(self, name: str) -> str:
        await asyncio.sleep(self.random.random() * 0.004)
        self.done[name] += 1
        return name

    def do_sync(self, name: str) -> str:
        self.done[name] += 1
        return name


def parallel(effects: Effects) -> Service:
    service = Service("parallel")

    @service.handler
    async def gathered(ctx: Context, count: int) -> list[str]:
        return await asyncio.gather(*(ctx.run(f"step {n}", effects.do, f"step {n}") for n in range(count)))

    @service.handler
    async def branches(ctx: Context, count: int) -> list[str]:
        async def branch(n: int) -> str:
            first = await ctx.run("first", effects.do, f"{n} first")
            if n % 3 == 0:
                await ctx.sleep(0.05)
            second = await ctx.run("second", effects.do_sync, f"{n} second")
            return f"{first}, {second}"

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(branch(n)) for n in range(count)]
        return [task.result() for task in tasks]

    @service.handler
    async def nested(ctx: Context, count: int) -> list[list[str]]:
        async def leaf(n: int) -> str:
            return await ctx.run("leaf", effects.do, f"leaf {n}")

        async def inner(n: int) -> list[str]:
            before = await ctx.run("before", effects.do, f"before {n}")
            leaves = await asyncio.gather(*(leaf(10 * n + m) for m in range(3)), ctx.run("own", effects.do, f"own {n}"))
            return [before, *leaves]

        return await asyncio.gather(*(inner(n) for n in range(count)))

    @service.handler
    async def firsts(ctx: Context, count: int) -> list[list[str]]:
        """The first result decides what happens next: the order must be the same in every attempt."""
        winners = []
        tasks = {
            asyncio.create_task(ctx.run(f"r{n}", effects.do, f"r{n}") if n % 2 else sleep(ctx, n)): f"task {n}"
            for n in range(count)
        }
        while tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            names = sorted(tasks.pop(task) for task in done)
            winners.append(names)
            await ctx.run(f"after {' and '.join(names)}", effects.do, f"after {names}")
        return winners

    async def sleep(ctx: Context, n: int) -> None:
        await ctx.sleep(milliseconds=ctx.random.random() * 300)

    return service


async def crash_at_random(
    handler: str, seed: int, *, count: int, frames: int, latency: bool = True
) -> tuple[Any, Effects]:
    effects = Effects(seed)
    services: list[AnyService] = [parallel(effects)]
    node = FakeNode(seed=seed, latency=latency)
    node.connect(services)
    invocation = node.invoke("parallel", handler, str(count).encode())
    result = await run_with_crashes(node, services, invocation, crashes=4, frames=frames)
    assert not invocation.errors, invocation.errors
    return result, effects


@pytest.mark.parametrize("seed", range(6))
def test_fifty_parallel_steps_recover_in_any_order(seed: int) -> None:
    result, effects = asyncio.run(crash_at_random("gathered", seed, count=50, frames=40))

    assert result == b"[" + b",".join(b'"step %d"' % n for n in range(50)) + b"]"
    assert len(effects.done) == 50


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("handler", ["branches", "nested", "firsts"])
@pytest.mark.parametrize("seed", range(5))
def test_branches_recover_wherever_the_process_dies(handler: str, seed: int, run: Any) -> None:
    result, effects = run(crash_at_random(handler, seed, count=8, frames=25))

    assert result
    if handler == "branches":
        assert result == b"[" + b",".join(b'"%d first, %d second"' % (n, n) for n in range(8)) + b"]"
        assert len(effects.done) == 16


def test_of_ten_branches_the_finished_five_are_not_run_again() -> None:
    ran: Counter[str] = Counter()
    gate = asyncio.Event()
    service = Service("ten")

    async def work(n: int) -> int:
        ran[str(n)] += 1
        if n >= 5:
            await gate.wait()
        return n

    @service.handler
    async def ten(ctx: Context) -> list[int]:
        return await asyncio.gather(*(ctx.run(f"branch {n}", work, n) for n in range(10)))

    async def main() -> None:
        node = FakeNode()
        node.connect([service])
        invocation = node.invoke("ten", "ten")
        while len(invocation.steps) < 6:
            await asyncio.sleep(0.001)
        await node.crash()
        gate.set()
        node.connect([service])

        assert await node.result(invocation) == b"[0,1,2,3,4,5,6,7,8,9]"

    asyncio.run(main())

    assert [ran[str(n)] for n in range(10)] == [1] * 5 + [2] * 5
    assert ran.total() == 15


def test_the_order_of_first_completions_is_replayed_exactly() -> None:
    """Steps named after the winner so far: a different winner in replay would not find its step."""
    seen: list[list[str]] = []
    service = Service("order")

    @service.handler
    async def race(ctx: Context) -> list[str]:
        order: list[str] = []
        tasks = {asyncio.create_task(branch(ctx, n)): str(n) for n in range(6)}
        while tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            order += sorted(tasks.pop(task) for task in done)
            await ctx.run("-".join(order), lambda: None)
        seen.append(order)
        await ctx.run("last", lambda: None)
        return order

    async def branch(ctx: Context, n: int) -> None:
        if n % 2:
            await ctx.sleep(milliseconds=(7 * n) % 5 * 10)
        else:
            await ctx.run("work", asyncio.sleep, (11 * n) % 7 / 1000)

    async def main() -> None:
        node = FakeNode(latency=True)
        node.crash_at = lambda frame: "before" if getattr(frame, "key", "") == "last" else None
        node.connect([service])
        invocation = node.invoke("order", "race")
        for _ in range(3):
            await node.crashed.wait()
            node.connect([service])
        await node.crashed.wait()
        node.crash_at = None
        node.connect([service])
        await node.result(invocation)

        assert not invocation.errors

    asyncio.run(main())

    assert len(seen) == 5
    assert all(order == seen[0] for order in seen)


def test_a_task_factory_of_the_user_is_kept() -> None:
    made: list[str] = []
    service = Service("factory")

    @service.handler
    async def two(ctx: Context) -> list[str]:
        return list(await asyncio.gather(ctx.run("a", lambda: "a"), ctx.run("b", lambda: "b")))

    def factory(loop: asyncio.AbstractEventLoop, coro: Any) -> asyncio.Task[Any]:
        made.append(getattr(coro, "__qualname__", repr(coro)))
        return asyncio.Task(coro, loop=loop)

    async def main() -> None:
        asyncio.get_running_loop().set_task_factory(factory)
        node = FakeNode()
        node.connect([service])

        assert await node.call("factory", "two") == b'["a","b"]'

    asyncio.run(main())

    assert len(made) >= 3


def test_tasks_with_a_context_of_their_own_have_keys_of_their_own() -> None:
    import contextvars

    service = Service("contexts")

    @service.handler
    async def two(ctx: Context) -> list[int]:
        async def branch(n: int) -> int:
            await ctx.sleep(0.01)
            return await ctx.run("work", lambda: n)

        shared = contextvars.copy_context()
        tasks = [asyncio.get_running_loop().create_task(branch(n), context=shared) for n in range(3)]
        return [await task for task in tasks]

    async def main() -> None:
        node = FakeNode()
        node.connect([service])
        invocation = node.invoke("contexts", "two")

        assert await node.result(invocation) == b"[0,1,2]"
        assert {key for _, key in invocation.journal()} == {
            f"{n}:{name}" for n in (1, 2, 3) for name in ("sleep", "work")
        }

    asyncio.run(main())
