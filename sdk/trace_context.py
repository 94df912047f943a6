"""The header traceparent of W3C Trace Context: which trace an invocation belongs to, and the span that called it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Final, NamedTuple

from holdfast.sdk.ids import InvocationId

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


# -- traces that the cluster exports -----------------------------------------------------------------------------------
# Ids are derived, so nodes and handlers agree on them without a word, and a repeated export is no second span.

TRACESTATE: Final = "tracestate"
#: In tracestate: the cluster exports the spans of this invocation, so its steps are there to be parents.
EXPORTED: Final = "holdfast=1"
_TRACESTATE_MAX: Final = 512


def is_exported(headers: Mapping[str, str]) -> bool:
    """Whether the cluster exports spans of the invocation that has these headers."""
    if TRACESTATE not in headers or EXPORTED not in [entry.strip() for entry in headers[TRACESTATE].split(",")]:
        return False
    parent = read_parent(headers)
    return parent is not None and parent.sampled


def marked(tracestate: str) -> str:
    """With our entry, which comes first as that of the newest in the chain. Too many others are dropped."""
    others = [entry.strip() for entry in tracestate.split(",")]
    kept = [EXPORTED, *(entry for entry in others if entry and not entry.startswith("holdfast="))]
    while len(kept) > 32 or len(",".join(kept)) > _TRACESTATE_MAX:
        kept.pop()
    return ",".join(kept)


def traceparent(trace_id: str, span_id: str, *, sampled: bool = True) -> str:
    return f"00-{trace_id}-{span_id}-{'01' if sampled else '00'}"


def trace_id_for(invocation: InvocationId) -> str:
    """Of an invocation that belongs to no trace yet."""
    return _digest(invocation, "trace", 16)


def root_id(invocation: InvocationId) -> str:
    """In place of a parent: it says that the span of this invocation has none."""
    return _digest(invocation, "root", 8)


def invocation_span(invocation: InvocationId) -> str:
    return _digest(invocation, "invocation", 8)


def attempt_span(invocation: InvocationId, epoch: int) -> str:
    return _digest(invocation, f"attempt {epoch}", 8)


def step_span(invocation: InvocationId, key: str) -> str:
    return _digest(invocation, f"step {key}", 8)


def _digest(invocation: InvocationId, what: str, size: int) -> str:
    found = blake2b(invocation + what.encode(errors="surrogatepass"), digest_size=size, person=b"holdfast trace")
    return found.hexdigest()
