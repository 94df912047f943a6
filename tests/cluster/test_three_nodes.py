"""Three nodes in one process: every node serves every request, whichever node leads or dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from holdfast.cluster.config import Config, HostPort
from holdfast.cluster.environment import Environment
from holdfast.cluster.node import Node
from holdfast.cluster.registry import metalog
from holdfast.log import engine
from holdfast.sdk.frames import Completion
from holdfast.sdk.ids import PartitionNumber, partition_of
from holdfast.sdk.journal import Op
from tests.cluster.harness import FAST, PATIENCE_S, FakeEndpoint, Handled, World, eventually
from tests.ports import free_ports

NAMES = ("n1", "n2", "n3")
#: All nodes of a test share one loop: a pause of half a second would depose every leader at once. The connections of a
#: killed node break, so this delays nothing.
PATIENT = engine.Timing(election_min=2.0, election_max=2.5, quorum=2.0)


class Seat(World):
    """One of several nodes."""

    def __init__(self, path: Path, name: str, places: dict[str, HostPort], partitions: int, **settings: Any) -> None:
        super().__init__(path / name, partitions=partitions, **settings)
        self.name = name
        self.places = places
        self.up = False

    async def start(self) -> Node:
        free = HostPort("127.0.0.1", 0)
        peers = {name: place for name, place in self.places.items() if name != self.name}
        config = Config(
            node=self.name,
            data=self.path,
            ingress=free,
            admin=free,
            peer=self.places[self.name],
            peers=peers,
            secret=b"the secret of the tests",
            **self._settings,
        )
        self.node = Node(
            config, Environment(boot=self.boot), timing=FAST, log_timing=PATIENT, on_fatal=self.failures.append
        )
        await self.node.start()
        self.up = True
        return self.node

    async def kill(self) -> None:
        self.up = False
        await super().kill()


class Three:
    def __init__(self, path: Path, partitions: int, **settings: Any) -> None:
        places = {name: HostPort("127.0.0.1", port) for name, port in zip(NAMES, free_ports(3), strict=True)}
        self.seats = {name: Seat(path, name, places, partitions, **settings) for name in NAMES}
        self.endpoint: FakeEndpoint

    def up(self) -> list[Seat]:
        return [seat for seat in self.seats.values() if seat.up]

    async def start(self, handlers: dict[str, Any]) -> None:
        await asyncio.gather(*(seat.start() for seat in self.seats.values()))
        self.endpoint = FakeEndpoint(handlers)
        await self.endpoint.start()
        await self.seats["n2"].node.ground.registry.register(self.endpoint.uri)
        await eventually(
            lambda: all(seat.node.ground.registry.state.deployments for seat in self.up()),
            "the deployment on every node",
        )

    def leading(self, number: int) -> Seat | None:
        """The current leader. There may be none at any time: a pause of this machine is enough to lose a leadership."""
        leading = [seat for seat in self.up() if seat.node.serving.router.leads(PartitionNumber(number))]
        return max(
            leading, key=lambda seat: seat.node.serving.router.hosted[PartitionNumber(number)].group.term, default=None
        )

    async def leader(self, number: int) -> Seat:
        found: Seat = await eventually(lambda: self.leading(number), f"a leader of partition {number}")
        return found

    async def led(self) -> None:
        def led() -> bool:
            return all(seat.node.unhealthy() is None for seat in self.up())

        await eventually(led, "a leader of every partition")

    async def stop(self) -> None:
        for seat in self.up():
            await seat.node.stop()
        await self.endpoint.stop()
        for seat in self.seats.values():
            assert not seat.failures, (seat.name, seat.failures)


@asynccontextmanager
async def three(path: Path, handlers: dict[str, Any], partitions: int = 3, **settings: Any) -> AsyncIterator[Three]:
    cluster = Three(path, partitions, **settings)
    await cluster.start(handlers)
    try:
        yield cluster
    finally:
        await cluster.stop()


async def echo(handled: Handled) -> None:
    handled.output(handled.input)


async def test_every_node_answers_for_every_partition(tmp_path: Path) -> None:
    async with three(tmp_path, {"echo:object/say:exclusive": echo}) as cluster:
        answers = await asyncio.gather(
            *(
                seat.call("echo/say", f"{seat.name} {number}".encode(), key=f"key {number}")
                for seat in cluster.up()
                for number in range(20)
            )
        )

        expected = [[0, f"{name} {number}".encode()] for name in NAMES for number in range(20)]
        assert answers == expected
        led = {(await cluster.leader(number)).name for number in range(3)}
        asked = {partition_of(start.invocation, 3) for start in cluster.endpoint.starts}
        assert asked == {0, 1, 2} and led, "keys of every partition were asked for at every node"


async def test_a_deployment_registered_at_one_node_exists_on_every_node_at_once(tmp_path: Path) -> None:
    """A follower of the meta group learns with the next heartbeat that an entry is committed: it asks before it answers
    404."""
    async with three(tmp_path, {"echo/say": echo}) as cluster, aiohttp.ClientSession() as session:

        async def ask(seat: Seat, method: str, door: str, path: str) -> int:
            server = seat.node.doors.ingress if door == "ingress" else seat.node.doors.admin
            assert server is not None
            async with session.request(method, f"http://127.0.0.1:{server.port}{path}", data=b"1") as response:
                return response.status

        for round_ in range(3):
            name = f"late{round_}"
            late = FakeEndpoint({f"{name}/say": echo})
            await late.start()
            seat = cluster.up()[round_]
            registered = await seat.node.ground.registry.register(late.uri)
            others = [each for each in cluster.up() if each is not seat]

            answers = await asyncio.gather(
                *(ask(each, "POST", "ingress", f"/{name}/say") for each in others),
                *(ask(each, "GET", "admin", f"/services/{name}") for each in others),
                *(ask(each, "GET", "admin", f"/deployments/{registered.deployment.id}") for each in others),
            )

            assert answers == [200] * 6
            await late.stop()
        assert await ask(cluster.seats["n1"], "POST", "ingress", "/nobody/say") == 404


async def test_a_node_that_cannot_ask_answers_503_and_not_404(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metalog, "SHARED_WAIT_S", 0.3)
    async with three(tmp_path, {"echo/say": echo}) as cluster, aiohttp.ClientSession() as session:
        for name in ("n2", "n3"):
            await cluster.seats[name].kill()
        ingress, admin = cluster.seats["n1"].node.doors.ingress, cluster.seats["n1"].node.doors.admin
        assert ingress is not None and admin is not None

        for port, method, path in ((ingress.port, "POST", "/nobody/say"), (admin.port, "GET", "/deployments/dp_x")):
            async with session.request(method, f"http://127.0.0.1:{port}{path}") as response:
                assert (response.status, response.headers["Retry-After"]) == (503, "1"), await response.text()
                assert "cannot ask" in await response.text()


async def test_a_call_survives_the_leader_of_its_partition(tmp_path: Path) -> None:
    """The client waits at a surviving node: one slow request, no error, and the journaled step does not run again."""
    ran: list[bytes] = []
    gate = asyncio.Event()

    async def two_steps(handled: Handled) -> None:
        if handled.length == 1:
            ran.append(b"one")
            handled.step(Op.RUN, "one", ["one"], [0, b"1"])
            await handled.acks(2)
            gate.set()
            await asyncio.Event().wait()  # The node that started us is about to die.
        handled.output(b"done")

    async with three(tmp_path, {"flow:object/run:exclusive": two_steps}) as cluster:
        await cluster.led()
        number = partition_of(cluster.seats["n1"].node.serving.router.mint("flow", "k"), 3)
        leader = await cluster.leader(number)
        client = next(seat for seat in cluster.up() if seat is not leader)
        calling = asyncio.ensure_future(client.call("flow/run", b"", key="k"))
        await gate.wait()
        await leader.kill()

        async with asyncio.timeout(PATIENCE_S):
            assert await calling == [0, b"done"]
        assert ran == [b"one"], [(start.epoch, start.attempt, len(start.journal)) for start in cluster.endpoint.starts]


async def test_calls_between_partitions_of_different_leaders_arrive_once(tmp_path: Path) -> None:
    async def add(handled: Handled) -> None:
        index = handled.step(Op.GET, "total", ["total"])
        total = (await handled.completion(index))[1]
        count = int(total[1:] or b"0") + 1 if total else 1
        handled.step(Op.SET, "set", ["total", str(count).encode()])
        handled.output(str(count).encode())

    async def call_all(handled: Handled) -> None:
        if handled.length == 1:
            for number in range(12):
                handled.step(Op.CALL, f"call {number}", ["counter", "add", f"key {number}", b"", {}])
        done = sum(step.outcome is not None for step in handled.journal[1:])
        while done < 12:
            done += type(await handled.receive()) is Completion
        handled.output(b"all")

    async with three(tmp_path, {"counter:object/add:exclusive": add, "caller/all": call_all}) as cluster:
        await cluster.led()
        for seat in cluster.up():
            assert await seat.call("caller/all") == [0, b"all"]

        totals = [await cluster.seats["n1"].call("counter/add", b"", key=f"key {number}") for number in range(12)]
        assert totals == [[0, b"4"]] * 12


async def test_a_read_on_any_node_sees_everything_acknowledged_before_it(tmp_path: Path) -> None:
    async with three(tmp_path, {"echo:object/say:exclusive": echo}) as cluster:
        await cluster.led()
        for number in range(10):
            ident = await cluster.seats["n1"].send("echo/say", b"x", key=f"key {number}")
            for seat in cluster.up():
                await seat.node.serving.router.fresh(partition_of(ident, 3))

                assert seat.record(ident) is not None


async def test_a_node_that_is_left_alone_does_not_call_itself_healthy(tmp_path: Path) -> None:
    """It still remembers the leader, but nothing answers there."""
    async with three(tmp_path, {"echo:object/say:exclusive": echo}) as cluster:
        await cluster.led()
        *others, alone = cluster.up()
        for seat in others:
            await seat.kill()

        nobody = "partitions without a leader: [0, 1, 2]"
        await eventually(lambda: alone.node.unhealthy() == nobody, nobody)
        for seat in others:
            await seat.start()
        await eventually(lambda: alone.node.unhealthy() is None, "leaders again")
