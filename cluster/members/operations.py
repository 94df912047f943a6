"""Operations on the cluster: add, drain and remove nodes, move leaderships."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Annotated, Any, Final, TypedDict

from holdfast.cluster.config import read_host_port, read_name, read_zone
from holdfast.cluster.errors import BadRequest, Conflict, Full, NotFound, Unavailable
from holdfast.cluster.members.handover import CannotMove, Handover
from holdfast.cluster.registry.registry import Registry
from holdfast.cluster.routing.router import Router
from holdfast.cluster.schemas import one_of
from holdfast.log.errors import NotLeader
from holdfast.sdk.ids import NodeId, PartitionNumber
from holdfast.statemachine.effects import Code
from holdfast.statemachine.members import (
    ACTIVE,
    DRAINING,
    LEAVING,
    REMOVED,
    Member,
    Membership,
    PutNode,
    SetNodeState,
)
from holdfast.statemachine.meta import MetaCommand

DRAIN_S: Final = 10.0
STATUS_HINT: Final = "`holdfast cluster status` (GET /cluster) lists the nodes"
ADD_HINT: Final = 'give a name and host:port of its peer link, as in {"name": "n4", "address": "10.0.0.4:5122"}'


class NodeMembership(TypedDict):
    """A node as a member of the cluster."""

    name: str
    state: Annotated[
        str,
        "draining: it leads nothing; leaving: its replicas move away, too; removed: for good",
        one_of([ACTIVE, DRAINING, LEAVING, REMOVED]),
    ]
    zone: str | None
    address: Annotated[str, "host:port of its peer link"]
    ingress_url: Annotated[str | None, "null: the node has not reported it yet"]
    admin_url: Annotated[str | None, "null: the node has not reported it yet"]
    replicas: Annotated[int, "how many it holds; stop a removed node only when this is 0"]
    leads: Annotated[int | None, "how many partitions it leads; null: unknown"]


class Leadership(TypedDict):
    partition: int
    leader: str | None


def read_node(name: Any, address: Any, zone: Any) -> PutNode:
    try:
        return PutNode(NodeId(read_name(name)), read_zone(zone), str(read_host_port(address)))
    except ValueError as error:
        raise BadRequest(str(error), ADD_HINT) from None


class Operations:
    def __init__(
        self,
        registry: Registry,
        router: Router,
        handover: Handover,
        *,
        fresh: Callable[[], Any],
        meta_members: Callable[[], Collection[str]],
        members_here: Callable[[PartitionNumber], Collection[str]],
    ) -> None:
        """`members_here`: of a partition, as its replica on this node knows them; empty if there is none."""
        self._members_here = members_here
        self._registry = registry
        self._router = router
        self._handover = handover
        self._fresh = fresh
        self._meta_members = meta_members

    @property
    def _membership(self) -> Membership:
        return self._registry.state.membership

    async def add(self, command: PutNode) -> NodeMembership:
        """Add a node to the cluster. It gets replicas once it is running."""
        await self._fresh()
        known = self._membership.nodes.get(command.name)
        if known is not None and known.state != REMOVED and not command.zone:
            command = command._replace(zone=known.zone)  # The node reported it itself.
        if known is not None:
            command = command._replace(ingress_url=known.ingress_url, admin_url=known.admin_url)
        await self._propose(command)
        return self.show(self._membership.nodes[command.name])

    async def drain(self, name: NodeId, *, move: bool, wait: bool = True) -> NodeMembership:
        """Move all leaderships off a node, and with `move` also its replicas.

        With `wait`, it returns when the node leads nothing, or after a while."""
        await self._propose(SetNodeState(name, LEAVING if move else DRAINING))
        loop = asyncio.get_running_loop()
        deadline = loop.time() + DRAIN_S
        while wait and self._handover.leads(name) and loop.time() < deadline:  # noqa: ASYNC110 - bounded
            await asyncio.sleep(0.02)
        return self.show(self._membership.nodes[name])

    async def undrain(self, name: NodeId) -> NodeMembership:
        await self._propose(SetNodeState(name, ACTIVE))
        return self.show(self._membership.nodes[name])

    async def remove(self, name: NodeId, *, force: bool) -> NodeMembership:
        """Remove a node permanently. Other nodes replace its replicas."""
        await self._fresh()
        membership = self._membership
        if name not in membership.nodes:
            raise NotFound(f"there is no node {name!r:.100}", STATUS_HINT)
        left = [node for node in membership.nodes.values() if node.state in (ACTIVE, DRAINING) and node.name != name]
        holds = self._holds(name)
        if holds and len(left) < membership.replication and not force:
            raise Conflict(
                f"{name} has replicas of {holds} partitions, and only {len(left)} nodes are left for "
                f"{membership.replication} replicas of each",
                "add a replacement first, or accept fewer replicas with --force (force=true)",
            )
        await self._propose(SetNodeState(name, REMOVED))
        return self.show(membership.nodes[name])

    async def transfer(self, number: PartitionNumber, to: str | None) -> Leadership:
        if not 0 <= number < self._router.count:
            raise NotFound(f"there is no partition {number}", f"partitions are numbered 0 to {self._router.count - 1}")
        try:
            leader = await self._handover.transfer(number, to, self._router.leader(number))
        except CannotMove as error:
            raise Conflict(str(error), STATUS_HINT) from None
        except NotLeader as error:
            raise Unavailable(str(error)) from None
        return {"partition": number, "leader": leader}

    async def _propose(self, command: MetaCommand) -> None:
        result = (await self._registry.propose(command)).result
        known = self._membership.nodes.get(getattr(command, "name", NodeId("")))
        is_gone = known is not None and known.state == REMOVED
        match result.code:
            case Code.NOT_FOUND:
                raise NotFound(result.message, STATUS_HINT)
            case Code.CONFLICT:
                raise Conflict(result.message, "give the node a new name and an empty directory" if is_gone else "")
            case Code.FULL:
                raise Full(result.message)

    def _holds(self, name: NodeId) -> int:
        """By the table, and by the logs of the partitions: the table learns of a change of members a moment later."""
        table = self._membership.table
        return sum(name in each.members or name in self._members_here(number) for number, each in table.items())

    def _votes_still(self, node: Member) -> bool:
        """An operator stops a removed node once it holds nothing.

        So while it votes in the meta group, it counts one replica more.

        A node that shows it as removed has applied the removal, and so every earlier change of the meta group's
        members. A removed name never votes again. So 0 is final.
        """
        return node.state == REMOVED and node.name in self._meta_members()

    def show(self, node: Member) -> NodeMembership:
        return {
            "name": node.name,
            "state": node.state,
            "zone": node.zone or None,
            "address": node.address,
            "ingress_url": node.ingress_url or None,
            "admin_url": node.admin_url or None,
            "replicas": self._holds(node.name) + self._votes_still(node),
            "leads": self._handover.leads(node.name),
        }
