"""The level of a cluster rises by itself, exactly when every node supports it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from holdfast.cluster.members import releases
from holdfast.cluster.node import Node
from holdfast.cluster.peers.rpc import Refused
from holdfast.statemachine.levels import FIRST, LEVEL, schema_of
from tests.cluster.harness import World, echo, eventually
from tests.cluster.test_three_nodes import Seat, Three

HANDLERS = {"agent/echo": echo}


class OlderSeat(Seat):
    """A node that does not support the query for its release, like those before levels."""

    async def start(self) -> Node:
        node_open = Node.open

        async def open_(node: Node) -> None:
            async def unknown(peer: str, argument: Any) -> Any:
                raise Refused("unknown", "this node does not know 'release'; it may run an older release")

            await node_open(node)
            node.ground.rpc.serve("release", unknown)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(releases, "OURS", releases.BEFORE_LEVELS)  # It may found the cluster, or lead the meta group.
            patch.setattr(Node, "open", open_)
            return await super().start()


def levels(three: Three) -> set[int]:
    nodes = [seat.node for seat in three.up()]
    partitions = [partition.level for node in nodes for partition in node.partitions]
    return {*(node.ground.meta.state.level for node in nodes), *partitions}


async def test_a_new_cluster_begins_with_the_newest_level(tmp_path: Path) -> None:
    it = World(tmp_path, partitions=2)

    await it.start()

    assert it.node.ground.meta.state.level == LEVEL
    await eventually(lambda: {partition.level for partition in it.node.partitions} == {LEVEL}, "the level everywhere")
    assert {partition.state.schema for partition in it.node.partitions} == {schema_of(LEVEL)}
    await it.stop()


async def test_the_level_rises_when_the_last_older_node_is_replaced_and_not_before(tmp_path: Path) -> None:
    three = Three(tmp_path, partitions=2)
    newer = three.seats["n3"]
    three.seats["n3"] = OlderSeat(tmp_path, "n3", newer.places, 2)
    await three.start(HANDLERS)
    node = three.seats["n1"].node
    known = await eventually(
        lambda: node.ground.releases.known if len(node.ground.releases.known) == 3 else None,
        "all releases are known to n1",
    )
    assert known["n2"] == releases.OURS and known["n3"] == releases.BEFORE_LEVELS
    assert levels(three) == {FIRST}
    assert await three.seats["n1"].call("agent/echo", b"1") == [0, b"1"]
    assert {it.state.schema for seat in three.up() for it in seat.node.partitions} <= {0, schema_of(FIRST)}

    await three.seats["n3"].stop()
    three.seats["n3"] = newer
    await newer.start()

    await eventually(lambda: levels(three) == {LEVEL}, "the level on every node and in every partition")
    assert await three.seats["n1"].call("agent/echo", b"2") == [0, b"2"]
    await asyncio.gather(*(seat.stop() for seat in three.up()))
    await three.endpoint.stop()
