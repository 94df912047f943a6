"""An invocation from start to completion, and the properties that every command must keep."""

import pytest

from holdfast.sdk.journal import Op, unpack_step
from holdfast.statemachine import explain, machine, queries
from holdfast.statemachine.commands import NUMBERS, Announce, FailAttempt, Invoke, Mode, Pause, Redispatch, Retry
from holdfast.statemachine.effects import (
    AbortAttempt,
    Acknowledge,
    First,
    Reply,
    Result,
    SendCompletion,
    StartAttempt,
    Status,
)
from holdfast.statemachine.state import State
from tests.statemachine.rig import BOOM, HOUR_MS, RESULT, T0, Rig, ident


def test_every_command_is_handled() -> None:
    assert list(machine._HANDLERS) == list(NUMBERS)


def test_an_invocation_runs_at_once_with_what_its_first_attempt_needs() -> None:
    rig = Rig()

    a = rig.invoke("a")

    assert rig.result == Result(0)
    [effect] = rig.effects
    assert isinstance(effect, StartAttempt) and effect.first is not None
    assert effect == StartAttempt(a, 1, First("greeter", "greet", None, Mode.PLAIN, effect.first.input))
    assert unpack_step(effect.first.input).outcome == [0, b"input"]
    assert queries.journal(rig.txn, a, 0, 10) == [effect.first.input]


def test_invoking_a_known_id_changes_nothing() -> None:
    rig = Rig()
    a = rig.invoke("a")
    rig.step(a, Op.RUN, ["x"], RESULT)
    before = queries.digest(rig.txn)

    rig.invoke("a", payload=b"other")

    assert (rig.result.code, rig.effects) == (200, [])
    assert queries.digest(rig.txn) == before


def test_invoking_a_completed_id_returns_its_outcome() -> None:
    rig = Rig()
    a = rig.invoke("a")
    rig.complete(a)

    rig.invoke("a")

    assert (rig.result.code, rig.result.outcome, rig.effects) == (200, RESULT, [])


def request(name: str, *, key: str = "order 7", of: bytes = b"") -> Invoke:
    payload = b"large" if of else b"input"
    return Invoke(
        ident(name), "greeter", "greet", None, Mode.PLAIN, payload, {}, 0, None, -1, HOUR_MS, key, of or b"\1" * 16
    )


def test_an_idempotency_key_is_refused_for_another_body_also_after_completion() -> None:
    rig = Rig()
    other = request("a", of=b"\2" * 16)
    rig.do(request("a"))

    for complete in (False, True):
        if complete:
            rig.complete(ident("a"))
        before = queries.digest(rig.txn)
        rig.do(other)
        assert (rig.result.code, rig.result.outcome, rig.effects) == (422, None, [])
        rig.do(request("a"))
        assert (rig.result.code, rig.effects) == (200, [])
        assert queries.digest(rig.txn) == before
    rig.pass_time(HOUR_MS + 1)
    rig.do(other)
    assert rig.result.code == 0, "it was forgotten: the key is free again"


def test_bodies_are_compared_only_if_both_are_known_under_the_same_idempotency_key() -> None:
    rig = Rig()
    rig.invoke("old")
    rig.do(request("a"))

    rig.do(request("old"))
    assert rig.result.code == 200, "an older release kept no hash"
    rig.do(request("a", key="order 8", of=b"\2" * 16))
    assert rig.result.code == 200, "a workflow is found by its own key"
    rig.do(request("a")._replace(request_hash=b""))
    assert rig.result.code == 200, "asked by an older release"


def test_before_level_2_no_hash_of_a_request_is_kept() -> None:
    rig = Rig()
    rig.state = State(0, 1, level=1)

    rig.do(request("a"))
    rig.do(request("a", of=b"\2" * 16))

    assert rig.result.code == 200
    assert rig.load(ident("a")).request_hash == b""


def test_a_step_is_acknowledged_when_it_is_journaled() -> None:
    rig = Rig()
    a = rig.invoke("a")

    rig.step(a, Op.RUN, ["x"], RESULT)

    assert rig.effects == [Acknowledge(a, 1, 2)]
    assert [step.op for step in rig.journal(a)] == [Op.INPUT, Op.RUN]
    assert rig.load(a).deployment == "dp_1"


