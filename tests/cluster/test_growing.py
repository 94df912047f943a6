"""Nodes join and leave while clients count: the counts add up, and the replicas end up where they should."""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from holdfast.cluster.config import HostPort
from holdfast.cluster.members import controller, leftovers
from holdfast.log.errors import NoRoomHere
from holdfast.log.host import Host
from holdfast.log.messages import GroupId
from holdfast.sdk.ids import NodeId, PartitionNumber
from tests.cluster.harness import PATIENCE_S, FakeEndpoint, eventually
from tests.cluster.load import COUNTER, Load
from tests.cluster.test_store_faults import place
from tests.cluster.test_three_nodes import Seat
from tests.ports import free_ports
from tests.snapshots.conftest import credentials, rclone  # noqa: F401 - fixtures
from tests.snapshots.servers import Server


class Growing:
    """A cluster that begins with its founders. They learn of a new node only when it is added."""

    def __init__(self, path: Path, founders: tuple[str, ...], later: tuple[str, ...], **settings: Any) -> None:
        names = (*founders, *later)
        self.places = {
            name: HostPort("127.0.0.1", port) for name, port in zip(names, free_ports(len(names)), strict=True)
        }
        first = {name: self.places[name] for name in founders}
        zones: dict[str, str] = settings.pop("zones", {})
        partitions: int = settings.pop("partitions", 4)
        self.seats = {
            name: Seat(
                path, name, first if name in founders else {**first, name: self.places[name]}, partitions, founders=founders,
                zone=zones.get(name, ""), **settings,
            )
            for name in names
        }  # fmt: skip
        self.founders = founders
        self.endpoint = FakeEndpoint(COUNTER)

    def up(self) -> list[Seat]:
        return [seat for seat in self.seats.values() if seat.up]

    def urls(self) -> list[str]:
        return [seat.node.doors.urls.ingress for seat in self.up()]

    def table(self) -> dict[PartitionNumber, tuple[NodeId, ...]]:
        """The table that all running nodes agree on; empty if they do not agree yet."""
        tables = [
            {number: each.members for number, each in seat.node.ground.meta.state.membership.table.items()}
            for seat in self.up()
        ]
        return tables[0] if all(table == tables[0] for table in tables) else {}

    def loads(self) -> Counter[str]:
        return Counter(name for members in self.table().values() for name in members)

    async def admin(self, method: str, path: str, at: str = "n1", **more: Any) -> Any:
        url = self.seats[at].node.doors.urls.admin + path
        async with aiohttp.ClientSession() as http, http.request(method, url, **more) as response:
            answer = await response.json()
            assert response.status in (200, 201), answer
            return answer

    async def add(self, name: str) -> None:
        await self.admin("POST", "/cluster/nodes", json={"name": name, "address": str(self.places[name])})
        async with asyncio.timeout(PATIENCE_S):
            await self.seats[name].start()

    async def members_are(self, *names: str) -> None:
        """Only these nodes hold replicas, each holds those in the table, and they are the meta group."""

        def there() -> bool:
            table = self.table()
            held = {
                seat.name: {number for number, members in table.items() if seat.name in members} for seat in self.up()
            }
            return (
                bool(table)
                and {name for members in table.values() for name in members} == {*names}
                and all(len(members) == min(3, len(names)) for members in table.values())
                and all({*seat.node.ground.replicas.hosted} == held[seat.name] for seat in self.up())
            )

        await eventually(there, f"replicas on {names}")


@asynccontextmanager
async def growing(
    path: Path, founders: tuple[str, ...], later: tuple[str, ...] = (), **settings: Any
) -> AsyncIterator[Growing]:
    cluster = Growing(path, founders, later, **settings)
    await asyncio.gather(*(cluster.seats[name].start() for name in founders))
    await cluster.endpoint.start()
    await cluster.seats[founders[-1]].node.ground.registry.register(cluster.endpoint.uri)
    await eventually(
        lambda: all(seat.node.ground.registry.state.deployments for seat in cluster.up()), "the deployment"
    )
    try:
        yield cluster
    finally:
        for seat in cluster.up():
            await seat.node.stop()
        await cluster.endpoint.stop()
        for seat in cluster.seats.values():
            assert not seat.failures, (seat.name, seat.failures)


