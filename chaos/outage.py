"""Times in which a node of a chaos run was away. Client errors are excused during an outage, and only then."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Outage:
    node: str
    why: str
    since: float
    until: float | None = None  # None: still out

    def touches(self, began: float, ended: float, *, slack_s: float) -> bool:
        return self.since - slack_s <= ended and (self.until is None or began <= self.until + slack_s)
