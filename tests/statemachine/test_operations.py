"""Operations on an invocation: cancel, kill, pause, resume, restart and purge; and how it is forgotten."""

from datetime import UTC, datetime
from random import Random

from holdfast.sdk.ids import DeploymentId, InvocationId, format_id, workflow_id
from holdfast.sdk.journal import (
    CANCELLED,
    KILLED,
    Op,
    pack_outcome,
)
from holdfast.statemachine import queries, texts
from holdfast.statemachine.commands import (
    Cancel,
    Complete,
    CompletePromise,
    FailAttempt,
    FireTimers,
    Invoke,
    Kill,
    Mode,
    Pause,
    Purge,
    RecordIntent,
    RecordRunFailure,
    Restart,
    Resume,
    Retry,
    SetLimits,
    SuspendAttempt,
)
from holdfast.statemachine.effects import (
    AbortAttempt,
    Reply,
    Result,
    SendCancelled,
    SendCompletion,
    StartAttempt,
    Status,
)
from holdfast.statemachine.records import End
from holdfast.statemachine.state import State
from tests.statemachine.rig import BOOM, HOUR_MS, RESULT, Rig, failure, ident

DP_1 = DeploymentId("dp_1")

CANCELLATION = pack_outcome(CANCELLED)


def call(rig: Rig, caller: InvocationId, name: str) -> tuple[int, InvocationId]:
    child = Invoke(ident(name), "greeter", "help", None, Mode.PLAIN, b"", {}, 0, None, 0, HOUR_MS)
    return rig.step(caller, Op.CALL, ["greeter", "help", None, b"", {}], child=child), child.id


# -- cancel ------------------------------------------------------------------------------------------------------------


def test_cancelling_fails_everything_an_invocation_waits_for() -> None:
    rig = Rig()
    a = rig.invoke("a", service="signup", key="ann", mode=Mode.WORKFLOW)
    waiting = [
        rig.step(a, Op.SLEEP, [1000]),
        rig.step(a, Op.AWAKEABLE),
        rig.step(a, Op.PROMISE, ["p"]),
        rig.step(a, Op.ATTACH, [rig.invoke("b")]),
    ]
    rig.do(RecordRunFailure(a, 1, 5, "/pay", "pay", BOOM, Retry(), 0, None))

    rig.do(Cancel(a))

    told = [effect.step for effect in rig.effects if isinstance(effect, SendCompletion)]
    assert told == [*waiting, 5]
    assert all(rig.journal(a)[index].outcome == CANCELLATION for index in told)
    assert not rig.load(a).cancelled and rig.load(a).pending == 0
    assert queries.next_due(rig.txn) is None


def test_cancelling_an_invocation_cancels_its_tree_of_calls() -> None:
    rig = Rig()
    a = rig.invoke("a")
    index, b = call(rig, a, "b")
    _, c = call(rig, b, "c")
    sleep = rig.step(c, Op.SLEEP, [1000])

    rig.do(Cancel(a))

    assert rig.journal(a)[index].outcome == CANCELLATION
    assert rig.journal(b)[1].outcome == CANCELLATION
    assert rig.journal(c)[sleep].outcome == CANCELLATION


def test_cancelling_code_that_waits_for_nothing_fails_its_next_wait() -> None:
    rig = Rig()
    a = rig.invoke("a")

    assert rig.do(Cancel(a)) == [SendCancelled(a, 1, 2)]
    rig.do(Cancel(a))
    assert rig.result.code == 200
    rig.step(a, Op.VALUE, ["now"], RESULT)
    index, b = call(rig, a, "b")

    assert rig.effects[-1] == SendCompletion(a, 1, index, 5, CANCELLATION)
    assert queries.load(rig.txn, b) is None
    assert not rig.load(a).cancelled


def test_a_cancellation_before_the_output_starts_another_attempt() -> None:
    rig = Rig()
    a = rig.invoke("a")
    rig.step(a, Op.RUN, ["hotel"], RESULT)
    rig.do(Cancel(a))

    rig.do(Complete(a, 1, RESULT, DP_1, 2, notices=True))

    assert rig.effects == [StartAttempt(a, 2, None)]
    assert rig.load(a).cancelled and rig.outcome(a) is None
    rig.step(a, Op.RUN, ["cancelled after step 1"], CANCELLATION)
    rig.do(Complete(a, 2, RESULT, DP_1, 3, notices=True))
    assert rig.outcome(a) == RESULT, "the code knew, and completes as it likes"


