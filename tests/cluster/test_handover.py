"""Leaderships that move, and leaderships that stay."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from holdfast.cluster.members.handover import Handover, _Hold
from holdfast.cluster.partition.door import Partition
from holdfast.cluster.peers.rpc import Rpc
from holdfast.log.node import Group
from holdfast.sdk.ids import NodeId, PartitionNumber


class Undecided:
    """A group whose log abandons a transfer after being asked three times."""

    def __init__(self) -> None:
        self.is_leader = True
        self.leader = "n1"
        self.asked = 0

    def transfer(self, to: str) -> bool:
        return True

    @property
    def is_transferring(self) -> bool:
        self.asked += 1
        return self.asked < 3


async def test_a_transfer_that_the_log_gave_up_is_not_waited_for() -> None:
    """The partition is held during the transfer: no attempt begins."""
    nobody: Any = None
    handover = Handover(
        NodeId("n1"),
        {},
        Rpc(lambda *_: False),
        meta_group=lambda: nobody,
        membership=lambda: nobody,
        connected=lambda: (),
        hint=lambda *_: None,
    )
    group = Undecided()

    await handover._transfer(cast(Group, group), "n2")

    assert 1 <= group.asked <= 3


class Held:
    """A leadership with a step that runs for ever."""

    def __init__(self) -> None:
        self.holds = self.releases = 0
        self.released = asyncio.Event()

    def hold(self) -> None:
        self.holds += 1

    def release(self) -> None:
        self.releases += 1
        self.released.set()

    def quiet(self) -> bool:
        return False


async def test_a_partition_is_not_held_for_a_newcomer_that_fell_behind_again() -> None:
    """The log asks only once: waiting for its answer must not keep attempts from beginning."""
    leadership, moving = Held(), set[PartitionNumber]()
    group = SimpleNamespace(is_leader=True, nudge=lambda: None)
    partition = cast(Partition, SimpleNamespace(number=3, leadership=leadership, group=group))
    hold = _Hold(partition, moving)

    assert not hold.is_over() and leadership.holds == 1 and moving == {3}
    async with asyncio.timeout(30):
        await leadership.released.wait()
    assert not moving, "it may be handed over"

    assert not hold.is_over() and leadership.holds == 2, "the newcomer is back"
    assert not hold.end() and leadership.releases == 2 and not moving
