"""A TCP proxy between two nodes that injects faults, without root and without touching the machine's network.

One proxy serves one directed pair: it listens where `a` dials `b`. It delivers delayed bytes later and in order, as TCP
does after a temporary cut. Like TCP, it never drops bytes from the middle of a stream. A mode takes effect when `mode`
returns: from then on nothing passes that the mode forbids, except at most one chunk that may already be on the wire.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Any, Self

CHUNK_BYTES = 64 * 1024
HELD_BYTES_MAX = 1024 * 1024  # Above this the proxy stops reading, which the sender sees as TCP backpressure.
DIAL_TIMEOUT_S = 10.0

Address = tuple[str, int]


class Direction(StrEnum):
    FORWARD = "forward"  # From the dialling side to the target.
    BACKWARD = "backward"


BOTH = frozenset(Direction)


@dataclass(frozen=True, slots=True)
class Pass:
    """Forwards everything."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Open connections are reset and new ones refused: a crashed host, or a firewall that rejects."""


@dataclass(frozen=True, slots=True)
class Blackhole:
    """Connections are accepted and stay open, but nothing passes, not even their end: a cable pulled out."""

    directions: frozenset[Direction] = BOTH


@dataclass(frozen=True, slots=True)
class Delay:
    """Each chunk arrives `delay_ms` later, plus up to `jitter_ms`; the order is kept and bandwidth is not reduced."""

    delay_ms: float
    jitter_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Throttle:
    """Limits the bytes per second in each direction of each connection."""

    bytes_per_second: int


@dataclass(frozen=True, slots=True)
class Errors:
    """Answers each request with one of these S3 errors, (status, code). The target sees none of the requests.

    Open connections are reset when it begins and when it ends, because the target does not know their requests.
    """

    answers: tuple[tuple[int, str], ...]


Mode = Pass | Cut | Blackhole | Delay | Throttle | Errors


class _End(StrEnum):
    CLOSED = "closed"
    RESET = "reset"


class _Line:
    """The pending chunks of one direction of one connection, in order, each with the time from which it may pass."""

    def __init__(self) -> None:
        self._chunks: deque[tuple[float, bytes | _End]] = deque()
        self._held_bytes = 0
        self._last_due = 0.0
        self._filled = asyncio.Event()
        self._emptied = asyncio.Event()

    async def put(self, due: float, chunk: bytes | _End) -> None:
        self._last_due = max(self._last_due, due)  # Chunks stay in order, whatever their jitter.
        self._chunks.append((self._last_due, chunk))
        self._held_bytes += len(chunk)
        self._filled.set()
        while self._held_bytes > HELD_BYTES_MAX:
            self._emptied.clear()
            await self._emptied.wait()

    async def take(self) -> tuple[float, bytes | _End]:
        while not self._chunks:
            self._filled.clear()
            await self._filled.wait()
        due, chunk = self._chunks.popleft()
        self._held_bytes -= len(chunk)
        self._emptied.set()
        return due, chunk