def test_an_output_counts_if_its_sdk_could_not_notice_the_cancellation() -> None:
    rig = Rig()
    old, failed = rig.invoke("a"), rig.invoke("b")
    rig.do(Cancel(old))
    rig.do(Cancel(failed))

    rig.do(Complete(old, 1, RESULT, DP_1, 1))
    rig.do(Complete(failed, 1, BOOM, DP_1, 1, notices=True))

    assert (rig.outcome(old), rig.outcome(failed)) == (RESULT, BOOM)


def test_before_level_2_an_output_counts_although_the_invocation_was_cancelled() -> None:
    rig = Rig()
    rig.state = State(0, 1, level=1)
    a = rig.invoke("a")
    rig.do(Cancel(a))

    rig.do(Complete(a, 1, RESULT, DP_1, 1, notices=True))

    assert rig.outcome(a) == RESULT


def test_a_run_in_progress_is_not_interrupted_but_its_retry_is() -> None:
    rig = Rig()
    a = rig.invoke("a")
    rig.do(RecordIntent(a, 1, 1, "/pay", "pay", None))

    assert rig.do(Cancel(a)) == [SendCancelled(a, 1, 3)]
    rig.do(RecordRunFailure(a, 1, 1, "/pay", "pay", BOOM, Retry(), 0, None))

    assert rig.journal(a)[1].outcome == CANCELLATION
    assert not rig.load(a).cancelled


def test_cancelling_wakes_suspended_paused_and_backing_off_invocations() -> None:
    rig = Rig()
    suspended, backing_off, paused = (rig.invoke(name) for name in "abc")
    rig.do(SuspendAttempt(suspended, 1, [rig.step(suspended, Op.SLEEP, [HOUR_MS])]))
    rig.do(FailAttempt(backing_off, 1, BOOM, Retry(), 0, 0, False))
    rig.do(FailAttempt(paused, 1, BOOM, Retry(), 0, 0, True))

    assert rig.do(Cancel(suspended)) == [StartAttempt(suspended, 2)]
    assert rig.do(Cancel(backing_off)) == [StartAttempt(backing_off, 2)]
    assert rig.do(Cancel(paused)) == [StartAttempt(paused, 2)]
    assert (rig.load(suspended).cancelled, rig.load(paused).cancelled) == (False, True)
    assert rig.pass_time(HOUR_MS) == []


def test_an_invocation_cancelled_before_it_starts_is_completed_as_cancelled() -> None:
    rig = Rig()
    rig.invoke("holder", key="k")
    queued = rig.invoke("queued", key="k")
    scheduled = rig.invoke("scheduled", start_at_ms=rig.now_ms + 1000)

    assert rig.do(Cancel(queued)) == [Reply(queued, CANCELLATION)]
    assert rig.do(Cancel(scheduled)) == [Reply(scheduled, CANCELLATION)]
    assert rig.load(scheduled).end == End.CANCELLED
    assert rig.pass_time(1000) == []


def test_a_handler_may_complete_although_it_is_being_cancelled() -> None:
    rig = Rig()
    a = rig.invoke("a")
    rig.do(Cancel(a))

    rig.complete(a)

    assert (rig.outcome(a), rig.load(a).end) == (RESULT, End.SUCCEEDED)
    rig.do(Cancel(a))
    assert rig.result.code == 409
    rig.do(Cancel(ident("nobody")))
    assert rig.result.code == 404


# -- kill, pause, resume ---------------------------------------------------------------------------------------------------


def test_killing_ends_an_invocation_and_its_calls_at_once() -> None:
    rig = Rig()
    a = rig.invoke("a")
    _, b = call(rig, a, "b")
    _, c = call(rig, b, "c")

    effects = rig.do(Kill(a))

    aborted = [(effect.id, effect.epoch) for effect in effects if isinstance(effect, AbortAttempt)]
    assert aborted == [(a, 1), (b, 1), (c, 1)]
    assert [rig.outcome(each) for each in (a, b, c)] == [pack_outcome(KILLED)] * 3
    assert rig.load(c).end == End.KILLED
    rig.do(Complete(a, 1, RESULT, None))
    assert rig.result.code == 409


