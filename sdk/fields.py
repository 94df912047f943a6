"""Checks of the fields of frames: whether a value has the right type and lies within its bound.

Each check is total: it returns a bool for any value that msgpack can decode.
"""

from __future__ import annotations

from typing import Any, Final

from holdfast.sdk.ids import ID_BYTES
from holdfast.sdk.journal import (
    INT_MAX,
    KEY_BYTES_MAX,
    NAME_BYTES_MAX,
    SIGNATURES,
    STEP_KEY_BYTES_MAX,
    Op,
    ProtocolError,
    unpack_outcome,
)


def is_id(value: Any) -> bool:
    return type(value) is bytes and len(value) == ID_BYTES


def is_int(value: Any) -> bool:
    return type(value) is int and 0 <= value <= INT_MAX


def is_index(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**32


def is_bool(value: Any) -> bool:
    return type(value) is bool


def is_bytes(value: Any) -> bool:
    return type(value) is bytes


def is_text(value: Any) -> bool:
    return type(value) is str


def is_name(value: Any) -> bool:
    return type(value) is str and 0 < len(value.encode(errors="surrogatepass")) <= NAME_BYTES_MAX


def is_key(value: Any) -> bool:
    return value is None or (type(value) is str and len(value.encode(errors="surrogatepass")) <= KEY_BYTES_MAX)


def is_step_key(value: Any) -> bool:
    return type(value) is str and 0 < len(value.encode(errors="surrogatepass")) <= STEP_KEY_BYTES_MAX


#: Operations that code may ask for: the node makes step 0.
_SENT: Final = frozenset(SIGNATURES) - {Op.INPUT}


def is_op(value: Any) -> bool:
    return type(value) is int and value in _SENT


ARGUMENTS_MAX: Final = 8


def is_argument(value: Any) -> bool:
    return type(value) is list and len(value) <= ARGUMENTS_MAX


def is_outcome(value: Any) -> bool:
    if type(value) is list and len(value) == 2 and value[0] == 0 and type(value[1]) is bytes:
        return True
    try:
        unpack_outcome(value)
    except ProtocolError:
        return False
    return True


def is_outcome_or_none(value: Any) -> bool:
    return value is None or is_outcome(value)


def is_failure(value: Any) -> bool:
    return is_outcome(value) and value[0] == 1


def is_retry(value: Any) -> bool:
    return value is None or (type(value) is list and len(value) == 6 and all(is_int(number) for number in value))


def is_journal(value: Any) -> bool:
    return type(value) is list and all(type(row) is bytes for row in value)


def is_state(value: Any) -> bool:
    if value is None:
        return True
    return type(value) is dict and all(type(k) is str and type(v) is bytes for k, v in value.items())


def is_steps(value: Any) -> bool:
    return type(value) is list and all(is_index(index) for index in value)


# -- the fields of the most frequent frames, in one call -----------------------------------------------------------------

_KEY_LENGTH: Final = STEP_KEY_BYTES_MAX // 4  # Characters that fit however many bytes they have.


def is_step(values: list[Any]) -> bool:
    """Of a STEP. Step keys of unusual length fail here, and are checked by themselves."""
    ident, epoch, index, op, key, argument, outcome, began_ms = values
    return (
        type(ident) is bytes
        and len(ident) == ID_BYTES
        and type(epoch) is type(index) is type(began_ms) is int
        and 0 <= epoch <= INT_MAX
        and 0 <= index < 2**32
        and 0 <= began_ms <= INT_MAX
        and is_op(op)
        and type(key) is str
        and 0 < len(key) <= _KEY_LENGTH
        and type(argument) is list
        and len(argument) <= ARGUMENTS_MAX
        and (outcome is None or is_outcome(outcome))
    )


def is_output(values: list[Any]) -> bool:
    """Of an OUTPUT."""
    ident, epoch, outcome = values
    return (
        type(ident) is bytes
        and len(ident) == ID_BYTES
        and type(epoch) is int
        and 0 <= epoch <= INT_MAX
        and is_outcome(outcome)
    )


def is_ack(values: list[Any]) -> bool:
    """Of an ACK."""
    ident, epoch, length = values
    return (
        type(ident) is bytes
        and len(ident) == ID_BYTES
        and type(epoch) is type(length) is int
        and 0 <= epoch <= INT_MAX
        and 0 <= length < 2**32
    )
