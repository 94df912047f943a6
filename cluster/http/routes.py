"""What a route is: a method and a path, the role that it asks for, and what is said about it in OpenAPI.

Each door has one table of them (`ingress.routes`, `admin.routes`). Requests are matched with the table, so a path that is
not in it does not exist, and none exists without a role.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

PUBLIC: Final = ""  # The role of routes that need no token.
JSON: Final = "application/json"
NUMBER: Final = {"type": "integer"}
TRUTH: Final = {"type": "boolean"}
NO_SUCH: Final = (404, "there is no such object")


class Parameter(NamedTuple):
    name: str
    description: str
    schema: Mapping[str, Any] = {"type": "string"}


class Route(NamedTuple):
    method: str
    path: str
    name: str  # of the method that serves it
    summary: str
    role: str  # that the client's token must include
    parameters: tuple[Parameter, ...] = ()
    body: Mapping[str, Any] | None = None
    answers: tuple[tuple[int, str], ...] = ((200, "the answer"),)
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


def document(title: str, version: str, paths: Mapping[str, Any], schemas: Mapping[str, Any]) -> dict[str, Any]:
    """An OpenAPI document with our error and our tokens."""
    error = {
        "type": "object",
        "required": ["code", "message", "source"],
        "properties": {
            "code": NUMBER,
            "message": {"type": "string"},
            "source": {"type": "string"},
            "hint": {"type": ["string", "null"]},
            "details": {"type": "array", "items": {"type": "string"}},
        },
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": dict(paths),
        "components": {
            "schemas": {"Error": error, **schemas},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "responses": {
                "Error": {
                    "description": "what is wrong, and what to do about it",
                    "content": {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}},
                }
            },
        },
    }


def operation(route: Route, path_schemas: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, Any]:
    """A route in OpenAPI. `path_schemas`: of placeholders that are more than any text."""
    schemas = path_schemas or {}
    in_path = [part.strip("{}") for part in route.path.split("/") if part.startswith("{")]
    found: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": dict(schemas.get(name, {"type": "string"}))}
            for name in in_path
        ]
        + [
            {"name": each.name, "in": "query", "description": each.description, "schema": dict(each.schema)}
            for each in route.parameters
        ],
        "responses": {str(status): {"description": text} for status, text in route.answers}
        | {"default": {"$ref": "#/components/responses/Error"}},
    }
    if route.role != PUBLIC:
        found["x-holdfast-role"] = route.role
        found["security"] = [{"token": []}]
    if route.body is not None:
        found["requestBody"] = {"required": True, "content": {JSON: {"schema": route.body}}}
    return found


def paths_of(
    routes: Iterable[Route], path_schemas: Mapping[str, Mapping[str, Any]] | None = None
) -> dict[str, dict[str, Any]]:
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = operation(route, path_schemas)
    return paths
