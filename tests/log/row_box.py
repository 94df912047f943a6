"""A journal whose commits make rows."""

from __future__ import annotations

from holdfast.log.group_log import GroupLog
from holdfast.log.journal import Journal
from holdfast.log.messages import COMMANDS, Entry, GroupId, NodeId
from holdfast.log.records import Configuration
from holdfast.log.rows import RECENT, Rows
from holdfast.log.store import Op, Store
from tests.log.journals import everything, flush, write

MEMBERS = Configuration(0, (NodeId("n1"), NodeId("n2"), NodeId("n3")))


MANY = tuple(GroupId(number) for number in range(1, 9))


class Box:
    """A journal of eight groups, and the store under it."""

    def __init__(self, store: Store, rows: Rows | None = None) -> None:
        self.store = store
        self.rows = rows
        self.journal = Journal(store, rows)
        for group in MANY:
            if group not in self.journal.groups:
                self.journal.create(group, MEMBERS).set_vote(1, None)
        self.flush()

    def __getitem__(self, group: int) -> GroupLog:
        return self.journal.groups[GroupId(group)]

    def append(self, *groups: int, size: int = 100) -> None:
        """The next entry of each of them."""
        for group in groups or MANY:
            log = self[group]
            log.append(entry(log, size))

    def flush(self) -> list[Op]:
        return flush(self.journal, self.store)

    def settle(self) -> int:
        """Until nothing is left to do. Returns the number of commits."""
        commits = 0
        while self.journal.dirty:
            self.flush()
            commits += 1
        return commits

    def write(self, *ops: Op) -> None:
        """Bypasses the journal, like a bug or a bad disk."""
        write(self.store, *ops)

    def reopen(self) -> Journal:
        """As after a kill: only committed data remains."""
        self.journal = Journal(self.store, self.rows)
        return self.journal

    @property
    def numbers(self) -> list[int]:
        rows = self.store.scan(RECENT, b"", b"\xff" * 9, bytes_max=1 << 30, count_max=1 << 20)
        return [int.from_bytes(key, "big") for key, _ in rows]

    @property
    def contents(self) -> dict[GroupId, list[Entry]]:
        return {group: everything(log) for group, log in self.journal.groups.items()}


def entry(log: GroupLog, size: int = 100) -> Entry:
    index = log.last_index + 1
    return bytes([COMMANDS]) + b"%d.%d.%d" % (log.group, index, log.term) + bytes(size), index, log.term


def row_key(number: int) -> bytes:
    return number.to_bytes(8, "big")
