"""Snapshots of a running node: cut during work, the log trimmed up to them, and restarts from them."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from holdfast.cluster.partition.state import State
from holdfast.cluster.snapshotting import keeper as keepers
from holdfast.cluster.snapshotting import service as snapshots
from holdfast.cluster.snapshotting.keeper import Keeper
from holdfast.sdk.frames import Output
from holdfast.sdk.journal import Op
from holdfast.snapshots import files
from holdfast.snapshots.cut import cut_blocking
from holdfast.snapshots.files import SteadyWriter
from holdfast.snapshots.format import Header, SnapshotFile, listed, verify
from holdfast.snapshots.restore import restore_blocking
from holdfast.statemachine import lists
from holdfast.statemachine.effects import Status
from holdfast.statemachine.lists import Order
from holdfast.statemachine.queries import Filter
from tests.cluster.harness import Handled, World, echo, eventually, world
from tests.statemachine import invariants

OFTEN: dict[str, Any] = {"snapshot_entries": 100, "snapshot_interval": 0.0, "log_tail": 50}
SELDOM: dict[str, Any] = {"log_tail": 0}


async def count(handled: Handled) -> None:
    """A counter per key, so that a lost or duplicated call shows."""
    index = handled.step(Op.GET, "total", ["total"])
    found = (await handled.completion(index))[1]
    total = int(found[1:] or b"0") + 1 if found else 1
    handled.step(Op.SET, "set", ["total", str(total).encode()])
    handled.output(str(total).encode())


COUNTER: dict[str, Any] = {"counter:object/add:exclusive": count}


async def fails(handled: Handled) -> None:
    handled.send(Output(handled.id, handled.epoch, [1, 500, "boom", "ValueError"]))


def keeper(it: World, number: int = 0) -> Keeper:
    return it.node.ground.snapshots.keepers[it.node.partitions[number].group.id]


async def snapshot(it: World, number: int = 0) -> SnapshotFile:
    return await keeper(it, number).create()


def base(it: World, number: int = 0) -> int:
    return it.node.partitions[number].group.status().base


def log_bytes(it: World) -> int:
    store = it.node.ground.log._store
    store._measure()
    return store._live_bytes


async def test_a_snapshot_is_cut_during_work_and_the_log_is_trimmed_up_to_it(tmp_path: Path) -> None:
    async with world(tmp_path, partitions=1, **OFTEN) as it:
        await it.register(COUNTER)

        for number in range(1, 121):
            assert await it.call("counter/add", key="k") == [0, str(number).encode()]
        await eventually(lambda: base(it) > 0, "a trimmed log")

        kept = keeper(it)
        assert kept.newest is not None and kept.cuts >= 1
        header = verify(kept.newest.path).header
        assert header.meta.group == 2 and header.meta.members == ("n1",) and header.meta.node == "n1"
        assert base(it) <= header.meta.index - 50, "the tail stays"
        assert it.node.partitions[0].machine.snapshot() is not None


async def test_a_request_for_a_snapshot_during_a_cut_gets_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path, partitions=1) as it:
        await it.register(COUNTER)
        await it.call("counter/add", key="k")
        loop, cutting, go = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

        def late(*args: Any, **options: Any) -> SnapshotFile:
            file = cut_blocking(*args, **options)
            loop.call_soon_threadsafe(cutting.set)
            go.wait()
            return file

        monkeypatch.setattr(keepers, "cut_blocking", late)
        first = asyncio.ensure_future(snapshot(it))
        await cutting.wait()
        await it.call("counter/add", key="k")
        applied = it.node.partitions[0].machine.applied[0]
        second = asyncio.ensure_future(snapshot(it))
        await asyncio.sleep(0)
        go.set()

        assert (await first).header.meta.index < applied <= (await second).header.meta.index


async def test_disk_use_levels_off_under_constant_load(tmp_path: Path) -> None:
    """Log, snapshots and their number: each round writes as much as the previous one, without more disk space."""
    async with world(tmp_path, partitions=1, **OFTEN, snapshot_keep=2) as it:
        await it.register({"echo/say": echo_briefly})
        for _ in range(5):
            for _ in range(120):
                await asyncio.gather(*(it.call("echo/say", bytes(2000)) for _ in range(4)))
            await eventually(lambda: entries_held(it) <= 150, "a log of one tail, and less than one more snapshot")
            assert len(listed(keeper(it).directory)) <= 3

        assert keeper(it).cuts >= 3, "nobody asked for them"
        written = it.node.partitions[0].machine.bytes_applied
        await eventually(lambda: log_bytes(it) < written / 2, "less on disk than was written")


def entries_held(it: World) -> int:
    log = it.node.ground.log.host.replicas[it.node.partitions[0].group.id].log
    return log.last_index - log._trim_from


async def echo_briefly(handled: Handled) -> None:
    handled.output(b"")


async def test_a_node_without_its_state_begins_with_its_snapshot(tmp_path: Path) -> None:
    it = World(tmp_path, partitions=1, **SELDOM)
    await it.start()
    await it.register(COUNTER)
    for _ in range(30):
        await it.call("counter/add", key="k")
    await snapshot(it)
    await eventually(lambda: base(it) > 0, "a trimmed log")
    for _ in range(5):
        await it.call("counter/add", key="k")
    applied = it.node.partitions[0].machine.applied
    await it.kill()
    shutil.rmtree(tmp_path / "node" / "state")

    node = await it.start()

    await eventually(lambda: node.partitions[0].machine.applied[0] >= applied[0], "what was applied before")
    assert await it.call("counter/add", key="k") == [0, b"36"]
    await it.stop()


async def test_a_state_is_restored_from_a_snapshot_whose_name_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was killed may have left names that a power loss still removes."""
    it = World(tmp_path, partitions=1, **SELDOM)
    await it.start()
    await it.register(COUNTER)
    await it.call("counter/add", key="k")
    await keeper(it).create()
    directory = keeper(it).directory
    await it.stop()
    shutil.rmtree(tmp_path / "node" / "state")
    synced: list[Path] = []
    before: list[list[Path]] = []
    monkeypatch.setattr(files, "sync_directory", synced.append)

    def restore(*arguments: Any, **options: Any) -> Header:
        before.append(list(synced))
        return restore_blocking(*arguments, **options)

    monkeypatch.setattr(snapshots, "restore_blocking", restore)
    await it.start()

    top = tmp_path / "node"
    assert before == [[top, top / "snapshots", directory.parent, directory]]
    await it.stop()


