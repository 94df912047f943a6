"""Faults on real processes and real connections: they hit their targets, and their end repairs everything."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import permutations
from pathlib import Path

import pytest

from holdfast.chaos.nemesis import (
    Cluster,
    Fault,
    FaultLog,
    Halves,
    Isolate,
    Kill,
    Manner,
    OneWay,
    Pause,
    Ring,
    Schedule,
    Slow,
    Target,
    Together,
    aim,
    every_kind,
)
from holdfast.chaos.proxy import Delay, Pass, Proxy

PATIENCE_S = 20.0
SILENCE_S = 0.25
LOOPBACK = ("127.0.0.1", 0)


class Nodes:
    """Processes that only wait to be killed, each with a server in this process, reached through proxies."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.proxies: dict[tuple[str, str], Proxy] = {}
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self.servers: dict[str, asyncio.Server] = {}
        self.first = self.names[0]
        self.round = 0
        self.hearings: set[tuple[str, str]] = set()

    def pid(self, name: str) -> int | None:
        process = self.processes[name]
        return process.pid if process.returncode is None else None

    def leader(self) -> str | None:
        return self.first if self.pid(self.first) is not None else None

    async def start(self, name: str) -> None:
        program = "import signal\nwhile True: signal.pause()"
        self.processes[name] = await asyncio.create_subprocess_exec(sys.executable, "-S", "-E", "-c", program)

    async def kill(self, name: str, signum: signal.Signals) -> None:
        process = self.processes[name]
        process.send_signal(signum)
        if signum is signal.SIGKILL:
            await process.wait()

    def running(self) -> set[str]:
        return {name for name in self.names if self.pid(name) is not None}

    def stopped(self) -> set[str]:
        states = {name: Path(f"/proc/{self.pid(name)}/stat").read_text() for name in self.running()}
        return {name for name, stat in states.items() if stat.rpartition(")")[2].split()[0] == "T"}

    async def heard(self, expected: int) -> set[tuple[str, str]]:
        """Every (a, b) such that b receives from a now. All dial each other, so the receiver counts, whichever side
        dialled.

        Waits for the expected number of directions, and then a little for an extra one.
        """
        self.round += 1
        self.hearings = set()
        diallers = [asyncio.create_task(self._dial(pair, f"{self.round}".encode())) for pair in self.proxies]
        try:
            async with asyncio.timeout(PATIENCE_S):
                while len(self.hearings) < expected:
                    await asyncio.sleep(0.01)
        except TimeoutError:
            pass
        await asyncio.sleep(SILENCE_S)
        heard = self.hearings
        for dialler in diallers:
            dialler.cancel()
        await asyncio.gather(*diallers, return_exceptions=True)
        return heard

    async def _dial(self, pair: tuple[str, str], token: bytes) -> None:
        a, b = pair
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(*self.proxies[pair].address)
            try:
                writer.write(b"%b %b\n" % (a.encode(), token))
                if await reader.readline() == b"greetings\n":
                    self.hearings.add((b, a))
                await reader.read()
            finally:
                writer.transport.abort()

    def _serve(self, name: str) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                writer.write(b"greetings\n")
                line = (await reader.readline()).decode().split()
                if line and line[1] == str(self.round):  # Messages held back by an earlier round's fault do not count.
                    self.hearings.add((line[0], name))
                await reader.read()
            writer.transport.abort()

        return serve

    async def open(self) -> None:
        for name in self.names:
            await self.start(name)
            self.servers[name] = await asyncio.start_server(self._serve(name), *LOOPBACK)
        for a, b in permutations(self.names, 2):
            host, port = self.servers[b].sockets[0].getsockname()
            self.proxies[a, b] = Proxy(LOOPBACK, (host, port))
            await self.proxies[a, b].start()

    async def close(self) -> None:
        for proxy in self.proxies.values():
            await proxy.close()
        for server in self.servers.values():
            server.close()
        for name in self.running():
            await self.kill(name, signal.SIGKILL)


@asynccontextmanager
async def nodes(size: int) -> AsyncIterator[Nodes]:
    cluster = Nodes([f"n{number}" for number in range(1, size + 1)])
    try:
        await cluster.open()
        yield cluster
    finally:
        await cluster.close()


def run(size: int, test: Callable[[Nodes, random.Random], Awaitable[None]], seed: int = 1) -> None:
    async def main() -> None:
        async with nodes(size) as cluster:
            await test(cluster, random.Random(seed))

    asyncio.run(main())


def between(*pairs: tuple[str, str]) -> set[tuple[str, str]]:
    return {*pairs, *((b, a) for a, b in pairs)}


def everybody(cluster: Nodes) -> set[tuple[str, str]]:
    return set(permutations(cluster.names, 2))


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


def test_the_test_cluster_implements_the_protocol() -> None:
    cluster: Cluster = Nodes(["n1"])

    assert cluster.names == ["n1"]


