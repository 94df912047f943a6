"""Backups of a running cluster: one point in time for all partitions, whatever changes in the meantime."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from holdfast.cluster.backup import job as backup_module
from holdfast.cluster.backup.job import Backup, Backups, read_place
from holdfast.cluster.partition.hold import Hold
from holdfast.sdk import Server
from holdfast.sdk.ids import PartitionNumber, partition_of
from holdfast.sdk.journal import Op
from holdfast.snapshots.backups import Interrupted, Manifest, find_backup, list_backups, verify_backup
from holdfast.snapshots.directory import DirectoryStore
from holdfast.statemachine import queries
from holdfast.statemachine.tables import SCHEMA
from tests.cluster.bookkeeping import Books, books, ended, files_in, handlers
from tests.cluster.harness import Handled, echo, eventually, world

NAMES = ("n1", "n2", "n3")

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def place(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "place", create=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Server]:
    async with handlers() as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def three(tmp_path_factory: pytest.TempPathFactory, server: Server) -> AsyncIterator[Books]:
    """Three nodes for all tests that leave them unchanged."""
    async with books(tmp_path_factory.mktemp("three"), NAMES, server) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def it(three: Books) -> AsyncIterator[Books]:
    """With clients that constantly place orders. In the end, no order may be lost or duplicated."""
    three.work(clients=4)
    await three.more(4)
    yield three
    await three.rest()
    await three.settle()
    assert three.audit() == []
    await eventually(lambda: leftovers(three) == [], "nothing left on the disks of the nodes")


def leftovers(it: Books) -> list[Path]:
    """Files of backups on the disks of the nodes."""
    return [path for seat in it.seats.values() for path in files_in(seat.path / "backups")]


# -- holding -----------------------------------------------------------------------------------------------------------


async def test_without_a_hold_no_delivery_waits_even_for_a_turn() -> None:
    hold = Hold()
    waiting = hold.over()

    with pytest.raises(StopIteration):
        waiting.send(None)


async def test_a_hold_is_over_when_the_last_one_lets_go() -> None:
    hold = Hold()
    hold.begin("a", 60.0)
    hold.begin("b", 60.0)
    waiting = asyncio.ensure_future(hold.over())
    hold.end("a")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done()

    hold.end("b")

    async with asyncio.timeout(10):
        await waiting


async def test_a_hold_ends_by_itself() -> None:
    hold = Hold()
    hold.begin("a", 0.05)
    hold.begin("b", 0.01)

    async with asyncio.timeout(10):
        await hold.over()

    hold.end("a")  # A late request is harmless.
    async with asyncio.timeout(10):
        await hold.over()


async def test_while_a_partition_is_held_its_messages_neither_leave_nor_are_forgotten(tmp_path: Path) -> None:
    async def calls(handled: Handled) -> None:
        if handled.length == 1:
            handled.step(Op.CALL, "0/call/0", ["kv", "put", handled.input.decode(), b"", {}])
        outcome = handled.journal[1].outcome if len(handled.journal) > 1 else await handled.completion(1)
        assert outcome is not None
        handled.output(b"done")

    async with world(tmp_path, partitions=2) as it:
        await it.register({"caller/call": calls, "kv:object/put:exclusive": echo})
        router, (here, there) = it.node.serving.router, it.node.partitions
        caller = next(found for _ in range(1000) if partition_of(found := router.mint("caller"), 2) == 0)
        key = next(key for key in map(str, range(1000)) if partition_of(router.mint("kv", key), 2) == 1)

        here.messages.begin("test", 60.0)
        calling = asyncio.ensure_future(it.call("caller/call", key.encode(), ident=caller))
        await eventually(lambda: outbox(here), "a message for the other partition")
        await it.call("caller/call", key.encode(), ident=router.mint("kv", key))  # The other direction is not held.
        assert not calling.done() and taken(there) == 0

        here.messages.end("test")
        assert await calling == [0, b"done"]
        await eventually(lambda: not outbox(here), "an empty outbox")


def outbox(partition: Any) -> list[bytes]:
    with partition.state.read() as txn:
        return queries.outbox(txn, 1 - partition.number, 0, 10)[1]


def taken(partition: Any) -> int:
    from holdfast.statemachine.marks import read_marks

    with partition.state.read() as txn:
        return read_marks(txn).taken.get(1 - partition.number, 0)


# -- the point in time -------------------------------------------------------------------------------------------------


async def test_backups_under_load_are_whole_and_their_partitions_fit(
    tmp_path: Path, place: DirectoryStore, it: Books
) -> None:
    for name in NAMES:
        job = await it.backup(place.directory, at=name)
        assert job["status"] == "succeeded", job
        await it.more(2)

    listed = list_backups(place, schema_max=SCHEMA)
    assert len(listed) == 3
    for found in listed:
        assert isinstance(found, Manifest) and found.partitions == 4 and found.cluster == "holdfast"
        verify_backup(place, found, tmp_path / "scratch", first_group=2, schema_max=SCHEMA)


async def test_without_a_hold_the_copies_do_not_fit_and_are_no_backup(
    place: DirectoryStore, it: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backup_module, "TRIES", 1)
    monkeypatch.setattr(it.nodes[0].serving.backups, "_hold", never_hold)
    begin_late(it, await spread(it), 5, monkeypatch)
    for _ in range(10):  # A leader may move at that moment, or no request may be late.
        job = await it.backup(place.directory)
        if job["error"] and (" has message " in job["error"] or " forgot message " in job["error"]):
            break

    assert job["status"] == "failed" and "message" in (job["error"] or ""), job
    assert job["id"] not in {found.id for found in list_backups(place) if isinstance(found, Manifest)}


async def test_a_leader_that_moves_in_the_middle_only_costs_a_round(
    tmp_path: Path, place: DirectoryStore, it: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    backups = it.nodes[0].serving.backups
    hold = backups._hold
    moved: list[str] = []

    async def hold_and_move(token: str, by_node: Mapping[str, list[PartitionNumber]]) -> None:
        await hold(token, by_node)
        if not moved:
            leader = await it.leader(2)
            moved.append(leader.name)
            await leader.node.serving.handover.transfer(PartitionNumber(2), None, leader.name)

    monkeypatch.setattr(backups, "_hold", hold_and_move)

    job = await it.backup(place.directory)

    assert moved and job["status"] == "succeeded" and job["rounds"] >= 2, job
    verify_backup(place, find_backup(place, None), tmp_path / "scratch", first_group=2, schema_max=SCHEMA)


async def spread(it: Books) -> str:
    """Leaders on at least two nodes. Returns a node that leads something and does not make the backup."""
    await eventually(
        lambda: any(it.seats[name].node.serving.router.led_here() for name in NAMES[1:]), "leaders elsewhere"
    )
    return next(name for name in NAMES[1:] if it.seats[name].node.serving.router.led_here())


def begin_late(it: Books, name: str, orders: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The partitions that this node leads are copied after this many more orders."""
    node = it.seats[name].node
    begin = node.serving.backups.copies.begin

    async def late(peer: str, argument: Any) -> Any:
        await it.more(orders)
        return await begin(argument)

    monkeypatch.setitem(node.ground.rpc._handlers, "backup-begin", late)


