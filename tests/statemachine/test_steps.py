"""Steps that wait: each gets its outcome once, and the invocation continues."""

from typing import Any

import msgpack

from holdfast.sdk.journal import (
    NOTHING,
    Op,
    some,
)
from holdfast.statemachine import explain, queries
from holdfast.statemachine.commands import (
    AbandonStep,
    Mode,
    SuspendAttempt,
)
from holdfast.statemachine.effects import (
    Acknowledge,
    SendCompletion,
    StartAttempt,
    Status,
)
from tests.statemachine.rig import HOUR_MS, RESULT, Rig, run_failure

SLEPT: list[Any] = [0, b""]


def test_an_outcome_restarts_a_suspended_invocation() -> None:
    rig = Rig()
    a = rig.invoke("a")
    index = rig.step(a, Op.SLEEP, [1000])

    rig.do(SuspendAttempt(a, 1, [index]))

    assert rig.status(a) == Status.SUSPENDED
    assert "a timer at" in explain.why_not_running(rig.txn, a)
    assert rig.pass_time(1000) == [StartAttempt(a, 2)]
    assert rig.journal(a)[index].outcome == SLEPT


def test_suspending_after_the_outcome_arrived_restarts_at_once() -> None:
    rig = Rig()
    a = rig.invoke("a")
    index = rig.step(a, Op.SLEEP, [1000])
    rig.pass_time(1000)

    assert rig.do(SuspendAttempt(a, 1, [index])) == [StartAttempt(a, 2)]


def test_suspending_without_a_wait_restarts_at_once() -> None:
    rig = Rig()
    a = rig.invoke("a")

    assert rig.do(SuspendAttempt(a, 1, [])) == [StartAttempt(a, 2)]


def test_completions_are_numbered_in_order_of_arrival() -> None:
    rig = Rig()
    a = rig.invoke("a")
    slow, fast = rig.step(a, Op.SLEEP, [200]), rig.step(a, Op.SLEEP, [100])
    rig.pass_time(100)
    value = rig.step(a, Op.VALUE, ["now"], RESULT)
    rig.pass_time(100)

    steps = rig.journal(a)

    assert [(step.made, step.done) for step in steps] == [(1, 1), (2, 6), (3, 4), (5, 5)]
    assert steps[slow].done > steps[value].done > steps[fast].done


def test_state_that_was_not_sent_is_read_through_the_node() -> None:
    rig = Rig()
    a = rig.invoke("a", key="k")
    rig.step(a, Op.SET, ["x", b"1"])

    rig.step(a, Op.GET, ["x"])
    rig.step(a, Op.GET, ["y"])
    rig.step(a, Op.KEYS)

    outcomes = [step.outcome for step in rig.journal(a)[2:]]
    assert outcomes == [[0, some(b"1")], [0, NOTHING], [0, msgpack.packb(["x"])]]
    assert rig.effects == [Acknowledge(a, 1, 5), SendCompletion(a, 1, 4, 8, [0, msgpack.packb(["x"])])]


def test_an_abandoned_step_wakes_no_one_and_removes_its_timer() -> None:
    rig = Rig()
    a = rig.invoke("a")
    index = rig.step(a, Op.SLEEP, [1000])

    rig.do(AbandonStep(a, 1, index))

    assert rig.journal(a)[index].abandoned
    assert queries.next_due(rig.txn) is None
    assert rig.pass_time(HOUR_MS) == []


def test_completion_cleans_up_everything_the_invocation_waited_for() -> None:
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
