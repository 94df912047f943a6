"""How a fake node reaches an endpoint: in this process, or over a WebSocket."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Protocol

import aiohttp

from holdfast.sdk.endpoint import Endpoint, Stream
from holdfast.sdk.frames import BATCH_BYTES_MAX, HIGHEST_HEADER, VERSION_HEADER, Credit, encode_batch


class Receiver(Protocol):
    """What a link needs of its node."""

    version: int

    def receive(self, link: Link, message: bytes) -> None: ...

    def lost(self, link: Link) -> None: ...


class MemoryLink:
    """An endpoint in this process: messages are bytes, but there is no socket."""

    def __init__(self, node: Receiver, endpoint: Endpoint) -> None:
        self.node = node
        self.endpoint = endpoint
        self.version = node.version
        self.stream = Stream(endpoint, self._write, version=self.version)
        self.open = True
        self.task = asyncio.ensure_future(self.stream.run())
        self.stream.receive(encode_batch([Credit(1_000_000)], self.version))

    async def _write(self, message: bytes) -> None:
        if self.open:
            self.node.receive(self, message)

    def deliver(self, message: bytes) -> None:
        if self.open:
            self.stream.receive(message)

    async def drop(self) -> None:
        self.open = False
        self.stream.close()
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


class SocketLink:
    """An endpoint behind a URI, over a WebSocket."""

    def __init__(self, node: Receiver, session: aiohttp.ClientSession, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.node = node
        self.session = session
        self.socket = socket
        self.version = 1
        self.open = True
        self.queue: asyncio.Queue[bytes] = asyncio.Queue()
        self.tasks = [asyncio.ensure_future(self._read()), asyncio.ensure_future(self._send())]

    @classmethod
    async def connect(cls, node: Receiver, uri: str) -> SocketLink:
        session = aiohttp.ClientSession()
        try:
            headers = {VERSION_HEADER: "1"}
            if node.version > 1:
                headers[HIGHEST_HEADER] = str(node.version)
            socket = await session.ws_connect(f"{uri}/stream", headers=headers, max_msg_size=BATCH_BYTES_MAX)
        except BaseException:
            await session.close()
            raise
        link = cls(node, session, socket)
        link.version = int(socket._response.headers[VERSION_HEADER]) if node.version > 1 else 1
        link.deliver(encode_batch([Credit(1_000_000)], link.version))
        return link

    async def _read(self) -> None:
        async for message in self.socket:
            if message.type is aiohttp.WSMsgType.BINARY and self.open:
                self.node.receive(self, message.data)
        if self.open:
            self.open = False
            self.node.lost(self)

    async def _send(self) -> None:
        while True:
            await self.socket.send_bytes(await self.queue.get())

    def deliver(self, message: bytes) -> None:
        if self.open:
            self.queue.put_nowait(message)

    async def drop(self) -> None:
        self.open = False
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.socket.close()
        await self.session.close()


Link = MemoryLink | SocketLink