def test_a_deep_tree_of_calls_is_killed_without_deep_recursion() -> None:
    rig = Rig()
    rig.do(SetLimits(100, 1 << 20, 10_000, 1 << 30, call_depth_max=10_000))
    first = rig.invoke("0")
    which = first
    for number in range(1, 2000):
        _, which = call(rig, which, str(number))

    rig.do(Kill(first))

    assert rig.load(which).end == End.KILLED


def test_a_paused_invocation_is_fenced_and_resumes_where_it_was() -> None:
    rig = Rig()
    a = rig.invoke("a")
    rig.step(a, Op.RUN, ["x"], RESULT)

    [effect] = rig.do(Pause(a))

    assert isinstance(effect, AbortAttempt) and effect.epoch == 1
    rig.step(a, Op.RUN, ["y"], RESULT, epoch=1)
    assert rig.result.code == 409
    rig.do(Pause(a))
    assert rig.result.code == 200
    assert rig.do(Resume(a, None)) == [StartAttempt(a, 3)]
    assert rig.load(a).length == 2


def test_a_step_that_completes_while_paused_is_kept_for_later() -> None:
    rig = Rig()
    a = rig.invoke("a")
    index = rig.step(a, Op.SLEEP, [1000])
    rig.do(Pause(a))

    assert rig.pass_time(1000) == []

    assert rig.journal(a)[index].outcome == [0, b""]
    assert rig.status(a) == Status.PAUSED


def test_resuming_can_move_an_invocation_to_another_deployment() -> None:
    rig = Rig()
    a = rig.invoke("a")
    rig.step(a, Op.RUN, ["x"], RESULT)
    assert queries.statistics(rig.txn).deployments == {"dp_1": 1}

    effects = rig.do(Resume(a, DeploymentId("dp_2")))

    assert [type(effect) for effect in effects] == [AbortAttempt, StartAttempt]
    assert rig.load(a).deployment == "dp_2"
    assert queries.statistics(rig.txn).deployments == {"dp_2": 1}
    rig.complete(a)
    assert queries.statistics(rig.txn).deployments == {}


def test_resuming_ends_a_backoff_early_and_clears_the_failures() -> None:
    rig = Rig()
    a = rig.invoke("a")
    rig.do(FailAttempt(a, 1, BOOM, Retry(), 0, 0, False))

    assert rig.do(Resume(a, None)) == [StartAttempt(a, 2)]
    assert rig.load(a).failures == 0
    assert rig.pass_time(HOUR_MS) == []


def test_progress_clears_failed_attempts_but_a_lost_attempt_does_not() -> None:
    rig = Rig()
    a = rig.invoke("a")
    rig.do(FailAttempt(a, 1, BOOM, Retry(), 0, 0, False))
    rig.pass_time(100)
    assert rig.load(a).failures == 1

    rig.step(a, Op.RUN, ["x"], RESULT)

    assert (rig.load(a).failures, rig.load(a).failures_total) == (0, 1)


def test_a_retry_after_and_jitter_are_honoured() -> None:
    rig = Rig()
    a, b = rig.invoke("a"), rig.invoke("b")

    rig.do(FailAttempt(a, 1, BOOM, Retry(), 0, 7000, False))
    assert rig.armed == [rig.now_ms + 7000]
    rig.do(FailAttempt(b, 1, BOOM, Retry(100, jitter_permille=500), 123456789, 0, False))
    assert rig.now_ms + 100 <= rig.armed[0] <= rig.now_ms + 150


# -- restart -----------------------------------------------------------------------------------------------------------------


def test_restarting_begins_a_new_invocation_with_the_same_input() -> None:
    rig = Rig()
    a, b = rig.invoke("a"), ident("b")
    rig.step(a, Op.RUN, ["x"], RESULT)
    rig.do(Restart(a, b, 0, None))
    assert rig.result.code == 409
    rig.complete(a, BOOM)

    rig.do(Restart(a, b, 0, None))

    assert (rig.result.code, rig.result.message, rig.started()) == (0, format_id(b), [b])
    assert rig.journal(b) == rig.journal(a)[:1]
    assert rig.load(b).deployment is None
    assert rig.load(b).seed != rig.load(a).seed
    rig.do(Restart(a, b, 0, None))
    assert (rig.result.code, rig.effects) == (200, [])


