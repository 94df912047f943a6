"""Every route of the ingress in one table: its role, its answers, and the method that serves it.

Handlers are reached at paths that follow from what is registered. All of them need the role invoke.
"""

from __future__ import annotations

from typing import Any, Final

from holdfast.cluster.http.routes import PUBLIC, Parameter, Route
from holdfast.statemachine.access import INVOKE

_NOT_READY: Final = (470, "it has not completed")
_NO_INVOCATION: Final = (404, "there is no such invocation")
_NO_WORKFLOW: Final = (404, "there is no such workflow, or no invocation of it with this key")
_OUTCOME: Final = (200, "the result of the handler; a failure has the code of its TerminalError")
_COMPLETED: Final = (200, "it is completed, or was completed with the same outcome before")
_NOTHING_WAITS: Final = (404, "nothing waits under this name")
_OTHER_OUTCOME: Final = (409, "it was completed with another outcome before")
_REJECTION: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"message": {"type": "string"}, "code": {"type": "integer", "minimum": 400, "maximum": 599}},
}
_HEALTH: Final = ((200, "the node can serve requests; `warnings` if there are any"), (503, "it cannot, and why"))
ROUTES: Final = (
    Route("GET", "/holdfast/health", "health", "Whether this node can serve requests", PUBLIC, answers=_HEALTH),
    Route("HEAD", "/holdfast/health", "health", "The same without the body", PUBLIC, answers=_HEALTH),
    Route(
        "GET",
        "/holdfast/openapi.json",
        "openapi",
        "The OpenAPI description of this API, with the handlers that the token may call",
        INVOKE,
    ),
    Route(
        "GET",
        "/holdfast/invocation/{id}/attach",
        "attach",
        "Wait for the outcome of an invocation; with Accept: text/event-stream, follow its progress, too",
        INVOKE,
        answers=(_OUTCOME, _NO_INVOCATION),
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
        answers=(_OUTCOME, _NO_WORKFLOW),
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
        body={
            "type": "object",
            "required": ["choice"],
            "properties": {
                "choice": {"type": "string"},
                "comment": {"type": "string"},
                "payload": {"description": "what is approved, in place of what was shown"},
            },
        },
        answers=(
            (200, "decided, or decided the same way by the same token before"),
            (404, "there is no such approval, or nobody waits for it any more: the message says why"),
            (409, "it was decided otherwise before, or timed out: the message says by whom and when"),
        ),
    ),
)
PREFIX: Final = "holdfast"
DELAY: Final = Parameter("delay", "start after this duration: 10s, 2h, PT10M")
