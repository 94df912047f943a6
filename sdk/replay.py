"""Compares a step of the journal with the operation that claims it.

All arguments are compared except headers, which may differ between attempts (traces do). The journal keeps a hash of some
arguments, such as the payload of a call. Steps of older nodes do not even have that, and count as equal there.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgpack

from holdfast.sdk.ids import ID_BYTES, format_id
from holdfast.sdk.journal import DIGESTED, OP_NAMES, STEP_FIELDS, Op, Outcome, digest, unpack_outcome

SHOWN_CHARS: Final = 200  # of a value in a message

_HEADERS: Final = {Op.CALL: 4, Op.SEND: 4}
#: The arguments of operations, for messages.
_PARTS: Final[dict[int, tuple[str, ...]]] = {
    Op.RUN: ("name",),
    Op.SLEEP: ("duration in milliseconds",),
    Op.CALL: ("service", "handler", "key", "argument", "headers"),
    Op.SEND: ("service", "handler", "key", "argument", "headers", "delay in milliseconds"),
    Op.SET: ("name", "value"),
    Op.RESOLVE: ("name", "outcome"),
    Op.RESOLVE_AWAKEABLE: ("invocation", "step", "outcome"),
    Op.ATTACH: ("invocation",),
    Op.CANCEL: ("invocation",),
}


class Recorded(NamedTuple):
    """A step that an earlier attempt journaled (`journal.Step`), with its outcome unpacked."""

    op: int
    key: str
    argument: list[Any]
    made: int
    done: int
    outcome: Outcome | None
    abandoned: bool


def unpack(row: bytes) -> Recorded:
    """A step of a journal as a frame carries it."""
    fields = msgpack.unpackb(row)
    op, key, argument, made, done, outcome, abandoned = fields[:STEP_FIELDS]
    if outcome is not None:
        outcome = unpack_outcome(outcome)
    return Recorded(op, key, argument, made, done, outcome, abandoned)


class Difference(NamedTuple):
    """How an operation differs from its step, in words."""

    what: str
    expected: str
    found: str


def difference(step: Recorded, code: int, argument: list[Any]) -> Difference | None:
    """How the operation `code` with this argument differs from the step with its key. None if it is that step."""
    if step.op != code:
        return Difference("The operation differs", _name(step.op), _name(code))
    stored = step.argument
    if stored == argument:
        return None
    digested, headers = DIGESTED.get(code), _HEADERS.get(code)
    for offset, (kept, given) in enumerate(zip(stored, argument, strict=False)):
        if offset == headers or (offset == digested and not isinstance(kept, bytes)):
            continue
        if kept != (digest(given) if offset == digested else given):
            parts = _PARTS.get(code, ("name",))
            what = parts[offset] if offset < len(parts) else f"argument {offset}"
            expected = f"hash {kept.hex()}" if offset == digested else _shown(kept)
            found = f"{_shown(given)}, hash {digest(given).hex()}" if offset == digested else _shown(given)
            return Difference(f"The {what} differs", expected, found)
    return None


def describe(code: int, argument: list[Any], key: str) -> str:
    """A step for people: its operation, name and key."""
    shown = [part for part in argument[:3] if isinstance(part, str)]
    return f"{_name(code)} {'/'.join(shown)!r} (key {key!r})"


def _name(code: int) -> str:
    return OP_NAMES.get(code, str(code))


def _shown(value: Any) -> str:
    """A value for people, cut. Payloads are usually JSON."""
    if isinstance(value, list) and value[:1] == [0]:
        value = value[1]  # an outcome
    if isinstance(value, bytes) and len(value) == ID_BYTES and not value.isascii():
        return format_id(value)
    if isinstance(value, bytes):
        head = value[: 4 * SHOWN_CHARS]
        try:
            text = head.decode() if len(head) == len(value) else head.decode(errors="ignore")
        except UnicodeDecodeError:
            text = repr(head)
    else:
        text = repr(value)
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "…"
