"""Faults around snapshots: a lost state, a kill in the middle of a cut, an upload or an install, and a store that fails.

Chaos nodes cut often and keep little log, so that snapshots are needed all the time. A kill is aimed: the node is
halted at the intended moment (`faulty_node.Moment`) and killed there. A node that does not reach that moment in time is
killed anyway, and counted as missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import signal
import time
from typing import Final, cast

from holdfast.chaos.cluster import STORE, NodeCluster
from holdfast.chaos.faulty_node import Moment
from holdfast.chaos.nemesis import Cluster, Fault, Target, aim
from holdfast.chaos.proxy import Blackhole, Cut, Delay, Errors, Mode, Pass, Throttle
from holdfast.cluster.groups import FIRST_PARTITION_GROUP

AIM_S: Final = 12.0
LOOK_S: Final = 0.002
CUT: Final = (Moment.CUT_COPIED, Moment.CUT_NAMED)
UPLOAD: Final = (Moment.UPLOAD_BEGINS, Moment.UPLOAD_DONE)
INSTALL: Final = (Moment.FETCHED, Moment.STAGED, Moment.INSTALL_NAMED, Moment.INSTALLED)


class WipeState(Fault):
    """The state of one partition is gone when its node starts again: it must come back from a snapshot and the log.

    With `snapshots`, the snapshots are gone too: the node has no state that its log could continue from, and fetches
    one before it takes part. With `everywhere`, all nodes lose the state of the same partition at once.
    """

    def __init__(self, chance: random.Random, *, snapshots: bool = False, everywhere: bool = False) -> None:
        assert not (snapshots and everywhere), "that would be a loss of data"
        self.name = "wipe state"
        if snapshots:
            self.name = "wipe state and snapshots"
        elif everywhere:
            self.name = "wipe state everywhere"
        self._chance, self._snapshots, self._everywhere = chance, snapshots, everywhere
        self._victims: list[str] = []
        self._partition = 0

    def describe(self) -> str:
        what = "state and snapshots" if self._snapshots else "state"
        return f"SIGKILL {', '.join(self._victims)}, {what} of partition {self._partition} wiped"

    async def begin(self, cluster: Cluster) -> None:
        nodes = cast(NodeCluster, cluster)
        self._victims = list(nodes.names) if self._everywhere else aim(cluster, Target.ONE, self._chance)
        begins = nodes.views.log_begins(self._victims[0])
        # A complete log alone restores the state, so prefer a partition that needs its snapshot.
        needed = [number for number, index in begins.items() if index > 0]
        self._partition = self._chance.choice(sorted(needed or begins or range(nodes.partitions)))
        await asyncio.gather(*(nodes.kill(victim, signal.SIGKILL) for victim in self._victims))
        for victim in self._victims:
            data = nodes.data(victim)
            shutil.rmtree(data / "state" / f"{self._partition:04d}", ignore_errors=True)
            if self._snapshots:
                for each in data.glob(f"snapshots/*/{FIRST_PARTITION_GROUP + self._partition:010d}"):
                    shutil.rmtree(each)

    async def end(self, cluster: Cluster) -> None:
        await asyncio.gather(*(cluster.start(victim) for victim in self._victims))


class AimedKill(Fault):
    """SIGKILL in the middle of something. Whether it hit is in the description, and counted."""

    def __init__(self, name: str, moments: tuple[Moment, ...], chance: random.Random) -> None:
        self.name = name
        self._moments, self._chance = moments, chance
        self._victim = ""
        self._moment = Moment.NONE
        self._hit = False

    def describe(self) -> str:
        if self._hit:
            return f"SIGKILL {self._victim} when {self._moment.words}"
        return f"SIGKILL {self._victim}, which did not come in time to where {self._moment.words}"

    async def begin(self, cluster: Cluster) -> None:
        nodes = cast(NodeCluster, cluster)
        self._victim = self.choose(nodes)
        self._moment = self._chance.choice(self._moments)
        self._hit = False
        await self.prepare(nodes)
        nodes.bends(self._victim).hold_at(self._moment)
        provoking = asyncio.create_task(self.provoke(nodes))
        try:
            self._hit = await self._is_held(nodes)
            await nodes.kill(self._victim, signal.SIGKILL)
        finally:
            nodes.bends(self._victim).hold_at(Moment.NONE)
            provoking.cancel()
            await asyncio.gather(provoking, return_exceptions=True)
        nodes.aimed[self.name]["hit" if self._hit else "missed"] += 1

    async def _is_held(self, nodes: NodeCluster) -> bool:
        deadline = time.monotonic() + AIM_S
        while not (held := nodes.bends(self._victim).is_held) and time.monotonic() < deadline:
            await asyncio.sleep(LOOK_S)
        return held

    async def end(self, cluster: Cluster) -> None:
        if self._victim:
            await cluster.start(self._victim)

    def choose(self, nodes: NodeCluster) -> str:
        return aim(nodes, Target.LEADER, self._chance)[0]

    async def prepare(self, nodes: NodeCluster) -> None:
        """Do slow preparations before the process can be halted."""

    async def provoke(self, nodes: NodeCluster) -> None:
        """Make the victim do it repeatedly: the partition's leader cuts and publishes a snapshot."""
        while True:
            for number in nodes.views.led_by(self._victim):
                await nodes.create_snapshot(number)
            await asyncio.sleep(0.5)


