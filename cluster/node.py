"""One node: its parts, and the order in which they start and stop.

    node = Node(config)
    await node.start()      # serves ingress and admin API, and leads its partitions
    await node.stop()       # accepts no more work, hands over, lets attempts hand themselves back

Group 1 of the log is the meta group. Group 2 + p is partition p. The number of partitions was decided when the cluster
was founded, and is stored beside the log, because the state of a partition cannot be opened without it.

A node has three parts, made one after the other: `ground`, which every node has around its log, `serving`, while it serves,
and `doors`, while clients may come in. The log knows none of them: this module passes its events on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final

from holdfast.cluster.certificates import Certificates
from holdfast.cluster.config import Config
from holdfast.cluster.doors import Doors, early_metrics
from holdfast.cluster.environment import Environment
from holdfast.cluster.ground import Ground, opened
from holdfast.cluster.groups import META_GROUP, partition_in
from holdfast.cluster.handlers.dispatch import Timing
from holdfast.cluster.handlers.protocols.interface import Means
from holdfast.cluster.handlers.protocols.table import Protocols, known_protocols
from holdfast.cluster.http.not_serving import NotServing
from holdfast.cluster.log_ring import LogRing
from holdfast.cluster.observe.starting import StartingMetrics
from holdfast.cluster.observe.watchdog import Watchdog
from holdfast.cluster.partition.door import Observer, Partition
from holdfast.cluster.private import check_secrets
from holdfast.cluster.serving import Serving
from holdfast.log import engine
from holdfast.log.messages import GroupId
from holdfast.log.node import Group, exit_process
from holdfast.log.replica import Machine
from holdfast.sdk.ids import PartitionNumber

logger = logging.getLogger(__name__)

SUSPEND_S: Final = 2.0
HANDOVER_S: Final = 4.0
FINISH_S: Final = 5.0
FINISH_ALONE_S: Final = 0.5
LOG_HANDOVER_S: Final = 2.0


class Node:
    def __init__(
        self,
        config: Config,
        environment: Environment | None = None,
        *,
        timing: Timing | None = None,
        log_timing: engine.Timing | None = None,
        protocols: Callable[[Means], Protocols] = known_protocols,
        on_fatal: Callable[[BaseException], None] = exit_process,
    ) -> None:
        self.config = config
        self.environment = environment or Environment()
        self.on_fatal = on_fatal
        self.watchdog = Watchdog(config.health)
        self.log_ring = LogRing(config.node, self.environment.clock.now_ms())
        self.certificates = Certificates(config, self.environment.clock.now_ms)
        self.not_serving = NotServing(config, self.certificates, self._why_not_serving, self._scrape_early)
        self._early: StartingMetrics | None = None  # Made when somebody asks.
        self.stopping = False
        self.closed = ""  # Why the ingress refuses requests; `holdfast dev` uses it. Empty: it accepts them.
        self._protocols = protocols
        self._timing = timing or Timing()
        self._log_timing = log_timing or engine.Timing()
        self._observers: list[Observer] = []
        self._ground: Ground | None = None  # Made when the node opens its log,
        self._serving: Serving | None = None  # when it has joined its cluster,
        self._doors: Doors | None = None  # and when it lets clients in.
        self._settling_in: asyncio.Future[tuple[None, None]] | None = None

    # -- its parts -----------------------------------------------------------------------------------------------------

    @property
    def ground(self) -> Ground:
        assert self._ground is not None, "opened"
        return self._ground

    @property
    def serving(self) -> Serving:
        assert self._serving is not None, "joined"
        return self._serving

    @property
    def doors(self) -> Doors:
        assert self._doors is not None, "started"
        return self._doors

    @property
    def is_open(self) -> bool:
        return self._ground is not None

    @property
    def is_serving(self) -> bool:
        return self._serving is not None

    @property
    def partitions(self) -> list[Partition]:
        """The partitions of which this node has a replica."""
        return [partition for _, partition in sorted(self.ground.replicas.hosted.items())]

    def observe(self, observer: Observer) -> None:
        """From now on, call `observer` with each command of this node that is applied, and its result."""
        self._observers.append(observer)

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open everything on disk, found or join the cluster, and lead partitions.

        Raises StorageError, BadConfig or NodeRemoved.
        """
        self.watchdog.start()
        self.log_ring.attach()
        try:
            await self.open()
            try:
                await self._start()
            except BaseException:
                await self.stop()
                raise
        except BaseException:
            self.log_ring.detach()
            await self.watchdog.stop()
            raise

    async def open(self) -> None:
        """Open the log and the states on disk. Raises StorageError, BadConfig or NodeRemoved."""
        check_secrets(self.config)
        self.certificates.load()
        ground = self._ground = await opened(
            self.config,
            self.environment,
            self,
            certificates=self.certificates,
            watchdog=self.watchdog,
            log_ring=self.log_ring,
            protocols=self._protocols,
            timing=self._timing,
            log_timing=self._log_timing,
        )
        ground.copies.remove_leftovers()
        ground.leftovers.keep_out(ground.replicas.on_disk())
        try:
            await ground.log.start()
        except BaseException:
            ground.invoker.refuse_all()
            ground.replicas.close_all()
            raise
        ground.leftovers.tidy()

    async def _start(self) -> None:
        ground = self.ground
        self.certificates.watch(ground.log.use_tls)
        if ground.record.founding.founders != (self.config.node,) or ground.places.heard:
            await self.not_serving.start()
        serving = await ground.removal.unless_removed(self.join())
        serving.identity.start()
        doors = self._doors = Doors(ground, serving, lambda: self.state)
        # The doors open last and close first: no client meets a node that is not ready yet, or already gone.
        await doors.open(self.not_serving)
        ground.removal.then(doors.refuse)
        await self.not_serving.stop()
        serving.note_arrears()
        self._settling_in = asyncio.gather(ground.joining.introduce_doors(doors.urls), serving.settle_in())
        self._settling_in.add_done_callback(_report)

    async def join(self) -> Serving:
        """Found the cluster with the others or rejoin it, host the partitions of this node, and lead some of them."""
        await self.ground.joining.join()
        serving = self._serving = Serving(self.ground, observers=self._observers, closed=lambda: self.closed)
        if self.ground.tracer is not None:
            self.ground.tracer.start()
        serving.begin()
        return serving

    async def until_removed(self) -> None:
        """Return when the cluster has removed this node and its doors have announced that for a while. Then stop it."""
        await self.ground.removal.wait()

    def settle_no_more(self) -> None:
        if self._settling_in is not None:
            self._settling_in.cancel()

    async def stop(self) -> None:
        """Hand over, finish work in progress, let attempts hand themselves back, and close. Accepted work is on disk."""
        self.stopping = True
        ground, serving, doors = self.ground, self._serving, self._doors
        ground.places.stop()
        ground.removal.stop()
        if serving is not None:
            serving.stop_beginning()
        if doors is not None:
            doors.leave()
        await self.not_serving.stop()
        self.settle_no_more()
        if serving is not None:
            copying = asyncio.ensure_future(serving.backups.stop())
            await serving.handover.leave(HANDOVER_S)
            if doors is not None:
                # Partitions that others lead now continue, so clients that wait here get their answers if those come soon.
                # Partitions that are still led here continue for a moment, and then wait for our return.
                await doors.stop(FINISH_ALONE_S if serving.handover.led_here() else FINISH_S)
            await serving.identity.stop()
            await serving.statuses.stop()
        await ground.invoker.stop(SUSPEND_S)
        if serving is not None:
            serving.leaderships.resign_all()
        await ground.invoker.close()
        if ground.tracer is not None:
            await ground.tracer.stop()
        ground.meta_log.stop()
        await ground.protocols.close()
        if serving is not None:
            await serving.stop()
        await ground.leftovers.stop()
        await self.certificates.stop()
        await ground.rpc.stop()
        if serving is not None:
            await copying
        await ground.objects.stop()
        await ground.snapshots.stop()
        # `Handover` has moved what it could, and knows better than the log which nodes not to ask.
        await ground.log.stop(handover_s=LOG_HANDOVER_S if serving is None else 0.0)
        ground.replicas.close_all()
        self.log_ring.detach()
        await self.watchdog.stop()

    # -- events of the log -------------------------------------------------------------------------------------------

    def open_machine(self, group: GroupId) -> Machine:
        number = partition_in(group)
        return self.serving.open_machine(number) if self._serving is not None else self.ground.replicas.open(number)

    def may_join(self, group: GroupId) -> bool:
        """A partition's leader may be ready before we know how many partitions there are."""
        if group == META_GROUP:
            return True
        ground = self.ground
        is_going = partition_in(group) in ground.leftovers.going
        return ground.record.partitions > 0 and not is_going and ground.log.why_stalled() is None

    def on_role_change(self, group: Group) -> None:
        if self._serving is not None:
            self._serving.role_changed(group)

    def on_peer(self, peer: str, up: bool) -> None:
        if not up:
            self.ground.rpc.peer_down(peer)
        if self._serving is not None:
            self._serving.peer_changed(peer, up=up)

    def leader(self, partition: PartitionNumber) -> str | None:
        return self.serving.router.leader(partition)

    # -- health ------------------------------------------------------------------------------------------------------

    def unhealthy(self) -> str | None:
        """Why requests may fail here now; None: they should not."""
        return self._why_not_serving() if self._serving is None else self._serving.health.unhealthy()

    @property
    def state(self) -> str:
        """One of `observe.node_metrics.STATES`."""
        if self.stopping:
            return "stopping"
        if self.ground.removal.why:
            return "removed"
        if self._serving is None:
            return "starting"
        return "unhealthy" if self._serving.health.unhealthy() is not None else "serving"

    async def _scrape_early(self, headers: Mapping[str, str]) -> tuple[bytes, str]:
        if self._early is None:
            self._early = early_metrics(self.ground, lambda: self.state)
        return await self._early.scrape(headers)

    def _why_not_serving(self) -> str:
        if self.stopping:
            return "the node is shutting down"
        if self._ground is None:
            return "the node is starting"
        return self.ground.removal.why or self.ground.joining.why_not_serving()


def _report(done: asyncio.Future[tuple[None, None]]) -> None:
    error = None if done.cancelled() else done.exception()
    if error is not None and not isinstance(error, asyncio.CancelledError):
        logger.error("settling in failed", exc_info=error)
