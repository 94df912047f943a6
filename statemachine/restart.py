"""Restarting a completed invocation, from its beginning or from a step on.

Steps before the chosen one are copied with their outcomes, so their effects are not repeated. The copy draws the random
numbers of the original, because its code must reach the same steps.
"""

from __future__ import annotations

from typing import Final

from holdfast.sdk.ids import NO_INVOCATION, InvocationId, format_id
from holdfast.sdk.journal import By
from holdfast.statemachine import attempts, blobs, invocation, keys, ops, promises, refs, retention, values
from holdfast.statemachine.commands import Mode, Restart
from holdfast.statemachine.effects import Code, Result, Status
from holdfast.statemachine.records import Invocation, Step, unpack_completed, unpack_step
from holdfast.statemachine.state import State
from holdfast.statemachine.tables import COMPLETED, JOURNAL, step_bytes

#: Operations whose steps get an outcome.
_COMPLETED: Final = ops.those(lambda row: row.by is not By.NOTHING)


def restart(state: State, command: Restart) -> Result:
    old = state.load(command.id)
    if old is not None:
        if old.request and old.request == command.new_id:
            return Result(Code.UNCHANGED, format_id(old.id))  # The request was repeated because its answer was lost.
        return Result(Code.CONFLICT, "the invocation is not completed: cancel or kill it first")
    raw = state.get(COMPLETED + command.id)
    if raw is None:
        return attempts.UNKNOWN
    old = unpack_completed(command.id, raw)
    new_id = command.id if old.mode == Mode.WORKFLOW else command.new_id
    in_place = new_id == command.id
    if in_place and old.request and old.request == command.new_id:
        return Result(Code.UNCHANGED, format_id(old.id))
    if not in_place and (state.load(new_id) is not None or state.get(COMPLETED + new_id) is not None):
        return Result(Code.UNCHANGED, format_id(new_id))
    if not state.is_here(new_id):
        return Result(Code.CONFLICT, "a restarted invocation stays in its partition")
    if not 0 <= command.step <= old.length:
        return Result(Code.CONFLICT, f"there is no step {command.step}: the journal has {old.length}")
    prefix = [state.get(JOURNAL + command.id + step_bytes(index)) for index in range(max(command.step, 1))]
    packed = [step for step in prefix if step is not None]
    if len(packed) < len(prefix):
        return Result(Code.CONFLICT, "the journal of the invocation is being removed")
    rows = [unpack_step(step) for step in packed]
    for index, row in enumerate(rows):
        if row.op in _COMPLETED and row.is_pending:
            return Result(Code.CONFLICT, f"step {index} has no outcome: restart from it, or from an earlier step")
    if in_place:
        for index in range(len(packed), old.length):
            retention.drop_step(state, old, index)
        retention.forget(state, old, raw)
    _begin(state, old, new_id, command, packed=packed, rows=rows)
    return Result(Code.DONE, format_id(new_id))


def _begin(
    state: State, old: Invocation, new_id: InvocationId, command: Restart, packed: list[bytes], rows: list[Step]
) -> None:
    for index, raw in enumerate(packed):
        state.put(JOURNAL + new_id + step_bytes(index), raw)
    record = Invocation(
        id=new_id,
        status=Status.SCHEDULED,
        epoch=old.epoch if new_id == old.id else 0,
        service=old.service,
        handler=old.handler,
        key=old.key,
        mode=old.mode,
        oid=old.oid,
        created_ms=state.now_ms,
        since_ms=state.now_ms,
        retention_ms=old.retention_ms,
        caller=None,
        caller_step=-1,
        idempotency_key=None,
        length=len(packed),
        size=sum(map(len, packed)),
        order=max(max(row.made, row.done) for row in rows),
        origin=old.origin or old.id if len(packed) > 1 else NO_INVOCATION,
        request=command.new_id if new_id == old.id != command.new_id else NO_INVOCATION,
        tags=old.tags,
    )
    for row in rows:
        for ref in refs.in_step(row.op, row.argument, row.outcome):
            blobs.add_to_journal(state, record, ref)
            if new_id == old.id:
                blobs.release(state, ref)  # The steps of the old journal stay in place, and were counted before.
    if len(packed) > 1:
        attempts.pin(state, record, command.deployment or old.deployment)
    if old.mode == Mode.WORKFLOW and old.key is not None:
        _restore(state, record, rows)
    invocation.admit(state, record, 0, None)


def _restore(state: State, record: Invocation, rows: list[Step]) -> None:
    """The state of a workflow is its own, so it is reset to what it was at the chosen step. A restart from the beginning
    also resets its promises."""
    keyed = keys.object_of(state, record)
    values.clear(state, keyed)
    for row in rows:
        values.apply(state, keyed, row.op, row.argument)
    if len(rows) == 1:
        promises.clear(state, keyed)
