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
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, overload
from zlib import crc32

import msgpack

from holdfast.log.errors import Corrupt
from holdfast.log.messages import NOOP, Entry, GroupId, NodeId
from holdfast.log.store import Cut, Drop, Put

if TYPE_CHECKING:
    from holdfast.log.store import Op, Store

_HEADER: Final = struct.Struct(">QI")  # term, checksum
_SUBJECT: Final = struct.Struct(">IQQ")  # group, index, term: what the checksum speaks of besides the command
_KEY: Final = struct.Struct(">Q")
_CHECKSUM: Final = struct.Struct(">I")
_BASE_COMMAND: Final = bytes([NOOP])

_TABLE: Final = "log."
HARD: Final = "hard"  # One record per group: term, vote, configuration, base, and the commit index at that time.
COMMITS: Final = "commits"  # The commit indices of `COMMITS_GROUPS` groups in one record: they move with every entry.
COMMITS_GROUPS: Final = 64
PINS: Final = "pins"  # Which disk each peer had when we first met it.
TOMBSTONES: Final = "tombstones"  # What we promised in groups whose log we deleted.
TAIL_BYTES: Final = 4 * 1024 * 1024
SLICE_BYTES: Final = 4 * 1024 * 1024
SLICE_ENTRIES: Final = 4096
TRIM_ENTRIES: Final = 2048  # Per commit, so that trimming a long log never holds up the loop.
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


def _checksum(group: GroupId, index: int, term: int, command: bytes) -> int:
    return crc32(command, crc32(_SUBJECT.pack(group, index, term)))


def encode_entry(group: GroupId, entry: Entry) -> bytes:
    command, index, term = entry
    return _HEADER.pack(term, _checksum(group, index, term, command)) + command


