"""Type hints as converters: from the result of json.loads to the value that a hint describes.

Converters are built once per hint. They check their input and name the place of a mismatch, because the other side may
be any program. pydantic models are recognised by their methods, so pydantic is never imported here.
"""

from __future__ import annotations

import base64
import binascii
import collections.abc
import dataclasses
import datetime
import decimal
import enum
import json
import types
import typing
import uuid
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from holdfast.sdk.errors import BadPayload

Convert = Callable[[Any], Any]  # From the result of json.loads to the value; raises Misfit.


class Misfit(Exception):
    """A value does not fit its hint; the callers add to `path`."""

    def __init__(self, message: str) -> None:
        self.message = message
        self.path: list[str] = []

    def text(self) -> str:
        where = "".join(reversed(self.path))
        return f"at {where}: {self.message}" if where else self.message

    def at(self, part: str) -> Misfit:
        self.path.append(part)
        return self


class _Built(NamedTuple):
    convert: Convert | None  # None: unchanged
    schema: dict[str, Any]


_KINDS: Final = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "a list"}
_KINDS_FOUND: Final = {**_KINDS, dict: "an object", type(None): "null"}


def _misfit(expected: str, value: Any) -> Misfit:
    return Misfit(f"{expected} expected, {_KINDS_FOUND.get(type(value), type(value).__name__)} found")


def _exact(kind: type, expected: str) -> Convert:
    def convert(value: Any) -> Any:
        if type(value) is not kind:
            raise _misfit(expected, value)
        return value

    return convert


def _float(value: Any) -> float:
    if type(value) is not float and type(value) is not int:
        raise _misfit("a number", value)
    return float(value)


def _nothing(value: Any) -> None:
    if value is not None:
        raise _misfit("null", value)


def _parsed(kind: Callable[[str], Any], expected: str) -> Convert:
    def convert(value: Any) -> Any:
        if type(value) is not str:
            raise _misfit(expected, value)
        try:
            return kind(value)
        except (ValueError, ArithmeticError, binascii.Error):
            raise Misfit(f"{expected} expected, {value!r:.60} found") from None

    return convert


def _timedelta(value: Any) -> datetime.timedelta:
    try:
        return datetime.timedelta(seconds=_float(value))
    except OverflowError:
        raise Misfit("a duration in seconds expected, but the number is too large") from None


_SCALARS: Final[dict[Any, _Built]] = {
    Any: _Built(None, {}),
    object: _Built(None, {}),
    None: _Built(_nothing, {"type": "null"}),
    type(None): _Built(_nothing, {"type": "null"}),
    bool: _Built(_exact(bool, "a boolean"), {"type": "boolean"}),
    int: _Built(_exact(int, "an integer"), {"type": "integer"}),
    float: _Built(_float, {"type": "number"}),
    str: _Built(_exact(str, "a string"), {"type": "string"}),
    bytes: _Built(
        _parsed(lambda text: base64.b64decode(text, validate=True), "base64"),
        {"type": "string", "contentEncoding": "base64"},
    ),
    datetime.datetime: _Built(
        _parsed(datetime.datetime.fromisoformat, "a date and time"), {"type": "string", "format": "date-time"}
    ),
    datetime.date: _Built(_parsed(datetime.date.fromisoformat, "a date"), {"type": "string", "format": "date"}),
    datetime.time: _Built(_parsed(datetime.time.fromisoformat, "a time"), {"type": "string", "format": "time"}),
    datetime.timedelta: _Built(_timedelta, {"type": "number", "description": "seconds"}),
    uuid.UUID: _Built(_parsed(uuid.UUID, "a UUID"), {"type": "string", "format": "uuid"}),
    decimal.Decimal: _Built(_parsed(decimal.Decimal, "a decimal number"), {"type": "string", "format": "decimal"}),
}

_LISTS: Final = {
    list: list,
    set: set,
    frozenset: frozenset,
    collections.abc.Sequence: list,
    collections.abc.Iterable: list,
    collections.abc.Collection: list,
    collections.abc.MutableSequence: list,
    collections.abc.Set: set,
}
_MAPPINGS: Final = (dict, collections.abc.Mapping, collections.abc.MutableMapping)


