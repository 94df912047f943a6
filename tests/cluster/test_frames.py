"""Frames of a handler become commands: any bytes give a command that can be written, or a ProtocolError."""

from __future__ import annotations

from random import Random
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.cluster.handlers.protocols.native.session import Session
from holdfast.cluster.handlers.protocols.native.translate import Translator
from holdfast.cluster.registry.machine import Options, Target
from holdfast.cluster.values.staging import HASHED_BYTES_MAX, digested
from holdfast.sdk.frames import (
    NUMBERS,
    TO_NODE,
    Abandon,
    Credit,
    Error,
    Goaway,
    Intent,
    Output,
    RunDone,
    RunFailed,
    StepFrame,
    Waiting,
    decode_batch,
)
from holdfast.sdk.ids import DeploymentId, InvocationId, child_id, idempotent_id, workflow_id
from holdfast.sdk.journal import (
    Op,
    ProtocolError,
    digest,
)
from holdfast.statemachine.commands import (
    FailAttempt,
    Invoke,
    Mode,
    RecordRunFailure,
    RecordStep,
    Redispatch,
    SuspendAttempt,
    decode_command,
    encode_command,
)
from holdfast.statemachine.machine import apply
from holdfast.statemachine.memory import Memory
from holdfast.statemachine.state import State

DP_1 = DeploymentId("dp_1")

ID = InvocationId(bytes(range(16)))


class Directory:
    targets = {  # noqa: RUF012
        ("plain", "go"): Target("plain", "go", "service", Mode.PLAIN, DP_1, Options()),
        ("kv", "put"): Target("kv", "put", "object", Mode.EXCLUSIVE, DP_1, Options()),
        ("flow", "run"): Target("flow", "run", "workflow", Mode.WORKFLOW, DP_1, Options()),
    }

    def find(self, service: str, handler: str) -> Target | None:
        return self.targets.get((service, handler))


class Sender:
    def __init__(self) -> None:
        self.id = ID
        self.epoch = 1
        self.target = Directory.targets["plain", "go"]
        self.pinned = False
        self.sent = 1
        self.progressed = False
        self.asked_back = False
        self.level = 2
        self.session = Session(2)

    def now_ms(self) -> int:
        return 1_000_000


def translator() -> Translator:
    return Translator(Directory(), Random(1))


def step(op: int, argument: list[Any], outcome: list[Any] | None = None, index: int = 1) -> StepFrame:
    return StepFrame(ID, 1, index, op, "0/x/1", argument, outcome)


def record(frame: StepFrame) -> RecordStep:
    command = translator().command(Sender(), frame, is_fresh=True)
    assert isinstance(command, RecordStep)
    return command


def test_the_first_step_pins_and_later_ones_do_not() -> None:
    sender = Sender()
    make = translator()

    first = make.command(sender, step(Op.RUN, ["a"], [0, b""]))
    second = make.command(sender, step(Op.RUN, ["a"], [0, b""], 2))

    assert isinstance(first, RecordStep) and first.deployment == "dp_1"
    assert isinstance(second, RecordStep) and second.deployment is None


def test_a_call_begins_a_child_whose_id_both_sides_know() -> None:
    command = record(step(Op.CALL, ["kv", "put", "k", b"payload", {"a": "b"}]))

    assert command.child is not None and command.outcome is None
    child = Invoke(*command.child)
    assert child.id == child_id(ID, 1, "kv", "k", spread=False)
    assert (child.payload, child.headers, child.mode) == (b"payload", {"a": "b"}, Mode.EXCLUSIVE)
    assert (child.caller, child.caller_step) == (ID, 1)
    assert b"payload" not in msgpack.packb(command.argument), "it is written once"


def test_a_workflow_is_called_by_its_key_alone() -> None:
    command = record(step(Op.CALL, ["flow", "run", "k", b"", {}]))

    assert command.child is not None
    assert command.child[0] == workflow_id("flow", "k")


def test_a_delayed_send_starts_later_without_a_waiting_caller() -> None:
    command = record(step(Op.SEND, ["plain", "go", None, b"", {}, 5000]))

    assert command.child is not None
    child = Invoke(*command.child)
    assert child.start_at_ms == 1_005_000 and child.caller_step == -1


