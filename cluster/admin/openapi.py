"""The admin API as an OpenAPI document, made from the table of routes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from holdfast import __version__
from holdfast.cluster.admin.choices import ACTIONS, PARTITION_MAX, TAKEN_BY
from holdfast.cluster.admin.routes import ROUTES
from holdfast.cluster.http.routes import Route, document, number, paths_of
from holdfast.cluster.schemas import Components


@cache
def openapi() -> dict[str, Any]:
    """Made once, and not changed: it takes some milliseconds."""
    schemas = Components()
    paths = paths_of(
        (each for route in ROUTES for each in spelled_out(route)), schemas, {"partition": number(0, PARTITION_MAX)}
    )
    return document("Holdfast admin API", __version__, paths, schemas)


def spelled_out(route: Route) -> Iterator[Route]:
    """One operation for each action, with its own parameters. OpenAPI forbids two paths that differ in the names of their
    placeholders alone, such as /invocations/{id} and /invocations/{action}."""
    if "{action}" not in route.path:
        yield route
        return
    for action in ACTIONS:
        yield route._replace(
            path=route.path.replace("{action}", action),
            name=route.name.replace("act", action, 1),
            summary=route.summary.replace("Act on", action.capitalize()),
            parameters=tuple(each for each in route.parameters if action in TAKEN_BY.get(each.name, ACTIONS)),
        )
