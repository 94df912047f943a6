"""Large values in the store that all nodes share: put there, fetched from there, and whether it may be used for them.

    blobs/<cluster>/<partition>/<when made>-<sha256>-<random>     a value; only a row of that partition's state refers to it
    blobs/<cluster>/nodes/<node>/<random>                         written once in the life of a node: others look for it

Nobody waits long for the store. What cannot be put there in time goes through the log instead, and while the store fails,
nothing is tried (`usable`). What cannot be fetched is asked for again later. A request that hangs is left to itself, and
holds its slot until it ends: so there are never many.

A value is put there only while every node of the cluster has said that it finds there what this node writes; of one that is
down, it is enough that it once wrote there itself. So a directory that is not the same on all nodes is not used, nor does a
release that knows nothing of this meet such a value.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from random import Random
from typing import Any, Final, TypeVar

from holdfast.cluster.clock import Clock
from holdfast.cluster.errors import Circumstance, Unavailable
from holdfast.cluster.peers.rpc import Refused, Unanswered
from holdfast.cluster.snapshotting.complaints import Complaints
from holdfast.cluster.snapshotting.service import Snapshots
from holdfast.snapshots.errors import Corrupted, NotFound, SnapshotError, StoreFailed
from holdfast.snapshots.stores import Store
from holdfast.snapshots.work import Work, beside
from holdfast.statemachine import refs
from holdfast.statemachine.blobs import created_ms_of, object_name

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: So long a value waits for the store before it goes through the log, and a second more for each so many bytes. Less in all
#: than a stream bears that is not read, because too much of what it brought waits (`endpoint.Timing.heartbeat_s`).
PUT_S: Final = 5.0
PUT_BYTES_PER_S: Final = 8 * 1024 * 1024
#: And so long a reader waits for a value, before it is told to come again.
GET_S: Final = 10.0
GET_BYTES_PER_S: Final = 4 * 1024 * 1024
#: Deleting and listing are nobody's hurry.
CHORE_S: Final = 120.0
PUTS_AT_A_TIME: Final = 4
GETS_AT_A_TIME: Final = 4
CHORES_AT_A_TIME: Final = 2
#: Of values that were put or fetched a moment ago, and are likely to be wanted again.
CACHE_BYTES_MAX: Final = 64 * 1024 * 1024
#: What is not found, or not as it must be, is looked at once more after this.
SECOND_LOOK_S: Final = 0.5
#: A store may show to one node later what another wrote. What is not found so long after its making is lost.
SETTLED_MS: Final = 5 * 60_000
#: Of an attempt whose value cannot be fetched, until the next one.
DELAY_MS: Final = 500
DELAY_MS_MAX: Final = 30_000
CONFIRM_S: Final = 1.0  # How often the other nodes are asked that have not confirmed,
CONFIRM_S_MAX: Final = 30.0  # if they refuse, more and more rarely.
#: A partition whose time differs too much from ours takes no object of us. It is tried again after this.
CLOCKS_S: Final = 60.0


class StoreDown(Unavailable):
    """A large value is in a store that cannot be used now. It is still there."""


class ValueLost(Circumstance):
    """The store answers, and does not have what it was given. Only an operator can bring it back."""


class Objects:
    """One per node."""

    def __init__(
        self,
        home: Snapshots,
        clock: Clock,
        *,
        members: Callable[[], Collection[str]],
        connected: Callable[[], Collection[str]],
    ) -> None:
        self.home = home
        self.reading = Complaints("fetching large values from the store")
        self.chores = Complaints("deleting large values from the store")
        self.puts = self.put_bytes = 0
        self.fallbacks = 0  # Values that went through the log although there is a store.
        self.gets = self.get_bytes = self.cache_hits = 0
        self.deleted = self.swept = 0
        self.lost = 0
        self._clock = clock
        self._members = members
        self._connected = connected
        self._puts = asyncio.Semaphore(PUTS_AT_A_TIME)
        self._gets = asyncio.Semaphore(GETS_AT_A_TIME)
        self._chores = asyncio.Semaphore(CHORES_AT_A_TIME)
        self._getting: dict[str, asyncio.Task[bytes]] = {}
        self._cache: OrderedDict[bytes, bytes] = OrderedDict()
        self._cache_bytes = 0
        self._mark: str | None = None  # What this node wrote, for the others to find.
        self._confirmed: set[str] = set()
        self._was_here: set[str] = set()  # Whose marks are there, of those that could not be asked.
        self._why_not: dict[str, str] = {}  # What those said who have not confirmed.
        self._apart: dict[int, float] = {}  # Partitions whose clocks differ from ours, until when they are left alone.
        home.rpc.serve("blob-mark", self._serve_mark)

    # -- whether it may be used --------------------------------------------------------------------------------------

    @property
    def wanted(self) -> bool:
        """Whether large values are to go to the store."""
        return self.home.shared and self.home.config.blobs != "log"

    def why_not(self) -> str | None:
        """Why they go through the log; None: they go to the store."""
        if not self.home.shared:
            return "there is no store that all nodes share (snapshots)"
        if not self.wanted:
            return 'blobs = "log"'
        if self.home.store_complaints.error is not None:
            return self.home.store_complaints.error
        if self._mark is None:
            return "the store was not looked at yet"
        for name in sorted(self._waiting()):
            return (
                f"{name} has not found there what this node writes: {self._why_not.get(name, 'it was not asked yet')}"
            )
        return None

    def _waiting(self) -> set[str]:
        """Members that have not confirmed. One that is down cannot, but may have used the store before."""
        return {*self._members()} - self._confirmed - (self._was_here - {*self._connected()})

    def usable(self, number: int) -> bool:
        """For a value of this partition."""
        if self.why_not() is not None:
            return False
        return asyncio.get_running_loop().time() >= self._apart.get(number, 0.0)

    def apart(self, number: int) -> None:
        """The partition found that we live in another time than it."""
        self._apart[number] = asyncio.get_running_loop().time() + CLOCKS_S
        self.fallbacks += 1
        logger.warning(
            "partition %d: its time and this node's differ by minutes, so large values go through its log: set the clocks",
            number,
        )

    async def watch(self) -> None:
        """Have the others look for what we write, until all have found it; and whoever joins later."""
        if not self.wanted:
            return
        failures = 0
        while True:
            try:
                await self._confirm()
                failures = failures + 1 if self._waiting() & self._why_not.keys() else 0
            except (SnapshotError, TimeoutError) as error:
                self.home.store_complaints.failed(error)
                failures += 1
            await asyncio.sleep(min(CONFIRM_S * 2 ** min(failures, 8), CONFIRM_S_MAX))

    async def _confirm(self) -> None:
        if self.home.store_complaints.failures:
            return  # Somebody else sees to that.
        if self._mark is None:
            mark = os.urandom(8).hex()
            mine = f"{self._root}nodes/{self.home.config.node}/"

            def write(store: Store) -> None:
                store.put_bytes(mark.encode(), mine + mark)
                for found in store.list(mine):
                    if found.name != mine + mark:
                        store.delete(found.name)  # Of an earlier life.

            await self._do(self._chores, write, PUT_S)
            self._mark = mark
        waiting = self._waiting()
        if waiting - {*self._connected()}:
            nodes = f"{self._root}nodes/"
            found = await self._do(self._chores, lambda store: store.list(nodes), GET_S)
            self._was_here = {each.name.removeprefix(nodes).partition("/")[0] for each in found}
        for name in sorted(waiting & {*self._connected()}):
            try:
                async with asyncio.timeout(2 * GET_S):
                    why = await self.home.rpc.ask(name, "blob-mark", self._mark)
            except (Unanswered, Refused, TimeoutError) as error:
                why = str(error) or "it does not answer"
            if why is None:
                self._confirmed.add(name)
                self._why_not.pop(name, None)
            else:
                self._why_not[name] = why

    async def _serve_mark(self, peer: str, mark: Any) -> str | None:
        """None: we find what `peer` wrote; else why not."""
        if not self.home.shared or not isinstance(mark, str) or not mark.isalnum():
            return "it has no store (snapshots)"
        name = f"{self._root}nodes/{peer}/{mark}"
        try:
            found = await self._do(self._chores, lambda store: store.read(name), GET_S)
        except NotFound:
            return f"{self.home.config.snapshots} is another store there: all nodes must see the same"
        except (SnapshotError, TimeoutError) as error:
            return str(error)
        return None if found == mark.encode() else "it finds something else there"

    # -- values ------------------------------------------------------------------------------------------------------

    async def put(self, number: int, blob: bytes, data: bytes) -> str | None:
        """The name of its new object; None: it has to go through the log."""
        name = object_name(blob, self._clock.now_ms(), os.urandom(8))
        path = self._path(number, name)
        try:
            await self._do(self._puts, lambda store: store.put_bytes(data, path), PUT_S + len(data) / PUT_BYTES_PER_S)
        except (SnapshotError, TimeoutError) as error:
            self.fallbacks += 1
            if not isinstance(error, _Busy):
                self.home.store_complaints.failed(error)
            return None
        self.puts += 1
        self.put_bytes += len(data)
        self._remember(blob, data)
        return name

    async def get(self, number: int, blob: bytes, name: str) -> bytes:
        """The very bytes that were put. Raises StoreDown or ValueLost; a loss is counted by who is sure of it."""
        found = self._cache.get(blob)
        if found is not None:
            self._cache.move_to_end(blob)
            self.cache_hits += 1
            return found
        getting = self._getting.get(name)
        if getting is None:
            getting = self._getting[name] = asyncio.ensure_future(self._get(number, blob, name))
            getting.add_done_callback(lambda task: self._got(name, task))
        return await asyncio.shield(getting)

    def _got(self, name: str, task: asyncio.Task[bytes]) -> None:
        del self._getting[name]
        if not task.cancelled():
            task.exception()  # Whoever waited has heard of it; perhaps nobody does any more.

    async def _get(self, number: int, blob: bytes, name: str) -> bytes:
        where = self.home.config.snapshots
        hint = (
            f"the value is in the store {where}, and nothing is lost: ask for it again when that works "
            "(an outcome: at /holdfast/invocation/{id}/attach)"
        )
        seconds = GET_S + refs.stored_size(blob) / GET_BYTES_PER_S
        if not self.home.shared:
            raise StoreDown(
                "a large value is in a store, and none is set", "set snapshots to the store that it was put into"
            )
        try:
            data = await self._do(self._gets, lambda store: self.read(store, number, blob, name), seconds)
        except (NotFound, Corrupted) as error:
            if isinstance(error, NotFound) and self._clock.now_ms() - (created_ms_of(name) or 0) < SETTLED_MS:
                self.reading.failed(error)
                raise StoreDown(f"a large value is not seen in the store yet: {error}", hint) from None
            what = f"there is no {error.name}" if isinstance(error, NotFound) else f"{error.place}: {error.detail}"
            raise ValueLost(
                f"a large value is lost: {what}",
                f"bring the object back to {where} (an older version of it, a replica), and resume what waits for it",
            ) from None
        except (SnapshotError, TimeoutError) as error:
            if not isinstance(error, _Busy):
                self.reading.failed(error)
            raise StoreDown(f"a large value cannot be fetched: {error}", hint) from None
        self.reading.went_well()
        self.gets += 1
        self.get_bytes += len(data)
        self._remember(blob, data)
        return data

    def read(self, store: Store, number: int, blob: bytes, name: str) -> bytes:
        """In a thread. NotFound and Corrupted are said by a store that has other things of this cluster."""
        path = self._path(number, name)
        try:
            return _checked(store, path, blob)
        except (NotFound, Corrupted):
            Work().pause(SECOND_LOOK_S)
        try:
            return _checked(store, path, blob)
        except NotFound:
            if not store.list(f"{self._root}nodes/"):  # Each node that ever used it left a mark there.
                raise StoreFailed(
                    store.url, "it has nothing of this cluster; is it the right one, and mounted?"
                ) from None
            raise

    def report(self, error: ValueLost, what: str) -> None:
        self.lost += 1
        logger.error("%s: %s", what, error)

    def delay_ms(self, rng: Random) -> int:
        """Until somebody who could not fetch a value tries again."""
        delay: int = min(DELAY_MS << min(self.reading.failures, 10), DELAY_MS_MAX)
        return delay // 2 + int(rng.random() * delay / 2)

    async def delete(self, number: int, names: Iterable[str]) -> None:
        """Raises SnapshotError or TimeoutError; then some of them may be gone."""
        paths = [self._path(number, name) for name in names]

        def delete(store: Store) -> None:
            for path in paths:
                store.delete(path)

        await self._do(self._chores, delete, CHORE_S)

    async def listed(self, number: int) -> list[str]:
        """Names of all objects of a partition. May lack what is new, and hold what is gone."""
        prefix = self._path(number, "")
        found = await self._do(self._chores, lambda store: store.list(prefix), CHORE_S)
        names = [each.name.removeprefix(prefix) for each in found]
        return [name for name in names if created_ms_of(name) is not None]

    # -- how ---------------------------------------------------------------------------------------------------------

    @property
    def _root(self) -> str:
        return f"blobs/{self.home.identity()}/"

    def _path(self, number: int, name: str) -> str:
        return f"{self._root}{number:04d}/{name}"

    async def _do(self, slots: asyncio.Semaphore, function: Callable[[Store], T], seconds: float) -> T:
        """In a thread, soon. Raises what the store does, or TimeoutError; then it may happen nevertheless, and later."""
        began = False
        try:
            async with asyncio.timeout(seconds):
                await slots.acquire()
                began = True
                thread = beside(lambda: self._ask(function))
                thread.add_done_callback(lambda _: slots.release())
                return await asyncio.shield(thread)
        except TimeoutError:
            if not began:
                raise _Busy("too much is on its way to and from the store") from None
            raise TimeoutError(f"the store did not answer within {seconds:.0f} s") from None

    def _ask(self, function: Callable[[Store], T]) -> T:
        """In a thread."""
        try:
            return function(self.home.hasty_store())
        except SnapshotError:
            raise
        except Exception as error:
            raise StoreFailed(self.home.config.snapshots, f"{type(error).__name__}: {error}") from error

    def _remember(self, blob: bytes, data: bytes) -> None:
        if len(data) > CACHE_BYTES_MAX:
            return
        self._cache_bytes += len(data) - len(self._cache.pop(blob, b""))
        self._cache[blob] = data
        while self._cache_bytes > CACHE_BYTES_MAX:
            _, dropped = self._cache.popitem(last=False)
            self._cache_bytes -= len(dropped)

    def forget(self) -> None:
        """Nothing is kept in memory any more."""
        self._cache.clear()
        self._cache_bytes = 0

    async def stop(self) -> None:
        """Nobody is answered any more. A thread that waits for the store is left behind: it holds nothing of ours."""
        getting = list(self._getting.values())
        for task in getting:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*getting, return_exceptions=True)

    def show(self) -> dict[str, Any]:
        """Where large values of this node go, and what is wrong with that."""
        why_not = self.why_not()
        return {
            "in": "store" if why_not is None else "log",
            "store": self.home.config.snapshots or None,
            "why_not_in_store": why_not,
            "error": self.reading.error or self.chores.error,
            "lost": self.lost,
        }


class _Busy(TimeoutError):
    """The store was not even asked: too much is on its way already."""


def _checked(store: Store, path: str, blob: bytes) -> bytes:
    data = store.read(path)
    if len(data) != refs.stored_size(blob) or hashlib.sha256(data).digest() != blob[:32]:
        raise Corrupted(f"{store.url}: {path}", "its bytes are not those of its name")
    return data