def test_waiting_for_nothing_means_once_more_after_a_step_or_when_it_was_asked_back() -> None:
    asked, worked, idle = Sender(), Sender(), Sender()
    asked.asked_back = True
    translator().command(worked, step(Op.RUN, ["x"], [0, b""]))

    assert translator().command(asked, Waiting(ID, 1, [])) == Redispatch(ID, 1)
    assert translator().command(worked, Waiting(ID, 1, [])) == Redispatch(ID, 1)
    assert translator().command(idle, Waiting(ID, 1, [3])) == SuspendAttempt(ID, 1, [3])
    counted = translator().command(idle, Waiting(ID, 1, []))
    assert isinstance(counted, FailAttempt) and counted.failure[3] == "NoProgress" and not counted.pause


def test_a_step_that_fails_is_never_run_again_at_once() -> None:
    command = translator().command(Sender(), RunFailed(ID, 1, 1, "0/x/1", "x", [1, 500, "no", ""], [0, 0, 0, 0, 0, 0]))

    assert isinstance(command, RecordRunFailure)
    assert command.retry.initial_ms == command.retry.max_interval_ms == 1


@pytest.mark.parametrize(
    "frame",
    [
        step(Op.RUN, ["a"]),
        step(Op.RUN, [], [0, b""]),
        step(Op.RUN, [7], [0, b""]),
        step(Op.SLEEP, [-1]),
        step(Op.SLEEP, [1.5]),
        step(Op.SLEEP, [2**62]),
        step(Op.SLEEP, [5], [0, b""]),
        step(Op.CALL, ["a", "b", None, "text", {}]),
        step(Op.CALL, ["a", "b", None, b"", {1: "x"}]),
        step(Op.CALL, ["a", "b", None, b"", {"x" * 20_000: "x"}]),
        step(Op.CALL, ["a", "b", None, b""]),
        step(Op.SEND, ["a", "b", None, b"", {}]),
        step(Op.SET, ["name", "text"]),
        step(Op.ATTACH, [b"short"]),
        step(Op.RESOLVE_AWAKEABLE, [ID, -1, [0, b""]]),
        step(Op.RESOLVE, ["p", [2]]),
        step(Op.VALUE, ["now"]),
        Credit(3),
        Goaway(""),
    ],
)
def test_what_no_sdk_sends_is_refused(frame: Any) -> None:
    with pytest.raises(ProtocolError):
        translator().command(Sender(), frame)


# -- fuzzing ---------------------------------------------------------------------------------------------------------------

junk = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=20)
    | st.binary(max_size=40) | st.sampled_from(["plain", "go", "kv", "put", "flow", "run", ID]),
    lambda inner: st.lists(inner, max_size=7) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)  # fmt: skip
ids = st.just(ID) | st.binary(min_size=16, max_size=16)
outcomes = st.none() | st.tuples(st.just(0), st.binary(max_size=10)).map(list) | st.just([1, 500, "m", "k"]) | junk
arguments = st.lists(junk, max_size=8) | st.sampled_from(
    [
        ["a"],
        [],
        [50],
        ["plain", "go", None, b"", {}],
        ["kv", "put", "k", b"", {}, 5],
        ["n", b"v"],
        [ID],
        ["n", [0, b""]],
        [ID, 1, [0, b""]],
    ]
)
rows = st.one_of(
    st.tuples(
        st.just(NUMBERS[StepFrame]), ids, st.just(1), st.integers(0, 4), st.sampled_from(sorted(Op)), st.just("0/x/1"),
        arguments, outcomes,
    ),
    st.tuples(st.just(NUMBERS[Waiting]), ids, st.just(1), st.lists(st.integers(0, 5), max_size=4)),
    st.tuples(st.just(NUMBERS[Output]), ids, st.just(1), outcomes),
    st.tuples(st.just(NUMBERS[Error]), ids, st.just(1), outcomes, st.integers(0, 2**63), st.booleans()),
    st.tuples(st.just(NUMBERS[RunFailed]), ids, st.just(1), st.integers(0, 4), st.just("k"), st.just("n"), outcomes,
              st.none() | st.lists(st.integers(0, 2**63 - 1), min_size=6, max_size=6)),
    st.tuples(st.just(NUMBERS[Intent]), ids, st.just(1), st.integers(0, 4), st.just("k"), st.just("n")),
    st.tuples(st.just(NUMBERS[RunDone]), ids, st.just(1), st.integers(0, 4), outcomes),
    st.tuples(st.just(NUMBERS[Abandon]), ids, st.just(1), st.integers(0, 4)),
    st.lists(junk, max_size=6),
)  # fmt: skip


