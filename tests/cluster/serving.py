"""A complete server with HTTP listeners on free ports, and scripted handlers of every kind behind it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from yarl import URL

from holdfast.cluster.config import Config, HostPort
from holdfast.cluster.http.exchange import Exchange
from holdfast.cluster.ingress.ingress import Ingress
from holdfast.cluster.node import Node
from holdfast.sdk.frames import Intent
from holdfast.sdk.journal import Op
from tests.cluster.harness import FAST, PATIENCE_S, FakeEndpoint, Handled, Script, echo, eventually


async def three_steps(handled: Handled) -> None:
    for name in ("flight", "hotel", "car")[handled.length - 1 :]:
        handled.run(name, json.dumps({"booked": name}).encode())
    handled.output(b'"booked"')


async def waits(handled: Handled) -> None:
    """Waits for an awakeable and returns its outcome."""
    if handled.length == 1:
        handled.wait_for(handled.step(Op.AWAKEABLE, "0/awakeable/0", []))
    else:
        outcome = handled.journal[1].outcome
        assert outcome is not None
        handled.output(outcome[1] if outcome[0] == 0 else outcome[2].encode())


async def waits_for_promise(handled: Handled) -> None:
    if handled.length == 1:
        handled.wait_for(handled.step(Op.PROMISE, "0/approved/0", ["approved"]))
    else:
        outcome = handled.journal[1].outcome
        assert outcome is not None
        handled.output(outcome[1])


async def fails(handled: Handled) -> None:
    handled.fail("the database is down", retry_after_ms=3_600_000)


async def gives_up(handled: Handled) -> None:
    handled.fail("the code has changed", pause=True)


async def counts(handled: Handled) -> None:
    state = handled.start.state or {}
    count = json.loads(state.get("count", b"0")) + 1
    handled.step(Op.SET, "0/set/0", ["count", json.dumps(count).encode()])
    handled.output(json.dumps(count).encode())


async def in_doubt(handled: Handled) -> None:
    if handled.length == 1:
        handled.send(Intent(handled.id, handled.epoch, 1, "0/pay/0", "pay"))
        await handled.acks(2)
    elif handled.journal[1].outcome is not None:
        handled.output(handled.journal[1].outcome[1])
        return
    handled.fail("was it paid?", pause=True)


HANDLERS: dict[str, Script] = {
    "echo/say": echo,
    "trips/book": three_steps,
    "agent/wait": waits,
    "flaky/fail": fails,
    "flaky/stop": gives_up,
    "payments/pay": in_doubt,
    "counter:object/add:exclusive": counts,
    "counter:object/wait:exclusive": waits,
    "signup:workflow/run:main": waits_for_promise,
}


class Serving:
    def __init__(self, node: Node, http: aiohttp.ClientSession) -> None:
        self.node = node
        self.http = http
        self.endpoint = FakeEndpoint(HANDLERS)

    @property
    def ingress(self) -> Ingress:
        handler = self.exchange.handler
        assert isinstance(handler, Ingress)
        return handler

    @property
    def exchange(self) -> Exchange:
        assert self.node.doors.ingress is not None
        return self.node.doors.ingress.exchange

    async def ask(self, method: str, url: str, **more: Any) -> tuple[int, Any]:
        async with self.http.request(method, URL(url, encoded=True), **more) as response:
            body = await response.read()
            return response.status, json.loads(body) if response.content_type == "application/json" and body else body

    async def admin(self, method: str, path: str, **more: Any) -> tuple[int, Any]:
        return await self.ask(method, self.node.doors.urls.admin + path, **more)

    async def call(self, path: str, data: bytes = b"1", **more: Any) -> tuple[int, Any]:
        return await self.ask("POST", f"{self.node.doors.urls.ingress}/{path}", data=data, **more)

    async def send(self, path: str, data: bytes = b"1") -> str:
        status, answer = await self.call(f"{path}/send", data)
        assert status == 202, answer
        name: str = answer["invocationId"]
        return name

    async def describe(self, id_: str) -> dict[str, Any]:
        status, answer = await self.admin("GET", f"/invocations/{id_}")
        assert status == 200, answer
        shown: dict[str, Any] = answer
        return shown

    async def reaches(self, id_: str, status: str) -> dict[str, Any]:
        async with asyncio.timeout(PATIENCE_S):
            while (shown := await self.describe(id_))["status"] != status:
                await asyncio.sleep(0.01)
        return shown

    async def listed(self, name: str, query: str, limit: int) -> list[dict[str, Any]]:
        """All pages of the list at `/name`."""
        found: list[dict[str, Any]] = []
        cursor = ""
        while True:
            status, page = await self.admin("GET", f"/{name}?{query}&limit={limit}{cursor}")
            assert status == 200, page
            assert len(page[name]) <= limit
            found += page[name]
            if page["cursor"] is None:
                return found
            cursor = f"&cursor={page['cursor']}"

    async def error(self, method: str, path: str, **more: Any) -> tuple[int, dict[str, Any]]:
        status, answer = await self.admin(method, path, **more)
        assert answer["code"] == status and answer["source"] == "admin" and answer["message"], answer
        return status, answer


@asynccontextmanager
async def serving(path: Path, *, register: bool = True, **settings: Any) -> AsyncIterator[Serving]:
    free = HostPort("127.0.0.1", 0)
    failures: list[BaseException] = []
    config = Config(data=path / "data", partitions=2, ingress=free, admin=free, peer=free, **settings)
    node = Node(config, timing=FAST, on_fatal=failures.append)
    await node.start()
    try:
        async with aiohttp.ClientSession() as http:
            made = Serving(node, http)
            await made.endpoint.start()
            if register:
                assert (await made.admin("POST", "/deployments", json={"uri": made.endpoint.uri}))[0] == 201
            await eventually(lambda: node.unhealthy() is None)
            yield made
    finally:
        await node.stop()
        await made.endpoint.stop()
    assert not failures, failures


def run(path: Path, scenario: Callable[[Serving], Awaitable[None]], **settings: Any) -> None:
    async def inside() -> None:
        async with asyncio.timeout(2 * PATIENCE_S), serving(path, **settings) as made:
            await scenario(made)

    asyncio.run(inside())