@pytest.mark.parametrize(
    ("target", "size"),
    [
        (Target.LEADER, 1),
        (Target.FOLLOWER, 1),
        (Target.ONE, 1),
        (Target.MINORITY, 2),
        (Target.MAJORITY, 3),
        (Target.ALL, 5),
    ],
)
def test_a_target_means_the_nodes_it_names(target: Target, size: int) -> None:
    async def test(cluster: Nodes, chance: random.Random) -> None:
        for _ in range(20):
            victims = aim(cluster, target, chance)
            assert len(set(victims)) == len(victims) == size
            assert target is not Target.LEADER or victims == ["n1"]
            assert target is not Target.FOLLOWER or victims != ["n1"]

    run(5, test)


def test_without_a_leader_any_node_is_the_target() -> None:
    async def test(cluster: Nodes, chance: random.Random) -> None:
        await cluster.kill("n1", signal.SIGKILL)

        assert {aim(cluster, Target.LEADER, chance)[0] for _ in range(50)} == {"n1", "n2", "n3"}

    run(3, test)


def test_a_killed_node_is_gone_until_the_end_and_then_another_process() -> None:
    async def test(cluster: Nodes, chance: random.Random) -> None:
        before = cluster.pid("n1")
        fault = Kill(Target.LEADER, chance)

        await fault.begin(cluster)
        assert cluster.running() == {"n2", "n3"}
        assert fault.describe() == "SIGKILL n1"

        await fault.end(cluster)
        assert cluster.running() == {"n1", "n2", "n3"}
        assert cluster.pid("n1") != before

    run(3, test)


def test_all_nodes_can_be_killed_at_once() -> None:
    async def test(cluster: Nodes, chance: random.Random) -> None:
        fault = Kill(Target.ALL, chance)

        await fault.begin(cluster)
        assert cluster.running() == set()

        await fault.end(cluster)
        assert cluster.running() == {"n1", "n2", "n3"}

    run(3, test)


def test_a_paused_node_continues_as_the_same_process() -> None:
    async def test(cluster: Nodes, chance: random.Random) -> None:
        before = cluster.pid("n1")
        fault = Pause(Target.LEADER, chance)

        await fault.begin(cluster)
        await eventually(lambda: cluster.stopped() == {"n1"})

        await fault.end(cluster)
        await eventually(lambda: cluster.stopped() == set())
        assert cluster.pid("n1") == before

    run(3, test)


def test_a_pause_whose_victim_was_killed_ends_without_touching_its_successor() -> None:
    async def test(cluster: Nodes, chance: random.Random) -> None:
        fault = Pause(Target.LEADER, chance)
        await fault.begin(cluster)
        await cluster.kill("n1", signal.SIGKILL)
        await cluster.start("n1")
        pid = cluster.pid("n1")
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await eventually(lambda: cluster.stopped() == {"n1"})

        await fault.end(cluster)

        assert cluster.stopped() == {"n1"}

    run(3, test)


@pytest.mark.parametrize("manner", Manner)
def test_an_isolated_node_neither_sends_nor_receives(manner: Manner) -> None:
    async def test(cluster: Nodes, chance: random.Random) -> None:
        fault = Isolate(Target.LEADER, manner, chance)

        await fault.begin(cluster)
        assert await cluster.heard(expected=2) == between(("n2", "n3"))

        await fault.end(cluster)
        assert await cluster.heard(expected=6) == everybody(cluster)

    run(3, test)


@pytest.mark.parametrize("manner", Manner)
def test_halves_communicate_only_among_themselves(manner: Manner) -> None:
    async def test(cluster: Nodes, chance: random.Random) -> None:
        fault = Halves(manner, chance)

        await fault.begin(cluster)
        heard = await cluster.heard(expected=2 + 6)
        groups = {frozenset({a} | {b for b in cluster.names if (a, b) in heard}) for a in cluster.names}
        assert sorted(map(len, groups)) == [2, 3]
        assert len(heard) == 2 + 6

        await fault.end(cluster)
        assert await cluster.heard(expected=20) == everybody(cluster)

    run(5, test)


def test_one_way_silences_one_direction_of_either_dialer() -> None:
    async def test(cluster: Nodes, chance: random.Random) -> None:
        fault = OneWay(Target.LEADER, chance)
        seen = set()
        for _ in range(6):
            await fault.begin(cluster)
            heard = await cluster.heard(expected=1)
            await fault.end(cluster)

            mute = "is not heard" in fault.describe()
            assert heard == ({("n2", "n1")} if mute else {("n1", "n2")})
            seen.add(mute)

        assert seen == {True, False}
        assert await cluster.heard(expected=2) == everybody(cluster)

    run(2, test)


