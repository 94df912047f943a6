"""Damaged and missing rows are refused."""

from __future__ import annotations

import pytest

from holdfast.log import group_log
from holdfast.log.errors import Corrupt
from holdfast.log.messages import GroupId
from holdfast.log.records import FILED, HARD, table_of
from holdfast.log.rows import RECENT, Rows, decode_row, encode_row, place_in
from holdfast.log.store import Cut, Drop, Put, Store
from tests.log.journals import encode_entry
from tests.log.row_box import MANY, Box, row_key
from tests.sim.disk import SimDisk

# Damage


def test_any_flipped_bit_in_a_row_is_refused() -> None:
    disk = SimDisk("d")
    box = Box(disk)
    box.append(size=4)
    box.flush()
    for at in range(8 * len(disk.get(RECENT, row_key(1)) or b"")):
        disk.flip_bit(RECENT, row_key(1), at)
        with pytest.raises(Corrupt, match=r"simulated disk.* does not match its checksum"):
            box.reopen()
        disk.flip_bit(RECENT, row_key(1), at)
    box.reopen()


def test_a_damaged_entry_in_a_row_is_named(store: Store) -> None:
    box = Box(store)
    box.append()
    box.flush()
    box.append()
    box.flush()
    value = store.get(RECENT, row_key(2))
    assert value is not None
    damaged = value.replace(b"\x005.2.1", b"\x005.2.9")
    assert damaged != value
    box.write(Put(RECENT, row_key(2), damaged))

    with pytest.raises(Corrupt, match="Restore this node from its peers") as refusal:
        box.reopen()

    assert (refusal.value.group, refusal.value.index) == (5, 2)


def test_any_flipped_bit_of_a_place_or_its_entry_is_refused() -> None:
    disk = SimDisk("d")
    box = Box(disk, Rows(groups_min=1, recent_bytes=0, filed_every=1))
    for _ in range(3):
        box.append(size=4)
        box.flush()
    assert disk.filed == 4
    place = place_in(disk.get(table_of(GroupId(3)), row_key(2)) or b"")
    assert place is not None and place.row == 2
    flips = [(table_of(GroupId(3)), row_key(2), bit) for bit in range(8 * 20)]
    flips += [(RECENT, row_key(2), bit) for bit in range(8 * place.offset, 8 * (place.offset + place.length))]
    flips += [(FILED, b"rows", bit) for bit in range(8 * 20)]
    for flip in flips:
        disk.flip_bit(*flip)
        with pytest.raises(Corrupt, match="simulated disk"):
            box.reopen()
        disk.flip_bit(*flip)
    box.reopen()


def test_a_place_that_points_to_a_truncated_entry_is_refused() -> None:
    disk = SimDisk("d")
    box = Box(disk, Rows(groups_min=1, recent_bytes=0))
    box.append(2)
    box.flush()
    box.append(1)
    box.flush()
    box[1].truncate(1)
    box[1].set_vote(2, None)
    box.flush()
    box.append(1)
    box.append(2)
    box.flush()
    place = place_in(disk.get(table_of(GroupId(1)), row_key(1)) or b"")
    assert place is not None and place.row == 3, "and in row 2 there is an entry of that index, with a checksum"

    disk.flip_bit(table_of(GroupId(1)), row_key(1), 8 * 7)

    with pytest.raises(Corrupt, match="group 1, index 1: the entry does not match its checksum"):
        box.reopen()


def test_missing_oldest_rows_are_noticed(store: Store) -> None:
    box = Box(store, Rows(recent_bytes=1_000, filed_every=1))
    for _ in range(20):
        box.append()
        box.flush()
    box.write(Cut(RECENT, row_key(1), row_key(4)))
    with pytest.raises(Corrupt, match="row 1 of the recent entries is missing"):
        box.reopen()
    box.write(Drop(RECENT))
    with pytest.raises(Corrupt, match="row 1 of the recent entries is missing"):
        box.reopen()


def test_a_row_that_a_table_points_to_and_that_is_missing_is_refused(store: Store) -> None:
    box = Box(store, Rows(groups_min=1, recent_bytes=0, filed_every=1))
    for _ in range(3):
        box.append()
        box.flush()
    box.write(Cut(RECENT, row_key(3), row_key(4)))

    with pytest.raises(Corrupt, match="row 3 of the recent entries, which holds the entry, is missing") as refusal:
        box.reopen()

    assert (refusal.value.group, refusal.value.index) == (1, 3)


def test_a_missing_row_is_refused(store: Store) -> None:
    box = Box(store)
    for _ in range(3):
        box.append()
        box.flush()
    box.write(Cut(RECENT, row_key(2), row_key(3)))

    with pytest.raises(Corrupt, match="row 2 of the recent entries is missing"):
        box.reopen()


def test_a_hole_between_a_table_and_the_rows_is_refused(store: Store) -> None:
    box = Box(store)
    for _ in range(3):
        box.append()
        box.flush()
    box.write(Cut(RECENT, row_key(1), row_key(2)))

    with pytest.raises(Corrupt, match="the entry is missing") as refusal:
        box.reopen()

    assert (refusal.value.group, refusal.value.index) == (1, 1)


def test_rows_do_not_hide_the_loss_of_a_table_during_a_trim(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_log, "TRIM_ENTRIES", 1)
    box = Box(store)
    for _ in range(4):
        box.append()
        box.flush()
    box.append(3)  # It is filed, with its entries in rows.
    box[3].set_commit(4)
    box[3].trim(3)
    box.flush()
    box.write(Drop(table_of(GroupId(3))))

    with pytest.raises(Corrupt, match="the entry is missing; the log begins after entry 3") as refusal:
        box.reopen()

    assert (refusal.value.group, refusal.value.index) == (3, 2)


def test_a_row_of_a_group_without_its_record_is_refused(store: Store) -> None:
    box = Box(store)
    box.append()
    box.flush()
    box.write(Cut(HARD, MANY[2].to_bytes(4, "big"), MANY[3].to_bytes(4, "big")))

    with pytest.raises(Corrupt, match="the record of term, vote and base is missing") as refusal:
        box.reopen()

    assert refusal.value.group == MANY[2]


def test_a_falling_term_in_a_row_is_refused(store: Store) -> None:
    box = Box(store)
    log = box[3]
    log.set_vote(2, None)
    for _ in range(2):
        box.append()
        box.flush()
    value = store.get(RECENT, row_key(2))
    assert value is not None
    parts = decode_row(row_key(2), value)
    assert parts is not None
    values = [value[start:stop] for _, _, places in parts for start, stop in places]
    values[2] = encode_entry(GroupId(3), (values[2][12:], 2, 1))
    contents = [field for group, first, places in parts for field in (group, first, [b - a for a, b in places])]
    box.write(Put(RECENT, row_key(2), encode_row(row_key(2), contents, values)))

    with pytest.raises(Corrupt, match="the entry's term 1 is below its predecessor's 2") as refusal:
        box.reopen()

    assert (refusal.value.group, refusal.value.index) == (3, 2)
