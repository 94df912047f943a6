"""Frames as bytes: any input is a list of well-formed frames or a ProtocolError."""

import contextlib
from typing import Any, get_args

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.sdk import frames as module
from holdfast.sdk.frames import (
    LATER_FRAMES,
    NUMBERS,
    TO_NODE,
    TO_SDK,
    Abandon,
    Abort,
    Ack,
    Began,
    Blocked,
    Cancelled,
    Completion,
    Credit,
    Error,
    Frame,
    Goaway,
    Intent,
    Journal,
    Output,
    Piece,
    RetryRun,
    RunDone,
    RunFailed,
    Start,
    StepFrame,
    Suspend,
    Waiting,
    choose_version,
    decode_batch,
    encode_batch,
)
from holdfast.sdk.ids import InvocationId
from holdfast.sdk.journal import (
    INT_MAX,
    Op,
    ProtocolError,
    Step,
    pack_step,
    unpack_step,
)
from tests.sdk.strategies import failures, ids, indexes, names

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
ints = st.integers(0, INT_MAX)
outcomes = st.one_of(
    st.binary().map(lambda payload: [0, payload]),
    failures,
)
rows = st.lists(
    st.builds(
        Step,
        indexes,
        names,
        st.lists(st.binary(), max_size=3),
        ints,
        ints,
        st.none() | outcomes,
        st.booleans(),
        st.just(0),
        st.just(0),
        st.just(0),
    ).map(pack_step),
    max_size=3,
)
frames: st.SearchStrategy[Any] = st.one_of(
    st.builds(
        Start, ids, ints, names, names, st.none() | names, ints, ints, ints, rows, st.booleans(),
        st.none() | st.dictionaries(names, st.binary()), st.booleans(), st.booleans(), indexes, ints, ints,
    ),
    st.builds(Began, ids, ints),
    st.builds(Blocked, ints, names, names),
    st.builds(Journal, ids, ints, rows, st.booleans()),
    st.builds(Ack, ids, ints, indexes),
    st.builds(Completion, ids, ints, indexes, ints, outcomes),
    st.builds(RetryRun, ids, ints, indexes),
    st.builds(Cancelled, ids, ints),
    st.builds(Suspend, ids, ints),
    st.builds(Abort, ids, ints, names),
    st.builds(
        StepFrame, ids, ints, indexes, st.integers(1, 17), names, st.lists(st.binary(), max_size=8),
        st.none() | outcomes, ints,
    ),
    st.builds(
        RunFailed, ids, ints, indexes, names, names, failures,
        st.none() | st.lists(ints, min_size=6, max_size=6), ints, ints,
    ),
    st.builds(Intent, ids, ints, indexes, names, names),
    st.builds(RunDone, ids, ints, indexes, outcomes, ints),
    st.builds(Abandon, ids, ints, indexes),
    st.builds(Waiting, ids, ints, st.lists(indexes)),
    st.builds(Output, ids, ints, outcomes),
    st.builds(Error, ids, ints, failures, ints, st.booleans()),
    st.builds(Credit, ints),
    st.builds(Goaway, names),
    st.builds(Piece, st.binary(), st.booleans()),
)  # fmt: skip
EVERY = TO_SDK | TO_NODE


@given(st.lists(frames, max_size=5))
def test_frames_survive_encoding_and_decoding(batch: list[Any]) -> None:
    assert decode_batch(encode_batch(batch), EVERY) == batch


@given(st.binary(max_size=200))
def test_any_bytes_are_frames_or_refused(raw: bytes) -> None:
    for allowed in (TO_SDK, TO_NODE):
        try:
            found = decode_batch(raw, allowed)
        except ProtocolError:
            continue
        assert all(type(frame) in allowed for frame in found)


@given(values)
def test_any_msgpack_is_frames_or_refused(value: Any) -> None:
    with contextlib.suppress(ProtocolError):
        decode_batch(msgpack.packb(value), EVERY)


