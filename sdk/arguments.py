"""Checks the arguments of the operations of a context, before anything is journaled.

A wrong argument raises `BadArgument`, because it would be wrong in every attempt.
"""

from __future__ import annotations

import inspect
import math
import typing
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Final

from holdfast.sdk.errors import BadArgument, BadPayload
from holdfast.sdk.journal import NAME_BYTES_MAX, PAYLOAD_BYTES_MAX, unsome
from holdfast.sdk.serde import UNTYPED, Serde, serde_for

HEADERS_MAX: Final = 64
HEADER_BYTES_MAX: Final = 16 * 1024
DELAY_S_MAX: Final = 100 * 366 * 24 * 3600  # A longer delay is most likely a wrong unit.


def checked_headers(headers: dict[str, str] | None) -> dict[str, str]:
    if not headers:
        return {}
    size = 0
    for name, value in headers.items():
        check_text(name, "the name of a header")
        check_text(value, f"header {name!r}", HEADER_BYTES_MAX, empty=True)
        size += len(name.encode()) + len(value.encode())
    if len(headers) > HEADERS_MAX or size > HEADER_BYTES_MAX:
        raise BadArgument(f"a call must have at most {HEADERS_MAX} headers, of {HEADER_BYTES_MAX} bytes together")
    return dict(headers)


def check_text(text: str, what: str, limit: int = NAME_BYTES_MAX, *, empty: bool = False) -> None:
    if type(text) is not str:
        raise BadArgument(f"{what} must be a str, not {type(text).__name__}")
    if not text.isascii():
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise BadArgument(f"{what} must be valid Unicode") from None
    else:
        size = len(text)
    if size > limit or (size == 0 and not empty):
        raise BadArgument(f"{what} must have 1 to {limit} bytes, not {size}")


def duration_ms(value: float | timedelta, what: str) -> int:
    """Rounded up: a durable wait is never shorter than requested."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if not isinstance(seconds, int | float):
        raise BadArgument(f"{what} must be a number of seconds or a timedelta, not {value!r:.100}")
    if not 0 <= seconds <= DELAY_S_MAX:
        raise BadArgument(f"{what} must be a duration between zero and 100 years, not {value!r}")
    return math.ceil(seconds * 1000)


def as_timedelta(value: float | timedelta, what: str, parts: Mapping[str, float] | None = None) -> timedelta:
    """With `parts` added: hours, days and so on, as `timedelta` takes them."""
    try:
        return (value if isinstance(value, timedelta) else timedelta(seconds=value)) + timedelta(**(parts or {}))
    except (TypeError, ValueError, OverflowError):
        given = ", ".join([repr(value), *(f"{name}={part!r}" for name, part in (parts or {}).items() if part)])
        raise BadArgument(
            f"{what} must be a number of seconds or a timedelta of up to 100 years, not {given:.100}"
        ) from None


def dumped(serde: Serde[Any], value: Any, what: str) -> bytes:
    """A value as the payload of a step."""
    try:
        payload = serde.dump(value)
    except BadPayload as error:
        raise BadPayload(f"{what}: {error}") from None
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise BadPayload(f"{what} must have at most {PAYLOAD_BYTES_MAX} bytes, not {len(payload)}")
    return payload


def optional(serde: Serde[Any]) -> Callable[[bytes], Any]:
    """How to load a value that may be absent."""

    def load(payload: bytes) -> Any:
        found = unsome(payload)
        return None if found is None else serde.load(found)

    return load


def check_clash(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: list[str]
) -> None:
    """Refuse an option of `ctx.run` that was probably meant for the function: the function has a parameter of that name
    without a value."""
    code = getattr(function, "__code__", None)
    for option in options:
        if code is None or option not in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            continue
        try:
            inspect.signature(function).bind(*args, **kwargs)
        except TypeError as error:
            raise BadArgument(
                f"{option}= is an option of ctx.run, but {function.__name__} has a parameter of that name too ({error}): "
                f"pass it by position, or as functools.partial({function.__name__}, {option}=...)"
            ) from None


_result_serdes: weakref.WeakKeyDictionary[Any, Serde[Any]] = weakref.WeakKeyDictionary()


def result_serde(function: Any) -> Serde[Any]:
    """The serde of the return annotation; UNTYPED: there is none, or it cannot be used. The cache is by code object, because
    functions made for each call share it."""
    code = getattr(inspect.unwrap(function) if hasattr(function, "__wrapped__") else function, "__code__", None)
    if code is None:
        inner = getattr(function, "func", None) or vars(type(function)).get("__call__")
        if inner is None or not hasattr(inner, "__code__"):
            return UNTYPED
        return result_serde(inner)
    found = _result_serdes.get(code)
    if found is None:
        try:
            hint = typing.get_type_hints(function, include_extras=True).get("return", Any)
            found = UNTYPED if hint is Any else serde_for(hint)
        except (BadPayload, NameError, TypeError, AttributeError):
            found = UNTYPED
        _result_serdes[code] = found
    return found
