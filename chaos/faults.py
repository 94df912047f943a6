"""Faults of a whole cluster, in addition to those of `nemesis`: handlers, restarts, clocks, disks, and flapping links."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, cast

from holdfast.chaos.cluster import NodeCluster
from holdfast.chaos.member_faults import Drain, DrainedRestart, Replace
from holdfast.chaos.nemesis import (
    Cluster,
    Fault,
    Halves,
    Isolate,
    Kill,
    Manner,
    OneWay,
    Pause,
    Ring,
    Slow,
    Target,
    Together,
    aim,
    sever,
)
from holdfast.chaos.proxy import Delay, Pass
from holdfast.chaos.snapshot_faults import (
    OUTAGES,
    KillInCut,
    KillInInstall,
    KillInUpload,
    KillMidUpload,
    StoreOutage,
    WipeState,
)

FLAP_S: Final = (0.05, 0.6)
FULL: Final = "full disk"
FULL_TO_THE_LAST_BYTE: Final = "full disk to the last byte"
FILLER: Final = "filler"
RESERVE_BYTES: Final = 24 << 20  # Less than the 64 MiB that a node keeps free.


class Flap(Fault):
    """The links of one node break and come back repeatedly, faster than the cluster can settle."""

    def __init__(self, target: Target, manner: Manner, chance: random.Random) -> None:
        self.name = f"flapping {target} ({manner})"
        self._target, self._manner, self._chance = target, manner, chance
        self._victim = ""
        self._task: asyncio.Task[None] | None = None

    def describe(self) -> str:
        return f"links of {self._victim} come and go ({self._manner})"

    async def begin(self, cluster: Cluster) -> None:
        self._victim = aim(cluster, self._target, self._chance)[0]
        self._task = asyncio.create_task(self._flap(cluster))

    async def _flap(self, cluster: Cluster) -> None:
        others = [name for name in cluster.names if name != self._victim]
        modes = sever(cluster, [(self._victim, other) for other in others], self._manner)
        while True:
            for pair, mode in modes.items():
                cluster.proxies[pair].mode(mode)
            await asyncio.sleep(self._chance.uniform(*FLAP_S))
            for pair in modes:
                cluster.proxies[pair].mode(Pass())
            await asyncio.sleep(self._chance.uniform(*FLAP_S))

    async def end(self, cluster: Cluster) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        for pair, link in cluster.proxies.items():
            if self._victim in pair:
                link.mode(Pass())


class KillHandlers(Fault):
    """SIGKILL of handler processes, one or all of them."""

    def __init__(self, chance: random.Random, *, everyone: bool) -> None:
        self.name = "kill all handlers" if everyone else "kill handlers"
        self._chance, self._everyone = chance, everyone
        self._victims: list[str] = []

    def describe(self) -> str:
        return f"SIGKILL handlers {', '.join(self._victims)}"

    async def begin(self, cluster: Cluster) -> None:
        handlers = list(cast(NodeCluster, cluster).handlers)
        self._victims = handlers if self._everyone else [self._chance.choice(handlers)]
        await asyncio.gather(*(cluster.kill(victim, signal.SIGKILL) for victim in self._victims))

    async def end(self, cluster: Cluster) -> None:
        await asyncio.gather(*(cluster.start(victim) for victim in self._victims if cluster.pid(victim) is None))


class PauseHandlers(Fault):
    """SIGSTOP of a handler process: its connections stay open, and it continues later with outdated knowledge."""

    def __init__(self, chance: random.Random) -> None:
        self.name = "pause handlers"
        self._chance = chance
        self._victim = ""
        self._pid: int | None = None

    def describe(self) -> str:
        return f"SIGSTOP handlers {self._victim}"

    async def begin(self, cluster: Cluster) -> None:
        self._victim = self._chance.choice(list(cast(NodeCluster, cluster).handlers))
        self._pid = cluster.pid(self._victim)
        await cluster.kill(self._victim, signal.SIGSTOP)

    async def end(self, cluster: Cluster) -> None:
        if self._pid is not None and cluster.pid(self._victim) == self._pid:
            await cluster.kill(self._victim, signal.SIGCONT)


class RollingRestart(Fault):
    """SIGTERM to one node after the other, each when the previous one accepts requests again."""

    instant = False

    def __init__(self, chance: random.Random) -> None:
        self.name = "rolling restart"
        self._chance = chance
        self._order: list[str] = []

    def describe(self) -> str:
        return f"SIGTERM and start of {', '.join(self._order)}, one by one"

    async def begin(self, cluster: Cluster) -> None:
        nodes = cast(NodeCluster, cluster)
        self._order = self._chance.sample(list(nodes.names), len(nodes.names))
        for name in self._order:
            await nodes.kill(name, signal.SIGTERM)
            await nodes.start(name)
            await nodes.answers(name)

    async def end(self, cluster: Cluster) -> None:
        await asyncio.gather(*(cluster.start(name) for name in self._order if cluster.pid(name) is None))


class ClockJump(Fault):
    """The wall clock of some nodes is set hours ahead or back, and later set right again."""

    def __init__(self, target: Target, chance: random.Random) -> None:
        self.name = f"clock jump {target}"
        self._target, self._chance = target, chance
        self._jumps: dict[str, float] = {}

    def describe(self) -> str:
        return "clocks: " + ", ".join(f"{name} {jump:+.0f} s" for name, jump in self._jumps.items())

    async def begin(self, cluster: Cluster) -> None:
        nodes = cast(NodeCluster, cluster)
        victims = aim(cluster, self._target, self._chance)
        self._jumps = {name: self._chance.choice((-1, 1)) * 10 ** self._chance.uniform(1, 5) for name in victims}
        for name, jump in self._jumps.items():
            nodes.bends(name).bend(clock_s=jump, disk_s=0.0)

    async def end(self, cluster: Cluster) -> None:
        for name in self._jumps:
            cast(NodeCluster, cluster).bends(name).bend(clock_s=0.0, disk_s=0.0)


class SlowDisk(Fault):
    """Every commit of some nodes takes longer."""

    def __init__(self, target: Target, chance: random.Random, *, milliseconds: tuple[float, float]) -> None:
        self.name = f"slow disk {target}"
        self._target, self._chance, self._range = target, chance, milliseconds
        self._victims: list[str] = []
        self._delay_ms = 0.0

    def describe(self) -> str:
        return f"each commit of {', '.join(self._victims)} takes {self._delay_ms:.0f} ms longer"

    async def begin(self, cluster: Cluster) -> None:
        self._victims = aim(cluster, self._target, self._chance)
        self._delay_ms = self._chance.uniform(*self._range)
        for name in self._victims:
            cast(NodeCluster, cluster).bends(name).bend(clock_s=0.0, disk_s=self._delay_ms / 1000)

    async def end(self, cluster: Cluster) -> None:
        for name in self._victims:
            cast(NodeCluster, cluster).bends(name).bend(clock_s=0.0, disk_s=0.0)


class FullDisk(Fault):
    """The disk of one node fills up, and is emptied again.

    With less space than a node keeps in reserve, it must refuse new requests and continue. Without a single byte, it
    may end, because it cannot write what it must; its supervisor starts it again.
    """

    def __init__(self, *, left_bytes: int) -> None:
        self.name = FULL if left_bytes else FULL_TO_THE_LAST_BYTE
        self._left_bytes = left_bytes
        self._victim = ""

    def describe(self) -> str:
        return f"the disk of {self._victim} has {self._left_bytes >> 20} MiB left"

    async def begin(self, cluster: Cluster) -> None:
        nodes = cast(NodeCluster, cluster)
        assert nodes.small_disk is not None, "left out where there is none"
        self._victim = nodes.small_disk
        disk = os.statvfs(nodes.data(self._victim))
        size = disk.f_bavail * disk.f_frsize - self._left_bytes
        filler = os.open(nodes.data(self._victim) / FILLER, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            with contextlib.suppress(OSError):  # The node writes at the same time, so less may be left to fill.
                os.posix_fallocate(filler, 0, max(1, size))
        finally:
            os.close(filler)

    async def end(self, cluster: Cluster) -> None:
        if self._victim:
            nodes = cast(NodeCluster, cluster)
            (nodes.data(self._victim) / FILLER).unlink(missing_ok=True)
            if not self._left_bytes:
                nodes.emptied_at = time.monotonic()


class Family(StrEnum):
    """The subject of a fault. Each family is a lane of the report, and even a short run has some of each."""

    PROCESSES = "processes"
    NETWORK = "network"
    HANDLERS = "handlers"
    MACHINE = "clock, disk"
    MEMBERS = "operators"
    SNAPSHOTS = "snapshots"
    STORE = "S3"
    PAIRS = "pairs"


@dataclass(frozen=True, slots=True)
class Turn:
    """A fault and the bounds of its duration. Short durations are as likely as long ones."""

    family: Family
    fault: Fault
    lasts_s: tuple[float, float]

    def draw_s(self, chance: random.Random) -> float:
        low, high = self.lasts_s
        return math.exp(chance.uniform(math.log(low), math.log(high))) if low > 0 else 0.0


NOW: Final = (0.0, 0.0)  # For faults that determine their own duration.
SHORT: Final = (0.5, 3.0)
LONG: Final = (1.0, 6.0)


def a_round(cluster: NodeCluster, chance: random.Random, *, pause_s_max: float = 30.0) -> list[Turn]:
    """One of each fault that a cluster must survive; a leader's death, which matters most, several times."""
    families = {
        Family.PROCESSES: processes(chance, pause_s_max, two=len(cluster.names) > 3),
        Family.NETWORK: network(chance),
        Family.HANDLERS: handlers(chance),
        Family.MACHINE: machine(chance, small_disk=cluster.small_disk is not None),
        Family.MEMBERS: members(chance),
        Family.SNAPSHOTS: snapshots(chance, store=cluster.has_store),
        Family.STORE: store(chance) if cluster.has_store else [],
        Family.PAIRS: pairs(chance, store=cluster.has_store),
    }
    return [Turn(family, fault, lasts_s) for family, some in families.items() for fault, lasts_s in some]


