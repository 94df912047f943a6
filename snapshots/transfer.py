"""Fetching a snapshot, from a store or in chunks from a peer. Both resume after an interruption and verify everything.

A fetch writes to `<name>.part` in the fetcher's directory and checks the whole file before it gets its final name. A
partial file of the same name, left by an earlier fetch, is continued. If the complete file then fails the check, it is
fetched once more from the beginning, because the partial file may have been damaged.

Between peers, the fetcher sends requests and the serving node answers, one message each (`Request`). The fetcher
controls pace and order, so the serving node keeps no state, and the bound on message size bounds memory on both sides.
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

from holdfast.log.messages import GroupId
from holdfast.sdk.bounds import check_msgpack
from holdfast.snapshots.errors import Corrupted, PeerRefused
from holdfast.snapshots.files import PRIVATE_FILE, make_directory, move_into_place, remove_quietly, room_on_disk
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
    """Fetch in a thread; see `fetch_blocking`."""
    return await in_thread(
        lambda work: fetch_blocking(store, name, directory, expected=expected, work=work),
        progress=progress,
        throttle=throttle,
    )


def fetch_blocking(
    store: Store, name: str, directory: Path, *, expected: Expected = ANY, work: Work | None = None
) -> SnapshotFile:
    """Fetch the snapshot `name` from the store: verified, and durable in `directory` under its own name."""
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
    """Verify a completely fetched file, and that it matches its name."""
    found = verify(part, expected)
    if found.name != path.name:
        raise Corrupted(part, f"it holds another snapshot, {found.name}")
    move_into_place(part, path)
    return SnapshotFile(path, found.header)


def remove_parts(directory: Path, *, but: str | None = None) -> None:
    """Remove partial files of fetches that will not be resumed."""
    for part in directory.glob(f"*{PART}"):
        if but is None or part.name != but + PART:
            remove_quietly(part)


# Offers


@dataclass(frozen=True)
class Offer:
    """What a leader offers to a follower that fell behind: `log.engine.Snapshot.detail`."""

    name: str
    """The snapshot's own name, without a prefix."""
    size: int
    """Size of the file in bytes."""
    stored: bool
    """Whether the snapshot is in the shared store. If not, the offering peer has it."""

    def encode(self) -> bytes:
        packed: bytes = msgpack.packb([1, self.name, self.size, self.stored])
        return packed

    @classmethod
    def decode(cls, detail: bytes) -> Offer:
        """Raises PeerRefused for anything but an offer, because the bytes come from the network."""
        match _unpack(detail):
            case [1, str(name), int(size), bool(stored)] if parse_name(name) is not None and size >= BLOCK_BYTES:
                return cls(name, size, stored)
        raise PeerRefused("the leader", "its offer cannot be decoded")


# From a peer

Request = Callable[[str, bytes], Awaitable[bytes]]
"""Sends a request to a peer and returns its answer. Raises if there is none."""

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
    """The serving side: returns chunks of local snapshots to authenticated peers."""

    def __init__(self, find: Callable[[GroupId], Path | None]) -> None:
        """`find` returns the directory of a group's snapshots, or None if this node has none."""
        self._find = find

    async def answer(self, question: bytes) -> bytes:
        """Never raises for a bad request: the answer says what is wrong."""
        match _unpack(question):
            case [1, int(kind), int(group), str(name), int(offset), int(length)] if kind == _READ:
                if parse_name(name) is None or offset < 0 or not 0 < length <= CHUNK_BYTES_MAX:
                    return _refusal("the request is out of bounds")
                directory = self._find(GroupId(group))
                if directory is None:
                    return _refusal(f"group {group} is not here")
                return await asyncio.to_thread(_read_chunk, directory / name, offset, length)
        return _refusal("the request cannot be decoded")


def _read_chunk(path: Path, offset: int, length: int) -> bytes:
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            data = os.pread(file.fileno(), length, offset)
    except FileNotFoundError:
        return _refusal(f"{path.name} does not exist, or no longer exists")
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
    group: GroupId,
    name: str,
    directory: Path,
    *,
    expected: Expected = ANY,
    chunk_bytes: int = CHUNK_BYTES,
    progress: Progress | None = None,
    throttle: Throttle | None = None,
) -> SnapshotFile:
    """Fetch the snapshot `name` from a peer: verified, and durable in `directory`. A few requests are in flight at a
    time.
    """
    if parse_name(name) is None or not 0 < chunk_bytes <= CHUNK_BYTES_MAX:
        raise ValueError(f"invalid name {name!r} or chunk size {chunk_bytes}")
    path = directory / name
    part = path.with_name(path.name + PART)
    with room_on_disk(directory):
        resumed = await asyncio.to_thread(_prepare, directory, part)
        fetcher = _Fetcher(request, peer, group, name, chunk_bytes=chunk_bytes, progress=progress, throttle=throttle)
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
        group: GroupId,
        name: str,
        *,
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
        """Append to `part` until it is complete, and fsync it."""
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
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
                assert offset == have, "answers are processed in order"
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
        """Size of the file. Its first block must be a header, so that a peer cannot make us write gigabytes of anything
        else.
        """
        size, block = await self._chunk(0, BLOCK_BYTES)
        header = decode(block, f"{self._name} of {self._peer}")
        if header.name != self._name or header.file_bytes != size:
            raise Corrupted(f"{self._name} of {self._peer}", "the peer's copy is truncated, or another snapshot")
        return size

    async def _chunk(self, offset: int, length: int) -> tuple[int, bytes]:
        """(size of the file, the chunk). A damaged or short answer is requested again a few times."""
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
    """None for invalid msgpack, because these bytes come from the network."""
    if len(packed) > _MESSAGE_BYTES_MAX:
        return None
    try:
        check_msgpack(packed, _ELEMENTS_MAX)
        found: object = msgpack.unpackb(packed)
        return found
    except Exception:  # msgpack raises a dozen kinds of errors, which all mean the same here.
        return None
