"""A client that waits at one node gets an outcome from the leader at another node, even if that leader dies."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast.cluster.peers.rpc import Refused, Rpc
from holdfast.cluster.routing.replies import Replies
from holdfast.cluster.routing.watches import RECHECK_S, Watches
from holdfast.log.errors import NotLeader, OutcomeUnknown
from holdfast.sdk.ids import InvocationId, PartitionNumber, partition_of
from tests.cluster.test_rpc import Wire

IDENT = InvocationId(bytes(16))


def watches(node: str, rpc: Rpc, replies: Replies) -> Watches:
    """b leads the only partition, and nothing had completed when it was asked."""

    async def completed(number: int, ids: list[InvocationId]) -> list[tuple[InvocationId, list[Any]]]:
        return []

    return Watches(
        node, 1, replies, rpc, leader=lambda _: "b", own_term=lambda _: 0, completed_here=completed
    )  # fmt: skip


async def is_watched(replies: Replies, seconds: float) -> None:
    async with asyncio.timeout(seconds):
        while not replies.watched:
            await asyncio.sleep(0.001)


async def test_a_leader_that_succeeds_itself_is_asked_to_watch_again() -> None:
    """It drops its watches with the old term. Nothing else would inform the other node: leader and link are the same."""
    wire, here, there = Wire(), Replies(), Replies()
    waiting, leading = watches("a", wire.a, here), watches("b", wire.b, there)
    waiting.start()
    try:
        with here.wait(IDENT) as outcome:
            await is_watched(there, RECHECK_S)

            leading.resigned(PartitionNumber(0))

            assert not there.watched
            await is_watched(there, RECHECK_S / 2)  # Well before all watches are renewed.
            there.settle(IDENT, [0, b"done"])
            assert await outcome == [0, b"done"]
    finally:
        await waiting.stop()


async def test_a_leader_that_resigns_without_watches_sends_nothing() -> None:
    wire, there = Wire(), Replies()

    watches("b", wire.b, there).resigned(PartitionNumber(0))

    assert not wire.sent


async def test_a_partition_that_cannot_be_read_here_does_not_hold_up_the_watches_of_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It may have moved away in the meantime. The next round finds its new leader."""
    first, second = (
        next(i for n in range(99) if partition_of(i := InvocationId(bytes([n * 2] * 16)), 2) == p) for p in (0, 1)
    )
    asked: list[int] = []

    async def completed(number: int, ids: list[InvocationId]) -> list[tuple[InvocationId, list[Any]]]:
        asked.append(number)
        if number == 0:
            raise OutcomeUnknown("this node lags behind in partition 0")
        return [(ident, [0, b"done"]) for ident in ids]

    replies = Replies()
    own = Watches("a", 2, replies, Wire().a, leader=lambda _: "a", own_term=lambda _: 1, completed_here=completed)
    own.start()
    try:
        with replies.wait(first), replies.wait(second) as outcome:
            async with asyncio.timeout(RECHECK_S):
                assert await outcome == [0, b"done"]
                while asked.count(0) < 2:
                    await asyncio.sleep(0.001)
    finally:
        await own.stop()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_leader_that_cannot_read_its_partition_refuses_to_watch(caplog: pytest.LogCaptureFixture) -> None:
    """Its leadership may just have ended: that is a circumstance, and no error of the node."""
    wire = Wire()

    async def completed(number: int, ids: list[InvocationId]) -> list[tuple[InvocationId, list[Any]]]:
        raise NotLeader(None)

    leading = Watches("b", 1, Replies(), wire.b, leader=lambda _: "b", own_term=lambda _: 0, completed_here=completed)

    with pytest.raises(Refused, match="no leader"):
        await wire.a.ask("b", "watch", (0, [IDENT]))

    assert leading is not None and not caplog.records
