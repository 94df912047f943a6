"""Values to bytes and back, by type hints; and the schemas that describe them."""

import datetime as dt
import decimal
import enum
import json
import uuid
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, NewType, NotRequired, TypedDict

import pydantic
import pytest

from holdfast.sdk import BadPayload, Context, Serde, Service
from holdfast.sdk.serde import serde_for


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Point:
    x: int
    y: float = 0.5


@dataclass
class Tree:
    value: int
    children: list["Tree"] = field(default_factory=list)


class Movie(TypedDict):
    title: str
    year: NotRequired[int]


class Pair(NamedTuple):
    left: int
    right: str


class Model(pydantic.BaseModel):
    name: str
    tags: list[str] = []
    at: dt.datetime | None = None


UserId = NewType("UserId", int)


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (Any, {"a": [1, 2.5, None, True, "x"]}),
        (int, 5),
        (float, 1.5),
        (str, "ä\u0000"),
        (bool, True),
        (bytes, b"\x00\xff"),
        (None, None),
        (list[int], [1, 2]),
        (tuple[int, str], (1, "a")),
        (tuple[int, ...], (1, 2, 3)),
        (set[int], {1, 2}),
        (frozenset[str], frozenset({"a"})),
        (dict[str, Point], {"a": Point(1, 2.0)}),
        (dict[int, str], {1: "a"}),
        (Point | None, None),
        (Point | str, "x"),
        (Point | str, Point(1)),
        (Literal["a", 1], 1),
        (Color, Color.BLUE),
        (Tree, Tree(1, [Tree(2), Tree(3, [Tree(4)])])),
        (Movie, {"title": "Alien"}),
        (Pair, Pair(1, "x")),
        (Model, Model(name="x", tags=["a"], at=dt.datetime(2026, 1, 2, 3, 4, 5))),
        (list[Model], [Model(name="x")]),
        (UserId, 7),
        (Annotated[int, "positive"], 7),
        (dt.datetime, dt.datetime(2026, 1, 2, 3, 4, tzinfo=dt.UTC)),
        (dt.date, dt.date(2026, 1, 2)),
        (dt.timedelta, dt.timedelta(seconds=1.5)),
        (uuid.UUID, uuid.UUID(int=5)),
        (decimal.Decimal, decimal.Decimal("1.10")),
        (list[bytes], [b"\xff"]),
    ],
    ids=str,
)
def test_a_value_survives_dump_and_load(hint: Any, value: Any) -> None:
    serde = serde_for(hint)

    found = serde.load(serde.dump(value))

    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("hint", "payload", "message"),
    [
        (int, b'"5"', "an integer expected, a string found"),
        (int, b"true", "an integer expected, a boolean found"),
        (str, b"5", "a string expected"),
        (list[int], b'[1,"x"]', r"at \[1\]: an integer expected"),
        (Point, b'{"y":1}', "'x' is missing"),
        (Point, b'{"x":1,"z":1}', "'z' is not a field of Point"),
        (Tree, b'{"value":1,"children":[{"value":"x"}]}', r"at .children\[0\].value: an integer"),
        (Color, b'"green"', "one of 'red', 'blue' expected"),
        (Literal["a"], b'"b"', "one of 'a' expected"),
        (dt.date, b'"tomorrow"', "a date expected"),
        (Model, b"{}", "name"),
        (tuple[int, str], b"[1]", "a list of 2 expected"),
        (Movie, b"{}", "'title' is missing"),
        (Any, b"{", "not valid JSON"),
        (Any, b"\xff", "not valid JSON"),
        (int, b"", "an integer expected, null found"),
        (int | str, b"[]", "an integer expected, a list found; or a string expected"),
    ],
    ids=str,
)
def test_a_mismatch_names_the_place_and_the_reason(hint: Any, payload: bytes, message: str) -> None:
    with pytest.raises(BadPayload, match=message):
        serde_for(hint).load(payload)


@pytest.mark.parametrize("value", [object(), float("nan"), {1: object()}, lambda: 1], ids=str)
def test_unwritable_values_are_refused(value: Any) -> None:
    with pytest.raises(BadPayload):
        serde_for(Any).dump(value)


def test_a_value_that_cannot_be_written_is_named_by_its_type() -> None:
    with pytest.raises(BadPayload, match="a value of type object cannot be written as JSON"):
        serde_for(Any).dump([object()])


def test_schemas_describe_the_hints() -> None:
    assert serde_for(Any).schema() is None
    assert serde_for(bytes).schema() is None
    assert serde_for(int | None).schema() == {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    tree = serde_for(Tree).schema()
    assert tree is not None
    assert tree["$ref"] == "#/$defs/Tree"
    assert tree["$defs"]["Tree"]["properties"]["children"] == {"type": "array", "items": {"$ref": "#/$defs/Tree"}}
    assert tree["$defs"]["Tree"]["required"] == ["value"]
    models = serde_for(list[Model]).schema()
    assert models is not None
    assert models["items"]["properties"]["name"]["type"] == "string"
    for hint in (Point, Tree, Movie, Pair, Model, Color, dict[str, Point], tuple[int, ...], set[int]):
        json.dumps(serde_for(hint).schema())


def test_a_serde_of_the_user_is_used_for_input_and_output() -> None:
    class Upper:
        content_type = "text/plain"

        def dump(self, value: str) -> bytes:
            return value.upper().encode()

        def load(self, payload: bytes) -> str:
            return payload.decode().lower()

        def schema(self) -> None:
            return None

    upper = Upper()
    assert isinstance(upper, Serde)
    service = Service("texts")

    @service.handler(input=upper, output=upper)
    async def shout(ctx: Context, text: str) -> str:
        return text

    manifest = shout.manifest()
    assert manifest["input"] == {"content_type": "text/plain", "schema": None}
    assert shout.output.dump(shout.input.load(b"ABC")) == b"ABC"
