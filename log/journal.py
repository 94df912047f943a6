"""The node's journal: entries, terms, votes and configurations of all its groups, in one store.

`take_writes` collects the writes of all groups since the last commit as one transaction; `persisted` tells the groups that the
transaction is on disk. `log/group_log.py` is the log of one group.

**Where an entry is stored.** Each group has a table of its own, with a key for every entry. A commit that appends to many
groups writes their entries to one *row* (`log/rows.py`). Later the entries are *filed*: their places are written to the table
of their group, many at a time. Entries that are not filed are also in memory, and opening finds them in the newest rows. A
row is deleted when no group needs an entry in it. Where only a few entries are needed, they move to the tables of their groups
(ADR 6, ADR 8).
"""

from __future__ import annotations

import struct
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import msgpack

from holdfast.log.errors import Corrupt
from holdfast.log.group_log import GroupLog, first_hole, slice_of
from holdfast.log.messages import GroupId, NodeId
from holdfast.log.records import (
    CHECKSUM_AT,
    COMMITS,
    COMMITS_GROUPS,
    FILED,
    HARD,
    KEY,
    LOGS,
    PINS,
    TOMBSTONES,
    Configuration,
    Tombstone,
    checked,
    decode_entry,
    decode_tombstone,
    encode_tombstone,
    table_of,
    with_checksum,
)
from holdfast.log.rows import PLACED, RECENT, ROW_BYTES, RowEntry, Rows, decode_row, encode_row, pack_place, row_of
from holdfast.log.store import Cut, Drop, Extend, Put

if TYPE_CHECKING:
    from holdfast.log.store import Op, Store

_FILED: Final = struct.Struct(">QQ")  # The first row that may not be wholly filed, and the oldest row.
_ROWS: Final = b"rows"  # The key of that record.
_pack = msgpack.Packer(autoreset=True).pack  # Shared: making a packer costs more than packing.

#: Bytes of the newest entries kept in memory, for all groups together and at least for each. More would only cool the caches.
TAILS_BYTES: Final = 4 * 1024 * 1024
TAIL_BYTES_MIN: Final = 64 * 1024


