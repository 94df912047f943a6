"""Steps that wait: what each of them set up, how it gets its outcome, and how the attempt learns of it."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from holdfast.sdk.journal import By, Op
from holdfast.statemachine import approvals, attempts, blobs, ops, promises, refs, timers
from holdfast.statemachine.commands import AbandonStep, CompleteStep, DecideStep, SuspendAttempt
from holdfast.statemachine.effects import OK, Code, Result, SendCompletion, SendRetry, Status
from holdfast.statemachine.outcomes import DONE, Packed, failed
from holdfast.statemachine.records import Invocation, Step, pack_step, unpack_step
from holdfast.statemachine.state import State
from holdfast.statemachine.tables import COMPLETED, JOURNAL, PENDING, STEP_END, after, step_bytes
from holdfast.statemachine.timers import Timer


class Tries(NamedTuple):
    """The argument of a RUN that failed, after its name. A RUN without an outcome whose argument is its name alone was
    started by an attempt that may or may not have carried it out. It is in doubt once that attempt is lost."""

    failures: int
    due_ms: int  # 0: the backoff is over, and the RUN may begin
    message: str
    since_ms: int
    trace: Sequence[str] | None = None

    def argument(self, name: str) -> list[Any]:
        """The whole argument of the RUN `name`."""
        return [name, *(self if self.trace else self[:-1])]


#: Operations that the state machine completes by `CompleteStep`, and those that clients and other handlers complete by it.
_ANSWERED: Final = ops.those(lambda row: row.by in (By.INVOCATION, By.PROMISE))
_AWAKENED: Final = ops.those(lambda row: row.by is By.CLIENT)
_RUN: Final = Op.RUN
_SLEEP: Final = Op.SLEEP
_PROMISE: Final = Op.PROMISE
_APPROVAL: Final = Op.APPROVAL
_FAILURES: Final = 1 + Tries._fields.index("failures")
_DUE: Final = 1 + Tries._fields.index("due_ms")
_TRIES_MIN: Final = 1 + Tries._fields.index("since_ms")  # Journals of the first releases have shorter arguments.
_SAME: Final = Result(Code.UNCHANGED, "the step was completed before, with this outcome")
_TOO_MUCH: Final = failed(413, "the large values of this journal pass their limit with this outcome", "JournalTooLong")
_RUNNING: Final = Status.RUNNING
_SUSPENDED: Final = Status.SUSPENDED
_PAUSED: Final = Status.PAUSED


def load(state: State, record: Invocation, index: int) -> tuple[Step, int] | None:
    """A step and its size in bytes."""
    if not 0 <= index < record.length:
        return None
    raw = state.get(JOURNAL + record.id + step_bytes(index))
    return None if raw is None else (unpack_step(raw), len(raw))


def store(state: State, record: Invocation, index: int, step: Step, size: int) -> None:
    """Replace a step that took `size` bytes."""
    raw = pack_step(step)
    state.put(JOURNAL + record.id + step_bytes(index), raw)
    record.size += len(raw) - size
    state.changed[record.id] = record


def stamp(state: State, record: Invocation, step: Step, began_ms: int = 0) -> None:
    """Note that the step changes now. `began_ms`: when its function began, by the clock of the handler's process."""
    if state.level < 2:
        return
    if began_ms:
        step.began_ms = credible(state, record, began_ms)
        step.epoch = record.epoch
    elif step.journaled_ms is None:
        step.epoch = record.epoch
    step.journaled_ms = state.now_ms


def credible(state: State, record: Invocation, began_ms: int) -> int:
    """When the function of a step began, as far as another machine's clock can be believed: not before its attempt, and
    not after now."""
    return min(max(began_ms, record.since_ms), state.now_ms)


def tries_of(step: Step) -> Tries | None:
    """The tries of a RUN that failed and has no outcome yet."""
    argument = step.argument
    return Tries(*argument[1:]) if step.op == _RUN and len(argument) > _TRIES_MIN else None


def forgive(state: State, record: Invocation, step: Step) -> None:
    """The failed tries of a step no longer make the invocation look failing."""
    if record.step_failures and step.op == _RUN and len(step.argument) > _TRIES_MIN:
        record.step_failures = max(record.step_failures - step.argument[_FAILURES], 0)
        if not record.step_failures:
            state.moved[record.id] = record  # It is no longer shown as backing off.


