"""When a client repeats a request, and at which address."""

from __future__ import annotations

import random
import time
from typing import Final

from holdfast.sdk.client.errors import CallFailed
from holdfast.sdk.client.requests import Address, Requests

PAUSE_S: Final = 0.1  # before the second try; doubled up to
PAUSE_S_MAX: Final = 5.0
#: A node that cannot accept a request refuses it sooner than this. A try that lasted longer waited for its outcome.
LONG_S: Final = 60.0


class Pauses:
    """How long to wait before the next try. The budget bounds the time that is spent on failing tries.

    Time in which a try waited for an outcome does not count: a client that waited for an hour until a node was restarted
    has not failed for an hour.
    """

    def __init__(self, budget: float, requests: Requests) -> None:
        self._requests = requests
        self._untried = len(requests.addresses)
        self._budget = budget
        self._deadline: float | None = None
        self._pause = PAUSE_S
        self._began = 0.0

    def begin(self) -> None:
        """Call this before each try."""
        self._began = time.monotonic()

    def next(self, after: float, error: CallFailed, failed: Address | None) -> float:
        """The pause before the next try, zero until every address was tried. Raises `error` when the budget is spent.

        `failed` is the address to leave, if there is one.
        """
        if failed is not None:
            self._requests.fail_over(failed)
            self._untried -= 1
            if self._untried > 0:
                return 0.0
            self._untried = len(self._requests.addresses)
        now = time.monotonic()
        if self._deadline is None or now - self._began >= LONG_S:
            self._deadline, self._pause = now + self._budget, PAUSE_S
        pause = max(after, self._pause * (0.5 + random.random() / 2))
        self._pause = min(self._pause * 2, PAUSE_S_MAX)
        if now + pause > self._deadline:
            raise error
        return pause
