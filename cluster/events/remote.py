"""Changes of partitions that are not on this node, from nodes that have a replica.

One request per node asks for all partitions that it is asked for. Any replica will do, because all have the same changes at
the same positions; a replica that lags behind only has the newest ones later.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, Protocol, TypeAlias

from holdfast.cluster.partition.changes import Changes, Position, Slice
from holdfast.cluster.peers.rpc import Refused, Rpc, Unanswered
from holdfast.sdk.ids import PartitionNumber

logger = logging.getLogger(__name__)

ASK_S: Final = 2.0
ROWS_MAX: Final = 1000  # in one answer; each has less than two kilobytes.
_METHOD: Final = "changes"


class HasChanges(Protocol):
    @property
    def changes(self) -> Changes: ...


class Replica(Protocol):
    """The part of `cluster.partition.door.Partition` that is used here."""

    @property
    def machine(self) -> HasChanges: ...


#: What to read: by partition, the position after which. None: only where its changes end.
Wanted: TypeAlias = Mapping[PartitionNumber, Position | None]


class Remote:
    """One per node. It also answers the others."""

    def __init__(
        self,
        rpc: Rpc,
        hosted: Mapping[PartitionNumber, Replica],
        *,
        replicas: Callable[[PartitionNumber], Sequence[str]],
        connected: Callable[[], Collection[str]],
    ) -> None:
        """`replicas`: the nodes that have a partition, by the cluster's table."""
        self._rpc = rpc
        self._hosted = hosted
        self._replicas = replicas
        self._connected = connected
        self._turns: dict[PartitionNumber, int] = {}  # Raised when a node could not answer, so that another is asked.
        rpc.serve(_METHOD, self._serve)

    async def read(self, wanted: Wanted) -> dict[PartitionNumber, Slice]:
        """The next changes of partitions. Those that no node can tell now are left out."""
        by_peer: dict[str, list[PartitionNumber]] = defaultdict(list)
        connected = set(self._connected())
        for number in wanted:
            near = [name for name in self._replicas(number) if name in connected]
            if near:
                by_peer[near[self._turns.get(number, 0) % len(near)]].append(number)
        answers = await asyncio.gather(*(self._ask(peer, numbers, wanted) for peer, numbers in by_peer.items()))
        return {number: slice_ for answer in answers for number, slice_ in answer.items()}

    async def _ask(self, peer: str, numbers: list[PartitionNumber], wanted: Wanted) -> dict[PartitionNumber, Slice]:
        found: dict[PartitionNumber, Slice] = {}
        try:
            async with asyncio.timeout(ASK_S):
                answer = await self._rpc.ask(peer, _METHOD, [[number, wanted[number]] for number in numbers])
            for number, rows, position, lost in answer:
                found[PartitionNumber(int(number))] = Slice(
                    [(at, offset, tuple(row)) for at, offset, row in rows], tuple(position), lost
                )
        except (Refused, Unanswered, TimeoutError, TypeError, ValueError) as error:
            logger.debug("%s does not tell the changes of partitions %s: %s", peer, numbers, error)
        for number in numbers:
            if number not in found:
                self._turns[number] = self._turns.get(number, 0) + 1
        return found

    async def _serve(self, peer: str, argument: Any) -> Any:
        answer: list[tuple[Any, ...]] = []
        room = ROWS_MAX
        try:
            for number, position in argument:
                replica = self._hosted.get(number)
                if replica is None:
                    continue
                changes = replica.machine.changes
                if position is None:
                    answer.append((number, (), changes.end, False))
                    continue
                index, count = position
                found = changes.after((int(index), int(count)), room)
                room -= len(found.rows)
                answer.append((number, found.rows, found.position, found.lost))
                await asyncio.sleep(0)
        except (TypeError, ValueError) as error:
            raise Refused("Malformed", f"cannot decode a request for changes from {peer}: {error}") from None
        return answer
