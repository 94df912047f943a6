"""The admin API: what operators, the command line and the console ask, and what they change.

One table (`ROUTES`) says what there is; the routes of the server and /openapi.json are both made from it. Nothing here is
on the way of an invocation, so this is a plain aiohttp application.
"""

from __future__ import annotations

import asyncio
import html
import json
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from aiohttp import web

from holdfast import __version__
from holdfast.cluster.backup import Backups
from holdfast.cluster.config import Config
from holdfast.cluster.doors import Door
from holdfast.cluster.durations import parse_duration_ms
from holdfast.cluster.errors import (
    BadRequest,
    Circumstance,
    Conflict,
    Internal,
    NotFound,
    TooLarge,
    Unavailable,
    UnknownInvocation,
    UnsupportedEncoding,
    WrongMethod,
    check,
    circumstance,
    error_body,
)
from holdfast.cluster.ingress import Router
from holdfast.cluster.operations import Operations
from holdfast.cluster.reader import Reader
from holdfast.cluster.registry import METADATA_BYTES_MAX, Registry
from holdfast.cluster.rpc import Refused, Unanswered
from holdfast.cluster.shown import (
    read_payload,
    show_deployment,
    show_description,
    show_handler,
    show_invocation,
    show_keyed,
    show_service,
    show_step,
)
from holdfast.cluster.snapshots import Snapshots
from holdfast.sdk.protocol import (
    ID_BYTES,
    KEY_BYTES_MAX,
    NAME_BYTES_MAX,
    BadId,
    InvocationId,
    cut_text,
    format_id,
    parse_id,
    partition_key,
)
from holdfast.snapshots.errors import SnapshotError
from holdfast.statemachine.commands import Cancel, Command, DecideStep, Kill, Pause, Purge, Restart, Resume, SetState
from holdfast.statemachine.effects import STATUS_NAMES, Result
from holdfast.statemachine.queries import Filter
from holdfast.statemachine.records import Invocation

logger = logging.getLogger(__name__)

ANSWER_S: Final = 2.0  # How long clients of a node that stops get to take their last answers.
BODY_BYTES_MAX: Final = 4 * 1024 * 1024
PAGE: Final = 100
PAGE_MAX: Final = 1000
BULK: Final = 1000
BULK_MAX: Final = 100_000
AT_A_TIME: Final = 256  # of a bulk operation under way
STEPS_PAGE: Final = 1000
ACTIONS: Final = ("cancel", "kill", "pause", "resume", "restart", "purge")

Answer: TypeAlias = tuple[int, Any]

_STATUS_BY_NAME: Final = {name: status for status, name in STATUS_NAMES.items()}


class Parameter(NamedTuple):
    name: str
    description: str
    schema: Mapping[str, Any] = {"type": "string"}


class Route(NamedTuple):
    method: str
    path: str
    name: str  # of the method of Admin that answers
    summary: str
    parameters: tuple[Parameter, ...] = ()
    body: Mapping[str, Any] | None = None
    answers: tuple[tuple[int, str], ...] = ((200, "as asked"),)


_TRUTH: Final = {"type": "boolean"}
_NUMBER: Final = {"type": "integer"}
_FILTERS: Final = (
    Parameter(
        "status", f"one or more of {', '.join(_STATUS_BY_NAME)}, separated by commas; `active`: all but completed"
    ),
    Parameter("service", "of this service"),
    Parameter("handler", "of this handler"),
    Parameter("key", "of this key of a virtual object or workflow"),
    Parameter("deployment", "pinned to this deployment"),
    Parameter("older_than", "begun longer ago than this duration: 10m, 2h, 1d, PT10M"),
)
_RESTART: Final = (
    Parameter("step", "restart: keep the steps before this one; 0 keeps nothing but the input", _NUMBER),
    Parameter("to", "resume, restart: go on at this deployment; `newest` is where new invocations go"),
)
_NOT_FOUND: Final = (404, "there is none")

