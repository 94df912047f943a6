"""One writer per key, in order of arrival; workflows run once; shared handlers never wait."""

from typing import Any

import pytest

from holdfast.sdk.ids import InvocationId, partition_key, workflow_id
from holdfast.sdk.journal import Op
from holdfast.statemachine import explain, queries, refs
from holdfast.statemachine.commands import (
    CALL_DEPTH_MAX,
    Cancel,
    FailAttempt,
    Invoke,
    Kill,
    Mode,
    RaiseLevel,
    Redispatch,
    Retry,
    SetState,
)
from holdfast.statemachine.effects import Reply, StartAttempt, Status
from holdfast.statemachine.state import State
from holdfast.statemachine.values import fingerprint
from tests.statemachine.rig import BOOM, HOUR_MS, RESULT, Rig, failure, ident


def test_exclusive_invocations_of_a_key_run_one_after_another_in_order_of_arrival() -> None:
    rig = Rig()
    first, second, third = (rig.invoke(name, key="k") for name in "abc")

    assert [rig.status(each) for each in (first, second, third)] == [Status.RUNNING, Status.QUEUED, Status.QUEUED]
    assert rig.complete(first) == [Reply(first, RESULT), StartAttempt(second, 1)]
    assert rig.status(third) == Status.QUEUED
    assert rig.complete(second) == [Reply(second, RESULT), StartAttempt(third, 1)]


def test_an_invocation_of_another_key_does_not_wait() -> None:
    rig = Rig()
    rig.invoke("a", key="k")

    b = rig.invoke("b", key="other")

    assert rig.status(b) == Status.RUNNING


def test_shared_handlers_run_beside_an_exclusive_one() -> None:
    rig = Rig()
    a = rig.invoke("a", key="k")

    b = rig.invoke("b", key="k", mode=Mode.SHARED)

    assert rig.status(b) == Status.RUNNING
    assert rig.complete(b) == [Reply(b, RESULT)]
    assert rig.status(a) == Status.RUNNING


def test_a_key_stays_held_while_its_holder_backs_off_or_is_redispatched() -> None:
    rig = Rig()
    a = rig.invoke("a", key="k")
    b = rig.invoke("b", key="k")

    rig.do(Redispatch(a, 1))
    rig.do(FailAttempt(a, 2, BOOM, Retry(), 0, 0, False))

    assert (rig.status(a), rig.status(b)) == (Status.BACKING_OFF, Status.QUEUED)


def test_a_cancelled_invocation_leaves_the_queue_of_its_key() -> None:
    rig = Rig()
    a, b, c = (rig.invoke(name, key="k") for name in "abc")

    rig.do(Cancel(b))

    assert rig.status(b) == Status.COMPLETED
    assert rig.complete(a)[-1] == StartAttempt(c, 1)


def test_killing_the_holder_passes_the_key_to_the_next_in_line() -> None:
    rig = Rig()
    a, b = (rig.invoke(name, key="k") for name in "ab")

    rig.do(Kill(a))

    assert rig.started() == [b]


def test_a_scheduled_invocation_joins_the_queue_when_its_time_comes() -> None:
    rig = Rig()
    late = rig.invoke("late", key="k", start_at_ms=rig.now_ms + 1000)
    holder = rig.invoke("holder", key="k")
    next_one = rig.invoke("next", key="k")

    rig.pass_time(1000)

    assert rig.status(late) == Status.QUEUED
    assert rig.complete(holder)[-1] == StartAttempt(next_one, 1)
    assert rig.complete(next_one)[-1] == StartAttempt(late, 1)


def test_an_idle_object_without_state_leaves_no_record() -> None:
    rig = Rig()
    a, b = (rig.invoke(name, key="k") for name in "ab")

    rig.complete(a)
    assert queries.load_object(rig.txn, "greeter", "k") is not None
    rig.complete(b)

    assert queries.load_object(rig.txn, "greeter", "k") is None


def test_a_workflow_runs_once_per_key() -> None:
    rig = Rig()
    main = workflow_id("signup", "ann")
    invoke = Invoke(main, "signup", "run", "ann", Mode.WORKFLOW, b"", {}, 0, None, -1, HOUR_MS)
    rig.do(invoke)
    rig.complete(main)

    assert rig.do(invoke) == []
    assert (rig.result.code, rig.result.outcome) == (200, RESULT)


def test_state_is_written_in_order_and_survives_its_writer() -> None:
    rig = Rig()
    a = rig.invoke("a", key="k")

    rig.step(a, Op.SET, ["x", b"1"])
    rig.step(a, Op.SET, ["y", b"2"])
    rig.step(a, Op.SET, ["x", b"33"])
    rig.step(a, Op.CLEAR, ["y"])
    rig.complete(a)

    assert rig.values("greeter", "k") == {"x": b"33"}
    found = queries.load_object(rig.txn, "greeter", "k")
    assert found is not None and (found.names, found.holder) == (1, b"")


