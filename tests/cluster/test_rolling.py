"""Nodes that stop, drain or hand over under load: clients see only answers, and each counts once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp

from holdfast.sdk.ids import NodeId, PartitionNumber
from tests.cluster.harness import PATIENCE_S, eventually
from tests.cluster.load import COUNTER, Load
from tests.cluster.test_three_nodes import NAMES, Three, three


def urls(cluster: Three) -> list[str]:
    return [seat.node.doors.urls.ingress for seat in cluster.up()]


async def test_a_rolling_restart_under_load_shows_no_error_to_any_client(tmp_path: Path) -> None:
    """Neither with a new connection per request, nor with reused connections."""
    async with three(tmp_path, COUNTER, partitions=4) as cluster:
        await cluster.led()
        places = {seat.name: seat.node.doors.urls.ingress for seat in cluster.up()}

        def known() -> list[str]:
            """Clients know all nodes, including the one that is down: it refuses, and they try another."""
            return [seat.node.doors.urls.ingress if seat.up else places[seat.name] for seat in cluster.seats.values()]

        async with Load(known) as fresh, Load(known, keep_alive=True, name="pooled") as pooled:

            async def more(count: int = 20) -> None:
                await asyncio.gather(fresh.more(count), pooled.more(count))

            for name in NAMES:
                await more()
                seat = cluster.seats[name]
                stopping = asyncio.ensure_future(seat.node.stop())
                await more()
                async with asyncio.timeout(PATIENCE_S):
                    await stopping
                places[name] = seat.node.doors.urls.ingress
                seat.up = False
                await more()
                await seat.start()
                await cluster.led()
            await more(50)

        assert fresh.errors == [] and pooled.errors == []
        assert fresh.stale == 0, "a connection of its own is never broken"
        for load in (fresh, pooled):
            assert len(load.totals) == 6 and min(load.totals.values()) > 5
            print(f"{load.done} requests, the slowest {load.slowest}, {load.refused} refused, {load.stale} stale")
        hurried = sum(seat.node.serving.handover.hurried for seat in cluster.up())
        print(f"{hurried} partitions were handed over in a hurry")


async def test_a_stopping_node_hands_over_and_finishes_what_is_in_progress(tmp_path: Path) -> None:
    async with three(tmp_path, COUNTER, partitions=3) as cluster:
        await cluster.led()
        seat = await cluster.leader(0)

        await seat.node.serving.handover.leave(PATIENCE_S)

        assert not seat.node.serving.handover.led_here() and not seat.node.ground.meta_group().is_leader
        await eventually(lambda: cluster.leading(0) not in (None, seat))


async def test_leaders_spread_over_the_nodes_by_themselves(tmp_path: Path) -> None:
    async with three(tmp_path, COUNTER, partitions=6) as cluster:
        await cluster.led()
        first = cluster.seats["n1"].node

        def spread() -> bool:
            return [len(seat.node.serving.handover.led_here()) for seat in cluster.up()] == [2, 2, 2]

        for number in range(6):
            async with asyncio.timeout(PATIENCE_S):
                while (leader := (await cluster.leader(number)).node) is not first:
                    await leader.serving.handover.move(leader.ground.replicas.hosted[PartitionNumber(number)], "n1")
        await eventually(spread, "two leaderships on each node")


async def test_a_drained_node_leads_nothing_until_it_is_taken_back(tmp_path: Path) -> None:
    async with three(tmp_path, COUNTER, partitions=3) as cluster, aiohttp.ClientSession() as http:
        await cluster.led()

        async def ask(at: str, path: str) -> tuple[int, Any]:
            async with http.post(f"{cluster.seats[at].node.doors.urls.admin}{path}") as response:
                return response.status, await response.json()

        drained = await cluster.leader(0)
        other = next(name for name in NAMES if name != drained.name)
        async with Load(lambda: urls(cluster)) as load:
            await load.more()
            status, shown = await ask(other, f"/cluster/nodes/{drained.name}/drain")
            assert (status, shown["state"], shown["leads"]) == (200, "draining", 0)
            await load.more()
            refused = await ask(other, f"/cluster/partitions/0/transfer?to={drained.name}")
            assert refused[0] == 409 and "cannot lead now" in refused[1]["message"]
            assert drained.node.serving.handover.led_here() == [] and not drained.node.ground.meta_group().is_leader

            assert (await ask(other, f"/cluster/nodes/{drained.name}/undrain"))[1]["state"] == "active"
            leader = (await cluster.leader(0)).node
            await eventually(lambda: leader.ground.meta.state.membership.nodes[NodeId(drained.name)].state == "active")
            moved = await ask(other, f"/cluster/partitions/0/transfer?to={drained.name}")
            assert moved == (200, {"partition": 0, "leader": drained.name})
            await load.more()

        assert load.errors == []
        assert (await ask(other, "/cluster/nodes/n9/drain"))[0] == 404
        assert (await ask(other, "/cluster/partitions/99/transfer"))[0] == 404
        assert (await ask(other, "/cluster/partitions/x/transfer"))[0] == 400
        assert (await ask(other, "/cluster/partitions/0/transfer?to=n9"))[0] == 409
        assert (await ask(other, f"/cluster/nodes/{drained.name}/remove"))[0] == 409


async def test_a_restarted_node_is_healthy_when_it_has_caught_up(tmp_path: Path) -> None:
    """Otherwise the next node of a rolling restart would stop too early, and leave a partition without a majority."""
    async with three(tmp_path, COUNTER, partitions=3) as cluster:
        await cluster.led()
        away = cluster.seats["n3"]
        await away.node.stop()
        away.up = False
        async with Load(lambda: urls(cluster)) as load:
            await load.more(60)
        acknowledged = {
            number: (await cluster.leader(number)).node.ground.replicas.machines[PartitionNumber(number)].applied[0]
            for number in range(3)
        }

        await away.start()

        await eventually(lambda: away.node.unhealthy() is None, "a healthy node")
        assert all(
            away.node.ground.replicas.machines[PartitionNumber(number)].applied[0] >= index
            for number, index in acknowledged.items()
        )
        assert load.errors == []