class Journal:
    """All groups of one node. `take_writes` and `persisted` bracket each durable commit of the store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.groups: dict[GroupId, GroupLog] = {}
        self._dirty: dict[GroupId, GroupLog] = {}
        self._flying: list[GroupLog] = []
        self._ops: list[Op] = []
        self._pins: dict[NodeId, str] = {}
        self.tombstones: dict[GroupId, Tombstone] = {}
        self._commits: dict[int, dict[GroupId, int]] = {}  # By record: group -> commit index, as stored or about to be.
        self._moved_commits: set[int] = set()  # The records that differ from the stored ones.
        for key, value in self._rows(PINS):
            self._pins[NodeId(key.decode())] = self._decode_pin(key, value)
        for key, value in self._rows(TOMBSTONES):
            self.tombstones[GroupId(int.from_bytes(key, "big"))] = self._decode_tombstone(key, value)
        for key, value in self._rows(COMMITS):
            self._commits[int.from_bytes(key, "big")] = self._decode_commits(key, value)
        for key, _ in self._rows(HARD):
            group = GroupId(int.from_bytes(key, "big"))
            self.groups[group] = GroupLog(self, group)
        for group in [group for commits in self._commits.values() for group in commits]:
            if group not in self.groups:
                raise self._headless(group)
        for table in store.tables():
            if table.startswith(_TABLE) and (group := GroupId(int(table[len(_TABLE) :]))) not in self.groups:
                raise self._headless(group)

    def _headless(self, group: GroupId) -> Corrupt:
        # Taken for a new group, it would vote a second time in terms it has forgotten.
        path = str(getattr(self.store, "path", HARD))
        return Corrupt(path, "the record of term, vote and base is missing", group=group)

    def _rows(self, table: str) -> list[tuple[bytes, bytes]]:
        return self.store.scan(table, b"", b"\xff" * 9, bytes_max=1 << 30, count_max=1 << 20)

    def create(self, group: GroupId, configuration: Configuration) -> GroupLog:
        assert group not in self.groups, f"group {group} exists"
        log = self.groups[group] = GroupLog(self, group, configuration)
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
        self._bury(group, Tombstone(log.term, log.vote, log.configuration))
        self._dirty.pop(group, None)
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
        self._ops.append(Put(TOMBSTONES, key, _CHECKSUM.pack(crc32(record, crc32(key))) + record))

    def _decode_tombstone(self, key: bytes, value: bytes) -> Tombstone:
        if len(value) <= 4 or _CHECKSUM.unpack_from(value)[0] != crc32(value[4:], crc32(key)):
            path = str(getattr(self.store, "path", TOMBSTONES))
            group = GroupId(int.from_bytes(key, "big"))
            raise Corrupt(path, "the record of what was promised in it does not match its checksum", group=group)
        term, vote, epoch, members, *seed = msgpack.unpackb(value[4:])
        return Tombstone(term, None if vote is None else NodeId(vote), Configuration(epoch, tuple(members), *seed))

    def pin(self, peer: NodeId) -> str | None:
        return self._pins.get(peer)

    def set_pin(self, peer: NodeId, disk: str) -> None:
        """Remember a peer's disk: one that comes back with another has lost what it acknowledged."""
        self._pins[peer] = disk
        key, value = peer.encode(), disk.encode()
        self._ops.append(Put(PINS, key, _CHECKSUM.pack(crc32(value, crc32(key))) + value))

    def _decode_pin(self, key: bytes, value: bytes) -> str:
        if len(value) < 4 or _CHECKSUM.unpack_from(value)[0] != crc32(value[4:], crc32(key)):
            path = str(getattr(self.store, "path", PINS))
            raise Corrupt(path, f"the record of the disk of {key.decode(errors='replace')} does not match its checksum")
        return value[4:].decode()

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
                record: bytes = msgpack.packb(commits)
                ops.append(Put(COMMITS, key, _CHECKSUM.pack(crc32(record, crc32(key))) + record))
            else:
                ops.append(Cut(COMMITS, key, key + b"\0"))
        self._moved_commits.clear()

    def _decode_commits(self, key: bytes, value: bytes) -> dict[GroupId, int]:
        if len(value) <= 4 or _CHECKSUM.unpack_from(value)[0] != crc32(value[4:], crc32(key)):
            path = str(getattr(self.store, "path", COMMITS))
            first = int.from_bytes(key, "big") * COMMITS_GROUPS
            groups = f"groups {first} to {first + COMMITS_GROUPS - 1}"
            raise Corrupt(path, f"the record of the commit indices of {groups} does not match its checksum")
        commits: dict[GroupId, int] = msgpack.unpackb(value[4:], strict_map_key=False)
        return commits

    def mark_dirty(self, log: GroupLog) -> None:
        self._dirty[log.group] = log

    def is_settled(self, log: GroupLog) -> bool:
        """Whether all that a log holds is on disk, its commit index apart."""
        return log.group not in self._dirty and log not in self._flying

    @property
    def dirty(self) -> bool:
        return bool(self._dirty or self._ops)  # A commit index alone is not worth a write.

    def take_writes(self) -> list[Op]:
        """Everything since the last call, of all groups: one transaction."""
        assert not self._flying, "one commit at a time: the store has one writer"
        ops, self._ops = self._ops, []
        for group, log in self._dirty.items():
            log.take_writes(ops)
            if log.commit != log.commit_taken:
                log.commit_taken = log.commit
                number = group // COMMITS_GROUPS
                self._commits.setdefault(number, {})[group] = log.commit
                self._moved_commits.add(number)
        self._flying = list(self._dirty.values())
        self._dirty = {}
        if self._moved_commits:
            self._write_commits(ops)
        return ops

    def persisted(self) -> list[GroupLog]:
        """What `take_writes` gave last is on disk. Returns the logs whose durable mark may have moved."""
        flown, self._flying = self._flying, []
        for log in flown:
            log.persisted()
        return flown


