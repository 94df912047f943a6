"""A disk in memory that forgets unsynced data: it replaces `LmdbStore` under the real journal."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence

import msgpack

from holdfast.log.messages import GroupId
from holdfast.log.records import FILED, HARD, table_of
from holdfast.log.rows import RECENT, decode_row, place_in
from holdfast.log.store import Cut, Drop, Extend, Op, Put


class Table:
    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.values: dict[bytes, bytes] = {}

    def put(self, key: bytes, value: bytes) -> None:
        if key not in self.values:
            if self.keys and key < self.keys[-1]:
                insort(self.keys, key)
            else:
                self.keys.append(key)
        self.values[key] = value

    def cut(self, low: bytes, high: bytes) -> None:
        start, stop = bisect_left(self.keys, low), bisect_left(self.keys, high)
        for key in self.keys[start:stop]:
            del self.values[key]
        del self.keys[start:stop]


class SimDisk:
    """The durable data, and the data of the current commit. There is one commit at a time, as with LMDB."""

    path = "simulated disk"

    def __init__(self, disk_id: str) -> None:
        self.disk_id = disk_id
        self.tables_: dict[str, Table] = {}
        self.pending: list[Op] = []
        self.begun = False  # The commit of the pending data was requested.
        self.on_stage: Callable[[Sequence[Op]], None] = lambda ops: None
        self.full = False
        self.to_the_last_byte = False  # Not even a state can be written.
        self.fsyncs = 0
        self._rows: dict[bytes, tuple[bytes, dict[GroupId, tuple[int, list[bytes]]]]] = {}

    def _table(self, name: str) -> Table:
        table = self.tables_.get(name)
        if table is None:
            table = self.tables_[name] = Table()
        return table

    def get(self, table: str, key: bytes) -> bytes | None:
        return self._table(table).values.get(key)

    def part(self, table: str, key: bytes, offset: int, length: int) -> bytes | None:
        value = self._table(table).values.get(key)
        return None if value is None else value[offset : offset + length]

    def scan(self, table: str, low: bytes, high: bytes, *, bytes_max: int, count_max: int) -> list[tuple[bytes, bytes]]:
        found = self._table(table)
        rows: list[tuple[bytes, bytes]] = []
        size = 0
        for key in found.keys[bisect_left(found.keys, low) : bisect_left(found.keys, high)]:
            size += len(key) + len(found.values[key])
            if rows and (size > bytes_max or len(rows) >= count_max):
                break
            rows.append((key, found.values[key]))
        return rows

    def first(self, table: str) -> tuple[bytes, bytes] | None:
        found = self._table(table)
        return (found.keys[0], found.values[found.keys[0]]) if found.keys else None

    def last(self, table: str) -> tuple[bytes, bytes] | None:
        found = self._table(table)
        return (found.keys[-1], found.values[found.keys[-1]]) if found.keys else None

    def count(self, table: str) -> int:
        return len(self._table(table).keys)

    def tables(self) -> list[str]:
        return sorted(name for name, table in self.tables_.items() if table.keys)

    def stage(self, ops: Sequence[Op]) -> None:
        assert not self.pending, "one commit at a time"
        self.on_stage(ops)
        self.pending = list(ops)

    def commit(self) -> None:
        """The fsync returned: everything is durable."""
        self.fsyncs += 1
        ops, self.pending, self.begun = self.pending, [], False
        for op in ops:
            match op:
                case Put(table, key, value):
                    self._table(table).put(key, value)
                case Extend(table, items):
                    for key, value in items:
                        self._table(table).put(key, value)
                case Cut(table, low, high):
                    self._table(table).cut(low, high)
                case Drop(table):
                    self.tables_.pop(table, None)

    def lose_power(self, *, keep_pending: bool) -> None:
        """A commit is atomic: after a crash it is complete or absent, and absent if it had not begun.

        Also right for a killed process whose pages the kernel still holds: opening the store syncs the file before
        anything in it is trusted.
        """
        if keep_pending and self.begun:
            self.commit()
        self.pending, self.begun = [], False

    def room(self) -> str | None:
        return "the simulated disk is full" if self.full else None

    def close(self) -> None: ...

    def keys(self, table: str) -> list[bytes]:
        return self._table(table).keys

    def hards(self) -> list[tuple[int, bytes]]:
        """(group, record) of all groups."""
        return [(int.from_bytes(key, "big"), value) for key, value in self._table(HARD).values.items()]

    @property
    def filed(self) -> int:
        """Rows before this one are not read when a node starts, unless tables point to them."""
        return int.from_bytes(self._table(FILED).values.get(b"rows", b"")[4:12], "big")

    def entry(self, group: GroupId, index: int) -> bytes | None:
        """The entry of a group on the disk: in its own table, or else in the newest row that counts."""
        filed = self._table(table_of(group)).values.get(index.to_bytes(8, "big"))
        if filed is not None:
            place = place_in(filed)
            return filed if place is None else self.part(RECENT, place.row.to_bytes(8, "big"), *place[1:3])
        hard = self._table(HARD).values.get(group.to_bytes(4, "big"))
        recent = self._table(RECENT)
        since: bytes = (0 if hard is None else msgpack.unpackb(hard[4:])[10]).to_bytes(8, "big")
        for key in reversed(recent.keys):
            if key < since:
                return None
            found = self._row(key, recent.values[key]).get(group)
            if found is not None and 0 <= index - found[0] < len(found[1]):
                return found[1][index - found[0]]
        return None

    def _row(self, key: bytes, value: bytes) -> dict[GroupId, tuple[int, list[bytes]]]:
        known = self._rows.get(key)
        if known is None or known[0] is not value:
            parts = {
                group: (first, [value[start:stop] for start, stop in places])
                for group, first, places in decode_row(key, value) or ()
            }
            known = self._rows[key] = value, parts
        return known[1]

    def flip_bit(self, table: str, key: bytes, at: int) -> None:
        """Damage one value. A second call restores it."""
        values = self._table(table).values
        value = bytearray(values[key])
        value[at // 8 % len(value)] ^= 1 << (at % 8)
        values[key] = bytes(value)
