"""Looking through the tables for people: slices are bounded, and together they have everything once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from holdfast.sdk.ids import DeploymentId
from holdfast.sdk.journal import Op
from holdfast.statemachine import survey
from holdfast.statemachine.commands import CompletePromise, FailAttempt, Invoke, Mode, RecordIntent, SetState
from holdfast.statemachine.survey import AWAKEABLE, IN_DOUBT, PROMISED, Child
from tests.statemachine.rig import HOUR_MS, RETRY, T0, Rig, ident


@pytest.fixture(autouse=True)
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "LOOKED_AT_MAX", 3)
    monkeypatch.setattr(survey, "STEPS_LOOKED_AT_MAX", 3)


def all_of(read: Callable[[bytes], tuple[list[tuple[bytes, Any]], bytes | None]]) -> list[Any]:
    found: list[tuple[bytes, Any]] = []
    after: bytes | None = b""
    while after is not None:
        rows, after = read(after)
        assert len(rows) <= 3
        found += rows
    ranks = [rank for rank, _ in found]
    assert ranks == sorted(set(ranks)), "rows come once, and in the order of their ranks"
    return [row for _, row in found]


def test_keys_are_filtered_by_service_and_prefix() -> None:
    rig = Rig()
    for name in ("a1", "a2", "b1"):
        rig.do(SetState("counter", name, {"x": b"1"}, False))
    rig.do(SetState("other", "a3", {"x": b"1"}, False))

    def found(service: str | None, prefix: str) -> set[str]:
        return {each.key for each in all_of(lambda after: survey.keys(rig.txn, service, prefix, after, 2))}

    assert found("counter", "") == {"a1", "a2", "b1"}
    assert found("counter", "a") == {"a1", "a2"}
    assert found(None, "a") == {"a1", "a2", "a3"}


def test_a_queue_is_in_the_order_of_arrival() -> None:
    rig = Rig()
    ids = [rig.invoke(f"m{number}", key="k") for number in range(4)]

    whole, part = survey.queue(rig.txn, "greeter", "k", 10), survey.queue(rig.txn, "greeter", "k", 2)

    assert whole.holder is not None and whole.holder.id == ids[0]
    assert [record.id for record in whole.waiting] == ids[1:] and not whole.more
    assert [record.id for record in part.waiting] == ids[1:3] and part.more
    assert survey.queue(rig.txn, "greeter", "other", 2) == (None, [], False)


def test_promises_are_shown_with_their_outcomes() -> None:
    rig = Rig()
    rig.do(CompletePromise("flow", "k", "b", [0, b"1"]))
    rig.do(CompletePromise("flow", "k", "a", [1, 400, "no", ""]))

    assert survey.promises(rig.txn, "flow", "k", 5) == ([("a", [1, 400, "no", ""]), ("b", [0, b"1"])], False)
    assert survey.promises(rig.txn, "flow", "k", 1) == ([("a", [1, 400, "no", ""])], True)


def test_what_waits_for_somebody_is_found_by_kind_and_service() -> None:
    rig = Rig()
    awakeable = rig.invoke("a", service="agent")
    rig.step(awakeable, Op.AWAKEABLE, [b"s" * 8])
    promise = rig.invoke("b", service="flow", key="k")
    rig.step(promise, Op.PROMISE, ["approved"])
    doubt = rig.invoke("c", service="pay")
    rig.do(RecordIntent(doubt, 1, 1, "0/pay/0", "charge", DeploymentId("dp_1")))
    asleep = rig.invoke("d", service="agent")
    rig.step(asleep, Op.SLEEP, [1000])

    def found(kinds: tuple[str, ...], service: str | None = None) -> list[survey.Wait]:
        return all_of(lambda after: survey.waiting(rig.txn, kinds, service, after, 2))

    everything = (AWAKEABLE, PROMISED, IN_DOUBT)
    assert {each.invocation for each in found(everything)} == {awakeable, promise}, "its attempt still runs"
    rig.do(FailAttempt(doubt, 1, [1, 500, "lost", ""], RETRY, 0, 0, pause=True))
    assert {(each.kind, each.invocation) for each in found(everything)} == {
        (AWAKEABLE, awakeable), (PROMISED, promise), (IN_DOUBT, doubt),
    }  # fmt: skip
    [one] = found((IN_DOUBT,))
    assert (one.name, one.step, one.service, one.since_ms) == ("charge", 1, "pay", T0)
    [two] = found((AWAKEABLE, PROMISED), "agent")
    assert (two.invocation, two.secret, two.name) == (awakeable, b"s" * 8, None)
    [three] = found((PROMISED,))
    assert (three.name, three.key) == ("approved", "k")


def test_timers_are_found_earliest_first() -> None:
    rig = Rig()
    scheduled = rig.invoke("a", start_at_ms=T0 + 9000)
    asleep = rig.invoke("b")
    rig.step(asleep, Op.SLEEP, [5000])
    failing = rig.invoke("c", service="flaky")
    rig.do(FailAttempt(failing, 1, [1, 500, "no", ""], RETRY, 0, 0, pause=False))
    for number in range(5):
        rig.invoke(f"later{number}", start_at_ms=T0 + HOUR_MS)

    found = all_of(lambda after: survey.timed(rig.txn, None, after, 2))

    assert [each.invocation for each in found[:3]] == [failing, asleep, scheduled]
    assert [each.name for each in found[:3]] == ["next attempt", "sleep", "start"]
    assert [each.due_ms for each in found[:3]] == [T0 + 100, T0 + 5000, T0 + 9000] and len(found) == 8
    assert [each.step for each in found[:3]] == [None, 1, None]
    assert [each.service for each in all_of(lambda after: survey.timed(rig.txn, "flaky", after, 2))] == ["flaky"]


def test_children_are_found_in_any_journal_in_slices() -> None:
    rig = Rig()
    parent = rig.invoke("parent")
    for number in range(7):
        rig.step(parent, Op.RUN, ["work"], [0, b"1"])
        if number % 2:
            child = Invoke(
                ident(f"c{number}"),
                "mailer",
                "send",
                None,
                Mode.PLAIN,
                b"",
                {},
                0,
                parent,
                rig.load(parent).length,
                HOUR_MS,
            )
            rig.step(parent, Op.CALL, ["mailer", "send", None, b"", {}], child=child)

    found: list[Child] = []
    start: int | None = 0
    while start is not None:
        rows, start = survey.children(rig.txn, parent, start, 100)
        found += rows

    assert [child.id for child in found] == [ident(f"c{number}") for number in (1, 3, 5)]
    assert {(child.service, child.handler, child.key) for child in found} == {("mailer", "send", None)}
    assert [record.id for record in survey.records(rig.txn, [ident("nothing"), found[0].id])] == [found[0].id]
