"""Invocations, their journals and trees, and actions on them."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, NotRequired, TypedDict

from holdfast.cluster.admin.choices import ACTIONS, WAITING
from holdfast.cluster.registry.machine import MODES
from holdfast.cluster.schemas import Keywords, Time, one_of
from holdfast.sdk.journal import OP_NAMES
from holdfast.statemachine.effects import STATUS_NAMES
from holdfast.statemachine.history import ENDED_NAMES
from holdfast.statemachine.records import END_NAMES, End

_STATUS: Final = one_of(STATUS_NAMES.values())
_END: Final = one_of(name for end, name in END_NAMES.items() if end != End.NONE)
_CURSOR: Final = "send it to get the next page; null: this is the last"

#: A payload as people see it. Whole values: `GET /invocations/{id}/steps/{step}/value`.
Shown = Annotated[
    Any,
    'a payload: JSON as it is, other text as text, other bytes as {"base64"}; a long one is cut, as {"bytes", "begins"}, '
    'and one that is stored beside the journal is only described, as {"bytes", "sha256"}',
]


class Failure(TypedDict):
    code: int
    message: str
    kind: Annotated[str | None, "the type of the exception, as in TerminalError"]
    metadata: NotRequired[Annotated[dict[str, str], "what the handler attached to its error"]]
    trace: NotRequired[Annotated[list[str], "the end of the stack trace, the innermost line last"]]


class ShortFailure(TypedDict):
    code: Annotated[int | None, "null: a step failed, which has no code"]
    message: str
    kind: Annotated[str | None, "the type of the exception"]


class Outcome(TypedDict):
    """Has either `value` or `failure`."""

    value: NotRequired[Shown]
    failure: NotRequired[Failure]


class InvocationRow(TypedDict):
    """An invocation in a list."""

    id: str
    service: str
    handler: str
    key: Annotated[str | None, "null: its service has no keys"]
    status: Annotated[str, _STATUS]
    end: Annotated[Annotated[str, _END] | None, "how it ended; null: it has not completed"]
    created_at: Time | None
    since: Annotated[Time | None, "when it came to this status"]
    completed_at: Time | None
    failure: Annotated[ShortFailure | None, "why it failed, or why it is not done yet"]
    parent: Annotated[str | None, "the invocation that called or sent it"]
    deployment: Annotated[str | None, "the deployment it is pinned to; null: it has not started"]
    attempts: Annotated[int, "how many attempts have started"]
    failures: Annotated[int, "consecutive failures of attempts and of steps"]
    lost_streams: Annotated[int, "consecutive attempts whose connection was lost"]
    steps: Annotated[int, "steps in its journal"]
    idempotency_key: str | None
    tags: dict[str, str]


class CalledBy(TypedDict):
    id: str
    step: Annotated[int, "the index of the step that called or sent it"]


class LastFailure(Failure):
    """The failure of the newest attempt that failed."""

    attempt: int
    at: Time | None


class Attempt(TypedDict):
    """An attempt that has ended without completing its invocation."""

    attempt: Annotated[int, "its number; the first is 1"]
    started_at: Time | None
    ended_at: Time | None
    how: Annotated[str, "how it ended", one_of(ENDED_NAMES.values())]
    deployment: str | None
    node: Annotated[str | None, "the node that ran it"]
    error: Failure | None


class Invocation(InvocationRow):
    """An invocation with all that is known about it."""

    mode: Annotated[str, "of its handler", one_of(MODES)]
    why_not_running: Annotated[str | None, "one sentence for people; null: it runs, or has completed"]
    starts_at: Annotated[Time | None, "when it is scheduled to start"]
    next_attempt_at: Annotated[Time | None, "when it is attempted again"]
    forgotten_at: Annotated[Time | None, "when its record is removed"]
    called_by: CalledBy | None
    call_depth: Annotated[int, "how many invocations are between it and a request of a client"]
    children: Annotated[int | None, "how many invocations it called and sent; null: unknown"]
    steps_copied_from: Annotated[str | None, "the invocation that it was restarted from"]
    cancelling: Annotated[bool, "it was asked to cancel"]
    journal_bytes: int
    journal_nearly_full: Annotated[bool, "it comes close to the limits of a journal"]
    large_values: Annotated[int, "values that are stored beside the journal"]
    large_bytes: Annotated[int, "the bytes of these values"]
    waiting_steps: Annotated[int, "steps without an outcome yet"]
    last_failure: LastFailure | None
    attempt_history: Annotated[list[Attempt], "the newest ended attempts, the oldest first"]
    outcome: Annotated[Outcome | None, "null: it has not completed"]


class InvocationPage(TypedDict):
    invocations: list[InvocationRow]
    cursor: Annotated[str | None, _CURSOR]
    looked_at: Annotated[int, "how many invocations were compared with the filter for this page"]
    complete: Annotated[bool, "false: a tree or a window is too large to list all that match"]


class Step(TypedDict):
    """A step of a journal."""

    index: int
    op: Annotated[str, "what the handler requested", one_of(OP_NAMES.values())]
    key: Annotated[str | None, "identifies the step in a replay"]
    argument: Annotated[dict[str, Any], "of the operation, by name"]
    outcome: Annotated[Outcome | None, "null: there is none yet"]
    journaled_as: Annotated[int, "its place in the order of all events of the journal"]
    completed_as: Annotated[int | None, "the place of its outcome in that order"]
    abandoned: Annotated[bool, "its outcome is not awaited any more"]
    began_at: Time | None
    journaled_at: Time | None
    duration_ms: int | None
    attempt: Annotated[int | None, "the attempt that made it"]


class Journal(TypedDict):
    id: str
    steps: list[Step]
    next: Annotated[int | None, "the `start` of the next page; null: this is the last"]


class TreeNode(TypedDict):
    """An invocation in a tree of calls."""

    id: str
    parent: Annotated[str | None, "the invocation that called or sent it"]
    step: Annotated[int | None, "the step of the parent"]
    service: str
    handler: str
    key: str | None
    status: Annotated[Annotated[str, _STATUS] | None, "null: its record was removed"]
    end: Annotated[str, _END] | None
    created_at: Time | None
    completed_at: Time | None


class Tree(TypedDict):
    root: Annotated[str, "the id of the invocation at the top"]
    nodes: list[TreeNode]
    complete: Annotated[bool, "false: there are more invocations than are shown"]


class Wait(TypedDict):
    """A step that waits for somebody, or an invocation that a timer will start."""

    kind: Annotated[str, one_of(WAITING)]
    invocation: str
    service: str
    handler: str
    key: str | None
    step: Annotated[int | None, "null: the invocation itself waits"]
    name: Annotated[str | None, "of the promise or the step"]
    since: Time | None
    due_at: Annotated[Time | None, "when a timer ends the wait"]
    awakeable: NotRequired[Annotated[str, "the id that completes it; for tokens that may invoke all services"]]
    approval: NotRequired[Annotated[str, "the name of the approval"]]


class WaitPage(TypedDict):
    waiting: list[Wait]
    cursor: Annotated[str | None, _CURSOR]


class DecidedFailure(TypedDict):
    message: str
    code: NotRequired[Annotated[int, Keywords(minimum=400, maximum=599, default=500)]]


class Decision(TypedDict):
    """The outcome of a step in doubt: exactly one of these."""

    value: NotRequired[Annotated[Any, 'it succeeded with this result: any JSON value, or {"base64": "..."} for bytes']]
    failure: NotRequired[DecidedFailure]
    again: NotRequired[Annotated[Literal[True], "it did not happen: run it again"]]


class Decided(TypedDict):
    id: str
    step: int
    status: Annotated[str, one_of(["Decided"])]


#: What an action that took effect did.
DONE: Final = {
    "cancel": "Cancelling",
    "kill": "Killed",
    "pause": "Paused",
    "resume": "Resumed",
    "restart": "Restarted",
    "purge": "Purged",
}
assert [*DONE] == [*ACTIONS], "every action has a name for its effect"


class ActionDone(TypedDict):
    id: str
    status: Annotated[str, "Unchanged: there was nothing to do", one_of([*DONE.values(), "Unchanged"])]
    new_id: NotRequired[Annotated[str, "of a restart: the id of the new invocation"]]
    message: NotRequired[Annotated[str, "why nothing was to do"]]


class BulkDone(TypedDict):
    """What an action on many invocations did. A dry run only counts those that match."""

    action: Annotated[str, one_of(ACTIONS)]
    matched: int
    done: NotRequired[int]
    unchanged: NotRequired[Annotated[int, "there was nothing to do"]]
    failed: NotRequired[int]
    reasons: NotRequired[Annotated[dict[str, int], "why actions failed, and how many for each reason"]]
    more: Annotated[bool, "there may be others that match: send the request again"]


class ServiceFigures(TypedDict):
    """Totals since the start."""

    invoked: Annotated[int, "how many invocations there ever were"]
    succeeded: int
    failed: int
    cancelled: int
    killed: int
    attempts: int
    attempts_failed: int
    steps: int


class ServiceCounts(ServiceFigures):
    """Of one service, or of all."""

    by_status: Annotated[dict[str, int], "how many invocations there are now, by status"]


class WaitingApprovals(TypedDict):
    waiting: Annotated[int, "how many; up to 2,000 of each partition are counted"]
    oldest_since: Annotated[Time | None, "null: none waits"]


class Statistics(TypedDict):
    services: Annotated[dict[str, ServiceCounts], "by name"]
    totals: ServiceCounts
    approvals: WaitingApprovals
    at: Time | None


class NewInvocation(TypedDict):
    """What to start."""

    service: str
    handler: str
    key: NotRequired[Annotated[str | None, "of a virtual object or workflow"]]
    input: NotRequired[Annotated[Any, 'any JSON value, or {"base64": "..."} for bytes; none: an empty input']]
    headers: NotRequired[Annotated[dict[str, str], "of the request, as the handler sees them"]]
    idempotency_key: NotRequired[Annotated[str | None, "a second request with it finds the invocation of the first"]]
    delay: NotRequired[Annotated[str | None, "start after this duration: 10s, 2h, PT10M"]]
