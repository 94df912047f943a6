"""A cluster restored from a backup continues where the old one was: nothing is lost or duplicated, and no other node
joins.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

from holdfast.cluster.backup.restoring import identify, restore
from holdfast.cluster.clock import Clock, wall_ms
from holdfast.cluster.config import BadConfig, HostPort
from holdfast.cluster.members.founding import open_founding, read_founding
from holdfast.cluster.members.operations import read_node
from holdfast.log.errors import WrongDirectory
from holdfast.sdk import Server
from holdfast.sdk.ids import InvocationId
from holdfast.snapshots.backups import Manifest, find_backup, verify_backup
from holdfast.snapshots.directory import DirectoryStore
from holdfast.snapshots.errors import Corrupted
from holdfast.statemachine import queries
from holdfast.statemachine.marks import why_not_together
from holdfast.statemachine.tables import SCHEMA
from tests.cluster.bookkeeping import Books, books, files_in, handlers
from tests.cluster.harness import PATIENCE_S, eventually
from tests.cluster.test_backup import begin_late, never_hold, spread
from tests.cluster.test_three_nodes import Seat
from tests.ports import free_ports

pytestmark = pytest.mark.asyncio(loop_scope="module")
OLD = ("n1", "n2", "n3")


class Past(NamedTuple):
    """A cluster that no longer exists, and its backups."""

    place: DirectoryStore
    backups: list[str]
    unheld: str  # made without holding messages, and without checking that the copies are consistent
    done: dict[str, list[InvocationId]]  # by backup, orders that were completed when it began


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Server]:
    async with handlers() as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def past(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Past:
    path = tmp_path_factory.mktemp("past")
    place = DirectoryStore(path / "place", create=True)
    with pytest.MonkeyPatch.context() as patch:
        async with books(path, OLD, server) as old:
            old.work()
            ids, done = [], {}
            for name in OLD:
                await old.more(6)
                completed = old.completed()
                job = await old.backup(place.directory, at=name)
                assert job["status"] == "succeeded", job
                ids.append(job["id"])
                done[job["id"]] = completed
            unheld = await without_a_point(old, place, patch)
    return Past(place, ids, unheld, done)


async def without_a_point(old: Books, place: DirectoryStore, patch: pytest.MonkeyPatch) -> str:
    """An inconsistent backup, made by switching off everything that prevents it."""
    backups = old.nodes[0].serving.backups
    misfits = []

    def look_away(marks: Any) -> None:
        misfits.append(why_not_together(marks))

    patch.setattr(backups, "_hold", never_hold)
    patch.setattr(backups, "why_not_together", look_away)
    begin_late(old, await spread(old), 16, patch)  # Some of them begin and end in between.
    for _ in range(10):
        job = await old.backup(place.directory)
        if job["status"] == "succeeded" and misfits[-1] is not None:
            return str(job["id"])
    raise AssertionError("the copies fit every time")


def made_from(past: Past, id_: str, path: Path, count: int, **settings: Any) -> Books:
    """New nodes, restored but not started."""
    new = Books(path, tuple(f"m{number}" for number in range(1, count + 1)), **settings)
    manifest = find_backup(past.place, id_)
    for name in new.seats:
        restore(new.config(name), past.place, manifest)
    return new


# -- nothing is lost, nothing is doubled -------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "count"), [(0, 1), (1, 3), (2, 5)])
async def test_everything_pending_runs_to_its_end_once(past: Past, tmp_path: Path, number: int, count: int) -> None:
    id_ = past.backups[number]
    new = made_from(past, id_, tmp_path, count)
    await new.start()
    try:
        await new.settle()
        assert new.audit() == []
        for order in past.done[id_]:
            assert new.outcome(order) == [0, b"3"], "what was completed before is still known"

        new.work(clients=3)
        await new.more(6)
        await new.rest()
        await new.settle()
        assert new.audit() == []
        status = new.nodes[0].ground.record.founding.restored
        assert status.startswith(id_) and all(node.ground.record.founding.restored == status for node in new.nodes)
    finally:
        await new.stop()


async def test_a_backup_without_a_point_in_time_is_found_faulty(past: Past, tmp_path: Path) -> None:
    """What the tests above would find if messages were not held and the copies not compared."""
    with pytest.raises(Corrupted, match="its partitions are inconsistent"):
        manifest = find_backup(past.place, past.unheld)
        verify_backup(past.place, manifest, tmp_path / "scratch", first_group=2, schema_max=SCHEMA)

    new = made_from(past, past.unheld, tmp_path / "new", 1)
    await new.start()
    try:
        await new.settle()
        assert new.audit() != []
    finally:
        await new.stop()


# -- a cluster of its own ----------------------------------------------------------------------------------------------


async def test_only_founders_of_the_same_backup_and_settings_form_a_cluster(
    past: Past, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One of three is restored from another backup. The two others are a majority, but wait."""
    new = Books(tmp_path, ("m1", "m2", "m3"))
    for name, id_ in zip(new.seats, (past.backups[0], past.backups[0], past.backups[1]), strict=True):
        restore(new.config(name), past.place, find_backup(past.place, id_))
    starting = [asyncio.ensure_future(seat.start()) for seat in new.seats.values()]
    try:
        await eventually(lambda: "different founders or backup; every node" in caplog.text, "a refusal")
        for name, others in {"m1": ("m3",), "m2": ("m3",), "m3": ("m1", "m2")}.items():
            await eventually(
                lambda name=name, others=others: all(  # type: ignore[misc]
                    re.search(f"no link to {other}: [^;]*different founders or backup", waits_for(new.seats[name]))
                    for other in others
                ),
                f"{name} says why it waits",
            )
        assert not any(task.done() for task in starting)
    finally:
        await give_up(*starting)

    shutil.rmtree(new.seats["m3"].path)
    restore(new.config("m3"), past.place, find_backup(past.place, past.backups[0]))
    await new.start()
    await new.settle()
    assert new.audit() == []
    await new.stop()


