"""Rows of recent entries: a commit of many groups writes them together, without a visible difference."""

from __future__ import annotations

from zlib import crc32

import msgpack
import pytest

from holdfast.log import journal as journal_module
from holdfast.log.messages import GroupId
from holdfast.log.records import HARD, Configuration, table_of
from holdfast.log.rows import RECENT, Rows, decode_row, place_in
from holdfast.log.store import Extend, Put, Store
from tests.log.journals import everything
from tests.log.row_box import MANY, MEMBERS, Box, row_key

ALWAYS = Rows(groups_min=1)


def go_on_without_the_last(box: Box) -> None:
    """All other groups write much, and are trimmed."""
    for _ in range(100):
        box.append(*MANY[:-1])
        box.flush()
        for group in MANY[:-1]:
            box[group].set_commit(box[group].last_index)
            if box[group].last_index > 5:
                box[group].trim(box[group].commit - 5)
    box.settle()


# Where entries go


def test_a_commit_of_many_groups_writes_one_row_and_none_of_their_tables(store: Store) -> None:
    box = Box(store)
    box.append()

    ops = box.flush()

    assert [type(op) for op in ops if op.table == RECENT] == [Extend]
    assert not [op for op in ops if op.table.startswith("log.")]
    written = box.contents
    box.reopen()
    assert box.contents == written
    assert all(len(entries) == 1 for entries in written.values())
    assert all(log.durable == log.last_index == 1 for log in box.journal.groups.values())


def test_a_commit_of_few_groups_writes_to_their_own_tables(store: Store) -> None:
    box = Box(store)
    box.append(1, 2, 3)

    box.flush()

    assert box.numbers == []
    assert [store.count(table_of(group)) for group in MANY[:4]] == [1, 1, 1, 0]


def test_a_group_written_to_its_own_table_also_files_its_rows(store: Store) -> None:
    box = Box(store)
    for _ in range(3):
        box.append()
        box.flush()
    box.append(5)

    box.flush()

    assert store.count(table_of(GroupId(5))) == 4
    assert store.count(table_of(GroupId(4))) == 0
    written = box.contents
    box.reopen()
    assert box.contents == written


def test_a_large_part_is_not_written_twice(store: Store) -> None:
    box = Box(store)
    box.append(*MANY[:-1])
    box.append(MANY[-1], size=20_000)

    ops = box.flush()

    assert sum(len(value) for op in ops if type(op) is Extend for _, value in op.items) < 25_000
    assert store.count(table_of(MANY[-1])) == 1
    assert box.numbers == [1]


def test_a_row_is_bounded(store: Store) -> None:
    box = Box(store, Rows(row_bytes_max=1000))
    box.append(size=300)

    box.flush()

    assert [store.count(table_of(group)) for group in MANY] == [0, 0, 0, 1, 1, 1, 1, 1]
    written = box.contents
    box.reopen()
    assert box.contents == written


def test_entries_are_filed_a_few_at_a_time_and_are_not_written_again(store: Store) -> None:
    box = Box(store, Rows(recent_bytes=20_000))
    filed, written = [], 0
    for _ in range(200):
        box.append()
        ops = box.flush()
        items = [item for op in ops if type(op) is Extend and op.table != RECENT for item in op.items]
        assert all(place_in(value) for _, value in items)
        filed.append(len(items))
        written += sum(len(value) for op in ops if type(op) is Extend for _, value in op.items)

    assert sum(filed) > 8 * 150, "20,000 bytes are some 20 rows"
    assert max(filed) < 8 * 30
    assert written < 200 * 8 * (110 + 12 + 20 + 10)
    assert box.numbers == list(range(1, 201))
    contents = box.contents
    box.reopen()
    assert box.contents == contents


