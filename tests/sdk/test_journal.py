"""Outcomes as they are journaled: packed, unpacked and cut to their bounds."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.sdk.journal import (
    MESSAGE_BYTES_MAX,
    Failure,
    ProtocolError,
    cut_text,
    pack_outcome,
    unpack_outcome,
)
from tests.sdk.strategies import extras, failures


@given(st.text(st.characters(), max_size=20_000))
def test_messages_of_failures_are_cut_and_always_encodable(text: str) -> None:
    cut = cut_text(text)
    assert len(cut.encode()) <= MESSAGE_BYTES_MAX
    assert unpack_outcome([1, 500, text.encode(errors="replace").decode(), "kind"]) == Failure(500, cut, "kind")


@given(failures, st.none() | extras)
def test_a_failure_survives_packing_and_unpacking(outcome: list[Any], extra: dict[str, Any] | None) -> None:
    if extra is not None:
        outcome = [*outcome, extra]

    assert pack_outcome(unpack_outcome(outcome)) == outcome


def test_details_of_a_failure_are_cut_to_their_bounds() -> None:
    metadata = {f"name{n}": "x" * 1000 for n in range(10)}
    trace = [f"orders.py:{n} in charge" for n in range(20)]

    failure = unpack_outcome([1, 409, "no", "NoSeats", {"metadata": metadata, "trace": trace, "other": 1}])

    assert isinstance(failure, Failure) and failure.extra is not None
    assert failure.extra == {"metadata": dict(list(metadata.items())[:4]), "trace": trace[-8:]}
    long = unpack_outcome([1, 409, "no", "", {"trace": ["x" * 1500, "y" * 1500]}])
    assert isinstance(long, Failure) and long.extra == {"trace": ["y" * 1500]}


@pytest.mark.parametrize("extra", [None, [], "x", {"metadata": [1]}, {"metadata": {"a": 1}}, {"trace": {"a": "b"}}])
def test_details_of_a_failure_must_be_a_map_of_texts_and_a_list_of_texts(extra: Any) -> None:
    with pytest.raises(ProtocolError):
        unpack_outcome([1, 409, "no", "NoSeats", extra])
