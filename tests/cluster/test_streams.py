"""Answers that go on: when they end, how many there are, and that a node never waits for one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from typing import Any

import aiohttp
import pytest

from holdfast.cluster.config import Config, HostPort
from holdfast.cluster.http import streams
from holdfast.cluster.http.exchange import Answer, Exchange, Request
from holdfast.cluster.http.server import HttpServer
from holdfast.cluster.http.sessions import Sessions
from holdfast.cluster.http.streams import STREAMS_MIN, Stream
from holdfast.statemachine.access import READ, RevokeToken
from tests.cluster.harness import PATIENCE_S
from tests.cluster.test_access import World


class Source:
    """Streams what a test puts into it. Also a plain answer, at /plain."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self.begun = self.closed = 0

    async def handle(self, request: Request) -> Answer:
        if request.target == "/plain":
            return Answer(200, b"{}")
        if request.target == "/endless":
            return Answer(200, b"", "text/plain", stream=Stream(self.endless()))
        return Answer(200, b"", "text/event-stream", stream=Stream(self.chunks()))

    async def chunks(self) -> AsyncIterator[bytes]:
        self.begun += 1
        try:
            while (chunk := await self.queue.get()) is not None:
                if isinstance(chunk, Exception):
                    raise chunk
                yield chunk
        finally:
            self.closed += 1

    async def endless(self) -> AsyncIterator[bytes]:
        self.begun += 1
        try:
            while True:
                yield b"x" * 1_000_000
        finally:
            self.closed += 1

    def name_act(self, request: Request) -> None: ...

    def stop(self, why: str) -> None: ...


class Rig:
    def __init__(self, source: Source, server: HttpServer, http: aiohttp.ClientSession) -> None:
        self.source = source
        self.server = server
        self.http = http
        self.url = f"http://127.0.0.1:{server.port}"

    @property
    def exchange(self) -> Exchange:
        return self.server.exchange


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def rig(*, connections: int = 100, abandon: bool = False, **more: Any) -> AsyncIterator[Rig]:
    config, source = Config(ingress=HostPort("127.0.0.1", 0)), Source()
    exchange = Exchange(config, source, source="ingress", **more)
    server = HttpServer(
        config.ingress, exchange, connections_max=lambda: connections, per_address_max=1000, abandon=abandon
    )
    await server.start()
    try:
        async with asyncio.timeout(2 * PATIENCE_S), aiohttp.ClientSession() as http:
            yield Rig(source, server, http)
    finally:
        await server.stop()
    assert exchange.streams.open == 0 and source.begun == source.closed, "every stream ended, and its source was closed"


async def test_chunks_arrive_one_by_one_until_the_source_ends() -> None:
    async with rig() as it, it.http.get(it.url) as response:
        for chunk in (b"one", b"two"):
            it.source.queue.put_nowait(chunk)
            assert await response.content.readany() == chunk
        it.source.queue.put_nowait(None)

        assert await response.content.read() == b""
        assert response.headers["Cache-Control"] == "no-store"
        assert response.headers["Transfer-Encoding"] == "chunked" and "Content-Encoding" not in response.headers
        assert it.exchange.active == 0, "it does not count as a request in progress"


async def test_the_time_of_a_stream_is_not_a_latency() -> None:
    async with rig() as it, it.http.get(it.url) as response:
        it.source.queue.put_nowait(b"one")
        await response.content.readany()
        await asyncio.sleep(0.3)
        it.source.queue.put_nowait(None)
        await response.content.read()

        assert it.exchange.latency.sum < 0.3


async def test_a_client_of_http_1_0_gets_the_same_bytes() -> None:
    async with rig() as it:
        it.source.queue.put_nowait(b"one")
        it.source.queue.put_nowait(None)
        with closing(socket.create_connection(("127.0.0.1", it.server.port), PATIENCE_S)) as plain:
            plain.sendall(b"GET / HTTP/1.0\r\n\r\n")
            found = b""
            while piece := await asyncio.to_thread(plain.recv, 65536):
                found += piece

        head, _, body = found.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.0 200") and b"chunked" not in head
        assert body == b"one"


@pytest.mark.parametrize("abandon", [True, False], ids=["ingress", "admin"])
async def test_a_stream_ends_when_its_client_is_gone(abandon: bool) -> None:
    async with rig(abandon=abandon) as it:
        response = await it.http.get(it.url)
        await until(lambda: it.source.begun)

        response.close()

        await until(lambda: it.source.closed)
        await until(lambda: it.exchange.streams.open == 0)


