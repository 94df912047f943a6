"""Operations on a cluster under load: drain a node, restart it after a drain, replace a lost one.

They use the admin API of any node that answers, like `holdfast cluster ...`. None of them may cause a client error, and
what the API reports must be true. Each fault checks that, and records violations (`NodeCluster.found`).
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from typing import Final, cast

from holdfast.chaos.cluster import NodeCluster
from holdfast.chaos.nemesis import Cluster, Fault, Target, aim

#: By then other nodes lead what a drained node led, even on a busy machine.
MOVED_S: Final = 20.0
REPLACED_S: Final = 120.0
DRAINED: Final = "a drained node leads nothing"
REPLACED: Final = "a lost node can be replaced"
FORGETFUL: Final = "a node that forgot is not let in"


class Drain(Fault):
    """A node is drained for a while: its leaderships move away, and come back after the drain."""

    def __init__(self, target: Target, chance: random.Random) -> None:
        self.name = f"drain {target}"
        self._target, self._chance = target, chance
        self._victim = ""

    def describe(self) -> str:
        return f"drain {self._victim}"

    async def begin(self, cluster: Cluster) -> None:
        nodes = cast(NodeCluster, cluster)
        self._victim = aim(cluster, self._target, self._chance)[0]
        await drain(nodes, self._victim)

    async def end(self, cluster: Cluster) -> None:
        if self._victim:
            nodes = cast(NodeCluster, cluster)
            await leads_nothing(nodes, self._victim)
            await undrain(nodes, self._victim)


class DrainedRestart(Fault):
    """A careful restart: drain the node, stop it, start it, undrain it."""

    name = "drain and restart"
    instant = False

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._victim = ""

    def describe(self) -> str:
        return f"drain, SIGTERM and start of {self._victim}"

    async def begin(self, cluster: Cluster) -> None:
        nodes = cast(NodeCluster, cluster)
        self._victim = aim(cluster, Target.LEADER, self._chance)[0]
        await drain(nodes, self._victim)
        await leads_nothing(nodes, self._victim)
        await nodes.kill(self._victim, signal.SIGTERM)
        await nodes.start(self._victim)
        await nodes.answers(self._victim)

    async def end(self, cluster: Cluster) -> None:
        if self._victim:
            nodes = cast(NodeCluster, cluster)
            await nodes.start(self._victim)
            await undrain(nodes, self._victim)


class Replace(Fault):
    """A node and its disk are lost. Later an operator adds a replacement, and removes the lost node.

    With `started_empty` the lost node first comes back with an empty directory under its old name. It must be refused,
    because it has lost what it acknowledged. With `newcomer_killed` the new node is killed while it gets its replicas.
    """

    def __init__(self, chance: random.Random, *, started_empty: bool = False, newcomer_killed: bool = False) -> None:
        self.name = "replace node"
        if started_empty:
            self.name = "wipe disk"
        elif newcomer_killed:
            self.name = "replace node, newcomer killed"
        self._chance = chance
        self._started_empty, self._newcomer_killed = started_empty, newcomer_killed
        self._victim = self._newcomer = ""

    def describe(self) -> str:
        by = f", replaced by {self._newcomer}" if self._newcomer else ""
        return f"SIGKILL {self._victim} and its disk wiped{by}"

    async def begin(self, cluster: Cluster) -> None:
        nodes = cast(NodeCluster, cluster)
        # The node whose disk can be filled stays, because that disk belongs to its name.
        self._victim = self._chance.choice([name for name in nodes.names if name != nodes.small_disk])
        self._newcomer = ""
        await nodes.kill(self._victim, signal.SIGKILL)
        nodes.wipe(self._victim)

    async def end(self, cluster: Cluster) -> None:
        if not self._victim:
            return
        nodes = cast(NodeCluster, cluster)
        if self._started_empty:
            await self._come_back_empty(nodes)
        self._newcomer = newcomer = await nodes.newcomer()
        introduction = {"name": newcomer, "address": nodes.address(newcomer)}
        await nodes.ask_admin("/cluster/nodes", method="POST", body=introduction)
        await nodes.start(newcomer)
        if self._newcomer_killed:
            await asyncio.sleep(self._chance.uniform(0.3, 3.0))
            await nodes.kill(newcomer, signal.SIGKILL)
            await nodes.start(newcomer)
        await nodes.answers(newcomer)
        nodes.welcome(newcomer)
        await nodes.ask_admin(f"/cluster/nodes/{self._victim}/remove", method="POST")
        nodes.forget(self._victim)
        await has_moved(nodes, self._victim, newcomer)

    async def _come_back_empty(self, nodes: NodeCluster) -> None:
        instead = await nodes.is_turned_away(self._victim)
        if instead is not None:
            nodes.broken(FORGETFUL, f"{self._victim} was started on an empty directory, and {instead}")


async def has_moved(cluster: NodeCluster, old: str, new: str) -> None:
    """Wait until `old` has nothing and every group is complete again. A timeout is recorded."""
    deadline = time.monotonic() + REPLACED_S
    while True:
        view = await cluster.ask_admin("/cluster")
        groups = {f"partition {it['partition']}": it["members"] for it in view["partitions"]}
        groups["the meta group"] = view["meta"]["members"]
        wrong = {
            name: it
            for name, it in groups.items()
            if old in it or len(it) < min(cluster.replication, len(cluster.names))
        }
        if new not in groups["the meta group"]:
            wrong["the meta group"] = groups["the meta group"]
        if not wrong and not view["changing"]:
            return
        if time.monotonic() > deadline:
            cluster.broken(
                REPLACED, f"{old} by {new}: after {REPLACED_S:g} s, {wrong}; what is being done: {view['changing']}"
            )
            return
        await asyncio.sleep(0.1)


async def drain(cluster: NodeCluster, name: str) -> None:
    await cluster.ask_admin(f"/cluster/nodes/{name}/drain", method="POST")


async def undrain(cluster: NodeCluster, name: str) -> None:
    await cluster.ask_admin(f"/cluster/nodes/{name}/undrain", method="POST")


async def leads_nothing(cluster: NodeCluster, name: str) -> None:
    """Wait until other nodes lead all partitions. A timeout is recorded."""
    deadline = time.monotonic() + MOVED_S
    while (led := cluster.views.led_by(name)) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    if led:
        cluster.broken(DRAINED, f"{name} was drained, and leads partitions {led} {MOVED_S:g} s later")
