"""Steps that wait: each gets its outcome once, and the invocation goes on."""

from typing import Any

import msgpack
import pytest

from holdfast.sdk.ids import object_id, workflow_id
from holdfast.sdk.journal import (
    CANCELLED,
    NOTHING,
    Op,
    pack_outcome,
    some,
)
from holdfast.statemachine import queries
from holdfast.statemachine.commands import (
    AbandonStep,
    Cancel,
    Complete,
    CompletePromise,
    CompleteStep,
    DecideStep,
    FailAttempt,
    Invoke,
    Mode,
    RecordIntent,
    RecordRunFailure,
    RecordRunOutcome,
    RecordStep,
    Redispatch,
    Retry,
    SetLimits,
    SuspendAttempt,
)
from holdfast.statemachine.effects import (
    AbortAttempt,
    Acknowledge,
    Reply,
    SendCompletion,
    SendRetry,
    StartAttempt,
    Status,
)
from holdfast.statemachine.state import State
from tests.statemachine.rig import BOOM, HOUR_MS, RESULT, Rig, failure, ident

SLEPT: list[Any] = [0, b""]


def test_a_sleep_ends_when_it_is_due_and_not_before() -> None:
    rig = Rig()
    a = rig.invoke("a")
    index = rig.step(a, Op.SLEEP, [1000])

    assert rig.armed == [rig.now_ms + 1000]
    assert rig.pass_time(999) == []
    assert rig.pass_time(1) == [SendCompletion(a, 1, index, 3, SLEPT)]
    assert rig.pass_time(HOUR_MS) == []


def test_a_clock_that_went_back_fires_nothing_early_and_loses_nothing() -> None:
    rig = Rig()
    a = rig.invoke("a")
    rig.step(a, Op.SLEEP, [1000])

    assert rig.pass_time(-5000) == []
    assert rig.pass_time(5999) == []
    assert len(rig.pass_time(1)) == 1


def test_timers_fire_in_order_of_their_time_and_no_more_than_asked_for() -> None:
    rig = Rig()
    a = rig.invoke("a")
    late = rig.step(a, Op.SLEEP, [300])
    early = rig.step(a, Op.SLEEP, [100])

    first = rig.pass_time(1000, limit=1)
    assert rig.armed == [rig.now_ms - 700]
    second = rig.pass_time(0, limit=1)

    assert [effect.step for effect in first + second if isinstance(effect, SendCompletion)] == [early, late]


def test_a_suspended_invocation_is_started_again_by_an_outcome() -> None:
    rig = Rig()
    a = rig.invoke("a")
    index = rig.step(a, Op.SLEEP, [1000])

    rig.do(SuspendAttempt(a, 1, [index]))

    assert rig.status(a) == Status.SUSPENDED
    assert "a timer at" in queries.why_not_running(rig.txn, a)
    assert rig.pass_time(1000) == [StartAttempt(a, 2)]
    assert rig.journal(a)[index].outcome == SLEPT


def test_suspending_after_the_outcome_came_starts_again_at_once() -> None:
    rig = Rig()
    a = rig.invoke("a")
    index = rig.step(a, Op.SLEEP, [1000])
    rig.pass_time(1000)

    assert rig.do(SuspendAttempt(a, 1, [index])) == [StartAttempt(a, 2)]


def test_suspending_for_nothing_means_start_me_again() -> None:
    rig = Rig()
    a = rig.invoke("a")

    assert rig.do(SuspendAttempt(a, 1, [])) == [StartAttempt(a, 2)]


def test_completions_are_numbered_in_the_order_they_came() -> None:
    rig = Rig()
    a = rig.invoke("a")
    slow, fast = rig.step(a, Op.SLEEP, [200]), rig.step(a, Op.SLEEP, [100])
    rig.pass_time(100)
    value = rig.step(a, Op.VALUE, ["now"], RESULT)
    rig.pass_time(100)

    steps = rig.journal(a)

    assert [(step.made, step.done) for step in steps] == [(1, 1), (2, 6), (3, 4), (5, 5)]
    assert steps[slow].done > steps[value].done > steps[fast].done


