"""The admin API: the queries and changes of operators, the command line and the console.

One table (`ROUTES`) defines it: requests are matched with it, and /openapi.json is made from it. Each part answers the
routes of one subject, and has a method `on_<name>` for each of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeAlias

from holdfast.cluster.admin.audit import name_act
from holdfast.cluster.admin.openapi import openapi
from holdfast.cluster.admin.parameters import AdminRequest, json_answer
from holdfast.cluster.admin.routes import ROUTES
from holdfast.cluster.errors import NotFound, Unavailable, WrongMethod
from holdfast.cluster.http.exchange import Answer, Request, split_target
from holdfast.cluster.http.routes import PUBLIC, match
from holdfast.cluster.http.shapes import Health

_Method: TypeAlias = Callable[[AdminRequest], Awaitable[Answer]]
_PREFIX: Final = "on_"


class Admin:
    """Passes each request to the part that answers it."""

    def __init__(self, parts: Sequence[object], *, removed: Callable[[], str]) -> None:
        """`removed`: why the cluster has removed this node; empty: it has not."""
        self._removed = removed
        self._methods: dict[str, _Method] = {}
        for part in (self, *parts):
            for name in dir(part):
                if name.startswith(_PREFIX):
                    assert name not in self._methods, f"two parts have a method {name}"
                    self._methods[name] = getattr(part, name)
        assert {*self._methods} == {_PREFIX + route.name for route in ROUTES}, "one method per route"

    def stop(self, why: str) -> None:
        """Nothing here waits for long."""

    def name_act(self, request: Request) -> None:
        segments, query = split_target(request.target)
        for route in ROUTES:
            if route.method == request.method and (places := match(route, segments)) is not None:
                name_act(request, route, places, query)
                return

    async def handle(self, request: Request) -> Answer:
        segments, query = split_target(request.target)
        path = "/" + "/".join(segments)
        if (removed := self._removed()) and path != "/metrics":
            # This node's knowledge of the cluster is outdated, and its proposals are refused. Metrics are its own.
            raise Unavailable(removed)
        allowed = []
        for route in ROUTES:
            places = match(route, segments)
            if places is None:
                continue
            if route.method == request.method:
                name_act(request, route, places, query)
                if route.role != PUBLIC:
                    request.principal.check(route.role)
                return await self._methods[_PREFIX + route.name](AdminRequest(request, places, query))
            allowed.append(route.method)
        if allowed:
            raise WrongMethod(", ".join(sorted(allowed)), f"{request.method} is not supported for this path")
        raise NotFound(f"there is nothing at {path!r:.200}", "GET /openapi.json lists what there is")

    async def on_openapi(self, request: AdminRequest) -> Answer:
        return json_answer(200, openapi())


class NodeAdmin:
    """The node itself: its health and its metrics."""

    def __init__(
        self,
        *,
        unhealthy: Callable[[], str | None],
        warnings: Callable[[], Sequence[str]],
        metrics: Callable[[], Awaitable[tuple[bytes, str]]],
    ) -> None:
        self._unhealthy = unhealthy
        self._warnings = warnings
        self._metrics = metrics

    async def on_health(self, request: AdminRequest) -> Answer:
        problem = self._unhealthy()
        if problem is not None:
            raise Unavailable(problem)
        warnings = self._warnings()
        shown: Health = {"status": "ok"}
        if warnings:
            shown["warnings"] = [*warnings]
        return json_answer(200, shown)

    async def on_metrics(self, request: AdminRequest) -> Answer:
        body, content_type = await self._metrics()
        return Answer(200, body, content_type)
