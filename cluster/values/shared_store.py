"""Large values in the shared store: writing them, fetching them, and deciding whether the store may be used.

    blobs/<cluster>/<partition>/<when made>-<sha256>-<random>     a value; only that partition's state refers to it
    blobs/<cluster>/nodes/<node>/<random>                         a node's mark, one per start, for its peers to find

No caller waits long for the store. A value that cannot be written in time goes through the log instead, and a failing
store is not tried at all (`usable`). A value that cannot be fetched is requested again later. A request that hangs is
abandoned but keeps its slot until it ends, which bounds how many there are.

A value is written there only while every node has confirmed that it finds this node's mark. A node that is down need
only have left its own mark. So a directory that is not shared by all nodes is not used, and a release that does not
support this never encounters such a value.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from random import Random
from typing import Annotated, Any, Final, Literal, TypedDict, TypeVar

from holdfast.cluster.backoff import backoff, with_jitter
from holdfast.cluster.clock import Clock
from holdfast.cluster.errors import Circumstance, Unavailable
from holdfast.cluster.peers.rpc import Refused, Unanswered
from holdfast.cluster.snapshotting.complaints import Complaints
from holdfast.cluster.snapshotting.service import Snapshots
from holdfast.sdk.ids import PartitionNumber
from holdfast.snapshots.errors import Corrupted, NotFound, SnapshotError, StoreFailed
from holdfast.snapshots.stores import Store
from holdfast.snapshots.work import Work, beside
from holdfast.statemachine import refs
from holdfast.statemachine.blobs import created_ms_of, object_name

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: A value waits this long for the store before it goes through the log, plus a second per PUT_BYTES_PER_S bytes. The
#: total is shorter than the time that a stream may stay unread because too much of its input is waiting
#: (`native.settings.patience_s`).
PUT_S: Final = 5.0
PUT_BYTES_PER_S: Final = 8 * 1024 * 1024
#: A reader waits this long for a value before it is told to retry.
GET_S: Final = 10.0
GET_BYTES_PER_S: Final = 4 * 1024 * 1024
#: Deleting and listing are not urgent.
CHORE_S: Final = 120.0
PUTS_AT_A_TIME: Final = 4
GETS_AT_A_TIME: Final = 4
CHORES_AT_A_TIME: Final = 2
#: Cache of recently written or fetched values, which are likely to be needed again.
CACHE_BYTES_MAX: Final = 64 * 1024 * 1024
#: A missing or damaged object is checked once more after this delay.
SECOND_LOOK_S: Final = 0.5
#: A store may show an object to other nodes with a delay. An object that is missing this long after its creation is
#: lost.
SETTLED_MS: Final = 5 * 60_000
#: Delay before the next attempt if a value cannot be fetched.
DELAY_MS: Final = 500
DELAY_MS_MAX: Final = 30_000
CONFIRM_S: Final = 1.0  # How often nodes that have not confirmed are asked. The interval grows
CONFIRM_S_MAX: Final = 30.0  # up to this while they refuse.
#: A partition whose time differs too much from ours refuses our objects. We try again after this delay.
CLOCKS_S: Final = 60.0


class StoreDown(Unavailable):
    """A large value is in a store that is unavailable at the moment. The value is not lost."""


class ValueLost(Circumstance):
    """The store is available, but the value is missing or damaged. Only an operator can restore it."""


#: Where this node stores large values. The field `in` is a keyword of Python.
LargeValues = TypedDict(
    "LargeValues",
    {
        "in": Literal["store", "log"],
        "store": Annotated[str | None, "the address of the shared store"],
        "why_not_in_store": Annotated[str | None, "why they go through the log"],
        "error": Annotated[str | None, "of the store"],
        "lost": Annotated[int, "values that the store should have and has not"],
    },
)


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
        self.reading = Complaints("fetching large values from the store", clock)
        self.chores = Complaints("deleting large values from the store", clock)
        self.puts = self.put_bytes = 0
        self.fallbacks = 0  # Values that went through the log although a store is configured.
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
        self._mark: str | None = None  # What this node wrote for its peers to find.
        self._confirmed: set[str] = set()
        self._was_here: set[str] = set()  # Nodes that could not be asked, but have a mark in the store.
        self._why_not: dict[str, str] = {}  # Answers of the nodes that have not confirmed.
        # Partitions whose clocks differ from ours: when to try them again.
        self._apart: dict[PartitionNumber, float] = {}
        home.rpc.serve("blob-mark", self._serve_mark)

    # -- may it be used? ---------------------------------------------------------------------------------------------

    @property
    def wanted(self) -> bool:
        """Whether large values should go to the store."""
        return self.home.shared and self.home.config.blobs != "log"

    def why_not(self) -> str | None:
        """Why large values go through the log; None if they go to the store."""
        if not self.home.shared:
            return "no shared store is configured (snapshots)"
        if not self.wanted:
            return 'blobs = "log"'
        if self.home.store_complaints.error is not None:
            return self.home.store_complaints.error
        if self._mark is None:
            return "the store has not been checked yet"
        for name in sorted(self._waiting()):
            return (
                f"{name} has not confirmed that it shares the store: {self._why_not.get(name, 'it was not asked yet')}"
            )
        return None

    def _waiting(self) -> set[str]:
        """Members that have not confirmed. A member that is down is excused if it has used the store before."""
        return {*self._members()} - self._confirmed - (self._was_here - {*self._connected()})

    def usable(self, number: PartitionNumber) -> bool:
        """Whether the store may be used for a value of this partition."""
        if self.why_not() is not None:
            return False
        return asyncio.get_running_loop().time() >= self._apart.get(number, 0.0)

    def apart(self, number: PartitionNumber) -> None:
        """The partition's clock differs from ours."""
        self._apart[number] = asyncio.get_running_loop().time() + CLOCKS_S
        self.fallbacks += 1
        logger.warning(
            "partition %d: its clock and this node's differ by minutes, so large values go through the log: set the clocks",
            number,
        )

    async def watch(self) -> None:
        """Ask every member, including those that join later, whether it finds our mark, until all have confirmed."""
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
            await asyncio.sleep(backoff(CONFIRM_S, failures, CONFIRM_S_MAX))

    async def _confirm(self) -> None:
        if self.home.store_complaints.failures:
            return  # `watch_store` handles that.
        if self._mark is None:
            mark = self.home.environment.entropy.bytes(8).hex()
            mine = f"{self._root}nodes/{self.home.config.node}/"

            def write(store: Store) -> None:
                store.put_bytes(mark.encode(), mine + mark)
                for found in store.list(mine):
                    if found.name != mine + mark:
                        store.delete(found.name)  # A mark of an earlier start.

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
        """None if we find the mark of `peer`, else the reason."""
        if not self.home.shared or not isinstance(mark, str) or not mark.isalnum():
            return "it has no shared store (snapshots)"
        name = f"{self._root}nodes/{peer}/{mark}"
        try:
            found = await self._do(self._chores, lambda store: store.read(name), GET_S)
        except NotFound:
            return f"{self.home.config.snapshots} is a different store there: all nodes must use the same one"
        except (SnapshotError, TimeoutError) as error:
            return str(error)
        return None if found == mark.encode() else "it finds different content there"

    # -- values ------------------------------------------------------------------------------------------------------

    async def put(self, number: PartitionNumber, blob: bytes, data: bytes) -> str | None:
        """Write a value and return its object's name; None if it has to go through the log."""
        name = object_name(blob, self._clock.now_ms(), self.home.environment.entropy.bytes(8))
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

    async def get(self, number: PartitionNumber, blob: bytes, name: str) -> bytes:
        """The bytes that were written. Raises StoreDown or ValueLost. The caller reports a loss once it is certain."""
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
            task.exception()  # The callers got it, if any still wait. Retrieved so that asyncio does not log it.

    async def _get(self, number: PartitionNumber, blob: bytes, name: str) -> bytes:
        where = self.home.config.snapshots
        hint = (
            f"the value is in the store {where} and is not lost: request it again when the store works "
            "(get an outcome at /holdfast/invocation/{id}/attach)"
        )
        seconds = GET_S + refs.stored_size(blob) / GET_BYTES_PER_S
        if not self.home.shared:
            raise StoreDown(
                "a large value is in a store, but no store is configured", "set snapshots to the store that holds it"
            )
        try:
            data = await self._do(self._gets, lambda store: self.read(store, number, blob, name), seconds)
        except (NotFound, Corrupted) as error:
            if isinstance(error, NotFound) and self._clock.now_ms() - (created_ms_of(name) or 0) < SETTLED_MS:
                self.reading.failed(error)
                raise StoreDown(f"a large value is not visible in the store yet: {error}", hint) from None
            what = f"{error.name} does not exist" if isinstance(error, NotFound) else f"{error.place}: {error.detail}"
            raise ValueLost(
                f"a large value is lost: {what}",
                f"restore the object in {where} (an older version, a replica), and resume the invocations that wait for it",
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

    def read(self, store: Store, number: PartitionNumber, blob: bytes, name: str) -> bytes:
        """Read a value, in a thread. Raises NotFound or Corrupted only if the store has other data of this cluster."""
        path = self._path(number, name)
        try:
            return _checked(store, path, blob)
        except (NotFound, Corrupted):
            Work().pause(SECOND_LOOK_S)
        try:
            return _checked(store, path, blob)
        except NotFound:
            if not store.list(f"{self._root}nodes/"):  # Each node that ever used the store left a mark.
                raise StoreFailed(
                    store.url, "it has no data of this cluster; check that it is the right store, and mounted"
                ) from None
            raise

    def report(self, error: ValueLost, what: str) -> None:
        self.lost += 1
        logger.error("%s: %s", what, error)

    def delay_ms(self, rng: Random) -> int:
        """Delay before an attempt that could not fetch a value is retried."""
        return int(with_jitter(backoff(DELAY_MS, self.reading.failures, DELAY_MS_MAX), rng))

    async def delete(self, number: PartitionNumber, names: Iterable[str]) -> None:
        """Delete objects. Raises SnapshotError or TimeoutError; some of them may be gone then."""
        paths = [self._path(number, name) for name in names]

        def delete(store: Store) -> None:
            for path in paths:
                store.delete(path)

        await self._do(self._chores, delete, CHORE_S)

    async def listed(self, number: PartitionNumber) -> list[str]:
        """Names of all objects of a partition. May lack new objects and contain deleted ones."""
        prefix = self._path(number, "")
        found = await self._do(self._chores, lambda store: store.list(prefix), CHORE_S)
        names = [each.name.removeprefix(prefix) for each in found]
        return [name for name in names if created_ms_of(name) is not None]

    # -- how ---------------------------------------------------------------------------------------------------------

    @property
    def _root(self) -> str:
        return f"blobs/{self.home.identity()}/"

    def _path(self, number: PartitionNumber, name: str) -> str:
        return f"{self._root}{number:04d}/{name}"

    async def _do(self, slots: asyncio.Semaphore, function: Callable[[Store], T], seconds: float) -> T:
        """Run `function` in a thread. Raises what the store raises, or TimeoutError. It may still take effect later."""
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
                raise _Busy("too many requests to the store are in flight") from None
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
        """Empty the cache."""
        self._cache.clear()
        self._cache_bytes = 0

    async def stop(self) -> None:
        """Cancel all requests. A thread that waits for the store is abandoned: it holds no resources of ours."""
        getting = list(self._getting.values())
        for task in getting:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*getting, return_exceptions=True)

    def show(self) -> LargeValues:
        """Where this node's large values go, and what is wrong with that store."""
        why_not = self.why_not()
        return {
            "in": "store" if why_not is None else "log",
            "store": self.home.config.snapshots or None,
            "why_not_in_store": why_not,
            "error": self.reading.error or self.chores.error,
            "lost": self.lost,
        }


class _Busy(TimeoutError):
    """The store was not asked, because too many requests are in flight."""


def _checked(store: Store, path: str, blob: bytes) -> bytes:
    data = store.read(path)
    if len(data) != refs.stored_size(blob) or hashlib.sha256(data).digest() != blob[:32]:
        raise Corrupted(f"{store.url}: {path}", "its content does not match its name")
    return data
