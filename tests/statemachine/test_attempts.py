"""Invocations whose attempts end without a report: redispatch, backoff and pause."""

from holdfast.sdk.ids import InvocationId
from holdfast.sdk.journal import Op
from holdfast.statemachine import explain
from holdfast.statemachine.attempts import LOSSES_MAX, QUIET_MS
from holdfast.statemachine.commands import FailAttempt, Resume, Retry, SuspendAttempt
from holdfast.statemachine.effects import Status
from tests.statemachine.rig import RESULT, Rig

GONE = [1, 503, "the connection broke", "ProcessLost"]


def lose(rig: Rig, which: InvocationId, *, retry: Retry | None = None) -> None:
    rig.do(FailAttempt(which, rig.load(which).epoch, GONE, retry or Retry(), 0, 0, False, lost=True))


def begin_again(rig: Rig, which: InvocationId) -> int:
    """Wait for the next attempt, and return how long that took."""
    record = rig.load(which)
    assert record.status == Status.BACKING_OFF
    waited_ms = record.due_ms - rig.now_ms
    rig.pass_time(waited_ms)
    assert rig.started() == [which]
    return waited_ms


def test_the_first_lost_stream_is_redispatched_at_once_and_counts_as_no_failure() -> None:
    rig = Rig()
    which = rig.invoke("a")

    lose(rig, which)

    assert rig.started() == [which]
    record = rig.load(which)
    assert (record.status, record.epoch, record.failures, record.failures_total) == (Status.RUNNING, 2, 0, 0)


def test_lost_streams_in_a_row_back_off_and_then_pause_with_the_reason() -> None:
    rig = Rig()
    which = rig.invoke("a")
    rig.step(which, Op.RUN, ["charge"], RESULT)
    lose(rig, which)

    waits = []
    while True:
        lose(rig, which)
        if rig.status(which) == Status.PAUSED:
            break
        waits.append(begin_again(rig, which))

    assert waits == [QUIET_MS, 2 * QUIET_MS, 4 * QUIET_MS]
    assert rig.load(which).losses == LOSSES_MAX
    why = explain.why_not_running(rig.txn, which)
    assert "the handler process ended 5 times while it ran this invocation, after the step '/1'" in why
    assert "the connection broke" in why


def test_a_longer_delay_of_the_retry_policy_is_respected() -> None:
    rig = Rig()
    which = rig.invoke("a")
    patient = Retry(initial_ms=60_000, max_interval_ms=3_600_000)
    lose(rig, which, retry=patient)

    lose(rig, which, retry=patient)
    first = begin_again(rig, which)
    lose(rig, which, retry=patient)

    assert (first, begin_again(rig, which)) == (60_000, 120_000)


def test_progress_clears_the_suspicion_of_an_invocation() -> None:
    rig = Rig()
    which = rig.invoke("a")
    for _ in range(3 * LOSSES_MAX):
        lose(rig, which)
        assert rig.status(which) == Status.RUNNING
        rig.step(which, Op.RUN, ["a"], RESULT)
        assert rig.load(which).losses == 0


def test_an_attempt_that_hands_itself_back_clears_the_suspicion_too() -> None:
    rig = Rig()
    which = rig.invoke("a")
    step = rig.step(which, Op.AWAKEABLE)
    lose(rig, which)

    rig.do(SuspendAttempt(which, rig.load(which).epoch, [step]))

    assert rig.status(which) == Status.SUSPENDED and rig.load(which).losses == 0


def test_resuming_an_invocation_clears_the_suspicion() -> None:
    rig = Rig()
    which = rig.invoke("a")
    lose(rig, which)
    while rig.status(which) != Status.PAUSED:
        lose(rig, which)
        if rig.status(which) == Status.BACKING_OFF:
            begin_again(rig, which)

    rig.do(Resume(which, None))

    assert rig.status(which) == Status.RUNNING and rig.load(which).losses == 0


def test_lost_streams_of_a_finished_attempt_do_not_count() -> None:
    rig = Rig()
    which = rig.invoke("a")
    old = rig.load(which).epoch
    lose(rig, which)

    rig.do(FailAttempt(which, old, GONE, Retry(), 0, 0, False, lost=True))

    assert rig.result.code == 409 and rig.load(which).losses == 1
