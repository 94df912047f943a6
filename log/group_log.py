"""One group's log: its entries, term, vote and configuration, in memory and as the journal stores them.

A `GroupLog` gives the journal a list of operations to make durable, and keeps a watermark, `durable`, of what already is. It
never waits: an appended entry can be read at once, and is durable when the store's next commit has returned. Nothing beyond
the watermark may be promised to a peer.

Entries read from the store are checked: each carries a checksum over its group, index, term and command, indices have no holes,
and terms never decrease. A log that breaks one of these rules stops the node. It is never shortened to fit, because a hole
inside acknowledged entries is amnesia.

Entries older than the tail in memory are read from the store in slices, and terms are kept as runs, so memory does not grow
with the log. `log/spans.py` knows which rows the group's table needs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

from holdfast.log.errors import Corrupt
from holdfast.log.messages import Entry, GroupId, NodeId
from holdfast.log.records import (
    CHECKSUM_AT,
    HARD,
    HEADER_BYTES,
    KEY,
    Configuration,
    Hard,
    decode_entry,
    decode_hard,
    encode_hard,
    header_of,
    table_of,
)
from holdfast.log.rows import RECENT, RowEntry, place_in, row_of
from holdfast.log.spans import Spans
from holdfast.log.store import Cut, Drop, Extend, Put

if TYPE_CHECKING:
    from holdfast.log.store import Op, Store

SLICE_BYTES: Final = 4 * 1024 * 1024
SLICE_ENTRIES: Final = 4096
TRIM_ENTRIES: Final = 2048  # Per commit, so that trimming a long log never blocks the loop.
PIECE_ENTRIES: Final = 256  # Read from a table in one scan.
CHECKED_ENTRIES: Final = 1024  # The newest entries are verified on opening, the others when they are read.


class LogOwner(Protocol):
    """What a group's log needs from its journal."""

    store: Store
    first_row: int
    next_row: int
    rows_free: bool
    tail_bytes: int
    dirty_logs: dict[GroupId, GroupLog]
    risen: dict[GroupId, GroupLog]

    def is_settled(self, log: GroupLog) -> bool: ...

    def stored_commit(self, group: GroupId) -> int | None: ...


def slice_of(store: Store, table: str, number: int) -> list[tuple[bytes, bytes]]:
    """The items of a table from key `number` on, up to a bound."""
    return store.scan(table, KEY.pack(number), b"\xff" * 9, bytes_max=SLICE_BYTES, count_max=SLICE_ENTRIES)


def first_hole(store: Store, table: str, number: int) -> int:
    """The first missing key from `number` on."""
    while items := slice_of(store, table, number):
        for key, _ in items:
            if key != KEY.pack(number):
                return number
            number += 1
    return number


