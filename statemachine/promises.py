"""Promises of a workflow: named values that are set once, by its handlers or by clients, and awaited by its handlers.

A record is [outcome or None, waiters], a waiter is [invocation, step]. All of it is in the workflow's partition.
"""

from __future__ import annotations

from typing import Any, Final

from holdfast.sdk.ids import ObjectId, object_id, workflow_id
from holdfast.sdk.journal import NAME_BYTES_MAX, Failure, pack_outcome
from holdfast.statemachine import blobs, refs, timers
from holdfast.statemachine.commands import CompletePromise, CompleteStep
from holdfast.statemachine.effects import OK, Code, Result
from holdfast.statemachine.outbox import post
from holdfast.statemachine.records import Invocation, Object, pack, unpack
from holdfast.statemachine.state import State
from holdfast.statemachine.tables import COMPLETED, PROMISE, after
from holdfast.statemachine.values import is_name

#: How long a promise waits for its workflow to begin.
EARLY_MS: Final = 24 * 3_600_000
GONE: Final = Failure(410, "the workflow of this promise is no longer kept", "Gone")


def outcome_of(state: State, oid: ObjectId, name: str) -> list[Any] | None:
    raw = state.get(PROMISE + oid + name.encode())
    outcome: list[Any] | None = None if raw is None else unpack(raw)[0]
    return outcome


def join(state: State, record: Invocation, keyed: Object, name: str, index: int) -> None:
    """Add a step that waits for a promise without an outcome."""
    key = PROMISE + record.oid + name.encode()
    raw = state.get(key)
    if raw is None:
        keyed.promises += 1
        state.touch_object(keyed)
        waiters = []
    else:
        waiters = unpack(raw)[1]
    waiters.append([record.id, index])
    state.put(key, pack([None, waiters]))


def leave(state: State, record: Invocation, name: str, index: int) -> None:
    """Remove a waiting step."""
    key = PROMISE + record.oid + name.encode()
    raw = state.get(key)
    if raw is None:
        return
    outcome, waiters = unpack(raw)
    rest = [waiter for waiter in waiters if waiter != [record.id, index]]
    if rest or outcome is not None:
        state.put(key, pack([outcome, rest]))
    else:
        state.delete(key)
        keyed = state.object(record.oid, record.service, record.key or "")
        keyed.promises -= 1
        state.touch_object(keyed)


def resolve(state: State, keyed: Object, name: str, outcome: list[Any]) -> bool:
    """Set the outcome and complete the waiting steps. Returns whether it had no outcome before."""
    key = PROMISE + keyed.id + name.encode()
    raw = state.get(key)
    waiters: list[list[Any]] = []
    if raw is None:
        keyed.promises += 1
        state.touch_object(keyed)
    else:
        before, waiters = unpack(raw)
        if before is not None:
            return False
    state.put(key, pack([outcome, []]))
    blobs.acquire(state, refs.in_outcome(outcome))
    _answer(state, waiters, outcome)
    if not _has_workflow(state, keyed):
        timers.arm(state, timers.of_promises(timers.due_in(state, EARLY_MS), keyed.id))
    return True


def _has_workflow(state: State, keyed: Object) -> bool:
    """Whether there is a run whose retention will remove the promises."""
    main = workflow_id(keyed.service, keyed.key)
    return bool(keyed.holder) or state.load(main) is not None or state.get(COMPLETED + main) is not None


def awaken(state: State, oid: ObjectId) -> None:
    """Forget promises that were set long ago, before their workflow began, if there is still no workflow."""
    keyed = state.find_object(oid)
    if keyed is not None and not _has_workflow(state, keyed):
        clear(state, keyed)


def _answer(state: State, waiters: list[list[Any]], outcome: list[Any]) -> None:
    for ident, index in waiters:
        post(state, CompleteStep(ident, index, outcome, True))


def complete(state: State, command: CompletePromise) -> Result:
    if not is_name(command.name):
        return Result(Code.MALFORMED, f"the name of a promise must have 1 to {NAME_BYTES_MAX} bytes")
    oid = object_id(command.service, command.key)
    if resolve(state, state.object(oid, command.service, command.key), command.name, command.outcome):
        return OK
    before = outcome_of(state, oid, command.name)
    # A client that repeats its request after a lost answer must not see a conflict with itself.
    return Result(
        Code.UNCHANGED if before == command.outcome else Code.CONFLICT, "the promise already has an outcome", before
    )


def clear(state: State, keyed: Object) -> int:
    """Remove all promises of a workflow, and tell the steps that still wait. Returns how many there were."""
    prefix = PROMISE + keyed.id
    found = list(state.scan(prefix, after(prefix)))
    for key, _ in found:
        state.delete(key)
    keyed.promises = 0
    state.touch_object(keyed)
    for _, raw in found:
        outcome, waiters = unpack(raw)
        blobs.release(state, refs.in_outcome(outcome))
        _answer(state, waiters, pack_outcome(GONE))
    return len(found)