def test_restarting_from_a_step_keeps_what_came_before_it() -> None:
    rig = Rig()
    a, b = rig.invoke("a"), ident("b")
    rig.step(a, Op.RUN, ["x"], RESULT)
    rig.step(a, Op.RUN, ["y"], BOOM)
    rig.complete(a, BOOM)

    rig.do(Restart(a, b, 2, None))

    assert rig.journal(b) == rig.journal(a)[:2]
    assert rig.load(b).deployment == "dp_1"
    assert rig.load(b).seed == rig.load(a).seed
    assert rig.step(b, Op.RUN, ["y"], RESULT) == 2


def test_restarting_is_refused_if_an_outcome_would_never_arrive() -> None:
    rig = Rig()
    a = rig.invoke("a")
    rig.step(a, Op.AWAKEABLE)
    rig.step(a, Op.RUN, ["x"], RESULT)
    rig.complete(a, BOOM)

    rig.do(Restart(a, ident("b"), 3, None))
    assert rig.result.code == 409 and "step 1 has no outcome" in rig.result.message
    rig.do(Restart(a, ident("b"), 9, None))
    assert rig.result.code == 409
    rig.do(Restart(a, ident("b"), 1, None))
    assert rig.result.code == 0


def test_a_workflow_is_restarted_in_place_and_its_old_attempt_stays_fenced() -> None:
    rig = Rig()
    main = workflow_id("signup", "ann")
    rig.do(Invoke(main, "signup", "run", "ann", Mode.WORKFLOW, b"", {}, 0, None, -1, HOUR_MS))
    rig.step(main, Op.SET, ["x", b"1"])
    rig.step(main, Op.SET, ["x", b"2"])
    rig.do(CompletePromise("signup", "ann", "p", RESULT))
    rig.complete(main, BOOM)

    rig.do(Restart(main, ident("ignored"), 2, None))

    assert rig.effects == [StartAttempt(main, 2)]
    assert rig.values("signup", "ann") == {"x": b"1"}
    assert len(rig.journal(main)) == 2
    rig.step(main, Op.RUN, ["zombie"], RESULT, epoch=1)
    assert rig.result.code == 409
    assert queries.statistics(rig.txn).by_status["completed"] == 0
    rig.complete(main)
    rig.do(Restart(main, main, 0, None))
    assert rig.values("signup", "ann") == {}
    assert rig.step(main, Op.PROMISE, ["p"]) == 1
    assert rig.journal(main)[1].outcome is None


def test_a_repeated_restart_in_place_happens_once() -> None:
    rig = Rig()
    main = workflow_id("signup", "ann")
    rig.do(Invoke(main, "signup", "run", "ann", Mode.WORKFLOW, b"", {}, 0, None, -1, HOUR_MS))
    rig.complete(main, BOOM)
    once = Restart(main, ident("request"), 0, None)
    rig.do(once)

    assert rig.do(once) == []
    assert rig.result == Result(200, format_id(main))
    rig.complete(main)
    assert rig.do(once) == [], "it ran to its end before the question came again"
    assert rig.result == Result(200, format_id(main))
    assert rig.do(Restart(main, ident("another"), 0, None)) == [StartAttempt(main, 3)]


# -- retention ---------------------------------------------------------------------------------------------------------------


def leftovers(rig: Rig) -> list[bytes]:
    """Keys that are neither counters nor about the partition itself."""
    return [key for key, _ in rig.txn.scan(b"\x01", b"\xff") if key[:1] not in (b"M", b"N")]


def test_a_completed_invocation_is_forgotten_after_its_retention() -> None:
    rig = Rig()
    a = rig.invoke("a")
    rig.do(FailAttempt(a, 1, BOOM, Retry(), 0, 0, False))
    rig.pass_time(100)
    rig.step(a, Op.RUN, ["x"], RESULT)
    rig.complete(a)

    rig.pass_time(HOUR_MS - 1)
    assert rig.status(a) == Status.COMPLETED
    rig.pass_time(1)

    assert leftovers(rig) == []
    assert queries.meta(rig.txn).completed_bytes == 0
    assert rig.invoke("a") == a and rig.result.code == 0


def test_a_long_journal_is_forgotten_piece_by_piece() -> None:
    rig = Rig()
    a = rig.invoke("a")
    for _ in range(25):
        rig.step(a, Op.RUN, ["x"], RESULT)
    rig.complete(a)
    sizes = []

    rig.now_ms += HOUR_MS
    while leftovers(rig):
        rig.do(FireTimers(10))
        sizes.append(len(leftovers(rig)))
        assert len(sizes) < 10

    assert len(sizes) == 3
    assert queries.meta(rig.txn).completed_bytes == 0
    assert queries.next_due(rig.txn) is None


