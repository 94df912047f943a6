"""Compares a step of the journal with the operation that claims it.

All arguments are compared except headers, which may differ between attempts (traces do). For some arguments, such as
the payload of a call, the journal keeps only a hash. Steps of older nodes lack even that, and count as equal.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgpack

from holdfast.sdk.ids import ID_BYTES, SECRET_BYTES, InvocationId, format_id
from holdfast.sdk.journal import DIGESTED, OP_NAMES, SIGNATURES, STEP_FIELDS, Kind, Outcome, digest, unpack_outcome

SHOWN_CHARS: Final = 200  # of a value in an error text

#: What may differ between attempts.
_IGNORED: Final = {op: signature.offset_of(Kind.HEADERS, Kind.SECRET) for op, signature in SIGNATURES.items()}


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
    """Decode a journaled step from a frame."""
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
    digested, ignored = DIGESTED.get(code), _IGNORED.get(code)
    for offset, (kept, given) in enumerate(zip(stored, argument, strict=False)):
        if offset == ignored or (offset == digested and not isinstance(kept, bytes)):
            continue
        if kept != (digest(given) if offset == digested else given):
            parts = SIGNATURES[code].parts
            what = parts[offset].text or parts[offset].name if offset < len(parts) else f"argument {offset}"
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
    """A value for people, shortened. Payloads are usually JSON."""
    if isinstance(value, list) and value[:1] == [0]:
        value = value[1]  # an outcome
    if isinstance(value, bytes) and len(value) in (ID_BYTES, ID_BYTES + SECRET_BYTES) and not value.isascii():
        return format_id(InvocationId(value[:ID_BYTES]))  # A secret is not for people.
    if isinstance(value, bytes):
        head = value[: 4 * SHOWN_CHARS]
        try:
            text = head.decode() if len(head) == len(value) else head.decode(errors="ignore")
        except UnicodeDecodeError:
            text = repr(head)
    else:
        text = repr(value)
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "…"