def test_completion_answers_all_waiters_and_keeps_the_outcome() -> None:
    rig = Rig()
    a = rig.invoke("a")

    assert rig.complete(a) == [Reply(a, RESULT)]
    assert (rig.status(a), rig.outcome(a)) == (Status.COMPLETED, RESULT)
    assert rig.armed == [T0 + HOUR_MS]


def test_a_lost_attempt_is_started_again_under_a_new_epoch_only_once() -> None:
    rig = Rig()
    a = rig.invoke("a")

    assert rig.do(Redispatch(a, 1)) == [StartAttempt(a, 2)]
    assert rig.do(Redispatch(a, 1)) == []
    assert rig.result.code == 409
    assert rig.load(a).failures == 0


def test_the_steps_of_a_superseded_attempt_are_refused() -> None:
    rig = Rig()
    a = rig.invoke("a")
    rig.do(Redispatch(a, 1))
    before = queries.digest(rig.txn)

    rig.step(a, Op.RUN, ["x"], RESULT, epoch=1)

    [effect] = rig.effects
    assert isinstance(effect, AbortAttempt) and (effect.id, effect.epoch) == (a, 1)
    assert rig.result.code == 409
    assert queries.digest(rig.txn) == before


def test_a_call_runs_its_child_and_gets_its_outcome() -> None:
    rig = Rig()
    a = rig.invoke("a")
    child = Invoke(ident("b"), "greeter", "help", None, Mode.PLAIN, b"x", {}, 0, None, 0, HOUR_MS)

    index = rig.step(a, Op.CALL, ["greeter", "help", None, b"x", {}], child=child)

    assert rig.effects[0] == Acknowledge(a, 1, 2)
    assert rig.started() == [child.id]
    assert rig.complete(child.id) == [Reply(child.id, RESULT), SendCompletion(a, 1, index, 3, RESULT)]
    assert rig.journal(a)[index].argument == ["greeter", "help", None, None, None, child.id]


def test_the_clock_of_the_state_never_goes_back() -> None:
    rig = Rig()
    rig.do(Announce(1, "n1"))
    rig.now_ms -= 5000

    a = rig.invoke("a")

    assert rig.load(a).created_ms == T0


def test_failed_attempts_back_off_and_are_paused_in_the_end() -> None:
    rig = Rig()
    a = rig.invoke("a")
    retry = Retry(100, 2000, 250, 4)
    delays = []

    for epoch in (1, 2, 3):
        rig.do(FailAttempt(a, epoch, BOOM, retry, 0, 0, False))
        delays.append(rig.armed[0] - rig.now_ms)
        assert rig.status(a) == Status.BACKING_OFF
        assert rig.pass_time(delays[-1] - 1) == []
        assert rig.pass_time(1) == [StartAttempt(a, epoch + 1)]
    rig.do(FailAttempt(a, 4, BOOM, retry, 0, 0, False))

    assert delays == [100, 200, 250]
    assert (rig.status(a), rig.armed) == (Status.PAUSED, [])
    assert "boom" in explain.why_not_running(rig.txn, a)
    assert "after 4 failed attempts" in explain.why_not_running(rig.txn, a)


def test_one_failed_attempt_is_named_in_the_singular() -> None:
    rig = Rig()
    a, b, c = rig.invoke("a"), rig.invoke("b"), rig.invoke("c")

    rig.do(FailAttempt(a, 1, BOOM, Retry(), 0, 0, False))
    rig.do(FailAttempt(b, 1, BOOM, Retry(), 0, 0, True))
    rig.do(Pause(c))

    assert "after 1 failed attempt." in explain.why_not_running(rig.txn, a)
    assert "paused after 1 failed attempt and" in explain.why_not_running(rig.txn, b)
    assert explain.why_not_running(rig.txn, c) == "It is paused and waits for an operator."


@pytest.mark.parametrize("message", ["no seats", "SoldOut: no seats"])
def test_the_kind_of_a_failure_is_said_once(message: str) -> None:
    rig = Rig()
    a = rig.invoke("a")

    rig.do(FailAttempt(a, 1, [1, 500, message, "SoldOut"], Retry(), 0, 0, True))

    assert explain.why_not_running(rig.txn, a).endswith("The last failure: SoldOut: no seats")
