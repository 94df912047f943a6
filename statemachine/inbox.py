"""Reading the inbox of a partition: approvals that wait, one approval whatever became of it, and how many there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from holdfast.sdk.ids import ID_BYTES, InvocationId
from holdfast.sdk.journal import DETAILS_BYTES_MAX, Op
from holdfast.statemachine import queries
from holdfast.statemachine.approvals import Asked, Row
from holdfast.statemachine.effects import Status
from holdfast.statemachine.outcomes import is_success, payload_of
from holdfast.statemachine.records import unpack
from holdfast.statemachine.tables import APPROVAL, JOURNAL, after, approval_key, step_bytes
from holdfast.statemachine.txn import ReadTxn

#: The most rows that one call examines: a few milliseconds.
LOOKED_AT_MAX: Final = 500
RANK_BYTES: Final = 8 + ID_BYTES + 4
#: Of a payload in a list. A longer one is left out; `approval` has it.
LISTED_BYTES_MAX: Final = 4 * 1024

WAITING: Final = "waiting"
DECIDED: Final = "decided"
TIMED_OUT: Final = "timed-out"
WITHDRAWN: Final = "withdrawn"  # The code does not wait for it any more.
CANCELLED: Final = "cancelled"
GONE: Final = "gone"  # Its invocation ended first.
_OUTCOME: Final = 5  # in a packed step
_ABANDONED: Final = 6


class Wanted(NamedTuple):
    """The conditions of a list of approvals. None: no condition. It travels between nodes: new fields go to the end."""

    service: str | None = None
    assignee: str | None = None
    key: str | None = None
    before_ms: int | None = None  # asked before this time
    due_before_ms: int | None = None  # with a deadline before this time


class Approval(NamedTuple):
    """An approval for people. It travels between nodes: new fields go to the end, with a default."""

    invocation: InvocationId
    step: int
    step_key: str
    service: str
    handler: str
    key: str | None
    title: str
    payload: bytes | None  # None: it is left out
    payload_bytes: int
    choices: Sequence[str]
    assignee: str | None
    editable: bool
    secret: bytes
    since_ms: int
    due_ms: int
    remind_ms: int
    reminded_ms: int
    status: str
    decided: bytes | None = None  # see `sdk.journal.Decided`


def approvals(
    txn: ReadTxn, wanted: Wanted, after_rank: bytes, limit: int
) -> tuple[list[tuple[bytes, Approval]], bytes | None]:
    """Approvals that wait, with their ranks, in the order in which they were asked."""
    found: list[tuple[bytes, Approval]] = []
    first = APPROVAL + after_rank + b"\0" if after_rank else APPROVAL
    for looked_at, (key, raw) in enumerate(txn.scan(first, after(APPROVAL)), start=1):
        since_ms = int.from_bytes(key[1:9], "big")
        if wanted.before_ms is not None and since_ms >= wanted.before_ms:
            return found, None  # All others were asked later.
        row = Row(*unpack(raw))
        if (
            wanted.service in (None, row.service)
            and wanted.assignee in (None, row.assignee)
            and wanted.key in (None, row.key)
        ):
            ident, index = InvocationId(key[9 : 9 + ID_BYTES]), int.from_bytes(key[9 + ID_BYTES :], "big")
            one = approval(txn, ident, index, bytes_max=LISTED_BYTES_MAX)
            if one is not None and (wanted.due_before_ms is None or 0 < one.due_ms < wanted.due_before_ms):
                found.append((key[1:], one))
        if len(found) >= limit or looked_at >= LOOKED_AT_MAX:
            return found, key[1:]
    return found, None


def approval(txn: ReadTxn, ident: InvocationId, index: int, *, bytes_max: int = DETAILS_BYTES_MAX) -> Approval | None:
    """One approval, whatever became of it; None: there is none at this step."""
    record, raw = queries.load(txn, ident), txn.get(JOURNAL + ident + step_bytes(index))
    if record is None or raw is None:
        return None
    step = unpack(raw)
    if step[0] != Op.APPROVAL:
        return None
    asked = Asked(*step[2])
    row = txn.get(approval_key(asked.since_ms, ident, index))
    status, decided = _status(step, is_active=record.status != Status.COMPLETED)
    return Approval(
        invocation=ident,
        step=index,
        step_key=step[1],
        service=record.service,
        handler=record.handler,
        key=record.key,
        title=asked.title,
        payload=asked.payload if len(asked.payload) <= bytes_max else None,
        payload_bytes=len(asked.payload),
        choices=asked.choices,
        assignee=asked.assignee,
        editable=asked.editable,
        secret=asked.secret,
        since_ms=asked.since_ms,
        due_ms=asked.due_ms,
        remind_ms=asked.remind_ms,
        reminded_ms=Row(*unpack(row)).reminded_ms if row is not None else 0,
        status=status,
        decided=decided,
    )


def _status(step: list[Any], *, is_active: bool) -> tuple[str, bytes | None]:
    outcome = step[_OUTCOME]
    if outcome is None:
        return WITHDRAWN if step[_ABANDONED] else WAITING if is_active else GONE, None
    if not is_success(outcome):
        return CANCELLED, None
    payload = payload_of(outcome)
    assert isinstance(payload, bytes), "decisions are small"
    return DECIDED if unpack(payload)[0] is not None else TIMED_OUT, payload


def figures(txn: ReadTxn, limit: int) -> dict[str, tuple[int, int]]:
    """By service: how many approvals wait, and since when the oldest does. No more than `limit` are counted."""
    found: dict[str, tuple[int, int]] = {}
    for looked_at, (key, raw) in enumerate(txn.scan(APPROVAL, after(APPROVAL)), start=1):
        service = Row(*unpack(raw)).service
        count, since_ms = found.get(service, (0, int.from_bytes(key[1:9], "big")))
        found[service] = (count + 1, since_ms)
        if looked_at >= limit:
            break
    return found