async def test_a_slow_reader_is_disconnected_and_holds_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "READ_S", 0.2)
    async with rig() as it:
        response = await it.http.get(f"{it.url}/endless")

        await until(lambda: it.source.closed)

        assert it.exchange.streams.slow == 1
        with pytest.raises((aiohttp.ClientError, ConnectionError)):
            await response.read()


async def test_a_stopping_node_ends_its_streams_without_waiting() -> None:
    async with rig() as it, it.http.get(it.url) as response:
        it.source.queue.put_nowait(b"one")
        await response.content.readany()
        loop = asyncio.get_running_loop()
        began = loop.time()

        await it.server.stop()

        assert await response.content.read() == b"", "a proper end"
        assert it.source.closed and loop.time() - began < streams.CHECK_S


async def test_a_listener_that_is_drained_ends_its_streams_and_begins_no_more() -> None:
    async with rig() as it, it.http.get(f"{it.url}/plain") as first:
        await first.read()
        async with it.http.get(it.url) as response:
            it.server.leave()
            assert await response.content.read() == b""
        async with it.http.get(it.url) as refused, it.http.get(f"{it.url}/plain") as plain:
            assert (refused.status, plain.status) == (503, 200)
            assert refused.headers["Retry-After"] == "1"


async def test_streams_have_a_bound_of_their_own() -> None:
    async with rig(connections=2 * STREAMS_MIN) as it:
        open_ = [await it.http.get(it.url) for _ in range(STREAMS_MIN)]

        async with it.http.get(it.url) as refused, it.http.get(f"{it.url}/plain") as plain:
            assert (refused.status, plain.status) == (503, 200)
            assert refused.headers["Retry-After"] == "1"
            assert f"{STREAMS_MIN} streams are open" in (await refused.json())["message"]
        open_[0].close()
        await until(lambda: it.exchange.streams.open < STREAMS_MIN)
        async with it.http.get(it.url) as again:
            assert again.status == 200
        for response in open_:
            response.close()


async def test_a_stream_ends_when_its_token_is_revoked_or_expires() -> None:
    world = World()
    tokens = [world.create(READ), world.create(READ, expires_ms=world.now_ms + 1000), world.create(READ)]
    async with rig(access=world.access) as it:
        revoked, expired, other = [
            await it.http.get(it.url, headers={"Authorization": f"Bearer {token}"}) for token in tokens
        ]

        world.tokens.revoke(RevokeToken(tokens[0].split("_")[1]))
        assert await revoked.content.read() == b""
        world.now_ms += 2000
        assert await expired.content.read() == b""

        assert it.exchange.streams.open == 1
        other.close()


async def test_a_stream_outlives_a_meta_group_without_a_majority() -> None:
    """The token may just have been rotated on another node."""
    world = World()
    token = world.create(READ)
    async with rig(access=world.access) as it:
        response = await it.http.get(it.url, headers={"Authorization": f"Bearer {token}"})
        world.down = True
        world.tokens.revoke(RevokeToken(token.split("_")[1]))
        await asyncio.sleep(2 * streams.CHECK_S)

        it.source.queue.put_nowait(b"one")
        assert await response.content.readany() == b"one"
        response.close()


async def test_a_stream_ends_when_its_session_ends() -> None:
    world = World()
    sessions = Sessions(
        world.access, cluster="c", secret=b"0123456789abcdef", lifetime_s=3600.0, now_ms=lambda: world.now_ms
    )
    async with rig(access=world.access, sessions=sessions) as it:
        cookie = (await sessions.sign_in(world.create(READ), secure=False)).cookie.partition(";")[0]
        response = await it.http.get(it.url, headers={"Cookie": cookie})
        await until(lambda: it.source.begun)

        await sessions.sign_out({"Cookie": cookie}, secure=False)

        assert await response.content.read() == b""


async def test_a_source_that_fails_breaks_the_connection_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with rig() as it:
        response = await it.http.get(it.url)

        it.source.queue.put_nowait(ValueError("of the test"))

        with pytest.raises((aiohttp.ClientError, ConnectionError)):
            await response.read()
        assert "its source failed" in caplog.text