def test_opening_reads_the_newest_rows_and_counts_the_others(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    box = Box(store, Rows(recent_bytes=5_000, filed_every=8))
    for _ in range(100):
        box.append()
        box.flush()
    decoded: list[bytes] = []

    def decode(key: bytes, value: bytes) -> object:
        decoded.append(key)
        return decode_row(key, value)

    monkeypatch.setattr(journal_module, "decode_row", decode)
    box.reopen()

    assert decoded == [row_key(number) for number in range(101 - len(decoded), 101)]
    assert 5 <= len(decoded) < 40


def test_rows_are_deleted_when_no_group_needs_them(store: Store) -> None:
    box = Box(store, Rows(recent_bytes=5_000, retired_max=16))
    for _ in range(100):
        box.append()
        box.flush()
    for group in MANY:
        box[group].set_commit(90)
        box[group].trim(80 if group == 3 else 90)

    commits = box.settle()

    assert 81 - 30 < box.numbers[0] <= 81, "a group knows of some dozens of entries together where they begin"
    assert box.numbers[-1] == 100
    assert 3 <= commits <= 10, "not all at once"
    contents = box.contents
    box.reopen()
    assert box.contents == contents
    for group in MANY:
        box[group].set_commit(100)
        box[group].trim(100)
    box.settle()
    assert box.numbers == []
    box.append()
    box.flush()
    box.reopen()
    assert box.numbers == [101]
    assert all([e[1] for e in entries] == [101] for entries in box.contents.values())


def test_a_group_that_is_not_trimmed_does_not_keep_rows_for_ever(store: Store) -> None:
    box = Box(store, Rows(recent_bytes=5_000, kept_bytes=20_000, moved_max=4))
    for number in range(400):
        box.append(*(MANY if number % 50 < 3 else MANY[:-1]))  # The last group writes little.
        if number % 20 == 19:
            for group in MANY[:-1]:
                box[group].set_commit(box[group].last_index - 5)
                box[group].trim(box[group].commit)
        box[MANY[-1]].set_commit(box[MANY[-1]].last_index)
        box.flush()
    contents = box.contents

    assert len(box.numbers) < 80
    assert [e[1] for e in contents[MANY[-1]]] == list(range(1, 25))
    assert place_in(store.get(table_of(MANY[-1]), row_key(1)) or b"") is None, "it is in the table itself"
    box.reopen()
    assert box.contents == contents


def test_an_entry_that_is_never_committed_does_not_keep_rows_for_ever(store: Store) -> None:
    box = Box(store, Rows(recent_bytes=2_000, kept_bytes=5_000))
    box.append()
    box.flush()
    go_on_without_the_last(box)

    assert box.numbers[0] > 50
    contents = box.contents
    assert [e[1] for e in contents[MANY[-1]]] == [1]
    box.reopen()
    assert box.contents == contents
    box[MANY[-1]].truncate(1)  # It may still be truncated.
    box.append(MANY[-1])
    box.settle()
    contents = box.contents
    box.reopen()
    assert box.contents == contents


def test_sparse_rows_are_cleared_without_other_activity(store: Store) -> None:
    box = Box(store, Rows(recent_bytes=2_000, kept_bytes=5_000, moved_max=1))
    for number in range(100):
        box.append(*(MANY if number < 3 else MANY[2:]))
        box.flush()
    for group in MANY[2:]:
        box[group].set_commit(100)
        box[group].trim(100)

    box.settle()

    assert len(box.numbers) < 10
    assert [len(entries) for entries in box.contents.values()] == [3, 3, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("placed", [False, True])
def test_a_group_that_writes_alone_does_not_keep_rows_for_ever_after_opening(store: Store, *, placed: bool) -> None:
    box = Box(store, Rows(recent_bytes=2_000, kept_bytes=5_000))
    if placed:
        box.append()
        box.flush()
    for _ in range(6_000):
        box.append(MANY[-1], size=10)
        box.flush()
    box.reopen()
    go_on_without_the_last(box)

    assert len(box.numbers) < 20
    assert len(everything(box[MANY[-1]])) == 6_000 + placed


def test_unfiled_entries_stay_in_memory_and_others_are_read_from_their_place(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "TAILS_BYTES", 2_000)
    monkeypatch.setattr(journal_module, "TAIL_BYTES_MIN", 1_000)
    box = Box(store, Rows(recent_bytes=8_000))
    for _ in range(100):
        box.append()
        for group in MANY:
            box[group].set_commit(box[group].last_index)
        box.flush()
        for group in MANY:
            assert [e[1] for e in everything(box[group])] == list(range(1, box[group].last_index + 1))

    assert all(log._tail_bytes < 12_000 for log in box.journal.groups.values())


def test_the_store_is_not_asked_for_rows_while_the_journal_is_open(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = Box(store)
    for _ in range(5):
        box.append()
        box.flush()

    monkeypatch.setattr(type(store), "scan", lambda *_, **__: pytest.fail("read"))

    assert all(len(entries) == 5 for entries in box.contents.values())


def test_rows_of_the_previous_format_are_readable(store: Store) -> None:
    box = Box(store)
    for _ in range(3):
        box.append()
        box.flush()
    written = box.contents
    for number in (1, 2, 3):  # The contents preceded the entries.
        value = store.get(RECENT, row_key(number)) or b""
        size = int.from_bytes(value[4:8], "big") ^ 1 << 31
        before = value[:4] + size.to_bytes(4, "big") + value[-size:] + value[8:-size]
        box.write(Put(RECENT, row_key(number), before))

    box.reopen()
    assert box.contents == written
    for group in MANY:
        box.append(group)
        box.flush()  # Alone: it is filed, with the places of its entries in those rows.
    written = box.contents
    box.reopen()

    assert box.contents == written
    assert all(store.count(table_of(group)) == 4 for group in MANY)


# What is over does not come back


def test_truncated_entries_do_not_come_back_from_a_row(store: Store) -> None:
    box = Box(store, ALWAYS)
    for _ in range(5):
        box.append()
        box.flush()
    box[3].truncate(3)
    box.flush()
    box.append(1, 2)
    box.flush()

    box.reopen()

    assert [e[1] for e in everything(box[3])] == [1, 2]
    assert 1 in box.numbers, "the rows are still there"


def test_entries_that_replace_truncated_ones_are_kept(store: Store) -> None:
    box = Box(store, ALWAYS)
    for _ in range(5):
        box.append()
        box.flush()
    box[3].truncate(3)
    box[3].set_vote(2, None)
    box.append(3)
    box.flush()
    box.append()
    box.flush()

    box.reopen()

    assert [e[1:] for e in everything(box[3])] == [(1, 1), (2, 1), (3, 2), (4, 2)]


def test_entries_truncated_before_their_commit_ended_do_not_come_back(store: Store) -> None:
    box = Box(store, ALWAYS)
    box.append()
    ops = box.journal.take_writes()
    box[3].truncate(1)  # A newer leader, while the fsync runs.
    store.stage(ops)
    store.commit()
    box.journal.persisted()
    assert box[3].durable == 0
    box.flush()

    box.reopen()

    assert everything(box[3]) == []


def test_a_log_that_was_replaced_by_a_state_does_not_come_back_from_a_row(store: Store) -> None:
    box = Box(store, ALWAYS)
    for _ in range(5):
        box.append()
        box.flush()
    box[3].set_vote(2, None)
    box[3].reset(4, 2)  # Our entry 4 was another one.
    box[4].reset(9, 1)
    box.flush()
    box.append()
    box.flush()

    box.reopen()

    assert [e[1:] for e in everything(box[3])] == [(5, 2)]
    assert [e[1:] for e in everything(box[4])] == [(10, 1)]


@pytest.mark.parametrize("base", [3, 5])
def test_a_log_can_be_trimmed_past_its_filed_entries(store: Store, base: int) -> None:
    box = Box(store, ALWAYS)
    for _ in range(5):
        box.append()
        box.flush()
    box[3].set_commit(5)
    box[3].trim(base)
    box.flush()
    box.append()
    box.flush()

    box.reopen()

    assert [e[1] for e in everything(box[3])] == list(range(base + 1, 7))
    assert store.count(table_of(GroupId(3))) <= 5 - base + 1


def test_a_forgotten_group_that_begins_again_finds_nothing_of_its_own_in_rows(store: Store) -> None:
    box = Box(store, ALWAYS)
    for _ in range(3):
        box.append()
        box.flush()
    box.journal.forget(GroupId(3))
    box.flush()
    box.reopen()
    assert GroupId(3) not in box.journal.groups

    box.journal.create(GroupId(3), Configuration(1, MEMBERS.members, 2, 1))
    box.append()
    box.flush()
    box.reopen()

    assert [e[1] for e in everything(box[3])] == [1]
    assert [e[1] for e in everything(box[4])] == [1, 2, 3, 4]


def test_row_numbers_continue_when_no_row_is_left(store: Store) -> None:
    box = Box(store, ALWAYS)
    box.append()
    box.flush()
    for group in MANY:  # All are filed, and their marks are past row 1.
        box[group].truncate(1)
    box.settle()
    assert box.numbers == []
    box.reopen()

    box.append()
    box.flush()
    box.reopen()

    assert box.numbers == [2]
    assert all(len(entries) == 1 for entries in box.contents.values())


def test_a_record_of_the_format_before_rows_is_readable(store: Store) -> None:
    box = Box(store)
    box.append(1)
    box.flush()
    hard = store.get(HARD, MANY[0].to_bytes(4, "big"))
    assert hard is not None
    record = msgpack.packb(msgpack.unpackb(hard[4:])[:-1])
    checksum = crc32(record, MANY[0]).to_bytes(4, "big")
    box.write(Put(HARD, MANY[0].to_bytes(4, "big"), checksum + record))

    box.reopen()
    box.append()
    box.flush()
    box.reopen()

    assert [e[1] for e in everything(box[1])] == [1, 2]


def test_commit_indices_of_all_groups_are_stored_with_every_eighth_commit_even_without_rows(
    store: Store,
) -> None:
    box = Box(store, Rows(group_bytes_max=50))
    for number in range(1, 41):
        for group in MANY:
            # One group writes rarely, and never when the others' indices are stored.
            if group != MANY[0] or number % 8 == 3:
                box.append(group)
                box[group].set_commit(box[group].last_index)
        box.flush()

    before = {group: box[group].commit for group in MANY}
    box.reopen()
    assert all(before[group] - 8 <= box[group].commit <= before[group] for group in MANY)
    assert box[MANY[0]].commit == before[MANY[0]] > 0
