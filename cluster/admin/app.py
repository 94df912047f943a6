"""The admin API: the queries and changes of operators, the command line and the console.

One table (`ROUTES`) defines it: requests are matched with it, and /openapi.json is made from it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from holdfast.cluster.addresses import find_guarded
from holdfast.cluster.admin.actions import action_of, command_of, show_done
from holdfast.cluster.admin.audit import AuditAdmin, name_act
from holdfast.cluster.admin.identity import IdentityAdmin
from holdfast.cluster.admin.openapi import openapi
from holdfast.cluster.admin.pages import Pages
from holdfast.cluster.admin.parameters import (
    AdminRequest,
    Parameters,
    check_encodable,
    id_of,
    json_answer,
    read_body,
    read_ends,
    read_size,
    read_statuses,
    read_time,
)
from holdfast.cluster.admin.routes import (
    BULK,
    BULK_MAX,
    FILTER_NAMES,
    PAGE,
    PAGE_MAX,
    PUBLIC,
    ROUTES,
    STEPS_PAGE,
    match,
)
from holdfast.cluster.admin.tokens import TokenAdmin
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
from holdfast.cluster.backup.job import Backups, check_place, read_place, show_to
from holdfast.cluster.config import Config, read_endpoint
from holdfast.cluster.durations import parse_duration_ms
from holdfast.cluster.errors import (
    BadRequest,
    Conflict,
    EndpointFailed,
    NotFound,
    Unavailable,
    UnknownInvocation,
    WrongMethod,
    check,
    circumstance,
)
from holdfast.cluster.handlers.health import Health
from holdfast.cluster.http.audit import Audit
from holdfast.cluster.http.exchange import Answer, Request, split_target
from holdfast.cluster.http.sessions import Sessions
from holdfast.cluster.members.operations import Operations, read_node
from holdfast.cluster.peers.rpc import Refused, Unanswered
from holdfast.cluster.registry.registry import METADATA_BYTES_MAX, Registry, normalize_uri
from holdfast.cluster.routing.reader import Reader
from holdfast.cluster.routing.router import Router
from holdfast.cluster.snapshotting.service import Snapshots
from holdfast.sdk.ids import (
    InvocationId,
    format_id,
    partition_key,
)
from holdfast.sdk.journal import KEY_BYTES_MAX, NAME_BYTES_MAX, cut_text
from holdfast.snapshots.errors import SnapshotError
from holdfast.statemachine.access import ADMIN, permits
from holdfast.statemachine.commands import DecideStep, SetState
from holdfast.statemachine.effects import Code, Status
from holdfast.statemachine.queries import Filter
from holdfast.statemachine.records import Invocation

logger = logging.getLogger(__name__)
AT_A_TIME: Final = 256  # concurrent actions of a bulk operation


def _is_admin(request: AdminRequest) -> bool:
    return permits(request.request.principal.roles, ADMIN)


class Admin:
    """Answers requests; `cluster` and `metrics` are functions because only the node knows what they show."""

    def __init__(
        self,
        config: Config,
        registry: Registry,
        router: Router,
        reader: Reader,
        *,
        now_ms: Callable[[], int],
        cluster: Callable[..., Awaitable[Mapping[str, Any]]],
        metrics: Callable[[], Awaitable[tuple[bytes, str]]],
        unhealthy: Callable[[], str | None],
        warnings: Callable[[], list[str]] = list,
        removed: Callable[[], str] = lambda: "",
        operations: Operations,
        identity: IdentityAdmin,
        healths: Callable[[str | None, InvocationId | None], Awaitable[Sequence[Health]]] | None = None,
        snapshots: Snapshots | None = None,
        backups: Backups | None = None,
        audit: Audit | None = None,
        sessions: Sessions | None = None,
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
        self._tokens = TokenAdmin(registry, now_ms)
        self._pages = Pages(config, registry, sessions)
        self._audit = AuditAdmin(registry, audit, now_ms)
        self._identity = identity

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
                answer: Callable[[AdminRequest], Awaitable[Answer]] = getattr(self, f"_on_{route.name}")
                return await answer(AdminRequest(request, places, query))
            allowed.append(route.method)
        if allowed:
            raise WrongMethod(", ".join(sorted(allowed)), f"{request.method} is not supported for this path")
        raise NotFound(f"there is nothing at {path!r:.200}", "GET / lists what there is")

    # -- pages -------------------------------------------------------------------------------------------------------

    async def _on_page(self, request: AdminRequest) -> Answer:
        return self._pages.page(request)

    async def _on_console_file(self, request: AdminRequest) -> Answer:
        return self._pages.file(request.path["name"])

    async def _on_session(self, request: AdminRequest) -> Answer:
        return self._pages.session(request)

    async def _on_sign_in(self, request: AdminRequest) -> Answer:
        return await self._pages.sign_in(request)

    async def _on_sign_out(self, request: AdminRequest) -> Answer:
        return await self._pages.sign_out(request)

    async def _on_health(self, request: AdminRequest) -> Answer:
        problem = self._unhealthy()
        if problem is not None:
            raise Unavailable(problem)
        warnings = self._warnings()
        return json_answer(200, {"status": "ok", **({"warnings": warnings} if warnings else {})})

    async def _on_openapi(self, request: AdminRequest) -> Answer:
        return json_answer(200, openapi())

    async def _on_metrics(self, request: AdminRequest) -> Answer:
        body, content_type = await self._metrics()
        return Answer(200, body, content_type)

    async def _on_cluster(self, request: AdminRequest) -> Answer:
        return json_answer(200, await self._cluster(reasons=_is_admin(request)))

    async def _on_create_snapshot(self, request: AdminRequest) -> Answer:
        text = request.path["partition"]
        number = int(text) if text.isascii() and text.isdigit() and len(text) < 6 else -1
        if self._snapshots is None:
            raise Unavailable("this node keeps no snapshots")
        try:
            made = await self._snapshots.create(number, partitions=self._router.count, leader=self._router.leader)
        except (Refused, Unanswered) as error:
            if isinstance(error, Refused) and error.kind == "NotFound":
                raise NotFound(f"there is no partition {text!r:.20}", "GET /cluster shows them") from None
            raise Unavailable(f"no snapshot of partition {number}: {error}") from None
        return json_answer(201, made)

    async def _on_snapshots(self, request: AdminRequest) -> Answer:
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

    async def _on_begin_backup(self, request: AdminRequest) -> Answer:
        given = await read_body(request, {"to"})
        place = read_place(given.get("to"))
        request.note(to=place.partition("?")[0])
        roles = request.request.principal.roles
        await check_place(place, self._config.snapshots, roles)
        return json_answer(202, show_to(roles, self._made.begin(place)))

    async def _on_backups(self, request: AdminRequest) -> Answer:
        return json_answer(
            200, {"backups": [show_to(request.request.principal.roles, each) for each in self._made.recent()]}
        )

    async def _on_backup(self, request: AdminRequest) -> Answer:
        return json_answer(200, show_to(request.request.principal.roles, await self._made.show(request.path["id"])))

    async def _on_cancel_backup(self, request: AdminRequest) -> Answer:
        return json_answer(200, show_to(request.request.principal.roles, await self._made.cancel(request.path["id"])))

    async def _on_add_node(self, request: AdminRequest) -> Answer:
        given = await read_body(request, {"name", "address", "zone"})
        node = read_node(given.get("name"), given.get("address"), given.get("zone") or "")
        request.note(name=node.name, address=node.address)
        place = read_endpoint(node.address)
        if (guarded := await find_guarded(place.host, place.port)) is not None:
            raise BadRequest(guarded, "give the address of the node's peer port")
        return json_answer(200, await self._operations.add(node))

    async def _on_drain(self, request: AdminRequest) -> Answer:
        move = Parameters(request, "move").truth("move")
        return json_answer(200, await self._operations.drain(request.path["name"], move=move))

    async def _on_undrain(self, request: AdminRequest) -> Answer:
        return json_answer(200, await self._operations.undrain(request.path["name"]))

    async def _on_remove_node(self, request: AdminRequest) -> Answer:
        force = Parameters(request, "force").truth("force")
        return json_answer(200, await self._operations.remove(request.path["name"], force=force))

    async def _on_transfer(self, request: AdminRequest) -> Answer:
        text = request.path["partition"]
        if not (text.isascii() and text.isdigit() and len(text) <= 6):
            raise BadRequest(f"{text!r:.50} is not the number of a partition")
        to = Parameters(request, "to").text("to")
        return json_answer(200, await self._operations.transfer(int(text), to))

    # -- tokens ------------------------------------------------------------------------------------------------------

    async def _on_tokens(self, request: AdminRequest) -> Answer:
        return json_answer(200, {"tokens": self._tokens.list()})

    async def _on_create_token(self, request: AdminRequest) -> Answer:
        given = await read_body(request, {"name", "roles", "services", "expires_in"})
        created = await self._tokens.create(request.request.principal, given)
        request.note(id=created["id"], name=created["name"], roles=",".join(created["roles"]))
        return json_answer(201, created)

    async def _on_rotate_token(self, request: AdminRequest) -> Answer:
        return json_answer(200, await self._tokens.rotate(request.path["id"], await read_body(request, {"keep_old"})))

    async def _on_revoke_token(self, request: AdminRequest) -> Answer:
        return json_answer(200, await self._tokens.revoke(request.path["id"]))

    async def _on_audit(self, request: AdminRequest) -> Answer:
        return json_answer(200, await self._audit.show(request))

    async def _on_identity(self, request: AdminRequest) -> Answer:
        return json_answer(200, self._identity.show())

    async def _on_rotate_identity(self, request: AdminRequest) -> Answer:
        return json_answer(200, await self._identity.rotate(await read_body(request, {"finish"})))

    # -- deployments and services ------------------------------------------------------------------------------------

    async def _on_register(self, request: AdminRequest) -> Answer:
        given = await read_body(request, {"uri", "force", "metadata"})
        uri, force, metadata = given.get("uri"), given.get("force", False), given.get("metadata") or {}
        if not isinstance(uri, str):
            raise BadRequest('"uri" is missing', 'send JSON as in {"uri": "http://127.0.0.1:9080"}')
        if type(force) is not bool:
            raise BadRequest('"force" must be true or false')
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise BadRequest('"metadata" must be an object of texts')
        if len(json.dumps(metadata)) > METADATA_BYTES_MAX:
            raise BadRequest(f'"metadata" is larger than {METADATA_BYTES_MAX} bytes')
        uri = normalize_uri(uri)
        request.note(uri=uri, force=force)
        try:
            registered = await self._registry.register(uri, force=force, metadata=check_encodable(metadata))
        except EndpointFailed as error:
            shown = error.shown_to(request.request.principal.roles)
            if shown is error:
                logger.warning("discovery: %s", error.detail or error.message)
            raise shown from None
        request.note(id=registered.deployment.id)
        return json_answer(201 if registered.created else 200, await self._show_deployment(registered.deployment.id))

    async def _show_deployment(self, id_: str) -> dict[str, Any]:
        deployment = await self._registry.certainly(lambda: self._registry.get_deployment(id_))
        in_flight = await self._reader.in_flight(id_)
        return show_deployment(deployment, self._registry.state, in_flight, await self._health_of(id_), whole=True)

    async def _health_of(self, deployment: str | None, invocation: InvocationId | None = None) -> Sequence[Health]:
        """As all answering nodes see it; None: of every deployment."""
        return await self._healths(deployment, invocation) if self._healths is not None else ()

    async def _on_deployments(self, request: AdminRequest) -> Answer:
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

    async def _on_deployment(self, request: AdminRequest) -> Answer:
        return json_answer(200, await self._show_deployment(request.path["id"]))

    async def _on_remove(self, request: AdminRequest) -> Answer:
        parameters = Parameters(request, "force")
        id_ = request.path["id"]
        await self._registry.remove(id_, force=parameters.truth("force"), in_flight=self._reader.in_flight)
        return json_answer(200, {"id": id_, "status": "Removed"})

    async def _on_services(self, request: AdminRequest) -> Answer:
        figures = (await self._reader.statistics()).services
        state = self._registry.state
        shown = []
        for name in sorted(state.offers):
            found = self._registry.service(name)
            assert found is not None, "GET /services lists the services"
            counts = figures[name].by_status if name in figures else {}
            shown.append(show_service(*found, state, counts))
        return json_answer(200, {"services": shown})

    async def _on_service(self, request: AdminRequest) -> Answer:
        name = request.path["name"]
        found = await self._registry.certainly(lambda: self._registry.get_service(name))
        figures = (await self._reader.statistics()).services.get(name)
        shown = show_service(*found, self._registry.state, figures.by_status if figures is not None else {})
        shown["handlers"] = [show_handler(handler) for handler in found[0].handlers]
        shown["options"] = found[0].options
        if figures is not None:
            shown["totals"] = {field: value for field, value in figures._asdict().items() if field != "by_status"}
        return json_answer(200, shown)

    # -- state -------------------------------------------------------------------------------------------------------

    async def _keyed(self, request: AdminRequest) -> tuple[str, str]:
        name, key = request.path["name"], request.path["key"]
        found = await self._registry.certainly(lambda: self._registry.get_service(name))
        if found[0].kind == "service":
            raise BadRequest(f"{name} is a service without keys: it has no state")
        if not 0 < read_size(key) <= KEY_BYTES_MAX:
            raise BadRequest(f"a key must have 1 to {KEY_BYTES_MAX} bytes of UTF-8")
        return name, key

    async def _on_state(self, request: AdminRequest) -> Answer:
        name, key = await self._keyed(request)
        return json_answer(200, show_keyed(name, key, await self._reader.keyed(name, key)))

    async def _on_set_state(self, request: AdminRequest) -> Answer:
        name, key = await self._keyed(request)
        given = await read_body(request, {"values", "remove", "replace"})
        values, remove, replace = given.get("values", {}), given.get("remove", []), given.get("replace", False)
        if not isinstance(values, dict) or type(replace) is not bool:
            raise BadRequest('"values" must be an object, and "replace" true or false')
        if not isinstance(remove, list) or not all(isinstance(each, str) for each in remove):
            raise BadRequest('"remove" must be a list of names')
        if not (values or remove or replace):
            raise BadRequest("the request changes nothing", 'send JSON as in {"values": {"count": 3}}')
        for each in (*values, *remove):
            if not 0 < read_size(each) <= NAME_BYTES_MAX:
                raise BadRequest(f"a name of state must have 1 to {NAME_BYTES_MAX} bytes of UTF-8")
        changes: dict[str, bytes | None] = dict.fromkeys(remove)
        changes.update({each: read_payload(value) for each, value in values.items()})
        check(await self._router.submit(partition_key(name, key), SetState(name, key, changes, replace)))
        return json_answer(200, show_keyed(name, key, await self._reader.keyed(name, key)))

    # -- invocations -------------------------------------------------------------------------------------------------

    async def _on_invocations(self, request: AdminRequest) -> Answer:
        parameters = Parameters(request, *FILTER_NAMES, "limit", "cursor")
        wanted = self._filter(parameters)
        page = await self._reader.page(wanted, parameters.text("cursor"), parameters.number("limit", PAGE, 1, PAGE_MAX))
        shown = [show_invocation(record) for record in page.records]
        return json_answer(200, {"invocations": shown, "cursor": page.cursor})

    def _filter(self, parameters: Parameters) -> Filter:
        created_before_ms = read_time(parameters, "until", self._now_ms())
        older_than = parameters.text("older_than")
        if older_than is not None:
            try:
                older_ms = self._now_ms() - parse_duration_ms(older_than)
            except ValueError as error:
                raise BadRequest(f"older_than: {error}") from None
            created_before_ms = older_ms if created_before_ms is None else min(older_ms, created_before_ms)
        return Filter(
            statuses=read_statuses(parameters.text("status")),
            service=parameters.text("service"),
            handler=parameters.text("handler"),
            key=parameters.text("key"),
            deployment=parameters.text("deployment"),
            created_before_ms=created_before_ms,
            ends=read_ends(parameters.text("outcome")),
            created_since_ms=read_time(parameters, "since", self._now_ms()),
            idempotency_key=parameters.text("idempotency_key"),
        )

    async def _on_invocation(self, request: AdminRequest) -> Answer:
        id_ = id_of(request)
        description = await self._reader.describe(id_)
        if description is None:
            raise UnknownInvocation(f"there is no invocation {format_id(id_)}")
        return json_answer(200, show_description(description, await self._health_for(description.record)))

    async def _health_for(self, record: Invocation) -> Sequence[Health]:
        """Of the deployment that will run an invocation: the one it is pinned to, or the one for new invocations."""
        if record.status != Status.RUNNING:
            return ()
        target = self._registry.find(record.service, record.handler)
        deployment = record.deployment or (target.deployment if target is not None else None)
        return await self._health_of(deployment, record.id) if deployment is not None else ()

    async def _on_journal(self, request: AdminRequest) -> Answer:
        parameters = Parameters(request, "start", "limit")
        start = parameters.number("start", 0, 0, 2**32 - 1)
        limit = parameters.number("limit", STEPS_PAGE, 1, STEPS_PAGE)
        id_ = id_of(request)
        steps = await self._reader.journal(id_, start, limit)
        if steps is None:
            raise UnknownInvocation(f"there is no invocation {format_id(id_)}")
        may_complete = request.request.principal.may_invoke_all
        shown = [show_step(id_, start + offset, step, with_ids=may_complete) for offset, step in enumerate(steps)]
        return json_answer(
            200, {"id": format_id(id_), "steps": shown, "next": start + limit if len(steps) == limit else None}
        )

    async def _on_decide(self, request: AdminRequest) -> Answer:
        id_ = id_of(request)
        text = request.path["step"]
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise BadRequest(f"{text!r:.40} is not the index of a step")
        given = await read_body(request, {"value", "failure", "again"})
        if len(given) != 1 or given.get("again", True) is not True:
            raise BadRequest('send exactly one of "value", "failure" and "again": true')
        outcome: list[Any] | None = None
        if "value" in given:
            outcome = [0, read_payload(given["value"])]
        elif "failure" in given:
            failure = given["failure"]
            message = failure.get("message") if isinstance(failure, dict) else None
            code = failure.get("code", 500) if isinstance(failure, dict) else None
            if not isinstance(message, str) or type(code) is not int or not 400 <= code <= 599:
                raise BadRequest('"failure" must have a "message" and may have a "code" from 400 to 599')
            outcome = [1, code, cut_text(message), "Decided"]
        check(await self._router.submit(id_, DecideStep(id_, int(text), outcome)))
        return json_answer(200, {"id": format_id(id_), "step": int(text), "status": "Decided"})

    async def _on_act(self, request: AdminRequest) -> Answer:
        parameters = Parameters(request, "step", "to")
        action = action_of(request, parameters)
        id_ = id_of(request)
        deployment = parameters.text("to")
        if deployment is not None:
            description = await self._reader.describe(id_)
            if description is None:
                raise UnknownInvocation(f"there is no invocation {format_id(id_)}")
            deployment = await self._deployment(deployment, description.record)
        result = check(await self._router.submit(id_, command_of(action, id_, parameters, deployment)))
        done = show_done(action, id_, result)
        request.note(**{name: done[name] for name in ("new_id",) if name in done})
        return json_answer(200, done)

    async def _deployment(self, wanted: str, record: Invocation) -> str:
        """The deployment on which an invocation shall continue; it must offer the handler."""
        return await self._registry.certainly(lambda: self._known_deployment(wanted, record))

    def _known_deployment(self, wanted: str, record: Invocation) -> str:
        if wanted == "newest":
            return self._registry.resolve(record.service, record.handler).deployment
        self._registry.get_deployment(wanted)
        if self._registry.target(wanted, record.service, record.handler) is None:
            raise Conflict(f"{wanted} does not offer {record.service}/{record.handler}")
        return wanted

    async def _on_act_on_many(self, request: AdminRequest) -> Answer:
        parameters = Parameters(request, *FILTER_NAMES, "step", "to", "limit")
        action = action_of(request, parameters)
        wanted = self._filter(parameters)
        if wanted == Filter():
            raise BadRequest(
                f"no invocations selected: {action} needs a filter", f"one or more of {', '.join(FILTER_NAMES)}"
            )
        limit = parameters.number("limit", BULK, 1, BULK_MAX)
        deployment = parameters.text("to")
        ids, more = await self._matching(wanted, limit)
        tally = {"matched": len(ids), "done": 0, "unchanged": 0, "failed": 0}
        reasons: dict[str, int] = {}

        async def act(record: Invocation) -> None:
            try:
                there = await self._deployment(deployment, record) if deployment is not None else None
                result = check(
                    await self._router.submit(record.id, command_of(action, record.id, parameters, there))
                )  # fmt: skip
                tally["done" if result.code == Code.DONE else "unchanged"] += 1
            except Exception as error:
                known = circumstance(error)
                if known is None:
                    raise
                tally["failed"] += 1
                reasons[known.message] = reasons.get(known.message, 0) + 1

        for first in range(0, len(ids), AT_A_TIME):
            await asyncio.gather(*(act(record) for record in ids[first : first + AT_A_TIME]))
        request.note(**tally)
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
