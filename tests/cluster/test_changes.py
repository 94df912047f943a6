"""The changes that replicas keep, and the ids that say how far a reader has come."""

from __future__ import annotations

import base64

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.cluster.events.positions import BadPositions, Encoder, OtherCluster
from holdfast.cluster.partition.changes import ALL, KEPT_MAX, KEPT_MIN, Changes, Position, Row, Slice
from holdfast.sdk.ids import PartitionNumber

PARTITIONS = 4096  # So that each keeps the fewest.


def entry(index: int, count: int = 1) -> tuple[int, list[Row]]:
    return index, [(f"{index}.{number}",) for number in range(1, count + 1)]


def names(found: Slice) -> list[str]:
    return [row[0] for _, _, row in found.rows]


def filled(*entries: tuple[int, list[Row]], applied: int, partitions: int = 1) -> Changes:
    changes = Changes(10, partitions=partitions)
    changes.extend(applied, entries)
    return changes


def test_a_reader_gets_what_comes_after_its_position() -> None:
    changes = filled(entry(12, 3), entry(15), applied=17)

    assert names(changes.after((10, ALL), 100)) == ["12.1", "12.2", "12.3", "15.1"]
    assert names(changes.after((12, 1), 100)) == ["12.2", "12.3", "15.1"]
    assert names(changes.after((12, 3), 100)) == names(changes.after((13, ALL), 100)) == ["15.1"]
    assert changes.after((15, ALL), 100) == Slice([], (17, ALL))


def test_a_reader_may_be_ahead_of_a_replica() -> None:
    changes = filled(entry(12), applied=12)

    assert changes.after((20, ALL), 100) == Slice((), (20, ALL))


@given(st.integers(1, 7))
def test_pieces_are_the_same_as_the_whole(limit: int) -> None:
    changes = filled(*(entry(index, index % 4 + 1) for index in range(11, 30)), applied=31)
    position: Position = (10, ALL)
    found: list[str] = []
    while (piece := changes.after(position, limit)).position != position:
        assert len(piece.rows) <= limit
        found += names(piece)
        position = piece.position

    assert found == names(changes.after((10, ALL), 1000))
    assert position == changes.end


def test_no_room_is_no_progress() -> None:
    assert filled(entry(12), applied=12).after((10, ALL), 0) == Slice([], (10, ALL))


def test_changes_are_bounded_and_a_reader_before_them_is_told() -> None:
    changes = Changes(0, partitions=PARTITIONS)
    for index in range(1, 1000):
        changes.extend(index, [entry(index)])

    assert len(changes.after((999 - KEPT_MIN, ALL), 10_000).rows) == KEPT_MIN
    assert not changes.after((999 - KEPT_MIN, ALL), 10_000).lost
    early = changes.after((998 - KEPT_MIN, ALL), 10_000)
    assert early == Slice((), (999, ALL), lost=True)
    assert KEPT_MAX // PARTITIONS < KEPT_MIN, "the bound of one with many partitions"


def test_a_state_that_was_replaced_knows_no_changes_before() -> None:
    changes = filled(entry(12), applied=12)

    changes.restart(50)

    assert changes.after((12, ALL), 100).lost
    assert not changes.after((50, ALL), 100).lost


# -- ids

positions = st.one_of(st.none(), st.tuples(st.integers(0, 2**62), st.one_of(st.just(ALL), st.integers(1, ALL - 1))))


@given(st.lists(positions, min_size=1, max_size=30), st.data())
def test_an_id_says_exactly_what_was_read(places: list[Position | None], data: st.DataObject) -> None:
    encoder = Encoder("c", len(places))
    number = data.draw(st.integers(0, len(places) - 1))
    place = data.draw(positions.filter(lambda each: each is not None))
    assert place is not None

    text = Encoder.encode_at(encoder.around(places, PartitionNumber(number)), PartitionNumber(number), place)

    assert encoder.decode(encoder.encode(places)) == places
    assert encoder.decode(text) == [*places[:number], place, *places[number + 1 :]]
    assert text.isascii() and not set(text) & {"=", "\n", "+", "/"}


def test_an_id_of_another_cluster_or_number_of_partitions_is_known_as_such() -> None:
    text = Encoder("c", 2).encode([(1, ALL), (2, ALL)])

    for other in (Encoder("d", 2), Encoder("c", 3)):
        with pytest.raises(OtherCluster):
            other.decode(text)


@given(st.one_of(st.text(max_size=60), st.binary(max_size=60).map(lambda raw: base64.urlsafe_b64encode(raw).decode())))
@example("")
@example("é")
@example(Encoder("c", 2).encode([(1, ALL), (2, ALL)])[:-1])
@example(Encoder("c", 2).encode([(1, 3), (2, ALL)]) + "AA")
@example("A" * 1_000_000)
def test_any_text_is_an_id_or_refused(text: str) -> None:
    try:
        found = Encoder("c", 2).decode(text)
    except (BadPositions, OtherCluster):
        return
    assert len(found) == 2


def test_an_id_that_was_cut_or_continued_is_refused() -> None:
    encoder = Encoder("c", 2)
    raw = base64.urlsafe_b64decode(encoder.encode([(1000, ALL), (2000, 7)]) + "==")

    for wrong in (raw[:-1], raw[:-3], raw + b"\x01", raw + b"\x05\x01", raw + b"\xff", raw + b"\xff" * 40):
        with pytest.raises(BadPositions):
            encoder.decode(base64.urlsafe_b64encode(wrong).decode().rstrip("="))
