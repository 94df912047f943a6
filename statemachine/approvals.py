"""Approvals that wait for somebody: the inbox of a partition, in the order in which they were asked.

An approval is a step (`journal`). While it waits it has a row here, with what lists filter by, and timers for its deadline
and its reminder. The row goes with the wait, however that ends (`steps.unwait`). Decisions are in `decisions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from holdfast.sdk.ids import InvocationId
from holdfast.sdk.journal import Decided, pack_decided
from holdfast.statemachine import hooks, timers
from holdfast.statemachine.outcomes import Packed, succeeded
from holdfast.statemachine.records import Invocation, pack, unpack
from holdfast.statemachine.state import State
from holdfast.statemachine.tables import approval_key
from holdfast.statemachine.webhooks import ASKED, REMINDED


class Asked(NamedTuple):
    """The argument of an approval as the journal keeps it: as it was sent, and since when and until when it waits."""

    title: str
    payload: bytes
    choices: Sequence[str]
    assignee: str | None
    timeout_ms: int
    remind_after_ms: int
    editable: bool
    secret: bytes
    since_ms: int = 0
    due_ms: int = 0  # 0: never
    remind_ms: int = 0  # 0: never


class Row(NamedTuple):
    """What the inbox holds of an approval. New fields go to the end, with a default."""

    service: str
    key: str | None
    assignee: str | None
    reminded_ms: int = 0  # 0: not yet


_SENT: Final = Asked._fields.index("since_ms")


def kept(state: State, argument: list[Any]) -> list[Any]:
    """The argument that stays in the journal."""
    asked = Asked(*argument)
    due_ms = timers.due_in(state, asked.timeout_ms) if asked.timeout_ms > 0 else 0
    remind_ms = timers.due_in(state, asked.remind_after_ms) if asked.remind_after_ms > 0 else 0
    if due_ms and remind_ms >= due_ms:
        remind_ms = 0  # There is nothing left to be reminded of.
    return [*argument[:_SENT], state.now_ms, due_ms, remind_ms]


def enter(state: State, record: Invocation, index: int, argument: list[Any]) -> None:
    """Show an approval in the inbox."""
    asked = Asked(*argument)
    row = Row(record.service, record.key, asked.assignee)
    state.put(approval_key(asked.since_ms, record.id, index), pack(row))
    for due_ms in (asked.due_ms, asked.remind_ms):
        if due_ms:
            timers.arm(state, timers.of_step(due_ms, record.id, index))
    state.approvals_version += 1
    _note(state, record, asked, ASKED, index=index)


def leave(state: State, ident: InvocationId, index: int, argument: list[Any]) -> None:
    """Nobody is asked any more."""
    asked = Asked(*argument)
    state.delete(approval_key(asked.since_ms, ident, index))
    for due_ms in (asked.due_ms, asked.remind_ms):
        if due_ms:
            timers.disarm(state, timers.of_step(due_ms, ident, index))
    state.approvals_version += 1


def is_over(state: State, argument: list[Any]) -> bool:
    due_ms = Asked(*argument).due_ms
    return 0 < due_ms <= state.now_ms


def timed_out(state: State) -> Packed:
    return succeeded(pack_decided(Decided(None, at_ms=state.now_ms)))


def remind(state: State, record: Invocation, index: int, argument: list[Any]) -> None:
    """It has waited for long."""
    asked = Asked(*argument)
    key = approval_key(asked.since_ms, record.id, index)
    raw = state.get(key)
    assert raw is not None, "an approval that waits is in the inbox"
    state.put(key, pack(Row(*unpack(raw))._replace(reminded_ms=state.now_ms)))
    state.approvals_version += 1
    _note(state, record, asked, REMINDED, index=index)


def _note(state: State, record: Invocation, asked: Asked, event: int, *, index: int) -> None:
    if state.meta.hooks:
        shown = [index, asked.title, asked.choices, asked.assignee, asked.due_ms]
        hooks.note_approval(state, record, event, shown)
