"""The event loop: a connection that ends while it begins must not take another's file descriptor with it."""

from __future__ import annotations

import asyncio
import socket
from typing import cast

import pytest

from holdfast.sdk import loop as ours

pytest.importorskip("uvloop")


class EndsAtOnce(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).abort()


class Stays(asyncio.Protocol):
    pass


def test_a_connection_that_ends_while_it_begins_is_closed_once() -> None:
    async def dial(protocol: type[asyncio.Protocol]) -> tuple[socket.socket, asyncio.BaseTransport]:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as server:
            sock = socket.socket()
            sock.setblocking(False)
            await loop.sock_connect(sock, server.getsockname())
            transport, _ = await loop.create_connection(protocol, sock=sock)
        return sock, transport

    async def run() -> None:
        ended, _ = await dial(EndsAtOnce)
        stays, transport = await dial(Stays)

        assert ended.fileno() == -1  # Else it would close whatever has its number by then.
        assert stays.fileno() != -1
        transport.close()
        await asyncio.sleep(0.05)
        assert stays.fileno() == -1

    assert ours.new_event_loop is not None
    with asyncio.Runner(loop_factory=ours.new_event_loop) as runner:
        runner.run(run())