@given(frames, st.data())
def test_a_frame_with_one_wrong_field_is_refused_or_well_formed(frame: Any, data: st.DataObject) -> None:
    """A field is replaced by an arbitrary value; an accepted frame is as well-formed as one made here."""
    row = [NUMBERS[type(frame)], *frame]
    row[data.draw(st.integers(0, len(row) - 1))] = data.draw(values)
    raw = msgpack.packb([row])
    try:
        found = decode_batch(raw, EVERY)
    except ProtocolError:
        return
    assert decode_batch(encode_batch(found), EVERY) == found


@given(frames, st.integers(-3, 3).filter(bool))
def test_a_frame_with_fields_too_many_or_too_few_is_refused(frame: Any, change: int) -> None:
    row = [NUMBERS[type(frame)], *frame]
    row = row + [None] * change if change > 0 else row[: change - len(type(frame)._field_defaults)]
    with pytest.raises(ProtocolError):
        decode_batch(msgpack.packb([row]), EVERY)


@given(frames)
def test_a_frame_of_version_1_has_no_later_field(frame: Any) -> None:
    later = type(frame)._field_defaults
    if type(frame) in LATER_FRAMES:
        with pytest.raises(ProtocolError, match="unknown frame"):
            decode_batch(encode_batch([frame], 1), EVERY, 1)
        return

    (found,) = decode_batch(encode_batch([frame], 1), EVERY, 1)

    assert found == frame._replace(**later)
    row = [NUMBERS[type(frame)], *frame]
    if later:
        with pytest.raises(ProtocolError, match="fields expected"):
            decode_batch(msgpack.packb([row]), EVERY, 1)


@pytest.mark.parametrize(
    ("frame", "fields"),
    [
        (RunFailed(InvocationId(b"x" * 16), 1, 2, "k", "n", [1, 500, "", ""], None), 7),
        (RunFailed(InvocationId(b"x" * 16), 1, 2, "k", "n", [1, 500, "", ""], None, began_ms=5), 8),
        (RunFailed(InvocationId(b"x" * 16), 1, 2, "k", "n", [1, 500, "", ""], None, retry_after_ms=5), 9),
    ],
)
def test_trailing_fields_with_their_default_are_omitted(frame: RunFailed, fields: int) -> None:
    ((_, *sent),) = msgpack.unpackb(encode_batch([frame]))

    assert len(sent) == fields
    assert decode_batch(encode_batch([frame]), EVERY) == [frame]


def test_a_node_that_speaks_version_1_sends_steps_without_their_times() -> None:
    step = Step(Op.RUN, "k", ["charge"], 2, 2, [0, b"1"], False, 1700, 1650, 3)
    frame = Journal(InvocationId(b"x" * 16), 1, [pack_step(step)], False)

    (first,) = decode_batch(encode_batch([frame], 1), EVERY, 1)
    (second,) = decode_batch(encode_batch([frame], 2), EVERY, 2)

    assert isinstance(first, Journal) and isinstance(second, Journal)
    assert msgpack.unpackb(first.journal[0]) == [*step[:7]]
    assert unpack_step(second.journal[0]) == step


@pytest.mark.parametrize(("low", "high", "chosen"), [(1, 1, 1), (1, 2, 2), (1, 9, 2), (2, 9, 2), (2, 2, 2)])
def test_the_highest_common_version_is_used(low: int, high: int, chosen: int) -> None:
    assert choose_version(low, high) == chosen


def test_sides_without_a_common_version_refuse_each_other() -> None:
    with pytest.raises(ProtocolError, match="this side speaks version 1 and version 2, the other versions 7 to 9"):
        choose_version(7, 9)


def test_each_side_refuses_frames_meant_for_the_other() -> None:
    for frame in (Ack(InvocationId(b"x" * 16), 1, 1), Abort(InvocationId(b"x" * 16), 1, "")):
        with pytest.raises(ProtocolError, match="this is version 1 of"):
            decode_batch(encode_batch([frame]), TO_NODE, 1)


def test_every_frame_has_a_number_a_check_and_a_direction() -> None:
    kinds = set(get_args(Frame))
    assert kinds == set(NUMBERS) == set(EVERY)
    assert len(set(NUMBERS.values())) == len(kinds)


