"""The snapshots of one partition on this node: when to cut, what to keep and publish, and how far to trim the log.

The order is what safety depends on: a cut is made durable and read back, then the log may offer it, then the log is trimmed up
to it. Publishing to the shared store is the leader's, and delays neither.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import lmdb

from holdfast.cluster.clock import Clock
from holdfast.cluster.config import Config
from holdfast.cluster.environment import Environment
from holdfast.cluster.partition.door import Partition
from holdfast.cluster.partition.state import read_applied, read_schema
from holdfast.cluster.snapshotting.complaints import Complaints
from holdfast.log.engine import Snapshot
from holdfast.log.messages import GroupId
from holdfast.snapshots.catalog import Catalog
from holdfast.snapshots.cut import cut_blocking, remove_drafts
from holdfast.snapshots.errors import Cancelled, SnapshotError
from holdfast.snapshots.files import remove_quietly, sync_path
from holdfast.snapshots.format import Expected, Meta, SnapshotFile, is_sound, listed, parse_name, verify
from holdfast.snapshots.policy import (
    Kept,
    Policy,
    Progress,
    names_to_delete,
    reason_to_cut,
    trim_point,
)
from holdfast.snapshots.stores import Store
from holdfast.snapshots.transfer import Offer
from holdfast.snapshots.work import ABANDON_S, Work, in_thread
from holdfast.statemachine.levels import FIRST, schema_of
from holdfast.statemachine.tables import SCHEMA

logger = logging.getLogger(__name__)
TICK_S: Final = 1.0


class Home(Protocol):
    """What all keepers of a node share: its directories, its store, and how many may cut or upload at a time."""

    config: Config
    environment: Environment
    clock: Clock
    cuts: asyncio.Semaphore
    uploads: asyncio.Semaphore
    store_complaints: Complaints
    identity: Callable[[], str]
    connected: Callable[[], set[str]]

    @property
    def shared(self) -> bool: ...

    def directory(self, group: GroupId) -> Path: ...

    def restored(self, group: GroupId) -> Path | None: ...

    def expected(self, group: GroupId) -> Expected: ...

    def store(self) -> Store: ...

    def pinned(self, group: GroupId) -> set[str]: ...

    def run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]: ...


def policy_of(config: Config, partitions: int) -> Policy:
    """Divide the node's bound on log size among its groups. A group cuts when it reaches half of its share."""
    share = max(config.log_bytes_max // (2 * max(partitions, 1)), 1 << 20)
    return Policy(
        entries_max=config.snapshot_entries,
        bytes_max=min(config.snapshot_bytes, share // 2),
        age_max_s=config.snapshot_age,
        interval_min_s=config.snapshot_interval,
        keep=config.snapshot_keep,
        tail_entries=config.log_tail,
        lag_entries_max=max(2 * config.snapshot_entries, config.log_tail),
        log_bytes_max=share,
    )


class Keeper:
    """The snapshots of one partition on this node."""

    def __init__(self, home: Home, partition: Partition) -> None:
        self.home = home
        self.partition = partition
        self.group = partition.group
        self.directory = home.directory(partition.group.id)
        self.policy = policy_of(home.config, partition.machine.partitions)
        self.newest: SnapshotFile | None = None
        self.published: str | None = None  # Name of the newest snapshot that we put into the shared store.
        self.doing: str | None = None
        self.done_bytes = self.total_bytes = 0
        self.cuts = self.cut_bytes = self.published_bytes = self.fetched_bytes = self.installs = 0
        self.cut_s = 0.0
        name = f"partition {partition.number}"
        self.cutting = Complaints(f"{name}: cutting a snapshot", home.clock)
        self.publishing = Complaints(f"{name}: publishing a snapshot to {home.config.snapshots}", home.clock)
        self.fetching = Complaints(f"{name}: fetching a snapshot", home.clock)
        self._began_at = home.clock.monotonic_s()
        self._cut_at = self._began_at
        self._bytes_at_cut = partition.machine.bytes_applied
        self._wishes: list[asyncio.Future[SnapshotFile]] = []
        self._wake = asyncio.Event()
        self._uploading: str | None = None
        self._restored: Path | None = None  # A restored state. It is of another cluster, so it is no snapshot of ours.
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.ensure_future(self._run())]
        if self.home.shared:
            self._tasks.append(asyncio.ensure_future(self._run_publishing()))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for wish in self._wishes:
            wish.cancel()

    def create(self) -> asyncio.Future[SnapshotFile]:
        """Cut a snapshot now, regardless of the policy."""
        wish: asyncio.Future[SnapshotFile] = asyncio.get_running_loop().create_future()
        if self.partition.machine.applied[0] == 0:
            wish.set_exception(SnapshotError(f"partition {self.partition.number} is empty here"))
            return wish
        self._wishes.append(wish)
        self._wake.set()
        return wish

    # -- cutting -----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        await self._find()
        while True:
            self._wake.clear()
            try:
                reason = "asked for" if self._wishes else self._reason()
                if reason is not None:
                    await self._cut(reason)
                self._trim(at_least=max(self.policy.tail_entries // 8, 1))
            except Exception as error:
                self._refuse_wishes(error)
                self.cutting.failed(error)
            try:
                async with asyncio.timeout(TICK_S):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _find(self) -> None:
        """Find the newest snapshot on disk. It is read completely before the log relies on it."""
        group = self.group.id

        def look(work: Work) -> SnapshotFile | None:
            remove_drafts(self.directory)
            # A process that was killed before its fsync leaves names of files and directories that a power loss may
            # remove.
            sync_path(self.home.config.data, self.directory)
            restored = self.home.restored(group)
            self._restored = restored if restored is not None and listed(restored) else None
            for path in listed(self.directory):
                try:
                    return verify(path, Expected(group=group, schema_max=SCHEMA), work)
                except Cancelled:
                    raise  # The node is stopping, which says nothing about the file.
                except SnapshotError as error:
                    logger.error("skipping a snapshot: %s", error)
            return None

        try:
            found = await in_thread(look)
        except Exception as error:
            self.cutting.failed(error)
        else:
            if found is not None:
                self.accept(found, age_s=max(self.home.clock.wall_s() - found.header.created_ms / 1000, 0.0))

    def _reason(self) -> str | None:
        machine = self.partition.machine
        if self._restored is not None and machine.applied[0] and not self.cutting.holds_back(self.policy):
            return "it started from a state of another cluster"  # No peer may be offered that state.
        progress = Progress(
            applied=machine.applied[0],
            log_bytes=machine.bytes_applied - self._bytes_at_cut,
            snapshot_index=self.newest.header.meta.index if self.newest is not None else 0,
            snapshot_at=self._cut_at,
            failures=self.cutting.failures,
            failed_at=self.cutting.failed_at,
        )
        return reason_to_cut(self.policy, progress, self.home.clock.monotonic_s())

    async def _cut(self, reason: str) -> None:
        machine, state, home = self.partition.machine, self.partition.state, self.home
        newest = self.newest
        if newest is not None and newest.header.meta.index == machine.applied[0]:
            self._grant_wishes(newest, len(self._wishes))  # It is up to date.
            return
        async with home.cuts:
            asked = len(self._wishes)  # A request made during the copy wants a later state.
            epoch, members = self.group.status().epoch, self.group.status().members
            bytes_applied, began = machine.bytes_applied, home.clock.monotonic_s()
            token = home.environment.entropy.token(8)

            def describe(txn: lmdb.Transaction[bytes]) -> Meta:
                index, term = read_applied(txn)
                schema = read_schema(txn) or schema_of(FIRST)
                return Meta(
                    cluster=home.identity(),
                    group=self.group.id,
                    index=index,
                    term=term,
                    epoch=epoch,
                    members=tuple(members),
                    schema=schema,
                    node=home.config.node,
                )

            def cut(work: Work) -> SnapshotFile:
                with state.lend(work.cancel) as env:
                    file = cut_blocking(env, describe, self.directory, work, token=token, now_s=home.clock.wall_s)
                return verify(file.path, home.expected(self.group.id))

            state.make_room()
            logger.debug("partition %d: cutting a snapshot: %s", self.partition.number, reason)
            try:
                with self.progress("cutting"):
                    file = await in_thread(cut, progress=self.show)
            except Cancelled:
                return  # The state had to grow, or was replaced. The next tick tries again.
            took = home.clock.monotonic_s() - began
        if self.group.status().epoch != epoch:
            await asyncio.to_thread(remove_quietly, file.path)  # It is unknown which of the two epochs it belongs to.
            return
        self.cutting.went_well()
        self.cuts += 1
        self.cut_bytes += file.header.file_bytes
        self.cut_s = took
        self._bytes_at_cut = bytes_applied
        logger.info(
            "partition %d: cut a snapshot at entry %d, %d bytes, in %.1f s: %s",
            self.partition.number, file.header.meta.index, file.header.file_bytes, took, reason,
        )  # fmt: skip
        self.accept(file)
        self._grant_wishes(file, asked)
        if self._wishes:
            self._wake.set()
        self._trim(at_least=1)
        await asyncio.to_thread(self._prune)

    def _grant_wishes(self, file: SnapshotFile, count: int) -> None:
        wishes, self._wishes = self._wishes[:count], self._wishes[count:]
        for wish in wishes:
            if not wish.done():
                wish.set_result(file)

    def _refuse_wishes(self, error: Exception) -> None:
        wishes, self._wishes = self._wishes, []
        for wish in wishes:
            if not wish.done():
                wish.set_exception(error)

    def accept(self, file: SnapshotFile, *, age_s: float = 0.0) -> None:
        """Take over `file`, which is ours, durable and valid. The log may offer it from now on."""
        meta = file.header.meta
        if self.newest is not None and self.newest.header.meta.index >= meta.index:
            return
        self.newest = file
        self._cut_at = self.home.clock.monotonic_s() - age_s
        self.offer()
        if self._restored is not None:
            restored, self._restored = self._restored, None
            self.home.run(asyncio.to_thread(shutil.rmtree, restored, ignore_errors=True))

    def offer(self) -> None:
        """Tell the log which snapshot to offer to followers that fell behind."""
        assert self.newest is not None
        header = self.newest.header
        offer = Offer(header.name, header.file_bytes, stored=header.name == self.published)
        self.partition.machine.newest = Snapshot(header.meta.index, header.meta.term, offer.encode())

    # -- trimming ------------------------------------------------------------------------------------------------------

    def _trim(self, *, at_least: int) -> None:
        """Trim the log up to a durable snapshot, except for a tail that saves slow followers a snapshot."""
        newest = self.newest
        if newest is None:
            return
        machine, status = self.partition.machine, self.group.status()
        entry_bytes = machine.bytes_applied / max(machine.entries_applied, 1)
        connected = self.home.connected() if status.match else set()
        point = trim_point(
            self.policy,
            durable_index=newest.header.meta.index,
            applied=status.applied,
            base=status.base,
            log_bytes=int((status.last - status.base) * entry_bytes),
            connected_matches=[match for peer, match in status.match.items() if peer in connected],
        )
        if point is not None and point - status.base >= at_least:
            self.group.trim(point)

    def _prune(self) -> None:
        pinned = self.home.pinned(self.group.id)
        if self._uploading is not None:
            pinned.add(self._uploading)
        kept = []
        for path in listed(self.directory):
            numbers = parse_name(path.name)
            assert numbers is not None, "only snapshots are listed"
            kept.append(Kept(path.name, *numbers, is_sound(path)))
        for name in names_to_delete(self.policy, kept, pinned=pinned):
            remove_quietly(self.directory / name)

    # -- publishing ----------------------------------------------------------------------------------------------------

    async def _run_publishing(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            file = self.newest
            if not self.group.is_leader:
                self.publishing.drop()  # The new leader publishes.
                continue
            if file is None or file.name == self.published:
                continue
            if self.publishing.holds_back(self.policy):
                continue
            try:
                await self._publish(file)
            except Exception as error:
                self.publishing.failed(error)

    async def _publish(self, file: SnapshotFile) -> None:
        home = self.home

        def publish(work: Work) -> None:
            catalog = Catalog(home.store(), cluster=home.identity(), group=self.group.id, schema_max=SCHEMA)
            catalog.publish(file, work)
            catalog.prune(self.policy)

        async with home.uploads:
            self._uploading = file.name
            try:
                with self.progress("publishing"):
                    await in_thread(publish, progress=self.show, abandon_after_s=ABANDON_S)
            finally:
                self._uploading = None
        self.publishing.went_well()
        home.store_complaints.went_well()
        self.published = file.name
        self.published_bytes += file.header.file_bytes
        self.offer()

    # -- for people ----------------------------------------------------------------------------------------------------

    @contextmanager
    def progress(self, doing: str) -> Iterator[None]:
        self.doing, self.done_bytes, self.total_bytes = doing, 0, 0
        try:
            yield
        finally:
            self.doing = None

    def show(self, done: int, total: int) -> None:
        self.done_bytes, self.total_bytes = done, total

    @property
    def age_s(self) -> float:
        """Age of the newest snapshot; without one, the time since the start."""
        return self.home.clock.monotonic_s() - self._cut_at
