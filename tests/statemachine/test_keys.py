"""One writer per key, in order of arrival; workflows run once; shared handlers wait for nobody."""

from holdfast.sdk.protocol import Op, partition_key, workflow_id
from holdfast.statemachine import queries
from holdfast.statemachine.commands import Cancel, FailAttempt, Invoke, Kill, Mode, Redispatch, Retry, SetState
from holdfast.statemachine.effects import Reply, StartAttempt, Status
from tests.statemachine.rig import BOOM, HOUR_MS, RESULT, Rig


def test_exclusive_invocations_of_a_key_run_one_after_another_in_order_of_arrival() -> None:
    rig = Rig()
    first, second, third = (rig.invoke(name, key="k") for name in "abc")

    assert [rig.status(each) for each in (first, second, third)] == [Status.RUNNING, Status.QUEUED, Status.QUEUED]
    assert rig.complete(first) == [Reply(first, RESULT), StartAttempt(second, 1)]
    assert rig.status(third) == Status.QUEUED
    assert rig.complete(second) == [Reply(second, RESULT), StartAttempt(third, 1)]


def test_another_key_does_not_wait() -> None:
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


def test_who_is_cancelled_in_the_queue_leaves_it() -> None:
    rig = Rig()
    a, b, c = (rig.invoke(name, key="k") for name in "abc")

    rig.do(Cancel(b))

    assert rig.status(b) == Status.COMPLETED
    assert rig.complete(a)[-1] == StartAttempt(c, 1)


def test_killing_the_holder_gives_the_key_to_the_next() -> None:
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


def test_an_object_that_holds_nothing_leaves_no_record() -> None:
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


def test_clear_all_leaves_nothing() -> None:
    rig = Rig()
    a = rig.invoke("a", key="k")
    rig.step(a, Op.SET, ["x", b"1"])
    rig.step(a, Op.SET, ["y", b"2"])

    rig.step(a, Op.CLEAR_ALL)

    assert rig.values("greeter", "k") == {}


def test_a_shared_handler_that_writes_state_is_paused_for_somebody_to_see() -> None:
    rig = Rig()
    a = rig.invoke("a", key="k", mode=Mode.SHARED)

    rig.step(a, Op.SET, ["x", b"1"])

    assert rig.status(a) == Status.PAUSED
    assert "exclusive handlers" in queries.why_not_running(rig.txn, a)
    assert rig.values("greeter", "k") == {}


def test_a_handler_without_a_key_has_no_state() -> None:
    rig = Rig()
    a = rig.invoke("a")

    rig.step(a, Op.GET, ["x"])

    assert rig.status(a) == Status.PAUSED


def test_an_operator_edits_the_state_of_a_key_that_nobody_holds() -> None:
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


def test_eager_state_says_whether_it_is_all() -> None:
    rig = Rig()
    rig.do(SetState("greeter", "k", {"a": b"x" * 50, "b": b"y" * 50}, False))
    found = queries.load_object(rig.txn, "greeter", "k")
    assert found is not None

    assert queries.eager_state(rig.txn, found.id, 1000) == ({"a": b"x" * 50, "b": b"y" * 50}, True)
    assert queries.eager_state(rig.txn, found.id, 100) == ({"a": b"x" * 50}, False)


def test_why_it_is_queued_names_the_holder() -> None:
    rig = Rig()
    a, _, c = (rig.invoke(name, key="k") for name in "abc")

    sentence = queries.why_not_running(rig.txn, c)

    assert a.hex() in sentence and "with 1 others before it" in sentence
    assert partition_key("greeter", "k") == c[:4]
