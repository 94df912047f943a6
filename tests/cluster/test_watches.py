"""Whoever waits at one node hears of what another one led through, whatever becomes of that leader."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast.cluster.peers.rpc import Rpc
from holdfast.cluster.routing.replies import Replies
from holdfast.cluster.routing.watches import RECHECK_S, Watches
from holdfast.log.errors import OutcomeUnknown
from holdfast.sdk.ids import partition_of
from tests.cluster.test_rpc import Wire

IDENT = bytes(16)


def watches(node: str, rpc: Rpc, replies: Replies) -> Watches:
    """b leads the only partition, and nothing had completed when it was asked."""

    async def completed(number: int, ids: list[bytes]) -> list[tuple[bytes, list[Any]]]:
        return []

    return Watches(
        node, 1, replies, rpc, leader=lambda _: "b", own_term=lambda _: 0, completed_here=completed
    )  # fmt: skip


async def is_watched(replies: Replies, seconds: float) -> None:
    async with asyncio.timeout(seconds):
        while not replies.watched:
            await asyncio.sleep(0.001)


async def test_a_leader_that_succeeds_itself_is_asked_to_watch_again() -> None:
    """It forgets its watches with the old term. Nothing else would tell the other node: leader and link are the same."""
    wire, here, there = Wire(), Replies(), Replies()
    waiting, leading = watches("a", wire.a, here), watches("b", wire.b, there)
    waiting.start()
    try:
        with here.wait(IDENT) as outcome:
            await is_watched(there, RECHECK_S)

            leading.resigned(0)

            assert not there.watched
            await is_watched(there, RECHECK_S / 2)  # Well before everything is asked for again.
            there.settle(IDENT, [0, b"done"])
            assert await outcome == [0, b"done"]
    finally:
        await waiting.stop()


async def test_who_resigns_without_having_watched_says_nothing() -> None:
    wire, there = Wire(), Replies()

    watches("b", wire.b, there).resigned(0)

    assert not wire.sent


async def test_a_partition_that_cannot_be_read_here_does_not_hold_up_the_watches_of_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It may have moved away meanwhile. The next round finds who leads it by then."""
    first, second = (next(i for n in range(99) if partition_of(i := bytes([n * 2] * 16), 2) == p) for p in (0, 1))
    asked: list[int] = []

    async def completed(number: int, ids: list[bytes]) -> list[tuple[bytes, list[Any]]]:
        asked.append(number)
        if number == 0:
            raise OutcomeUnknown("this node is behind in partition 0")
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
