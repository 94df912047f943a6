"""Large values for an attempt: looked up, fetched from the shared store, and read a few chunks at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from holdfast.cluster.partition.door import Partition
from holdfast.cluster.values.shared_store import Objects
from holdfast.statemachine import queries, refs
from holdfast.statemachine.blobs import chunks_of
from holdfast.statemachine.commands import Ref

READ_CHUNKS: Final = 8  # of a large value, per turn of the event loop


class LargeValues:
    """The values behind some references of a partition.

    Values in the shared store are fetched before they are needed, because that may take long and must not delay other
    attempts. All others are read when they are sent."""

    __slots__ = ("_partition", "_refs", "fetched")

    def __init__(self, partition: Partition, references: Iterable[Ref]) -> None:
        self._partition = partition
        self._refs = list(references)
        self.fetched: dict[bytes, bytes] = {}

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

    async def read(self) -> dict[bytes, list[bytes]]:
        """Their chunks, read a few per turn so that the event loop stays responsive. Raises queries.Gone."""
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
