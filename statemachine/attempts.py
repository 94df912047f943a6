"""Attempts: how they begin, how they are fenced, and what becomes of an invocation whose attempt failed.

An attempt is numbered by its epoch. Its commands count only while its epoch is the invocation's and the invocation is
running: a zombie can neither append a step nor complete anything.
"""

from __future__ import annotations

from typing import Final

from holdfast.sdk.ids import DeploymentId, InvocationId
from holdfast.sdk.journal import Failure, pack_outcome
from holdfast.statemachine import history, hooks, timers
from holdfast.statemachine.commands import FailAttempt, Pause, PostponeAttempt, Redispatch, Resume, Retry
from holdfast.statemachine.effects import OK, AbortAttempt, Code, First, Result, StartAttempt, Status
from holdfast.statemachine.history import Ended
from holdfast.statemachine.outcomes import Packed, details_of, failure_of
from holdfast.statemachine.records import Count, Invocation, pack, unpack_step
from holdfast.statemachine.state import State
from holdfast.statemachine.tables import COMPLETED, FAILURE, JOURNAL, step_bytes

STALE: Final = Result(Code.CONFLICT, "the attempt is over: a newer one replaced it, or the invocation is not running")
UNKNOWN: Final = Result(Code.NOT_FOUND, "no such invocation")
DONE: Final = Result(Code.CONFLICT, "the invocation is completed")
#: After this many lost streams, an invocation may be what ends the process: it runs beside fewer and fewer others,
SUSPECT_LOSSES: Final = 2
#: after pauses that start here and double, so that the others have time to finish.
QUIET_MS: Final = 500
#: After this many it is paused.
LOSSES_MAX: Final = 5
_DEFAULT_RETRY: Final = Retry()
#: Steps of a backoff that are calculated. An interval that is still below its maximum grows no further.
_DOUBLINGS_MAX: Final = 1000
_RUNNING: Final = Status.RUNNING
_PAUSED: Final = Status.PAUSED
_BACKING_OFF: Final = Status.BACKING_OFF
_SCHEDULED: Final = Status.SCHEDULED
_QUEUED: Final = Status.QUEUED


def set_status(state: State, record: Invocation, status: Status) -> None:
    counters = state.counters(record.service)
    counters[record.status] -= 1
    counters[status] += 1
    record.status = status
    record.since_ms = state.now_ms
    state.changed[record.id] = state.moved[record.id] = record


def begin(state: State, record: Invocation, first: First | None = None) -> None:
    """Begin the next attempt. Commands of older attempts are void from here on."""
    counters = state.counters(record.service)
    counters[record.status] -= 1
    counters[_RUNNING] += 1
    counters[Count.ATTEMPTS] += 1
    record.status = _RUNNING
    record.since_ms = state.now_ms
    record.epoch += 1
    state.changed[record.id] = state.moved[record.id] = record
    state.effects.append(StartAttempt(record.id, record.epoch, first))


def current(state: State, ident: InvocationId, epoch: int) -> Invocation | None:
    """The invocation, if this is its current attempt. Otherwise the process that runs the attempt is told to stop."""
    record = state.load(ident)
    if record is not None and record.epoch == epoch and record.status == _RUNNING:
        return record
    state.effects.append(AbortAttempt(ident, epoch, STALE.message))
    return None


def missing(state: State, ident: InvocationId) -> Result:
    """The refusal for an id without an active invocation."""
    return UNKNOWN if state.get(COMPLETED + ident) is None else DONE


def pin(state: State, record: Invocation, deployment: DeploymentId | None) -> None:
    """Pin the invocation to a deployment: the code that resumes is the code that started."""
    if deployment is not None and deployment != record.deployment:
        if record.deployment is not None:
            state.count_deployment(record.deployment, -1)
        record.deployment = deployment
        state.count_deployment(deployment, 1)
        state.changed[record.id] = record


def redispatch(state: State, command: Redispatch) -> Result:
    record = state.load(command.id)
    if record is None:
        return missing(state, command.id)
    if record.epoch != command.epoch or record.status != _RUNNING:
        return STALE
    history.remember(state, record, Ended.AGAIN)
    begin(state, record)
    return OK


def fail(state: State, command: FailAttempt) -> Result:
    record = current(state, command.id, command.epoch)
    if record is None:
        return STALE
    if command.lost and state.level >= 2:
        lose(state, record, command)
        return OK
    failed(
        state,
        record,
        command.failure,
        command.retry,
        jitter=command.jitter_ms,
        retry_after_ms=command.retry_after_ms,
        pause=command.pause,
    )
    return OK


def refuse(state: State, record: Invocation, failure: Failure, *, pause: bool) -> Result:
    """End the attempt because its request cannot be carried out. It counts as failed."""
    state.effects.append(AbortAttempt(record.id, record.epoch, failure.message))
    failed(state, record, pack_outcome(failure), _DEFAULT_RETRY, jitter=0, retry_after_ms=0, pause=pause)
    return Result(Code.CONFLICT, failure.message)


def misplaced(state: State, record: Invocation, what: str) -> Result:
    """End an attempt that disagrees with the journal about its length. The next attempt starts from the journal."""
    message = f"{what}, but the journal has {record.length} steps"
    return refuse(state, record, Failure(500, message, "JournalMismatch"), pause=False)


