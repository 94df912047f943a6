"""Why an invocation is not running: a sentence for people, built from the state."""

from __future__ import annotations

from typing import Any, assert_never

from holdfast.sdk.ids import InvocationId, format_id
from holdfast.sdk.journal import OP_NAMES
from holdfast.statemachine import queries
from holdfast.statemachine.effects import Status
from holdfast.statemachine.ops import ROWS
from holdfast.statemachine.records import Invocation, unpack_object
from holdfast.statemachine.tables import OBJECT, QUEUE, after
from holdfast.statemachine.texts import counted, utc
from holdfast.statemachine.txn import ReadTxn


def why_not_running(txn: ReadTxn, ident: InvocationId) -> str:
    """A sentence for people. It is empty for an invocation that runs."""
    record = queries.load(txn, ident)
    if record is None:
        return "It is not known here."
    match record.status:
        case Status.SCHEDULED:
            return f"It is scheduled to start at {utc(record.due_ms)}."
        case Status.QUEUED:
            return _why_queued(txn, record)
        case Status.SUSPENDED:
            return f"It waits for {_waits(txn, record)}."
        case Status.RUNNING:
            return f"An attempt is running, and waits for {_waits(txn, record)}." if record.step_failures else ""
        case Status.BACKING_OFF | Status.PAUSED:
            return _why_stopped(txn, record)
        case Status.COMPLETED:
            return "It is completed."
        case _:
            assert_never(record.status)


def _why_queued(txn: ReadTxn, record: Invocation) -> str:
    raw = txn.get(OBJECT + record.oid)
    assert raw is not None, "a queued invocation waits for a key that is held"
    ahead = 0
    prefix = QUEUE + record.oid
    for _, ident in txn.scan(prefix, after(prefix)):
        if ident == record.id or ahead >= queries.LOOKED_AT_MAX:
            break
        ahead += 1
    holder = format_id(unpack_object(record.oid, raw).holder)
    behind = f", with {counted(ahead, 'other')} before it" if ahead else ""
    return f"It waits for {holder} to release the key {record.key!r} of {record.service}{behind}."


def _waits(txn: ReadTxn, record: Invocation) -> str:
    waits = [_why_waits(record, index, step) for index, step in queries.waiting_steps(txn, record.id, 3)]
    more = f" and {record.pending - len(waits)} more" if record.pending > len(waits) else ""
    return f"{', '.join(waits)}{more}"


def _why_waits(record: Invocation, index: int, step: list[Any]) -> str:
    op, _, argument = step[:3]
    waits = ROWS[op].waits
    return waits(record.id, index, argument) if waits is not None else f"{OP_NAMES[op]} (step {index})"


def _why_stopped(txn: ReadTxn, record: Invocation) -> str:
    failure = queries.last_failure(txn, record.id)
    last = f" The last failure: {failure_text(failure)}" if failure is not None else ""
    if record.status == Status.PAUSED:
        after_failures = f" after {counted(record.failures, 'failed attempt')}" if record.failures else ""
        return f"It is paused{after_failures} and waits for an operator.{last}"
    after_failures = f", after {counted(record.failures, 'failed attempt')}" if record.failures else ""
    return f"Its next attempt is at {utc(record.due_ms)}{after_failures}.{last}"


def failure_text(failure: queries.FailedAttempt) -> str:
    """Kind and message. The message of an exception begins with its kind already."""
    kind = failure.kind or str(failure.code)
    return failure.message if failure.message.startswith(kind) else f"{kind}: {failure.message}"
