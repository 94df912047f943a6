"""Lists of invocations: both orders, every filter, and the same result however they are read."""

from __future__ import annotations

from random import Random

import pytest

from holdfast.sdk.ids import DeploymentId, InvocationId
from holdfast.sdk.journal import Op
from holdfast.statemachine import lists, queries, tables
from holdfast.statemachine.commands import (
    FailAttempt,
    FireTimers,
    Kill,
    PostponeAttempt,
    Purge,
    RaiseLevel,
    RecordRunFailure,
    Redispatch,
    Restart,
    Resume,
)
from holdfast.statemachine.effects import Status
from holdfast.statemachine.lists import Order
from holdfast.statemachine.queries import Filter, ShownFailure
from holdfast.statemachine.records import End
from holdfast.statemachine.state import State
from tests.statemachine import invariants
from tests.statemachine.rig import BOOM, HOUR_MS, RESULT, RETRY, T0, Rig, ident


def pages(rig: Rig, wanted: Filter, order: Order = Order.NEWEST, *, limit: int = 3) -> list[InvocationId]:
    found: list[InvocationId] = []
    after: bytes | None = b""
    while after is not None:
        page = lists.ordered(rig.txn, wanted, after, limit, order=order)
        assert page is not None
        records, after, _ = page
        assert len(records) <= limit
        found += [record.id for record in records]
    return found


def crowd(rig: Rig, random: Random) -> list[InvocationId]:
    """Invocations in every status, some of them created at the same time."""
    made = []
    for number in range(40):
        tags = random.choice([None, {"tenant": "acme"}, {"tenant": "acme", "order": str(number % 2)}, {"tenant": "b"}])
        retention_ms = random.choice([HOUR_MS, HOUR_MS, 2 * HOUR_MS])
        key = random.choice([None, "a", "ab", "b"])
        made.append(rig.invoke(f"m{number}", key=key, tags=tags, retention_ms=retention_ms))
        rig.now_ms += random.choice([0, 0, 1000])
    for each in made:
        record = rig.load(each)
        if record.status != Status.RUNNING:
            continue
        match random.randrange(5):
            case 0:
                rig.complete(each)
            case 1:
                rig.complete(each, BOOM)
            case 2:
                rig.do(Kill(each))
            case 3:
                rig.do(FailAttempt(each, record.epoch, [1, 503, "Too Many", "Busy"], RETRY, 0, 0, pause=False))
        rig.now_ms += random.choice([0, 1000])
    return made


FILTERS = [
    Filter(),
    Filter(statuses=(Status.BACKING_OFF,)),
    Filter(statuses=(Status.RUNNING, Status.QUEUED)),
    Filter(statuses=(Status.COMPLETED,), ends=(End.FAILED, End.KILLED)),
    Filter(key_prefix="a"),
    Filter(failure_code=503),
    Filter(failure="too m"),
    Filter(failure="valueerror"),
    Filter(failure="too m", failure_code=500),
    Filter(completed_since_ms=T0 + 12_000),
    Filter(completed_since_ms=0, created_before_ms=T0 + 9000),
    Filter(completed_before_ms=T0 + 25_000),
    Filter(created_since_ms=T0 + 3000, created_before_ms=T0 + 9000),
    Filter(tags=[["tenant", "acme"]]),
    Filter(tags=[["tenant", "acme"], ["order", "1"]]),
    Filter(tags=[["tenant", "acme"]], failure_code=500),
    Filter(tags=[["tenant", "acme"]], created_since_ms=T0 + 3000, created_before_ms=T0 + 18_000),
    Filter(tags=[["tenant", "nobody"]]),
    Filter(ends=(End.FAILED, End.KILLED)),
    Filter(failure_code=409, statuses=(Status.COMPLETED,), created_before_ms=T0 + 18_000),
]
NOTHING = (Filter(failure="too m", failure_code=500), Filter(tags=[["tenant", "nobody"]]))


