"""The journal: what an attempt did, step by step, and what each operation means for the rest of the state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from holdfast.sdk.journal import (
    CANCELLED,
    NOTHING,
    Failure,
    Op,
    pack_outcome,
)
from holdfast.statemachine import attempts, blobs, invocation, keys, promises, refs, steps, timers, values
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
from holdfast.statemachine.effects import OK, AbortAttempt, Acknowledge, Result, SendCompletion
from holdfast.statemachine.outbox import post
from holdfast.statemachine.records import Count, Invocation, pack
from holdfast.statemachine.state import State
from holdfast.statemachine.tables import JOURNAL, step_bytes

_CANCELLED: Final[list[Any]] = pack_outcome(CANCELLED)
_DONE: Final[list[Any]] = [0, NOTHING]
#: Steps of a journal beyond its limit, at least: for code that compensates.
RESERVE_STEPS: Final = 100
_WRITERS: Final = (Mode.EXCLUSIVE, Mode.WORKFLOW)
#: What a cancellation interrupts.
_CANCELLABLE: Final = frozenset({Op.SLEEP, Op.CALL, Op.PROMISE, Op.AWAKEABLE, Op.ATTACH})
_STATE_WRITES: Final = frozenset({Op.SET, Op.CLEAR, Op.CLEAR_ALL})
#: Operations that a journal takes without looking any further, as long as they bring their outcome.
_PLAIN: Final = frozenset({Op.RUN, Op.VALUE, Op.GET, Op.KEYS})
_KEYED: Final = frozenset(
    {Op.GET, Op.SET, Op.CLEAR, Op.CLEAR_ALL, Op.KEYS, Op.PROMISE, Op.PEEK, Op.RESOLVE},
)


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
        if record.cancelled and op == Op.RUN and outcome[0] == 1 and outcome[3] == CANCELLED.kind:
            record.cancelled = False
        return _append(state, record, op, key, argument, outcome, began_ms=command.began_ms)
    check = _CHECKS.get(op)
    if check is None or not check(argument):
        return _refuse(state, record, f"the argument of step {index} is not what its operation takes")
    if outcome is not None and op not in _STATE_WRITES:
        # A call that the proposer refused: the attempt waits for its outcome and does not know it.
        return _append(state, record, op, key, _kept(command, None), outcome, tell=op == Op.CALL)
    if op in _KEYED and not record.oid:
        return _refuse(state, record, f"step {index} needs a key: only objects and workflows have state and promises")
    if op in _STATE_WRITES and record.mode not in _WRITERS:
        return _refuse(state, record, "state can be written only in exclusive handlers")
    if record.cancelled and op in _CANCELLABLE:
        record.cancelled = False
        return _append(state, record, op, key, _kept(command, None), _CANCELLED, tell=True)
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
    """Journal it. `done`: nothing is to come for it any more; `tell`: the attempt does not know the outcome yet."""
    index = record.length
    made = record.order = record.order + 1
    if tell:
        record.order += 1  # It completes after it was made: in replay, too, the code waits for it.
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
        record.failures = 0  # It went further than the attempts that failed.
        record.failing_since_ms = 0
    record.losses = 0
    state.counters(record.service)[Count.STEPS] += 1
    state.changed[record.id] = record
    if not done:
        steps.wait(state, record, index, op)
    state.effects.append(Acknowledge(record.id, record.epoch, index + 1))
    if tell:
        assert outcome is not None
        state.effects.append(SendCompletion(record.id, record.epoch, index, order, outcome))
    return OK


def _is_full(state: State, record: Invocation, index: int, size: int) -> bool:
    """Whether a journal of `size` bytes with a step at `index` has no place. Up to level 1 the limit was the end; now the
    code is told at the limit (by the SDK, which knows it), and may compensate in the reserve."""
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
    invocation.end(state, record, [1, 413, message, "JournalTooLong"])
    return Result(413, message)


def _out_of_place(state: State, record: Invocation, index: int) -> Result:
    return attempts.misplaced(state, record, f"step {index} was sent")


def _refuse(state: State, record: Invocation, message: str) -> Result:
    """Code that asks for what cannot be will ask for it again: let somebody look at it."""
    return attempts.refuse(state, record, Failure(500, message, "ProtocolViolation"), pause=True)


# -- operations ----------------------------------------------------------------------------------------------------------


def _sleep(state: State, record: Invocation, command: RecordStep) -> Result:
    due_ms = timers.due_in(state, command.argument[0])
    index = record.length
    result = _append(state, record, Op.SLEEP, command.key, [command.argument[0], due_ms], None, done=False)
    if result is OK:
        timers.arm(state, due_ms, record.id, index)
    return result


def _call(state: State, record: Invocation, command: RecordStep) -> Result:
    child = _child(command.child)
    if child is None:
        return _refuse(state, record, f"step {command.step} says nothing about what it calls")
    awaited = command.op == Op.CALL
    argument = _kept(command, child.id)
    index = record.length
    result = _append(state, record, command.op, command.key, argument, None, done=not awaited)
    if result is OK:
        chain = invocation.chain_of(state, record) if awaited else ()
        post(state, child._replace(caller=record.id, caller_step=index if awaited else -1, chain=chain))
    return result


def _child(row: list[Any] | None) -> Invoke | None:
    if row is None or not len(Invoke._fields) - len(Invoke._field_defaults) <= len(row) <= len(Invoke._fields):
        return None
    child = Invoke(*row)
    return child if type(child.id) is bytes and len(child.id) == 16 else None


def _kept(command: RecordStep, child: bytes | None) -> list[Any]:
    """What stays of an argument: payload and headers of a call are with its child now, and what was resolved has it.

    A hash stays in place of the payload or outcome, so that a later attempt can tell whether it asks for the same.
    """
    op, argument, digest = command.op, command.argument, command.digest or None
    if op in (Op.CALL, Op.SEND):
        return [*argument[:3], digest, None, *argument[5:], child]
    return [*argument[:-1], digest] if op in (Op.RESOLVE, Op.RESOLVE_AWAKEABLE) else argument


def _get(state: State, record: Invocation, command: RecordStep) -> Result:
    payload = values.get(state, record.oid, command.argument[0])
    outcome = [0, NOTHING if payload is None else refs.some_of(payload)]
    return _append(state, record, Op.GET, command.key, command.argument, outcome, tell=True)


def _keys(state: State, record: Invocation, command: RecordStep) -> Result:
    outcome = [0, pack(values.names(state, record.oid))]
    return _append(state, record, Op.KEYS, command.key, command.argument, outcome, tell=True)


def _write(state: State, record: Invocation, command: RecordStep) -> Result:
    result = _append(state, record, command.op, command.key, command.argument, None)
    if result is OK:
        values.apply(state, keys.object_of(state, record), command.op, command.argument)
    return result


def _promise(state: State, record: Invocation, command: RecordStep) -> Result:
    name = command.argument[0]
    outcome = promises.outcome_of(state, record.oid, name)
    if outcome is not None:
        return _append(state, record, Op.PROMISE, command.key, command.argument, outcome, tell=True)
    index = record.length
    result = _append(state, record, Op.PROMISE, command.key, command.argument, None, done=False)
    if result is OK:
        promises.join(state, record, keys.object_of(state, record), name, index)
    return result


def _peek(state: State, record: Invocation, command: RecordStep) -> Result:
    """A failure is a failure; a value is told from "none yet" as in `some`."""
    outcome = promises.outcome_of(state, record.oid, command.argument[0])
    if outcome is None:
        outcome = [0, NOTHING]
    elif outcome[0] == 0:
        outcome = [0, refs.some_of(outcome[1])]
    return _append(state, record, Op.PEEK, command.key, command.argument, outcome, tell=True)


def _resolve(state: State, record: Invocation, command: RecordStep) -> Result:
    name, outcome = command.argument
    taken = promises.outcome_of(state, record.oid, name) is not None
    answer = [1, 409, f"promise {name} has an outcome already", "AlreadyCompleted"] if taken else _DONE
    result = _append(state, record, Op.RESOLVE, command.key, _kept(command, None), answer, tell=True)
    if result is OK and not taken:
        promises.resolve(state, keys.object_of(state, record), name, outcome)
    return result


def _awakeable(state: State, record: Invocation, command: RecordStep) -> Result:
    return _append(state, record, Op.AWAKEABLE, command.key, command.argument, None, done=False)


def _resolve_awakeable(state: State, record: Invocation, command: RecordStep) -> Result:
    ident, index, outcome = command.argument
    result = _append(state, record, Op.RESOLVE_AWAKEABLE, command.key, _kept(command, None), None)
    if result is OK:
        post(state, CompleteStep(ident, index, outcome))
    return result


def _attach(state: State, record: Invocation, command: RecordStep) -> Result:
    index = record.length
    result = _append(state, record, Op.ATTACH, command.key, command.argument, None, done=False)
    if result is OK:
        post(state, AttachTo(command.argument[0], record.id, index))
    return result


def _cancel(state: State, record: Invocation, command: RecordStep) -> Result:
    result = _append(state, record, Op.CANCEL, command.key, command.argument, None)
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
}


def _is_id(value: Any) -> bool:
    return type(value) is bytes and len(value) == 16


def _is_outcome(value: Any) -> bool:
    return type(value) is list and (
        (len(value) == 2 and value[0] == 0 and refs.is_payload(value[1])) or (len(value) in (4, 5) and value[0] == 1)
    )


def _is_nothing(argument: list[Any]) -> bool:
    return True


def _is_one_name(argument: list[Any]) -> bool:
    return len(argument) == 1 and values.is_name(argument[0])


def _is_one_id(argument: list[Any]) -> bool:
    return len(argument) == 1 and _is_id(argument[0])


#: An operation that is not here must bring its outcome.
_CHECKS: Final[dict[int, Callable[[list[Any]], bool]]] = {
    Op.SLEEP: lambda argument: len(argument) == 1 and type(argument[0]) is int,
    Op.CALL: lambda argument: len(argument) in (5, 6),  # With an idempotency key,
    Op.SEND: lambda argument: len(argument) in (6, 7),  # since level 2.
    Op.GET: _is_one_name,
    Op.SET: lambda argument: len(argument) == 2 and values.is_name(argument[0]) and refs.is_payload(argument[1]),
    Op.CLEAR: _is_one_name,
    Op.CLEAR_ALL: _is_nothing,
    Op.KEYS: _is_nothing,
    Op.PROMISE: _is_one_name,
    Op.PEEK: _is_one_name,
    Op.RESOLVE: lambda argument: len(argument) == 2 and values.is_name(argument[0]) and _is_outcome(argument[1]),
    Op.AWAKEABLE: _is_nothing,
    Op.RESOLVE_AWAKEABLE: lambda argument: (
        len(argument) == 3 and _is_id(argument[0]) and type(argument[1]) is int and _is_outcome(argument[2])
    ),
    Op.ATTACH: _is_one_id,
    Op.CANCEL: _is_one_id,
}


# -- runs that take more than one command --------------------------------------------------------------------------------


def record_intent(state: State, command: RecordIntent) -> Result:
    """From here on, until its outcome comes, nobody but the attempt knows whether the run took place."""
    record = attempts.current(state, command.id, command.epoch)
    if record is None:
        return attempts.STALE
    if record.deployment is None:
        attempts.pin(state, record, command.deployment)
    if command.step == record.length:
        return _append(state, record, Op.RUN, command.key, [command.name], None, done=False)
    found = _pending_run(state, record, command.step)
    if found is None:
        return _no_longer_pending(state, record, command.step)
    step, size = found
    if steps.is_retrying(step):
        timers.disarm(state, step[steps.ARGUMENT][steps.DUE], record.id, command.step)
    steps.forgive(record, step)
    step[steps.ARGUMENT] = [command.name]
    steps.stamp(state, record, step)
    steps.store(state, record, command.step, step, size)
    # The journal did not grow, so its length cannot tell that this was journaled: say that the run may begin.
    steps.let_run(state, record, command.step)
    return OK


def record_run_failure(state: State, command: RecordRunFailure) -> Result:
    """Counted in the step: neither a crash of the handler nor of the leader makes it forget a failure."""
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
        before = found[0][steps.ARGUMENT]
        failures = before[steps.FAILURES] + 1 if len(before) > steps.SINCE else 1
        since_ms = before[steps.SINCE] if len(before) > steps.SINCE else now_ms
    trace = _trace_of(command.failure) if state.level >= 2 else None
    outcome: list[Any] | None = None
    if record.cancelled:
        outcome = _CANCELLED
        record.cancelled = False
    elif attempts.gives_up(state, command.retry, failures, since_ms):
        times = "once" if failures == 1 else f"{failures} times"
        outcome = [1, 500, f"{command.name} failed {times}: {command.failure[2]}", "RetriesExhausted"]
        if trace:
            outcome.append({"trace": trace})
    if found is None and outcome is not None:
        return _append(
            state, record, Op.RUN, command.key, [command.name], outcome, tell=True, began_ms=command.began_ms
        )
    if found is not None and outcome is not None:
        steps.finish(state, record, index, *found, outcome, began_ms=command.began_ms)
        state.effects.append(Acknowledge(record.id, record.epoch, record.length))
        return OK
    delay_ms = attempts.backoff_ms(command.retry, failures, command.jitter_ms)
    if state.level >= 2 and command.retry_after_ms > 0:
        delay_ms = command.retry_after_ms
    due_ms = timers.due_in(state, delay_ms) or 1
    argument: list[Any] = [command.name, failures, due_ms, command.failure[2], since_ms]
    if trace:
        argument.append(trace)
    if found is None:
        result = _append(state, record, Op.RUN, command.key, argument, None, done=False, began_ms=command.began_ms)
        if result is not OK:
            return result
    else:
        step, size = found
        if steps.is_retrying(step):
            timers.disarm(state, step[steps.ARGUMENT][steps.DUE], record.id, index)
        step[steps.ARGUMENT] = argument
        steps.stamp(state, record, step, command.began_ms)
        steps.store(state, record, index, step, size)
        state.effects.append(Acknowledge(record.id, record.epoch, record.length))
    if state.level >= 2:
        record.step_failures += 1
    timers.arm(state, due_ms, record.id, index)
    return OK


def _trace_of(failure: list[Any]) -> list[str] | None:
    """The innermost frames of a failure, if it came with them."""
    return failure[4].get("trace") if len(failure) > 4 and type(failure[4]) is dict else None


def record_run_outcome(state: State, command: RecordRunOutcome) -> Result:
    record = attempts.current(state, command.id, command.epoch)
    if record is None:
        return attempts.STALE
    found = _pending_run(state, record, command.step)
    if found is None:
        return _no_longer_pending(state, record, command.step)
    if record.cancelled and command.outcome[0] == 1 and command.outcome[3] == CANCELLED.kind:
        record.cancelled = False
    step, size = found
    steps.finish(state, record, command.step, step, size, command.outcome, began_ms=command.began_ms)
    state.effects.append(Acknowledge(record.id, record.epoch, record.length))
    return OK


def _pending_run(state: State, record: Invocation, index: int) -> tuple[list[Any], int] | None:
    found = steps.load(state, record, index)
    return found if found is not None and found[0][steps.OP] == Op.RUN and steps.is_pending(found[0]) else None


def _no_longer_pending(state: State, record: Invocation, index: int) -> Result:
    """An attempt that was told twice to try again may report a run that has its outcome: the first one stays."""
    found = steps.load(state, record, index)
    if found is None or found[0][steps.OP] != Op.RUN:
        return _out_of_place(state, record, index)
    return Result(200, "the run has its outcome already, or nobody waits for it any more")
