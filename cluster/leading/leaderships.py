"""The partitions that this node leads: a `Leadership` begins and ends as the role of a replica in the log changes."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.cluster.clock import Clock
from holdfast.cluster.config import Config
from holdfast.cluster.groups import group_of
from holdfast.cluster.handlers.invoker import Invoker
from holdfast.cluster.leading.courier import Courier
from holdfast.cluster.leading.leadership import Leadership, limits_of
from holdfast.cluster.partition.door import Bounds, Observer, Outvoted, Partition
from holdfast.cluster.registry.machine import MetaMachine
from holdfast.cluster.routing.replies import Replies
from holdfast.cluster.routing.router import Router
from holdfast.cluster.routing.watches import Watches
from holdfast.cluster.snapshotting.replicas import Replicas
from holdfast.cluster.snapshotting.service import Snapshots
from holdfast.cluster.traces import Tracer
from holdfast.cluster.values.shared_store import Objects
from holdfast.log.node import LogNode
from holdfast.sdk.ids import PartitionNumber


class Leaderships:
    """One per node. Everything here runs on the event loop's thread."""

    def __init__(
        self,
        config: Config,
        *,
        replicas: Replicas,
        log: LogNode,
        meta: MetaMachine,
        invoker: Invoker,
        router: Router,
        replies: Replies,
        watches: Watches,
        snapshots: Snapshots,
        objects: Objects,
        courier: Courier,
        clock: Clock,
        bounds: Bounds,
        outvoted: Outvoted,
        observers: Sequence[Observer],
        tracer: Tracer | None = None,
    ) -> None:
        self._config = config
        self._replicas = replicas
        self._log = log
        self._meta = meta
        self._invoker = invoker
        self._router = router
        self._replies = replies
        self._watches = watches
        self._snapshots = snapshots
        self._objects = objects
        self._courier = courier
        self._clock = clock
        self._bounds = bounds
        self._outvoted = outvoted
        self._observers = observers
        self._tracer = tracer
        self._stopped = False

    def adopt(self, number: PartitionNumber) -> None:
        """Hold a group of the log as a partition while this node is a member, and lead it if its replica is the leader."""
        replicas = self._replicas
        group = self._log.group(group_of(number))
        partition = replicas.every.get(number)
        if partition is None:
            # One for the life of the process: it counts the proposals of this process.
            partition = replicas.every[number] = Partition(
                replicas.machines[number],
                group,
                self._clock,
                bounds=self._bounds,
                settle=self._replies.settle,
                outvoted=self._outvoted,
                observers=self._observers,
            )
            self._snapshots.attach(partition)
        if self._config.node in group.status().members:
            replicas.hosted[number] = partition
        else:
            replicas.hosted.pop(number, None)
        self.lead_or_not(partition)

    def lead_or_not(self, partition: Partition) -> None:
        """Start to lead in this term, or stop leading in an older one."""
        group = partition.group
        term = group.term if group.is_leader and not self._stopped else 0
        leadership = partition.leadership
        if leadership is not None and leadership.term != term:
            self.resign(partition)
            leadership = None
        if term and leadership is None:
            leadership = Leadership(
                partition=partition,
                term=term,
                node=self._config.node,
                invoker=self._invoker,
                router=self._router,
                replies=self._replies,
                objects=self._objects,
                courier=self._courier,
                limits=limits_of(self._config),
                level=self._meta.state.level,
                tracer=self._tracer,
            )
            partition.leadership = leadership
            leadership.begin()

    def resign(self, partition: Partition) -> None:
        if partition.leadership is not None:
            partition.leadership.end()
            partition.leadership = None
            self._watches.resigned(partition.number)

    def raise_level(self) -> None:
        """Propose the newer level of the cluster in each partition that this node leads."""
        for partition in self._replicas.hosted.values():
            if partition.leadership is not None:
                partition.leadership.raise_level(self._meta.state.level)

    def webhooks_changed(self) -> None:
        """The webhooks of the cluster may have changed."""
        for partition in self._replicas.hosted.values():
            if partition.leadership is not None:
                partition.leadership.webhooks_changed()

    def stop_beginning(self) -> None:
        """Begin no more leaderships."""
        self._stopped = True

    def resign_all(self) -> None:
        for _, partition in sorted(self._replicas.hosted.items()):
            self.resign(partition)