def test_clear_all_removes_every_entry_of_the_state() -> None:
    rig = Rig()
    a = rig.invoke("a", key="k")
    rig.step(a, Op.SET, ["x", b"1"])
    rig.step(a, Op.SET, ["y", b"2"])

    rig.step(a, Op.CLEAR_ALL)

    assert rig.values("greeter", "k") == {}


def test_a_shared_handler_that_writes_state_is_paused_with_the_reason() -> None:
    rig = Rig()
    a = rig.invoke("a", key="k", mode=Mode.SHARED)

    rig.step(a, Op.SET, ["x", b"1"])

    assert rig.status(a) == Status.PAUSED
    assert "exclusive handlers" in explain.why_not_running(rig.txn, a)
    assert rig.values("greeter", "k") == {}


def test_a_handler_without_a_key_has_no_state() -> None:
    rig = Rig()
    a = rig.invoke("a")

    rig.step(a, Op.GET, ["x"])

    assert rig.status(a) == Status.PAUSED


def test_an_operator_can_edit_the_state_of_a_free_key() -> None:
    rig = Rig()
    a = rig.invoke("a", key="k")
    rig.step(a, Op.SET, ["x", b"1"])

    rig.do(SetState("greeter", "k", {"x": b"9"}, False))
    assert rig.result.code == 409
    rig.complete(a)
    rig.do(SetState("greeter", "k", {"y": b"2", "x": None}, False))
    assert rig.values("greeter", "k") == {"y": b"2"}
    rig.do(SetState("greeter", "k", {"z": b"3"}, True))
    assert rig.values("greeter", "k") == {"z": b"3"}


def test_an_edit_that_expects_other_values_changes_nothing() -> None:
    rig = Rig()
    rig.do(SetState("greeter", "k", {"x": b"1", "y": b"2"}, False))
    before = queries.digest(rig.txn)

    expect = {"x": fingerprint(b"1"), "y": fingerprint(b"3"), "z": None, "w": fingerprint(b"")}
    rig.do(SetState("greeter", "k", {"x": b"9"}, True, expect))
    assert (rig.result.code, rig.result.outcome) == (409, ["y", "w"])
    rig.do(SetState("greeter", "k", {"x": b"9"}, False, {"y": None}))
    assert (rig.result.code, rig.result.outcome) == (409, ["y"])
    assert queries.digest(rig.txn) == before

    rig.do(SetState("greeter", "k", {"x": b"9"}, False, {"x": fingerprint(b"1"), "z": None}))
    assert rig.result.code == 0 and rig.values("greeter", "k") == {"x": b"9", "y": b"2"}
    rig.do(SetState("greeter", "k", {"x": b"8"}, False, {}))
    assert rig.result.code == 0


def test_an_edit_that_expects_values_is_refused_until_the_level_is_raised() -> None:
    rig = Rig()
    rig.state = State(0, 1, level=1)
    edit = SetState("greeter", "k", {"x": b"9"}, False, {})

    rig.do(edit)
    assert rig.result.code == 409 and "being upgraded" in rig.result.message and rig.values("greeter", "k") == {}
    rig.do(RaiseLevel(2))
    rig.do(edit)

    assert rig.values("greeter", "k") == {"x": b"9"}


def test_a_value_has_one_fingerprint_wherever_it_is() -> None:
    for value in (b"", b"1", b"\x01", b"\x01" * 100, b"x" * 100_000):
        assert fingerprint(value) == fingerprint(refs.make(value)[0])
    assert len({fingerprint(value) for value in (b"", b"1", b"\x01", b"\x01\x01", b"\x011")}) == 5


def test_eager_state_says_whether_it_is_complete() -> None:
    rig = Rig()
    rig.do(SetState("greeter", "k", {"a": b"x" * 50, "b": b"y" * 50}, False))
    found = queries.load_object(rig.txn, "greeter", "k")
    assert found is not None

    assert queries.eager_state(rig.txn, found.id, 1000) == ({"a": b"x" * 50, "b": b"y" * 50}, True)
    assert queries.eager_state(rig.txn, found.id, 100) == ({"a": b"x" * 50}, False)


def test_the_reason_for_queueing_names_the_holder_of_the_key() -> None:
    rig = Rig()
    a, _, c = (rig.invoke(name, key="k") for name in "abc")

    sentence = explain.why_not_running(rig.txn, c)

    assert a.hex() in sentence and "with 1 other before it" in sentence
    assert partition_key("greeter", "k") == c[:4]


# -- deadlocks -------------------------------------------------------------------------------------------------------


