"""The journal as a whole: its order, what it accepts, and its limits."""

from typing import Any

import pytest

from holdfast.sdk.journal import (
    Op,
)
from holdfast.statemachine.commands import (
    Complete,
    RecordStep,
    SetLimits,
)
from holdfast.statemachine.effects import (
    AbortAttempt,
    Reply,
    StartAttempt,
    Status,
)
from holdfast.statemachine.state import State
from tests.statemachine.rig import RESULT, Rig, failure


def test_a_step_out_of_order_ends_its_attempt_and_the_next_attempt_continues() -> None:
    rig = Rig()
    a = rig.invoke("a")

    rig.do(RecordStep(a, 1, 5, Op.RUN, "/x", ["x"], RESULT, None))

    assert isinstance(rig.effects[0], AbortAttempt)
    assert rig.status(a) == Status.BACKING_OFF
    assert rig.pass_time(1000) == [StartAttempt(a, 2)]


def test_an_output_after_a_lost_step_does_not_complete_the_invocation() -> None:
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
def test_an_invalid_argument_pauses_the_invocation(op: int, argument: list[Any]) -> None:
    rig = Rig()
    a = rig.invoke("a", key="k")

    rig.step(a, op, argument)

    assert (rig.result.code, rig.status(a)) == (409, Status.PAUSED)


@pytest.mark.parametrize(
    ("limits", "reserve"),
    [(SetLimits(3, 1 << 20, 10, 1 << 20), 100), (SetLimits(2000, 1 << 20, 10, 1 << 20), 200)],
)
def test_a_journal_longer_than_its_reserve_fails_the_invocation_with_the_reason(
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


def test_the_byte_limit_of_a_journal_has_a_reserve_too() -> None:
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


def test_a_journal_is_nearly_full_at_four_fifths_of_its_limit() -> None:
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
