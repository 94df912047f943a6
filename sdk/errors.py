"""What can go wrong for code that uses the SDK, as a small tree.

`HoldfastError` is what a user may catch. `AttemptEnded` is not: it is a `BaseException`, because an attempt that was
suspended or superseded must leave the user's code without being mistaken for a failure of what it was doing.
"""

from __future__ import annotations

from datetime import timedelta

from holdfast.sdk.protocol import Failure, cut_text


class HoldfastError(Exception):
    """The base of every error that the SDK raises for user code to catch."""


class TerminalError(HoldfastError):
    """A failure that is never retried: the step or the invocation fails for good, with an HTTP status.

    Raise it in a handler or in a function given to `ctx.run`; whoever called gets it as a `TerminalError` too::

        raise TerminalError("no seats left", code=409)

    `kind` names the class of error for people and filters; it is the class name unless given.
    """

    def __init__(self, message: str, *, code: int = 500, kind: str = "") -> None:
        if not 400 <= code <= 599:
            raise ValueError(f"code is an HTTP status of an error, 400 to 599, not {code}")
        super().__init__(message)
        self.message = message
        self.code = code
        self.kind = kind or type(self).__name__


class InvocationCancelled(TerminalError):
    """Somebody cancelled the invocation. Raised where the code waits, or where it would start its next step.

    Code may catch it to compensate: steps after it work again.
    """

    def __init__(self, message: str = "the invocation was cancelled", *, code: int = 409, kind: str = "Cancelled"):
        super().__init__(message, code=code, kind=kind)


class RetriesExhausted(TerminalError):
    """A step failed as often as its `RetryPolicy` allows; the message includes the last error."""


class RetryableError(HoldfastError):
    """A failure to try again, like any other exception, but not before `retry_after` (seconds or a timedelta)::

    raise RetryableError("the model is overloaded", retry_after=30)
    """

    def __init__(self, message: str, *, retry_after: float | timedelta = 0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RunAgain(HoldfastError):
    """Raised by a `reconcile` hook: the effect in doubt did not happen, so the step may run."""


class NonDeterminismError(HoldfastError):
    """In replay the code did something else than the journal says it did. The invocation pauses for an operator."""

    def __init__(self, message: str, *, expected: str, found: str) -> None:
        super().__init__(f"{message}\n  the journal has: {expected}\n  the code does:   {found}")
        self.expected = expected
        self.found = found


class BadDefinition(HoldfastError):
    """A service or handler is defined in a way that cannot work. Raised where it is defined."""


class BadPayload(HoldfastError):
    """A value cannot be turned into bytes, or bytes not into the declared type."""


class MisusedContext(HoldfastError):
    """A context was used where it cannot work: outside its handler, inside a step, or in another thread."""


class AttemptEnded(BaseException):
    """This attempt is over (suspended, aborted, superseded); the invocation goes on in another one.

    Never catch it without raising it again: whatever the code does from here on is not recorded.
    """


def to_failure(error: BaseException) -> Failure:
    """An exception as it is journaled. One that is not a `TerminalError` has code 500."""
    try:
        text = str(error)
    except Exception:
        text = ""  # It cannot even say what it is; it is a failure nevertheless.
    kind = type(error).__name__
    if isinstance(error, TerminalError):
        return Failure(error.code, cut_text(text), cut_kind(error.kind))
    return Failure(500, cut_text(f"{kind}: {text}" if text else kind), cut_kind(kind))


def cut_kind(kind: str) -> str:
    """At most 200 characters, and always encodable."""
    return kind.encode(errors="replace").decode()[:200]


def from_failure(failure: Failure) -> TerminalError:
    """A journaled failure as user code sees it: the same live and in replay."""
    code = failure.code if 400 <= failure.code <= 599 else 500
    known = _BY_KIND.get(failure.kind, TerminalError)
    return known(failure.message, code=code, kind=failure.kind)


_BY_KIND: dict[str, type[TerminalError]] = {"Cancelled": InvocationCancelled, "RetriesExhausted": RetriesExhausted}