class Builder:
    """Builds the converter and schema of a hint; named types go to `definitions`, so that they may be recursive."""

    def __init__(self, definitions: dict[str, Any]) -> None:
        self.definitions = definitions
        self.named: dict[tuple[Any, str], _Built] = {}  # by class and arguments

    def build(self, hint: Any) -> _Built:
        known = _scalar(hint)
        if known is not None:
            return known
        origin = typing.get_origin(hint)
        arguments = typing.get_args(hint)
        if origin in (typing.Annotated, typing.Required, typing.NotRequired, typing.Final):
            return self.build(arguments[0])
        if origin in (typing.Union, types.UnionType):
            return self._union(arguments)
        if origin is typing.Literal:
            return self._literal(arguments)
        kind = origin or hint
        if kind is tuple:
            return self._tuple(arguments)
        if kind in _LISTS:
            return self._list(_LISTS[kind], arguments)
        if kind in _MAPPINGS:
            return self._mapping(arguments)
        if isinstance(hint, typing.NewType):
            return self.build(hint.__supertype__)
        if isinstance(kind, type):
            return self._class(kind, arguments)
        return _SCALARS[Any]  # A type variable or an unresolved forward reference: any value is valid.

    def _union(self, arguments: tuple[Any, ...]) -> _Built:
        built = [self.build(argument) for argument in arguments]
        converters = [each.convert for each in built]
        schema = {"anyOf": [each.schema for each in built]}
        if None in converters:
            return _Built(None, {})

        def convert(value: Any) -> Any:
            misfits = []
            for each in converters:
                assert each is not None
                try:
                    return each(value)
                except Misfit as misfit:
                    misfits.append(misfit.text())
            raise Misfit("; or ".join(dict.fromkeys(misfits)))

        return _Built(convert, schema)

    def _literal(self, choices: tuple[Any, ...]) -> _Built:
        written = [choice.value if isinstance(choice, enum.Enum) else choice for choice in choices]

        def convert(value: Any) -> Any:
            for found, choice in zip(written, choices, strict=True):
                if type(found) is type(value) and found == value:
                    return choice
            raise Misfit(f"one of {', '.join(map(repr, written))} expected, {value!r:.60} found")

        return _Built(convert, {"enum": written})

    def _list(self, make: Callable[[Any], Any], arguments: tuple[Any, ...]) -> _Built:
        item = self.build(arguments[0]) if arguments else _SCALARS[Any]
        each = item.convert
        schema: dict[str, Any] = {"type": "array", **({"items": item.schema} if item.schema else {})}
        if make in (set, frozenset):
            schema["uniqueItems"] = True

        def convert(value: Any) -> Any:
            if type(value) is not list:
                raise _misfit("a list", value)
            if each is not None:
                value = [_within(each, found, f"[{offset}]") for offset, found in enumerate(value)]
            try:
                return value if make is list else make(value)
            except TypeError:
                raise Misfit("a list of simple values expected") from None

        return _Built(convert, schema)

    def _tuple(self, arguments: tuple[Any, ...]) -> _Built:
        if not arguments or (len(arguments) == 2 and arguments[1] is Ellipsis):
            inner = self._list(list, arguments[:1])
            assert inner.convert is not None
            as_list = inner.convert
            return _Built(lambda value: tuple(as_list(value)), inner.schema)
        built = [self.build(argument) for argument in arguments]
        size = len(built)

        def convert(value: Any) -> Any:
            if type(value) is not list or len(value) != size:
                raise _misfit(f"a list of {size}", value)
            pairs = enumerate(zip(built, value, strict=True))
            return tuple(
                found if each.convert is None else _within(each.convert, found, f"[{offset}]")
                for offset, (each, found) in pairs
            )

        schema = {
            "type": "array",
            "prefixItems": [each.schema for each in built],
            "minItems": size,
            "maxItems": size,
        }
        return _Built(convert, schema)

    def _mapping(self, arguments: tuple[Any, ...]) -> _Built:
        key, item = arguments if arguments else (Any, Any)
        built = self.build(item)
        keys = _key_converter(key)
        each = built.convert

        def convert(value: Any) -> Any:
            if type(value) is not dict:
                raise _misfit("an object", value)
            if keys is None and each is None:
                return value
            return {
                (name if keys is None else _within(keys, name, f".{name}")): (
                    found if each is None else _within(each, found, f".{name}")
                )
                for name, found in value.items()
            }

        schema = {"type": "object", **({"additionalProperties": built.schema} if built.schema else {})}
        return _Built(convert, schema)

    def _class(self, kind: Any, arguments: tuple[Any, ...] = ()) -> _Built:
        known = self.named.get((kind, str(arguments) if arguments else ""))
        if known is not None:
            return known
        if hasattr(kind, "model_validate") and hasattr(kind, "model_json_schema"):
            return self._model(kind)
        if issubclass(kind, enum.Enum):
            return self._enum(kind)
        if typing.is_typeddict(kind):
            required = frozenset(kind.__required_keys__)
            fields = {name: (hint, name not in required) for name, hint in _hints(kind, arguments).items()}
            return self._record(kind, fields, dict, arguments=arguments)
        if dataclasses.is_dataclass(kind):
            hints = _hints(kind, arguments)
            fields = {
                field.name: (
                    hints.get(field.name, Any),
                    field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING,
                )
                for field in dataclasses.fields(kind)
                if field.init
            }
            derived = frozenset(field.name for field in dataclasses.fields(kind) if not field.init)
            make = typing.cast(Callable[..., Any], kind)
            return self._record(kind, fields, make, arguments=arguments, derived=derived)
        if issubclass(kind, tuple) and hasattr(kind, "_fields"):
            hints = _hints(kind, arguments)
            inner = self._tuple(tuple(hints.get(name, Any) for name in kind._fields))
            assert inner.convert is not None
            as_tuple = inner.convert
            return _Built(lambda value: kind(*as_tuple(value)), inner.schema)
        raise BadPayload(
            f"{kind.__name__} cannot be read from JSON: use a dataclass, a TypedDict, a pydantic model or a Serde"
        )

    def _model(self, kind: Any) -> _Built:
        def convert(value: Any) -> Any:
            try:
                return kind.model_validate_json(json.dumps(value, ensure_ascii=False))
            except ValueError as error:
                raise Misfit(str(error)) from None

        schema = dict(kind.model_json_schema(ref_template="#/$defs/{model}"))
        self.definitions.update(schema.pop("$defs", {}))
        self.named[kind, ""] = built = _Built(convert, schema)
        return built

    def _enum(self, kind: type[enum.Enum]) -> _Built:
        def convert(value: Any) -> Any:
            try:
                return kind(value)
            except ValueError:
                choices = ", ".join(repr(member.value) for member in kind)
                raise Misfit(f"one of {choices} expected, {value!r:.60} found") from None

        return _Built(convert, {"enum": [member.value for member in kind]})

    def _record(
        self,
        kind: Any,
        fields: dict[str, tuple[Any, bool]],
        make: Callable[..., Any],
        *,
        arguments: tuple[Any, ...],
        derived: frozenset[str] = frozenset(),
    ) -> _Built:
        """A dataclass or a TypedDict: fields by name, each (hint, optional). `derived` fields are written with the others, and
        the class sets them itself."""
        name = "_".join([kind.__name__, *(getattr(each, "__name__", "") or "any" for each in arguments)])
        if name in self.definitions:
            name = f"{kind.__module__}.{kind.__qualname__}" + (f".{len(self.definitions)}" if arguments else "")
        schema: dict[str, Any] = {"type": "object", "title": kind.__name__, "properties": {}}
        self.definitions[name] = schema
        converters: dict[str, Convert | None] = {}
        missing_not_allowed = [field for field, (_, optional) in fields.items() if not optional]

        def convert(value: Any) -> Any:
            if type(value) is not dict:
                raise _misfit("an object", value)
            for field in missing_not_allowed:
                if field not in value:
                    raise Misfit(f"{field!r} is missing")
            found = {}
            for field, item in value.items():
                if field in derived:
                    continue
                if field not in converters:
                    raise Misfit(f"{field!r} is not a field of {kind.__name__}")
                each = converters[field]
                found[field] = item if each is None else _within(each, item, f".{field}")
            try:
                return make(**found)
            except (ValueError, TypeError) as error:  # A check in the user's __post_init__.
                raise Misfit(str(error)) from None

        self.named[kind, str(arguments) if arguments else ""] = built = _Built(convert, {"$ref": f"#/$defs/{name}"})
        for field, (hint, _) in fields.items():
            each = self.build(hint)
            converters[field] = each.convert
            schema["properties"][field] = each.schema
        if missing_not_allowed:
            schema["required"] = missing_not_allowed
        return built