class GroupLog:
    """One group's log. It holds entries (base, last]; `base` is the last entry covered by a snapshot, or 0."""

    # A turn visits all groups, so the attributes that it reads should be close together in memory.
    __slots__ = (
        "_flying_filed",
        "_flying_term",
        "_journal",
        "_ops",
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
        journal: LogOwner,
        group: GroupId,
        configuration: Configuration | None = None,
        recent: Sequence[RowEntry] = (),
    ) -> None:
        self.group = group
        self.table = table_of(group)
        self._journal = journal
        self._store = journal.store
        self.term = 0
        self.vote: NodeId | None = None
        self.commit = 0
        self.commit_taken = -1  # The commit index in the journal's newest write; -1 if there is none.
        self.base_index = 0
        self.base_term = 0
        self.last_index = 0
        self.last_term = 0
        self.durable = 0
        self.durable_term = 0
        self.flying_last = 0
        self._flying_term = 0
        # Entries up to `filed` are in the group's own table or in the current commit to it, as themselves or as places. For
        # entries up to `flying_last`, `places` holds their places; for the fresh ones after it, `headers` holds their headers.
        self.filed = 0
        self.places: list[bytes] = []
        self.places_bytes = 0  # An upper bound on the bytes of the entries at `places`.
        self.headers: list[bytes] = []
        self.must_file = False  # Rows hold entries that were since cut off, or the log now begins after `filed`.
        self.fresh_bytes = 0  # Bytes of the entries that are in no commit yet.
        self.recent_from = journal.next_row  # Rows before this one no longer count for this group.
        self._spans = Spans()  # Of the entries filed as places.
        self._flying_filed = 0
        self._tabled = 0  # The table can be read up to here.
        self._ops: list[Op] = []  # Pending cuts of the table.
        self.must_mark = False
        self._runs: list[tuple[int, int]] = []  # (first index of the run, its term), ascending.
        self.tail: list[Entry] = []  # The newest entries: at least all that are not filed.
        self._tail_first = 1
        self._tail_bytes = 0
        self._trim_from = 0  # Entries (trim_from, base] are still in the store and are deleted in slices.
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
        """Entries from `low` to `high`, inclusive: fewer if they exceed `bytes_max`, but at least one."""
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
            stop = min(high, low + PIECE_ENTRIES - 1) + 1  # A place does not count the bytes of its entry.
            items = self._store.scan(
                self.table, KEY.pack(low), KEY.pack(stop), bytes_max=bytes_max - size, count_max=stop - low
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
        """Entries have the terms of our runs: the binary search of `_load_runs` reads few entries and trusts the rest."""
        before = self.term_of(entries[0][1] - 1) or 0
        for _, index, term in entries:
            if term < before:
                raise self._corrupt(index, f"the entry's term {term} is below its predecessor's {before}")
            before = term
        last = entries[-1]
        if last[2] != self.term_of(last[1]):
            raise self._corrupt(last[1], f"the entry's term {last[2]} is above a later entry's")

    def _decode(self, index: int, key: bytes, value: bytes) -> Entry:
        if key != KEY.pack(index):
            raise self._corrupt(index, "the entry is missing")
        place = place_in(value)
        if place is not None:
            held = self._store.part(RECENT, KEY.pack(place.row), place.offset, place.length)
            if held is None:
                raise self._corrupt(index, f"row {place.row} of the recent entries, which holds the entry, is missing")
            value = held
        if len(value) <= HEADER_BYTES:
            raise self._corrupt(index, "the entry is truncated")
        entry = decode_entry(self.group, index, value)
        # An older row may hold another entry of this index, which was cut off and has a valid checksum of its own.
        if entry is None or (place is not None and value[CHECKSUM_AT] != place.checksum):
            raise self._corrupt(index, "the entry does not match its checksum")
        return entry

    def _corrupt(self, index: int | None, detail: str) -> Corrupt:
        return Corrupt(str(getattr(self._store, "path", self.table)), detail, group=self.group, index=index)

    # -- writing -------------------------------------------------------------------------------------------------

    def append(self, entry: Entry) -> None:
        command, index, term = entry
        assert index == self.last_index + 1, f"entry {index} after {self.last_index} would leave a hole"
        assert self.last_term <= term <= self.term, "terms never decrease, and none is above our own"
        if term != self.last_term or not self._runs:
            self._runs.append((index, term))
            self.last_term = term
        self.last_index = index
        self.tail.append(entry)
        group, size = self.group, len(command)
        self._tail_bytes += size
        self.fresh_bytes += HEADER_BYTES + size
        self.headers.append(header_of(group, entry))
        self._journal.dirty_logs[group] = self

    def truncate(self, low: int) -> None:
        """Drop the entries from `low` on, which conflict with a leader's. Committed entries are never dropped."""
        assert self.commit < low <= self.last_index, f"truncating {low}, committed {self.commit}"
        if low <= self.filed:
            self._ops.append(Cut(self.table, KEY.pack(low), KEY.pack(self.filed + 1)))
            self.filed = low - 1
            self._spans.cut(low)
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
            if term > self.term:
                self._journal.risen[self.group] = self
            self.term, self.vote = term, vote
            self._mark_hard()

    def set_commit(self, index: int) -> None:
        """Written with one of the next commits: it saves a restarted node work, and safety does not depend on it."""
        assert self.commit <= index <= self.last_index, f"commit {self.commit} -> {index}, last {self.last_index}"
        self.commit = index

    def set_configuration(self, configuration: Configuration) -> None:
        assert configuration.epoch > self.configuration.epoch, "epochs only increase"
        self.configuration = configuration
        self._journal.risen[self.group] = self
        self._mark_hard()

    def trim(self, index: int) -> None:
        """Delete entries up to `index`, which a durable snapshot covers, in slices."""
        assert index <= self.commit, f"trimming {index}, committed {self.commit}"
        if index <= self.base_index:
            return
        self._rebase(index, self._known_term(index))

    def reset(self, index: int, term: int) -> None:
        """The state at (index, term) was installed, so the log begins after it. A tail that continues it is kept."""
        assert index > self.commit, f"installing {index} below commit {self.commit}"
        if term > self.term:
            self.set_vote(term, None)  # We stopped before the term was written, so no vote of ours in it has left.
        if self.term_of(index) == term:
            self._rebase(index, term)
        else:
            self._ops, self.places, self.headers = [Drop(self.table)], [], []
            self.places_bytes = self.fresh_bytes = 0
            self._spans, self.must_file = Spans(), True
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
        # A run that begins below the new base loses its start; runs entirely below it are dropped.
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
        drop = (
            min(index, self.filed) + 1 - self._tail_first
        )  # The table has no holes, so later entries are filed first.
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
        """The lengths on disk of the entries from `first` on, none of which is filed."""
        return [HEADER_BYTES + len(entry[0]) for entry in self.tail[first - self._tail_first :]]

    def parts(self, first: int) -> list[bytes]:
        """The header and command of each entry from `first` on, all of which are fresh."""
        entries = self.tail[first - self._tail_first :]
        return [part for header, entry in zip(self.headers, entries, strict=True) for part in (header, entry[0])]

    def file(self, ops: list[Op]) -> int:
        """File all entries in the group's own table: those in rows as places, fresh ones as themselves. Return the count."""
        ops += self._ops
        self._ops = []
        if self.must_file:
            self.must_file = False
            self.recent_from = self._journal.next_row
            self.must_mark = True
        first, places = self.filed + 1, self.places
        items = [(KEY.pack(index), place) for index, place in enumerate(places, first)]
        if places:
            self._spans.add(first, row_of(places[0]), self.places_bytes)
            self._spans.placed_last = first + len(places) - 1
        self.places, self.places_bytes = [], 0
        if self.headers:
            fresh = self.tail[self.flying_last + 1 - self._tail_first :]
            items += [
                (KEY.pack(entry[1]), header + entry[0]) for header, entry in zip(self.headers, fresh, strict=True)
            ]
            self.headers = []
        if items:
            ops.append(Extend(self.table, items))
        self.filed = self._flying_filed = self.flying_last = self.last_index
        return len(items)

    # -- the rows it needs ---------------------------------------------------------------------------------------------

    def first_row(self) -> int | None:
        """A row at or before the oldest one that the table needs; None if it needs none."""
        return self._spans.first_row(self.base_index)

    @property
    def placed_bytes(self) -> int:
        """Roughly how many bytes of the log are in rows."""
        return self._spans.placed_bytes + self.places_bytes

    def move(self, ops: list[Op], count_max: int) -> bool:
        """Move the oldest entries filed as places into the table itself. False if none can be moved now."""
        first, row = self._spans.oldest
        low = start = max(first, self.base_index + 1)
        if low > self._tabled:
            return False
        items = self._store.scan(
            self.table, KEY.pack(low), KEY.pack(self._tabled + 1), bytes_max=SLICE_BYTES, count_max=count_max + 1
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
        self._spans.moved(low, row, size)
        return True

    def mark(self, ops: list[Op]) -> None:
        """Write the group's record, which includes how far this transaction trims."""
        if self._trim_from < self.base_index:
            upto = min(self.base_index, self._trim_from + TRIM_ENTRIES)
            ops.append(Cut(self.table, KEY.pack(self._trim_from), KEY.pack(upto + 1)))
            self._trim_from = upto
        hard = Hard(
            term=self.term,
            vote=self.vote,
            commit=self.commit,
            base_index=self.base_index,
            base_term=self.base_term,
            trim_from=self._trim_from,
            configuration=self.configuration,
            recent_from=self.recent_from,
        )
        ops.append(Put(HARD, self.group.to_bytes(4, "big"), encode_hard(self.group, hard)))
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
        """Keep half of the bound in memory, and every entry that is not committed or cannot be read from the table."""
        tail, size, keep = self.tail, self._tail_bytes, self._journal.tail_bytes // 2
        drop, drop_max = 0, min(self._tabled, self.commit) + 1 - self._tail_first
        while drop < drop_max and size > keep:
            size -= len(tail[drop][0])
            drop += 1
        del tail[:drop]
        self._tail_first += drop
        self._tail_bytes = size

    def _load(self, recent: Sequence[RowEntry]) -> None:
        hard = decode_hard(self.group, self._store.get(HARD, self.group.to_bytes(4, "big")))
        if hard is None:
            raise self._corrupt(None, "the record of term, vote and base does not match its checksum")
        self.term, self.vote, self.configuration = hard.term, hard.vote, hard.configuration
        self.base_index, self.base_term, self._trim_from = hard.base_index, hard.base_term, hard.trim_from
        self.recent_from = hard.recent_from
        newer = self._journal.stored_commit(self.group)
        if newer is None:
            raise self._corrupt(None, "the record of the commit index is missing")
        self.commit, self.commit_taken = max(hard.commit, newer), newer
        # The table holds exactly (trim_from, filed]: the transaction that deletes entries also moves `trim_from`.
        last = self._store.last(self.table)
        self.filed = self._tabled = self._flying_filed = (
            self._trim_from if last is None else int.from_bytes(last[0], "big")
        )
        if self._store.count(self.table) != self.filed - self._trim_from:
            raise self._corrupt(first_hole(self._store, self.table, self._trim_from + 1), "the entry is missing")
        if self.base_index > self.filed:
            raise self._corrupt(self.filed + 1, f"the entry is missing; the log begins after entry {self.base_index}")
        self.last_index, self._tail_first = self.filed, self.filed + 1
        self._load_span()
        self._load_runs()
        self._load_recent(recent)
        if max(self.commit, self.base_index) > self.last_index:
            raise self._corrupt(
                self.last_index + 1, f"the entry is missing, although entries up to {self.commit} are committed"
            )
        self.durable = self.flying_last = self.last_index
        self.durable_term = self._flying_term = self.term
        if self._trim_from < self.base_index:
            self._mark_hard()
        if self.last_term > self.term:
            raise self._corrupt(
                self.last_index, f"the entry's term {self.last_term} is above the node's term {self.term}"
            )
        low = max(self.base_index + 1, self.last_index - CHECKED_ENTRIES + 1)
        while low <= self.last_index:
            low += len(self.entries(low, self.last_index))

    def _load_span(self) -> None:
        """Find the first row that the table needs. If that takes long, all rows are kept for now."""
        journal = self._journal
        if journal.first_row == journal.next_row:
            return
        first = self.base_index + 1
        items = slice_of(self._store, self.table, first)
        found = [(at, place) for at, (_, value) in enumerate(items) if (place := place_in(value)) is not None]
        if found:
            at, oldest = found[0]
            self._decode(first + at, *items[at])
            self._spans.add(first + at, oldest.row, sum([place.length for _, place in found]))
        elif first + len(items) <= self.filed:
            self._spans.add(first + len(items), journal.first_row, 0)
        self._spans.placed_last = self.filed

    def _load_recent(self, recent: Sequence[RowEntry]) -> None:
        """Take the entries after the table's end from rows. Cuts were filed, so the table holds all other entries of rows."""
        for entry, place in recent:
            command, index, term = entry
            if row_of(place) < self.recent_from or index <= self.last_index:
                continue
            if index != self.last_index + 1:
                raise self._corrupt(self.last_index + 1, "the entry is missing")
            if term < self.last_term:
                raise self._corrupt(index, f"the entry's term {term} is below its predecessor's {self.last_term}")
            if term != self.last_term or not self._runs:
                self._runs.append((index, term))
                self.last_term = term
            self.tail.append(entry)
            self._tail_bytes += len(command)
            self.places.append(place)
            self.places_bytes += HEADER_BYTES + len(command)
            self.last_index = index

    def _load_runs(self) -> None:
        """Terms never decrease along a log, so a binary search finds where they change, without reading everything."""
        index = self.base_index + 1
        previous = self.base_term
        while index <= self.last_index:
            term = self._read(index, index, SLICE_BYTES)[0][2]
            if term < previous:
                raise self._corrupt(index, f"the entry's term {term} is below its predecessor's {previous}")
            self._runs.append((index, term))
            low, high = index, self.last_index + 1  # term(low) == term; term(high) != term, or high is past the end.
            while high - low > 1:
                middle = (low + high) // 2
                if self._read(middle, middle, SLICE_BYTES)[0][2] == term:
                    low = middle
                else:
                    high = middle
            index, previous = high, term
        self._end_runs()
