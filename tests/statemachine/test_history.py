"""The history shown for an invocation: times of steps, failed tries, unsuccessful attempts."""

from __future__ import annotations

from holdfast.sdk.ids import DeploymentId, InvocationId
from holdfast.sdk.journal import Op
from holdfast.statemachine import explain, history, queries
from holdfast.statemachine.commands import (
    FailAttempt,
    Pause,
    PostponeAttempt,
    RecordRunFailure,
    RecordRunOutcome,
    RecordStep,
    Redispatch,
    Resume,
    Retry,
    SuspendAttempt,
)
from holdfast.statemachine.effects import Status
from holdfast.statemachine.history import Ended
from holdfast.statemachine.queries import Filter
from tests.statemachine import invariants
from tests.statemachine.rig import BOOM, HOUR_MS, RESULT, T0, Rig

DP_1 = DeploymentId("dp_1")

TRACED = [*BOOM, {"trace": ["shop.py:3 in charge"]}]


def run_failed(
    rig: Rig, a: InvocationId, index: int, *, began_ms: int = 0, retry: Retry | None = None
) -> RecordRunFailure:
    return RecordRunFailure(
        a, rig.load(a).epoch, index, "k", "charge", TRACED, retry or Retry(), 0, DP_1, began_ms=began_ms
    )


def test_a_step_says_when_it_began_when_it_was_journaled_and_in_which_attempt() -> None:
    rig = Rig()
    a = rig.invoke("a")
    rig.do(Redispatch(a, 1))
    rig.now_ms += 500

    rig.do(RecordStep(a, 2, 1, Op.RUN, "k", ["charge"], RESULT, DP_1, None, began_ms=T0 + 200))

    step = rig.journal(a)[1]
    assert (step.began_ms, step.journaled_ms, step.epoch) == (T0 + 200, T0 + 500, 2)
    assert (rig.journal(a)[0].journaled_ms, rig.journal(a)[0].epoch) == (T0, 0)


def test_a_wrong_clock_makes_no_duration_negative_or_longer_than_its_attempt() -> None:
    rig = Rig()
    a = rig.invoke("a")
    rig.now_ms += 500

    rig.do(RecordStep(a, 1, 1, Op.RUN, "k", ["fast"], RESULT, DP_1, None, began_ms=T0 + HOUR_MS))
    rig.do(RecordStep(a, 1, 2, Op.RUN, "l", ["slow"], RESULT, DP_1, None, began_ms=5))

    assert [step.journaled_ms - step.began_ms for step in rig.journal(a)[1:]] == [0, 500]


def test_the_duration_of_a_waiting_step_ends_with_its_outcome() -> None:
    rig = Rig()
    a = rig.invoke("a")
    rig.step(a, Op.SLEEP, [1000])
    rig.do(SuspendAttempt(a, 1, [1]))

    rig.pass_time(1000)

    step = rig.journal(a)[1]
    assert (step.began_ms, step.journaled_ms, step.epoch) == (T0, T0 + 1000, 1)


def test_a_step_that_fails_again_and_again_makes_its_invocation_look_failing() -> None:
    rig = Rig()
    a, b = rig.invoke("a"), rig.invoke("b")
    wanted = Filter(statuses=(Status.BACKING_OFF,))

    rig.do(run_failed(rig, a, 1, began_ms=T0))
    rig.pass_time(100)
    rig.do(run_failed(rig, a, 1, began_ms=T0 + 100))
    running = explain.why_not_running(rig.txn, a)
    rig.do(SuspendAttempt(a, 1, [1]))

    record = rig.load(a)
    assert (record.status, queries.shown_status(record), record.step_failures) == (
        Status.SUSPENDED,
        Status.BACKING_OFF,
        2,
    )
    assert [each.id for each in queries.list_invocations(rig.txn, wanted, b"", 10)[0]] == [a]
    assert queries.shown_status(rig.load(b)) == Status.RUNNING
    assert running.startswith("An attempt is running, and waits for the next try of 'charge' at ")
    assert explain.why_not_running(rig.txn, a).endswith("after 2 failures (step 1): boom.")
    assert rig.journal(a)[1].argument[-1] == ["shop.py:3 in charge"]
    invariants.check(rig.txn)


def test_a_step_that_succeeds_in_the_end_no_longer_looks_failing() -> None:
    rig = Rig()
    a = rig.invoke("a")
    rig.do(run_failed(rig, a, 1))
    rig.pass_time(100)

    rig.do(RecordRunOutcome(a, 1, 1, RESULT, began_ms=T0 + 40))

    assert (rig.load(a).step_failures, queries.shown_status(rig.load(a))) == (0, Status.RUNNING)
    step = rig.journal(a)[1]
    assert (step.began_ms, step.journaled_ms) == (T0 + 40, T0 + 100)
    invariants.check(rig.txn)


def test_a_step_that_gives_up_keeps_the_frames_of_its_last_error() -> None:
    rig = Rig()
    a = rig.invoke("a")

    rig.do(run_failed(rig, a, 1, retry=Retry(max_attempts=1)))

    assert rig.journal(a)[1].outcome == [
        1,
        500,
        "charge failed once: boom",
        "RetriesExhausted",
        {"trace": ["shop.py:3 in charge"]},
    ]
    assert rig.load(a).step_failures == 0


def test_unsuccessful_attempts_are_kept_until_the_invocation_is_forgotten() -> None:
    rig = Rig()
    a, quiet = rig.invoke("a"), rig.invoke("quiet")

    rig.now_ms += 10
    rig.do(FailAttempt(a, 1, TRACED, Retry(), 0, 0, False))
    rig.pass_time(100)
    rig.do(Redispatch(a, 2))
    rig.do(PostponeAttempt(a, 3, BOOM, 50))
    rig.pass_time(50)
    rig.do(Pause(a))
    rig.do(Resume(a, None))
    rig.do(Resume(a, DeploymentId("dp_2")))

    found = history.attempts(rig.txn, a)
    assert [(each.epoch, each.how) for each in found] == [
        (1, Ended.FAILED),
        (2, Ended.AGAIN),
        (3, Ended.POSTPONED),
        (4, Ended.PAUSED),
        (6, Ended.MOVED),
    ]
    assert (found[0].started_ms, found[0].ended_ms, found[0].message) == (T0, T0 + 10, "boom")
    invariants.check(rig.txn)
    rig.complete(a)
    rig.complete(quiet)
    assert history.attempts(rig.txn, quiet) == []
    rig.pass_time(HOUR_MS)
    assert list(rig.txn.scan(b"F", b"I")) == [], "neither the last failure nor the history stays"


def test_only_the_newest_attempts_are_kept() -> None:
    rig = Rig()
    a = rig.invoke("a")

    for epoch in range(1, history.KEPT + 6):
        rig.do(Redispatch(a, epoch))

    assert [each.epoch for each in history.attempts(rig.txn, a)] == list(range(6, history.KEPT + 6))
    invariants.check(rig.txn)
