"""Data of older releases opens for ever, and data of newer ones is refused by a named error.

tests/data/ holds data directories and snapshots, written by the release that introduced their format. They are created
by `python -m tests.data.make NAME` and never again: when a format changes, another one is added beside the old.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path

import lmdb
import msgpack
import pytest

from holdfast.cluster.backup.restoring import restore
from holdfast.cluster.clock import Clock
from holdfast.cluster.config import Config
from holdfast.cluster.partition.state import State, read_applied
from holdfast.log.errors import WrongVersion
from holdfast.sdk.ids import InvocationId
from holdfast.sdk.journal import Op
from holdfast.snapshots.backups import find_backup, verify_backup
from holdfast.snapshots.directory import DirectoryStore
from holdfast.snapshots.errors import NewerVersion
from holdfast.snapshots.format import read_header, verify
from holdfast.snapshots.restore import restore_blocking
from holdfast.statemachine import queries, refs
from holdfast.statemachine.commands import CompleteStep, Kill
from holdfast.statemachine.effects import Status
from holdfast.statemachine.tables import SCHEMA
from tests.cluster.harness import Handled, World, echo
from tests.cluster.test_snapshots import COUNTER, keeper, snapshot
from tests.statemachine import invariants

DATA = Path(__file__).resolve().parents[1] / "data"
DIRECTORIES = sorted(DATA.glob("*.tar.gz"))
SNAPSHOTS = sorted(DATA.glob("*.snapshot"))
BACKUPS = sorted((DATA / "backups").glob("*.tar.gz"))
#: Since schema 2.
LARGE = InvocationId(bytes.fromhex("00000000") + b"large value!")
LARGE_VALUE = b"large " * 1000
WAITING = InvocationId(bytes.fromhex("00000000") + b"waits for us")


async def wait(handled: Handled) -> None:
    if handled.length == 1:
        handled.wait_for(handled.step(Op.AWAKEABLE, "0/awakeable/0", []))
    else:
        outcome = handled.journal[1].outcome
        assert outcome is not None
        handled.output(outcome[1])


def on_the_day(created_ms: int) -> Clock:
    """Completed invocations are kept for a day, so the data is opened as if on the day it was written."""
    return Clock(wall=lambda: float(created_ms))


HANDLERS = {**COUNTER, "agent/wait": wait, "agent/echo": echo}


def test_there_is_something_to_open() -> None:
    assert DIRECTORIES and SNAPSHOTS and BACKUPS


@pytest.mark.parametrize("archive", DIRECTORIES, ids=lambda path: path.name)
@pytest.mark.parametrize("boot", ["the boot that wrote it", "another boot"])
async def test_an_old_data_directory_opens_and_continues(tmp_path: Path, archive: Path, boot: str) -> None:
    """With its state, or (the machine was restarted) from its snapshot and the rest of its log."""
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    it = World(tmp_path, partitions=1, log_tail=0)
    it.boot = boot

    await it.start()

    assert it.node.partitions[0].group.status().base > 0, "its log is trimmed"
    await it.register(HANDLERS)
    assert await it.call("counter/add", key="k") == [0, b"31"]
    await it.reaches(WAITING, Status.SUSPENDED)
    await it.node.serving.router.submit(WAITING, CompleteStep(WAITING, 1, [0, b"at last"]))
    await it.reaches(WAITING, Status.RUNNING)  # At its own deployment, which no longer exists.
    await it.node.serving.router.submit(WAITING, Kill(WAITING))
    await it.reaches(WAITING, Status.COMPLETED)
    machine = it.node.partitions[0].machine
    before = machine.applied[0]
    cut = await snapshot(it)
    assert cut == keeper(it).newest
    # Expired invocations are removed in the background.
    assert before <= verify(cut.path).header.meta.index <= machine.applied[0]
    await it.stop()


@pytest.mark.parametrize("archive", DIRECTORIES, ids=lambda path: path.name)
@pytest.mark.parametrize("boot", ["the boot that wrote it", "another boot"])
async def test_a_large_value_of_an_old_data_directory_is_still_there(tmp_path: Path, archive: Path, boot: str) -> None:
    if archive.name == "schema-1.tar.gz":
        pytest.skip("there were none")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    store = tmp_path / "store"  # It exists since schema 3.
    it = World(tmp_path, partitions=1, log_tail=0, snapshots=str(store) if store.exists() else "")
    it.boot = boot
    [cut] = (tmp_path / "node").glob("snapshots/*/*/*.snapshot")
    it.clock = on_the_day(read_header(cut).created_ms)
    await it.start()

    found = await it.node.serving.reader.lookup(LARGE)

    assert found is not None and found.outcome is not None
    ref = refs.in_outcome(found.outcome)
    assert ref is not None and await it.node.serving.reader.value(LARGE, ref) == LARGE_VALUE
    with it.node.partitions[0].state.read() as txn:
        invariants.check(txn)
        assert bool(queries.place(txn, ref.data)) == store.exists()
    await it.stop()


@pytest.mark.parametrize("archive", BACKUPS, ids=lambda path: path.name)
async def test_a_cluster_is_made_from_an_old_backup(tmp_path: Path, archive: Path) -> None:
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    place = DirectoryStore(tmp_path / "place")
    manifest = find_backup(place, None, schema_max=SCHEMA)
    verify_backup(place, manifest, tmp_path / "scratch", first_group=2, schema_max=SCHEMA)
    it = World(tmp_path)
    it.clock = on_the_day(manifest.created_ms)
    restore(Config(data=tmp_path / "node"), place, manifest)

    await it.start()

    assert len(it.node.partitions) == 1 and it.node.ground.registry.state.revisions == {"counter": 1, "agent": 1}
    await it.register(HANDLERS)
    assert await it.call("counter/add", key="k") == [0, b"31"]
    await it.reaches(WAITING, Status.SUSPENDED)
    found = await it.node.serving.reader.lookup(LARGE)
    assert (found is not None) == (archive.name != "backup-1.tar.gz"), "there were no large values"
    if found is not None:
        assert await it.node.serving.reader.value(LARGE, refs.make(LARGE_VALUE)[0]) == LARGE_VALUE
    await it.stop()


@pytest.mark.parametrize("file", SNAPSHOTS, ids=lambda path: path.name)
def test_an_old_snapshot_is_restored(tmp_path: Path, file: Path) -> None:
    header = restore_blocking(file, tmp_path)
    assert verify(file).header == header

    with lmdb.open(str(tmp_path), readonly=True, lock=False) as env, env.begin() as txn:
        assert read_applied(txn) == (header.meta.index, header.meta.term)
        assert header.meta.schema <= SCHEMA
    state = State(tmp_path, owner="", boot="", map_bytes=1 << 20)
    with state.read() as view:
        record = queries.load(view, WAITING)
    assert record is not None and record.status == Status.SUSPENDED
    state.close()


async def test_a_state_of_a_later_schema_is_refused(tmp_path: Path) -> None:
    it = World(tmp_path, partitions=1)
    await it.start()
    await it.register(COUNTER)
    await it.call("counter/add", key="k")
    await it.stop()
    path = tmp_path / "node" / "state" / "0000"
    with lmdb.open(str(path)) as env, env.begin(write=True) as txn:
        txn.put(b"\x00schema", msgpack.packb(SCHEMA + 1))

    with pytest.raises(WrongVersion, match=f"format {SCHEMA + 1}, this release understands format {SCHEMA}"):
        await World(tmp_path, partitions=1).start()

    with lmdb.open(str(path)) as env, env.begin(write=True) as txn:
        txn.put(b"\x00schema", msgpack.packb(SCHEMA))
    again = World(tmp_path, partitions=1)
    await again.start()
    await again.stop()


async def test_a_state_of_a_later_format_is_refused_and_kept(tmp_path: Path) -> None:
    it = World(tmp_path, partitions=1)
    await it.start()
    await it.stop()
    mark = tmp_path / "node" / "state" / "0000" / "MARK"
    mark.write_text(json.dumps({**json.loads(mark.read_text()), "format": 99}))

    with pytest.raises(WrongVersion, match="format 99"):
        await World(tmp_path, partitions=1).start()

    assert (mark.parent / "data.mdb").exists()


async def test_a_snapshot_of_a_later_schema_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older one beside it would lack data acknowledged since."""
    it = World(tmp_path, partitions=1, log_tail=0)
    await it.start()
    await it.register(COUNTER)
    await it.call("counter/add", key="k")
    await snapshot(it)
    with monkeypatch.context() as later:
        later.setattr("holdfast.cluster.snapshotting.keeper.read_schema", lambda _: SCHEMA + 1)
        later.setattr("holdfast.cluster.snapshotting.keeper.SCHEMA", SCHEMA + 1)
        later.setattr("holdfast.cluster.snapshotting.service.SCHEMA", SCHEMA + 1)
        await it.call("counter/add", key="k")
        await snapshot(it)
    await it.kill()
    shutil.rmtree(tmp_path / "node" / "state")

    with pytest.raises(NewerVersion, match=f"state schema {SCHEMA + 1}"):
        await World(tmp_path, partitions=1, log_tail=0).start()
