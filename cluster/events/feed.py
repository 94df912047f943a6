"""The events of a node for everybody who watches: one list that all readers share, and what each of them has read.

The feed works only while somebody reads. It collects the changes of all partitions in short intervals: those of partitions
with a replica here from memory, the others from nodes that have them. A reader is a place in the list. One that resumes, or
has fallen behind the list, first catches up from the changes that the replicas keep, and gets only the newest state of each
invocation then. If they do not keep them any more, it is told to read everything anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final

from holdfast.cluster.events.positions import Around, Encoder, OtherCluster
from holdfast.cluster.events.remote import Remote, Replica
from holdfast.cluster.events.signals import APPROVALS, CLUSTER, DEPLOYMENTS, Signals
from holdfast.cluster.partition.changes import Change, Numbered, Position, Slice
from holdfast.sdk.ids import InvocationId, PartitionNumber, numbers_of

logger = logging.getLogger(__name__)

INVOCATION: Final = "invocation"
RESET: Final = "reset"
KINDS: Final = (INVOCATION, CLUSTER, DEPLOYMENTS, APPROVALS)

COLLECT_S: Final = 0.05
ASK_S: Final = 0.1  # Between two requests for the changes of partitions that are not here.
RETRY_S: Final = 1.0
#: How long the first reader waits for the places of partitions that are not here, and for a node that lags behind.
BEGIN_S: Final = 2.0
#: Collected at a time, between two turns of the loop.
ROWS: Final = 250
#: Events in the list that all readers share.
LIST_MAX: Final = 8192
#: With more, ids would be too long for the header in which clients return them, so events have none.
RESUMABLE_PARTITIONS_MAX: Final = 1000
#: Read at a time by a reader that catches up.
CATCH_UP_ROWS: Final = 1000
#: Events that a reader gets at a time.
READ_MAX: Final = 250
_TOO_MANY: Final = "partition {} has changed more often than its nodes remember"


#: The partition of an event that is of none.
NOWHERE: Final = PartitionNumber(-1)


class Event:
    """One event, the same for all readers; so is its `text`, which its encoder sets."""

    __slots__ = ("around", "change", "kind", "number", "position", "reason", "text")

    def __init__(
        self,
        kind: str,
        change: Change | None = None,
        *,
        number: PartitionNumber = NOWHERE,
        position: Position = (0, 0),
        around: Around = (b"", b"", b""),
        reason: str = "",
    ) -> None:
        self.kind = kind
        self.change = change
        self.number = number  # The partition, or NOWHERE.
        self.position = position
        self.around = around  # What was read in the other partitions.
        self.reason = reason
        self.text: bytes | None = None

    @property
    def id(self) -> str | None:
        """Everything up to this event. Only a change of an invocation has one."""
        return Encoder.encode_at(self.around, self.number, self.position) if self.number >= 0 else None


class Lost(Exception):
    """Changes that a reader has not read are not known any more. The message says why."""


class Feed:
    """One per node."""

    def __init__(
        self,
        partitions: int,
        hosted: Mapping[PartitionNumber, Replica],
        remote: Remote,
        signals: Signals,
        *,
        identity: Callable[[], str],
    ) -> None:
        """`identity`: of the cluster; it does not change any more when somebody reads."""
        self._partitions = partitions
        self._hosted = hosted
        self._remote = remote
        self._signals = signals
        self._identity = identity
        self._encoder: Encoder | None = None
        self._readers: dict[Reader, None] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._id: str | None = None
        self.positions: list[Position | None] = [None] * partitions  # Collected up to here.
        self.events: list[Event] = []
        self.first = 0  # The number of the first event in the list, since the node started.
        self._news: asyncio.Future[None] | None = None

    @property
    def is_resumable(self) -> bool:
        return self._partitions <= RESUMABLE_PARTITIONS_MAX

    @property
    def readers(self) -> int:
        return len(self._readers)

    @property
    def encoder(self) -> Encoder:
        if self._encoder is None:
            self._encoder = Encoder(self._identity(), self._partitions)
        return self._encoder

    @property
    def end(self) -> int:
        return self.first + len(self.events)

    @property
    def id(self) -> str:
        """Of everything collected so far."""
        if self._id is None:
            self._id = self.encoder.encode(self.positions)
        return self._id

    def check(self, after: str) -> None:
        """Raises BadPositions if this is not the id of an event."""
        with suppress(OtherCluster):
            self.encoder.decode(after)

    async def open(self, after: str | None) -> Reader:
        """A new reader, from now on or after an event; see `Reader.lost`. Close it. Raises BadPositions."""
        positions: list[Position | None] | None = None
        lost = ""
        if after is not None:
            try:
                positions = self.encoder.decode(after)
            except OtherCluster:
                lost = "the last event was of another cluster"
            else:
                if None in positions:
                    lost = "a partition was unreachable when the last event was sent"
        reader = Reader(self, positions, lost)
        self._readers[reader] = None
        try:
            if not self._tasks:
                self._begin()
            await self._until_known(positions or ())
        except BaseException:
            self.close(reader)
            raise
        reader.begin()
        return reader

    def _begin(self) -> None:
        """Begin where the partitions are now. Nobody has read anything since the last reader left."""
        self.first, self.events = self.end, []
        self.positions = [
            self._hosted[number].machine.changes.end if number in self._hosted else None
            for number in numbers_of(self._partitions)
        ]
        self._id = None
        self._signals.restart(self._signal)
        works = (self._collect, self._ask, self._signals.look, self._signals.look_at_handlers)
        self._tasks = [asyncio.ensure_future(self._run(each)) for each in works]

    async def _until_known(self, positions: Sequence[Position | None]) -> None:
        """Give partitions on other nodes time to answer, and replicas here time to catch up with what a reader has seen."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + BEGIN_S

        def is_known() -> bool:
            mine = self.positions
            return None not in mine and all(
                at is None or (here is not None and here >= at) for at, here in zip(positions, mine, strict=False)
            )

        while not is_known() and loop.time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(COLLECT_S)

    def close(self, reader: Reader) -> None:
        self._readers.pop(reader, None)
        if not self._readers:
            self._cancel()

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks = []

    async def stop(self) -> None:
        tasks = self._tasks
        self._cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def wait(self, number: int, seconds: float) -> None:
        """Until there is an event with this number, or the time is up."""
        if self.end > number:
            return
        if self._news is None or self._news.done():
            self._news = asyncio.get_running_loop().create_future()
        await asyncio.wait((self._news,), timeout=seconds)

    # -- collecting --------------------------------------------------------------------------------------------------

    async def _run(self, work: Callable[[], Awaitable[float]]) -> None:
        """Repeat work that says when it wants to be repeated."""
        while True:
            try:
                pause_s = await work()
            except Exception:
                logger.exception("collecting events failed; retrying")
                pause_s = RETRY_S
            await asyncio.sleep(pause_s)

    async def _collect(self) -> float:
        for number in numbers_of(self._partitions):
            while (replica := self._hosted.get(number)) is not None:
                position = self.positions[number]
                changes = replica.machine.changes
                if position is None:
                    self._found(number, changes.end)
                    break
                if position >= changes.end:
                    break
                found = changes.after(position, ROWS)
                self._add(number, found)
                if len(found.rows) < ROWS:
                    break
                await asyncio.sleep(0)
        return COLLECT_S

    async def _ask(self) -> float:
        wanted = {
            number: self.positions[number] for number in numbers_of(self._partitions) if number not in self._hosted
        }
        if wanted:
            for number, found in (await self._remote.read(wanted)).items():
                if self.positions[number] != wanted[number]:
                    continue  # It came to this node meanwhile.
                if wanted[number] is None:
                    self._found(number, found.position)
                else:
                    self._add(number, found)
                await asyncio.sleep(0)
        return ASK_S

    def _found(self, number: PartitionNumber, end: Position) -> None:
        """The place of a partition is known now. Readers that came before may have missed something in it."""
        self.positions[number] = end
        self._id = None
        if any(each.is_reading for each in self._readers):
            self._append([Event(RESET, reason=f"partition {number} was unreachable, and its changes unknown")])

    def _add(self, number: PartitionNumber, found: Slice) -> None:
        self.positions[number] = found.position
        self._id = None
        if found.lost:
            self._append([Event(RESET, reason=_TOO_MANY.format(number))])
        elif found.rows:
            around = self.encoder.around(self.positions, number)
            self._append(
                [
                    Event(INVOCATION, Change(*row), number=number, position=(index, count), around=around)
                    for index, count, row in found.rows
                ]
            )

    def _signal(self, kind: str) -> None:
        self._append([Event(kind)])

    def _append(self, events: Sequence[Event]) -> None:
        self.events += events
        if len(self.events) > LIST_MAX:
            gone = len(self.events) - LIST_MAX // 2  # Half of it, because moving the rest costs time.
            del self.events[:gone]
            self.first += gone
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    # -- catching up -------------------------------------------------------------------------------------------------

    async def read(self, number: PartitionNumber, after: Position, until: Position) -> tuple[list[Numbered], Position]:
        """The changes of a partition after a position, oldest first, and the position after them: a part of those up to
        `until`, with only the newest of each invocation. Raises Lost."""
        found = await self._next_of(number, after)
        newest: dict[InvocationId, Numbered] = {}
        for row in found.rows:
            if row[:2] > until:
                break
            id_ = row[2][0]
            newest.pop(id_, None)
            newest[id_] = row
        return list(newest.values()), min(found.position, until)

    async def _next_of(self, number: PartitionNumber, after: Position) -> Slice:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + BEGIN_S
        while True:
            replica = self._hosted.get(number)
            found = replica.machine.changes.after(after, CATCH_UP_ROWS) if replica is not None else None
            if found is None or found.lost:  # A node that runs for longer may still know them.
                found = (await self._remote.read({number: after})).get(number, found)
            if found is not None and found.lost:
                raise Lost(_TOO_MANY.format(number))
            if found is not None and found.position > after:
                return found
            if loop.time() > deadline:  # The replica that was asked lags behind, or none is reachable.
                raise Lost(f"no node tells the changes of partition {number}")
            await asyncio.sleep(COLLECT_S)


