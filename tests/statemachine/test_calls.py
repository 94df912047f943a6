"""Calls, sends and attachments: the requests of one invocation to another."""

from holdfast.sdk.journal import (
    Op,
)
from holdfast.statemachine.commands import (
    AbandonStep,
    Invoke,
    Mode,
)
from holdfast.statemachine.effects import (
    Reply,
    SendCompletion,
    StartAttempt,
    Status,
)
from tests.statemachine.rig import HOUR_MS, RESULT, Rig, failure, ident


def test_the_journal_keeps_a_digest_of_an_argument_that_it_does_not_store() -> None:
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


def test_the_answer_to_an_abandoned_call_is_dropped() -> None:
    rig = Rig()
    a = rig.invoke("a")
    child = Invoke(ident("b"), "greeter", "help", None, Mode.PLAIN, b"", {}, 0, None, 0, HOUR_MS)
    index = rig.step(a, Op.CALL, ["greeter", "help", None, b"", {}], child=child)
    rig.do(AbandonStep(a, 1, index))

    assert rig.complete(child.id) == [Reply(child.id, RESULT)]