def test_an_awakeable_is_completed_once_by_whoever_knows_it() -> None:
    rig = Rig()
    a = rig.invoke("a")
    index = rig.step(a, Op.AWAKEABLE)

    assert rig.do(CompleteStep(a, index, RESULT)) == [SendCompletion(a, 1, index, 3, RESULT)]
    assert rig.do(CompleteStep(a, index, RESULT)) == []
    assert rig.result.code == 200  # Whoever asks again because an answer was lost has what it wants.
    assert rig.do(CompleteStep(a, index, [0, b"another"])) == []
    assert rig.result.code == 409


def test_who_completed_an_awakeable_is_told_so_also_when_its_invocation_is_over() -> None:
    rig = Rig()
    a = rig.invoke("a")
    index = rig.step(a, Op.AWAKEABLE)
    rig.do(CompleteStep(a, index, RESULT))
    rig.complete(a)

    rig.do(CompleteStep(a, index, RESULT))
    same = rig.result.code
    rig.do(CompleteStep(a, index, [0, b"another"]))
    another = rig.result.code
    rig.do(CompleteStep(a, 2**40, RESULT))

    assert (same, another, rig.result.code) == (200, 409, 409)


def test_a_client_cannot_make_up_the_result_of_a_call_or_of_a_sleep() -> None:
    rig = Rig()
    a = rig.invoke("a")
    child = Invoke(ident("b"), "greeter", "help", None, Mode.PLAIN, b"", {}, 0, None, 0, HOUR_MS)
    call = rig.step(a, Op.CALL, ["greeter", "help", None, b"", {}], child=child)
    sleep = rig.step(a, Op.SLEEP, [1000])

    for index in (call, sleep, 99):
        rig.do(CompleteStep(a, index, RESULT))
        assert rig.result.code == 404


def test_one_handler_resolves_the_awakeable_of_another() -> None:
    rig = Rig()
    a, b = rig.invoke("a"), rig.invoke("b")
    index = rig.step(a, Op.AWAKEABLE)

    rig.step(b, Op.RESOLVE_AWAKEABLE, [a, index, RESULT])

    assert SendCompletion(a, 1, index, 3, RESULT) in rig.effects


def test_a_digest_stays_of_what_the_journal_does_not_keep() -> None:
    rig = Rig()
    a = rig.invoke("a", service="signup", key="ann", mode=Mode.WORKFLOW)
    child = Invoke(ident("b"), "greeter", "help", None, Mode.PLAIN, b"payload", {}, 0, None, 0, HOUR_MS)
    refused = [1, 404, "no such handler", "NotFound"]
    digest = b"sixteen bytes :)"

    call = rig.step(a, Op.CALL, ["greeter", "help", None, b"", {}], child=child, digest=digest)
    nobody = rig.step(a, Op.CALL, ["greeter", "nobody", None, b"", {}], refused, digest=digest)
    send = rig.step(a, Op.SEND, ["greeter", "help", None, b"", {}, 50], child=child, digest=digest)
    resolve = rig.step(a, Op.RESOLVE, ["approved", RESULT], digest=digest)
    awakeable = rig.step(a, Op.RESOLVE_AWAKEABLE, [a, 9, RESULT], digest=digest)
    older = rig.step(a, Op.RESOLVE, ["other", RESULT])

    kept = [rig.journal(a)[step].argument for step in (call, nobody, send, resolve, awakeable, older)]
    assert kept == [
        ["greeter", "help", None, digest, None, child.id],
        ["greeter", "nobody", None, digest, None, None],
        ["greeter", "help", None, digest, None, 50, child.id],
        ["approved", digest],
        [a, 9, digest],
        ["other", None],
    ]


