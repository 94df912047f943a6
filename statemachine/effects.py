"""What apply asks the leader to do. An effect may be lost or repeated: state is the truth, effects are reminders.

A `Result` is what the proposer of a command is told about it.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final, NamedTuple, TypeAlias

from holdfast.sdk.ids import DeploymentId, InvocationId, PartitionNumber


class First(NamedTuple):
    """What the first attempt of an invocation needs. It is known when the invocation begins, and saves the leader a read."""

    service: str
    handler: str
    key: str | None
    mode: int
    input: bytes  # step 0 as it is stored (packed)
    large: int = 0  # bytes of the input, if step 0 only refers to it


class StartAttempt(NamedTuple):
    """Send the invocation to its handler, as attempt `epoch`. With `first`, its journal holds nothing but the input."""

    id: InvocationId
    epoch: int
    first: First | None = None


class RecoverAttempt(NamedTuple):
    """Attempt `epoch` should run, but the leader that started it may be gone, and the attempt with it. A leader that does not
    run it replaces it (`Redispatch`), because the attempt may still be on its way. Only a derivation from state makes this
    effect (`queries.pending_effects`)."""

    id: InvocationId
    epoch: int
    service: str
    handler: str
    deployment: DeploymentId | None  # None: it is not pinned yet.
    key: str | None = None


class Acknowledge(NamedTuple):
    """Steps of this attempt below `length` are applied."""

    id: InvocationId
    epoch: int
    length: int


class SendCompletion(NamedTuple):
    """Tell the running attempt that a step has its outcome."""

    id: InvocationId
    epoch: int
    step: int
    order: int
    outcome: list[Any]


class SendRetry(NamedTuple):
    """Tell the running attempt to run a failed step again. An attempt whose START included the event `order` already
    knows."""

    id: InvocationId
    epoch: int
    step: int
    order: int


class SendCancelled(NamedTuple):
    """Tell the running attempt that it is being cancelled. An attempt whose START included the event `order` already
    knows."""

    id: InvocationId
    epoch: int
    order: int


class AbortAttempt(NamedTuple):
    """Stop the attempt: it was superseded, paused or killed."""

    id: InvocationId
    epoch: int
    reason: str


class Reply(NamedTuple):
    """The invocation completed. Clients that wait for it get this outcome."""

    id: InvocationId
    outcome: list[Any]


class FlushOutbox(NamedTuple):
    """There are new messages for partition `target`."""

    target: PartitionNumber


class ArmTimer(NamedTuple):
    """There is a timer due at this time, which may be earlier than those the leader knows."""

    due_ms: int


class DeleteObjects(NamedTuple):
    """There are unused objects in the shared store."""


class DeliverNotices(NamedTuple):
    """There are notices for webhooks, or the hooks changed."""


Effect: TypeAlias = (
    StartAttempt
    | RecoverAttempt
    | Acknowledge
    | SendCompletion
    | SendRetry
    | SendCancelled
    | AbortAttempt
    | Reply
    | FlushOutbox
    | ArmTimer
    | DeleteObjects
    | DeliverNotices
)


class Status(IntEnum):
    """The state that an invocation is in. Hot paths bind the members they need to names of their module: see
    `sdk.journal.Op`."""

    SCHEDULED = 0  # waits for its start time
    QUEUED = 1  # waits behind its key
    RUNNING = 2  # has, or should have, an attempt
    SUSPENDED = 3  # waits for steps, holds nothing
    BACKING_OFF = 4  # waits for the next attempt
    PAUSED = 5  # waits for an operator
    COMPLETED = 6


STATUS_NAMES: Final = {status: status.name.lower().replace("_", "-") for status in Status}


class Code(IntEnum):
    """What became of a command. Except for DONE, the numbers and their meanings are those of HTTP."""

    DONE = 0  # the command took effect
    UNCHANGED = 200  # there was nothing to do
    MALFORMED = 400
    NOT_FOUND = 404
    CONFLICT = 409
    OUTDATED = 410  # the name of an object of the shared store that was not made just now
    TOO_LARGE = 413
    MISMATCH = 422  # it contradicts what came before under the same name
    VALUE_MISSING = 424  # a large value is not here: stage it and propose the command again
    FULL = 507


class Result(NamedTuple):
    """What a command did, for its proposer. A node of a later release may answer with a `code` that is not a `Code`."""

    code: int = Code.DONE
    message: str = ""
    outcome: list[Any] | None = None  # of an invocation that is completed already, or names of state that differ


OK: Final = Result()