async def test_a_node_serves_partitions_that_it_does_not_hold(tmp_path: Path) -> None:
    """Five nodes, three replicas of each partition: calls, lookups and admin reads work everywhere."""
    names = ("n1", "n2", "n3", "n4", "n5")
    async with growing(tmp_path, names) as cluster:
        await cluster.members_are(*names)
        assert max(cluster.loads().values()) == 3
        seat = cluster.seats["n5"]
        async with Load(lambda: cluster.urls()[-1:]) as load:
            await load.more(60)

        assert load.errors == [] and len(seat.node.ground.replicas.hosted) < 4
        for key, total in load.totals.items():
            shown = await cluster.admin("GET", f"/services/counter/{key}/state", at="n5")
            assert shown["state"] == {"count": total}
        listed = await cluster.admin("GET", "/invocations?limit=1000", at="n5")
        assert len(listed["invocations"]) == load.done
        one = listed["invocations"][0]["id"]
        assert (await cluster.admin("GET", f"/invocations/{one}", at="n5"))["status"] == "completed"
        assert len((await cluster.admin("GET", f"/invocations/{one}/journal", at="n5"))["steps"]) == 4


async def test_two_nodes_join_and_one_leaves_while_clients_count(tmp_path: Path) -> None:
    async with growing(tmp_path, ("n1", "n2", "n3"), ("n4", "n5")) as cluster:
        async with Load(cluster.urls) as load:
            await load.more()
            await cluster.add("n4")
            await load.more()
            await cluster.add("n5")
            await cluster.members_are("n1", "n2", "n3", "n4", "n5")
            await eventually(lambda: sorted(cluster.loads().values()) == [2, 2, 2, 3, 3], "an even share for each")
            await load.more(50)
            await cluster.admin("POST", "/cluster/nodes/n2/drain?move=true")
            await cluster.members_are("n1", "n3", "n4", "n5")
            await load.more(50)
            await cluster.admin("POST", "/cluster/nodes/n2/remove")
            meta = cluster.seats["n1"].node.ground.meta_group()
            await eventually(lambda: set(meta.status().members) == {"n1", "n3", "n4", "n5"}, "a meta group without n2")
            seat = cluster.seats["n2"]
            seat.up = False
            await seat.node.stop()
            await load.more(50)

        assert load.errors == []
        for key, total in load.totals.items():
            for seat in cluster.up():
                shown = await cluster.admin("GET", f"/services/counter/{key}/state", at=seat.name)
                assert shown["state"] == {"count": total}, "every node tells what clients were told"


async def test_nodes_that_are_stopped_when_they_hold_nothing_are_not_missed(tmp_path: Path) -> None:
    """As `holdfast cluster remove` says: stop it when it has 0 replicas. Four of seven voters, all at once."""
    names = ("n1", "n2", "n3", "n4", "n5", "n6", "n7")
    async with growing(tmp_path, names, partitions=2) as cluster:
        leaving = names[3:]

        async def all_hold_nothing() -> None:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    nodes = (await cluster.admin("GET", "/cluster"))["nodes"]
                    if not any(node["replicas"] for node in nodes if node["name"] in leaving):
                        return
                    await asyncio.sleep(0.02)

        for name in leaving:
            await cluster.admin("POST", f"/cluster/nodes/{name}/drain?move=true")
        await all_hold_nothing()
        told = await asyncio.gather(*(cluster.admin("POST", f"/cluster/nodes/{name}/remove") for name in leaving))
        if any(node["replicas"] for node in told):
            await all_hold_nothing()
        for name in leaving:
            cluster.seats[name].up = False
        await asyncio.gather(*(cluster.seats[name].kill() for name in leaving))

        meta = cluster.seats["n1"].node.ground.meta_group()
        await eventually(
            lambda: set(meta.status().members) == {"n1", "n2", "n3"} and meta.leader is not None,
            "a meta group of three",
        )
        assert (await cluster.admin("GET", "/cluster"))["linearizable"]["nodes"]