ROUTES: Final = (
    Route("GET", "/", "page", "A page for people: what is here", answers=((200, "HTML"),)),
    Route(
        "GET", "/health", "health", "Whether this node can take requests", answers=((200, "it can"), (503, "why not"))
    ),
    Route(
        "POST",
        "/deployments",
        "register",
        "Register the endpoint at a uri: it is asked what it offers",
        body={
            "type": "object",
            "required": ["uri"],
            "properties": {
                "uri": {"type": "string", "description": "where nodes reach the endpoint"},
                "force": {"type": "boolean", "description": "even if callers break or a manifest changes in place"},
                "metadata": {"type": "object", "additionalProperties": {"type": "string"}},
            },
        },
        answers=(
            (201, "registered"),
            (200, "it was registered with this manifest before"),
            (400, "the manifest is wrong, and where"),
            (409, "it would break callers or change a deployment: `details` says how"),
            (502, "the endpoint cannot be asked"),
        ),
    ),
    Route("GET", "/deployments", "deployments", "All deployments, with the invocations in flight on each"),
    Route(
        "GET", "/deployments/{id}", "deployment", "One deployment with its handlers", answers=((200, "it"), _NOT_FOUND)
    ),
    Route(
        "DELETE",
        "/deployments/{id}",
        "remove",
        "Remove a deployment that is drained, or any by force",
        (Parameter("force", "even if invocations run on it", _TRUTH),),
        answers=((200, "removed"), _NOT_FOUND, (409, "it is in use: how")),
    ),
    Route("GET", "/services", "services", "All services, as their newest deployment offers them"),
    Route("GET", "/services/{name}", "service", "One service with its handlers", answers=((200, "it"), _NOT_FOUND)),
    Route("GET", "/services/{name}/{key}/state", "state", "The state of one key", answers=((200, "it"), _NOT_FOUND)),
    Route(
        "PUT",
        "/services/{name}/{key}/state",
        "set_state",
        "Edit the state of a key that nobody is writing to",
        body={
            "type": "object",
            "properties": {
                "values": {"type": "object", "description": 'by name: any JSON value, or {"base64": "..."} for bytes'},
                "remove": {"type": "array", "items": {"type": "string"}},
                "replace": {"type": "boolean", "description": "remove whatever is not in `values`"},
            },
        },
        answers=((200, "the state as it is now"), _NOT_FOUND, (409, "an invocation holds the key")),
    ),
    Route(
        "GET",
        "/invocations",
        "invocations",
        "Invocations that match every filter, in pages; newest first within a page",
        (
            *_FILTERS,
            Parameter("limit", f"of the page, up to {PAGE_MAX}; {PAGE} if not given", _NUMBER),
            Parameter("cursor", "that came with the page before"),
        ),
    ),
    Route(
        "GET",
        "/invocations/{id}",
        "invocation",
        "One invocation: its record, why it is not running, its outcome",
        answers=((200, "it"), _NOT_FOUND),
    ),
    Route(
        "GET",
        "/invocations/{id}/journal",
        "journal",
        "Its steps, decoded",
        (Parameter("start", "the first step", _NUMBER), Parameter("limit", f"up to {STEPS_PAGE}", _NUMBER)),
        answers=((200, "the steps"), _NOT_FOUND),
    ),
    Route(
        "POST",
        "/invocations/{id}/steps/{step}/decide",
        "decide",
        "Say what became of a run that is in doubt",
        body={
            "type": "object",
            "properties": {
                "value": {"description": "it succeeded with this result"},
                "failure": {"type": "object", "properties": {"message": {"type": "string"}, "code": _NUMBER}},
                "again": {"type": "boolean", "description": "it did not happen: run it again"},
            },
        },
        answers=((200, "decided"), _NOT_FOUND, (409, "it is not in doubt")),
    ),
    Route(
        "POST",
        "/invocations/{id}/{action}",
        "act",
        f"{', '.join(ACTIONS)}",
        _RESTART,
        answers=((200, "done, or already so"), _NOT_FOUND, (409, "its state does not allow it")),
    ),
    Route(
        "POST",
        "/invocations/{action}",
        "act_on_many",
        f"{', '.join(ACTIONS)}: all invocations that match; at least one filter is needed",
        (
            *_FILTERS,
            *_RESTART,
            Parameter("limit", f"at most this many, up to {BULK_MAX}; {BULK} if not given", _NUMBER),
        ),
        answers=((200, "how many"), (400, "no filter")),
    ),
    Route(
        "GET",
        "/cluster",
        "cluster",
        "Nodes, partitions, leaders, lags, snapshots; `linearizable` says what of it includes every change acknowledged before",
    ),
    Route(
        "POST",
        "/cluster/nodes",
        "add_node",
        "Let a node join; it is given replicas when it is there",
        body={
            "type": "object",
            "required": ["name", "address"],
            "properties": {
                "name": {"type": "string"},
                "address": {"type": "string", "description": "host:port of its peer link"},
                "zone": {"type": "string"},
            },
        },
        answers=((200, "it may join"), (409, "the name was removed before")),
    ),
    Route(
        "POST",
        "/cluster/nodes/{name}/drain",
        "drain",
        "Lead nothing on a node any more",
        (Parameter("move", "true: and move its replicas to other nodes", _TRUTH),),
        answers=((200, "drained, or under way: `leads` says"), _NOT_FOUND),
    ),
    Route(
        "POST",
        "/cluster/nodes/{name}/undrain",
        "undrain",
        "Take a drained node back",
        answers=((200, "done"), _NOT_FOUND),
    ),
    Route(
        "POST",
        "/cluster/nodes/{name}/remove",
        "remove_node",
        "Remove a node for ever; what it holds is made again on others",
        (Parameter("force", "true: even if too few nodes are left for all replicas", _TRUTH),),
        answers=((200, "under way"), _NOT_FOUND, (409, "too few would be left")),
    ),
    Route(
        "POST",
        "/cluster/partitions/{partition}/transfer",
        "transfer",
        "Have another replica lead a partition",
        (Parameter("to", "this node; any other if not given"),),
        answers=((200, "who leads it now"), _NOT_FOUND, (409, "why it stays")),
    ),
    Route(
        "POST",
        "/cluster/partitions/{partition}/snapshot",
        "create_snapshot",
        "Cut a snapshot of a partition now, on the node that leads it",
        answers=((201, "it"), _NOT_FOUND, (503, "it cannot be cut now: why")),
    ),
    Route(
        "POST",
        "/cluster/backups",
        "begin_backup",
        "Begin a backup of the whole cluster, made by this node",
        body={
            "type": "object",
            "required": ["to"],
            "properties": {
                "to": {
                    "type": "string",
                    "description": "s3://bucket/prefix?..., or a directory that all nodes share, as the nodes see it",
                },
            },
        },
        answers=((202, "begun: ask for its id"), (400, "not a place"), (409, "this node is making one already")),
    ),
    Route("GET", "/cluster/backups", "backups", "Backups that this node makes, or made since it started"),
    Route(
        "GET",
        "/cluster/backups/{id}",
        "backup",
        "How far a backup is, whichever node makes it",
        answers=((200, "`status`: running, succeeded, failed or cancelled"), _NOT_FOUND),
    ),
    Route(
        "DELETE",
        "/cluster/backups/{id}",
        "cancel_backup",
        "End a backup that is being made, and remove what it wrote",
        answers=((200, "as it ended"), _NOT_FOUND),
    ),
    Route(
        "GET",
        "/snapshots",
        "snapshots",
        "What the shared store has of the partitions on this node",
        answers=((200, "names"), (409, "there is no shared store"), (503, "the store does not answer: why")),
    ),
    Route("GET", "/metrics", "metrics", "For Prometheus", answers=((200, "text"),)),
    Route("GET", "/openapi.json", "openapi", "This list, for programs"),
)


