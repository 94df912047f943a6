"""Messages between partitions are applied exactly once and in order, however the network delivers them."""

import pytest

from holdfast.sdk.ids import InvocationId, PartitionNumber, partition_of
from holdfast.sdk.journal import Op
from holdfast.statemachine import queries
from holdfast.statemachine.commands import (
    Announce,
    Cancel,
    Deliver,
    Invoke,
    Kill,
    Mode,
    Redispatch,
    SuspendAttempt,
    TrimOutbox,
    encode_command,
)
from holdfast.statemachine.effects import (
    Acknowledge,
    ArmTimer,
    Effect,
    FlushOutbox,
    RecoverAttempt,
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
    """Two partitions; `carry` delivers the messages of one to the other."""

    def __init__(self) -> None:
        self.rigs = [Rig(partition, PARTITIONS) for partition in range(PARTITIONS)]

    def deliver(self, source: int, *, first: int | None = None, count: int = 100) -> Deliver:
        begin, messages = queries.outbox(self.rigs[source].txn, PartitionNumber(1 - source), (first or 1) - 1, count)
        return Deliver(PartitionNumber(source), begin, messages)

    def carry(self, source: int) -> None:
        delivery = self.deliver(source)
        if delivery.messages:
            self.rigs[1 - source].do(delivery)
            assert self.rigs[1 - source].result.code in (0, 200)
            self.rigs[source].do(TrimOutbox(PartitionNumber(1 - source), delivery.first + len(delivery.messages) - 1))


def call_across(pair: Pair) -> tuple[InvocationId, InvocationId, int]:
    caller, child = pair.rigs[0].invoke(named(0)), ident(named(1))
    row = Invoke(child, "greeter", "help", None, Mode.PLAIN, b"", {}, 0, None, 0, HOUR_MS)
    index = pair.rigs[0].step(caller, Op.CALL, ["greeter", "help", None, b"", {}], child=row)
    return caller, child, index


def test_a_call_to_another_partition_goes_through_the_outbox_and_its_outcome_comes_back() -> None:
    pair = Pair()
    caller, child, index = call_across(pair)
    assert pair.rigs[0].effects == [Acknowledge(caller, 1, 2), FlushOutbox(PartitionNumber(1))]
    assert queries.outbox_targets(pair.rigs[0].txn) == [1]

    pair.carry(0)
    assert pair.rigs[1].started() == [child]
    assert pair.rigs[1].complete(child) == [Reply(child, RESULT), FlushOutbox(PartitionNumber(0))]
    pair.carry(1)

    assert pair.rigs[0].effects == [SendCompletion(caller, 1, index, 3, RESULT)]
    assert [queries.outbox_targets(rig.txn) for rig in pair.rigs] == [[], []]


def test_a_repeated_delivery_changes_nothing() -> None:
    pair = Pair()
    _, child, _ = call_across(pair)
    delivery = pair.deliver(0)
    pair.rigs[1].do(delivery)
    pair.rigs[1].complete(child)
    before = queries.digest(pair.rigs[1].txn)

    assert pair.rigs[1].do(delivery) == []

    assert pair.rigs[1].result.code == 200
    assert queries.digest(pair.rigs[1].txn) == before


def test_a_delivery_after_a_gap_is_refused() -> None:
    pair = Pair()
    call_across(pair)
    messages = pair.deliver(0).messages

    assert pair.rigs[1].do(Deliver(PartitionNumber(0), 2, messages)) == []

    assert pair.rigs[1].result.code == 409


def test_only_the_new_part_of_an_overlapping_delivery_is_applied() -> None:
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


def test_the_length_of_the_outbox_is_what_the_receiver_has_not_confirmed() -> None:
    pair = Pair()
    lengths = [queries.outbox_length(pair.rigs[0].txn)]
    for number in range(3):
        child = ident(named(1, f"child{number}-"))
        row = Invoke(child, "greeter", "help", None, Mode.PLAIN, b"", {}, 0, None, 0, HOUR_MS)
        caller = pair.rigs[0].invoke(named(0))
        pair.rigs[0].step(caller, Op.CALL, ["greeter", "help", None, b"", {}], child=row)
        lengths.append(queries.outbox_length(pair.rigs[0].txn))
    pair.rigs[0].do(TrimOutbox(PartitionNumber(1), 1))
    lengths.append(queries.outbox_length(pair.rigs[0].txn))
    pair.rigs[0].do(TrimOutbox(PartitionNumber(1), 3))

    assert [*lengths, queries.outbox_length(pair.rigs[0].txn)] == [0, 1, 2, 3, 2, 0]


def test_sequence_numbers_continue_after_the_whole_outbox_is_trimmed() -> None:
    pair = Pair()
    call_across(pair)
    pair.carry(0)
    pair.rigs[0].do(Cancel(ident(named(0))))

    assert pair.deliver(0).first == 2
    pair.rigs[0].do(TrimOutbox(PartitionNumber(1), 1))
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
        pytest.param(encode_command(Deliver(PartitionNumber(0), 1, [])), id="a delivery in a delivery"),
    ],
)
def test_a_message_unknown_to_this_release_stops_the_node_before_any_is_applied(unknown: bytes) -> None:
    rig = Rig(1, PARTITIONS)
    good = Invoke(ident(named(1)), "greeter", "help", None, Mode.PLAIN, b"", {}, 0, None, -1, HOUR_MS)

    with pytest.raises(TooNew, match=r"message 2 of partition 0 .* level 3.* start this node with the release"):
        rig.do(Deliver(PartitionNumber(0), 1, [encode_command(good), unknown]))

    assert rig.state.taken(PartitionNumber(0)) == 0 and not rig.state.todo


