"""The errors of the SDK, as a small tree.

Users may catch `HoldfastError`. `AttemptEnded` is a `BaseException` that they must not catch: the end of a suspended or
superseded attempt is no failure of what the code was doing.
"""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Mapping
from datetime import timedelta

from holdfast.sdk.journal import (
    METADATA_BYTES_MAX,
    Failure,
    cut_metadata,
    cut_text,
    cut_trace,
)
from holdfast.sdk.traces import frames


class HoldfastError(Exception):
    """The base of every error that the SDK raises for user code to catch."""


class TerminalError(HoldfastError):
    """A failure that is never retried: the step or the invocation fails for good, with an HTTP status.

    Raise it in a handler or in a function given to `ctx.run`; the caller gets it as a `TerminalError` too::

        raise TerminalError("no seats left", code=409)

    `kind` names the class of error for people and filters; it is the class name unless given. `metadata` travels with the
    error, to the handler that called and to HTTP clients, as texts under names: at most 4 KiB of it::

        raise TerminalError("no seats left", code=409, metadata={"flight": "LH 470"})
    """

    metadata: dict[str, str]

    def __init__(
        self, message: str, *, code: int = 500, kind: str = "", metadata: Mapping[str, str] | None = None
    ) -> None:
        if not 400 <= code <= 599:
            raise BadArgument(f"code must be an HTTP status from 400 to 599, not {code}")
        self.metadata = _checked_metadata(metadata)
        super().__init__(message)
        self.message = message
        self.code = code
        self.kind = kind or type(self).__name__


class InvocationCancelled(TerminalError):
    """The invocation was cancelled. Raised where the code waits, or where it would start its next step.

    Code may catch it to compensate: steps after it work again. A coroutine that runs as a step is interrupted (with
    `asyncio.CancelledError`); a sync function in a thread, or a step with `effect="at_most_once"`, runs to its end, and
    the next operation raises this. If the handler returns without another operation, its last one raises this when the
    handler is replayed. So the operation that raises it may have taken effect: compensate for it too.

    If an agent framework catches it, for example to tell the model that a tool failed, the next step raises it again.
    """

    def __init__(self, message: str = "the invocation was cancelled", *, code: int = 409, kind: str = "Cancelled"):
        super().__init__(message, code=code, kind=kind)


class RetriesExhausted(TerminalError):
    """A step failed as often as its `RetryPolicy` allows; the message includes the last error."""


class JournalTooLong(TerminalError):
    """The journal of this invocation reached its limit: split the work into several invocations.

    Raised once, by the first operation beyond the limit, which did not happen. A tenth of the limit, and at least 100
    steps, are in reserve after that, so code may catch it to compensate. Beyond the reserve the invocation ends.
    """

    def __init__(self, message: str, *, code: int = 413, kind: str = "JournalTooLong"):
        super().__init__(message, code=code, kind=kind)


class RetryableError(HoldfastError):
    """A failure that is retried, like any other exception, but after `retry_after` (seconds or a timedelta)::

    raise RetryableError("the model is overloaded", retry_after=30)

    `retry_after` replaces the backoff of the step's or handler's `RetryPolicy`. The failure counts, so `max_attempts` and
    `max_duration` hold. Without `retry_after` the policy decides.
    """

    def __init__(self, message: str, *, retry_after: float | timedelta = 0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RunAgain(HoldfastError):
    """Raised by a `reconcile` hook: the effect in doubt did not happen, so the step may run."""


class NonDeterminismError(HoldfastError):
    """The code diverged from its journal during replay. The invocation pauses for an operator."""

    def __init__(self, message: str, *, expected: str, found: str) -> None:
        super().__init__(f"{message}\n  the journal has: {expected}\n  the code does:   {found}")
        self.expected = expected
        self.found = found


class BadDefinition(HoldfastError):
    """The definition of a service or handler cannot work. Raised where it is defined."""


class BadPayload(HoldfastError):
    """A value cannot be converted to bytes, or bytes cannot be converted to the declared type."""


class MisusedContext(HoldfastError):
    """A context was used where or how it cannot work: outside its handler, inside a step, with a wrong argument.

    A retry cannot help, so the invocation pauses until its code is corrected.
    """


class BadArgument(MisusedContext, ValueError, TypeError):
    """An argument of an operation is not allowed, such as a negative delay."""


class MissingOperation(MisusedContext, AttributeError):
    """The context of this kind of service does not have this operation."""


class ExitRaised(HoldfastError):
    """A handler or a step raised `SystemExit` or `KeyboardInterrupt`: its attempt failed, and the process continues."""


class AttemptEnded(BaseException):
    """This attempt has ended (suspended, aborted, superseded). The invocation continues in another one.

    Never catch it without raising it again: nothing that the code does after it is recorded.
    """


def never_works(error: BaseException) -> bool:
    """Whether the error is a mistake in the code that a retry cannot fix."""
    return any(isinstance(each, BadPayload | MisusedContext) for each in _leaves(error))


def find_terminal(error: BaseException) -> TerminalError | None:
    """The error that fails an invocation for good. A group counts if nothing in it can be retried.

    An agent framework may have caught it and raised an error of its own instead. What the user's code makes of an error is
    the user's decision.
    """
    leaves = _leaves(error)
    found = [each for each in leaves if isinstance(each, TerminalError)]
    return found[0] if found and len(found) == len(leaves) else None


def _leaves(error: BaseException) -> list[BaseException]:
    """The errors in a group, and those behind the errors of frameworks."""
    found: list[BaseException] = []
    waiting, seen = [error], set[int]()
    while waiting:
        each = waiting.pop(0)
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, BaseExceptionGroup):
            waiting[:0] = each.exceptions
        elif not isinstance(each, HoldfastError) and (inner := _replaced_by(each)) is not None:
            waiting.insert(0, inner)
        else:
            found.append(each)
    return found


