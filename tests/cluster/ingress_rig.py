"""An ingress behind a real HTTP server, over a partition in memory that answers like the state machine."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import aiohttp
from yarl import URL

from holdfast.cluster.config import Config, HostPort
from holdfast.cluster.errors import NotFound
from holdfast.cluster.http.exchange import Exchange
from holdfast.cluster.http.server import HttpServer
from holdfast.cluster.ingress.ingress import Ingress
from holdfast.cluster.registry.registry import Registry
from holdfast.cluster.routing.approvals import Draft, Made, Sender
from holdfast.cluster.routing.channel import Channel
from holdfast.cluster.routing.reader import Summary
from holdfast.sdk.ids import (
    ApprovalId,
    InvocationId,
    Route,
    new_id,
)
from holdfast.statemachine import refs
from holdfast.statemachine.commands import Command, Invoke, Ref
from holdfast.statemachine.effects import Result
from holdfast.statemachine.inbox import Approval
from tests.cluster.rig import EVERY_KIND, PATIENCE_S, endpoint, registry

NOW_MS = 1_000_000


class Partition:
    """Everything below the ingress. Invocations complete with their own input, unless the input requests otherwise:
    `wait` never completes, `fail` is a terminal error, and `refuse` is an error of the log."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.outcomes: dict[InvocationId, list[Any] | None] = {}
        self.invoked: dict[InvocationId, Invoke] = {}
        self.waiting: dict[InvocationId, list[Channel]] = {}
        self.refuse: Exception | None = None
        self.answer = Result()
        self.large: dict[bytes, bytes] = {}

    def mint(self, service: str, key: str | None, /) -> InvocationId:
        return new_id(service, key, os.urandom(16))

    @contextmanager
    def wait(self, invocation: InvocationId, /, *, follow: bool = False) -> Iterator[Channel]:
        channel = Channel(follows=follow)
        self.waiting.setdefault(invocation, []).append(channel)
        try:
            yield channel
        finally:
            self.waiting[invocation].remove(channel)
            channel.close()

    async def submit(self, route: Route, command: Command, /) -> Result:
        self.commands.append(command)
        if self.refuse is not None:
            raise self.refuse
        if not isinstance(command, Invoke):
            return self.answer
        invocation = command.id
        if invocation in self.outcomes:
            return Result(200, "", self.outcomes[invocation])
        self.invoked[invocation] = command
        self.outcomes[invocation] = None
        if command.payload == b"fail":
            self.complete(invocation, [1, 418, "I am a teapot", "TerminalError"])
        elif command.payload != b"wait":
            self.complete(invocation, [0, command.payload])
        return Result()

    def complete(self, invocation: InvocationId, outcome: list[Any]) -> None:
        self.outcomes[invocation] = outcome
        for channel in self.waiting.get(invocation, []):
            channel.settle(outcome)

    async def load(self, invocation: InvocationId, ref: Ref) -> bytes:
        return refs.restored(ref, self.large[ref.data])

    async def find(self, id_: ApprovalId, /) -> Approval:
        raise NotFound("there are no approvals here")

    async def decide(self, found: Approval, draft: Draft, sender: Sender, /) -> Made:
        raise NotFound("there are no approvals here")

    async def lookup(self, invocation: InvocationId) -> Summary | None:
        invoke = self.invoked.get(invocation)
        return Summary(self.outcomes[invocation], invoke.service, invoke.handler, None) if invoke is not None else None


class Rig:
    def __init__(self, partition: Partition, ingress: Ingress, server: HttpServer, http: aiohttp.ClientSession) -> None:
        self.partition = partition
        self.ingress = ingress
        self.server = server
        self.http = http

    @property
    def exchange(self) -> Exchange:
        return self.server.exchange

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    async def ask(self, method: str, path: str, **more: Any) -> tuple[int, bytes, aiohttp.ClientResponse]:
        async with self.http.request(method, URL(self.url + path, encoded=True), **more) as response:
            return response.status, await response.read(), response

    async def error(self, method: str, path: str, **more: Any) -> tuple[int, dict[str, Any]]:
        status, body, response = await self.ask(method, path, **more)
        assert response.content_type == "application/json"
        parsed = json.loads(body)
        assert set(parsed) == {"code", "message", "source", "hint"} and parsed["code"] == status, parsed
        assert parsed["message"]
        return status, parsed

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.005)


async def known_services() -> Registry:
    async with endpoint(EVERY_KIND) as (_, uri):
        known = registry()
        await known.register(uri)
        return known


@asynccontextmanager
async def rig(**settings: Any) -> AsyncIterator[Rig]:
    config = Config(ingress=HostPort("127.0.0.1", 0), **settings)
    partition = Partition()
    ingress = Ingress(
        config,
        await known_services(),
        partition,
        partition,
        approvals=partition,
        lookup=partition.lookup,
        load=partition.load,
        now_ms=lambda: NOW_MS,
    )
    server = HttpServer(
        config.ingress,
        Exchange(config, ingress, source="ingress"),
        connections_max=lambda: config.connections_max,
        per_address_max=config.connections_per_address_max,
        abandon=True,
    )
    await server.start()
    async with aiohttp.ClientSession() as http:
        yield Rig(partition, ingress, server, http)
    await server.stop()


def run(scenario: Callable[[Rig], Awaitable[None]], **settings: Any) -> None:
    async def inside() -> None:
        async with asyncio.timeout(PATIENCE_S), rig(**settings) as ready:
            await scenario(ready)

    asyncio.run(inside())