def test_beyond_the_limit_the_invocations_that_expire_next_are_forgotten_first() -> None:
    rig = Rig()
    rig.do(SetLimits(100, 1 << 20, 2, 1 << 30))
    kept_long, soon, later = (
        rig.invoke(name, retention_ms=days * 24 * HOUR_MS) for name, days in (("a", 30), ("b", 1), ("c", 2))
    )
    for each in (kept_long, soon, later):
        rig.complete(each)

    assert rig.armed == [rig.now_ms]
    assert queries.next_due(rig.txn) == rig.now_ms
    rig.pass_time(0)

    assert [queries.load(rig.txn, each) is None for each in (kept_long, soon, later)] == [False, True, False]


def test_the_bytes_of_completed_invocations_are_bounded_too() -> None:
    rig = Rig()
    rig.do(SetLimits(100, 1 << 20, 100, 2000))
    for number in range(10):
        rig.complete(rig.invoke(str(number), payload=b"x" * 500))
        rig.pass_time(0)
        assert queries.meta(rig.txn).completed_bytes <= 2000

    assert queries.statistics(rig.txn).completed < 10


def test_purging_forgets_a_completed_invocation_now() -> None:
    rig = Rig()
    a = rig.invoke("a")
    rig.do(Purge(a))
    assert rig.result.code == 409
    rig.complete(a)

    rig.do(Purge(a))

    assert (rig.result.code, leftovers(rig)) == (0, [])
    rig.do(Purge(a))
    assert rig.result.code == 404


def test_purging_a_very_long_journal_is_left_to_the_timers() -> None:
    rig = Rig()
    a = rig.invoke("a")
    for _ in range(1001):
        rig.step(a, Op.RUN, ["x"], RESULT)
    rig.complete(a)

    rig.do(Purge(a))

    assert rig.armed == [rig.now_ms]
    rig.pass_time(0, limit=2000)
    assert leftovers(rig) == []


# -- figures and lists -------------------------------------------------------------------------------------------------------


def test_statistics_count_current_and_past_invocations() -> None:
    rig = Rig()
    done, failed, killed, running = (rig.invoke(name) for name in "abcd")
    rig.complete(done)
    rig.complete(failed, BOOM)
    rig.do(Kill(killed))
    rig.step(running, Op.RUN, ["x"], RESULT)

    found = queries.statistics(rig.txn)

    service = found.services["greeter"]
    assert (found.by_status["completed"], found.by_status["running"]) == (3, 1)
    assert (service.invoked, service.succeeded, service.failed, service.killed) == (4, 1, 1, 1)
    assert (service.attempts, service.steps, found.completed) == (4, 1, 3)


def test_invocations_are_listed_by_filter_page_by_page() -> None:
    rig = Rig()
    every = [rig.invoke(str(number)) for number in range(10)]
    other = rig.invoke("other", service="mailer")
    for each in every[:4]:
        rig.complete(each)

    pages, cursor = [], b""
    while True:
        page, following = queries.list_invocations(rig.txn, queries.Filter(service="greeter"), cursor, 3)
        pages.append([record.id for record in page])
        if following is None:
            break
        cursor = following

    assert sorted(ident for page in pages for ident in page) == sorted(every)
    assert max(map(len, pages)) == 3

    def listed(wanted: queries.Filter) -> set[bytes]:
        return {record.id for record in queries.list_invocations(rig.txn, wanted, b"", 100)[0]}

    assert listed(queries.Filter(statuses=(Status.COMPLETED,))) == set(every[:4])
    assert listed(queries.Filter(statuses=(Status.RUNNING,))) == {*every[4:], other}
    assert listed(queries.Filter(statuses=(Status.PAUSED,))) == set()
    assert listed(queries.Filter(handler="greet", service="mailer", created_before_ms=rig.now_ms + 1)) == {other}
    assert failure(pack_outcome(CANCELLED)).kind == "Cancelled"


def test_times_are_shown_in_a_readable_form() -> None:
    random = Random(1)
    for at_ms in [0, 951_782_400_000, 4_102_444_799_999, *(random.randrange(2**42) for _ in range(500))]:
        expected = datetime.fromtimestamp(at_ms // 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        assert texts.utc(at_ms) == expected
