"""The parts that exist while a node serves: made when the node has joined its cluster, before its doors open."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from holdfast.cluster.admin.views import show_invocation
from holdfast.cluster.backup.job import Backups
from holdfast.cluster.events.feed import Feed
from holdfast.cluster.events.remote import Remote
from holdfast.cluster.events.signals import Signals
from holdfast.cluster.ground import Ground
from holdfast.cluster.groups import group_of, partition_in
from holdfast.cluster.ingress.ingress import Ingress
from holdfast.cluster.leading.courier import Courier
from holdfast.cluster.leading.leaderships import Leaderships
from holdfast.cluster.leading.webhooks import Farings
from holdfast.cluster.members.controller import Controller
from holdfast.cluster.members.handover import Handover
from holdfast.cluster.members.operations import Operations
from holdfast.cluster.observe.health import Health
from holdfast.cluster.partition.door import Observer
from holdfast.cluster.registry.identity import IdentityKeys
from holdfast.cluster.routing.approvals import Approvals
from holdfast.cluster.routing.arrears import Arrears
from holdfast.cluster.routing.reader import Reader
from holdfast.cluster.routing.router import Router
from holdfast.cluster.routing.statuses import Statuses
from holdfast.cluster.routing.watches import Watches
from holdfast.cluster.snapshotting.complaints import Complaints
from holdfast.log.node import Group
from holdfast.log.replica import Machine
from holdfast.sdk.ids import NodeId, PartitionNumber, numbers_of


class Serving:
    """One per node. `begin` starts it."""

    def __init__(self, ground: Ground, *, observers: Sequence[Observer], closed: Callable[[], str]) -> None:
        """`observers` of applied commands may grow. `closed`: why the ingress refuses requests; empty: it does not."""
        self._ground = ground
        self._observers = observers
        self._opening = Complaints("opening the state of a partition", ground.environment.clock)
        self._make_routing()
        self._make_members()
        self._make_leading()
        self._make_clients(closed)
        self._make_feed()

    def _make_routing(self) -> None:
        ground, meta, hosted = self._ground, self._ground.meta, self._ground.replicas.hosted
        partitions = ground.record.partitions
        self.router = Router(
            node=ground.config.node,
            count=partitions,
            hosted=hosted,
            rpc=ground.rpc,
            replies=ground.replies,
            watched=lambda invocation, leader: self.watches.watched(invocation, leader),
            replicas=meta.replicas,
            can_move=lambda number: self.handover.has_room(meta.replicas(number)),
            stager=ground.stager,
            entropy=ground.environment.entropy,
        )
        self.reader = Reader(
            partitions,
            hosted,
            fresh=self.router.fresh,
            elsewhere=self.router.ask_replica,
            objects=ground.objects,
            level=lambda: meta.state.level,
        )
        self.watches = Watches(
            ground.config.node,
            partitions,
            ground.replies,
            ground.rpc,
            leader=self.router.leader,
            own_term=lambda number: hosted[number].group.term if number in hosted else 0,
            completed_here=self.reader.completed,
        )
        self.statuses = Statuses(
            partitions,
            ground.replies,
            self.reader,
            after_s=ground.config.paused_answer_after,
            now_ms=ground.environment.clock.now_ms,
        )
        self.arrears = Arrears(hosted, self.router)

    def _make_members(self) -> None:
        ground, meta, hosted = self._ground, self._ground.meta, self._ground.replicas.hosted
        self.handover = Handover(
            NodeId(ground.config.node),
            hosted,
            ground.rpc,
            meta_group=self._ground.meta_group,
            membership=lambda: meta.state.membership,
            connected=ground.log.connected,
            hint=self.router.hint,
            no_room=ground.log.why_no_room,
            on_round=self._on_round,
        )
        self.controller = Controller(
            NodeId(ground.config.node),
            hosted,
            ground.rpc,
            self.handover,
            meta_group=self._ground.meta_group,
            membership=lambda: meta.state.membership,
            connected=ground.log.connected,
            leader=self.router.leader,
            propose=ground.registry.propose,
        )
        self.operations = Operations(
            ground.registry,
            self.router,
            self.handover,
            fresh=ground.meta_log.fresh,
            meta_members=lambda: self._ground.meta_group().status().members,
            members_here=lambda number: hosted[number].group.status().members if number in hosted else (),
        )
        self.identity = IdentityKeys(ground.registry, leads_meta=lambda: self._ground.meta_group().is_leader)
        self.backups = Backups(
            ground.snapshots,
            ground.copies,
            partitions=ground.record.partitions,
            leader=self.router.leader,
            meta=lambda: meta.state,
            meta_fresh=ground.meta_log.fresh,
            connected=ground.log.connected,
        )

    def _make_leading(self) -> None:
        ground = self._ground
        self.courier = Courier(
            ground.config.node,
            lambda: ground.meta.state.webhooks,
            addresses=ground.config.webhook_addresses,
            clock=ground.environment.clock,
            cluster=ground.config.cluster,
            show=show_invocation,
        )
        self.farings = Farings(
            self.courier,
            ground.replicas.hosted,
            ground.rpc,
            leads=self.router.leads,
            connected=ground.log.connected,
            now_ms=ground.environment.clock.now_ms,
        )
        self.leaderships = Leaderships(
            ground.config,
            replicas=ground.replicas,
            log=ground.log,
            meta=ground.meta,
            invoker=ground.invoker,
            router=self.router,
            replies=ground.replies,
            watches=self.watches,
            snapshots=ground.snapshots,
            objects=ground.objects,
            courier=self.courier,
            clock=ground.environment.clock,
            bounds=ground.bounds,
            outvoted=self.handover.outvoted,
            observers=self._observers,
            tracer=ground.tracer,
        )

    def _make_clients(self, closed: Callable[[], str]) -> None:
        ground, meta = self._ground, self._ground.meta
        self.health = Health(
            NodeId(ground.config.node),
            log=ground.log,
            meta=meta,
            removal=ground.removal,
            certificates=ground.certificates,
            router=self.router,
            handover=self.handover,
            arrears=self.arrears,
            webhooks=self.farings.warnings,
        )
        #: The inbox of the cluster.
        self.approvals = Approvals(self.reader, self.router, lambda: meta.state.level)
        #: Answers clients of both doors.
        self.clients = Ingress(
            ground.config,
            ground.registry,
            self.router,
            ground.replies,
            approvals=self.approvals,
            lookup=self.reader.lookup,
            load=self.reader.value,
            now_ms=ground.environment.clock.now_ms,
            level=lambda: meta.state.level,
            unhealthy=self.health.unhealthy,
            warnings=self.health.warnings,
            closed=closed,
        )

        ground.vitals.measure("accept", self.clients.acceptance)

    def _make_feed(self) -> None:
        ground, meta, hosted = self._ground, self._ground.meta, self._ground.replicas.hosted
        #: The events for those who watch.
        self.feed = Feed(
            ground.record.partitions,
            hosted,
            Remote(ground.rpc, hosted, replicas=meta.replicas, connected=ground.log.connected),
            Signals(
                meta,
                cluster=self._seen_of_cluster,
                healths=ground.healths.everywhere,
                approvals=lambda: {number: each.machine.approvals_version for number, each in hosted.items()},
            ),
            identity=lambda: f"{ground.config.cluster}-{meta.identity}",
        )

    def _seen_of_cluster(self) -> object:
        """What operators see of the cluster and this node alone knows."""
        ground = self._ground
        return (
            [self.router.leader(number) for number in numbers_of(ground.record.partitions)],
            [self._ground.meta_group().leader, *sorted(ground.log.connected())],
            [self.health.unhealthy(), *self.health.warnings()],
            dict(ground.releases.known),
        )

    # -- life --------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Watch the other nodes, host the partitions of this node, and lead some of them."""
        self.watches.start()
        self.handover.start()
        self.controller.start()
        self._ground.releases.start()
        self._ground.leftovers.start()
        self._ground.rpc.serve("join", self._ground.joining.serve_join)
        self._ground.meta.on_change.append(self._on_meta_change)
        self._on_meta_change()
        self._ground.rpc.serve("read", self.reader.serve)
        hollow = {partition_in(group) for group in self._ground.log.host.hollow}
        for number, members in self._ground.meta.state.membership.first.items():
            if (
                self._ground.config.node in members
                and number not in hollow
                and not self._ground.replicas.is_forgotten(number)
            ):
                self._ground.log.create_group(group_of(number), members)
        self._ground.joining.done()
        for number in sorted({*self._ground.replicas.machines} - hollow):
            self.leaderships.adopt(number)
        self.statuses.start()
        for number in sorted(hollow):
            self._ground.snapshots.run(self._fill(number))
        self._ground.snapshots.run(self._ground.snapshots.watch_store())
        self._ground.snapshots.run(self._ground.objects.watch())

    async def settle_in(self) -> None:
        """Wait until this node has all entries that were acknowledged while it was away. It is unhealthy before that."""
        hosted = self._ground.replicas.hosted
        behind = sorted(self.arrears.numbers & hosted.keys())  # Replicas without a state get one first: see `_fill`.
        await asyncio.gather(*(self.arrears.catch_up(number) for number in behind))

    def note_arrears(self) -> None:
        """Note the partitions in which others may have acknowledged entries meanwhile."""
        hosted = self._ground.replicas.hosted
        self.arrears.numbers = {it.number for it in hosted.values() if len(it.group.status().members) > 1}
        self.arrears.numbers.update(partition_in(group) for group in self._ground.log.host.hollow)

    async def _fill(self, number: PartitionNumber) -> None:
        """Fetch the state of a partition that lost it. The others serve meanwhile: another node may wait for one of ours."""
        group = group_of(number)
        machine = self._ground.replicas.machines[number]
        await self._ground.catch_up.fill(self._ground.log, group, machine, lambda: sorted(self._ground.log.connected()))
        self.leaderships.adopt(number)
        await self.arrears.catch_up(number)

    def stop_beginning(self) -> None:
        """Begin no more leaderships, because the node shuts down."""
        self.health.stopping()
        self.leaderships.stop_beginning()

    async def stop(self) -> None:
        await self.feed.stop()
        await self.controller.stop()
        await self._ground.releases.stop()
        await self.handover.stop()
        await self.watches.stop()
        await self.courier.close()

    # -- events of the log -------------------------------------------------------------------------------------------

    def open_machine(self, number: PartitionNumber) -> Machine:
        """Accept an invitation to a partition. Raises OSError; the invitation is then repeated."""
        try:
            machine = self._ground.replicas.open(number)
        except OSError as error:
            self._opening.failed(error)
            raise
        self._opening.went_well()
        asyncio.get_running_loop().call_soon(self.leaderships.adopt, number)
        return machine

    def role_changed(self, group: Group) -> None:
        number = partition_in(group.id)
        if number in self._ground.replicas.machines:
            self.leaderships.adopt(number)
        self._changed()

    def peer_changed(self, peer: str, *, up: bool) -> None:
        self.watches.peer_changed(peer, up=up)
        self.handover.peer_changed(peer, up=up)
        self.controller.changed()
        self._ground.releases.peer_changed(peer, up=up)
        if not up:
            self.router.forget_peer(peer)

    def _on_meta_change(self) -> None:
        self._changed()
        self.leaderships.raise_level()
        self.leaderships.webhooks_changed()
        self._ground.log.loop.call_soon(self._update_members)
        self._ground.log.loop.call_soon(self._ground.invoker.deployments_changed)
        self._ground.log.loop.call_soon(self._ground.invoker.pauses.changed)

    def _changed(self) -> None:
        self.handover.changed()
        self.controller.changed()
        self._ground.releases.changed()

    def _update_members(self) -> None:
        self._ground.places.update()
        self._ground.removal.check()

    def _on_round(self) -> None:
        """Runs every few seconds, and after changes that concern leaders."""
        self.controller.record()
        self._ground.removal.check()
        self._ground.places.tell()
