"""Messages between partitions are taken exactly once, in order, whatever the network does with their delivery."""

import pytest

from holdfast.sdk.ids import partition_of
from holdfast.sdk.journal import Op
from holdfast.statemachine import queries
from holdfast.statemachine.commands import Announce, Cancel, Deliver, Invoke, Kill, Mode, TrimOutbox, encode_command
from holdfast.statemachine.effects import (
    Acknowledge,
    FlushOutbox,
    Reply,
    SendCompletion,
    StartAttempt,
    Status,
)
from holdfast.statemachine.levels import TooNew
from holdfast.statemachine.state import State
from tests.statemachine.rig import HOUR_MS, RESULT, Rig, ident

PARTITIONS = 2


def named(partition: int, prefix: str = "") -> str:
    """A name whose id lives in `partition`."""
    return next(
        name
        for name in (f"{prefix}{number}" for number in range(100))
        if partition_of(ident(name), PARTITIONS) == partition
    )


class Pair:
    """Two partitions; `carry` delivers what one has for the other."""

    def __init__(self) -> None:
        self.rigs = [Rig(partition, PARTITIONS) for partition in range(PARTITIONS)]

    def deliver(self, source: int, *, first: int | None = None, count: int = 100) -> Deliver:
        begin, messages = queries.outbox(self.rigs[source].txn, 1 - source, (first or 1) - 1, count)
        return Deliver(source, begin, messages)

    def carry(self, source: int) -> None:
        delivery = self.deliver(source)
        if delivery.messages:
            self.rigs[1 - source].do(delivery)
            assert self.rigs[1 - source].result.code in (0, 200)
            self.rigs[source].do(TrimOutbox(1 - source, delivery.first + len(delivery.messages) - 1))


def call_across(pair: Pair) -> tuple[bytes, bytes, int]:
    caller, child = pair.rigs[0].invoke(named(0)), ident(named(1))
    row = Invoke(child, "greeter", "help", None, Mode.PLAIN, b"", {}, 0, None, 0, HOUR_MS)
    index = pair.rigs[0].step(caller, Op.CALL, ["greeter", "help", None, b"", {}], child=row)
    return caller, child, index


def test_a_call_to_another_partition_goes_through_the_outbox_and_its_outcome_comes_back() -> None:
    pair = Pair()
    caller, child, index = call_across(pair)
    assert pair.rigs[0].effects == [Acknowledge(caller, 1, 2), FlushOutbox(1)]
    assert queries.outbox_targets(pair.rigs[0].txn) == [1]

    pair.carry(0)
    assert pair.rigs[1].started() == [child]
    assert pair.rigs[1].complete(child) == [Reply(child, RESULT), FlushOutbox(0)]
    pair.carry(1)

    assert pair.rigs[0].effects == [SendCompletion(caller, 1, index, 3, RESULT)]
    assert [queries.outbox_targets(rig.txn) for rig in pair.rigs] == [[], []]


def test_a_delivery_that_comes_again_changes_nothing() -> None:
    pair = Pair()
    _, child, _ = call_across(pair)
    delivery = pair.deliver(0)
    pair.rigs[1].do(delivery)
    pair.rigs[1].complete(child)
    before = queries.digest(pair.rigs[1].txn)

    assert pair.rigs[1].do(delivery) == []

    assert pair.rigs[1].result.code == 200
    assert queries.digest(pair.rigs[1].txn) == before


def test_a_delivery_with_a_gap_before_it_is_refused() -> None:
    pair = Pair()
    call_across(pair)
    messages = pair.deliver(0).messages

    assert pair.rigs[1].do(Deliver(0, 2, messages)) == []

    assert pair.rigs[1].result.code == 409


def test_a_delivery_that_overlaps_is_taken_from_where_it_is_new() -> None:
    pair = Pair()
    children = []
    for number in range(3):
        child = ident(named(1, f"child{number}-"))
        children.append(child)
        row = Invoke(child, "greeter", "help", None, Mode.PLAIN, b"", {}, 0, None, 0, HOUR_MS)
        caller = pair.rigs[0].invoke(named(0))
        pair.rigs[0].step(caller, Op.CALL, ["greeter", "help", None, b"", {}], child=row)
    pair.rigs[1].do(pair.deliver(0, count=2))
    assert pair.rigs[1].started() == children[:2]

    pair.rigs[1].do(pair.deliver(0))

    assert pair.rigs[1].started() == children[2:]
    assert pair.rigs[1].result.code == 0


