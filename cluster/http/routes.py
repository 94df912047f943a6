"""What a route is: a method and a path, the role that it asks for, and what is said about it in OpenAPI.

Each door has one table of them (`ingress.routes`, `admin.routes`). Requests are matched with the table, so a path that is
not in it does not exist, and none exists without a role. Neither does one without the shapes of its bodies: a `TypedDict` for
JSON (`cluster.schemas`), or else `Raw` or `EventStream`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Final, NamedTuple, TypeAlias

from holdfast.cluster.errors import Error
from holdfast.cluster.schemas import Components, schema_of

PUBLIC: Final = ""  # The role of routes that need no token.
JSON: Final = "application/json"
NUMBER: Final = {"type": "integer"}
TRUTH: Final = {"type": "boolean"}
TEXT: Final = {"type": "string", "minLength": 1}
NO_SUCH: Final = (404, "there is no such object")


class Parameter(NamedTuple):
    name: str
    description: str
    schema: Mapping[str, Any] = TEXT


def number(low: int, high: int, default: int | None = None) -> dict[str, Any]:
    """The schema of a whole number within these bounds."""
    bounds = {**NUMBER, "minimum": low, "maximum": high}
    return bounds if default is None else {**bounds, "default": default}


class Raw(NamedTuple):
    """A body that is passed on as it is."""

    content_type: str
    description: str = ""
    schema: Mapping[str, Any] = {}


class EventStream(NamedTuple):
    """Server-sent events, with the shape of the data of each kind of event."""

    events: Mapping[str, Any]


#: A `TypedDict`, a `Raw` or an `EventStream`, or a tuple of them, if the body may be any of these.
Shape: TypeAlias = Any
#: A status, what it means, and the shape of the body. Errors (400 and above) have the shape `Error`, and 304 has no body.
Reply: TypeAlias = tuple[int, str] | tuple[int, str, Shape]


class Route(NamedTuple):
    method: str
    path: str
    name: str  # of the method that serves it
    summary: str
    role: str  # that the client's token must include
    parameters: tuple[Parameter, ...] = ()
    body: Shape = None
    answers: tuple[Reply, ...] = ()
    reads: bool = False  # although its method is not GET
    service: str = ""  # The placeholder of the service that a token for some services must name; empty: there is none.

    @property
    def acts(self) -> bool:
        """Whether it changes something: then each request to it is in the audit trail."""
        return self.method != "GET" and not self.reads


def match(route: Route, segments: Sequence[str]) -> dict[str, str] | None:
    """The values of the placeholders of its path; None: the path does not match."""
    wanted = _segments(route.path)
    if len(wanted) != len(segments):
        return None
    places = {}
    for expected, found in zip(wanted, segments, strict=True):
        if expected.startswith("{"):
            if not found:
                return None
            places[expected.strip("{}")] = found
        elif expected != found:
            return None
    return places


@cache
def _segments(path: str) -> list[str]:
    return path[1:].split("/")


def shapes_of(shape: Shape) -> tuple[Any, ...]:
    return shape if isinstance(shape, tuple) and not isinstance(shape, Raw | EventStream) else (shape,)


def shape_of(reply: Reply) -> Shape:
    """None: the answer has no body."""
    if len(reply) == 3:
        return reply[2]
    return Error if reply[0] >= 400 else None


def document(title: str, version: str, paths: Mapping[str, Any], schemas: Components) -> dict[str, Any]:
    """An OpenAPI document with our error and our tokens."""
    error = schema_of(Error, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": dict(paths),
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "responses": {
                "Error": {
                    "description": "what is wrong, and what to do about it",
                    "content": {JSON: {"schema": error}},
                }
            },
        },
    }


def operation(
    route: Route, schemas: Components, path_schemas: Mapping[str, Mapping[str, Any]] | None = None
) -> dict[str, Any]:
    """A route in OpenAPI; the components that it refers to are added to `schemas`. `path_schemas`: of placeholders that are
    more than any text."""
    in_path = [part.strip("{}") for part in route.path.split("/") if part.startswith("{")]
    of_path = path_schemas or {}
    found: dict[str, Any] = {
        "operationId": route.name if route.method != "HEAD" else f"{route.name}_head",
        "summary": route.summary,
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": dict(of_path.get(name, {"type": "string"}))}
            for name in in_path
        ]
        + [
            {"name": each.name, "in": "query", "description": each.description, "schema": dict(each.schema)}
            for each in route.parameters
        ],
        "responses": {str(reply[0]): _response(reply, schemas) for reply in route.answers}
        | {"default": {"$ref": "#/components/responses/Error"}},
    }
    if route.role != PUBLIC:
        found["x-holdfast-role"] = route.role
        found["security"] = [{"token": []}]
    if route.body is not None:
        # A body that is passed on may be empty.
        required = not any(isinstance(shape, Raw) for shape in shapes_of(route.body))
        found["requestBody"] = {"required": required, "content": _content(route.body, schemas, closed=True)}
    return found


def _response(reply: Reply, schemas: Components) -> dict[str, Any]:
    found: dict[str, Any] = {"description": reply[1]}
    if (shape := shape_of(reply)) is not None:
        found["content"] = _content(shape, schemas)
    return found


def _content(shape: Shape, schemas: Components, *, closed: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = {}
    typed: list[Any] = []
    for each in shapes_of(shape):
        match each:
            case Raw():
                found[each.content_type] = {"schema": dict(each.schema)}
                if each.description:
                    found[each.content_type]["schema"]["description"] = each.description
            case EventStream():
                kinds = ", ".join(f"`{kind}`" for kind in each.events)
                found["text/event-stream"] = {
                    "schema": {
                        "type": "string",
                        "description": f"server-sent events ({kinds}); x-holdfast-events has the schema of the data of each",
                    },
                    "x-holdfast-events": {kind: schema_of(data, schemas) for kind, data in each.events.items()},
                }
            case _:
                typed.append(schema_of(each, schemas, closed=closed))
    if typed:
        found[JSON] = {"schema": typed[0] if len(typed) == 1 else {"anyOf": typed}}
    return found


def paths_of(
    routes: Iterable[Route], schemas: Components, path_schemas: Mapping[str, Mapping[str, Any]] | None = None
) -> dict[str, dict[str, Any]]:
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = operation(route, schemas, path_schemas)
    return paths
