"""A client of `GET /events`, as a browser would be."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp

from tests.cluster.harness import PATIENCE_S


class Seen(NamedTuple):
    kind: str
    data: dict[str, Any]
    id: str  # the newest so far


class Watcher:
    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.id = ""
        self.seen: list[Seen] = []

    async def next(self) -> Seen:
        """The next event. Blocks with an id alone only move the id, as in a browser."""
        kind, data = "", ""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                raw = await self._response.content.readline()
                if not raw:
                    raise EOFError("the stream ended")
                name, _, value = raw.decode().rstrip("\n").partition(": ")
                if name == "id":
                    self.id = value
                elif name == "event":
                    kind = value
                elif name == "data":
                    data = value
                elif not name and kind:
                    seen = Seen(kind, json.loads(data), self.id)
                    self.seen.append(seen)
                    return seen

    async def until(self, condition: Callable[[Seen], bool]) -> list[Seen]:
        """Everything up to an event."""
        found = [await self.next()]
        while not condition(found[-1]):
            found.append(await self.next())
        return found

    async def invocations(self, id_: str, status: str) -> list[dict[str, Any]]:
        """The events of invocations up to the one that an invocation has this status."""
        found = await self.until(
            lambda each: each.kind == "invocation" and each.data["id"] == id_ and each.data["status"] == status
        )
        return [each.data for each in found if each.kind == "invocation"]

    def close(self) -> None:
        self._response.close()


@asynccontextmanager
async def watching(url: str, after: str | None = None, *, token: str = "", **parameters: str) -> AsyncIterator[Watcher]:
    headers = {} if after is None else {"Last-Event-ID": after}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    timeout = aiohttp.ClientTimeout(total=None)
    async with (
        aiohttp.ClientSession(timeout=timeout) as http,
        http.get(f"{url}/events", params=parameters, headers=headers) as response,
    ):
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        watcher = Watcher(response)
        assert (await watcher.next()).kind == "hello"
        yield watcher