class GroupLog:
    """One group's log: (base, last] are its entries, `base` is the last one covered by a snapshot or 0."""

    def __init__(self, journal: Journal, group: GroupId, configuration: Configuration | None = None) -> None:
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
        self.durable = 0
        self.durable_term = 0
        self._flying_last = 0
        self._flying_term = 0
        self._ops: list[Op] = []
        self._hard_dirty = False
        self._runs: list[tuple[int, int]] = []  # (first index of the run, its term), ascending
        self._tail: list[Entry] = []  # The newest entries; at least all that are not durable.
        self._tail_first = 1
        self._tail_bytes = 0
        self._trim_from = 0  # Entries (trim_from, base] are still in the store and go in slices.
        if configuration is None:
            self._load()
        else:
            self.configuration = configuration
            self._mark_hard()

    # -- reading -------------------------------------------------------------------------------------------------

    @property
    def last_term(self) -> int:
        return self._runs[-1][1] if self._runs else self.base_term

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
            return [self._tail[low - self._tail_first]]
        start, stop = low - self._tail_first, min(high, low + SLICE_ENTRIES - 1) - self._tail_first + 1
        found = self._tail[start:stop]
        size = 0
        for offset, entry in enumerate(found):
            size += len(entry[0])
            if size > bytes_max:
                return found[: max(offset, 1)]
        return found

    def _read(self, low: int, high: int, bytes_max: int) -> list[Entry]:
        rows = self._store.scan(
            self.table, _KEY.pack(low), _KEY.pack(high + 1), bytes_max=bytes_max, count_max=high - low + 1
        )
        found = [self._decode(low + offset, key, value) for offset, (key, value) in enumerate(rows)]
        if not found:
            raise self._corrupt(low, "the entry is missing")
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
        if len(value) <= _HEADER.size:
            raise self._corrupt(index, "the entry is cut short")
        term, checksum = _HEADER.unpack_from(value)
        command = value[_HEADER.size :]
        if checksum != _checksum(self.group, index, term, command):
            raise self._corrupt(index, "the entry does not match its checksum")
        return command, index, term

    def _corrupt(self, index: int | None, detail: str) -> Corrupt:
        return Corrupt(str(getattr(self._store, "path", self.table)), detail, group=self.group, index=index)

    # -- writing -------------------------------------------------------------------------------------------------

    def append(self, entry: Entry) -> None:
        command, index, term = entry
        assert index == self.last_index + 1, f"entry {index} after {self.last_index} would leave a hole"
        runs = self._runs
        last_term = runs[-1][1] if runs else self.base_term
        assert last_term <= term <= self.term, "terms never fall, and none is above our own"
        if term != last_term or not runs:
            runs.append((index, term))
        self.last_index = index
        self._tail.append(entry)
        self._tail_bytes += len(command)
        self._ops.append(Put(self.table, _KEY.pack(index), encode_entry(self.group, entry), True))
        self._journal.mark_dirty(self)

    def truncate(self, low: int) -> None:
        """Drop the entries from `low` on: they conflict with a leader's. Never committed ones."""
        assert self.commit < low <= self.last_index, f"truncating {low}, committed {self.commit}"
        self._ops.append(Cut(self.table, _KEY.pack(low), _KEY.pack(self.last_index + 1)))
        self.last_index = low - 1
        self.durable = min(self.durable, low - 1)
        self._flying_last = min(self._flying_last, low - 1)
        while self._runs and self._runs[-1][0] >= low:
            self._runs.pop()
        if low < self._tail_first:
            self._tail, self._tail_first, self._tail_bytes = [], low, 0
        else:
            for entry in self._tail[low - self._tail_first :]:
                self._tail_bytes -= len(entry[0])
            del self._tail[low - self._tail_first :]
        self._journal.mark_dirty(self)

    def set_vote(self, term: int, vote: NodeId | None) -> None:
        assert term > self.term or (term == self.term and self.vote in (None, vote)), "one vote per term"
        if (term, vote) != (self.term, self.vote):
            self.term, self.vote = term, vote
            self._mark_hard()

    def set_commit(self, index: int) -> None:
        """Kept with the next write only: it saves a restarted node work, and safety does not rest on it."""
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
            self._ops = [Drop(self.table)]
            self._runs, self._tail, self._tail_bytes, self._tail_first = [], [], 0, index + 1
            self.last_index = self.durable = self._flying_last = self._trim_from = index
            self._rebase(index, term)
        self.commit = index
        self._hard_dirty = True

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
        if index >= self._tail_first:
            drop = index + 1 - self._tail_first
            self._tail_bytes -= sum(len(entry[0]) for entry in self._tail[:drop])
            del self._tail[:drop]
            self._tail_first = index + 1
        self._mark_hard()

    def _mark_hard(self) -> None:
        self._hard_dirty = True
        self._journal.mark_dirty(self)

    # -- durability ----------------------------------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        return self._journal.is_settled(self)

    def take_writes(self, ops: list[Op]) -> None:
        ops += self._ops
        self._ops = []
        if self._trim_from < self.base_index:
            upto = min(self.base_index, self._trim_from + TRIM_ENTRIES)
            ops.append(Cut(self.table, _KEY.pack(self._trim_from), _KEY.pack(upto + 1)))
            self._trim_from = upto
            self._hard_dirty = True  # The record says how far it went, in the same transaction.
        if self._hard_dirty:
            ops.append(Put(HARD, self.group.to_bytes(4, "big"), self._encode_hard()))
            self._hard_dirty = False
        self._flying_last, self._flying_term = self.last_index, self.term

    def persisted(self) -> None:
        self.durable_term = self._flying_term
        if self._flying_last > self.durable:
            self.durable = self._flying_last
        assert self.durable <= self.last_index
        if self._trim_from < self.base_index:
            self._journal.mark_dirty(self)
        if self._tail_bytes > TAIL_BYTES:
            self._shrink_tail()

    def _shrink_tail(self) -> None:
        """Keep half of the bound in memory, and everything that is not durable or not committed."""
        drop, bound = 0, min(self.durable, self.commit)
        while drop < len(self._tail) and self._tail_bytes > TAIL_BYTES // 2 and self._tail[drop][1] <= bound:
            self._tail_bytes -= len(self._tail[drop][0])
            drop += 1
        del self._tail[:drop]
        self._tail_first += drop

    def _encode_hard(self) -> bytes:
        epoch = self.configuration
        mine = (self.term, self.vote, self.commit, self.base_index, self.base_term, self._trim_from)
        record: bytes = msgpack.packb((*mine, epoch.epoch, epoch.members, epoch.seed_index, epoch.seed_term))
        return _CHECKSUM.pack(crc32(record, self.group)) + record

    def _load(self) -> None:
        value = self._store.get(HARD, self.group.to_bytes(4, "big"))
        if value is None or len(value) <= 4 or _CHECKSUM.unpack_from(value)[0] != crc32(value[4:], self.group):
            raise self._corrupt(None, "the record of term, vote and base does not match its checksum")
        (self.term, vote, commit, self.base_index, self.base_term, self._trim_from, epoch, members, *seed) = (
            msgpack.unpackb(value[4:])
        )
        newer = self._journal.stored_commit(self.group)
        if newer is None:
            raise self._corrupt(None, "the record of its commit index is missing")
        self.commit, self.commit_taken = max(commit, newer), newer
        self.vote = None if vote is None else NodeId(vote)
        self.configuration = Configuration(epoch, tuple(members), *seed)
        # The store holds exactly (trim_from, last]: trimming moves that mark in the transaction that deletes.
        last = self._store.last(self.table)
        self.last_index = self._trim_from if last is None else int.from_bytes(last[0], "big")
        if self._store.count(self.table) != self.last_index - self._trim_from:
            raise self._corrupt(self._first_hole(self._trim_from + 1), "the entry is missing")
        if max(self.commit, self.base_index) > self.last_index:
            raise self._corrupt(self.last_index + 1, f"the entry is missing; entries up to {self.commit} are committed")
        self.durable = self._flying_last = self.last_index
        self.durable_term = self._flying_term = self.term
        self._tail_first = self.last_index + 1
        self._load_runs()
        if self._trim_from < self.base_index:
            self._journal.mark_dirty(self)
        if self.last_term > self.term:
            raise self._corrupt(self.last_index, f"its term {self.last_term} is above the node's term {self.term}")
        low = max(self.base_index + 1, self.last_index - CHECKED_ENTRIES + 1)
        while low <= self.last_index:
            low += len(self.entries(low, self.last_index))

    def _first_hole(self, index: int) -> int:
        while rows := self._store.scan(self.table, _KEY.pack(index), b"\xff" * 9, bytes_max=1 << 30, count_max=4096):
            for key, _ in rows:
                if key != _KEY.pack(index):
                    return index
                index += 1
        return index

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
                return found + self._tail[low - self._tail_first : max(self.base_index + stop - self._tail_first, 0)]
            while low < self.base_index + stop:
                found += self.entries(low, self.base_index + stop - 1)
                low = found[-1][1] + 1
            return found
        index = self.base_index + (item if item >= 0 else len(self) + item)
        if index >= self._tail_first:
            return self._tail[index - self._tail_first]
        if index == self.base_index:
            return self._base_entry()
        return self.entries(index, index)[0]

    def _base_entry(self) -> Entry:
        return _BASE_COMMAND, self.base_index, self.base_term
