"""Clients that never stop: each counts on a key of its own over HTTP, at any node that answers, and records failures."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp

from holdfast.sdk.journal import Op
from tests.cluster.harness import PATIENCE_S, Handled, Script


async def counts(handled: Handled) -> None:
    """Adds one in three steps: reads, runs a function, writes."""
    if handled.length == 1:
        handled.step(Op.GET, "0/get/0", ["count"])
    outcome = handled.journal[1].outcome if len(handled.journal) > 1 else None
    found = (outcome or await handled.completion(1))[1]
    count = int(found[1:] or b"0") + 1
    if handled.length == 2:
        handled.run("effect", b"null")
    if handled.length == 3:
        handled.step(Op.SET, "0/set/0", ["count", str(count).encode()])
    handled.output(str(count).encode())


COUNTER: dict[str, Script] = {"counter:object/add:exclusive": counts}


async def _reused(session: aiohttp.ClientSession, context: Any, parameters: Any) -> None:
    context.trace_request_ctx.append(True)


class Load:
    """`urls` returns the ingresses to try. A refused connection is retried elsewhere, because nothing was sent.

    With `keep_alive`, connections are reused. A connection that the other side closes just when it is reused is stale:
    then the request is sent again with the same idempotency key, as clients with a connection pool do.
    """

    def __init__(
        self,
        urls: Callable[[], Sequence[str]],
        clients: int = 6,
        pause_s: float = 0.01,
        *,
        keep_alive: bool = False,
        name: str = "key",
    ) -> None:
        self._keep_alive = keep_alive
        self._name = name
        self.refused = self.stale = 0
        self._urls = urls
        self._clients = clients
        self._pause_s = pause_s
        self._over = False
        self.totals: dict[str, int] = {}
        self.errors: list[str] = []
        self.slowest_s = 0.0
        self.slowest: tuple[float, float] = (0.0, 0.0)

    async def __aenter__(self) -> Load:
        reuse = aiohttp.TraceConfig()
        reuse.on_connection_reuseconn.append(_reused)
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=not self._keep_alive),
            timeout=aiohttp.ClientTimeout(total=PATIENCE_S / 2),
            trace_configs=[reuse],
        )
        self._began = time.monotonic()
        self._tasks = [asyncio.ensure_future(self._client(number)) for number in range(self._clients)]
        return self

    async def __aexit__(self, *_: Any) -> None:
        self._over = True
        await asyncio.gather(*self._tasks)
        await self._http.close()

    @property
    def done(self) -> int:
        return sum(self.totals.values())

    async def more(self, count: int = 20) -> None:
        """Wait for this many more answers."""
        goal = self.done + count
        async with asyncio.timeout(60):
            while self.done < goal and not self.errors:
                await asyncio.sleep(0.01)

    async def _client(self, number: int) -> None:
        key = f"{self._name} {number}"
        turn = number
        ask = uuid.uuid4().hex
        while not self._over and len(self.errors) < 10:
            turn += 1
            urls = self._urls()
            url = urls[turn % len(urls)]
            began = time.monotonic()
            used_before: list[bool] = []
            try:
                async with self._http.post(
                    f"{url}/counter/{key}/add",
                    data=b"1",
                    headers={"Idempotency-Key": ask},
                    trace_request_ctx=used_before,
                ) as response:
                    body = await response.read()
            except aiohttp.ClientConnectorError:
                self.refused += 1
                await asyncio.sleep(0.005)
                continue
            except Exception as error:
                if used_before and isinstance(error, aiohttp.ClientConnectionError):
                    self.stale += 1
                    continue
                self.errors.append(f"{time.monotonic() - self._began:.2f} s {key} at {url}: {error!r}")
                continue
            took = time.monotonic() - began
            if took > self.slowest_s:
                self.slowest_s, self.slowest = took, (began - self._began, took)
            expected = self.totals.get(key, 0) + 1
            if response.status != 200 or json.loads(body) != expected:
                self.errors.append(
                    f"{time.monotonic() - self._began:.2f} s {key} at {url}: {response.status} {body!r}, "
                    f"expected {expected}"
                )
                continue
            self.totals[key] = expected
            ask = uuid.uuid4().hex
            await asyncio.sleep(self._pause_s)