async def test_a_newcomer_that_cannot_take_the_meta_group_does_not_keep_others_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its disk is full. It is connected, and first by name."""
    no_room = Host.no_room
    monkeypatch.setattr(Host, "no_room", lambda self: NoRoomHere("full") if self.node == "n2" else no_room(self))
    monkeypatch.setattr(controller, "META_S", 1.0)
    async with growing(tmp_path, ("n1",), ("n2", "n3")) as cluster:
        full = asyncio.ensure_future(cluster.add("n2"))
        await eventually(
            lambda: "n2" in str(cluster.seats["n1"].node.serving.controller.doing), "a change that waits for n2"
        )

        await cluster.add("n3")

        meta = cluster.seats["n1"].node.ground.meta_group()
        await eventually(lambda: "n3" in meta.status().members, "n3 is a member, although n2 came first")
        full.cancel()
        await asyncio.gather(full, return_exceptions=True)
        await cluster.seats["n2"].node.stop()


async def test_a_dead_node_is_replaced_by_one_with_a_new_name(tmp_path: Path) -> None:
    async with growing(tmp_path, ("n1", "n2", "n3"), ("n4",)) as cluster:
        async with Load(cluster.urls) as load:
            await load.more()
            dead = cluster.seats["n3"]
            dead.up = False
            await dead.node.stop()
            await load.more()
            await cluster.add("n4")
            await cluster.admin("POST", "/cluster/nodes/n3/remove")
            await cluster.members_are("n1", "n2", "n4")
            await load.more(50)

        assert load.errors == []
        shown = await cluster.admin("GET", "/cluster", at="n4")
        assert {node["name"]: node["state"] for node in shown["nodes"]}["n3"] == "removed"
        assert shown["linearizable"]["nodes"] is True


async def test_a_node_finds_the_cluster_again_when_all_whom_its_settings_name_are_gone(tmp_path: Path) -> None:
    async with growing(tmp_path, ("n1",), ("n2", "n3"), replication=2, partitions=1) as cluster:
        await cluster.add("n2")
        first = cluster.seats["n1"]
        meta = first.node.ground.meta_group()
        await eventually(lambda: meta.transfer("n2") or meta.leader == "n2", "a second member of the meta group")
        await eventually(lambda: cluster.seats["n2"].node.ground.meta_group().is_leader, "n2 leads it")
        await cluster.add("n3")  # It does not know n2, which must invite it.
        await cluster.admin("POST", "/cluster/nodes/n1/remove")
        await eventually(lambda: not first.node.ground.replicas.hosted, "nothing left on n1")
        await eventually(lambda: set(cluster.seats["n2"].node.ground.meta_group().status().members) == {"n2", "n3"})
        first.up = False
        await first.node.stop()
        await asyncio.gather(*(cluster.seats[name].kill() for name in ("n2", "n3")))

        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(cluster.seats[name].start() for name in ("n2", "n3")))

        await cluster.members_are("n2", "n3")
        async with Load(cluster.urls) as load:
            await load.more(20)
        assert load.errors == []


@pytest.mark.parametrize("source", ["the leader", "S3"])
async def test_a_new_member_joins_by_snapshot(tmp_path: Path, source: str, request: pytest.FixtureRequest) -> None:
    """The logs of the others no longer reach back to the beginning."""
    stores = {}
    if source == "S3":
        request.getfixturevalue("credentials")
        server: Server = request.getfixturevalue("rclone")
        stores["snapshots"] = place(server.endpoint_url, prefix=secrets.token_hex(4))
    async with growing(tmp_path, ("n1", "n2", "n3"), ("n4",), partitions=1, log_tail=0, **stores) as cluster:
        async with Load(cluster.urls) as load:
            await load.more(30)
            old = cluster.up()
            await asyncio.gather(*(seat.node.ground.snapshots.keepers[GroupId(2)].create() for seat in old))
            await eventually(
                lambda: all(
                    seat.node.ground.replicas.hosted[PartitionNumber(0)].group.status().base > 0 for seat in old
                ),
                "trimmed logs",
            )
            leader = next(seat for seat in old if seat.node.ground.replicas.hosted[PartitionNumber(0)].group.is_leader)
            if stores:
                await eventually(
                    lambda: leader.node.ground.snapshots.keepers[GroupId(2)].published is not None,
                    "a published snapshot",
                )
            await cluster.add("n4")
            leaving = next(seat.name for seat in old if seat is not leader)
            await cluster.admin("POST", f"/cluster/nodes/{leaving}/drain?move=true")
            await cluster.members_are(*({"n1", "n2", "n3", "n4"} - {leaving}))
            await load.more(30)

        assert load.errors == []
        assert cluster.seats["n4"].node.ground.snapshots.keepers[GroupId(2)].installs >= 1
        assert (leader.node.ground.snapshots.bytes_served == 0) == (source == "S3"), "the store spares the leader"


async def test_a_node_that_lost_its_state_while_members_changed_takes_part_again(tmp_path: Path) -> None:
    async with growing(tmp_path, ("n1", "n2", "n3"), ("n4",), partitions=1, log_tail=0) as cluster:
        async with Load(cluster.urls) as load:
            await load.more(30)
        old = cluster.up()
        await asyncio.gather(*(seat.node.ground.snapshots.keepers[GroupId(2)].create() for seat in old))
        await eventually(
            lambda: all(seat.node.ground.replicas.hosted[PartitionNumber(0)].group.status().base > 0 for seat in old),
            "trimmed logs",
        )
        leader = next(seat for seat in old if seat.node.ground.replicas.hosted[PartitionNumber(0)].group.is_leader)
        away, leaving = (seat for seat in old if seat is not leader)
        await cluster.add("n4")
        await away.kill()
        shutil.rmtree(away.path / "state")
        shutil.rmtree(away.path / "snapshots")
        await cluster.admin("POST", f"/cluster/nodes/{leaving.name}/drain?move=true", at=leader.name)
        await cluster.members_are(leader.name, away.name, "n4")

        await away.start()

        goal = leader.node.ground.replicas.hosted[PartitionNumber(0)].group.status().commit
        await eventually(
            lambda: (
                0 in away.node.ground.replicas.hosted
                and away.node.ground.replicas.hosted[PartitionNumber(0)].group.status().applied >= goal
            )
        )
        shown = await cluster.admin("GET", "/services/counter/key 1/state", at=away.name)
        assert load.errors == [] and shown["state"] == {"count": load.totals["key 1"]}


def traces(seat: Seat) -> dict[str, list[str]]:
    """Files of partitions on a node's disk, by kind, except tombstones of the log."""
    log = seat.node.ground.log
    snapshots = seat.path / "snapshots" / log.disk
    return {
        "state": sorted(path.name for path in (seat.path / "state").glob("*")),
        "snapshots": sorted(path.name for path in snapshots.glob("*")),
        "log": [name for name in log._store.tables() if name.startswith("log.") and name != "log.1"],
    }


