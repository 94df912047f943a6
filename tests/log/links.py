"""Nodes with real links, a failing network between them, and strangers."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import trustme

from holdfast.log.connection import LinkLimits
from holdfast.log.handshake import Established, Handshake, Identity, Role
from holdfast.log.link import Links
from holdfast.log.sockets import Address, TlsFiles

SECRET = b"the secret of the cluster"


PATIENCE_S = 30.0


Run = Callable[[Coroutine[Any, Any, None]], None]


class Expected(Exception):
    """Raised on purpose by a callback."""


class Node:
    """Links, and all their callbacks in order."""

    def __init__(
        self,
        name: str,
        *,
        secret: bytes | None = SECRET,
        tls: TlsFiles | None = None,
        cluster: str = "c1",
        port: int = 0,
        limits: LinkLimits = LinkLimits(),  # noqa: B008
    ) -> None:
        self.name = name
        self.events: list[tuple[str, str, int]] = []
        self.frames: list[bytes] = []
        self.late: list[int] = []
        self.disks: dict[str, str] = {}
        self.fatal: list[BaseException] = []
        self.removed: dict[str, str] = {}
        self.live: dict[str, int] = {}
        self.react: Callable[[str, int, bytes], None] | None = None
        self._changed = asyncio.Event()
        self.links = Links(
            cluster=cluster,
            node=name,
            disk=f"disk-of-{name}",
            incarnation=1,
            listen=Address("127.0.0.1", port),
            secret=secret,
            tls=tls,
            on_up=self._up,
            on_down=self._down,
            on_frame=self._frame,
            on_fatal=self.fatal.append,
            on_removed=self.removed.__setitem__,
            limits=limits,
            jitter=random.Random(1),
        )

    def _up(self, peer: str, session: int, disk: str) -> None:
        assert peer not in self.live, "the old session is down before the new one is up"
        self.events.append(("up", peer, session))
        self.disks[peer] = disk
        self.live[peer] = session
        self._changed.set()

    def _down(self, peer: str, session: int) -> None:
        assert self.live.pop(peer) == session
        self.events.append(("down", peer, session))
        self._changed.set()

    def _frame(self, peer: str, session: int, payload: bytes) -> None:
        if self.live.get(peer) != session:
            self.late.append(session)
        self.frames.append(payload)
        self._changed.set()
        if self.react is not None:
            self.react(peer, session, payload)

    @property
    def address(self) -> Address:
        return Address("127.0.0.1", self.links.port)

    def send(self, peer: str, payload: bytes) -> bool:
        return self.links.send(peer, self.live.get(peer, 0), payload)

    def error(self, peer: str) -> str:
        return self.links.status()[peer].last_error or ""

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a callback of this node makes `condition` true."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def sessions(self) -> list[int]:
        return [session for kind, _, session in self.events if kind == "up"]


async def eventually(condition: Callable[[], bool]) -> None:
    """For conditions without a callback, such as a status."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def started(*nodes: Node) -> AsyncIterator[None]:
    """Start the nodes, make them each other's peers, and stop them at the end."""
    try:
        for node in nodes:
            await node.links.start()
        for node in nodes:
            node.links.set_peers({other.name: other.address for other in nodes})
        yield
    finally:
        for node in nodes:
            await node.links.stop()
        for node in nodes:
            assert node.late == [], "no frame is delivered outside its session"
            assert node.live == {}, "stopping reports every session down"


@contextlib.asynccontextmanager
async def connected(left: Node, right: Node) -> AsyncIterator[None]:
    async with started(left, right):
        await left.until(lambda: right.name in left.live)
        await right.until(lambda: left.name in right.live)
        yield


class Stranger:
    """A hand-written peer with non-blocking raw sockets and only the handshake."""

    def __init__(self, node: str, *, secret: bytes | None = SECRET, cluster: str = "c1") -> None:
        self.us = Identity(cluster, node, f"disk-of-{node}", 1)
        self.secret = secret
        self.loop = asyncio.get_running_loop()
        self.sock = socket.socket()
        self.sock.setblocking(False)
        self.end: Established | None = None

    async def connect(self, to: Address, *, source: str = "") -> Stranger:
        if source:
            self.sock.bind((source, 0))
        await self.loop.sock_connect(self.sock, (to.host, to.port))
        return self

    async def greet(self, peer: str) -> Established:
        handshake = Handshake(role=Role.DIALER, us=self.us, peer=peer, secret=self.secret)
        async with asyncio.timeout(PATIENCE_S):
            while True:
                await self.loop.sock_sendall(self.sock, handshake.take_output())
                data = await self.loop.sock_recv(self.sock, 4096)
                if not data:
                    raise ConnectionError(handshake.explain_close())
                if (end := handshake.receive(data)) is not None:
                    return end

    async def closed(self) -> None:
        """Wait until the other side has closed; its bytes are discarded."""
        async with asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(ConnectionError):
                while await self.loop.sock_recv(self.sock, 65536):
                    pass

    def __del__(self) -> None:
        self.sock.close()


# TLS.


def certificates(folder: Path, *nodes: str, common: bool = False) -> dict[str, TlsFiles]:
    """A certificate per node, all of one new CA; the node id is a DNS name, or only the common name."""
    authority = trustme.CA()
    place = Path(tempfile.mkdtemp(dir=folder))
    authority.cert_pem.write_to_path(str(place / "ca.pem"))
    made: dict[str, TlsFiles] = {}
    for node in nodes:
        leaf = authority.issue_cert("host.example", common_name=node) if common else authority.issue_cert(node)
        cert, key = place / f"{node}.pem", place / f"{node}.key"
        leaf.private_key_pem.write_to_path(str(key))
        for number, blob in enumerate(leaf.cert_chain_pems):
            blob.write_to_path(str(cert), append=number > 0)
        made[node] = TlsFiles(cert=cert, key=key, ca=place / "ca.pem")
    return made