async def test_a_machine_that_lost_power_begins_with_its_snapshot(tmp_path: Path) -> None:
    it = World(tmp_path, partitions=2, **SELDOM)
    await it.start()
    await it.register(COUNTER)
    for number in range(40):
        await it.call("counter/add", key=f"k{number % 4}")
    for number in range(2):
        await snapshot(it, number)
    await eventually(lambda: base(it, 0) > 0 and base(it, 1) > 0, "trimmed logs")
    await it.call("counter/add", key="k0")
    await it.kill()
    it.boot = "boot 2"

    await it.start()

    assert await it.call("counter/add", key="k0") == [0, b"12"]
    assert await it.call("counter/add", key="k1") == [0, b"11"]
    await it.stop()


async def test_a_damaged_snapshot_is_passed_over_for_an_older_one(tmp_path: Path) -> None:
    it = World(tmp_path, partitions=1, log_tail=100_000)
    await it.start()
    await it.register(COUNTER)
    files = []
    for _ in range(2):
        for _ in range(10):
            await it.call("counter/add", key="k")
        files.append(await snapshot(it))
    await it.kill()
    raw = bytearray(files[1].path.read_bytes())
    raw[-5] ^= 1
    files[1].path.write_bytes(raw)
    it.boot = "boot 2"

    await it.start()

    assert await it.call("counter/add", key="k") == [0, b"21"]
    await eventually(lambda: keeper(it).newest is not None, "a snapshot found again")
    newest = keeper(it).newest
    assert newest is not None and newest.name == files[0].name
    await it.stop()


async def test_the_state_grows_although_a_snapshot_is_being_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB cannot move the map under a reader: the cut ends, the state grows, and the cut is repeated."""
    monkeypatch.setattr("holdfast.snapshots.cut.SteadyWriter", StuckWriter)
    async with world(tmp_path, partitions=1) as it:
        await it.register(COUNTER)
        await it.call("counter/add", key="k")
        state = it.node.partitions[0].state
        map_bytes = state._env.info()["map_size"]
        cutting = keeper(it).create()
        await eventually(lambda: StuckWriter.stuck, "a cut in the middle")

        threading.Timer(0.1, StuckWriter.go_on.set).start()
        state.grow()

        assert state._env.info()["map_size"] == 2 * map_bytes
        assert not cutting.done() and not listed(keeper(it).directory)
        file = await cutting
        assert verify(file.path).header.meta.index == it.node.partitions[0].machine.applied[0]


class StuckWriter(SteadyWriter):
    """A disk that hangs for a while."""

    go_on = threading.Event()
    stuck = False

    def write(self, piece: bytes | memoryview) -> None:
        StuckWriter.stuck = True
        self.go_on.wait()
        super().write(piece)


async def test_lists_of_a_restored_state_find_tags_failures_and_completions(tmp_path: Path) -> None:
    async with world(tmp_path / "node", partitions=1) as it:
        await it.register({"echo/say": echo, "bad/fails": fails})
        for path in ("echo/say", "bad/fails"):
            command = it.invoke(path, b"1")._replace(tags={"tenant": "acme"})
            await it.node.serving.router.submit(command.id, command)
            await it.reaches(command.id, Status.COMPLETED)
        file = await snapshot(it)

        restore_blocking(file.path, tmp_path / "restored")

        state = State(tmp_path / "restored", owner="", boot="", map_bytes=1 << 20)
        with state.read() as view:
            invariants.check(view)
            acme = lists.ordered(view, Filter(tags=[["tenant", "acme"]]), b"", 10)
            failed = lists.ordered(view, Filter(failure="boom"), b"", 10)
            done = lists.ordered(view, Filter(), b"", 10, order=Order.COMPLETED)
        state.close()
        assert acme is not None and failed is not None and done is not None
        assert {record.service for record in acme.records} == {"echo", "bad"}
        assert [record.service for record in failed.records] == ["bad"] and failed.looked_at == 1
        assert [record.service for record in done.records] == ["bad", "echo"]
