"""The routes of the admin API about approvals."""

from __future__ import annotations

from typing import Final

from holdfast.cluster.admin.choices import PAGE, PAGE_MAX
from holdfast.cluster.http.routes import NO_SUCH, NUMBER, Parameter, Route
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
            Parameter("limit", f"of the page, up to {PAGE_MAX}; {PAGE} if not given", NUMBER),
            Parameter("cursor", "cursor from the previous page"),
        ),
        answers=((200, "approvals; a payload of more than 4 KiB is left out"),),
    ),
    Route(
        "GET",
        "/approvals/{id}",
        "approval",
        "One approval with its payload, and what became of it",
        READ,
        answers=(
            (200, "the approval; its status is waiting, decided, timed-out, withdrawn, cancelled or gone"),
            NO_SUCH,
        ),
    ),
    Route(
        "POST",
        "/approvals/{id}",
        DECIDE,
        "Decide about an approval",
        APPROVE,
        body={
            "type": "object",
            "required": ["choice"],
            "properties": {
                "choice": {"type": "string", "description": "one of the choices of the approval"},
                "comment": {"type": "string"},
                "payload": {
                    "description": 'what is approved, in place of what was shown: any JSON, or {"base64": "..."}'
                },
            },
        },
        answers=(
            (200, "decided, or decided the same way by the same token before"),
            (400, "the approval has no such choice, or its payload must not be edited"),
            (404, "there is no such approval, or nobody waits for it any more: the message says why"),
            (409, "it was decided otherwise before, or timed out: the message says by whom and when"),
        ),
    ),
)
