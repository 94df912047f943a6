"""A snapshot is the state at one index, despite concurrent writes; and it becomes a state again, or nothing changes."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from pathlib import Path

import lmdb
import pytest

from holdfast.snapshots.cut import cut, cut_blocking, remove_drafts
from holdfast.snapshots.errors import Cancelled, Corrupted, NoSpace
from holdfast.snapshots.files import SteadyWriter
from holdfast.snapshots.format import BLOCK_BYTES, Expected, SnapshotFile, verify
from holdfast.snapshots.restore import remove_staged, restore_blocking, stage, stage_blocking
from holdfast.snapshots.work import Throttle, Work
from tests.snapshots.states import State, applied_in, digest_of, expected_digest

MIB = 1 << 20


def restored(file: SnapshotFile, directory: Path) -> State:
    restore_blocking(file.path, directory)
    return State(directory)


def test_a_snapshot_is_the_state(state: State, tmp_path: Path) -> None:
    state.apply(300)

    file = cut_blocking(state.env, state.describe, tmp_path / "snapshots")
    copy = restored(file, tmp_path / "copy")

    assert copy.applied == (300, 1)
    assert copy.digest() == state.digest() == expected_digest(300)
    copy.close()


def test_an_empty_state_can_be_cut_too(state: State, tmp_path: Path) -> None:
    file = cut_blocking(state.env, state.describe, tmp_path / "snapshots")

    copy = restored(file, tmp_path / "copy")

    assert copy.applied == (0, 0)
    copy.close()


def test_a_snapshot_is_consistent_during_writes(state: State, tmp_path: Path) -> None:
    state.apply(4000)
    stop = threading.Event()

    def write() -> None:
        while not stop.wait(0.002):  # A file grows while a reader pins its pages, but within bounds.
            state.apply(20)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        throttle = Throttle(8 * MIB)  # Slow enough that many transactions fall into each cut.
        files = [
            cut_blocking(state.env, state.describe, tmp_path / "snapshots", Work(throttle=throttle)) for _ in range(3)
        ]
    finally:
        stop.set()
        writer.join()

    indexes = [file.header.meta.index for file in files]
    assert indexes == sorted(set(indexes)), "the writer went on between the cuts"
    assert state.applied[0] > indexes[-1], "and during the last one"
    for file in files:
        copy = restored(verify(file.path), tmp_path / f"copy{file.header.meta.index}")
        assert copy.digest() == expected_digest(file.header.meta.index)
        copy.close()


def test_the_loop_runs_on_during_a_cut(state: State, tmp_path: Path) -> None:
    state.apply(3000)
    seen: list[tuple[int, int]] = []

    async def work() -> int:
        cutting = asyncio.ensure_future(
            cut(
                state.env,
                state.describe,
                tmp_path / "snapshots",
                progress=lambda done, total: seen.append((done, total)),
                throttle=Throttle(4 * MIB),
            )
        )
        turns = 0
        while not cutting.done():
            state.apply(1)
            await asyncio.sleep(0)
            turns += 1
        await cutting
        await asyncio.sleep(0)
        return turns

    turns = asyncio.run(work())

    assert turns > 50
    assert seen[0][0] == 0
    assert seen[-1][0] == seen[-1][1] > MIB


def test_a_cancelled_cut_ends_its_thread_and_leaves_nothing(state: State, tmp_path: Path) -> None:
    state.apply(3000)

    async def work() -> None:
        begun = asyncio.Event()
        cutting = asyncio.ensure_future(
            cut(
                state.env,
                state.describe,
                tmp_path / "snapshots",
                progress=lambda done, _: begun.set() if done else None,
                throttle=Throttle(MIB),
            )
        )
        await begun.wait()
        cutting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cutting

    asyncio.run(work())

    assert "holdfast-copy" not in {thread.name for thread in threading.enumerate()}, "the environment may be closed"
    assert list((tmp_path / "snapshots").iterdir()) == []
    state.apply(10)


def test_a_full_disk_during_a_cut_leaves_nothing(state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state.apply(3000)
    monkeypatch.setattr(SteadyWriter, "write", _disk_full)

    with pytest.raises(NoSpace, match="Free space"):
        cut_blocking(state.env, state.describe, tmp_path / "snapshots")
    monkeypatch.undo()

    assert list((tmp_path / "snapshots").iterdir()) == []
    assert verify(cut_blocking(state.env, state.describe, tmp_path / "snapshots").path).header.meta.index == 3000


def _disk_full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_an_environment_without_locks_is_not_cut(tmp_path: Path, state: State) -> None:
    """Its writer would reuse pages during the copy."""
    with lmdb.open(os.fspath(tmp_path / "unlocked"), lock=False) as env, pytest.raises(AssertionError, match="locks"):
        cut_blocking(env, state.describe, tmp_path / "snapshots")


def test_named_tables_are_copied_too(tmp_path: Path, state: State) -> None:
    with lmdb.open(os.fspath(tmp_path / "tables"), max_dbs=2) as env:
        with env.begin(write=True) as txn:
            txn.put(b"k", b"v", db=env.open_db(b"one", txn=txn))
        file = cut_blocking(env, state.describe, tmp_path / "snapshots")
    restore_blocking(file.path, tmp_path / "copy")

    with lmdb.open(os.fspath(tmp_path / "copy"), max_dbs=2) as env, env.begin() as txn:
        assert txn.get(b"k", db=env.open_db(b"one", txn=txn, create=False)) == b"v"


# Restoring


def test_a_staged_state_takes_the_place_of_the_old_in_one_step(state: State, tmp_path: Path) -> None:
    state.apply(100)
    file = cut_blocking(state.env, state.describe, tmp_path / "snapshots")
    old = State(tmp_path / "old")
    old.apply(5)

    staged = asyncio.run(stage(file, tmp_path / "old", expected=Expected(group=3)))
    assert old.applied == (5, 1), "the old one is in use until the swap"
    old.close()
    staged.swap()

    new = State(tmp_path / "old")
    assert new.applied == (100, 1)
    new.apply(10)
    assert new.digest() == expected_digest(110)
    new.close()


def test_data_of_this_machine_is_written_before_the_swap(state: State, tmp_path: Path) -> None:
    state.apply(10)
    file = cut_blocking(state.env, state.describe, tmp_path / "snapshots")

    def prepare(env: lmdb.Environment) -> None:
        with env.begin(write=True) as txn:
            assert applied_in(txn) == (10, 1)
            txn.put(b"boot", b"here")

    restore_blocking(file.path, tmp_path / "copy", prepare=prepare)

    with lmdb.open(os.fspath(tmp_path / "copy")) as env, env.begin() as txn:
        assert txn.get(b"boot") == b"here"


@pytest.mark.parametrize("at", [100, BLOCK_BYTES, BLOCK_BYTES + 20_000])
def test_a_damaged_snapshot_never_becomes_a_state(state: State, tmp_path: Path, at: int) -> None:
    state.apply(100)
    file = cut_blocking(state.env, state.describe, tmp_path / "snapshots")
    old = State(tmp_path / "old")
    old.apply(5)
    data = bytearray(file.path.read_bytes())
    data[at] ^= 1
    file.path.write_bytes(data)

    with pytest.raises(Corrupted):
        stage_blocking(file.path, tmp_path / "old")

    assert old.digest() == expected_digest(5)
    assert not list((tmp_path / "old").glob(".staged-*"))
    old.close()


def test_a_cancelled_restore_leaves_the_old_state(state: State, tmp_path: Path) -> None:
    state.apply(3000)
    file = cut_blocking(state.env, state.describe, tmp_path / "snapshots")
    old = State(tmp_path / "old")
    old.apply(5)
    work = Work(lambda done, _: work.cancel() if done else None, Throttle(MIB))

    with pytest.raises(Cancelled):
        restore_blocking(file.path, tmp_path / "old", work=work)

    assert old.applied == (5, 1)
    assert not list((tmp_path / "old").glob(".staged-*"))
    old.close()


def test_a_discarded_stage_leaves_nothing(state: State, tmp_path: Path) -> None:
    state.apply(10)
    file = cut_blocking(state.env, state.describe, tmp_path / "snapshots")

    stage_blocking(file.path, tmp_path / "other").discard()

    assert list((tmp_path / "other").iterdir()) == []


def test_leavings_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    for name in (".cutting-1", ".staged-1", "kept"):
        (tmp_path / name).write_bytes(b"")

    remove_drafts(tmp_path)
    remove_staged(tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_the_digest_of_the_tests_sees_a_difference(state: State) -> None:
    state.apply(10)

    with state.env.begin() as txn:
        assert digest_of(txn) == expected_digest(10) != expected_digest(11)


def test_a_state_restored_over_a_stale_lock_file_works(state: State, tmp_path: Path) -> None:
    state.apply(100)
    file = cut_blocking(state.env, state.describe, tmp_path / "snapshots")
    old = State(tmp_path / "old")
    old.apply(2000)
    old.close()
    assert (tmp_path / "old" / "lock.mdb").exists()

    new = restored(file, tmp_path / "old")
    new.apply(50)

    assert new.digest() == expected_digest(150)
    new.close()
    shutil.rmtree(tmp_path / "old")
