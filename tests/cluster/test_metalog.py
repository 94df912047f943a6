"""The log of the meta group, seen from a node that does not lead it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.cluster.peers.rpc import Rpc
from holdfast.cluster.registry import metalog
from holdfast.cluster.registry.metalog import MetaLog, SharedRead
from holdfast.log.errors import NotLeader, ProposalError
from holdfast.log.node import Group


class LeaderAt(Rpc):
    """A leader that reports this commit index."""

    def __init__(self, index: int) -> None:
        super().__init__(lambda *_: True)
        self.index = index

    async def ask(self, *_: Any, **__: Any) -> Any:
        return self.index


def follower(applied: int) -> Group:
    group = SimpleNamespace(is_leader=False, leader="n2", status=lambda: SimpleNamespace(applied=applied))
    return cast(Group, group)


async def test_a_node_that_has_caught_up_is_fresh() -> None:
    await MetaLog("n1", lambda: follower(7), LeaderAt(7)).fresh()


async def test_a_node_that_stays_behind_never_calls_itself_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metalog, "WAIT_S", 0.05)

    with pytest.raises(ProposalError):
        await MetaLog("n1", lambda: follower(6), LeaderAt(7)).fresh()


class Reads:
    """Reads that end, one after the other, when the test says so."""

    def __init__(self) -> None:
        self.under_way: list[asyncio.Future[None]] = []

    async def __call__(self) -> None:
        self.under_way.append(asyncio.get_running_loop().create_future())
        await self.under_way[-1]

    async def begun(self, count: int) -> asyncio.Future[None]:
        while len(self.under_way) < count:
            await asyncio.sleep(0.001)
        return self.under_way[count - 1]


async def test_only_callers_before_the_beginning_of_a_read_share_it() -> None:
    reads = Reads()
    known = SharedRead(reads)
    early = [asyncio.ensure_future(known()) for _ in range(100)]
    first = await reads.begun(1)
    late = [asyncio.ensure_future(known()) for _ in range(100)]
    await asyncio.sleep(0)
    first.set_result(None)

    await asyncio.gather(*early)
    assert not any(each.done() for each in late), "that read began before they asked"
    (await reads.begun(2)).set_result(None)
    await asyncio.gather(*late)
    assert len(reads.under_way) == 2


async def test_a_flood_of_questions_is_a_few_reads() -> None:
    count = 0

    async def read() -> None:
        nonlocal count
        count += 1

    known = SharedRead(read)
    loop = asyncio.get_running_loop()
    began = loop.time()
    for _ in range(200):
        await asyncio.gather(*(known() for _ in range(10)))
        if loop.time() > began + 0.3:
            break

    assert 1 <= count <= (loop.time() - began) / metalog.REST_S + 1


async def test_a_caller_that_gives_up_does_not_end_the_wait_of_the_others() -> None:
    reads = Reads()
    known = SharedRead(reads)
    one, other = asyncio.ensure_future(known()), asyncio.ensure_future(known())
    read = await reads.begun(1)
    one.cancel()
    await asyncio.sleep(0)
    read.set_result(None)

    await other


async def test_an_unanswered_read_ends_in_time_and_the_next_one_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metalog, "SHARED_WAIT_S", 0.02)
    reads = Reads()
    known = SharedRead(reads)

    with pytest.raises(NotLeader):
        await known()
    again = asyncio.ensure_future(known())
    (await reads.begun(2)).set_result(None)
    await again


async def test_callers_do_not_wait_for_a_read_of_a_stopping_node() -> None:
    reads = Reads()
    known = SharedRead(reads)
    first = asyncio.ensure_future(known())
    await reads.begun(1)
    second = asyncio.ensure_future(known())
    await asyncio.sleep(0)

    known.stop()

    for each in (first, second):
        with pytest.raises(NotLeader):
            await each
