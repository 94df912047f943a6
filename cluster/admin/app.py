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
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, TypeAlias

from aiohttp import web

from holdfast import __version__
from holdfast.cluster.admin.openapi import openapi
from holdfast.cluster.admin.parameters import (
    BODY_BYTES_MAX,
    Parameters,
    answer_expectation,
    check_encodable,
    errors_as_json,
    id_of,
    json_answer,
    read_body,
    read_ends,
    read_size,
    read_statuses,
)
from holdfast.cluster.admin.routes import (
    ACTIONS,
    BULK,
    BULK_MAX,
    FILTER_NAMES,
    PAGE,
    PAGE_MAX,
    ROUTES,
    STEPS_PAGE,
)
from holdfast.cluster.admin.views import (
    read_payload,
    show_deployment,
    show_description,
    show_handler,
    show_invocation,
    show_keyed,
    show_service,
    show_step,
)
from holdfast.cluster.backup.job import Backups
from holdfast.cluster.config import Config
from holdfast.cluster.durations import parse_duration_ms
from holdfast.cluster.errors import (
    BadRequest,
    Conflict,
    NotFound,
    Unavailable,
    UnknownInvocation,
    check,
    circumstance,
)
from holdfast.cluster.handlers.health import Health
from holdfast.cluster.members.operations import Operations
from holdfast.cluster.peers.rpc import Refused, Unanswered
from holdfast.cluster.registry.registry import METADATA_BYTES_MAX, Registry
from holdfast.cluster.routing.reader import Reader
from holdfast.cluster.routing.router import Leaders
from holdfast.cluster.snapshotting.service import Snapshots
from holdfast.sdk.ids import (
    ID_BYTES,
    format_id,
    partition_key,
)
from holdfast.sdk.journal import KEY_BYTES_MAX, NAME_BYTES_MAX, cut_text
from holdfast.snapshots.errors import SnapshotError
from holdfast.statemachine.commands import Cancel, Command, DecideStep, Kill, Pause, Purge, Restart, Resume, SetState
from holdfast.statemachine.effects import Result, Status
from holdfast.statemachine.queries import Filter
from holdfast.statemachine.records import Invocation

logger = logging.getLogger(__name__)
AT_A_TIME: Final = 256  # of a bulk operation under way
Answer: TypeAlias = tuple[int, Any]


