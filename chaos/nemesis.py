"""Faults and their schedule: on processes by pid, and on links by proxies.

A fault begins and ends; its end repairs everything it broke. Victims are drawn from an injected random number
generator, so one seed gives one sequence of choices (the cluster's reaction depends on real time). A schedule runs
faults one after the other with quiet times in between, because a system under permanent faults only shows that it
stops.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import combinations, permutations
from pathlib import Path
from typing import Protocol

from holdfast.chaos.proxy import Blackhole, Cut, Delay, Direction, Mode, Pass


class Link(Protocol):
    """The link over which one node dials another: a proxy, or routes between network namespaces."""

    def mode(self, mode: Mode) -> None: ...


class Cluster(Protocol):
    """What faults need of a cluster under test."""

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def proxies(self) -> Mapping[tuple[str, str], Link]:
        """For each (a, b) the link through which a dials b."""

    def pid(self, name: str) -> int | None:
        """None while the node does not run."""

    def leader(self) -> str | None:
        """The leader, as far as known."""

    async def start(self, name: str) -> None: ...

    async def kill(self, name: str, signum: signal.Signals) -> None:
        """Send a signal to the node's process; after SIGKILL, return when the process is gone."""


class Target(StrEnum):
    LEADER = "leader"
    FOLLOWER = "follower"
    ONE = "one"
    MINORITY = "minority"
    MAJORITY = "majority"
    ALL = "all"


