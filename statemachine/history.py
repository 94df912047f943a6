"""The history of attempts: the newest of those that ended neither in an outcome nor by waiting for steps.

One row per invocation, written when such an attempt ends. An invocation whose attempts all went well has none, and pays
nothing. It is for people; nothing here decides anything.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from holdfast.statemachine.records import Invocation, pack, unpack
from holdfast.statemachine.state import State
from holdfast.statemachine.tables import HISTORY
from holdfast.statemachine.txn import ReadTxn

KEPT: Final = 20
MESSAGE_MAX: Final = 300  # characters of each error; the last failure is kept in full elsewhere


class Ended:
    """How an attempt ended."""

    FAILED: Final = 0
    AGAIN: Final = 1  # its leader changed, or it was handed back: another one took its place
    POSTPONED: Final = 2  # it could not go on, through no fault of its own
    PAUSED: Final = 3  # by an operator
    MOVED: Final = 4  # to another deployment, by an operator
    LOST: Final = 5  # the process of its handler ended, or the stream to it broke


ENDED_NAMES: Final = {
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
    deployment: str | None  # that the invocation was pinned to
    node: str  # that led the partition when it ended
    code: int = 0
    message: str = ""
    kind: str = ""


def remember(state: State, record: Invocation, how: int, failure: list[Any] | None = None) -> None:
    """The running attempt ends like this. To be called before the record says so."""
    if state.level < 2:
        return
    raw = state.get(HISTORY + record.id) if record.lapses else None
    rows: list[Any] = [] if raw is None else unpack(raw)
    code, message, kind = (0, "", "") if failure is None else failure[1:4]
    started_ms, node = record.since_ms, state.meta.leader
    row = EndedAttempt(
        record.epoch, started_ms, state.now_ms, how, record.deployment, node, code, message[:MESSAGE_MAX], kind
    )
    rows.append(row)
    state.put(HISTORY + record.id, pack(rows[-KEPT:]))
    record.lapses += 1
    state.touch(record)


def attempts(txn: ReadTxn, ident: bytes) -> list[EndedAttempt]:
    """Oldest first."""
    raw = txn.get(HISTORY + ident)
    return [] if raw is None else [EndedAttempt(*row) for row in unpack(raw)]