@pytest.mark.parametrize("few", [True, False], ids=["few active", "many active"])
@pytest.mark.parametrize("wanted", FILTERS, ids=str)
def test_both_orders_have_what_a_scan_finds(wanted: Filter, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists, "WANTED_MAX", 1000 if few else 0)
    monkeypatch.setattr(lists, "LOOKED_AT_MAX", 5)
    rig = Rig()
    made = crowd(rig, Random(7))
    records = [rig.load(each) for each in made]
    expected = sorted(
        (record for record in records if queries.admits(rig.txn, wanted, record)),
        key=lambda record: (-record.created_ms, record.id),
    )

    assert pages(rig, wanted, Order.NEWEST) == [record.id for record in expected]
    assert pages(rig, wanted, Order.OLDEST) == [record.id for record in reversed(expected)]
    assert expected or wanted in NOTHING


@pytest.mark.parametrize("wanted", FILTERS, ids=str)
def test_the_order_of_completion_has_what_a_scan_finds(wanted: Filter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists, "WANTED_MAX", 0)
    monkeypatch.setattr(lists, "LOOKED_AT_MAX", 5)
    rig = Rig()
    records = [rig.load(each) for each in crowd(rig, Random(7))]
    done = [record for record in records if record.status == Status.COMPLETED]

    found = pages(rig, wanted, Order.COMPLETED)

    expected = sorted(
        (record for record in done if queries.admits(rig.txn, wanted, record)),
        key=lambda record: (record.since_ms, record.id),
        reverse=True,
    )
    assert found == [record.id for record in expected]
    assert len({record.retention_ms for record in done}) == 2


def looked_at(rig: Rig, wanted: Filter, order: Order = Order.NEWEST) -> int:
    found = lists.ordered(rig.txn, wanted, b"", 100, order=order)
    assert found is not None and found.records and found.more is None
    return found.looked_at


def test_tags_failures_and_completions_are_found_without_looking_at_others() -> None:
    rig = Rig()
    for number in range(100):
        rig.complete(rig.invoke(f"m{number}"))
        rig.now_ms += 1000
    ours = rig.invoke("ours", tags={"tenant": "acme", "order": "17"})
    rig.complete(rig.invoke("theirs", tags={"tenant": "acme"}))
    rig.complete(rig.invoke("failed"), BOOM)
    busy = rig.invoke("busy")
    rig.do(FailAttempt(busy, 1, [1, 503, "busy", "Busy"], RETRY, 0, 0, pause=False))
    rig.now_ms += 1000

    assert looked_at(rig, Filter(tags=[["tenant", "acme"]])) == 2
    assert looked_at(rig, Filter(tags=[["tenant", "acme"], ["order", "17"]])) == 1
    assert looked_at(rig, Filter(failure="b")) == 2
    assert looked_at(rig, Filter(failure_code=503)) == 1
    assert looked_at(rig, Filter(failure_code=500)) == 2, "and an active one, which may fail with any code"
    assert looked_at(rig, Filter(ends=(End.FAILED,))) == 1
    assert looked_at(rig, Filter(completed_since_ms=T0 + 98_000)) == 4
    assert looked_at(rig, Filter(completed_since_ms=T0 + 98_000), Order.COMPLETED) == 4
    rig.pass_time(0)
    rig.complete(busy)
    assert looked_at(rig, Filter(failure_code=500)) == 1, "it succeeded in the end"
    rig.complete(ours)
    rig.do(Purge(ours))
    assert looked_at(rig, Filter(tags=[["tenant", "acme"]])) == 1
    invariants.check(rig.txn)


def test_an_invocation_without_tags_and_failures_has_no_rows_in_their_tables() -> None:
    rig = Rig()
    first = rig.invoke("first")
    rig.step(first, Op.RUN, ["x"], RESULT)
    rig.complete(first)
    before = [key for key, _ in rig.txn.scan(b"\0", b"\xff")]

    second = rig.invoke("second")
    rig.step(second, Op.RUN, ["x"], RESULT)
    rig.complete(second)

    added = {key[:1] for key, _ in rig.txn.scan(b"\0", b"\xff") if key not in before}
    assert added == {tables.COMPLETED, tables.CREATED, tables.EXPIRY, tables.JOURNAL}


