"""Approvals: a step that people decide about, once, until its deadline; and the inbox that shows it."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.sdk.ids import InvocationId
from holdfast.sdk.journal import CANCELLED, DETAILS_BYTES_MAX, Decided, Op, pack_decided, pack_outcome, unpack_decided
from holdfast.statemachine import explain, inbox, queries, tables
from holdfast.statemachine.commands import (
    AbandonStep,
    Cancel,
    CompleteStep,
    Decide,
    Kill,
    Restart,
    SetHooks,
    SuspendAttempt,
)
from holdfast.statemachine.effects import SendCompletion, StartAttempt, Status
from holdfast.statemachine.inbox import Wanted
from holdfast.statemachine.state import State
from holdfast.statemachine.webhooks import ASKED, REMINDED, HookId
from tests.statemachine.rig import RESULT, T0, Rig

SECRET, WRONG = b"8 bytes!", b"8 others"
DAY_MS = 86_400_000
HOOK = HookId(b"hook 1..")


def asks(
    rig: Rig,
    which: InvocationId,
    *,
    title: str = "Refund order 17?",
    assignee: str | None = "finance",
    timeout_ms: int = 0,
    remind_after_ms: int = 0,
    editable: bool = True,
) -> int:
    argument = [title, b'{"eur":240}', ["approve", "reject"], assignee, timeout_ms, remind_after_ms, editable, SECRET]
    return rig.step(which, Op.APPROVAL, argument)


def approve(which: InvocationId, index: int, **changed: Any) -> Decide:
    whole = {"choice": "approve", "by": "Ann", "by_id": "tk1", "secret": SECRET, **changed}
    return Decide(which, index, **whole)


def waiting(rig: Rig, **wanted: Any) -> list[tuple[InvocationId, int]]:
    rows, more = inbox.approvals(rig.txn, Wanted(**wanted), b"", 100)
    assert more is None
    return [(row.invocation, row.step) for _, row in rows]


def decision(rig: Rig, which: InvocationId, index: int) -> Decided:
    outcome = rig.journal(which)[index].outcome
    assert outcome is not None and outcome[0] == 0
    return unpack_decided(outcome[1])


def test_the_journal_keeps_who_decided_when_and_with_which_comment_and_payload() -> None:
    rig = Rig()
    a = rig.invoke("a")
    index = asks(rig, a)
    rig.now_ms += 5000

    effects = rig.do(approve(a, index, comment="looks right", payload=b'{"eur":200}'))

    decided = Decided("approve", "Ann", "tk1", "looks right", T0 + 5000, b'{"eur":200}')
    assert effects == [SendCompletion(a, 1, index, 3, [0, pack_decided(decided)])]
    assert decision(rig, a, index) == decided and rig.result.outcome == [0, pack_decided(decided)]
    assert waiting(rig) == []


def test_a_decision_requires_the_secret_of_the_approval() -> None:
    rig = Rig()
    a = rig.invoke("a")
    index = asks(rig, a)

    for wrong in (approve(a, index, secret=WRONG), approve(a, index, secret=b""), approve(a, index + 1), approve(a, 0)):
        assert rig.do(wrong) == [] and rig.result.code == 404
    for edge in (-1, 2**32):
        rig.do(approve(a, edge))
        assert rig.result.code == 404
    rig.do(CompleteStep(a, index, RESULT, secret=SECRET))
    assert rig.result.code == 404, "it is no awakeable"

    assert waiting(rig) == [(a, index)]


def test_only_the_first_decision_counts_and_the_others_are_told_of_it() -> None:
    rig = Rig()
    a = rig.invoke("a")
    index = asks(rig, a)
    rig.do(approve(a, index, comment="fine"))
    first = rig.result.outcome

    codes = []
    for later in (
        approve(a, index),
        approve(a, index, choice="reject"),
        approve(a, index, by="Bob", by_id="tk2"),
        approve(a, index, payload=b"1"),
        approve(a, index, secret=WRONG),
    ):
        assert rig.do(later) == []
        codes.append(rig.result.code)
        assert rig.result.outcome == (first if rig.result.code != 404 else None)
    assert codes == [200, 409, 409, 409, 404]
    rig.do(approve(a, index, choice="reject"))
    assert rig.result.message == "'approve' was decided by Ann at 2023-11-14 22:13:20 UTC"

    rig.complete(a)
    rig.do(approve(a, index))
    assert (rig.result.code, rig.result.outcome) == (200, first), "the request itself may have completed the invocation"
    rig.do(approve(a, index, choice="reject"))
    assert (rig.result.code, rig.result.outcome) == (409, first)


@pytest.mark.parametrize(
    ("changed", "code", "says"),
    [
        ({"choice": "maybe"}, 400, "choose approve or reject"),
        ({"comment": "x" * 5000}, 413, "comment"),
        ({"payload": bytes(DETAILS_BYTES_MAX + 1)}, 413, "payload"),
    ],
)
def test_a_decision_that_the_approval_does_not_allow_is_refused(changed: dict[str, Any], code: int, says: str) -> None:
    rig = Rig()
    a = rig.invoke("a")
    index = asks(rig, a)

    assert rig.do(approve(a, index, **changed)) == []

    assert rig.result.code == code and says in rig.result.message
    assert waiting(rig) == [(a, index)]


def test_a_payload_that_must_not_be_edited_stays_as_it_was_shown() -> None:
    rig = Rig()
    a = rig.invoke("a")
    index = asks(rig, a, editable=False)

    rig.do(approve(a, index, payload=b"{}"))
    assert rig.result.code == 400 and waiting(rig) == [(a, index)]
    rig.do(approve(a, index))
    assert rig.result.code == 0


def test_an_approval_times_out_at_its_deadline_and_not_before() -> None:
    rig = Rig()
    a = rig.invoke("a")
    index = asks(rig, a, timeout_ms=2 * DAY_MS)
    assert rig.armed == [T0 + 2 * DAY_MS]
    rig.do(SuspendAttempt(a, 1, [index]))

    assert rig.pass_time(2 * DAY_MS - 1) == [] and waiting(rig) == [(a, index)]
    assert rig.pass_time(1) == [StartAttempt(a, 2)]

    assert decision(rig, a, index) == Decided(None, at_ms=T0 + 2 * DAY_MS)
    assert waiting(rig) == []
    rig.do(approve(a, index))
    assert rig.result.code == 409 and rig.result.message == "the approval timed out at 2023-11-16 22:13:20 UTC"


def test_nobody_decides_after_the_deadline_although_its_timer_has_not_fired() -> None:
    rig = Rig()
    a = rig.invoke("a")
    index = asks(rig, a, timeout_ms=DAY_MS)
    rig.do(SuspendAttempt(a, 1, [index]))
    rig.now_ms += DAY_MS

    effects = rig.do(approve(a, index))

    assert rig.result.code == 409 and rig.result.message.startswith("the approval timed out at ")
    assert effects == [StartAttempt(a, 2)] and decision(rig, a, index).choice is None
    assert waiting(rig) == [] and list(rig.txn.scan(tables.TIMER, tables.after(tables.TIMER))) == []


def test_a_decision_disarms_the_deadline_and_the_reminder() -> None:
    rig = Rig()
    a = rig.invoke("a")
    index = asks(rig, a, timeout_ms=DAY_MS, remind_after_ms=1000)

    rig.do(approve(a, index))

    assert list(rig.txn.scan(tables.TIMER, tables.after(tables.TIMER))) == []


def test_whoever_is_asked_is_reminded_once_and_the_inbox_says_so() -> None:
    rig = Rig()
    rig.do(SetHooks(1, [[HOOK, ASKED | REMINDED, []]]))
    a = rig.invoke("a")
    index = asks(rig, a, timeout_ms=DAY_MS, remind_after_ms=1000)

    rig.pass_time(999)
    assert [notice.event for notice in queries.notices(rig.txn, HOOK, 9)] == [ASKED]
    rig.pass_time(1)
    rig.pass_time(5000)

    notices = queries.notices(rig.txn, HOOK, 9)
    assert [notice.event for notice in notices] == [ASKED, REMINDED]
    assert notices[1].approval == [index, "Refund order 17?", ["approve", "reject"], "finance", T0 + DAY_MS]
    found = inbox.approval(rig.txn, a, index)
    assert found is not None and found.reminded_ms == T0 + 1000 and found.status == "waiting"


def test_there_is_no_reminder_at_or_after_the_deadline() -> None:
    rig = Rig()
    a = rig.invoke("a")
    asks(rig, a, timeout_ms=1000, remind_after_ms=1000)

    assert len(list(rig.txn.scan(tables.TIMER, tables.after(tables.TIMER)))) == 1


def ends() -> dict[str, Any]:
    return {
        "abandoned": lambda a, index: AbandonStep(a, 1, index),
        "cancelled": lambda a, index: Cancel(a),
        "killed": lambda a, index: Kill(a),
    }


@pytest.mark.parametrize("how", ends())
def test_an_approval_that_nobody_waits_for_leaves_the_inbox_and_is_gone(how: str) -> None:
    rig = Rig()
    a = rig.invoke("a")
    index = asks(rig, a, timeout_ms=DAY_MS, remind_after_ms=5)

    rig.do(ends()[how](a, index))

    assert waiting(rig) == [] and list(rig.txn.scan(tables.TIMER, tables.after(tables.TIMER))) == []
    rig.do(approve(a, index))
    assert rig.result.code == 404 and "the approval is gone" in rig.result.message
    found = inbox.approval(rig.txn, a, index)
    assert (
        found is not None
        and found.status == {"abandoned": "withdrawn", "cancelled": "cancelled", "killed": "gone"}[how]
    )


def test_an_approval_leaves_the_inbox_with_its_invocation() -> None:
    rig = Rig()
    a = rig.invoke("a")
    index = asks(rig, a)

    rig.complete(a)

    assert waiting(rig) == []
    rig.do(approve(a, index))
    assert (rig.result.code, rig.result.message) == (
        404,
        "the approval is gone: its invocation ended (succeeded) before anybody decided",
    )
    rig.do(Restart(a, a, 0, None))
    rig.do(approve(a, index))
    assert (rig.result.code, rig.result.message) == (404, "there is no such approval")


def test_a_cancellation_that_waits_completes_the_next_approval() -> None:
    rig = Rig()
    a = rig.invoke("a")
    rig.do(Cancel(a))

    index = asks(rig, a)

    assert rig.journal(a)[index].outcome == pack_outcome(CANCELLED) and waiting(rig) == []
    rig.do(approve(a, index))
    assert rig.result.code == 404


def test_a_restarted_invocation_keeps_decisions_and_asks_the_rest_again() -> None:
    rig = Rig()
    a = rig.invoke("a")
    first = asks(rig, a)
    rig.do(approve(a, first))
    asks(rig, a)
    rig.complete(a)
    outcome = rig.journal(a)[first].outcome

    rig.do(Restart(a, a, 3, None))
    assert rig.result.code == 409
    rig.do(Restart(a, a, 2, None))

    assert rig.journal(a)[first].outcome == outcome and waiting(rig) == []
    assert asks(rig, a) == 2 and waiting(rig) == [(a, 2)]


def test_the_inbox_is_in_the_order_of_time_and_filters() -> None:
    rig = Rig()
    asked = {}
    for name, service, key, assignee in (
        ("z", "refunds", None, "finance"),
        ("a", "refunds", None, None),
        ("m", "orders", "k", "finance"),
    ):
        rig.now_ms += 10
        which = rig.invoke(name, service=service, key=key)
        asked[name] = (which, asks(rig, which, assignee=assignee, timeout_ms=1000 if name == "a" else 0))

    def found(**wanted: Any) -> list[str]:
        return [name for each in waiting(rig, **wanted) for name, where in asked.items() if where == each]

    assert found() == ["z", "a", "m"]
    assert found(service="refunds") == ["z", "a"]
    assert found(assignee="finance") == ["z", "m"]
    assert found(key="k") == ["m"]
    assert found(before_ms=T0 + 20) == ["z"]
    assert found(due_before_ms=T0 + 1021) == ["a"]
    page, more = inbox.approvals(rig.txn, Wanted(), b"", 2)
    assert [row.invocation for _, row in page] == [asked["z"][0], asked["a"][0]] and more is not None
    rest, _ = inbox.approvals(rig.txn, Wanted(), more, 2)
    assert [row.invocation for _, row in rest] == [asked["m"][0]]
    assert inbox.figures(rig.txn, 100) == {"refunds": (2, T0 + 10), "orders": (1, T0 + 30)}


def test_people_are_told_what_the_invocation_waits_for() -> None:
    rig = Rig()
    a = rig.invoke("a")
    index = asks(rig, a, timeout_ms=DAY_MS)
    rig.do(SuspendAttempt(a, 1, [index]))

    assert rig.status(a) == Status.SUSPENDED
    assert explain.why_not_running(rig.txn, a) == (
        "It waits for an approval of 'Refund order 17?' by finance since 2023-11-14 22:13:20 UTC, "
        "until 2023-11-15 22:13:20 UTC (step 1)."
    )


@pytest.mark.parametrize(
    "wrong",
    [
        ["", b"", ["a"], None, 0, 0, True, SECRET],
        ["t", "text", ["a"], None, 0, 0, True, SECRET],
        ["t", bytes(DETAILS_BYTES_MAX + 1), ["a"], None, 0, 0, True, SECRET],
        ["t", b"", [], None, 0, 0, True, SECRET],
        ["t", b"", [7], None, 0, 0, True, SECRET],
        ["t", b"", ["a"], "", 0, 0, True, SECRET],
        ["t", b"", ["a"], None, None, 0, True, SECRET],
        ["t", b"", ["a"], None, 0, 0, 1, SECRET],
        ["t", b"", ["a"], None, 0, 0, True, b"short"],
        ["t", b"", ["a"], None, 0, 0, True],
    ],
)
def test_apply_takes_no_approval_that_it_could_not_decide(wrong: list[Any]) -> None:
    rig = Rig()
    a = rig.invoke("a")

    rig.step(a, Op.APPROVAL, wrong)

    assert rig.status(a) == Status.PAUSED and waiting(rig) == [] and rig.load(a).length == 1


def test_before_level_2_there_are_no_approvals() -> None:
    rig = Rig()
    rig.state = State(0, 1, level=1)
    a = rig.invoke("a")

    rig.step(a, Op.APPROVAL, ["t", b"", ["a"], None, 0, 0, True, SECRET])

    assert rig.status(a) == Status.PAUSED and waiting(rig) == []


def test_an_endpoint_cannot_decide_its_own_approval() -> None:
    rig = Rig()
    a = rig.invoke("a")

    rig.step(a, Op.APPROVAL, ["t", b"", ["a"], None, 0, 0, True, SECRET], RESULT)

    assert rig.status(a) == Status.PAUSED and rig.load(a).length == 1
