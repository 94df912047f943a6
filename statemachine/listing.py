"""Invocations by the time they were created, newest first: one row each, active or completed.

Rows are written from level 2 on. Rows of older invocations are added after the level is raised, a slice with every
`FireTimers`. They are found by their journals, which are written through, so a slice is the same wherever a transaction
ends. Until all are added, lists are read from the tables instead (`Meta.indexed`).
"""

from __future__ import annotations

from itertools import islice
from typing import Final

from holdfast.sdk.ids import InvocationId
from holdfast.statemachine.records import INDEXED, Invocation, Meta, unpack_completed
from holdfast.statemachine.state import State
from holdfast.statemachine.tables import COMPLETED, CREATED, JOURNAL, TIME_MAX, after, long_bytes

POSITION_BYTES: Final = 24


def position(created_ms: int, ident: InvocationId) -> bytes:
    """The position of an invocation among all, newest first. Positions compare as bytes."""
    return long_bytes(TIME_MAX - min(max(created_ms, 0), TIME_MAX)) + ident


def created_at(where: bytes) -> int:
    """When the invocation at a position was created."""
    return TIME_MAX - int.from_bytes(where[:8], "big")


def add(state: State, record: Invocation) -> None:
    if state.level >= 2:
        state.put(CREATED + position(record.created_ms, record.id), b"")


def remove(state: State, record: Invocation) -> None:
    if state.level >= 2:
        state.delete(CREATED + position(record.created_ms, record.id))


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
        add(state, record)
