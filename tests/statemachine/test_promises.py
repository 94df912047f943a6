"""Promises of a workflow: resolved once, for current and later waiters."""

from typing import Any

from holdfast.sdk.ids import object_id, workflow_id
from holdfast.sdk.journal import (
    NOTHING,
    Op,
    some,
)
from holdfast.statemachine import queries
from holdfast.statemachine.commands import (
    CompletePromise,
    Invoke,
    Mode,
)
from holdfast.statemachine.effects import (
    SendCompletion,
)
from tests.statemachine.rig import BOOM, HOUR_MS, RESULT, Rig, failure

SLEPT: list[Any] = [0, b""]


def test_a_promise_is_resolved_once_for_current_and_later_waiters() -> None:
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
    assert rig.result.code == 200  # A client that repeats its request because the answer was lost succeeds.


def test_a_client_may_resolve_a_promise_before_anybody_waits() -> None:
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


def test_the_name_of_a_promise_must_be_valid() -> None:
    rig = Rig()

    for name in ("", "x" * 129):
        rig.do(CompletePromise("signup", "ann", name, RESULT))
        assert rig.result.code == 400


def test_a_promise_is_forgotten_with_its_workflow_and_its_waiters_are_told() -> None:
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