class Admin:
    """Answers; `cluster` and `metrics` are functions because they look at things only the node knows."""

    def __init__(
        self,
        config: Config,
        registry: Registry,
        router: Leaders,
        reader: Reader,
        *,
        now_ms: Callable[[], int],
        cluster: Callable[[], Awaitable[Mapping[str, Any]]],
        metrics: Callable[[], Awaitable[tuple[bytes, str]]],
        unhealthy: Callable[[], str | None],
        warnings: Callable[[], list[str]] = list,
        removed: Callable[[], str] = lambda: "",
        operations: Operations,
        healths: Callable[[str | None], Awaitable[Sequence[Health]]] | None = None,
        snapshots: Snapshots | None = None,
        backups: Backups | None = None,
    ) -> None:
        self._operations = operations
        self._healths = healths
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
        self._warnings = warnings
        self._removed = removed

    def application(self) -> web.Application:
        app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[errors_as_json, self._refuse_if_removed])
        for route in ROUTES:
            answer: Callable[[web.Request], Awaitable[web.StreamResponse]] = getattr(self, f"_on_{route.name}")
            app.router.add_route(route.method, route.path, answer, expect_handler=answer_expectation)
        return app

    @web.middleware
    async def _refuse_if_removed(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """What this node knows of the cluster is old, and nobody listens to what it proposes. Metrics are its own."""
        if (removed := self._removed()) and request.path != "/metrics":
            raise Unavailable(removed)
        return await handler(request)

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
        warnings = self._warnings()
        return json_answer(200, {"status": "ok", **({"warnings": warnings} if warnings else {})})

    async def _on_openapi(self, request: web.Request) -> web.Response:
        return json_answer(200, openapi())

    async def _on_metrics(self, request: web.Request) -> web.Response:
        body, content_type = await self._metrics()
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _on_cluster(self, request: web.Request) -> web.Response:
        return json_answer(200, await self._cluster())

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
        return json_answer(201, made)

    async def _on_snapshots(self, request: web.Request) -> web.Response:
        if self._snapshots is None or not self._snapshots.shared:
            raise Conflict(
                "this node has no shared store of snapshots", "set `snapshots`; GET /cluster shows its own snapshots"
            )
        try:
            return json_answer(200, {"store": self._config.snapshots, "snapshots": await self._snapshots.stored()})
        except SnapshotError as error:
            raise Unavailable(str(error)) from None

    @property
    def _made(self) -> Backups:
        if self._backups is None:
            raise Unavailable("this node makes no backups")
        return self._backups

    async def _on_begin_backup(self, request: web.Request) -> web.Response:
        given = await read_body(request, {"to"})
        return json_answer(202, self._made.begin(given.get("to")))

    async def _on_backups(self, request: web.Request) -> web.Response:
        return json_answer(200, {"backups": self._made.recent()})

    async def _on_backup(self, request: web.Request) -> web.Response:
        return json_answer(200, await self._made.show(request.match_info["id"]))

    async def _on_cancel_backup(self, request: web.Request) -> web.Response:
        return json_answer(200, await self._made.cancel(request.match_info["id"]))

    async def _on_add_node(self, request: web.Request) -> web.Response:
        given = await read_body(request, {"name", "address", "zone"})
        added = await self._operations.add(given.get("name"), given.get("address"), given.get("zone") or "")
        return json_answer(200, added)

    async def _on_drain(self, request: web.Request) -> web.Response:
        move = Parameters(request, "move").truth("move")
        return json_answer(200, await self._operations.drain(request.match_info["name"], move=move))

    async def _on_undrain(self, request: web.Request) -> web.Response:
        return json_answer(200, await self._operations.undrain(request.match_info["name"]))

    async def _on_remove_node(self, request: web.Request) -> web.Response:
        force = Parameters(request, "force").truth("force")
        return json_answer(200, await self._operations.remove(request.match_info["name"], force=force))

    async def _on_transfer(self, request: web.Request) -> web.Response:
        text = request.match_info["partition"]
        if not (text.isascii() and text.isdigit() and len(text) <= 6):
            raise BadRequest(f"{text!r:.50} is not the number of a partition")
        to = Parameters(request, "to").text("to")
        return json_answer(200, await self._operations.transfer(int(text), to))

    # -- deployments and services ------------------------------------------------------------------------------------

    async def _on_register(self, request: web.Request) -> web.Response:
        given = await read_body(request, {"uri", "force", "metadata"})
        uri, force, metadata = given.get("uri"), given.get("force", False), given.get("metadata") or {}
        if not isinstance(uri, str):
            raise BadRequest('"uri" is missing', 'send JSON as in {"uri": "http://127.0.0.1:9080"}')
        if type(force) is not bool:
            raise BadRequest('"force" is true or false')
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise BadRequest('"metadata" is an object of texts')
        if len(json.dumps(metadata)) > METADATA_BYTES_MAX:
            raise BadRequest(f'"metadata" is larger than {METADATA_BYTES_MAX} bytes')
        registered = await self._registry.register(uri, force=force, metadata=check_encodable(metadata))
        return json_answer(201 if registered.created else 200, await self._show_deployment(registered.deployment.id))

    async def _show_deployment(self, id_: str) -> dict[str, Any]:
        deployment = await self._registry.certainly(lambda: self._registry.get_deployment(id_))
        in_flight = await self._reader.in_flight(id_)
        return show_deployment(deployment, self._registry.state, in_flight, await self._health_of(id_), whole=True)

    async def _health_of(self, deployment: str | None) -> Sequence[Health]:
        """As all nodes see it that answer; None: every deployment."""
        return await self._healths(deployment) if self._healths is not None else ()

    async def _on_deployments(self, request: web.Request) -> web.Response:
        in_flight = (await self._reader.statistics()).deployments
        state, healths = self._registry.state, await self._health_of(None)
        shown = [
            show_deployment(
                deployment,
                state,
                in_flight.get(deployment.id, 0),
                [each for each in healths if each.deployment == deployment.id],
                whole=False,
            )
            for deployment in sorted(state.deployments.values(), key=lambda each: (-each.created_ms, each.id))
        ]
        return json_answer(200, {"deployments": shown})

    async def _on_deployment(self, request: web.Request) -> web.Response:
        return json_answer(200, await self._show_deployment(request.match_info["id"]))

    async def _on_remove(self, request: web.Request) -> web.Response:
        parameters = Parameters(request, "force")
        id_ = request.match_info["id"]
        await self._registry.remove(id_, force=parameters.truth("force"))
        return json_answer(200, {"id": id_, "status": "Removed"})

    async def _on_services(self, request: web.Request) -> web.Response:
        figures = (await self._reader.statistics()).services
        state = self._registry.state
        shown = []
        for name in sorted(state.offers):
            found = self._registry.service(name)
            assert found is not None, "what is offered is there"
            counts = figures[name].by_status if name in figures else {}
            shown.append(show_service(*found, state, counts))
        return json_answer(200, {"services": shown})

    async def _on_service(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        found = await self._registry.certainly(lambda: self._registry.get_service(name))
        figures = (await self._reader.statistics()).services.get(name)
        shown = show_service(*found, self._registry.state, figures.by_status if figures is not None else {})
        shown["handlers"] = [show_handler(handler) for handler in found[0].handlers]
        shown["options"] = found[0].options
        if figures is not None:
            shown["totals"] = {field: value for field, value in figures._asdict().items() if field != "by_status"}
        return json_answer(200, shown)

    # -- state -------------------------------------------------------------------------------------------------------

    async def _keyed(self, request: web.Request) -> tuple[str, str]:
        name, key = request.match_info["name"], request.match_info["key"]
        found = await self._registry.certainly(lambda: self._registry.get_service(name))
        if found[0].kind == "service":
            raise BadRequest(f"{name} is a service without keys: it has no state")
        if not 0 < read_size(key) <= KEY_BYTES_MAX:
            raise BadRequest(f"a key has 1 to {KEY_BYTES_MAX} bytes of UTF-8")
        return name, key

    async def _on_state(self, request: web.Request) -> web.Response:
        name, key = await self._keyed(request)
        return json_answer(200, show_keyed(name, key, await self._reader.keyed(name, key)))

    async def _on_set_state(self, request: web.Request) -> web.Response:
        name, key = await self._keyed(request)
        given = await read_body(request, {"values", "remove", "replace"})
        values, remove, replace = given.get("values", {}), given.get("remove", []), given.get("replace", False)
        if not isinstance(values, dict) or type(replace) is not bool:
            raise BadRequest('"values" is an object and "replace" true or false')
        if not isinstance(remove, list) or not all(isinstance(each, str) for each in remove):
            raise BadRequest('"remove" is a list of names')
        if not (values or remove or replace):
            raise BadRequest("there is nothing to change", 'send JSON as in {"values": {"count": 3}}')
        for each in (*values, *remove):
            if not 0 < read_size(each) <= NAME_BYTES_MAX:
                raise BadRequest(f"a name of state has 1 to {NAME_BYTES_MAX} bytes of UTF-8")
        changes: dict[str, bytes | None] = dict.fromkeys(remove)
        changes.update({each: read_payload(value) for each, value in values.items()})
        check(await self._router.submit(partition_key(name, key), SetState(name, key, changes, replace)))
        return json_answer(200, show_keyed(name, key, await self._reader.keyed(name, key)))

    # -- invocations -------------------------------------------------------------------------------------------------

    async def _on_invocations(self, request: web.Request) -> web.Response:
        parameters = Parameters(request, *FILTER_NAMES, "limit", "cursor")
        wanted = self._filter(parameters)
        page = await self._reader.page(wanted, parameters.text("cursor"), parameters.number("limit", PAGE, 1, PAGE_MAX))
        shown = [show_invocation(record) for record in page.records]
        return json_answer(200, {"invocations": shown, "cursor": page.cursor})

    def _filter(self, parameters: Parameters) -> Filter:
        created_before_ms = self._time(parameters, "until")
        older_than = parameters.text("older_than")
        if older_than is not None:
            try:
                older_ms = self._now_ms() - parse_duration_ms(older_than)
            except ValueError as error:
                raise BadRequest(f"older_than: {error}") from None
            created_before_ms = older_ms if created_before_ms is None else min(older_ms, created_before_ms)
        return Filter(
            read_statuses(parameters.text("status")),
            parameters.text("service"),
            parameters.text("handler"),
            parameters.text("key"),
            parameters.text("deployment"),
            created_before_ms,
            read_ends(parameters.text("outcome")),
            self._time(parameters, "since"),
            parameters.text("idempotency_key"),
        )

    def _time(self, parameters: Parameters, name: str) -> int | None:
        """A time, or a duration before now."""
        text = parameters.text(name)
        if text is None:
            return None
        try:
            if text[:4].isdigit() and text[4:5] == "-":
                time = datetime.fromisoformat(text)
                return round((time if time.tzinfo is not None else time.replace(tzinfo=UTC)).timestamp() * 1000)
            return self._now_ms() - parse_duration_ms(text)
        except (ValueError, OverflowError):
            raise BadRequest(
                f"{name}: {text!r:.60} is neither a time nor a duration", "for example 2026-11-18T04:00:00Z, or 2h"
            ) from None

    async def _on_invocation(self, request: web.Request) -> web.Response:
        id_ = id_of(request)
        description = await self._reader.describe(id_)
        if description is None:
            raise UnknownInvocation(f"there is no invocation {format_id(id_)}")
        return json_answer(200, show_description(description, await self._health_for(description.record)))

    async def _health_for(self, record: Invocation) -> Sequence[Health]:
        """Of the deployment that is to run an invocation: the one it is pinned to, or the one where new ones go."""
        if record.status != Status.RUNNING:
            return ()
        target = self._registry.find(record.service, record.handler)
        deployment = record.deployment or (target.deployment if target is not None else None)
        return await self._health_of(deployment) if deployment is not None else ()

    async def _on_journal(self, request: web.Request) -> web.Response:
        parameters = Parameters(request, "start", "limit")
        start = parameters.number("start", 0, 0, 2**32 - 1)
        limit = parameters.number("limit", STEPS_PAGE, 1, STEPS_PAGE)
        id_ = id_of(request)
        steps = await self._reader.journal(id_, start, limit)
        if steps is None:
            raise UnknownInvocation(f"there is no invocation {format_id(id_)}")
        shown = [show_step(id_, start + offset, step) for offset, step in enumerate(steps)]
        return json_answer(
            200, {"id": format_id(id_), "steps": shown, "next": start + limit if len(steps) == limit else None}
        )

    async def _on_decide(self, request: web.Request) -> web.Response:
        id_ = id_of(request)
        text = request.match_info["step"]
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise BadRequest(f"{text!r:.40} is not the index of a step")
        given = await read_body(request, {"value", "failure", "again"})
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
        return json_answer(200, {"id": format_id(id_), "step": int(text), "status": "Decided"})

    async def _on_act(self, request: web.Request) -> web.Response:
        parameters = Parameters(request, "step", "to")
        action = _action(request, parameters)
        id_ = id_of(request)
        deployment = parameters.text("to")
        if deployment is not None:
            description = await self._reader.describe(id_)
            if description is None:
                raise UnknownInvocation(f"there is no invocation {format_id(id_)}")
            deployment = await self._deployment(deployment, description.record)
        result = check(await self._router.submit(id_, _command(action, id_, parameters, deployment)))
        return json_answer(200, _done(action, id_, result))

    async def _deployment(self, wanted: str, record: Invocation) -> str:
        """Where an invocation shall go on; it has to know the handler."""
        return await self._registry.certainly(lambda: self._known_deployment(wanted, record))

    def _known_deployment(self, wanted: str, record: Invocation) -> str:
        if wanted == "newest":
            return self._registry.resolve(record.service, record.handler).deployment
        self._registry.get_deployment(wanted)
        if self._registry.target(wanted, record.service, record.handler) is None:
            raise Conflict(f"{wanted} does not offer {record.service}/{record.handler}")
        return wanted

    async def _on_act_on_many(self, request: web.Request) -> web.Response:
        parameters = Parameters(request, *FILTER_NAMES, "step", "to", "limit")
        action = _action(request, parameters)
        wanted = self._filter(parameters)
        if wanted == Filter():
            raise BadRequest(f"which ones? {action} needs a filter", f"one or more of {', '.join(FILTER_NAMES)}")
        limit = parameters.number("limit", BULK, 1, BULK_MAX)
        deployment = parameters.text("to")
        ids, more = await self._matching(wanted, limit)
        tally = {"matched": len(ids), "done": 0, "unchanged": 0, "failed": 0}
        reasons: dict[str, int] = {}

        async def act(record: Invocation) -> None:
            try:
                there = await self._deployment(deployment, record) if deployment is not None else None
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
        return json_answer(200, {"action": action, **tally, "reasons": reasons, "more": more})

    async def _matching(self, wanted: Filter, limit: int) -> tuple[list[Invocation], bool]:
        found: list[Invocation] = []
        cursor = None
        while True:
            page = await self._reader.page(wanted, cursor, min(limit - len(found), PAGE_MAX))
            found += page.records
            cursor = page.cursor
            if cursor is None or len(found) >= limit:
                return found, cursor is not None


def _command(action: str, id_: bytes, parameters: Parameters, deployment: str | None) -> Command:
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


def _action(request: web.Request, parameters: Parameters) -> str:
    action = request.match_info["action"]
    if action not in ACTIONS:
        raise NotFound(f"there is no action {action!r:.60}", f"there are: {', '.join(ACTIONS)}")
    if action != "restart" and parameters.text("step") is not None:
        raise BadRequest("step: only restart takes it")
    if action not in ("resume", "restart") and parameters.text("to") is not None:
        raise BadRequest("to: only resume and restart take it")
    return action
