"""Values to bytes and back, by type hints; and the schemas that describe them."""

import datetime as dt
import decimal
import enum
import json
import subprocess
import sys
import uuid
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, NotRequired, TypedDict, TypeVar

import pydantic
import pytest
import typing_extensions

from holdfast.sdk import RAW_JSON, BadPayload, Context, Serde, Service, TypeSerde
from holdfast.sdk.serde import serde_for
from tests.sdk.fake_node import FakeNode


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


# -- types that only pydantic can read


class Cat(pydantic.BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = 9


class Dog(pydantic.BaseModel):
    kind: Literal["dog"] = "dog"
    lives: int = 1


T = TypeVar("T")


@dataclass
class Box(Generic[T]):
    content: T
    others: list[T] = field(default_factory=list)


class Labelled(TypedDict, Generic[T]):
    label: str
    box: Box[T]


class Celsius:
    """A class of another library, which pydantic can read and we cannot."""

    def __init__(self, degrees: float) -> None:
        self.degrees = degrees

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Celsius) and other.degrees == self.degrees

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(
            cls, core_schema.float_schema(), serialization=core_schema.plain_serializer_function_ser_schema(_degrees)
        )


def _degrees(value: Celsius) -> float:
    return value.degrees


class Foreign:
    pass


class Film(typing_extensions.TypedDict):
    """pydantic refuses those of `typing` before Python 3.12."""

    title: str
    year: typing_extensions.NotRequired[int]


@dataclass
class Weather:
    at: dict[int, Celsius]
    seen: frozenset[str]


Pet = Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (Pet, Dog()),
        (list[Pet], [Cat(), Dog(lives=2)]),
        (Annotated[int, pydantic.Field(gt=3)], 4),
        (Film, {"title": "Alien"}),
        (Celsius | None, Celsius(3.5)),
        (Weather, Weather({1: Celsius(2.0)}, frozenset({"b", "a", "c"}))),
        (Box[Point], Box(Point(1), [Point(2)])),
        (tuple[Point, ...], (Point(1), Point(2))),
        (pydantic.AnyUrl, pydantic.AnyUrl("https://example.com/")),
    ],
)
def test_a_type_serde_takes_what_pydantic_takes(hint: Any, value: Any) -> None:
    serde: TypeSerde[Any] = TypeSerde(hint)

    payload = serde.dump(value)

    assert serde.load(payload) == value
    assert serde.dump(serde.load(payload)) == payload
    assert isinstance(serde, Serde)


def test_a_type_serde_says_what_does_not_fit() -> None:
    serde: TypeSerde[Any] = TypeSerde(list[Pet])

    with pytest.raises(BadPayload, match="kind"):
        serde.load(b'[{"kind":"fish"}]')
    with pytest.raises(BadPayload, match="list"):
        serde.dump(5)
    with pytest.raises(BadPayload, match="pydantic cannot read Foreign"):
        TypeSerde(Foreign)
    schema = serde.schema()
    assert schema is not None
    assert schema["items"]["discriminator"]["propertyName"] == "kind"


def test_hints_that_only_pydantic_can_read_are_left_to_it() -> None:
    assert isinstance(serde_for(Weather), TypeSerde)
    assert isinstance(serde_for(Celsius | None), TypeSerde)
    assert not isinstance(serde_for(Point), TypeSerde)
    service = Service("weather")

    @service.handler
    async def report(ctx: Context, weather: Weather) -> Celsius:
        return weather.at[1]

    assert isinstance(report.input, TypeSerde)
    assert report.output.dump(report.input.load(b'{"at":{"1":2.5},"seen":[]}').at[1]) == b"2.5"
    with pytest.raises(BadPayload, match="Foreign cannot be read from JSON"):
        serde_for(Foreign)


