"""The cluster as one node shows it to operators: nodes, partitions, leaders, lags, snapshots."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final, NamedTuple

from holdfast.cluster.admin.shapes import cluster
from holdfast.cluster.admin.shapes.cluster import Cluster, Node
from holdfast.cluster.admin.views import show_pause
from holdfast.cluster.config import Config
from holdfast.cluster.groups import META_GROUP
from holdfast.cluster.members.controller import Controller
from holdfast.cluster.members.founding import Founding
from holdfast.cluster.members.handover import Handover
from holdfast.cluster.members.operations import Operations
from holdfast.cluster.members.releases import Releases
from holdfast.cluster.members.vitals import UNKNOWN, AllVitals, Vitals
from holdfast.cluster.partition.door import Partition
from holdfast.cluster.partition.views import show_group
from holdfast.cluster.registry.machine import MetaMachine
from holdfast.cluster.registry.metalog import MetaLog
from holdfast.cluster.routing.router import Router
from holdfast.cluster.snapshotting.service import Snapshots
from holdfast.cluster.snapshotting.views import show_keeper, show_snapshots
from holdfast.cluster.values.shared_store import Objects
from holdfast.log.errors import ProposalError
from holdfast.log.link import LinkStatus
from holdfast.log.node import LogNode
from holdfast.sdk.ids import PartitionNumber
from holdfast.statemachine.members import ACTIVE, Member, Replicas

FRESH_S: Final = 3.0  # How long an operator waits for a meta group without a leader.

NOT_CONNECTED: Final = "not connected"
#: Conditions of nodes that are members for good; others are shown with their state.
OK: Final = "ok"
UNREACHABLE: Final = "unreachable"
DISK_FULL: Final = "disk full"


class Overview(NamedTuple):
    config: Config
    log: LogNode
    meta: MetaMachine
    meta_log: MetaLog
    founding: Founding
    router: Router
    hosted: Mapping[PartitionNumber, Partition]
    controller: Controller
    handover: Handover
    operations: Operations
    releases: Releases
    vitals: AllVitals
    snapshots: Snapshots
    objects: Objects

    async def show(self, *, reasons: bool = True) -> Cluster:
        """`reasons`: why links are down. They tell what listens at an address, which is for administrators only.

        Nodes and the table are linearizable, if the meta group answers. The rest is as this node sees it: links,
        leaders, and the progress of others, which only a leader knows."""
        fresh, changing, vitals = await asyncio.gather(
            self._is_fresh(), self.controller.doing_now(), self.vitals.everywhere()
        )
        membership = self.meta.state.membership
        return {
            "cluster": self.config.cluster,
            "founders": list(self.founding.founders),
            "restored": self.founding.restored or None,
            "answered_by": self.config.node,
            "linearizable": {"nodes": fresh, "members": fresh, "leaders": False, "lags": False},
            "changing": changing or None,
            "pauses": [show_pause(each) for each in self.meta.state.pauses.by_scope.values()],
            "replication": membership.replication,
            "level": self.meta.state.level,
            "nodes": self._nodes(vitals, reasons=reasons),
            "snapshots": show_snapshots(self.snapshots),
            "blobs": self.objects.show(),
            "meta": show_group(self.log.group(META_GROUP)),
            "partitions": [self._partition(number, replicas) for number, replicas in sorted(membership.table.items())],
        }

    async def _is_fresh(self) -> bool:
        try:
            async with asyncio.timeout(FRESH_S):
                await self.meta_log.fresh()
        except (ProposalError, TimeoutError):
            return False
        return True

    def _nodes(self, vitals: Mapping[str, Vitals], *, reasons: bool) -> list[Node]:
        links, releases = self.log.links(), self.releases.known
        return [
            {
                **self.operations.show(member),
                "condition": self._condition(member, links),
                **(vitals[name].show() if name in vitals else UNKNOWN),
                "version": releases[name].version if name in releases else None,
                "level": releases[name].level if name in releases else None,
                "disk_full": name in self.handover.full,
                "connected": self._is_connected(name, links),
                "error": self._link_error(links.get(name), reasons=reasons),
            }
            for name, member in sorted(self.meta.state.membership.nodes.items())
        ]

    def _is_connected(self, name: str, links: Mapping[str, LinkStatus]) -> bool:
        return name == self.config.node or (name in links and links[name].connected)

    def _condition(self, member: Member, links: Mapping[str, LinkStatus]) -> str:
        """In a word: whether the node works, or what is the matter with it."""
        if member.state != ACTIVE:
            return member.state
        if not self._is_connected(member.name, links):
            return UNREACHABLE
        return DISK_FULL if member.name in self.handover.full else OK

    @staticmethod
    def _link_error(link: LinkStatus | None, *, reasons: bool) -> str | None:
        if link is None or link.connected or link.last_error is None:
            return None
        return link.last_error if reasons else NOT_CONNECTED

    def _partition(self, number: PartitionNumber, replicas: Replicas) -> cluster.Partition:
        shown: cluster.Partition = {
            "partition": number,
            "leader": self.router.leader(number),
            "members": list(replicas.members),
            "epoch": replicas.epoch,
            "here": number in self.hosted,
        }
        if number not in self.hosted:
            return shown
        # What only a node with a replica knows.
        group = self.hosted[number].group
        return {**shown, **show_group(group), "snapshot": show_keeper(self.snapshots.keepers[group.id])}
