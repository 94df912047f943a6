"""Steps that wait: what each of them set up, how it gets its outcome, and how the invocation hears of it."""

from __future__ import annotations

from typing import Any, Final

from holdfast.sdk.journal import (
    NOTHING,
    Failure,
    Op,
    pack_outcome,
)
from holdfast.statemachine import attempts, blobs, promises, refs, timers
from holdfast.statemachine.commands import AbandonStep, CompleteStep, DecideStep, SuspendAttempt
from holdfast.statemachine.effects import OK, Result, SendCompletion, SendRetry, Status
from holdfast.statemachine.records import Invocation, pack, unpack
from holdfast.statemachine.state import State
from holdfast.statemachine.tables import COMPLETED, JOURNAL, NO_STEP, PENDING, after, step_bytes

#: Offsets in a stored step: the fields of `sdk.journal.Step`.
OP: Final = 0
KEY: Final = 1
ARGUMENT: Final = 2
MADE: Final = 3
DONE: Final = 4
OUTCOME: Final = 5
ABANDONED: Final = 6
JOURNALED_MS: Final = 7  # From here on since level 2: see `stamp`.
BEGAN_MS: Final = 8
EPOCH: Final = 9

#: Offsets in the argument of a RUN that failed and is tried again. A RUN without an outcome whose argument is only its
#: name was begun by an attempt that may or may not have carried it out: it is in doubt once that attempt is lost.
FAILURES: Final = 1
DUE: Final = 2  # 0: the backoff is over, it may run
MESSAGE: Final = 3
SINCE: Final = 4

_ANSWERED: Final = (Op.CALL, Op.ATTACH, Op.PROMISE)
_AWAKENED: Final = (Op.AWAKEABLE,)
_SAME: Final = Result(200, "it was completed before, with this outcome")
SLEPT: Final[list[Any]] = [0, NOTHING]
_TOO_MUCH: Final = Failure(413, "the large values of this journal pass their limit with this outcome", "JournalTooLong")


def load(state: State, record: Invocation, index: int) -> tuple[list[Any], int] | None:
    """A step and how many bytes it takes."""
    if not 0 <= index < record.length:
        return None
    raw = state.get(JOURNAL + record.id + step_bytes(index))
    return None if raw is None else (unpack(raw), len(raw))


def store(state: State, record: Invocation, index: int, step: list[Any], size: int) -> None:
    """In place of one that took `size` bytes."""
    raw: bytes = pack(step)
    state.put(JOURNAL + record.id + step_bytes(index), raw)
    record.size += len(raw) - size
    state.changed[record.id] = record


def stamp(state: State, record: Invocation, step: list[Any], began_ms: int = 0) -> None:
    """Something of the step is journaled now. `began_ms`: when its function began, by the clock of the handler's process."""
    if state.level < 2:
        return
    known = len(step) > EPOCH
    if began_ms:
        began_ms, epoch = credible(state, record, began_ms), record.epoch
    else:
        began_ms, epoch = (step[BEGAN_MS], step[EPOCH]) if known else (0, record.epoch)
    step[JOURNALED_MS:] = (state.now_ms, began_ms, epoch)


def credible(state: State, record: Invocation, began_ms: int) -> int:
    """When the function of a step began, if another machine's clock says so: not before its attempt, not after now."""
    return min(max(began_ms, record.since_ms), state.now_ms)


def failures_of(step: list[Any]) -> int:
    """Failed tries of a RUN that has no outcome."""
    argument = step[ARGUMENT]
    return argument[FAILURES] if step[OP] == Op.RUN and len(argument) > SINCE else 0


def forgive(record: Invocation, step: list[Any]) -> None:
    """Its failed tries no longer make the invocation look failing."""
    if record.step_failures:
        record.step_failures = max(record.step_failures - failures_of(step), 0)


def is_pending(step: list[Any]) -> bool:
    return not step[DONE] and not step[ABANDONED]


def is_retrying(step: list[Any]) -> bool:
    """A failed RUN that waits for its next try."""
    return bool(step[OP] == Op.RUN and len(step[ARGUMENT]) > DUE and step[ARGUMENT][DUE])


def wait(state: State, record: Invocation, index: int, op: int) -> None:
    """It is among those that wait for an outcome."""
    state.put(PENDING + record.id + step_bytes(index), bytes([op]))
    record.pending += 1


def unwait(state: State, record: Invocation, index: int, step: list[Any]) -> None:
    """What it set up elsewhere is taken down."""
    op = step[OP]
    if op == Op.SLEEP:
        timers.disarm(state, step[ARGUMENT][1], record.id, index)
    elif op == Op.PROMISE:
        promises.leave(state, record, step[ARGUMENT][0], index)
    elif is_retrying(step):
        timers.disarm(state, step[ARGUMENT][DUE], record.id, index)
    state.delete(PENDING + record.id + step_bytes(index))
    record.pending -= 1
    forgive(record, step)


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
    step: list[Any],
    size: int,
    outcome: list[Any],
    *,
    began_ms: int = 0,
) -> None:
    """The step has its outcome. A running attempt is told; a suspended invocation goes on."""
    unwait(state, record, index, step)
    ref = refs.in_outcome(outcome)
    if ref is not None:
        if record.blob_bytes + refs.size_of(ref) > state.meta.journal_blob_bytes_max:
            outcome = pack_outcome(_TOO_MUCH)
        else:
            blobs.add_to_journal(state, record, ref)
    record.order += 1
    step[DONE] = record.order
    step[OUTCOME] = outcome
    stamp(state, record, step, began_ms)
    store(state, record, index, step, size)
    if record.status == Status.RUNNING:
        state.effects.append(SendCompletion(record.id, record.epoch, index, record.order, outcome))
    elif record.status == Status.SUSPENDED:
        attempts.begin(state, record)


