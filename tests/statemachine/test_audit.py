"""The audit trail in the state of the meta group: bounded, ordered, and with each act once."""

from __future__ import annotations

from holdfast.statemachine.audit import ACTS_MAX, BATCHES_MAX, BYTES_MAX, Act, RecordActs, Trail, size_of

ACT = Act(5, "n1", "t1", "ops", "127.0.0.1", "admin", "POST", "kill", {"id": "inv_1"}, 200)


def test_acts_are_numbered_in_the_order_of_the_log() -> None:
    trail = Trail()

    trail.record(RecordActs(b"1", [ACT, ACT._replace(action="pause")]))
    trail.record(RecordActs(b"2", [ACT._replace(action="resume")]))

    assert [(each.sequence, each.act.action) for each in trail.newest_first()] == [
        (3, "resume"), (2, "pause"), (1, "kill"),
    ]  # fmt: skip
    assert [each.sequence for each in trail.newest_first(3)] == [2, 1]
    assert trail.newest_first(1) == trail.newest_first(0) == []


def test_a_command_proposed_twice_is_recorded_once() -> None:
    trail = Trail()

    assert trail.record(RecordActs(b"1", [ACT])).code == 0
    assert trail.record(RecordActs(b"1", [ACT])).code == 200

    assert len(trail.acts) == 1


def test_the_oldest_acts_are_dropped_beyond_the_limit_on_their_number() -> None:
    trail = Trail()
    acts = [ACT._replace(at_ms=number) for number in range(ACTS_MAX + 3)]

    for number in range(0, len(acts), 100):
        trail.record(RecordActs(number.to_bytes(8, "big"), acts[number : number + 100]))

    assert len(trail.acts) == ACTS_MAX and trail.next == ACTS_MAX + 4
    assert trail.newest_first()[-1] == (4, acts[3])
    assert trail.bytes == sum(map(size_of, trail.acts))


def test_the_oldest_acts_are_dropped_beyond_the_limit_on_their_bytes() -> None:
    trail = Trail()
    large = ACT._replace(targets={"key": "é" * 1000})

    for number in range(2 * BYTES_MAX // size_of(large)):
        trail.record(RecordActs(number.to_bytes(8, "big"), [large]))

    assert BYTES_MAX - size_of(large) < trail.bytes <= BYTES_MAX
    assert trail.bytes == sum(map(size_of, trail.acts))


def test_the_memory_of_proposed_commands_is_bounded() -> None:
    trail = Trail()

    for number in range(2 * BATCHES_MAX):
        trail.record(RecordActs(number.to_bytes(8, "big"), [ACT]))

    assert len(trail._batches) == BATCHES_MAX