@settings(max_examples=600, deadline=None)
@given(batch=st.lists(rows, max_size=6))
def test_any_bytes_of_an_endpoint_become_commands_that_apply_or_a_protocol_error(batch: list[Any]) -> None:
    """Total from end to end: an accepted command is encoded, decoded to the same value, and applied without an
    exception."""
    raw = msgpack.packb([list(row) for row in batch])
    state = State(0, 1)
    state.begin(Memory())
    apply(state, 1_000_000, Invoke(ID, "plain", "go", None, Mode.PLAIN, b"in", {}, 0, None, -1, 1000))
    make, sender = translator(), Sender()
    try:
        for frame in decode_batch(raw, TO_NODE):
            if isinstance(frame, Credit | Goaway):
                continue
            command = make.command(sender, frame)
            encoded = encode_command(command)
            assert encode_command(decode_command(encoded)) == encoded
            apply(state, 1_000_001, decode_command(encoded))
    except ProtocolError:
        pass
    state.flush()


@settings(max_examples=300, deadline=None)
@given(raw=st.binary(max_size=200))
def test_random_bytes_are_refused_without_any_other_error(raw: bytes) -> None:
    try:
        for frame in decode_batch(raw, TO_NODE):
            if not isinstance(frame, Credit | Goaway):
                translator().command(Sender(), frame)
    except ProtocolError:
        pass


def test_failures_are_cut_before_they_are_proposed() -> None:
    extra = {"metadata": {"seat": "12A", "note": "x" * 5000}}
    failure = [1, 409, "m" * 10_000, "NoSeats", extra]
    it, sender = translator(), Sender()

    commands: list[Any] = [
        it.command(sender, step(Op.RUN, ["x"], failure)),
        it.command(sender, RunDone(ID, 1, 1, failure)),
        it.command(sender, Output(ID, 1, failure)),
    ]
    resolve: Any = it.command(sender, step(Op.RESOLVE, ["x", failure], index=2))
    failed: Any = it.command(sender, RunFailed(ID, 1, 3, "k", "x", failure, None))
    error: Any = it.command(sender, Error(ID, 1, failure, 0, False))

    for outcome in [*(command.outcome for command in commands), resolve.argument[1], failed.failure, error.failure]:
        assert len(outcome[2].encode()) <= 8 * 1024
        assert outcome[3:] == ["NoSeats", {"metadata": {"seat": "12A"}}]


def test_at_level_1_failures_have_four_elements() -> None:
    failure = [1, 409, "no", "NoSeats", {"metadata": {"seat": "12A"}}]
    it, sender = translator(), Sender()
    sender.level = 1

    output: Any = it.command(sender, Output(ID, 1, failure))
    resolve: Any = it.command(sender, step(Op.RESOLVE, ["x", failure], index=2))

    assert output.outcome == resolve.argument[1] == [1, 409, "no", "NoSeats"]


@pytest.mark.parametrize(("level", "version", "notices"), [(1, 2, False), (2, 1, False), (2, 2, True)])
def test_an_output_says_whether_its_sdk_can_notice_a_late_cancellation(level: int, version: int, notices: bool) -> None:
    sender = Sender()
    sender.level, sender.session = level, Session(version)

    command: Any = translator().command(sender, Output(ID, 1, [0, b""]))

    assert command.notices is notices


DIGESTED_FRAMES = [
    (step(Op.CALL, ["kv", "put", "k", b"payload", {}]), b"payload"),
    (step(Op.CALL, ["nobody", "knows", None, b"payload", {}]), b"payload"),
    (step(Op.SEND, ["plain", "go", None, b"payload", {}, 0]), b"payload"),
    (step(Op.RESOLVE, ["promise", [0, b"payload"]]), b"payload"),
    (step(Op.RESOLVE_AWAKEABLE, [ID, 1, [0, b"payload"]]), b"payload"),
    (step(Op.RESOLVE, ["promise", [1, 409, "no", "Full"]]), [1, 409, "no", "Full", {"metadata": {"a": "b"}}]),
]


@pytest.mark.parametrize(("frame", "given"), DIGESTED_FRAMES)
def test_what_a_journal_does_not_keep_has_a_digest_from_level_2_on(frame: StepFrame, given: Any) -> None:
    sender = Sender()
    sender.level = 1
    older: Any = translator().command(sender, frame, is_fresh=True)

    assert record(frame).digest == digest(given)
    assert older.digest == b""


