"""Fetching a snapshot: from a store, or piece by piece from a peer. Both go on where they broke off, and trust nothing.

A fetch writes to `<name>.part` in a directory of the fetcher's and checks the whole file before it gets its name. A partial
file left by an earlier fetch is used if it belongs to the same snapshot, which the name says; if the whole then turns
out to be wrong, it is fetched once more from the beginning, because the partial file may be what is wrong.

Between peers the fetcher asks and the other side answers, each question and each answer in one message that some link carries
(`Request`). The fetcher decides on pace and order, so the one that serves keeps no state at all, and a bound on each
message bounds the memory on both sides.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgpack

from holdfast.sdk.bounds import check_msgpack
from holdfast.snapshots.errors import Corrupted, PeerRefused
from holdfast.snapshots.files import make_directory, move_into_place, remove_quietly, room_on_disk
from holdfast.snapshots.format import ANY, BLOCK_BYTES, Expected, SnapshotFile, decode, parse_name, verify
from holdfast.snapshots.stores import Store
from holdfast.snapshots.work import Progress, Throttle, Work, in_thread

PART: Final = ".part"

# From a store


async def fetch(
    store: Store,
    name: str,
    directory: Path,
    *,
    expected: Expected = ANY,
    progress: Progress | None = None,
    throttle: Throttle | None = None,
) -> SnapshotFile:
    """In a thread; see `fetch_blocking`."""
    return await in_thread(
        lambda work: fetch_blocking(store, name, directory, expected=expected, work=work),
        progress=progress,
        throttle=throttle,
    )


def fetch_blocking(
    store: Store, name: str, directory: Path, *, expected: Expected = ANY, work: Work | None = None
) -> SnapshotFile:
    """The snapshot `name` of the store, verified, durable in `directory` under its own name."""
    work = work or Work()
    with room_on_disk(directory):
        make_directory(directory)
        path = directory / name.rpartition("/")[2]
        part = path.with_name(path.name + PART)
        resumed = part.exists()
        store.get(name, part, work)
        try:
            return _accept(part, path, expected)
        except Corrupted:
            remove_quietly(part)
            if not resumed:
                raise
        store.get(name, part, work)
        try:
            return _accept(part, path, expected)
        except Corrupted:
            remove_quietly(part)
            raise


def _accept(part: Path, path: Path, expected: Expected) -> SnapshotFile:
    """Everything came: is it what its name says?"""
    found = verify(part, expected)
    if found.name != path.name:
        raise Corrupted(part, f"it is another snapshot, {found.name}")
    move_into_place(part, path)
    return SnapshotFile(path, found.header)


def remove_parts(directory: Path, *, but: str | None = None) -> None:
    """Partial files of fetches that nobody will go on with."""
    for part in directory.glob(f"*{PART}"):
        if but is None or part.name != but + PART:
            remove_quietly(part)


# Offers


@dataclass(frozen=True)
class Offer:
    """What a leader tells a follower that fell behind: `log.engine.Snapshot.detail`."""

    name: str
    """The snapshot's own name, without a prefix."""
    size: int
    """Of the file."""
    stored: bool
    """It is in the store that all nodes share. If not, the peer that offers has it."""

    def encode(self) -> bytes:
        packed: bytes = msgpack.packb([1, self.name, self.size, self.stored])
        return packed

    @classmethod
    def decode(cls, detail: bytes) -> Offer:
        """PeerRefused for what is no offer: it came over the network."""
        match _unpack(detail):
            case [1, str(name), int(size), bool(stored)] if parse_name(name) is not None and size >= BLOCK_BYTES:
                return cls(name, size, stored)
        raise PeerRefused("the leader", "its offer is not understood")


# From a peer

Request = Callable[[str, bytes], Awaitable[bytes]]
"""Sends a question to a peer and returns its answer. Raises whatever tells that there is none."""

CHUNK_BYTES: Final = 256 << 10
CHUNK_BYTES_MAX: Final = 4 << 20
_MESSAGE_BYTES_MAX: Final = CHUNK_BYTES_MAX + 4096
_ELEMENTS_MAX: Final = 64
_READ: Final = 1
_CHUNK: Final = 1
_REFUSAL: Final = 2
_WINDOW: Final = 4
_ATTEMPTS: Final = 3


class PeerSource:
    """The side that serves: chunks of the snapshots in one directory, to whoever the link let in."""

    def __init__(self, find: Callable[[int], Path | None]) -> None:
        """`find` gives the directory of a group's snapshots, None if this node has none."""
        self._find = find

    async def answer(self, question: bytes) -> bytes:
        """Never raises for what is asked: the answer says what is wrong."""
        match _unpack(question):
            case [1, int(kind), int(group), str(name), int(offset), int(length)] if kind == _READ:
                if parse_name(name) is None or offset < 0 or not 0 < length <= CHUNK_BYTES_MAX:
                    return _refusal("the question is out of bounds")
                directory = self._find(group)
                if directory is None:
                    return _refusal(f"group {group} is not here")
                return await asyncio.to_thread(_read_chunk, directory / name, offset, length)
        return _refusal("the question is not understood")


