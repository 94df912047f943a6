"""When a client repeats a request, and at which address."""

from __future__ import annotations

import random
import time
from typing import Final

from holdfast.sdk.client.errors import CallFailed
from holdfast.sdk.client.requests import Address, Requests

PAUSE_S: Final = 0.1  # before the second try; doubled up to
PAUSE_S_MAX: Final = 5.0
#: A node that cannot accept a request refuses it sooner than this. A longer try was waiting for its outcome.
LONG_S: Final = 60.0


class Pauses:
    """How long to wait before the next try. The budget limits the time spent on failing tries.

    Time that a try spends waiting for an outcome does not count: a client that waited an hour until a node restarted
    has not been failing for an hour.
    """

    def __init__(self, budget: float, requests: Requests) -> None:
        self._requests = requests
        self._untried = len(requests.addresses)
        self._budget = budget
        self._deadline: float | None = None
        self._pause = PAUSE_S
        self._began = 0.0
        self._hopeless: set[Address] = set()

    def begin(self) -> None:
        """Call this before each try."""
        self._began = time.monotonic()

    def next(self, after: float, error: CallFailed, failed: Address | None, *, hopeless: bool = False) -> float:
        """The pause before the next try: zero until every address has been tried. Raises `error` when the budget is
        spent.

        `failed` is the address to avoid, if there is one. `hopeless`: another try at this address cannot succeed. If no
        address is left, the error is raised at once.
        """
        if failed is not None:
            if hopeless:
                self._hopeless.add(failed)
                if self._hopeless.issuperset(self._requests.addresses):
                    raise error
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