async def never_hold(*_: Any) -> None:
    """Replaces `Backups._hold`."""


@pytest.mark.parametrize("registered", ["before", "meanwhile"])
async def test_a_deployment_removed_during_a_backup_is_not_missed(
    tmp_path: Path, place: DirectoryStore, server: Server, monkeypatch: pytest.MonkeyPatch, registered: str
) -> None:
    """A partition may have been copied with an invocation of it."""
    async with books(tmp_path, ("n1",), server) as it, handlers() as other:
        registry, backups = it.nodes[0].ground.registry, it.nodes[0].serving.backups
        begin, begun = backups._begin, 0
        if registered == "before":
            await registry.register(other.uri)

        async def begin_and_remove(*arguments: Any) -> Any:
            nonlocal begun
            begun += 1
            if begun == 1:
                brief = (await registry.register(other.uri)).deployment.id
                await registry.remove(brief, force=True)
            return await begin(*arguments)

        monkeypatch.setattr(backups, "_begin", begin_and_remove)

        job = await it.backup(place.directory)

        assert job["status"] == "succeeded" and job["rounds"] == begun == 2, job


# -- interruptions -----------------------------------------------------------------------------------------------------


async def begun_and_stuck(backups: Backups, place: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> Backup:
    """A backup whose copies never end."""
    stuck = asyncio.Event()

    async def never(*_: Any) -> None:
        stuck.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(backups, "_sent", never)
    job = backups.begin(str(place.directory))
    async with asyncio.timeout(60):
        await stuck.wait()
    return job


async def test_a_cancelled_backup_leaves_nothing(
    place: DirectoryStore, it: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    backups = it.nodes[0].serving.backups
    job = await begun_and_stuck(backups, place, monkeypatch)
    assert list_backups(place) == [Interrupted(job["id"])]

    elsewhere = it.nodes[1].serving.backups
    assert (await elsewhere.show(job["id"]))["status"] == "running"
    assert (await elsewhere.cancel(job["id"]))["status"] == "cancelled"

    assert list_backups(place) == []
    await eventually(lambda: leftovers(it) == [], "nothing left on the disks of the nodes")
    monkeypatch.undo()
    assert (await it.backup(place.directory))["status"] == "succeeded"


async def test_a_node_that_dies_in_the_middle_costs_a_round_and_the_backup_continues_with_the_others(
    tmp_path: Path, place: DirectoryStore, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backup_module, "LOST_S", 0.5)
    async with books(tmp_path, NAMES, server) as it:
        it.work(clients=2)
        await it.more(5)
        victim = await spread(it)
        backups = it.nodes[0].serving.backups
        begin = backups._begin
        killed: list[str] = []

        async def begin_and_kill(*arguments: Any) -> Any:
            marks = await begin(*arguments)
            if not killed:
                killed.append(victim)
                await it.rest()
                await it.seats[victim].kill()
            return marks

        monkeypatch.setattr(backups, "_begin", begin_and_kill)

        job = await it.backup(place.directory)

        assert job["status"] == "succeeded" and job["rounds"] >= 2, job
        assert victim not in {row["node"] for row in job["partitions"]}
        verify_backup(place, find_backup(place, None), tmp_path / "scratch", first_group=2, schema_max=SCHEMA)


async def test_abandoned_copies_are_released(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.cluster.backup.copies.LEASE_S", 0.1)
    async with books(tmp_path, ("n1",), server) as it:
        copies = it.nodes[0].serving.backups.copies
        rows = await copies.begin(["backup/1", [0, 1, 2, 3]])
        assert [number for number, *_ in rows] == [0, 1, 2, 3]

        await eventually(lambda: not copies._rounds and not leftovers(it), "no copies")

        it.nodes[0].ground.replicas.hosted[PartitionNumber(0)].state.grow()  # There are no readers.


async def test_copies_of_a_killed_node_are_removed_when_it_restarts(tmp_path: Path) -> None:
    async with world(tmp_path, partitions=1) as it:
        await it.kill()
        left = tmp_path / "node" / "backups" / "backup-1.1" / "0000" / ".cutting-1"
        left.parent.mkdir(parents=True)
        left.write_bytes(b"half a state")

        await it.start()

        assert not (tmp_path / "node" / "backups").exists()


async def test_a_node_that_stops_does_not_finish_its_backup_first(
    tmp_path: Path, place: DirectoryStore, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with books(tmp_path, ("n1",), server) as it:
        backups = it.nodes[0].serving.backups
        job = await begun_and_stuck(backups, place, monkeypatch)

        await it.stop()

        assert backups.recent()[0]["status"] == "cancelled"
        assert list_backups(place) == [Interrupted(job["id"])], "it is in nobody's way, and can be deleted"


async def test_an_unusable_store_is_reported_before_anything_is_held(tmp_path: Path, server: Server) -> None:
    async with books(tmp_path, ("n1",), server) as it:
        job = await it.backup(tmp_path / "missing")

        assert job["status"] == "failed" and job["rounds"] == 0
        assert job["error"] and "the directory does not exist" in job["error"] and "Create it" in job["error"]


async def test_a_directory_that_the_nodes_do_not_share_is_no_place_for_a_backup(
    tmp_path: Path, place: DirectoryStore, it: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = DirectoryStore(tmp_path / "another machine", create=True)
    monkeypatch.setattr(it.nodes[0].environment, "open_store", lambda url: other)

    job = await it.backup(place.directory)

    assert job["status"] == "failed" and "must be shared by all nodes" in (job["error"] or ""), job


async def test_one_node_makes_one_backup_at_a_time(tmp_path: Path, place: DirectoryStore, server: Server) -> None:
    from holdfast.cluster.errors import BadRequest, Conflict, NotFound

    async with books(tmp_path, ("n1",), server) as it:
        backups = it.nodes[0].serving.backups
        job = backups.begin(str(place.directory))
        with pytest.raises(Conflict, match=job["id"]):
            backups.begin(str(place.directory))
        await ended(it.nodes[0], job["id"])
        for nonsense in (None, 7, "", "ftp://x", "s3://user:secret@bucket"):
            with pytest.raises(BadRequest):
                read_place(nonsense)
        with pytest.raises(NotFound):
            await backups.show("backup-1")
        assert [each["id"] for each in backups.recent()] == [job["id"]]
