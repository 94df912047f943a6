"""The alarm of a partition: it rings when the earliest timer in the state is due, and has apply fire all that are."""

from __future__ import annotations

import asyncio
from typing import Final

from holdfast.cluster.partition.door import Partition
from holdfast.log.errors import ProposalError
from holdfast.statemachine import queries
from holdfast.statemachine.commands import FireTimers
from holdfast.statemachine.effects import Result

TIMERS_PER_COMMAND: Final = 256
TIMER_S_MAX: Final = 3600.0  # A timer further away is checked again, because clocks drift.
RETRY_S: Final = 0.05


class Alarm:
    """One per leadership."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due_ms = 0
        self._firing = False
        self._ended = False

    def set(self, due_ms: int) -> None:
        """A timer is due then. Apply decides which timers are due, by the time of the batch."""
        if self._timer is not None:
            if self._due_ms <= due_ms:
                return
            self._timer.cancel()
        self._due_ms = due_ms
        delay_s = max(due_ms - self._partition.now_ms(), 0) / 1000
        self._timer = self._loop.call_later(min(delay_s, TIMER_S_MAX), self._ring)

    def end(self) -> None:
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()

    def _ring(self) -> None:
        self._timer = None
        if self._ended or self._firing:
            return
        if self._partition.now_ms() < self._due_ms:
            self.set(self._due_ms)  # The event loop's clock differs from ours.
            return
        self._firing = True
        self._partition.submit(FireTimers(TIMERS_PER_COMMAND), self._fired)

    def _fired(self, answer: Result | ProposalError) -> None:
        self._firing = False
        if self._ended:
            return
        with self._partition.state.read() as txn:
            due_ms = queries.next_due(txn)
        if isinstance(answer, ProposalError):
            due_ms = self._partition.now_ms() + int(RETRY_S * 1000)
        if due_ms is not None:
            self.set(due_ms)
