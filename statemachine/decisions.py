"""Decisions about approvals: the first one counts, and its author, time and comment stay in the journal.

A decision that comes too late is told what became of the approval. So is one that is repeated because its answer was lost,
but that is no conflict.
"""

from __future__ import annotations

import hmac
from typing import Final

from holdfast.sdk.journal import COMMENT_BYTES_MAX, DETAILS_BYTES_MAX, Decided, Op, pack_decided, unpack_decided
from holdfast.statemachine import approvals, steps
from holdfast.statemachine.approvals import Asked
from holdfast.statemachine.commands import Decide
from holdfast.statemachine.effects import Code, Result
from holdfast.statemachine.outcomes import Packed, is_success, payload_of, succeeded
from holdfast.statemachine.records import END_NAMES, Invocation, Step, unpack_completed, unpack_step
from holdfast.statemachine.state import State
from holdfast.statemachine.tables import COMPLETED, JOURNAL, STEP_END, step_bytes
from holdfast.statemachine.texts import utc

_UNKNOWN: Final = Result(Code.NOT_FOUND, "there is no such approval")
_WITHDRAWN: Final = Result(Code.NOT_FOUND, "the approval is gone: the code no longer waits for it")
_CANCELLED: Final = Result(Code.NOT_FOUND, "the approval is gone: its invocation was cancelled before anybody decided")


def decide(state: State, command: Decide) -> Result:
    step = _find(state, command)
    if step is None or not hmac.compare_digest(Asked(*step.argument).secret, command.secret):
        return _UNKNOWN
    if step.outcome is not None:
        return _too_late(step.outcome, command)
    if step.abandoned:
        return _WITHDRAWN
    record = state.load(command.id)
    if record is None:
        return Result(Code.NOT_FOUND, f"the approval is gone: {_ended(state, command)}")
    if approvals.is_over(state, step.argument):
        # Its timer is yet to fire, because the leader was down or is behind. The deadline holds all the same.
        outcome = approvals.timed_out(state)
        _finish(state, record, command, step, outcome=outcome)
        return _too_late(outcome, command)
    refusal = _refusal(step, command)
    if refusal is not None:
        return refusal
    decided = Decided(
        choice=command.choice,
        by=command.by,
        by_id=command.by_id,
        comment=command.comment,
        at_ms=state.now_ms,
        payload=command.payload,
    )
    outcome = succeeded(pack_decided(decided))
    _finish(state, record, command, step, outcome=outcome)
    return Result(Code.DONE, outcome=outcome)


def _finish(state: State, record: Invocation, command: Decide, step: Step, *, outcome: Packed) -> None:
    found = steps.load(state, record, command.step)
    assert found is not None, "it was found above"
    steps.finish(state, record, command.step, step, size=found[1], outcome=outcome)


def _find(state: State, command: Decide) -> Step | None:
    """The approval, which may belong to a completed invocation."""
    if not 0 <= command.step < STEP_END:
        return None
    raw = state.get(JOURNAL + command.id + step_bytes(command.step))
    step = None if raw is None else unpack_step(raw)
    return step if step is not None and step.op == Op.APPROVAL else None


def _ended(state: State, command: Decide) -> str:
    raw = state.get(COMPLETED + command.id)
    assert raw is not None, "the journal of an invocation that is not active belongs to a completed one"
    end = END_NAMES[unpack_completed(command.id, raw).end]
    return f"its invocation ended ({end}) before anybody decided"


def _too_late(outcome: Packed, command: Decide) -> Result:
    if not is_success(outcome):
        return _CANCELLED
    payload = payload_of(outcome)
    assert isinstance(payload, bytes), "decisions are small"
    decided = unpack_decided(payload)
    if decided.choice is None:
        return Result(Code.CONFLICT, f"the approval timed out at {utc(decided.at_ms)}", outcome)
    what = f"{decided.choice!r} was decided by {decided.by} at {utc(decided.at_ms)}"
    first = (decided.choice, decided.by, decided.by_id, decided.payload)
    is_same = first == (command.choice, command.by, command.by_id, command.payload)
    return Result(Code.UNCHANGED if is_same else Code.CONFLICT, what, outcome)


def _refusal(step: Step, command: Decide) -> Result | None:
    asked = Asked(*step.argument)
    if command.choice not in asked.choices:
        return Result(
            Code.MALFORMED, f"there is no choice {command.choice!r:.100}: choose {' or '.join(asked.choices)}"
        )
    if len(command.comment.encode()) > COMMENT_BYTES_MAX:
        return Result(Code.TOO_LARGE, f"a comment must have at most {COMMENT_BYTES_MAX} bytes")
    if command.payload is None:
        return None
    if not asked.editable:
        return Result(Code.MALFORMED, "the payload of this approval must not be edited")
    if len(command.payload) > DETAILS_BYTES_MAX:
        return Result(Code.TOO_LARGE, f"the payload of an approval must have at most {DETAILS_BYTES_MAX} bytes")
    return None
