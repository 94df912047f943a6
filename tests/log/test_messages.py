"""The checks between peers: messages of a correct node pass unchanged, everything else is refused as `Malformed`."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.log.messages import (
    APP_BYTES_MAX,
    COMMANDS,
    DETAIL_BYTES_MAX,
    ELEMENTS_MAX,
    ENTRIES_MAX,
    ENTRY_BYTES_MAX,
    ENTRY_KINDS,
    GROUP_MAX,
    INT_MAX,
    KINDS,
    MEMBERS_MAX,
    MESSAGES_MAX,
    NODE_BYTES_MAX,
    SLICE_ELEMENTS,
    SPLIT_ELEMENTS,
    TABLE_ROWS_MAX,
    App,
    Append,
    AppendAck,
    AppendAcks,
    AppendReject,
    Appends,
    Config,
    Entry,
    Envelope,
    Farewell,
    GroupId,
    Heartbeat,
    HeartbeatAck,
    Malformed,
    Message,
    NodeId,
    Offer,
    PreVote,
    PreVoteReply,
    RequestVote,
    TimeoutNow,
    Vote,
    alike,
    decode,
    encode,
    encode_frames,
    slices,
)
from holdfast.sdk.bounds import Walk

number = st.integers(0, INT_MAX)
small = st.integers(0, 1 << 40)
names = st.lists(st.text(min_size=1, max_size=16), min_size=1, max_size=MEMBERS_MAX, unique=True).map(sorted)


@st.composite
def appends(draw: st.DrawFn) -> Append:
    prev_index, prev_term = draw(small), draw(small)
    entries: list[Entry] = []
    term = prev_term
    for offset in range(draw(st.integers(0, 5))):
        term += draw(st.integers(0, 3))
        command = bytes([draw(st.sampled_from(sorted(ENTRY_KINDS)))]) + draw(st.binary(max_size=20))
        entries.append((command, prev_index + 1 + offset, term))
    return Append(term + draw(st.integers(0, 9)), prev_index, prev_term, draw(number), tuple(entries))


messages: st.SearchStrategy[Message] = st.one_of(
    appends(),
    st.builds(AppendAck, number, number),
    st.builds(AppendReject, number, number, number),
    st.builds(Heartbeat, number, number, number),
    st.builds(HeartbeatAck, number, number),
    st.builds(PreVote, number, number, number),
    st.builds(PreVoteReply, number, number, st.booleans()),
    st.builds(RequestVote, number, number, number, st.booleans()),
    st.builds(Vote, number, st.booleans()),
    st.builds(TimeoutNow, number),
    st.builds(Offer, number, number, number, st.binary(max_size=50)),
    st.builds(Config, names.map(tuple), number, number),
    st.builds(App, st.binary(max_size=50)),
    st.lists(st.tuples(st.integers(0, GROUP_MAX), number, number, number), min_size=1, max_size=5).map(
        lambda acks: AppendAcks([field for ack in acks for field in ack])
    ),
    st.lists(appends().filter(lambda append: len(append.entries) == 1), min_size=1, max_size=3).map(
        lambda several: Appends(
            [field for append in several for field in (7, 1, *append[:4], append.entries[0][2], append.entries[0][0])]
        )
    ),
)
envelopes = st.builds(Envelope, st.integers(0, GROUP_MAX), number, messages)


def frame_of(row: list[Any]) -> bytes:
    frame: bytes = msgpack.packb([row])
    return frame


def row_of(message: Message) -> list[Any]:
    row: list[Any] = msgpack.unpackb(encode([Envelope(GroupId(1), 0, message)]))[0]
    return row


EXAMPLES: list[Message] = [
    Append(3, 5, 2, 4, ((b"\x00one", 6, 2), (b"\x01", 7, 3))),
    AppendAck(3, 7),
    AppendReject(3, 7, 2),
    Heartbeat(3, 7, 1),
    HeartbeatAck(3, 1),
    PreVote(4, 7, 3),
    PreVoteReply(3, 4, True),
    RequestVote(4, 7, 3, False),
    Vote(4, True),
    TimeoutNow(4),
    Offer(4, 90, 3, b"where"),
    Config((NodeId("a"), NodeId("b")), 9, 2),
    App(b"for the rooms above"),
    Farewell(b"you have forgotten what you promised"),
    AppendAcks([1, 0, 3, 7, 2, 5, 4, 9]),
    Appends([1, 0, 3, 7, 2, 5, 3, b"\x00one", 2, 5, 4, 9, 4, 9, 4, b"\x01"]),
]


def test_there_is_an_example_of_every_kind() -> None:
    assert [type(message) for message in EXAMPLES] == list(KINDS)


@given(st.lists(envelopes, max_size=8))
def test_messages_survive_encoding_and_decoding(batch: list[Envelope]) -> None:
    again = decode(encode(batch))

    assert again == batch
    assert [type(each.message) for each in again] == [type(each.message) for each in batch]


def test_a_decoded_entry_is_the_tuple_the_engine_compares() -> None:
    (envelope,) = decode(encode([Envelope(GroupId(1), 0, EXAMPLES[0])]))

    assert isinstance(envelope.message, Append)
    assert envelope.message.entries == ((b"\x00one", 6, 2), (b"\x01", 7, 3))
    assert all(type(entry) is tuple for entry in envelope.message.entries)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_or_encode_to_the_same_bytes(noise: bytes) -> None:
    try:
        decoded = decode(noise)
    except Malformed:
        return
    assert decode(encode(decoded)) == decoded


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=6,
)


@settings(max_examples=400)
@given(st.sampled_from(EXAMPLES), st.integers(0, 9), anything)
def test_any_field_replaced_by_anything_is_refused_or_within_its_bounds(message: Message, at: int, value: Any) -> None:
    row = row_of(message)
    row[at % len(row)] = value
    try:
        decoded = decode(frame_of(row))
    except Malformed:
        return
    assert decode(encode(decoded)) == decoded


@settings(max_examples=400)
@given(st.lists(envelopes, min_size=1, max_size=4), st.data())
def test_a_mutated_frame_is_refused_or_within_its_bounds(batch: list[Envelope], data: st.DataObject) -> None:
    frame = bytearray(encode(batch))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(frame)))
    for mutated in (bytes(frame), bytes(frame[:cut])):
        try:
            decoded = decode(mutated)
        except Malformed:
            continue
        assert decode(encode(decoded)) == decoded


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_with_a_field_too_few_or_too_many_is_refused(message: Message) -> None:
    row = row_of(message)

    with pytest.raises(Malformed):
        decode(frame_of(row[:-1]))
    with pytest.raises(Malformed):
        decode(frame_of([*row, 0]))


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
@pytest.mark.parametrize("value", [-1, INT_MAX + 1, 1.0, "1", None, [], True])
def test_an_invalid_number_is_refused_in_every_field(message: Message, value: object) -> None:
    row = row_of(message)
    for place, old in enumerate(row):
        if type(old) is int:
            with pytest.raises(Malformed):
                decode(frame_of([*row[:place], value, *row[place + 1 :]]))


@pytest.mark.parametrize("message", [m for m in EXAMPLES if type(row_of(m)[-1]) is bool], ids=repr)
@pytest.mark.parametrize("value", [0, 1, None, "yes"])
def test_a_flag_that_is_not_a_boolean_is_refused(message: Message, value: object) -> None:
    with pytest.raises(Malformed, match="boolean"):
        decode(frame_of([*row_of(message)[:-1], value]))


@pytest.mark.parametrize(
    ("what", "frame"),
    [
        ("empty", b""),
        ("not a list", msgpack.packb({"kind": 1})),
        ("a map inside", msgpack.packb([[1, 1, 0, {}, 1]])),
        ("an extension", msgpack.packb([msgpack.ExtType(1, b"x")])),
        ("more behind the end", encode([]) + b"\x00"),
        ("a message that is not a list", msgpack.packb([7])),
        ("a message without a group", msgpack.packb([[1, 1]])),
        ("an unknown kind", msgpack.packb([[len(KINDS), 1, 0, 1]])),
        ("a negative kind", msgpack.packb([[-1, 1, 0, 1, 1]])),
        ("a kind that is a list", msgpack.packb([[[], 1, 0, 1, 1]])),
        ("text that is not UTF-8", b"\x91\x96\x0b\x01\x00\x91\xa2\xff\xff\x00\x00"),
        ("too deep to be parsed", b"\x91" * 100_000),
    ],
)
def test_a_frame_that_is_not_a_list_of_messages_is_refused(what: str, frame: bytes) -> None:
    with pytest.raises(Malformed):
        decode(frame)


def test_a_frame_has_a_bounded_number_of_messages() -> None:
    row = row_of(TimeoutNow(1))

    assert len(decode(msgpack.packb([row] * MESSAGES_MAX))) == MESSAGES_MAX
    with pytest.raises(Malformed, match="bounded list"):
        decode(msgpack.packb([row] * (MESSAGES_MAX + 1)))


def test_a_group_has_a_bounded_number() -> None:
    row = row_of(TimeoutNow(1))
    row[1] = GROUP_MAX + 1

    with pytest.raises(Malformed, match="out of range"):
        decode(frame_of(row))


def append_row(flat: list[Any], *, term: int = 5, prev_index: int = 9, prev_term: int = 3) -> bytes:
    return frame_of([0, 1, 0, term, prev_index, prev_term, 0, flat])


@pytest.mark.parametrize(
    ("what", "flat"),
    [
        ("a term below its predecessor's", [3, b"\x00", 2, b"\x00"]),
        ("a first term below prev_term", [2, b"\x00"]),
        ("a term above the leader's", [6, b"\x00"]),
        ("a term that is a boolean", [True, b"\x00"]),
        ("an empty command", [3, b""]),
        ("a command of an unknown kind", [3, b"\x02x"]),
        ("a command that is text", [3, "\x00"]),
        ("a term without a command", [3]),
        ("not a list", "entries"),
    ],
)
def test_entries_that_no_leader_sends_are_refused(what: str, flat: list[Any]) -> None:
    with pytest.raises(Malformed, match="append"):
        decode(append_row(flat))


def test_entries_are_bounded_in_number_and_size() -> None:
    assert decode(append_row([3, b"\x00"] * ENTRIES_MAX))
    with pytest.raises(Malformed, match="bounded list"):
        decode(append_row([3, b"\x00"] * (ENTRIES_MAX + 1)))
    assert decode(append_row([3, bytes(ENTRY_BYTES_MAX)]))
    with pytest.raises(Malformed, match="kind and size"):
        decode(append_row([3, bytes(ENTRY_BYTES_MAX + 1)]))


def test_indices_follow_from_the_previous_one_and_end_at_the_bound() -> None:
    command = bytes([COMMANDS])
    (envelope,) = decode(append_row([3, command, 4, command], prev_index=41))
    assert isinstance(envelope.message, Append)
    assert [index for _, index, _ in envelope.message.entries] == [42, 43]

    assert decode(append_row([3, command], prev_index=INT_MAX - 1))
    with pytest.raises(Malformed, match="out of range"):
        decode(append_row([3, command], prev_index=INT_MAX))


@pytest.mark.parametrize(
    "members",
    [
        [],
        ["b", "a"],
        ["a", "a"],
        [""],
        ["x" * (NODE_BYTES_MAX + 1)],
        [b"a"],
        [f"{i:02}" for i in range(MEMBERS_MAX + 1)],
        "ab",
    ],
)
def test_members_that_are_not_sorted_distinct_bounded_names_are_refused(members: Any) -> None:
    with pytest.raises(Malformed, match="config"):
        decode(frame_of([11, 1, 1, members, 0, 0]))


@pytest.mark.parametrize(("message", "bound"), [(Offer(1, 1, 1, b""), DETAIL_BYTES_MAX), (App(b""), APP_BYTES_MAX)])
def test_payloads_are_bytes_within_their_bound(message: Message, bound: int) -> None:
    row = row_of(message)[:-1]

    assert decode(frame_of([*row, bytes(bound)]))
    with pytest.raises(Malformed, match="payload"):
        decode(frame_of([*row, bytes(bound + 1)]))
    with pytest.raises(Malformed, match="payload"):
        decode(frame_of([*row, "text"]))


def test_one_wrong_message_refuses_the_whole_frame() -> None:
    good, bad = row_of(TimeoutNow(1)), row_of(TimeoutNow(1))
    bad[3] = -1

    with pytest.raises(Malformed):
        decode(msgpack.packb([good, bad, good]))


def test_the_refusal_does_not_repeat_a_long_value() -> None:
    with pytest.raises(Malformed) as refusal:
        decode(frame_of([9, 1, 0, "x" * 10_000]))

    assert len(str(refusal.value)) < 200


def test_messages_of_different_kinds_are_never_alike_though_their_fields_are_equal() -> None:
    """Frames that are alike are encoded once. As tuples, a vote and an acknowledgement may be equal."""
    vote, ack = Envelope(GroupId(1), 0, Vote(1, True)), Envelope(GroupId(1), 0, AppendAck(1, 1))

    assert [vote] == [ack]
    assert not alike([vote], [ack])
    assert not alike([ack, ack], [ack])
    assert alike([vote, ack], [Envelope(GroupId(1), 0, Vote(1, True)), Envelope(GroupId(1), 0, AppendAck(1, 1))])


@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize("wrong", [True, 1.0, -1, 2**63, "1", None])
def test_an_acknowledgement_is_checked_field_by_field(place: int, wrong: Any) -> None:
    row: list[Any] = [1, 1, 1, 1, 1]
    assert decode(frame_of(row)) == [Envelope(GroupId(1), 1, AppendAck(1, 1))]

    row[place] = wrong

    with pytest.raises(Malformed):
        decode(frame_of(row))


@pytest.mark.parametrize("place", range(8))
@pytest.mark.parametrize("wrong", [True, 1.0, -1, 2**63, "1", None])
def test_acknowledgements_of_several_groups_are_checked_field_by_field(place: int, wrong: Any) -> None:
    flat: list[Any] = [1, 1, 1, 1, 2, 1, 1, 1]
    assert decode(frame_of([14, 0, 0, flat])) == [Envelope(GroupId(0), 0, AppendAcks(flat))]

    flat[place] = wrong

    with pytest.raises(Malformed):
        decode(frame_of([14, 0, 0, flat]))


@pytest.mark.parametrize("wrong", [[], [1, 1, 1], [1, 1, 1, 1, 1], [2**32, 1, 1, 1], 7, None, b"1111", [[1, 1, 1, 1]]])
def test_acknowledgements_are_four_fields_each(wrong: Any) -> None:
    with pytest.raises(Malformed):
        decode(frame_of([14, 0, 0, wrong]))


@pytest.mark.parametrize("place", range(8))
@pytest.mark.parametrize("wrong", [True, 1.0, -1, 2**63, "1", None, b"", b"\x09"])
def test_appends_of_several_groups_are_checked_field_by_field(place: int, wrong: Any) -> None:
    flat: list[Any] = [1, 1, 1, 1, 1, 1, 1, b"\x00", 2, 1, 1, 1, 1, 1, 1, b"\x00"]
    assert decode(frame_of([15, 0, 0, flat])) == [Envelope(GroupId(0), 0, Appends(flat))]

    flat[8 + place] = wrong

    with pytest.raises(Malformed):
        decode(frame_of([15, 0, 0, flat]))


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        7,
        [1, 1, 1, 1, 1, 1, 1],
        [2**32, 1, 1, 1, 1, 1, 1, b"\x00"],
        [1, 1, 1, 2**63 - 1, 1, 1, 1, b"\x00"],
        [1, 1, 3, 1, 2, 1, 1, b"\x00"],
        [1, 1, 3, 1, 2, 1, 4, b"\x00"],
    ],
)
def test_an_append_among_several_obeys_the_rules_of_one(wrong: Any) -> None:
    with pytest.raises(Malformed):
        decode(frame_of([15, 0, 0, wrong]))


@pytest.mark.parametrize(
    "row",
    [
        [3, 1, 0, None, 1, 1],
        [14, 0, 0, [None, 1, 1, 1]],
        [15, 0, 0, [1, 1, 1, 1, 1, 1, None, b"x"]],
        [None, 1, 0],
        [3, None, 0, 1, 1, 1],
        [3, 1, None, 1, 1, 1],
    ],
)
def test_deeply_nested_lists_are_refused(row: list[Any]) -> None:
    """They are too deep to be printed, and the refusal must not fail because of that."""
    deep = b"\x91" * 1010 + b"\x90"

    with pytest.raises(Malformed):
        decode(frame_of(row).replace(b"\xc0", deep))


def test_a_frame_of_too_many_elements_is_refused_before_it_is_parsed() -> None:
    arrays = b"\xdd" + (4_000_000).to_bytes(4, "big") + b"\x90" * 4_000_000
    claims = b"\xdc\xea\x60" * 900 + bytes(60_000)

    for frame in (arrays, b"\x91" + arrays, claims):
        with pytest.raises(Malformed, match=r"elements|not msgpack"):
            decode(frame)


def test_many_entries_travel_in_several_frames_in_their_order() -> None:
    entries = tuple((bytes([COMMANDS]) + b"x" * 9, index + 1, 1) for index in range(4000))
    envelopes = [Envelope(GroupId(group), 1, Append(1, 0, 0, 0, entries)) for group in range(40)]

    frames = encode_frames(envelopes, 32 * 1024 * 1024)

    assert [each for frame in frames for each in decode(frame)] == envelopes
    assert len(frames) > 1 and max(map(count_elements, frames)) <= SPLIT_ELEMENTS
    assert len(encode_frames(envelopes, 100_000)) == 40  # One message is not divided.
    assert encode_frames(envelopes[:1], 32 * 1024 * 1024) == [encode(envelopes[:1])]


def count_elements(frame: bytes) -> int:
    walk = Walk(frame)
    walk.skip(ELEMENTS_MAX)
    return walk.seen


# -- slices of large frames ------------------------------------------------------------------------------------------


def _large() -> list[Envelope]:
    """Messages of every size: many small ones, some with many entries, and one of megabytes."""
    few = [Envelope(GroupId(n), 1, AppendAck(3, n)) for n in range(20_000)]
    entries = tuple((b"\0" * 60, index, 3) for index in range(1, 2001))
    windows = [Envelope(GroupId(n), 1, Append(3, 0, 0, 0, entries)) for n in range(20)]
    return [*few, *windows, Envelope(GroupId(0), 0, App(b"x" * 3_000_000)), *few[:5]]


def test_the_slices_of_a_frame_have_its_messages_in_order() -> None:
    envelopes = _large()

    parts = [decode(part) for part in slices(encode(envelopes))]

    assert [envelope for part in parts for envelope in part] == envelopes
    assert len(parts) > 10
    assert max(map(len, parts)) <= SLICE_ELEMENTS


@pytest.mark.parametrize("count", [0, 1, 15, 16])
def test_a_frame_of_few_messages_has_few_slices(count: int) -> None:
    envelopes = _large()[:count]

    assert [decode(part) for part in slices(encode(envelopes))] == ([envelopes] if envelopes else [])


def test_a_frame_that_is_malformed_late_gives_the_slices_before() -> None:
    frame = encode(_large())

    for wrong in (frame[:-1], frame + b"\0", b"\x93" + b"\x90" * 2, b"\xc0", b"\xdd\xff\xff\xff\xff" + bytes(300_000)):
        with pytest.raises(Malformed):
            for part in slices(wrong):
                decode(part)


def test_a_frame_of_a_million_elements_is_never_parsed_as_a_whole() -> None:
    table = [14, 0, 0, [1, 1, 1, 1] * TABLE_ROWS_MAX]
    frame = msgpack.packb([table] * 20 + [[12, 0, 0, bytes(APP_BYTES_MAX)]])

    parts = list(slices(frame))

    assert len(parts) == 21, "no two of these messages share a slice"
    with pytest.raises(Malformed, match="bounded list"):
        decode(msgpack.packb([[14, 0, 0, [1, 1, 1, 1] * (TABLE_ROWS_MAX + 1)]]))
