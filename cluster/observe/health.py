"""The health of a node that has joined: why requests may fail, and warnings for its operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from holdfast.cluster.certificates import Certificates
from holdfast.cluster.members.handover import Handover
from holdfast.cluster.members.removal import Removal
from holdfast.cluster.registry.machine import MetaMachine
from holdfast.cluster.routing.arrears import Arrears
from holdfast.cluster.routing.router import Router
from holdfast.log.node import LogNode
from holdfast.sdk.ids import NodeId, PartitionNumber, numbers_of
from holdfast.statemachine.members import REMOVED
from holdfast.statemachine.pauses import describe, resume_command

PAUSES_SHOWN: Final = 5


class Health:
    """One per node."""

    def __init__(
        self,
        node: NodeId,
        *,
        log: LogNode,
        meta: MetaMachine,
        removal: Removal,
        certificates: Certificates,
        router: Router,
        handover: Handover,
        arrears: Arrears,
        webhooks: Callable[[], list[str]],
    ) -> None:
        self._node = node
        self._log = log
        self._meta = meta
        self._removal = removal
        self._certificates = certificates
        self._router = router
        self._handover = handover
        self._arrears = arrears
        self._webhooks = webhooks
        self._stopping = False

    def stopping(self) -> None:
        """Report from now on that the node shuts down."""
        self._stopping = True

    def unhealthy(self) -> str | None:
        """Why requests may fail here now; None: they should not."""
        if self._stopping:
            return "the node is shutting down"
        if self._removal.why:
            return self._removal.why
        mine = self._meta.state.membership.nodes.get(self._node)
        if mine is not None and mine.state == REMOVED:
            return (
                "this node is being removed from the cluster: it must run until it holds nothing, and stops by itself"
            )
        # A replica keeps the leader it last heard of, which means nothing if that node cannot be reached.
        near = {self._node, *self._log.connected()}
        headless = [number for number in self._partitions if self._router.leader(number) not in near]
        if headless:
            return f"partitions without a leader: {headless}"
        if self._arrears.numbers:
            return f"catching up after this node was away, in partitions {sorted(self._arrears.numbers)}"
        if (stalled := self._log.why_stalled()) is not None:
            return f"committed entries cannot be applied: {stalled}"
        full = self._log.why_no_room()
        has_room, replicas = self._handover.has_room, self._meta.replicas
        if full is not None and not all(has_room(replicas(number)) for number in self._partitions):
            return f"no disk space on this node, nor on the nodes that could lead instead: {full}"
        return None

    def warnings(self) -> list[str]:
        """Problems that need an operator although requests are served."""
        found = self._certificates.warnings()
        full = self._log.why_no_room()
        if full is not None:
            found.append(f"no disk space on this node, so it leads no partitions: {full}")
        elsewhere = sorted(self._handover.full - {self._node})
        found += [f"the disk of {name} is full, so it leads no partitions" for name in elsewhere]
        return found + self._pauses() + self._webhooks()

    def _pauses(self) -> list[str]:
        standing = list(self._meta.state.pauses.by_scope.values())
        found = [f"{describe(each)}; `{resume_command(each.scope)}` ends it" for each in standing[:PAUSES_SHOWN]]
        if len(standing) > PAUSES_SHOWN:
            found.append(f"{len(standing) - PAUSES_SHOWN} more pauses are in force: `holdfast pause --list` shows them")
        return found

    @property
    def _partitions(self) -> Sequence[PartitionNumber]:
        return numbers_of(self._router.count)
