"""Circumstances: conditions that keep a request from its answer, and their HTTP statuses.

One small tree, mapped to HTTP here and nowhere else. A circumstance is not a bug (that is an assert) and not a business
failure (that is a value in the journal). Its text is for the sender of the request: it says what is wrong, and its hint
says what to do about it. Errors of other rooms are translated by `circumstance`, at the edge.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, ClassVar, Final, NotRequired, TypedDict

from holdfast.log import errors as log_errors
from holdfast.sdk.journal import Failure
from holdfast.statemachine.access import ADMIN, permits
from holdfast.statemachine.effects import Result


class Error(TypedDict):
    """Why a request was refused, or how an invocation failed."""

    code: Annotated[int, "the HTTP status; of a failed invocation, the code of its TerminalError"]
    message: str
    source: Annotated[str, "where it arose: ingress, admin, invocation (a handler failed), or node (it is starting)"]
    hint: Annotated[str | None, "what to do about it"]
    details: NotRequired[Annotated[list[str], "of some conflicts: one sentence for each reason"]]
    metadata: NotRequired[Annotated[dict[str, str], "what the handler attached to its error"]]


NOT_READY: Final = 470  # Not a standard status: "not ready yet" must not look like an error of the server.


class Circumstance(Exception):
    """`retryable`: the same request may succeed later, and sending it again is harmless."""

    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    hint: str | None = None
    retry_after_s: int | None = None

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        if hint is not None:
            self.hint = hint


class BadRequest(Circumstance):
    """The request itself is wrong, and sending it again will not help."""

    status = 400


class BadManifest(BadRequest):
    """The manifest of an endpoint cannot be registered. `path` is the place inside the manifest."""

    def __init__(self, path: str, message: str, hint: str | None = None) -> None:
        super().__init__(f"the manifest is wrong at {path}: {message}", hint)
        self.path = path


class Unauthorized(Circumstance):
    status = 401


class Forbidden(Circumstance):
    status = 403


class NotFound(Circumstance):
    status = 404


class UnknownService(NotFound):
    pass


class UnknownHandler(NotFound):
    pass


class UnknownInvocation(NotFound):
    hint = "it never existed, or it was removed after its retention"


class WrongMethod(Circumstance):
    status = 405

    def __init__(self, allowed: str, message: str) -> None:
        super().__init__(message, f"use {allowed}")
        self.allowed = allowed


class TooSlow(Circumstance):
    status = 408


class Conflict(Circumstance):
    """The current state does not allow it. `details` has one sentence per reason."""

    status = 409

    def __init__(self, message: str, hint: str | None = None, details: tuple[str, ...] = ()) -> None:
        super().__init__(message, hint)
        self.details = details


class TooLarge(Circumstance):
    status = 413


class UnsupportedEncoding(Circumstance):
    status = 415


class Unprocessable(Circumstance):
    """The request contradicts an earlier one under the same Idempotency-Key."""

    status = 422


class NotReady(Circumstance):
    """The invocation has no outcome yet."""

    status = NOT_READY
    retryable = True


class Overloaded(Circumstance):
    """A limit of this node was reached. Nothing was accepted."""

    status = 429
    retryable = True
    retry_after_s = 1
    hint = "nothing was accepted; send the request again after the time in Retry-After"


class EndpointFailed(Circumstance):
    """An endpoint could not be reached, or gave no usable answer. `detail` says why, to administrators only."""

    status = 502
    retryable = True

    def __init__(self, message: str, hint: str | None = None, *, detail: str = "") -> None:
        super().__init__(message, hint)
        self.detail = detail

    def shown_to(self, roles: Sequence[str]) -> EndpointFailed:
        """Others than administrators could find out what listens at addresses that only nodes can reach."""
        if not self.detail or not permits(roles, ADMIN):
            return self
        return EndpointFailed(f"{self.message}: {self.detail}", self.hint)


class Unavailable(Circumstance):
    """The part of the cluster that must answer cannot do so now. Nothing was accepted."""

    status = 503
    retryable = True
    retry_after_s = 1
    hint = "send the request again after the time in Retry-After; with an Idempotency-Key it cannot run twice"


class Uncertain(Unavailable):
    """The request may have been accepted, or not: its answer was lost. The same id finds it, if it was."""

    hint = (
        "it may have been accepted: send it again with the same Idempotency-Key, or attach to the id in x-holdfast-id"
    )


class Full(Circumstance):
    """A storage limit was reached."""

    status = 507


class Stopping(Unavailable):
    """This node is shutting down."""

    hint = "another node answers, or this one when it is back"


class Paused(Circumstance):
    """The invocation is paused and waits for an operator. It was accepted: the same request finds it again."""

    status = 503


class Internal(Circumstance):
    """A defect of Holdfast. The cause is in the log of the node."""

    hint = "this is a defect of Holdfast: the node's log has the cause"


def circumstance(error: BaseException) -> Circumstance | None:
    """The circumstance that an error of another room amounts to. None if the error is a bug."""
    match error:
        case Circumstance():
            return error
        case log_errors.TooLarge():
            return TooLarge(str(error), "send less, or put large values into a blob store and send their address")
        case log_errors.Overloaded():
            return Overloaded(str(error))
        case log_errors.NoRoomHere():
            return Unavailable(
                f"the disks of the cluster are full: {error}",
                "free space on them or add more; the cluster recovers by itself",
            )
        case log_errors.NoRoom():
            return Unavailable(str(error), "make room, as the message says; the node recovers by itself")
        case log_errors.OutcomeUnknown():
            return Uncertain(str(error))
        case log_errors.ProposalError() if error.retryable:
            return Unavailable(str(error))
        case TimeoutError():
            return Uncertain("no answer from the partition's leader in time")
        case _:
            return None


def check(result: Result) -> Result:
    """The result of a command that took effect or changed nothing. Raises the circumstance of any other result."""
    match result.code:
        case 0 | 200:
            return result
        case 404:
            raise UnknownInvocation(result.message or "there is no such invocation")
        case 409:
            raise Conflict(result.message or "its state does not allow it")
        case 413:
            raise TooLarge(result.message or "too large")
        case 422:
            raise Unprocessable(result.message or "it contradicts an earlier request")
        case 507:
            raise Full(result.message or "a limit was reached")
        case 503:
            raise Unavailable(result.message or "the partition's leader is changing")
        case _:
            raise BadRequest(result.message or f"refused with code {result.code}")


def error_body(
    code: int, message: str, *, source: str, hint: str | None, metadata: dict[str, str] | None = None
) -> bytes:
    """The JSON body of every error. `metadata` is what a handler attached to its `TerminalError`."""
    shown: Error = {"code": code, "message": message, "source": source, "hint": hint}
    if metadata:
        shown["metadata"] = metadata
    return json.dumps(shown).encode()


def status_of(failure: Failure) -> int:
    """A terminal error keeps its code if that is an HTTP error."""
    return failure.code if 400 <= failure.code <= 599 else 500