def test_without_pydantic_the_error_is_ours() -> None:
    code = (
        "import sys; sys.modules['pydantic'] = None\n"
        "from holdfast.sdk import TypeSerde\nfrom holdfast.sdk.serde import serde_for\n"
        "class Foreign: pass\n"
        "for make in (serde_for, TypeSerde):\n"
        "    try: make(Foreign)\n"
        "    except Exception as error: print(error)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert found == [
        "Foreign cannot be read from JSON: use a dataclass, a TypedDict, a pydantic model or a Serde",
        "TypeSerde needs pydantic: pip install pydantic",
    ]


@pytest.mark.parametrize("hint", [Box[Point], Labelled[Point], list[Box[Box[int]]], Box[int] | Box[str]])
def test_generic_classes_know_their_arguments(hint: Any) -> None:
    values: dict[Any, Any] = {
        Box[Point]: Box(Point(1), [Point(2)]),
        Labelled[Point]: {"label": "x", "box": Box(Point(1))},
        list[Box[Box[int]]]: [Box(Box(1))],
        Box[int] | Box[str]: Box("x"),
    }
    serde = serde_for(hint)

    assert serde.load(serde.dump(values[hint])) == values[hint]
    assert serde.schema()
    with pytest.raises(BadPayload, match="content"):
        serde_for(Box[Point]).load(b'{"content":5}')


def test_raw_json_takes_json_and_nothing_else() -> None:
    value = {"a": [1, 2.5, None, True, "x"]}

    assert RAW_JSON.load(RAW_JSON.dump(value)) == value
    for odd, what in ((Point(1), "Point"), ((1,), "tuple"), ({1: 2}, "a dict with a key of type int"), ({1}, "set")):
        with pytest.raises(BadPayload, match=what):
            RAW_JSON.dump([odd])


async def test_a_step_whose_result_comes_back_as_something_else_warns_with_file_and_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    service = Service("untyped")

    def untyped(value):  # type: ignore[no-untyped-def]
        return value

    def plain() -> Any:
        return {"a": [1, "x"], "b": None}

    def typed() -> Box[Point]:
        return Box(Point(1))

    @service.handler
    async def run(ctx: Context) -> None:
        assert await ctx.run("dataclass", untyped, Point(1)) == {"x": 1, "y": 0.5}
        assert await ctx.run("nested", untyped, {"all": [Dog()]}) == {"all": [{"kind": "dog", "lives": 1}]}
        assert await ctx.run("tuple", untyped, (1, 2)) == [1, 2]
        assert await ctx.run("plain", plain) == {"a": [1, "x"], "b": None}
        assert await ctx.run("typed", typed) == Box(Point(1))
        assert await ctx.run("raw", plain, serde=RAW_JSON) == {"a": [1, "x"], "b": None}

    node = FakeNode()
    node.connect([service])
    await node.call("untyped", "run")
    await node.call("untyped", "run")

    warnings = [record.getMessage() for record in caplog.records if "comes back as plain JSON" in record.getMessage()]
    assert [warning.split("ctx.run(")[1].split(",")[0] for warning in warnings] == [
        "'dataclass'",
        "'nested'",
        "'tuple'",
    ]
    assert all("test_serde.py:" in warning for warning in warnings)
    assert "returned a Point" in warnings[0]


@dataclass
class Square:
    side: int
    area: int = field(init=False)

    def __post_init__(self) -> None:
        self.area = self.side * self.side


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (Square, Square(3)),
        (list[Square | None], [Square(2), None]),
        (Literal[Color.RED, 1], Color.RED),
        (Literal[Color.RED, 1], 1),
        (dict[str, Literal[Color.BLUE] | None], {"a": Color.BLUE}),
    ],
)
def test_what_is_written_of_a_derived_field_or_a_literal_member_is_read_back(hint: Any, value: Any) -> None:
    serde = serde_for(hint)

    assert serde.load(serde.dump(value)) == value
    json.dumps(serde.schema())


def test_a_derived_field_is_set_by_its_class_and_never_by_the_sender() -> None:
    assert serde_for(Square).load(b'{"side":3,"area":100}') == Square(3)
    with pytest.raises(BadPayload, match="one of 'red' expected"):
        serde_for(Literal[Color.RED]).load(b'"blue"')
