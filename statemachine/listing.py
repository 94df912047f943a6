"""Invocations by the time they were created, newest first: one row each, active or completed. Those with tags and those that
fail have more rows, in the same order: see `tags` and `failing`.

Rows are written from level 2 on. Rows of older invocations are added after the level is raised, a slice with every
`FireTimers`. They are found by their journals, which are written through, so a slice is the same wherever a transaction
ends. Until all are added, lists are read from the tables instead (`Meta.indexed`).
"""

from __future__ import annotations

from itertools import islice

from holdfast.sdk.ids import InvocationId
from holdfast.statemachine import failing, tags
from holdfast.statemachine.records import INDEXED, Invocation, Meta, unpack_completed
from holdfast.statemachine.state import State
from holdfast.statemachine.tables import COMPLETED, CREATED, JOURNAL, after, position


def add(state: State, record: Invocation) -> None:
    if state.level >= 2:
        state.put(CREATED + position(record.created_ms, record.id), b"")
        if record.tags:
            tags.add(state, record)


def remove(state: State, record: Invocation) -> None:
    if state.level >= 2:
        state.delete(CREATED + position(record.created_ms, record.id))
        if record.tags:
            tags.remove(state, record)


def begin(state: State) -> None:
    """The level was raised: start to add rows of older invocations."""
    if next(iter(state.scan(JOURNAL, after(JOURNAL))), None) is None:
        state.meta.indexed = INDEXED
    else:
        state.remind_of(state.now_ms)


def next_due(meta: Meta) -> int | None:
    return meta.now_ms if meta.level >= 2 and meta.indexed != INDEXED else None


def add_older(state: State, limit: int) -> None:
    """Add a slice of the invocations created before level 2."""
    meta = state.meta
    if state.level < 2 or meta.indexed == INDEXED:
        return
    for _ in range(limit):
        first = after(JOURNAL + meta.indexed) if meta.indexed else JOURNAL
        key = next((key for key, _ in islice(state.scan(first, after(JOURNAL)), 1)), None)
        if key is None:
            meta.indexed = INDEXED
            return
        meta.indexed = ident = InvocationId(key[1:17])
        record = state.load(ident)
        if record is None:
            raw = state.get(COMPLETED + ident)
            assert raw is not None, "a journal belongs to an invocation"
            record = unpack_completed(ident, raw)
            state.note_retention(record.retention_ms)
        add(state, record)
        failing.add_older(state, record)
