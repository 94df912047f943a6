"""Waiting for outcomes, and the time of a partition over leaders whose clocks differ."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from holdfast.cluster.clock import Clock
from holdfast.cluster.routing.channel import PROGRESS_MAX, Progress
from holdfast.cluster.routing.replies import Replies
from holdfast.sdk.ids import InvocationId
from holdfast.sdk.journal import Op
from holdfast.statemachine.commands import Invoke, Mode
from tests.cluster.harness import FakeEndpoint, Handled, World, echo
from tests.cluster.test_leader import cluster

A, B = InvocationId(b"a"), InvocationId(b"b")
RUNNING = Progress("running", 1, None)
BACKING_OFF = Progress("backing-off", 1, "ValueError: no")


def test_all_waiting_clients_are_answered_and_nothing_is_kept() -> None:
    async def run() -> None:
        replies = Replies()
        with replies.wait(A) as first, replies.wait(A) as second, replies.wait(B) as other:
            replies.settle(A, [0, b"x"])

            assert await first == await second == [0, b"x"]
            assert not other.done
        assert len(replies) == 0

    asyncio.run(run())


def test_a_client_that_leaves_is_forgotten() -> None:
    async def run() -> None:
        replies = Replies()
        with replies.wait(A), replies.wait(A):
            pass

        assert len(replies) == 0

    asyncio.run(run())


def test_a_client_that_leaves_does_not_end_the_watch_of_others() -> None:
    async def run() -> None:
        replies = Replies()
        with replies.wait(A):
            with replies.wait(A):
                pass

            assert list(replies.unwatched) == [A]
        assert not replies.unwatched

    asyncio.run(run())


def test_a_follower_gets_every_change_once_and_then_the_outcome() -> None:
    async def run() -> None:
        replies = Replies()
        with replies.wait(A, follow=True) as channel, replies.wait(A) as caller:
            for progress in (RUNNING, RUNNING, BACKING_OFF):
                replies.tell(A, progress)
            replies.settle(A, [0, b"x"])

            assert [progress async for progress in channel.progress()] == [RUNNING, BACKING_OFF]
            assert await channel == await caller == [0, b"x"]

    asyncio.run(run())


def test_a_follower_that_waits_is_woken_by_progress_and_by_the_outcome() -> None:
    async def run() -> None:
        replies = Replies()
        with replies.wait(A, follow=True) as channel:
            heard = channel.progress()
            first = asyncio.ensure_future(anext(heard))
            await asyncio.sleep(0)
            replies.tell(A, RUNNING)
            assert await first == RUNNING

            end = asyncio.ensure_future(anext(heard, None))
            await asyncio.sleep(0)
            assert not end.done()
            replies.settle(A, [0, b"x"])
            assert await end is None

    asyncio.run(run())


def test_a_follower_that_reads_slowly_misses_only_old_progress() -> None:
    async def run() -> None:
        replies = Replies()
        with replies.wait(A, follow=True) as channel:
            for attempt in range(10 * PROGRESS_MAX):
                replies.tell(A, Progress("running", attempt, None))
            replies.settle(A, [0, b""])

            heard = [progress.attempt async for progress in channel.progress() if progress is not None]

        assert heard == list(range(9 * PROGRESS_MAX, 10 * PROGRESS_MAX))

    asyncio.run(run())


def test_a_refusal_ends_the_wait_of_callers_but_not_of_followers() -> None:
    async def run() -> None:
        replies = Replies()
        with replies.wait(A) as caller, replies.wait(A, follow=True) as follower:
            replies.refuse(A, ValueError("it is paused"))

            with pytest.raises(ValueError, match="paused"):
                await caller
            assert replies.followed() == replies.waiting() == [A]
            replies.settle(A, [0, b"x"])
            assert await follower == [0, b"x"]
        assert replies.followed() == replies.waiting() == []

    asyncio.run(run())


def test_any_replica_answers_a_client_that_waits_for_an_outcome(tmp_path: Path) -> None:
    """A client at a follower gets the outcome of a completion under another leader."""

    async def run() -> None:
        async with cluster(tmp_path) as it:
            endpoint = FakeEndpoint({"greeter/go": echo})
            await it.register(endpoint)
            command = Invoke(
                InvocationId(bytes(16)), "greeter", "go", None, Mode.PLAIN, b"hi", {}, 0, None, -1, 3_600_000
            )
            node = await it.leader(0)
            follower = next(each for each in it.nodes.values() if each is not node)

            with follower.ground.replies.wait(command.id) as reply:
                await it.submit(command)

                assert await asyncio.wait_for(reply, 60) == [0, b"hi"]
            await endpoint.stop()

    asyncio.run(run())


def test_a_leader_whose_clock_is_behind_continues_from_the_time_of_the_state(tmp_path: Path) -> None:
    """Otherwise a sleep would last longer by the difference of the clocks."""

    async def sleeper(handled: Handled) -> None:
        if handled.length == 1:
            handled.wait_for(handled.step(Op.SLEEP, "0/sleep/1", [100]))
        else:
            handled.output(b"awake")

    async def run() -> None:
        it = World(tmp_path)
        await it.start()
        await it.register({"greeter/sleep": sleeper})
        assert await it.call("greeter/sleep") == [0, b"awake"]
        now_ms = [partition.now_ms() for partition in it.node.partitions]
        await it.kill()

        hour_ms = 3_600_000
        clock = Clock()
        clock._offset -= hour_ms
        it.clock = clock
        await it.start()

        ident = await it.send("greeter/sleep")
        assert await asyncio.wait_for(it.completed(ident), 60) == [0, b"awake"]
        number = it.node.serving.router.partition(ident).number
        assert it.node.partitions[number].now_ms() >= now_ms[number]
        await it.stop()

    asyncio.run(run())
