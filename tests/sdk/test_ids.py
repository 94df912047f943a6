"""Ids as texts: read as they are written, and nothing else is taken for one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.sdk.ids import BadId, format_awakeable, format_id, parse_awakeable, parse_id
from tests.sdk.strategies import ids, indexes


@given(ids, indexes)
def test_ids_are_read_as_they_are_written(raw: bytes, index: int) -> None:
    assert parse_id(format_id(raw)) == raw
    assert parse_awakeable(format_awakeable(raw, index)) == (raw, index)


@given(st.text())
def test_texts_that_are_not_ids_are_refused(text: str) -> None:
    for parse in (parse_id, parse_awakeable):
        with pytest.raises(BadId):
            parse(text)
