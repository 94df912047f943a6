"""Large values on their way into a partition: staged in front of the command that refers to them.

A value goes to the store that all nodes share, and the partition is told its name. Where there is no such store, or it does not
take the value at once, the value goes through the partition's log, piece by piece. Nothing larger than a piece is in a log
entry or in a message between nodes, so a large value holds up nobody: what is small slips in between its pieces. A bounded
number of pieces is under way per partition. Values that are equal are staged one after the other; whoever comes second finds
it there.

Who stages decides what is large (`threshold`). The state machine does not care, so nodes may differ in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

from holdfast.cluster.values.shared_store import Objects
from holdfast.sdk.journal import DIGESTED, digest
from holdfast.statemachine import refs
from holdfast.statemachine.blobs import CHUNK_BYTES, STALE, chunks_of
from holdfast.statemachine.commands import Command, Invoke, KeepBlob, Payload, PutBlob, RecordStep, Ref, TouchBlob
from holdfast.statemachine.effects import Result

THRESHOLD_BYTES: Final = 256 * 1024
#: Pieces under way in one partition, from this node,
WINDOW_CHUNKS: Final = 16
#: and of one value.
WORKERS: Final = 8
#: A hash of this much is left to a thread.
HASHED_BYTES_MAX: Final = 1024 * 1024
#: Smaller than this, a reference is not worth its own bookkeeping, whatever else is in the command.
WORTH_BYTES: Final = 1024

_CHILD_PAYLOAD: Final = Invoke._fields.index("payload")

#: Proposes a command to the partition, whoever leads it. Raises ProposalError.
Put: TypeAlias = Callable[[Command], Awaitable[Result]]
#: A piece of the value, by its number,
Chunk: TypeAlias = Callable[[int], bytes]
#: once the value is at hand. Asked for only when the value has to be brought.
Source: TypeAlias = Callable[[], Awaitable[Chunk]]
#: Pieces that are put together between two turns of the loop.
JOINED_CHUNKS: Final = 8


class Stager:
    def __init__(self, threshold: int = THRESHOLD_BYTES, objects: Objects | None = None) -> None:
        self.threshold = threshold
        self.objects = objects  # The store that all nodes share, if there is one; the node sets it.
        self.staged = 0  # Values that had to be brought, since the start,
        self.staged_bytes = 0
        self.found = 0  # and those that were there already.
        self._windows: dict[int, asyncio.Semaphore] = {}
        self._under_way: dict[tuple[int, bytes], asyncio.Future[None]] = {}

    def large(self, command: Command) -> int:
        """How many bytes of this command have to be staged."""
        payloads = refs.payloads(command)
        if not payloads:
            return 0
        if len(payloads) == 1:  # As a rule.
            size = len(payloads[0]) if isinstance(payloads[0], bytes) else 0
            return size if size > self.threshold else 0
        limit = self._limit(payloads)
        return sum(len(each) for each in payloads if isinstance(each, bytes) and len(each) > limit)

    def _limit(self, payloads: list[Payload]) -> int:
        """What is left in a command with many values is together not larger than one value alone may be."""
        return max(self.threshold // max(len(payloads), 1), min(self.threshold, WORTH_BYTES))

    async def detach(self, number: int, command: Command, put: Put, *, intake: bool = False) -> Command:
        """The command with references in place of what is large, when all of that is in partition `number`."""
        payloads = refs.payloads(command)
        limit = self._limit(payloads)
        new: list[Payload] = []
        for payload in payloads:
            if isinstance(payload, bytes) and len(payload) > limit:
                payload = await self._stage_value(number, payload, put, intake=intake)
            new.append(payload)
        return refs.replaced(command, new)

    async def _stage_value(self, number: int, payload: bytes, put: Put, *, intake: bool) -> Ref:
        if len(payload) > HASHED_BYTES_MAX:
            ref, stored = await asyncio.get_running_loop().run_in_executor(None, refs.make, payload)
        else:
            ref, stored = refs.make(payload)

        async def source() -> Chunk:
            return pieces_of(stored)

        await self.stage(number, ref, source, put, intake=intake)
        return ref

    async def stage(self, number: int, ref: Ref, source: Source, put: Put, *, intake: bool = False) -> None:
        """Until the value is in partition `number`, and stays there long enough to be referred to. Raises ProposalError."""
        key = (number, ref.data)
        while (other := self._under_way.get(key)) is not None:
            await asyncio.wait([other])  # Then look whether it came there.
        done = self._under_way[key] = asyncio.get_running_loop().create_future()
        try:
            if (await put(TouchBlob(ref.data, intake))).code == 200:
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

    async def _put_into_store(self, number: int, ref: Ref, chunk: Chunk, put: Put) -> bool:
        """False: it has to go through the log."""
        objects = self.objects
        if objects is None or not objects.usable(number):
            return False
        name = await objects.put(number, ref.data, await _joined(ref, chunk))
        if name is None:
            return False
        answer = await put(KeepBlob(ref.data, name))
        if answer.code == STALE:
            objects.apart(number)
        return answer.code in (0, 200)

    async def _put_all(self, number: int, ref: Ref, chunk: Chunk, put: Put) -> None:
        window = self._windows.setdefault(number, asyncio.Semaphore(WINDOW_CHUNKS))
        count = chunks_of(refs.stored_size(ref.data))
        indexes = iter(range(count))

        async def work() -> None:
            for index in indexes:
                async with window:
                    answer = await put(PutBlob(ref.data, index, chunk(index)))
                if answer.code not in (0, 200):
                    raise RuntimeError(f"a piece of a value was refused: {answer.message}")

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
    """All of it, a few pieces at a time: the loop has other things to do."""
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