class Admin:
    """Answers; `cluster` and `metrics` are functions because they look at things only the node knows."""

    def __init__(
        self,
        config: Config,
        registry: Registry,
        router: Router,
        reader: Reader,
        *,
        now_ms: Callable[[], int],
        cluster: Callable[[], Awaitable[Mapping[str, Any]]],
        metrics: Callable[[], Awaitable[tuple[bytes, str]]],
        unhealthy: Callable[[], str | None],
        operations: Operations,
        snapshots: Snapshots | None = None,
        backups: Backups | None = None,
    ) -> None:
        self._operations = operations
        self._backups = backups
        self._snapshots = snapshots
        self._config = config
        self._registry = registry
        self._router = router
        self._reader = reader
        self._now_ms = now_ms
        self._cluster = cluster
        self._metrics = metrics
        self._unhealthy = unhealthy

    def application(self) -> web.Application:
        app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[_errors])
        for route in ROUTES:
            answer: Callable[[web.Request], Awaitable[web.StreamResponse]] = getattr(self, f"_on_{route.name}")
            app.router.add_route(route.method, route.path, answer)
        return app

    # -- pages -------------------------------------------------------------------------------------------------------

    async def _on_page(self, request: web.Request) -> web.Response:
        rows = "".join(
            f"<tr><td>{route.method}<td><code>{html.escape(route.path)}</code><td>{html.escape(route.summary)}"
            for route in ROUTES
        )
        names = ", ".join(html.escape(name) for name in sorted(self._registry.state.offers)) or "none registered yet"
        text = (
            "<!doctype html><meta charset=utf-8><title>Holdfast</title>"
            "<style>body{font:16px/1.5 system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}td{padding:0 1rem 0 0;"
            "vertical-align:top}</style>"
            f"<h1>Holdfast {__version__}</h1><p>Node <b>{html.escape(self._config.node)}</b> of cluster "
            f"<b>{html.escape(self._config.cluster)}</b>. Services: {names}.</p>"
            '<p><a href="/invocations">invocations</a> · <a href="/deployments">deployments</a> · '
            '<a href="/services">services</a> · <a href="/cluster">cluster</a> · <a href="/metrics">metrics</a> · '
            '<a href="/openapi.json">openapi.json</a></p>'
            f"<p>In a terminal: <code>holdfast invocations list</code>.</p><table>{rows}</table>"
        )
        return web.Response(text=text, content_type="text/html")

    async def _on_health(self, request: web.Request) -> web.Response:
        problem = self._unhealthy()
        if problem is not None:
            raise Unavailable(problem)
        return _json(200, {"status": "ok"})

    async def _on_openapi(self, request: web.Request) -> web.Response:
        return _json(200, openapi())

    async def _on_metrics(self, request: web.Request) -> web.Response:
        body, content_type = await self._metrics()
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _on_cluster(self, request: web.Request) -> web.Response:
        return _json(200, await self._cluster())

    async def _on_create_snapshot(self, request: web.Request) -> web.Response:
        text = request.match_info["partition"]
        number = int(text) if text.isascii() and text.isdigit() and len(text) < 6 else -1
        if self._snapshots is None:
            raise Unavailable("this node keeps no snapshots")
        try:
            made = await self._snapshots.create(number)
        except (Refused, Unanswered) as error:
            if isinstance(error, Refused) and error.kind == "NotFound":
                raise NotFound(f"there is no partition {text!r:.20}", "GET /cluster shows them") from None
            raise Unavailable(f"no snapshot of partition {number}: {error}") from None
        return _json(201, made)

    async def _on_snapshots(self, request: web.Request) -> web.Response:
        if self._snapshots is None or not self._snapshots.shared:
            raise Conflict(
                "this node has no shared store of snapshots", "set `snapshots`; GET /cluster shows its own snapshots"
            )
        try:
            return _json(200, {"store": self._config.snapshots, "snapshots": await self._snapshots.stored()})
        except SnapshotError as error:
            raise Unavailable(str(error)) from None

    @property
    def _made(self) -> Backups:
        if self._backups is None:
            raise Unavailable("this node makes no backups")
        return self._backups

    async def _on_begin_backup(self, request: web.Request) -> web.Response:
        given = await _body(request, {"to"})
        return _json(202, self._made.begin(given.get("to")))

    async def _on_backups(self, request: web.Request) -> web.Response:
        return _json(200, {"backups": self._made.recent()})

    async def _on_backup(self, request: web.Request) -> web.Response:
        return _json(200, await self._made.show(request.match_info["id"]))

    async def _on_cancel_backup(self, request: web.Request) -> web.Response:
        return _json(200, await self._made.cancel(request.match_info["id"]))

    async def _on_add_node(self, request: web.Request) -> web.Response:
        given = await _body(request, {"name", "address", "zone"})
        added = await self._operations.add(given.get("name"), given.get("address"), given.get("zone") or "")
        return _json(200, added)

    async def _on_drain(self, request: web.Request) -> web.Response:
        move = _Parameters(request, "move").truth("move")
        return _json(200, await self._operations.drain(request.match_info["name"], move=move))

    async def _on_undrain(self, request: web.Request) -> web.Response:
        return _json(200, await self._operations.undrain(request.match_info["name"]))

    async def _on_remove_node(self, request: web.Request) -> web.Response:
        force = _Parameters(request, "force").truth("force")
        return _json(200, await self._operations.remove(request.match_info["name"], force=force))

    async def _on_transfer(self, request: web.Request) -> web.Response:
        text = request.match_info["partition"]
        if not (text.isascii() and text.isdigit() and len(text) <= 6):
            raise BadRequest(f"{text!r:.50} is not the number of a partition")
        to = _Parameters(request, "to").text("to")
        return _json(200, await self._operations.transfer(int(text), to))

    # -- deployments and services ------------------------------------------------------------------------------------

    async def _on_register(self, request: web.Request) -> web.Response:
        given = await _body(request, {"uri", "force", "metadata"})
        uri, force, metadata = given.get("uri"), given.get("force", False), given.get("metadata") or {}
        if not isinstance(uri, str):
            raise BadRequest('"uri" is missing', 'send JSON as in {"uri": "http://127.0.0.1:9080"}')
        if type(force) is not bool:
            raise BadRequest('"force" is true or false')
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise BadRequest('"metadata" is an object of texts')
        if len(json.dumps(metadata)) > METADATA_BYTES_MAX:
            raise BadRequest(f'"metadata" is larger than {METADATA_BYTES_MAX} bytes')
        registered = await self._registry.register(uri, force=force, metadata=_encodable(metadata))
        return _json(201 if registered.created else 200, await self._show_deployment(registered.deployment.id))

    async def _show_deployment(self, id_: str) -> dict[str, Any]:
        deployment = self._registry.deployment(id_)
        if deployment is None:
            raise NotFound(f"there is no deployment {id_!r:.100}", "GET /deployments shows what there is")
        in_flight = await self._reader.in_flight(id_)
        return show_deployment(deployment, self._registry.state, in_flight, whole=True)

    async def _on_deployments(self, request: web.Request) -> web.Response:
        in_flight = (await self._reader.statistics()).deployments
        state = self._registry.state
        shown = [
            show_deployment(deployment, state, in_flight.get(deployment.id, 0), whole=False)
            for deployment in sorted(state.deployments.values(), key=lambda each: (-each.created_ms, each.id))
        ]
        return _json(200, {"deployments": shown})

    async def _on_deployment(self, request: web.Request) -> web.Response:
        return _json(200, await self._show_deployment(request.match_info["id"]))

    async def _on_remove(self, request: web.Request) -> web.Response:
        parameters = _Parameters(request, "force")
        id_ = request.match_info["id"]
        await self._registry.remove(id_, force=parameters.truth("force"))
        return _json(200, {"id": id_, "status": "Removed"})

    async def _on_services(self, request: web.Request) -> web.Response:
        figures = (await self._reader.statistics()).services
        state = self._registry.state
        shown = []
        for name in sorted(state.offers):
            found = self._registry.service(name)
            assert found is not None, "what is offered is there"
            counts = figures[name].by_status if name in figures else {}
            shown.append(show_service(*found, state, counts))
        return _json(200, {"services": shown})

    async def _on_service(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        found = self._registry.service(name)
        if found is None:
            raise self._registry.unknown(name, "")
        figures = (await self._reader.statistics()).services.get(name)
        shown = show_service(*found, self._registry.state, figures.by_status if figures is not None else {})
        shown["handlers"] = [show_handler(handler) for handler in found[0].handlers]
        shown["options"] = found[0].options
        if figures is not None:
            shown["totals"] = {field: value for field, value in figures._asdict().items() if field != "by_status"}
        return _json(200, shown)

    # -- state -------------------------------------------------------------------------------------------------------

    def _keyed(self, request: web.Request) -> tuple[str, str]:
        name, key = request.match_info["name"], request.match_info["key"]
        found = self._registry.service(name)
        if found is None:
            raise self._registry.unknown(name, "")
        if found[0].kind == "service":
            raise BadRequest(f"{name} is a service without keys: it has no state")
        if not 0 < _size(key) <= KEY_BYTES_MAX:
            raise BadRequest(f"a key has 1 to {KEY_BYTES_MAX} bytes of UTF-8")
        return name, key

    async def _on_state(self, request: web.Request) -> web.Response:
        name, key = self._keyed(request)
        return _json(200, show_keyed(name, key, await self._reader.keyed(name, key)))

    async def _on_set_state(self, request: web.Request) -> web.Response:
        name, key = self._keyed(request)
        given = await _body(request, {"values", "remove", "replace"})
        values, remove, replace = given.get("values", {}), given.get("remove", []), given.get("replace", False)
        if not isinstance(values, dict) or type(replace) is not bool:
            raise BadRequest('"values" is an object and "replace" true or false')
        if not isinstance(remove, list) or not all(isinstance(each, str) for each in remove):
            raise BadRequest('"remove" is a list of names')
        if not (values or remove or replace):
            raise BadRequest("there is nothing to change", 'send JSON as in {"values": {"count": 3}}')
        for each in (*values, *remove):
            if not 0 < _size(each) <= NAME_BYTES_MAX:
                raise BadRequest(f"a name of state has 1 to {NAME_BYTES_MAX} bytes of UTF-8")
        changes: dict[str, bytes | None] = dict.fromkeys(remove)
        changes.update({each: read_payload(value) for each, value in values.items()})
        check(await self._router.submit(partition_key(name, key), SetState(name, key, changes, replace)))
        return _json(200, show_keyed(name, key, await self._reader.keyed(name, key)))

    # -- invocations -------------------------------------------------------------------------------------------------

    async def _on_invocations(self, request: web.Request) -> web.Response:
        parameters = _Parameters(request, *_FILTER_NAMES, "limit", "cursor")
        wanted = self._filter(parameters)
        page = await self._reader.page(wanted, parameters.text("cursor"), parameters.number("limit", PAGE, 1, PAGE_MAX))
        shown = [show_invocation(record) for record in page.records]
        return _json(200, {"invocations": shown, "cursor": page.cursor})

    def _filter(self, parameters: _Parameters) -> Filter:
        created_before_ms = None
        older_than = parameters.text("older_than")
        if older_than is not None:
            try:
                created_before_ms = self._now_ms() - parse_duration_ms(older_than)
            except ValueError as error:
                raise BadRequest(f"older_than: {error}") from None
        return Filter(
            _statuses(parameters.text("status")),
            parameters.text("service"),
            parameters.text("handler"),
            parameters.text("key"),
            parameters.text("deployment"),
            created_before_ms,
        )

    async def _on_invocation(self, request: web.Request) -> web.Response:
        id_ = _id(request)
        description = await self._reader.describe(id_)
        if description is None:
            raise UnknownInvocation(f"there is no invocation {format_id(id_)}")
        return _json(200, show_description(description))

    async def _on_journal(self, request: web.Request) -> web.Response:
        parameters = _Parameters(request, "start", "limit")
        start = parameters.number("start", 0, 0, 2**32 - 1)
        limit = parameters.number("limit", STEPS_PAGE, 1, STEPS_PAGE)
        id_ = _id(request)
        steps = await self._reader.journal(id_, start, limit)
        if steps is None:
            raise UnknownInvocation(f"there is no invocation {format_id(id_)}")
        shown = [show_step(id_, start + offset, step) for offset, step in enumerate(steps)]
        return _json(
            200, {"id": format_id(id_), "steps": shown, "next": start + limit if len(steps) == limit else None}
        )

    async def _on_decide(self, request: web.Request) -> web.Response:
        id_ = _id(request)
        text = request.match_info["step"]
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise BadRequest(f"{text!r:.40} is not the index of a step")
        given = await _body(request, {"value", "failure", "again"})
        if len(given) != 1 or given.get("again", True) is not True:
            raise BadRequest('one of "value", "failure" and "again": true is needed')
        outcome: list[Any] | None = None
        if "value" in given:
            outcome = [0, read_payload(given["value"])]
        elif "failure" in given:
            failure = given["failure"]
            message = failure.get("message") if isinstance(failure, dict) else None
            code = failure.get("code", 500) if isinstance(failure, dict) else None
            if not isinstance(message, str) or type(code) is not int or not 400 <= code <= 599:
                raise BadRequest('"failure" has a "message" and may have a "code" from 400 to 599')
            outcome = [1, code, cut_text(message), "Decided"]
        check(await self._router.submit(id_, DecideStep(id_, int(text), outcome)))
        return _json(200, {"id": format_id(id_), "step": int(text), "status": "Decided"})

    async def _on_act(self, request: web.Request) -> web.Response:
        parameters = _Parameters(request, "step", "to")
        action = _action(request, parameters)
        id_ = _id(request)
        deployment = parameters.text("to")
        if deployment is not None:
            description = await self._reader.describe(id_)
            if description is None:
                raise UnknownInvocation(f"there is no invocation {format_id(id_)}")
            deployment = self._deployment(deployment, description.record)
        result = check(await self._router.submit(id_, _command(action, id_, parameters, deployment)))
        return _json(200, _done(action, id_, result))

    def _deployment(self, wanted: str, record: Invocation) -> str:
        """Where an invocation shall go on; it has to know the handler."""
        if wanted == "newest":
            return self._registry.resolve(record.service, record.handler).deployment
        if self._registry.deployment(wanted) is None:
            raise NotFound(f"there is no deployment {wanted!r:.100}", "GET /deployments shows what there is")
        if self._registry.target(wanted, record.service, record.handler) is None:
            raise Conflict(f"{wanted} does not offer {record.service}/{record.handler}")
        return wanted

    async def _on_act_on_many(self, request: web.Request) -> web.Response:
        parameters = _Parameters(request, *_FILTER_NAMES, "step", "to", "limit")
        action = _action(request, parameters)
        wanted = self._filter(parameters)
        if wanted == Filter():
            raise BadRequest(f"which ones? {action} needs a filter", f"one or more of {', '.join(_FILTER_NAMES)}")
        limit = parameters.number("limit", BULK, 1, BULK_MAX)
        deployment = parameters.text("to")
        ids, more = await self._matching(wanted, limit)
        tally = {"matched": len(ids), "done": 0, "unchanged": 0, "failed": 0}
        reasons: dict[str, int] = {}

        async def act(record: Invocation) -> None:
            try:
                there = self._deployment(deployment, record) if deployment is not None else None
                result = check(
                    await self._router.submit(record.id, _command(action, record.id, parameters, there))
                )  # fmt: skip
                tally["done" if result.code == 0 else "unchanged"] += 1
            except Exception as error:
                known = circumstance(error)
                if known is None:
                    raise
                tally["failed"] += 1
                reasons[known.message] = reasons.get(known.message, 0) + 1

        for first in range(0, len(ids), AT_A_TIME):
            await asyncio.gather(*(act(record) for record in ids[first : first + AT_A_TIME]))
        return _json(200, {"action": action, **tally, "reasons": reasons, "more": more})

    async def _matching(self, wanted: Filter, limit: int) -> tuple[list[Invocation], bool]:
        found: list[Invocation] = []
        cursor = None
        while True:
            page = await self._reader.page(wanted, cursor, min(limit - len(found), PAGE_MAX))
            found += page.records
            cursor = page.cursor
            if cursor is None or len(found) >= limit:
                return found, cursor is not None


_FILTER_NAMES: Final = tuple(parameter.name for parameter in _FILTERS)


def _command(action: str, id_: bytes, parameters: _Parameters, deployment: str | None) -> Command:
    match action:
        case "cancel":
            return Cancel(id_)
        case "kill":
            return Kill(id_)
        case "pause":
            return Pause(id_)
        case "resume":
            return Resume(id_, deployment)
        case "purge":
            return Purge(id_)
        case _:
            new_id = id_[:4] + os.urandom(ID_BYTES - 4)  # In the partition of the first one: its journal is there.
            return Restart(id_, new_id, parameters.number("step", 0, 0, 2**32 - 1), deployment)


_DONE: Final = {
    "cancel": "Cancelling",
    "kill": "Killed",
    "pause": "Paused",
    "resume": "Resumed",
    "restart": "Restarted",
    "purge": "Purged",
}


def _done(action: str, id_: bytes, result: Result) -> dict[str, Any]:
    status = _DONE[action] if result.code == 0 else "Unchanged"
    shown: dict[str, Any] = {"id": format_id(id_), "status": status}
    if action == "restart":
        shown["new_id"] = result.message
    elif result.message:
        shown["message"] = result.message
    return shown


def _action(request: web.Request, parameters: _Parameters) -> str:
    action = request.match_info["action"]
    if action not in ACTIONS:
        raise NotFound(f"there is no action {action!r:.60}", f"there are: {', '.join(ACTIONS)}")
    if action != "restart" and parameters.text("step") is not None:
        raise BadRequest("step: only restart takes it")
    if action not in ("resume", "restart") and parameters.text("to") is not None:
        raise BadRequest("to: only resume and restart take it")
    return action


def _id(request: web.Request) -> InvocationId:
    try:
        return parse_id(request.match_info["id"])
    except BadId as error:
        raise BadRequest(str(error), "it is in the header x-holdfast-id of every answer about an invocation") from None


def _statuses(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    found: list[int] = []
    for name in text.split(","):
        name = name.strip().lower().replace("_", "-")
        if name == "active":
            found += [status for status in STATUS_NAMES if STATUS_NAMES[status] != "completed"]
        elif name in _STATUS_BY_NAME:
            found.append(_STATUS_BY_NAME[name])
        else:
            raise BadRequest(f"there is no status {name!r:.60}", f"there are: {', '.join(_STATUS_BY_NAME)}, active")
    return tuple(dict.fromkeys(found))


class _Parameters:
    """The parameters of a request, known ones only: a misspelt filter must not be no filter."""

    def __init__(self, request: web.Request, *known: str) -> None:
        self._query = request.query
        for name in self._query:
            if name not in known:
                raise BadRequest(f"there is no parameter {name!r:.60}", f"there are: {', '.join(known)}")

    def text(self, name: str) -> str | None:
        value = self._query.get(name)
        if value == "":
            raise BadRequest(f"{name}: it is empty")
        return value

    def truth(self, name: str) -> bool:
        value = self._query.get(name, "false").lower()
        if value not in ("true", "false", "1", "0"):
            raise BadRequest(f"{name}: true or false expected")
        return value in ("true", "1")

    def number(self, name: str, default: int, low: int, high: int) -> int:
        value = self._query.get(name)
        if value is None:
            return default
        if not (value.isascii() and value.isdigit() and len(value) < 12 and low <= int(value) <= high):
            raise BadRequest(f"{name}: a whole number from {low} to {high} expected")
        return int(value)


async def _body(request: web.Request, known: set[str]) -> dict[str, Any]:
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise UnsupportedEncoding("the admin API takes bodies as they are, not compressed")
    try:
        given = json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise BadRequest("the body is a JSON object")
    unknown = sorted(set(given) - known)
    if unknown:
        raise BadRequest(f"there is no field {unknown[0]!r:.60}", f"there are: {', '.join(sorted(known))}")
    return given


def _size(text: str) -> int:
    """In bytes; 0 for what cannot be encoded, which JSON can express and nobody can store."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return 0


def _encodable(texts: dict[str, str]) -> dict[str, str]:
    return {
        name.encode(errors="replace").decode(): value.encode(errors="replace").decode() for name, value in texts.items()
    }


def _json(status: int, value: Any) -> web.Response:
    return web.Response(
        status=status, body=json.dumps(value, ensure_ascii=True).encode(), headers={"Content-Type": "application/json"}
    )


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Whatever goes wrong becomes the one shape of an error."""
    try:
        return await handler(request)
    except web.HTTPRequestEntityTooLarge:
        return _refusal(TooLarge(f"the body is larger than {BODY_BYTES_MAX} bytes"))
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        return _refusal(WrongMethod(allowed, f"{request.method} does not work here"))
    except web.HTTPNotFound:
        return _refusal(NotFound(f"there is nothing at {request.path!r:.200}", "GET / lists what there is"))
    except web.HTTPException:
        raise
    except Exception as error:
        known = circumstance(error)
        if known is None:
            logger.exception("%s %.200s failed", request.method, request.path)
            known = Internal("an internal error; its cause is in the log of the node")
        return _refusal(known)


def _refusal(error: Circumstance) -> web.Response:
    body = json.loads(error_body(error.status, error.message, source="admin", hint=error.hint))
    if isinstance(error, Conflict) and error.details:
        body["details"] = list(error.details)
    response = _json(error.status, body)
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(error.retry_after_s)
    if isinstance(error, WrongMethod):
        response.headers["Allow"] = error.allowed
    return response


def openapi() -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        in_path = [part.strip("{}") for part in route.path.split("/") if part.startswith("{")]
        operation: dict[str, Any] = {
            "operationId": route.name,
            "summary": route.summary,
            "parameters": [
                {"name": name, "in": "path", "required": True, "schema": _path_schema(name)} for name in in_path
            ]
            + [
                {"name": each.name, "in": "query", "description": each.description, "schema": dict(each.schema)}
                for each in route.parameters
            ],
            "responses": {str(status): {"description": text} for status, text in route.answers}
            | {"default": {"$ref": "#/components/responses/Error"}},
        }
        if route.body is not None:
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": route.body}}}
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    error = {
        "type": "object",
        "required": ["code", "message", "source"],
        "properties": {
            "code": _NUMBER,
            "message": {"type": "string"},
            "source": {"type": "string"},
            "hint": {"type": ["string", "null"]},
            "details": {"type": "array", "items": {"type": "string"}},
        },
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Holdfast admin API", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {"Error": error},
            "responses": {
                "Error": {
                    "description": "what is wrong, and what to do about it",
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
                }
            },
        },
    }


def _path_schema(name: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(ACTIONS)} if name == "action" else {"type": "string"}


class AdminServer:
    def __init__(self, config: Config, admin: Admin) -> None:
        self._config = config
        self._admin = admin
        self._runner: web.AppRunner | None = None
        self._door: Door | None = None

    async def start(self, sockets: Sequence[socket.socket] = ()) -> None:
        """At the configured place, or through sockets that listen there already."""
        app = self._admin.application()
        app.on_response_prepare.append(self._last_answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=ANSWER_S, auto_decompress=False)
        await self._runner.setup()
        assert self._runner.server is not None
        door = Door(self._runner.server)
        await door.open(self._config.admin, sockets)
        self._door = door

    async def _last_answer(self, request: web.Request, response: web.StreamResponse) -> None:
        if self._door is None or self._door.leaving:
            response.force_close()

    @property
    def port(self) -> int:
        assert self._door is not None, "started"
        return self._door.port

    def leave(self) -> None:
        """Close connections after their next answer, or when nothing comes from them. New ones are still let in."""
        if self._door is not None:
            self._door.leave()

    async def stop(self) -> None:
        """Nothing to do if it never started."""
        if self._door is not None:
            await self._door.finish(ANSWER_S)
        if self._runner is not None:
            if self._door is not None:
                await self._door.close(self._runner.cleanup)
            else:
                await self._runner.cleanup()
