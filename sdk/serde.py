"""Payloads: conversion between values and bytes, by the type hints of the code.

JSON unless the hint is `bytes` or a `Serde` is given. `hints` builds what reads it. Types that need pydantic, and are no
models of it, are left to its `TypeAdapter` (`TypeSerde`), which is imported only for them.
"""

from __future__ import annotations

import base64
import collections.abc
import dataclasses
import datetime
import decimal
import enum
import json
import typing
import uuid
from collections.abc import Callable
from typing import Any, Final, Generic, Protocol, TypeVar, runtime_checkable

from holdfast.sdk.errors import BadPayload
from holdfast.sdk.hints import Builder, Misfit

T = TypeVar("T")

JSON_TYPE: Final = "application/json"
BYTES_TYPE: Final = "application/octet-stream"


@runtime_checkable
class Serde(Protocol[T]):
    """How one type of value is stored. Give an object like this where JSON does not fit::

    class Protobuf:
        content_type = "application/protobuf"
        def dump(self, value: Order) -> bytes: return value.SerializeToString(deterministic=True)
        def load(self, payload: bytes) -> Order: return Order.FromString(payload)
        def schema(self) -> None: return None

    `dump` must give the same bytes for the same value in every process: replay compares them with those in the journal.
    """

    content_type: str

    def dump(self, value: T) -> bytes: ...

    def load(self, payload: bytes) -> T: ...

    def schema(self) -> dict[str, Any] | None: ...


class BytesSerde:
    """Bytes as they are."""

    content_type = BYTES_TYPE

    def dump(self, value: bytes) -> bytes:
        if not isinstance(value, bytes | bytearray | memoryview):
            raise BadPayload(f"value must be bytes, not {type(value).__name__}")
        return bytes(value)

    def load(self, payload: bytes) -> bytes:
        return payload

    def schema(self) -> None:
        return None


class NothingSerde:
    """For `None`: no bytes at all. Received bytes are ignored."""

    content_type = JSON_TYPE

    def dump(self, value: None) -> bytes:
        if value is not None:
            raise BadPayload(f"value must be None, not {type(value).__name__}")
        return b""

    def load(self, payload: bytes) -> None:
        return None

    def schema(self) -> None:
        return None


class JsonSerde(Generic[T]):
    """JSON, checked against a type hint when it is read."""

    content_type = JSON_TYPE

    def __init__(self, hint: Any = Any) -> None:
        self.hint = hint
        self._definitions: dict[str, Any] = {}
        self._convert, self._schema = Builder(self._definitions).build(hint)

    def dump(self, value: T) -> bytes:
        number: Any = value
        if type(number) is int and -_SMALL < number < _SMALL:
            return b"%d" % number  # The same as below, without its overhead.
        return _dumped(value)

    def load(self, payload: bytes) -> T:
        value = _loaded(payload)
        if self._convert is None:
            return typing.cast(T, value)
        try:
            return typing.cast(T, self._convert(value))
        except Misfit as misfit:
            raise BadPayload(misfit.text()) from None

    def schema(self) -> dict[str, Any] | None:
        """The JSON schema of the hint; None: any value."""
        if not self._schema:
            return None
        return {**self._schema, "$defs": self._definitions} if self._definitions else dict(self._schema)


class UntypedSerde(JsonSerde[Any]):
    """For functions without a usable annotation: what is no JSON is written all the same, and comes back as JSON."""

    def dump_noting(self, value: Any) -> tuple[bytes, str | None]:
        """The bytes, and the name of a type in the value that does not come back."""
        noted: list[str] = ["tuple"] if type(value) is tuple else []

        def default(each: Any) -> Any:
            if type(each) not in _RETURNS:
                noted.append(type(each).__name__)
            return _default(each)

        payload = _dumped(value, json.JSONEncoder(**_OPTIONS, default=default).encode)
        return payload, noted[0] if noted else None


class RawJsonSerde:
    """Values that are JSON already: `None`, bool, int, float, str, lists, and dicts with text as keys.

    Anything else is an error. `JsonSerde(Any)` would write a dataclass, and read a dict.
    """

    content_type = JSON_TYPE

    def dump(self, value: Any) -> bytes:
        if (lost := not_plain(value)) is not None:
            raise BadPayload(f"{lost} is not JSON: convert it, or give a type")
        return _dumped(value)

    def load(self, payload: bytes) -> Any:
        return _loaded(payload)

    def schema(self) -> None:
        return None


class TypeSerde(Generic[T]):
    """Any type that pydantic's `TypeAdapter` takes, as JSON: unions with a discriminator, `Annotated` with constraints,
    generics, dataclasses with validators, types of other libraries. Needs pydantic::

        @service.handler(input=TypeSerde(Annotated[Cat | Dog, Field(discriminator="kind")]))
    """

    content_type = JSON_TYPE

    def __init__(self, hint: Any) -> None:
        try:
            from pydantic import TypeAdapter
        except ImportError:
            raise BadPayload("TypeSerde needs pydantic: pip install pydantic") from None
        self.hint = hint
        try:
            self._adapter: Any = TypeAdapter(hint)
            self._adapter.rebuild()
        except Exception as error:  # Many classes of pydantic, of types' own hooks, and NameError.
            raise BadPayload(f"pydantic cannot read {_name_of(hint)}: {error}") from error

    def dump(self, value: T) -> bytes:
        adapter = self._adapter
        try:
            dumped = adapter.dump_python(value, mode="json", by_alias=True, warnings="error")
            return _dumped(_order_sets(dumped, adapter.dump_python(value, by_alias=True)))
        except BadPayload:
            raise
        except Exception as error:  # A serializer of the user may raise anything.
            raise BadPayload(f"not a {_name_of(self.hint)}: {error}") from error

    def load(self, payload: bytes) -> T:
        try:
            return typing.cast(T, self._adapter.validate_json(payload or b"null"))
        except ValueError as error:
            raise BadPayload(str(error)) from None

    def schema(self) -> dict[str, Any] | None:
        try:
            schema = dict(self._adapter.json_schema(mode="validation"))
        except Exception:
            return None  # It can be read, but not described.
        return schema or None


