"""What apply asks the leader to do. An effect may be lost or doubled: state is the truth, effects are reminders.

`results` (what a proposer is told about its own command) are plain values: see `Result`.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, TypeAlias


class First(NamedTuple):
    """What the first attempt of an invocation needs. It is at hand when the invocation began, and saves the leader a read."""

    service: str
    handler: str
    key: str | None
    mode: int
    input: bytes  # step 0 as it is stored (packed)
    large: int = 0  # bytes of the input, if step 0 only refers to it


class StartAttempt(NamedTuple):
    """Send the invocation to its handler, as attempt `epoch`. `first`: its journal holds the input and nothing more."""

    id: bytes
    epoch: int
    first: First | None = None


class Acknowledge(NamedTuple):
    """Steps of this attempt below `length` are applied."""

    id: bytes
    epoch: int
    length: int


class SendCompletion(NamedTuple):
    """Tell the running attempt that a step has its outcome."""

    id: bytes
    epoch: int
    step: int
    order: int
    outcome: list[Any]


class SendRetry(NamedTuple):
    """Tell the running attempt to run a failed step again. An attempt whose START held the event `order` knows already."""

    id: bytes
    epoch: int
    step: int
    order: int


class SendCancelled(NamedTuple):
    """Tell the running attempt that it is being cancelled. One whose START held the event `order` knows already."""

    id: bytes
    epoch: int
    order: int


class AbortAttempt(NamedTuple):
    """The attempt is over: superseded, paused or killed."""

    id: bytes
    epoch: int
    reason: str


class Reply(NamedTuple):
    """The invocation completed; whoever waits for it at an ingress gets this."""

    id: bytes
    outcome: list[Any]


class FlushOutbox(NamedTuple):
    """There is something new for partition `target`."""

    target: int


class ArmTimer(NamedTuple):
    """The next timer may be earlier than known."""

    due_ms: int


class DeleteObjects(NamedTuple):
    """There are objects in the shared store that nothing refers to any more."""


Effect: TypeAlias = (
    StartAttempt
    | Acknowledge
    | SendCompletion
    | SendRetry
    | SendCancelled
    | AbortAttempt
    | Reply
    | FlushOutbox
    | ArmTimer
    | DeleteObjects
)


class Status:
    """Where an invocation stands."""

    SCHEDULED: Final = 0  # waits for its start time
    QUEUED: Final = 1  # waits behind its key
    RUNNING: Final = 2  # has, or should have, an attempt
    SUSPENDED: Final = 3  # waits for steps, holds nothing
    BACKING_OFF: Final = 4  # waits for the next attempt
    PAUSED: Final = 5  # waits for an operator
    COMPLETED: Final = 6


STATUS_NAMES: Final = {value: name.lower().replace("_", "-") for name, value in vars(Status).items() if name[0] != "_"}


class Result(NamedTuple):
    """What a command did. `code`: 0 it took effect; 200 nothing to do (already so); 404, 409 as HTTP means them."""

    code: int = 0
    message: str = ""
    outcome: list[Any] | None = None  # of an invocation that is completed already


OK: Final = Result()
