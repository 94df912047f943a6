"""How a request to the ingress can fail."""

from __future__ import annotations

from holdfast.sdk.errors import HoldfastError


class CallFailed(HoldfastError):
    """An invocation failed, or the ingress refused a request.

    `code` is an HTTP status. `source` is "invocation" if the handler failed and "ingress" otherwise. `hint` says what to do.
    `metadata` is what the handler attached to its `TerminalError`.
    """

    def __init__(
        self,
        message: str,
        *,
        code: int,
        source: str = "ingress",
        hint: str | None = None,
        invocation_id: str | None = None,
        metadata: dict[str, str] | None = None,
    ) -> None:
        super().__init__(f"{message} ({hint})" if hint else message)
        self.metadata = metadata or {}
        self.message = message
        self.code = code
        self.source = source
        self.hint = hint
        self.invocation_id = invocation_id


class NotReady(CallFailed):
    """`output` was called for an invocation that has not completed."""


class InvocationPaused(CallFailed):
    """The invocation is paused until an operator resumes it. `attach` to `invocation_id` after that."""


class Unreachable(CallFailed):
    """No node answered in time. It is safe to repeat the request with the same idempotency key."""


class CallTimedOut(CallFailed, TimeoutError):
    """A call had no result within its `timeout`. The invocation goes on: `attach` to its `invocation_id`, or repeat the
    call with the same idempotency key."""
