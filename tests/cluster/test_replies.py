"""Waiting for outcomes, and the time of a partition over leaders whose clocks differ."""

from __future__ import annotations

import asyncio
from pathlib import Path

from holdfast.cluster.clock import Clock
from holdfast.cluster.routing.replies import Replies
from holdfast.sdk.journal import Op
from holdfast.statemachine.commands import Invoke, Mode
from tests.cluster.harness import FakeEndpoint, Handled, World, echo
from tests.cluster.test_leader import cluster


def test_all_who_wait_are_told_and_nothing_is_kept() -> None:
    async def run() -> None:
        replies = Replies()
        with replies.wait(b"a") as first, replies.wait(b"a") as second, replies.wait(b"b") as other:
            replies.settle(b"a", [0, b"x"])

            assert await first == await second == [0, b"x"]
            assert not other.done()
        assert len(replies) == 0

    asyncio.run(run())


def test_who_leaves_is_forgotten() -> None:
    async def run() -> None:
        replies = Replies()
        with replies.wait(b"a"), replies.wait(b"a"):
            pass

        assert len(replies) == 0

    asyncio.run(run())


def test_who_leaves_does_not_make_others_wait_unwatched() -> None:
    async def run() -> None:
        replies = Replies()
        with replies.wait(b"a"):
            with replies.wait(b"a"):
                pass

            assert list(replies.unwatched) == [b"a"]
        assert not replies.unwatched

    asyncio.run(run())


def test_any_replica_tells_who_waits_for_an_outcome(tmp_path: Path) -> None:
    """A client at a follower hears of a completion that another node led through."""

    async def run() -> None:
        async with cluster(tmp_path) as it:
            endpoint = FakeEndpoint({"greeter/go": echo})
            await it.register(endpoint)
            command = Invoke(bytes(16), "greeter", "go", None, Mode.PLAIN, b"hi", {}, 0, None, -1, 3_600_000)
            node = await it.leader(0)
            follower = next(each for each in it.nodes.values() if each is not node)

            with follower.replies.wait(command.id) as reply:
                await it.submit(command)

                assert await asyncio.wait_for(reply, 60) == [0, b"hi"]
            await endpoint.stop()

    asyncio.run(run())


def test_a_leader_whose_clock_is_behind_goes_on_from_the_time_of_the_state(tmp_path: Path) -> None:
    """Else a sleep would last longer by as much as the clocks differ."""

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
        number = it.node.router.partition(ident).number
        assert it.node.partitions[number].now_ms() >= now_ms[number]
        await it.stop()

    asyncio.run(run())
