"""Which deployment runs an invocation, also if its deployment is dead, removed or not known yet."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest

from holdfast.cluster import ground as cluster_ground
from holdfast.cluster.handlers.dispatch import Limits
from holdfast.cluster.registry.machine import Target
from holdfast.log.errors import NotLeader
from holdfast.sdk.ids import DeploymentId
from holdfast.sdk.journal import Op
from holdfast.statemachine.commands import Resume
from holdfast.statemachine.effects import Status
from tests.cluster.harness import Handled, echo, eventually, world


def test_invocations_that_wait_for_a_dead_deployment_move_to_the_next_one_unless_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_ground, "Limits", partial(Limits, waiting=5))

    async def run() -> None:
        async with world(tmp_path) as it:
            dead = await it.register({"greeter/echo": echo})
            await dead.stop()
            idents = [await it.send("greeter/echo", b"%d" % number) for number in range(20)]

            alive = await it.register({"greeter/echo": echo})

            for number, ident in enumerate(idents):
                assert await it.completed(ident) == [0, b"%d" % number]
            assert len({start.invocation for start in alive.starts}) == 20

    asyncio.run(run())


def test_nothing_is_left_of_a_removed_deployment(tmp_path: Path) -> None:
    """Whether or not an invocation ever ran there."""
    hold = asyncio.Event()

    async def slow(handled: Handled) -> None:
        await hold.wait()
        handled.output(b"")

    async def run() -> None:
        async with world(tmp_path) as it:
            await it.register({"quiet/echo": echo})
            await it.call("quiet/echo")
            busy = await it.register({"busy/go": slow})
            ident = await it.send("busy/go")
            await eventually(lambda: busy.starts)
            assert len(it.node.ground.invoker.endpoints) == 2

            for deployment in list(it.node.ground.registry.state.deployments):
                await it.node.ground.registry.remove(deployment, force=True)

            await eventually(lambda: len(it.node.ground.invoker.endpoints) == 1, "the quiet one is gone")
            hold.set()
            assert await it.completed(ident) == [0, b""], "what runs may end"
            await eventually(lambda: not it.node.ground.invoker.endpoints, "the busy one is gone")

    asyncio.run(run())


def test_a_running_invocation_stays_on_its_deployment_and_new_ones_go_to_the_newest(tmp_path: Path) -> None:
    async def old(handled: Handled) -> None:
        if handled.length == 1:
            handled.wait_for(handled.step(Op.SLEEP, "0/sleep/1", [300]))
        else:
            handled.output(b"old")

    async def new(handled: Handled) -> None:
        handled.output(b"new")

    async def run() -> None:
        async with world(tmp_path) as it:
            await it.register({"greeter/go": old})
            ident = await it.send("greeter/go")
            await it.reaches(ident, Status.SUSPENDED)
            await it.register({"greeter/go": new})

            assert await it.call("greeter/go") == [0, b"new"]
            assert await it.completed(ident) == [0, b"old"]

    asyncio.run(run())


def test_an_invocation_whose_deployment_was_removed_waits_for_an_operator(tmp_path: Path) -> None:
    async def sleeper(handled: Handled) -> None:
        if handled.length == 1:
            handled.wait_for(handled.step(Op.SLEEP, "0/sleep/1", [50]))
        else:
            handled.output(b"moved")

    async def run() -> None:
        async with world(tmp_path) as it:
            await it.register({"greeter/go": sleeper})
            ident = await it.send("greeter/go")
            pinned = (await it.reaches(ident, Status.SUSPENDED)).deployment
            assert pinned is not None
            await it.register({"greeter/go": sleeper})
            await it.node.ground.registry.remove(pinned, force=True)

            await it.reaches(ident, Status.PAUSED)
            newest = it.node.ground.registry.resolve("greeter", "go").deployment
            await it.node.serving.router.submit(ident, Resume(ident, newest))

            assert await it.completed(ident) == [0, b"moved"]

    asyncio.run(run())


def test_an_invocation_of_a_deployment_unknown_to_the_node_waits_until_it_is_known(tmp_path: Path) -> None:
    """The meta group is read before anything is paused; the first read fails because there is no leader."""

    async def sleeper(handled: Handled) -> None:
        if handled.length == 1:
            handled.wait_for(handled.step(Op.SLEEP, "0/sleep/1", [50]))
        else:
            handled.output(b"woke")

    async def run() -> None:
        async with world(tmp_path) as it:
            await it.register({"greeter/go": sleeper})
            asked = 0
            target = it.node.ground.registry.target

            async def fresh() -> None:
                nonlocal asked
                asked += 1
                if asked == 1:
                    raise NotLeader(None)

            def heard(deployment: DeploymentId, service: str, handler: str) -> Target | None:
                return target(deployment, service, handler) if asked > 1 else None

            it.node.ground.registry.target = heard  # type: ignore[method-assign]
            it.node.ground.invoker.fresh = fresh

            ident = await it.send("greeter/go")

            assert await it.completed(ident) == [0, b"woke"]
            assert asked == 2

    asyncio.run(run())
