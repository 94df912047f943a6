"""Where queries get their rows: slices of the partitions, read in a thread of this node or of another one.

A thread borrows the state of a partition for one slice at a time, a few milliseconds, because the partition cannot
enlarge or replace its file meanwhile. So a query sees each slice as of one moment, and the slices as of several.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from functools import partial
from heapq import merge
from operator import itemgetter
from threading import Event
from time import perf_counter
from typing import Any, Final, Protocol

import lmdb

from holdfast.cluster.errors import Circumstance, Conflict, Unavailable
from holdfast.cluster.partition.state import LmdbTxn
from holdfast.cluster.peers.rpc import Refused
from holdfast.cluster.sql.catalog import TABLES
from holdfast.cluster.sql.relations import Slice, Table, Value, View, Wanted, read_slice
from holdfast.log.errors import NotHosted, ProposalError
from holdfast.sdk.ids import PartitionNumber, numbers_of

METHOD: Final = "rows"  # of the peer link
LEVEL_MIN: Final = 2  # of the cluster: every node serves METHOD.
SLICE_FIRST: Final = 64  # Rows examined by the first slice; each next one examines twice as many,
SLICE_MAX: Final = 1024  # up to this many,
SLICE_S: Final = 0.01  # unless that takes longer.
#: How long a query rests after each slice, as a share of the slice's time: the event loop needs the interpreter too.
REST: Final = 0.25
SERVING_THREADS: Final = 2
_LOOK_S: Final = 0.1


class Lends(Protocol):
    def lend(self, stop: Callable[[], None]) -> AbstractContextManager[lmdb.Environment]: ...


class Partition(Protocol):
    """The part of `cluster.partition.door.Partition` that is used here."""

    @property
    def state(self) -> Lends: ...


class Ended(Exception):
    """The query must end: it was cancelled, or its time is over."""


class Source:
    """The partitions of the cluster. One per node."""

    def __init__(
        self,
        count: int,
        hosted: Mapping[PartitionNumber, Partition],
        *,
        fresh: Callable[[PartitionNumber], Awaitable[None]],
        elsewhere: Callable[[PartitionNumber, str, Any], Awaitable[Any]],
        overview: Callable[[str], Awaitable[list[list[Value]]]],
        level: Callable[[], int],
    ) -> None:
        """`fresh` and `elsewhere` are those of the router, `overview` gives the rows of a table without partitions."""
        self.count = count
        self._hosted = hosted
        self._fresh = fresh
        self._elsewhere = elsewhere
        self.overview = overview
        self._level = level
        self._stopped = False
        self._serving = ThreadPoolExecutor(SERVING_THREADS, thread_name_prefix="rows")

    def stop(self) -> None:
        self._stopped = True
        self._serving.shutdown(wait=False, cancel_futures=True)

    def is_here(self, number: PartitionNumber) -> bool:
        return number in self._hosted

    def read(self, number: PartitionNumber, wanted: Wanted, limit: int) -> Slice:
        """In a thread. Raises NotHosted."""
        partition = self._hosted.get(number)
        if partition is None:
            raise NotHosted(f"partition {number} moved away")
        recalled = Event()
        end = perf_counter() + SLICE_S

        def is_over() -> bool:
            return recalled.is_set() or perf_counter() > end

        try:
            with partition.state.lend(recalled.set) as env, env.begin() as raw:
                view = View(LmdbTxn(raw), number, wanted.with_ids, {})
                return read_slice(TABLES[wanted.table], wanted, view, limit, is_over=is_over)
        except lmdb.Error:
            if self._hosted.get(number) is partition:
                raise
            raise NotHosted(f"partition {number} moved away") from None

    async def ask(self, number: PartitionNumber, wanted: Wanted, limit: int) -> Slice:
        """A slice of a partition that is not on this node. Raises a ProposalError or a circumstance."""
        if self._level() < LEVEL_MIN:
            raise Conflict(
                f"partition {number} is on another node, and nodes of the previous release cannot be queried",
                "finish the upgrade of all nodes, or send the query to a node that has all partitions",
            )
        try:
            answer = await self._elsewhere(number, METHOD, (number, tuple(wanted), limit))
        except ProposalError as error:
            raise Unavailable(
                f"partition {number} cannot be read on another node: {error}",
                "send the query again after the time in Retry-After; `holdfast cluster status` shows nodes and leaders",
            ) from None
        return Slice(*answer)

    async def make_fresh(self, numbers: list[PartitionNumber]) -> None:
        """Wait until the replicas here have everything acknowledged before."""
        await asyncio.gather(*(self._fresh(number) for number in numbers if self.is_here(number)))

    async def serve(self, peer: str, argument: Any) -> Any:
        """Read a slice for another node."""
        try:
            number, row, limit = argument
            wanted = Wanted(*row)
            table = TABLES[wanted.table]
            if table.scan is None or type(limit) is not int:
                raise ValueError("it is not about rows of a partition")
            for column in (*wanted.columns, *(column for column, _, _ in wanted.conditions)):
                table.column(column)
        except (KeyError, TypeError, ValueError) as error:
            why = f"there is no {error} here" if isinstance(error, KeyError) else str(error)
            raise Refused("Malformed", f"this node cannot answer a query of {peer}: {why}") from None
        if number not in self._hosted or self._stopped:
            raise Refused("NotHosted", f"partition {number} is not here")
        loop = asyncio.get_running_loop()
        try:
            if wanted.fresh:
                await self._fresh(number)
            return await loop.run_in_executor(self._serving, partial(self.read, number, wanted, min(limit, SLICE_MAX)))
        except ProposalError as error:
            raise Refused(type(error).__name__, str(error)) from None
        except Circumstance as error:
            raise Refused("Unavailable", error.message) from None


class Reading:
    """The rows that one query reads, in its own thread."""

    def __init__(
        self, source: Source, loop: asyncio.AbstractEventLoop, *, deadline_s: float, with_ids: bool, fresh: bool
    ) -> None:
        self._source = source
        self._loop = loop
        self._began = perf_counter()
        self._deadline = self._began + deadline_s
        self._with_ids = with_ids
        self._fresh = fresh
        self.examined = 0
        self.cancelled = ""  # Why; empty: it was not.
        self._rest = Event()
        self._overviews: dict[str, list[list[Value]]] = {}
        self._active: int | None = None
        self._made_fresh: set[PartitionNumber] = set()

    @property
    def took_ms(self) -> int:
        return round((perf_counter() - self._began) * 1000)

    @property
    def is_late(self) -> bool:
        return perf_counter() > self._deadline

    def cancel(self, why: str) -> None:
        """From any thread. The query ends soon."""
        self.cancelled = self.cancelled or why
        self._rest.set()

    def must_end(self) -> bool:
        return bool(self.cancelled) or self.is_late

    def rows(self, table: Table, wanted: Wanted) -> Iterator[list[Value]]:
        """The rows of a table that may match. Raises Ended."""
        wanted = wanted._replace(with_ids=self._with_ids)
        if table.scan is None:
            yield from self._whole(table, wanted)
            return
        numbers = table.route(wanted, self._source.count)
        chosen = sorted(numbers) if numbers is not None else list(numbers_of(self._source.count))
        if not wanted.newest_first:
            for number in chosen:
                for part in self._slices(number, wanted):
                    yield from part.rows
            return
        streams = [self._positioned(number, wanted) for number in chosen]
        for _, row in merge(*streams, key=itemgetter(0)):
            yield row

    def _positioned(self, number: PartitionNumber, wanted: Wanted) -> Iterator[tuple[bytes, list[Value]]]:
        for part in self._slices(number, wanted):
            yield from zip(part.positions, part.rows, strict=True)

    def _whole(self, table: Table, wanted: Wanted) -> Iterator[list[Value]]:
        if table.name not in self._overviews:
            self._overviews[table.name] = self._await(self._source.overview(table.name))
        offsets = [table.columns.index(table.column(name)) for name in wanted.columns]
        for row in self._overviews[table.name]:
            self.examined += 1
            yield [row[offset] for offset in offsets]

    def _slices(self, number: PartitionNumber, wanted: Wanted) -> Iterator[Slice]:
        limit = SLICE_FIRST
        if self._fresh and number not in self._made_fresh:  # Once per query, however often it comes back.
            self._made_fresh.add(number)
            wanted = wanted._replace(fresh=True)
        asked: Future[Slice] | None = None
        while True:
            if self.must_end():
                raise Ended
            if asked is None and self._source.is_here(number):
                began = perf_counter()
                try:
                    part = self._source.read(number, wanted, limit)
                except NotHosted:
                    continue  # Now it is elsewhere.
                self._rest.wait(REST * (perf_counter() - began))
            else:
                part = self._result(asked or self._begin(self._source.ask(number, wanted, limit)))
            asked = None
            self.examined += part.examined
            limit = min(2 * limit, SLICE_MAX)
            if part.next is not None:
                wanted = wanted._replace(position=part.next, fresh=False)
                if not self._source.is_here(number):  # The next slice is on its way while this one is used.
                    asked = self._begin(self._source.ask(number, wanted, limit))
            try:
                yield part
            except GeneratorExit:
                if asked is not None:
                    asked.cancel()
                raise
            if part.next is None:
                return

    def active(self) -> int:
        """About how many invocations are not completed, in the partitions on this node."""
        if self._active is None:
            self._active = 0
            for number in numbers_of(self._source.count):
                if self._source.is_here(number):
                    wanted = Wanted("statistics", ("status", "count"), ())
                    with suppress(NotHosted):
                        part = self._source.read(number, wanted, SLICE_MAX)
                        self._active += sum(int(count or 0) for status, count in part.rows if status != "completed")
        return self._active

    # -- the event loop ----------------------------------------------------------------------------------------------

    def _begin(self, work: Coroutine[Any, Any, Slice]) -> Future[Slice]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _await(self, work: Awaitable[Any]) -> Any:
        async def inside() -> Any:
            return await work

        return self._result(asyncio.run_coroutine_threadsafe(inside(), self._loop))

    def _result(self, future: Future[Any]) -> Any:
        while True:
            try:
                return future.result(_LOOK_S)
            except TimeoutError:
                if future.done():
                    raise
                if self.must_end():
                    future.cancel()
                    raise Ended from None
