"""How long attempts take, divided between this cluster and the handlers.

An attempt is in our hands while it waits for its turn, and while its handler waits for a step to be durable. The rest is
the handler's: its code, its process, the network to it, and everything it awaits without suspending.
"""

from __future__ import annotations

from typing import Final

from holdfast.cluster.histogram import BUCKETS_S, Histogram

#: Handlers may run for hours.
HANDLER_BUCKETS_S: Final = (*BUCKETS_S, 300.0, 1800.0, 3600.0)


class Timings:
    """One per node. Each observation is one increment; see `Histogram`."""

    __slots__ = ("handler", "ours", "start")

    def __init__(self) -> None:
        self.start = Histogram()  # From the decision that an attempt starts until it is on its way to the endpoint.
        self.ours = Histogram()  # Of an attempt: its handler waited until steps were durable.
        self.handler = Histogram(HANDLER_BUCKETS_S)  # Of an attempt: everything else.

    def ended(self, seconds: float, ours_s: float) -> None:
        """An attempt ended with an answer of its handler."""
        self.ours.observe(ours_s)
        self.handler.observe(max(seconds - ours_s, 0.0))
