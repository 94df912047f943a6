"""Timers have kinds. Their rows are the same in every release: due time, id, and a step or, in its place, a marker."""

from collections import Counter
from typing import Any

import pytest

from holdfast.sdk.ids import InvocationId, ObjectId, object_id
from holdfast.sdk.journal import Op
from holdfast.statemachine import tables, timers
from holdfast.statemachine.commands import CompletePromise
from holdfast.statemachine.effects import SendCompletion, Status
from holdfast.statemachine.timers import Kind, Timer
from tests.statemachine import invariants
from tests.statemachine.rig import HOUR_MS, Rig

ID = InvocationId(bytes(range(16)))
SLEPT: list[Any] = [0, b""]


@pytest.mark.parametrize(
    ("timer", "key"),
    [
        (timers.of_step(1, ID, 0), b"T" + bytes(7) + b"\x01" + ID + b"\x00\x00\x00\x00"),
        (timers.of_step(258, ID, 70_000), b"T" + bytes(6) + b"\x01\x02" + ID + b"\x00\x01\x11\x70"),
        (timers.of_invocation(2, ID), b"T" + bytes(7) + b"\x02" + ID + b"\xff\xff\xff\xff"),
        (timers.of_promises(3, ObjectId(ID)), b"T" + bytes(7) + b"\x03" + ID + b"\xff\xff\xff\xfe"),
    ],
    ids=["step", "later step", "invocation", "promises"],
)
def test_the_row_of_a_timer_is_the_same_in_every_release(timer: Timer, key: bytes) -> None:
    assert timers.pack_key(timer) == key
    assert timers.unpack_key(key) == timer


def test_the_timer_of_a_step_is_never_taken_for_another_kind() -> None:
    with pytest.raises(AssertionError):
        timers.pack_key(timers.of_step(1, ID, tables.STEP_END))


def test_due_timers_are_counted_up_to_a_limit_and_the_oldest_is_named() -> None:
    rig = Rig()
    begin = rig.now_ms
    for number in range(3):
        rig.invoke(f"later{number}", start_at_ms=begin + 100 * (number + 1))

    found = [timers.count_due(rig.txn, begin + after_ms, 2) for after_ms in (99, 100, 250, 1000)]

    assert found == [(0, 0), (1, begin + 100), (2, begin + 100), (2, begin + 100)]


def test_each_timer_fires_as_its_kind() -> None:
    rig = Rig()
    later = rig.invoke("later", start_at_ms=rig.now_ms + 100)
    sleeper = rig.invoke("sleeper")
    rig.step(sleeper, Op.SLEEP, [200])
    rig.do(CompletePromise("flows", "k", "paid", [0, b"1"]))

    found = {timer.kind: timer for timer in map(timers.unpack_key, rows(rig))}

    assert found[Kind.INVOCATION] == (rig.now_ms + 100, Kind.INVOCATION, later, 0)
    assert found[Kind.STEP] == (rig.now_ms + 200, Kind.STEP, sleeper, 1)
    assert found[Kind.PROMISES].id == object_id("flows", "k")
    rig.pass_time(100)
    assert rig.started() == [later]
    rig.pass_time(100)
    assert rig.journal(sleeper)[1].done and rig.status(sleeper) == Status.RUNNING
    rig.pass_time(found[Kind.PROMISES].due_ms - rig.now_ms)
    assert rows(rig) == [] and list(rig.txn.scan(tables.PROMISE, tables.after(tables.PROMISE))) == []


def test_timers_of_many_invocations_fire_in_order_and_in_bounded_batches() -> None:
    rig = Rig()
    for number in range(10):
        rig.invoke(f"{number}", start_at_ms=rig.now_ms + 10 * (number // 2 + 1))

    rig.pass_time(1000, limit=3)

    left = Counter(timer.due_ms for timer in map(timers.unpack_key, rows(rig)))
    assert [*left.values()] == [1, 2, 2, 2] and rig.armed == [min(left)]
    invariants.check(rig.txn)


def test_a_sleep_ends_when_it_is_due_and_not_earlier() -> None:
    rig = Rig()
    a = rig.invoke("a")
    index = rig.step(a, Op.SLEEP, [1000])

    assert rig.armed == [rig.now_ms + 1000]
    assert rig.pass_time(999) == []
    assert rig.pass_time(1) == [SendCompletion(a, 1, index, 3, SLEPT)]
    assert rig.pass_time(HOUR_MS) == []


def test_a_clock_set_back_fires_no_timer_early_and_loses_none() -> None:
    rig = Rig()
    a = rig.invoke("a")
    rig.step(a, Op.SLEEP, [1000])

    assert rig.pass_time(-5000) == []
    assert rig.pass_time(5999) == []
    assert len(rig.pass_time(1)) == 1


def test_timers_fire_in_order_of_time_up_to_the_requested_number() -> None:
    rig = Rig()
    a = rig.invoke("a")
    late = rig.step(a, Op.SLEEP, [300])
    early = rig.step(a, Op.SLEEP, [100])

    first = rig.pass_time(1000, limit=1)
    assert rig.armed == [rig.now_ms - 700]
    second = rig.pass_time(0, limit=1)

    assert [effect.step for effect in first + second if isinstance(effect, SendCompletion)] == [early, late]


def rows(rig: Rig) -> list[bytes]:
    return [key for key, _ in rig.txn.scan(tables.TIMER, tables.after(tables.TIMER))]