def shuffled(turns: Sequence[Turn], chance: random.Random) -> list[Turn]:
    """Shuffle so that any part of the order has about the same share of each family. A short run is then a small long one."""
    placed = []
    for family in Family:
        some = [turn for turn in turns if turn.family is family]
        for at, turn in enumerate(chance.sample(some, len(some))):
            placed.append(((at + chance.random()) / len(some), turn))
    return [turn for _, turn in sorted(placed, key=lambda it: it[0])]


_Some = list[tuple[Fault, tuple[float, float]]]


def processes(chance: random.Random, pause_s_max: float, *, two: bool) -> _Some:
    kills = [Kill(Target.LEADER, chance) for _ in range(4)]
    kills += [Kill(target, chance) for target in (Target.FOLLOWER, Target.MAJORITY, Target.ALL)]
    if two:
        kills.append(Kill(Target.MINORITY, chance))  # Two of five; of three it would be one.
    return [
        *((kill, SHORT) for kill in kills),
        (Pause(Target.LEADER, chance), (0.1, pause_s_max)),
        (Pause(Target.LEADER, chance), (0.1, 2.0)),
        (Pause(Target.FOLLOWER, chance), (0.1, pause_s_max)),
    ]


def network(chance: random.Random) -> _Some:
    faults: list[Fault] = [
        Isolate(Target.LEADER, Manner.SILENT, chance),
        Isolate(Target.LEADER, Manner.RESET, chance),
        Isolate(Target.ALL, Manner.RESET, chance),
        Halves(Manner.SILENT, chance),
        OneWay(Target.LEADER, chance),
        OneWay(Target.FOLLOWER, chance),
        Ring(Manner.SILENT, chance),
        Flap(Target.LEADER, Manner.RESET, chance),
        Flap(Target.ONE, Manner.SILENT, chance),
        Slow(Target.ONE, Delay(40, 60), chance),
        Slow(Target.ALL, Delay(5, 20), chance),
    ]
    return [(fault, LONG) for fault in faults]


