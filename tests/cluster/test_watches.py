"""Whoever waits at one node hears of what another one led through, whatever becomes of that leader."""

from __future__ import annotations

import asyncio
from typing import Any

from holdfast.cluster.replies import Replies
from holdfast.cluster.rpc import Rpc
from holdfast.cluster.watches import RECHECK_S, Watches
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
