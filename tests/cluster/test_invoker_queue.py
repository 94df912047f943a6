"""How many attempts and frames an endpoint gets at a time, and what happens to those that wait."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest

from holdfast.cluster import ground as cluster_ground
from holdfast.cluster.handlers.dispatch import Limits
from holdfast.cluster.leading import leadership as cluster_leader
from holdfast.sdk.frames import (
    Credit,
    encode_batch,
)
from tests.cluster.harness import Handled, echo, eventually, world


async def nothing(handled: Handled) -> None:
    """Accepts the attempt and never sends a frame."""


def test_a_dead_endpoint_does_not_slow_others(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path) as it:
            dead = await it.register({"dead/echo": echo})
            silent = await it.register({"silent/echo": nothing})
            silent.credit = 3
            await it.register({"alive/echo": echo})
            await dead.stop()
            for _ in range(50):
                await it.send("dead/echo")
                await it.send("silent/echo")

            for number in range(20):
                assert await it.call("alive/echo", b"%d" % number) == [0, b"%d" % number]

            assert len(silent.starts) >= 3

    asyncio.run(run())


def test_an_endpoint_gets_no_more_frames_than_it_can_take(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path) as it:
            endpoint = await it.register({"greeter/echo": nothing})
            endpoint.credit = 0
            idents = [await it.send("greeter/echo") for _ in range(5)]
            await eventually(lambda: endpoint.sockets)
            await asyncio.sleep(0.1)

            assert not endpoint.starts
            endpoint.handlers["greeter", "echo"] = echo
            await endpoint.say(encode_batch([Credit(100)]))

            for ident in idents:
                assert await it.completed(ident) == [0, b""]

    asyncio.run(run())


def test_no_more_attempts_run_at_a_time_than_a_deployment_may_have(tmp_path: Path) -> None:
    most = 0
    running = 0

    async def counted(handled: Handled) -> None:
        nonlocal most, running
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        handled.output(b"")

    async def run() -> None:
        async with world(tmp_path, attempts_max=4) as it:
            await it.register({"greeter/go": counted})

            idents = [await it.send("greeter/go") for _ in range(40)]
            for ident in idents:
                await it.completed(ident)

            assert 1 <= most <= 4
            endpoint = next(iter(it.node.ground.invoker.endpoints.values()))
            assert endpoint.queue.is_idle

    asyncio.run(run())


def test_invocations_beyond_the_bound_of_the_queue_are_found_in_the_state_again(tmp_path: Path) -> None:
    """Looking for them costs the log little: a full endpoint is not offered the same work repeatedly."""
    hold = asyncio.Event()

    async def slow(handled: Handled) -> None:
        await hold.wait()
        handled.output(b"")

    async def run() -> None:
        async with world(tmp_path, attempts_max=2) as it:
            it.node.ground.invoker.limits = it.node.ground.invoker.limits._replace(waiting=3)
            await it.register({"greeter/go": slow})
            idents = [await it.send("greeter/go") for _ in range(60)]
            await asyncio.sleep(0.5)
            before = sum(partition.commands for partition in it.node.partitions)
            await asyncio.sleep(1.0)
            assert sum(partition.commands for partition in it.node.partitions) == before

            hold.set()

            for ident in idents:
                await it.completed(ident)

    asyncio.run(run())


def test_a_full_queue_of_a_dead_endpoint_does_not_keep_a_new_leader_from_finding_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_ground, "Limits", partial(Limits, waiting=5))
    monkeypatch.setattr(cluster_leader, "SLICE", 4)
    monkeypatch.setattr(cluster_leader, "REDISPATCHES_MAX", 4)
    hold = asyncio.Event()

    async def slow(handled: Handled) -> None:
        await hold.wait()
        handled.output(b"alive")

    async def run() -> None:
        async with world(tmp_path) as it:
            dead = await it.register({"dead/echo": echo})
            alive = await it.register({"alive/go": slow})
            await dead.stop()
            waiting = [await it.send("dead/echo", b"%d" % number) for number in range(60)]
            running = [await it.send("alive/go") for _ in range(5)]
            await eventually(lambda: len(alive.starts) == 5)

            await it.restart()
            hold.set()

            for ident in running:
                assert await it.completed(ident) == [0, b"alive"]
            before = sum(partition.commands for partition in it.node.partitions)
            await asyncio.sleep(0.7)
            assert sum(partition.commands for partition in it.node.partitions) == before, "nothing is offered in vain"
            await dead.start()
            for number, ident in enumerate(waiting):
                assert await it.completed(ident) == [0, b"%d" % number]

    asyncio.run(run())
