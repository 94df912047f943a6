"""Attempts as the leader knows them: one object per attempt that runs somewhere, and a ticket for each that waits its turn.

An attempt that only waits for a place at its endpoint is an id and an epoch; everything else is in the state and read when
its turn comes. A suspended invocation is nothing here at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from holdfast.cluster.partition.door import Partition
from holdfast.cluster.registry.machine import Target
from holdfast.log.errors import ProposalError, TooLarge
from holdfast.statemachine.commands import Command
from holdfast.statemachine.effects import First, Result


class Owner(Protocol):
    """The leadership in whose name an attempt runs: what it does not want to know any more is not started."""

    partition: Partition
    ended: bool
    held: bool

    def redispatch(self, invocation: bytes, epoch: int) -> None: ...

    def scan(self, first: bytes = b"", only: str | None = None) -> None:
        """Look for what should run, from an id on, at one deployment or at any: there is room again."""


class Ticket(NamedTuple):
    """An attempt that waits for its turn."""

    owner: Owner
    id: bytes
    epoch: int
    first: First | None  # Only while it is started at once: a waiting one is read again.
    losses: int = 0  # Streams that its invocation lost in a row.


class Opening(NamedTuple):
    """What an attempt begins with: all that the state says of its invocation."""

    service: str
    handler: str
    key: str | None
    now_ms: int
    seed: int  # The same in every attempt of an invocation.
    steps: list[bytes]  # packed (`sdk.journal.Step`), from step 0 on; large values are references
    sizes: list[int]  # of each step, with its large values
    state: dict[str, bytes] | None  # Eager state of an object or workflow; None: not applicable.
    state_complete: bool  # Whether `state` is all there is.
    cancelled: bool  # A cancellation waits to be noticed.
    suspects_max: int  # Not 0: it is a suspect (`handlers.queue`).
    journal_steps_max: int  # At this length the code is told; 0: not said.
    journal_bytes_max: int


class Carrier(Protocol):
    """Carries attempts to one endpoint, in the language of its protocol.

    The invoker says what is meant, and the carrier says it in frames. What comes back becomes commands, which the carrier hands
    to `Dispatcher.submit`.
    """

    attempts: dict[bytes, Attempt]
    version: int  # Of its protocol, as this carrier and the endpoint speak it.
    drains: bool  # It takes no new attempts, and ends when those that it has are over.

    @property
    def connected(self) -> bool:
        """Whether a connection stands, so that the endpoint is known to be there."""

    @property
    def attempts_max(self) -> int: ...

    @property
    def can_start(self) -> bool: ...

    def begin(self, attempt: Attempt, opening: Opening) -> None: ...

    def acknowledge(self, attempt: Attempt) -> None:
        """Steps below `attempt.length` are durable."""

    def complete(self, attempt: Attempt, step: int, order: int, outcome: list[Any]) -> None:
        """The outcome of a step, which may be a reference to a large value."""

    def retry(self, attempt: Attempt, step: int) -> None:
        """The function of a step may be tried again."""

    def cancelled(self, attempt: Attempt) -> None: ...

    def suspend(self, attempt: Attempt) -> None:
        """Ask it to hand itself back at the next point where it only waits."""

    def abort(self, attempt: Attempt, reason: str) -> None: ...

    def let_go(self, attempt: Attempt) -> None:
        """It is over: nothing more is to be said to it."""

    async def close(self) -> None: ...


class Attempts(Protocol):
    """Whom an attempt tells that it is of no use any more."""

    def drop(self, attempt: Attempt, reason: str) -> None: ...

    def lost(self, attempt: Attempt, why: str) -> None: ...

    def fail(self, attempt: Attempt, failure: list[Any], *, pause: bool = False) -> None: ...


class Attempt:
    """One attempt that was started. It ends once: by its last frame, or by somebody who drops it."""

    __slots__ = (
        "_attempts",
        "ack_waits",
        "asked_at",
        "asked_back",
        "backlog",
        "begun",
        "carrier",
        "epoch",
        "id",
        "last_frame_at",
        "length",
        "losses",
        "order",
        "over",
        "owner",
        "partition",
        "pinned",
        "progressed",
        "sent",
        "target",
        "trusted",
        "unresolved",
        "unsent",
        "version",
    )

    def __init__(
        self,
        attempts: Attempts,
        ticket: Ticket,
        target: Target,
        carrier: Carrier,
        *,
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
        self.begun = False  # Whether its handler may have run. If not, it cannot be what ended the process.
        self.trusted = False  # A suspect that ran for a while without ending the process.
        self.target = target
        self.carrier = carrier
        self.version = carrier.version  # Of the handler protocol, for all frames of this attempt.
        self.pinned = pinned
        self.order = order  # Events of the journal up to this one were in its START.
        self.length = self.sent = length  # Steps below are acknowledged, or about to be; and those it has sent.
        self.ack_waits: Any = (
            None  # The acknowledgement that waits to be sent, if the carrier has one: later ones may join it.
        )
        self.last_frame_at = now
        #: What it said behind a large value that is still being staged, in order: commands, and whether they are its last.
        self.backlog: deque[tuple[Command, bool]] = deque()
        #: What it said from a call on whose handler is not known here, while this node asks the others, in order: what takes
        #: it then, and about how many bytes it has.
        self.unresolved: list[tuple[Callable[[bool], None], int]] = []
        self.unsent = 0  # Frames with large values for it that wait their turn: it cannot answer what it has not got.
        self.progressed = False  # Whether it sent anything for the journal.
        self.asked_back = False  # Whether it was asked to hand itself back.
        self.asked_at = 0.0  # When it was asked to suspend; 0: it was not.
        self.over = False

    @property
    def level(self) -> int:
        return self.partition.level

    def now_ms(self) -> int:
        return self.partition.now_ms()

    def ask_back(self) -> None:
        """Have it hand itself back at the next point where it only waits."""
        self.asked_back = True
        self.carrier.suspend(self)

    def answered(self, answer: Result | ProposalError) -> None:
        """What became of one of its commands. As a rule, nothing is to be done: acknowledgements are effects."""
        if type(answer) is Result:
            if answer.code in (0, 200):
                return
            if answer.code in (409, 413):
                self._attempts.drop(self, answer.message)  # The state has moved on already, without this attempt.
                return
            why = answer.message
        elif isinstance(answer, TooLarge):
            self._attempts.fail(self, [1, 413, str(answer), "TooLarge"], pause=True)
            return
        else:
            why = str(answer)
        # The state does not hold what this attempt believes. Another one begins with what it does hold.
        self._attempts.lost(self, why)