def _scalar(hint: Any) -> _Built | None:
    try:
        return _SCALARS.get(hint)
    except TypeError:
        return None


def _within(convert: Convert, value: Any, part: str) -> Any:
    try:
        return convert(value)
    except Misfit as misfit:
        raise misfit.at(part) from None


def _key_converter(hint: Any) -> Convert | None:
    if hint in (str, Any):
        return None
    if hint is int:
        return _parsed(int, "an integer as key")
    raise BadPayload("the keys of a JSON object must be str or int")


def _hints(kind: Any, arguments: tuple[Any, ...]) -> dict[str, Any]:
    try:
        hints = typing.get_type_hints(kind, include_extras=True)
    except Exception as error:
        raise BadPayload(f"the type hints of {kind.__name__} cannot be resolved: {error}") from error
    given = dict(zip(getattr(kind, "__parameters__", ()), arguments, strict=False))
    return {name: _substituted(hint, given) for name, hint in hints.items()} if given else hints


def _substituted(hint: Any, given: dict[Any, Any]) -> Any:
    """The hint of a field of a generic class, with the arguments of the class in place of its type variables."""
    if isinstance(hint, typing.TypeVar):
        return given.get(hint, hint)
    parameters = getattr(hint, "__parameters__", ())
    return hint[tuple(given.get(each, each) for each in parameters)] if parameters else hint