def handlers(chance: random.Random) -> _Some:
    return [
        (KillHandlers(chance, everyone=False), (0.2, 2.0)),
        (KillHandlers(chance, everyone=True), (0.2, 2.0)),
        (PauseHandlers(chance), (0.1, 4.0)),
    ]


def machine(chance: random.Random, *, small_disk: bool) -> _Some:
    faults: list[Fault] = [
        ClockJump(Target.LEADER, chance),
        ClockJump(Target.ALL, chance),
        SlowDisk(Target.LEADER, chance, milliseconds=(20, 150)),
        SlowDisk(Target.ALL, chance, milliseconds=(10, 60)),
    ]
    if small_disk:
        faults += [FullDisk(left_bytes=RESERVE_BYTES), FullDisk(left_bytes=0)]
    return [(fault, LONG) for fault in faults]


def members(chance: random.Random) -> _Some:
    return [
        (RollingRestart(chance), NOW),
        (Drain(Target.LEADER, chance), LONG),
        (DrainedRestart(chance), NOW),
        (Replace(chance), SHORT),
        (Replace(chance, started_empty=True), SHORT),
        (Replace(chance, newcomer_killed=True), SHORT),
    ]


def snapshots(chance: random.Random, *, store: bool) -> _Some:
    faults: list[Fault] = [
        WipeState(chance),
        WipeState(chance, snapshots=True),
        WipeState(chance, everywhere=True),
        KillInCut(chance),
        KillInInstall(chance),
    ]
    if store:
        faults += [KillInUpload(chance), KillMidUpload(chance)]
    return [(fault, SHORT) for fault in faults]


def store(chance: random.Random) -> _Some:
    return [(StoreOutage(manner, chance), LONG) for manner in OUTAGES]


def pairs(chance: random.Random, *, store: bool) -> _Some:
    faults = [
        Together(Isolate(Target.FOLLOWER, Manner.SILENT, chance), KillHandlers(chance, everyone=False)),
        Together(Slow(Target.ALL, Delay(5, 20), chance), Kill(Target.LEADER, chance)),
        Together(KillHandlers(chance, everyone=True), Kill(Target.LEADER, chance)),
        Together(Pause(Target.FOLLOWER, chance), Kill(Target.LEADER, chance)),
        Together(Drain(Target.LEADER, chance), Kill(Target.FOLLOWER, chance)),
        Together(Slow(Target.ALL, Delay(5, 20), chance), Replace(chance)),
    ]
    if store:
        faults += [
            Together(StoreOutage("refused", chance), Kill(Target.LEADER, chance)),
            Together(StoreOutage("silent", chance), WipeState(chance, snapshots=True)),
        ]
    return [(fault, SHORT) for fault in faults]