def test_sequences_go_on_after_everything_was_trimmed() -> None:
    pair = Pair()
    call_across(pair)
    pair.carry(0)
    pair.rigs[0].do(Cancel(ident(named(0))))

    assert pair.deliver(0).first == 2
    pair.rigs[0].do(TrimOutbox(1, 1))
    assert pair.rigs[0].result.code == 200


@pytest.mark.parametrize("command", [Cancel, Kill])
def test_cancelling_and_killing_reach_calls_in_other_partitions(command: type[Cancel] | type[Kill]) -> None:
    pair = Pair()
    caller, child, _ = call_across(pair)
    pair.carry(0)
    pair.rigs[0].do(command(caller))

    pair.carry(0)

    record = pair.rigs[1].load(child)
    assert record.status == Status.COMPLETED if command is Kill else record.cancelled


def test_attaching_reaches_another_partition() -> None:
    pair = Pair()
    a, b = pair.rigs[0].invoke(named(0)), pair.rigs[1].invoke(named(1))
    index = pair.rigs[0].step(a, Op.ATTACH, [b])
    pair.carry(0)
    pair.rigs[1].complete(b)

    pair.carry(1)

    assert pair.rigs[0].effects == [SendCompletion(a, 1, index, 3, RESULT)]


@pytest.mark.parametrize(
    "unknown",
    [
        pytest.param(b"\xc1", id="no msgpack"),
        pytest.param(b"\x93\xcd\x03\xe7\x01\x02", id="a command of a later release"),
        pytest.param(encode_command(Announce(9, "x")), id="no message"),
        pytest.param(encode_command(Deliver(0, 1, [])), id="a delivery in a delivery"),
    ],
)
def test_a_message_that_this_release_cannot_read_stops_the_node_before_anything_is_taken(unknown: bytes) -> None:
    rig = Rig(1, PARTITIONS)
    good = Invoke(ident(named(1)), "greeter", "help", None, Mode.PLAIN, b"", {}, 0, None, -1, HOUR_MS)

    with pytest.raises(TooNew, match=r"message 2 of partition 0 .* level 3.* start this node with the release"):
        rig.do(Deliver(0, 1, [encode_command(good), unknown]))

    assert rig.state.taken(0) == 0 and not rig.state.todo


def test_at_level_1_a_message_that_cannot_be_read_is_passed_over_as_it_was_then() -> None:
    rig = Rig(1, PARTITIONS)
    rig.state = State(1, PARTITIONS, level=1)
    good = Invoke(ident(named(1)), "greeter", "help", None, Mode.PLAIN, b"", {}, 0, None, -1, HOUR_MS)

    rig.do(Deliver(0, 1, [b"\xc1", encode_command(Announce(9, "x")), encode_command(good)]))

    assert rig.started() == [good.id] and rig.state.taken(0) == 3


def test_a_new_leader_finds_everything_that_has_to_go_on() -> None:
    pair = Pair()
    caller, _, _ = call_across(pair)
    rig = pair.rigs[0]
    sleeper = rig.invoke(named(0, "sleeper"))
    rig.step(sleeper, Op.SLEEP, [5000])
    due_ms = rig.now_ms + 5000
    done = rig.invoke(named(0, "done"))
    rig.complete(done)

    found = list(queries.pending_effects(rig.txn))

    starts = [(effect.id, effect.epoch) for effect in found if isinstance(effect, StartAttempt)]
    assert sorted(starts) == sorted([(caller, 1), (sleeper, 1)])
    assert FlushOutbox(1) in found
    assert queries.next_due(rig.txn) == due_ms
    first, cursor = queries.running(rig.txn, b"", 1)
    assert cursor is not None
    second, cursor = queries.running(rig.txn, cursor, 5)
    assert sorted((record.id, record.epoch) for record in first + second) == sorted(starts)
    assert cursor is None