def _name_of(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint)


# -- writing ---------------------------------------------------------------------------------------------------------


def _dumped(value: Any, encode: Callable[[Any], str] | None = None) -> bytes:
    try:
        return (encode or _encode)(value).encode()
    except BadPayload:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise BadPayload(f"not JSON: {error}") from error


def _loaded(payload: bytes) -> Any:
    try:
        return json.loads(payload) if payload else None
    except (ValueError, RecursionError) as error:
        raise BadPayload(f"not valid JSON: {error}") from None


_SAME: Final = frozenset({str, int, float, bool, type(None)})


def not_plain(value: Any) -> str | None:
    """What in this value JSON would give back as something else. None: nothing."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        kind = type(each)
        if kind in _SAME:
            continue
        if kind is list:
            waiting.extend(each)
        elif kind is dict:
            odd = next((key for key in each if type(key) is not str), None)
            if odd is not None:
                return f"a dict with a key of type {type(odd).__name__}"
            waiting.extend(each.values())
        else:
            return f"a value of type {kind.__name__}"
    return None


def _default(value: Any) -> Any:
    """Converts values that json does not support. json writes subclasses of str and int without calling this."""
    dump = getattr(value, "model_dump", None)
    if dump is not None and not isinstance(value, type):
        return _order_sets(dump(mode="json", by_alias=True), dump(by_alias=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, uuid.UUID | decimal.Decimal):
        return str(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=_place)
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode()
    if isinstance(value, collections.abc.Mapping):
        return dict(value)
    if isinstance(value, collections.abc.Sequence):
        return list(value)
    raise BadPayload(
        f"a value of type {type(value).__name__} cannot be written as JSON: "
        "use a dataclass, a pydantic model, plain values or a Serde"
    )


def _place(value: Any) -> str:
    """A sort key for the items of a set, the same in every process: `repr` of nested sets would not be."""
    return repr(value) if value is None or isinstance(value, _PLAIN) else _encode(value)


def _order_sets(dumped: Any, value: Any) -> Any:
    """The converted pydantic model, with its sets in order: pydantic writes them in iteration order, which differs by
    process.

    `value` is the same model as Python objects. Where a user's serializer gives it another shape, it is left alone.
    """
    if isinstance(value, set | frozenset) and isinstance(dumped, list):
        return sorted(dumped, key=_place)
    if isinstance(value, dict) and isinstance(dumped, dict) and len(value) == len(dumped):
        return {key: _order_sets(dumped[key], each) for key, each in zip(dumped, value.values(), strict=True)}
    if isinstance(value, list | tuple) and isinstance(dumped, list) and len(value) == len(dumped):
        return [_order_sets(found, each) for found, each in zip(dumped, value, strict=True)]
    return dumped


_PLAIN: Final = (
    str,
    int,
    float,
    enum.Enum,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    uuid.UUID,
    decimal.Decimal,
)

_SMALL: Final = 1 << 63
_OPTIONS: Final[dict[str, Any]] = {"ensure_ascii": False, "allow_nan": False, "separators": (",", ":")}
_encode = json.JSONEncoder(**_OPTIONS, default=_default).encode
#: Types that people return without expecting them back.
_RETURNS: Final = frozenset({type({}.keys()), type({}.values())})


# -- which serde ----------------------------------------------------------------------------------------------------

BYTES: Final = BytesSerde()
NOTHING: Final = NothingSerde()
ANY: Final[JsonSerde[Any]] = JsonSerde(Any)
RAW_JSON: Final = RawJsonSerde()
UNTYPED: Final = UntypedSerde()


def serde_for(hint: Any) -> Serde[Any]:
    """The serde of a type hint, or the hint itself if it is one."""
    if hint is Any:
        return ANY
    if hint is bytes:
        return BYTES
    if hint is None or hint is type(None):
        return NOTHING
    if not isinstance(hint, type) and isinstance(hint, Serde):
        return hint
    try:
        found = _by_hint.get(hint)
    except TypeError:  # A hint that cannot be hashed.
        return _built(hint)
    if found is None:
        found = _built(hint)
        if len(_by_hint) >= _HINTS_MAX:
            _by_hint.clear()
        _by_hint[hint] = found
    return found


def _built(hint: Any) -> Serde[Any]:
    """Our own JSON where it can read the hint. Otherwise pydantic's, if that is installed and can."""
    try:
        return JsonSerde(hint)
    except BadPayload as ours:
        try:
            return TypeSerde(hint)
        except BadPayload:
            raise ours from None


_HINTS_MAX: Final = 4096
_by_hint: dict[Any, Serde[Any]] = {}