def _replaced_by(error: BaseException) -> BaseException | None:
    """The error that a framework caught when it raised this one."""
    inner = error.__cause__ if error.__suppress_context__ or error.__cause__ is not None else error.__context__
    return inner if inner is not None and is_caught_by_framework(inner) else None


#: Agent frameworks, by the import names of their packages. They replace errors of tools by their own, or by text for the
#: model. `agents` of OpenAI is missing because applications have packages of that name: its integration adds it.
_frameworks: set[str] = {
    "autogen_agentchat", "autogen_core", "crewai", "fastmcp", "google.adk", "haystack", "langchain", "langchain_core",
    "langgraph", "litellm", "llama_index", "mcp", "pydantic_ai", "pydantic_graph", "smolagents",
}  # fmt: skip


def see_through(package: str) -> None:
    """Treat the code of this package as an agent framework: an error that it catches and replaces still counts."""
    _frameworks.add(package)


_final: dict[type[Exception], int] = {}


def fails_for_good(kind: type[Exception], *, code: int) -> None:
    """Fail an invocation whose handler raises this with a `TerminalError` of this status. For errors of a framework whose
    requests are steps: another attempt would replay them to the same end. In a step they are retried."""
    _final[kind] = code


def find_final(error: BaseException) -> TerminalError | None:
    """The error that fails an invocation for good when its handler raises it."""
    terminal = find_terminal(error)
    if terminal is None:
        code = next((code for kind, code in _final.items() if isinstance(error, kind)), 0)
        if code:
            terminal = TerminalError(str(error), code=code, kind=type(error).__name__)
    return terminal


def is_caught_by_framework(error: BaseException) -> bool:
    """Whether the code that this error reached last belongs to a framework."""
    trace = error.__traceback__  # It begins with the frame that the error reached last.
    if trace is None:
        return False
    parts = str(trace.tb_frame.f_globals.get("__name__", "")).split(".")
    return any(".".join(parts[:length]) in _frameworks for length in range(1, len(parts) + 1))


def is_being_handled(error: BaseException) -> bool:
    """Whether the running code is in an `except` block for this error, or for one that a framework made of it."""
    handled = sys.exception()
    return handled is not None and any(each is error for each in _leaves(handled))


def is_from_terminal(error: BaseException) -> bool:
    """Whether it may be Ctrl-C. Where a loop or a server handles the signal, only code raises KeyboardInterrupt."""
    return isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def exit_raised(error: BaseException) -> ExitRaised:
    """The error that replaces an exception that would end the process."""
    text = f"{type(error).__name__}({error})"
    raised = ExitRaised(f"{text} was raised in a handler or a step: its attempt failed, and the process continues")
    raised.__cause__ = error
    return raised.with_traceback(error.__traceback__)  # The journal shows where the original exception was raised.


def retry_after_ms(error: BaseException) -> int:
    """The delay that an error requests before the retry, as `RetryableError` does; 0 if it requests none."""
    after = getattr(error, "retry_after", 0)
    seconds = after.total_seconds() if isinstance(after, timedelta) else after
    return math.ceil(seconds * 1000) if isinstance(seconds, int | float) and 0 < seconds < 1e11 else 0


def to_failure(error: BaseException) -> Failure:
    """An exception as it is journaled. One that is not a `TerminalError` has code 500."""
    try:
        text = str(error)
    except Exception:
        text = ""  # Its __str__ raises, but the failure still counts.
    kind = type(error).__name__
    if isinstance(error, TerminalError):
        metadata = {"metadata": cut_metadata(error.metadata)} if error.metadata else None
        return Failure(error.code, cut_text(text), cut_kind(error.kind), metadata)
    trace = cut_trace(frames(error))
    extra = {"trace": trace} if trace else None
    return Failure(500, cut_text(f"{kind}: {text}" if text else kind), cut_kind(kind), extra)


def cut_kind(kind: str) -> str:
    """At most 200 characters, and always encodable."""
    return kind.encode(errors="replace").decode()[:200]


def from_failure(failure: Failure) -> TerminalError:
    """A journaled failure as user code sees it: the same live and in replay."""
    code = failure.code if 400 <= failure.code <= 599 else 500
    known = _BY_KIND.get(failure.kind, TerminalError)
    error = known(failure.message, code=code, kind=failure.kind)
    error.metadata = dict((failure.extra or {}).get("metadata", {}))
    return error


def _checked_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    if not metadata:
        return {}
    found = dict(metadata)
    for name, text in found.items():
        if type(name) is not str or type(text) is not str:
            raise BadArgument(
                f"metadata must map str to str, not {name!r:.80} to {text!r:.80}: convert the values to text"
            )
    if len(cut_metadata(found)) < len(found):
        raise BadArgument(f"metadata must have at most {METADATA_BYTES_MAX} bytes, names and values together")
    return found


_BY_KIND: dict[str, type[TerminalError]] = {
    "Cancelled": InvocationCancelled,
    "JournalTooLong": JournalTooLong,
    "RetriesExhausted": RetriesExhausted,
}
