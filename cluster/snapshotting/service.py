"""Snapshots of the partitions on this node: where they are, the shared store, and what operators and peers ask for.

Every replica cuts its own snapshots, because after a power loss its state is not trusted, and the log alone no longer
reaches back to the beginning. The leader also publishes to the shared store, if there is one. Safety depends on the
order: a cut is made durable and read back, then the log may offer it, then the log is trimmed up to it. A store that is
down delays neither cutting nor trimming, because the peers have the snapshots that it lacks.

    <data>/snapshots/<disk>/<group>/<term>-<index>-<id>.snapshot      ours: cut here, or installed here
    <data>/snapshots/<disk>/<group>/incoming/                         fetched, and not yet accepted by the log

<disk> identifies the log's disk: a snapshot is meaningless to a log that has lost the entries it was cut from. A
fetched snapshot becomes ours only when the log accepts it, because it may belong to an epoch that this log does not
know (`catchup`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, Final, TypedDict

import msgpack

from holdfast.cluster.config import Config
from holdfast.cluster.environment import Environment
from holdfast.cluster.groups import group_of, partition_in
from holdfast.cluster.partition.door import Partition
from holdfast.cluster.peers.rpc import Refused, Rpc
from holdfast.cluster.snapshotting.complaints import STORE_RETRY_S, STORE_RETRY_S_MAX, Complaints
from holdfast.cluster.snapshotting.keeper import TICK_S, Keeper
from holdfast.cluster.tasks import Tasks
from holdfast.log.messages import GroupId
from holdfast.sdk.ids import PartitionNumber
from holdfast.snapshots.catalog import Catalog
from holdfast.snapshots.errors import NewerVersion, SnapshotError
from holdfast.snapshots.files import sync_path
from holdfast.snapshots.format import Expected, listed
from holdfast.snapshots.policy import Policy
from holdfast.snapshots.restore import restore_blocking
from holdfast.snapshots.stores import Store
from holdfast.snapshots.transfer import PeerSource
from holdfast.snapshots.work import ABANDON_S, Throttle, Work, beside, in_thread
from holdfast.statemachine.tables import SCHEMA

logger = logging.getLogger(__name__)
CUTS_AT_A_TIME: Final = 1  # Each cut reads a whole state and writes it to the disk that the log syncs.
UPLOADS_AT_A_TIME: Final = 2
FETCHES_AT_A_TIME: Final = 2
#: A snapshot that a peer requested this recently is not removed.
SERVED_PIN_S: Final = 120.0


class StoredSnapshot(TypedDict):
    """A snapshot in the shared store."""

    partition: int
    name: str
    index: Annotated[int, "of its last entry"]
    term: Annotated[int, "of that entry"]
    bytes: int


class Snapshot(StoredSnapshot):
    """A snapshot that was just taken."""

    node: Annotated[str, "that took it"]


class Snapshots:
    """One per node. `restorer` is used before the node runs; `attach` gives a partition its keeper."""

    def __init__(
        self,
        config: Config,
        rpc: Rpc,
        environment: Environment,
        *,
        disk: Callable[[], str],
        identity: Callable[[], str],
        connected: Callable[[], set[str]],
        restored: Path | None = None,
    ) -> None:
        self.config = config
        self.environment = environment
        self.clock = environment.clock
        self._restored = restored
        self.keepers: dict[GroupId, Keeper] = {}  # by group
        self.rpc = rpc
        self.identity = identity
        self.connected = connected
        self.cuts = asyncio.Semaphore(CUTS_AT_A_TIME)
        self.uploads = asyncio.Semaphore(UPLOADS_AT_A_TIME)
        self.fetches = asyncio.Semaphore(FETCHES_AT_A_TIME)
        self.throttle = Throttle(config.snapshot_rate_bytes, self.clock.monotonic_s)
        self.bytes_served = 0
        self.store_policy = Policy(retry_s=STORE_RETRY_S, retry_max_s=STORE_RETRY_S_MAX)
        self.store_complaints = Complaints(f"the store of snapshots {config.snapshots}", self.clock)
        self.stopping = False
        self._disk = disk
        self._source = PeerSource(self._served_directory)
        self._served: dict[tuple[int, str], float] = {}
        self._store: Store | None = None
        self._hasty_store: Store | None = None
        self._store_lock = Lock()
        self._tasks = Tasks()
        rpc.serve("snapshot", self._serve)
        rpc.serve("snapshot-create", self._serve_create)

    # -- places ------------------------------------------------------------------------------------------------------

    def directory(self, group: GroupId) -> Path:
        return self.config.data / "snapshots" / self._disk() / f"{group:010d}"

    def incoming(self, group: GroupId) -> Path:
        return self.directory(group) / "incoming"

    def restored(self, group: GroupId) -> Path | None:
        """The restored state that the group started from, if it has no snapshot of its own yet."""
        return self._restored / f"{group:010d}" if self._restored is not None else None

    def expected(self, group: GroupId) -> Expected:
        return Expected(cluster=self.identity(), group=group, schema_max=SCHEMA)

    def store(self) -> Store:
        """The shared store. Blocks while boto3 is loaded: call it in a thread."""
        with self._store_lock:
            if self._store is None:
                self._store = self.environment.open_store(self.config.snapshots)
            return self._store

    def hasty_store(self) -> Store:
        """The same store with short timeouts, for requests that a caller waits for. Blocks too."""
        with self._store_lock:
            if self._hasty_store is None:
                self._hasty_store = self.environment.open_store(self.config.snapshots, hasty=True)
            return self._hasty_store

    @property
    def shared(self) -> bool:
        return bool(self.config.snapshots)

    def restorer(self, group: GroupId) -> Callable[[Path], None]:
        """Restores the newest valid snapshot of this disk into an empty directory. For `State.open`, before the node
        runs.
        """

        def restore(path: Path) -> None:
            # A process killed before its fsync leaves names that a power loss may still remove. The log may begin after
            # the snapshot as soon as this returns, so the name must be durable by then.
            sync_path(self.config.data, self.directory(group))
            restored, expected = self.restored(group), Expected(group=group, schema_max=SCHEMA)
            for file in (*listed(self.directory(group)), *(listed(restored) if restored is not None else ())):
                try:
                    header = restore_blocking(file, path, expected=expected, token=self.environment.entropy.token(8))
                except NewerVersion:
                    raise  # An older snapshot would lose what was acknowledged since.
                except SnapshotError as error:
                    logger.error("skipping a snapshot: %s", error)
                else:
                    logger.info("%s starts from the snapshot at entry %d", path, header.meta.index)
                    return

        return restore

    # -- life --------------------------------------------------------------------------------------------------------

    def attach(self, partition: Partition) -> Keeper:
        assert partition.group.id not in self.keepers
        keeper = self.keepers[partition.group.id] = Keeper(self, partition)
        keeper.start()
        return keeper

    async def detach(self, group: GroupId) -> None:
        """The partition leaves this node. Its snapshots stay until they are deleted with the rest of it."""
        keeper = self.keepers.pop(group, None)
        if keeper is not None:
            await keeper.stop()

    async def watch_store(self) -> None:
        """Log early what is wrong with the shared store, and when it recovers. A failing store does not stop the node.

        A node that leads nothing publishes nothing, so it would not notice otherwise that the store works again.
        """
        if not self.shared:
            return
        await self._check_store()
        while True:
            await asyncio.sleep(TICK_S)
            if self.store_complaints.failures and not self.store_complaints.holds_back(self.store_policy):
                await self._check_store()

    async def _check_store(self) -> None:
        try:
            # Abandoned at the end of the node: a silent store would hold it up for minutes.
            await asyncio.shield(beside(lambda: self.store().check()))
        except Exception as error:
            self.store_complaints.failed(error)
        else:
            self.store_complaints.went_well()

    def run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that ends with this node's snapshots."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.keep(task)
        return task

    async def stop(self) -> None:
        """On return, no thread of ours reads a state or writes a file."""
        self.stopping = True
        keepers, tasks = list(self.keepers.values()), list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *(keeper.stop() for keeper in keepers), return_exceptions=True)
        self.keepers.clear()

    # -- for operators -------------------------------------------------------------------------------------------------

    async def create(
        self, number: PartitionNumber, *, partitions: int, leader: Callable[[PartitionNumber], str | None]
    ) -> Snapshot:
        """Cut a snapshot of a partition now. Its leader cuts it, because the leader publishes it."""
        if not 0 <= number < partitions:
            raise Refused("NotFound", f"there is no partition {number}")
        return await self._create(group_of(number), leader(number))

    async def _create(self, group: GroupId, leader: str | None) -> Snapshot:
        if leader is not None and leader != self.config.node:
            answer: Snapshot = await self.rpc.ask(leader, "snapshot-create", group)
            return answer
        return await self._create_here(group)

    async def _create_here(self, group: GroupId) -> Snapshot:
        keeper = self.keepers.get(group)
        if keeper is None:
            raise Refused("NotHosted", f"the partition is not on {self.config.node}")
        try:
            file = await keeper.create()
        except (SnapshotError, OSError) as error:
            raise Refused("SnapshotError", str(error)) from None
        meta = file.header.meta
        return {
            "partition": keeper.partition.number,
            "node": self.config.node,
            "name": file.name,
            "index": meta.index,
            "term": meta.term,
            "bytes": file.header.file_bytes,
        }

    async def _serve_create(self, peer: str, group: Any) -> Snapshot:
        return await self._create_here(GroupId(group if isinstance(group, int) else -1))

    async def stored(self) -> list[StoredSnapshot]:
        """The snapshots of this cluster that the shared store lists. Their content has not been read."""

        def look(_: Work) -> list[StoredSnapshot]:
            store = self.store()
            return [
                {"partition": partition_in(group), "name": found.name, "index": found.index, "term": found.term,
                 "bytes": found.size}
                for group in sorted(self.keepers)
                for found in Catalog(store, cluster=self.identity(), group=group).list()
            ]  # fmt: skip

        return await in_thread(look, abandon_after_s=ABANDON_S)

    # -- for peers -----------------------------------------------------------------------------------------------------

    def _served_directory(self, group: GroupId) -> Path | None:
        return self.directory(group) if group in self.keepers else None

    async def _serve(self, peer: str, question: Any) -> bytes:
        answer = await self._source.answer(question if isinstance(question, bytes) else b"")
        asked = msgpack.unpackb(question) if len(answer) > 256 else None
        if asked is not None:  # The request was valid, and was answered with data.
            self._served[asked[2], asked[3]] = self.clock.monotonic_s()
            self.bytes_served += len(answer)
        return answer

    def pinned(self, group: GroupId) -> set[str]:
        """Snapshots that peers are fetching."""
        since = self.clock.monotonic_s() - SERVED_PIN_S
        self._served = {what: at for what, at in self._served.items() if at >= since}
        return {name for (its_group, name) in self._served if its_group == group}
