"""Ids as texts: they can be read back, and other texts are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.sdk.ids import AwakeableId, BadId, InvocationId, format_awakeable, format_id, parse_awakeable, parse_id
from tests.sdk.strategies import ids, indexes


@given(ids, indexes, st.sampled_from([b"", b"\xff secret"]))
def test_ids_are_read_as_they_are_written(raw: InvocationId, index: int, secret: bytes) -> None:
    assert parse_id(format_id(raw)) == raw
    assert parse_awakeable(format_awakeable(raw, index, secret)) == AwakeableId(raw, index, secret)


@given(st.text())
def test_texts_that_are_not_ids_are_refused(text: str) -> None:
    for parse in (parse_id, parse_awakeable):
        with pytest.raises(BadId):
            parse(text)


@pytest.mark.parametrize(
    "digits", ["0" * 38, "0" * 42, "0" * 54, "0" * 58, "0" * 39 + " ", "0 " * 20, "0 " * 28, "g" * 56]
)
def test_an_awakeable_has_a_whole_secret_or_none(digits: str) -> None:
    with pytest.raises(BadId, match="40 or 56 hexadecimal digits"):
        parse_awakeable(f"awk_{digits}")
