"""Durations as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cluster.durations import format_duration_ms, parse_duration_ms


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [
        ("10s", 10_000), ("250ms", 250), ("0.1s", 100), ("1h30m", 5_400_000), ("2d", 172_800_000), ("1w", 604_800_000),
        ("PT10S", 10_000), ("pt1m", 60_000), ("P1DT2H", 93_600_000), ("PT0,25S", 250), ("P2W", 1_209_600_000),
        ("0s", 0),
    ],
)  # fmt: skip
def test_a_duration_is_read(text: str, milliseconds: int) -> None:
    assert parse_duration_ms(text) == milliseconds


@pytest.mark.parametrize(
    "text", ["", "10", "s", "10 s", "-1s", "1y", "P", "PT", "P1M", "P1Y", "PT1H2", "1e3s", "20000d", "²s"]
)
def test_an_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a duration|longer than ten years"):
        parse_duration_ms(text)


@given(st.text(max_size=12) | st.from_regex(r"\AP[0-9WDTHMS.,]{0,12}\Z") | st.from_regex(r"\A([0-9]{1,20}(ms|s|h))*\Z"))
def test_any_text_is_a_duration_or_refused(text: str) -> None:
    try:
        assert parse_duration_ms(text) >= 0
    except ValueError as error:
        assert "duration" in str(error) or "ten years" in str(error)


@pytest.mark.parametrize(
    ("milliseconds", "text"), [(0, "0ms"), (999, "999ms"), (61_000, "1m 1s"), (90_061_000, "1d 1h"), (3_600_000, "1h")]
)
def test_a_duration_is_written_with_its_two_largest_units(milliseconds: int, text: str) -> None:
    assert format_duration_ms(milliseconds) == text