def test_a_send_starts_its_child_and_waits_for_nothing() -> None:
    rig = Rig()
    a = rig.invoke("a")
    child = Invoke(ident("b"), "greeter", "help", None, Mode.PLAIN, b"", {}, rig.now_ms + 50, None, -1, HOUR_MS)

    rig.step(a, Op.SEND, ["greeter", "help", None, b"", {}, 50], child=child)

    assert rig.status(child.id) == Status.SCHEDULED
    assert rig.load(a).pending == 0
    assert rig.pass_time(50) == [StartAttempt(child.id, 1)]
    assert rig.complete(child.id) == [Reply(child.id, RESULT)]


def test_attaching_waits_for_an_invocation_or_answers_at_once() -> None:
    rig = Rig()
    a, b = rig.invoke("a"), rig.invoke("b")
    waits = rig.step(a, Op.ATTACH, [b])

    assert rig.complete(b)[-1] == SendCompletion(a, 1, waits, 3, RESULT)
    at_once = rig.step(a, Op.ATTACH, [b])
    assert rig.effects[-1] == SendCompletion(a, 1, at_once, 5, RESULT)
    unknown = rig.step(a, Op.ATTACH, [ident("nobody")])
    assert failure(rig.journal(a)[unknown].outcome).code == 404


def test_a_call_of_a_known_id_attaches_to_it() -> None:
    rig = Rig()
    a, b = rig.invoke("a"), rig.invoke("b")
    child = Invoke(b, "greeter", "greet", None, Mode.PLAIN, b"", {}, 0, None, 0, HOUR_MS)
    index = rig.step(a, Op.CALL, ["greeter", "greet", None, b"", {}], child=child)

    assert rig.started() == []
    assert rig.complete(b)[-1] == SendCompletion(a, 1, index, 3, RESULT)
    again = rig.step(a, Op.CALL, ["greeter", "greet", None, b"", {}], child=child)
    assert rig.journal(a)[again].outcome == RESULT


def test_state_is_read_through_the_node_when_it_was_not_sent() -> None:
    rig = Rig()
    a = rig.invoke("a", key="k")
    rig.step(a, Op.SET, ["x", b"1"])

    rig.step(a, Op.GET, ["x"])
    rig.step(a, Op.GET, ["y"])
    rig.step(a, Op.KEYS)

    outcomes = [step.outcome for step in rig.journal(a)[2:]]
    assert outcomes == [[0, some(b"1")], [0, NOTHING], [0, msgpack.packb(["x"])]]
    assert rig.effects == [Acknowledge(a, 1, 5), SendCompletion(a, 1, 4, 8, [0, msgpack.packb(["x"])])]


def test_a_promise_is_given_once_to_all_who_wait_and_to_who_comes_later() -> None:
    rig = Rig()
    main = rig.invoke("main", service="signup", key="ann", mode=Mode.WORKFLOW)
    other = rig.invoke("other", service="signup", key="ann", mode=Mode.SHARED)
    waits = rig.step(main, Op.PROMISE, ["approved"])
    peek = rig.step(other, Op.PEEK, ["approved"])

    resolve = rig.step(other, Op.RESOLVE, ["approved", RESULT])

    assert rig.journal(main)[waits].outcome == RESULT
    assert rig.journal(other)[peek].outcome == [0, NOTHING]
    assert rig.journal(other)[resolve].outcome == SLEPT
    again = rig.step(other, Op.RESOLVE, ["approved", RESULT])
    assert failure(rig.journal(other)[again].outcome).code == 409
    late = rig.step(other, Op.PROMISE, ["approved"])
    assert rig.journal(other)[late].outcome == RESULT
    seen = rig.step(other, Op.PEEK, ["approved"])
    assert rig.journal(other)[seen].outcome == [0, some(b"result")]
    rig.do(CompletePromise("signup", "ann", "approved", BOOM))
    assert (rig.result.code, rig.result.outcome) == (409, RESULT)
    rig.do(CompletePromise("signup", "ann", "approved", RESULT))
    assert rig.result.code == 200  # Whoever asks again because an answer was lost has what it wants.