def waits_for(seat: Seat) -> str:
    return seat.node.ground.joining.forming.waits_for if hasattr(seat, "node") and seat.node.is_open else ""


async def give_up(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_restored_cluster_differs_from_the_old_one_and_from_other_restores(past: Past, tmp_path: Path) -> None:
    new = Books(tmp_path, ("m1", "m2", "m3", "m4"))
    config = new.config("m1")
    first, second = (find_backup(past.place, id_) for id_ in past.backups[:2])

    made = {
        identify(config, first),
        identify(config, second),
        identify(replace(config, replication=1), first),
        identify(replace(config, founders=("m1", "m2", "m3")), first),
        identify(replace(config, cluster="other"), first),
    }

    assert len(made) == 5
    assert identify(new.config("m2"), first) == identify(config, first)
    fresh = open_founding(config)
    assert fresh.cluster_id != fresh._replace(restored=identify(config, first)).cluster_id


async def test_a_node_joins_a_restored_cluster_and_gets_its_states(
    past: Past, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.cluster.members.controller.IDLE_S", 0.2)
    new = made_from(past, past.backups[0], tmp_path, 2, replication=3)
    await new.start()
    place = HostPort("127.0.0.1", free_ports(1)[0])
    restored = new.nodes[0].ground.record.founding.restored
    joining = Seat(tmp_path, "m9", {**new.places, "m9": place}, 4, founders=tuple(new.places), restored=restored)
    try:
        await new.nodes[0].serving.operations.add(read_node("m9", str(place), ""))
        async with asyncio.timeout(PATIENCE_S):
            await joining.start()
        new.seats["m9"] = joining
        await eventually(lambda: len(joining.node.ground.replicas.hosted) == 4, "replicas of all partitions")
        await new.settle()
        assert new.audit() == []
    finally:
        await new.stop()


# -- what may happen to it ---------------------------------------------------------------------------------------------


async def test_a_power_loss_soon_after_the_first_start_costs_nothing(past: Past, tmp_path: Path) -> None:
    """At first its state is the fetched one; then it has a snapshot of its own, and the fetched one is removed."""
    new = made_from(past, past.backups[1], tmp_path, 1)
    seat = new.seats["m1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holdfast.cluster.snapshotting.keeper.cut_blocking", full)
        await new.start()
        new.work(clients=2)
        await new.more(3)
        await new.rest()
        await seat.kill()
    assert fetched(seat.path)
    seat.boot = "boot 2"

    await new.start()
    await new.settle()
    assert new.audit() == []
    await eventually(lambda: not fetched(seat.path), "snapshots of its own")
    await seat.kill()
    seat.boot = "boot 3"

    await new.start()
    await new.settle()
    assert new.audit() == []
    await new.stop()


def full(*_: Any) -> None:
    raise OSError(28, "no space")


def fetched(data: Path) -> list[Path]:
    return [path for path in files_in(data / "restored") if path.name.endswith(".snapshot")]


async def test_time_does_not_go_back(past: Past, tmp_path: Path) -> None:
    """A clock that is two hours behind the old cluster's: deadlines that have passed remain passed."""
    new = made_from(past, past.backups[0], tmp_path, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holdfast.cluster.environment.Clock", lambda: Clock(wall=lambda: wall_ms() - 7_200_000))
        await new.start()
    try:
        for partition in new.nodes[0].partitions:
            with partition.state.read() as txn:
                assert queries.meta(txn).now_ms > wall_ms() - 3_600_000
            await eventually(lambda: partition.now_ms() > wall_ms() - 3_600_000, "the time of the state")  # noqa: B023
        await new.settle()
        assert new.audit() == []
    finally:
        await new.stop()


@pytest.mark.parametrize("damage", ["gone", "a wrong byte"])
async def test_a_state_that_is_not_there_at_the_first_start_is_not_replaced_by_nothing(
    past: Past, tmp_path: Path, damage: str
) -> None:
    new = made_from(past, past.backups[0], tmp_path, 1)
    file = fetched(new.seats["m1"].path)[2]
    if damage == "gone":
        file.unlink()
    else:
        raw = bytearray(file.read_bytes())
        raw[-9] ^= 1
        file.write_bytes(raw)

    with pytest.raises(WrongDirectory, match="the restored state of partition 2 is missing or damaged"):
        await new.seats["m1"].start()

    assert not (new.seats["m1"].path / "log").exists(), "it has met nobody"


# -- making the directory ----------------------------------------------------------------------------------------------


async def test_a_restore_that_is_interrupted_anywhere_can_be_run_again(past: Past, tmp_path: Path) -> None:
    new = Books(tmp_path, ("m1",))
    config, manifest = new.config("m1"), find_backup(past.place, past.backups[0])
    interruptions = 0
    while True:
        with pytest.MonkeyPatch.context() as patch:
            power = Power(interruptions)
            patch.setattr(os, "fsync", power.before(os.fsync))
            patch.setattr(os, "rename", power.before(os.rename))
            try:
                made = restore(config, past.place, manifest)
                break
            except PowerLoss:
                interruptions += 1
        if config.data.exists() and any(config.data.iterdir()) and read_founding(config.data) is None:
            with pytest.raises(WrongDirectory, match="holdfast restore again"):
                open_founding(config)
        if interruptions % 2:
            shutil.rmtree(config.data, ignore_errors=True)  # From the beginning, and from where it stopped.
    assert interruptions > 15

    again = restore(config, past.place, manifest)

    assert again.already and again.founding == made.founding == open_founding(config)
    assert len(fetched(config.data)) == 4


class PowerLoss(BaseException):
    pass


class Power:
    def __init__(self, calls: int) -> None:
        self.left = calls

    def before(self, call: Any) -> Any:
        def guarded(*arguments: Any) -> Any:
            if self.left == 0:
                raise PowerLoss
            self.left -= 1
            return call(*arguments)

        return guarded


async def test_a_directory_that_holds_anything_is_left_alone(past: Past, tmp_path: Path) -> None:
    new = Books(tmp_path, ("m1",))
    config, manifest = new.config("m1"), find_backup(past.place, past.backups[0])
    config.data.mkdir()
    (config.data / "thesis.txt").write_text("finished")

    with pytest.raises(
        WrongDirectory, match=r"not empty \(it holds thesis.txt\), and a restore does not overwrite anything"
    ):
        restore(config, past.place, manifest)

    assert [path.name for path in config.data.iterdir()] == ["thesis.txt"]
    (config.data / "thesis.txt").unlink()
    restore(config, past.place, manifest)
    with pytest.raises(WrongDirectory, match="not empty"):
        restore(config, past.place, find_backup(past.place, past.backups[1]))
    (config.data / "log").mkdir()
    with pytest.raises(WrongDirectory, match="not empty"):
        restore(config, past.place, manifest)


async def test_a_node_that_is_no_founder_is_not_restored_but_added(past: Past, tmp_path: Path) -> None:
    new = Books(tmp_path, ("m1", "m2"))
    config, manifest = replace(new.config("m1"), founders=("m2",)), find_backup(past.place, past.backups[0])

    with pytest.raises(BadConfig, match=r"m1 is not listed.*restored = "):
        restore(config, past.place, manifest)
    with pytest.raises(BadConfig, match="use the same backup, founders and replication on every node"):
        restore(replace(new.config("m1"), restored="backup-1.0123456789abcdef"), past.place, manifest)
    with pytest.raises(BadConfig, match="run holdfast restore first"):
        open_founding(replace(new.config("m1"), restored="backup-1.0123456789abcdef"))


async def test_a_directory_of_another_life_is_refused(past: Past, tmp_path: Path) -> None:
    new = Books(tmp_path, ("m1",))
    config = new.config("m1")
    made = restore(config, past.place, find_backup(past.place, past.backups[0]))

    assert open_founding(replace(config, restored=made.founding.restored)) == made.founding
    with pytest.raises(WrongDirectory, match="Use the directory that belongs to this cluster"):
        open_founding(replace(config, restored="backup-20260101-000000-abcdef.0123456789abcdef"))


@pytest.mark.parametrize("what", ["partition", "meta.msgpack", "manifest.json"])
async def test_damage_in_the_store_is_found_before_the_directory_is_one(past: Past, tmp_path: Path, what: str) -> None:
    place = DirectoryStore(tmp_path / "copy", create=True)
    id_ = past.backups[0]
    shutil.copytree(past.place.directory / id_, place.directory / id_)
    files = sorted((place.directory / id_).rglob("*.snapshot" if what == "partition" else what))
    raw = bytearray(files[-1].read_bytes())
    raw[len(raw) // 2] ^= 1
    files[-1].write_bytes(raw)
    new = Books(tmp_path, ("m1",))

    with pytest.raises(Corrupted):
        restore(new.config("m1"), place, find_backup(place, None))

    assert read_founding(new.config("m1").data) is None if new.config("m1").data.exists() else True
    shutil.copytree(past.place.directory / id_, place.directory / id_, dirs_exist_ok=True)
    assert isinstance(find_backup(place, None), Manifest)
    restore(new.config("m1"), place, find_backup(place, None))
