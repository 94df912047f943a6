"""The cluster in the admin API: nodes, leaderships, snapshots and backups."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from holdfast.cluster.addresses import find_guarded
from holdfast.cluster.admin.parameters import AdminRequest, Parameters, json_answer, read_body
from holdfast.cluster.admin.shapes.cluster import Cluster, NewBackup, NodeAddress, RecentBackups, StoredSnapshots
from holdfast.cluster.backup.job import Backups, check_place, read_place, show_to
from holdfast.cluster.config import Config, read_host_port
from holdfast.cluster.errors import BadRequest, Conflict, NotFound, Unavailable
from holdfast.cluster.http.exchange import Answer
from holdfast.cluster.members.operations import Operations, read_node
from holdfast.cluster.peers.rpc import Refused, Unanswered
from holdfast.cluster.routing.router import Router
from holdfast.cluster.snapshotting.service import Snapshots
from holdfast.sdk.ids import NodeId, PartitionNumber
from holdfast.snapshots.errors import SnapshotError
from holdfast.statemachine.access import ADMIN, permits


class ClusterAdmin:
    def __init__(
        self,
        config: Config,
        router: Router,
        operations: Operations,
        *,
        cluster: Callable[..., Awaitable[Cluster]],
        snapshots: Snapshots,
        backups: Backups,
    ) -> None:
        """`cluster` is a function because only the node knows what it shows."""
        self._config = config
        self._router = router
        self._operations = operations
        self._cluster = cluster
        self._snapshots = snapshots
        self._backups = backups

    async def on_cluster(self, request: AdminRequest) -> Answer:
        return json_answer(200, await self._cluster(reasons=permits(request.request.principal.roles, ADMIN)))

    async def on_create_snapshot(self, request: AdminRequest) -> Answer:
        text = request.path["partition"]
        number = PartitionNumber(int(text) if text.isascii() and text.isdigit() and len(text) < 6 else -1)
        try:
            made = await self._snapshots.create(number, partitions=self._router.count, leader=self._router.leader)
        except (Refused, Unanswered) as error:
            if isinstance(error, Refused) and error.kind == "NotFound":
                raise NotFound(f"there is no partition {text!r:.20}", "GET /cluster shows them") from None
            raise Unavailable(f"no snapshot of partition {number}: {error}") from None
        return json_answer(201, made)

    async def on_snapshots(self, request: AdminRequest) -> Answer:
        if not self._snapshots.shared:
            raise Conflict(
                "this node has no shared store of snapshots", "set `snapshots`; GET /cluster shows its own snapshots"
            )
        try:
            shown: StoredSnapshots = {"store": self._config.snapshots, "snapshots": await self._snapshots.stored()}
            return json_answer(200, shown)
        except SnapshotError as error:
            raise Unavailable(str(error)) from None

    async def on_begin_backup(self, request: AdminRequest) -> Answer:
        given = await read_body(request, NewBackup)
        place = read_place(given.get("to"))
        request.note(to=place.partition("?")[0])
        roles = request.request.principal.roles
        await check_place(place, self._config.snapshots, roles)
        return json_answer(202, show_to(roles, self._backups.begin(place)))

    async def on_backups(self, request: AdminRequest) -> Answer:
        shown: RecentBackups = {
            "backups": [show_to(request.request.principal.roles, each) for each in self._backups.recent()]
        }
        return json_answer(200, shown)

    async def on_backup(self, request: AdminRequest) -> Answer:
        return json_answer(200, show_to(request.request.principal.roles, await self._backups.show(request.path["id"])))

    async def on_cancel_backup(self, request: AdminRequest) -> Answer:
        return json_answer(
            200, show_to(request.request.principal.roles, await self._backups.cancel(request.path["id"]))
        )

    async def on_add_node(self, request: AdminRequest) -> Answer:
        given = await read_body(request, NodeAddress)
        node = read_node(given.get("name"), given.get("address"), "" if given.get("zone") is None else given["zone"])
        request.note(name=node.name, address=node.address)
        place = read_host_port(node.address)
        if (guarded := await find_guarded(place.host, place.port)) is not None:
            raise BadRequest(guarded, "give the address of the node's peer port")
        return json_answer(200, await self._operations.add(node))

    async def on_drain(self, request: AdminRequest) -> Answer:
        parameters = Parameters(request, "move", "wait")
        move, wait = parameters.truth("move"), parameters.choice("wait", ("true", "false")) == "true"
        return json_answer(200, await self._operations.drain(NodeId(request.path["name"]), move=move, wait=wait))

    async def on_undrain(self, request: AdminRequest) -> Answer:
        return json_answer(200, await self._operations.undrain(NodeId(request.path["name"])))

    async def on_remove_node(self, request: AdminRequest) -> Answer:
        force = Parameters(request, "force").truth("force")
        return json_answer(200, await self._operations.remove(NodeId(request.path["name"]), force=force))

    async def on_transfer(self, request: AdminRequest) -> Answer:
        text = request.path["partition"]
        if not (text.isascii() and text.isdigit() and len(text) <= 6):
            raise BadRequest(f"{text!r:.50} is not the number of a partition")
        to = Parameters(request, "to").text("to")
        return json_answer(200, await self._operations.transfer(PartitionNumber(int(text)), to))
