"""Timers, by due time. They are kept until they fire or until nobody waits for them."""

from __future__ import annotations

from itertools import islice

from holdfast.statemachine.state import State
from holdfast.statemachine.tables import NO_STEP, TIME_MAX, TIMER, after, long_bytes, timer_key
from holdfast.statemachine.txn import ReadTxn


def due_in(state: State, delay_ms: int) -> int:
    return min(state.now_ms + max(delay_ms, 0), TIME_MAX)


def arm(state: State, due_ms: int, ident: bytes, step: int = NO_STEP) -> None:
    state.put(timer_key(due_ms, ident, step), b"")
    state.remind_of(due_ms)


def disarm(state: State, due_ms: int, ident: bytes, step: int = NO_STEP) -> None:
    state.delete(timer_key(due_ms, ident, step))


def take_due(state: State, limit: int) -> list[tuple[int, bytes, int]]:
    """At most `limit` timers that are due by now, earliest first, removed: (due, invocation, step)."""
    end = TIMER + long_bytes(min(state.now_ms + 1, TIME_MAX))
    keys = [key for key, _ in islice(state.scan(TIMER, end), limit)]
    for key in keys:
        state.delete(key)
    return [(int.from_bytes(key[1:9], "big"), key[9:25], int.from_bytes(key[25:], "big")) for key in keys]


def next_due(txn: ReadTxn) -> int | None:
    for key, _ in txn.scan(TIMER, after(TIMER)):
        return int.from_bytes(key[1:9], "big")
    return None
