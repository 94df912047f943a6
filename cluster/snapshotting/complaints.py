"""What goes wrong again and again, said once in a while: in the log, and to operators who ask."""

from __future__ import annotations

import logging
import time
from typing import Final

from holdfast.snapshots.errors import SnapshotError
from holdfast.snapshots.policy import (
    Policy,
    retry_delay_s,
)

logger = logging.getLogger(__name__)
#: A store that failed is looked at again soon: large values go through the log meanwhile.
STORE_RETRY_S: Final = 5.0
STORE_RETRY_S_MAX: Final = 60.0
REPEAT_S: Final = 600.0  # The same complaint is not logged more often.


class Complaints:
    """Says in the log what is wrong: at once, then rarely while it stays the same, and when it is over."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._said = ""
        self._said_at = 0.0
        self.failures = 0  # In a row.
        self.failures_total = 0
        self.failed_at = 0.0
        self.error: str | None = None

    def failed(self, error: BaseException) -> None:
        now = time.monotonic()
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
        """It is no longer ours to do: what went wrong is over, and nothing works again."""
        self.failures, self.error, self._said = 0, None, ""

    def holds_back(self, policy: Policy) -> bool:
        return self.failures > 0 and time.monotonic() < self.failed_at + retry_delay_s(policy, self.failures)
