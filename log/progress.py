"""What a leader knows of one follower's log, and how much it may send it.

Three states, as in etcd's raft: *probe* (one message at a time until the follower confirms where our logs agree),
*replicate* (a bounded window of messages in flight), *snapshot* (the next entry is trimmed; the state is offered
instead). `match` is what the follower has acknowledged as durable in this term. It never falls, and `next` never falls to it.
"""

from __future__ import annotations

from collections import deque
from enum import Enum, auto
from typing import Final


class Flow(Enum):
    PROBE = auto()
    REPLICATE = auto()
    SNAPSHOT = auto()


# A member of an enum is looked up by a Python function (until 3.12): too slow for what is asked of each message.
PROBE: Final = Flow.PROBE
REPLICATE: Final = Flow.REPLICATE
SNAPSHOT: Final = Flow.SNAPSHOT


class Progress:
    __slots__ = ("contact", "flow", "in_flight", "in_flight_bytes", "match", "next", "sequence", "waiting_since")

    def __init__(self, next_index: int, now: float) -> None:
        self.match = 0
        self.next = next_index
        self.flow: Flow = PROBE
        self.waiting_since: float | None = None  # Since when an answer to something sent is due; None: to nothing.
        self.in_flight: deque[tuple[int, int]] = deque()  # (last index, bytes) of each append not acknowledged
        self.in_flight_bytes = 0
        self.contact = now
        self.sequence = 0  # The newest heartbeat round it answered.

    def sent(self, last_index: int, size: int, now: float) -> None:
        """An append with entries up to `last_index` left."""
        if self.flow is REPLICATE:
            if not self.in_flight:
                self.waiting_since = now
            self.in_flight.append((last_index, size))
            self.in_flight_bytes += size
            self.next = last_index + 1
        else:
            self.waiting_since = now

    def acknowledged(self, index: int, now: float) -> bool:
        """The follower holds everything up to `index`, durably. True if that is news."""
        in_flight = self.in_flight
        while in_flight and in_flight[0][0] <= index:
            self.in_flight_bytes -= in_flight.popleft()[1]
        news = index > self.match
        if news:
            self.match = index
        if index >= self.next:
            self.next = index + 1
        if self.flow is REPLICATE:
            self.waiting_since = now if in_flight else None
        elif index >= self.next - 1:
            self.flow, self.waiting_since = REPLICATE, None
        return news

    def rejected(self, index: int, hint: int) -> bool:
        """The follower does not hold entry `index`. False if that is old news: `next` only falls, and never to `match`."""
        stale = index <= self.match if self.flow is REPLICATE else index != self.next - 1
        if stale or self.flow is SNAPSHOT:
            return False
        self.restart(max(self.match + 1, min(hint, index)))
        return True

    def restart(self, next_index: int) -> None:
        """Find out again where the logs agree: after a rejection, a new session, or silence."""
        self.flow, self.next, self.waiting_since = PROBE, next_index, None
        self.in_flight.clear()
        self.in_flight_bytes = 0

    def offer_snapshot(self) -> None:
        self.flow, self.waiting_since = SNAPSHOT, None
        self.in_flight.clear()
        self.in_flight_bytes = 0