def is_retrying(step: Step) -> bool:
    """Whether it is a failed RUN that waits for its next try."""
    return bool(step.op == _RUN and len(step.argument) > _DUE and step.argument[_DUE])


def next_try(record: Invocation, index: int, step: Step) -> Timer:
    """The timer of a RUN that is being retried."""
    return timers.of_step(step.argument[_DUE], record.id, index)


def may_run(step: Step) -> None:
    """The backoff of a failed RUN is over."""
    step.argument[_DUE] = 0


def wait(state: State, record: Invocation, index: int, op: int) -> None:
    """Add the step to those that wait for an outcome."""
    state.put(PENDING + record.id + step_bytes(index), bytes([op]))
    record.pending += 1


def unwait(state: State, record: Invocation, index: int, step: Step) -> None:
    """Remove the step from those that wait, and what it set up elsewhere."""
    op = step.op
    if op == _SLEEP:
        timers.disarm(state, timers.of_step(step.argument[1], record.id, index))
    elif op == _PROMISE:
        promises.leave(state, record, step.argument[0], index)
    elif op == _APPROVAL:
        approvals.leave(state, record.id, index, step.argument)
    elif is_retrying(step):
        timers.disarm(state, next_try(record, index, step))
    state.delete(PENDING + record.id + step_bytes(index))
    record.pending -= 1
    forgive(state, record, step)


def pending(state: State, record: Invocation) -> list[int]:
    """Indexes of the steps that wait for an outcome, in order."""
    if not record.pending:
        return []
    prefix = PENDING + record.id
    return [int.from_bytes(key[17:], "big") for key, _ in state.scan(prefix, after(prefix))]


def finish(
    state: State,
    record: Invocation,
    index: int,
    step: Step,
    size: int,
    outcome: Packed,
    *,
    began_ms: int = 0,
) -> None:
    """Give the step its outcome. A running attempt is told; a suspended invocation continues."""
    unwait(state, record, index, step)
    ref = refs.in_outcome(outcome)
    if ref is not None:
        if record.blob_bytes + refs.size_of(ref) > state.meta.journal_blob_bytes_max:
            outcome = _TOO_MUCH
        else:
            blobs.add_to_journal(state, record, ref)
    record.order += 1
    step.done = record.order
    step.outcome = outcome
    stamp(state, record, step, began_ms)
    store(state, record, index, step, size=size)
    if record.status == _RUNNING:
        # By position: names would double its price.
        state.effects.append(SendCompletion(record.id, record.epoch, index, record.order, outcome))
    elif record.status == _SUSPENDED:
        attempts.begin(state, record)


def complete(state: State, command: CompleteStep) -> Result:
    """Complete a step. Clients and other handlers may complete awakeables alone; other answers come from the state
    machine."""
    record = state.load(command.id)
    if record is None:
        return _SAME if _did_complete(state, command) else attempts.missing(state, command.id)
    found = load(state, record, command.step)
    if found is None:
        return Result(Code.NOT_FOUND, "no such step")
    step, size = found
    if step.op not in (_ANSWERED if command.answer else _AWAKENED):
        return Result(Code.NOT_FOUND, "this step is not an awakeable")
    if not (command.answer or _knows_secret(step, command)):
        return Result(Code.NOT_FOUND, "no such step")
    if step.done and step.outcome == command.outcome:
        return _SAME
    if not step.is_pending:
        return Result(Code.CONFLICT, "the step was completed before, or the code no longer waits for it")
    finish(state, record, command.step, step, size=size, outcome=command.outcome)
    return OK


def _did_complete(state: State, command: CompleteStep) -> bool:
    """Whether a completed invocation had this awakeable completed with this outcome. The request itself may have
    completed the invocation, before its answer was sent."""
    if not 0 <= command.step < STEP_END or state.get(COMPLETED + command.id) is None:
        return False
    raw = state.get(JOURNAL + command.id + step_bytes(command.step))
    step = None if raw is None else unpack_step(raw)
    if step is None or step.op not in _AWAKENED or not _knows_secret(step, command):
        return False
    return bool(step.done) and step.outcome == command.outcome


def _knows_secret(step: Step, command: CompleteStep) -> bool:
    """An awakeable of an SDK that draws no secret has none, and is completed without one."""
    argument = step.argument
    secret = argument[0] if argument and type(argument[0]) is bytes else b""
    return hmac.compare_digest(secret, command.secret)