def test_a_client_may_give_a_promise_before_anybody_waits() -> None:
    rig = Rig()
    rig.do(CompletePromise("signup", "ann", "approved", BOOM))
    main = rig.invoke("main", service="signup", key="ann", mode=Mode.WORKFLOW)

    index = rig.step(main, Op.PROMISE, ["approved"])

    assert rig.effects[-1] == SendCompletion(main, 1, index, 3, BOOM)


def test_a_promise_whose_workflow_never_begins_is_forgotten() -> None:
    rig = Rig()
    rig.do(CompletePromise("signup", "ann", "approved", RESULT))
    rig.do(CompletePromise("signup", "bob", "approved", RESULT))
    main = workflow_id("signup", "bob")
    rig.do(Invoke(main, "signup", "run", "bob", Mode.WORKFLOW, b"", {}, 0, None, -1, 99 * HOUR_MS))
    rig.complete(main)

    rig.pass_time(24 * HOUR_MS)

    ann, bob = object_id("signup", "ann"), object_id("signup", "bob")
    assert queries.promise_outcome(rig.txn, ann, "approved") is None
    assert queries.promise_outcome(rig.txn, bob, "approved") == RESULT
    assert queries.load_object(rig.txn, "signup", "ann") is None


def test_a_promise_needs_a_name_that_fits() -> None:
    rig = Rig()

    for name in ("", "x" * 129):
        rig.do(CompletePromise("signup", "ann", name, RESULT))
        assert rig.result.code == 400


def test_an_abandoned_step_wakes_nobody_and_takes_its_timer_along() -> None:
    rig = Rig()
    a = rig.invoke("a")
    index = rig.step(a, Op.SLEEP, [1000])

    rig.do(AbandonStep(a, 1, index))

    assert rig.journal(a)[index].abandoned
    assert queries.next_due(rig.txn) is None
    assert rig.pass_time(HOUR_MS) == []


def test_the_answer_to_an_abandoned_call_is_dropped() -> None:
    rig = Rig()
    a = rig.invoke("a")
    child = Invoke(ident("b"), "greeter", "help", None, Mode.PLAIN, b"", {}, 0, None, 0, HOUR_MS)
    index = rig.step(a, Op.CALL, ["greeter", "help", None, b"", {}], child=child)
    rig.do(AbandonStep(a, 1, index))

    assert rig.complete(child.id) == [Reply(child.id, RESULT)]


def test_a_step_out_of_place_ends_the_attempt_and_the_next_one_is_not_lost() -> None:
    rig = Rig()
    a = rig.invoke("a")

    rig.do(RecordStep(a, 1, 5, Op.RUN, "/x", ["x"], RESULT, None))

    assert isinstance(rig.effects[0], AbortAttempt)
    assert rig.status(a) == Status.BACKING_OFF
    assert rig.pass_time(1000) == [StartAttempt(a, 2)]


def test_an_output_behind_a_step_that_got_lost_completes_nothing() -> None:
    rig = Rig()
    a = rig.invoke("a")

    rig.do(Complete(a, 1, RESULT, None, 2))

    assert isinstance(rig.effects[0], AbortAttempt)
    assert rig.status(a) == Status.BACKING_OFF
    assert rig.pass_time(1000) == [StartAttempt(a, 2)]
    rig.do(Complete(a, 2, RESULT, None, 1))
    assert rig.status(a) == Status.COMPLETED


@pytest.mark.parametrize(
    ("op", "argument"),
    [
        (Op.SLEEP, ["soon"]),
        (Op.CALL, []),
        (Op.SET, [7, b"x"]),
        (Op.SET, ["x" * 129, b"x"]),
        (Op.ATTACH, [b"short"]),
        (Op.RESOLVE_AWAKEABLE, [b"short", 1, RESULT]),
        (Op.RESOLVE, ["x", ["?"]]),
        (Op.VALUE, ["now"]),
        (Op.INPUT, []),
    ],
)
def test_an_argument_that_makes_no_sense_pauses_the_invocation(op: int, argument: list[Any]) -> None:
    rig = Rig()
    a = rig.invoke("a", key="k")

    rig.step(a, op, argument)

    assert (rig.result.code, rig.status(a)) == (409, Status.PAUSED)


