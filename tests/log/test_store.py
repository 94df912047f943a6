"""The store on real files: durable batches, bounds, and a refusal for every unsuitable directory."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.log import lmdb_file
from holdfast.log.errors import NoSpace
from holdfast.log.store import Cut, Drop, Extend, LmdbStore, Op, Put, Store
from tests.log.stores import WAIT_S, child, close_after, key, next_line, open_store, scan_all, write


def await_room(store: Store, *, wanted: bool) -> str | None:
    deadline = time.monotonic() + WAIT_S
    while (store.room() is None) != wanted and time.monotonic() < deadline:
        time.sleep(0.02)
    return store.room()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LmdbStore]:
    store = open_store(tmp_path / "data")
    yield store
    store.close()


# Tables


def test_a_committed_batch_is_read_back_after_reopening(tmp_path: Path) -> None:
    close_after(tmp_path, Put("a", b"k1", b"one"), Put("a", b"k2", b"two"), Put("b", b"k", b"other"))

    store = open_store(tmp_path)

    assert store.get("a", b"k1") == b"one"
    assert store.get("b", b"k") == b"other"
    assert store.first("a") == (b"k1", b"one")
    assert store.last("a") == (b"k2", b"two")
    assert store.count("a") == 2
    assert store.tables() == ["a", "b"]
    store.close()


def test_an_unknown_table_reads_as_empty(store: LmdbStore) -> None:
    assert store.get("x", b"k") is None
    assert scan_all(store, "x") == []
    assert store.first("x") is None
    assert store.last("x") is None
    assert store.count("x") == 0
    assert store.tables() == []
    write(store, Cut("x", b"a", b"b"), Drop("x"))
    assert store.tables() == []


def test_reads_do_not_see_staged_data(store: LmdbStore) -> None:
    write(store, Put("a", b"k", b"old"), Put("a", b"l", b"old"), Put("gone", b"k", b"still here"))

    store.stage([Put("a", b"k", b"new"), Put("b", b"k", b"new"), Cut("a", b"l", b"m"), Drop("gone")])

    assert scan_all(store, "a") == [(b"k", b"old"), (b"l", b"old")]
    assert store.get("gone", b"k") == b"still here"
    assert store.tables() == ["a", "gone"]
    store.commit()
    assert scan_all(store, "a") == [(b"k", b"new")]
    assert store.tables() == ["a", "b"]


def test_a_scan_stops_at_its_end_its_bytes_and_its_count_but_returns_one_item(store: LmdbStore) -> None:
    write(store, *(Put("a", key(i), b"v" * 92) for i in range(20)))

    def found(low: int, high: int, *, bytes_max: int = 1 << 30, count_max: int = 1 << 30) -> list[int]:
        items = store.scan("a", key(low), key(high), bytes_max=bytes_max, count_max=count_max)
        return [int.from_bytes(k, "big") for k, _ in items]

    assert found(3, 7) == [3, 4, 5, 6]
    assert found(18, 99) == [18, 19]
    assert found(5, 5) == []
    assert found(0, 20, count_max=2) == [0, 1]
    assert found(0, 20, bytes_max=300) == [0, 1, 2]
    assert found(0, 20, bytes_max=299) == [0, 1]
    assert found(0, 20, bytes_max=1) == [0]
    assert found(0, 20, count_max=0) == [0]
    assert found(20, 30, bytes_max=1) == []


def test_a_cut_deletes_its_range_and_nothing_else(store: LmdbStore) -> None:
    write(store, *(Put("a", key(i), b"%d" % i) for i in range(1, 2001)))

    write(store, Cut("a", key(0), key(500)), Cut("a", key(1500), key(9999)), Cut("a", key(700), key(700)))
    write(store, Cut("a", key(800), key(801)))

    left = [int.from_bytes(k, "big") for k, _ in scan_all(store, "a")]
    assert left == [*range(500, 800), *range(801, 1500)]
    write(store, Cut("a", b"", key(10_000)))
    assert store.count("a") == 0
    assert store.tables() == []


def test_a_dropped_table_can_come_back_at_once_and_later(store: LmdbStore) -> None:
    write(store, Put("a", b"old", b"1"), Put("b", b"old", b"1"))

    write(store, Drop("a"), Put("a", b"new", b"2"), Drop("b"), Put("c", b"k", b"1"), Drop("c"))
    assert scan_all(store, "a") == [(b"new", b"2")]
    assert store.tables() == ["a"]
    write(store, Put("b", b"new", b"2"), Put("c", b"k", b"2"))

    assert scan_all(store, "b") == [(b"new", b"2")]
    assert scan_all(store, "c") == [(b"k", b"2")]


def test_an_item_wrongly_marked_as_last_is_stored_in_order(store: LmdbStore) -> None:
    write(store, Extend("log", [(key(number), b"old") for number in (1, 5, 9)]))

    write(store, Extend("log", [(key(5), b"new")]), Extend("log", [(key(7), b"late"), (key(11), b"end")]))

    found = [(key(1), b"old"), (key(5), b"new"), (key(7), b"late"), (key(9), b"old"), (key(11), b"end")]
    assert scan_all(store, "log") == found


def test_a_table_written_at_its_end_fills_its_pages(store: LmdbStore) -> None:
    for low in range(0, 600, 30):
        numbers = range(low, low + 30)
        write(store, Extend("hinted", [(key(number), b"x" * 1000) for number in numbers]))
        write(store, *[Put("plain", key(number), b"x" * 1000) for number in numbers])

    pages = {name: store._reader.stat(store._tables[name])["leaf_pages"] for name in ("hinted", "plain")}

    assert pages["hinted"] < 0.8 * pages["plain"]


def test_more_tables_come_and_go_than_may_be_open_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmdb_file, "TABLES_MAX", 8)
    store = open_store(tmp_path)

    for i in range(30):
        write(store, Put(f"t{i}", b"k", b"v"))
        assert store.get(f"t{i}", b"k") == b"v"
        write(store, Drop(f"t{i}"))

    assert store.tables() == []
    store.close()


def test_a_table_dropped_before_the_map_grew_is_gone_and_can_come_back(tmp_path: Path) -> None:
    store = LmdbStore.open(tmp_path, node="n1", cluster="c1", map_bytes=64 << 10)
    write(store, Put("a", b"old", b"1"), Put("b", b"old", b"1"))
    write(store, Drop("a"), Drop("b"))

    write(store, Put("a", b"new", b"2"), Put("big", b"k", bytes(1 << 20)))

    assert scan_all(store, "a") == [(b"new", b"2")]
    assert store.tables() == ["a", "big"]
    store.close()
    store = open_store(tmp_path)
    assert store.tables() == ["a", "big"]
    store.close()


@pytest.mark.parametrize("seed", range(4))
def test_any_batches_match_a_dictionary(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    model: dict[str, dict[bytes, bytes]] = {}
    store = LmdbStore.open(tmp_path, node="n1", cluster="c1", map_bytes=64 << 10)

    def some_op() -> Op:
        table = rng.choice("abc")
        low, high = key(rng.randrange(60)), key(rng.randrange(60))
        roll = rng.random()
        if roll < 0.3:
            items = sorted({key(rng.randrange(60)): bytes([rng.randrange(256)]) * 900 for _ in range(4)}.items())
            model.setdefault(table, {}).update(items)
            return Extend(table, items)
        if roll < 0.75:
            value = bytes([rng.randrange(256)]) * rng.choice([0, 10, 1000, 9000, 70_000])
            model.setdefault(table, {})[low] = value
            return Put(table, low, value)
        if roll < 0.95:
            model[table] = {k: v for k, v in model.get(table, {}).items() if not low <= k < high}
            return Cut(table, low, high)
        model.pop(table, None)
        return Drop(table)

    for _ in range(60):
        for _ in range(rng.randrange(1, 3)):
            store.stage([some_op() for _ in range(rng.randrange(1, 12))])
        store.commit()
        for table in "abc":
            assert scan_all(store, table) == sorted(model.get(table, {}).items())
            assert store.count(table) == len(model.get(table, {}))
        assert store.tables() == sorted(table for table, items in model.items() if items)
        if rng.random() < 0.1:
            store.close()
            store = LmdbStore.open(tmp_path, node="n1", cluster="c1", map_bytes=64 << 10)
    store.close()


@pytest.mark.slow("writes a million entries")
def test_a_million_entries_are_counted_without_being_read(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for start in range(0, 1_000_000, 100_000):
        write(store, *[Put("log", key(i), b"entry") for i in range(start, start + 100_000)])
    store.close()

    before = resource.getrusage(resource.RUSAGE_SELF)
    started = time.perf_counter()
    store = open_store(tmp_path)
    assert store.count("log") == 1_000_000
    last = store.last("log")
    print(f"opened and counted in {(time.perf_counter() - started) * 1000:.1f} ms")
    after = resource.getrusage(resource.RUSAGE_SELF)

    assert last == (key(999_999), b"entry")
    # The file has thousands of pages. Reading them all would fault them in, many at a time at most.
    assert (tmp_path / "data.mdb").stat().st_size > 5000 * resource.getpagesize()
    assert after.ru_minflt + after.ru_majflt - before.ru_minflt - before.ru_majflt < 600
    store.close()


def test_a_key_that_lmdb_cannot_hold_stages_nothing(store: LmdbStore) -> None:
    for bad in (Put("a", b"", b"v"), Put("a", b"k" * 512, b"v"), Put("node", b"k", b"v"), Drop("node")):
        with pytest.raises(AssertionError):
            store.stage([Put("a", b"good", b"v"), bad])

    write(store, Put("a", b"k" * 511, b"v"))

    assert store.count("a") == 1


# Durability and threads

WRITER = """
import sys
from pathlib import Path
from holdfast.log.store import LmdbStore, Put
store = LmdbStore.open(Path(sys.argv[1]), node="n1", cluster="c1")
store.stage([Put("log", b"%d" % i, b"committed") for i in range(100)])
store.commit()
store.stage([Put("log", b"0", b"staged"), Put("log", b"later", b"staged"), Put("other", b"k", b"staged")])
print("committed one, staged another", flush=True)
sys.stdin.read()
"""


def test_kill_9_keeps_committed_data_and_no_staged_data(tmp_path: Path) -> None:
    with child(WRITER, os.fspath(tmp_path)) as writer:
        assert next_line(writer) == "committed one, staged another"
        writer.send_signal(signal.SIGKILL)
        writer.wait(WAIT_S)

    store = open_store(tmp_path)

    assert sorted(scan_all(store, "log")) == sorted((b"%d" % i, b"committed") for i in range(100))
    assert store.tables() == ["log"]
    assert store.incarnation == 2
    store.close()


COUNTER = """
import sys
from pathlib import Path
from holdfast.log.store import Cut, LmdbStore, Put
store = LmdbStore.open(Path(sys.argv[1]), node="n1", cluster="c1", map_bytes=64 << 10)
number = 0
while True:
    number += 1
    store.stage([Put(t, number.to_bytes(8, "big"), bytes(300)) for t in ("a", "b")])
    store.stage([Cut("a", bytes(8), max(0, number - 50).to_bytes(8, "big"))])
    store.commit()
    print(number, flush=True)
