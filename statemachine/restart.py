"""Starting a completed invocation over, from its beginning or from a step on.

Steps before the chosen one are copied with their outcomes: what they did is not done again. The copy draws the random
numbers of the original, because its code has to come to the same steps.
"""

from __future__ import annotations

from typing import Any

from holdfast.sdk.ids import format_id
from holdfast.sdk.journal import AWAITED, Op
from holdfast.statemachine import attempts, blobs, invocation, keys, promises, refs, retention, steps, values
from holdfast.statemachine.commands import Mode, Restart
from holdfast.statemachine.effects import Result, Status
from holdfast.statemachine.records import Invocation, unpack, unpack_completed
from holdfast.statemachine.state import State
from holdfast.statemachine.tables import COMPLETED, JOURNAL, step_bytes


def restart(state: State, command: Restart) -> Result:
    old = state.load(command.id)
    if old is not None:
        if old.request and old.request == command.new_id:
            return Result(200, format_id(old.id))  # The same question once more, after its answer was lost.
        return Result(409, "it is not completed: cancel or kill it first")
    raw = state.get(COMPLETED + command.id)
    if raw is None:
        return attempts.UNKNOWN
    old = unpack_completed(command.id, raw)
    new_id = command.id if old.mode == Mode.WORKFLOW else command.new_id
    in_place = new_id == command.id
    if in_place and old.request and old.request == command.new_id:
        return Result(200, format_id(old.id))
    if not in_place and (state.load(new_id) is not None or state.get(COMPLETED + new_id) is not None):
        return Result(200, format_id(new_id))
    if not state.is_here(new_id):
        return Result(409, "a restarted invocation stays in its partition")
    if not 0 <= command.step <= old.length:
        return Result(409, f"there is no step {command.step}: the journal has {old.length}")
    prefix = [state.get(JOURNAL + command.id + step_bytes(index)) for index in range(max(command.step, 1))]
    packed = [step for step in prefix if step is not None]
    if len(packed) < len(prefix):
        return Result(409, "its journal is being forgotten")
    rows = [unpack(step) for step in packed]
    for index, row in enumerate(rows):
        if row[steps.OP] in (Op.RUN, *AWAITED) and steps.is_pending(row):
            return Result(409, f"step {index} never had an outcome: restart from it, or from an earlier step")
    if in_place:
        for index in range(len(packed), old.length):
            retention.drop_step(state, old, index)
        retention.forget(state, old, raw)
    _begin(state, old, new_id, command, packed, rows)
    return Result(0, format_id(new_id))


def _begin(
    state: State, old: Invocation, new_id: bytes, command: Restart, packed: list[bytes], rows: list[list[Any]]
) -> None:
    for index, raw in enumerate(packed):
        state.put(JOURNAL + new_id + step_bytes(index), raw)
    record = Invocation(
        new_id,
        Status.SCHEDULED,
        old.epoch if new_id == old.id else 0,
        old.service,
        old.handler,
        old.key,
        old.mode,
        old.oid,
        state.now_ms,
        state.now_ms,
        old.retention_ms,
        None,
        -1,
        None,
        length=len(packed),
        size=sum(map(len, packed)),
        order=max(max(row[steps.MADE], row[steps.DONE]) for row in rows),
        origin=old.origin or old.id if len(packed) > 1 else b"",
        request=command.new_id if new_id == old.id != command.new_id else b"",
    )
    for row in rows:
        for ref in refs.in_step(row[steps.OP], row[steps.ARGUMENT], row[steps.OUTCOME]):
            blobs.add_to_journal(state, record, ref)
            if new_id == old.id:
                blobs.release(state, ref)  # The very steps of the old journal go on: they were counted before.
    if len(packed) > 1:
        attempts.pin(state, record, command.deployment or old.deployment)
    if old.mode == Mode.WORKFLOW and old.key is not None:
        _restore(state, record, rows)
    invocation.admit(state, record, 0, None)


def _restore(state: State, record: Invocation, rows: list[list[Any]]) -> None:
    """A workflow's state is its own: it becomes again what it was at the chosen step. From the beginning, its promises
    are open again too."""
    keyed = keys.object_of(state, record)
    values.clear(state, keyed)
    for row in rows:
        values.apply(state, keyed, row[steps.OP], row[steps.ARGUMENT])
    if len(rows) == 1:
        promises.clear(state, keyed)
