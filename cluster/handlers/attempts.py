"""Attempts on the leader: one object per running attempt, and a ticket for each attempt that waits for its turn.

An attempt that waits for a place at its endpoint is only an id and an epoch; everything else is read from the state
when its turn comes. A suspended invocation needs no memory here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any, Final, NamedTuple, Protocol

from holdfast.cluster.handlers.large import LargeOutcome
from holdfast.cluster.handlers.timings import Timings
from holdfast.cluster.partition.door import Partition
from holdfast.cluster.registry.machine import Target
from holdfast.log.errors import ProposalError, TooLarge
from holdfast.sdk.ids import NO_INVOCATION, DeploymentId, InvocationId, format_id
from holdfast.statemachine.commands import Command
from holdfast.statemachine.effects import Code, First, Result
from holdfast.statemachine.outcomes import failed

_TAKEN: Final = frozenset({Code.DONE, Code.UNCHANGED})
_SUPERSEDED: Final = frozenset({Code.CONFLICT, Code.TOO_LARGE})


class Owner(Protocol):
    """The leadership that an attempt belongs to. Once it has ended, none of its attempts is started."""

    partition: Partition
    ended: bool
    held: bool

    def redispatch(self, invocation: InvocationId, epoch: int) -> None: ...

    def scan(self, first: InvocationId = NO_INVOCATION, only: DeploymentId | None = None) -> None:
        """There is room again: find attempts that should run, from an id on, at one deployment or at all."""


class Ticket(NamedTuple):
    """An attempt that waits for its turn."""

    owner: Owner
    id: InvocationId
    epoch: int
    first: First | None  # Only if it starts at once. A waiting attempt is read from the state again.
    handler: tuple[str, str]  # Its service, and its name there.
    losses: int = 0  # Consecutive streams that its invocation lost.
    since: float = 0.0  # When it began to wait, by `perf_counter`.


class Opening(NamedTuple):
    """What an attempt starts with: everything that the state has about its invocation."""

    service: str
    handler: str
    key: str | None
    now_ms: int
    seed: int  # The same in every attempt of an invocation.
    steps: list[bytes]  # packed (`sdk.journal.Step`), from step 0 on; large values are references
    sizes: list[int]  # of each step, with its large values
    state: dict[str, bytes] | None  # Eager state of an object or workflow; None: not applicable.
    state_complete: bool  # Whether `state` is the complete state.
    cancelled: bool  # A cancellation is pending.
    suspects_max: (
        int  # If not 0, it is watched, and at most this many watched attempts run at a time (`handlers.queue`).
    )
    journal_steps_max: int  # The code is told at this length; 0: never.
    journal_bytes_max: int

    @property
    def is_large(self) -> bool:
        """Whether its steps refer to large values."""
        return any(size > len(step) for step, size in zip(self.steps, self.sizes, strict=True))


class Stall(NamedTuple):
    """An endpoint does not respond although it is connected."""

    since_ms: int
    why: str


class Carrier(Protocol):
    """Carries attempts to one endpoint, in its protocol.

    The invoker decides what to send, and the carrier encodes it in frames. The carrier turns answers into commands and
    passes them to `Dispatcher.submit`.
    """

    attempts: dict[InvocationId, Attempt]
    drains: bool  # It accepts no new attempts, and ends with its last attempt.

    @property
    def connected(self) -> bool:
        """Whether there is a connection, so that the endpoint is known to be up."""

    @property
    def stall(self) -> Stall | None:
        """Why the endpoint does not respond now, although it is connected."""

    @property
    def attempts_max(self) -> int: ...

    @property
    def can_start(self) -> bool: ...

    def begin(self, attempt: Attempt, opening: Opening) -> None: ...

    def acknowledge(self, attempt: Attempt) -> None:
        """Steps below `attempt.length` are durable."""

    def complete(self, attempt: Attempt, step: int, order: int, outcome: list[Any] | LargeOutcome) -> None:
        """The outcome of a step, or where it is if it is large."""

    def retry(self, attempt: Attempt, step: int) -> None:
        """The function of a step may be retried."""

    def cancelled(self, attempt: Attempt) -> None: ...

    def suspend(self, attempt: Attempt) -> None:
        """Ask the attempt to suspend at the next point where it only waits."""

    def abort(self, attempt: Attempt, reason: str) -> None: ...

    def owes(self, attempt: Attempt) -> bool:
        """Whether something for the attempt is not sent yet, so that its silence is not its own."""

    def let_go(self, attempt: Attempt) -> None:
        """The attempt is over: send it nothing more."""

    async def close(self) -> None: ...


class Attempts(Protocol):
    """Receives the end of attempts that cannot continue."""

    def drop(self, attempt: Attempt, reason: str) -> None: ...

    def lost(self, attempt: Attempt, why: str) -> None: ...

    def fail(self, attempt: Attempt, failure: list[Any], *, pause: bool = False) -> None: ...


class Attempt:
    """One started attempt. It ends exactly once: with its last frame, or because it is dropped."""

    __slots__ = (
        "_attempts",
        "asked_at",
        "asked_back",
        "backlog",
        "began_at",
        "begun",
        "beside",
        "carrier",
        "epoch",
        "id",
        "last_frame_at",
        "length",
        "losses",
        "order",
        "ours_s",
        "over",
        "owner",
        "partition",
        "pinned",
        "progressed",
        "sent",
        "session",
        "target",
        "trusted",
        "unresolved",
        "waits_since",
    )

    def __init__(
        self,
        attempts: Attempts,
        ticket: Ticket,
        target: Target,
        carrier: Carrier,
        *,
        beside: int,
        pinned: bool,
        order: int,
        length: int,
        now: float,
    ) -> None:
        self._attempts = attempts
        self.owner = ticket.owner
        self.partition = ticket.owner.partition
        self.id = ticket.id
        self.epoch = ticket.epoch
        self.losses = ticket.losses
        self.beside = beside  # If not 0, it is watched (`handlers.queue`).
        self.begun = False  # Whether its handler may have run. If not, it cannot have ended the process.
        self.trusted = False  # A watched attempt that ran for a while without ending the process.
        self.target = target
        self.carrier = carrier
        self.session: Any = None  # What the protocol keeps about it. Nobody else looks inside.
        self.pinned = pinned
        self.order = order  # Its START contained the journal's events up to this one.
        self.length = self.sent = length  # Steps acknowledged, or about to be; and steps received.
        self.last_frame_at = now
        self.began_at = perf_counter()  # uvloop's clock is too coarse for what follows.
        self.ours_s = 0.0  # How long its handler waited until steps were durable,
        self.waits_since = 0.0  # and since when it waits now; 0 if it does not.
        #: Commands that follow a large value that is still being staged, in order, and whether each is the last.
        self.backlog: deque[tuple[Command, bool]] = deque()
        #: What follows a call to a handler that is unknown here, in order, while this node asks its peers: how to
        #: process it then, and its approximate size in bytes.
        self.unresolved: list[tuple[Callable[[bool], None], int]] = []
        self.progressed = False  # Whether it sent anything for the journal.
        self.asked_back = False  # Whether it was asked to suspend for a handover.
        self.asked_at = 0.0  # When it was asked to suspend; 0 if it was not.
        self.over = False

    @property
    def level(self) -> int:
        return self.partition.level

    @property
    def log_fields(self) -> dict[str, object]:
        """For records of the log that are about it."""
        target = self.target
        return {
            "invocation_id": format_id(self.id),
            "service": target.service,
            "handler": target.handler,
            "attempt": self.epoch,
            "partition": self.partition.number,
        }

    def now_ms(self) -> int:
        return self.partition.now_ms()

    def acknowledged(self, length: int) -> None:
        """Steps below `length` are durable."""
        self.length = length  # An equal length is also an answer: to a step that was already recorded.
        if length >= self.sent and self.waits_since:
            self.ours_s += perf_counter() - self.waits_since
            self.waits_since = 0.0
        self.carrier.acknowledge(self)

    def measure(self, timings: Timings) -> None:
        """It ends with an answer of its handler."""
        now = perf_counter()
        ours_s = self.ours_s + (now - self.waits_since if self.waits_since else 0.0)
        timings.ended(now - self.began_at, ours_s)

    def ask_back(self) -> None:
        """Ask it to suspend at the next point where it only waits."""
        self.asked_back = True
        self.carrier.suspend(self)

    def answered(self, answer: Result | ProposalError) -> None:
        """Handle the result of one of its commands. Usually there is nothing to do: acknowledgements are effects."""
        if type(answer) is Result:
            if answer.code in _TAKEN:
                return
            if answer.code in _SUPERSEDED:
                self._attempts.drop(self, answer.message)  # The state has already moved on without this attempt.
                return
            why = answer.message
        elif isinstance(answer, TooLarge):
            self._attempts.fail(self, failed(413, str(answer), "TooLarge"), pause=True)
            return
        else:
            why = str(answer)
        # The state differs from what this attempt assumes. A new attempt starts from the actual state.
        self._attempts.lost(self, why)
