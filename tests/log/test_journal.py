"""The journal: entries are read back as appended, or the node learns where they are not."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from holdfast.log.errors import Corrupt
from holdfast.log.group_log import TRIM_ENTRIES
from holdfast.log.journal import Journal
from holdfast.log.messages import Entry, GroupId, NodeId
from holdfast.log.records import COMMITS, HARD, TOMBSTONES, Configuration, Tombstone, table_of
from holdfast.log.rows import Rows
from holdfast.log.store import Drop, Extend, Put
from tests.log.journal_box import MEMBERS, Box, G, entry, fill, key
from tests.log.journals import encode_entry, everything
from tests.sim.disk import SimDisk

# What is written is read back


def test_entries_term_vote_commit_and_configuration_survive_reopening(box: Box) -> None:
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


def test_entries_are_readable_before_they_are_durable_and_the_mark_shows_it(box: Box) -> None:
    log = box.create()
    fill(log, 1, 3)

    assert everything(log) == [entry(i) for i in (1, 2, 3)]
    assert log.durable == 0
    box.flush()
    assert log.durable == 3


def test_the_durable_mark_covers_only_entries_of_the_commit(box: Box) -> None:
    log = box.create()
    fill(log, 1, 3)
    box.store.stage(box.journal.take_writes())
    fill(log, 4, 5)
    box.store.commit()
    box.journal.persisted()

    assert log.durable == 3
    box.flush()
    assert log.durable == 5


def test_a_truncated_tail_can_be_written_again(box: Box) -> None:
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
    """The record and its entries are in one transaction, or the entries in an earlier one."""
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


def test_a_trimmed_log_begins_after_its_base(box: Box) -> None:
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


def test_uncommitted_entries_cannot_be_trimmed(box: Box) -> None:
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


def test_trimming_continues_after_a_restart_in_the_middle(box: Box) -> None:
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


def test_a_snapshot_inside_the_log_keeps_the_tail_after_it(box: Box) -> None:
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


def test_a_snapshot_of_an_unknown_term_raises_the_node_s_term(box: Box) -> None:
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
def test_any_history_of_writes_and_crashes_matches_a_naive_list(seed: int, rows: Rows) -> None:
    """The journal against a model that keeps whole lists: after a crash, the state of the last durable commit."""
    rng = Random(seed)
    disk = SimDisk("d")
    box = Box(lambda: disk, rows)
    log = box.create()
    log.set_vote(1, None)
    box.flush()
    now: tuple[int, int, list[Entry]] = (0, 0, [])  # base, commit, entries after the base
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