async def test_large_values_are_hashed_in_a_thread() -> None:
    payload = bytes(HASHED_BYTES_MAX + 1)
    call = record(step(Op.CALL, ["kv", "put", "k", payload, {}]))
    resolve = record(step(Op.RESOLVE, ["promise", [0, payload]]))
    plain = record(step(Op.SET, ["name", payload]))

    assert call.digest == resolve.digest == b""
    for command in (call, resolve):
        found: Any = await digested(command, 2)
        assert found.digest == digest(payload)
        assert await digested(command, 1) is command
    assert await digested(plain, 2) is plain


def test_calls_with_an_idempotency_key_have_the_id_that_a_client_gets() -> None:
    it, sender = translator(), Sender()

    called: Any = it.command(sender, step(Op.CALL, ["kv", "put", "k", b"", {}, "once"]))
    sent: Any = it.command(sender, step(Op.SEND, ["plain", "go", None, b"", {}, 500, "once"], index=2))

    assert called.argument[5:] == ["once"] and sent.argument[5:] == [500, "once"]
    child, other = Invoke(*called.child), Invoke(*sent.child)
    assert (child.id, child.idempotency_key) == (idempotent_id("kv", "k", "put", "once"), "once")
    assert (other.id, other.start_at_ms) == (idempotent_id("plain", None, "go", "once"), 1_000_500)
    for wrong in ("", 7, "x" * 600):
        with pytest.raises(ProtocolError):
            it.command(sender, step(Op.CALL, ["kv", "put", "k", b"", {}, wrong]))


def test_before_level_2_a_call_with_an_idempotency_key_waits_for_the_upgrade() -> None:
    sender = Sender()
    sender.level = 1

    command: Any = translator().command(sender, step(Op.CALL, ["kv", "put", "k", b"", {}, "once"]))

    assert type(command).__name__ == "FailAttempt" and not command.pause and command.failure[3] == "Upgrading"


@pytest.mark.parametrize(
    "frame",
    [step(Op.AWAKEABLE, [b"8 bytes!"]), step(Op.RESOLVE_AWAKEABLE, [ID + b"8 bytes!", 1, [0, b""]])],
    ids=["made", "resolved"],
)
def test_before_level_2_the_secret_of_an_awakeable_waits_for_the_upgrade(frame: StepFrame) -> None:
    sender = Sender()
    sender.level = 1

    command: Any = translator().command(sender, frame)

    assert type(command).__name__ == "FailAttempt" and not command.pause and command.failure[3] == "Upgrading"
    assert record(frame).argument == frame.argument


ASKS: list[Any] = ["Refund?", b"{}", ["approve", "reject"], "finance", 60_000, 0, True, b"8 bytes!"]


def test_before_level_2_an_approval_waits_for_the_upgrade() -> None:
    sender = Sender()
    sender.level = 1

    command: Any = translator().command(sender, step(Op.APPROVAL, ASKS))

    assert type(command).__name__ == "FailAttempt" and not command.pause and command.failure[3] == "Upgrading"
    assert record(step(Op.APPROVAL, ASKS)).argument == ASKS


@pytest.mark.parametrize(
    ("offset", "wrong"),
    [
        (0, ""), (0, "x" * 513), (0, 7), (1, "text"), (1, bytes(65_537)), (2, []), (2, "approve"), (2, ["a", "a"]),
        (2, [""]), (2, ["x" * 65]), (2, [str(number) for number in range(17)]), (2, [7]), (3, ""), (3, "x" * 129),
        (4, -1), (4, None), (5, -1), (5, 2**62), (6, 1), (7, b"7 bytes"), (7, None),
    ],
)  # fmt: skip
def test_an_approval_beyond_its_bounds_is_an_error_of_the_endpoint(offset: int, wrong: Any) -> None:
    with pytest.raises(ProtocolError):
        record(step(Op.APPROVAL, [*ASKS[:offset], wrong, *ASKS[offset + 1 :]]))
    with pytest.raises(ProtocolError):
        record(step(Op.APPROVAL, ASKS[:-1]))


@pytest.mark.parametrize("argument", [[b""], [b"7 bytes"], ["8 bytes!"], [b"8 bytes!", b""], [None]])
def test_the_secret_of_an_awakeable_has_8_bytes(argument: list[Any]) -> None:
    with pytest.raises(ProtocolError):
        record(step(Op.AWAKEABLE, argument))
    if type(argument[0]) is not bytes or argument[0]:
        with pytest.raises(ProtocolError):
            record(step(Op.RESOLVE_AWAKEABLE, [7 if argument[0] is None else argument[0], 1, [0, b""]]))