def awaken(state: State, record: Invocation, index: int) -> None:
    """The timer of a step fired: a sleep is over, a failed RUN may be tried again, or an approval has waited for long."""
    found = load(state, record, index)
    if found is None or not found[0].is_pending:
        return
    step, size = found
    if step.op == _SLEEP:
        finish(state, record, index, step, size=size, outcome=DONE)
    elif step.op == _APPROVAL:
        if approvals.is_over(state, step.argument):
            finish(state, record, index, step, size=size, outcome=approvals.timed_out(state))
        else:
            approvals.remind(state, record, index, step.argument)
    elif is_retrying(step):
        may_run(step)
        store(state, record, index, step, size=size)
        if record.status == _RUNNING:
            let_run(state, record, index)
        elif record.status == _SUSPENDED:
            attempts.begin(state, record)


def let_run(state: State, record: Invocation, index: int) -> None:
    """Tell the attempt to retry, once. This is an event of the journal, so an attempt whose START included it is not told
    again."""
    record.order += 1
    state.changed[record.id] = record
    state.effects.append(SendRetry(record.id, record.epoch, index, record.order))


def suspend(state: State, command: SuspendAttempt) -> Result:
    """Suspend, unless an outcome came in between: then the next attempt begins at once, as it does without any steps."""
    record = attempts.current(state, command.id, command.epoch)
    if record is None:
        return attempts.STALE
    if command.steps and all(_will_wake(state, record, index) for index in command.steps):
        record.losses = 0  # The process survived this attempt.
        attempts.set_status(state, record, _SUSPENDED)
    else:
        attempts.begin(state, record)
    return OK


def _will_wake(state: State, record: Invocation, index: int) -> bool:
    """Whether something is still to come for this step. Nothing comes for a RUN without a timer: its backoff is over, or
    it is in doubt, which the next attempt reports."""
    found = load(state, record, index)
    if found is None or not found[0].is_pending:
        return False
    return found[0].op != _RUN or is_retrying(found[0])


def abandon(state: State, command: AbandonStep) -> Result:
    record = attempts.current(state, command.id, command.epoch)
    if record is None:
        return attempts.STALE
    found = load(state, record, command.step)
    if found is None:
        return Result(Code.NOT_FOUND, "no such step")
    step, size = found
    if step.abandoned:
        return Result(Code.UNCHANGED, "the step was already abandoned")
    if not step.done:
        unwait(state, record, command.step, step)
    step.abandoned = True
    store(state, record, command.step, step, size=size)
    return OK


def decide(state: State, command: DecideStep) -> Result:
    """Somebody has found out what became of a RUN. A paused invocation continues, unless another of its runs is in doubt:
    the attempt would stop there and put this one in doubt again."""
    record = state.load(command.id)
    if record is None:
        return attempts.missing(state, command.id)
    found = load(state, record, command.step)
    if found is None or found[0].op != _RUN:
        return Result(Code.NOT_FOUND, "there is no run at this step")
    step, size = found
    if not step.is_pending:
        return Result(Code.CONFLICT, "the step already has an outcome")
    if record.status == _RUNNING:
        return Result(Code.CONFLICT, "an attempt is running and may be at this step: pause the invocation first")
    if command.outcome is not None:
        finish(state, record, command.step, step, size=size, outcome=command.outcome)
    else:
        if is_retrying(step):
            timers.disarm(state, next_try(record, command.step, step))
        forgive(state, record, step)
        step.argument = Tries(0, 0, "", state.now_ms).argument(step.argument[0])
        store(state, record, command.step, step, size=size)
        if record.status == _SUSPENDED:
            attempts.begin(state, record)
    if record.status == _PAUSED:
        others = _in_doubt(state, record)
        if others:
            return Result(Code.DONE, f"steps {others} are in doubt too: the invocation continues when they are decided")
        attempts.run_now(state, record)
    return OK


def _in_doubt(state: State, record: Invocation) -> list[int]:
    """Runs that a lost attempt may or may not have carried out."""
    found = [(index, load(state, record, index)) for index in pending(state, record)]
    return [index for index, step in found if step is not None and step[0].op == _RUN and len(step[0].argument) == 1]
