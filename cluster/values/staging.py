"""Staging of large values: they enter a partition before the command that refers to them.

A value goes to the shared store, and the partition records its object's name. Without a shared store, or if the store
does not accept the value promptly, the value goes through the partition's log in chunks. No log entry and no message
between nodes is larger than a chunk, so a large value delays nothing: small commands pass between its chunks. The
number of chunks in flight per partition is bounded. Equal values are staged one after the other; the second finds the
first one already there.

The staging node decides what is large (`threshold`). The state machine does not depend on it, so nodes may differ.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

from holdfast.cluster.values.shared_store import Objects
from holdfast.sdk.ids import PartitionNumber
from holdfast.sdk.journal import DIGESTED, digest
from holdfast.statemachine import refs
from holdfast.statemachine.blobs import CHUNK_BYTES, chunks_of
from holdfast.statemachine.commands import Command, Invoke, KeepBlob, Payload, PutBlob, RecordStep, Ref, TouchBlob
from holdfast.statemachine.effects import Code, Result

THRESHOLD_BYTES: Final = 256 * 1024
#: Chunks in flight from this node to one partition,
WINDOW_CHUNKS: Final = 16
#: and of one value.
WORKERS: Final = 8
#: Larger values are hashed in a thread.
HASHED_BYTES_MAX: Final = 1024 * 1024
#: Below this size a reference is not worth its bookkeeping, whatever else is in the command.
WORTH_BYTES: Final = 1024

_CHILD_PAYLOAD: Final = Invoke._fields.index("payload")

#: Proposes a command to the partition's leader. Raises ProposalError.
Put: TypeAlias = Callable[[Command], Awaitable[Result]]
#: Returns a chunk of the value, by its number.
Chunk: TypeAlias = Callable[[int], bytes]
#: Fetches the value. Called only if the partition does not have it.
Source: TypeAlias = Callable[[], Awaitable[Chunk]]
#: Chunks joined per turn of the event loop.
JOINED_CHUNKS: Final = 8


class Stager:
    def __init__(self, threshold: int = THRESHOLD_BYTES, objects: Objects | None = None) -> None:
        self.threshold = threshold
        self.objects = objects  # The shared store, if there is one.
        self.staged = 0  # Values written since the start,
        self.staged_bytes = 0
        self.found = 0  # and values that the partition already had.
        self._windows: dict[PartitionNumber, asyncio.Semaphore] = {}
        self._under_way: dict[tuple[int, bytes], asyncio.Future[None]] = {}

    def large(self, command: Command) -> int:
        """Number of bytes of this command that have to be staged."""
        payloads = refs.payloads(command)
        if not payloads:
            return 0
        if len(payloads) == 1:  # The usual case.
            size = len(payloads[0]) if isinstance(payloads[0], bytes) else 0
            return size if size > self.threshold else 0
        limit = self._limit(payloads)
        return sum(len(each) for each in payloads if isinstance(each, bytes) and len(each) > limit)

    def _limit(self, payloads: list[Payload]) -> int:
        """The values that stay in a command with many values are together no larger than a single value may be."""
        return max(self.threshold // max(len(payloads), 1), min(self.threshold, WORTH_BYTES))

    async def detach(self, number: PartitionNumber, command: Command, put: Put, *, intake: bool = False) -> Command:
        """Stage the large values of a command in partition `number`, and return the command with references to them."""
        payloads = refs.payloads(command)
        limit = self._limit(payloads)
        new: list[Payload] = []
        for payload in payloads:
            if isinstance(payload, bytes) and len(payload) > limit:
                payload = await self._stage_value(number, payload, put, intake=intake)
            new.append(payload)
        return refs.replaced(command, new)

    async def _stage_value(self, number: PartitionNumber, payload: bytes, put: Put, *, intake: bool) -> Ref:
        if len(payload) > HASHED_BYTES_MAX:
            ref, stored = await asyncio.get_running_loop().run_in_executor(None, refs.make, payload)
        else:
            ref, stored = refs.make(payload)

        async def source() -> Chunk:
            return pieces_of(stored)

        await self.stage(number, ref, source, put, intake=intake)
        return ref

    async def stage(self, number: PartitionNumber, ref: Ref, source: Source, put: Put, *, intake: bool = False) -> None:
        """Return once partition `number` keeps the value long enough to be referred to. Raises ProposalError."""
        key = (number, ref.data)
        while (other := self._under_way.get(key)) is not None:
            await asyncio.wait([other])  # Then check whether it succeeded.
        done = self._under_way[key] = asyncio.get_running_loop().create_future()
        try:
            if (await put(TouchBlob(ref.data, intake))).code == Code.UNCHANGED:
                self.found += 1
                return
            chunk = await source()
            if not await self._put_into_store(number, ref, chunk, put):
                await self._put_all(number, ref, chunk, put)
            self.staged += 1
            self.staged_bytes += refs.stored_size(ref.data)
        finally:
            del self._under_way[key]
            done.set_result(None)

    async def _put_into_store(self, number: PartitionNumber, ref: Ref, chunk: Chunk, put: Put) -> bool:
        """Returns False if the value has to go through the log."""
        objects = self.objects
        if objects is None or not objects.usable(number):
            return False
        name = await objects.put(number, ref.data, await _joined(ref, chunk))
        if name is None:
            return False
        answer = await put(KeepBlob(ref.data, name))
        if answer.code == Code.OUTDATED:
            objects.apart(number)
        return answer.code in (Code.DONE, Code.UNCHANGED)

    async def _put_all(self, number: PartitionNumber, ref: Ref, chunk: Chunk, put: Put) -> None:
        window = self._windows.setdefault(number, asyncio.Semaphore(WINDOW_CHUNKS))
        count = chunks_of(refs.stored_size(ref.data))
        indexes = iter(range(count))

        async def work() -> None:
            for index in indexes:
                async with window:
                    answer = await put(PutBlob(ref.data, index, chunk(index)))
                if answer.code not in (0, 200):
                    raise RuntimeError(f"a chunk of a large value was refused: {answer.message}")

        workers = [asyncio.ensure_future(work()) for _ in range(min(WORKERS, count))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()


def pieces_of(stored: bytes | memoryview) -> Chunk:
    def chunk(index: int) -> bytes:
        return bytes(stored[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES])

    return chunk


async def _joined(ref: Ref, chunk: Chunk) -> bytes:
    """Join all chunks, a few per turn, so that the event loop stays responsive."""
    pieces = []
    for index in range(chunks_of(refs.stored_size(ref.data))):
        if index and index % JOINED_CHUNKS == 0:
            await asyncio.sleep(0)
        pieces.append(chunk(index))
    return b"".join(pieces)


async def digested(command: Command, level: int) -> Command:
    """The command with its digest, if it has a value too large to hash on the loop."""
    if level < 2 or not isinstance(command, RecordStep) or command.op not in DIGESTED or command.digest:
        return command
    given = command.child[_CHILD_PAYLOAD] if command.child is not None else command.argument[-1]
    found = await asyncio.get_running_loop().run_in_executor(None, digest, given)
    return command._replace(digest=found)
