"""The node's journal: entries, terms, votes and configurations of all its groups, in one store.

A `GroupLog` is one group's part. Towards the engine it is pysyncobj's Journal (positions, tuples); towards the node it
is a list of operations to make durable, and a watermark that says what already is. It never waits: what the engine
appends is readable at once and durable when the store's next commit has returned, and `durable` says so. Nothing may
be promised to a peer beyond that mark.

What is read back is checked: each entry carries a checksum over its group, index, term and command, indices have no
holes, and terms never fall. A log that breaks one of these rules stops the node. It is never shortened to fit, because a
hole inside acknowledged entries is amnesia.

Entries below the tail kept in memory are read from the store in slices, and terms are kept as runs, so memory does not
grow with the log.

**Where an entry is.** Each group has a table of its own, with a key for every entry. What a commit appends to many groups goes
into one *row* (`log/rows.py`), and is *filed* later: the table of the group is told its place, many at a time. What is not
filed is in memory too, and is found again on opening, in the newest rows. A row goes when no group needs an entry in it any
more; where few do, those entries move to the tables of their groups (ADR 6, ADR 8).
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, overload
from zlib import crc32

import msgpack

from holdfast.log.errors import Corrupt
from holdfast.log.messages import NOOP, Entry, GroupId, NodeId
from holdfast.log.rows import (
    PLACED,
    RECENT,
    ROW_BYTES,
    Found,
    Rows,
    decode_row,
    encode_row,
    pack_place,
    place_in,
    row_of,
)
from holdfast.log.store import Cut, Drop, Extend, Put

if TYPE_CHECKING:
    from holdfast.log.store import Op, Store

_HEADER: Final = struct.Struct(">QI")  # term, checksum
_SUBJECT: Final = struct.Struct(">IQQ")  # group, index, term: what the checksum speaks of besides the command
_HEADER_BYTES: Final = _HEADER.size
_pack_header, _pack_subject = _HEADER.pack, _SUBJECT.pack
_KEY: Final = struct.Struct(">Q")
_CHECKSUM: Final = struct.Struct(">I")
_CHECKSUM_AT: Final = slice(8, _HEADER_BYTES)  # In the header, and so in an entry on disk.
_FILED: Final = struct.Struct(">QQ")  # the first row that may not be wholly filed, the first row there is
_ROWS: Final = b"rows"  # The key of that.
_BASE_COMMAND: Final = bytes([NOOP])
_pack = msgpack.Packer(autoreset=True).pack  # One for all: making a packer costs more than packing.

_TABLE: Final = "log."
HARD: Final = "hard"  # One record per group: term, vote, configuration, base, and the commit index at that time.
COMMITS: Final = "commits"  # The commit indices of `COMMITS_GROUPS` groups in one record: they move with every entry.
COMMITS_GROUPS: Final = 64
FILED: Final = "filed"  # One record: from which row on not all may be filed, and which is the oldest.
PINS: Final = "pins"  # Which disk each peer had when we first met it.
TOMBSTONES: Final = "tombstones"  # What we promised in groups whose log we deleted.
#: Of the newest entries of all groups, kept in memory; and at least of each. More would only be colder in the caches.
TAILS_BYTES: Final = 4 * 1024 * 1024
TAIL_BYTES_MIN: Final = 64 * 1024
SLICE_BYTES: Final = 4 * 1024 * 1024
SLICE_ENTRIES: Final = 4096
TRIM_ENTRIES: Final = 2048  # Per commit, so that trimming a long log never holds up the loop.
PIECE_ENTRIES: Final = 256  # Read from a table at once.
SPANS_MAX: Final = 64
CHECKED_ENTRIES: Final = 1024  # How much of the newest end is verified on opening; the rest when it is read.


@dataclass(frozen=True, slots=True)
class Configuration:
    """An epoch of a group: who its members are, and after which entry of the epoch before it begins."""

    epoch: int
    members: tuple[NodeId, ...]
    seed_index: int = 0
    seed_term: int = 0


@dataclass(frozen=True, slots=True)
class Tombstone:
    """What is left of a group that went on without us: the epoch it did so in, and our vote.

    Without it, a late message of an older epoch would make us a member of that epoch again, with an empty log and a new
    vote. With it, we can still tell those who have not heard of the newer epoch (ADR 2, "Forgetting").
    """

    term: int
    vote: NodeId | None
    configuration: Configuration


def table_of(group: GroupId) -> str:
    return f"{_TABLE}{group}"


def header_of(group: GroupId, entry: Entry) -> bytes:
    """What stands before the command of an entry on disk: its term and checksum."""
    command, index, term = entry
    return _pack_header(term, crc32(command, crc32(_pack_subject(group, index, term))))


def decode_entry(group: GroupId, index: int, value: bytes) -> Entry | None:
    """None if it does not match its checksum."""
    term, checksum = _HEADER.unpack_from(value)
    command = value[_HEADER_BYTES:]
    return (command, index, term) if checksum == crc32(command, crc32(_pack_subject(group, index, term))) else None


def with_checksum(key: bytes, record: bytes) -> bytes:
    return _CHECKSUM.pack(crc32(record, crc32(key))) + record


def checked(key: bytes, value: bytes) -> bytes | None:
    """The record in a value, or None if it does not match its checksum."""
    if len(value) < _CHECKSUM.size or _CHECKSUM.unpack_from(value)[0] != crc32(value[4:], crc32(key)):
        return None
    return value[4:]


class Journal:
    """All groups of one node. `take_writes` and `persisted` bracket each durable commit of the store."""

    def __init__(self, store: Store, rows: Rows | None = None) -> None:
        self.store = store
        self._bounds = rows or Rows()
        self._recent: deque[tuple[int, int]] = deque()  # (number, bytes) of the rows not wholly filed, in order.
        self._recent_bytes = 0
        self._unfiled: dict[GroupId, int] = {}  # In which row each group's entries not filed begin; the oldest first.
        self.first_row = self.next_row = 1
        self._filed_noted = 0  # As stored: rows before this one are filed.
        self._needed_from = 0  # Rows before this one may go.
        self.rows_free = True  # Some group may need fewer rows than when that was last looked at.
        self._moving = False  # Entries are on their way out of rows that are kept for few.
        self._rows_known = self._rows_known_bytes = 0  # Since opening, to know how large they are.
        self.groups: dict[GroupId, GroupLog] = {}
        self.tail_bytes = TAILS_BYTES  # Of each of them, in memory.
        self.dirty_logs: dict[GroupId, GroupLog] = {}
        self._flying: list[GroupLog] = []
        self._ops: list[Op] = []
        self._pins: dict[NodeId, str] = {}
        self.tombstones: dict[GroupId, Tombstone] = {}
        self._commits: dict[int, dict[GroupId, int]] = {}  # By record: group -> commit index, as stored or about to be.
        self._moved_commits: set[int] = set()  # The records that differ from the stored ones.
        self._commits_skipped = 0  # So many commits did not look for commit indices that have moved.
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
            if table.startswith(_TABLE) and (group := GroupId(int(table[len(_TABLE) :]))) not in self.groups:
                raise self._headless(group)

    def _headless(self, group: GroupId) -> Corrupt:
        # Taken for a new group, it would vote a second time in terms it has forgotten.
        return Corrupt(self._path, "the record of term, vote and base is missing", group=group)

    def _rows(self, table: str) -> list[tuple[bytes, bytes]]:
        return self.store.scan(table, b"", b"\xff" * 9, bytes_max=1 << 30, count_max=1 << 20)

    def _load_rows(self) -> dict[GroupId, list[Found]]:
        """The entries in rows that may not be filed. All other rows are only counted: they are read when they are needed."""
        value = self.store.get(FILED, _ROWS)
        oldest = None
        if value is not None:
            record = checked(_ROWS, value)
            if record is None or len(record) != _FILED.size:
                raise Corrupt(self._path, "the record of the filed rows does not match its checksum")
            self._filed_noted, oldest = _FILED.unpack(record)
            self.next_row = max(self._filed_noted, oldest)
        first, last = self.store.first(RECENT), self.store.last(RECENT)
        found: dict[GroupId, list[Found]] = {}
        self.first_row = low = self.next_row if first is None else int.from_bytes(first[0], "big")
        if oldest is not None and oldest != low:
            raise Corrupt(self._path, f"row {min(oldest, low)} of the recent entries is missing")
        if last is None:
            return found
        self.next_row = max(self.next_row, int.from_bytes(last[0], "big") + 1)
        if self.store.count(RECENT) != int.from_bytes(last[0], "big") + 1 - low:
            raise Corrupt(self._path, f"row {self.first_hole(RECENT, low)} of the recent entries is missing")
        low = max(low, self._filed_noted)
        while rows := self.slice(RECENT, low):
            for key, value in rows:
                self._load_row(low, key, value, found)
                low += 1
        return found

    def _load_row(self, number: int, key: bytes, value: bytes, found: dict[GroupId, list[Found]]) -> None:
        parts = decode_row(key, value)
        if parts is None:
            raise Corrupt(self._path, f"row {number} of the recent entries does not match its checksum")
        for group, first, places in parts:
            for index, (start, stop) in enumerate(places, first):
                entry = decode_entry(group, index, value[start:stop])
                if entry is None:
                    raise Corrupt(self._path, "the entry does not match its checksum", group=group, index=index)
                place = pack_place(number | PLACED, start, stop - start, value[start:stop][_CHECKSUM_AT])
                found.setdefault(group, []).append(Found(entry, place))
        self._add_recent(number, len(value))

    def _add_recent(self, number: int, size: int) -> None:
        self._recent.append((number, size))
        self._recent_bytes += size
        self._rows_known += 1
        self._rows_known_bytes += size

    def first_hole(self, table: str, number: int) -> int:
        while items := self.slice(table, number):
            for key, _ in items:
                if key != _KEY.pack(number):
                    return number
                number += 1
        return number

    def slice(self, table: str, number: int) -> list[tuple[bytes, bytes]]:
        return self.store.scan(table, _KEY.pack(number), b"\xff" * 9, bytes_max=SLICE_BYTES, count_max=SLICE_ENTRIES)

    def _begin_rows(self) -> None:
        """What is not filed, and where to go on: a number is never used twice, or an old mark would hide a row."""
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
            assert configuration.epoch >= before.configuration.epoch, f"group {group} went on to a later epoch"
            log.term, log.vote = before.term, before.vote  # We forgot the log, not what we promised.
            key = group.to_bytes(4, "big")
            self._ops.append(Cut(TOMBSTONES, key, key + b"\0"))
        return log

    def forget(self, group: GroupId) -> None:
        """Delete a group's entries and its record, in the next commit. A tombstone takes their place."""
        log = self.groups.pop(group)
        self._share_memory()
        self._bury(group, Tombstone(log.term, log.vote, log.configuration))
        self.dirty_logs.pop(group, None)
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
        key, epoch = group.to_bytes(4, "big"), tombstone.configuration
        record: bytes = msgpack.packb(
            (tombstone.term, tombstone.vote, epoch.epoch, epoch.members, epoch.seed_index, epoch.seed_term)
        )
        self._ops.append(Put(TOMBSTONES, key, with_checksum(key, record)))

    def _decode_tombstone(self, key: bytes, value: bytes) -> Tombstone:
        record = checked(key, value)
        if not record:
            group = GroupId(int.from_bytes(key, "big"))
            raise Corrupt(self._path, "the record of what was promised in it does not match its checksum", group=group)
        term, vote, epoch, members, *seed = msgpack.unpackb(record)
        return Tombstone(term, None if vote is None else NodeId(vote), Configuration(epoch, tuple(members), *seed))

    def pin(self, peer: NodeId) -> str | None:
        return self._pins.get(peer)

    def set_pin(self, peer: NodeId, disk: str) -> None:
        """Remember a peer's disk: one that comes back with another has lost what it acknowledged."""
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
        """Whether all that a log holds is on disk, its commit index apart."""
        return log.group not in self.dirty_logs and log not in self._flying

    def _share_memory(self) -> None:
        """The number of groups has changed."""
        self.tail_bytes = max(TAIL_BYTES_MIN, TAILS_BYTES // (len(self.groups) or 1))

    @property
    def dirty(self) -> bool:
        # A commit index alone is not worth a write.
        return bool(self.dirty_logs or self._ops) or self._moving or self.first_row < self._needed_from

    def take_writes(self) -> list[Op]:
        """Everything since the last call, of all groups: one transaction."""
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
                if first == last:  # As a rule.
                    header = log.headers.pop()
                    contents += group, first, [size]
                    parts += header, log.tail[-1][0]
                    places.append(pack_place(placed, offset, size, header[_CHECKSUM_AT]))
                    offset += size
                else:
                    lengths = log.lengths(first)
                    contents += group, first, lengths
                    parts += log.parts(first)
                    for length, header in zip(lengths, log.headers, strict=True):
                        places.append(pack_place(placed, offset, length, header[_CHECKSUM_AT]))
                        offset += length
                    log.headers.clear()
            log.flying_last, log.fresh_bytes = last, 0
            if log.must_mark:
                log.mark(ops)
                if log.commit_taken < 0:
                    new[group] = log
        if parts:
            key = _KEY.pack(number)
            self._add_row(key, encode_row(key, contents, parts), len(parts) // 2, ops, dirty)
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
        room = 2 * count  # As much as keeps up with what comes, and no more: nobody waits for a great sorting.
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
        """Which row is the first that is not wholly filed. Opening need not look at those before it."""
        unfiled = next(iter(self._unfiled.values()), self.next_row)
        while self._recent and self._recent[0][0] < unfiled:
            self._recent_bytes -= self._recent.popleft()[1]
        return unfiled

    def _look_for_free_rows(self, ops: list[Op], dirty: dict[GroupId, GroupLog]) -> None:
        """Some log got shorter. Where rows are kept for few entries, those move to the table of their group."""
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
                self.rows_free = self._moving = True  # Look again with the next commit.

    def _retire_rows(self, ops: list[Op]) -> None:
        """Delete rows that nobody needs any more."""
        first = self.first_row
        self.first_row = min(first + self._bounds.retired_max, self._needed_from)
        ops.append(Cut(RECENT, _KEY.pack(first), _KEY.pack(self.first_row)))
        self._note_rows(ops)

    def persisted(self) -> list[GroupLog]:
        """What `take_writes` gave last is on disk. Returns the logs whose durable mark may have moved."""
        flown, self._flying = self._flying, []
        for log in flown:
            log.persisted()
        return flown


class GroupLog:
    """One group's log: (base, last] are its entries, `base` is the last one covered by a snapshot or 0."""

    # A turn goes through all groups: what it looks at in each should be near each other in memory.
    __slots__ = (
        "_flying_filed",
        "_flying_term",
        "_journal",
        "_ops",
        "_placed_last",
        "_runs",
        "_spans",
        "_store",
        "_tabled",
        "_tail_bytes",
        "_tail_first",
        "_trim_from",
        "base_index",
        "base_term",
        "commit",
        "commit_taken",
        "configuration",
        "durable",
        "durable_term",
        "filed",
        "flying_last",
        "fresh_bytes",
        "group",
        "headers",
        "last_index",
        "last_term",
        "must_file",
        "must_mark",
        "places",
        "places_bytes",
        "recent_from",
        "table",
        "tail",
        "term",
        "vote",
    )

    def __init__(
        self,
        journal: Journal,
        group: GroupId,
        configuration: Configuration | None = None,
        recent: Sequence[Found] = (),
    ) -> None:
        self.group = group
        self.table = table_of(group)
        self._journal = journal
        self._store = journal.store
        self.term = 0
        self.vote: NodeId | None = None
        self.commit = 0
        self.commit_taken = -1  # As the journal stores it or is about to; -1: it never did.
        self.base_index = 0
        self.base_term = 0
        self.last_index = 0
        self.last_term = 0
        self.durable = 0
        self.durable_term = 0
        self.flying_last = 0
        self._flying_term = 0
        # Entries up to `filed` are in the group's own table, or in the commit under way to it, themselves or as places. Of the
        # others, up to `flying_last`, the places are kept here; of the fresh ones, what will stand before them on disk.
        self.filed = 0
        self.places: list[bytes] = []
        self.places_bytes = 0  # Of the entries there; rather too many.
        self.headers: list[bytes] = []
        self.must_file = False  # Rows hold what was cut off meanwhile, or the log now begins behind `filed`.
        self.fresh_bytes = 0  # Of the entries that are in no commit yet.
        self.recent_from = journal.next_row  # What rows before this one say of this group is over.
        # (index, row, bytes) of what was filed as places: from this index on, entries are in no row before that one, if they
        # are in rows at all. And behind which index there are none.
        self._spans: list[tuple[int, int, int]] = []
        self._placed_last = 0
        self._flying_filed = 0
        self._tabled = 0  # Up to here the table can be read.
        self._ops: list[Op] = []  # That cut the table.
        self.must_mark = False
        self._runs: list[tuple[int, int]] = []  # (first index of the run, its term), ascending
        self.tail: list[Entry] = []  # The newest entries; at least all that are not filed.
        self._tail_first = 1
        self._tail_bytes = 0
        self._trim_from = 0  # Entries (trim_from, base] are still in the store and go in slices.
        if configuration is None:
            self._load(recent)
        else:
            self.configuration = configuration
            self._mark_hard()

    # -- reading -------------------------------------------------------------------------------------------------

    def term_of(self, index: int) -> int | None:
        """The term of the entry at `index`; None outside [base, last]."""
        if index == self.base_index:
            return self.base_term
        if not self.base_index < index <= self.last_index:
            return None
        runs = self._runs
        if index >= runs[-1][0]:
            return runs[-1][1]
        return runs[bisect_right(runs, index, key=lambda run: run[0]) - 1][1]

    def entries(self, low: int, high: int, *, bytes_max: int = SLICE_BYTES) -> list[Entry]:
        """Entries low..high inclusive, fewer if they pass `bytes_max`, at least one."""
        assert self.base_index < low <= high <= self.last_index, (self.base_index, low, high, self.last_index)
        if low < self._tail_first:
            found = self._read(low, min(high, self._tail_first - 1, low + SLICE_ENTRIES - 1), bytes_max)
            self._check_terms(found)
            return found
        if low == high:
            return [self.tail[low - self._tail_first]]
        start, stop = low - self._tail_first, min(high, low + SLICE_ENTRIES - 1) - self._tail_first + 1
        found = self.tail[start:stop]
        size = 0
        for offset, entry in enumerate(found):
            size += len(entry[0])
            if size > bytes_max:
                return found[: max(offset, 1)]
        return found

    def _read(self, low: int, high: int, bytes_max: int) -> list[Entry]:
        found: list[Entry] = []
        size = 0
        while low <= high and (size < bytes_max or not found):
            stop = min(high, low + PIECE_ENTRIES - 1) + 1  # Places say nothing of the size of what is there.
            items = self._store.scan(
                self.table, _KEY.pack(low), _KEY.pack(stop), bytes_max=bytes_max - size, count_max=stop - low
            )
            if not items:
                raise self._corrupt(low, "the entry is missing")
            for key, value in items:
                entry = self._decode(low, key, value)
                size += len(entry[0])
                if found and size > bytes_max:
                    return found
                found.append(entry)
                low += 1
        return found

    def _check_terms(self, entries: list[Entry]) -> None:
        """What is read has the terms we go by: halving (`_load_runs`) looks at few entries, and trusts the rest."""
        before = self.term_of(entries[0][1] - 1) or 0
        for _, index, term in entries:
            if term < before:
                raise self._corrupt(index, f"its term {term} is below its predecessor's {before}")
            before = term
        last = entries[-1]
        if last[2] != self.term_of(last[1]):
            raise self._corrupt(last[1], f"its term {last[2]} is above a later entry's")

    def _decode(self, index: int, key: bytes, value: bytes) -> Entry:
        if key != _KEY.pack(index):
            raise self._corrupt(index, "the entry is missing")
        place = place_in(value)
        if place is not None:
            held = self._store.part(RECENT, _KEY.pack(place.row), place.offset, place.length)
            if held is None:
                raise self._corrupt(index, f"row {place.row} of the recent entries, which holds the entry, is missing")
            value = held
        if len(value) <= _HEADER_BYTES:
            raise self._corrupt(index, "the entry is cut short")
        entry = decode_entry(self.group, index, value)
        # In an older row there may be another entry of this index, which was cut off, with a checksum of its own.
        if entry is None or (place is not None and value[_CHECKSUM_AT] != place.checksum):
            raise self._corrupt(index, "the entry does not match its checksum")
        return entry

    def _corrupt(self, index: int | None, detail: str) -> Corrupt:
        return Corrupt(str(getattr(self._store, "path", self.table)), detail, group=self.group, index=index)

    # -- writing -------------------------------------------------------------------------------------------------

    def append(self, entry: Entry) -> None:
        command, index, term = entry
        assert index == self.last_index + 1, f"entry {index} after {self.last_index} would leave a hole"
        assert self.last_term <= term <= self.term, "terms never fall, and none is above our own"
        if term != self.last_term or not self._runs:
            self._runs.append((index, term))
            self.last_term = term
        self.last_index = index
        self.tail.append(entry)
        group, size = self.group, len(command)
        self._tail_bytes += size
        self.fresh_bytes += _HEADER_BYTES + size
        self.headers.append(header_of(group, entry))
        self._journal.dirty_logs[group] = self

    def truncate(self, low: int) -> None:
        """Drop the entries from `low` on: they conflict with a leader's. Never committed ones."""
        assert self.commit < low <= self.last_index, f"truncating {low}, committed {self.commit}"
        if low <= self.filed:
            self._ops.append(Cut(self.table, _KEY.pack(low), _KEY.pack(self.filed + 1)))
            self.filed = low - 1
            self._cut_spans(low)
        del self.places[low - self.filed - 1 :]
        del self.headers[max(low - self.flying_last - 1, 0) :]
        if low <= self.flying_last:
            self.must_file = self._journal.rows_free = True
        self.last_index = low - 1
        self.durable = min(self.durable, low - 1)
        self._tabled = min(self._tabled, low - 1)
        self.flying_last = min(self.flying_last, low - 1)
        self._flying_filed = min(self._flying_filed, low - 1)
        while self._runs and self._runs[-1][0] >= low:
            self._runs.pop()
        self._end_runs()
        if low < self._tail_first:
            self.tail, self._tail_first, self._tail_bytes = [], low, 0
        else:
            for entry in self.tail[low - self._tail_first :]:
                self._tail_bytes -= len(entry[0])
            del self.tail[low - self._tail_first :]
        self.fresh_bytes = sum(self.lengths(self.flying_last + 1))
        self._journal.dirty_logs[self.group] = self

    def set_vote(self, term: int, vote: NodeId | None) -> None:
        assert term > self.term or (term == self.term and self.vote in (None, vote)), "one vote per term"
        if (term, vote) != (self.term, self.vote):
            self.term, self.vote = term, vote
            self._mark_hard()

    def set_commit(self, index: int) -> None:
        """Kept with one of the next writes only: it saves a restarted node work, and safety does not rest on it."""
        assert self.commit <= index <= self.last_index, f"commit {self.commit} -> {index}, last {self.last_index}"
        self.commit = index

    def set_configuration(self, configuration: Configuration) -> None:
        assert configuration.epoch > self.configuration.epoch, "epochs only rise"
        self.configuration = configuration
        self._mark_hard()

    def trim(self, index: int) -> None:
        """Entries up to `index` are in a durable snapshot: they go, in slices."""
        assert index <= self.commit, f"trimming {index}, committed {self.commit}"
        if index <= self.base_index:
            return
        self._rebase(index, self._known_term(index))

    def reset(self, index: int, term: int) -> None:
        """The state at (index, term) was installed: the log begins behind it. A tail that continues it is kept."""
        assert index > self.commit, f"installing {index} below commit {self.commit}"
        if term > self.term:
            self.set_vote(term, None)  # We stopped before it was written. Nobody has heard a vote of ours in it.
        if self.term_of(index) == term:
            self._rebase(index, term)
        else:
            self._ops, self.places, self.headers = [Drop(self.table)], [], []
            self.places_bytes = self.fresh_bytes = 0
            self._spans, self._placed_last, self.must_file = [], 0, True
            self.filed = self._flying_filed = self._tabled = index
            self._runs, self.tail, self._tail_bytes, self._tail_first = [], [], 0, index + 1
            self.last_index = self.durable = self.flying_last = self._trim_from = index
            self._rebase(index, term)
        self.commit = index
        self.must_mark = True

    def _known_term(self, index: int) -> int:
        term = self.term_of(index)
        assert term is not None, f"entry {index} is not in the log"
        return term

    def _rebase(self, index: int, term: int) -> None:
        # A run that begins below the new base loses its start, and those wholly below it go.
        keep = [(max(first, index + 1), run_term) for first, run_term in self._runs]
        self._runs = [
            run for offset, run in enumerate(keep)
            if run[0] <= self.last_index and (offset + 1 == len(keep) or keep[offset + 1][0] > run[0])
        ]  # fmt: skip
        self.base_index, self.base_term = index, term
        self._end_runs()
        if index > self.filed:
            self.must_file = True
        self._journal.rows_free = True
        drop = min(index, self.filed) + 1 - self._tail_first  # The table is without a hole: the others are filed first.
        if drop > 0:
            self._tail_bytes -= sum(len(entry[0]) for entry in self.tail[:drop])
            del self.tail[:drop]
            self._tail_first += drop
        self._mark_hard()

    def _end_runs(self) -> None:
        self.last_term = self._runs[-1][1] if self._runs else self.base_term

    def _mark_hard(self) -> None:
        self.must_mark = True
        self._journal.dirty_logs[self.group] = self

    # -- durability ----------------------------------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        return self._journal.is_settled(self)

    def lengths(self, first: int) -> list[int]:
        """Of the entries from `first` on, which are not filed, as they are on disk."""
        return [_HEADER_BYTES + len(entry[0]) for entry in self.tail[first - self._tail_first :]]

    def parts(self, first: int) -> list[bytes]:
        """Header and command of each of the entries from `first` on, which are fresh."""
        entries = self.tail[first - self._tail_first :]
        return [part for header, entry in zip(self.headers, entries, strict=True) for part in (header, entry[0])]

    def file(self, ops: list[Op]) -> int:
        """Bring all entries to the group's own table: those in rows as places, the fresh ones themselves. Returns how many."""
        ops += self._ops
        self._ops = []
        if self.must_file:
            self.must_file = False
            self.recent_from = self._journal.next_row
            self.must_mark = True
        first, places = self.filed + 1, self.places
        items = [(_KEY.pack(index), place) for index, place in enumerate(places, first)]
        if places:
            self._add_span(first, row_of(places[0]), self.places_bytes)
            self._placed_last = first + len(places) - 1
        self.places, self.places_bytes = [], 0
        if self.headers:
            fresh = self.tail[self.flying_last + 1 - self._tail_first :]
            items += [
                (_KEY.pack(entry[1]), header + entry[0]) for header, entry in zip(self.headers, fresh, strict=True)
            ]
            self.headers = []
        if items:
            ops.append(Extend(self.table, items))
        self.filed = self._flying_filed = self.flying_last = self.last_index
        return len(items)

    # -- which rows it needs -------------------------------------------------------------------------------------------

    def _add_span(self, index: int, row: int, size: int) -> None:
        spans = self._spans
        if len(spans) >= SPANS_MAX:  # Coarser: what is said of the first of two is true of the second.
            pairs = zip(spans[::2], spans[1::2], strict=True)
            spans[:] = [(first[0], first[1], first[2] + second[2]) for first, second in pairs]
        spans.append((index, row, size))

    def _cut_spans(self, low: int) -> None:
        """Entries from `low` on are gone."""
        self._placed_last = min(self._placed_last, low - 1)
        while self._spans and self._spans[-1][0] >= low:
            self._spans.pop()

    def first_row(self) -> int | None:
        """The oldest row with an entry that is filed as a place and not trimmed, or one before it; None if there is none."""
        spans = self._spans
        if self._placed_last <= self.base_index:
            spans.clear()
        while len(spans) > 1 and spans[1][0] <= self.base_index + 1:
            del spans[0]
        return spans[0][1] if spans else None

    @property
    def placed_bytes(self) -> int:
        """About how much of what is not trimmed is in rows."""
        return sum([size for _, _, size in self._spans]) + self.places_bytes

    def move(self, ops: list[Op], count_max: int) -> bool:
        """Bring the oldest entries that are filed as places to the table themselves. False if there is none to move now."""
        first, row, rest = self._spans[0]
        low = start = max(first, self.base_index + 1)
        if low > self._tabled:
            return False
        items = self._store.scan(
            self.table, _KEY.pack(low), _KEY.pack(self._tabled + 1), bytes_max=SLICE_BYTES, count_max=count_max + 1
        )
        size = 0
        for index, (key, value) in enumerate(items, low):
            low = index
            if place_in(value) is None:
                continue
            row = row_of(value)
            if index - start >= count_max or size > SLICE_BYTES:
                break
            command, _, _ = entry = self._decode(index, key, value)
            ops.append(Put(self.table, key, header_of(self.group, entry) + command))
            size += len(command)
        else:
            low += 1
        self._spans[0] = low, row, max(rest - size, 0)
        if low > self._placed_last:
            self._spans.clear()
        elif len(self._spans) > 1 and low >= self._spans[1][0]:
            del self._spans[0]
        return True

    def mark(self, ops: list[Op]) -> None:
        """Write the group's record, and with it how far trimming went in this transaction."""
        if self._trim_from < self.base_index:
            upto = min(self.base_index, self._trim_from + TRIM_ENTRIES)
            ops.append(Cut(self.table, _KEY.pack(self._trim_from), _KEY.pack(upto + 1)))
            self._trim_from = upto
        ops.append(Put(HARD, self.group.to_bytes(4, "big"), self._encode_hard()))
        self.must_mark = False
        self._flying_term = self.term

    def persisted(self) -> None:
        self.durable_term = self._flying_term
        if self.flying_last > self.durable:
            self.durable = self.flying_last
        self._tabled = self._flying_filed
        assert self._tabled <= self.durable <= self.last_index
        if self._trim_from < self.base_index:
            self._mark_hard()
        if self._tail_bytes > self._journal.tail_bytes:
            self._shrink_tail()

    def _shrink_tail(self) -> None:
        """Keep half of the bound in memory, and everything that is not committed, or cannot be read from the table."""
        tail, size, keep = self.tail, self._tail_bytes, self._journal.tail_bytes // 2
        drop, drop_max = 0, min(self._tabled, self.commit) + 1 - self._tail_first
        while drop < drop_max and size > keep:
            size -= len(tail[drop][0])
            drop += 1
        del tail[:drop]
        self._tail_first += drop
        self._tail_bytes = size

    def _encode_hard(self) -> bytes:
        epoch = self.configuration
        mine = (self.term, self.vote, self.commit, self.base_index, self.base_term, self._trim_from)
        lives = (epoch.epoch, epoch.members, epoch.seed_index, epoch.seed_term)
        record: bytes = msgpack.packb((*mine, *lives, self.recent_from))
        return _CHECKSUM.pack(crc32(record, self.group)) + record

    def _load(self, recent: Sequence[Found]) -> None:
        value = self._store.get(HARD, self.group.to_bytes(4, "big"))
        if value is None or len(value) <= 4 or _CHECKSUM.unpack_from(value)[0] != crc32(value[4:], self.group):
            raise self._corrupt(None, "the record of term, vote and base does not match its checksum")
        fields = msgpack.unpackb(value[4:])
        self.term, vote, commit, self.base_index, self.base_term, self._trim_from = fields[:6]
        epoch, members, seed_index, seed_term, *rest = fields[6:]
        self.recent_from = rest[0] if rest else 0  # Not in records of format 2.
        newer = self._journal.stored_commit(self.group)
        if newer is None:
            raise self._corrupt(None, "the record of its commit index is missing")
        self.commit, self.commit_taken = max(commit, newer), newer
        self.vote = None if vote is None else NodeId(vote)
        self.configuration = Configuration(epoch, tuple(members), seed_index, seed_term)
        # The table holds exactly (trim_from, filed]: trimming moves that mark in the transaction that deletes.
        last = self._store.last(self.table)
        self.filed = self._tabled = self._flying_filed = (
            self._trim_from if last is None else int.from_bytes(last[0], "big")
        )
        if self._store.count(self.table) != self.filed - self._trim_from:
            raise self._corrupt(self._journal.first_hole(self.table, self._trim_from + 1), "the entry is missing")
        if self.base_index > self.filed:
            raise self._corrupt(self.filed + 1, f"the entry is missing; the log begins behind {self.base_index}")
        self.last_index, self._tail_first = self.filed, self.filed + 1
        self._load_span()
        self._load_runs()
        self._load_recent(recent)
        if max(self.commit, self.base_index) > self.last_index:
            raise self._corrupt(self.last_index + 1, f"the entry is missing; entries up to {self.commit} are committed")
        self.durable = self.flying_last = self.last_index
        self.durable_term = self._flying_term = self.term
        if self._trim_from < self.base_index:
            self._mark_hard()
        if self.last_term > self.term:
            raise self._corrupt(self.last_index, f"its term {self.last_term} is above the node's term {self.term}")
        low = max(self.base_index + 1, self.last_index - CHECKED_ENTRIES + 1)
        while low <= self.last_index:
            low += len(self.entries(low, self.last_index))

    def _load_span(self) -> None:
        """From which row on the table needs them. If that takes long to find out, all rows are kept for now."""
        journal = self._journal
        if journal.first_row == journal.next_row:
            return
        first = self.base_index + 1
        items = journal.slice(self.table, first)
        found = [(at, place) for at, (_, value) in enumerate(items) if (place := place_in(value)) is not None]
        if found:
            at, oldest = found[0]
            self._decode(first + at, *items[at])
            self._add_span(first + at, oldest.row, sum([place.length for _, place in found]))
        elif first + len(items) <= self.filed:
            self._add_span(first + len(items), journal.first_row, 0)
        self._placed_last = self.filed

    def _load_recent(self, recent: Sequence[Found]) -> None:
        """What rows hold behind the table's end. Cuts were filed, so whatever else they hold is in the table as well."""
        for entry, place in recent:
            command, index, term = entry
            if row_of(place) < self.recent_from or index <= self.last_index:
                continue
            if index != self.last_index + 1:
                raise self._corrupt(self.last_index + 1, "the entry is missing")
            if term < self.last_term:
                raise self._corrupt(index, f"its term {term} is below its predecessor's {self.last_term}")
            if term != self.last_term or not self._runs:
                self._runs.append((index, term))
                self.last_term = term
            self.tail.append(entry)
            self._tail_bytes += len(command)
            self.places.append(place)
            self.places_bytes += _HEADER_BYTES + len(command)
            self.last_index = index

    def _load_runs(self) -> None:
        """Terms never fall along a log, so where they change is found by halving, not by reading everything."""
        index = self.base_index + 1
        previous = self.base_term
        while index <= self.last_index:
            term = self._read(index, index, SLICE_BYTES)[0][2]
            if term < previous:
                raise self._corrupt(index, f"its term {term} is below its predecessor's {previous}")
            self._runs.append((index, term))
            low, high = index, self.last_index + 1  # term(low) == term; term(high) != term, or high is past the end
            while high - low > 1:
                middle = (low + high) // 2
                if self._read(middle, middle, SLICE_BYTES)[0][2] == term:
                    low = middle
                else:
                    high = middle
            index, previous = high, term
        self._end_runs()

    # -- pysyncobj's Journal: positions count from the base, which stands for entry 0 ------------------------------

    def add(self, command: bytes, idx: int, term: int) -> None:
        self.append((command, idx, term))

    def deleteEntriesFrom(self, entryFrom: int) -> None:  # noqa: N802, N803
        self.truncate(self.base_index + entryFrom)

    def setRaftCommitIndex(self, raftCommitIndex: int) -> None:  # noqa: N802, N803
        if raftCommitIndex > self.commit:
            self.set_commit(raftCommitIndex)

    def setCurrentTerm(self, term: int, votedForNodeId: NodeId | None) -> None:  # noqa: N802, N803
        self.set_vote(term, votedForNodeId)

    def __len__(self) -> int:
        return self.last_index - self.base_index + 1

    @overload
    def __getitem__(self, item: int) -> Entry: ...
    @overload
    def __getitem__(self, item: slice) -> Sequence[Entry]: ...
    def __getitem__(self, item: int | slice) -> Entry | Sequence[Entry]:
        if isinstance(item, slice):
            start, stop, _ = item.indices(len(self))
            found = [self._base_entry()] if start == 0 < stop else []
            low = self.base_index + max(start, 1)
            if low >= self._tail_first:  # Almost always: the newest entries, already in memory.
                return found + self.tail[low - self._tail_first : max(self.base_index + stop - self._tail_first, 0)]
            while low < self.base_index + stop:
                found += self.entries(low, self.base_index + stop - 1)
                low = found[-1][1] + 1
            return found
        index = self.base_index + (item if item >= 0 else len(self) + item)
        if index >= self._tail_first:
            return self.tail[index - self._tail_first]
        if index == self.base_index:
            return self._base_entry()
        return self.entries(index, index)[0]

    def _base_entry(self) -> Entry:
        return _BASE_COMMAND, self.base_index, self.base_term