class KillInCut(AimedKill):
    def __init__(self, chance: random.Random) -> None:
        super().__init__("kill in cut", CUT, chance)


class KillInUpload(AimedKill):
    def __init__(self, chance: random.Random) -> None:
        super().__init__("kill in upload", UPLOAD, chance)


class KillMidUpload(AimedKill):
    """Kill during the transfer: the store accepts no bytes until the node is dead."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__("kill mid upload", (Moment.NONE,), chance)

    def describe(self) -> str:
        return f"SIGKILL {self._victim} " + ("during an upload" if self._hit else "which did not upload in time")

    async def prepare(self, nodes: NodeCluster) -> None:
        nodes.store_link.mode(Blackhole())

    async def _is_held(self, nodes: NodeCluster) -> bool:
        deadline = time.monotonic() + AIM_S
        while not (publishing := "publishing" in nodes.views.doing(self._victim)) and time.monotonic() < deadline:
            await asyncio.sleep(LOOK_S)
        return publishing

    async def end(self, cluster: Cluster) -> None:
        cast(NodeCluster, cluster).store_link.mode(Pass())
        await super().end(cluster)


class KillInInstall(AimedKill):
    """A follower is away until the log has trimmed the entries it lacks. It comes back, gets a snapshot, and is killed."""

    instant = False

    def __init__(self, chance: random.Random) -> None:
        super().__init__("kill in install", INSTALL, chance)

    def choose(self, nodes: NodeCluster) -> str:
        return aim(nodes, Target.FOLLOWER, self._chance)[0]

    async def prepare(self, nodes: NodeCluster) -> None:
        had = nodes.views.applied(self._victim)
        await nodes.kill(self._victim, signal.SIGKILL)
        deadline = time.monotonic() + AIM_S
        while time.monotonic() < deadline:
            leaders = nodes.views.leaders()
            if any(nodes.views.log_begins(leaders.get(it, "")).get(it, 0) > index for it, index in had.items()):
                return
            for number in had:
                await nodes.create_snapshot(number)
            await asyncio.sleep(0.2)

    async def provoke(self, nodes: NodeCluster) -> None:
        await nodes.start(self._victim)


OUTAGES: Final = {
    "refused": "connections to S3 are reset and refused",
    "silent": "S3 does not answer",
    "slow": "S3 takes 16 KiB a second",
    "delayed": "every answer of S3 takes half a second longer",
    "flapping": "connections to S3 come and go",
    "killed": "SIGKILL the S3 server",
    "failing": "S3 answers 500 InternalError and 503 SlowDown",
    "forbidding": "S3 answers 403 AccessDenied",
}


class StoreOutage(Fault):
    """The store of snapshots cannot be reached, is silent, slow, comes and goes, dies, or answers with errors.

    No client may notice any of it.
    """

    excuses = False

    def __init__(self, manner: str, chance: random.Random) -> None:
        self.name = f"S3 {manner}"
        self._manner, self._chance = manner, chance
        self._task: asyncio.Task[None] | None = None

    def describe(self) -> str:
        return OUTAGES[self._manner]

    async def begin(self, cluster: Cluster) -> None:
        nodes = cast(NodeCluster, cluster)
        match self._manner:
            case "flapping":
                self._task = asyncio.create_task(self._flap(nodes))
            case "killed":
                await nodes.kill(STORE, signal.SIGKILL)
            case _:
                nodes.store_link.mode(_MODES[self._manner])

    async def _flap(self, nodes: NodeCluster) -> None:
        while True:
            nodes.store_link.mode(Cut())
            await asyncio.sleep(self._chance.uniform(0.02, 0.2))
            nodes.store_link.mode(Pass())
            await asyncio.sleep(self._chance.uniform(0.02, 0.2))

    async def end(self, cluster: Cluster) -> None:
        nodes = cast(NodeCluster, cluster)
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        nodes.store_link.mode(Pass())
        await nodes.start(STORE)
        nodes.store_failed_at = time.monotonic()


_MODES: Final[dict[str, Mode]] = {
    "refused": Cut(),
    "silent": Blackhole(),
    "slow": Throttle(16 * 1024),
    "delayed": Delay(500.0),
    "failing": Errors(((500, "InternalError"), (503, "SlowDown"))),
    "forbidding": Errors(((403, "AccessDenied"),)),
}
