"""One node: its parts, and the order in which they start and stop.

    node = Node(config)
    await node.start()      # serves ingress and admin API, and leads its partitions
    await node.stop()       # accepts no more work, hands over, lets attempts hand themselves back

Group 1 of the log is the meta group. Group 2 + p is partition p. The number of partitions was decided when the cluster
was founded, and is stored beside the log, because the state of a partition cannot be opened without it.

`open` makes the `Ground`, which every node has around its log. `join` makes `Serving`, which exists while the node serves.
The log knows neither: this module passes its events on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final

from holdfast.cluster.backup.copies import Copies
from holdfast.cluster.backup.job import Backups
from holdfast.cluster.backup.restoring import Plan, read_plan, restored_directory
from holdfast.cluster.certificates import Certificates
from holdfast.cluster.config import Config
from holdfast.cluster.doors import Doors, early_metrics
from holdfast.cluster.environment import Environment
from holdfast.cluster.ground import Ground, bounds_of
from holdfast.cluster.groups import FIRST_PARTITION_GROUP, META_GROUP
from holdfast.cluster.handlers.dispatch import Limits, Timing
from holdfast.cluster.handlers.health import Healths
from holdfast.cluster.handlers.invoker import Invoker
from holdfast.cluster.handlers.protocols.interface import Means
from holdfast.cluster.handlers.protocols.table import Protocols, known_protocols
from holdfast.cluster.http.not_serving import NotServing
from holdfast.cluster.http.server import HttpServer
from holdfast.cluster.log_settings import log_settings
from holdfast.cluster.members.founding import Founding, FoundingRecord
from holdfast.cluster.members.handover import Handover
from holdfast.cluster.members.joining import Joining
from holdfast.cluster.members.leftovers import Leftovers
from holdfast.cluster.members.places import Places, addresses, read_places
from holdfast.cluster.members.releases import Releases
from holdfast.cluster.members.removal import Removal
from holdfast.cluster.members.vitals import AllVitals, Vitals
from holdfast.cluster.observe.process import disk_bytes, memory_bytes
from holdfast.cluster.observe.starting import StartingMetrics
from holdfast.cluster.observe.watchdog import Watchdog
from holdfast.cluster.partition.door import Observer, Partition
from holdfast.cluster.peers.rpc import Rpc
from holdfast.cluster.private import check_secrets
from holdfast.cluster.registry.machine import MetaMachine
from holdfast.cluster.registry.metalog import META, MetaLog
from holdfast.cluster.registry.registry import Registry
from holdfast.cluster.routing.reader import Reader
from holdfast.cluster.routing.replies import Replies
from holdfast.cluster.routing.router import Router
from holdfast.cluster.serving import Serving
from holdfast.cluster.snapshotting.catchup import CatchUp
from holdfast.cluster.snapshotting.replicas import Replicas
from holdfast.cluster.snapshotting.service import Snapshots
from holdfast.cluster.traces import Tracer, open_collector
from holdfast.cluster.values.shared_store import Objects
from holdfast.cluster.values.staging import Stager
from holdfast.log import engine
from holdfast.log.environment import NodeConfig
from holdfast.log.messages import GroupId
from holdfast.log.node import Group, LogNode, exit_process
from holdfast.log.replica import Machine
from holdfast.snapshots.work import in_thread

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
        self.environment = environment = environment or Environment()
        self.clock = environment.clock
        self.replies = Replies()
        self.meta = MetaMachine(self.clock, environment.entropy)
        self.rpc = Rpc(
            lambda peer, payload: self.log.send(peer, payload), leader=self._leader, entropy=self.environment.entropy
        )
        self.protocols = protocols(
            Means(
                config.deployment_addresses,
                keys=lambda: self.meta.state.identity.keys,
                connect_s=(timing or Timing()).connect_s,
            )
        )
        self.watchdog = Watchdog(config.health)
        self._began_s = self.clock.monotonic_s()
        self.stopping = False
        self.closed = ""  # Why the ingress refuses requests; `holdfast dev` uses it. Empty: it accepts them.
        self.tracer: Tracer | None = None
        self._serving: Serving | None = None  # Set when this node has joined.
        self._doors: Doors | None = None  # Set when they open.
        self.certificates = Certificates(config, self.clock.now_ms)
        self.not_serving = NotServing(config, self.certificates, self._why_not_serving, self._scrape_early)
        self._early: StartingMetrics | None = None  # Made when somebody asks.
        self._observers: list[Observer] = []
        self._timing = timing
        self._log_timing = log_timing or engine.Timing()
        self._on_fatal = on_fatal
        self._settling_in: asyncio.Future[tuple[None, None]] | None = None

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open everything on disk, found or join the cluster, and lead partitions.

        Raises StorageError, BadConfig or NodeRemoved.
        """
        self.watchdog.start()
        try:
            await self.open()
            try:
                await self._start()
            except BaseException:
                await self.stop()
                raise
        except BaseException:
            await self.watchdog.stop()
            raise

    async def _start(self) -> None:
        self.certificates.watch(self.log.use_tls)
        if self.founding.founders != (self.config.node,) or self.places.heard:
            await self.not_serving.start()
        serving = await self.removal.unless_removed(self.join())
        serving.identity.start()
        doors = self._doors = Doors(self._ground(), serving, lambda: self.state)
        # The doors open last and close first: no client meets a node that is not ready yet, or already gone.
        await doors.open(self.not_serving)
        self.removal.then(doors.refuse)
        await self.not_serving.stop()
        serving.note_arrears()
        self._settling_in = asyncio.gather(self.joining.introduce_doors(doors.urls), serving.settle_in())
        self._settling_in.add_done_callback(_report)

    async def open(self) -> None:
        """Open the log and the states on disk. Raises StorageError, BadConfig or NodeRemoved."""
        config = self.config
        check_secrets(config)
        self.certificates.load()
        self.record = FoundingRecord(config)
        heard = read_places(config.data)
        plan = read_plan(config.data, self.founding)
        if plan is not None:
            await in_thread(plan.check)
        self.log = self._log(
            log_settings(
                config,
                cluster_id=self.founding.cluster_id,
                peers=addresses(config, heard),
                timing=self._log_timing,
                rows=self.environment.rows,
            )
        )
        if config.traces:
            send = open_collector(config.traces, node=config.node, cluster=config.cluster)
            self.tracer = Tracer(send, ratio=config.traces_ratio, now_s=self.clock.monotonic_s)
        self._make_rooms(plan)
        self.places = Places(config=config, heard=heard, rpc=self.rpc, meta=self.meta, log=self.log)
        self.leftovers.keep_out(self.replicas.on_disk())
        try:
            await self.log.start()
        except BaseException:
            self.invoker.refuse_all()
            self.replicas.close_all()
            raise
        self.leftovers.tidy()

    def _make_rooms(self, plan: Plan | None) -> None:
        """Make everything around the log that does not need it yet."""
        config, log = self.config, self.log
        self.meta_log = MetaLog(config.node, self.meta_group, self.rpc)
        self.registry = Registry(
            self.meta,
            self.meta_log,
            self.protocols.discover,
            fresh=self.meta_log.known,
            entropy=self.environment.entropy,
        )
        self.releases = Releases(
            config.node,
            self.rpc,
            connected=log.connected,
            meta=lambda: self.meta.state,
            leads_meta=lambda: self.meta_group().is_leader,
            propose=self.registry.propose,
        )
        self.snapshots = Snapshots(
            config,
            self.rpc,
            self.environment,
            disk=lambda: log.disk,
            identity=lambda: f"{config.cluster}-{self.meta.identity}",
            connected=lambda: {peer for peer, link in log.links().items() if link.connected},
            restored=restored_directory(config.data, self.founding),
        )
        self.replicas = Replicas(
            config.data,
            log,
            self.snapshots,
            open_machine=self.environment.open_machine,
            partitions=lambda: self.record.partitions,
        )
        self.leftovers = Leftovers(
            config.node, self.replicas, log, self.snapshots, membership=lambda: self.meta.state.membership
        )
        self.objects = Objects(
            self.snapshots, self.clock, members=lambda: self.meta.others(config.node), connected=log.connected
        )
        self.stager = Stager(config.blob_threshold_bytes, self.objects)
        self.catch_up = CatchUp(self.snapshots)
        self.copies = Copies(self.snapshots, self.objects, self.replicas.hosted)
        self.copies.remove_leftovers()
        self.joining = Joining(
            config=config,
            record=self.record,
            log=log,
            rpc=self.rpc,
            meta_log=self.meta_log,
            registry=self.registry,
            releases=self.releases,
            plan=plan,
        )
        self.removal = Removal(config, self.meta, log)
        self.invoker = Invoker(
            self.registry,
            self.protocols,
            self.clock,
            objects=self.objects,
            fresh=self.meta_log.known,
            partitions=self.replicas.hosted.values(),
            limits=Limits(attempts=config.attempts_max),
            timing=self._timing,
            rng=self.environment.entropy.generator(),
            stager=self.stager,
        )
        self.healths = Healths(config.node, self.invoker.endpoints, self.rpc, log.connected)
        self.vitals = AllVitals(config.node, self.rpc, connected=log.connected, here=self._vitals)

    def _vitals(self) -> Vitals:
        free, total = disk_bytes(self.config.data)
        return Vitals(
            uptime_s=int(self.clock.monotonic_s() - self._began_s),
            disk_free=free,
            disk_total=total,
            memory_bytes=memory_bytes(),
            loop_lag_ms=round(self.watchdog.lag_s * 1000),
        )

    async def join(self) -> Serving:
        """Found the cluster with the others or rejoin it, host the partitions of this node, and lead some of them."""
        await self.joining.join()
        serving = self._serving = Serving(self._ground(), observers=self._observers, closed=lambda: self.closed)
        if self.tracer is not None:
            self.tracer.start()
        serving.begin()
        return serving

    def _ground(self) -> Ground:
        return Ground(
            config=self.config,
            environment=self.environment,
            certificates=self.certificates,
            watchdog=self.watchdog,
            bounds=bounds_of(self.config),
            record=self.record,
            log=self.log,
            rpc=self.rpc,
            replies=self.replies,
            meta=self.meta,
            meta_log=self.meta_log,
            registry=self.registry,
            releases=self.releases,
            snapshots=self.snapshots,
            replicas=self.replicas,
            leftovers=self.leftovers,
            objects=self.objects,
            stager=self.stager,
            catch_up=self.catch_up,
            copies=self.copies,
            joining=self.joining,
            places=self.places,
            removal=self.removal,
            invoker=self.invoker,
            healths=self.healths,
            vitals=self.vitals,
            tracer=self.tracer,
        )

    async def until_removed(self) -> None:
        """Return when the cluster has removed this node and its doors have announced that for a while. Then stop it."""
        await self.removal.wait()

    def settle_no_more(self) -> None:
        if self._settling_in is not None:
            self._settling_in.cancel()

    async def stop(self) -> None:
        """Hand over, finish work in progress, let attempts hand themselves back, and close. Accepted work is on disk."""
        self.stopping = True
        serving, doors = self._serving, self._doors
        self.places.stop()
        self.removal.stop()
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
        await self.invoker.stop(SUSPEND_S)
        if serving is not None:
            serving.leaderships.resign_all()
        await self.invoker.close()
        if self.tracer is not None:
            await self.tracer.stop()
        self.meta_log.stop()
        await self.protocols.close()
        if serving is not None:
            await serving.stop()
        await self.leftovers.stop()
        await self.certificates.stop()
        await self.rpc.stop()
        if serving is not None:
            await copying
        await self.objects.stop()
        await self.snapshots.stop()
        # `Handover` has moved what it could, and knows better than the log which nodes not to ask.
        await self.log.stop(handover_s=LOG_HANDOVER_S if serving is None else 0.0)
        self.replicas.close_all()
        await self.watchdog.stop()

    # -- events of the log -------------------------------------------------------------------------------------------

    def _log(self, settings: NodeConfig) -> LogNode:
        return LogNode(
            settings,
            self.environment.log,
            open_machine=self._open_machine,
            may_join=self._may_join,
            on_role_change=self._on_role_change,
            on_message=self.rpc.receive,
            on_peer=self._on_peer,
            on_refused=lambda peer, reason: self.joining.forming.refused(peer, reason),
            on_removed=lambda peer, reason: self.removal.heard(peer, reason),
            keep_hollow=True,  # `Serving` fills them.
            applied_at_once=frozenset({GroupId(META_GROUP)}),  # Every node acts on it.
            on_snapshot_wanted=lambda want: self.catch_up.wanted(want),
            on_forgotten=lambda group: self.leftovers.forgotten(group - FIRST_PARTITION_GROUP),
            on_fatal=self._on_fatal,
        )

    def _open_machine(self, group: GroupId) -> Machine:
        if group == META_GROUP:
            return self.meta
        number = group - FIRST_PARTITION_GROUP
        return self.serving.open_machine(number) if self._serving is not None else self.replicas.open(number)

    def _may_join(self, group: GroupId) -> bool:
        """A partition's leader may be ready before we know how many partitions there are."""
        if group == META_GROUP:
            return True
        is_going = group - FIRST_PARTITION_GROUP in self.leftovers.going
        return self.record.partitions > 0 and not is_going and self.log.why_stalled() is None

    def _on_role_change(self, group: Group) -> None:
        if self._serving is not None:
            self.serving.role_changed(group)

    def _on_peer(self, peer: str, up: bool) -> None:
        if not up:
            self.rpc.peer_down(peer)
        if self._serving is not None:
            self.serving.peer_changed(peer, up=up)

    def _leader(self, number: int) -> str | None:
        return self.meta_group().leader if number == META else self.router.leader(number)

    # -- queries ----------------------------------------------------------------------------------------------------

    def meta_group(self) -> Group:
        return self.log.group(META_GROUP)

    @property
    def is_serving(self) -> bool:
        return self._serving is not None

    def unhealthy(self) -> str | None:
        """Why requests may fail here now; None: they should not."""
        return self._why_not_serving() if self._serving is None else self.serving.health.unhealthy()

    def _why_not_serving(self) -> str:
        if self.stopping:
            return "the node is shutting down"
        return self.removal.why or self.joining.why_not_serving()

    @property
    def state(self) -> str:
        """One of `observe.metrics.STATES`."""
        if self.stopping:
            return "stopping"
        if self.removal.why:
            return "removed"
        if self._serving is None:
            return "starting"
        return "unhealthy" if self.serving.health.unhealthy() is not None else "serving"

    async def _scrape_early(self, headers: Mapping[str, str]) -> tuple[bytes, str]:
        if self._early is None:
            self._early = early_metrics(self._ground(), lambda: self.state)
        return await self._early.scrape(headers)

    def observe(self, observer: Observer) -> None:
        """From now on, call `observer` with each command of this node that is applied, and its result."""
        self._observers.append(observer)

    @property
    def partitions(self) -> list[Partition]:
        """The partitions of which this node has a replica."""
        return [partition for _, partition in sorted(self.replicas.hosted.items())]

    @property
    def ingress_url(self) -> str:
        return self.doors.urls.ingress

    @property
    def admin_url(self) -> str:
        return self.doors.urls.admin

    @property
    def founding(self) -> Founding:
        return self.record.founding

    @property
    def hosted(self) -> Mapping[int, Partition]:
        return self.replicas.hosted

    @property
    def router(self) -> Router:
        return self.serving.router

    @property
    def reader(self) -> Reader:
        return self.serving.reader

    @property
    def handover(self) -> Handover:
        return self.serving.handover

    @property
    def backups(self) -> Backups:
        return self.serving.backups

    @property
    def ingress(self) -> HttpServer:
        return self.doors.ingress

    @property
    def admin(self) -> HttpServer:
        return self.doors.admin

    @property
    def serving(self) -> Serving:
        assert self._serving is not None, "joined"
        return self._serving

    @property
    def doors(self) -> Doors:
        assert self._doors is not None, "started"
        return self._doors


def _report(done: asyncio.Future[tuple[None, None]]) -> None:
    error = None if done.cancelled() else done.exception()
    if error is not None and not isinstance(error, asyncio.CancelledError):
        logger.error("settling in failed", exc_info=error)