def calls(
    rig: Rig, caller: InvocationId, name: str, *, service: str, key: str | None, mode: int, op: int = Op.CALL
) -> tuple[int, InvocationId]:
    """Record a call of `caller`, and return the invocation that it starts."""
    which = ident(name, service=service, key=key)
    child = Invoke(which, service, "go", key, mode, b"", {}, 0, caller, 0, HOUR_MS)
    argument: list[Any] = [service, "go", key, b"", {}]
    return rig.step(caller, op, [*argument, 0] if op == Op.SEND else argument, child=child), which


def test_a_call_to_a_key_held_by_its_caller_fails_and_names_the_cycle() -> None:
    rig = Rig()
    a = rig.invoke("a", service="counter", key="a")

    step, b = calls(rig, a, "b", service="counter", key="a", mode=Mode.EXCLUSIVE)

    found = failure(rig.journal(a)[step].outcome)
    assert (found.code, found.kind) == (409, "Deadlock")
    assert "counter/a → counter/a" in found.message and "ctx.send" in found.message
    assert queries.load(rig.txn, b) is None


def test_a_deadlock_through_a_chain_of_calls_fails_the_call_that_closes_it() -> None:
    rig = Rig()
    a = rig.invoke("a", service="counter", key="a")
    _, b = calls(rig, a, "b", service="transfers", key="x", mode=Mode.EXCLUSIVE)
    _, c = calls(rig, b, "c", service="plain", key=None, mode=Mode.PLAIN)

    step, _ = calls(rig, c, "d", service="counter", key="a", mode=Mode.EXCLUSIVE)

    assert "counter/a → transfers/x → counter/a" in failure(rig.journal(c)[step].outcome).message
    assert rig.load(b).chain == ["counter/a"]


@pytest.mark.parametrize(
    ("key", "mode", "op"),
    [("a", Mode.SHARED, Op.CALL), ("b", Mode.EXCLUSIVE, Op.CALL), ("a", Mode.EXCLUSIVE, Op.SEND)],
)
def test_a_call_that_does_not_wait_for_a_key_of_its_callers_is_no_deadlock(key: str, mode: int, op: int) -> None:
    rig = Rig()
    a = rig.invoke("a", service="counter", key="a")

    step, b = calls(rig, a, "b", service="counter", key=key, mode=mode, op=op)

    assert rig.journal(a)[step].outcome is None
    assert rig.load(b).status == (Status.QUEUED if op == Op.SEND else Status.RUNNING)


def test_a_send_ends_the_chain_because_nobody_waits_for_it() -> None:
    rig = Rig()
    a = rig.invoke("a", service="counter", key="a")
    _, b = calls(rig, a, "b", service="plain", key=None, mode=Mode.PLAIN, op=Op.SEND)

    step, c = calls(rig, b, "c", service="counter", key="a", mode=Mode.EXCLUSIVE)

    assert rig.journal(b)[step].outcome is None and rig.status(c) == Status.QUEUED


def test_a_chain_is_bounded() -> None:
    rig = Rig()
    last = rig.invoke("0", service="deep", key="0")
    rig.state.meta.call_depth_max = 200
    for n in range(1, 120):
        _, last = calls(rig, last, str(n), service="deep", key=str(n), mode=Mode.EXCLUSIVE)
    assert list(rig.load(last).chain) == [f"deep/{n}" for n in range(CALL_DEPTH_MAX)]

    near, _ = calls(rig, last, "near", service="deep", key="99", mode=Mode.EXCLUSIVE)
    far, beyond = calls(rig, last, "far", service="deep", key="110", mode=Mode.EXCLUSIVE)

    assert failure(rig.journal(last)[near].outcome).kind == "Deadlock"
    assert rig.journal(last)[far].outcome is None and rig.status(beyond) == Status.QUEUED


def test_a_deadlock_is_found_at_any_depth_that_is_allowed_by_default_and_with_long_keys() -> None:
    rig = Rig()
    last = rig.invoke("0", service="deep", key="k" * 500 + "0")
    for n in range(1, CALL_DEPTH_MAX):
        _, last = calls(rig, last, str(n), service="deep", key="k" * 500 + str(n), mode=Mode.EXCLUSIVE)

    step, _ = calls(rig, last, "again", service="deep", key="k" * 500 + str(CALL_DEPTH_MAX - 2), mode=Mode.EXCLUSIVE)
    other, _ = calls(rig, last, "other", service="deep", key="k" * 500 + "other", mode=Mode.SHARED)

    assert failure(rig.journal(last)[step].outcome).kind == "Deadlock"
    assert rig.journal(last)[other].outcome is None
    assert sum(map(len, rig.load(last).chain)) <= 64 * CALL_DEPTH_MAX


def test_before_level_2_deadlocks_are_not_detected() -> None:
    rig = Rig()
    rig.state = State(0, 1, level=1)
    a = rig.invoke("a", service="counter", key="a")

    step, b = calls(rig, a, "b", service="counter", key="a", mode=Mode.EXCLUSIVE)

    assert rig.journal(a)[step].outcome is None and rig.status(b) == Status.QUEUED
