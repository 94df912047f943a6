"""The memory and disk space of the journal are bounded."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import msgpack
import pytest

from holdfast.log.errors import DirectoryInUse, StorageError, WrongDirectory
from holdfast.log.group_log import SLICE_BYTES, SLICE_ENTRIES
from holdfast.log.journal import TAILS_BYTES, Journal
from holdfast.log.messages import GroupId, NodeId
from holdfast.log.positions import Positions
from holdfast.log.records import HARD, table_of
from holdfast.log.store import LmdbStore, Put
from tests.log.journal_box import MEMBERS, Box, G, entry, fill, key, on_lmdb
from tests.log.journals import encode_entry, everything
from tests.sim.disk import SimDisk

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


def test_uncommitted_or_not_durable_entries_stay_in_memory() -> None:
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
    """Endless elections leave a run per entry; the binary search still finds each."""
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


def test_positions_count_from_the_base_which_counts_as_an_entry() -> None:
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


def test_the_record_is_plain_msgpack_after_its_checksum(box: Box) -> None:
    log = box.create()
    log.set_vote(3, NodeId("n2"))
    box.flush()

    record = box.store.get(HARD, G.to_bytes(4, "big"))

    assert record is not None
    assert msgpack.unpackb(record[4:])[:2] == [3, "n2"]