@pytest.mark.parametrize("manner", Manner)
def test_in_a_ring_of_five_each_hears_two_and_no_two_see_the_same_majority(manner: Manner) -> None:
    async def test(cluster: Nodes, chance: random.Random) -> None:
        await Ring(manner, chance).begin(cluster)

        heard = await cluster.heard(expected=10)

        views = {frozenset({a} | {b for b in cluster.names if (b, a) in heard}) for a in cluster.names}
        assert [len(view) for view in views] == [3] * 5, "five different majorities"

    run(5, test)


def test_a_ring_of_three_is_a_chain() -> None:
    async def test(cluster: Nodes, chance: random.Random) -> None:
        await Ring(Manner.SILENT, chance).begin(cluster)

        heard = await cluster.heard(expected=4)

        assert len(heard) == 4
        assert len({frozenset(pair) for pair in heard}) == 2

    run(3, test)


def test_slow_bends_the_links_of_its_victim_only() -> None:
    async def test(cluster: Nodes, chance: random.Random) -> None:
        delay = Delay(20, 5)
        fault = Slow(Target.LEADER, delay, chance)

        await fault.begin(cluster)
        assert {pair for pair, proxy in cluster.proxies.items() if proxy.current == delay} == between(
            ("n1", "n2"), ("n1", "n3")
        )

        await fault.end(cluster)
        assert all(proxy.current == Pass() for proxy in cluster.proxies.values())

    run(3, test)


def test_faults_together_begin_and_end_together() -> None:
    async def test(cluster: Nodes, chance: random.Random) -> None:
        fault = Together(Isolate(Target.ONE, Manner.SILENT, chance), Kill(Target.ALL, chance))

        await fault.begin(cluster)
        assert cluster.running() == set()
        assert any(proxy.current != Pass() for proxy in cluster.proxies.values())

        await fault.end(cluster)
        assert cluster.running() == {"n1", "n2", "n3"}
        assert all(proxy.current == Pass() for proxy in cluster.proxies.values())

    run(3, test)


def test_a_schedule_gives_every_kind_its_turn_repairs_all_and_writes_it_down(tmp_path: Path) -> None:
    async def test(cluster: Nodes, chance: random.Random) -> None:
        log = FaultLog(tmp_path / "faults")
        faults = every_kind(chance)
        schedule = Schedule(faults, chance, log, on_s=(0.0, 0.02), off_s=(0.0, 0.01))
        turns = asyncio.create_task(schedule.run(cluster, PATIENCE_S))
        async with asyncio.timeout(PATIENCE_S):
            while len(log.events) < 2 * len(faults):
                await asyncio.sleep(0.01)
        turns.cancel()
        await asyncio.gather(turns, return_exceptions=True)

        assert set(log.begun()) == {fault.name for fault in faults}
        assert [event.event for event in log.events] == ["begin", "end"] * (len(log.events) // 2)
        assert cluster.running() == {"n1", "n2", "n3"}
        await eventually(lambda: cluster.stopped() == set())
        assert all(proxy.current == Pass() for proxy in cluster.proxies.values())
        lines = [json.loads(line) for line in (tmp_path / "faults").read_text().splitlines()]
        assert [line["name"] for line in lines] == [event.name for event in log.events]

    run(3, test)


def test_a_schedule_that_is_cancelled_repairs_first() -> None:
    async def test(cluster: Nodes, chance: random.Random) -> None:
        log = FaultLog()
        schedule = Schedule([Kill(Target.ALL, chance)], chance, log, on_s=(1000, 1000), off_s=(0, 0))
        turns = asyncio.create_task(schedule.run(cluster, 1000))
        async with asyncio.timeout(PATIENCE_S):
            while not log.events:
                await asyncio.sleep(0.01)
        assert cluster.running() == set()

        turns.cancel()
        await asyncio.gather(turns, return_exceptions=True)

        assert cluster.running() == {"n1", "n2", "n3"}

    run(3, test)


def test_one_seed_makes_one_sequence_of_choices() -> None:
    class Still:
        """A cluster in which nothing happens, so that only the choices are compared."""

        names = ("n1", "n2", "n3", "n4", "n5")
        proxies: Mapping[tuple[str, str], Proxy] = {}

        def pid(self, name: str) -> int | None:
            return 1

        def leader(self) -> str | None:
            return "n3"

        async def start(self, name: str) -> None:
            raise AssertionError("nothing was killed")

        async def kill(self, name: str, signum: signal.Signals) -> None: ...

    async def choices(seed: int) -> list[str]:
        chance = random.Random(seed)
        faults: list[Fault] = every_kind(chance)
        described = []
        for _ in range(30):
            fault = chance.choice(faults)
            await fault.begin(Still())
            described.append(fault.describe())
        return described

    assert asyncio.run(choices(5)) == asyncio.run(choices(5))
    assert asyncio.run(choices(5)) != asyncio.run(choices(6))