def test_at_level_1_an_unreadable_message_is_skipped_as_in_that_release() -> None:
    rig = Rig(1, PARTITIONS)
    rig.state = State(1, PARTITIONS, level=1)
    good = Invoke(ident(named(1)), "greeter", "help", None, Mode.PLAIN, b"", {}, 0, None, -1, HOUR_MS)

    rig.do(Deliver(PartitionNumber(0), 1, [b"\xc1", encode_command(Announce(9, "x")), encode_command(good)]))

    assert rig.started() == [good.id] and rig.state.taken(PartitionNumber(0)) == 3


def test_a_new_leader_finds_all_pending_work() -> None:
    pair = Pair()
    caller, _, _ = call_across(pair)
    rig = pair.rigs[0]
    sleeper = rig.invoke(named(0, "sleeper"))
    rig.step(sleeper, Op.SLEEP, [5000])
    due_ms = rig.now_ms + 5000
    done = rig.invoke(named(0, "done"))
    rig.complete(done)

    found, following = queries.pending_effects(rig.txn, b"", 100)

    attempts = [(effect.id, effect.epoch) for effect in found if isinstance(effect, RecoverAttempt)]
    assert attempts == sorted([(caller, 1), (sleeper, 1)]) and following is None
    assert FlushOutbox(PartitionNumber(1)) in found and ArmTimer(due_ms) in found
    assert queries.next_due(rig.txn) == due_ms


def test_a_new_leader_finds_pending_work_in_bounded_slices() -> None:
    rig = Rig(0, PARTITIONS)
    running = [rig.invoke(named(0, f"running {number}")) for number in range(5)]
    for number in range(40):
        sleeper = rig.invoke(named(0, f"sleeper {number}"))
        rig.step(sleeper, Op.SLEEP, [5000])
        rig.do(SuspendAttempt(sleeper, 1, [1]))
    slices: list[list[Effect]] = []
    following: bytes | None = b""

    while following is not None:
        found, following = queries.pending_effects(rig.txn, following, 7)
        slices.append(found)

    assert len(slices) == 45 // 7 + 1, "no slice looks at many invocations, whether they run or not"
    first, *attempts = [effect for found in slices for effect in found]
    assert type(first) is ArmTimer
    assert [effect.id for effect in attempts if isinstance(effect, RecoverAttempt)] == sorted(running)
    assert len(attempts) == len(running)


def test_a_command_applied_between_two_slices_shows_in_a_later_slice_or_as_its_own_effect() -> None:
    rig = Rig(0, PARTITIONS)
    first, *_ = sorted(rig.invoke(named(0, f"running {number}")) for number in range(3))
    found, following = queries.pending_effects(rig.txn, b"", 2)
    assert following is not None
    seen = [effect.id for effect in found if isinstance(effect, RecoverAttempt)]

    rig.do(Redispatch(first, 1))
    found, _ = queries.pending_effects(rig.txn, following, 2)

    assert StartAttempt(first, 2) in rig.effects, "its slice is over, and apply says that it has a newer attempt"
    assert first in seen and first not in [effect.id for effect in found if isinstance(effect, RecoverAttempt)]
