"""The SDK and a real node: handlers behind the built-in server, clients at the ingress."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from holdfast.cluster.config import Config, HostPort
from holdfast.cluster.node import Node
from holdfast.sdk import (
    CallFailed,
    Client,
    Context,
    InvocationCancelled,
    NotReady,
    ObjectContext,
    RetryPolicy,
    Server,
    Service,
    SyncClient,
    TerminalError,
    VirtualObject,
    Workflow,
    WorkflowContext,
)


@dataclass
class Item:
    name: str
    price: int


class World:
    """Services of every kind, and the effects of their steps."""

    def __init__(self) -> None:
        self.done: Counter[str] = Counter()
        self.random = random.Random(7)
        self.awakeables: list[str] = []
        self.fruits = ["fig", "pear"]
        self.service = service = Service("work")
        self.counter = counter = VirtualObject("counter")
        self.approval = approval = Workflow("approval")

        @counter.handler
        async def add(ctx: ObjectContext, amount: int) -> int:
            value = (await ctx.get("value", int) or 0) + amount
            ctx.set("value", value)
            return value

        @counter.handler(shared=True)
        async def peek(ctx: ObjectContext) -> int | None:
            return await ctx.get("value", int)

        @service.handler
        async def everything(ctx: Context, item: Item) -> dict[str, Any]:
            first = await ctx.run("first", self.do, "first")
            both = await asyncio.gather(ctx.run("a", self.do, "a"), ctx.run("b", self.do_sync, "b"))
            await ctx.sleep(milliseconds=20)
            total = await ctx.call(add, item.price, key=item.name)
            await ctx.run("flaky", self.flaky, retry=RetryPolicy(initial=0.01))
            try:
                await ctx.call(fail)
            except TerminalError as error:
                failure = [error.message, error.code, error.metadata]
            try:
                await ctx.call("nobody/here")
            except TerminalError as error:
                missing = error.code
            late = await ctx.race(ctx.sleep(days=3), ctx.run("winner", self.do, "winner"))
            return {"first": first, "both": both, "total": total, "failure": failure, "missing": missing, "late": late}

        @service.handler
        async def fail(ctx: Context) -> None:
            raise TerminalError("no seats", code=418, metadata={"seat": "12A"})

        @service.handler
        async def approve(ctx: Context) -> bool:
            awakeable = ctx.awakeable(bool)
            await ctx.run("ask", self.awakeables.append, awakeable.id)
            return await awakeable.future

        @service.handler
        async def many(ctx: Context, count: int) -> int:
            async def branch(n: int) -> int:
                await ctx.run("one", self.do, f"{n} one")
                if n % 4 == 0:
                    await ctx.sleep(milliseconds=5)
                await ctx.run("two", self.do, f"{n} two")
                return n

            return sum(await asyncio.gather(*(branch(n) for n in range(count))))

        @service.handler
        async def sleepy(ctx: Context) -> str:
            try:
                await ctx.sleep(days=300)
            except InvocationCancelled:
                return await ctx.run("undo", self.do, "undone")
            return "slept"

        @service.handler
        async def twice(ctx: Context) -> list[Any]:
            calls = [ctx.call(tick, idempotency_key="once") for _ in range(2)]
            sent = ctx.send(tick, idempotency_key="once")
            return [calls[0].invocation_id, *await asyncio.gather(*calls), sent.invocation_id]

        @service.handler
        async def tick(ctx: Context) -> int:
            return await ctx.run("tick", self.tick)

        @counter.handler
        async def stuck(ctx: ObjectContext) -> None:
            await ctx.call("counter/stuck", key=ctx.key)

        @service.handler
        async def busy(ctx: Context) -> str:
            try:
                await ctx.run("wait", asyncio.sleep, 3600)
            except InvocationCancelled:
                return await ctx.run("undo", self.do, "undone")
            return "worked"

        @service.handler
        async def price(ctx: Context, fruit: str) -> str:
            return f"price-of-{fruit}"

        @service.handler
        async def prices(ctx: Context) -> dict[str, str]:
            self.fruits.reverse()  # As a set of strings may from one process to the next.
            found = {fruit: await ctx.call(price, fruit) for fruit in self.fruits}
            await ctx.sleep(1)
            return found

        @approval.main
        async def run(ctx: WorkflowContext, who: str) -> str:
            ctx.set("who", who)
            return f"{who}: {await ctx.promise('decision', str)}"

        @approval.handler
        async def asked(ctx: WorkflowContext) -> str | None:
            return await ctx.get("who", str)

        @approval.handler
        async def decide(ctx: WorkflowContext, what: str) -> str | None:
            await ctx.promise("decision", str).resolve(what)
            return await ctx.get("who", str)

        self.add, self.peek, self.everything, self.fail, self.approve = add, peek, everything, fail, approve
        self.many, self.sleepy, self.run, self.decide, self.prices = many, sleepy, run, decide, prices

    @property
    def services(self) -> list[Any]:
        return [self.service, self.counter, self.approval]

    async def do(self, name: str) -> str:
        await asyncio.sleep(self.random.random() * 0.004)
        self.done[name] += 1
        return name

    def do_sync(self, name: str) -> str:
        self.done[name] += 1
        return name

    def tick(self) -> int:
        self.done["tick"] += 1
        return self.done["tick"]

    async def flaky(self) -> str:
        self.done["flaky"] += 1
        if self.done["flaky"] < 3:
            raise ConnectionError("not yet")
        return "worked"


@asynccontextmanager
async def running(path: Path, world: World) -> AsyncIterator[tuple[Node, Server, Client]]:
    free = HostPort("127.0.0.1", 0)
    node = Node(Config(data=path / "node", partitions=2, ingress=free, admin=free, peer=free))
    await node.start()
    server = Server(world.services, suspend_after=0.1)
    await server.start(port=0)
    client = Client(node.doors.urls.ingress, retry_for=30)
    try:
        async with aiohttp.ClientSession() as session, asyncio.timeout(60):
            while True:
                async with session.post(f"{node.doors.urls.admin}/deployments", json={"uri": server.uri}) as response:
                    if response.status < 300:
                        break
                    assert response.status == 503, await response.text()
                await asyncio.sleep(0.05)
        yield node, server, client
    finally:
        await client.close()
        await server.stop(grace=2.0)
        await node.stop()


def test_every_operation_works_end_to_end(tmp_path: Path) -> None:
    async def main() -> None:
        world = World()
        async with running(tmp_path, world) as (_, _, client), asyncio.timeout(60):
            result = await client.call(world.everything, Item("book", 12))

            assert result == {
                "first": "first",
                "both": ["a", "b"],
                "total": 12,
                "failure": ["no seats", 418, {"seat": "12A"}],
                "missing": 404,
                "late": "winner",
            }
            assert world.done["flaky"] == 3
            assert await client.call(world.add, 3, key="book") == 15
            assert await client.call(world.peek, key="a/b ä%2F?") is None
            assert await client.call("counter/peek", key="book") == 15
            with pytest.raises(CallFailed) as caught:
                await client.call(world.fail)
            assert (caught.value.code, caught.value.source) == (418, "invocation")
            assert caught.value.metadata == {"seat": "12A"}
            with pytest.raises(CallFailed) as caught:
                await client.call("work/everything", {"name": "x"})
            assert caught.value.code == 400

            first, *ticks, last = await client.call("work/twice")
            assert ticks == [1, 1] and first == last and world.done["tick"] == 1
            assert await client.call("work/tick", idempotency_key="once") == 1, "a client's call is the same one"
            with pytest.raises(CallFailed, match="counter/k → counter/k") as caught:
                await client.call("counter/stuck", key="k")
            assert caught.value.code == 409

            sent = await client.send(world.approve, idempotency_key="once")
            again = await client.send(world.approve, idempotency_key="once")
            assert sent.invocation_id == again.invocation_id
            assert again.previously and not sent.previously
            with pytest.raises(NotReady):
                await client.output(sent)
            while not world.awakeables:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.5)  # Long enough to be suspended: then it must be started again.
            await client.resolve_awakeable(world.awakeables[0], True)
            assert await client.attach(sent) is True
            assert await client.output(sent.invocation_id, bool) is True

            main = await client.send(world.run, "ann", key="k1")
            while await client.call("approval/asked", key="k1") is None:
                await asyncio.sleep(0.01)  # `decide` sees the state at its beginning.
            assert await client.call(world.decide, "yes", key="k1") == "ann"
            assert await client.attach(main) == "ann: yes"
            assert await client.attach_workflow(world.approval, "k1") == "ann: yes"
            await client.send(world.run, "bob", key="k2")
            await client.resolve_promise(world.approval, "k2", "decision", "no")
            assert await client.attach_workflow("approval", "k2", str) == "bob: no"

    asyncio.run(main())


def test_the_sync_client_needs_no_event_loop(tmp_path: Path) -> None:
    async def main() -> None:
        world = World()
        async with running(tmp_path, world) as (node, _, _), asyncio.timeout(60):

            def use() -> None:
                with SyncClient(node.doors.urls.ingress) as client:
                    assert client.call(world.add, 4, key="sync") == 4
                    assert client.call(world.peek, key="sync") == 4
                    sent = client.send(world.many, 3, delay=0.05)
                    assert client.attach(sent) == 3
                    assert client.output(sent.invocation_id, int) == 3
                    client.send(world.run, "eve", key="k3")
                    client.reject_promise(world.approval, "k3", "decision", "vetoed", code=403)
                    with pytest.raises(CallFailed) as caught:
                        client.attach_workflow(world.approval, "k3")
                    assert (caught.value.code, caught.value.message) == (403, "vetoed")
                    with pytest.raises(CallFailed) as caught:
                        client.call("work/nothing")
                    assert caught.value.code == 404

            await asyncio.to_thread(use)

    asyncio.run(main())


@pytest.mark.parametrize("handler", ["sleepy", "busy"])
def test_cancelled_code_compensates(tmp_path: Path, handler: str) -> None:
    async def main() -> None:
        world = World()
        async with running(tmp_path, world) as (node, _, client), asyncio.timeout(60):
            sent = await client.send(f"work/{handler}")
            await asyncio.sleep(0.5)
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"{node.doors.urls.admin}/invocations/{sent.invocation_id}/cancel") as response,
            ):
                assert response.status < 300, await response.text()

            assert await client.attach(sent) == "undone"

    asyncio.run(main())


def test_a_call_with_another_argument_in_replay_pauses_the_invocation(tmp_path: Path) -> None:
    async def main() -> None:
        world = World()
        async with running(tmp_path, world) as (node, _, client), asyncio.timeout(60):
            sent = await client.send(world.prices)
            async with aiohttp.ClientSession() as session:
                while True:
                    async with session.get(f"{node.doors.urls.admin}/invocations/{sent.invocation_id}") as response:
                        found = await response.json()
                    if found["status"] not in ("ready", "running", "suspended"):
                        break
                    await asyncio.sleep(0.02)

            assert found["status"] == "paused"
            assert found["last_failure"]["kind"] == "NonDeterminismError"
            assert "The argument differs" in found["last_failure"]["message"]

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(3))
def test_parallel_branches_recover_from_handler_processes_that_vanish(tmp_path: Path, seed: int) -> None:
    """The server is dropped abruptly, again and again, in the middle of parallel steps."""

    async def main() -> None:
        world = World()
        rng = random.Random(seed)
        async with running(tmp_path, world) as (_, server, client), asyncio.timeout(120):
            calls = [asyncio.ensure_future(client.call(world.many, 12)) for _ in range(5)]
            for _ in range(4):
                await asyncio.sleep(0.02 + rng.random() * 0.05)
                for stream in list(server.endpoint.streams):
                    stream.close()  # Its attempts end silently, and the connection breaks.
            assert await asyncio.gather(*calls) == [66] * 5
            assert len(world.done) == 24

    asyncio.run(main())
