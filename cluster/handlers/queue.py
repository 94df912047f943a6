"""The order of attempts at an endpoint: which ones wait, and which may run at the same time.

When a handler process ends unexpectedly, any attempt that ran in it may be the cause. A crash with one attempt in it is
evidence; a crash with many is not. So attempts are *watched*: only a limited number of them run at a time, fewer after
each crash, and in the end one runs alone. Three things make an attempt watched:

- its invocation lost its process again and again (a *suspect*; the state counts), - the process ended often within a
minute, so that no attempt there makes progress, - its handler ended the process while it ran alone, more than once (a
*convicted* handler).

Attempts of convicted handlers run alone and after growing pauses, so that all others make progress in between. Other
attempts wait for a watched one for at most `SUSPICION_S`: its step may take hours, or hang.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator
from typing import Final

from holdfast.cluster.backoff import backoff
from holdfast.cluster.handlers.attempts import Ticket
from holdfast.sdk.ids import InvocationId
from holdfast.statemachine.attempts import SUSPECT_LOSSES

#: How many watched attempts may run at a time, by how often the invocation lost its process, and by how often the
#: process ended recently. The limit falls in steps: one crash with ten thousand attempts must not make them run one by
#: one.
_BY_LOSSES: Final = {SUSPECT_LOSSES: 64, SUSPECT_LOSSES + 1: 8}
_BY_CRASHES: Final = {3: 64, 4: 8}
#: A watched attempt that must be the only watched one.
ALONE: Final = 1
#: Others wait this long for a running watched attempt. Endpoints use the same rule.
SUSPICION_S: Final = 30.0
#: Crashes without a known culprit count for this long.
CRASHES_S: Final = 60.0
#: A handler is convicted when its attempts ended the process this many times while they ran alone,
CONVICTION: Final = 2
#: then it pauses for this long after each further crash, doubled each time,
PAUSE_S: Final = 1.0
PAUSE_S_MAX: Final = 60.0
#: and is forgiven after this long without one.
FORGIVEN_S: Final = 600.0

Handler = tuple[str, str]


def suspects_max(losses: int) -> int:
    """Watched attempts that may run at a time beside one whose invocation lost `losses` processes. 0: no limit."""
    return _BY_LOSSES.get(losses, ALONE) if losses >= SUSPECT_LOSSES else 0


class _Record:
    """The crashes of a handler."""

    __slots__ = ("crashed_at", "crashes", "not_before")

    def __init__(self) -> None:
        self.crashes = 0  # While one of its attempts ran alone.
        self.crashed_at = 0.0
        self.not_before = 0.0

    @property
    def convicted(self) -> bool:
        return self.crashes >= CONVICTION


class _Running:
    """A watched attempt that runs."""

    __slots__ = ("began_at", "beside", "handler")

    def __init__(self, handler: Handler, beside: int, now: float) -> None:
        self.handler = handler
        self.beside = beside
        self.began_at = now


class Turns:
    """The queues of one endpoint on one node."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._plain: OrderedDict[InvocationId, Ticket] = OrderedDict()
        self._suspects: OrderedDict[InvocationId, Ticket] = OrderedDict()
        self._convicts: dict[Handler, OrderedDict[InvocationId, Ticket]] = {}
        self._running: dict[InvocationId, _Running] = {}  # Only watched attempts.
        self._crashes: deque[float] = deque(maxlen=max(_BY_CRASHES) + 1)  # Without a known culprit.
        self._records: dict[Handler, _Record] = {}

    # -- the queues

    def __len__(self) -> int:
        return len(self._plain) + len(self._suspects) + len(self._convicts)

    def __contains__(self, invocation: InvocationId) -> bool:
        return any(invocation in queue for queue in self._queues)

    def __iter__(self) -> Iterator[Ticket]:
        for queue in self._queues:
            yield from queue.values()

    @property
    def _queues(self) -> tuple[OrderedDict[InvocationId, Ticket], ...]:
        return *self._convicts.values(), self._suspects, self._plain

    def get(self, invocation: InvocationId) -> Ticket | None:
        return next((queue[invocation] for queue in self._queues if invocation in queue), None)

    def add(self, ticket: Ticket) -> None:
        """Append a ticket to its queue. A newer ticket of the same invocation replaces the older one in place."""
        wanted = self._queue_of(ticket)
        for queue in self._queues:
            if queue is not wanted:
                queue.pop(ticket.id, None)
        wanted[ticket.id] = ticket

    def _queue_of(self, ticket: Ticket) -> OrderedDict[InvocationId, Ticket]:
        if self._records and self._is_convicted(ticket.handler):
            return self._convicts.setdefault(ticket.handler, OrderedDict())
        return self._suspects if suspects_max(ticket.losses) else self._plain

    def remove(self, invocation: InvocationId) -> None:
        for queue in self._queues:
            queue.pop(invocation, None)

    def clear(self) -> None:
        for queue in self._queues:
            queue.clear()

    # -- turns

    def beside(self, ticket: Ticket) -> int:
        """How many watched attempts may run at a time while this one does; 0 if it is not watched."""
        if self._records and self._is_convicted(ticket.handler):
            return ALONE
        limits = suspects_max(ticket.losses), self._caution()
        return min(filter(None, limits), default=0)

    def is_next(self, ticket: Ticket) -> bool:
        """Whether a newly arrived attempt may start at once."""
        if self._records and self._is_convicted(ticket.handler):
            return False
        return not self._queue_of(ticket) and self._may_run(self.beside(ticket))

    def _may_run(self, beside: int) -> bool:
        running = self._running
        if not running:
            return True
        limit = min(each.beside for each in running.values())
        if limit == ALONE:
            return False
        return not beside or len(running) < min(beside, limit)

    def take(self) -> Ticket | None:
        """The next attempt to start, or None.

        First comes a convict whose pause is over, if it can run alone; then the suspect with the fewest losses, if it
        may run; then the attempt that has waited longest."""
        watch_no_more = False  # A convict waits for the watched attempts to end.
        if self._convicts and (convict := self._due_convict()) is not None:
            if not self._running:
                return self._convicts[convict].popitem(last=False)[1]
            watch_no_more = True
        if self._suspects and not watch_no_more:
            first = min(self._suspects.values(), key=lambda ticket: ticket.losses)
            if self._may_run(self.beside(first)):
                return self._suspects.pop(first.id)
        if self._plain:
            caution = self._caution()
            if self._may_run(caution) and not (caution and watch_no_more):
                return self._plain.popitem(last=False)[1]
        return None

    def _due_convict(self) -> Handler | None:
        """A convicted handler with waiting attempts whose pause is over."""
        for handler, queue in list(self._convicts.items()):
            if not queue or not self._is_convicted(handler):
                del self._convicts[handler]
                for ticket in queue.values():
                    self.add(ticket)
        now = self._clock()
        return next((each for each in self._convicts if self._records[each].not_before <= now), None)

    def due_in(self) -> float | None:
        """Seconds until the first pause of a handler with waiting attempts is over; None if there is no such handler."""
        waiting = [self._records.get(each) for each, queue in self._convicts.items() if queue]
        if not waiting:
            return None
        return max(min(record.not_before if record is not None else 0.0 for record in waiting) - self._clock(), 0.0)

    def began(self, invocation: InvocationId, handler: Handler, beside: int) -> None:
        if beside:
            self._running[invocation] = _Running(handler, beside, self._clock())

    def ended(self, invocation: InvocationId) -> None:
        """The attempt is over, or has run for so long that others stop waiting for it."""
        running = self._running.pop(invocation, None)
        if running is not None and (record := self._records.get(running.handler)) is not None and record.convicted:
            # Others had to wait for it, so they get as much time as it used.
            now = self._clock()
            record.not_before = max(record.not_before, now + min(now - running.began_at, SUSPICION_S))

    # -- crashes

    def crashed(self, begun: Collection[InvocationId]) -> InvocationId | None:
        """The process ended unexpectedly while these attempts ran. Returns the attempt that ended it, if known."""
        now = self._clock()
        culprit = next(
            (each for each, running in self._running.items() if running.beside == ALONE and each in begun), None
        )
        if culprit is None:
            if begun:
                self._crashes.append(now)
            return None
        handler = self._running[culprit].handler
        self._is_convicted(handler)  # Drops a record that is too old to count.
        record = self._records.setdefault(handler, _Record())
        record.crashes += 1
        record.crashed_at = now
        if record.convicted:
            pause = backoff(PAUSE_S, record.crashes - CONVICTION, PAUSE_S_MAX)
            record.not_before = now + pause
            self._crashes.clear()  # The culprit is known now. Others are found in the same way.
            for queue in (self._plain, self._suspects):
                for ticket in [each for each in queue.values() if each.handler == handler]:
                    self.add(ticket)
        return culprit

    def _caution(self) -> int:
        """How many attempts may run at a time because the process ends often; 0 means no limit."""
        crashes = self._crashes
        if not crashes:
            return 0
        now = self._clock()
        while crashes and now - crashes[0] > CRASHES_S:
            crashes.popleft()
        return _BY_CRASHES.get(len(crashes), 0 if len(crashes) < min(_BY_CRASHES) else ALONE)

    def _is_convicted(self, handler: Handler) -> bool:
        record = self._records.get(handler)
        if record is None:
            return False
        if self._clock() - record.crashed_at > FORGIVEN_S:
            del self._records[handler]
            return False
        return record.convicted

    def why_waits(self, invocation: InvocationId) -> str:
        """Explains to operators why this attempt is held back and how many are ahead of it; empty if it is not."""
        for handler, queue in self._convicts.items():
            if invocation in queue:
                return f"{self._why_convicted(handler)}; {_ahead(_place(queue, invocation))}"
        if (ticket := self._suspects.get(invocation)) is not None:
            ahead = sum(each.losses < ticket.losses for each in self._suspects.values())
            equals = [each.id for each in self._suspects.values() if each.losses == ticket.losses]
            return (
                f"its process ended during its last {ticket.losses} attempts, so {_at_a_time(self.beside(ticket))} of those "
                f"that may be the cause; {_ahead(ahead + equals.index(invocation))}"
            )
        if invocation not in self._plain:
            return ""
        if caution := self._caution():
            why = (
                f"its process ended {len(self._crashes)} times or more within a minute, so {_at_a_time(caution)} there"
            )
        elif not self._may_run(0):
            why = f"an attempt that may end the process runs alone, for {SUSPICION_S:.0f} s at most"
        else:
            return ""
        return f"{why}; {_ahead(_place(self._plain, invocation))}"

    def _why_convicted(self, handler: Handler) -> str:
        record = self._records.get(handler)
        crashes = f"{record.crashes} times" if record is not None else "again and again"
        pause = record.not_before - self._clock() if record is not None else 0.0
        after = f", the next one in {max(pause, 1):.0f} s" if pause > 0 else ""
        alone = f"{_at_a_time(ALONE)}, after pauses{after}"
        return f"its handler ended the process {crashes} while nothing else ran in it, so {alone}"

    @property
    def restraint(self) -> str:
        """Explains to operators why few attempts run; empty if nothing is held back."""
        said = []
        if caution := self._caution():
            many = "1 attempt runs" if caution == ALONE else f"{caution} attempts run"
            said.append(
                f"its process ended {len(self._crashes)} times or more within a minute, so at most {many} there at a time"
            )
        said += [
            f"the handler {name} ended the process {crashes} times while nothing else ran in it, so its attempts run alone, "
            "after pauses"
            for name, crashes in self.convicted.items()
        ]
        return "; ".join(said)

    @property
    def convicted(self) -> dict[str, int]:
        """Handlers that ended their process while nothing else ran in it, and how often."""
        return {"/".join(each): record.crashes for each, record in self._records.items() if record.convicted}


def _place(queue: OrderedDict[InvocationId, Ticket], invocation: InvocationId) -> int:
    """How many are ahead of it."""
    return next(place for place, each in enumerate(queue) if each == invocation)


def _ahead(count: int) -> str:
    return "it is the next" if not count else "1 is ahead of it" if count == 1 else f"{count} are ahead of it"


def _at_a_time(many: int) -> str:
    return "attempts run one at a time" if many == ALONE else f"at most {many} attempts run at a time"
