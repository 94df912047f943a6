"""Whose turn it is at an endpoint: who waits there, and who may not run beside whom.

When a process of handlers ends without a word, any of the attempts that ran in it may have ended it. Those of invocations that
were hit again and again are *suspects*. The more often it happened, the fewer suspects run at a time: the innocent ones finish,
because sooner or later they run without the one that ends the process, and that one is found out when it runs without them.
Others wait for a suspect for `SUSPICION_S` at most: its step may take hours, or hang.
Everybody else is started as always.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

from holdfast.cluster.handlers.attempts import Ticket
from holdfast.statemachine.attempts import SUSPECT_LOSSES

#: How many suspects may run at a time, by how many streams they lost: a process that ends while ten thousand attempts run must
#: not make them wait for one another, one by one.
_BESIDE: Final = {SUSPECT_LOSSES: 64, SUSPECT_LOSSES + 1: 8}
#: For so long others wait for a suspect that runs. Endpoints count the same way.
SUSPICION_S: Final = 30.0


def suspects_max(losses: int) -> int:
    """How many suspects may run at a time while one runs that lost so many streams. 0: it is no suspect."""
    return _BESIDE.get(losses, 1) if losses >= SUSPECT_LOSSES else 0


class Turns:
    """Of one endpoint, at one node."""

    def __init__(self) -> None:
        self._plain: OrderedDict[bytes, Ticket] = OrderedDict()
        self._suspects: OrderedDict[bytes, Ticket] = OrderedDict()
        self._running: dict[bytes, int] = {}  # Suspects that run, and how many may beside them.

    def __len__(self) -> int:
        return len(self._plain) + len(self._suspects)

    def __contains__(self, invocation: bytes) -> bool:
        return invocation in self._plain or invocation in self._suspects

    def __iter__(self) -> Iterator[Ticket]:
        yield from self._suspects.values()
        yield from self._plain.values()

    def get(self, invocation: bytes) -> Ticket | None:
        return self._plain.get(invocation) or self._suspects.get(invocation)

    def add(self, ticket: Ticket) -> None:
        """At the end of its queue; a newer ticket of the same invocation takes the place of the older one."""
        is_suspect = bool(suspects_max(ticket.losses))
        (self._plain if is_suspect else self._suspects).pop(ticket.id, None)
        (self._suspects if is_suspect else self._plain)[ticket.id] = ticket

    def remove(self, invocation: bytes) -> None:
        self._plain.pop(invocation, None)
        self._suspects.pop(invocation, None)

    def clear(self) -> None:
        self._plain.clear()
        self._suspects.clear()

    def is_next(self, losses: int) -> bool:
        """Whether it is the turn of somebody who comes only now, and lost so many streams."""
        return not self._suspects and self._may_run(losses) if suspects_max(losses) else not self._plain

    def _may_run(self, losses: int) -> bool:
        """Whether a suspect may run beside those that do."""
        return len(self._running) < min([suspects_max(losses), *self._running.values()])

    def take(self) -> Ticket | None:
        """Whoever is next: of the suspects the one that was hit least often, if it may run, or else whoever waits longest."""
        if self._suspects:
            first = min(self._suspects.values(), key=lambda ticket: ticket.losses)
            if self._may_run(first.losses):
                return self._suspects.pop(first.id)
        return self._plain.popitem(last=False)[1] if self._plain else None

    def began(self, invocation: bytes, losses: int) -> None:
        if beside := suspects_max(losses):
            self._running[invocation] = beside

    def ended(self, invocation: bytes) -> None:
        self._running.pop(invocation, None)
