"""The routes of the admin API about approvals."""

from __future__ import annotations

from typing import Final

from holdfast.cluster.admin.choices import PAGE, PAGE_MAX
from holdfast.cluster.admin.shapes.approvals import Approval, ApprovalPage, Choice, Chosen
from holdfast.cluster.http.routes import NO_SUCH, Parameter, Route, number
from holdfast.statemachine.access import APPROVE, READ

#: The name of the route that decides. Its path may have a secret, which the audit trail leaves out.
DECIDE: Final = "decide_approval"
OF_APPROVALS: Final = (
    Route(
        "GET",
        "/approvals",
        "approvals",
        "Approvals that wait for somebody, the oldest first, in pages; a page with a cursor may be short",
        READ,
        (
            Parameter("service", "asked for by invocations of this service"),
            Parameter("assignee", "meant for this assignee"),
            Parameter("key", "asked for by invocations of this key of a virtual object or workflow"),
            Parameter("older_than", "asked for longer ago than this duration: 10m, 2h, 1d, PT10M"),
            Parameter("due_within", "with a deadline within this duration"),
            Parameter("limit", "rows of the page", number(1, PAGE_MAX, PAGE)),
            Parameter("cursor", "cursor from the previous page"),
        ),
        answers=((200, "approvals that wait", ApprovalPage),),
    ),
    Route(
        "GET",
        "/approvals/{id}",
        "approval",
        "One approval with its payload, and what became of it",
        READ,
        answers=(
            (200, "the approval", Approval),
            NO_SUCH,
        ),
    ),
    Route(
        "POST",
        "/approvals/{id}",
        DECIDE,
        "Decide about an approval",
        APPROVE,
        body=Choice,
        answers=(
            (200, "decided, or decided the same way by the same token before", Chosen),
            (400, "the approval has no such choice, or its payload must not be edited"),
            (404, "there is no such approval, or nobody waits for it any more: the message says why"),
            (409, "it was decided otherwise before, or timed out: the message says by whom and when"),
        ),
    ),
)
