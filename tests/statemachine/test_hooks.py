"""Notices for webhooks: who is told what, that nothing is told twice by the state, and the bounds."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.statemachine import hooks, queries, tables
from holdfast.statemachine.commands import (
    Cancel,
    Command,
    Complete,
    FailAttempt,
    ForgetNotices,
    Invoke,
    Kill,
    Mode,
    Pause,
    Retry,
    SetHooks,
)
from holdfast.statemachine.effects import DeliverNotices, Effect, Result
from holdfast.statemachine.levels import FIRST
from holdfast.statemachine.machine import apply
from holdfast.statemachine.memory import Memory
from holdfast.statemachine.queries import Notice
from holdfast.statemachine.state import State
from holdfast.statemachine.webhooks import COMPLETED, FAILED, IN_DOUBT, PAUSED, HookId
from tests.statemachine import invariants
from tests.statemachine.rig import T0, ident

A, B = HookId(b"hook a.."), HookId(b"hook b..")
ALL = FAILED | PAUSED | COMPLETED | IN_DOUBT


class Room:
    def __init__(self, *, level: int = 2) -> None:
        self.txn, self.state = Memory(), State(0, 1, level=level)
        self.count = 0

    def do(self, *commands: Command) -> tuple[list[Result], list[Effect]]:
        """In one transaction."""
        self.state.begin(self.txn)
        results = [apply(self.state, T0 + self.count, command) for command in commands]
        self.state.flush()
        invariants.check(self.txn)
        return results, self.state.take_effects()

    def begin(self, service: str = "objects") -> Any:
        self.count += 1
        which = ident(str(self.count), service=service)
        self.do(Invoke(which, service, "h", None, Mode.PLAIN, b"in", {}, 0, None, -1, 60_000))
        return which

    def notices(self, hook: HookId = A) -> list[Notice]:
        return queries.notices(self.txn, hook, 100_000)

    def events(self, hook: HookId = A) -> list[int]:
        return [notice.event for notice in self.notices(hook)]

    def hook(self, hook: HookId = A) -> Any:
        return next((each for each in queries.hooks(self.txn) if each.id == hook), None)


def with_hooks(*rows: list[Any]) -> Room:
    room = Room()
    room.do(SetHooks(1, list(rows)))
    return room


def fail(which: Any, *, kind: str = "", pause: bool = True) -> FailAttempt:
    return FailAttempt(which, 1, [1, 500, "no", kind], Retry(max_attempts=5), 0, 0, pause)


def test_each_way_to_end_or_to_stop_is_an_event_of_its_own() -> None:
    room = with_hooks([A, ALL, []])

    room.do(Complete(room.begin(), 1, [0, b"out"], None))
    room.do(Complete(room.begin(), 1, [1, 404, "not there", "NotFound"], None))
    room.do(Cancel(which := room.begin()), Complete(which, 1, [1, 499, "cancelled", "Cancelled"], None))
    room.do(Kill(room.begin()))
    room.do(fail(room.begin()))
    room.do(fail(room.begin(), kind="InDoubt"))
    room.do(Pause(room.begin()))
    room.do(fail(room.begin(), pause=False))

    assert room.events() == [COMPLETED, FAILED, COMPLETED, COMPLETED, PAUSED, IN_DOUBT, PAUSED]
    found = room.notices()
    assert [notice.failure for notice in found[:2]] == [None, [404, "not there", "NotFound"]]
    assert found[5].failure == [500, "no", "InDoubt"] and found[6].failure is None
    assert [notice.sequence for notice in found] == [1, 2, 3, 4, 5, 6, 7]
    assert found[0].invocation.service == "objects" and found[0].invocation.since_ms == found[0].at_ms


def test_a_hook_is_told_only_about_its_events_and_services() -> None:
    room = with_hooks([A, FAILED, ["objects"]], [B, FAILED | COMPLETED, ["flows"]])

    for service in ("objects", "flows"):
        room.do(Complete(room.begin(service), 1, [0, b""], None))
        room.do(Complete(room.begin(service), 1, [1, 500, "no", ""], None))

    assert room.events(A) == [FAILED] and room.notices(A)[0].invocation.service == "objects"
    assert room.events(B) == [COMPLETED, FAILED]


def test_a_partition_without_hooks_writes_and_asks_nothing() -> None:
    room = Room()
    _, effects = room.do(Complete(room.begin(), 1, [0, b""], None))

    assert not any(isinstance(effect, DeliverNotices) for effect in effects)
    assert not list(room.txn.scan(tables.HOOK, tables.after(tables.HOOK)))
    assert room.state.hooks is None, "not even read"


def test_a_transaction_asks_once_to_deliver_its_notices() -> None:
    room = with_hooks([A, ALL, []])
    which = [room.begin() for _ in range(3)]

    _, effects = room.do(*(Complete(each, 1, [0, b""], None) for each in which))

    assert effects.count(DeliverNotices()) == 1
    assert queries.pending_effects(room.txn, b"", 10)[0].count(DeliverNotices()) == 1, "and so does a new leader"


def test_a_delivered_notice_is_forgotten_once() -> None:
    room = with_hooks([A, ALL, []])
    for _ in range(3):
        room.do(Complete(room.begin(), 1, [0, b""], None))

    first, _ = room.do(ForgetNotices(A, [1, 3, 99, -1, 2**70]))
    again, _ = room.do(ForgetNotices(A, [1, 3]), ForgetNotices(B, [2]))

    assert (first[0].code, [result.code for result in again]) == (0, [200, 200])
    assert [notice.sequence for notice in room.notices()] == [2]
    assert (room.hook().pending, room.hook().dropped) == (1, 0)
    room.do(ForgetNotices(A, [2], True))
    assert (room.hook().pending, room.hook().dropped) == (0, 1)
    assert not any(isinstance(each, DeliverNotices) for each in queries.standing_effects(room.txn))


def test_the_oldest_notice_is_dropped_and_counted_beyond_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "NOTICES_MAX", 3)
    room = with_hooks([A, ALL, []], [B, FAILED, []])
    room.do(Complete(room.begin(), 1, [1, 500, "no", ""], None))

    for _ in range(4):
        room.do(Complete(room.begin(), 1, [0, b""], None))

    assert [notice.sequence for notice in room.notices()] == [4, 5, 6]
    assert (room.hook().pending, room.hook().dropped) == (3, 2)
    assert room.events(B) == [FAILED] and room.hook(B).dropped == 0, "other hooks keep theirs"


def test_a_deleted_hook_gets_no_more_and_is_gone_with_its_last_notice() -> None:
    room = with_hooks([A, ALL, []], [B, ALL, []])
    room.do(Complete(room.begin(), 1, [0, b""], None))
    room.do(ForgetNotices(B, [2]))

    _, effects = room.do(SetHooks(2, []))
    room.do(Complete(room.begin(), 1, [0, b""], None))

    assert DeliverNotices() in effects
    assert room.hook(B) is None and room.hook(A).gone and len(room.notices(A)) == 1
    room.do(ForgetNotices(A, [1]))
    assert room.hook(A) is None and not room.notices(A)


def test_older_knowledge_about_hooks_changes_nothing() -> None:
    room = with_hooks([A, ALL, []])
    room.do(SetHooks(5, [[A, FAILED, []], [B, ALL, []]]))

    results, _ = room.do(SetHooks(4, []), SetHooks(5, []))

    assert [result.code for result in results] == [200, 200]
    assert room.hook(A).events == FAILED and not room.hook(A).gone and room.hook(B) is not None


def test_a_partition_of_level_1_keeps_no_notices() -> None:
    room = Room(level=FIRST)

    results, _ = room.do(SetHooks(1, [[A, ALL, []]]))

    assert results[0].code == 200 and not room.hook()


def test_the_order_of_notices_does_not_depend_on_what_a_replica_has_decoded() -> None:
    """Sequences follow the ids of hooks, in whatever order these were created."""
    digests = []
    for forgets in (False, True):
        room = with_hooks([B, ALL, []])
        room.do(SetHooks(2, [[B, ALL, []], [A, ALL, []]]))
        if forgets:
            room.state.forget()
        room.do(Complete(room.begin(), 1, [0, b""], None))
        digests.append(queries.digest(room.txn))
        assert [notice.sequence for notice in (*room.notices(A), *room.notices(B))] == [1, 2]

    assert digests[0] == digests[1]