async def test_a_moved_partition_is_deleted_and_a_returning_one_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "QUIET_S", 0.2)
    async with growing(tmp_path, ("n1", "n2", "n3"), ("n4",)) as cluster:
        async with Load(cluster.urls) as load:
            await cluster.add("n4")
            await eventually(lambda: sorted(cluster.loads().values()) == [3, 3, 3, 3], "an even share for each")
            seat = cluster.seats["n2"]
            for number in range(4):
                await cluster.admin("POST", f"/cluster/partitions/{number}/snapshot")
            assert traces(seat)["state"] and traces(seat)["log"]
            await cluster.admin("POST", "/cluster/nodes/n2/drain?move=true")
            await cluster.members_are("n1", "n3", "n4")

            await eventually(lambda: not any(traces(seat).values()), "nothing left on n2")
            await load.more(30)
            await cluster.admin("POST", "/cluster/nodes/n2/undrain")
            await eventually(lambda: sorted(cluster.loads().values()) == [3, 3, 3, 3], "its share again")
            await load.more(30)
            await eventually(lambda: len(traces(seat)["state"]) == 3, "and nothing of what it does not hold")

            dead = cluster.seats["n3"]  # Now n2 is needed: the returned one is a replica like any other.
            dead.up = False
            await dead.node.stop()
            await load.more(30)

        assert load.errors == []
        for key, total in load.totals.items():
            shown = await cluster.admin("GET", f"/services/counter/{key}/state", at="n2")
            assert shown["state"] == {"count": total}


async def test_leftovers_of_an_earlier_life_are_deleted_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process died between forgetting the log of a partition and deleting its files."""
    monkeypatch.setattr(leftovers, "QUIET_S", 0.2)

    async def stuck(number: int) -> None:
        await asyncio.Event().wait()

    async with growing(tmp_path, ("n1", "n2"), replication=1) as cluster:
        await eventually(lambda: sorted(cluster.loads().values()) == [2, 2], "an even share for each")
        seat = cluster.seats["n2"]
        monkeypatch.setattr(seat.node.ground.replicas, "delete", stuck)
        await cluster.admin("POST", "/cluster/nodes/n2/drain?move=true")
        await eventually(lambda: not traces(seat)["log"], "the logs forgotten")
        await seat.kill()

        assert list((seat.path / "state").iterdir()), "the files are still there"
        await seat.start()
        await eventually(lambda: not any(traces(seat).values()), "nothing left on n2")
        await cluster.admin("POST", "/cluster/nodes/n2/undrain")
        await eventually(lambda: sorted(cluster.loads().values()) == [2, 2], "its share again")


async def test_replicas_are_kept_in_different_zones(tmp_path: Path) -> None:
    """Two processes on each of two machines: after every move, the replicas of a partition are on different machines."""
    zones = {"n1": "a", "n2": "a", "n3": "b", "n4": "b"}

    def apart() -> bool:
        return all({zones[name] for name in members} == {"a", "b"} for members in cluster.table().values())

    async with growing(tmp_path, ("n1", "n2", "n3", "n4"), zones=zones, replication=2) as cluster:
        await eventually(lambda: len(cluster.table()) == 4, "the partition table")
        assert apart() and set(cluster.loads().values()) == {2}

        await cluster.admin("POST", "/cluster/nodes/n3/drain?move=true")
        await eventually(lambda: cluster.table() and "n3" not in cluster.loads(), "nothing left on n3")
        assert apart() and cluster.loads()["n4"] == 4, "all of them went to the other process of its machine"

        await cluster.admin("POST", "/cluster/nodes/n3/undrain")
        await eventually(lambda: set(cluster.loads().values()) == {2}, "an even share for each")
        assert apart()