class Reader:
    """What one of those who watch has read."""

    def __init__(self, feed: Feed, positions: list[Position | None] | None, lost: str) -> None:
        self._feed = feed
        self._behind = positions  # Still to be caught up with, from here; None: it reads the list.
        self._lost = lost  # Why it cannot continue after its last event; empty: it can.
        self._until: list[Position | None] = []  # Catch up to here,
        self._next = 0  # and continue with this event of the list.
        self._ready: deque[tuple[PartitionNumber, Numbered]] = deque()  # A partition, and its change.
        self._around: Around = (b"", b"", b"")  # Of them.
        self._ahead: dict[PartitionNumber, Position] = {}  # Partitions in which it has seen more than this node.
        self._id = ""
        self.is_reading = False

    @property
    def resumes(self) -> bool:
        """Whether it gets everything after its last event."""
        return self._behind is not None and not self._lost

    @property
    def id(self) -> str:
        """Of everything that it has read."""
        return self._id

    def begin(self) -> None:
        self.is_reading = True
        if self._behind is not None and not self._lost:
            self._catch_up_from(self._behind)
        else:
            self._jump()

    def _jump(self) -> None:
        """Continue with what comes now."""
        self._behind = None
        self._ahead = {}
        self._ready.clear()
        self._next, self._id = self._feed.end, self._feed.id

    def _catch_up_from(self, positions: list[Position | None]) -> None:
        feed = self._feed
        self._behind = positions
        self._id = feed.encoder.encode(positions)
        self._until, self._next = list(feed.positions), feed.end

    async def read(self, seconds: float) -> list[Event]:
        """The next events; none if none come within this time."""
        if self._lost:
            reason, self._lost = self._lost, ""
            return [Event(RESET, reason=reason)]
        if self._behind is not None:
            try:
                return await self._catch_up(self._behind)
            except Lost as error:
                self._jump()
                return [Event(RESET, reason=str(error))]
        feed = self._feed
        await feed.wait(self._next, seconds)
        if self._next < feed.first:  # It reads too slowly.
            self._catch_up_from(feed.encoder.decode(self._id))
            return []
        first = self._next - feed.first
        events = feed.events[first : first + READ_MAX]
        self._next += len(events)
        if self._ahead:
            events = [each for each in events if not self._has_seen(each)]
        if self._next == feed.end:
            self._ahead = {number: at for number, at in self._ahead.items() if (feed.positions[number] or at) < at}
        if self._next == feed.end and not self._ahead:
            self._id = feed.id
        else:
            self._note(events)
        return events

    def _has_seen(self, event: Event) -> bool:
        at = self._ahead.get(event.number)
        if at is not None and event.number != NOWHERE and event.position > at:
            del self._ahead[event.number]
            return False
        return at is not None

    def _note(self, events: Sequence[Event]) -> None:
        self._id = next((id_ for each in reversed(events) if (id_ := each.id) is not None), self._id)

    async def _catch_up(self, behind: list[Position | None]) -> list[Event]:
        """The next piece of what it has missed. At the end, also that anything else may have changed."""
        if not self._ready:
            number = next((number for number in numbers_of(len(behind)) if self._is_behind(behind, number)), None)
            if number is None:
                return self._caught_up(behind)
            after, until = behind[number], self._until[number]
            assert after is not None and until is not None, "as found just now"
            rows, behind[number] = await self._feed.read(number, after, until)
            self._around = self._feed.encoder.around(behind, number)
            self._ready.extend((number, row) for row in rows)
        ready = [self._ready.popleft() for _ in range(min(READ_MAX, len(self._ready)))]
        events = [
            Event(INVOCATION, Change(*row), number=number, position=(index, count), around=self._around)
            for number, (index, count, row) in ready
        ]
        self._note(events)
        return events

    def _is_behind(self, behind: list[Position | None], number: PartitionNumber) -> bool:
        at, until = behind[number], self._until[number]
        if at is None or until is None:
            raise Lost(f"no node tells the changes of partition {number}")
        return at < until

    def _caught_up(self, behind: list[Position | None]) -> list[Event]:
        triples = zip(numbers_of(len(behind)), behind, self._until, strict=True)
        self._ahead = {
            number: at for number, at, until in triples if at is not None and until is not None and at > until
        }
        self._behind = None
        self._id = self._feed.encoder.encode(behind)
        return [Event(CLUSTER), Event(DEPLOYMENTS), Event(APPROVALS)]
