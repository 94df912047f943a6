"""Repeated failures, reported at a bounded rate in the log, and to operators on request."""

from __future__ import annotations

import logging
from typing import Final

from holdfast.cluster.clock import Clock
from holdfast.snapshots.errors import SnapshotError
from holdfast.snapshots.policy import (
    Policy,
    retry_delay_s,
)

logger = logging.getLogger(__name__)
#: A failed store is checked again soon, because large values go through the log meanwhile.
STORE_RETRY_S: Final = 5.0
STORE_RETRY_S_MAX: Final = 60.0
REPEAT_S: Final = 600.0  # The same failure is not logged more often.


class Complaints:
    """Logs a failure at once, repeats it rarely while it stays the same, and logs when it is over."""

    def __init__(self, what: str, clock: Clock) -> None:
        self._clock = clock
        self._what = what
        self._said = ""
        self._said_at = 0.0
        self.failures = 0  # Consecutive.
        self.failures_total = 0
        self.failed_at = 0.0
        self.error: str | None = None

    def failed(self, error: BaseException) -> None:
        now = self._clock.monotonic_s()
        self.failures += 1
        self.failures_total += 1
        self.failed_at = now
        self.error = str(error)
        if type(error).__name__ != self._said or now >= self._said_at + REPEAT_S:
            self._said, self._said_at = type(error).__name__, now
            foreign = not isinstance(error, SnapshotError)
            logger.warning("%s failed: %s", self._what, error, exc_info=error if foreign else None)

    def went_well(self) -> None:
        if self.failures:
            logger.info("%s works again, after %d failures", self._what, self.failures)
        self.failures, self.error, self._said = 0, None, ""

    def drop(self) -> None:
        """The work is no longer ours: forget the failures without logging a recovery."""
        self.failures, self.error, self._said = 0, None, ""

    def holds_back(self, policy: Policy) -> bool:
        return self.failures > 0 and self._clock.monotonic_s() < self.failed_at + retry_delay_s(policy, self.failures)
