"""Completed invocations: how long they are kept, and how they are removed.

Constant load must mean constant disk. Each has a time at which it is removed. If a partition holds too many, or too many
bytes, those with the earliest time go first. A long journal is removed in pieces, so no command takes long.
"""

from __future__ import annotations

from itertools import islice
from typing import Any, Final

from holdfast.sdk.ids import InvocationId
from holdfast.statemachine import blobs, failing, listing, promises, refs, values
from holdfast.statemachine.attempts import UNKNOWN
from holdfast.statemachine.commands import Mode, Purge
from holdfast.statemachine.effects import OK, Code, Result, Status
from holdfast.statemachine.records import (
    End,
    Invocation,
    Meta,
    pack_completed,
    unpack,
    unpack_completed,
    unpack_completed_outcome,
)
from holdfast.statemachine.state import State
from holdfast.statemachine.tables import (
    COMPLETED,
    EXPIRY,
    FAILURE,
    HISTORY,
    JOURNAL,
    TIME_MAX,
    after,
    expiry_key,
    long_bytes,
    step_bytes,
)
from holdfast.statemachine.txn import ReadTxn

#: Steps that one purge removes. The rest of a longer journal is left to the timers.
PURGE_STEPS_MAX: Final = 1000


def keep(state: State, record: Invocation, outcome: list[Any]) -> None:
    ref = refs.in_outcome(outcome)
    if ref is not None:
        blobs.acquire(state, ref)
        record.blob_bytes += refs.size_of(ref)
    raw = pack_completed(record, outcome)
    state.put(COMPLETED + record.id, raw)
    state.put(expiry_key(record.due_ms, record.id), b"")
    if record.retention_ms not in state.retentions:
        state.note_retention(record.retention_ms)
    state.meta.completed += 1
    state.meta.completed_bytes += len(raw) + record.size + record.blob_bytes
    state.remind_of(state.now_ms if is_too_much(state.meta) else record.due_ms)


def is_too_much(meta: Meta) -> bool:
    return meta.completed > meta.completed_max or meta.completed_bytes > meta.completed_bytes_max


def expire(state: State, budget: int) -> None:
    """Remove invocations that are due, or too many: about `budget` keys at most."""
    while budget > 0:
        end = after(EXPIRY) if is_too_much(state.meta) else EXPIRY + long_bytes(min(state.now_ms + 1, TIME_MAX))
        key = next((key for key, _ in islice(state.scan(EXPIRY, end), 1)), None)
        if key is None:
            return
        ident = InvocationId(key[9:])
        raw = state.get(COMPLETED + ident)
        assert raw is not None, "an invocation in the table of expiries exists"
        budget -= _forget(state, unpack_completed(ident, raw), raw, budget)


def _forget(state: State, record: Invocation, raw: bytes, budget: int) -> int:
    """Remove the journal from its end, and the rest with its last step. Returns how many keys were removed."""
    rest = max(record.length - budget, 0)
    for index in range(rest, record.length):
        drop_step(state, record, index)
    removed = record.length - rest
    if rest:
        state.meta.completed_bytes -= len(raw)
        record.length = rest
        raw = pack_completed(record, unpack_completed_outcome(raw))
        state.meta.completed_bytes += len(raw)
        state.put(COMPLETED + record.id, raw)
        return removed
    forget(state, record, raw)
    if record.mode == Mode.WORKFLOW and record.key is not None:
        keyed = state.object(record.oid, record.service, record.key)
        if not keyed.holder:
            removed += values.clear(state, keyed) + promises.clear(state, keyed)
    return removed + 1


def drop_step(state: State, record: Invocation, index: int) -> None:
    """Remove a step of a journal that is being removed, and the values that only it refers to."""
    key = JOURNAL + record.id + step_bytes(index)
    if record.blobs:
        raw = state.get(key)
        assert raw is not None, "a journal has no hole"
        blobs.drop_step(state, record, unpack(raw))
    state.delete(key)


def forget(state: State, record: Invocation, raw: bytes) -> None:
    """Remove everything but its journal."""
    if record.blob_bytes:
        blobs.release(state, refs.in_outcome(unpack_completed_outcome(raw)))
    state.delete(COMPLETED + record.id)
    listing.remove(state, record)
    if record.end > End.SUCCEEDED:
        failing.forget(state, record)
    state.delete(expiry_key(record.due_ms, record.id))
    if record.failures_total or record.lapses:
        state.delete(FAILURE + record.id)
    if record.lapses:
        state.delete(HISTORY + record.id)
    state.meta.completed -= 1
    state.meta.completed_bytes -= len(raw) + record.size + record.blob_bytes
    state.counters(record.service)[Status.COMPLETED] -= 1


def purge(state: State, command: Purge) -> Result:
    if state.load(command.id) is not None:
        return Result(Code.CONFLICT, "the invocation is not completed: cancel or kill it first")
    raw = state.get(COMPLETED + command.id)
    if raw is None:
        return UNKNOWN
    record = unpack_completed(command.id, raw)
    if record.length <= PURGE_STEPS_MAX:
        _forget(state, record, raw, record.length)
        return OK
    state.delete(expiry_key(record.due_ms, record.id))
    record.due_ms = state.now_ms
    state.meta.completed_bytes -= len(raw)
    raw = pack_completed(record, unpack_completed_outcome(raw))
    state.meta.completed_bytes += len(raw)
    state.put(COMPLETED + record.id, raw)
    state.put(expiry_key(record.due_ms, record.id), b"")
    state.remind_of(state.now_ms)
    return OK


def next_due(txn: ReadTxn, meta: Meta) -> int | None:
    if is_too_much(meta):
        return meta.now_ms
    for key, _ in txn.scan(EXPIRY, after(EXPIRY)):
        return int.from_bytes(key[1:9], "big")
    return None
