"""A group's log as pysyncobj's Journal: only the methods that the audited parent still calls.

pysyncobj counts positions from the first entry in its journal. For us that is the base, which stands for all trimmed entries:
position 0 is the base, and position n is the nth entry after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, overload

from holdfast.log.messages import NOOP, Entry, NodeId

if TYPE_CHECKING:
    from holdfast.log.group_log import GroupLog

_BASE_COMMAND: Final = bytes([NOOP])


class Positions:
    __slots__ = ("log",)

    def __init__(self, log: GroupLog) -> None:
        self.log = log

    def add(self, command: bytes, idx: int, term: int) -> None:
        self.log.append((command, idx, term))

    def deleteEntriesFrom(self, entryFrom: int) -> None:  # noqa: N802, N803
        self.log.truncate(self.log.base_index + entryFrom)

    def setRaftCommitIndex(self, raftCommitIndex: int) -> None:  # noqa: N802, N803
        if raftCommitIndex > self.log.commit:
            self.log.set_commit(raftCommitIndex)

    def setCurrentTerm(self, term: int, votedForNodeId: NodeId | None) -> None:  # noqa: N802, N803
        self.log.set_vote(term, votedForNodeId)

    def __len__(self) -> int:
        return self.log.last_index - self.log.base_index + 1

    @overload
    def __getitem__(self, item: int) -> Entry: ...
    @overload
    def __getitem__(self, item: slice) -> Sequence[Entry]: ...
    def __getitem__(self, item: int | slice) -> Entry | Sequence[Entry]:
        log = self.log
        if isinstance(item, slice):
            start, stop, _ = item.indices(len(self))
            found = [self._base_entry()] if start == 0 < stop else []
            low, high = log.base_index + max(start, 1), log.base_index + stop - 1
            while low <= high:
                found += log.entries(low, high)
                low = found[-1][1] + 1
            return found
        index = log.base_index + (item if item >= 0 else len(self) + item)
        return self._base_entry() if index == log.base_index else log.entries(index, index)[0]

    def _base_entry(self) -> Entry:
        return _BASE_COMMAND, self.log.base_index, self.log.base_term
