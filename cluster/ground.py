"""The parts that every node has, whether it serves yet or not: the log, and everything directly around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from holdfast.cluster.backup.copies import Copies
from holdfast.cluster.backup.restoring import Plan, read_plan, restored_directory
from holdfast.cluster.certificates import Certificates
from holdfast.cluster.config import Config, HostPort
from holdfast.cluster.environment import Environment
from holdfast.cluster.events.logs import AllLogs
from holdfast.cluster.groups import META_GROUP, partition_in
from holdfast.cluster.handlers.dispatch import Limits, Timing
from holdfast.cluster.handlers.health import Healths
from holdfast.cluster.handlers.invoker import Invoker
from holdfast.cluster.handlers.protocols.interface import Means
from holdfast.cluster.handlers.protocols.table import Protocols
from holdfast.cluster.log_ring import LogRing
from holdfast.cluster.log_settings import command_bytes_max, log_settings
from holdfast.cluster.members.founding import FoundingRecord
from holdfast.cluster.members.joining import Joining
from holdfast.cluster.members.leftovers import Leftovers
from holdfast.cluster.members.places import Places, addresses, read_places
from holdfast.cluster.members.releases import Releases
from holdfast.cluster.members.removal import Removal
from holdfast.cluster.members.vitals import AllVitals, Vitals
from holdfast.cluster.observe.process import cpu_ms, disk_bytes, memory_bytes
from holdfast.cluster.observe.watchdog import Watchdog
from holdfast.cluster.partition.door import Bounds
from holdfast.cluster.peers.rpc import Rpc
from holdfast.cluster.registry.machine import MetaMachine
from holdfast.cluster.registry.metalog import META, MetaLog
from holdfast.cluster.registry.registry import Registry
from holdfast.cluster.routing.replies import Replies
from holdfast.cluster.snapshotting.catchup import CatchUp
from holdfast.cluster.snapshotting.replicas import Replicas
from holdfast.cluster.snapshotting.service import Snapshots
from holdfast.cluster.traces import Tracer, open_collector
from holdfast.cluster.values.shared_store import Objects
from holdfast.cluster.values.staging import Stager
from holdfast.log import engine
from holdfast.log.messages import GroupId
from holdfast.log.node import Group, LogNode
from holdfast.log.replica import Machine
from holdfast.sdk.ids import NodeId, PartitionNumber
from holdfast.snapshots.work import in_thread


@dataclass(frozen=True)
class Ground:
    """One per node, made when it opens its log."""

    config: Config
    environment: Environment
    certificates: Certificates
    watchdog: Watchdog
    bounds: Bounds
    record: FoundingRecord
    log: LogNode
    rpc: Rpc
    replies: Replies
    meta: MetaMachine
    meta_log: MetaLog
    protocols: Protocols
    registry: Registry
    releases: Releases
    snapshots: Snapshots
    replicas: Replicas
    leftovers: Leftovers
    objects: Objects
    stager: Stager
    catch_up: CatchUp
    copies: Copies
    joining: Joining
    places: Places
    removal: Removal
    invoker: Invoker
    healths: Healths
    vitals: AllVitals
    logs: AllLogs
    tracer: Tracer | None  # None: there is no collector.

    def meta_group(self) -> Group:
        return self.log.group(META_GROUP)


class Listener(Protocol):
    """What a node hears from its log."""

    def open_machine(self, group: GroupId) -> Machine: ...

    def may_join(self, group: GroupId) -> bool: ...

    def on_role_change(self, group: Group) -> None: ...

    def on_peer(self, peer: str, up: bool) -> None: ...

    def on_fatal(self, error: BaseException) -> None: ...

    def leader(self, partition: PartitionNumber) -> str | None:
        """The leader of a partition, as far as this node knows."""


async def opened(
    config: Config,
    environment: Environment,
    listener: Listener,
    *,
    certificates: Certificates,
    watchdog: Watchdog,
    log_ring: LogRing,
    protocols: Callable[[Means], Protocols],
    timing: Timing,
    log_timing: engine.Timing,
) -> Ground:
    """Open what is on disk, and make everything around the log. The log starts later.

    Raises StorageError, BadConfig or NodeRemoved.
    """
    record, heard = FoundingRecord(config), read_places(config.data)
    plan = read_plan(config.data, record.founding)
    if plan is not None:
        await in_thread(plan.check)
    settings = log_settings(
        config,
        cluster_id=record.founding.cluster_id,
        peers=addresses(config, heard),
        timing=log_timing,
        rows=environment.rows,
    )
    meta = MetaMachine(environment.clock, environment.entropy)
    rpc = Rpc(
        lambda peer, payload: log.send(peer, payload),
        leader=lambda number: (
            log.group(META_GROUP).leader if number == META else listener.leader(PartitionNumber(number))
        ),
        entropy=environment.entropy,
    )
    log = LogNode(
        settings,
        environment.log,
        open_machine=lambda group: meta if group == META_GROUP else listener.open_machine(group),
        may_join=listener.may_join,
        on_role_change=listener.on_role_change,
        on_message=rpc.receive,
        on_peer=listener.on_peer,
        on_refused=lambda peer, reason: ground.joining.forming.refused(peer, reason),
        on_removed=lambda peer, reason: ground.removal.heard(peer, reason),
        keep_hollow=True,  # `Serving` fills them.
        applied_at_once=frozenset({GroupId(META_GROUP)}),  # Every node acts on it.
        on_snapshot_wanted=lambda want: ground.catch_up.wanted(want),
        on_forgotten=lambda group: ground.leftovers.forgotten(partition_in(group)),
        on_fatal=listener.on_fatal,
    )
    means = Means(config.deployment_addresses, lambda: meta.state.identity.keys, timing.connect_s)
    base = _Base(
        config=config,
        environment=environment,
        record=record,
        log=log,
        rpc=rpc,
        meta=meta,
        meta_log=MetaLog(config.node, lambda: log.group(META_GROUP), rpc),
        protocols=protocols(means),
        log_ring=log_ring,
    )
    ground = _around(base, plan, heard, timing=timing, certificates=certificates, watchdog=watchdog)
    return ground


class _Base(NamedTuple):
    """What is made first: the log, what it carries, and who talks to other nodes and to endpoints."""

    config: Config
    environment: Environment
    record: FoundingRecord
    log: LogNode
    rpc: Rpc
    meta: MetaMachine
    meta_log: MetaLog
    protocols: Protocols
    log_ring: LogRing


def _around(
    base: _Base,
    plan: Plan | None,
    heard: Mapping[NodeId, HostPort],
    *,
    timing: Timing,
    certificates: Certificates,
    watchdog: Watchdog,
) -> Ground:
    """Everything around the log, none of which needs it to run yet."""
    config, environment, record, log, rpc, meta, meta_log, protocols, log_ring = base
    registry = Registry(meta, meta_log, protocols.discover, fresh=meta_log.known, entropy=environment.entropy)
    releases = Releases(
        config.node,
        rpc,
        connected=log.connected,
        meta=lambda: meta.state,
        leads_meta=lambda: log.group(META_GROUP).is_leader,
        propose=registry.propose,
    )
    snapshots = _snapshots(base)
    replicas = Replicas(
        config.data,
        log,
        snapshots,
        open_machine=environment.open_machine,
        partitions=lambda: record.partitions,
    )
    objects = Objects(snapshots, environment.clock, members=lambda: meta.others(config.node), connected=log.connected)
    stager = Stager(config.blob_threshold_bytes, objects)
    invoker = _invoker(base, registry, replicas, objects=objects, stager=stager, timing=timing)
    vitals = AllVitals(config.node, rpc, connected=log.connected, here=_vitals(base, watchdog))
    vitals.measure("handler", invoker.timings.handler)
    return Ground(
        config=config,
        environment=environment,
        certificates=certificates,
        watchdog=watchdog,
        bounds=bounds_of(config),
        record=record,
        log=log,
        rpc=rpc,
        replies=Replies(),
        meta=meta,
        meta_log=meta_log,
        protocols=protocols,
        registry=registry,
        releases=releases,
        snapshots=snapshots,
        replicas=replicas,
        leftovers=Leftovers(config.node, replicas, log, snapshots, membership=lambda: meta.state.membership),
        objects=objects,
        stager=stager,
        catch_up=CatchUp(snapshots),
        copies=Copies(snapshots, objects, replicas.hosted),
        joining=_joining(base, registry, releases, plan),
        places=Places(config=config, heard=heard, rpc=rpc, meta=meta, log=log),
        removal=Removal(config, meta, log),
        invoker=invoker,
        healths=Healths(config.node, invoker.endpoints, rpc, log.connected),
        vitals=vitals,
        logs=AllLogs(
            config.node,
            log_ring,
            rpc,
            members=lambda: {config.node, *meta.others(config.node)},
            connected=log.connected,
        ),
        tracer=_tracer(base),
    )


def _vitals(base: _Base, watchdog: Watchdog) -> Callable[[], Vitals]:
    """How this node is."""
    clock, data = base.environment.clock, base.config.data
    began_s = clock.monotonic_s()

    def here() -> Vitals:
        free, total = disk_bytes(data)
        return Vitals(
            uptime_s=int(clock.monotonic_s() - began_s),
            disk_free=free,
            disk_total=total,
            memory_bytes=memory_bytes(),
            loop_lag_ms=round(watchdog.lag_s * 1000),
            cpu_ms=cpu_ms(),
        )

    return here


def _tracer(base: _Base) -> Tracer | None:
    config = base.config
    if not config.traces:
        return None
    send = open_collector(config.traces, node=config.node, cluster=config.cluster)
    return Tracer(send, ratio=config.traces_ratio, now_s=base.environment.clock.monotonic_s)


def _snapshots(base: _Base) -> Snapshots:
    config, log, meta = base.config, base.log, base.meta
    return Snapshots(
        config,
        base.rpc,
        base.environment,
        disk=lambda: log.disk,
        identity=lambda: f"{config.cluster}-{meta.identity}",
        connected=lambda: {peer for peer, link in log.links().items() if link.connected},
        restored=restored_directory(config.data, base.record.founding),
    )


def _joining(base: _Base, registry: Registry, releases: Releases, plan: Plan | None) -> Joining:
    return Joining(
        config=base.config,
        record=base.record,
        log=base.log,
        rpc=base.rpc,
        meta_log=base.meta_log,
        registry=registry,
        releases=releases,
        plan=plan,
    )


def _invoker(
    base: _Base, registry: Registry, replicas: Replicas, *, objects: Objects, stager: Stager, timing: Timing
) -> Invoker:
    return Invoker(
        registry,
        base.protocols,
        base.environment.clock,
        objects=objects,
        fresh=base.meta_log.known,
        partitions=replicas.hosted.values(),
        limits=Limits(attempts=base.config.attempts_max),
        timing=timing,
        rng=base.environment.entropy.generator(),
        stager=stager,
    )


def bounds_of(config: Config) -> Bounds:
    """Bounds on commands in flight in one partition. The log must take the largest command."""
    command_bytes = command_bytes_max(config)
    return Bounds(
        bytes=max(Bounds().bytes, 2 * command_bytes), command_bytes=command_bytes, state_bytes=config.state_bytes_max
    )
