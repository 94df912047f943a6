"""Approvals: the code asks people, and waits for their decision without using memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Generic, TypeVar, overload

from holdfast.sdk.arguments import check_text, dumped, duration_ms
from holdfast.sdk.attempt import Attempt, Operation
from holdfast.sdk.errors import BadArgument, BadPayload, RetryableError, TerminalError
from holdfast.sdk.ids import format_approval
from holdfast.sdk.journal import (
    CHOICE_BYTES_MAX,
    CHOICES_MAX,
    DETAILS_BYTES_MAX,
    KEY_BYTES_MAX,
    TITLE_BYTES_MAX,
    Op,
    unpack_decided,
)
from holdfast.sdk.serde import ANY, Serde, serde_for

T = TypeVar("T")

APPROVE: Final = "approve"
CHOICES: Final = (APPROVE, "reject")


@dataclasses.dataclass(frozen=True, slots=True)
class Decision(Generic[T]):
    """What people decided. It is true if they approved: `if await ctx.approval("Refund?"): ...`"""

    choice: str | None
    """One of the choices; None if the deadline passed first."""
    approved: bool
    """Whether the choice is "approve", or the first one if there is no choice of that name. Never after a timeout."""
    by: str
    """The name of the token of the person who decided; empty after a timeout."""
    comment: str
    payload: T
    """What the person approved: the payload as it was edited, or as it was shown."""
    decided_at: datetime
    edited: bool = False
    timed_out: bool = False

    def __bool__(self) -> bool:
        return self.approved


class Approval(Operation[Decision[T]]):
    """An approval that people are asked for. `id` lets its holder decide, for links that you send yourself: keep it secret."""

    __slots__ = ("id", "keep")
    id: str
    keep: bool


class Approvals:
    """The part of a context that asks people."""

    _attempt: Attempt

    @overload
    def approval(
        self,
        title: str,
        *,
        choices: Sequence[str] = ...,
        assignee: str | None = ...,
        timeout: float | timedelta | None = ...,
        remind_after: float | timedelta | None = ...,
        key: str | None = ...,
        editable: bool = ...,
        keep: bool = ...,
    ) -> Approval[None]: ...
    @overload
    def approval(
        self,
        title: str,
        payload: T,
        *,
        payload_type: type[T] | Serde[T] | None = ...,
        choices: Sequence[str] = ...,
        assignee: str | None = ...,
        timeout: float | timedelta | None = ...,
        remind_after: float | timedelta | None = ...,
        key: str | None = ...,
        editable: bool = ...,
        keep: bool = ...,
    ) -> Approval[T]: ...
    def approval(
        self,
        title: str,
        payload: Any = None,
        *,
        payload_type: Any = None,
        choices: Sequence[str] = CHOICES,
        assignee: str | None = None,
        timeout: float | timedelta | None = None,
        remind_after: float | timedelta | None = None,
        key: str | None = None,
        editable: bool = True,
        keep: bool = False,
    ) -> Approval[Any]:
        """Ask people for a decision, and wait for it durably::

            decision = await ctx.approval("Refund order 17?", {"order": 17, "eur": 240}, assignee="finance",
                                          timeout=timedelta(days=2))
            if decision.approved:
                await ctx.run("refund", refund, decision.payload)

        The approval is in the inbox of the console, the command line and the admin API until somebody decides. `assignee` is
        a name for people and filters. After `timeout` (seconds or a timedelta) the decision is one without a choice, which is
        not approved. `remind_after` sends a reminder to webhooks, once. `key` names the step explicitly, such as the id of a
        tool call.

        People may edit the payload, unless `editable` is false; `payload_type` decides how it is read back. Continue with
        `decision.payload`, which is what was approved.

        An approval that loses a race, select, any or timeout is withdrawn from the inbox, because the code goes on without
        it. With `keep=True` it stays there, and may be awaited again.
        """
        attempt = self._attempt
        check_text(title, "the title of an approval", TITLE_BYTES_MAX)
        if assignee is not None:
            check_text(assignee, "the assignee of an approval")
        offered = _checked(choices)
        serde = _serde_of(payload, payload_type)
        shown = _shown(serde, payload, title)
        timeout_ms = _positive_ms(timeout, "the timeout of an approval")
        remind_ms = _positive_ms(remind_after, "remind_after")
        if timeout_ms and remind_ms >= timeout_ms:
            raise BadArgument("remind_after must be shorter than the timeout of the approval")
        if attempt.version < 2 or not attempt.start.secrets:
            # No pause: the cluster is probably being upgraded at this moment.
            raise RetryableError("ctx.approval requires that every node of the cluster runs release 0.2 or later")
        if key is not None:
            check_text(key, "the key of a step", KEY_BYTES_MAX - 1)
            step_key = attempt.explicit_key(key)
        else:
            step_key = attempt.next_key("approval")
        operation: Approval[Any] = Approval(attempt, Op.APPROVAL, step_key, _loader(serde, shown, offered, title))
        operation.keep = keep
        argument = [title, shown, offered, assignee, timeout_ms, remind_ms, bool(editable)]
        secret = attempt.approval(operation, argument)
        operation.id = format_approval(attempt.id, operation.index, secret)
        return operation


def _checked(choices: Sequence[str]) -> list[str]:
    if not isinstance(choices, list | tuple):  # A set has another order in another process.
        raise BadArgument(f"the choices of an approval must be a list or a tuple, not {choices!r:.200}")
    for choice in choices:
        check_text(choice, "a choice", CHOICE_BYTES_MAX)
    if not 0 < len(choices) <= CHOICES_MAX or len({*choices}) < len(choices):
        raise BadArgument(
            f"the choices of an approval must be 1 to {CHOICES_MAX} different texts, not {choices!r:.200}"
        )
    return list(choices)


def _positive_ms(value: float | timedelta | None, what: str) -> int:
    if value is None:
        return 0
    milliseconds = duration_ms(value, what)
    if not milliseconds:
        raise BadArgument(f"{what} must be longer than zero")
    return milliseconds


def _serde_of(payload: Any, payload_type: Any) -> Serde[Any]:
    """Models and dataclasses are read back as what they are; other values as plain JSON."""
    if payload_type is not None:
        return serde_for(payload_type)
    is_model = hasattr(payload, "model_dump") or dataclasses.is_dataclass(payload)
    return serde_for(type(payload)) if is_model else ANY


def _shown(serde: Serde[Any], payload: Any, title: str) -> bytes:
    """The payload that people see. It is read back at once: they must not approve what the code then cannot read."""
    what = f"the payload of approval {title!r:.100}"
    shown = dumped(serde, payload, what)
    if len(shown) > DETAILS_BYTES_MAX:
        raise BadArgument(f"the payload of an approval must have at most {DETAILS_BYTES_MAX} bytes, not {len(shown)}")
    if serde is not ANY:
        try:
            serde.load(shown)
        except BadPayload as error:
            raise BadArgument(f"{what} must have the type of its fields, or payload_type: {error}") from None
    return shown


def _loader(serde: Serde[Any], shown: bytes, choices: list[str], title: str) -> Callable[[bytes], Decision[Any]]:
    approves = APPROVE if APPROVE in choices else choices[0]

    def load(payload: bytes) -> Decision[Any]:
        decided = unpack_decided(payload)
        try:
            approved = serde.load(shown if decided.payload is None else decided.payload)
        except BadPayload as error:
            raise TerminalError(
                f"the payload of approval {title!r:.100}, as {decided.by} edited it, does not have its type: {error}",
                code=400,
                kind="BadValue",
            ) from None
        return Decision(
            choice=decided.choice,
            approved=decided.choice == approves,
            by=decided.by,
            comment=decided.comment,
            payload=approved,
            decided_at=datetime.fromtimestamp(decided.at_ms / 1000, UTC),
            edited=decided.payload is not None,
            timed_out=decided.choice is None,
        )

    return load
