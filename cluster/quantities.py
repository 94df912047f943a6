"""Numbers in settings: counts, durations, shares and sizes. Readers raise ValueError, which says what is expected."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from holdfast.cluster.durations import parse_duration_ms

MIB: Final = 1024 * 1024


def read_count(low: int, high: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if isinstance(value, str) and value.isascii() and value.isdigit():
            value = int(value[:20])
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"{value!r:.80} is not a whole number from {low} to {high}")
        return value

    return read


def read_seconds(low: float, high: float) -> Callable[[Any], float]:
    """A number of seconds, or text with units: `1h`, `90s`."""

    def read(value: Any) -> float:
        seconds = value
        if isinstance(value, str):
            seconds = parse_duration_ms(value) / 1000
        if type(seconds) not in (int, float) or not low <= seconds <= high:
            raise ValueError(f"{value!r:.80} is not between {low:g} and {high:g} seconds")
        return float(seconds)

    return read


def read_ratio(value: Any) -> float:
    found = float(value)
    if not 0 <= found <= 1:
        raise ValueError(f"{value!r:.80} is not a number from 0 to 1")
    return found


_UNITS: Final = {"": 1, "b": 1, "kib": 1024, "mib": MIB, "gib": 1024 * MIB, "tib": 1024 * 1024 * MIB}


def read_bytes(low: int, high: int) -> Callable[[Any], int]:
    """A number of bytes, or text with a unit: `4 MiB`."""

    def read(value: Any) -> int:
        size = value
        if isinstance(value, str):
            match = re.fullmatch(r"\s*([0-9]{1,18})\s*([A-Za-z]*)\s*", value)
            if match is None or match[2].lower() not in _UNITS:
                raise ValueError(f"{value!r:.80} is not a size, as in 4 MiB")
            size = int(match[1]) * _UNITS[match[2].lower()]
        if type(size) is not int or not low <= size <= high:
            raise ValueError(f"{value!r:.80} is not between {show_size(low)} and {show_size(high)}")
        return size

    return read


def show_size(count: int) -> str:
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        factor = _UNITS[unit.lower()] if unit != "KiB" else 1024
        if count >= factor and count % factor == 0:
            return f"{count // factor} {unit}"
    return f"{count} bytes"
