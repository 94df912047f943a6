"""Shared by the tests of the HTTP surface: manifests, an endpoint that serves one, and a log below the real registry."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from holdfast.cluster.handlers.protocols.native.protocol import Native
from holdfast.cluster.registry.machine import MetaMachine
from holdfast.cluster.registry.offer import Offer
from holdfast.cluster.registry.registry import Registry
from holdfast.log.replica import Committed

PATIENCE_S = 60.0


def handler(name: str, mode: str = "plain", **more: Any) -> dict[str, Any]:
    return {"name": name, "mode": mode, **more}


def service(name: str, *handlers: dict[str, Any], kind: str = "service", **more: Any) -> dict[str, Any]:
    return {"name": name, "kind": kind, "handlers": list(handlers) or [handler("run")], **more}


def manifest(*services: dict[str, Any]) -> dict[str, Any]:
    return {
        "protocol": {"min": 1, "max": 1},
        "sdk": "holdfast-tests/1",
        "modes": ["stream", "request-response"],
        "services": list(services),
    }


#: One service of each kind, with its forms of paths.
EVERY_KIND = manifest(
    service("echo", handler("say"), handler("send"), handler("raw", output={"content_type": "text/plain"})),
    service("hidden", handler("say"), options={"private": True}),
    service("counter", handler("add", "exclusive"), handler("read", "shared"), kind="object"),
    service("signup", handler("run", "main"), handler("status", "shared"), kind="workflow"),
)


class AtOnce:
    """A log of one member that commits everything in the next turn of the loop, below a real MetaMachine."""

    def __init__(self, machine: MetaMachine) -> None:
        self.machine = machine
        self.refuse: Exception | None = None

    def propose(self, command: bytes) -> asyncio.Future[int]:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(self._commit, command, future)
        return future

    def _commit(self, command: bytes, future: asyncio.Future[int]) -> None:
        if self.refuse is not None:
            future.set_exception(self.refuse)
            return
        index = self.machine.applied[0] + 1
        self.machine.apply([Committed(index, 1, [command])])
        future.set_result(index)


def registry() -> Registry:
    machine = MetaMachine()
    log = AtOnce(machine)
    return Registry(machine, log, discover)


async def discover(uri: str) -> Offer:
    """Discovery as a node does it, with a session of its own."""
    protocol = Native()
    try:
        return await protocol.discover(uri)
    finally:
        await protocol.close()


class StaticEndpoint:
    """Serves only a manifest."""

    def __init__(self, body: object) -> None:
        self.status = 200
        self.body = body
        self.delay_s = 0.0
        self.asked = 0

    async def discover(self, request: web.Request) -> web.Response:
        self.asked += 1
        await asyncio.sleep(self.delay_s)
        body = self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()
        return web.Response(status=self.status, body=body, content_type="application/json")


@asynccontextmanager
async def endpoint(body: object = EVERY_KIND) -> AsyncIterator[tuple[StaticEndpoint, str]]:
    """An endpoint and its uri, on a free port."""
    static = StaticEndpoint(body)
    app = web.Application()
    app.router.add_get("/discover", static.discover)
    app.router.add_get("/below/discover", static.discover)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield static, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