class Journal:
    """The logs of all groups of one node. `take_writes` and `persisted` bracket each durable commit of the store."""

    def __init__(self, store: Store, rows: Rows | None = None) -> None:
        self.store = store
        self._bounds = rows or Rows()
        self._recent: deque[tuple[int, int]] = (
            deque()
        )  # (number, bytes) of the rows that are not wholly filed, in order.
        self._recent_bytes = 0
        self._unfiled: dict[GroupId, int] = {}  # The row in which each group's unfiled entries begin, oldest first.
        self.first_row = self.next_row = 1
        self._filed_noted = 0  # The stored mark: rows before this one are filed.
        self._needed_from = 0  # Rows before this one may be deleted.
        self.rows_free = True  # A group may need fewer rows than at the last check.
        self._moving = False  # Entries are being moved out of sparse rows.
        self._rows_known = self._rows_known_bytes = 0  # Counted since opening, to estimate the size of a row.
        self.groups: dict[GroupId, GroupLog] = {}
        self.tail_bytes = TAILS_BYTES  # In memory, for each group.
        self.dirty_logs: dict[GroupId, GroupLog] = {}
        self.risen: dict[GroupId, GroupLog] = {}  # Groups in a later term or epoch than in the last transaction.
        self._flying: list[GroupLog] = []
        self._ops: list[Op] = []
        self._pins: dict[NodeId, str] = {}
        self.tombstones: dict[GroupId, Tombstone] = {}
        self._commits: dict[
            int, dict[GroupId, int]
        ] = {}  # By record: group -> commit index, as stored or about to be stored.
        self._moved_commits: set[int] = set()  # Records that differ from the stored ones.
        self._commits_skipped = 0  # Commits since commit indices were last written.
        for key, value in self._rows(PINS):
            self._pins[NodeId(key.decode())] = self._decode_pin(key, value)
        for key, value in self._rows(TOMBSTONES):
            self.tombstones[GroupId(int.from_bytes(key, "big"))] = self._decode_tombstone(key, value)
        for key, value in self._rows(COMMITS):
            self._commits[int.from_bytes(key, "big")] = self._decode_commits(key, value)
        found = self._load_rows()
        for key, _ in self._rows(HARD):
            group = GroupId(int.from_bytes(key, "big"))
            self.groups[group] = GroupLog(self, group, recent=found.pop(group, ()))
        self._begin_rows()
        self._share_memory()
        for group in found:
            if group not in self.tombstones:
                raise self._headless(group)
        for group in [group for commits in self._commits.values() for group in commits]:
            if group not in self.groups:
                raise self._headless(group)
        for table in store.tables():
            if table.startswith(LOGS) and (group := GroupId(int(table[len(LOGS) :]))) not in self.groups:
                raise self._headless(group)

    def _headless(self, group: GroupId) -> Corrupt:
        # If it were taken for a new group, it would vote again in terms that it has forgotten.
        return Corrupt(self._path, "the record of term, vote and base is missing", group=group)

    def _rows(self, table: str) -> list[tuple[bytes, bytes]]:
        return self.store.scan(table, b"", b"\xff" * 9, bytes_max=1 << 30, count_max=1 << 20)

    def _load_rows(self) -> dict[GroupId, list[RowEntry]]:
        """Read the rows that may not be wholly filed. All others are only counted, and read when they are needed."""
        value = self.store.get(FILED, _ROWS)
        oldest = None
        if value is not None:
            record = checked(_ROWS, value)
            if record is None or len(record) != _FILED.size:
                raise Corrupt(self._path, "the record of the filed rows does not match its checksum")
            self._filed_noted, oldest = _FILED.unpack(record)
            self.next_row = max(self._filed_noted, oldest)
        first, last = self.store.first(RECENT), self.store.last(RECENT)
        found: dict[GroupId, list[RowEntry]] = {}
        self.first_row = low = self.next_row if first is None else int.from_bytes(first[0], "big")
        if oldest is not None and oldest != low:
            raise Corrupt(self._path, f"row {min(oldest, low)} of the recent entries is missing")
        if last is None:
            return found
        self.next_row = max(self.next_row, int.from_bytes(last[0], "big") + 1)
        if self.store.count(RECENT) != int.from_bytes(last[0], "big") + 1 - low:
            raise Corrupt(self._path, f"row {first_hole(self.store, RECENT, low)} of the recent entries is missing")
        low = max(low, self._filed_noted)
        while rows := slice_of(self.store, RECENT, low):
            for key, value in rows:
                self._load_row(low, key, value, found)
                low += 1
        return found

    def _load_row(self, number: int, key: bytes, value: bytes, found: dict[GroupId, list[RowEntry]]) -> None:
        parts = decode_row(key, value)
        if parts is None:
            raise Corrupt(self._path, f"row {number} of the recent entries does not match its checksum")
        for group, first, places in parts:
            for index, (start, stop) in enumerate(places, first):
                entry = decode_entry(group, index, value[start:stop])
                if entry is None:
                    raise Corrupt(self._path, "the entry does not match its checksum", group=group, index=index)
                place = pack_place(number | PLACED, start, stop - start, value[start:stop][CHECKSUM_AT])
                found.setdefault(group, []).append(RowEntry(entry, place))
        self._add_recent(number, len(value))

    def _add_recent(self, number: int, size: int) -> None:
        self._recent.append((number, size))
        self._recent_bytes += size
        self._rows_known += 1
        self._rows_known_bytes += size

    def _begin_rows(self) -> None:
        """Find the unfiled entries and the next row number. A number is never reused, or an old mark would hide a row."""
        waiting = [(row_of(log.places[0]), group) for group, log in self.groups.items() if log.places]
        self._unfiled = {group: row for row, group in sorted(waiting)}
        is_empty = self.first_row == self.next_row
        self.next_row = max([self.next_row, *(log.recent_from for log in self.groups.values())])
        if is_empty:
            self.first_row = self.next_row

    @property
    def _path(self) -> str:
        return str(getattr(self.store, "path", "the journal"))

    def create(self, group: GroupId, configuration: Configuration) -> GroupLog:
        assert group not in self.groups, f"group {group} exists"
        log = self.groups[group] = GroupLog(self, group, configuration)
        self._share_memory()
        before = self.tombstones.pop(group, None)
        if before is not None:
            assert configuration.epoch >= before.configuration.epoch, f"group {group} continued in a later epoch"
            log.term, log.vote = before.term, before.vote  # We deleted the log, not our promises.
            key = group.to_bytes(4, "big")
            self._ops.append(Cut(TOMBSTONES, key, key + b"\0"))
        return log

    def forget(self, group: GroupId) -> None:
        """Delete a group's entries and its record, in the next commit. A tombstone takes their place."""
        log = self.groups.pop(group)
        self._share_memory()
        self._bury(group, Tombstone(log.term, log.vote, log.configuration))
        self.dirty_logs.pop(group, None)
        self.risen.pop(group, None)
        self._unfiled.pop(group, None)
        self.rows_free = True
        if log in self._flying:
            self._flying.remove(log)
        key = group.to_bytes(4, "big")
        self._ops += [Drop(table_of(group)), Cut(HARD, key, key + b"\0")]
        self._commits.get(group // COMMITS_GROUPS, {}).pop(group, None)
        self._moved_commits.add(group // COMMITS_GROUPS)

    def _bury(self, group: GroupId, tombstone: Tombstone) -> None:
        self.tombstones[group] = tombstone
        key = group.to_bytes(4, "big")
        self._ops.append(Put(TOMBSTONES, key, encode_tombstone(key, tombstone)))

    def _decode_tombstone(self, key: bytes, value: bytes) -> Tombstone:
        tombstone = decode_tombstone(key, value)
        if tombstone is None:
            group = GroupId(int.from_bytes(key, "big"))
            raise Corrupt(self._path, "the tombstone does not match its checksum", group=group)
        return tombstone

    def pin(self, peer: NodeId) -> str | None:
        return self._pins.get(peer)

    def set_pin(self, peer: NodeId, disk: str) -> None:
        """Remember a peer's disk: a peer that returns with another disk has lost what it acknowledged."""
        self._pins[peer] = disk
        key = peer.encode()
        self._ops.append(Put(PINS, key, with_checksum(key, disk.encode())))

    def _decode_pin(self, key: bytes, value: bytes) -> str:
        record = checked(key, value)
        if record is None:
            raise Corrupt(
                self._path, f"the record of the disk of {key.decode(errors='replace')} does not match its checksum"
            )
        return record.decode()

    def clear_pin(self, peer: NodeId) -> None:
        if self._pins.pop(peer, None) is not None:
            key = peer.encode()
            self._ops.append(Cut(PINS, key, key + b"\0"))

    def stored_commit(self, group: GroupId) -> int | None:
        return self._commits.get(group // COMMITS_GROUPS, {}).get(group)

    def _write_commits(self, ops: list[Op]) -> None:
        for number in sorted(self._moved_commits):
            key, commits = number.to_bytes(4, "big"), self._commits.get(number)
            if commits:
                record: bytes = _pack(commits)
                ops.append(Put(COMMITS, key, with_checksum(key, record)))
            else:
                ops.append(Cut(COMMITS, key, key + b"\0"))
        self._moved_commits.clear()

    def _decode_commits(self, key: bytes, value: bytes) -> dict[GroupId, int]:
        record = checked(key, value)
        if not record:
            first = int.from_bytes(key, "big") * COMMITS_GROUPS
            groups = f"groups {first} to {first + COMMITS_GROUPS - 1}"
            raise Corrupt(self._path, f"the record of the commit indices of {groups} does not match its checksum")
        commits: dict[GroupId, int] = msgpack.unpackb(record, strict_map_key=False)
        return commits

    def is_settled(self, log: GroupLog) -> bool:
        """Whether everything in a log is on disk, apart from its commit index."""
        return log.group not in self.dirty_logs and log not in self._flying

    def _share_memory(self) -> None:
        """Divide the memory for tails among the groups."""
        self.tail_bytes = max(TAIL_BYTES_MIN, TAILS_BYTES // (len(self.groups) or 1))

    @property
    def dirty(self) -> bool:
        # A new commit index alone does not justify a write.
        return bool(self.dirty_logs or self._ops) or self._moving or self.first_row < self._needed_from

    def take_risen(self) -> dict[GroupId, GroupLog]:
        """The groups that entered a later term or epoch since the last call."""
        risen = self.risen
        if risen:
            self.risen = {}
        return risen

    def take_writes(self) -> list[Op]:
        """All writes of all groups since the last call, as one transaction."""
        assert not self._flying, "one commit at a time: the store has one writer"
        ops, self._ops = self._ops, []
        dirty, self.dirty_logs = self.dirty_logs, {}
        bounds, number, unfiled = self._bounds, self.next_row, self._unfiled
        size_max, placed = bounds.group_bytes_max, number | PLACED
        room = bounds.row_bytes_max if len(dirty) >= bounds.groups_min else 0
        new: dict[GroupId, GroupLog] = {}
        contents: list[Any] = []
        parts: list[bytes] = []
        offset = ROW_BYTES
        for group, log in dirty.items():
            size, last = log.fresh_bytes, log.last_index
            if size > size_max or size > room or log.must_file:
                log.file(ops)
                unfiled.pop(group, None)
            elif size:
                room -= size
                first, places = log.flying_last + 1, log.places
                if not places:
                    unfiled[group] = number
                log.places_bytes += size
                if first == last:  # The usual case.
                    header = log.headers.pop()
                    contents += group, first, [size]
                    parts += header, log.tail[-1][0]
                    places.append(pack_place(placed, offset, size, header[CHECKSUM_AT]))
                    offset += size
                else:
                    lengths = log.lengths(first)
                    contents += group, first, lengths
                    parts += log.parts(first)
                    for length, header in zip(lengths, log.headers, strict=True):
                        places.append(pack_place(placed, offset, length, header[CHECKSUM_AT]))
                        offset += length
                    log.headers.clear()
            log.flying_last, log.fresh_bytes = last, 0
            if log.must_mark:
                log.mark(ops)
                if log.commit_taken < 0:
                    new[group] = log
        if parts:
            key = KEY.pack(number)
            self._add_row(key, encode_row(key, contents, parts), len(parts) // 2, ops=ops, dirty=dirty)
        if self.rows_free:
            self._look_for_free_rows(ops, dirty)
        if self.first_row < self._needed_from:
            self._retire_rows(ops)
        self._flying = list(dirty.values())
        if room and self._commits_skipped + 1 < bounds.commits_every:
            self._commits_skipped += 1
            self._note_commits(new)
        else:
            self._note_commits(self.groups if self._commits_skipped else dirty)
            self._commits_skipped = 0
        if self._moved_commits:
            self._write_commits(ops)
        return ops

    def _note_commits(self, logs: dict[GroupId, GroupLog]) -> None:
        for group, log in logs.items():
            if log.commit != log.commit_taken:
                log.commit_taken = log.commit
                record = group // COMMITS_GROUPS
                self._commits.setdefault(record, {})[group] = log.commit
                self._moved_commits.add(record)

    def _add_row(self, key: bytes, value: bytes, count: int, ops: list[Op], dirty: dict[GroupId, GroupLog]) -> None:
        ops.append(Extend(RECENT, ((key, value),)))
        self._add_recent(self.next_row, len(value))
        self.next_row += 1
        room = 2 * count  # Enough to keep up with new entries, and no more, so that no commit waits for a large filing.
        while self._recent_bytes > self._bounds.recent_bytes and room > 0 and self._unfiled:
            group = next(iter(self._unfiled))
            del self._unfiled[group]
            log = dirty[group] = self.groups[group]
            room -= log.file(ops)
            if log.must_mark:
                log.mark(ops)
            self._pass_filed()
        unfiled = self._pass_filed()
        if unfiled >= self._filed_noted + self._bounds.filed_every:
            self._filed_noted = unfiled
            self._note_rows(ops)

    def _note_rows(self, ops: list[Op]) -> None:
        ops.append(Put(FILED, _ROWS, with_checksum(_ROWS, _FILED.pack(self._filed_noted, self.first_row))))

    def _pass_filed(self) -> int:
        """The first row that is not wholly filed. Opening skips those before it."""
        unfiled = next(iter(self._unfiled.values()), self.next_row)
        while self._recent and self._recent[0][0] < unfiled:
            self._recent_bytes -= self._recent.popleft()[1]
        return unfiled

    def _look_for_free_rows(self, ops: list[Op], dirty: dict[GroupId, GroupLog]) -> None:
        """Some log got shorter: find rows that no group needs, and move entries out of sparse ones."""
        self.rows_free = self._moving = False
        unfiled = self._pass_filed()
        needing = [(row, log.group, log) for log in self.groups.values() if (row := log.first_row()) is not None]
        self._needed_from = min([unfiled, *(row for row, _, _ in needing)])
        kept = (self.next_row - self._needed_from) * self._rows_known_bytes // (self._rows_known or 1)
        live = sum(log.placed_bytes for log in self.groups.values())
        if needing and kept > self._bounds.kept_bytes and kept > self._bounds.sparse * live:
            _, group, log = min(needing)
            if log.move(ops, self._bounds.moved_max):
                dirty.setdefault(group, log)
                self.rows_free = self._moving = True  # Check again with the next commit.

    def _retire_rows(self, ops: list[Op]) -> None:
        """Delete rows that no group needs."""
        first = self.first_row
        self.first_row = min(first + self._bounds.retired_max, self._needed_from)
        ops.append(Cut(RECENT, KEY.pack(first), KEY.pack(self.first_row)))
        self._note_rows(ops)

    def persisted(self) -> list[GroupLog]:
        """The last transaction of `take_writes` is on disk. Return the logs whose `durable` mark may have moved."""
        flown, self._flying = self._flying, []
        for log in flown:
            log.persisted()
        return flown
