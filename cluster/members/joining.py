"""Joining: a node forms the cluster with the other founders, or waits to be added, and introduces itself.

A node serves when it has joined: it is in touch with the meta group, knows how many partitions there are, and knows
every deployment that was registered before it started.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

from holdfast.cluster.config import Config, HostPort
from holdfast.cluster.groups import META_GROUP
from holdfast.cluster.members.founding import Forming, FoundingRecord
from holdfast.cluster.members.releases import Releases
from holdfast.cluster.peers.rpc import Refused, Rpc
from holdfast.cluster.registry.metalog import MetaLog
from holdfast.cluster.registry.registry import Registry
from holdfast.log.errors import ProposalError
from holdfast.log.node import LogNode
from holdfast.sdk.ids import NodeId
from holdfast.statemachine.effects import Code
from holdfast.statemachine.members import PutNode
from holdfast.statemachine.meta import MetaCommand

logger = logging.getLogger(__name__)

_POLL_S: Final = 0.01
_AGAIN_S: Final = 1.0
_INTRODUCE_S: Final = 5.0
_PUT_S: Final = 4.0  # Less than the time for which a waiting node waits for our answer (`founding.JOIN_S`).


class Plan(Protocol):
    """How the cluster is made from a backup; `backup.restoring.Plan`."""

    @property
    def commands(self) -> Sequence[MetaCommand]: ...

    def done(self) -> None: ...


class Urls(NamedTuple):
    """The URLs of the doors of a node; empty until they are open."""

    ingress: str = ""
    admin: str = ""


CLOSED: Final = Urls()


class Joining:
    """One per node."""

    def __init__(
        self,
        config: Config,
        record: FoundingRecord,
        log: LogNode,
        rpc: Rpc,
        meta_log: MetaLog,
        registry: Registry,
        releases: Releases,
        plan: Plan | None,
    ) -> None:
        self._config = config
        self._record = record
        self._log = log
        self._meta_log = meta_log
        self._registry = registry
        self._releases = releases
        self._plan = plan
        self.forming = Forming(
            config.data,
            record.founding,
            rpc,
            formed=lambda: META_GROUP in log.host.replicas,
            connected=log.connected,
            introduction=self.introduction,
            refusals=log.refusals,
        )

    async def join(self) -> None:
        """Form the cluster with the other founders or rejoin it, and learn its decisions."""
        await self.forming.wait()
        if META_GROUP not in self._log.host.replicas:
            self._log.create_group(META_GROUP, self._record.founding.founders)
        await self._await_partitions()
        await self._catch_up()

    def done(self) -> None:
        """Drop the plan: the cluster is formed, and its groups exist here."""
        if self._plan is not None:
            self._plan.done()
            self._plan = None

    def why_not_serving(self) -> str:
        if self.forming.waits_for:
            return self.forming.waits_for
        refused = "".join(f"; no link to {peer}: {reason}" for peer, reason in self._log.refusals().items())
        return f"the node is starting, and has not reached the cluster yet{refused}"

    # -- the cluster -------------------------------------------------------------------------------------------------

    async def _await_partitions(self) -> None:
        """Wait until the leader of the meta group has decided, once, how many partitions the cluster has."""
        group, state = self._log.group(META_GROUP), self._registry.state
        while not state.partitions:
            try:
                if not self._record.partitions or self._plan is not None:
                    await self.introduce()
                if group.is_leader and {*self._record.founding.founders} <= {*state.membership.nodes}:
                    await self._found()
            except (ProposalError, TimeoutError) as error:
                logger.debug("founding the cluster: %s", error)
            await asyncio.sleep(_POLL_S)
        self._record.learn(state.partitions)

    async def _found(self) -> None:
        """Found the cluster once, as leader of the meta group. The zones for placing partitions are known only now."""
        founding = self._record.founding
        if self._plan is not None:
            for command in self._plan.commands:
                await self._registry.propose(command)
        elif not founding.restored:  # A cluster that was made from a backup is never made from nothing.
            await self._registry.found(
                cluster=self._config.cluster,
                partitions=self._config.partitions,
                founders=founding.founders,
                replication=self._config.replication,
                level=await self._releases.common_level(founding.founders),
            )

    async def _catch_up(self) -> None:
        """Wait until this node knows the deployments that were registered before it started.

        A restarted node learns only from a leader how much of its log is committed. One that led partitions before that
        would find pinned invocations without their deployment, and pause them.
        """
        while True:
            try:
                await self._meta_log.fresh()
                return
            except ProposalError as error:
                logger.warning("the deployments of the cluster cannot be read yet: %s", error)

    # -- introduction-------------------------------------------------------------------------------------------------

    def introduction(self, urls: Urls = CLOSED) -> tuple[NodeId, str, str, str, str]:
        config = self._config
        address = config.advertise or config.peer
        if not address.port:
            address = HostPort(address.host, self._log.port)
        where = "" if address.host in ("0.0.0.0", "::", "") else str(address)  # No address that another node can reach.
        ingress = config.public_ingress_url or urls.ingress
        return (NodeId(config.node), config.zone, where, ingress, config.public_admin_url or urls.admin)

    async def introduce(self, urls: Urls = CLOSED) -> None:
        """Announce the address of this node to the cluster. Raises a ProposalError or TimeoutError."""
        known = self._registry.state.membership.nodes.get(NodeId(self._config.node))
        mine = self.introduction(urls)
        if known is None or known[: len(mine)] != mine:
            await self._registry.propose(PutNode(*mine), timeout_s=_INTRODUCE_S)

    async def introduce_doors(self, urls: Urls) -> None:
        """Announce the doors of this node to the cluster, however long it takes. Nothing waits for it."""
        while True:
            try:
                await self.introduce(urls)
                return
            except (ProposalError, TimeoutError) as error:
                logger.debug("the cluster is not told where %s is yet: %s", self._config.node, error)
                await asyncio.sleep(_AGAIN_S)

    async def serve_join(self, peer: str, introduction: Any) -> Any:
        """Add a node that waits to join. None: it is added; otherwise the reason why it never will be."""
        name, zone, address, ingress_url, admin_url = introduction
        if name != peer:
            raise Refused("Malformed", f"{peer} introduces itself as {name}")
        known = self._registry.state.membership.nodes.get(name)
        if known is not None and known[: len(introduction)] == tuple(introduction):
            return None
        try:
            outcome = await self._registry.propose(
                PutNode(name=name, zone=zone, address=address, ingress_url=ingress_url, admin_url=admin_url),
                timeout_s=_PUT_S,
            )
        except (ProposalError, TimeoutError) as error:
            raise Refused("Unavailable", str(error)) from None
        return outcome.result.message if outcome.result.code == Code.CONFLICT else None