# -- runs ------------------------------------------------------------------------------------------------------------

RETRY = Retry(100, 2000, 60_000, 3)


def run_failure(rig: Rig, which: bytes, index: int, retry: Retry = RETRY) -> RecordRunFailure:
    return RecordRunFailure(which, rig.load(which).epoch, index, "/pay", "pay", BOOM, retry, 0, "dp_1")


def test_failures_of_a_run_are_counted_over_attempts_until_it_is_given_up() -> None:
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


def test_a_failed_run_is_tried_again_when_its_error_asks_for_it() -> None:
    rig = Rig()
    a = rig.invoke("a")

    rig.do(run_failure(rig, a, 1)._replace(retry_after_ms=5000))

    assert rig.pass_time(4999) == []
    assert rig.pass_time(1) == [SendRetry(a, 1, 1, 3)]
    rig.do(run_failure(rig, a, 1))
    assert rig.pass_time(200) == [SendRetry(a, 1, 1, 4)], "without a wish, the policy's backoff holds"


def test_before_level_2_the_policy_alone_decides_when_a_run_is_tried_again() -> None:
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


def test_a_suspended_invocation_comes_back_for_the_next_try() -> None:
    rig = Rig()
    a = rig.invoke("a")
    rig.do(run_failure(rig, a, 1))
    rig.do(SuspendAttempt(a, 1, [1]))

    assert rig.pass_time(100) == [StartAttempt(a, 2)]


def test_suspending_while_the_retry_is_on_its_way_does_not_lose_it() -> None:
    rig = Rig()
    a = rig.invoke("a")
    rig.do(run_failure(rig, a, 1))
    rig.pass_time(100)

    assert rig.do(SuspendAttempt(a, 1, [1])) == [StartAttempt(a, 2)]


def test_a_run_that_succeeds_at_last_has_its_outcome() -> None:
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


def test_a_run_whose_intent_is_journaled_is_in_doubt_until_somebody_decides() -> None:
    rig = Rig()
    a = rig.invoke("a")
    assert rig.do(RecordIntent(a, 1, 1, "/pay", "pay", "dp_1")) == [Acknowledge(a, 1, 2)]
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


def test_an_invocation_goes_on_when_all_of_its_runs_in_doubt_are_decided() -> None:
    rig = Rig()
    a = rig.invoke("a")
    rig.do(RecordIntent(a, 1, 1, "/pay", "pay", None))
    rig.do(RecordIntent(a, 1, 2, "/mail", "mail", None))
    rig.do(FailAttempt(a, 1, [1, 500, "pay is in doubt", "InDoubt"], Retry(), 0, 0, True))

    assert rig.do(DecideStep(a, 1, None)) == []
    assert (rig.result.code, rig.status(a)) == (0, Status.PAUSED)
    assert rig.do(DecideStep(a, 2, RESULT)) == [StartAttempt(a, 2)]


def test_what_a_completed_invocation_waited_for_is_cleaned_up() -> None:
    rig = Rig()
    a = rig.invoke("a", service="signup", key="ann", mode=Mode.WORKFLOW, retention_ms=HOUR_MS * 99)
    rig.step(a, Op.SLEEP, [1000])
    rig.step(a, Op.PROMISE, ["p"])
    rig.do(run_failure(rig, a, 3))

    rig.complete(a)

    assert queries.next_due(rig.txn) == rig.now_ms + HOUR_MS * 99
    assert queries.waiting_steps(rig.txn, a, 10) == []
    assert queries.load_object(rig.txn, "signup", "ann") is None
    assert list(rig.txn.scan(b"P", b"Q")) == []


