"""The audit trail in the admin API, and the requests that belong in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Final

from holdfast.cluster.admin.choices import ACTIONS, PAGE, PAGE_MAX, SEQUENCE_MAX
from holdfast.cluster.admin.parameters import AdminRequest, Parameters, json_answer, read_time
from holdfast.cluster.admin.routes_of_approvals import DECIDE
from holdfast.cluster.admin.shapes import access
from holdfast.cluster.admin.shapes.access import AuditPage
from holdfast.cluster.errors import BadRequest
from holdfast.cluster.http.audit import Audit, outcome_of
from holdfast.cluster.http.exchange import Answer, Request
from holdfast.cluster.http.routes import Route
from holdfast.cluster.registry.registry import Registry
from holdfast.cluster.times import show_time
from holdfast.log.errors import ProposalError
from holdfast.sdk.ids import BadId, format_approval, parse_approval
from holdfast.statemachine.audit import Act, Recorded

SETTLE_S: Final = 2.0
OUTCOMES: Final = ("done", "refused", "failed", "unknown")


class AuditAdmin:
    def __init__(self, registry: Registry, audit: Audit | None, now_ms: Callable[[], int]) -> None:
        self._registry = registry
        self._audit = audit
        self._now_ms = now_ms

    async def on_audit(self, request: AdminRequest) -> Answer:
        parameters = Parameters(request, "since", "until", "principal", "action", "outcome", "limit", "cursor", "after")
        wanted = _filter(parameters, self._now_ms())
        limit = parameters.number("limit", PAGE, 1, PAGE_MAX)
        before = parameters.number("cursor", 0, 1, SEQUENCE_MAX) or None
        after = parameters.number("after", -1, 0, SEQUENCE_MAX)
        if before is not None and after >= 0:
            raise BadRequest("give either cursor or after, not both")
        complete = await self._catch_up()
        trail = self._registry.state.trail
        acts = trail.newest_first(before)
        if after >= 0:
            acts = [each for each in reversed(acts) if each.sequence > after]
        found = list(islice((each for each in acts if wanted(each.act)), limit + 1))
        more, found = len(found) > limit, found[:limit]
        shown: AuditPage = {
            "acts": [_show(each) for each in found],
            "cursor": found[-1].sequence if more and after < 0 else None,
            "newest": trail.next - 1,
            "complete": complete,
        }
        return json_answer(200, shown)

    async def _catch_up(self) -> bool:
        """Whether this node knows all acts recorded before. Without a quorum it shows what it knows."""
        if self._audit is not None:
            await self._audit.settle(SETTLE_S)
        try:
            if self._registry.fresh is not None:
                await self._registry.fresh()
            return True
        except ProposalError:
            return False


def name_act(request: Request, route: Route, places: Mapping[str, str], query: Mapping[str, str]) -> None:
    """Make a request to this route name its change, if it changes something."""
    if not route.acts:
        return
    known = {parameter.name for parameter in route.parameters}
    targets = {**places, **{name: value for name, value in query.items() if name in known}}
    action = targets.pop("action", "")
    if action not in ACTIONS:
        action = route.name
    elif route.name == "act_on_many":
        action = f"{action}_many"
    if route.name == DECIDE:
        targets["id"] = _without_secret(places["id"])
    request.acts(action, **targets)


def _without_secret(text: str) -> str:
    """The name of an approval. A reader of the whole id could decide about another one at the ingress."""
    try:
        id_, step, _ = parse_approval(text)
    except BadId:
        return "not the id of an approval"
    return format_approval(id_, step)


def _filter(parameters: Parameters, now_ms: int) -> Callable[[Act], bool]:
    since, until = read_time(parameters, "since", now_ms), read_time(parameters, "until", now_ms)
    principal, action, outcome = (parameters.text(name) for name in ("principal", "action", "outcome"))
    if outcome is not None and outcome not in OUTCOMES and not (outcome.isascii() and outcome.isdigit()):
        raise BadRequest(
            f"there is no outcome {outcome!r:.60}", f"there are: {', '.join(OUTCOMES)}, or a status as 404"
        )

    def matches(act: Act) -> bool:
        return (
            (since is None or act.at_ms >= since)
            and (until is None or act.at_ms < until)
            and (principal is None or principal in (act.principal, act.name))
            and (action is None or action == act.action)
            and (outcome is None or outcome in (outcome_of(act.status), str(act.status)))
        )

    return matches


def _show(recorded: Recorded) -> access.Act:
    act = recorded.act
    return {
        "sequence": recorded.sequence,
        "at": show_time(act.at_ms),
        "principal": {"id": act.principal or None, "name": act.name},
        "address": act.address or None,
        "node": act.node,
        "door": act.door,
        "method": act.method,
        "action": act.action,
        "targets": act.targets,
        "outcome": outcome_of(act.status),
        "status": act.status or None,
        "error": act.error or None,
        "unrecorded": act.unrecorded,
    }
