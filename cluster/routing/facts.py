"""The questions about facts of a partition that a node answers since level 2, and how their answers are encoded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from holdfast.sdk.ids import InvocationId
from holdfast.statemachine import inbox, survey
from holdfast.statemachine.inbox import Approval, Wanted
from holdfast.statemachine.records import (
    Invocation,
    Object,
    pack_invocation,
    pack_object,
    unpack_invocation,
    unpack_object,
)
from holdfast.statemachine.survey import Child, Queue, Wait
from holdfast.statemachine.txn import ReadTxn


class Question(NamedTuple):
    """It reads one view of one partition, and knows how its answer is encoded."""

    answer: Callable[..., Any]
    pack: Callable[[Any], Any] = lambda answer: answer
    unpack: Callable[[Any], Any] = lambda row: row


def _pack(record: Invocation) -> tuple[InvocationId, bytes]:
    return record.id, pack_invocation(record)


def _pack_objects(answer: tuple[list[tuple[bytes, Object]], bytes | None]) -> Any:
    return [(rank, pack_object(record)) for rank, record in answer[0]], answer[1]


def _unpack_objects(row: Any) -> tuple[list[tuple[bytes, Object]], bytes | None]:
    return [(rank, unpack_object(rank, raw)) for rank, raw in row[0]], row[1]


def _pack_queue(found: Queue) -> Any:
    holder = _pack(found.holder) if found.holder is not None else None
    return holder, [_pack(record) for record in found.waiting], found.more


def _unpack_queue(row: Any) -> Queue:
    holder, waiting, more = row
    return Queue(
        unpack_invocation(*holder) if holder is not None else None, [unpack_invocation(*each) for each in waiting], more
    )


def _waiting(txn: ReadTxn, kinds: Sequence[str], service: str | None, after: bytes, limit: int) -> Any:
    return survey.waiting(txn, kinds, service, after_rank=after, limit=limit)


def _pack_waits(answer: tuple[list[tuple[bytes, Wait]], bytes | None]) -> Any:
    return [(rank, tuple(row)) for rank, row in answer[0]], answer[1]


def _unpack_waits(row: Any) -> tuple[list[tuple[bytes, Wait]], bytes | None]:
    return [(rank, Wait(*each)) for rank, each in row[0]], row[1]


def _approvals(txn: ReadTxn, wanted: Sequence[Any], after: bytes, limit: int) -> Any:
    return inbox.approvals(txn, Wanted(*wanted), after, limit)


FACTS: Final[Mapping[str, Question]] = {
    "keys": Question(survey.keys, _pack_objects, _unpack_objects),
    "queue": Question(survey.queue, _pack_queue, _unpack_queue),
    "promises": Question(survey.promises),
    "waiting": Question(_waiting, _pack_waits, _unpack_waits),
    "timed": Question(survey.timed, _pack_waits, _unpack_waits),
    "children": Question(
        survey.children,
        lambda it: ([tuple(child) for child in it[0]], it[1]),
        lambda row: ([Child(*child) for child in row[0]], row[1]),
    ),
    "approvals": Question(
        _approvals,
        lambda it: ([(rank, tuple(row)) for rank, row in it[0]], it[1]),
        lambda row: ([(rank, Approval(*each)) for rank, each in row[0]], row[1]),
    ),
    "approval": Question(inbox.approval, tuple, lambda row: Approval(*row)),
    "approval_figures": Question(inbox.figures),
    "records": Question(
        survey.records,
        lambda records: [_pack(record) for record in records],
        lambda rows: [unpack_invocation(*row) for row in rows],
    ),
}
