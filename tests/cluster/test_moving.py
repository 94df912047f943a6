"""Leaderships that move while handlers run: the next leader continues, and no step runs twice."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path

import aiohttp

from holdfast.cluster.node import Node
from holdfast.sdk import Context, Server, Service, current_step
from holdfast.sdk.ids import NodeId, PartitionNumber
from tests.cluster.harness import PATIENCE_S, eventually
from tests.cluster.load import COUNTER
from tests.cluster.test_growing import Growing, growing
from tests.cluster.test_three_nodes import Three, three

STEPS = 4


@contextlib.asynccontextmanager
async def three_and(service: Service, path: Path, partitions: int) -> AsyncIterator[Three]:
    """Three nodes, and handlers of the real SDK that all of them know."""
    server = Server([service])
    await server.start(port=0)
    try:
        async with three(path, COUNTER, partitions=partitions) as cluster:
            await cluster.seats["n1"].node.ground.registry.register(server.uri)
            await eventually(lambda: all(seat.node.ground.registry.service(service.name) for seat in cluster.up()))
            await cluster.led()
            yield cluster
    finally:
        await server.stop(grace=1.0)


class Flows:
    """Clients that constantly run flows of a few short steps, and the effects of the steps."""

    def __init__(self) -> None:
        self.ran: Counter[tuple[str, str]] = Counter()
        self.answered = 0
        self.service = service = Service("flow")

        @service.handler
        async def run(ctx: Context) -> int:
            for number in range(STEPS):
                await ctx.run(f"step {number}", self._step)
            return STEPS

        @service.handler
        async def both(ctx: Context) -> int:
            await asyncio.gather(*(ctx.run(f"branch {number}", self._step) for number in range(STEPS)))
            return STEPS

    async def _step(self) -> None:
        step = current_step()
        self.ran[step.invocation_id, step.key] += 1
        await asyncio.sleep(0.002)

    async def client(self, http: aiohttp.ClientSession, url: Callable[[], str], stop: asyncio.Event) -> None:
        while not stop.is_set():
            for handler in ("run", "both"):
                async with http.post(f"{url()}/flow/{handler}") as response:
                    assert response.status == 200, await response.text()
                    assert await response.json() == STEPS
                self.answered += 1

    async def while_clients_run(self, cluster: Three | Growing, act: Callable[[], Awaitable[None]]) -> None:
        stop = asyncio.Event()
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        async with aiohttp.ClientSession(timeout=timeout) as http, asyncio.TaskGroup() as clients:
            for number in range(6):
                clients.create_task(self.client(http, lambda number=number: _url(cluster, number), stop))  # type: ignore[misc]
            try:
                await act()
            finally:
                stop.set()

    @property
    def repeated(self) -> dict[tuple[str, str], int]:
        return {step: times for step, times in self.ran.items() if times > 1}


def _url(cluster: Three | Growing, number: int) -> str:
    seats = cluster.up()
    return seats[number % len(seats)].node.doors.urls.ingress


def terms(cluster: Three) -> list[int]:
    return [
        max(seat.node.ground.replicas.hosted[PartitionNumber(number)].group.term for seat in cluster.up())
        for number in range(3)
    ]


async def test_a_leadership_that_moves_repeats_no_step(tmp_path: Path) -> None:
    flows = Flows()
    async with three_and(flows.service, tmp_path, partitions=3) as cluster:
        before = terms(cluster)
        moved = 0

        async def move() -> None:
            nonlocal moved
            turn = 0
            async with asyncio.timeout(PATIENCE_S):
                while moved < 24:
                    turn += 1
                    leader = (await cluster.leader(turn % 3)).node
                    others = [name for name in cluster.seats if name != leader.config.node]
                    moved += await leader.serving.handover.move(
                        leader.ground.replicas.hosted[PartitionNumber(turn % 3)], others[turn % 2], patient=True
                    )

        await flows.while_clients_run(cluster, move)

        assert flows.answered > 24
        if sum(terms(cluster)) == sum(before) + moved:  # Otherwise a pause of this machine ended a leadership too.
            assert flows.repeated == {}


async def test_a_partition_with_a_running_step_is_moved_on_request_but_not_for_balance(tmp_path: Path) -> None:
    """A request is an operator's decision. The step that does not end then runs again on the new leader."""
    gate, begun = asyncio.Event(), asyncio.Event()
    starts = 0
    service = Service("long")

    async def step() -> None:
        nonlocal starts
        starts += 1
        begun.set()
        await gate.wait()

    @service.handler
    async def run(ctx: Context) -> str:
        await ctx.run("step", step)
        return "done"

    async with three_and(service, tmp_path, partitions=1) as cluster:
        seat = await cluster.leader(0)
        handover, partition = seat.node.serving.handover, seat.node.ground.replicas.hosted[PartitionNumber(0)]
        calling = asyncio.ensure_future(seat.call("long/run"))
        await begun.wait()
        successor = next(name for name in cluster.seats if name != seat.name)

        assert not await handover.move(partition, successor, patient=True)

        assert partition.group.is_leader and handover.hurried == 0
        assert starts == 1, "it goes on where it was"
        assert await handover.move(partition, successor)
        assert handover.hurried == 1
        await eventually(lambda: starts == 2)
        gate.set()
        assert await calling == [0, b'"done"']


