"""The newest changes of a partition's invocations, from which every node makes events for those who watch.

Every replica applies the same entries, so every replica has the same changes at the same positions, and a reader may
continue on another node. They are in memory alone: a reader that comes back too late is told so, and reads the state.
A change shows the state after its entry. Several changes of one invocation by one entry are one change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple, TypeAlias

from holdfast.sdk.ids import InvocationId
from holdfast.statemachine.effects import Status
from holdfast.statemachine.records import End, Invocation

#: Kept on a node that has every partition. A change takes about half a kilobyte.
KEPT_MAX: Final = 32 * 1024
KEPT_MIN: Final = 16  # Of each partition, however many there are.
#: After all changes of an entry.
ALL: Final = 2**32 - 1

#: (index of an entry, how many of its changes): everything up to there was read.
Position: TypeAlias = tuple[int, int]


class Change(NamedTuple):
    """An invocation after an entry. The fields before `status` never change. They are sent between nodes: new ones go to
    the end, with a default."""

    id: InvocationId
    service: str
    handler: str
    key: str | None
    created_ms: int
    caller: InvocationId | None
    status: int
    epoch: int
    since_ms: int
    end: int
    step_failures: int

    @property
    def shown_status(self) -> Status:
        """As in `queries.shown_status`."""
        status = Status(self.status)
        failing = self.step_failures and status in (Status.RUNNING, Status.SUSPENDED)
        return Status.BACKING_OFF if failing else status

    @property
    def shown_end(self) -> End:
        return End(self.end)


#: The fields of a `Change`.
Row: TypeAlias = tuple[Any, ...]


def rows_of(moved: Iterable[Invocation]) -> list[Row]:
    """What an entry changed. The records themselves change again, so the fields are copied: one by one, since that takes a
    tenth of a microsecond per record, and `attrgetter` four times as long."""
    return [
        (
            it.id, it.service, it.handler, it.key, it.created_ms, it.caller,
            it.status, it.epoch, it.since_ms, it.end, it.step_failures,
        )
        for it in moved
    ]  # fmt: skip


#: The index of an entry, the number of the change in it (from 1), and the change.
Numbered: TypeAlias = tuple[int, int, Row]


class Slice(NamedTuple):
    rows: Sequence[Numbered]
    position: Position  # after them
    lost: bool = False  # Changes between the position that was asked for and this one are not known any more.


class Changes:
    """Of one partition. Everything runs on the event loop's thread."""

    def __init__(self, applied: int, *, partitions: int) -> None:
        """`applied`: the index of the newest entry in the state. `partitions`: of the cluster."""
        self._kept_max = max(KEPT_MAX // partitions, KEPT_MIN)
        self.restart(applied)

    def restart(self, applied: int) -> None:
        """The state was replaced by a later one, so the changes in between are unknown."""
        self._entries: deque[tuple[int, list[Row]]] = deque()
        self._kept = 0
        self._floor = applied  # Changes up to this entry are gone.
        self.applied = applied

    def extend(self, applied: int, entries: Sequence[tuple[int, list[Row]]]) -> None:
        """Add what a committed transaction changed. `applied`: the index of its last entry."""
        self.applied = applied
        mine = self._entries
        for entry in entries:
            mine.append(entry)
            self._kept += len(entry[1])
        while self._kept > self._kept_max and len(mine) > 1:
            self._floor, rows = mine.popleft()
            self._kept -= len(rows)

    @property
    def end(self) -> Position:
        return self.applied, ALL

    def after(self, position: Position, limit: int) -> Slice:
        """The next changes after a position, which may be ahead of this replica."""
        end = self.end
        if position >= end:
            return Slice((), position)
        index, number = position
        if index < self._floor:
            return Slice((), end, lost=True)
        entries = self._entries
        first = len(entries)
        while first and entries[first - 1][0] >= index:  # From the end: nearly every reader is close to it.
            first -= 1
        found: list[Numbered] = []
        for at, rows in islice(entries, first, None):
            skipped = number if at == index else 0
            for offset, row in enumerate(rows[skipped:], skipped + 1):
                if len(found) == limit:
                    return Slice(found, found[-1][:2] if found else position)
                found.append((at, offset, row))
        return Slice(found, end)
