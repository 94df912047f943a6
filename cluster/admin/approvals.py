"""The inbox of approvals in the admin API: list, show and decide."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.cluster.admin.choices import PAGE, PAGE_MAX
from holdfast.cluster.admin.parameters import AdminRequest, Parameters, json_answer, read_body
from holdfast.cluster.admin.shapes.approvals import ApprovalPage, Choice, Chosen
from holdfast.cluster.admin.views import read_payload, show_approval, show_decision
from holdfast.cluster.durations import parse_duration_ms
from holdfast.cluster.errors import BadRequest
from holdfast.cluster.http.exchange import Answer
from holdfast.cluster.routing.approvals import Approvals, read_approval_id, read_draft
from holdfast.sdk.ids import format_approval
from holdfast.statemachine.inbox import Wanted


class ApprovalAdmin:
    def __init__(self, approvals: Approvals, now_ms: Callable[[], int]) -> None:
        self._approvals = approvals
        self._now_ms = now_ms

    async def on_approvals(self, request: AdminRequest) -> Answer:
        parameters = Parameters(request, "service", "assignee", "key", "older_than", "due_within", "limit", "cursor")
        older_ms, within_ms = _duration(parameters, "older_than"), _duration(parameters, "due_within")
        now_ms = self._now_ms()
        wanted = Wanted(
            service=parameters.text("service"),
            assignee=parameters.text("assignee"),
            key=parameters.text("key"),
            before_ms=now_ms - older_ms if older_ms is not None else None,
            due_before_ms=now_ms + within_ms + 1 if within_ms is not None else None,
        )
        limit = parameters.number("limit", PAGE, 1, PAGE_MAX)
        page = await self._approvals.page(wanted, parameters.text("cursor"), limit)
        shown: ApprovalPage = {"approvals": [show_approval(row) for row in page.rows], "cursor": page.cursor}
        return json_answer(200, shown)

    async def on_approval(self, request: AdminRequest) -> Answer:
        Parameters(request)
        return json_answer(200, show_approval(await self._approvals.find(read_approval_id(request.path["id"]))))

    async def on_decide_approval(self, request: AdminRequest) -> Answer:
        Parameters(request)
        found = await self._approvals.find(read_approval_id(request.path["id"]))
        principal = request.request.principal
        principal.check_approval(found.service)
        draft = read_draft(await read_body(request, Choice, payloads=True), read_payload)
        request.note(service=found.service, title=found.title, choice=draft.choice)
        made = await self._approvals.decide(found, draft, principal)
        shown: Chosen = {
            "id": format_approval(found.invocation, found.step),
            "status": "Decided" if made.is_new else "AlreadyDecided",
            "decision": show_decision(made.decided),
        }
        return json_answer(200, shown)


def _duration(parameters: Parameters, name: str) -> int | None:
    text = parameters.text(name)
    if text is None:
        return None
    try:
        return parse_duration_ms(text)
    except ValueError as error:
        raise BadRequest(f"{name}: {error}") from None
