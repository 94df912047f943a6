"""Durations as people and programs write them: `10s`, `1h30m`, `250ms`, `PT10S`, `P1DT2H`."""

from __future__ import annotations

import re
from typing import Final

DURATION_MS_MAX: Final = 10 * 366 * 24 * 3600 * 1000

_SHORT: Final = re.compile(r"(?:([0-9]{1,18}(?:\.[0-9]{1,9})?)(ms|s|m|h|d|w))")
_ISO: Final = re.compile(
    r"P(?:([0-9]{1,18})W)?(?:([0-9]{1,18})D)?"
    r"(?:T(?:([0-9]{1,18})H)?(?:([0-9]{1,18})M)?(?:([0-9]{1,18}(?:[.,][0-9]{1,9})?)S)?)?",
    re.ASCII,
)
_UNITS_MS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_ISO_UNITS: Final = ("w", "d", "h", "m", "s")


def parse_duration_ms(text: str) -> int:
    """Milliseconds, rounded down. Raises ValueError with the reason. Months and years are refused: their lengths differ."""
    total = _parse_iso(text.upper()) if text[:1] in "Pp" else _parse_short(text)
    if total is None:
        raise ValueError(f"{text!r:.60} is not a duration: write 10s, 1h30m, 250ms or PT10S")
    if total > DURATION_MS_MAX:
        raise ValueError(f"{text!r:.60} is longer than ten years")
    return total


def _parse_short(text: str) -> int | None:
    total, at = 0, 0
    while at < len(text):
        match = _SHORT.match(text, at)
        if match is None:
            return None
        total += _milliseconds(match[1], match[2])
        at = match.end()
    return total if text else None


def _parse_iso(text: str) -> int | None:
    match = _ISO.fullmatch(text)
    if match is None or text.endswith(("P", "T")):
        return None
    return sum(_milliseconds(value, unit) for value, unit in zip(match.groups(), _ISO_UNITS, strict=True) if value)


def _milliseconds(number: str, unit: str) -> int:
    """Whole-number arithmetic, so that 0.1s is 100 ms exactly."""
    whole, _, fraction = number.replace(",", ".").partition(".")
    factor = _UNITS_MS[unit]
    return int(whole) * factor + (int(fraction) * factor // 10 ** len(fraction) if fraction else 0)


def format_duration_ms(milliseconds: int) -> str:
    """The two largest units: `2d 3h`, `1m 5s`, `250ms`."""
    if milliseconds < 1000:
        return f"{max(milliseconds, 0)}ms"
    parts = []
    for unit in ("d", "h", "m", "s"):
        count, milliseconds = divmod(milliseconds, _UNITS_MS[unit])
        if count:
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2])
