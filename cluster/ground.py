"""The parts that every node has, whether it serves yet or not: the log, and everything directly around it."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.cluster.backup.copies import Copies
from holdfast.cluster.certificates import Certificates
from holdfast.cluster.config import Config
from holdfast.cluster.environment import Environment
from holdfast.cluster.handlers.health import Healths
from holdfast.cluster.handlers.invoker import Invoker
from holdfast.cluster.log_settings import command_bytes_max
from holdfast.cluster.members.founding import FoundingRecord
from holdfast.cluster.members.joining import Joining
from holdfast.cluster.members.leftovers import Leftovers
from holdfast.cluster.members.places import Places
from holdfast.cluster.members.releases import Releases
from holdfast.cluster.members.removal import Removal
from holdfast.cluster.members.vitals import AllVitals
from holdfast.cluster.observe.watchdog import Watchdog
from holdfast.cluster.partition.door import Bounds
from holdfast.cluster.peers.rpc import Rpc
from holdfast.cluster.registry.machine import MetaMachine
from holdfast.cluster.registry.metalog import MetaLog
from holdfast.cluster.registry.registry import Registry
from holdfast.cluster.routing.replies import Replies
from holdfast.cluster.snapshotting.catchup import CatchUp
from holdfast.cluster.snapshotting.replicas import Replicas
from holdfast.cluster.snapshotting.service import Snapshots
from holdfast.cluster.traces import Tracer
from holdfast.cluster.values.shared_store import Objects
from holdfast.cluster.values.staging import Stager
from holdfast.log.node import LogNode


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
    tracer: Tracer | None  # None: there is no collector.


def bounds_of(config: Config) -> Bounds:
    """Bounds on commands in flight in one partition. The log must take the largest command."""
    command_bytes = command_bytes_max(config)
    return Bounds(
        bytes=max(Bounds().bytes, 2 * command_bytes), command_bytes=command_bytes, state_bytes=config.state_bytes_max
    )
