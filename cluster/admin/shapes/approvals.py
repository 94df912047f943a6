"""Approvals and decisions about them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from holdfast.cluster.admin.shapes.invocations import Shown
from holdfast.cluster.schemas import Time, one_of
from holdfast.statemachine.inbox import CANCELLED, DECIDED, GONE, TIMED_OUT, WAITING, WITHDRAWN


class Decider(TypedDict):
    id: Annotated[str | None, "of the token; null: without tokens"]
    name: str


class ApprovalDecision(TypedDict):
    choice: Annotated[str | None, "null: the deadline passed first"]
    by: Annotated[Decider | None, "null: nobody, the deadline passed"]
    comment: str | None
    at: Time | None
    payload: NotRequired[Annotated[Any, "what was approved, if it was edited"]]


class Approval(TypedDict):
    id: Annotated[str, "its name, without the secret with which the ingress decides"]
    invocation: str
    step: int
    step_key: str
    service: str
    handler: str
    key: str | None
    title: str
    payload: Shown
    payload_bytes: int
    choices: list[str]
    assignee: str | None
    editable: Annotated[bool, "whether a decision may bring another payload"]
    since: Time | None
    due_at: Annotated[Time | None, "its deadline"]
    remind_at: Time | None
    reminded_at: Time | None
    status: Annotated[str, one_of((WAITING, DECIDED, TIMED_OUT, WITHDRAWN, CANCELLED, GONE))]
    decision: ApprovalDecision | None


class ApprovalPage(TypedDict):
    approvals: Annotated[list[Approval], "the payload of a row is null if it has more than 4 KiB"]
    cursor: Annotated[str | None, "send it to get the next page; null: this is the last"]


class Choice(TypedDict):
    """A decision about an approval."""

    choice: Annotated[str, "one of the choices of the approval"]
    comment: NotRequired[Annotated[str | None, "why; at most 4 KiB"]]
    payload: NotRequired[
        Annotated[Any, 'what is approved, in place of what was shown: any JSON value, or {"base64": "..."} for bytes']
    ]


class Chosen(TypedDict):
    id: str
    status: Annotated[Literal["Decided", "AlreadyDecided"], "AlreadyDecided: this token decided the same way before"]
    decision: ApprovalDecision
