"""The store on real files: durable batches, bounds, and a refusal for every directory that is not what it should be."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import lmdb
import pytest

from holdfast.log import lmdb_file
from holdfast.log.errors import (
    Corrupt,
    DirectoryInUse,
    DiskFailed,
    NoSpace,
    StorageError,
    WrongDirectory,
    WrongVersion,
)
from holdfast.log.lmdb_file import FORMAT, FORMATS_READ
from holdfast.log.store import Cut, Drop, Extend, LmdbStore, Op, Put, Store

WAIT_S = 30.0
ROOT = Path(__file__).resolve().parents[2]


def open_store(path: Path, *, node: str = "n1", cluster: str = "c1") -> LmdbStore:
    return LmdbStore.open(path, node=node, cluster=cluster)


def key(number: int) -> bytes:
    return number.to_bytes(8, "big")


def write(store: Store, *ops: Op) -> None:
    store.stage(ops)
    store.commit()


def scan_all(store: Store, table: str) -> list[tuple[bytes, bytes]]:
    return store.scan(table, b"", b"\xff" * 9, bytes_max=1 << 40, count_max=1 << 40)


def close_after(path: Path, *ops: Op) -> None:
    store = open_store(path)
    write(store, *ops)
    store.close()


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


@contextmanager
def child(source: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process with a store of its own; it is killed at the end if it still lives."""
    process = subprocess.Popen(
        [sys.executable, "-c", source, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(WAIT_S)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


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


def test_reads_do_not_see_what_is_only_staged(store: LmdbStore) -> None:
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


def test_an_item_said_to_be_last_is_kept_where_it_belongs_if_it_is_not(store: LmdbStore) -> None:
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
def test_any_batches_leave_what_a_dictionary_would_hold(tmp_path: Path, seed: int) -> None:
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
    # The file has thousands of pages. Whoever read them all would fault them in, many at a time at the most.
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


def test_kill_9_keeps_what_was_committed_and_nothing_of_what_was_staged(tmp_path: Path) -> None:
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


def test_kill_9_at_any_moment_leaves_whole_batches_and_all_that_were_reported(tmp_path: Path) -> None:
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


def test_what_is_staged_during_a_commit_waits_for_the_next_one(tmp_path: Path) -> None:
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


# The directory


def test_a_new_directory_is_made_with_its_parents_and_keeps_its_disk_id(tmp_path: Path) -> None:
    path = tmp_path / "some" / "deep" / "data"
    store = open_store(path)
    disk = store.disk
    assert len(bytes.fromhex(disk)) == 16 and store.incarnation == 1
    store.close()

    store = open_store(path)

    assert (store.disk, store.incarnation) == (disk, 2)
    store.close()
    other = open_store(tmp_path / "other")
    assert other.disk != disk
    other.close()


HOLDER = """
import sys
from pathlib import Path
from holdfast.log.store import LmdbStore
store = LmdbStore.open(Path(sys.argv[1]), node="n1", cluster="c1")
print("holding", flush=True)
sys.stdin.read()
"""


def test_a_directory_held_by_another_process_is_refused_by_its_pid(tmp_path: Path) -> None:
    with child(HOLDER, os.fspath(tmp_path)) as holder:
        assert next_line(holder) == "holding"

        with pytest.raises(DirectoryInUse) as caught:
            open_store(tmp_path)

        assert caught.value.pid == holder.pid
        assert str(tmp_path) in str(caught.value) and str(holder.pid) in str(caught.value)
        holder.kill()
        holder.wait(WAIT_S)
    store = open_store(tmp_path)
    with pytest.raises(DirectoryInUse):
        open_store(tmp_path)
    store.close()


@pytest.mark.parametrize("who", [{"node": "n2"}, {"cluster": "c2"}])
@pytest.mark.parametrize("lost", ["nothing", "IDENTITY", "data.mdb"])
def test_the_directory_of_another_node_or_cluster_is_refused_and_left_alone(
    tmp_path: Path, who: dict[str, str], lost: str
) -> None:
    close_after(tmp_path, Put("log", b"k", b"v"))
    (tmp_path / lost).unlink(missing_ok=True)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.name != "LOCK"}

    with pytest.raises(WrongDirectory) as caught:
        open_store(tmp_path, **who)

    (wrong,) = who.values()
    for word in ("'n1'", "'c1'", repr(wrong), str(tmp_path)):
        assert word in str(caught.value)
    assert before == {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.name != "LOCK"}


def test_a_directory_with_files_of_someone_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")

    with pytest.raises(WrongDirectory, match=r"thesis\.txt"):
        open_store(tmp_path)

    assert os.listdir(tmp_path) == ["thesis.txt"]


def test_an_empty_file_system_is_an_empty_directory(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()

    open_store(tmp_path).close()


def test_the_journal_file_of_another_disk_is_refused(tmp_path: Path) -> None:
    close_after(tmp_path / "one", Put("log", b"k", b"v"))
    close_after(tmp_path / "two", Put("log", b"k", b"v"))
    shutil.copy(tmp_path / "two" / "data.mdb", tmp_path / "one" / "data.mdb")

    with pytest.raises(WrongDirectory, match="replaced"):
        open_store(tmp_path / "one")


@pytest.mark.parametrize("other", [min(FORMATS_READ) - 1, FORMAT + 1])
def test_an_older_or_newer_format_is_refused_by_both_records(tmp_path: Path, other: int) -> None:
    close_after(tmp_path, Put("log", b"k", b"v"))
    marker = tmp_path / "IDENTITY"
    foreign = json.dumps({**json.loads(marker.read_text()), "format": other}).encode()

    original = marker.read_bytes()
    marker.write_bytes(foreign)
    with pytest.raises(WrongVersion) as caught:
        open_store(tmp_path)
    assert f"format {other}" in str(caught.value) and f"format {FORMAT}" in str(caught.value)

    marker.write_bytes(original)
    env = lmdb.open(os.fspath(tmp_path), max_dbs=8, lock=False, lib_version=0)
    with env.begin(write=True) as txn:
        txn.put(b"identity", foreign, db=env.open_db(b"node", txn=txn))
    env.close()
    with pytest.raises(WrongVersion) as caught:
        open_store(tmp_path)
    assert str(tmp_path / "data.mdb") in str(caught.value)


@pytest.mark.parametrize("crash", [False, True])
def test_a_directory_of_the_format_before_is_taken_over_and_then_refused_by_who_knows_only_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, crash: bool
) -> None:
    with monkeypatch.context() as before:
        before.setattr(lmdb_file, "FORMAT", FORMAT - 1)
        close_after(tmp_path, Put("log", b"k", b"v"))
    if crash:  # Between the two records of who owns the directory.
        old = (tmp_path / "IDENTITY").read_bytes()
        open_store(tmp_path).close()
        (tmp_path / "IDENTITY").write_bytes(old)

    store = open_store(tmp_path)
    assert store.get("log", b"k") == b"v"
    store.close()

    assert json.loads((tmp_path / "IDENTITY").read_text())["format"] == FORMAT
    monkeypatch.setattr(lmdb_file, "FORMAT", FORMAT - 1)
    monkeypatch.setattr(lmdb_file, "FORMATS_READ", (FORMAT - 1,))
    with pytest.raises(WrongVersion, match=f"format {FORMAT}, this release understands format {FORMAT - 1}"):
        open_store(tmp_path)


def test_a_crash_while_the_directory_is_made_is_made_good(tmp_path: Path) -> None:
    # Stopped before the file was whole: nothing was ever acknowledged, so it begins anew.
    first = tmp_path / "first"
    (first / "creating").mkdir(parents=True)
    (first / "creating" / "data.mdb").write_bytes(b"half")
    open_store(first).close()
    # Stopped before the marker was written.
    second = tmp_path / "second"
    close_after(second, Put("log", b"k", b"v"))
    (second / "IDENTITY").rename(second / "IDENTITY.new")

    store = open_store(second)

    assert store.get("log", b"k") == b"v"
    store.close()
    for path in (first, second):
        assert sorted(os.listdir(path)) == ["IDENTITY", "LOCK", "data.mdb"]


# Damage


def damaged(path: Path, ops: Sequence[Op] = ()) -> Path:
    close_after(path, *(ops or [Put("log", key(i), bytes(500)) for i in range(200)]))
    return path / "data.mdb"


def refusal(path: Path) -> str:
    with pytest.raises(Corrupt) as caught:
        open_store(path)
    assert isinstance(caught.value, StorageError) and not caught.value.retryable
    assert "Restore this node from its peers" in str(caught.value)
    # The refusal let go of the directory and is the same the next time: nothing was repaired away.
    with pytest.raises(Corrupt):
        open_store(path)
    return str(caught.value)


def test_a_missing_journal_file_is_not_a_new_start(tmp_path: Path) -> None:
    damaged(tmp_path).unlink()

    assert f"{tmp_path / 'data.mdb'}: the journal file is missing" in refusal(tmp_path)


@pytest.mark.parametrize("keep", [0, 100, 4096, 4200, 8192, 40_000, -4096, -1])
def test_a_torn_journal_file_is_refused_by_name(tmp_path: Path, keep: int) -> None:
    file = damaged(tmp_path)
    size = file.stat().st_size
    os.truncate(file, keep if keep >= 0 else size + keep)

    text = refusal(tmp_path)

    assert f"{file}: the file is torn" in text


def shortened(path: Path) -> Path:
    """A sound file that ends before the last page LMDB counted: pages used and freed at once are never written."""
    file = damaged(path)
    store = open_store(path)
    for _ in range(3):
        write(store, Cut("log", key(0), key(50)), Put("log", key(1), bytes(9000)))
        write(
            store, Put("log", key(2), b"small"), Put("log", key(999), bytes(3_000_000)), Cut("log", key(999), key(1000))
        )
    store.close()
    env = lmdb.open(os.fspath(path), max_dbs=8, lock=False, lib_version=0)
    last_page = env.info()["last_pgno"]
    env.close()
    assert file.stat().st_size < last_page * resource.getpagesize(), "the file is not as short as it was meant to be"
    return file


def test_a_file_that_ends_before_pages_nobody_uses_is_sound(tmp_path: Path) -> None:
    shortened(tmp_path)

    store = open_store(tmp_path)

    assert store.get("log", key(2)) == b"small"
    write(store, *(Put("more", key(i), bytes(3000)) for i in range(2000)))
    assert store.count("more") == 2000
    store.close()
    open_store(tmp_path).close()


READER = """
import sys
from pathlib import Path
from holdfast.log.errors import Corrupt
from holdfast.log.store import LmdbStore
for line in sys.stdin:
    try:
        store = LmdbStore.open(Path(line.strip()), node="n1", cluster="c1")
    except Corrupt:
        print("refused", flush=True)
    else:
        items = store.scan("log", b"", b"\\xff" * 9, bytes_max=1 << 40, count_max=1 << 40)
        print(len(items), sum(len(v) for _, v in items), flush=True)
        store.close()
"""


def trimmed(path: Path) -> Path:
    """A file whose last pages are in use while the list of free pages lives near its beginning."""
    file = damaged(path)
    store = open_store(path)
    write(store, Cut("log", key(0), key(48)))
    for number in range(6):
        write(store, Put("other", b"k", b"%d" % number))
    store.close()
    return file


@pytest.mark.parametrize("make", [shortened, trimmed])
def test_a_file_torn_anywhere_is_refused_or_lost_nothing(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    file = make(tmp_path / "whole")
    size = file.stat().st_size
    answers = []

    # In a process of its own: a wrong answer is SIGBUS.
    with child(READER) as reader:
        assert reader.stdin is not None
        for lost in range(size // resource.getpagesize()):
            path = tmp_path / str(lost)
            shutil.copytree(file.parent, path)
            os.truncate(path / "data.mdb", size - lost * resource.getpagesize())
            reader.stdin.write(f"{path}\n")
            reader.stdin.flush()
            answers.append(next_line(reader))
            shutil.rmtree(path)

    assert set(answers) == {answers[0], "refused"}
    assert answers[0].split()[0] == "152"
    assert answers == sorted(answers), "a file that lost more is not better than one that lost less"


@pytest.mark.parametrize("header", [0, 1])
@pytest.mark.parametrize(
    ("field", "offset"),
    [("page number", 0), ("kind", 10), ("magic", 16), ("layout", 20), ("size of a page", 40), ("transaction", 144)],
)
def test_a_flipped_bit_in_a_header_is_refused(tmp_path: Path, header: int, field: str, offset: int) -> None:
    file = damaged(tmp_path)
    flip(file, header * resource.getpagesize() + offset, bit=3)

    assert str(file) in refusal(tmp_path)


def test_a_header_that_looks_newer_does_not_roll_the_journal_back(tmp_path: Path) -> None:
    """LMDB alone would open the older snapshot and forget the last commit."""
    file = damaged(tmp_path)
    content = file.read_bytes()
    size = resource.getpagesize()
    older = min((0, 1), key=lambda number: content[number * size + 144 : number * size + 152][::-1])
    flip(file, older * size + 149, bit=0)

    assert "contradict" in refusal(tmp_path)


def test_overwritten_pages_are_damage_and_never_an_error_of_lmdb(tmp_path: Path) -> None:
    file = damaged(tmp_path)
    size = resource.getpagesize()
    with file.open("r+b") as stream:
        stream.seek(2 * size)
        stream.write(bytes(file.stat().st_size - 2 * size))

    assert str(file) in refusal(tmp_path)


def test_a_damaged_page_met_while_reading_is_named(tmp_path: Path) -> None:
    file = damaged(tmp_path, [Put("log", key(i), b"findme" * 50) for i in range(2000)])
    content = bytearray(file.read_bytes())
    size = resource.getpagesize()
    for start in range(2 * size, len(content), size):
        items = (int.from_bytes(content[start + 12 : start + 14], sys.byteorder) - 16) // 2
        if items > 5 and content.count(b"findme", start, start + size) > 100:
            content[start : start + size] = bytes(size)
            break
    file.write_bytes(content)
    store = open_store(tmp_path)

    for _ in range(2):
        with pytest.raises(Corrupt) as caught:
            scan_all(store, "log")
        assert str(file) in str(caught.value)

    store.close()


def test_a_damaged_identity_is_refused(tmp_path: Path) -> None:
    damaged(tmp_path)
    for text in (b"", b"{", b"[1]", b'{"format": %d, "node": 5}' % FORMAT, b"\xff\xfe"):
        (tmp_path / "IDENTITY").write_bytes(text)
        assert str(tmp_path / "IDENTITY") in refusal(tmp_path)


def test_a_path_that_cannot_be_used_is_a_failure_of_the_disk(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")

    with pytest.raises(DiskFailed, match="Not a directory"):
        open_store(tmp_path / "file" / "data")


def flip(file: Path, offset: int, *, bit: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ 1 << bit]))