def complete(state: State, command: CompleteStep) -> Result:
    """From a client or another handler: only an awakeable is theirs to complete. The answer to anything else comes from
    the state machine alone."""
    record = state.load(command.id)
    if record is None:
        return _SAME if _did_complete(state, command) else attempts.missing(state, command.id)
    found = load(state, record, command.step)
    if found is None:
        return Result(404, "no such step")
    step, size = found
    if step[OP] not in (_ANSWERED if command.answer else _AWAKENED):
        return Result(404, "this step is not an awakeable")
    if step[DONE] and step[OUTCOME] == command.outcome:
        return _SAME
    if not is_pending(step):
        return Result(409, "it was completed before, or nobody waits for it any more")
    finish(state, record, command.step, step, size, command.outcome)
    return OK


def _did_complete(state: State, command: CompleteStep) -> bool:
    """Whether an invocation that is over had this awakeable completed with this outcome: what was asked for may be why it
    is over before the answer was there."""
    if not 0 <= command.step < NO_STEP or state.get(COMPLETED + command.id) is None:
        return False
    raw = state.get(JOURNAL + command.id + step_bytes(command.step))
    step = None if raw is None else unpack(raw)
    return step is not None and step[OP] in _AWAKENED and bool(step[DONE]) and step[OUTCOME] == command.outcome


def awaken(state: State, record: Invocation, index: int) -> None:
    """The timer of a step fired: a sleep is over, or a failed RUN may be tried again."""
    found = load(state, record, index)
    if found is None or not is_pending(found[0]):
        return
    step, size = found
    if step[OP] == Op.SLEEP:
        finish(state, record, index, step, size, SLEPT)
    elif is_retrying(step):
        step[ARGUMENT][DUE] = 0
        store(state, record, index, step, size)
        if record.status == Status.RUNNING:
            let_run(state, record, index)
        elif record.status == Status.SUSPENDED:
            attempts.begin(state, record)


def let_run(state: State, record: Invocation, index: int) -> None:
    """Tell the attempt, once: as an event of the journal, so that nobody is told what the journal told it at its start."""
    record.order += 1
    state.changed[record.id] = record
    state.effects.append(SendRetry(record.id, record.epoch, index, record.order))


def suspend(state: State, command: SuspendAttempt) -> Result:
    """Unless what it waits for came in between: then the next attempt begins at once, as it does for no step at all."""
    record = attempts.current(state, command.id, command.epoch)
    if record is None:
        return attempts.STALE
    if command.steps and all(_will_wake(state, record, index) for index in command.steps):
        record.losses = 0  # The process lived on.
        attempts.set_status(state, record, Status.SUSPENDED)
    else:
        attempts.begin(state, record)
    return OK


def _will_wake(state: State, record: Invocation, index: int) -> bool:
    """Whether something is still to come for this step. Nothing comes for a RUN that waits for no timer: its backoff is
    over, or it is in doubt, and then the next attempt says so."""
    found = load(state, record, index)
    if found is None or not is_pending(found[0]):
        return False
    return found[0][OP] != Op.RUN or is_retrying(found[0])


def abandon(state: State, command: AbandonStep) -> Result:
    record = attempts.current(state, command.id, command.epoch)
    if record is None:
        return attempts.STALE
    found = load(state, record, command.step)
    if found is None:
        return Result(404, "no such step")
    step, size = found
    if step[ABANDONED]:
        return Result(200, "it was abandoned before")
    if not step[DONE]:
        unwait(state, record, command.step, step)
    step[ABANDONED] = True
    store(state, record, command.step, step, size)
    return OK


def decide(state: State, command: DecideStep) -> Result:
    """Somebody looked at the world and knows what became of a RUN. A paused invocation goes on, unless another of its runs
    is in doubt: the attempt would stop at that one, and put this one in doubt again."""
    record = state.load(command.id)
    if record is None:
        return attempts.missing(state, command.id)
    found = load(state, record, command.step)
    if found is None or found[0][OP] != Op.RUN:
        return Result(404, "there is no run at this step")
    step, size = found
    if not is_pending(step):
        return Result(409, "the step has an outcome already")
    if record.status == Status.RUNNING:
        return Result(409, "an attempt is running, and may be at this very step: pause the invocation first")
    if command.outcome is not None:
        finish(state, record, command.step, step, size, command.outcome)
    else:
        if is_retrying(step):
            timers.disarm(state, step[ARGUMENT][DUE], record.id, command.step)
        forgive(record, step)
        step[ARGUMENT] = [step[ARGUMENT][0], 0, 0, "", state.now_ms]
        store(state, record, command.step, step, size)
        if record.status == Status.SUSPENDED:
            attempts.begin(state, record)
    if record.status == Status.PAUSED:
        others = _in_doubt(state, record)
        if others:
            return Result(0, f"steps {others} are in doubt too: it goes on when they are decided")
        attempts.run_now(state, record)
    return OK


def _in_doubt(state: State, record: Invocation) -> list[int]:
    """Runs that an attempt which is lost may or may not have carried out."""
    found = [(index, load(state, record, index)) for index in pending(state, record)]
    return [
        index for index, step in found if step is not None and step[0][OP] == Op.RUN and len(step[0][ARGUMENT]) == 1
    ]
