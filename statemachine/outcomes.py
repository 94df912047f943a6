"""Outcomes as commands and records hold them: packed, so that apply copies them and never builds them again.

`sdk.journal` has the types, `Success` and `Failure`. A packed outcome is a list for msgpack. These functions are its face:
nothing else in this room knows what stands where in it. The payload of a success may be a reference (`refs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from holdfast.sdk.journal import CANCELLED, NOTHING, Failure, pack_outcome
from holdfast.statemachine.commands import Payload

#: [0, payload], or [1, code, message, kind] and maybe details: see `sdk.journal.pack_outcome`.
Packed: TypeAlias = list[Any]

_CANCELLED_KIND: Final = CANCELLED.kind


def succeeded(payload: Payload) -> Packed:
    return [0, payload]


def failed(code: int, message: str, kind: str, extra: dict[str, Any] | None = None) -> Packed:
    return pack_outcome(Failure(code, message, kind, extra))


def is_success(outcome: Sequence[Any]) -> bool:
    return bool(outcome[0] == 0)


def payload_of(outcome: Sequence[Any]) -> Payload:
    """Of a success."""
    payload: Payload = outcome[1]
    return payload


def failure_of(outcome: Sequence[Any]) -> Failure | None:
    """None for a success."""
    return None if outcome[0] == 0 else Failure(*outcome[1:])


def message_of(outcome: Sequence[Any]) -> str:
    """Of a failure."""
    message: str = outcome[2]
    return message


def details_of(outcome: Sequence[Any]) -> Sequence[Any]:
    """The fields of a failure, for the record of one."""
    return outcome[1:]


def is_cancellation(outcome: Sequence[Any]) -> bool:
    return bool(outcome[0] == 1 and outcome[3] == _CANCELLED_KIND)


#: The outcome of a step that has nothing to say but that it is done.
DONE: Final[Packed] = succeeded(NOTHING)
