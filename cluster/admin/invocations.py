"""Invocations in the admin API: lists, one with its journal, and actions on one or on many."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

from holdfast.cluster.admin.actions import action_of, command_of, show_done
from holdfast.cluster.admin.choices import (
    BULK,
    BULK_MAX,
    COMPLETED,
    FAILURE_CODE_MAX,
    NEWEST,
    OLDEST,
    ORDERS,
    PAGE,
    PAGE_MAX,
    STEP_MAX,
    STEPS_PAGE,
)
from holdfast.cluster.admin.healths import Healths
from holdfast.cluster.admin.parameters import (
    AdminRequest,
    Parameters,
    id_of,
    json_answer,
    read_body,
    read_ends,
    read_id,
    read_statuses,
    read_tags,
    read_time,
    step_of,
)
from holdfast.cluster.admin.routes import FILTER_NAMES
from holdfast.cluster.admin.shapes.invocations import BulkDone, Decided, Decision, InvocationPage, Journal
from holdfast.cluster.admin.views import read_payload, show_description, show_invocation, show_step
from holdfast.cluster.durations import parse_duration_ms
from holdfast.cluster.errors import BadRequest, Conflict, UnknownInvocation, check, circumstance
from holdfast.cluster.handlers.health import Health
from holdfast.cluster.http.exchange import Answer
from holdfast.cluster.registry.registry import Registry
from holdfast.cluster.routing.families import Families
from holdfast.cluster.routing.reader import Reader
from holdfast.cluster.routing.router import Router
from holdfast.cluster.routing.trees import Trees
from holdfast.sdk.ids import DeploymentId, InvocationId, format_id
from holdfast.sdk.journal import cut_text
from holdfast.statemachine.commands import DecideStep
from holdfast.statemachine.effects import Code, Status
from holdfast.statemachine.lists import Order
from holdfast.statemachine.outcomes import failed, succeeded
from holdfast.statemachine.queries import Filter
from holdfast.statemachine.records import Invocation

_ORDERS: Final = {NEWEST: Order.NEWEST, OLDEST: Order.OLDEST, COMPLETED: Order.COMPLETED}
AT_A_TIME: Final = 256  # concurrent actions of a bulk operation
BULK_S: Final = 20.0  # After this time it answers, whether it has found all or not.


class InvocationAdmin:
    def __init__(
        self,
        registry: Registry,
        router: Router,
        reader: Reader,
        trees: Trees,
        *,
        healths: Healths,
        now_ms: Callable[[], int],
    ) -> None:
        self._trees = trees
        self._families = Families(reader, trees, now_ms=now_ms)
        self._registry = registry
        self._router = router
        self._reader = reader
        self._healths = healths
        self._now_ms = now_ms

    async def on_invocations(self, request: AdminRequest) -> Answer:
        parameters = Parameters(request, *FILTER_NAMES, "order", "limit", "cursor")
        wanted = self._filter(parameters)
        page = await self._families.page(
            wanted,
            parameters.text("cursor"),
            parameters.number("limit", PAGE, 1, PAGE_MAX),
            _ORDERS[parameters.choice("order", ORDERS)],
        )
        shown = [show_invocation(record, page.failures.get(record.id)) for record in page.records]
        answer: InvocationPage = {
            "invocations": shown,
            "cursor": page.cursor,
            "looked_at": page.looked_at,
            "complete": page.complete,
        }
        return json_answer(200, answer)

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
            deployment=DeploymentId(deployment) if (deployment := parameters.text("deployment")) is not None else None,
            created_before_ms=created_before_ms,
            ends=read_ends(parameters.text("outcome")),
            created_since_ms=read_time(parameters, "since", self._now_ms()),
            idempotency_key=parameters.text("idempotency_key"),
            key_prefix=parameters.text("key_prefix"),
            failure_code=parameters.number("failure_code", 0, 1, FAILURE_CODE_MAX)
            if parameters.text("failure_code")
            else None,
            failure=failure.lower() if (failure := parameters.text("failure")) is not None else None,
            parent=read_id(parent) if (parent := parameters.text("parent")) is not None else None,
            completed_since_ms=read_time(parameters, "completed_since", self._now_ms()),
            completed_before_ms=read_time(parameters, "completed_until", self._now_ms()),
            tags=read_tags(parameters.every("tag")),
            root=read_id(root) if (root := parameters.text("root")) is not None else None,
        )

    async def on_invocation(self, request: AdminRequest) -> Answer:
        id_ = id_of(request)
        description = await self._reader.describe(id_)
        if description is None:
            raise UnknownInvocation(f"there is no invocation {format_id(id_)}")
        record = description.record
        standing = self._registry.state.pauses.covering(record.service, record.key)
        healths, children = await asyncio.gather(self._health_for(request, record), self._trees.count(record))
        return json_answer(200, show_description(description, healths, standing=standing, children=children))

    async def _health_for(self, request: AdminRequest, record: Invocation) -> Sequence[Health]:
        """Of the deployment that will run an invocation: the one it is pinned to, or the one for new invocations."""
        if record.status != Status.RUNNING:
            return ()
        target = self._registry.find(record.service, record.handler)
        deployment = record.deployment or (target.deployment if target is not None else None)
        return await self._healths.of(request, deployment, record.id) if deployment is not None else ()

    async def on_journal(self, request: AdminRequest) -> Answer:
        parameters = Parameters(request, "start", "limit")
        start = parameters.number("start", 0, 0, STEP_MAX)
        limit = parameters.number("limit", STEPS_PAGE, 1, STEPS_PAGE)
        id_ = id_of(request)
        steps = await self._reader.journal(id_, start, limit)
        if steps is None:
            raise UnknownInvocation(f"there is no invocation {format_id(id_)}")
        may_complete = request.request.principal.may_invoke_all
        shown = [show_step(id_, start + offset, step, with_ids=may_complete) for offset, step in enumerate(steps)]
        journal: Journal = {
            "id": format_id(id_),
            "steps": shown,
            "next": start + limit if len(steps) == limit else None,
        }
        return json_answer(200, journal)

    async def on_decide(self, request: AdminRequest) -> Answer:
        id_ = id_of(request)
        step = step_of(request)
        await self._check_decides(request, id_)
        given = await read_body(request, Decision, payloads=True)
        if len(given) != 1 or given.get("again", True) is not True:
            raise BadRequest('send exactly one of "value", "failure" and "again": true')
        outcome: list[Any] | None = None
        if "value" in given:
            outcome = succeeded(read_payload(given["value"]))
        elif "failure" in given:
            failure = given["failure"]
            message = failure.get("message") if isinstance(failure, dict) else None
            code = failure.get("code", 500) if isinstance(failure, dict) else None
            if not isinstance(message, str) or type(code) is not int or not 400 <= code <= 599:
                raise BadRequest('"failure" must have a "message" and may have a "code" from 400 to 599')
            outcome = failed(code, cut_text(message), "Decided")
        check(await self._router.submit(id_, DecideStep(id_, step, outcome)))
        decided: Decided = {"id": format_id(id_), "step": step, "status": "Decided"}
        return json_answer(200, decided)

    async def _check_decides(self, request: AdminRequest, id_: InvocationId) -> None:
        """A token that decides only for some services does not decide for others."""
        principal = request.request.principal
        if principal.services and (description := await self._reader.describe(id_)) is not None:
            principal.check_approval(description.record.service)

    async def on_act(self, request: AdminRequest) -> Answer:
        parameters = Parameters(request, "step", "to")
        action = action_of(request, parameters)
        id_ = id_of(request)
        wanted, deployment = parameters.text("to"), None
        if wanted is not None:
            description = await self._reader.describe(id_)
            if description is None:
                raise UnknownInvocation(f"there is no invocation {format_id(id_)}")
            deployment = await self._deployment(wanted, description.record)
        result = check(await self._router.submit(id_, command_of(action, id_, parameters, deployment)))
        done = show_done(action, id_, result)
        if "new_id" in done:
            request.note(new_id=done["new_id"])
        return json_answer(200, done)

    async def _deployment(self, wanted: str, record: Invocation) -> DeploymentId:
        """The deployment on which an invocation shall continue; it must offer the handler."""
        return await self._registry.certainly(lambda: self._known_deployment(wanted, record))

    def _known_deployment(self, wanted: str, record: Invocation) -> DeploymentId:
        if wanted == "newest":
            return self._registry.resolve(record.service, record.handler).deployment
        deployment = self._registry.get_deployment(DeploymentId(wanted)).id
        if self._registry.target(deployment, record.service, record.handler) is None:
            raise Conflict(f"{wanted} does not offer {record.service}/{record.handler}")
        return deployment

    async def on_act_on_many(self, request: AdminRequest) -> Answer:
        parameters = Parameters(request, *FILTER_NAMES, "step", "to", "limit", "dry_run")
        action = action_of(request, parameters)
        wanted = self._filter(parameters)
        if wanted == Filter():
            raise BadRequest(
                f"no invocations selected: {action} needs a filter", f"one or more of {', '.join(FILTER_NAMES)}"
            )
        limit = parameters.number("limit", BULK, 1, BULK_MAX)
        deployment = parameters.text("to")
        dry_run = parameters.truth("dry_run")
        request.note(**({"dry_run": True} if dry_run else {}))
        tally = {"matched": 0, "done": 0, "unchanged": 0, "failed": 0}
        reasons: dict[str, int] = {}

        async def act(record: Invocation) -> None:
            try:
                there = await self._deployment(deployment, record) if deployment is not None else None
                result = check(await self._router.submit(record.id, command_of(action, record.id, parameters, there)))
                tally["done" if result.code == Code.DONE else "unchanged"] += 1
            except Exception as error:
                known = circumstance(error)
                if known is None:
                    raise
                tally["failed"] += 1
                reasons[known.message] = reasons.get(known.message, 0) + 1

        more = False
        async for records, may_be_more in self._matching(wanted, limit):
            more = may_be_more
            tally["matched"] += len(records)
            if not dry_run:
                await asyncio.gather(*(act(record) for record in records))
        request.note(**tally)
        shown: BulkDone = {"action": action, "matched": tally["matched"], "more": more}
        if not dry_run:
            shown["done"], shown["unchanged"], shown["failed"] = tally["done"], tally["unchanged"], tally["failed"]
            shown["reasons"] = reasons
        return json_answer(200, shown)

    async def _matching(self, wanted: Filter, limit: int) -> AsyncIterator[tuple[list[Invocation], bool]]:
        """Pages of invocations, newest first, and whether there may be more behind each. Stops after a while: a filter that
        matches little must not keep a client waiting until it gives up."""
        now, cursor, left = asyncio.get_running_loop().time, None, limit
        deadline = now() + BULK_S
        while True:
            page = await self._families.page(wanted, cursor, min(left, AT_A_TIME))
            cursor = page.cursor
            left -= len(page.records)
            yield page.records, cursor is not None or not page.complete
            if cursor is None or left <= 0 or now() > deadline:
                return
