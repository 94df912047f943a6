"""One partition on this node: the door into its log, and what its log has made of its state.

`propose` is the only door. Commands of one turn of the loop become one batch and one proposal; each is encoded on its way
in, so that the bounds are of bytes and a command that cannot be written harms nobody else. Answers come from apply, on
this process: a batch carries the nonce of the process that proposed it.

`PartitionMachine` applies. It keeps the effects of what it applies only while this node leads, and only of what lies behind
the leader's own announcement: everything before it is the business of `Leadership`, which derives it from the state.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from holdfast.cluster.clock import Clock
from holdfast.cluster.histogram import Histogram
from holdfast.cluster.partition.hold import Hold
from holdfast.cluster.partition.machine import MEASURE_EVERY, Answers, Flight, PartitionMachine, Waiter, replies_of
from holdfast.log.errors import NoRoom, NotLeader, Overloaded, ProposalError, TooLarge
from holdfast.log.node import Group
from holdfast.statemachine.commands import (
    Command,
    Deliver,
    Invoke,
    TouchBlob,
    encode_command,
    frame_batch,
)
from holdfast.statemachine.effects import Effect, Result

logger = logging.getLogger(__name__)
BATCH_BYTES: Final = 512 * 1024  # A batch ends with the command that passes this,
BATCH_COMMANDS: Final = 4096  # or with this many.
#: Of a batch around its commands.
HEAD_BYTES: Final = 64
#: What fits a command must fit as a message inside a `Deliver` too, or it would block its outbox for ever.
ENVELOPE_BYTES: Final = 1024


class Bounds(NamedTuple):
    """How much may be under way in one partition. What the leader itself needs may use twice as much."""

    commands: int = 20_000
    bytes: int = 32 * 1024 * 1024
    command_bytes: int = 1024 * 1024  # As the log's: whoever makes the node keeps them equal.
    state_bytes: int = 16 << 30  # Of the state on disk; beyond, nothing new begins.


class Leads(Protocol):
    """What carries effects out while this node leads."""

    term: int

    def end(self) -> None: ...

    def hold(self) -> None: ...

    def quiet(self) -> bool:
        """Whether nothing runs in its name any more, and all that was done in it is in the log."""

    def release(self) -> None: ...

    def carry_out(self, effects: list[Effect]) -> None: ...

    def raise_level(self, level: int) -> None: ...


class Partition:
    """The door. Everything here happens on the loop's thread."""

    def __init__(self, machine: PartitionMachine, group: Group, clock: Clock, *, bounds: Bounds | None = None) -> None:
        self.number = machine.number
        self.machine = machine
        self.state = machine.state
        self.group = group
        self.clock = clock
        self.bounds = bounds or Bounds()
        self.leadership: Leads | None = None
        #: On its messages to other partitions, while all partitions are being copied.
        self.messages = Hold()
        #: On the deleting of objects that its state referred to, while a copy of that state is made.
        self.objects = Hold()
        #: Who waits at this node for outcomes; the node sets it.
        self.settle: Callable[[bytes, list[Any]], None] = lambda *_: None
        #: Why no majority would take an entry, although we would; the node sets it.
        self.outvoted: Callable[[], ProposalError | None] = lambda: None
        #: Told of each command of this process that was applied, and what it did; for `holdfast dev`.
        self.observer: Observer | None = None
        self.batches = 0
        self.commands = 0
        self.took = Histogram()  # seconds from a batch's proposal until it is committed and applied
        machine.deliver = self._applied
        self._loop = asyncio.get_running_loop()
        self._rows: list[bytes] = []
        self._queued: list[Command] = []
        self._waiters: list[Waiter | None] = []
        self._proposed_before = 0  # Commands, since this process began.
        self._open_commands = 0  # Queued and under way.
        self._open_bytes = 0
        self._sequence = 0
        self._scheduled = False
        self._ahead_ms = 0
        self._is_full = False
        self._unheard: deque[tuple[Answers, int, list[Effect]]] = deque()

    # -- the door ----------------------------------------------------------------------------------------------------

    def propose(self, command: Command) -> asyncio.Future[Result]:
        """What the command did, applied here and durable on a majority; or a ProposalError."""
        future: asyncio.Future[Result] = self._loop.create_future()
        try:
            if (refusal := self.refusal(command)) is not None:
                raise refusal
            self._enter(command, partial(_resolve, future))
        except ProposalError as error:
            future.set_exception(error)
        return future

    def refusal(self, command: Command) -> ProposalError | None:
        """Why a client's command is not taken now; None: it is."""
        if self.busy:
            return Overloaded(f"partition {self.number} has {self._open_commands} commands under way; try again later")
        if self._is_full and (type(command) is Invoke or (type(command) is TouchBlob and command.intake)):
            return NoRoom(
                f"the state of partition {self.number} has reached its bound of {self.bounds.state_bytes} bytes; "
                "purge completed invocations, shorten their retention, or raise state_bytes_max"
            )
        return self.outvoted()

    def submit(self, command: Command, waiter: Waiter | None = None) -> bool:
        """For the leader's own work: no future, more room. A refusal reaches the waiter like any other; whether there was
        none is told at once."""
        try:
            bounds = self.bounds
            if self._open_commands >= 2 * bounds.commands or self._open_bytes >= 2 * bounds.bytes:
                raise Overloaded(
                    f"partition {self.number} has {self._open_commands} commands under way; try again later"
                )
            self._enter(command, waiter)
        except ProposalError as error:
            if waiter is not None:
                self._loop.call_soon(waiter, error)
            return False
        return True

    def submit_and_wait(self, command: Command) -> asyncio.Future[Result]:
        """As `submit`, for the leader's own work that goes on only with the answer."""
        future: asyncio.Future[Result] = self._loop.create_future()
        self.submit(command, partial(_resolve, future))
        return future

    @property
    def level(self) -> int:
        return self.machine.level

    @property
    def journal_limits(self) -> tuple[int, int]:
        return self.machine.journal_limits

    @property
    def busy(self) -> bool:
        """Whether a client's command would be refused now."""
        return self._open_commands >= self.bounds.commands or self._open_bytes >= self.bounds.bytes

    def now_ms(self) -> int:
        """The time of this partition. A leader whose clock is behind its predecessor's goes on from that one's time."""
        return self.clock.now_ms() + self._ahead_ms

    def keep_up_with(self, now_ms: int) -> None:
        """The state has seen this time already."""
        self._ahead_ms = max(now_ms - self.clock.now_ms(), 0)

    @property
    def under_way(self) -> int:
        return self._open_commands

    @property
    def entered(self) -> int:
        """How many commands came through the door, ever. `landed` tells when so many are answered."""
        return self._proposed_before + len(self._queued)

    def landed(self, count: int) -> bool:
        """Whether the first `count` commands are all answered, by apply or by a refusal."""
        oldest = next(iter(self.machine.flights.values()), None)
        return (oldest.before if oldest is not None else self._proposed_before) >= count

    def _enter(self, command: Command, waiter: Waiter | None) -> None:
        row = encode_command(command)
        limit = self.bounds.command_bytes - HEAD_BYTES
        if type(command) is not Deliver:
            limit -= ENVELOPE_BYTES
        if len(row) > limit:
            raise TooLarge(f"a command of {len(row)} bytes; at most {limit} are allowed")
        self._rows.append(row)
        self._queued.append(command)
        self._waiters.append(waiter)
        self._open_commands += 1
        self._open_bytes += len(row)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """What this turn of the loop brought becomes one proposal (or a few, if it is much)."""
        self._scheduled = False
        rows, commands, waiters = self._rows, self._queued, self._waiters
        self._rows, self._queued, self._waiters = [], [], []
        now_ms = self.now_ms()
        first = size = 0
        for offset, row in enumerate(rows):
            size += len(row)
            last = offset + 1
            if size >= BATCH_BYTES or last - first >= BATCH_COMMANDS or last == len(rows):
                # One that is large on its own must not push small ones over the bound of an entry.
                if size > len(row) and len(row) > BATCH_BYTES:
                    self._propose(rows[first:offset], commands[first:offset], waiters[first:offset], now_ms)
                    first = offset
                self._propose(rows[first:last], commands[first:last], waiters[first:last], now_ms)
                first, size = last, 0

    def _propose(self, rows: list[bytes], commands: list[Command], waiters: list[Waiter | None], now_ms: int) -> None:
        self._sequence += 1
        if self.batches % MEASURE_EVERY == 0:
            self._is_full = self.state.bytes_used() >= self.bounds.state_bytes
        self.batches += 1
        self.commands += len(commands)
        size, before = sum(map(len, rows)), self._proposed_before
        self._proposed_before += len(commands)
        flight = Flight(self._sequence, now_ms, commands, waiters, size, self._loop.time(), before)
        self.machine.flights[flight.sequence] = flight
        proposal = self.group.propose(frame_batch(self.machine.origin, flight.sequence, now_ms, rows))
        proposal.add_done_callback(partial(self._proposed, flight))

    def _proposed(self, flight: Flight, proposal: asyncio.Future[int]) -> None:
        error: BaseException | None = asyncio.CancelledError() if proposal.cancelled() else proposal.exception()
        if error is None:
            return  # Answered by apply, which came first.
        if self.machine.flights.pop(flight.sequence, None) is None:
            return
        if not isinstance(error, ProposalError):
            error = NotLeader(None)  # The loop is being torn down.
        self._land(flight)
        for waiter in flight.waiters:
            if waiter is not None:
                waiter(error)

    def _land(self, flight: Flight) -> None:
        self._open_commands -= len(flight.commands)
        self._open_bytes -= flight.bytes

    # -- what was applied ----------------------------------------------------------------------------------------------

    def _applied(self, answers: Answers, term: int, effects: list[Effect]) -> None:
        """Called in the middle of the log's turn: whoever reacts does so in a turn of its own."""
        now = self._loop.time()
        for flight, _ in answers:
            self._land(flight)
            self.took.observe(now - flight.at)
        self._unheard.append((answers, term, effects))
        self._loop.call_soon(self.react)

    def react(self) -> None:
        """Tell everybody what was applied and not told yet. Whoever compares the state with what runs calls this first:
        what the state asks for and nobody was told of is not lost."""
        while self._unheard:
            self._react(*self._unheard.popleft())

    def _react(self, answers: Answers, term: int, effects: list[Effect]) -> None:
        for flight, results in answers:
            if self.observer is not None:
                self._observe(flight, results)
            for waiter, result in zip(flight.waiters, results, strict=True):
                if waiter is not None:
                    try:
                        waiter(result)
                    except Exception:  # One that fails must not keep the others waiting for ever.
                        logger.exception("partition %d: an answer could not be taken", self.number)
        if not effects:
            return
        leadership = self.leadership
        if leadership is not None and leadership.term == term:
            leadership.carry_out(effects)
        else:
            # Whoever waits here is told by any replica: the outcome is the same on all of them.
            for reply in replies_of(effects):
                self.settle(reply.id, reply.outcome)

    def _observe(self, flight: Flight, results: list[Result]) -> None:
        assert self.observer is not None
        for command, result in zip(flight.commands, results, strict=True):
            try:
                self.observer(self, command, result)
            except Exception:
                logger.exception("partition %d: an observer failed", self.number)


#: See `Partition.observer`.
Observer: TypeAlias = Callable[[Partition, Command, Result], None]


def _resolve(future: asyncio.Future[Result], answer: Result | ProposalError) -> None:
    if future.done():
        return
    if isinstance(answer, Result):
        future.set_result(answer)
    else:
        future.set_exception(answer)
