"""The journal: the steps of an invocation, and what each operation changes in the rest of the state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from holdfast.sdk.ids import ID_BYTES, InvocationId
from holdfast.sdk.journal import (
    CANCELLED,
    By,
    Failure,
    Op,
    pack_outcome,
)
from holdfast.statemachine import (
    approvals,
    attempts,
    blobs,
    failing,
    invocation,
    keys,
    ops,
    promises,
    refs,
    steps,
    timers,
    values,
)
from holdfast.statemachine.commands import (
    AttachTo,
    Cancel,
    CompleteStep,
    Invoke,
    Mode,
    RecordIntent,
    RecordRunFailure,
    RecordRunOutcome,
    RecordStep,
)
from holdfast.statemachine.effects import OK, AbortAttempt, Acknowledge, Code, Result, SendCompletion
from holdfast.statemachine.outbox import post
from holdfast.statemachine.outcomes import (
    DONE,
    Packed,
    failed,
    failure_of,
    is_cancellation,
    is_success,
    payload_of,
    succeeded,
)
from holdfast.statemachine.records import Count, Invocation, Step, pack
from holdfast.statemachine.state import State
from holdfast.statemachine.tables import JOURNAL, step_bytes

_CANCELLED: Final = pack_outcome(CANCELLED)
#: Steps that a journal may have beyond its limit, at least, so that the code can compensate.
RESERVE_STEPS: Final = 100
_WRITERS: Final = (Mode.EXCLUSIVE, Mode.WORKFLOW)
_CANCELLABLE: Final = ops.those(lambda row: row.cancellable)
_STATE_WRITES: Final = ops.those(lambda row: row.writes)
_KEYED: Final = ops.those(lambda row: row.keyed)
_INVOKES: Final = ops.those(lambda row: row.invokes)
_RESOLVES: Final = ops.those(lambda row: row.resolves)
#: Operations that need no further check if they bring their outcome.
_PLAIN: Final = ops.those(lambda row: row.by is By.ENDPOINT or row.signature.eager)
_ACCEPTS: Final = {op: row.accepts for op, row in ops.ROWS.items() if row.accepts is not None}
_CALL: Final = Op.CALL
_RUN: Final = Op.RUN
_APPROVAL: Final = Op.APPROVAL


def record_step(state: State, command: RecordStep) -> Result:
    ident, epoch, index, op, key, argument, outcome, deployment = command[:8]
    record = attempts.current(state, ident, epoch)
    if record is None:
        return attempts.STALE
    if index != record.length:
        return _out_of_place(state, record, index)
    if record.deployment is None:
        attempts.pin(state, record, deployment)
    if outcome is not None and op in _PLAIN:
        if record.cancelled and op == _RUN and is_cancellation(outcome):
            record.cancelled = False
        return _append(state, record, op, key, argument=argument, outcome=outcome, began_ms=command.began_ms)
    accepts = _ACCEPTS.get(op)
    if accepts is None or not accepts(argument):
        return _refuse(state, record, f"the argument of step {index} is not what its operation takes")
    if op == _APPROVAL and (outcome is not None or state.level < 2):
        return _refuse(state, record, f"step {index} cannot be an approval with an outcome, or before level 2")
    if outcome is not None and op not in _STATE_WRITES:
        # The proposer refused this call. The attempt waits for the outcome, which it does not know yet.
        return _append(state, record, op, key, argument=_kept(command, None), outcome=outcome, tell=op == _CALL)
    if op in _KEYED and not record.oid:
        return _refuse(state, record, f"step {index} needs a key: only objects and workflows have state and promises")
    if op in _STATE_WRITES and record.mode not in _WRITERS:
        return _refuse(state, record, "state can be written only in exclusive handlers")
    if record.cancelled and op in _CANCELLABLE:
        record.cancelled = False
        return _append(state, record, op, key, argument=_kept(command, None), outcome=_CANCELLED, tell=True)
    return _OPERATIONS[op](state, record, command)


def _append(
    state: State,
    record: Invocation,
    op: int,
    key: str,
    argument: list[Any],
    outcome: list[Any] | None,
    *,
    done: bool = True,
    tell: bool = False,
    began_ms: int = 0,
) -> Result:
    """Append a step. `done`: no outcome is still to come; `tell`: the attempt does not know the outcome yet."""
    index = record.length
    made = record.order = record.order + 1
    if tell:
        record.order += 1  # It completes after it was made, so the code waits for it in replay too.
    order = record.order
    times: tuple[int, ...] = ()
    if state.level >= 2:
        now_ms = state.now_ms
        times = (now_ms, steps.credible(state, record, began_ms) if began_ms else now_ms, record.epoch)
    raw: bytes = pack((op, key, argument, made, order if done else 0, outcome, False, *times))
    size = record.size + len(raw)
    large = refs.in_step(op, argument, outcome)
    if _is_full(state, record, index, size):
        return _too_long(state, record)
    if large:
        if record.blob_bytes + sum(map(refs.size_of, large)) > state.meta.journal_blob_bytes_max:
            return _too_long(state, record)
        for ref in large:
            blobs.add_to_journal(state, record, ref)
    state.put(JOURNAL + record.id + step_bytes(index), raw)
    record.length = index + 1
    record.size = size
    if record.failures:
        record.failures = 0  # It made more progress than the failed attempts.
        record.failing_since_ms = 0
    record.losses = 0
    state.counters(record.service)[Count.STEPS] += 1
    state.changed[record.id] = record
    if not done:
        steps.wait(state, record, index, op)
    state.effects.append(Acknowledge(record.id, record.epoch, index + 1))
    if tell:
        assert outcome is not None
        # By position: names would double its price.
        state.effects.append(SendCompletion(record.id, record.epoch, index, order, outcome))
    return OK


def _is_full(state: State, record: Invocation, index: int, size: int) -> bool:
    """Whether a journal of `size` bytes has no room for a step at `index`. At level 1 the limit is final. From level 2
    on, the SDK tells the code when the limit is reached, and the code may compensate within the reserve."""
    steps_max, bytes_max = state.meta.journal_steps_max, state.meta.journal_bytes_max
    if state.level < 2:
        return index >= steps_max or size > bytes_max
    if not record.nearly_full and (index >= steps_max * 4 // 5 or size >= bytes_max * 4 // 5):
        record.nearly_full = True
    return index >= steps_max + max(steps_max // 10, RESERVE_STEPS) or size > bytes_max + bytes_max // 10


def _too_long(state: State, record: Invocation) -> Result:
    meta = state.meta
    message = (
        f"the journal would pass its limit of {meta.journal_steps_max} steps, {meta.journal_bytes_max} bytes, or "
        f"{meta.journal_blob_bytes_max} bytes of large values: split the work into several invocations, or keep large "
        "values elsewhere"
    )
    state.effects.append(AbortAttempt(record.id, record.epoch, message))
    invocation.end(state, record, failed(413, message, "JournalTooLong"))
    return Result(Code.TOO_LARGE, message)


def _out_of_place(state: State, record: Invocation, index: int) -> Result:
    return attempts.misplaced(state, record, f"step {index} was sent")


def _refuse(state: State, record: Invocation, message: str) -> Result:
    """Pause the invocation for an operator: the code would repeat its invalid request in every attempt."""
    return attempts.refuse(state, record, Failure(500, message, "ProtocolViolation"), pause=True)


# -- operations ----------------------------------------------------------------------------------------------------------


def _sleep(state: State, record: Invocation, command: RecordStep) -> Result:
    due_ms = timers.due_in(state, command.argument[0])
    index = record.length
    result = _append(
        state, record, Op.SLEEP, command.key, argument=[command.argument[0], due_ms], outcome=None, done=False
    )
    if result is OK:
        timers.arm(state, timers.of_step(due_ms, record.id, index))
    return result


def _call(state: State, record: Invocation, command: RecordStep) -> Result:
    child = _child(command.child)
    if child is None:
        return _refuse(state, record, f"step {command.step} says nothing about what it calls")
    awaited = command.op == Op.CALL
    argument = _kept(command, child.id)
    index = record.length
    result = _append(state, record, command.op, command.key, argument=argument, outcome=None, done=not awaited)
    if result is OK:
        child = child._replace(caller=record.id, caller_step=-1, chain=(), depth=0, callers=())
        if awaited:
            depth, callers = invocation.depth_of_call(state, record)
            chain = invocation.chain_of(state, record)
            child = child._replace(caller_step=index, chain=chain, depth=depth, callers=callers)
        post(state, child)
    return result


def _child(row: list[Any] | None) -> Invoke | None:
    if row is None or not len(Invoke._fields) - len(Invoke._field_defaults) <= len(row) <= len(Invoke._fields):
        return None
    child = Invoke(*row)
    return child if type(child.id) is bytes and len(child.id) == 16 else None


def _kept(command: RecordStep, child: InvocationId | None) -> list[Any]:
    """The argument that stays in the journal. The payload and headers of a call move to its child, and the outcome of a
    resolution to its receiver. A digest replaces them, so that replay can compare them."""
    op, argument, digest = command.op, command.argument, command.digest or None
    if op in _INVOKES:
        return [*argument[:3], digest, None, *argument[5:], child]
    return [*argument[:-1], digest] if op in _RESOLVES else argument


def _get(state: State, record: Invocation, command: RecordStep) -> Result:
    payload = values.get(state, record.oid, command.argument[0])
    outcome = DONE if payload is None else succeeded(refs.some_of(payload))
    return _append(state, record, Op.GET, command.key, argument=command.argument, outcome=outcome, tell=True)


def _keys(state: State, record: Invocation, command: RecordStep) -> Result:
    outcome = succeeded(pack(values.names(state, record.oid)))
    return _append(state, record, Op.KEYS, command.key, argument=command.argument, outcome=outcome, tell=True)


def _write(state: State, record: Invocation, command: RecordStep) -> Result:
    result = _append(state, record, command.op, command.key, argument=command.argument, outcome=None)
    if result is OK:
        values.apply(state, keys.object_of(state, record), command.op, command.argument)
    return result


def _promise(state: State, record: Invocation, command: RecordStep) -> Result:
    name = command.argument[0]
    outcome = promises.outcome_of(state, record.oid, name)
    if outcome is not None:
        return _append(state, record, Op.PROMISE, command.key, argument=command.argument, outcome=outcome, tell=True)
    index = record.length
    result = _append(state, record, Op.PROMISE, command.key, argument=command.argument, outcome=None, done=False)
    if result is OK:
        promises.join(state, record, keys.object_of(state, record), name, index=index)
    return result


def _peek(state: State, record: Invocation, command: RecordStep) -> Result:
    """Return the outcome of a promise. A value is marked by `some`, to tell it from "none yet"."""
    outcome = promises.outcome_of(state, record.oid, command.argument[0])
    if outcome is None:
        outcome = DONE
    elif is_success(outcome):
        outcome = succeeded(refs.some_of(payload_of(outcome)))
    return _append(state, record, Op.PEEK, command.key, argument=command.argument, outcome=outcome, tell=True)


def _resolve(state: State, record: Invocation, command: RecordStep) -> Result:
    name, outcome = command.argument
    taken = promises.outcome_of(state, record.oid, name) is not None
    answer = failed(409, f"promise {name} has an outcome already", "AlreadyCompleted") if taken else DONE
    result = _append(state, record, Op.RESOLVE, command.key, argument=_kept(command, None), outcome=answer, tell=True)
    if result is OK and not taken:
        promises.resolve(state, keys.object_of(state, record), name, outcome)
    return result


def _awakeable(state: State, record: Invocation, command: RecordStep) -> Result:
    return _append(state, record, Op.AWAKEABLE, command.key, argument=command.argument, outcome=None, done=False)


def _resolve_awakeable(state: State, record: Invocation, command: RecordStep) -> Result:
    ident, index, outcome = command.argument
    result = _append(state, record, Op.RESOLVE_AWAKEABLE, command.key, argument=_kept(command, None), outcome=None)
    if result is OK:
        post(state, CompleteStep(ident[:ID_BYTES], index, outcome, secret=ident[ID_BYTES:]))
    return result


def _approval(state: State, record: Invocation, command: RecordStep) -> Result:
    index = record.length
    argument = approvals.kept(state, command.argument)
    result = _append(state, record, Op.APPROVAL, command.key, argument=argument, outcome=None, done=False)
    if result is OK:
        approvals.enter(state, record, index, argument)
    return result


def _attach(state: State, record: Invocation, command: RecordStep) -> Result:
    index = record.length
    result = _append(state, record, Op.ATTACH, command.key, argument=command.argument, outcome=None, done=False)
    if result is OK:
        post(state, AttachTo(command.argument[0], record.id, index))
    return result


def _cancel(state: State, record: Invocation, command: RecordStep) -> Result:
    result = _append(state, record, Op.CANCEL, command.key, argument=command.argument, outcome=None)
    if result is OK:
        post(state, Cancel(command.argument[0]))
    return result


_OPERATIONS: Final[dict[int, Callable[[State, Invocation, RecordStep], Result]]] = {
    Op.SLEEP: _sleep,
    Op.CALL: _call,
    Op.SEND: _call,
    Op.GET: _get,
    Op.SET: _write,
    Op.CLEAR: _write,
    Op.CLEAR_ALL: _write,
    Op.KEYS: _keys,
    Op.PROMISE: _promise,
    Op.PEEK: _peek,
    Op.RESOLVE: _resolve,
    Op.AWAKEABLE: _awakeable,
    Op.RESOLVE_AWAKEABLE: _resolve_awakeable,
    Op.ATTACH: _attach,
    Op.CANCEL: _cancel,
    Op.APPROVAL: _approval,
}
assert _OPERATIONS.keys() == _ACCEPTS.keys(), "apply can carry out every operation that it accepts without an outcome"


# -- runs that take more than one command --------------------------------------------------------------------------------


def record_intent(state: State, command: RecordIntent) -> Result:
    """From here until the outcome comes, only the attempt knows whether the run took place."""
    record = attempts.current(state, command.id, command.epoch)
    if record is None:
        return attempts.STALE
    if record.deployment is None:
        attempts.pin(state, record, command.deployment)
    if command.step == record.length:
        return _append(state, record, Op.RUN, command.key, argument=[command.name], outcome=None, done=False)
    found = _pending_run(state, record, command.step)
    if found is None:
        return _no_longer_pending(state, record, command.step)
    step, size = found
    if steps.is_retrying(step):
        timers.disarm(state, steps.next_try(record, command.step, step))
    steps.forgive(state, record, step)
    step.argument = [command.name]
    steps.stamp(state, record, step)
    steps.store(state, record, command.step, step, size=size)
    # The journal did not grow, so its length does not acknowledge the intent. Tell the attempt that the run may begin.
    steps.let_run(state, record, command.step)
    return OK


def record_run_failure(state: State, command: RecordRunFailure) -> Result:
    """Count the failure in the step, so that no crash of the handler or the leader forgets it."""
    record = attempts.current(state, command.id, command.epoch)
    if record is None:
        return attempts.STALE
    if record.deployment is None:
        attempts.pin(state, record, command.deployment)
    now_ms, index = state.now_ms, command.step
    if index == record.length:
        failures, since_ms, found = 1, now_ms, None
    else:
        found = _pending_run(state, record, index)
        if found is None:
            return _no_longer_pending(state, record, index)
        tries = steps.tries_of(found[0])
        failures, since_ms = (1, now_ms) if tries is None else (tries.failures + 1, tries.since_ms)
    failure = failure_of(command.failure)
    assert failure is not None, "a failed run brings a failure"
    trace = failure.extra.get("trace") if failure.extra and state.level >= 2 else None
    outcome: Packed | None = None
    if record.cancelled:
        outcome = _CANCELLED
        record.cancelled = False
    elif attempts.gives_up(state, command.retry, failures, since_ms):
        times = "once" if failures == 1 else f"{failures} times"
        message = f"{command.name} failed {times}: {failure.message}"
        outcome = failed(500, message, "RetriesExhausted", {"trace": trace} if trace else None)
    if found is None and outcome is not None:
        return _append(
            state,
            record,
            Op.RUN,
            command.key,
            argument=[command.name],
            outcome=outcome,
            tell=True,
            began_ms=command.began_ms,
        )
    if found is not None and outcome is not None:
        steps.finish(state, record, index, *found, outcome, began_ms=command.began_ms)
        state.effects.append(Acknowledge(record.id, record.epoch, record.length))
        return OK
    delay_ms = attempts.backoff_ms(command.retry, failures, command.jitter_ms)
    if state.level >= 2 and command.retry_after_ms > 0:
        delay_ms = command.retry_after_ms
    due_ms = timers.due_in(state, delay_ms) or 1
    argument = steps.Tries(
        failures=failures, due_ms=due_ms, message=failure.message, since_ms=since_ms, trace=trace
    ).argument(command.name)
    if found is None:
        result = _append(
            state, record, Op.RUN, command.key, argument=argument, outcome=None, done=False, began_ms=command.began_ms
        )
        if result is not OK:
            return result
    else:
        step, size = found
        if steps.is_retrying(step):
            timers.disarm(state, steps.next_try(record, index, step))
        step.argument = argument
        steps.stamp(state, record, step, command.began_ms)
        steps.store(state, record, index, step, size=size)
        state.effects.append(Acknowledge(record.id, record.epoch, record.length))
    if state.level >= 2:
        record.step_failures += 1
        if record.step_failures == 1:
            state.moved[record.id] = record  # It is shown as backing off from now on.
            failing.note(state, record)
    timers.arm(state, timers.of_step(due_ms, record.id, index))
    return OK


def record_run_outcome(state: State, command: RecordRunOutcome) -> Result:
    record = attempts.current(state, command.id, command.epoch)
    if record is None:
        return attempts.STALE
    found = _pending_run(state, record, command.step)
    if found is None:
        return _no_longer_pending(state, record, command.step)
    if record.cancelled and is_cancellation(command.outcome):
        record.cancelled = False
    step, size = found
    steps.finish(state, record, command.step, step, size=size, outcome=command.outcome, began_ms=command.began_ms)
    state.effects.append(Acknowledge(record.id, record.epoch, record.length))
    return OK


def _pending_run(state: State, record: Invocation, index: int) -> tuple[Step, int] | None:
    found = steps.load(state, record, index)
    return found if found is not None and found[0].op == _RUN and found[0].is_pending else None


def _no_longer_pending(state: State, record: Invocation, index: int) -> Result:
    """The first outcome stays. An attempt that was told twice to retry may report a run that already has one."""
    found = steps.load(state, record, index)
    if found is None or found[0].op != _RUN:
        return _out_of_place(state, record, index)
    return Result(Code.UNCHANGED, "the run already has an outcome, or the code no longer waits for it")
