"""One node: the log and its groups, the partitions on them, and everything that a leader of them does.

    node = Node(config)
    await node.start()      # serves: ingress, admin, and whatever partitions it leads
    await node.stop()       # takes no more, hands over, lets attempts hand themselves back

Group 1 of the log is the meta group. Group 2 + p is partition p. How many there are was decided when the cluster was founded,
and is written down beside the log, because the state of a partition cannot be opened without knowing it.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable, Collection
from typing import Any, ClassVar, Final

from holdfast.cluster.admin.app import Admin
from holdfast.cluster.admin.overview import Overview
from holdfast.cluster.admin.server import AdminServer
from holdfast.cluster.backup.job import Backups
from holdfast.cluster.backup.restoring import Plan, read_plan, restored_directory
from holdfast.cluster.clock import Clock
from holdfast.cluster.config import DEV_SECRET, Config, Endpoint, read_endpoint, read_name
from holdfast.cluster.groups import FIRST_PARTITION_GROUP, META_GROUP
from holdfast.cluster.handlers.dispatch import Limits, Timing
from holdfast.cluster.handlers.health import Healths
from holdfast.cluster.handlers.invoker import Invoker
from holdfast.cluster.handlers.metrics import of_handlers
from holdfast.cluster.http.not_serving import Doorman
from holdfast.cluster.ingress.ingress import Ingress
from holdfast.cluster.ingress.metrics import of_ingress
from holdfast.cluster.ingress.server import IngressServer
from holdfast.cluster.leading.leadership import Leadership, limits_of
from holdfast.cluster.members.controller import Controller
from holdfast.cluster.members.founding import (
    Forming,
    Founding,
    NodeRemoved,
    open_founding,
    read_places,
    write_founding,
    write_places,
    write_removed,
)
from holdfast.cluster.members.handover import Handover
from holdfast.cluster.members.leftovers import Leftovers
from holdfast.cluster.members.metrics import of_members
from holdfast.cluster.members.operations import Operations
from holdfast.cluster.members.releases import Releases
from holdfast.cluster.observe.metrics import Metrics, of_log, of_node
from holdfast.cluster.observe.watchdog import Watchdog
from holdfast.cluster.partition.door import Bounds, Observer, Partition
from holdfast.cluster.partition.machine import PartitionMachine
from holdfast.cluster.partition.metrics import of_partitions
from holdfast.cluster.partition.state import State, boot_id
from holdfast.cluster.peers.rpc import Refused, Rpc
from holdfast.cluster.registry.machine import MetaMachine
from holdfast.cluster.registry.metalog import META, MetaLog
from holdfast.cluster.registry.registry import Registry
from holdfast.cluster.routing.paused import PausedCallers
from holdfast.cluster.routing.reader import Reader
from holdfast.cluster.routing.replies import Replies
from holdfast.cluster.routing.router import Router
from holdfast.cluster.routing.watches import Watches
from holdfast.cluster.snapshotting.catchup import CatchUp
from holdfast.cluster.snapshotting.complaints import Complaints
from holdfast.cluster.snapshotting.metrics import of_snapshots
from holdfast.cluster.snapshotting.service import Snapshots
from holdfast.cluster.values.metrics import of_values
from holdfast.cluster.values.shared_store import Objects
from holdfast.cluster.values.staging import Stager
from holdfast.log import engine
from holdfast.log.connection import LinkLimits
from holdfast.log.errors import ProposalError, WrongDirectory
from holdfast.log.messages import GroupId
from holdfast.log.node import Group, LogNode, NodeConfig, exit_process
from holdfast.log.replica import Machine
from holdfast.log.sockets import Address, TlsFiles
from holdfast.snapshots.work import in_thread
from holdfast.statemachine.members import REMOVED, PutNode

logger = logging.getLogger(__name__)

#: Around a payload in a command: names, headers, numbers.
COMMAND_HEAD_BYTES: Final = 1024 * 1024
#: Of one group, on the way to one peer,
WINDOW_BYTES: Final = 2 * 1024 * 1024
#: and of all groups: a peer that comes back is sent all its windows at once, and must not be given up for it.
WINDOWS_BYTES: Final = 256 * 1024 * 1024
SUSPEND_S: Final = 2.0
HANDOVER_S: Final = 4.0
FINISH_S: Final = 5.0
FINISH_ALONE_S: Final = 0.5
LOG_HANDOVER_S: Final = 2.0
#: How long a node that was removed says so at its doors, to clients, probes and operators, before it ends.
REMOVED_S: Final = 10.0


class Node:
    log_class: ClassVar[type[LogNode]] = LogNode

    def __init__(
        self,
        config: Config,
        *,
        clock: Clock | None = None,
        timing: Timing | None = None,
        log_timing: engine.Timing | None = None,
        boot: str | None = None,
        on_fatal: Callable[[BaseException], None] = exit_process,
    ) -> None:
        self.config = config
        self.clock = clock or Clock()
        self.replies = Replies()
        self.stager = Stager(config.blob_threshold_bytes)
        self.meta = MetaMachine()
        self.rpc = Rpc(lambda peer, payload: self.log.send(peer, payload))
        self.rpc.leader = self._leader
        self.rpc.listen("places", self._on_places)
        self.meta_log = MetaLog(config.node, self._meta_group, self.rpc)
        self.registry = Registry(self.meta, lambda: self.meta_log)
        self.releases = Releases(
            config.node,
            self.rpc,
            connected=self._connected,
            meta=lambda: self.meta.state,
            leads_meta=lambda: self._meta_group().is_leader,
            propose=self.registry.propose,
        )
        self.hosted: dict[int, Partition] = {}  # The partitions of which this node has a replica.
        self._observer: Observer | None = None
        self._every: dict[int, Partition] = {}  # And those it had one of: their logs are still here.
        self.machines: dict[int, PartitionMachine] = {}
        self.ingress: IngressServer | None = None
        self.admin: AdminServer | None = None
        self.paused_callers: PausedCallers | None = None
        self.stopping = False
        self.closed = ""  # Why the ingress takes no requests, where somebody wants that: `holdfast dev`.
        self.watchdog = Watchdog(config.health)
        self.removed = ""  # That the cluster removed this node, in a sentence.
        self._removed_told: asyncio.Future[None] | None = None  # Done when the doors have said so for a while.
        self.watches: Watches | None = None
        self._timing = timing
        self._boot = boot or boot_id()
        self._count = 0
        self._plan: Plan | None = None
        self._doorman = Doorman(config, self._why_not_serving)
        self._introducing: asyncio.Task[None] | None = None
        self._behind: set[int] = (
            set()
        )  # Partitions that went on while we were away, and that we have not caught up with.
        self._places: dict[str, Address] = {}
        self._gone: set[str] = set()  # Removed nodes that hold nothing any more.
        self._known: dict[str, Endpoint] = {}  # Where other nodes are, as the cluster says;
        self._heard: dict[str, Endpoint] = {}  # and as nodes say, which may know more than we do.
        command_bytes = config.body_bytes_max + COMMAND_HEAD_BYTES
        self._bounds = Bounds(
            bytes=max(Bounds().bytes, 2 * command_bytes),
            command_bytes=command_bytes,
            state_bytes=config.state_bytes_max,
        )
        self._frame_bytes = max(LinkLimits().frame_bytes_max, 2 * command_bytes)
        self._log_timing = log_timing or engine.Timing()
        self._on_fatal = on_fatal
        self.log: LogNode
        self.leftovers = Leftovers(
            config.node,
            self._every,
            group_of=lambda number: FIRST_PARTITION_GROUP + number,
            log=lambda: self.log,
            snapshots=lambda: self.snapshots,
            membership=lambda: self.meta.state.membership,
            close=self._close_partition,
            delete=self._delete_partition,
        )

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open everything on disk, found or join the cluster, lead what falls to us.

        Raises StorageError, BadConfig or NodeRemoved.
        """
        self.watchdog.start()
        try:
            await self._start()
        except BaseException:
            await self.watchdog.stop()
            raise

    async def _start(self) -> None:
        config = self.config
        await self._make_rooms()
        try:
            await self.log.start()
        except BaseException:
            self.invoker.refuse_all()
            for machine in self.machines.values():
                machine.state.close()
            raise
        self._tidy()
        try:
            if self.founding.founders != (config.node,) or self._heard:
                await self._doorman.start()
            await self._join_unless_removed()
            await self._open_doors()
            await self._doorman.stop()
            self._watch_store()
            self._behind = {it.number for it in self.hosted.values() if len(it.group.status().members) > 1}
            self._behind.update(group - FIRST_PARTITION_GROUP for group in self.log.host.hollow)
            self._introducing = asyncio.ensure_future(self._settle_in())
        except BaseException:
            await self.stop()
            raise

    def _watch_store(self) -> None:
        self.snapshots.run(self.snapshots.watch_store())
        self.snapshots.run(self.objects.watch())

    async def _make_rooms(self) -> None:
        """Everything that stands before the log is opened, and nothing of it runs yet."""
        config = self.config
        self.founding = self._open_founding()
        self._heard = read_places(config.data)
        self._count = self.founding.partitions
        self._plan = read_plan(config.data, self.founding)
        if self._plan is not None:
            await in_thread(self._plan.check)
        self.log = self._log()
        self.snapshots = Snapshots(
            config,
            self.rpc,
            disk=lambda: self.log.disk,
            identity=lambda: f"{config.cluster}-{self.meta.identity}",
            connected=lambda: {peer for peer, link in self.log.links().items() if link.connected},
            count=lambda: self._count,
            leader=lambda number: self.router.leader(number),
            restored=restored_directory(config.data, self.founding),
        )
        self.objects = self.stager.objects = Objects(
            self.snapshots, self.clock, members=self._other_members, connected=self._connected
        )
        self.catch_up = CatchUp(self.snapshots)
        self._opening = Complaints("opening the state of a partition")
        self.backups = Backups(
            self.snapshots,
            self.objects,
            self.hosted,
            count=lambda: self._count,
            leader=lambda number: self.router.leader(number),
            meta=lambda: self.meta.state,
            meta_fresh=self.meta_log.fresh,
            connected=self._connected,
        )
        self.backups.copies.remove_leftovers()
        self.forming = Forming(
            config.data,
            self.founding,
            self.rpc,
            formed=lambda: META_GROUP in self.log.host.replicas,
            connected=self._connected,
            introduction=self._introduction,
            refusals=self._refusals,
        )
        self.invoker = self._invoker()
        self.invoker.objects = self.objects
        self.healths = Healths(config.node, self.invoker.endpoints, self.rpc, self._connected)
        self.leftovers.going.update(self._partitions_on_disk())

    async def _join_unless_removed(self) -> None:
        """A node that was removed while it was down would wait for the others for ever: they tell it, and it ends."""
        self._removed_told = asyncio.get_running_loop().create_future()
        joining = asyncio.ensure_future(self._join())
        try:
            await asyncio.wait({joining, self._removed_told}, return_when=asyncio.FIRST_COMPLETED)
            if self.removed and not joining.done():
                raise NodeRemoved(self.config.node)
            await joining
        finally:
            joining.cancel()
            await asyncio.gather(joining, return_exceptions=True)

    async def until_removed(self) -> None:
        """Returns when the cluster has removed this node, and its doors have said so for a while. Stop it then."""
        assert self._removed_told is not None, "started"
        await asyncio.shield(self._removed_told)

    async def _join(self) -> None:
        """Found the cluster with the others or find it again, host its partitions, lead what falls to us."""
        await self.forming.wait()
        if META_GROUP not in self.log.host.replicas:
            self.log.create_group(META_GROUP, self.founding.founders)
        await self._await_partitions()
        await self._catch_up()
        self._route()
        hollow = {group - FIRST_PARTITION_GROUP for group in self.log.host.hollow}
        for number, members in self.meta.state.membership.first.items():
            if self.config.node in members and number not in hollow and not self._has_forgotten(number):
                self.log.create_group(FIRST_PARTITION_GROUP + number, members)
        if self._plan is not None:
            self._plan.done()
            self._plan = None
        self.invoker.partitions = self.hosted.values()
        self.invoker.fresh = self.registry.fresh = self.meta_log.known
        for number in sorted({*self.machines} - hollow):
            self._adopt(number)
        self.reader = Reader(
            self._count,
            self.hosted,
            fresh=self.router.fresh,
            elsewhere=self.router.ask_replica,
            objects=self.objects,
            level=lambda: self.meta.state.level,
        )
        self.rpc.serve("read", self.reader.serve)
        self.paused_callers = PausedCallers(
            self._count,
            self.replies,
            self.reader,
            after_s=self.config.paused_answer_after,
            now_ms=self.clock.now_ms,
        )
        self.paused_callers.start()
        self.registry.in_flight = self.reader.in_flight
        self.operations = Operations(
            self.registry,
            self.router,
            self.handover,
            fresh=self.meta_log.fresh,
            meta_members=lambda: self._meta_group().status().members,
        )
        for number in sorted(hollow):
            self.snapshots.run(self._fill(number))

    def _clients(self) -> Ingress:
        """What answers clients, behind whatever door they come through."""
        return Ingress(
            self.config,
            self.registry,
            self.router,
            self.replies,
            lookup=self.reader.lookup,
            load=self.reader.value,
            now_ms=self.clock.now_ms,
            level=lambda: self.meta.state.level,
            unhealthy=self.unhealthy,
            warnings=self.warnings,
            closed=lambda: self.closed,
        )

    def _overview(self) -> Overview:
        return Overview(
            self.config,
            self.log,
            self.meta,
            self.meta_log,
            self.founding,
            self.router,
            self.hosted,
            self.controller,
            self.handover,
            self.operations,
            self.releases,
            self.snapshots,
            self.objects,
        )

    def _metrics(self, ingress: Ingress, server: IngressServer) -> Metrics:
        return Metrics(
            self.reader.statistics_here,
            lambda: of_node(self.config, self.watchdog),
            lambda: of_log(self.log),
            lambda: of_members(self.meta.state.membership, self.handover),
            lambda: of_partitions(self.partitions),
            lambda: of_snapshots(self.snapshots),
            lambda: of_handlers(self.invoker),
            lambda: of_values(self.stager, self.objects),
            lambda: of_ingress(ingress, server),
        )

    async def _open_doors(self) -> None:
        config, ingress = self.config, self._clients()
        self.ingress = IngressServer(config, ingress)
        self.admin = AdminServer(
            config,
            Admin(
                config,
                self.registry,
                self.router,
                self.reader,
                now_ms=self.clock.now_ms,
                cluster=self._overview().show,
                metrics=self._metrics(ingress, self.ingress).scrape,
                unhealthy=self.unhealthy,
                warnings=self.warnings,
                removed=lambda: self.removed,
                operations=self.operations,
                healths=self.healths.everywhere,
                snapshots=self.snapshots,
                backups=self.backups,
            ),
        )
        # The doors open last and close first: no client meets a node that is not there yet, or not any more.
        await self.admin.start(self._doorman.relieve("admin"))
        await self.ingress.start(self._doorman.relieve("ingress"))
        if self.removed:  # Meanwhile.
            self._refuse_all()

    async def _await_partitions(self) -> None:
        """Until this node has heard how many partitions the cluster has. Whoever leads the meta group decides it, once."""
        group, state = self._meta_group(), self.meta.state
        while not state.partitions:
            try:
                if not self._count or self._plan is not None:
                    await self._introduce()
                if group.is_leader and {*self.founding.founders} <= {*state.membership.nodes}:
                    await self._found()
            except (ProposalError, TimeoutError) as error:
                logger.debug("founding the cluster: %s", error)
            await asyncio.sleep(0.01)
        count = state.partitions
        if self._count and self._count != count:
            raise WrongDirectory(
                self.config.data,
                f"it has the state of {self._count} partitions, but the cluster has {count}",
                "It belongs to another cluster: use its own directory",
            )
        if not self._count:
            self.founding = self.founding._replace(partitions=count)
            self._write_founding()
            self._count = count

    async def _found(self) -> None:
        """Once, by whoever leads the meta group. Only now are the zones known over which partitions are spread."""
        if self._plan is not None:
            for command in self._plan.commands:
                await self.registry.propose(command)
        elif not self.founding.restored:  # What was made from a backup is never made from nothing.
            await self.registry.found(
                cluster=self.config.cluster,
                partitions=self.config.partitions,
                founders=self.founding.founders,
                replication=self.config.replication,
                level=await self.releases.common_level(self.founding.founders),
            )

    async def _introduce(self) -> None:
        """Have the cluster know where we are."""
        known = self.meta.state.membership.nodes.get(self.config.node)
        mine = self._introduction()
        if known is None or known[: len(mine)] != mine:
            await self.registry.propose(PutNode(*mine), timeout_s=5.0)

    def _introduction(self) -> tuple[str, str, str, str, str]:
        config = self.config
        address = config.advertise or config.peer
        if not address.port:
            address = Endpoint(address.host, self.log.port)
        where = "" if address.host in ("0.0.0.0", "::", "") else str(address)  # Not an address that anybody reaches.
        ingress = config.public_ingress_url or (self.ingress_url if self.ingress is not None else "")
        admin = config.public_admin_url or (self.admin_url if self.admin is not None else "")
        return (config.node, config.zone, where, ingress, admin)

    async def _settle_in(self) -> None:
        """What a node that serves already still owes the others."""
        behind = sorted(self._behind & self.hosted.keys())  # Those without a state get theirs first: see `_fill`.
        await asyncio.gather(self._introduce_later(), *(self._catch_up_with(number) for number in behind))

    async def _catch_up_with(self, number: int) -> None:
        """Until this replica has what was acknowledged before. Sooner, the next node of a rolling restart must not stop: for
        its partitions there would be no majority until we have it."""
        while number in self.hosted:
            try:
                await self.router.fresh(number)
                break
            except ProposalError as error:
                logger.debug("partition %d: this replica is behind: %s", number, error)
        self._behind.discard(number)

    async def _introduce_later(self) -> None:
        """With the addresses of the doors, which are known when they are open. Nobody waits for it."""
        while not self.stopping:
            try:
                await self._introduce()
                return
            except (ProposalError, TimeoutError) as error:
                logger.debug("the cluster is not told where %s is yet: %s", self.config.node, error)
                await asyncio.sleep(1.0)

    # What stands on this machine's disk, clock and network. A simulated node overrides these, and nothing else.

    def _open_founding(self) -> Founding:
        return open_founding(self.config)

    def _write_places(self) -> None:
        """For the next start: those whom our settings name may be gone by then, and nobody else is asked."""
        try:
            write_places(self.config.data, {name: str(place) for name, place in self._known.items()})
        except OSError as error:  # As on a full disk. Who the peers are now does not depend on it.
            logger.warning("where the other nodes are is not written down: %s", error)

    def _write_removed(self, how: str) -> None:
        write_removed(self.config.data, how)

    def _write_founding(self) -> None:
        write_founding(self.config.data, self.founding)

    def _new_machine(self, number: int) -> PartitionMachine:
        state = State.open(
            self.config.data / "state" / f"{number:04d}",
            owner=self.log.disk,
            boot=self._boot,
            restore=self.snapshots.restorer(GroupId(FIRST_PARTITION_GROUP + number)),
        )
        return PartitionMachine(number, state, partitions=self._count)

    def _partitions_on_disk(self) -> list[int]:
        """Also those that the log has forgotten: the state is deleted last."""
        states = self.config.data / "state"
        return [int(path.name) for path in states.glob("*") if path.name.isdigit()]

    async def _delete_partition(self, number: int) -> None:
        group = FIRST_PARTITION_GROUP + number
        state = self.config.data / "state" / f"{number:04d}"
        for path in (self.snapshots.restored(group), self.snapshots.directory(group), state):
            if path is not None and path.exists():
                await asyncio.to_thread(shutil.rmtree, path)

    def _invoker(self) -> Invoker:
        limits = Limits(streamed=self.config.attempts_max)
        return Invoker(self.registry, self.clock, limits=limits, timing=self._timing, stager=self.stager)

    def _log(self) -> LogNode:
        config = self.config
        tls = None
        if config.tls_cert is not None and config.tls_key is not None and config.tls_ca is not None:
            tls = TlsFiles(config.tls_cert, config.tls_key, config.tls_ca)
        return self.log_class(
            NodeConfig(
                node=config.node,
                cluster=self.founding.cluster_id,
                data=config.data / "log",
                listen=Address(config.peer.host, config.peer.port),
                peers={
                    name: Address(place.host, place.port) for name, place in {**self._heard, **config.peers}.items()
                },
                secret=config.secret or (DEV_SECRET if tls is None else None),
                tls=tls,
                timing=self._log_timing,
                limits=engine.Limits(command_bytes_max=self._bounds.command_bytes, window_bytes=WINDOW_BYTES),
                link_limits=LinkLimits(
                    frame_bytes_max=self._frame_bytes, outbox_bytes_max=2 * self._frame_bytes + WINDOWS_BYTES
                ),
                log_bytes_max=config.log_bytes_max,
                free_bytes_min=config.free_bytes_min,
            ),
            open_machine=self._open_machine,
            # A partition's leader may be ready before we know how many partitions there are.
            may_join=lambda group: (
                group == META_GROUP
                or (
                    self._count > 0
                    and group - FIRST_PARTITION_GROUP not in self.leftovers.going
                    and self._stalled() is None
                )
            ),
            on_role_change=self._on_role_change,
            on_message=self.rpc.receive,
            on_peer=self._on_peer,
            on_refused=self._on_refused,
            on_removed=self._on_removed,
            keep_hollow=True,  # `_fill` sees to them.
            applied_at_once=frozenset({GroupId(META_GROUP)}),  # Every node acts on it.
            on_snapshot_wanted=lambda want: self.catch_up.wanted(want),
            on_forgotten=lambda group: self.leftovers.forgotten(group - FIRST_PARTITION_GROUP),
            on_fatal=self._on_fatal,
        )

    def _on_refused(self, peer: str, reason: str) -> None:
        logger.error("%s refuses this node: %s", peer, reason)
        self.forming.refused_by[peer] = reason

    def _on_removed(self, peer: str, reason: str) -> None:
        self._be_removed(f"{peer}: {reason}")

    def _check_removed(self) -> None:
        """A removed node serves on while it holds a replica or a vote: the others may still need it."""
        node, membership = self.config.node, self.meta.state.membership
        mine = membership.nodes.get(node)
        if mine is None or mine.state != REMOVED or any(node in each.members for each in membership.table.values()):
            return
        if META_GROUP not in self.log.host.replicas or node not in self._meta_group().status().members:
            self._be_removed("the meta group")

    def _be_removed(self, how: str) -> None:
        if self.removed or self.stopping:
            return
        self.removed = f"{NodeRemoved(self.config.node)}: ask another node"
        logger.warning("%s (known by %s); it stops in %.0f s", NodeRemoved(self.config.node), how, REMOVED_S)
        try:
            self._write_removed(how)
        except OSError as error:  # As on a full disk. After a restart the others tell us again.
            logger.warning("that this node was removed is not written down: %s", error)
        self._refuse_all()
        if self._removed_told is not None:
            self.log.loop.call_later(REMOVED_S, self._tell_removed, self._removed_told)

    @staticmethod
    def _tell_removed(told: asyncio.Future[None]) -> None:
        if not told.done():
            told.set_result(None)

    def _refuse_all(self) -> None:
        """Requests would wait for nodes that do not talk to us any more."""
        if self.ingress is not None:
            self.ingress.refuse(self.removed)
        if self.admin is not None:
            self.admin.leave()

    def _why_not_serving(self) -> str:
        if self.removed:
            return self.removed
        if self.forming.waits_for:
            return self.forming.waits_for
        refused = "".join(f"; no link to {peer}: {reason}" for peer, reason in self._refusals().items())
        return f"the node is starting, and not in touch with the cluster yet{refused}"

    def _route(self) -> None:
        config, hosted = self.config, self.hosted
        self.router = Router(
            config.node,
            self._count,
            hosted,
            self.rpc,
            self.replies,
            watched=self._on_watched,
            replicas=self._replicas,
            can_move=lambda number: self.handover.has_room(self._replicas(number)),
            stager=self.stager,
        )
        self.handover = Handover(
            config.node,
            hosted,
            self.rpc,
            meta_group=self._meta_group,
            membership=lambda: self.meta.state.membership,
            connected=self._connected,
            hint=self.router.hint,
            no_room=self._no_room,
        )
        self.watches = Watches(
            config.node,
            self._count,
            self.replies,
            self.rpc,
            leader=self.router.leader,
            own_term=lambda number: hosted[number].group.term if number in hosted else 0,
            completed_here=self._completed,
        )
        self.watches.start()
        self.controller = Controller(
            config.node,
            hosted,
            self.rpc,
            self.handover,
            meta_group=self._meta_group,
            membership=lambda: self.meta.state.membership,
            connected=self._connected,
            leader=self.router.leader,
            propose=self.registry.propose,
        )
        self.handover.on_round = self._on_round
        self.handover.start()
        self.controller.start()
        self.releases.start()
        self.leftovers.start()
        self.rpc.serve("join", self._serve_join)
        self.meta.on_change.append(self._on_meta_change)
        self._on_meta_change()

    def _on_meta_change(self) -> None:
        self.handover.changed()
        self.controller.changed()
        self.releases.changed()
        for partition in self.hosted.values():
            if partition.leadership is not None:
                partition.leadership.raise_level(self.meta.state.level)
        self.log.loop.call_soon(self._update_peers)
        self.log.loop.call_soon(self.invoker.deployments_changed)

    def _on_round(self) -> None:
        """Every few seconds, and when something changed that concerns leaders."""
        self.controller.record()
        self._check_removed()
        self._tell_places()

    def _update_peers(self) -> None:
        """Whoever is in the cluster is a peer, and whoever was removed is none once nothing is left on it."""
        if self.stopping:
            return
        membership = self.meta.state.membership
        holding = {name for replicas in membership.table.values() for name in replicas.members}
        if META_GROUP in self.log.host.replicas:
            holding.update(self._meta_group().status().members)
        gone = {name for name, node in membership.nodes.items() if node.state == REMOVED and name not in holding}
        known = {
            name: read_endpoint(node.address)
            for name, node in membership.nodes.items()
            if node.address and name != self.config.node and name not in gone
        }
        heard = {name: place for name, place in self._heard.items() if name not in membership.nodes}
        # Our own settings win: they are about how we reach it.
        wanted = {**heard, **known, **{name: place for name, place in self.config.peers.items() if name not in gone}}
        if known and known != self._known:
            self._known = known
            self._write_places()
            self._tell_places()
        places = {name: Address(place.host, place.port) for name, place in wanted.items()}
        if (places, gone) != (self._places, self._gone):
            self._places, self._gone = places, gone
            self.log.set_peers(places, gone)
        self._check_removed()

    def _tell_places(self) -> None:
        """Who joins, or was away for long, may know too few of us: the one who leads may be the one it would turn away."""
        places = {name: str(place) for name, place in self._known.items()}
        for peer in self._connected() if places else ():
            self.rpc.tell(peer, "places", places)

    def _on_places(self, peer: str, places: Any) -> None:
        heard = {read_name(name): read_endpoint(place) for name, place in dict(places).items()}
        heard.pop(self.config.node, None)
        if heard.items() - self._heard.items():
            self._heard |= heard
            self.log.loop.call_soon(self._update_peers)

    async def _serve_join(self, peer: str, introduction: Any) -> Any:
        """A node that waits outside. None: it is on the list; else why it never will be."""
        name, zone, address, ingress_url, admin_url = introduction
        if name != peer:
            raise Refused("Malformed", f"{peer} introduces itself as {name}")
        known = self.meta.state.membership.nodes.get(name)
        if known is not None and known[: len(introduction)] == tuple(introduction):
            return None
        try:
            outcome = await self.registry.propose(PutNode(name, zone, address, ingress_url, admin_url), timeout_s=4.0)
        except (ProposalError, TimeoutError) as error:
            raise Refused("Unavailable", str(error)) from None
        return outcome.result.message if outcome.result.code == 409 else None

    def _replicas(self, number: int) -> tuple[str, ...]:
        replicas = self.meta.state.membership.table.get(number)
        return replicas.members if replicas is not None else ()

    def _other_members(self) -> set[str]:
        """Whoever is in the cluster, up or down, beside us."""
        nodes = self.meta.state.membership.nodes
        return {name for name, node in nodes.items() if node.state != REMOVED and name != self.config.node}

    def _no_room(self) -> str | None:
        """Why nothing more can be appended here, or not even what is committed can be applied."""
        refusal = self.log.host.no_room()
        return str(refusal) if refusal is not None else self._stalled()

    def _stalled(self) -> str | None:
        replicas = self.log.host.replicas.values()
        stalled = (replica.stalled for replica in replicas if replica.stalled is not None)
        return self.log.no_space or next(stalled, None)

    def _connected(self) -> Collection[str]:
        return self.log.host.sessions.keys()

    def _refusals(self) -> dict[str, str]:
        """Why there is no link to peers that are there: other founders, certificates, secrets. Not that one is not there."""
        return {peer: link.refused for peer, link in sorted(self.log.links().items()) if link.refused is not None}

    def _on_watched(self, invocation: bytes, leader: str) -> None:
        if self.watches is not None:
            self.watches.watched(invocation, leader)

    def _on_peer(self, peer: str, up: bool) -> None:
        if not up:
            self.rpc.peer_down(peer)
        if self.watches is not None:
            self.watches.peer_changed(peer, up=up)
            self.handover.peer_changed(peer, up=up)
            self.controller.changed()
            self.releases.peer_changed(peer, up=up)
            if not up:
                self.router.forget_peer(peer)

    async def _completed(self, number: int, ids: list[bytes]) -> list[tuple[bytes, list[Any]]]:
        """Which of these have an outcome. Only who leads knows: a replica may be behind."""
        return await self.reader.completed(number, ids)

    async def _catch_up(self) -> None:
        """Until the deployments that were registered before we started are known here.

        A restarted node learns only from a leader how much of its log is committed. One that led partitions before that
        would find pinned invocations without their deployment, and pause them.
        """
        while True:
            try:
                await self.meta_log.fresh()
                return
            except ProposalError as error:
                logger.warning("the deployments of the cluster cannot be read yet: %s", error)

    async def _fill(self, number: int) -> None:
        """A partition whose state is gone gets one. The others serve meanwhile: another node may wait for one of ours."""
        group = FIRST_PARTITION_GROUP + number
        await self.catch_up.fill(self.log, group, self.machines[number], lambda: sorted(self._connected()))
        self._adopt(number)
        await self._catch_up_with(number)

    async def stop(self) -> None:
        """Hand over, finish what is in progress, let attempts hand themselves back, close. What was accepted is on disk."""
        self.stopping = True
        for door in (self.ingress, self.admin):
            if door is not None:
                door.leave()
        await self._doorman.stop()
        if self._introducing is not None:
            self._introducing.cancel()
        copying = asyncio.ensure_future(self.backups.stop())
        if self.watches is not None:
            await self.handover.leave(HANDOVER_S)
        if self.ingress is not None:
            # What others lead now goes on, so whoever waits here gets an answer, if it is not long in coming. What is
            # led here still goes on for a moment, and then waits for our return.
            await self.ingress.finish(FINISH_ALONE_S if self._leads() else FINISH_S)
            await self.ingress.stop()
        if self.admin is not None:
            await self.admin.stop()
        if self.paused_callers is not None:
            await self.paused_callers.stop()
        await self.invoker.stop(SUSPEND_S)
        for partition in self.partitions:
            self._resign(partition)
        await self.invoker.close()
        self.meta_log.stop()
        await self.registry.close()
        if self.watches is not None:
            await self.controller.stop()
            await self.releases.stop()
            await self.handover.stop()
            await self.watches.stop()
        await self.leftovers.stop()
        await self.rpc.stop()
        await copying
        await self.objects.stop()
        await self.snapshots.stop()
        # `Handover` has done what could be done, and knows better who should not be asked.
        await self.log.stop(handover_s=LOG_HANDOVER_S if self.watches is None else 0.0)
        for machine in self.machines.values():
            machine.state.close()
        await self.watchdog.stop()

    def _leads(self) -> bool:
        return any(partition.group.is_leader for partition in self.hosted.values())

    def observe(self, observer: Observer) -> None:
        """`observer` is told of each command of this node that is applied from now on, and what it did."""
        self._observer = observer
        for partition in self._every.values():
            partition.observer = observer

    @property
    def partitions(self) -> list[Partition]:
        return [self.hosted[number] for number in sorted(self.hosted)]

    # -- groups ------------------------------------------------------------------------------------------------------

    def _leader(self, number: int) -> str | None:
        if number == META:
            return self._meta_group().leader
        return self.router.leader(number)

    def _meta_group(self) -> Group:
        return self.log.group(META_GROUP)

    def _open_machine(self, group: GroupId) -> Machine:
        if group == META_GROUP:
            return self.meta
        number = group - FIRST_PARTITION_GROUP
        assert self._count, "partitions are made after their number is known"
        try:
            machine = self.machines[number] = self._new_machine(number)
        except OSError as error:
            if self.watches is not None:  # We were invited, and are again. At the start, whoever starts us says it.
                self._opening.failed(error)
            raise
        self._opening.went_well()
        if self.watches is not None:
            asyncio.get_running_loop().call_soon(self._adopt, number)  # We were invited.
        return machine

    def _has_forgotten(self, number: int) -> bool:
        return GroupId(FIRST_PARTITION_GROUP + number) in self.log.host.journal.tombstones

    def _close_partition(self, number: int) -> None:
        """Its log is about to go: nobody will believe its state again."""
        self.hosted.pop(number, None)
        self.machines.pop(number).state.discard()

    def _tidy(self) -> None:
        """What was found on disk is in use, or the rest of a partition that an earlier life of this node let go."""
        left = {number for number in self.leftovers.going if self._has_forgotten(number)}
        self.leftovers.going.clear()
        for number in sorted(left):
            self.leftovers.found(number)

    def _on_role_change(self, group: Group) -> None:
        number = group.id - FIRST_PARTITION_GROUP
        if self.watches is not None:
            if number in self.machines:
                self._adopt(number)
            self.handover.changed()
            self.controller.changed()
            self.releases.changed()

    def _adopt(self, number: int) -> None:
        """A group of the log is here: hold it as a partition while we are a member, and lead it when that falls to us."""
        group = self.log.group(FIRST_PARTITION_GROUP + number)
        partition = self._every.get(number)
        if partition is None:
            # One for the life of the process: it counts what this process has proposed.
            partition = self._every[number] = Partition(self.machines[number], group, self.clock, bounds=self._bounds)
            partition.observer = self._observer
            partition.settle = self.replies.settle
            partition.outvoted = lambda: self.handover.outvoted(group)
            self.snapshots.attach(partition)
        if self.config.node in group.status().members:
            self.hosted[number] = partition
        else:
            self.hosted.pop(number, None)
        self._lead_or_not(partition)

    def _lead_or_not(self, partition: Partition) -> None:
        """Begin to lead in this term, or stop leading in an older one."""
        group = partition.group
        term = group.term if group.is_leader and not self.stopping else 0
        leadership = partition.leadership
        if leadership is not None and leadership.term != term:
            self._resign(partition)
            leadership = None
        if term and leadership is None:
            leadership = Leadership(
                partition,
                term,
                self.config.node,
                self.invoker,
                self.router,
                self.replies,
                self.objects,
                limits=limits_of(self.config),
                level=self.meta.state.level,
            )
            partition.leadership = leadership
            leadership.begin()

    def _resign(self, partition: Partition) -> None:
        if partition.leadership is not None:
            partition.leadership.end()
            partition.leadership = None
            if self.watches is not None:
                self.watches.resigned(partition.number)

    # -- what others ask ---------------------------------------------------------------------------------------------

    def unhealthy(self) -> str | None:
        """Why requests may fail here now; None: they should not."""
        if self.stopping:
            return "the node is shutting down"
        if self.watches is None or self.removed:
            return self._why_not_serving()
        mine = self.meta.state.membership.nodes.get(self.config.node)
        if mine is not None and mine.state == REMOVED:
            return (
                "this node is being removed from the cluster: it must run until it holds nothing, and stops by itself"
            )
        # A replica keeps the leader it last heard of, which says nothing when that one cannot be reached.
        near = {self.config.node, *self._connected()}
        headless = [number for number in range(self._count) if self.router.leader(number) not in near]
        if headless:
            return f"partitions without a leader: {headless}"
        if self._behind:
            return f"catching up with what happened while this node was away, in partitions {sorted(self._behind)}"
        if (stalled := self._stalled()) is not None:
            return f"what is committed cannot be applied: {stalled}"
        full = self._no_room()
        if full is not None and not all(
            self.handover.has_room(self._replicas(number)) for number in range(self._count)
        ):
            return f"there is no room on this node, nor on those that could lead instead: {full}"
        return None

    def warnings(self) -> list[str]:
        """What an operator should see to although requests are served."""
        found = []
        if self.watches is not None:
            full = self._no_room()
            if full is not None:
                found.append(f"there is no room on this node, so it leads nothing: {full}")
            elsewhere = sorted(self.handover.full - {self.config.node})
            found += [f"the disk of {name} is full, so it leads nothing" for name in elsewhere]
        return found

    @property
    def ingress_url(self) -> str:
        assert self.ingress is not None, "started"
        return _url(self.config.ingress.host, self.ingress.port)

    @property
    def admin_url(self) -> str:
        assert self.admin is not None, "started"
        return _url(self.config.admin.host, self.admin.port)


def _url(host: str, port: int) -> str:
    """An address that can be typed: "any" is not one."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
