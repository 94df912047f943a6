"""The queue of a deployment on one node: which attempts wait, how many may, and which may run at the same time.

A pure module: it is told the time, and knows no socket, no event loop and no partition. The queue is bounded. An attempt that
does not fit is passed over: the queue remembers the smallest such id for each leadership, and the leadership looks in its
state from there on when there is room again (`Search`).

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
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar

from holdfast.cluster.backoff import backoff
from holdfast.sdk.ids import NO_INVOCATION, DeploymentId, InvocationId
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

#: A service, and the name of a handler there.
Handler: TypeAlias = tuple[str, str]


class Waiting(Protocol):
    """What the queue must know about an attempt that waits."""

    @property
    def owner(self) -> object:
        """The leadership that it belongs to."""

    @property
    def id(self) -> InvocationId: ...

    @property
    def handler(self) -> Handler: ...

    @property
    def losses(self) -> int:
        """How many processes its invocation lost in a row."""


_Ticket = TypeVar("_Ticket", bound=Waiting)
_Owner = TypeVar("_Owner")


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


class Queue(Generic[_Ticket, _Owner]):
    """Of one endpoint on one node. At most `waiting_max` attempts wait; every other one is passed over."""

    def __init__(self, clock: Callable[[], float], waiting_max: int) -> None:
        self._clock = clock
        self._waiting_max = waiting_max
        self.running = 0  # Attempts that were started and are not over.
        self._plain: OrderedDict[InvocationId, _Ticket] = OrderedDict()
        self._suspects: OrderedDict[InvocationId, _Ticket] = OrderedDict()
        self._convicts: dict[Handler, OrderedDict[InvocationId, _Ticket]] = {}
        self._watched: dict[InvocationId, _Running] = {}  # Those of the running attempts that are watched.
        self._crashes: deque[float] = deque(maxlen=max(_BY_CRASHES) + 1)  # Without a known culprit.
        self._records: dict[Handler, _Record] = {}
        #: Owners with more attempts than fit the queue, and the smallest id that did not fit. The state has them all.
        self._passed_over: dict[_Owner, InvocationId] = {}

    # -- the queues

    def __len__(self) -> int:
        count = len(self._plain) + len(self._suspects)
        return count + sum(map(len, self._convicts.values())) if self._convicts else count

    def __contains__(self, invocation: InvocationId) -> bool:
        return any(invocation in queue for queue in self._queues)

    def __iter__(self) -> Iterator[_Ticket]:
        for queue in self._queues:
            yield from queue.values()

    @property
    def _queues(self) -> tuple[OrderedDict[InvocationId, _Ticket], ...]:
        return *self._convicts.values(), self._suspects, self._plain

    def get(self, invocation: InvocationId) -> _Ticket | None:
        return next((queue[invocation] for queue in self._queues if invocation in queue), None)

    def add(self, ticket: _Ticket) -> None:
        """Append a ticket to its queue. A newer ticket of the same invocation replaces the older one in place."""
        wanted = self._queue_of(ticket)
        for queue in self._queues:
            if queue is not wanted:
                queue.pop(ticket.id, None)
        wanted[ticket.id] = ticket

    def _queue_of(self, ticket: _Ticket) -> OrderedDict[InvocationId, _Ticket]:
        if self._records and self._is_convicted(ticket.handler):
            return self._convicts.setdefault(ticket.handler, OrderedDict())
        return self._suspects if suspects_max(ticket.losses) else self._plain

    def remove(self, invocation: InvocationId) -> None:
        for queue in self._queues:
            queue.pop(invocation, None)

    def clear(self) -> None:
        for queue in self._queues:
            queue.clear()

    # -- bounds

    def has_room(self, attempts_max: int) -> bool:
        """Whether one more attempt may run at an endpoint with this limit."""
        return self.running < attempts_max

    @property
    def places(self) -> int:
        """How many more attempts may wait."""
        return self._waiting_max - len(self)

    def takes(self, invocation: InvocationId) -> bool:
        """Whether the attempt may wait here. A newer one takes the place of an older one of its invocation."""
        return len(self) < self._waiting_max or invocation in self

    def pass_over(self, owner: _Owner, invocation: InvocationId) -> None:
        """Remember where its owner must look when there are places again."""
        self._passed_over[owner] = min(invocation, self._passed_over.get(owner, invocation))

    @property
    def may_look_again(self) -> bool:
        """Whether attempts were passed over for which there are places by now, enough of them to be worth a search."""
        return bool(self._passed_over) and len(self) <= self._waiting_max // 2

    @property
    def has_passed_over(self) -> bool:
        return bool(self._passed_over)

    def take_passed_over(self) -> Iterable[tuple[_Owner, InvocationId]]:
        """The owners that must look again, and from which id on."""
        owners, self._passed_over = self._passed_over, {}
        return owners.items()

    def forget(self, owner: _Owner) -> None:
        """Drop everything of a leadership that has ended."""
        self._passed_over.pop(owner, None)
        for invocation in [ticket.id for ticket in self if ticket.owner is owner]:
            self.remove(invocation)

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs, waits or was passed over."""
        return not (self.running or self or self._passed_over)

    # -- turns

    def beside(self, ticket: _Ticket) -> int:
        """How many watched attempts may run at a time while this one does; 0 if it is not watched."""
        if self._is_calm and not ticket.losses:
            return 0
        if self._records and self._is_convicted(ticket.handler):
            return ALONE
        limits = suspects_max(ticket.losses), self._caution()
        return min(filter(None, limits), default=0)

    def is_next(self, ticket: _Ticket) -> bool:
        """Whether a newly arrived attempt may start at once."""
        if self._is_calm and not (ticket.losses or self._watched):
            return not self._plain
        if self._records and self._is_convicted(ticket.handler):
            return False
        return not self._queue_of(ticket) and self._may_run(self.beside(ticket))

    @property
    def _is_calm(self) -> bool:
        """Whether the process has not crashed lately, as usual: then only the losses of an attempt itself count."""
        return not (self._records or self._crashes)

    def _may_run(self, beside: int) -> bool:
        running = self._watched
        if not running:
            return True
        limit = min(each.beside for each in running.values())
        if limit == ALONE:
            return False
        return not beside or len(running) < min(beside, limit)

    def take(self) -> _Ticket | None:
        """The next attempt to start, or None.

        First comes a convict whose pause is over, if it can run alone; then the suspect with the fewest losses, if it
        may run; then the attempt that has waited longest."""
        watch_no_more = False  # A convict waits for the watched attempts to end.
        if self._convicts and (convict := self._due_convict()) is not None:
            if not self._watched:
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
        self.running += 1
        if beside:
            self._watched[invocation] = _Running(handler, beside, self._clock())

    def ended(self, invocation: InvocationId) -> None:
        """The attempt is over."""
        self.running -= 1
        if self._watched:
            self.trust(invocation)

    def trust(self, invocation: InvocationId) -> None:
        """The attempt is over, or has run for so long that others stop waiting for it."""
        running = self._watched.pop(invocation, None)
        if running is not None and (record := self._records.get(running.handler)) is not None and record.convicted:
            # Others had to wait for it, so they get as much time as it used.
            now = self._clock()
            record.not_before = max(record.not_before, now + min(now - running.began_at, SUSPICION_S))

    # -- crashes

    def crashed(self, begun: Collection[InvocationId]) -> InvocationId | None:
        """The process ended unexpectedly while these attempts ran. Returns the attempt that ended it, if known."""
        now = self._clock()
        culprit = next(
            (each for each, running in self._watched.items() if running.beside == ALONE and each in begun), None
        )
        if culprit is None:
            if begun:
                self._crashes.append(now)
            return None
        handler = self._watched[culprit].handler
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


