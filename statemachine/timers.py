"""Timers, by due time. A timer is kept until it fires, or until nothing waits for it.

The key of a timer ends in the number of a step. Timers that do not concern a step have a mark there, from the top of the
range, which no step reaches. So the timers of all releases are rows of one table, in one format. A new kind needs a
level, because an older release takes its mark for a step.
"""

from __future__ import annotations

from enum import Enum, auto
from itertools import islice
from typing import Final, NamedTuple

from holdfast.sdk.ids import InvocationId, ObjectId
from holdfast.statemachine.state import State
from holdfast.statemachine.tables import STEP_END, TIME_MAX, TIMER, after, long_bytes, timer_key
from holdfast.statemachine.txn import ReadTxn


class Kind(Enum):
    """What a timer does when it fires."""

    STEP = auto()  # A sleep is over, or a failed RUN may be tried again.
    INVOCATION = auto()  # An invocation starts, or its next attempt does.
    PROMISES = auto()  # The promises of a workflow that never began are forgotten.


class Timer(NamedTuple):
    due_ms: int
    kind: Kind
    id: InvocationId | ObjectId  # PROMISES: of the object; otherwise of the invocation
    step: int = 0  # STEP alone


_MARKS: Final = {Kind.INVOCATION: 0xFFFFFFFF, Kind.PROMISES: 0xFFFFFFFE}
_KINDS: Final = {mark: kind for kind, mark in _MARKS.items()}
assert {*_MARKS} == {*Kind} - {Kind.STEP} and min(_KINDS) >= STEP_END


def of_step(due_ms: int, invocation: InvocationId, step: int) -> Timer:
    return Timer(due_ms, Kind.STEP, invocation, step)


def of_invocation(due_ms: int, invocation: InvocationId) -> Timer:
    return Timer(due_ms, Kind.INVOCATION, invocation)


def of_promises(due_ms: int, oid: ObjectId) -> Timer:
    return Timer(due_ms, Kind.PROMISES, oid)


def pack_key(timer: Timer) -> bytes:
    mark = timer.step if timer.kind is Kind.STEP else _MARKS[timer.kind]
    assert (mark < STEP_END) == (timer.kind is Kind.STEP), "no journal is as long as that"
    return timer_key(timer.due_ms, timer.id, mark)


def unpack_key(key: bytes) -> Timer:
    due_ms, ident, mark = int.from_bytes(key[1:9], "big"), key[9:25], int.from_bytes(key[25:], "big")
    if mark < STEP_END:
        return Timer(due_ms, Kind.STEP, InvocationId(ident), mark)
    kind = _KINDS[mark]
    return Timer(due_ms, kind, ObjectId(ident) if kind is Kind.PROMISES else InvocationId(ident))


def due_in(state: State, delay_ms: int) -> int:
    return min(state.now_ms + max(delay_ms, 0), TIME_MAX)


def arm(state: State, timer: Timer) -> None:
    state.put(pack_key(timer), b"")
    state.remind_of(timer.due_ms)


def disarm(state: State, timer: Timer) -> None:
    state.delete(pack_key(timer))


def take_due(state: State, limit: int) -> list[Timer]:
    """Remove and return at most `limit` timers that are due by now, earliest first."""
    end = TIMER + long_bytes(min(state.now_ms + 1, TIME_MAX))
    keys = [key for key, _ in islice(state.scan(TIMER, end), limit)]
    for key in keys:
        state.delete(key)
    return [unpack_key(key) for key in keys]


def next_due(txn: ReadTxn) -> int | None:
    for key, _ in txn.scan(TIMER, after(TIMER)):
        return int.from_bytes(key[1:9], "big")
    return None


def count_due(txn: ReadTxn, now_ms: int, limit: int) -> tuple[int, int]:
    """(how many timers are due at this time, at most `limit`; when the oldest of them was due, or 0)."""
    end = TIMER + long_bytes(min(now_ms + 1, TIME_MAX))
    due = [int.from_bytes(key[1:9], "big") for key, _ in islice(txn.scan(TIMER, end), limit)]
    return len(due), due[0] if due else 0