def aim(cluster: Cluster, target: Target, chance: random.Random) -> list[str]:
    """The nodes that a target currently means. Without a leader, any node stands in for it."""
    names = list(cluster.names)
    leader = cluster.leader()
    match target:
        case Target.LEADER:
            return [leader if leader in names else chance.choice(names)]
        case Target.FOLLOWER:
            return [chance.choice([name for name in names if name != leader] or names)]
        case Target.ONE:
            return [chance.choice(names)]
        case Target.MINORITY:
            return chance.sample(names, max(1, (len(names) - 1) // 2))
        case Target.MAJORITY:
            return chance.sample(names, len(names) // 2 + 1)
        case Target.ALL:
            return names


class Fault(ABC):
    """A temporary fault. May be used again after its end."""

    name: str
    #: Whether the fault took effect just before `begin` returned. Only then can the recovery time be measured.
    instant = True
    #: Whether it may cause lost attempts or late timers. A fault that must go unnoticed excuses nothing.
    excuses = True

    @abstractmethod
    def describe(self) -> str:
        """What it did, and to which nodes, when it last began."""

    @abstractmethod
    async def begin(self, cluster: Cluster) -> None: ...

    @abstractmethod
    async def end(self, cluster: Cluster) -> None:
        """Repair everything `begin` broke, also if `begin` itself failed half-way."""


class Kill(Fault):
    """SIGKILL to all victims at once; at the end they start again from their disks."""

    def __init__(self, target: Target, chance: random.Random) -> None:
        self.name = f"kill {target}"
        self._target, self._chance = target, chance
        self._victims: list[str] = []

    def describe(self) -> str:
        return f"SIGKILL {', '.join(self._victims)}"

    async def begin(self, cluster: Cluster) -> None:
        self._victims = [it for it in aim(cluster, self._target, self._chance) if cluster.pid(it) is not None]
        await asyncio.gather(*(cluster.kill(victim, signal.SIGKILL) for victim in self._victims))

    async def end(self, cluster: Cluster) -> None:
        await asyncio.gather(*(cluster.start(victim) for victim in self._victims if cluster.pid(victim) is None))


class Pause(Fault):
    """SIGSTOP: silent, but still connected; SIGCONT at the end, when it continues with outdated knowledge."""

    def __init__(self, target: Target, chance: random.Random) -> None:
        self.name = f"pause {target}"
        self._target, self._chance = target, chance
        self._stopped: dict[str, int] = {}

    def describe(self) -> str:
        return f"SIGSTOP {', '.join(self._stopped)}"

    async def begin(self, cluster: Cluster) -> None:
        self._stopped = {}
        for name in aim(cluster, self._target, self._chance):
            pid = cluster.pid(name)
            if pid is not None:
                self._stopped[name] = pid
                await cluster.kill(name, signal.SIGSTOP)

    async def end(self, cluster: Cluster) -> None:
        for name, pid in self._stopped.items():
            if cluster.pid(name) == pid:  # Another fault may have killed it meanwhile.
                await cluster.kill(name, signal.SIGCONT)


class Manner(StrEnum):
    SILENT = "silent"  # Connections stay open and nothing arrives.
    RESET = "reset"  # Connections break at once and new ones are refused.


class LinkFault(Fault):
    """Degrades links; the end restores them."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._bent: list[tuple[str, str]] = []
        self._description = "nothing yet"

    def describe(self) -> str:
        return self._description

    async def begin(self, cluster: Cluster) -> None:
        self._bent = []
        modes, self._description = self.modes(cluster)
        for pair, mode in modes.items():
            self._bent.append(pair)
            cluster.proxies[pair].mode(mode)

    async def end(self, cluster: Cluster) -> None:
        for pair in self._bent:
            cluster.proxies[pair].mode(Pass())
        self._bent = []

    @abstractmethod
    def modes(self, cluster: Cluster) -> tuple[dict[tuple[str, str], Mode], str]:
        """The new modes of links, and a description."""


def silence(cluster: Cluster, deaf: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Mode]:
    """Modes under which nothing passes from a to b for each (a, b) in `deaf`, regardless of which node dialled."""
    deaf = set(deaf)
    modes: dict[tuple[str, str], Mode] = {}
    for a, b in cluster.proxies:
        directions = set()
        if (a, b) in deaf:
            directions.add(Direction.FORWARD)
        if (b, a) in deaf:
            directions.add(Direction.BACKWARD)
        if directions:
            modes[a, b] = Blackhole(frozenset(directions))
    return modes


def sever(cluster: Cluster, pairs: Iterable[tuple[str, str]], manner: Manner) -> dict[tuple[str, str], Mode]:
    """Modes under which nothing passes between the two nodes of each pair."""
    both = {pair for a, b in pairs for pair in ((a, b), (b, a))}
    if manner is Manner.SILENT:
        return silence(cluster, both)
    return {pair: Cut() for pair in cluster.proxies if pair in both}


class Isolate(LinkFault):
    """One node (or several, each alone) is cut off from all others. Clients still reach it."""

    def __init__(self, target: Target, manner: Manner, chance: random.Random) -> None:
        super().__init__(chance)
        self.name = f"isolate {target} ({manner})"
        self._target, self._manner = target, manner

    def modes(self, cluster: Cluster) -> tuple[dict[tuple[str, str], Mode], str]:
        alone = aim(cluster, self._target, self._chance)
        pairs = [pair for pair in combinations(cluster.names, 2) if alone_in(pair, alone)]
        return sever(cluster, pairs, self._manner), f"cut off {', '.join(alone)} ({self._manner})"


def alone_in(pair: tuple[str, str], alone: Sequence[str]) -> bool:
    return pair[0] in alone or pair[1] in alone


class Halves(LinkFault):
    """A majority and a minority that do not hear each other."""

    def __init__(self, manner: Manner, chance: random.Random) -> None:
        super().__init__(chance)
        self.name = f"halves ({manner})"
        self._manner = manner

    def modes(self, cluster: Cluster) -> tuple[dict[tuple[str, str], Mode], str]:
        shuffled = self._chance.sample(list(cluster.names), len(cluster.names))
        middle = len(shuffled) // 2
        fewer, more = shuffled[:middle], shuffled[middle:]
        pairs = [(a, b) for a in fewer for b in more]
        return sever(cluster, pairs, self._manner), f"cut {fewer} from {more} ({self._manner})"


class OneWay(LinkFault):
    """One node speaks but does not hear, or hears but is not heard."""

    def __init__(self, target: Target, chance: random.Random) -> None:
        super().__init__(chance)
        self.name = f"one-way {target}"
        self._target = target

    def modes(self, cluster: Cluster) -> tuple[dict[tuple[str, str], Mode], str]:
        victim = aim(cluster, self._target, self._chance)[0]
        mute = self._chance.random() < 0.5
        others = [name for name in cluster.names if name != victim]
        deaf = [(victim, other) if mute else (other, victim) for other in others]
        return silence(cluster, deaf), f"{victim} {'is not heard' if mute else 'does not hear'}"


class Ring(LinkFault):
    """Every node hears only its two neighbours, so majorities exist but no two nodes see the same one.

    Three nodes in a ring all hear each other; there the ring is broken open, and the ends do not hear each other.
    """

    def __init__(self, manner: Manner, chance: random.Random) -> None:
        super().__init__(chance)
        self.name = f"ring ({manner})"
        self._manner = manner

    def modes(self, cluster: Cluster) -> tuple[dict[tuple[str, str], Mode], str]:
        ring = self._chance.sample(list(cluster.names), len(cluster.names))
        last = len(ring) - 1
        kept = {frozenset((ring[i], ring[i + 1])) for i in range(last)}
        if len(ring) > 3:
            kept.add(frozenset((ring[last], ring[0])))
        pairs = [pair for pair in combinations(ring, 2) if frozenset(pair) not in kept]
        return sever(cluster, pairs, self._manner), f"{'ring' if last > 2 else 'chain'} {ring} ({self._manner})"


class Slow(LinkFault):
    """All links of the victims are slow, in both directions."""

    def __init__(self, target: Target, delay: Delay, chance: random.Random) -> None:
        super().__init__(chance)
        self.name = f"slow {target}"
        self._target, self._delay = target, delay

    def modes(self, cluster: Cluster) -> tuple[dict[tuple[str, str], Mode], str]:
        victims = aim(cluster, self._target, self._chance)
        pairs = [pair for pair in permutations(cluster.names, 2) if alone_in(pair, victims) and pair in cluster.proxies]
        delay = f"{self._delay.delay_ms:g} ms + {self._delay.jitter_ms:g} ms"
        return dict.fromkeys(pairs, self._delay), f"links of {', '.join(victims)} delayed by {delay}"


class Together(Fault):
    """Several faults at once, ended in reverse order. They must not affect the same links."""

    def __init__(self, *faults: Fault) -> None:
        self.name = " + ".join(fault.name for fault in faults)
        self.instant = all(fault.instant for fault in faults)
        self.excuses = any(fault.excuses for fault in faults)
        self._faults = faults
        self._begun: list[Fault] = []

    def describe(self) -> str:
        return "; ".join(fault.describe() for fault in self._begun)

    async def begin(self, cluster: Cluster) -> None:
        self._begun = []
        for fault in self._faults:
            self._begun.append(fault)
            await fault.begin(cluster)

    async def end(self, cluster: Cluster) -> None:
        for fault in reversed(self._begun):
            await fault.end(cluster)


def every_kind(chance: random.Random) -> list[Fault]:
    """One of each fault that a log must survive."""
    kills = [Kill(target, chance) for target in (Target.LEADER, Target.FOLLOWER, Target.MAJORITY, Target.ALL)]
    pauses = [Pause(target, chance) for target in (Target.LEADER, Target.FOLLOWER, Target.MAJORITY)]
    cuts: list[Fault] = [
        Isolate(Target.LEADER, Manner.SILENT, chance),
        Isolate(Target.LEADER, Manner.RESET, chance),
        Isolate(Target.ONE, Manner.SILENT, chance),
        Isolate(Target.ALL, Manner.RESET, chance),
        Halves(Manner.SILENT, chance),
        OneWay(Target.LEADER, chance),
        OneWay(Target.FOLLOWER, chance),
        Ring(Manner.SILENT, chance),
        Ring(Manner.RESET, chance),
        Slow(Target.ONE, Delay(40, 60), chance),
    ]
    pairs = [
        Together(Isolate(Target.LEADER, Manner.SILENT, chance), Kill(Target.FOLLOWER, chance)),
        Together(Slow(Target.ALL, Delay(5, 40), chance), Kill(Target.LEADER, chance)),
    ]
    return [*kills, *pauses, *cuts, *pairs]


@dataclass(frozen=True, slots=True)
class Event:
    at: float  # CLOCK_MONOTONIC, as in the history.
    event: str  # "begin" (the fault is in force) or "end" (all is repaired)
    name: str
    target: str


@dataclass(slots=True)
class FaultLog:
    """The faults with their times, in memory and, if a path is given, as JSON lines."""

    path: Path | None = None
    now: Callable[[], float] = time.monotonic
    events: list[Event] = field(default_factory=list)

    def record(self, event: str, fault: Fault) -> None:
        self.events.append(Event(self.now(), event, fault.name, fault.describe()))
        if self.path is not None:
            line = json.dumps(asdict(self.events[-1])).encode() + b"\n"
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                os.write(file, line)
            finally:
                os.close(file)

    def begun(self) -> Counter[str]:
        """How often each fault was in force."""
        return Counter(event.name for event in self.events if event.event == "begin")


class Schedule:
    """Faults in shuffled rounds, so that each kind has its turn; `on_s` and `off_s` bound how long each takes."""

    def __init__(
        self,
        faults: Sequence[Fault],
        chance: random.Random,
        log: FaultLog,
        *,
        on_s: tuple[float, float],
        off_s: tuple[float, float],
    ) -> None:
        assert faults, "a schedule without faults proves nothing"
        self._faults, self._chance, self._log = list(faults), chance, log
        self._on_s, self._off_s = on_s, off_s

    async def run(self, cluster: Cluster, seconds: float) -> None:
        """Begins no fault after `seconds`; when it returns or is cancelled, everything is repaired."""
        clock = asyncio.get_running_loop().time
        finish = clock() + seconds
        turns: list[Fault] = []
        while True:
            await asyncio.sleep(self._chance.uniform(*self._off_s))
            if clock() >= finish:
                return
            turns = turns or self._chance.sample(self._faults, len(self._faults))
            fault = turns.pop()
            beginning = asyncio.create_task(self._begin(fault, cluster))
            try:
                await asyncio.shield(beginning)
                await asyncio.sleep(self._chance.uniform(*self._on_s))
            finally:
                await asyncio.wait([beginning])  # A fault interrupted half-way would not know what to repair.
                await fault.end(cluster)
                self._log.record("end", fault)

    async def _begin(self, fault: Fault, cluster: Cluster) -> None:
        await fault.begin(cluster)
        self._log.record("begin", fault)
