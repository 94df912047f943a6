"""A leader's view of one follower's log, and how much the leader may send it.

There are three states, as in etcd's raft: *probe* (one message at a time until the follower confirms where the logs agree),
*replicate* (a bounded window of messages in flight) and *snapshot* (the next entry is trimmed, so the leader offers the state
instead). `match` is the highest index that the follower has acknowledged as durable in this term. It never decreases, and
`next` always stays above it.
"""

from __future__ import annotations

from collections import deque
from enum import Enum, auto
from typing import Final


class Flow(Enum):
    PROBE = auto()
    REPLICATE = auto()
    SNAPSHOT = auto()


# Until Python 3.12, looking up an enum member runs a Python function: too slow for a check made for each message.
PROBE: Final = Flow.PROBE
REPLICATE: Final = Flow.REPLICATE
SNAPSHOT: Final = Flow.SNAPSHOT


class Progress:
    __slots__ = ("contact", "flow", "in_flight", "in_flight_bytes", "match", "next", "sequence", "waiting_since")

    def __init__(self, next_index: int, now: float) -> None:
        self.match = 0
        self.next = next_index
        self.flow: Flow = PROBE
        self.waiting_since: float | None = None  # When the oldest unanswered message was sent; None if there is none.
        self.in_flight: deque[tuple[int, int]] = deque()  # (last index, bytes) of each append that is not acknowledged.
        self.in_flight_bytes = 0
        self.contact = now
        self.sequence = 0  # The newest heartbeat round that the follower answered.

    def sent(self, last_index: int, size: int, now: float) -> None:
        """An append with entries up to `last_index` was sent."""
        if self.flow is REPLICATE:
            if not self.in_flight:
                self.waiting_since = now
            self.in_flight.append((last_index, size))
            self.in_flight_bytes += size
            self.next = last_index + 1
        else:
            self.waiting_since = now

    def acknowledged(self, index: int, now: float) -> bool:
        """The follower durably holds everything up to `index`. True if `match` rises."""
        in_flight = self.in_flight
        while in_flight and in_flight[0][0] <= index:
            self.in_flight_bytes -= in_flight.popleft()[1]
        is_new = index > self.match
        if is_new:
            self.match = index
        if index >= self.next:
            self.next = index + 1
        if self.flow is REPLICATE:
            self.waiting_since = now if in_flight else None
        elif index >= self.next - 1:
            self.flow, self.waiting_since = REPLICATE, None
        return is_new

    def rejected(self, index: int, hint: int) -> bool:
        """The follower does not hold entry `index`. False if the rejection is stale; `next` never drops to `match`."""
        stale = index <= self.match if self.flow is REPLICATE else index != self.next - 1
        if stale or self.flow is SNAPSHOT:
            return False
        self.restart(max(self.match + 1, min(hint, index)))
        return True

    def restart(self, next_index: int) -> None:
        """Probe again for where the logs agree: after a rejection, a new session, or silence."""
        self.flow, self.next, self.waiting_since = PROBE, next_index, None
        self.in_flight.clear()
        self.in_flight_bytes = 0

    def offer_snapshot(self) -> None:
        self.flow, self.waiting_since = SNAPSHOT, None
        self.in_flight.clear()
        self.in_flight_bytes = 0