class Search:
    """What a leadership looks for in its state: the attempts that queues passed over, and those that were lost.

    Requests merge while a search runs, and the next search answers all of them. An endpoint gets at most as many attempts as
    there are places in its queue, counted once per search: what it was offered before may still be on its way through the log.
    """

    def __init__(self) -> None:
        self._wanted: dict[DeploymentId | None, InvocationId] = {}  # Deployment (None: all) -> the first id.
        self._deployments: set[DeploymentId] | None = None  # Those that the current search is for; None: all.
        self._places: dict[str, int] = {}  # Free places at endpoints in the current search.

    def want(self, first: InvocationId, deployment: DeploymentId | None) -> None:
        self._wanted[deployment] = min(first, self._wanted.get(deployment, first))

    @property
    def is_wanted(self) -> bool:
        return bool(self._wanted)

    def begin(self) -> InvocationId:
        """Begin a search for everything wanted so far. Returns the id to begin with."""
        wanted, self._wanted, self._places = self._wanted, {}, {}
        self._deployments = None if None in wanted else {deployment for deployment in wanted if deployment}
        return min(wanted.values(), default=NO_INVOCATION)

    def covers(self, deployment: DeploymentId | None) -> bool:
        """Whether the search is for attempts at this deployment (None: at none that is known)."""
        return self._deployments is None or deployment in self._deployments

    def take_place(self, deployment: DeploymentId, queue: Queue[Any, Any]) -> bool:
        """Take one of the places that the queue of this deployment had when the search met it first."""
        left = self._places.get(deployment)
        if left is None:
            left = queue.places
        self._places[deployment] = left - 1
        return left > 0

    @property
    def is_in_vain(self) -> bool:
        """Whether no queue that the search is for has a place left."""
        return self._deployments is not None and all(self._places.get(each, 1) <= 0 for each in self._deployments)


def _place(queue: OrderedDict[InvocationId, _Ticket], invocation: InvocationId) -> int:
    """How many are ahead of it."""
    return next(place for place, each in enumerate(queue) if each == invocation)


def _ahead(count: int) -> str:
    return "it is the next" if not count else "1 is ahead of it" if count == 1 else f"{count} are ahead of it"


def _at_a_time(many: int) -> str:
    return "attempts run one at a time" if many == ALONE else f"at most {many} attempts run at a time"
