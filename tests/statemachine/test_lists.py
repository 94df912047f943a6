"""Lists of invocations: both orders, every filter, and the same result however they are read."""

from __future__ import annotations

from random import Random

import pytest

from holdfast.sdk.ids import DeploymentId, InvocationId
from holdfast.sdk.journal import Op
from holdfast.statemachine import lists, queries
from holdfast.statemachine.commands import FailAttempt, Kill, RecordRunFailure
from holdfast.statemachine.effects import Status
from holdfast.statemachine.queries import Filter, ShownFailure
from holdfast.statemachine.records import End
from tests.statemachine.rig import BOOM, RETRY, T0, Rig


def pages(rig: Rig, wanted: Filter, *, oldest: bool, limit: int = 3) -> list[InvocationId]:
    found: list[InvocationId] = []
    after: bytes | None = b""
    while after is not None:
        page = lists.ordered(rig.txn, wanted, after, limit, oldest=oldest)
        assert page is not None
        records, after = page
        assert len(records) <= limit
        found += [record.id for record in records]
    return found


def crowd(rig: Rig, random: Random) -> list[InvocationId]:
    """Invocations in every status, some of them created at the same time."""
    made = []
    for number in range(40):
        made.append(rig.invoke(f"m{number}", key=random.choice([None, "a", "ab", "b"])))
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
]


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

    assert pages(rig, wanted, oldest=False) == [record.id for record in expected]
    assert pages(rig, wanted, oldest=True) == [record.id for record in reversed(expected)]
    assert expected or wanted == Filter(failure="too m", failure_code=500)


def test_calls_of_a_parent_are_found() -> None:
    rig = Rig()
    parent = rig.invoke("parent")
    child = rig.invoke("child", caller=(parent, 1))
    rig.invoke("other")

    assert pages(rig, Filter(parent=parent), oldest=True) == [child]


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
