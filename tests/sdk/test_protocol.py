"""Frames as bytes: whatever arrives is a list of well-formed frames or a ProtocolError."""

import contextlib
from typing import Any, get_args

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.sdk import protocol
from holdfast.sdk.protocol import TO_NODE, TO_SDK, Failure, ProtocolError, decode_batch, encode_batch

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
ids = st.binary(min_size=16, max_size=16)
ints = st.integers(0, protocol.INT_MAX)
indexes = st.integers(0, 2**32 - 1)
names = (
    st.text(min_size=1, max_size=32)
    .filter(lambda text: len(text.encode(errors="ignore")) in range(1, 128))
    .map(lambda text: text.encode(errors="replace").decode())
)
outcomes = st.one_of(
    st.binary().map(lambda payload: [0, payload]),
    st.tuples(st.integers(100, 999), names, names).map(lambda parts: [1, *parts]),
)
failures = st.tuples(st.integers(100, 999), names, names).map(lambda parts: [1, *parts])
frames: st.SearchStrategy[Any] = st.one_of(
    st.builds(
        protocol.Start, ids, ints, names, names, st.none() | names, ints, ints, ints, st.lists(st.binary()), st.booleans(),
        st.none() | st.dictionaries(names, st.binary()), st.booleans(), st.booleans(),
    ),
    st.builds(protocol.Journal, ids, ints, st.lists(st.binary()), st.booleans()),
    st.builds(protocol.Ack, ids, ints, indexes),
    st.builds(protocol.Completion, ids, ints, indexes, ints, outcomes),
    st.builds(protocol.RetryRun, ids, ints, indexes),
    st.builds(protocol.Cancelled, ids, ints),
    st.builds(protocol.Suspend, ids, ints),
    st.builds(protocol.Abort, ids, ints, names),
    st.builds(
        protocol.StepFrame, ids, ints, indexes, st.integers(1, 17), names, st.lists(st.binary(), max_size=8),
        st.none() | outcomes,
    ),
    st.builds(
        protocol.RunFailed, ids, ints, indexes, names, names, failures,
        st.none() | st.lists(ints, min_size=6, max_size=6),
    ),
    st.builds(protocol.Intent, ids, ints, indexes, names, names),
    st.builds(protocol.RunDone, ids, ints, indexes, outcomes),
    st.builds(protocol.Abandon, ids, ints, indexes),
    st.builds(protocol.Waiting, ids, ints, st.lists(indexes)),
    st.builds(protocol.Output, ids, ints, outcomes),
    st.builds(protocol.Error, ids, ints, failures, ints, st.booleans()),
    st.builds(protocol.Credit, ints),
    st.builds(protocol.Goaway, names),
)  # fmt: skip
EVERY = TO_SDK | TO_NODE


@given(st.lists(frames, max_size=5))
def test_frames_come_out_as_they_went_in(batch: list[Any]) -> None:
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
    """A field is replaced by anything at all; what passes must encode again to the same bytes."""
    row = [protocol.NUMBERS[type(frame)], *frame]
    row[data.draw(st.integers(0, len(row) - 1))] = data.draw(values)
    raw = msgpack.packb([row])
    try:
        found = decode_batch(raw, EVERY)
    except ProtocolError:
        return
    assert encode_batch(found) == raw


@given(frames, st.integers(-3, 3).filter(bool))
def test_a_frame_with_fields_too_many_or_too_few_is_refused(frame: Any, change: int) -> None:
    row = [protocol.NUMBERS[type(frame)], *frame]
    row = row + [None] * change if change > 0 else row[:change]
    with pytest.raises(ProtocolError):
        decode_batch(msgpack.packb([row]), EVERY)


def test_each_side_refuses_the_frames_of_its_own() -> None:
    for frame in (protocol.Ack(b"x" * 16, 1, 1), protocol.Abort(b"x" * 16, 1, "")):
        with pytest.raises(ProtocolError, match="version 1"):
            decode_batch(encode_batch([frame]), TO_NODE)


def test_every_frame_has_a_number_a_check_and_a_direction() -> None:
    kinds = set(get_args(protocol.Frame))
    assert kinds == set(protocol.NUMBERS) == set(EVERY)
    assert len(set(protocol.NUMBERS.values())) == len(kinds)


@given(ids, indexes)
def test_ids_are_read_as_they_are_written(raw: bytes, index: int) -> None:
    assert protocol.parse_id(protocol.format_id(raw)) == raw
    assert protocol.parse_awakeable(protocol.format_awakeable(raw, index)) == (raw, index)


@given(st.text())
def test_texts_that_are_not_ids_are_refused(text: str) -> None:
    for parse in (protocol.parse_id, protocol.parse_awakeable):
        with pytest.raises(protocol.BadId):
            parse(text)


@given(st.text(st.characters(), max_size=20_000))
def test_messages_of_failures_are_cut_and_always_encodable(text: str) -> None:
    cut = protocol.cut_text(text)
    assert len(cut.encode()) <= protocol.MESSAGE_BYTES_MAX
    assert protocol.unpack_outcome([1, 500, text.encode(errors="replace").decode(), "kind"]) == Failure(
        500, cut, "kind"
    )
