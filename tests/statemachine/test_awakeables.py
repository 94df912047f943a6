"""Awakeables with secrets: the id of an invocation is not enough to complete its awakeables."""

from __future__ import annotations

from holdfast.sdk.journal import Op
from holdfast.statemachine import ops
from holdfast.statemachine.commands import CompleteStep
from holdfast.statemachine.effects import SendCompletion
from tests.statemachine.rig import RESULT, Rig, ident

SECRET, WRONG = b"8 bytes!", b"8 others"


def test_completing_an_awakeable_with_a_secret_requires_the_secret() -> None:
    rig = Rig()
    a = rig.invoke("a")
    index = rig.step(a, Op.AWAKEABLE, [SECRET])

    for secret in (b"", WRONG, SECRET[:7], SECRET + b"!"):
        assert rig.do(CompleteStep(a, index, RESULT, secret=secret)) == []
        assert (rig.result.code, rig.result.message) == (404, "no such step")
    assert rig.do(CompleteStep(a, index, RESULT, secret=SECRET)) == [SendCompletion(a, 1, index, 3, RESULT)]
    rig.do(CompleteStep(a, index, RESULT, secret=WRONG))
    assert rig.result.code == 404
    rig.do(CompleteStep(a, index, RESULT, secret=SECRET))
    assert rig.result.code == 200


def test_only_holders_of_the_secret_learn_whether_an_awakeable_is_completed() -> None:
    rig = Rig()
    a = rig.invoke("a")
    index = rig.step(a, Op.AWAKEABLE, [SECRET])
    rig.do(CompleteStep(a, index, RESULT, secret=SECRET))
    rig.complete(a)

    codes = []
    for secret in (SECRET, WRONG, b""):
        rig.do(CompleteStep(a, index, RESULT, secret=secret))
        codes.append(rig.result.code)

    assert codes == [200, 409, 409]


def test_an_awakeable_of_an_older_sdk_has_no_secret_and_is_completed_without_one() -> None:
    rig = Rig()
    a = rig.invoke("a")
    index = rig.step(a, Op.AWAKEABLE)

    rig.do(CompleteStep(a, index, RESULT, secret=SECRET))
    assert rig.result.code == 404
    assert rig.do(CompleteStep(a, index, RESULT)) == [SendCompletion(a, 1, index, 3, RESULT)]


def test_one_handler_resolves_the_awakeable_of_another_with_its_secret() -> None:
    rig = Rig()
    a, b = rig.invoke("a"), rig.invoke("b")
    index = rig.step(a, Op.AWAKEABLE, [SECRET])

    rig.step(b, Op.RESOLVE_AWAKEABLE, [a, index, RESULT])
    rig.step(b, Op.RESOLVE_AWAKEABLE, [a + WRONG, index, RESULT])
    assert not rig.journal(a)[index].done
    rig.step(b, Op.RESOLVE_AWAKEABLE, [a + SECRET, index, RESULT])

    assert rig.journal(a)[index].outcome == RESULT


def test_an_explanation_never_shows_the_id_of_an_awakeable_with_a_secret() -> None:
    waits = ops.ROWS[Op.AWAKEABLE].waits
    assert waits is not None

    assert waits(ident("a"), 3, [SECRET]) == "an awakeable (step 3)"
    assert waits(ident("a"), 3, []) == f"the awakeable awk_{ident('a').hex()}00000003 (step 3)"
