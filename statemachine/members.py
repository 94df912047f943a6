"""The nodes of the cluster, and which nodes hold which partition. Part of the meta group's state, and as pure as the rest
of it.

The table says what *is*, not what is wanted. A change is made in the partition's own log, by sealing, and recorded here
afterwards. Its epoch is the epoch of that log, so late news can be told from new. The next change follows from the table
and the nodes (`next_change`), so the controller needs no memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

from holdfast.sdk.ids import NodeId, PartitionNumber, numbers_of
from holdfast.statemachine.effects import Code, Result

ACTIVE: Final = "active"
DRAINING: Final = "draining"  # Leads nothing.
LEAVING: Final = "leaving"  # Leads nothing, and its replicas move away.
REMOVED: Final = "removed"  # Permanent: what it acknowledged may be lost, so its name is not used again.
STATES: Final = (ACTIVE, DRAINING, LEAVING, REMOVED)

NODES_MAX: Final = 1000  # The removed ones included.
MEMBERS_MAX: Final = 15  # Of one group, as in the log.


class Member(NamedTuple):
    """A node as the others know it. The zone is its failure domain: a host or a rack; empty: the node is its own."""

    name: NodeId
    zone: str
    address: str  # host:port of its peer link
    ingress_url: str = ""
    admin_url: str = ""
    state: str = ACTIVE

    @property
    def place(self) -> str:
        """Two nodes of one place fail together."""
        return f"zone {self.zone}" if self.zone else f"node {self.name}"


class Replicas(NamedTuple):
    members: tuple[NodeId, ...]  # sorted
    epoch: int = 0


class PutNode(NamedTuple):
    """A node tells its address, or an operator adds a node. The state of a known node stays."""

    name: NodeId
    zone: str
    address: str
    ingress_url: str = ""
    admin_url: str = ""


class SetNodeState(NamedTuple):
    name: NodeId
    state: str


class AssignPartition(NamedTuple):
    """The log of a partition has had these members since this epoch."""

    partition: PartitionNumber
    members: list[NodeId]
    epoch: int


class Membership:
    def __init__(self) -> None:
        self.nodes: dict[NodeId, Member] = {}
        self.table: dict[PartitionNumber, Replicas] = {}
        #: The table at the founding. A founder that missed the beginning creates its groups from it.
        self.first: dict[PartitionNumber, tuple[NodeId, ...]] = {}
        self.replication = 0

    def found(self, *, partitions: int, founders: Sequence[NodeId], replication: int) -> None:
        self.replication = replication
        known = [self.nodes.get(name) or Member(name, "", "") for name in sorted(dict.fromkeys(founders))]
        load: Counter[NodeId] = Counter()
        for partition in numbers_of(partitions):
            chosen: list[Member] = []
            while len(chosen) < min(replication, len(known)):
                rest = [node for node in known if node not in chosen]
                chosen.append(min(rest, key=lambda node: _cost(node, chosen, load)))
                load[chosen[-1].name] += 1
            members = tuple(sorted(node.name for node in chosen))
            self.table[partition] = Replicas(members)
            self.first[partition] = members

    def place(self, placement: Sequence[Sequence[NodeId]], replication: int) -> None:
        """As `found`, where the places are given."""
        self.replication = replication
        for partition, names in zip(numbers_of(len(placement)), placement, strict=True):
            self.first[partition] = members = tuple(sorted(names))
            self.table[partition] = Replicas(members)

    def put(self, command: PutNode) -> Result:
        known = self.nodes.get(command.name)
        if known is None and len(self.nodes) >= NODES_MAX:
            return Result(Code.FULL, f"there are {NODES_MAX} nodes already")
        if known is not None and known.state == REMOVED:
            return Result(
                Code.CONFLICT,
                f"{command.name} was removed from the cluster, and names are not reused: choose another name",
            )
        new = Member(*command, state=known.state if known is not None else ACTIVE)
        if new == known:
            return Result(Code.UNCHANGED, "unchanged")
        self.nodes[command.name] = new
        return Result()

    def set_state(self, command: SetNodeState) -> Result:
        known = self.nodes.get(command.name)
        if known is None:
            return Result(Code.NOT_FOUND, f"there is no node {command.name}")
        if known.state == command.state:
            return Result(Code.UNCHANGED, "unchanged")
        if known.state == REMOVED:
            return Result(Code.CONFLICT, f"{command.name} was removed from the cluster")
        if command.state not in STATES:
            return Result(Code.CONFLICT, f"there is no such state: {command.state:.50}")
        staying = [node for node in self.nodes.values() if node.state in (ACTIVE, DRAINING)]
        if command.state in (LEAVING, REMOVED) and known.state in (ACTIVE, DRAINING) and len(staying) == 1:
            return Result(Code.CONFLICT, f"{command.name} is the last node")
        self.nodes[command.name] = known._replace(state=command.state)
        return Result()

    def assign(self, command: AssignPartition) -> Result:
        known = self.table.get(command.partition)
        if known is None:
            return Result(Code.NOT_FOUND, f"there is no partition {command.partition}")
        if command.epoch <= known.epoch:
            return Result(Code.UNCHANGED, "known already")
        self.table[command.partition] = Replicas(tuple(sorted(command.members)), command.epoch)
        return Result()

    def pack(self) -> list[Any]:
        return [
            [tuple(node) for node in self.nodes.values()],
            [(number, *replicas) for number, replicas in self.table.items()],
            list(self.first.items()),
            self.replication,
        ]

    @classmethod
    def unpack(cls, row: Sequence[Any]) -> Membership:
        made = cls()
        nodes, table, first, made.replication = row
        made.nodes = {name: Member(name, *rest) for name, *rest in nodes}
        made.table = {number: Replicas(tuple(members), epoch) for number, members, epoch in table}
        made.first = {number: tuple(members) for number, members in first}
        return made


# -- what to change next ----------------------------------------------------------------------------------------------


def next_change(
    membership: Membership,
    number: PartitionNumber,
    *,
    ready: Collection[NodeId],
    present: Collection[NodeId],
    moving: Mapping[PartitionNumber, Sequence[NodeId]] | None = None,
) -> tuple[NodeId, ...] | None:
    """The members that a partition should have after one change: one more, one less or one replaced. None: no change is
    needed.

    `ready` are the nodes that can take a replica now, `present` those that can be reached; `moving` is the planned
    members of other partitions. A live replica is never given up for a better place while another one cannot be reached:
    an unfinished copy does not replace a finished one.
    """
    nodes, members = membership.nodes, membership.table[number].members
    load: Counter[NodeId] = Counter()
    for other, replicas in membership.table.items():
        load.update((moving or {}).get(other, replicas.members))
    staying = sorted(node.name for node in nodes.values() if node.state in (ACTIVE, DRAINING))
    size = min(membership.replication, len(staying), MEMBERS_MAX)
    free = [nodes[name] for name in staying if nodes[name].state == ACTIVE and name in ready and name not in members]
    here = [nodes.get(name) or Member(name, "", "", state=REMOVED) for name in members]
    lost = [node for node in here if node.name not in present]
    gone = sorted((node for node in here if node.state in (LEAVING, REMOVED)), key=lambda node: node not in lost)

    def changed(out: Member | None, into: Member | None) -> tuple[NodeId, ...]:
        if len(members) == 1 and into is not None:
            out = None  # The leader of a change must still be a member after it: first two members, then the new one alone.
        names = {*members} - ({out.name} if out is not None else set())
        return tuple(sorted(names | ({into.name} if into is not None else set())))

    def best(rest: Sequence[Member]) -> Member | None:
        return min(free, key=lambda node: _cost(node, rest, load)) if free else None

    if gone:
        out = gone[0]
        into = best([node for node in here if node is not out])
        if into is not None or (len(members) > size and len(members) > 1):
            return changed(out, into if len(members) <= size else None)
        return None
    if len(members) < size:
        into = best(here)
        return changed(None, into) if into is not None else None
    crowded = sorted(here, key=lambda node: (-_together(node, here), -load[node.name], node.name))
    if len(members) > size:
        return changed((lost or crowded)[0], None)
    if lost:
        return None  # It comes back, or an operator removes it and it is replaced.
    # All are present: look for better places. Each change lowers the compared value, so this ends.
    for out in crowded:
        rest = [node for node in here if node is not out]
        into = best(rest)
        if into is not None:
            nearer, farther = _together(out, rest), _together(into, rest)
            if farther < nearer or (farther == nearer and load[out.name] - load[into.name] >= 2):
                return changed(out, into)
    return None


def _together(node: Member, others: Sequence[Member]) -> int:
    """The number of others in the same place."""
    return sum(other.place == node.place for other in others if other is not node)


def _cost(node: Member, others: Sequence[Member], load: Counter[NodeId]) -> tuple[int, int, str]:
    return (_together(node, others), load[node.name], node.name)
