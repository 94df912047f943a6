"""Invocations by the time they were created, newest first."""

from __future__ import annotations

from holdfast.sdk.ids import InvocationId
from holdfast.statemachine import lists, queries
from holdfast.statemachine.commands import FireTimers, Invoke, Mode, Purge, RaiseLevel
from holdfast.statemachine.effects import Status
from holdfast.statemachine.machine import apply
from holdfast.statemachine.queries import Filter
from holdfast.statemachine.records import End
from holdfast.statemachine.state import State
from tests.statemachine import invariants
from tests.statemachine.rig import BOOM, HOUR_MS, T0, Rig, ident


def names(rig: Rig, made: dict[InvocationId, str], wanted: Filter | None = None, limit: int = 3) -> list[str]:
    """The names of all matching invocations, read in pages."""
    found: list[str] = []
    after: bytes | None = b""
    while after is not None:
        page = lists.ordered(rig.txn, wanted or Filter(), after, limit)
        assert page is not None
        records, after, _ = page
        assert len(records) <= limit
        found += [made[record.id] for record in records]
    return found


def some(rig: Rig, count: int) -> dict[InvocationId, str]:
    """Create one invocation each second: m0 is the oldest."""
    made: dict[InvocationId, str] = {}
    for number in range(count):
        made[rig.invoke(f"m{number}")] = f"m{number}"
        rig.now_ms += 1000
    return made


def test_pages_follow_each_other_from_the_newest_to_the_oldest() -> None:
    rig = Rig()
    made = some(rig, 10)
    ids = list(made)
    rig.complete(ids[2])
    rig.complete(ids[5], BOOM)
    newest_first = [f"m{number}" for number in reversed(range(10))]

    assert names(rig, made) == newest_first
    assert names(rig, made, limit=100) == newest_first
    assert names(rig, made, Filter(ends=(End.FAILED,))) == ["m5"]
    assert names(rig, made, Filter(ends=(End.SUCCEEDED, End.FAILED))) == ["m5", "m2"]
    assert names(rig, made, Filter(created_since_ms=T0 + 7000)) == ["m9", "m8", "m7"]
    assert names(rig, made, Filter(created_before_ms=T0 + 2000)) == ["m1", "m0"]
    assert names(rig, made, Filter(created_since_ms=T0 + 3000, created_before_ms=T0 + 5000)) == ["m4", "m3"]
    assert names(rig, made, Filter(statuses=(Status.RUNNING,), created_before_ms=T0 + 4000)) == ["m3", "m1", "m0"]
    rig.do(Purge(ids[2]))
    assert "m2" not in names(rig, made)
    invariants.check(rig.txn)


def test_new_invocations_do_not_change_the_following_pages() -> None:
    rig = Rig()
    made = some(rig, 6)
    first = lists.ordered(rig.txn, Filter(), b"", 3)
    assert first is not None and first.more is not None

    made |= some(rig, 12)

    second = lists.ordered(rig.txn, Filter(), first.more, 3)
    assert second is not None
    assert [made[record.id] for record in (*first.records, *second.records)] == ["m5", "m4", "m3", "m2", "m1", "m0"]


def test_raising_the_level_indexes_older_invocations_in_slices() -> None:
    rig = Rig()
    rig.state = State(0, 1, level=1)
    made = some(rig, 10)
    rig.complete(list(made)[3])
    assert lists.ordered(rig.txn, Filter(), b"", 3) is None

    rig.do(RaiseLevel(2))
    armed = rig.armed
    made[rig.invoke("later")] = "later"
    slices = 0
    while lists.ordered(rig.txn, Filter(), b"", 3) is None:
        assert queries.next_due(rig.txn) is not None
        rig.do(FireTimers(4))
        invariants.check(rig.txn)
        slices += 1

    assert armed and slices == 3
    assert names(rig, made) == ["later", *(f"m{number}" for number in reversed(range(10)))]


def test_a_new_state_has_nothing_to_add() -> None:
    rig = Rig()
    rig.state = State(0, 1, level=1)

    rig.do(RaiseLevel(2))

    assert lists.ordered(rig.txn, Filter(), b"", 3) == ([], None, 0)
    assert queries.next_due(rig.txn) is None


def test_slices_are_the_same_wherever_a_transaction_ends() -> None:
    def digest(*, together: bool) -> bytes:
        rig = Rig()
        rig.state = State(0, 1, level=1)
        some(rig, 8)
        rig.do(RaiseLevel(2))
        state, mode = rig.state, Mode.PLAIN
        state.begin(rig.txn)
        for name in ("n1", "n2", "n3"):
            apply(state, rig.now_ms, Invoke(ident(name), "greeter", "greet", None, mode, b"", {}, 0, None, -1, HOUR_MS))
            if not together:
                state.flush()
                state.begin(rig.txn)
            apply(state, rig.now_ms, FireTimers(3))
        state.flush()
        return queries.digest(rig.txn)

    assert digest(together=True) == digest(together=False)
