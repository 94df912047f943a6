"""Every route of the ingress in one table: its role, its answers, and the method that serves it.

Handlers are reached at paths that follow from what is registered. All of them need the role invoke.
"""

from __future__ import annotations

from typing import Final

from holdfast.cluster.http.routes import PUBLIC, EventStream, Parameter, Raw, Route
from holdfast.cluster.http.shapes import Health
from holdfast.cluster.ingress.shapes import (
    ApprovalChoice,
    ApprovalChosen,
    Completed,
    FollowedOutcome,
    Progress,
    Rejection,
)
from holdfast.statemachine.access import INVOKE

_NOT_READY: Final = (470, "it has not completed")
_NO_INVOCATION: Final = (404, "there is no such invocation")
_NO_WORKFLOW: Final = (404, "there is no such workflow, or no invocation of it with this key")
_RESULT: Final = (
    Raw("application/json", "the result, if the handler returns JSON"),
    Raw("*/*", "the result, with the content type of the handler"),
)
_OUTCOME: Final = (200, "the result of the handler; a failure has the code of its TerminalError", _RESULT)
_FOLLOWED: Final = (
    200,
    _OUTCOME[1],
    (*_RESULT, EventStream({"progress": Progress, "outcome": FollowedOutcome})),
)
_COMPLETED: Final = (200, "it is completed, or was completed with the same outcome before", Completed)
_NOTHING_WAITS: Final = (404, "nothing waits under this name")
_OTHER_OUTCOME: Final = (409, "it was completed with another outcome before")
_VALUE: Final = (
    Raw("application/json", "the value: any JSON"),
    Raw("application/octet-stream", "the value: any bytes", {"type": "string", "format": "binary"}),
)
_REJECTION: Final = (Rejection, Raw("text/plain", "the message", {"type": "string"}))
_HEALTH: Final = (
    (200, "the node can serve requests; `warnings` if there are any", Health),
    (503, "it cannot, and why"),
)
ROUTES: Final = (
    Route("GET", "/holdfast/health", "health", "Whether this node can serve requests", PUBLIC, answers=_HEALTH),
    Route(
        "HEAD",
        "/holdfast/health",
        "health",
        "The same without the body",
        PUBLIC,
        answers=tuple((status, text, None) for status, text, *_ in _HEALTH),
    ),
    Route(
        "GET",
        "/holdfast/openapi.json",
        "openapi",
        "The OpenAPI description of this API, with the handlers that the token may call",
        INVOKE,
        answers=((200, "the description", Raw("application/json", "an OpenAPI document", {"type": "object"})),),
    ),
    Route(
        "GET",
        "/holdfast/invocation/{id}/attach",
        "attach",
        "Wait for the outcome of an invocation; with Accept: text/event-stream, follow its progress, too",
        INVOKE,
        answers=(_FOLLOWED, _NO_INVOCATION),
    ),
    Route(
        "GET",
        "/holdfast/invocation/{id}/output",
        "output",
        "The outcome of an invocation, if it has completed",
        INVOKE,
        answers=(_OUTCOME, _NO_INVOCATION, _NOT_READY),
    ),
    Route(
        "GET",
        "/holdfast/workflow/{name}/{key}/attach",
        "attach_workflow",
        "Wait for the outcome of a workflow",
        INVOKE,
        answers=(_FOLLOWED, _NO_WORKFLOW),
        service="name",
    ),
    Route(
        "GET",
        "/holdfast/workflow/{name}/{key}/output",
        "output_workflow",
        "The outcome of a workflow, if it has completed",
        INVOKE,
        answers=(_OUTCOME, _NO_WORKFLOW, _NOT_READY),
        service="name",
    ),
    Route(
        "POST",
        "/holdfast/workflow/{name}/{key}/promises/{promise}/resolve",
        "resolve_promise",
        "Complete a promise with a value: the body",
        INVOKE,
        body=_VALUE,
        answers=(_COMPLETED, _NOTHING_WAITS, _OTHER_OUTCOME),
        service="name",
    ),
    Route(
        "POST",
        "/holdfast/workflow/{name}/{key}/promises/{promise}/reject",
        "reject_promise",
        "Fail a promise: the body is a message, or JSON with message and code",
        INVOKE,
        body=_REJECTION,
        answers=(_COMPLETED, _NOTHING_WAITS, _OTHER_OUTCOME),
        service="name",
    ),
    Route(
        "POST",
        "/holdfast/awakeables/{id}/resolve",
        "resolve_awakeable",
        "Complete an awakeable with a value: the body",
        INVOKE,
        body=_VALUE,
        answers=(_COMPLETED, _NOTHING_WAITS, _OTHER_OUTCOME),
    ),
    Route(
        "POST",
        "/holdfast/awakeables/{id}/reject",
        "reject_awakeable",
        "Fail an awakeable: the body is a message, or JSON with message and code",
        INVOKE,
        body=_REJECTION,
        answers=(_COMPLETED, _NOTHING_WAITS, _OTHER_OUTCOME),
    ),
    Route(
        "POST",
        "/holdfast/approvals/{id}",
        "decide_approval",
        "Decide about an approval, with the whole id that its handler handed out",
        INVOKE,
        body=ApprovalChoice,
        answers=(
            (200, "decided, or decided the same way by the same token before", ApprovalChosen),
            (404, "there is no such approval, or nobody waits for it any more: the message says why"),
            (409, "it was decided otherwise before, or timed out: the message says by whom and when"),
        ),
    ),
)
PREFIX: Final = "holdfast"
DELAY: Final = Parameter("delay", "start after this duration: 10s, 2h, PT10M")
