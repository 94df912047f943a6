"""Large values in tests: a client with real HTTP, an adjustable clock, and access to the tables."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import aiohttp

from holdfast.cluster.clock import Clock
from holdfast.cluster.partition.door import Partition
from holdfast.statemachine import tables
from holdfast.statemachine.blobs import CHUNK_BYTES, KEPT_MS
from holdfast.statemachine.commands import FireTimers
from tests.cluster.harness import PATIENCE_S, Handled, World, world

MIB = 1 << 20
LARGE = Random(1).randbytes(MIB)
OTHER = Random(2).randbytes(CHUNK_BYTES + 77)


class MovedClock(Clock):
    ahead_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.ahead_ms


class Client:
    """A world with real HTTP."""

    def __init__(self, it: World, http: aiohttp.ClientSession) -> None:
        self.it = it
        self.http = http

    async def post(self, path: str, body: bytes = b"", **more: Any) -> tuple[int, bytes, dict[str, str]]:
        return await self._ask("POST", path, data=body, **more)

    async def get(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        return await self._ask("GET", path)

    async def _ask(self, method: str, path: str, **more: Any) -> tuple[int, bytes, dict[str, str]]:
        async with (
            asyncio.timeout(PATIENCE_S),
            self.http.request(method, self.it.node.doors.urls.ingress + path, **more) as it,
        ):
            return it.status, await it.read(), dict(it.headers)

    async def admin(self, path: str, method: str = "GET", **more: Any) -> Any:
        async with self.http.request(method, self.it.node.doors.urls.admin + path, **more) as it:
            return await it.json()


@asynccontextmanager
async def clients(path: Path, **settings: Any) -> AsyncIterator[Client]:
    async with world(path, **settings) as it, aiohttp.ClientSession() as http:
        yield Client(it, http)


def rows(partition: Partition, table: bytes) -> int:
    with partition.state.read() as txn:
        return sum(1 for _ in txn.scan(table, tables.after(table)))


def blobs(it: World) -> list[int]:
    """The large values of each partition."""
    return [rows(partition, tables.BLOB) for partition in it.node.partitions]


async def pass_time(it: World, ms: int = KEPT_MS) -> None:
    assert isinstance(it.node.environment.clock, MovedClock)
    it.node.environment.clock.ahead_ms += ms
    for partition in it.node.partitions:
        await partition.propose(FireTimers(1000))


async def twice(handled: Handled) -> None:
    """The input is the result of a step, and the outcome."""
    if handled.length == 1:
        handled.run("copy", handled.input)
        await handled.acks(handled.length)
    handled.output(handled.input)
