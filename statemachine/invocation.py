"""The life of an invocation: it begins, waits for its time and its key, completes, is cancelled or killed.

    scheduled -> queued -> running -> suspended | backing off | paused -> ... -> completed

`attempts` covers what happens between running and completed.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Final

from holdfast.sdk.ids import InvocationId, object_id
from holdfast.sdk.journal import (
    CANCELLED,
    KILLED,
    NAME_BYTES_MAX,
    Failure,
    Op,
    cut_text,
    pack_outcome,
)
from holdfast.statemachine import attempts, blobs, failing, hooks, keys, listing, retention, steps, timers
from holdfast.statemachine.commands import (
    CALL_DEPTH_MAX,
    AttachTo,
    Cancel,
    Complete,
    CompleteStep,
    Invoke,
    Kill,
    Mode,
    Ref,
)
from holdfast.statemachine.effects import OK, AbortAttempt, Code, First, Reply, Result, SendCancelled, Status
from holdfast.statemachine.outbox import post
from holdfast.statemachine.outcomes import failed, failure_of, is_success
from holdfast.statemachine.records import (
    NO_OBJECT,
    Count,
    End,
    Invocation,
    pack,
    unpack_completed,
    unpack_completed_outcome,
)
from holdfast.statemachine.state import State
from holdfast.statemachine.tables import COMPLETED, JOURNAL, LISTENER, TIME_MAX, after, step_bytes

_CHAIN_MAX: Final = CALL_DEPTH_MAX  # Deadlocks are found in chains of up to this many keys.
_LABEL_CHARS: Final = 64  # A longer name of a key is cut in the chain, and ends with a digest.
_CALLERS_MAX: Final = 5  # The refusal of a call that is too deep names this many callers,
_CALLER_CHARS: Final = 200  # each with up to this many characters.
_HOLDS_KEY: Final = (Mode.EXCLUSIVE, Mode.WORKFLOW)
_INPUT: Final = step_bytes(0)
_INPUT_OP: Final = Op.INPUT
_NOT_FOUND: Final = Failure(404, "no such invocation", "NotFound")
_ELSEWHERE: Final = Result(Code.CONFLICT, "this id belongs to another partition")
_OTHER_BODY: Final = Result(
    Code.MISMATCH,
    "this Idempotency-Key was used before, with another body: the request was not accepted; use a new key for a new request",
)
_NO_NAME: Final = Result(Code.MALFORMED, f"the name of a service must have at most {NAME_BYTES_MAX} bytes")
_CANCELLED_BEFORE: Final = Result(
    Code.UNCHANGED, "the invocation was cancelled before its output: another attempt notices it"
)
_CANCELLED: Final[list[Any]] = pack_outcome(CANCELLED)
_KILLED: Final[list[Any]] = pack_outcome(KILLED)
_ENDS: Final = {CANCELLED.kind: End.CANCELLED, KILLED.kind: End.KILLED}
_COUNTED: Final = {
    End.SUCCEEDED: Count.SUCCEEDED,
    End.FAILED: Count.FAILED,
    End.CANCELLED: Count.CANCELLED,
    End.KILLED: Count.KILLED,
}
_SCHEDULED: Final = Status.SCHEDULED
_QUEUED: Final = Status.QUEUED
_RUNNING: Final = Status.RUNNING
_SUSPENDED: Final = Status.SUSPENDED
_BACKING_OFF: Final = Status.BACKING_OFF
_PAUSED: Final = Status.PAUSED
_COMPLETED: Final = Status.COMPLETED
_SUCCEEDED: Final = End.SUCCEEDED
_FAILED: Final = End.FAILED


def invoke(state: State, command: Invoke) -> Result:
    """Begin an invocation. A known id changes nothing, so every way of asking twice is harmless."""
    (
        ident, service, handler, key, mode, payload, headers, start_at_ms, caller, caller_step, retention_ms,
        idempotency_key, request_hash, chain, depth, callers, tags,
    ) = command  # fmt: skip
    if chain and caller is not None and mode in _HOLDS_KEY and _label(service, key) in chain:
        return _deadlock(state, command, caller)
    record = state.load(ident)
    if record is not None:
        if request_hash and _is_another_request(record, command):
            return _OTHER_BODY
        if caller is not None and caller_step >= 0:
            _listen(state, record, caller, caller_step)
        return Result(Code.UNCHANGED, "the invocation is already known")
    raw = state.get(COMPLETED + ident)
    if raw is not None:
        if request_hash and _is_another_request(unpack_completed(ident, raw), command):
            return _OTHER_BODY
        outcome = unpack_completed_outcome(raw)
        if caller is not None and caller_step >= 0:
            post(state, CompleteStep(caller, caller_step, outcome, True))
        return Result(Code.UNCHANGED, "the invocation is already completed", outcome)
    if not state.is_here(ident):
        return _ELSEWHERE
    if depth > state.meta.call_depth_max and caller is not None:
        return _too_deep(state, command, caller)
    if len(service.encode()) > NAME_BYTES_MAX:
        return _NO_NAME
    now_ms = state.now_ms
    times = (now_ms, now_ms, 0) if state.level >= 2 else ()
    step: bytes = pack((_INPUT_OP, "", (headers,), 1, 1, (0, payload), False, *times))
    record = Invocation(  # By position: names would cost a microsecond per invocation.
        ident,
        _SCHEDULED,
        0,
        service,
        handler,
        key,
        mode,
        NO_OBJECT if key is None else object_id(service, key),
        now_ms,
        now_ms,
        retention_ms,
        caller,
        caller_step,
        idempotency_key,
        0,
        1,
        len(step),
        1,
        request_hash=request_hash if state.level >= 2 else b"",
        chain=chain or (),
        depth=depth,
        callers=callers or (),
    )
    if tags and state.level >= 2:
        record.tags = tags
    large = 0
    if type(payload) is Ref:
        blobs.add_to_journal(state, record, payload)
        large = record.blob_bytes
    state.put(JOURNAL + ident + _INPUT, step)
    first = First(service, handler, key, mode, step, large)  # By position, like the record.
    admit(state, record, min(start_at_ms, TIME_MAX), first)
    return OK


def _deadlock(state: State, command: Invoke, caller: InvocationId) -> Result:
    """Refuse a call that would wait for its key for ever, because the holder of the key waits for the call."""
    name = _label(command.service, command.key)
    chain = list(command.chain)
    cycle = " → ".join([*chain[chain.index(name) :], name])
    message = cut_text(
        f"deadlock: {cycle}. The call waits for a key that one of its callers holds while it waits for the call; "
        "use ctx.send, call a shared handler, or do the work in the handler that holds the key"
    )
    post(state, CompleteStep(caller, command.caller_step, failed(409, message, "Deadlock"), True))
    return Result(Code.CONFLICT, message)


def chain_of(state: State, record: Invocation) -> Sequence[str]:
    """The keys that stay held while a call of this invocation is in progress. The chain is bounded; keys
    beyond the bound are not examined."""
    if state.level < 2:
        return ()
    chain = record.chain
    if record.mode not in _HOLDS_KEY or not record.oid:
        return chain
    return (*chain, _label(record.service, record.key)) if len(chain) < _CHAIN_MAX else chain


def _label(service: str, key: str | None) -> str:
    """The name of a key in a chain: short, because every call carries the whole chain, and different for every key."""
    name = f"{service}/{key}"
    if len(name) <= _LABEL_CHARS:
        return name
    digest = blake2b(name.encode(errors="surrogatepass"), digest_size=12).hexdigest()
    return f"{name[: _LABEL_CHARS // 2]}…{digest}"


def _too_deep(state: State, command: Invoke, caller: InvocationId) -> Result:
    """Handlers that call each other without end would fill the cluster with invocations that wait."""
    named = " → ".join([*command.callers, path_of(command.service, command.handler, command.key)])
    if command.depth > len(command.callers):
        named = f"… → {named}"
    message = cut_text(
        f"the call would be nested {command.depth} deep, and the limit is {state.meta.call_depth_max} (the setting "
        f"call_depth_max): {named}. End the recursion, use ctx.send for work that nobody waits for, or raise the limit"
    )
    post(state, CompleteStep(caller, command.caller_step, failed(409, message, "CallTooDeep"), True))
    return Result(Code.CONFLICT, message)


def depth_of_call(state: State, record: Invocation) -> tuple[int, Sequence[str]]:
    """The depth of a call that this invocation makes and, near the limit, the nearest invocations that wait for it."""
    if state.level < 2:
        return 0, ()
    depth = record.depth + 1
    if depth <= state.meta.call_depth_max + 1 - _CALLERS_MAX:
        return depth, ()
    return depth, (*record.callers, path_of(record.service, record.handler, record.key))[-_CALLERS_MAX:]


def path_of(service: str, handler: str, key: str | None) -> str:
    path = f"{service}/{handler}" if key is None else f"{service}/{key}/{handler}"
    return path if len(path) <= _CALLER_CHARS else path[: _CALLER_CHARS - 1] + "…"


def _is_another_request(record: Invocation, command: Invoke) -> bool:
    """Whether a client used an idempotency key for another request. Records of older releases cannot tell."""
    return record.request_hash not in (b"", command.request_hash) and record.idempotency_key == command.idempotency_key


def admit(state: State, record: Invocation, start_at_ms: int, first: First | None) -> None:
    """Start a new invocation, or schedule it."""
    counters = state.counters(record.service)
    counters[_SCHEDULED] += 1
    counters[Count.INVOKED] += 1
    state.add(record)
    listing.add(state, record)
    if start_at_ms > state.now_ms:
        record.due_ms = start_at_ms
        state.moved[record.id] = record
        timers.arm(state, timers.of_invocation(start_at_ms, record.id))
    else:
        enter(state, record, first)


def enter(state: State, record: Invocation, first: First | None = None) -> None:
    """Start an invocation whose time has come, or queue it for its key."""
    if record.mode in _HOLDS_KEY and record.oid and not keys.acquire(state, record):
        attempts.set_status(state, record, _QUEUED)
    else:
        attempts.begin(state, record, first)


def awaken(state: State, record: Invocation, due_ms: int) -> None:
    """The timer of the invocation itself fired."""
    if record.due_ms != due_ms:
        return
    if record.status == _SCHEDULED:
        record.due_ms = 0
        enter(state, record)
    elif record.status == _BACKING_OFF:
        record.due_ms = 0
        attempts.begin(state, record)


def _listen(state: State, record: Invocation, caller: InvocationId, step: int) -> None:
    if (record.caller, record.caller_step) != (caller, step):
        state.put(LISTENER + record.id + caller + step_bytes(step), b"")
        record.listeners += 1
        state.touch(record)


def attach(state: State, command: AttachTo) -> Result:
    """Give a step of another invocation the outcome, now or when it is there."""
    record = state.load(command.id)
    if record is not None:
        _listen(state, record, command.caller, command.caller_step)
        return OK
    raw = state.get(COMPLETED + command.id)
    outcome: list[Any] = pack_outcome(_NOT_FOUND) if raw is None else unpack_completed_outcome(raw)
    post(state, CompleteStep(command.caller, command.caller_step, outcome, True))
    return OK


def complete(state: State, command: Complete) -> Result:
    record = attempts.current(state, command.id, command.epoch)
    if record is None:
        return attempts.STALE
    if 0 <= command.length != record.length:
        # An earlier step is missing: a write or a send would be lost although the invocation succeeded.
        return attempts.misplaced(state, record, f"the output follows {command.length} steps")
    attempts.pin(state, record, command.deployment)
    if state.level >= 2 and record.cancelled and command.notices and is_success(command.outcome):
        # The code returned before it learned of the cancellation. The next attempt tells it, so that it can compensate.
        attempts.begin(state, record)
        return _CANCELLED_BEFORE
    end(state, record, command.outcome)
    return OK


def end(state: State, record: Invocation, outcome: list[Any]) -> None:
    """Complete an invocation: everything that waits gets the outcome, and the key passes on."""
    ident = record.id
    state.effects.append(Reply(ident, outcome))
    if record.caller is not None and record.caller_step >= 0:
        post(state, CompleteStep(record.caller, record.caller_step, outcome, True))
    if record.listeners:
        _tell_listeners(state, record, outcome)
    for index in steps.pending(state, record):
        found = steps.load(state, record, index)
        assert found is not None, "a step that waits is in the journal"
        steps.unwait(state, record, index, found[0])
    if record.deployment is not None:
        state.count_deployment(record.deployment, -1)
    next_holder = _let_go(state, record)
    failure = failure_of(outcome)
    record.end = _SUCCEEDED if failure is None else _ENDS.get(failure.kind, _FAILED)
    record.code = 0 if failure is None else failure.code
    record.due_ms = timers.due_in(state, record.retention_ms)
    if record.in_failing:
        failing.forgive(state, record)
    attempts.set_status(state, record, _COMPLETED)
    if failure is not None:
        failing.keep(state, record)
    state.counters(record.service)[_COUNTED[record.end]] += 1
    state.remove(record)
    retention.keep(state, record, outcome)
    if state.meta.hooks:
        hooks.note_end(state, record, outcome, failed=record.end == _FAILED)
    if next_holder is not None:
        attempts.begin(state, next_holder)


def _let_go(state: State, record: Invocation) -> Invocation | None:
    """Release what the invocation holds in its status. Returns the next holder of its key."""
    status = record.status
    if status in (_SCHEDULED, _BACKING_OFF):
        timers.disarm(state, timers.of_invocation(record.due_ms, record.id))
    if record.mode not in _HOLDS_KEY or not record.oid or status == _SCHEDULED:
        return None
    if status == _QUEUED:
        keys.leave(state, record)
        return None
    return keys.release(state, record)


def _tell_listeners(state: State, record: Invocation, outcome: list[Any]) -> None:
    prefix = LISTENER + record.id
    found = [key for key, _ in state.scan(prefix, after(prefix))]
    for key in found:
        state.delete(key)
        post(state, CompleteStep(InvocationId(key[17:33]), int.from_bytes(key[33:], "big"), outcome, True))
    record.listeners = 0


def cancel(state: State, command: Cancel) -> Result:
    """The steps it waits for fail as cancelled, and its calls are cancelled too. If it waits for nothing, its next wait
    fails. The code may catch the failure, clean up, and complete as it likes."""
    record = state.load(command.id)
    if record is None:
        return attempts.missing(state, command.id)
    if record.status in (_SCHEDULED, _QUEUED):
        end(state, record, _CANCELLED)
        return OK
    waiting = 0
    for index in steps.pending(state, record):
        found = steps.load(state, record, index)
        assert found is not None, "a step that waits is in the journal"
        step, size = found
        if step.op == Op.RUN and not steps.is_retrying(step):
            continue  # Its function is running: only the attempt can tell how it ended.
        if step.op == Op.CALL:
            post(state, Cancel(step.argument[-1]))
        steps.finish(state, record, index, step, size=size, outcome=_CANCELLED)
        waiting += 1
    if not waiting:
        if record.cancelled:
            return Result(Code.UNCHANGED, "the invocation is already being cancelled")
        record.cancelled = True
        record.order += 1
        state.touch(record)
        if record.status == _RUNNING:
            state.effects.append(SendCancelled(record.id, record.epoch, record.order))
        elif record.status == _SUSPENDED:
            attempts.begin(state, record)
    if record.status in (_BACKING_OFF, _PAUSED):
        attempts.run_now(state, record)
    return OK


def kill(state: State, command: Kill) -> Result:
    record = state.load(command.id)
    if record is None:
        return attempts.missing(state, command.id)
    if record.status == _RUNNING:
        state.effects.append(AbortAttempt(record.id, record.epoch, KILLED.message))
    for index in steps.pending(state, record):
        found = steps.load(state, record, index)
        assert found is not None, "a step that waits is in the journal"
        if found[0].op == Op.CALL:
            post(state, Kill(found[0].argument[-1]))
    end(state, record, _KILLED)
    return OK