def test_version_1_has_failures_of_four_elements() -> None:
    invocation, failure = InvocationId(bytes(16)), [1, 409, "no", "NoSeats", {"metadata": {"seat": "12A"}}]
    step = pack_step(Step(Op.RUN, "a", ["a"], 2, 2, failure))
    batch: list[Any] = [
        Journal(invocation, 1, [step], False),
        Completion(invocation, 1, 1, 2, failure),
        StepFrame(invocation, 1, 1, Op.RUN, "a", ["a"], failure),
        StepFrame(invocation, 1, 1, Op.RESOLVE, "a", ["a", failure], None),
        RunFailed(invocation, 1, 1, "a", "a", failure, None),
        RunDone(invocation, 1, 1, failure),
        Output(invocation, 1, failure),
        Error(invocation, 1, failure, 0, False),
    ]

    journal, completion, run, resolve, run_failed, done, output, error = decode_batch(encode_batch(batch, 1), EVERY)

    short = failure[:4]
    assert isinstance(journal, Journal) and unpack_step(journal.journal[0]).outcome == short
    assert isinstance(completion, Completion) and completion.outcome == short
    assert isinstance(run, StepFrame) and run.outcome == short
    assert isinstance(resolve, StepFrame) and resolve.argument == ["a", short]
    assert isinstance(run_failed, RunFailed) and run_failed.failure == short
    assert isinstance(done, RunDone) and done.outcome == short
    assert isinstance(output, Output) and output.outcome == short
    assert isinstance(error, Error) and error.failure == short
    assert decode_batch(encode_batch(batch, 2), EVERY) == batch


_BYTES = st.sampled_from([b"", b"i" * 15, b"i" * 16, b"i" * 17, "i" * 16, None, 7])
_NUMBERS = st.sampled_from([0, 1, -1, 2**32 - 1, 2**32, 2**63 - 1, 2**63, True, 1.0, "1", None])
_KEYS = st.sampled_from(
    ["", "a", "ä", "\udc80", "k" * 128, "k" * 129, "k" * 512, "k" * 513, "\U0001f600" * 128, b"k", None]
)
_OPS = st.sampled_from([*map(int, Op), -1, 99, True, "1", None])
_ARGUMENTS = st.sampled_from([[], [1] * 8, [1] * 9, (), None, "a"])
_OUTCOMES = st.sampled_from([
    None, [0, b"1"], [0, "1"], [0], [1, 500, "why", "Kind"], [1, 500, "why", "Kind", {}], [1, 99], [2, b""], (0, b"1"), 7,
])  # fmt: skip
_FIELDS = {
    StepFrame: (_BYTES, _NUMBERS, _NUMBERS, _OPS, _KEYS, _ARGUMENTS, _OUTCOMES, _NUMBERS),
    Output: (_BYTES, _NUMBERS, _OUTCOMES),
    Ack: (_BYTES, _NUMBERS, _NUMBERS),
}


@settings(max_examples=2000)
@given(st.sampled_from([*_FIELDS]).flatmap(lambda kind: st.tuples(st.just(kind), st.tuples(*_FIELDS[kind]))))
def test_a_quick_check_passes_nothing_that_the_check_of_a_field_refuses(
    case: tuple[type[Any], tuple[Any, ...]],
) -> None:
    kind, values = case
    checks = module._CHECKS[kind]

    passes = module._QUICK[kind]([*values])

    assert not passes or all(check(value) for check, value in zip(checks, values, strict=True))


@pytest.mark.parametrize("frame", [
    StepFrame(InvocationId(b"i" * 16), 1, 1, int(Op.RUN), "charge", ["charge"], [0, b"1"], 5),
    StepFrame(InvocationId(b"i" * 16), 1, 1, int(Op.SLEEP), "sleep", [5], None, 0),
    Output(InvocationId(b"i" * 16), 1, [0, b"1"]),
    Ack(InvocationId(b"i" * 16), 1, 2),
])  # fmt: skip
def test_the_usual_frames_pass_their_quick_check(frame: Any) -> None:
    assert module._QUICK[type(frame)]([*frame])
