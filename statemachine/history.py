"""The history of attempts: the newest of those that ended neither in an outcome nor by waiting for steps.

Each invocation has at most one row, written when such an attempt ends. An invocation whose attempts all went well has
none and costs nothing. The history is for people; nothing is decided by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Final, NamedTuple

from holdfast.sdk.ids import DeploymentId, InvocationId
from holdfast.statemachine.outcomes import Packed, failure_of
from holdfast.statemachine.records import Invocation, pack, unpack
from holdfast.statemachine.state import State
from holdfast.statemachine.tables import HISTORY
from holdfast.statemachine.txn import ReadTxn

KEPT: Final = 20
MESSAGE_MAX: Final = 300  # characters of each error; the last failure is kept in full elsewhere


class Ended(IntEnum):
    """How an attempt ended."""

    FAILED = 0
    AGAIN = 1  # its leader changed, or it was handed back, and another attempt replaced it
    POSTPONED = 2  # it could not continue, through no fault of its own
    PAUSED = 3  # by an operator
    MOVED = 4  # to another deployment, by an operator
    LOST = 5  # the process of its handler ended, or the stream to it broke


ENDED_NAMES: Final[Mapping[int, str]] = {
    Ended.FAILED: "failed",
    Ended.AGAIN: "dispatched again",
    Ended.POSTPONED: "postponed",
    Ended.PAUSED: "paused",
    Ended.MOVED: "moved",
    Ended.LOST: "lost",
}


class EndedAttempt(NamedTuple):
    epoch: int
    started_ms: int
    ended_ms: int
    how: int
    deployment: DeploymentId | None  # that the invocation was pinned to
    node: str  # that led the partition when it ended
    code: int = 0
    message: str = ""
    kind: str = ""


def remember(state: State, record: Invocation, how: Ended, failure: Packed | None = None) -> None:
    """Record how the running attempt ends. Call it before the record of the invocation changes."""
    if state.level < 2:
        return
    raw = state.get(HISTORY + record.id) if record.lapses else None
    rows: list[Any] = [] if raw is None else unpack(raw)
    found = None if failure is None else failure_of(failure)
    code, message, kind = (0, "", "") if found is None else found[:3]
    started_ms, node = record.since_ms, state.meta.leader
    row = EndedAttempt(
        epoch=record.epoch,
        started_ms=started_ms,
        ended_ms=state.now_ms,
        how=how,
        deployment=record.deployment,
        node=node,
        code=code,
        message=message[:MESSAGE_MAX],
        kind=kind,
    )
    rows.append(row)
    state.put(HISTORY + record.id, pack(rows[-KEPT:]))
    record.lapses += 1
    state.touch(record)


def attempts(txn: ReadTxn, ident: InvocationId) -> list[EndedAttempt]:
    """Oldest first."""
    raw = txn.get(HISTORY + ident)
    return [] if raw is None else [EndedAttempt(*row) for row in unpack(raw)]
