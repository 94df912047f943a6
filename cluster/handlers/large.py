"""Large values on their way to endpoints: found in what an attempt is sent, fetched from the shared store, read when needed.

A value in the shared store is fetched before it is needed, because that may take long and must not delay other attempts. All
others are read when they are sent, so what waits takes no memory. How much is fetched ahead, and how many attempts load all
of their values at a time, is bounded here for every protocol.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, TypeAlias

from holdfast.cluster.partition.door import Partition
from holdfast.cluster.tasks import Tasks
from holdfast.cluster.values.shared_store import Objects
from holdfast.cluster.values.staging import HASHED_BYTES_MAX
from holdfast.statemachine import queries, refs
from holdfast.statemachine.blobs import chunks_of
from holdfast.statemachine.commands import Ref

READ_CHUNKS: Final = 8  # of a large value, per turn of the event loop
#: No value is fetched for a carrier while this much of fetched values waits to be sent.
FETCHED_BYTES_MAX: Final = 32 * 1024 * 1024
#: At most this many attempts of one deployment have all of their large values in memory at a time.
LOADED_MAX: Final = 8

#: The chunks of each value.
Pieces: TypeAlias = Mapping[bytes, list[bytes]]


class Large:
    """Something for an endpoint that refers to large values of a partition. `size` includes them."""

    __slots__ = ("_partition", "_refs", "fetched", "held", "size")

    def __init__(self, partition: Partition, references: Iterable[Ref], size: int) -> None:
        self._partition = partition
        self._refs = list(references)
        self.size = size
        self.fetched: dict[bytes, bytes] = {}
        self.held = 0  # Bytes that count against the bound of `Fetches`.

    def to_fetch(self) -> dict[bytes, str]:
        """The values in the shared store, and their objects. A missing value is noticed when it is read."""
        found: dict[bytes, str] = {}
        with self._partition.state.read() as txn:
            for ref in self._refs:
                with suppress(queries.Gone):
                    if ref.data not in self.fetched and (name := queries.place(txn, ref.data)):
                        found[ref.data] = name
        return found

    async def fetch(self, objects: Objects) -> None:
        """Raises StoreDown or ValueLost."""
        for blob, name in self.to_fetch().items():
            self.fetched[blob] = await objects.get(self._partition.number, blob, name)

    async def read(self) -> Pieces:
        """The chunks, read a few per turn so that the event loop stays responsive. Raises queries.Gone."""
        pieces: dict[bytes, list[bytes]] = {}
        for ref in self._refs:
            if ref.data in pieces:
                continue
            mine = pieces[ref.data] = []
            if ref.data in self.fetched:
                mine.append(self.fetched[ref.data])
                continue
            count = chunks_of(refs.stored_size(ref.data))
            for first in range(0, count, READ_CHUNKS):
                if first:
                    await asyncio.sleep(0)
                with self._partition.state.read() as txn:
                    mine += [queries.chunk(txn, ref.data, at) for at in range(first, min(first + READ_CHUNKS, count))]
        return pieces

    def whole(self, pieces: Pieces) -> list[Any]:
        """With the values in place of the references. In any thread, because copying may take long."""
        raise NotImplementedError


class LargeSteps(Large):
    """Packed steps of a journal."""

    __slots__ = ("_steps",)

    def __init__(self, partition: Partition, steps: list[bytes], size: int) -> None:
        super().__init__(partition, [ref for raw in steps for ref in refs.in_packed_step(raw)], size)
        self._steps = steps

    def whole(self, pieces: Pieces) -> list[bytes]:
        return [refs.filled_step(raw, lambda ref: _value(ref, pieces)) for raw in self._steps]


class LargeOutcome(Large):
    """The outcome of a step."""

    __slots__ = ("_ref",)

    def __init__(self, partition: Partition, ref: Ref) -> None:
        super().__init__(partition, [ref], refs.size_of(ref))
        self._ref = ref

    def whole(self, pieces: Pieces) -> list[Any]:
        return [0, _value(self._ref, pieces)]


def _value(ref: Ref, pieces: Pieces) -> bytes:
    return refs.restored(ref, b"".join(pieces[ref.data]))


class Fetches:
    """Fetches the values of one carrier that are in the shared store, in order, up to a bound on what waits to be sent."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._bytes = 0
        self._waiting: deque[tuple[Large, Callable[[], bool], Callable[[Exception | None], None]]] = deque()
        self._tasks = Tasks()
        self._closed = False

    def want(self, large: Large, is_wanted: Callable[[], bool], then: Callable[[Exception | None], None]) -> None:
        """Call `then` when its values are here, or with the reason why they are not. Values that are no longer wanted when
        their turn comes are not fetched."""
        self._waiting.append((large, is_wanted, then))
        self._fetch_more()

    def release(self, large: Large) -> None:
        """Its values were sent, or never will be."""
        if large.held:
            large.fetched.clear()
            self._bytes -= large.held
            large.held = 0
            self._fetch_more()

    def close(self) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()

    def _fetch_more(self) -> None:
        while self._waiting and not self._closed:
            large, is_wanted, then = self._waiting[0]
            if self._bytes and self._bytes + large.size > FETCHED_BYTES_MAX:
                return
            self._waiting.popleft()
            if is_wanted():
                large.held = large.size
                self._bytes += large.held
                self._tasks.keep(asyncio.get_running_loop().create_task(self._fetch(large, then)))

    async def _fetch(self, large: Large, then: Callable[[Exception | None], None]) -> None:
        try:
            await large.fetch(self._objects)
        except Exception as error:
            then(error)
        else:
            then(None)


class Loads:
    """For protocols that send everything at once: a bounded number of attempts of one deployment load their values."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._places = asyncio.Semaphore(LOADED_MAX)

    @asynccontextmanager
    async def loaded(self, large: Large) -> AsyncIterator[list[Any]]:
        """The whole steps or outcome, in memory as long as the block takes. Raises StoreDown, ValueLost or queries.Gone."""
        async with self._places:
            await large.fetch(self._objects)
            pieces = await large.read()
            if large.size <= HASHED_BYTES_MAX:
                yield large.whole(pieces)
            else:
                yield await asyncio.get_running_loop().run_in_executor(None, large.whole, pieces)
