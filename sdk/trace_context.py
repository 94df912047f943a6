"""The header traceparent of W3C Trace Context: which trace an invocation belongs to, and the span that called it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

TRACEPARENT: Final = "traceparent"
_FORM: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")


class Parent(NamedTuple):
    """A valid traceparent."""

    trace_id: str  # 32 hexadecimal digits
    span_id: str  # 16 hexadecimal digits
    sampled: bool


def read_parent(headers: Mapping[str, str]) -> Parent | None:
    """None: there is none, or it is not valid and must be ignored."""
    given = headers.get(TRACEPARENT, "")
    found = _FORM.fullmatch(given)
    if found is None or (given.startswith("00") and len(given) != 55):
        return None
    return Parent(found[1], found[2], bool(int(found[3], 16) & 1))


def trace_id_of(headers: Mapping[str, str]) -> str | None:
    parent = read_parent(headers)
    return parent.trace_id if parent is not None else None
