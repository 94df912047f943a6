"""What waits for somebody or something, over all invocations: approvals, awakeables, promises, steps in doubt,
and timers."""

from __future__ import annotations

from holdfast.cluster.admin.choices import PAGE, PAGE_MAX, WAITING
from holdfast.cluster.admin.parameters import AdminRequest, Parameters, json_answer
from holdfast.cluster.admin.shapes import invocations
from holdfast.cluster.admin.shapes.invocations import WaitPage
from holdfast.cluster.errors import BadRequest
from holdfast.cluster.http.exchange import Answer
from holdfast.cluster.routing.surveys import Surveys
from holdfast.cluster.times import show_time
from holdfast.sdk.ids import format_approval, format_awakeable, format_id
from holdfast.statemachine.survey import APPROVAL, AWAKEABLE, Wait


class WaitingAdmin:
    def __init__(self, surveys: Surveys) -> None:
        self._surveys = surveys

    async def on_waiting(self, request: AdminRequest) -> Answer:
        parameters = Parameters(request, "kind", "service", "limit", "cursor")
        kinds = _read_kinds(parameters.text("kind"))
        limit = parameters.number("limit", PAGE, 1, PAGE_MAX)
        found = await self._surveys.waits(kinds, parameters.text("service"), parameters.text("cursor"), limit)
        with_ids = request.request.principal.may_invoke_all
        shown: WaitPage = {
            "waiting": [_show(row, with_ids=with_ids) for row in found.rows],
            "cursor": found.cursor,
        }
        return json_answer(200, shown)


def _read_kinds(text: str | None) -> tuple[str, ...]:
    if text is None:
        return WAITING
    names = [name.strip().lower() for name in text.split(",")]
    for name in names:
        if name not in WAITING:
            raise BadRequest(f"nothing waits for {name!r:.60}", f"there are: {', '.join(WAITING)}")
    return tuple(dict.fromkeys(names))


def _show(row: Wait, *, with_ids: bool) -> invocations.Wait:
    shown: invocations.Wait = {
        "kind": row.kind,
        "invocation": format_id(row.invocation),
        "service": row.service,
        "handler": row.handler,
        "key": row.key,
        "step": row.step,
        "name": row.name,
        "since": show_time(row.since_ms),
        "due_at": show_time(row.due_ms),
    }
    if row.kind == AWAKEABLE and with_ids and row.step is not None:
        # A client that knows it may complete it.
        shown["awakeable"] = format_awakeable(row.invocation, row.step, row.secret)
    if row.kind == APPROVAL and row.step is not None:
        shown["approval"] = format_approval(row.invocation, row.step)
    return shown