class Proxy:
    """Use as `async with Proxy(listen, target) as proxy`, then `proxy.mode(Cut())` and so on."""

    def __init__(self, listen: Address, target: Address, *, chance: random.Random | None = None) -> None:
        self.target = target
        self.accepted = self.answered = 0
        self.passed_bytes = dict.fromkeys(Direction, 0)
        self._listen = listen
        self._chance = chance or random.Random()
        self._mode: Mode = Pass()
        self._changed = asyncio.Event()
        self._reservation: socket.socket | None = None
        self._listener: socket.socket | None = None
        self._connections: dict[asyncio.Task[None], list[asyncio.StreamWriter]] = {}

    @property
    def address(self) -> Address:
        """The listening address. The port stays reserved while connections are refused."""
        assert self._reservation is not None, "the proxy is started"
        host, port = self._reservation.getsockname()
        return host, port

    @property
    def current(self) -> Mode:
        return self._mode

    async def start(self) -> None:
        # The reservation is bound but never listens. It keeps the port ours while a cut refuses connections.
        self._reservation = _bound(self._listen)
        self._listen_unless_cut()

    async def close(self) -> None:
        self._stop_listening()
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._reservation is not None:
            self._reservation.close()
            self._reservation = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def mode(self, mode: Mode) -> None:
        """Change what happens from now on, to open connections too."""
        before, self._mode = self._mode, mode
        self._changed.set()
        self._changed = asyncio.Event()
        if self._reservation is None:
            return
        self._listen_unless_cut()
        if isinstance(mode, Cut | Errors) or isinstance(before, Errors):
            for task, writers in self._connections.items():
                for writer in writers:
                    _reset(writer)
                task.cancel()

    def _listen_unless_cut(self) -> None:
        if isinstance(self._mode, Cut):
            self._stop_listening()
        elif self._listener is None:
            self._listener = _bound(self.address)
            self._listener.listen(128)
            asyncio.get_running_loop().add_reader(self._listener, self._accept, self._listener)

    def _stop_listening(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def _accept(self, listener: socket.socket) -> None:
        try:
            client, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        client.setblocking(False)
        self.accepted += 1
        task = asyncio.get_running_loop().create_task(self._serve(client))
        self._connections[task] = []
        task.add_done_callback(self._connections.pop)

    async def _serve(self, client: socket.socket) -> None:
        writers: list[asyncio.StreamWriter] = []
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writers
        try:
            from_client, to_client = await _streams(asyncio.open_connection(sock=client), writers)
            if isinstance(self._mode, Errors):
                await _answer(from_client, to_client, *self._chance.choice(self._mode.answers))
                self.answered += 1
                to_client.close()
                return
            await self._until_open(Direction.FORWARD)  # Dialling counts as forward traffic.
            dialling = asyncio.open_connection(*self.target)
            from_target, to_target = await asyncio.wait_for(_streams(dialling, writers), DIAL_TIMEOUT_S)
            await asyncio.gather(
                self._carry(from_client, to_target, Direction.FORWARD),
                self._carry(from_target, to_client, Direction.BACKWARD),
            )
            for writer in writers:
                writer.close()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # The target is down; the reset below tells the client.
        finally:
            for writer in writers:
                _reset(writer)
            if not writers:
                client.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction) -> None:
        line = _Line()
        filling = asyncio.create_task(self._fill(reader, line))
        try:
            await self._empty(line, writer, direction)
        finally:
            filling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await filling

    async def _fill(self, reader: asyncio.StreamReader, line: _Line) -> None:
        while True:
            chunk: bytes | _End
            try:
                chunk = await reader.read(CHUNK_BYTES) or _End.CLOSED
            except OSError:
                chunk = _End.RESET
            due = asyncio.get_running_loop().time()
            if isinstance(self._mode, Delay):
                due += (self._mode.delay_ms + self._chance.random() * self._mode.jitter_ms) / 1000
            await line.put(due, chunk)
            if isinstance(chunk, _End):
                return

    async def _empty(self, line: _Line, writer: asyncio.StreamWriter, direction: Direction) -> None:
        while True:
            due, chunk = await line.take()
            await asyncio.sleep(due - asyncio.get_running_loop().time())
            await self._until_open(direction)
            match chunk:
                case _End.RESET:
                    _reset(writer)
                    return
                case _End.CLOSED:
                    with contextlib.suppress(OSError, RuntimeError):
                        writer.write_eof()
                    return
                case bytes():
                    # Bytes for a closed receiver are lost. The sender notices it through the other direction, if that
                    # one passes.
                    if writer.is_closing():
                        continue
                    with contextlib.suppress(OSError):
                        await self._hand_on(chunk, writer, direction)

    async def _hand_on(self, chunk: bytes, writer: asyncio.StreamWriter, direction: Direction) -> None:
        rest = memoryview(chunk)
        while rest:
            await self._until_open(direction)
            mode = self._mode
            size = max(1, mode.bytes_per_second // 50) if isinstance(mode, Throttle) else len(rest)
            piece, rest = rest[:size], rest[size:]
            writer.write(piece)
            self.passed_bytes[direction] += len(piece)
            await writer.drain()
            if isinstance(mode, Throttle):
                await self._pause(len(piece) / mode.bytes_per_second)

    async def _until_open(self, direction: Direction) -> None:
        while isinstance(self._mode, Blackhole) and direction in self._mode.directions:
            await self._changed.wait()

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)


async def _streams(
    opening: Coroutine[Any, Any, tuple[asyncio.StreamReader, asyncio.StreamWriter]],
    writers: list[asyncio.StreamWriter],
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await opening
    writers.append(writer)
    writer.transport.set_write_buffer_limits(high=0)  # Pending bytes stay here, where a mode can still hold them.
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return reader, writer


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, status: int, code: str) -> None:
    """Read one complete request, so that the answer arrives completely too; then close the connection."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    fields = dict(line.partition(": ")[::2] for line in head.split("\r\n")[1:])
    if "expect" not in fields:  # A client that expects "100 Continue" gets the error instead.
        await reader.readexactly(int(fields.get("content-length", 0)))
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>as ordered</Message></Error>".encode()
    answer = (
        f"HTTP/1.1 {status} {code}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    ).encode()
    writer.write(answer + (b"" if head.startswith("head ") else body))
    await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with a reset: with lingering for zero seconds the kernel sends RST instead of FIN."""
    if not writer.transport.is_closing():
        with contextlib.suppress(OSError):
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()


def _bound(address: Address) -> socket.socket:
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setblocking(False)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound
