"""The event loop: a connection that ends while it opens must not close another one's file descriptor."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
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

        assert ended.fileno() == -1  # Otherwise it would close another file with the same number.
        assert stays.fileno() != -1
        transport.close()
        await asyncio.sleep(0.05)
        assert stays.fileno() == -1

    assert ours.new_event_loop is not None
    with asyncio.Runner(loop_factory=ours.new_event_loop) as runner:
        runner.run(run())


def test_the_collector_skips_loaded_objects_and_finds_later_ones() -> None:
    program = """
import gc, weakref
from holdfast.sdk.loop import calm_collector
class Node: pass
calm_collector()
frozen = gc.get_freeze_count()
one, other = Node(), Node()
one.peer, other.peer = other, one
found = weakref.ref(one)
del one, other
gc.collect()
print(frozen > 10_000, found() is None, gc.isenabled())
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)

    assert said.stdout.split() == ["True", "True", "True"]
