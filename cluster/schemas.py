"""JSON schemas of the bodies of requests and answers, made from the types that the code builds them with.

A body is a `TypedDict`, declared beside the function that builds it or in `admin.shapes`. So the type checker compares the
code with it, and OpenAPI documents, generated clients and the tests' check of every answer are made from the same type.

`Annotated` adds what a type does not say: a text is a description, and `Keywords` has whatever else JSON Schema knows.

    class Page(TypedDict):
        \"\"\"The description of the component `Page`.\"\"\"

        rows: list[Row]
        cursor: Annotated[str | None, "send it to get the next page; null: there is none"]
        order: NotRequired[Annotated[str, one_of(ORDERS)]]
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NewType,
    NotRequired,
    TypeAlias,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

Schema: TypeAlias = dict[str, Any]
Components: TypeAlias = dict[str, Schema]

REFERENCE: Final = "#/components/schemas/"
_SIMPLE: Final[Mapping[Any, str]] = {str: "string", bool: "boolean", int: "integer", float: "number", NoneType: "null"}


class Keywords:
    """Keywords of JSON Schema, for `Annotated`. It needs notes that can be hashed, which a dict cannot."""

    def __init__(self, **keywords: Any) -> None:
        self.keywords = keywords


#: A time in UTC, as `admin.views.show_time` writes it.
Time: TypeAlias = Annotated[str, Keywords(format="date-time")]
#: As `cluster.durations` reads it.
Duration: TypeAlias = Annotated[str, Keywords(minLength=1)]
#: A JSON Schema of a handler's input or output, from its manifest.
JsonSchema: TypeAlias = Annotated[Any, "a JSON Schema; null if the handler declares none"]


def one_of(words: Iterable[str]) -> Keywords:
    """The only values of a text."""
    return Keywords(enum=list(words))


def schema_of(shape: Any, components: Components, *, closed: bool = False) -> Schema:
    """The schema of a type. Each `TypedDict` in it becomes a component, and is referred to. `closed`: others fields than those
    of the type itself are refused."""
    if is_typeddict(shape):
        return _component(shape, components, closed=closed)
    origin, arguments = get_origin(shape), get_args(shape)
    if origin is Annotated:
        return _annotated(arguments[0], arguments[1:], components)
    if origin in (Union, UnionType):
        return _union(arguments, components)
    if origin is Literal:
        return {"type": _SIMPLE[type(arguments[0])], "enum": list(arguments)}
    if origin in (list, Sequence):
        return {"type": "array", "items": schema_of(arguments[0], components)}
    if origin in (dict, Mapping):
        assert schema_of(arguments[0], components) == {"type": "string"}, f"names in JSON are texts: {shape}"
        return {"type": "object", "additionalProperties": schema_of(arguments[1], components)}
    if isinstance(shape, NewType):
        return schema_of(shape.__supertype__, components)
    if shape is Any:
        return {}
    assert shape in _SIMPLE, f"{shape} has no JSON schema: use a TypedDict, or teach this function the type"
    return {"type": _SIMPLE[shape]}


def fields(shape: Any) -> dict[str, Any]:
    """The types of the fields of a `TypedDict`; those that may be missing are `NotRequired`."""
    assert is_typeddict(shape), f"{shape} is not a TypedDict"
    assert shape.__total__, f"{shape.__name__}: mark each field that may be missing with NotRequired"
    return get_type_hints(shape, include_extras=True)


def _component(shape: Any, components: Components, *, closed: bool) -> Schema:
    name = shape.__name__
    assert _shapes.setdefault(name, shape) is shape, (
        f"two types are called {name}: each component has a name of its own"
    )
    if name not in components:
        components[name] = found = Schema()  # First, because it may refer to itself.
        found["type"] = "object"
        if shape.__doc__:
            found["description"] = " ".join(inspect.cleandoc(shape.__doc__).split())
        optional = set()
        found["properties"] = {}
        for field, hint in fields(shape).items():
            if get_origin(hint) is NotRequired:
                optional.add(field)
                hint = get_args(hint)[0]
            found["properties"][field] = schema_of(hint, components)
        if required := [field for field in found["properties"] if field not in optional]:
            found["required"] = required
        if closed:
            found["additionalProperties"] = False
    return {"$ref": REFERENCE + name}


#: The type behind each name: documents must not say different things under one name.
_shapes: Final[dict[str, Any]] = {}


def _annotated(base: Any, notes: Sequence[Any], components: Components) -> Schema:
    found = schema_of(base, components)
    for note in notes:
        if isinstance(note, str):
            found["description"] = note
        else:
            found |= note.keywords
    return found


def _union(members: Sequence[Any], components: Components) -> Schema:
    schemas = [schema_of(member, components) for member in members if member is not NoneType]
    if NoneType not in members:
        return {"anyOf": schemas}
    if len(schemas) > 1 or not isinstance(schemas[0].get("type"), str):
        return {"anyOf": [*schemas, {"type": "null"}]}
    found = schemas[0] | {"type": [schemas[0]["type"], "null"]}
    if "enum" in found:
        found["enum"] = [*found["enum"], None]
    return found
