"""The life of an invocation: begin, wait for its time and its key, complete, be cancelled or killed.

    scheduled -> queued -> running -> suspended | backing off | paused -> ... -> completed

`attempts` has what happens between running and completed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from holdfast.sdk.ids import object_id
from holdfast.sdk.journal import (
    CANCELLED,
    KILLED,
    NAME_BYTES_MAX,
    Failure,
    Op,
    cut_text,
    pack_outcome,
)
from holdfast.statemachine import attempts, blobs, keys, listing, retention, steps, timers
from holdfast.statemachine.commands import AttachTo, Cancel, Complete, CompleteStep, Invoke, Kill, Mode, Ref
from holdfast.statemachine.effects import OK, AbortAttempt, First, Reply, Result, SendCancelled, Status
from holdfast.statemachine.outbox import post
from holdfast.statemachine.records import Count, End, Invocation, pack, unpack_completed, unpack_completed_outcome
from holdfast.statemachine.state import State
from holdfast.statemachine.tables import COMPLETED, JOURNAL, LISTENER, TIME_MAX, after, step_bytes

_CHAIN_MAX: Final = 16  # keys that one call after the other holds, for which a deadlock is found,
_CHAIN_CHARS_MAX: Final = 2048  # and of how many characters.
_HOLDS_KEY: Final = (Mode.EXCLUSIVE, Mode.WORKFLOW)
_INPUT: Final = step_bytes(0)
_NOT_FOUND: Final = Failure(404, "no such invocation", "NotFound")
_ELSEWHERE: Final = Result(409, "this id belongs to another partition")
_OTHER_BODY: Final = Result(
    422,
    "this Idempotency-Key was used before, with another body: nothing was accepted; use a new key for a new request",
)
_NO_NAME: Final = Result(400, f"the name of a service has at most {NAME_BYTES_MAX} bytes")
_CANCELLED_BEFORE: Final = Result(200, "it was cancelled before its output: another attempt notices it")
_CANCELLED: Final[list[Any]] = pack_outcome(CANCELLED)
_KILLED: Final[list[Any]] = pack_outcome(KILLED)
_ENDS: Final = {CANCELLED.kind: End.CANCELLED, KILLED.kind: End.KILLED}
_COUNTED: Final = {
    End.SUCCEEDED: Count.SUCCEEDED,
    End.FAILED: Count.FAILED,
    End.CANCELLED: Count.CANCELLED,
    End.KILLED: Count.KILLED,
}


def invoke(state: State, command: Invoke) -> Result:
    """A known id changes nothing: that is what makes every way of asking twice harmless."""
    (
        ident, service, handler, key, mode, payload, headers, start_at_ms, caller, caller_step, retention_ms,
        idempotency_key, request_hash, chain,
    ) = command  # fmt: skip
    if chain and caller is not None and mode in _HOLDS_KEY and f"{service}/{key}" in chain:
        return _deadlock(state, command, caller)
    record = state.load(ident)
    if record is not None:
        if request_hash and _is_another_request(record, command):
            return _OTHER_BODY
        if caller is not None and caller_step >= 0:
            _listen(state, record, caller, caller_step)
        return Result(200, "it is known already")
    raw = state.get(COMPLETED + ident)
    if raw is not None:
        if request_hash and _is_another_request(unpack_completed(ident, raw), command):
            return _OTHER_BODY
        outcome = unpack_completed_outcome(raw)
        if caller is not None and caller_step >= 0:
            post(state, CompleteStep(caller, caller_step, outcome, True))
        return Result(200, "it is completed already", outcome)
    if not state.is_here(ident):
        return _ELSEWHERE
    if len(service.encode()) > NAME_BYTES_MAX:
        return _NO_NAME
    now_ms = state.now_ms
    times = (now_ms, now_ms, 0) if state.level >= 2 else ()
    step: bytes = pack((Op.INPUT, "", (headers,), 1, 1, (0, payload), False, *times))
    record = Invocation(
        ident,
        Status.SCHEDULED,
        0,
        service,
        handler,
        key,
        mode,
        b"" if key is None else object_id(service, key),
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
    )
    large = 0
    if type(payload) is Ref:
        blobs.add_to_journal(state, record, payload)
        large = record.blob_bytes
    state.put(JOURNAL + ident + _INPUT, step)
    admit(state, record, min(start_at_ms, TIME_MAX), First(service, handler, key, mode, step, large))
    return OK


def _deadlock(state: State, command: Invoke, caller: bytes) -> Result:
    """It would wait for its key for ever: whoever holds that waits for it."""
    name = f"{command.service}/{command.key}"
    chain = list(command.chain)
    cycle = " → ".join([*chain[chain.index(name) :], name])
    message = cut_text(
        f"deadlock: {cycle}. The call waits for a key that one of its callers holds while it waits for the call; "
        "use ctx.send, call a shared handler, or do the work in the handler that holds the key"
    )
    post(state, CompleteStep(caller, command.caller_step, [1, 409, message, "Deadlock"], True))
    return Result(409, message)


def chain_of(state: State, record: Invocation) -> Sequence[str]:
    """The keys that are held while a call of this invocation is waited for. Bounded: what is beyond is not looked at."""
    if state.level < 2:
        return ()
    chain = record.chain
    if record.mode not in _HOLDS_KEY or not record.oid:
        return chain
    name = f"{record.service}/{record.key}"
    if len(chain) >= _CHAIN_MAX or sum(map(len, chain)) + len(name) > _CHAIN_CHARS_MAX:
        return chain
    return (*chain, name)


def _is_another_request(record: Invocation, command: Invoke) -> bool:
    """Whether a client used an idempotency key again for something else. A record of an older release cannot tell."""
    return record.request_hash not in (b"", command.request_hash) and record.idempotency_key == command.idempotency_key


def admit(state: State, record: Invocation, start_at_ms: int, first: First | None) -> None:
    """A new invocation: let it run, or wait for its time."""
    counters = state.counters(record.service)
    counters[Status.SCHEDULED] += 1
    counters[Count.INVOKED] += 1
    state.add(record)
    listing.add(state, record)
    if start_at_ms > state.now_ms:
        record.due_ms = start_at_ms
        timers.arm(state, start_at_ms, record.id)
    else:
        enter(state, record, first)


def enter(state: State, record: Invocation, first: First | None = None) -> None:
    """Its time has come: let it run, or wait for its key."""
    if record.mode in _HOLDS_KEY and record.oid and not keys.acquire(state, record):
        attempts.set_status(state, record, Status.QUEUED)
    else:
        attempts.begin(state, record, first)


def awaken(state: State, record: Invocation, due_ms: int) -> None:
    """The timer of the invocation itself fired."""
    if record.due_ms != due_ms:
        return
    if record.status == Status.SCHEDULED:
        record.due_ms = 0
        enter(state, record)
    elif record.status == Status.BACKING_OFF:
        record.due_ms = 0
        attempts.begin(state, record)


def _listen(state: State, record: Invocation, caller: bytes, step: int) -> None:
    if (record.caller, record.caller_step) != (caller, step):
        state.put(LISTENER + record.id + caller + step_bytes(step), b"")
        record.listeners += 1
        state.touch(record)


def attach(state: State, command: AttachTo) -> Result:
    """Another invocation's step wants the outcome, now or later."""
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
        # A step in front of it did not get here: a write or a send would be lost behind a success.
        return attempts.misplaced(state, record, f"the output follows {command.length} steps")
    attempts.pin(state, record, command.deployment)
    if state.level >= 2 and record.cancelled and command.notices and command.outcome[0] == 0:
        # The code knew nothing of the cancellation when it returned. It gets to know in the next attempt, and compensates.
        attempts.begin(state, record)
        return _CANCELLED_BEFORE
    end(state, record, command.outcome)
    return OK


