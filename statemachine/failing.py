"""Invocations that failed, or that fail now: one row each, newest first, so that nobody reads all others to find them.

An active invocation has a row from its first failure on, and a completed one if it did not succeed, under the code that it
ended with. An invocation without any failure has none and costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final

from holdfast.statemachine.effects import Status
from holdfast.statemachine.records import End, Invocation
from holdfast.statemachine.state import State
from holdfast.statemachine.tables import FAILING, FAILURE, after, position, step_bytes
from holdfast.statemachine.txn import ReadTxn

#: The rows of active invocations, whatever they fail with: the next attempt may fail with another code.
ACTIVE: Final = 0
_CODE_END: Final = 2**32 - 1
_CODE_BYTES: Final = 4


def rows_of(code: int) -> bytes:
    """The prefix of the rows of one code. The position follows."""
    return FAILING + step_bytes(code)


def rows_ended(code: int) -> bytes:
    """The prefix of the rows of invocations that completed with this code."""
    return rows_of(min(max(code, ACTIVE + 1), _CODE_END))


def codes(txn: ReadTxn) -> Iterator[int]:
    """The codes that have rows."""
    first, end = FAILING, after(FAILING)
    while (found := next((key for key, _ in islice(txn.scan(first, end), 1)), None)) is not None:
        code = int.from_bytes(found[1 : 1 + _CODE_BYTES], "big")
        yield code
        first = after(rows_of(code))


def _key(record: Invocation) -> bytes:
    prefix = rows_ended(record.code) if record.status == Status.COMPLETED else rows_of(ACTIVE)
    return prefix + position(record.created_ms, record.id)


def note(state: State, record: Invocation) -> None:
    """An active invocation has a failure."""
    if state.level >= 2 and not record.in_failing:
        record.in_failing = True
        state.put(_key(record), b"")
        state.touch(record)


def forgive(state: State, record: Invocation) -> None:
    """The invocation, which has a row, is about to complete."""
    state.delete(_key(record))
    record.in_failing = False


def keep(state: State, record: Invocation) -> None:
    """The invocation is completed. One that succeeded gets no row."""
    if state.level >= 2 and record.end > End.SUCCEEDED:
        state.put(_key(record), b"")


def forget(state: State, record: Invocation) -> None:
    """A completed invocation is removed, which did not succeed."""
    if state.level >= 2:
        state.delete(_key(record))


def add_older(state: State, record: Invocation) -> None:
    """Add the row of an invocation of before level 2, if it has one."""
    if record.status == Status.COMPLETED:
        keep(state, record)
    elif state.get(FAILURE + record.id) is not None:  # Level 1 did not count all attempts that wrote one.
        note(state, record)
