"""Steps that run a function: failures and retries, runs in doubt, cancellation."""

from holdfast.sdk.ids import DeploymentId
from holdfast.sdk.journal import (
    CANCELLED,
    Op,
    pack_outcome,
)
from holdfast.statemachine.commands import (
    Cancel,
    DecideStep,
    FailAttempt,
    RecordIntent,
    RecordRunOutcome,
    Redispatch,
    Retry,
    SuspendAttempt,
)
from holdfast.statemachine.effects import (
    Acknowledge,
    SendCompletion,
    SendRetry,
    StartAttempt,
    Status,
)
from holdfast.statemachine.state import State
from tests.statemachine.rig import BOOM, RESULT, Rig, failure, run_failure


def test_failures_of_a_run_are_counted_across_attempts_until_the_limit() -> None:
    rig = Rig()
    a = rig.invoke("a")

    assert rig.do(run_failure(rig, a, 1)) == [Acknowledge(a, 1, 2)]
    assert rig.pass_time(100) == [SendRetry(a, 1, 1, 3)]
    rig.do(Redispatch(a, 1))
    rig.do(run_failure(rig, a, 1))
    assert rig.pass_time(199) == []
    assert rig.pass_time(1) == [SendRetry(a, 2, 1, 4)]
    rig.do(run_failure(rig, a, 1))

    gave_up = failure(rig.journal(a)[1].outcome)
    assert (gave_up.kind, gave_up.message) == ("RetriesExhausted", "pay failed 3 times: boom")
    assert rig.effects[0] == SendCompletion(a, 2, 1, 5, pack_outcome(gave_up))


def test_a_failed_run_is_retried_after_the_delay_that_its_error_names() -> None:
    rig = Rig()
    a = rig.invoke("a")

    rig.do(run_failure(rig, a, 1)._replace(retry_after_ms=5000))

    assert rig.pass_time(4999) == []
    assert rig.pass_time(1) == [SendRetry(a, 1, 1, 3)]
    rig.do(run_failure(rig, a, 1))
    assert rig.pass_time(200) == [SendRetry(a, 1, 1, 4)], "without a wish, the policy's backoff holds"


def test_before_level_2_the_policy_alone_decides_when_a_run_is_retried() -> None:
    rig = Rig()
    rig.state = State(0, 1, level=1)
    a = rig.invoke("a")

    rig.do(run_failure(rig, a, 1)._replace(retry_after_ms=5000))

    assert rig.pass_time(100) == [SendRetry(a, 1, 1, 3)]


def test_a_run_is_given_up_after_its_time() -> None:
    rig = Rig()
    a = rig.invoke("a")
    retry = Retry(100, 1000, 100, 0, 150)
    rig.do(run_failure(rig, a, 1, retry))
    rig.pass_time(100)
    rig.do(run_failure(rig, a, 1, retry))
    rig.pass_time(100)

    rig.do(run_failure(rig, a, 1, retry))

    assert failure(rig.journal(a)[1].outcome).kind == "RetriesExhausted"


def test_a_suspended_invocation_resumes_for_the_next_try() -> None:
    rig = Rig()
    a = rig.invoke("a")
    rig.do(run_failure(rig, a, 1))
    rig.do(SuspendAttempt(a, 1, [1]))

    assert rig.pass_time(100) == [StartAttempt(a, 2)]


def test_suspending_while_a_retry_is_on_its_way_does_not_lose_the_retry() -> None:
    rig = Rig()
    a = rig.invoke("a")
    rig.do(run_failure(rig, a, 1))
    rig.pass_time(100)

    assert rig.do(SuspendAttempt(a, 1, [1])) == [StartAttempt(a, 2)]


def test_a_run_that_succeeds_after_retries_has_its_outcome() -> None:
    rig = Rig()
    a = rig.invoke("a")
    rig.do(run_failure(rig, a, 1))
    rig.pass_time(100)

    rig.do(RecordRunOutcome(a, 1, 1, RESULT))

    assert rig.effects == [SendCompletion(a, 1, 1, 4, RESULT), Acknowledge(a, 1, 2)]
    assert rig.load(a).pending == 0
    for late in (run_failure(rig, a, 1), RecordRunOutcome(a, 1, 1, BOOM)):
        assert (rig.do(late), rig.result.code) == ([], 200)
    assert rig.journal(a)[1].outcome == RESULT


def test_a_run_with_a_journaled_intent_is_in_doubt_until_an_operator_decides() -> None:
    rig = Rig()
    a = rig.invoke("a")
    assert rig.do(RecordIntent(a, 1, 1, "/pay", "pay", DeploymentId("dp_1"))) == [Acknowledge(a, 1, 2)]
    rig.do(Redispatch(a, 1))
    rig.do(FailAttempt(a, 2, [1, 500, "pay is in doubt", "InDoubt"], Retry(), 0, 0, True))
    assert rig.status(a) == Status.PAUSED

    assert rig.do(DecideStep(a, 1, RESULT)) == [StartAttempt(a, 3)]

    assert rig.journal(a)[1].outcome == RESULT
    rig.do(DecideStep(a, 1, RESULT))
    assert rig.result.code == 409


def test_an_attempt_that_waits_for_its_own_intent_does_not_sleep_for_ever() -> None:
    rig = Rig()
    a = rig.invoke("a")
    rig.do(RecordIntent(a, 1, 1, "/pay", "pay", None))

    assert rig.do(SuspendAttempt(a, 1, [1])) == [StartAttempt(a, 2)]


def test_an_operator_may_decide_that_a_run_did_not_happen() -> None:
    rig = Rig()
    a = rig.invoke("a")
    rig.do(RecordIntent(a, 1, 1, "/pay", "pay", None))
    rig.do(FailAttempt(a, 1, [1, 500, "pay is in doubt", "InDoubt"], Retry(), 0, 0, True))

    assert rig.do(DecideStep(a, 1, None)) == [StartAttempt(a, 2)]

    step = rig.journal(a)[1]
    assert (step.outcome, step.argument[:3]) == (None, ["pay", 0, 0])
    assert rig.do(RecordIntent(a, 2, 1, "/pay", "pay", None)) == [SendRetry(a, 2, 1, 3)]
    assert rig.journal(a)[1].argument == ["pay"]
    rig.do(DecideStep(a, 1, RESULT))
    assert rig.result.code == 409


def test_an_invocation_continues_when_all_its_runs_in_doubt_are_decided() -> None:
    rig = Rig()
    a = rig.invoke("a")
    rig.do(RecordIntent(a, 1, 1, "/pay", "pay", None))
    rig.do(RecordIntent(a, 1, 2, "/mail", "mail", None))
    rig.do(FailAttempt(a, 1, [1, 500, "pay is in doubt", "InDoubt"], Retry(), 0, 0, True))

    assert rig.do(DecideStep(a, 1, None)) == []
    assert (rig.result.code, rig.status(a)) == (0, Status.PAUSED)
    assert rig.do(DecideStep(a, 2, RESULT)) == [StartAttempt(a, 2)]


def test_a_cancelled_run_notices_the_cancellation() -> None:
    rig = Rig()
    a = rig.invoke("a")
    rig.do(Cancel(a))
    assert rig.load(a).cancelled

    rig.step(a, Op.RUN, ["x"], pack_outcome(CANCELLED))

    assert not rig.load(a).cancelled