def end(state: State, record: Invocation, outcome: list[Any]) -> None:
    """It is completed: everybody who waits gets the outcome, and the next may have its key."""
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
    heir = _let_go(state, record)
    record.end = End.SUCCEEDED if outcome[0] == 0 else _ENDS.get(outcome[3], End.FAILED)
    record.code = 0 if outcome[0] == 0 else outcome[1]
    record.due_ms = timers.due_in(state, record.retention_ms)
    attempts.set_status(state, record, Status.COMPLETED)
    state.counters(record.service)[_COUNTED[record.end]] += 1
    state.remove(record)
    retention.keep(state, record, outcome)
    if heir is not None:
        attempts.begin(state, heir)


def _let_go(state: State, record: Invocation) -> Invocation | None:
    """Give up what its status holds. Who has its key now instead."""
    status = record.status
    if status in (Status.SCHEDULED, Status.BACKING_OFF):
        timers.disarm(state, record.due_ms, record.id)
    if record.mode not in _HOLDS_KEY or not record.oid or status == Status.SCHEDULED:
        return None
    if status == Status.QUEUED:
        keys.leave(state, record)
        return None
    return keys.release(state, record)


def _tell_listeners(state: State, record: Invocation, outcome: list[Any]) -> None:
    prefix = LISTENER + record.id
    found = [key for key, _ in state.scan(prefix, after(prefix))]
    for key in found:
        state.delete(key)
        post(state, CompleteStep(key[17:33], int.from_bytes(key[33:], "big"), outcome, True))
    record.listeners = 0


def cancel(state: State, command: Cancel) -> Result:
    """What it waits for fails as cancelled, and what it called is cancelled too. If it waits for nothing, its next wait
    fails. Code that catches the failure may clean up, and completes as it likes."""
    record = state.load(command.id)
    if record is None:
        return attempts.missing(state, command.id)
    if record.status in (Status.SCHEDULED, Status.QUEUED):
        end(state, record, _CANCELLED)
        return OK
    waiting = 0
    for index in steps.pending(state, record):
        found = steps.load(state, record, index)
        assert found is not None, "a step that waits is in the journal"
        step, size = found
        if step[steps.OP] == Op.RUN and not steps.is_retrying(step):
            continue  # Its function runs: only who runs it can say how it ended.
        if step[steps.OP] == Op.CALL:
            post(state, Cancel(step[steps.ARGUMENT][-1]))
        steps.finish(state, record, index, step, size, _CANCELLED)
        waiting += 1
    if not waiting:
        if record.cancelled:
            return Result(200, "it is being cancelled already")
        record.cancelled = True
        record.order += 1
        state.touch(record)
        if record.status == Status.RUNNING:
            state.effects.append(SendCancelled(record.id, record.epoch, record.order))
        elif record.status == Status.SUSPENDED:
            attempts.begin(state, record)
    if record.status in (Status.BACKING_OFF, Status.PAUSED):
        attempts.run_now(state, record)
    return OK


def kill(state: State, command: Kill) -> Result:
    record = state.load(command.id)
    if record is None:
        return attempts.missing(state, command.id)
    if record.status == Status.RUNNING:
        state.effects.append(AbortAttempt(record.id, record.epoch, KILLED.message))
    for index in steps.pending(state, record):
        found = steps.load(state, record, index)
        assert found is not None, "a step that waits is in the journal"
        if found[0][steps.OP] == Op.CALL:
            post(state, Kill(found[0][steps.ARGUMENT][-1]))
    end(state, record, _KILLED)
    return OK
