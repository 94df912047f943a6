"""The shapes of the bodies of the ingress: see `cluster.schemas`. Inputs and results of handlers have schemas of their own."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from holdfast.cluster.errors import Error
from holdfast.cluster.schemas import Keywords, one_of
from holdfast.statemachine.effects import STATUS_NAMES


class Accepted(TypedDict):
    """The invocation is stored, and will run."""

    invocationId: str
    status: Annotated[
        Literal["Accepted", "PreviouslyAccepted"],
        "PreviouslyAccepted: a request with the same Idempotency-Key, or for the same workflow, came before",
    ]


class Completed(TypedDict):
    """A promise or an awakeable is completed."""

    status: Annotated[
        Literal["Resolved", "AlreadyResolved", "Rejected", "AlreadyRejected"],
        "Already…: it was completed with the same outcome before",
    ]


class Rejection(TypedDict):
    message: NotRequired[str]
    code: NotRequired[Annotated[int, Keywords(minimum=400, maximum=599, default=500)]]


class Progress(TypedDict):
    """An invocation changed its status, or began another attempt."""

    status: Annotated[str, one_of(STATUS_NAMES.values())]
    attempt: Annotated[int, "the number of the newest attempt; 0: none has started"]
    reason: Annotated[str | None, "why it is backing off or paused"]


class FollowedOutcome(TypedDict):
    """Has one of these. After it, the stream ends."""

    value: NotRequired[Annotated[Any, "the result, if it is JSON; null if it is empty"]]
    base64: NotRequired[Annotated[str, "any other result"]]
    bytes: NotRequired[Annotated[int, "the size of a result that is too large for an event: ask for it at /output"]]
    failure: NotRequired[Error]


class ApprovalChoice(TypedDict):
    """A decision about an approval."""

    choice: Annotated[str, "one of the choices of the approval"]
    comment: NotRequired[Annotated[str | None, "why; at most 4 KiB"]]
    payload: NotRequired[Annotated[Any, "what is approved, in place of what was shown"]]


class ApprovalChosen(TypedDict):
    """The approval is decided."""

    status: Annotated[Literal["Decided", "AlreadyDecided"], "AlreadyDecided: this token decided the same way before"]
    choice: str
