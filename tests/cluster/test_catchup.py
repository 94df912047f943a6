"""Nodes that fell behind, or lost their state, and catch up while the others work."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.cluster.partition.machine import PartitionMachine
from holdfast.cluster.partition.state import State
from holdfast.cluster.snapshotting import catchup
from holdfast.cluster.snapshotting.keeper import Keeper
from holdfast.snapshots.format import listed
from tests.cluster.harness import eventually
from tests.cluster.test_snapshots import COUNTER
from tests.cluster.test_three_nodes import Seat, Three, three


@asynccontextmanager
async def counting(path: Path, **settings: Any) -> AsyncIterator[Three]:
    async with three(path, COUNTER, partitions=1, log_tail=0, **settings) as cluster:
        await cluster.led()
        yield cluster


def keeper(seat: Seat) -> Keeper:
    return next(iter(seat.node.ground.snapshots.keepers.values()))


def status(seat: Seat) -> Any:
    return seat.node.partitions[0].group.status()


async def follower(cluster: Three) -> Seat:
    leader = await cluster.leader(0)
    return next(seat for seat in cluster.up() if seat is not leader)


async def add(cluster: Three, count: int) -> int:
    total = 0
    for _ in range(count):
        outcome = await cluster.up()[0].call("counter/add", key="k")
        total = int(outcome[1])
    return total


async def trim_all(cluster: Three) -> None:
    """Every running node takes a snapshot and trims its log up to it."""
    for seat in cluster.up():
        await came_back(cluster, seat)
        await keeper(seat).create()
    await eventually(lambda: all(status(seat).base > 0 for seat in cluster.up()), "trimmed logs")


async def came_back(cluster: Three, seat: Seat) -> None:
    index = status(await cluster.leader(0)).commit
    # A node without a state serves before it has one.
    await eventually(lambda: seat.node.partitions and status(seat).applied >= index, "a follower that caught up")


def totals(cluster: Three) -> set[tuple[tuple[bytes, bytes], ...]]:
    """The totals of each replica; a single element if they agree."""
    found = set()
    for seat in cluster.up():
        with seat.node.partitions[0].state.read() as txn:
            found.add(tuple(txn.scan(b"S", b"T")))
    return found


async def test_a_follower_behind_the_log_catches_up_by_a_snapshot_of_the_leader(tmp_path: Path) -> None:
    async with counting(tmp_path) as cluster:
        await add(cluster, 3)
        away = await follower(cluster)
        await away.kill()
        await add(cluster, 40)
        await trim_all(cluster)
        await add(cluster, 3)

        await away.start()

        await came_back(cluster, away)
        assert keeper(away).installs == 1
        assert status(away).base > 0
        assert await add(cluster, 1) == 47
        await came_back(cluster, away)
        await eventually(lambda: len(totals(cluster)) == 1, "replicas that agree")


async def test_a_follower_catches_up_under_load(tmp_path: Path) -> None:
    """Snapshots are cut and the log is trimmed constantly, and no count is lost or duplicated."""
    often = {"snapshot_entries": 40, "snapshot_interval": 0.0}
    async with counting(tmp_path, **often) as cluster:
        away = await follower(cluster)
        await away.kill()
        loading = True
        total = 0

        async def load() -> None:
            nonlocal total
            while loading:
                total = await add(cluster, 1)

        working = asyncio.ensure_future(load())
        await eventually(lambda: (leader := cluster.leading(0)) and status(leader).base > 20, "a trimmed log")
        await away.start()
        await eventually(lambda: keeper(away).installs >= 1, "an installed snapshot")
        await came_back(cluster, away)
        loading = False
        await working

        assert await add(cluster, 1) == total + 1
        await came_back(cluster, away)
        await eventually(lambda: len(totals(cluster)) == 1, "replicas that agree")


async def test_a_follower_takes_it_from_the_shared_store(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    async with counting(tmp_path, snapshots=str(tmp_path / "store")) as cluster:
        away = await follower(cluster)
        await away.kill()
        await add(cluster, 20)
        await trim_all(cluster)
        leader = await cluster.leader(0)
        await eventually(lambda: keeper(leader).published is not None, "a published snapshot")

        await away.start()

        await came_back(cluster, away)
        assert keeper(away).installs == 1
        assert leader.node.ground.snapshots.bytes_served == 0, "the leader was spared"
        assert await add(cluster, 1) == 21


@pytest.mark.parametrize("lost", ["one snapshot", "all of it"])
async def test_what_the_store_lost_comes_from_the_leader(tmp_path: Path, lost: str) -> None:
    """A snapshot may have been pruned since it was offered, which is no reason for a warning."""
    (tmp_path / "store").mkdir()
    async with counting(tmp_path, snapshots=str(tmp_path / "store")) as cluster:
        away = await follower(cluster)
        await away.kill()
        await add(cluster, 20)
        await trim_all(cluster)
        leader = await cluster.leader(0)
        await eventually(lambda: keeper(leader).published is not None, "a published snapshot")
        if lost == "all of it":
            shutil.rmtree(tmp_path / "store")
        else:
            for path in (tmp_path / "store").rglob("*.snapshot"):
                path.unlink()

        await away.start()

        await came_back(cluster, away)
        assert leader.node.ground.snapshots.bytes_served > 0
        complained = away.node.ground.snapshots.store_complaints.error is not None
        assert complained == (lost == "all of it"), "it says what is wrong, if anything is"
        assert await add(cluster, 1) == 21


@pytest.mark.parametrize("source", ["a peer", "the shared store"])
async def test_a_node_without_its_state_and_its_snapshots_gets_both_from_elsewhere(tmp_path: Path, source: str) -> None:
    stores = {"snapshots": str(tmp_path / "store")} if source == "the shared store" else {}
    (tmp_path / "store").mkdir()
    async with counting(tmp_path, **stores) as cluster:
        await add(cluster, 20)
        await trim_all(cluster)
        leader, away = await cluster.leader(0), await follower(cluster)
        if stores:
            await eventually(lambda: keeper(leader).published is not None, "a published snapshot")
        await away.kill()
        shutil.rmtree(away.path / "state")
        shutil.rmtree(away.path / "snapshots")
        assert await add(cluster, 5) == 25

        await away.start()

        await came_back(cluster, away)
        assert listed(keeper(away).directory)
        if stores:
            assert leader.node.ground.snapshots.bytes_served == 0, "the leader was spared"
        assert await add(cluster, 1) == 26
        await came_back(cluster, away)
        await eventually(lambda: len(totals(cluster)) == 1, "replicas that agree")
        await away.restart()
        await came_back(cluster, away)


async def test_a_fetched_snapshot_outlives_a_power_loss(tmp_path: Path) -> None:
    async with counting(tmp_path) as cluster:
        away = await follower(cluster)
        await away.kill()
        await add(cluster, 20)
        await trim_all(cluster)
        await away.start()
        await came_back(cluster, away)
        assert keeper(away).installs == 1
        await away.kill()
        away.boot = "boot 2"

        await away.start()

        await came_back(cluster, away)
        assert keeper(away).installs == 0, "it has it"
        assert await add(cluster, 1) == 21


class PowerLoss(Exception):
    """Everything of this process is lost from now on."""


@pytest.fixture(params=["fetched", "staged", "ours", "swapped"])
def death(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


@pytest.mark.parametrize("boot", ["boot 1", "boot 2"])
async def test_a_node_that_dies_while_it_catches_up_has_the_old_state_or_the_new(
    tmp_path: Path, death: str, boot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed (the same boot) or without power (another boot), after each step. It restarts and catches up."""
    async with counting(tmp_path) as cluster:
        await add(cluster, 3)
        away = await follower(cluster)
        await away.kill()
        await add(cluster, 20)
        await trim_all(cluster)
        dead = asyncio.Event()
        _die_after(death, dead, monkeypatch)
        await away.start()
        await asyncio.wait_for(dead.wait(), 60)
        await away.kill()
        monkeypatch.undo()
        away.boot = boot
        away.failures.clear()

        await away.start()

        await came_back(cluster, away)
        assert await add(cluster, 1) == 24
        await came_back(cluster, away)
        await eventually(lambda: len(totals(cluster)) == 1, "replicas that agree")


def _die_after(step: str, dead: asyncio.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: object, **__: object) -> Any:
        dead.set()
        raise PowerLoss

    match step:
        case "fetched":

            async def stage(*_: object, **__: object) -> Any:
                die()

            monkeypatch.setattr(catchup, "stage", stage)
        case "staged":
            monkeypatch.setattr(catchup, "move_into_place", die)
        case "ours":
            monkeypatch.setattr(PartitionMachine, "swap", die)
        case "swapped":
            whole = State.swap

            def swap(self: State, staged: Any) -> None:
                whole(self, staged)
                die()

            monkeypatch.setattr(State, "swap", swap)