async def test_nodes_that_stop_at_the_same_time_do_not_hand_back_and_forth(tmp_path: Path) -> None:
    async with three(tmp_path, COUNTER, partitions=4) as cluster:
        await cluster.led()
        last = cluster.seats["n3"]
        stopping = [cluster.seats["n1"], cluster.seats["n2"]]
        terms = {
            number: (await cluster.leader(number)).node.ground.replicas.hosted[PartitionNumber(number)].group.term
            for number in range(4)
        }

        await asyncio.gather(*(seat.node.stop() for seat in stopping))

        for seat in stopping:
            seat.up = False
        for number, term in terms.items():
            assert last.node.ground.replicas.hosted[PartitionNumber(number)].group.term <= term + 3, (
                "handed over, and perhaps handed on, once"
            )


async def test_the_last_two_nodes_stop_without_handing_back_and_forth(tmp_path: Path) -> None:
    """No node is left that could lead for long."""
    async with three(tmp_path, COUNTER, partitions=4) as cluster:
        await cluster.led()
        await cluster.seats["n3"].kill()
        stopping = [cluster.seats["n1"], cluster.seats["n2"]]
        await eventually(
            lambda: all(
                any(seat.node.serving.router.leads(PartitionNumber(number)) for seat in stopping) for number in range(4)
            ),
            "leaders among those that are left",
        )
        terms = {
            number: (await cluster.leader(number)).node.ground.replicas.hosted[PartitionNumber(number)].group.term
            for number in range(4)
        }

        await asyncio.gather(*(seat.node.stop() for seat in stopping))

        for seat in stopping:
            seat.up = False
            for number, term in terms.items():
                assert seat.node.ground.replicas.hosted[PartitionNumber(number)].group.term <= term + 3


async def test_a_change_of_members_repeats_no_step(tmp_path: Path) -> None:
    """It ends the term of the leader, which continues in the next one."""
    flows, names = Flows(), ("n1", "n2", "n3", "n4")
    server = Server([flows.service])
    await server.start(port=0)
    async with growing(tmp_path, names) as cluster:
        await cluster.seats["n1"].node.ground.registry.register(server.uri)
        await eventually(lambda: all(seat.node.ground.registry.service("flow") for seat in cluster.up()))
        for seat in cluster.up():
            await seat.node.serving.controller.stop()  # No other controller changes anything.
        planned = True

        async def change() -> None:
            nonlocal planned
            for turn in range(8):
                leader: Node = await eventually(partial(leading, cluster, turn % 4))
                partition = leader.ground.replicas.hosted[PartitionNumber(turn % 4)]
                members, term = {*partition.group.status().members}, partition.group.term
                leaving = sorted(members - {leader.config.node})[turn % 2]
                wanted = tuple(sorted(NodeId(name) for name in {*names} - {leaving}))
                await leader.serving.handover.change_members(partition, wanted, PATIENCE_S)
                assert set(partition.group.status().members) == {*wanted}
                after = await eventually(partial(leading, cluster, turn % 4))
                planned = planned and after is leader and partition.group.term == term + 1

        await flows.while_clients_run(cluster, change)

        hurried = sum(seat.node.serving.handover.hurried for seat in cluster.up())
        # Otherwise a pause of this machine ended a leadership, or used up the time to wait for it.
        if planned and not hurried:
            assert flows.repeated == {}
    await server.stop(grace=1.0)


def leading(cluster: Growing, number: int) -> Node | None:
    leaders = [seat.node for seat in cluster.up() if seat.node.serving.router.leads(PartitionNumber(number))]
    return max(leaders, key=lambda node: node.ground.replicas.hosted[PartitionNumber(number)].group.term, default=None)
