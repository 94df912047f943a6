"""JSON schemas from types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NewType, NotRequired, TypedDict

import pytest

from holdfast.cluster.schemas import Components, Keywords, Time, fields, one_of, schema_of

Colour = NewType("Colour", str)


class Leaf(TypedDict):
    """A leaf
    of a tree."""

    colour: Annotated[str, "in autumn", one_of(["red", "brown"])]


class Branch(Leaf):
    leaves: list[Leaf]
    branches: NotRequired[Annotated[list[Branch], "that grow from it"]]
    broken_at: Time | None
    best: Leaf | None


class Partial(TypedDict, total=False):
    name: str


@pytest.mark.parametrize(
    ("shape", "schema"),
    [
        (str, {"type": "string"}),
        (bool, {"type": "boolean"}),
        (float, {"type": "number"}),
        (Any, {}),
        (int | None, {"type": ["integer", "null"]}),
        (Annotated[str, one_of(["a"])] | None, {"type": ["string", "null"], "enum": ["a", None]}),
        (int | str, {"anyOf": [{"type": "integer"}, {"type": "string"}]}),
        (list[str] | None, {"type": ["array", "null"], "items": {"type": "string"}}),
        (int | str | None, {"anyOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}]}),
        (Sequence[int], {"type": "array", "items": {"type": "integer"}}),
        (Mapping[str, int], {"type": "object", "additionalProperties": {"type": "integer"}}),
        (Colour, {"type": "string"}),
        (dict[Colour, int], {"type": "object", "additionalProperties": {"type": "integer"}}),
        (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}),
        (Literal[True], {"type": "boolean", "enum": [True]}),
        (Time | None, {"type": ["string", "null"], "format": "date-time"}),
        (Annotated[int, "how many", Keywords(minimum=1)], {"type": "integer", "description": "how many", "minimum": 1}),
    ],
)
def test_types_have_schemas(shape: Any, schema: dict[str, Any]) -> None:
    assert schema_of(shape, Components()) == schema


def test_a_typed_dict_becomes_a_component_with_the_fields_that_it_inherits() -> None:
    components = Components()

    assert schema_of(Branch, components) == {"$ref": "#/components/schemas/Branch"}
    assert components["Leaf"] == {
        "type": "object",
        "description": "A leaf of a tree.",
        "properties": {"colour": {"type": "string", "description": "in autumn", "enum": ["red", "brown"]}},
        "required": ["colour"],
    }
    branch = components["Branch"]
    assert "description" not in branch, "that of what it inherits from is about something else"
    assert branch["required"] == ["colour", "leaves", "broken_at", "best"]
    assert branch["properties"]["branches"] == {
        "type": "array",
        "items": {"$ref": "#/components/schemas/Branch"},
        "description": "that grow from it",
    }
    assert branch["properties"]["best"] == {"anyOf": [{"$ref": "#/components/schemas/Leaf"}, {"type": "null"}]}


def test_a_closed_component_refuses_other_fields() -> None:
    components = Components()

    schema_of(Leaf, components, closed=True)

    assert components["Leaf"]["additionalProperties"] is False


def test_two_types_of_one_name_are_refused() -> None:
    def other() -> Any:
        class Leaf(TypedDict):
            name: str

        return Leaf

    schema_of(Leaf, Components())

    with pytest.raises(AssertionError, match="two types are called Leaf"):
        schema_of(other(), Components())


def test_fields_that_may_be_missing_are_marked_one_by_one() -> None:
    with pytest.raises(AssertionError, match="Partial: mark each field that may be missing with NotRequired"):
        fields(Partial)


def test_a_type_without_a_schema_is_refused() -> None:
    with pytest.raises(AssertionError, match="has no JSON schema"):
        schema_of(bytes, Components())
