"""One partition on this node: the only way into its log, and the delivery of what was applied.

`propose` is the only door. All commands of one turn of the event loop become one batch and one proposal. Each command
is encoded on entry, so that bounds are in bytes and a command that cannot be encoded does not affect others. Answers
come from apply in the same process: a batch carries the nonce of the process that proposed it.

`PartitionMachine` applies. It keeps effects only while this node leads, and only of entries after the leader's own
announcement. `Leadership` derives everything before that from the state.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from holdfast.cluster.clock import Clock
from holdfast.cluster.histogram import Histogram
from holdfast.cluster.partition.hold import Hold
from holdfast.cluster.partition.machine import MEASURE_EVERY, Answers, Flight, PartitionMachine, Waiter, replies_of
from holdfast.log.errors import NoRoom, NotLeader, Overloaded, ProposalError, TooLarge
from holdfast.log.node import Group
from holdfast.sdk.ids import InvocationId
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
#: Overhead of a batch.
HEAD_BYTES: Final = 64
#: A command must also fit as a message inside a `Deliver`, or it would block its outbox forever.
ENVELOPE_BYTES: Final = 1024


class Bounds(NamedTuple):
    """Bounds on commands in flight in one partition. The leader's own commands may use twice as much."""

    commands: int = 20_000
    bytes: int = 32 * 1024 * 1024
    command_bytes: int = 1024 * 1024  # Must equal the log's bound; the node ensures it.
    state_bytes: int = 16 << 30  # Size of the state on disk. Above it, new invocations are refused.


class Leads(Protocol):
    """Carries out effects while this node leads."""

    term: int

    def end(self) -> None: ...

    def hold(self) -> None: ...

    def quiet(self) -> bool:
        """Whether no attempt runs any more, and everything the attempts did is in the log."""

    def release(self) -> None: ...

    def carry_out(self, effects: list[Effect]) -> None: ...

    def raise_level(self, level: int) -> None: ...

    def webhooks_changed(self) -> None:
        """The meta group may know other webhooks than the partition."""


Settle: TypeAlias = Callable[[InvocationId, list[Any]], None]
Outvoted: TypeAlias = Callable[[Group], ProposalError | None]