"""


def test_kill_9_at_any_moment_leaves_whole_batches_and_every_reported_one(tmp_path: Path) -> None:
    rng = random.Random(7)
    for attempt in range(5):
        path = tmp_path / str(attempt)
        with child(COUNTER, os.fspath(path)) as counter:
            for _ in range(rng.randrange(1, 200)):
                assert next_line(counter)
            counter.send_signal(signal.SIGKILL)
            assert counter.stdout is not None
            reported = [line for line in counter.stdout.read().split("\n")[:-1] if line]

        store = open_store(path)

        last = store.last("b")
        assert last is not None
        number = int.from_bytes(last[0], "big")
        assert not reported or number >= int(reported[-1])
        assert store.count("b") == number
        assert [k for k, _ in scan_all(store, "a")] == [key(i) for i in range(max(1, number - 50), number + 1)]
        store.close()


def test_a_commit_in_another_thread_never_disturbs_readers(tmp_path: Path) -> None:
    store = LmdbStore.open(tmp_path, node="n1", cluster="c1", map_bytes=64 << 10)
    wake = threading.Semaphore(0)
    done = threading.Semaphore(0)
    stop = False
    errors: list[BaseException] = []

    def commit_on_demand() -> None:
        while True:
            wake.acquire()
            if stop:
                return
            try:
                store.commit()
            except BaseException as error:
                errors.append(error)
            done.release()

    writer = threading.Thread(target=commit_on_demand)
    writer.start()
    number, reads = 0, 0
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline and not errors:
        number += 1
        # Each turn rewrites everything, so pages of older snapshots are reused all the time.
        turn = number.to_bytes(8, "big")
        store.stage([Put(t, key(i), turn * 100) for t in ("a", "b") for i in range(8)])
        store.stage([Cut("a", key(100), key(200)), Put("a", key(100 + number % 100), turn * 1000)])
        wake.release()
        while not done.acquire(blocking=False):
            values = {
                v[:8] for t in ("a", "b") for _, v in store.scan(t, key(0), key(8), bytes_max=1 << 20, count_max=99)
            }
            # A commit may become visible between the two scans, never in the middle of one.
            assert values <= {turn, (number - 1).to_bytes(8, "big")}
            (only,) = {v for _, v in store.scan("b", key(0), key(8), bytes_max=1 << 20, count_max=99)} or {b""}
            assert only in (turn * 100, (number - 1).to_bytes(8, "big") * 100, b"")
            reads += 1
        assert store.get("a", key(0)) == turn * 100
    stop = True
    wake.release()
    writer.join(WAIT_S)

    assert not errors
    assert number > 20 and reads > 20
    store.close()


def test_data_staged_during_a_commit_waits_for_the_next_one(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    stop = threading.Event()

    def commit_for_ever() -> None:
        while not stop.is_set():
            store.commit()

    writer = threading.Thread(target=commit_for_ever)
    writer.start()
    for number in range(3000):
        store.stage([Put("a", key(number), b"v")])
    stop.set()
    writer.join(WAIT_S)
    store.commit()

    assert [k for k, _ in scan_all(store, "a")] == [key(number) for number in range(3000)]
    store.close()


def test_lmdb_is_asked_to_sync_data_and_header_at_each_commit(store: LmdbStore) -> None:
    flags = store._env.flags()

    assert flags["sync"] and flags["metasync"] and not flags["writemap"] and not flags["map_async"]


def test_the_map_grows_past_its_first_size_without_losing_a_staged_op(tmp_path: Path) -> None:
    store = LmdbStore.open(tmp_path, node="n1", cluster="c1", map_bytes=64 << 10)
    write(store, Put("early", b"k", b"v"))

    store.stage([Put("a", key(i), bytes([i % 256]) * 3000) for i in range(100)])
    store.stage([Put("b", key(i), bytes([i % 256]) * 3000) for i in range(200)])
    assert store.get("early", b"k") == b"v"
    store.commit()
    for i in range(200, 300):
        write(store, Put("b", key(i), bytes([i % 256]) * 3000))
    store.close()

    store = open_store(tmp_path)
    assert scan_all(store, "a") == [(key(i), bytes([i % 256]) * 3000) for i in range(100)]
    assert scan_all(store, "b") == [(key(i), bytes([i % 256]) * 3000) for i in range(300)]
    assert (tmp_path / "data.mdb").stat().st_size > 10 * (64 << 10)
    store.close()


# Room


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[None]:
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", os.fspath(path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a small disk: {mounted.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", os.fspath(path)], check=True)


def test_a_full_disk_is_refused_before_append_and_heals_when_space_is_freed(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, "8m"):
        store = LmdbStore.open(disk / "data", node="n1", cluster="c1", free_bytes_min=2 << 20)
        assert store.room() is None
        (disk / "ballast").write_bytes(bytes(6 << 20))

        refusal = await_room(store, wanted=False)
        assert refusal is not None and str(disk / "data") in refusal
        (disk / "ballast").unlink()
        assert await_room(store, wanted=True) is None
        store.close()


def test_a_commit_that_meets_a_full_disk_keeps_everything_and_succeeds_later(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, "8m"):
        store = LmdbStore.open(disk / "data", node="n1", cluster="c1", free_bytes_min=0)
        write(store, Put("log", b"before", b"kept"))
        (disk / "ballast").write_bytes(bytes(7 << 20))
        store.stage([Put("log", key(i), bytes(2000)) for i in range(1000)])

        for _ in range(3):
            with pytest.raises(NoSpace) as caught:
                store.commit()
            assert caught.value.retryable
            assert str(disk / "data" / "data.mdb") in str(caught.value)
            assert scan_all(store, "log") == [(b"before", b"kept")]
        store.stage([Put("log", b"late", b"staged after the failure")])
        (disk / "ballast").unlink()
        store.commit()
        store.close()

        store = LmdbStore.open(disk / "data", node="n1", cluster="c1")
        assert store.count("log") == 1002
        assert store.get("log", b"late") == b"staged after the failure"
        assert store.get("log", key(999)) == bytes(2000)
        store.close()


def test_a_journal_that_filled_its_own_disk_has_room_again_after_a_trim(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, "8m"):
        store = LmdbStore.open(disk / "data", node="n1", cluster="c1", free_bytes_min=2 << 20)
        number = 0
        while store.room() is None:
            assert number < 8000
            write(store, *(Put("log", key(number + i), bytes(1000)) for i in range(50)))
            number += 50

        assert number > 3000
        write(store, Cut("log", key(0), key(number - 100)))
        assert await_room(store, wanted=True) is None
        for _ in range(20):
            write(store, *(Put("log", key(number + i), bytes(1000)) for i in range(50)))
            number += 50
        store.close()


def test_the_size_bound_is_refused_before_append_and_heals_after_a_trim(tmp_path: Path) -> None:
    store = LmdbStore.open(tmp_path, node="n1", cluster="c1", bytes_max=1 << 20)
    number = 0
    while store.room() is None:
        assert number < 2000
        write(store, Put("log", key(number), bytes(1000)))
        number += 1

    assert number > 500
    refusal = await_room(store, wanted=False)
    assert refusal is not None and str(1 << 20) in refusal
    store.close()
    store = LmdbStore.open(tmp_path, node="n1", cluster="c1", bytes_max=1 << 20)
    assert store.room() is not None
    write(store, Cut("log", key(0), key(number // 2)))
    assert await_room(store, wanted=True) is None
    store.close()


FAILING_DISK = """
import resource, signal, sys
from pathlib import Path
from holdfast.log.errors import DiskFailed
from holdfast.log.store import LmdbStore, Put
store = LmdbStore.open(Path(sys.argv[1]), node="n1", cluster="c1")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 10, resource.RLIM_INFINITY))
store.stage([Put("log", i.to_bytes(8, "big"), bytes(3000)) for i in range(500)])
try:
    store.commit()
except DiskFailed as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
for again in (store.commit, lambda: store.stage([Put("log", b"k", b"v")])):
    try:
        again()
    except DiskFailed:
        print("still failed")
store.close()
"""


def test_any_other_failure_of_a_commit_is_final(tmp_path: Path) -> None:
    with child(FAILING_DISK, os.fspath(tmp_path)) as process:
        lines = [next_line(process) for _ in range(3)]
        process.wait(WAIT_S)

    assert str(tmp_path / "data.mdb") in lines[0] and "Input/output error" in lines[0]
    assert lines[1:] == ["still failed", "still failed"]
    store = open_store(tmp_path)
    assert store.count("log") == 0
    store.close()
