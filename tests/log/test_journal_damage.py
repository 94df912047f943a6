"""Damage on the disk is found, reported with its place, and left unchanged."""

from __future__ import annotations

import pytest

from holdfast.log.errors import Corrupt
from holdfast.log.journal import Journal
from holdfast.log.messages import GroupId, NodeId
from holdfast.log.records import COMMITS, COMMITS_GROUPS, HARD, TOMBSTONES, table_of
from holdfast.log.store import Cut, Put
from tests.log.journal_box import MEMBERS, Box, G, entry, fill, key
from tests.log.journals import encode_entry, everything

# Damage is found, named, and never repaired


def damaged(box: Box, match: str, *, group: int | None = G, index: int | None = None) -> Corrupt:
    """Opening and reading everything finds the damage."""
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
    """Two groups of one record, and a distant one: each gets its own back."""
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
