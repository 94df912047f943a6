"""A whole node with real handlers (our SDK) and HTTP, as a user sees it."""

from __future__ import annotations

import asyncio
import json
import random
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from holdfast.sdk import Context, ObjectContext, Server, Service, VirtualObject
from holdfast.sdk.ids import InvocationId
from holdfast.sdk.journal import Op, unpack_step
from holdfast.statemachine import queries
from holdfast.statemachine.effects import Status
from tests.cluster.harness import World, eventually


class App:
    """Handlers that count their effects."""

    def __init__(self) -> None:
        self.effects: dict[str, int] = {}
        trips = Service("trips")
        accounts = VirtualObject("accounts")

        async def effect(name: str) -> str:
            self.effects[name] = self.effects.get(name, 0) + 1
            return name

        @trips.handler
        async def book(ctx: Context, name: str) -> list[str]:
            first = await ctx.run("flight", effect, f"{name} flight")
            both = await asyncio.gather(
                ctx.run("hotel", effect, f"{name} hotel"), ctx.run("car", effect, f"{name} car")
            )
            await ctx.sleep(0.05)
            total = await ctx.call(add, 1, key=f"account {int(name) % 3}")
            assert isinstance(total, int)
            last = await ctx.run("mail", effect, f"{name} mail")
            return [first, *both, last]

        @trips.handler
        async def hang(ctx: Context) -> str:
            await asyncio.sleep(3600)
            return "never"

        @accounts.handler
        async def add(ctx: ObjectContext, amount: int) -> int:
            total = (await ctx.get("total", int) or 0) + amount
            ctx.set("total", total)
            return total

        @accounts.handler(shared=True)
        async def total(ctx: ObjectContext) -> int:
            return await ctx.get("total", int) or 0

        self.services: list[Any] = [trips, accounts]


async def post(url: str, body: object = None, **headers: str) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as response:
        return response.status, json.loads(await response.read())


async def serve(it: World, app: App) -> Server:
    server = Server(app.services, suspend_after=0.1)
    await server.start(port=0)
    await it.node.ground.registry.register(server.uri)
    return server


def journaled_runs(it: World, ident: InvocationId) -> list[str]:
    """The effects whose results are in the log."""
    with it.node.serving.router.partition(ident).state.read() as txn:
        assert queries.load(txn, ident) is not None, "an accepted invocation is lost"
        steps = [unpack_step(raw) for raw in queries.journal(txn, ident, 0, 1000)]
    return [json.loads(step.outcome[1]) for step in steps if step.op == Op.RUN and step.outcome is not None]


def test_a_request_runs_a_handler_of_the_sdk_and_gets_its_result(tmp_path: Path) -> None:
    async def run() -> None:
        it = World(tmp_path)
        await it.start()
        app = App()
        server = await serve(it, app)

        status, body = await post(f"{it.node.doors.urls.ingress}/trips/book", "1")

        assert (status, body) == (200, ["1 flight", "1 hotel", "1 car", "1 mail"])
        assert set(app.effects.values()) == {1}
        assert await post(f"{it.node.doors.urls.ingress}/accounts/account%201/total") == (200, 1)
        await it.stop()
        await server.stop(grace=0.1)

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(3))
def test_nodes_and_streams_that_die_at_random_moments_lose_and_double_nothing(tmp_path: Path, seed: int) -> None:
    """Every accepted trip completes, every account adds up, and no step runs again once it is in the log."""
    rng = random.Random(seed)

    async def run() -> None:
        it = World(tmp_path, partitions=3)
        await it.start()
        app = App()
        server = await serve(it, app)
        idents: list[InvocationId] = []
        frozen: dict[str, int] = {}
        for round_ in range(4):
            for _ in range(15):
                idents.append(await it.send("trips/book", json.dumps(str(len(idents))).encode()))
                await asyncio.sleep(rng.random() * 0.01)
            await asyncio.sleep(rng.random() * 0.2)
            if round_ == 1:
                for stream in list(server.endpoint.streams):
                    stream.close()
                await asyncio.sleep(rng.random() * 0.05)
            if round_ == 3:
                it.boot = f"boot {seed + 2}"  # The machine lost power: the state is rebuilt.
            await it.restart()
            for ident in idents:
                for name in journaled_runs(it, ident):
                    frozen.setdefault(name, app.effects[name])

        for number, ident in enumerate(idents):
            outcome = await it.completed(ident)
            assert outcome[0] == 0, outcome
            assert json.loads(outcome[1]) == [f"{number} {what}" for what in ("flight", "hotel", "car", "mail")]
        totals = [(await post(f"{it.node.doors.urls.ingress}/accounts/account%20{n}/total"))[1] for n in range(3)]
        assert sum(totals) == len(idents), "each call was carried out exactly once"
        assert len(app.effects) == 4 * len(idents) and len(frozen) > len(idents)
        assert {name: app.effects[name] for name in frozen} == frozen, "what was in the log ran again"
        await it.stop()
        await server.stop(grace=0.1)

    asyncio.run(run())


def test_a_node_stops_within_seconds_even_if_its_handlers_hang(tmp_path: Path) -> None:
    async def run() -> None:
        it = World(tmp_path)
        await it.start()
        app = App()
        server = await serve(it, app)
        stuck = await it.send("trips/hang")
        waiting = asyncio.create_task(post(f"{it.node.doors.urls.ingress}/trips/hang"))
        await eventually(lambda: len(server.endpoint.attempts) == 2)

        begun = time.monotonic()
        await it.node.stop()
        took = time.monotonic() - begun

        assert took < 20, "a few seconds, on a busy machine"
        status, body = await waiting
        assert status == 503 and body["code"] == 503
        await it.start()
        assert (await it.reaches(stuck, Status.RUNNING)).epoch >= 1
        await it.kill()
        await server.stop(grace=0.1)

    asyncio.run(run())


def test_a_restarted_handler_resumes_at_the_step_that_did_not_finish(tmp_path: Path) -> None:
    calls: list[str] = []
    gate = asyncio.Event()

    def service() -> Service:
        trips = Service("trips")

        async def step(name: str) -> str:
            calls.append(name)
            if name == "b" and not gate.is_set():
                await asyncio.sleep(3600)
            return name

        @trips.handler
        async def go(ctx: Context) -> str:
            return "".join([await ctx.run(name, step, name) for name in "abc"])

        return trips

    async def run() -> None:
        it = World(tmp_path)
        await it.start()
        first = Server([service()])
        await first.start(port=0)
        await it.node.ground.registry.register(first.uri)
        ident = await it.send("trips/go")
        await eventually(lambda: calls == ["a", "b"])

        await first.stop(grace=0.0)
        gate.set()
        second = Server([service()])
        await second.start(port=first.port)

        assert await it.completed(ident) == [0, b'"abc"']
        assert calls == ["a", "b", "b", "c"]
        await it.stop()
        await second.stop(grace=0.1)

    asyncio.run(run())
