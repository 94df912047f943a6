"""The replicated state machine: the one place where state changes.

`apply` is a function of (state, time, command) and nothing else: no clock, no random number, no await. So replicas that
apply the same log hold the same bytes. What the world must do comes back as effects. Only the leader carries them out,
and a new leader derives them afresh from state (`queries.pending_effects`), so losing an effect loses nothing.

How the parts work together. An invocation has a record and a journal. The record holds its status (`effects.Status`) and
the number of its current attempt (`epoch`). An attempt appends steps. A step that depends on something outside the attempt
(time, another invocation, a promise, a client) is journaled without an outcome and *waits*: it is in the table of waiting
steps, and the timer, invocation or promise that will complete it knows its number. The outcome is journaled when it comes.
Then the running attempt is told, or the next attempt begins. An invocation that completes tells its caller in the same way,
passes its key on, and is kept for a while.

Invocations communicate by messages alone (`outbox.post`), as if each lived in a partition of its own. Messages to the own
partition are handled here, after the command that caused them. So no message overtakes another, and no function calls
itself through a chain of invocations.

Use: `state.begin(txn)`, then `apply` for every command of the entries at hand, then `state.flush()`, commit,
`state.take_effects()`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, assert_never, get_args

from holdfast.sdk.ids import InvocationId, ObjectId
from holdfast.statemachine import (
    attempts,
    blobs,
    decisions,
    hooks,
    invocation,
    journal,
    listing,
    outbox,
    promises,
    restart,
    retention,
    steps,
    timers,
    values,
)
from holdfast.statemachine.commands import (
    AbandonStep,
    Announce,
    AttachTo,
    Cancel,
    Command,
    Complete,
    CompletePromise,
    CompleteStep,
    Decide,
    DecideStep,
    Deliver,
    FailAttempt,
    FireTimers,
    ForgetNotices,
    ForgetObjects,
    Invoke,
    KeepBlob,
    Kill,
    Pause,
    PostponeAttempt,
    Purge,
    PutBlob,
    RaiseLevel,
    RecordIntent,
    RecordRunFailure,
    RecordRunOutcome,
    RecordStep,
    Redispatch,
    Restart,
    Resume,
    SetHooks,
    SetLimits,
    SetState,
    SuspendAttempt,
    TouchBlob,
    TrimOutbox,
)
from holdfast.statemachine.effects import OK, ArmTimer, Code, Result
from holdfast.statemachine.levels import LEVEL, TooNew
from holdfast.statemachine.state import State
from holdfast.statemachine.tables import TIME_MAX
from holdfast.statemachine.timers import Kind


def apply(state: State, now_ms: int, command: Command) -> Result:
    """Carry out one command of the log, and the messages to this partition that it causes."""
    # A leader's clock may be behind its predecessor's. The time of the state never goes back.
    if now_ms > state.now_ms:
        state.now_ms = min(now_ms, TIME_MAX)
    refusal = blobs.missing(state, command)
    if refusal is not None:
        return refusal
    result = _HANDLERS[type(command)](state, command)
    todo = state.todo
    while todo:
        message = todo.popleft()
        _HANDLERS[type(message)](state, message)
    return result


def _announce(state: State, command: Announce) -> Result:
    """Raft puts no entry of an older leader after this one, so nothing needs fencing here; attempts have epochs."""
    state.meta.term = command.term
    state.meta.leader = command.node
    return OK


def _set_limits(state: State, command: SetLimits) -> Result:
    meta = state.meta
    (
        meta.journal_steps_max,
        meta.journal_bytes_max,
        meta.completed_max,
        meta.completed_bytes_max,
        meta.journal_blob_bytes_max,
        meta.call_depth_max,
    ) = (max(limit, 0) for limit in command)
    if retention.is_too_much(meta):
        state.remind_of(state.now_ms)
    return OK


def _raise_level(state: State, command: RaiseLevel) -> Result:
    if command.level > LEVEL:
        raise TooNew(f"partition {state.partition}", command.level)
    if command.level <= state.level:
        return Result(Code.UNCHANGED, f"the level is already {state.level}")
    state.level = state.meta.level = command.level
    listing.begin(state)
    return OK


def _fire(state: State, command: FireTimers) -> Result:
    due = timers.take_due(state, max(command.limit, 1))
    for timer in due:
        match timer.kind:
            case Kind.STEP:
                record = state.load(InvocationId(timer.id))
                if record is not None:
                    steps.awaken(state, record, timer.step)
            case Kind.INVOCATION:
                record = state.load(InvocationId(timer.id))
                if record is not None:
                    invocation.awaken(state, record, timer.due_ms)
            case Kind.PROMISES:
                promises.awaken(state, ObjectId(timer.id))
            case _:
                assert_never(timer.kind)
    retention.expire(state, max(command.limit, 1) - len(due))
    blobs.collect(state, max(command.limit, 1))
    listing.add_older(state, max(command.limit, 1))
    dues = (
        timers.next_due(state),
        retention.next_due(state, state.meta),
        blobs.next_due(state),
        listing.next_due(state.meta),
    )
    following = [due_ms for due_ms in dues if due_ms is not None]
    if following:
        state.effects.append(ArmTimer(min(following)))
    return OK


_HANDLERS: Final[dict[type[Any], Callable[[State, Any], Result]]] = {
    Announce: _announce,
    Invoke: invocation.invoke,
    Redispatch: attempts.redispatch,
    RecordStep: journal.record_step,
    RecordRunFailure: journal.record_run_failure,
    RecordIntent: journal.record_intent,
    RecordRunOutcome: journal.record_run_outcome,
    AbandonStep: steps.abandon,
    SuspendAttempt: steps.suspend,
    Complete: invocation.complete,
    FailAttempt: attempts.fail,
    Cancel: invocation.cancel,
    Kill: invocation.kill,
    Pause: attempts.pause,
    Resume: attempts.resume,
    Restart: restart.restart,
    Purge: retention.purge,
    DecideStep: steps.decide,
    CompleteStep: steps.complete,
    CompletePromise: promises.complete,
    SetState: values.edit,
    AttachTo: invocation.attach,
    FireTimers: _fire,
    Deliver: outbox.deliver,
    TrimOutbox: outbox.trim,
    SetLimits: _set_limits,
    TouchBlob: blobs.touch,
    PutBlob: blobs.put,
    KeepBlob: blobs.keep,
    ForgetObjects: blobs.forget,
    PostponeAttempt: attempts.postpone,
    RaiseLevel: _raise_level,
    SetHooks: hooks.set_hooks,
    ForgetNotices: hooks.forget,
    Decide: decisions.decide,
}
assert _HANDLERS.keys() == {*get_args(Command)}, "every command has a function that carries it out"
