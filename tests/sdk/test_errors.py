"""Errors as they are journaled, and as user code gets them back."""

from typing import Any

import pytest

from holdfast.sdk import TerminalError
from holdfast.sdk.errors import from_failure, to_failure
from holdfast.sdk.journal import Failure, pack_outcome, unpack_outcome


def test_metadata_of_an_error_survives_the_journal() -> None:
    error = TerminalError("no seats", code=409, metadata={"seat": "12A"})

    failure = unpack_outcome(pack_outcome(to_failure(error)))

    assert isinstance(failure, Failure)
    found = from_failure(failure)
    assert (found.message, found.code, found.kind, found.metadata) == (
        "no seats",
        409,
        "TerminalError",
        {"seat": "12A"},
    )


def test_an_error_without_metadata_has_an_empty_map_and_takes_no_room_in_the_journal() -> None:
    failure = to_failure(TerminalError("no seats", code=409))

    assert pack_outcome(failure) == [1, 409, "no seats", "TerminalError"]
    assert from_failure(failure).metadata == {}


@pytest.mark.parametrize("metadata", [{"seat": 12}, {1: "x"}])
def test_metadata_is_texts(metadata: Any) -> None:
    with pytest.raises(TypeError, match="metadata must map str to str"):
        TerminalError("no seats", metadata=metadata)


def test_metadata_is_bounded() -> None:
    with pytest.raises(ValueError, match="at most 4096 bytes"):
        TerminalError("no seats", metadata={"seat": "x" * 5000})