def _read_chunk(path: Path, offset: int, length: int) -> bytes:
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            data = os.pread(file.fileno(), length, offset)
    except FileNotFoundError:
        return _refusal(f"there is no {path.name} (any more)")
    except OSError as error:
        return _refusal(f"{path.name} cannot be read ({error.strerror})")
    packed: bytes = msgpack.packb([1, _CHUNK, size, offset, data, hashlib.sha256(data).digest()])
    return packed


def _refusal(detail: str) -> bytes:
    packed: bytes = msgpack.packb([1, _REFUSAL, detail])
    return packed


async def fetch_from_peer(
    request: Request,
    peer: str,
    group: int,
    name: str,
    directory: Path,
    *,
    expected: Expected = ANY,
    chunk_bytes: int = CHUNK_BYTES,
    progress: Progress | None = None,
    throttle: Throttle | None = None,
) -> SnapshotFile:
    """The snapshot `name` of a peer, verified, durable in `directory`. A few questions are on their way at a time."""
    if parse_name(name) is None or not 0 < chunk_bytes <= CHUNK_BYTES_MAX:
        raise ValueError(f"{name!r} in chunks of {chunk_bytes} bytes cannot be asked for")
    path = directory / name
    part = path.with_name(path.name + PART)
    with room_on_disk(directory):
        resumed = await asyncio.to_thread(_prepare, directory, part)
        fetcher = _Fetcher(request, peer, group, name, chunk_bytes, progress, throttle)
        await fetcher.fetch(part)
        try:
            return await in_thread(lambda _: _accept(part, path, expected))
        except Corrupted:
            await asyncio.to_thread(remove_quietly, part)
            if not resumed:
                raise
        await fetcher.fetch(part)
        try:
            return await in_thread(lambda _: _accept(part, path, expected))
        except Corrupted:
            await asyncio.to_thread(remove_quietly, part)
            raise


def _prepare(directory: Path, part: Path) -> bool:
    make_directory(directory)
    return part.exists()


class _Fetcher:
    def __init__(
        self,
        request: Request,
        peer: str,
        group: int,
        name: str,
        chunk_bytes: int,
        progress: Progress | None,
        throttle: Throttle | None,
    ) -> None:
        self._request = request
        self._peer, self._group, self._name = peer, group, name
        self._chunk_bytes = chunk_bytes
        self._progress = progress
        self._throttle = throttle

    async def fetch(self, part: Path) -> None:
        """Append to `part` until it is whole, and fsync it."""
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        asked: deque[tuple[int, asyncio.Task[tuple[int, bytes]]]] = deque()
        try:
            size = await self._size()
            have = os.fstat(fd).st_size
            if have > size:
                os.ftruncate(fd, 0)
                have = 0
            next_offset = have
            while have < size:
                while next_offset < size and len(asked) < _WINDOW:
                    length = min(self._chunk_bytes, size - next_offset)
                    asked.append((next_offset, asyncio.ensure_future(self._chunk(next_offset, length))))
                    next_offset += length
                offset, task = asked.popleft()
                _, data = await task
                assert offset == have, "answers are taken in order"
                await asyncio.to_thread(_write_at, fd, data, offset)
                have += len(data)
                if self._progress is not None:
                    self._progress(have, size)
                if self._throttle is not None:
                    await asyncio.sleep(self._throttle.delay_s(len(data)))
            await asyncio.to_thread(os.fsync, fd)
        finally:
            for _, task in asked:
                task.cancel()
            await asyncio.gather(*(task for _, task in asked), return_exceptions=True)
            os.close(fd)

    async def _size(self) -> int:
        """Of the file. Its first block must be a header: a peer may not have us write gigabytes of anything else."""
        size, block = await self._chunk(0, BLOCK_BYTES)
        header = decode(block, f"{self._name} of {self._peer}")
        if header.name != self._name or header.file_bytes != size:
            raise Corrupted(f"{self._name} of {self._peer}", "the peer's copy is torn, or another snapshot")
        return size

    async def _chunk(self, offset: int, length: int) -> tuple[int, bytes]:
        """(size of the file, the chunk). A damaged or short answer is asked for again a few times."""
        question: bytes = msgpack.packb([1, _READ, self._group, self._name, offset, length])
        for _ in range(_ATTEMPTS):
            match _unpack(await self._request(self._peer, question)):
                case [1, int(kind), str(detail)] if kind == _REFUSAL:
                    raise PeerRefused(self._peer, detail)
                case [1, int(kind), int(size), int(start), bytes(data), bytes(digest)] if kind == _CHUNK:
                    if start == offset and len(data) == length and hashlib.sha256(data).digest() == digest:
                        return size, data
        raise PeerRefused(self._peer, f"its answers at offset {offset} are damaged")


def _write_at(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


def _unpack(packed: bytes) -> object:
    """None for what is not msgpack: these bytes come over the network."""
    if len(packed) > _MESSAGE_BYTES_MAX:
        return None
    try:
        check_msgpack(packed, _ELEMENTS_MAX)
        found: object = msgpack.unpackb(packed)
        return found
    except Exception:  # msgpack raises a dozen kinds, and all of them mean the same here.
        return None
