"""Shared by the tests of the journal."""

from __future__ import annotations

from holdfast.log.group_log import GroupLog
from holdfast.log.journal import Journal
from holdfast.log.messages import Entry, GroupId
from holdfast.log.records import header_of
from holdfast.log.store import Op, Store


def flush(journal: Journal, store: Store) -> list[Op]:
    """One commit, from staging to durable. Returns what was written."""
    ops = journal.take_writes()
    write(store, *ops)
    journal.persisted()
    return ops


def write(store: Store, *ops: Op) -> None:
    """Bypasses the journal, like a bug or a bad disk."""
    store.stage(ops)
    store.commit()


def everything(log: GroupLog) -> list[Entry]:
    found: list[Entry] = []
    while (low := log.base_index + 1 + len(found)) <= log.last_index:
        found += log.entries(low, log.last_index)
    return found


def encode_entry(group: GroupId, entry: Entry) -> bytes:
    """An entry as on disk."""
    return header_of(group, entry) + entry[0]
