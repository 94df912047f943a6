"""Bytes from outside are refused before they cost more than they may. Work is counted, not timed."""

from __future__ import annotations

import json
import random
import re
import struct
import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.sdk import bounds
from holdfast.sdk.bounds import SMALL_BYTES, TooComplex, Walk, check_json, check_msgpack, load_json, shown

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=40)
    | st.binary(max_size=300)
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=5), inner, max_size=20)
)
DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=10) | st.dictionaries(st.text(max_size=5), inner, max_size=10),
)


def elements(value: Any) -> int:
    """The number of elements in msgpack: each key and each value is one."""
    if isinstance(value, list):
        return 1 + sum(map(elements, value))
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(elements, value.values()))
    return 1


def depth(value: Any) -> int:
    inner = value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else None
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


@given(VALUES)
def test_a_walk_ends_where_the_message_ends_and_counts_its_elements(value: Any) -> None:
    raw = msgpack.packb(value)
    walk = Walk(raw + b"more")

    walk.skip(10_000)

    assert walk.at == len(raw)
    assert walk.seen == elements(value)


@given(VALUES.filter(lambda value: elements(value) > 1))
def test_the_bound_on_elements_is_exact(value: Any) -> None:
    raw = msgpack.packb(value)

    Walk(raw).skip(elements(value))
    with pytest.raises(TooComplex):
        Walk(raw).skip(elements(value) - 1)


@settings(max_examples=300)
@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_refused_or_can_be_parsed(raw: bytes, large: bool) -> None:
    """By both methods: in C for small messages, step by step for large ones."""
    try:
        check_msgpack(raw) if large else Walk(raw).skip(1000)
    except TooComplex:
        with pytest.raises(Exception):  # noqa: B017 - msgpack raises a dozen kinds
            _ = msgpack.unpackb(raw, strict_map_key=False, raw=True)


def test_headers_that_claim_too_much_reserve_no_memory() -> None:
    """Each of these three bytes makes a parser reserve room for 60,000 elements: half a gigabyte for a thousand of
    them."""
    claims = b"\xdc\xea\x60" * 1000
    small, large = claims + bytes(SMALL_BYTES - len(claims)), claims + bytes(SMALL_BYTES)

    for raw in (small, large):
        tracemalloc.start()
        try:
            with pytest.raises(TooComplex):
                check_msgpack(raw)
            assert tracemalloc.get_traced_memory()[1] < 1_000_000
        finally:
            tracemalloc.stop()


def test_forty_million_empty_arrays_are_refused_at_their_header() -> None:
    whole = b"\xdd" + struct.pack(">I", 40_000_000) + b"\x90" * 40_000_000
    nested = b"\xdc\x10\x00" * 1 + (b"\xdc\x10\x00" + b"\x90" * 4096) * 4096

    walk = Walk(whole)
    with pytest.raises(TooComplex, match="elements"):
        walk.skip(bounds.ELEMENTS_MAX)
    with pytest.raises(TooComplex, match="elements"):
        check_msgpack(nested)


@given(DOCUMENTS, st.booleans())
def test_json_within_its_bounds_is_accepted_with_any_strings(value: Any, escaped: bool) -> None:
    raw = json.dumps(value, ensure_ascii=escaped).encode()

    assert load_json(raw, 2 * elements(value), max(depth(value), 1)) == value  # An empty list counts twice.


@given(DOCUMENTS.filter(lambda value: elements(value) > 2))
def test_json_with_one_element_too_many_is_refused(value: Any) -> None:
    raw = json.dumps(value).encode()

    with pytest.raises(TooComplex):
        check_json(raw, elements(value) - 1)


def test_strings_full_of_commas_and_brackets_are_strings() -> None:
    text = '[[{,"\\' * 10_000
    value = {"text": text, text: [text]}

    assert load_json(json.dumps(value).encode(), 10, 2) == value


@pytest.mark.parametrize(
    "raw",
    [
        b"[" + b"[]," * 100_000 + b"[]]",
        b"[" + b'"",' * 100_000 + b'""]',
        b"{" + b'"":{},' * 100_000 + b'"":{}}',
        b"[" * 100_000 + b"]" * 100_000,
        b'["\\"' + b'",["\\"' * 100_000 + b'"' + b"]" * 100_001,
        b'"\\\\",' + b"[]," * 100_000,
    ],
)
def test_hostile_json_is_refused(raw: bytes) -> None:
    with pytest.raises(TooComplex):
        load_json(raw, 10_000)


def test_json_nested_deeper_than_the_bound_is_refused() -> None:
    assert load_json(b"[" * 64 + b"]" * 64, 100) is not None
    with pytest.raises(TooComplex, match="deeper"):
        load_json(b"[" * 65 + b"]" * 65, 100)
    with pytest.raises(TooComplex, match="deeper"):
        load_json(b'{"a":' * 65 + b"1" + b"}" * 65, 1000)


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999"])
def test_numbers_that_json_cannot_write_are_not_read(number: bytes) -> None:
    assert load_json(b'["%s"]' % number, 10) == [number.decode()]
    with pytest.raises(ValueError, match=re.escape(number.decode())):
        load_json(b'{"values": [%s]}' % number, 10)


@pytest.mark.parametrize("number", [b"1" * 129, b"-" + b"1" * 129, b"0." + b"1" * 127, b"1e" + b"1" * 127])
def test_numbers_without_end_are_refused(number: bytes) -> None:
    """A thousand integers of 4,000 digits took a second."""
    assert load_json(b"[" + b"7" * 128 + b",1.5]", 10) == [int("7" * 128), 1.5]
    with pytest.raises(TooComplex, match="digits"):
        load_json(b"[" + number + b"]", 10)


def test_a_byte_order_mark_is_left_out() -> None:
    assert load_json(b"\xef\xbb\xbf[1]", 10) == [1]


def test_encodings_that_would_evade_the_count_are_refused() -> None:
    raw = json.dumps(['"' + "x" * 10, [[], []]]).encode("utf-16-le")

    with pytest.raises(ValueError):
        load_json(raw, 100)


def test_hostile_json_costs_no_more_than_a_few_times_its_size() -> None:
    chosen = random.Random(1)
    for _ in range(200):
        pieces = [b"[", b"]", b"{", b"}", b'"', b",", b":", b"\\", b"[],", b'"",', b"1,", b'"a":']
        raw = b"".join(chosen.choices(pieces, k=chosen.randrange(1, 4))) * 20_000
        tracemalloc.start()
        try:
            load_json(raw, 10_000)
        except ValueError:
            pass
        finally:
            most = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert most <= 4 * len(raw) + 2_000_000, raw[:40]


def test_the_text_of_a_value_is_short() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]

    assert shown(deep) == "a list of 1"
    assert len(shown("x" * 10_000_000)) <= 60
    assert shown(12) == "12"