def failed(
    state: State,
    record: Invocation,
    failure: Packed,
    retry: Retry,
    *,
    jitter: int,
    retry_after_ms: int,
    pause: bool,
) -> None:
    record.failures += 1
    record.failures_total += 1
    if not record.failing_since_ms:
        record.failing_since_ms = state.now_ms
    state.counters(record.service)[Count.ATTEMPTS_FAILED] += 1
    history.remember(state, record, Ended.FAILED, failure)
    state.put(FAILURE + record.id, pack([record.epoch, state.now_ms, *details_of(failure)]))
    if pause or gives_up(state, retry, record.failures, record.failing_since_ms):
        _set_paused(state, record, failure)
        return
    record.due_ms = timers.due_in(state, retry_after_ms or backoff_ms(retry, record.failures, jitter))
    set_status(state, record, _BACKING_OFF)
    timers.arm(state, timers.of_invocation(record.due_ms, record.id))


def lose(state: State, record: Invocation, command: FailAttempt) -> None:
    """The handler's process ended while the attempt ran. Once means nothing: processes are restarted, and networks break.
    If it happens repeatedly without progress in between, the code of this invocation may be what ends the process, and
    then its neighbours suffer too. So its pauses grow, the leader runs it beside fewer and fewer others
    (`cluster.handlers.queue`), and finally it waits for an operator."""
    history.remember(state, record, Ended.LOST, command.failure)
    record.losses += 1
    failure = failure_of(command.failure)
    assert failure is not None, "a lost attempt brings a failure"
    if record.losses < SUSPECT_LOSSES:
        begin(state, record)
        return
    record.failures_total += 1
    state.counters(record.service)[Count.ATTEMPTS_FAILED] += 1
    message = (
        f"the handler process ended {record.losses} times while it ran this invocation, {_last_step(state, record)}. "
        f"The last time: {failure.message}"
    )
    state.put(FAILURE + record.id, pack([record.epoch, state.now_ms, failure.code, message, failure.kind]))
    if record.losses >= LOSSES_MAX:
        _set_paused(state, record, pack_outcome(failure._replace(message=message)))
        return
    repeated = record.losses - SUSPECT_LOSSES
    pause_ms = max(backoff_ms(command.retry, repeated + 1, command.jitter_ms), QUIET_MS << repeated)
    record.due_ms = timers.due_in(state, pause_ms + abs(command.jitter_ms) % (pause_ms // 2 + 1))
    set_status(state, record, _BACKING_OFF)
    timers.arm(state, timers.of_invocation(record.due_ms, record.id))


def _last_step(state: State, record: Invocation) -> str:
    raw = state.get(JOURNAL + record.id + step_bytes(record.length - 1)) if record.length > 1 else None
    return "before its first step" if raw is None else f"after the step {unpack_step(raw).key!r}"


def postpone(state: State, command: PostponeAttempt) -> Result:
    record = current(state, command.id, command.epoch)
    if record is None:
        return STALE
    history.remember(state, record, Ended.POSTPONED, command.failure)
    state.put(FAILURE + record.id, pack([record.epoch, state.now_ms, *details_of(command.failure)]))
    record.due_ms = timers.due_in(state, max(command.delay_ms, 0))
    set_status(state, record, _BACKING_OFF)
    timers.arm(state, timers.of_invocation(record.due_ms, record.id))
    return OK


def gives_up(state: State, retry: Retry, failures: int, since_ms: int) -> bool:
    if retry.max_attempts and failures >= retry.max_attempts:
        return True
    return bool(retry.max_duration_ms and state.now_ms - since_ms >= retry.max_duration_ms)


def backoff_ms(retry: Retry, failures: int, jitter: int) -> int:
    """The pause before the next try, after this many failures. `jitter` may be any number: it is folded into the range
    that the policy allows."""
    interval = retry.initial_ms
    for _ in range(min(failures - 1, _DOUBLINGS_MAX)):
        if interval >= retry.max_interval_ms or retry.factor_permille == 1000:
            break
        interval = interval * retry.factor_permille // 1000
    interval = max(min(interval, retry.max_interval_ms), 0)
    return interval + abs(jitter) % (max(interval * retry.jitter_permille // 1000, 0) + 1)


def pause(state: State, command: Pause) -> Result:
    record = state.load(command.id)
    if record is None:
        return missing(state, command.id)
    if record.status == _PAUSED:
        return Result(Code.UNCHANGED, "the invocation is already paused")
    if record.status in (_SCHEDULED, _QUEUED):
        return Result(Code.CONFLICT, "the invocation has not started yet: cancel it, or wait until it runs")
    if record.status == _RUNNING:
        state.effects.append(AbortAttempt(record.id, record.epoch, "the invocation was paused"))
        history.remember(state, record, Ended.PAUSED)
        record.epoch += 1
    wake(state, record)
    _set_paused(state, record, None)
    return OK


def _set_paused(state: State, record: Invocation, failure: Packed | None) -> None:
    """`failure`: why it is paused; None: an operator wants it."""
    set_status(state, record, _PAUSED)
    if state.meta.hooks:
        hooks.note_pause(state, record, failure)


def wake(state: State, record: Invocation) -> None:
    """End its backoff early."""
    if record.status == _BACKING_OFF:
        timers.disarm(state, timers.of_invocation(record.due_ms, record.id))
        record.due_ms = 0


def resume(state: State, command: Resume) -> Result:
    record = state.load(command.id)
    if record is None:
        return missing(state, command.id)
    moves = command.deployment is not None and command.deployment != record.deployment
    pin(state, record, command.deployment)
    if record.status in (_PAUSED, _BACKING_OFF):
        run_now(state, record)
        return OK
    if moves and record.status == _RUNNING:
        state.effects.append(AbortAttempt(record.id, record.epoch, "the invocation was moved to another deployment"))
        history.remember(state, record, Ended.MOVED)
        begin(state, record)
        return OK
    return OK if moves else Result(Code.UNCHANGED, "the invocation is neither paused nor backing off")


def run_now(state: State, record: Invocation) -> None:
    wake(state, record)
    record.failures = 0
    record.failing_since_ms = 0
    record.losses = 0
    begin(state, record)
