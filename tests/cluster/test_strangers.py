"""Clients without a token: what they may send, and that they keep nobody out."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from holdfast.cluster.http import descriptors, doors, exchange
from tests.cluster.harness import World, eventually
from tests.cluster.test_doors import Client
from tests.cluster.test_https import Files
from tests.cluster.test_tokens import one

SLOW_SIGN_IN = (
    b"POST /session HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 4000\r\n\r\n{"
)
LARGE_SIGN_IN = SLOW_SIGN_IN.replace(b"4000", b"1000000")  # Refused at once. The rest of its body does not come.
REFUSED = b"POST /deployments HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n{"


class Flood(threading.Thread):
    """Keeps many slow requests of one address open, and opens each again when it is closed."""

    def __init__(self, port: int, source: str, connections: int, request: bytes) -> None:
        super().__init__(daemon=True)
        self._request = request
        self._port = port
        self._source = source
        self._connections = connections
        self.opened = 0
        self.ending = threading.Event()

    def run(self) -> None:
        with selectors.DefaultSelector() as selector:
            while not self.ending.is_set():
                while len(selector.get_map()) < self._connections:
                    try:
                        each = socket.create_connection(("127.0.0.1", self._port), 5, (self._source, 0))
                        each.sendall(self._request)
                    except OSError:
                        break
                    self.opened += 1
                    selector.register(each, selectors.EVENT_READ)
                for key, _ in selector.select(0.01):
                    selector.unregister(key.fileobj)
                    assert isinstance(key.fileobj, socket.socket)
                    key.fileobj.close()
            for key in list(selector.get_map().values()):
                assert isinstance(key.fileobj, socket.socket)
                key.fileobj.close()


@contextmanager
def flooded(port: int, *sources: str, connections: int, request: bytes = SLOW_SIGN_IN) -> Iterator[list[Flood]]:
    floods = [Flood(port, source, connections, request) for source in sources]
    for flood in floods:
        flood.start()
    try:
        yield floods
    finally:
        for flood in floods:
            flood.ending.set()
        for flood in floods:
            flood.join(60)


@pytest.mark.slow("a flood of connections on the machine that serves them")
@pytest.mark.parametrize(
    ("addresses", "request_"), [(2, SLOW_SIGN_IN), (6, SLOW_SIGN_IN), (2, LARGE_SIGN_IN), (2, REFUSED)]
)
async def test_slow_requests_of_strangers_keep_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, addresses: int, request_: bytes
) -> None:
    monkeypatch.setattr(descriptors, "ADMIN_MAX", 32)
    async with one(tmp_path) as (world, at):
        server = world.node.doors.admin
        assert server is not None and server._door is not None
        sources = [f"127.0.0.{20 + number}" for number in range(addresses)]

        with flooded(server.port, *sources, connections=32, request=request_) as floods:
            await eventually(lambda: all(flood.opened > 64 for flood in floods), "every place taken, and again")
            headers = {"Authorization": f"Bearer {at.root}"}
            answers = []
            for _ in range(20):
                async with (
                    aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session,
                    session.get(f"http://127.0.0.1:{server.port}/cluster", headers=headers) as response,
                ):
                    answers.append(response.status)

        assert answers == [200] * 20


@pytest.mark.slow("a flood of connections on the machine that serves them")
@pytest.mark.parametrize("first", [b"", b"\x16\x03\x01"], ids=["silent", "half a handshake"])
async def test_clients_that_never_finish_a_handshake_keep_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bytes
) -> None:
    monkeypatch.setattr(descriptors, "ADMIN_MAX", 32)
    files = Files(tmp_path / "certs")
    tls: dict[str, Any] = {name: Path(file) for name, file in files.settings("admin").items()}
    world = World(tmp_path / "node", auth="tokens", **tls)
    await world.start()
    server = world.node.doors.admin
    assert server is not None and server._door is not None and server._door._strangers is not None
    strangers = server._door._strangers
    root = (world.node.config.data / "admin-token").read_text().strip()

    sources = [f"127.0.0.{20 + number}" for number in range(6)]
    with flooded(server.port, *sources, connections=32, request=first) as floods:
        await eventually(lambda: all(flood.opened > 64 for flood in floods), "every place taken, and again")
        answers = []
        for _ in range(10):
            connector = aiohttp.TCPConnector(force_close=True, ssl=files.trusting())
            async with (
                aiohttp.ClientSession(connector=connector) as session,
                session.get(
                    f"https://localhost:{server.port}/cluster", headers={"Authorization": f"Bearer {root}"}
                ) as response,
            ):
                answers.append(response.status)

    assert answers == [200] * 10
    await eventually(lambda: not len(strangers), "all of them forgotten")
    await world.stop()


async def test_strangers_send_short_bodies_and_send_them_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "STRANGER_BODY_S", 0.2)
    async with one(tmp_path) as (world, at):
        long = {"token": "x" * 4096}
        assert (await at.ask("POST", "/session", value=long))[0] == 413

        assert world.node.doors.admin is not None
        slow = Client(world.node.doors.admin.port)
        slow.send(SLOW_SIGN_IN)
        answer = await slow.receive_one()

        assert answer.startswith(b"HTTP/1.1 408") and b"within 0.2 seconds" in answer
        slow.socket.close()
        assert (await at.ask("POST", "/session", value={"token": at.root}))[0] == 200


async def test_a_connection_with_an_authenticated_request_is_not_closed_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptors, "ADMIN_MAX", 16)
    monkeypatch.setattr(doors, "STRANGER_S", 0.0)
    async with one(tmp_path) as (world, at):
        server = world.node.doors.admin
        assert server is not None and server._door is not None
        known = [Client(server.port) for _ in range(4)]
        for client in known:
            client.send(f"GET /session HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {at.root}\r\n\r\n".encode())
            assert (await client.receive_one()).startswith(b"HTTP/1.1 200")

        with flooded(server.port, "127.0.0.20", "127.0.0.21", "127.0.0.22", connections=16) as floods:
            await eventually(lambda: all(flood.opened > 64 for flood in floods), "every place taken, and again")

        for client in known:
            client.send(b"GET /session HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await client.receive_one()).startswith(b"HTTP/1.1 "), "it is still open"
            client.socket.close()
