"""The journal: what was appended is what is read back, or the node is told where it is not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import msgpack
import pytest

from holdfast.log.errors import Corrupt, DirectoryInUse, StorageError, WrongDirectory
from holdfast.log.group_log import SLICE_BYTES, SLICE_ENTRIES, TRIM_ENTRIES, GroupLog
from holdfast.log.journal import TAILS_BYTES, Journal
from holdfast.log.messages import COMMANDS, Entry, GroupId, NodeId
from holdfast.log.positions import Positions
from holdfast.log.records import COMMITS, COMMITS_GROUPS, HARD, TOMBSTONES, Configuration, Tombstone, table_of
from holdfast.log.rows import Rows
from holdfast.log.store import Cut, Drop, Extend, LmdbStore, Op, Put, Store
from tests.log.journals import encode_entry, everything, flush, write
from tests.sim.disk import SimDisk

G = GroupId(7)
MEMBERS = Configuration(0, (NodeId("n1"), NodeId("n2"), NodeId("n3")))


class Box:
    """A journal and the store under it, which can be closed and opened again."""

    def __init__(self, open_store: Callable[[], Store], rows: Rows | None = None) -> None:
        self._open = open_store
        self._rows = rows
        self.store = open_store()
        self.journal = Journal(self.store, rows)

    @property
    def log(self) -> GroupLog:
        return self.journal.groups[G]

    def create(self) -> GroupLog:
        return self.journal.create(G, MEMBERS)

    def flush(self) -> list[Op]:
        """One commit, from staging to durable. Returns what was written."""
        return flush(self.journal, self.store)

    def write(self, *ops: Op) -> None:
        """Past the journal: what a bug or a bad disk would leave."""
        write(self.store, *ops)

    def reopen(self) -> GroupLog:
        self.store.close()
        self.store = self._open()
        self.journal = Journal(self.store, self._rows)
        return self.log


@pytest.fixture(params=["lmdb", "simulated"])
def box(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Box]:
    disk = SimDisk("d")
    opened = Box((lambda: on_lmdb(tmp_path)) if request.param == "lmdb" else lambda: disk)
    yield opened
    opened.store.close()


def on_lmdb(path: Path) -> LmdbStore:
    return LmdbStore.open(path / "data", node="n1", cluster="c1")


def entry(index: int, term: int = 1, size: int = 8) -> Entry:
    return bytes([COMMANDS]) + b"%d.%d" % (index, term) + bytes(size), index, term


def key(index: int) -> bytes:
    return index.to_bytes(8, "big")


def fill(log: GroupLog, first: int, last: int, term: int = 1, size: int = 8) -> None:
    if term > log.term:
        log.set_vote(term, None)
    for index in range(first, last + 1):
        log.append(entry(index, term, size))


# What is written is read back


def test_entries_term_vote_commit_and_configuration_are_there_after_reopening(box: Box) -> None:
    log = box.create()
    log.set_vote(3, NodeId("n2"))
    fill(log, 1, 4, term=1)
    fill(log, 5, 9, term=3)
    log.set_commit(6)
    box.flush()

    again = box.reopen()

    assert everything(again) == [entry(i, 1) for i in range(1, 5)] + [entry(i, 3) for i in range(5, 10)]
    assert (again.term, again.vote, again.commit, again.durable) == (3, "n2", 6, 9)
    assert [again.term_of(i) for i in (0, 1, 4, 5, 9, 10)] == [0, 1, 1, 3, 3, None]
    assert again.configuration == MEMBERS


def test_entries_are_readable_before_they_are_durable_and_the_mark_says_so(box: Box) -> None:
    log = box.create()
    fill(log, 1, 3)

    assert everything(log) == [entry(i) for i in (1, 2, 3)]
    assert log.durable == 0
    box.flush()
    assert log.durable == 3


def test_the_durable_mark_covers_only_what_the_commit_took_along(box: Box) -> None:
    log = box.create()
    fill(log, 1, 3)
    box.store.stage(box.journal.take_writes())
    fill(log, 4, 5)
    box.store.commit()
    box.journal.persisted()

    assert log.durable == 3
    box.flush()
    assert log.durable == 5


def test_a_truncated_tail_is_gone_and_can_be_written_anew(box: Box) -> None:
    log = box.create()
    fill(log, 1, 6, term=1)
    box.flush()
    log.truncate(4)
    fill(log, 4, 5, term=2)
    box.flush()

    assert [e[1:] for e in everything(box.reopen())] == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2)]


def test_committed_entries_cannot_be_truncated(box: Box) -> None:
    log = box.create()
    fill(log, 1, 5)
    log.set_commit(3)

    with pytest.raises(AssertionError, match="committed 3"):
        log.truncate(3)


def test_an_entry_that_leaves_a_hole_or_has_a_falling_term_is_not_appended(box: Box) -> None:
    log = box.create()
    fill(log, 1, 2, term=2)

    with pytest.raises(AssertionError, match="hole"):
        log.append(entry(4, 2))
    with pytest.raises(AssertionError, match="terms never decrease"):
        log.append(entry(3, 1))
    with pytest.raises(AssertionError, match="none is above our own"):
        log.append(entry(3, 3))


def test_a_node_has_one_vote_per_term(box: Box) -> None:
    log = box.create()
    log.set_vote(2, NodeId("n2"))
    log.set_vote(2, NodeId("n2"))

    with pytest.raises(AssertionError, match="one vote per term"):
        log.set_vote(2, NodeId("n3"))
    with pytest.raises(AssertionError, match="one vote per term"):
        log.set_vote(1, None)


def test_the_commit_index_is_written_with_the_next_write_only(box: Box) -> None:
    log = box.create()
    fill(log, 1, 3)
    box.flush()
    log.set_commit(2)

    assert not box.journal.dirty
    fill(log, 4, 4)
    box.flush()
    assert box.reopen().commit == 2


def test_a_commit_index_is_never_on_disk_without_its_entries(box: Box) -> None:
    """The record and the entries it speaks of are in one transaction, or the entries in an earlier one."""
    log = box.create()
    box.flush()
    fill(log, 1, 3)
    box.store.stage(box.journal.take_writes())
    fill(log, 4, 6)
    log.set_commit(6)
    box.store.commit()
    box.journal.persisted()

    assert box.reopen().last_index == 3
    assert box.log.commit == 0


def test_a_trimmed_log_begins_behind_its_base(box: Box) -> None:
    log = box.create()
    fill(log, 1, 4, term=1)
    fill(log, 5, 9, term=2)
    log.set_commit(8)
    log.trim(6)
    box.flush()

    again = box.reopen()

    assert (again.base_index, again.base_term, again.last_index) == (6, 2, 9)
    assert [e[1] for e in everything(again)] == [7, 8, 9]
    assert [again.term_of(i) for i in (5, 6, 7, 9)] == [None, 2, 2, 2]
    assert box.store.count(table_of(G)) == 3


def test_what_is_not_committed_cannot_be_trimmed(box: Box) -> None:
    log = box.create()
    fill(log, 1, 5)
    log.set_commit(3)

    with pytest.raises(AssertionError, match="committed 3"):
        log.trim(4)


def test_a_long_trim_goes_in_slices_and_the_log_opens_after_each_of_them(box: Box) -> None:
    total = 2 * TRIM_ENTRIES + 700
    log = box.create()
    fill(log, 1, total + 5)
    log.set_commit(total)
    box.flush()
    log.trim(total)

    counts = []
    while box.journal.dirty:
        box.flush()
        counts.append(box.store.count(table_of(G)))
        reopened = Journal(box.store).groups[G]
        assert [e[1] for e in everything(reopened)] == list(range(total + 1, total + 6))

    assert counts[0] == total + 5 - TRIM_ENTRIES, "one slice per commit"
    assert counts[-1] == 5


def test_trimming_goes_on_after_a_restart_in_the_middle(box: Box) -> None:
    total = 3 * TRIM_ENTRIES
    log = box.create()
    fill(log, 1, total)
    log.set_commit(total)
    log.trim(total)
    box.flush()

    box.reopen()
    while box.journal.dirty:
        box.flush()

    assert box.store.count(table_of(G)) == 0
    assert (box.reopen().base_index, box.log.last_index) == (total, total)


def test_a_snapshot_ahead_of_the_log_replaces_it(box: Box) -> None:
    log = box.create()
    fill(log, 1, 5, term=1)
    box.flush()
    log.set_vote(4, None)
    log.reset(20, 3)
    fill(log, 21, 22, term=4)
    box.flush()

    again = box.reopen()

    assert (again.base_index, again.base_term, again.commit, again.last_index) == (20, 3, 20, 22)
    assert everything(again) == [entry(21, 4), entry(22, 4)]
    assert box.store.count(table_of(G)) == 2


def test_a_snapshot_inside_the_log_keeps_the_tail_behind_it(box: Box) -> None:
    log = box.create()
    fill(log, 1, 9)
    box.flush()
    log.reset(6, 1)
    box.flush()

    again = box.reopen()

    assert (again.base_index, again.commit) == (6, 6)
    assert [e[1] for e in everything(again)] == [7, 8, 9]


def test_a_snapshot_whose_term_differs_drops_a_tail_that_contradicts_it(box: Box) -> None:
    log = box.create()
    fill(log, 1, 9, term=1)
    box.flush()
    log.set_vote(2, None)
    log.reset(6, 2)
    box.flush()

    again = box.reopen()

    assert (again.base_index, again.base_term, again.last_index) == (6, 2, 6)
    assert everything(again) == []


def test_a_snapshot_of_a_term_we_never_heard_of_raises_ours(box: Box) -> None:
    """We stopped after the state was installed and before our term was written: the state still proves the term."""
    log = box.create()
    log.set_vote(3, NodeId("n1"))
    fill(log, 1, 2, term=3)
    box.flush()
    log.reset(20, 5)
    box.flush()

    again = box.reopen()

    assert (again.term, again.vote, again.last_term) == (5, None, 5)


def test_a_snapshot_below_the_commit_index_is_never_installed(box: Box) -> None:
    log = box.create()
    fill(log, 1, 9)
    log.set_commit(7)

    with pytest.raises(AssertionError, match="below commit 7"):
        log.reset(7, 1)


def test_a_forgotten_group_leaves_its_promises_and_can_be_created_again_at_once(box: Box) -> None:
    log = box.create()
    log.set_vote(2, NodeId("n3"))
    fill(log, 1, 5, term=2)
    box.flush()
    box.journal.forget(G)
    box.create()
    fill(box.log, 1, 1, term=1)
    box.flush()

    again = box.reopen()

    assert (again.term, again.vote, everything(again)) == (2, "n3", [entry(1, 1)])
    assert Journal(box.store).tombstones == {}


def test_a_forgotten_group_is_remembered_by_a_tombstone_alone(box: Box) -> None:
    log = box.create()
    log.set_vote(2, NodeId("n3"))
    fill(log, 1, 5, term=2)
    log.set_commit(5)
    log.set_configuration(Configuration(4, (NodeId("n2"), NodeId("n3")), 5, 2))
    box.flush()
    box.journal.forget(G)
    box.flush()

    again = Journal(box.store)

    assert again.groups == {}
    assert again.tombstones == {G: Tombstone(2, NodeId("n3"), Configuration(4, (NodeId("n2"), NodeId("n3")), 5, 2))}
    assert box.store.tables() == [TOMBSTONES]
    with pytest.raises(AssertionError, match="continued in a later epoch"):
        again.create(G, Configuration(3, MEMBERS.members))


def test_a_flipped_bit_in_a_tombstone_is_found(box: Box) -> None:
    box.create().set_vote(2, NodeId("n3"))
    box.flush()
    box.journal.forget(G)
    box.flush()
    key = G.to_bytes(4, "big")
    record = bytearray(box.store.get(TOMBSTONES, key) or b"")
    record[-1] ^= 1
    box.store.stage([Put(TOMBSTONES, key, bytes(record))])
    box.store.commit()

    with pytest.raises(Corrupt, match="the tombstone does not match its checksum"):
        Journal(box.store)


def test_disks_of_peers_are_remembered_and_forgotten_durably(box: Box) -> None:
    box.journal.set_pin(NodeId("n2"), "disk-2")
    box.journal.set_pin(NodeId("n3"), "disk-3")
    box.journal.clear_pin(NodeId("n3"))
    box.flush()
    box.store.close()

    journal = Journal(box._open())
    box.store = journal.store
    assert (journal.pin(NodeId("n2")), journal.pin(NodeId("n3"))) == ("disk-2", None)


def test_one_commit_carries_the_writes_of_all_groups(box: Box) -> None:
    for group in (1, 2, 3):
        fill(box.journal.create(GroupId(group), MEMBERS), 1, 2)

    ops = box.journal.take_writes()

    assert {op.table for op in ops} == {"log.1", "log.2", "log.3", HARD, COMMITS}
    with pytest.raises(AssertionError, match="one commit at a time"):
        fill(box.journal.groups[GroupId(1)], 3, 3)
        box.store.stage(ops)
        box.journal.take_writes()


# A change while a commit is under way


def test_entries_replaced_while_their_commit_was_under_way_are_not_durable(box: Box) -> None:
    """The same index, another entry: the commit that ends now wrote the old one."""
    log = box.create()
    fill(log, 1, 10, term=1)
    box.store.stage(box.journal.take_writes())
    log.truncate(8)
    fill(log, 8, 10, term=2)
    box.store.commit()
    box.journal.persisted()

    assert log.durable == 7
    box.flush()
    assert log.durable == 10
    assert [e[2] for e in everything(box.reopen())[7:]] == [2, 2, 2]


def test_a_log_reset_while_a_commit_was_under_way_counts_nothing_of_it(box: Box) -> None:
    log = box.create()
    log.set_vote(2, None)
    fill(log, 1, 30, term=1)
    box.store.stage(box.journal.take_writes())
    log.reset(20, 2)
    fill(log, 21, 25, term=2)
    box.store.commit()
    box.journal.persisted()

    assert log.durable == 20
    box.flush()
    assert log.durable == 25
    assert [e[1] for e in everything(box.reopen())] == [21, 22, 23, 24, 25]


def test_a_log_reset_before_its_appends_were_written_writes_none_of_them(box: Box) -> None:
    log = box.create()
    box.flush()
    fill(log, 1, 5, term=1)
    log.set_vote(2, None)
    log.reset(9, 2)
    fill(log, 10, 10, term=2)

    ops = box.flush()

    assert [op for op in ops if op.table == table_of(G)] == [
        Drop(table_of(G)),
        Extend(table_of(G), [(key(10), encode_entry(G, entry(10, 2)))]),
    ]
    assert everything(box.reopen()) == [entry(10, 2)]


def test_a_tail_kept_by_a_snapshot_is_durable_only_when_its_own_commit_ended(box: Box) -> None:
    log = box.create()
    fill(log, 1, 5)
    box.flush()
    fill(log, 6, 10)
    log.reset(8, 1)

    assert log.durable == 5
    box.flush()
    assert log.durable == 10


def test_a_crash_loses_the_commit_under_way_as_a_whole(tmp_path: Path) -> None:
    disk = SimDisk("d")
    box = Box(lambda: disk)
    log = box.create()
    fill(log, 1, 5, term=1)
    box.flush()
    log.truncate(3)
    log.set_vote(2, NodeId("n2"))
    fill(log, 3, 9, term=2)
    disk.stage(box.journal.take_writes())
    disk.lose_power(keep_pending=False)

    again = box.reopen()

    assert (again.term, again.vote) == (1, None)
    assert [e[1:] for e in everything(again)] == [(i, 1) for i in range(1, 6)]


@pytest.mark.parametrize("rows", [Rows(), Rows(groups_min=1), Rows(groups_min=1, recent_bytes=300, retired_max=2)])
@pytest.mark.parametrize("seed", range(20))
def test_any_history_of_writes_and_crashes_leaves_what_a_naive_list_would_hold(seed: int, rows: Rows) -> None:
    """The journal against a twin that keeps whole lists: after a crash, the state of the last durable commit."""
    rng = Random(seed)
    disk = SimDisk("d")
    box = Box(lambda: disk, rows)
    log = box.create()
    log.set_vote(1, None)
    box.flush()
    now: tuple[int, int, list[Entry]] = (0, 0, [])  # base, commit, entries behind the base
    saved = flying = now
    in_flight = False
    for _ in range(400):
        base, commit, entries = now
        match rng.choice(["append", "append", "truncate", "commit", "trim", "reset", "begin", "end", "crash"]):
            case "append":
                if rng.random() < 0.2:
                    log.set_vote(log.term + 1, None)
                fresh = [entry(base + len(entries) + 1 + i, log.term) for i in range(rng.randint(1, 5))]
                for each in fresh:
                    log.append(each)
                now = base, commit, entries + fresh
            case "truncate" if log.last_index > commit:
                low = rng.randint(commit + 1, log.last_index)
                log.truncate(low)
                now = base, commit, entries[: low - base - 1]
            case "commit" if log.last_index > commit:
                commit = rng.randint(commit, log.last_index)
                log.set_commit(commit)
                now = base, commit, entries
            case "trim" if commit > base:
                index = rng.randint(base, commit)
                log.trim(index)
                now = index, commit, entries[index - base :]
            case "reset":
                index = rng.randint(commit + 1, log.last_index + 3)
                term = log.term_of(index) if rng.random() < 0.7 else None
                kept = log.term_of(index) in (term, log.term)
                log.reset(index, log.term if term is None else term)
                now = index, index, entries[index - base :] if kept else []
            case "begin" if not in_flight and box.journal.dirty:
                disk.stage(box.journal.take_writes())
                disk.begun = True
                flying, in_flight = now, True
            case "end" if in_flight:
                disk.commit()
                box.journal.persisted()
                saved, in_flight = flying, False
            case "crash":
                if in_flight and rng.random() < 0.5:
                    saved = flying
                    disk.lose_power(keep_pending=True)
                else:
                    disk.lose_power(keep_pending=False)
                log, in_flight = box.reopen(), False
                now = (saved[0], log.commit, saved[2])
                assert saved[0] <= log.commit <= max(saved[1], saved[0])
        assert (log.base_index, everything(log)) == (now[0], now[2])
        assert log.durable <= log.last_index


# Damage is found, named, and never repaired


def damaged(box: Box, match: str, *, group: int | None = G, index: int | None = None) -> Corrupt:
    """Opening and reading everything meets the damage."""
    with pytest.raises(Corrupt, match=match) as refusal:
        everything(box.reopen())
    error = refusal.value
    assert (error.group, error.index) == (group, index)
    text = str(error)
    assert str(getattr(box.store, "path", "")) in text, "the error names the place"
    assert f"group {G}" in text
    assert index is None or f"index {index}" in text
    assert "Restore this node from its peers" in text and "new name" in text, "and says what to do"
    return error


@pytest.mark.parametrize("offset", [0, 7, 8, 11, 12, 15])
def test_a_flipped_bit_in_an_entry_is_found_whichever_byte_it_is_in(box: Box, offset: int) -> None:
    log = box.create()
    log.set_vote(1 << 57, None)
    fill(log, 1, 9)
    box.flush()
    value = bytearray(encode_entry(G, entry(5)))
    value[offset] ^= 1
    box.write(Put(table_of(G), key(5), bytes(value)))

    damaged(box, "does not match its checksum", index=5)


def test_a_flipped_bit_deep_in_a_long_log_is_found_when_it_is_read(box: Box) -> None:
    log = box.create()
    fill(log, 1, 5000)
    box.flush()
    box.write(Put(table_of(G), key(77), encode_entry(G, entry(77)) + b"\x01"))

    opened = box.reopen()

    with pytest.raises(Corrupt) as refusal:
        opened.entries(70, 90)
    assert refusal.value.index == 77


def test_an_entry_of_another_group_or_index_is_not_taken_for_this_one(box: Box) -> None:
    log = box.create()
    fill(log, 1, 3)
    box.flush()
    box.write(Put(table_of(G), key(2), encode_entry(GroupId(8), entry(2))))
    damaged(box, "does not match its checksum", index=2)

    box.write(Put(table_of(G), key(2), encode_entry(G, entry(1))))
    damaged(box, "does not match its checksum", index=2)


def test_an_entry_cut_short_is_found(box: Box) -> None:
    log = box.create()
    fill(log, 1, 3)
    box.flush()
    box.write(Put(table_of(G), key(3), b"\0" * 12))

    damaged(box, "the entry is truncated", index=3)


def test_a_missing_entry_in_the_middle_is_found_on_opening(box: Box) -> None:
    log = box.create()
    fill(log, 1, 3000)
    box.flush()
    box.write(Cut(table_of(G), key(41), key(42)))

    damaged(box, "is missing", index=41)


def test_a_missing_first_entry_is_found_on_opening(box: Box) -> None:
    log = box.create()
    fill(log, 1, 9)
    box.flush()
    box.write(Cut(table_of(G), key(1), key(2)))

    damaged(box, "is missing", index=1)


def test_a_lost_end_below_the_commit_index_is_found_on_opening(box: Box) -> None:
    log = box.create()
    fill(log, 1, 9)
    log.set_commit(8)
    box.flush()
    box.write(Cut(table_of(G), key(7), key(10)))

    damaged(box, "entries up to 8 are committed", index=7)


def test_a_flipped_bit_in_the_record_of_term_and_vote_is_found(box: Box) -> None:
    log = box.create()
    log.set_vote(3, NodeId("n2"))
    box.flush()
    record = bytearray(box.store.get(HARD, G.to_bytes(4, "big")) or b"")
    for offset in range(len(record)):
        flipped = bytearray(record)
        flipped[offset] ^= 0x10
        box.write(Put(HARD, G.to_bytes(4, "big"), bytes(flipped)))
        with pytest.raises(Corrupt, match="term, vote and base"):
            box.reopen()
    box.write(Put(HARD, G.to_bytes(4, "big"), bytes(record)[:4]))

    damaged(box, "term, vote and base")


def test_the_record_of_another_group_is_not_taken_for_this_one(box: Box) -> None:
    box.create()
    box.journal.create(GroupId(8), MEMBERS)
    box.flush()
    box.write(Put(HARD, G.to_bytes(4, "big"), box.store.get(HARD, (8).to_bytes(4, "big")) or b""))

    damaged(box, "term, vote and base")


def test_a_flipped_bit_in_the_record_of_commit_indices_is_found(box: Box) -> None:
    log = box.create()
    fill(log, 1, 9)
    log.set_commit(8)
    box.flush()
    number = (G // COMMITS_GROUPS).to_bytes(4, "big")
    record = box.store.get(COMMITS, number) or b""
    for offset in range(len(record)):
        flipped = bytearray(record)
        flipped[offset] ^= 0x10
        box.write(Put(COMMITS, number, bytes(flipped)))
        with pytest.raises(Corrupt, match="commit indices of groups 0 to 63"):
            box.reopen()
    box.write(Put(COMMITS, number, record[:4]))

    with pytest.raises(Corrupt, match="commit indices of groups 0 to 63"):
        box.reopen()


def test_a_group_without_its_commit_index_or_a_commit_index_without_its_group_is_refused(box: Box) -> None:
    box.create()
    box.flush()
    number = (G // COMMITS_GROUPS).to_bytes(4, "big")
    record = box.store.get(COMMITS, number) or b""

    box.write(Cut(COMMITS, number, number + b"\0"))
    damaged(box, "the record of the commit index is missing")

    box.write(Put(COMMITS, number, record), Cut(HARD, G.to_bytes(4, "big"), G.to_bytes(4, "big") + b"\0"))

    damaged(box, "record of term, vote and base is missing")


def test_the_commit_index_is_kept_with_the_next_entry_and_costs_no_record_of_its_own(box: Box) -> None:
    """Two groups of one record, one far away: each comes back with its own."""
    far = GroupId(1000)
    for group in (G, GroupId(8), far):
        fill(box.journal.create(group, MEMBERS), 1, 3)
    box.flush()
    for group, commit in ((G, 1), (GroupId(8), 2), (far, 3)):
        box.journal.groups[group].set_commit(commit)
        fill(box.journal.groups[group], 4, 4)

    ops = box.flush()

    assert sorted(op.table for op in ops) == [COMMITS, COMMITS, "log.1000", "log.7", "log.8"]
    journal = Journal(box.store)
    assert [journal.groups[group].commit for group in (G, GroupId(8), far)] == [1, 2, 3]


def test_a_forgotten_group_leaves_no_commit_index_behind(box: Box) -> None:
    for group in (G, GroupId(8)):
        fill(box.journal.create(group, MEMBERS), 1, 3)
    box.flush()
    box.journal.forget(G)
    box.flush()
    kept = set(Journal(box.store).groups)
    box.journal.forget(GroupId(8))
    box.flush()

    assert kept == {8}
    assert box.store.tables() == [TOMBSTONES]


def test_entries_without_a_record_of_their_term_and_vote_are_not_a_new_group(box: Box) -> None:
    log = box.create()
    log.set_vote(2, NodeId("n2"))
    fill(log, 1, 9, term=2)
    box.flush()
    box.write(Cut(HARD, G.to_bytes(4, "big"), G.to_bytes(4, "big") + b"\0"))

    damaged(box, "record of term, vote and base is missing")


def test_a_term_that_falls_along_the_log_is_found(box: Box) -> None:
    log = box.create()
    log.set_vote(9, None)
    fill(log, 1, 4, term=2)
    fill(log, 5, 9, term=3)
    box.flush()
    box.write(Put(table_of(G), key(7), encode_entry(G, entry(7, 1))))

    damaged(box, "term 1 is below its predecessor's 3", index=7)


def test_a_falling_term_that_halving_steps_over_is_found_when_it_is_read(box: Box) -> None:
    log = box.create()
    log.set_vote(9, None)
    fill(log, 1, 3000, term=3)
    box.flush()
    box.write(Put(table_of(G), key(1002), encode_entry(G, entry(1002, 2))))

    with pytest.raises(Corrupt, match="term 2") as refusal:
        everything(box.reopen())
    assert refusal.value.index == 1002


def test_an_entry_of_a_term_above_the_nodes_own_is_found(box: Box) -> None:
    log = box.create()
    fill(log, 1, 9, term=2)
    box.flush()
    box.write(Put(table_of(G), key(9), encode_entry(G, entry(9, 4))))

    damaged(box, "term 4 is above the node's term 2", index=9)


def test_damage_is_left_as_it_is(box: Box) -> None:
    log = box.create()
    fill(log, 1, 9)
    box.flush()
    box.write(Cut(table_of(G), key(5), key(6)))

    for _ in range(2):
        with pytest.raises(Corrupt):
            box.reopen()
    assert box.store.count(table_of(G)) == 8


# Size


class Counting(SimDisk):
    """How many rows were read."""

    def __init__(self) -> None:
        super().__init__("counting")
        self.rows = 0

    def scan(self, table: str, low: bytes, high: bytes, *, bytes_max: int, count_max: int) -> list[tuple[bytes, bytes]]:
        found = super().scan(table, low, high, bytes_max=bytes_max, count_max=count_max)
        self.rows += len(found)
        return found


def test_memory_does_not_grow_with_the_log() -> None:
    box = Box(lambda: SimDisk("d"))
    log = box.create()
    size = 64 * 1024
    for first in range(1, 400, 20):
        fill(log, first, first + 19, size=size)
        log.set_commit(first + 19)
        box.flush()

    assert log._tail_bytes <= TAILS_BYTES
    assert len(log.tail) * size <= TAILS_BYTES
    assert len(log._runs) == 1
    assert [e[1] for e in everything(log)] == list(range(1, 401))


def test_memory_does_not_grow_with_the_number_of_groups_either() -> None:
    box = Box(lambda: SimDisk("d"))
    logs = [box.journal.create(GroupId(number), MEMBERS) for number in range(1, 65)]
    for first in range(1, 60, 4):
        for log in logs:
            fill(log, first, first + 3, size=16 * 1024)
            log.set_commit(first + 3)
        box.flush()

    assert sum(log._tail_bytes for log in logs) <= TAILS_BYTES
    assert all([e[1] for e in everything(log)] == list(range(1, 61)) for log in logs)


def test_what_is_not_committed_or_not_durable_stays_in_memory() -> None:
    box = Box(lambda: SimDisk("d"))
    log = box.create()
    size = 1024 * 1024
    fill(log, 1, 12, size=size)
    box.flush()

    assert log._tail_first == 1, "nothing is committed yet"
    log.set_commit(12)
    fill(log, 13, 13, size=size)
    box.flush()
    assert 1 < log._tail_first <= 13


def test_a_slice_is_bounded_in_entries_and_bytes_and_has_at_least_one(box: Box) -> None:
    log = box.create()
    fill(log, 1, SLICE_ENTRIES + 10)
    fill(log, SLICE_ENTRIES + 11, SLICE_ENTRIES + 12, size=SLICE_BYTES)
    box.flush()

    for opened in (log, box.reopen()):
        last = opened.last_index
        assert len(opened.entries(1, last)) == SLICE_ENTRIES
        assert [e[1] for e in opened.entries(5, 7)] == [5, 6, 7]
        assert [e[1] for e in opened.entries(5, 90, bytes_max=1)] == [5]
        assert 1 <= len(opened.entries(1, last, bytes_max=1000)) < 100
        assert [e[1] for e in opened.entries(last - 1, last)] == [last - 1]


def test_a_slice_reads_only_its_own_rows() -> None:
    disk = Counting()
    box = Box(lambda: disk)
    log = box.create()
    fill(log, 1, 6000)
    log.set_commit(6000)
    box.flush()
    opened = box.reopen()
    disk.rows = 0

    opened.entries(3000, 3009)

    assert disk.rows == 10


@pytest.mark.slow("writes a million entries")
def test_a_log_of_a_million_entries_opens_without_being_read(tmp_path: Path) -> None:
    store = on_lmdb(tmp_path)
    box = Box(lambda: store)
    log = box.create()
    log.set_vote(40, NodeId("n2"))
    box.flush()
    total, per_term = 1_000_000, 25_000
    for first in range(1, total + 1, 50_000):
        box.write(
            *(
                Put(table_of(G), key(i), encode_entry(G, entry(i, 1 + (i - 1) // per_term)))
                for i in range(first, first + 50_000)
            )
        )
    store.close()

    read = 0
    store = on_lmdb(tmp_path)
    scan = store.scan

    def counted(*args: object, **kwargs: object) -> list[tuple[bytes, bytes]]:
        nonlocal read
        rows: list[tuple[bytes, bytes]] = scan(*args, **kwargs)  # type: ignore[arg-type]
        read += len(rows)
        return rows

    store.scan = counted  # type: ignore[method-assign]
    began = time.perf_counter()
    opened = Journal(store).groups[G]
    seconds = time.perf_counter() - began
    print(f"a log of {total} entries in {len(opened._runs)} terms opened in {seconds:.2f} s, {read} rows read")

    assert (opened.last_index, len(opened._runs)) == (total, total // per_term)
    assert read < 3000, "the newest entries, and the probes that find where terms change"
    assert opened.entries(500_000, 500_001)[1] == entry(500_001, 21)
    store.close()


def test_thousands_of_terms_are_found_again(box: Box) -> None:
    """Elections without end leave a run per entry; halving still finds each."""
    log = box.create()
    for index in range(1, 1500):
        fill(log, index, index, term=2 * index)
    box.flush()

    assert [box.reopen().term_of(i) for i in (1, 700, 1499)] == [2, 1400, 2998]


# Room, and whose directory it is


def test_a_full_journal_is_refused_before_append_and_has_room_after_a_trim(tmp_path: Path) -> None:
    bound = 2 << 20
    box = Box(lambda: LmdbStore.open(tmp_path / "data", node="n1", cluster="c1", bytes_max=bound))
    log = box.create()
    while box.store.room() is None:
        fill(log, log.last_index + 1, log.last_index + 16, size=4096)
        box.flush()
    refusal = box.store.room()
    assert refusal is not None and "data.mdb" in refusal and "trim the log" in refusal

    log.set_commit(log.last_index)
    log.trim(log.last_index - 2)
    while box.journal.dirty:
        box.flush()

    deadline = time.monotonic() + 30
    while box.store.room() is not None:
        assert time.monotonic() < deadline, "the trimmed bytes do not count any more"
        time.sleep(0.01)
    fill(log, log.last_index + 1, log.last_index + 16, size=4096)
    box.flush()
    assert box.reopen().last_index == log.last_index
    box.store.close()


def test_a_second_process_on_the_directory_is_refused(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from holdfast.log.store import LmdbStore; "
        "LmdbStore.open(Path(sys.argv[1]), node='n1', cluster='c1')"
    )
    store = on_lmdb(tmp_path)
    second = subprocess.run(
        [sys.executable, "-c", code, os.fspath(tmp_path / "data")], capture_output=True, text=True, timeout=120
    )
    store.close()

    assert second.returncode != 0
    assert "DirectoryInUse" in second.stderr and f"process {os.getpid()}" in second.stderr
    assert issubclass(DirectoryInUse, StorageError)


def test_the_directory_of_another_node_is_refused(tmp_path: Path) -> None:
    on_lmdb(tmp_path).close()

    with pytest.raises(WrongDirectory, match="belongs to node 'n1' of cluster 'c1', this is node 'n2'"):
        LmdbStore.open(tmp_path / "data", node="n2", cluster="c1")


# As the engine's parent sees it


def test_positions_count_from_the_base_which_stands_for_an_entry() -> None:
    box = Box(lambda: SimDisk("d"))
    log = box.create()
    fill(log, 1, 9, term=1)
    log.set_commit(6)
    log.trim(4)

    positions = Positions(log)
    assert len(positions) == 6
    assert positions[0][1:] == (4, 1)
    assert positions[1] == entry(5)
    assert positions[-1] == entry(9)
    assert [e[1] for e in positions[0:3]] == [4, 5, 6]
    assert [e[1] for e in positions[2:]] == [6, 7, 8, 9]
    positions.deleteEntriesFrom(4)
    assert log.last_index == 7


def test_the_record_is_plain_msgpack_behind_its_checksum(box: Box) -> None:
    log = box.create()
    log.set_vote(3, NodeId("n2"))
    box.flush()

    record = box.store.get(HARD, G.to_bytes(4, "big"))

    assert record is not None
    assert msgpack.unpackb(record[4:])[:2] == [3, "n2"]
