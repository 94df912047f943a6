"""kill -9 before every single step of cut, put, fetch and restore: the old or the new result remains, and work
continues.

Each test kills a child process before its first step, the next child before its second, and so on until one finishes.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest

from holdfast.snapshots.cut import cut_blocking, remove_drafts
from holdfast.snapshots.directory import DirectoryStore
from holdfast.snapshots.format import SUFFIX, SnapshotFile, verify
from holdfast.snapshots.opening import open_store
from holdfast.snapshots.restore import remove_staged, restore_blocking
from tests.snapshots.servers import BUCKET, Server
from tests.snapshots.states import State, expected_digest

ROOT = Path(__file__).resolve().parents[2]
STEPS_MAX = 200


def deaths(*arguments: object) -> Iterator[str]:
    """The name of each step at which a child died; ends when one did not die."""
    for number in range(1, STEPS_MAX):
        child = subprocess.run(
            [sys.executable, "-m", "tests.snapshots.crasher", str(number), *map(str, arguments)],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if child.returncode == 0:
            return
        assert child.returncode == -signal.SIGKILL, child.stderr
        yield child.stdout
    raise AssertionError("no child lived to the end")


@pytest.fixture
def file(state: State, tmp_path: Path) -> SnapshotFile:
    state.apply(2500)
    return cut_blocking(state.env, state.describe, tmp_path / "made")


def test_a_killed_cut_leaves_the_old_snapshot_and_never_half_a_new_one(state: State, tmp_path: Path) -> None:
    state.apply(100)
    old = cut_blocking(state.env, state.describe, tmp_path / "cut")
    state.apply(2400)
    state.close()
    steps = []

    for step in deaths("cut", state.directory, tmp_path / "cut"):
        steps.append(step)
        for path in (tmp_path / "cut").glob(f"*{SUFFIX}"):
            assert verify(path).header.meta.index in (100, 2500)
        assert verify(old.path).header == old.header

    remove_drafts(tmp_path / "cut")
    assert {"write", "pwrite", "fsync", "rename"} <= set(steps)
    assert sorted({verify(path).header.meta.index for path in (tmp_path / "cut").iterdir()}) == [100, 2500]


def test_a_killed_restore_leaves_the_old_state_or_the_new(file: SnapshotFile, tmp_path: Path) -> None:
    target = tmp_path / "target"
    old = State(target)
    old.apply(30)
    old.close()
    kept = tmp_path / "kept"
    shutil.copytree(target, kept)
    found, steps = [], []

    for step in deaths("restore", file.path, target):
        steps.append(step)
        state = State(target)
        count = state.applied[0]
        assert state.digest() == expected_digest(count)
        found.append(count)
        state.close()
        shutil.rmtree(target)
        shutil.copytree(kept, target)

    assert set(found) == {30, 2500}, "some died before the rename, some after it"
    assert found == sorted(found)
    restore_blocking(file.path, target)
    remove_staged(target)
    assert sorted(path.name for path in target.iterdir()) == ["data.mdb", "lock.mdb"]


def test_a_killed_put_leaves_nothing_or_the_whole_object(file: SnapshotFile, tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store", create=True)
    sizes = []

    for _ in deaths("put", file.path, f"a/b/{file.name}", tmp_path / "store"):
        sizes.append([found.size for found in store.list()])

    assert [] in sizes
    assert all(size in ([], [file.header.file_bytes]) for size in sizes)
    assert store.read(f"a/b/{file.name}") == file.path.read_bytes()


def test_a_killed_fetch_continues_and_is_never_accepted_in_part(file: SnapshotFile, tmp_path: Path) -> None:
    DirectoryStore(tmp_path / "store", create=True).put(file.path, file.name)
    steps = []

    for step in deaths("fetch", tmp_path / "fetched", file.name, tmp_path / "store"):
        steps.append(step)
        for path in (tmp_path / "fetched").glob(f"*{SUFFIX}"):
            verify(path)

    assert "rename" in steps
    assert [path.name for path in (tmp_path / "fetched").iterdir()] == [file.name]
    assert verify(tmp_path / "fetched" / file.name).header == file.header


def test_a_killed_upload_to_s3_leaves_nothing_or_the_whole_object(
    state: State, tmp_path: Path, rclone: Server, credentials: None
) -> None:
    state.apply(20_000)  # More than one part, so that a multipart upload is killed in its middle.
    file = cut_blocking(state.env, state.describe, tmp_path / "made")
    options = urlencode({"endpoint_url": rclone.endpoint_url, "part_bytes": 5 << 20})
    url = f"s3://{BUCKET}/crash-{tmp_path.name}?{options}"
    store = open_store(url)
    seen = []

    for _ in deaths("s3-put", file.path, file.name, url):
        seen.append([found.size for found in store.list()])

    assert file.header.file_bytes > 5 << 20
    assert len(seen) >= 4, "begin, two parts, complete"
    assert all(sizes in ([], [file.header.file_bytes]) for sizes in seen)
    store.get(file.name, tmp_path / "got")
    assert verify(tmp_path / "got").header == file.header
