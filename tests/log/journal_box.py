"""A journal that can be closed, opened again and damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from holdfast.log.group_log import GroupLog
from holdfast.log.journal import Journal
from holdfast.log.messages import COMMANDS, Entry, GroupId, NodeId
from holdfast.log.records import Configuration
from holdfast.log.rows import Rows
from holdfast.log.store import LmdbStore, Op, Store
from tests.log.journals import flush, write

G = GroupId(7)


MEMBERS = Configuration(0, (NodeId("n1"), NodeId("n2"), NodeId("n3")))


class Box:
    """A journal and the store under it, which can be closed and opened again."""

    def __init__(self, open_store: Callable[[], Store], rows: Rows | None = None) -> None:
        self._open = open_store
        self._rows = rows
        self.store = open_store()
        self.journal = Journal(self.store, rows)

    @property
    def log(self) -> GroupLog:
        return self.journal.groups[G]

    def create(self) -> GroupLog:
        return self.journal.create(G, MEMBERS)

    def flush(self) -> list[Op]:
        """One commit, from staging to durable. Returns what was written."""
        return flush(self.journal, self.store)

    def write(self, *ops: Op) -> None:
        """Bypasses the journal, like a bug or a bad disk."""
        write(self.store, *ops)

    def reopen(self) -> GroupLog:
        self.store.close()
        self.store = self._open()
        self.journal = Journal(self.store, self._rows)
        return self.log


def on_lmdb(path: Path) -> LmdbStore:
    return LmdbStore.open(path / "data", node="n1", cluster="c1")


def entry(index: int, term: int = 1, size: int = 8) -> Entry:
    return bytes([COMMANDS]) + b"%d.%d" % (index, term) + bytes(size), index, term


def key(index: int) -> bytes:
    return index.to_bytes(8, "big")


def fill(log: GroupLog, first: int, last: int, term: int = 1, size: int = 8) -> None:
    if term > log.term:
        log.set_vote(term, None)
    for index in range(first, last + 1):
        log.append(entry(index, term, size))
