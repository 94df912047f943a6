"""The header of a snapshot file, and that damage never goes unnoticed."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.snapshots.cut import cut_blocking
from holdfast.snapshots.errors import Corrupted, NewerVersion, WrongSnapshot
from holdfast.snapshots.format import (
    BLOCK_BYTES,
    Expected,
    Header,
    Meta,
    decode,
    encode,
    parse_name,
    read_header,
    verify,
)
from tests.snapshots.states import CLUSTER, GROUP, State

META = Meta("demo", 3, 70, 4, 2, ("n1", "n2", "n3"), 1, "n1")
HEADER = Header(META, created_ms=1_700_000_000_000, size=1000, sha256="ab" * 32)


@pytest.fixture
def file(state: State, tmp_path: Path) -> Path:
    state.apply(50)
    return cut_blocking(state.env, state.describe, tmp_path / "snapshots").path


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def test_a_header_survives_writing_and_reading() -> None:
    assert decode(encode(HEADER), "here") == HEADER
    assert len(encode(HEADER)) == BLOCK_BYTES


def test_the_largest_names_fit() -> None:
    meta = replace(META, cluster="c" * 64, node="ä" * 32, members=tuple(f"{n:02d}" + "n" * 62 for n in range(15)))

    assert decode(encode(replace(HEADER, meta=meta)), "here").meta == meta


@given(st.integers(0, BLOCK_BYTES * 8 - 1))
def test_no_flipped_bit_of_a_header_goes_unnoticed(bit: int) -> None:
    block = bytearray(encode(HEADER))
    block[bit // 8] ^= 1 << bit % 8

    with pytest.raises((Corrupted, NewerVersion)):
        decode(bytes(block), "here")


def test_names_contain_and_sort_by_term_and_index() -> None:
    later_index = replace(HEADER, meta=replace(META, index=1000))
    later_term = replace(HEADER, meta=replace(META, term=10, index=1))

    assert sorted([later_term.name, HEADER.name, later_index.name]) == [HEADER.name, later_index.name, later_term.name]
    assert parse_name(later_index.name) == (4, 1000)
    assert parse_name("0-1.snapshot") is None
    assert parse_name("../" + HEADER.name) is None


def test_another_content_is_another_name() -> None:
    assert replace(HEADER, sha256="cd" * 32).name != HEADER.name
    assert replace(HEADER, created_ms=1).name != HEADER.name


def test_a_whole_file_is_verified(file: Path) -> None:
    found = verify(file, Expected(cluster=CLUSTER, group=GROUP, schema_max=1))

    assert (found.header.meta.index, found.header.meta.term) == (50, 1)
    assert found.header.sha256 == hashlib.sha256(file.read_bytes()[BLOCK_BYTES:]).hexdigest()
    assert file.name == found.name


def test_damaged_data_is_noticed_and_the_error_says_what_to_do(file: Path) -> None:
    flip(file, BLOCK_BYTES + 5000)

    with pytest.raises(Corrupted, match=r"checksum mismatch.*use an older snapshot"):
        verify(file)


@pytest.mark.parametrize("keep", [0, 5, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 10])
def test_a_torn_file_is_noticed(file: Path, keep: int) -> None:
    file.write_bytes(file.read_bytes()[:keep])

    with pytest.raises(Corrupted):
        read_header(file)


def test_extra_bytes_after_the_end_are_noticed(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"x")

    with pytest.raises(Corrupted, match="bytes instead of"):
        verify(file)


def test_a_newer_format_is_refused(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[9] = 9
    file.write_bytes(data)

    with pytest.raises(NewerVersion, match=r"snapshot format 9.*Start the release that wrote it"):
        verify(file)


@pytest.mark.parametrize(
    ("expected", "error", "hint"),
    [
        (Expected(cluster="other"), WrongSnapshot, "cluster 'demo', not 'other'"),
        (Expected(group=4), WrongSnapshot, "group 3, not group 4"),
        (Expected(schema_max=0), NewerVersion, "state schema 1"),
    ],
)
def test_an_intact_snapshot_of_another_group_or_cluster_is_refused(
    file: Path, expected: Expected, error: type[Exception], hint: str
) -> None:
    with pytest.raises(error, match=hint):
        verify(file, expected)


def test_data_of_another_kind_of_machine_is_refused(tmp_path: Path) -> None:
    foreign = replace(HEADER, size=0, byteorder="big" if HEADER.byteorder == "little" else "little")
    (tmp_path / "file").write_bytes(encode(foreign))

    with pytest.raises(WrongSnapshot, match="endian"):
        read_header(tmp_path / "file")
