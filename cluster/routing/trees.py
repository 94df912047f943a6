"""The tree of calls that an invocation belongs to, walked over the partitions.

Journals have the ids of called and sent invocations, and every invocation knows its caller. Neither is indexed: a walk reads
journals in slices, and stops at a bound.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from holdfast.cluster.routing.reader import Reader
from holdfast.sdk.ids import InvocationId, PartitionNumber, partition_of
from holdfast.statemachine.records import Invocation
from holdfast.statemachine.survey import Child

NODES_MAX: Final = 1000
ANCESTORS_MAX: Final = 100
SLICES_MAX: Final = 1000  # of journals, per walk
COUNT_SLICES_MAX: Final = 64  # of one journal, for the number of its calls
AT_A_TIME: Final = 16  # journals that are read at once


class Node(NamedTuple):
    id: InvocationId
    parent: InvocationId | None
    step: int | None  # of its parent, that began it
    service: str
    handler: str
    key: str | None
    record: Invocation | None  # None: it is not known any more


class Tree(NamedTuple):
    root: InvocationId
    nodes: list[Node]  # a parent before its children, and children in the order of their steps
    complete: bool


class Trees:
    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    async def count(self, record: Invocation) -> int | None:
        """The number of invocations that one has called and sent; None: its journal is too long to count, or its node too
        old."""
        if record.length <= 1:
            return 0
        walk = _Walk(self._reader, COUNT_SLICES_MAX)
        if not self._reader.may_ask(partition_of(record.id, self._reader.count)):
            return None
        found = await walk.children(record.id, NODES_MAX * COUNT_SLICES_MAX)
        return len(found) if walk.complete else None

    async def tree(self, record: Invocation) -> Tree:
        """The whole tree, up to NODES_MAX. It always has the path from the root to the invocation."""
        walk = _Walk(self._reader, SLICES_MAX)
        path = await self._path(record, walk)
        nodes = {each.id: _node(each, path[index - 1] if index else None) for index, each in enumerate(path)}
        level = [path[0].id]
        while level:
            below: list[tuple[InvocationId, Child]] = []
            for first in range(0, len(level), AT_A_TIME):
                room = NODES_MAX - len(nodes) - len(below) + len(path)
                some = level[first : first + AT_A_TIME]
                if room <= 0:
                    walk.complete = False
                    break
                found = await asyncio.gather(*(walk.children(ident, room) for ident in some))
                below += [(ident, child) for ident, children in zip(some, found, strict=True) for child in children]
            level = await self._add(nodes, below, walk)
        return Tree(path[0].id, _sorted(path[0].id, nodes), walk.complete)

    async def _path(self, record: Invocation, walk: _Walk) -> list[Invocation]:
        """The invocation and its callers, as far as they are known, outermost first."""
        path = [record]
        while path[0].caller:
            if len(path) > ANCESTORS_MAX:
                walk.complete = False
                break
            callers = await walk.records([path[0].caller])
            if not callers or callers[0].id in {each.id for each in path}:
                break
            path = [callers[0], *path]
        return path

    async def _add(
        self, nodes: dict[InvocationId, Node], below: Sequence[tuple[InvocationId, Child]], walk: _Walk
    ) -> list[InvocationId]:
        """Add the children of one level, and return those whose journals may have more. Some are on the path already."""
        known = {each.id: each for each in await walk.records({child.id for _, child in below})}
        following = []
        seen = set()
        for parent, child in below:
            if child.id in seen:
                continue  # It has several callers, by an idempotency key: it is shown below the first.
            seen.add(child.id)
            record = known.get(child.id)
            node = nodes.get(child.id)
            if node is None:
                if len(nodes) >= NODES_MAX:
                    walk.complete = False
                    continue
                nodes[child.id] = Node(
                    id=child.id,
                    parent=parent,
                    step=child.step,
                    service=child.service,
                    handler=child.handler,
                    key=child.key,
                    record=record,
                )
            elif node.parent != parent:
                continue
            elif node.step is None:
                nodes[child.id] = node._replace(step=child.step)  # A send does not tell it to its invocation.
            if record is not None and record.length > 1:
                following.append(child.id)
        return following


class _Walk:
    """What one walk has read so far."""

    def __init__(self, reader: Reader, slices_max: int) -> None:
        self._reader = reader
        self._left = slices_max
        self.complete = True

    async def children(self, ident: InvocationId, limit: int) -> list[Child]:
        found: list[Child] = []
        number = partition_of(ident, self._reader.count)
        start: int | None = 0
        while start is not None:
            if self._left <= 0 or len(found) >= limit:
                self.complete = False
                return found
            self._left -= 1
            rows, start = await self._reader.ask(number, "children", ident, start, limit - len(found))
            found += rows
            await asyncio.sleep(0)
        return found

    async def records(self, ids: Iterable[InvocationId]) -> list[Invocation]:
        by_partition: dict[PartitionNumber, list[InvocationId]] = {}
        for ident in ids:
            by_partition.setdefault(partition_of(ident, self._reader.count), []).append(ident)
        answers = await asyncio.gather(
            *(self._reader.ask(number, "records", some) for number, some in by_partition.items())
        )
        return [record for answer in answers for record in answer]


def _node(record: Invocation, parent: Invocation | None) -> Node:
    return Node(
        id=record.id,
        parent=parent.id if parent is not None else None,
        step=record.caller_step if parent is not None and record.caller_step >= 0 else None,
        service=record.service,
        handler=record.handler,
        key=record.key,
        record=record,
    )


def _sorted(root: InvocationId, nodes: dict[InvocationId, Node]) -> list[Node]:
    """A parent before its children, in the order of their steps."""
    below: dict[InvocationId, list[Node]] = {}
    for node in nodes.values():
        if node.parent is not None:
            below.setdefault(node.parent, []).append(node)
    found, left = [], [nodes[root]]
    while left:
        node = left.pop()
        found.append(node)
        left += sorted(below.get(node.id, ()), key=_step, reverse=True)
    return found


def _step(node: Node) -> int:
    return -1 if node.step is None else node.step