@pytest.mark.parametrize(
    ("limits", "reserve"),
    [(SetLimits(3, 1 << 20, 10, 1 << 20), 100), (SetLimits(2000, 1 << 20, 10, 1 << 20), 200)],
)
def test_a_journal_that_grows_beyond_its_reserve_ends_the_invocation_with_a_clear_failure(
    limits: SetLimits, reserve: int
) -> None:
    rig = Rig()
    rig.do(limits)
    a = rig.invoke("a")
    for _ in range(limits.journal_steps_max + reserve - 1):
        rig.step(a, Op.RUN, ["x"], [0, b"x"])
    assert rig.status(a) == Status.RUNNING, "the code may compensate"

    rig.step(a, Op.RUN, ["x"], [0, b"x"])

    assert rig.status(a) == Status.COMPLETED
    found = failure(rig.outcome(a))
    assert (found.code, found.kind) == (413, "JournalTooLong")
    assert "split the work" in found.message
    assert [type(effect) for effect in rig.effects] == [AbortAttempt, Reply]


def test_the_bytes_of_a_journal_have_a_reserve_too() -> None:
    rig = Rig()
    rig.do(SetLimits(1000, 10_000, 10, 1 << 20))
    a = rig.invoke("a")
    rig.step(a, Op.RUN, ["x"], [0, b"x" * 7000])
    assert not rig.load(a).nearly_full
    rig.step(a, Op.RUN, ["x"], [0, b"x" * 2000])
    assert rig.load(a).nearly_full
    rig.step(a, Op.RUN, ["x"], [0, b"x" * 1500])
    assert rig.status(a) == Status.RUNNING

    rig.step(a, Op.RUN, ["x"], [0, b"x" * 1000])

    assert failure(rig.outcome(a)).kind == "JournalTooLong"


def test_a_journal_is_nearly_full_from_four_fifths_of_its_steps_on() -> None:
    rig = Rig()
    rig.do(SetLimits(10, 1 << 20, 10, 1 << 20))
    a = rig.invoke("a")
    for _ in range(7):
        rig.step(a, Op.RUN, ["x"], [0, b"x"])
    assert not rig.load(a).nearly_full

    rig.step(a, Op.RUN, ["x"], [0, b"x"])

    assert rig.load(a).nearly_full


def test_before_level_2_a_journal_ends_at_its_limit() -> None:
    for limits in (SetLimits(3, 1 << 20, 10, 1 << 20), SetLimits(10, 200, 10, 1 << 20)):
        rig = Rig()
        rig.state = State(0, 1, level=1)
        rig.do(limits)
        a = rig.invoke("a")
        rig.step(a, Op.RUN, ["x"], [0, b"x" * 60])
        rig.step(a, Op.RUN, ["x"], [0, b"x" * 60])

        rig.step(a, Op.RUN, ["x"], [0, b"x" * 60])

        assert failure(rig.outcome(a)).kind == "JournalTooLong"


def test_a_promise_goes_with_its_workflow_and_who_still_waits_is_told() -> None:
    rig = Rig()
    main = rig.invoke("main", service="signup", key="ann", mode=Mode.WORKFLOW)
    other = rig.invoke("other", service="signup", key="ann", mode=Mode.SHARED)
    rig.step(main, Op.SET, ["x", b"1"])
    index = rig.step(other, Op.PROMISE, ["never"])
    rig.complete(main)

    rig.pass_time(HOUR_MS)

    assert failure(rig.journal(other)[index].outcome).code == 410
    assert queries.state_value(rig.txn, object_id("signup", "ann"), "x") is None
    assert queries.load_object(rig.txn, "signup", "ann") is None


def test_a_cancelled_run_notices_the_cancellation() -> None:
    rig = Rig()
    a = rig.invoke("a")
    rig.do(Cancel(a))
    assert rig.load(a).cancelled

    rig.step(a, Op.RUN, ["x"], pack_outcome(CANCELLED))

    assert not rig.load(a).cancelled
