"""The machine of one partition on one node: it applies committed entries to the state and returns the results."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

import lmdb

from holdfast.cluster.partition.changes import Changes, Row, rows_of
from holdfast.cluster.partition.state import State
from holdfast.log.engine import Snapshot
from holdfast.log.errors import NoSpace, ProposalError
from holdfast.log.replica import Committed
from holdfast.sdk.ids import PartitionNumber
from holdfast.snapshots.restore import Staged
from holdfast.statemachine import queries
from holdfast.statemachine import state as machine_state
from holdfast.statemachine.commands import (
    Announce,
    Command,
    batch_head,
    decode_batch,
    sequence_of,
)
from holdfast.statemachine.effects import Effect, Reply, Result
from holdfast.statemachine.levels import FIRST, schema_of
from holdfast.statemachine.machine import apply

logger = logging.getLogger(__name__)
#: The size of the state is measured once per this many batches.
MEASURE_EVERY: Final = 64


#: Called with a command's result, or with the reason why it was not acknowledged.
Waiter: TypeAlias = Callable[[Result | ProposalError], None]


class Flight(NamedTuple):
    """A batch between proposal and answer."""

    sequence: int
    now_ms: int
    commands: list[Command]
    waiters: list[Waiter | None]
    bytes: int
    at: float  # when it was proposed, by the loop's clock
    before: int  # how many commands this process had proposed before


Answers: TypeAlias = list[tuple[Flight, list[Result]]]


#: What entries changed, by their index.
Changed: TypeAlias = list[tuple[int, list[Row]]]


#: Of the nonce of a process.
ORIGIN_BYTES: Final = 8


class PartitionMachine:
    """The state machine of one group, on one LMDB environment. Implements `log.replica.Machine`."""

    def __init__(self, number: PartitionNumber, state: State, *, partitions: int, origin: bytes) -> None:
        """`origin` is a nonce of this process: it marks what this process proposed."""
        self.number = number
        self.partitions = partitions
        self.state = state
        self._core = machine_state.State(number, partitions, level=FIRST)
        #: What apply does and what may be proposed: see `statemachine.levels`. An attribute, because hot paths read it.
        self.level = FIRST
        self.path = state.path
        self.origin = origin
        self._own = batch_head(self.origin)
        #: Batches that this process proposed. They are applied from memory, without decoding them again.
        self.flights: dict[int, Flight] = {}
        #: Receives answers, and the effects that the leader of this term must carry out.
        self.deliver: Callable[[Answers, int, list[Effect]], None] = lambda *_: None
        self._leading = 0  # The term of our own announcement, if no later one follows it.
        self._waits = False  # The disk is full; the log will pass the same entries again.
        #: The snapshot offered to followers that fell behind the log; set by `cluster.snapshotting`.
        self.newest: Snapshot | None = None
        self.entries_applied = self.bytes_applied = 0  # By this process.
        #: Of invocations, for those who watch.
        self.changes = Changes(state.applied[0], partitions=partitions)
        self._read_level()

    @property
    def journal_limits(self) -> tuple[int, int]:
        """Steps and bytes at which handler code is told that its journal is too long; 0 means no limit."""
        meta = self._core.meta
        return (meta.journal_steps_max, meta.journal_bytes_max) if self.level >= 2 else (0, 0)

    @property
    def approvals_version(self) -> int:
        """Changes with the inbox of this partition."""
        return self._core.approvals_version

    def _read_level(self) -> None:
        with self.state.read() as txn:
            self.level = self._core.level = queries.meta(txn).level

    @property
    def applied(self) -> tuple[int, int]:
        return self.state.applied

    def snapshot(self) -> Snapshot | None:
        return self.newest

    def swap(self, staged: Staged) -> None:
        """Replace the state with a snapshot of a later one."""
        self._core.forget()
        self._core.approvals_version += 1
        self._leading = 0
        self.state.swap(staged)
        self.changes.restart(self.state.applied[0])
        self._read_level()

    def apply(self, entries: Sequence[Committed]) -> None:
        """Apply entries in one write transaction, which also records the applied index."""
        state, core = self.state, self._core
        while True:
            txn = state.begin()
            try:
                core.begin(txn)
                leading, answers, changes = self._apply(entries)
                core.flush()
                state.commit(txn, (entries[-1].index, entries[-1].term), schema=schema_of(core.level))
                break
            except lmdb.MapFullError:
                core.forget()
                state.abort(txn)
                state.grow()  # Then start over: the transaction had no effect.
            except lmdb.Error as error:
                core.forget()
                state.abort(txn)
                translated = state.translate(error)
                if isinstance(translated, NoSpace) and not self._waits:
                    self._waits = True
                    logger.error("partition %d: committed entries cannot be applied: %s", self.number, translated)
                raise translated from error
            except BaseException:
                core.forget()
                state.abort(txn)
                raise
        self._leading = leading
        self.level = core.level
        self._waits = False
        self.changes.extend(entries[-1].index, changes)
        self.entries_applied += len(entries)
        self.bytes_applied += sum(len(raw) for _, _, commands in entries for raw in commands)
        effects = core.take_effects()
        for flight, _ in answers:
            del self.flights[flight.sequence]
        if answers or effects:
            self.deliver(answers, leading, effects if leading else [*replies_of(effects)])

    def _apply(self, entries: Sequence[Committed]) -> tuple[int, Answers, Changed]:
        """(the term in which we lead after these entries or 0, answers to our own proposals, changes of invocations)"""
        core, own = self._core, self._own
        leading = self._leading
        answers: Answers = []
        changes: Changed = []
        for index, _, commands in entries:
            for raw in commands:
                flight = self.flights.get(sequence_of(raw)) if raw.startswith(own) else None
                if flight is not None:
                    now_ms, batch = flight.now_ms, flight.commands
                else:
                    _, _, now_ms, batch = decode_batch(raw)
                results: list[Result] = []
                for command in batch:
                    results.append(apply(core, now_ms, command))
                    if type(command) is Announce:
                        leading = command.term if flight is not None else 0
                        core.effects[:] = replies_of(core.effects)  # The new leader derives the rest from the state.
                if flight is not None:
                    answers.append((flight, results))
            if core.moved:
                changes.append((index, rows_of(core.take_moved().values())))
        return leading, answers, changes


def replies_of(effects: list[Effect]) -> list[Reply]:
    return [effect for effect in effects if type(effect) is Reply]