def test_a_restarted_invocation_keeps_its_tags() -> None:
    rig = Rig()
    old = rig.invoke("old", tags={"tenant": "acme"})
    rig.complete(old, BOOM)

    rig.do(Restart(old, ident("new"), 0, None))

    assert set(pages(rig, Filter(tags=[["tenant", "acme"]]))) == {old, ident("new")}


def test_older_failures_and_completions_are_found_once_the_level_is_raised() -> None:
    rig = Rig()
    rig.state = State(0, 1, level=1)
    failed, done, busy, later = (rig.invoke(name) for name in ("failed", "done", "busy", "later"))
    rig.complete(failed, BOOM)
    rig.complete(done)
    for each in (busy, later):
        rig.do(FailAttempt(each, 1, [1, 503, "busy", "Busy"], RETRY, 0, 0, pause=True))
    rig.do(RaiseLevel(2))
    rig.do(Resume(later, None))
    rig.complete(later)
    assert lists.ordered(rig.txn, Filter(failure_code=500), b"", 10) is None, "read from the tables until then"

    while lists.ordered(rig.txn, Filter(), b"", 10) is None:
        rig.do(FireTimers(1))
        invariants.check(rig.txn)

    assert pages(rig, Filter(failure_code=500)) == [failed] and looked_at(rig, Filter(failure_code=500)) == 2
    assert pages(rig, Filter(failure="busy")) == [busy]
    assert set(pages(rig, Filter(), Order.COMPLETED)) == {failed, done, later}


def test_an_attempt_that_was_postponed_before_the_level_was_raised_is_found_when_its_failure_is_shown() -> None:
    rig = Rig()
    rig.state = State(0, 1, level=1)
    late = rig.invoke("late")
    rig.do(PostponeAttempt(late, 1, [1, 503, "not now", "Busy"], 10))
    rig.do(RaiseLevel(2))
    while lists.ordered(rig.txn, Filter(), b"", 10) is None:
        rig.do(FireTimers(1))
    assert pages(rig, Filter(failure="not now")) == [], "level 1 did not count it"
    rig.pass_time(10)

    rig.do(Redispatch(late, rig.load(late).epoch))

    assert pages(rig, Filter(failure="not now")) == [late]
    invariants.check(rig.txn)


def test_level_1_keeps_no_tags() -> None:
    rig = Rig()
    rig.state = State(0, 1, level=1)

    old = rig.invoke("old", tags={"tenant": "acme"})

    assert rig.load(old).tags is None
    assert [key for key, _ in rig.txn.scan(tables.TAGGED, tables.after(tables.TAGGED))] == []


def test_calls_of_a_parent_are_found() -> None:
    rig = Rig()
    parent = rig.invoke("parent")
    child = rig.invoke("child", caller=(parent, 1))
    rig.invoke("other")

    assert pages(rig, Filter(parent=parent), Order.OLDEST) == [child]


def test_the_failure_that_a_list_shows_is_the_last_one_or_the_outcome() -> None:
    rig = Rig()
    done, failed, retried, step = (rig.invoke(name) for name in ("done", "failed", "retried", "step"))
    for each in (done, failed, retried):
        rig.do(FailAttempt(each, rig.load(each).epoch, [1, 503, "busy", "Busy"], RETRY, 0, 0, pause=False))
    rig.pass_time(1000)
    rig.complete(done)
    rig.complete(failed, BOOM)
    rig.do(
        RecordRunFailure(step, 1, 1, "0/charge/0", "charge", [1, 500, "no money", "E"], RETRY, 0, DeploymentId("dp_1"))
    )

    def shown(which: InvocationId) -> ShownFailure | None:
        return queries.shown_failure(rig.txn, rig.load(which))

    assert shown(done) is None
    assert shown(failed) == ShownFailure(500, "boom", "ValueError")
    assert shown(retried) == ShownFailure(503, "busy", "Busy")
    found = shown(step)
    assert found is not None and found.code is None and "no money" in found.message
    assert queries.waiting_steps(rig.txn, step, 1)[0][1][0] == Op.RUN