class Partition:
    """The way into one partition's log. Everything here runs on the event loop's thread."""

    def __init__(
        self,
        machine: PartitionMachine,
        group: Group,
        clock: Clock,
        *,
        bounds: Bounds | None = None,
        settle: Settle = lambda *_: None,
        outvoted: Outvoted = lambda _: None,
        observers: Sequence[Observer] = (),
    ) -> None:
        """`settle` passes an outcome to the clients that wait for it at this node. `outvoted` says why a majority would
        refuse an entry although this node would not. `observers` may grow while the partition exists.
        """
        self.number = machine.number
        self.machine = machine
        self.state = machine.state
        self.group = group
        self.clock = clock
        self.bounds = bounds or Bounds()
        self.leadership: Leads | None = None
        #: Holds messages to other partitions while a backup begins.
        self.messages = Hold()
        #: Holds the deletion of objects that the state referred to, while that state is copied.
        self.objects = Hold()
        self.settle = settle
        self._outvoted = outvoted
        self._observers = observers
        self.batches = 0
        self.commands = 0
        self.latency = Histogram()  # seconds from a batch's proposal until it is committed and applied
        machine.deliver = self._applied
        self._loop = asyncio.get_running_loop()
        self._rows: list[bytes] = []
        self._queued: list[Command] = []
        self._waiters: list[Waiter | None] = []
        self._proposed_before = 0  # Commands since this process started.
        self._open_commands = 0  # Queued and in flight.
        self._open_bytes = 0
        self._sequence = 0
        self._scheduled = False
        self._ahead_ms = 0
        self._is_full = False
        self._unheard: deque[tuple[Answers, int, list[Effect]]] = deque()

    # -- the door ----------------------------------------------------------------------------------------------------

    def propose(self, command: Command) -> asyncio.Future[Result]:
        """The command's result, once it is durable on a majority and applied here. Fails with a ProposalError."""
        future: asyncio.Future[Result] = self._loop.create_future()
        try:
            if (refusal := self.refusal(command)) is not None:
                raise refusal
            self._enter(command, partial(_resolve, future))
        except ProposalError as error:
            future.set_exception(error)
        return future

    def refusal(self, command: Command) -> ProposalError | None:
        """Why a client's command is refused now, or None if it is accepted."""
        if self.busy:
            return Overloaded(f"partition {self.number} has {self._open_commands} commands in flight; try again later")
        if self._is_full and (type(command) is Invoke or (type(command) is TouchBlob and command.intake)):
            return NoRoom(
                f"the state of partition {self.number} has reached its bound of {self.bounds.state_bytes} bytes; "
                "purge completed invocations, shorten their retention, or raise state_bytes_max"
            )
        return self._outvoted(self.group)

    def submit(self, command: Command, waiter: Waiter | None = None) -> bool:
        """Propose a command of the leader's own, with higher bounds and without a future.

        Returns whether it was accepted. The waiter is told of a refusal, too."""
        try:
            bounds = self.bounds
            if self._open_commands >= 2 * bounds.commands or self._open_bytes >= 2 * bounds.bytes:
                raise Overloaded(
                    f"partition {self.number} has {self._open_commands} commands in flight; try again later"
                )
            self._enter(command, waiter)
        except ProposalError as error:
            if waiter is not None:
                self._loop.call_soon(waiter, error)
            return False
        return True

    def submit_and_wait(self, command: Command) -> asyncio.Future[Result]:
        """Like `submit`, for work that needs the answer to continue."""
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
        """The partition's time. A leader whose clock is behind its predecessor's continues from the predecessor's time."""
        return self.clock.now_ms() + self._ahead_ms

    def keep_up_with(self, now_ms: int) -> None:
        """Do not fall behind `now_ms`, which the state has already seen."""
        self._ahead_ms = max(now_ms - self.clock.now_ms(), 0)

    @property
    def under_way(self) -> int:
        return self._open_commands

    @property
    def entered(self) -> int:
        """Number of commands accepted so far. `landed` tells when that many are answered."""
        return self._proposed_before + len(self._queued)

    def landed(self, count: int) -> bool:
        """Whether the first `count` commands are all answered, by apply or by a refusal."""
        oldest = next(iter(self.machine.flights.values()), None)
        return (oldest.before if oldest is not None else self._proposed_before) >= count

    def _enter(self, command: Command, waiter: Waiter | None) -> None:
        row = encode_command(command)
        size = len(row)
        limit = self.bounds.command_bytes - HEAD_BYTES
        if type(command) is not Deliver:
            limit -= ENVELOPE_BYTES
        if size > limit:
            raise TooLarge(f"the command has {size} bytes; the limit is {limit}")
        self._rows.append(row)
        self._queued.append(command)
        self._waiters.append(waiter)
        self._open_commands += 1
        self._open_bytes += size
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Propose the commands of this turn as one batch, or as a few if there are many."""
        self._scheduled = False
        rows, commands, waiters = self._rows, self._queued, self._waiters
        self._rows, self._queued, self._waiters = [], [], []
        now_ms = self.now_ms()
        if len(rows) <= BATCH_COMMANDS and sum(map(len, rows)) < BATCH_BYTES:  # As in most turns.
            self._propose(rows, commands, waiters, now_ms)
            return
        first = size = 0
        for offset, row in enumerate(rows):
            size += len(row)
            last = offset + 1
            if size >= BATCH_BYTES or last - first >= BATCH_COMMANDS or last == len(rows):
                # A large command must not push a batch of small ones over the size limit of an entry.
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
        flight = Flight(
            sequence=self._sequence,
            now_ms=now_ms,
            commands=commands,
            waiters=waiters,
            bytes=size,
            at=self._loop.time(),
            before=before,
        )
        self.machine.flights[flight.sequence] = flight
        proposal = self.group.propose(frame_batch(self.machine.origin, flight.sequence, now_ms, rows))
        proposal.add_done_callback(partial(self._proposed, flight))

    def _proposed(self, flight: Flight, proposal: asyncio.Future[int]) -> None:
        error: BaseException | None = asyncio.CancelledError() if proposal.cancelled() else proposal.exception()
        if error is None:
            return  # Apply has answered already.
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

    # -- after apply ---------------------------------------------------------------------------------------------------

    def _applied(self, answers: Answers, term: int, effects: list[Effect]) -> None:
        """Called in the middle of the log's turn, so reactions are deferred to a turn of their own."""
        now = self._loop.time()
        for flight, _ in answers:
            self._land(flight)
            self.latency.observe(now - flight.at)
        self._unheard.append((answers, term, effects))
        self._loop.call_soon(self.react)

    def react(self) -> None:
        """Deliver the pending answers and effects of apply.

        Call this before comparing the state with what runs: an attempt whose effect is still pending is not lost."""
        while self._unheard:
            self._react(*self._unheard.popleft())

    def _react(self, answers: Answers, term: int, effects: list[Effect]) -> None:
        for flight, results in answers:
            if self._observers:
                self._observe(flight, results)
            for waiter, result in zip(flight.waiters, results, strict=True):
                if waiter is not None:
                    try:
                        waiter(result)
                    except Exception:  # A failing waiter must not keep the others waiting forever.
                        logger.exception("partition %d: processing an answer failed", self.number)
        if not effects:
            return
        leadership = self.leadership
        if leadership is not None and leadership.term == term:
            leadership.carry_out(effects)
        else:
            # Any replica may answer the clients that wait here: the outcome is the same on all of them.
            for reply in replies_of(effects):
                self.settle(reply.id, reply.outcome)

    def _observe(self, flight: Flight, results: list[Result]) -> None:
        for command, result in zip(flight.commands, results, strict=True):
            for observer in self._observers:
                try:
                    observer(self, command, result)
                except Exception:
                    logger.exception("partition %d: an observer failed", self.number)


#: Is told of each applied command of this process and its result; for `holdfast dev`.
Observer: TypeAlias = Callable[[Partition, Command, Result], None]


def _resolve(future: asyncio.Future[Result], answer: Result | ProposalError) -> None:
    if future.done():
        return
    if isinstance(answer, Result):
        future.set_result(answer)
    else:
        future.set_exception(answer)
