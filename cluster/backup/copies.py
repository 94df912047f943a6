"""One node's part in a backup: holding messages, copying the partitions it leads, and uploading the copies.

The coordinator of the backup (`job`) asks for it in steps. `hold`: messages between partitions wait. `begin`: open a
read transaction on the state of each partition and return its marks; nothing is copied yet. `release`: messages flow
again. `send`: make, upload and remove one copy after the other. `status`: return the progress. A coordinator that is
silent for a while is presumed dead, and everything is released.

A copy is cut from one read transaction, so it stays valid if this node loses its leadership meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import lmdb

from holdfast.cluster.backoff import backoff
from holdfast.cluster.backup.filling import fill_blocking, is_whole
from holdfast.cluster.environment import Event
from holdfast.cluster.partition.door import Partition
from holdfast.cluster.partition.state import LmdbTxn, read_applied, read_schema
from holdfast.cluster.peers.rpc import Refused
from holdfast.cluster.snapshotting.service import Snapshots
from holdfast.cluster.values.shared_store import Objects
from holdfast.log.errors import ProposalError
from holdfast.sdk.ids import PartitionNumber
from holdfast.snapshots.backups import digest_of, part_name
from holdfast.snapshots.cut import cut_blocking
from holdfast.snapshots.errors import Cancelled, NotFound, SnapshotError, StoreFailed
from holdfast.snapshots.files import remove_quietly
from holdfast.snapshots.format import Meta, SnapshotFile, verify
from holdfast.snapshots.stores import Store
from holdfast.snapshots.work import ABANDON_S, Work, in_thread
from holdfast.statemachine.levels import FIRST, schema_of
from holdfast.statemachine.marks import Marks, read_marks

logger = logging.getLogger(__name__)

#: A coordinator that is silent for this long is presumed dead.
LEASE_S: Final = 60.0
#: Attempts per upload while the store fails temporarily. The store's client also retries each request.
UPLOAD_TRIES: Final = 6
UPLOAD_RETRY_S: Final = 1.0
UPLOAD_RETRY_S_MAX: Final = 30.0

WAITING: Final = "waiting"
COPYING: Final = "copying"
UPLOADING: Final = "uploading"
DONE: Final = "done"
FAILED: Final = "failed"


@dataclass
class Copy:
    """The copy of one partition."""

    partition: Partition
    marks: asyncio.Future[Marks]
    go: Event
    whole: bool = True  # It contains all of its large values.
    cutting: asyncio.Task[SnapshotFile] | None = None
    doing: str = WAITING
    done_bytes: int = 0
    total_bytes: int = 0
    note: str | None = None
    error: tuple[str, bool] | None = None  # The reason, and whether repeating the round may help.
    stored: dict[str, Any] | None = None

    def show(self, done: int, total: int) -> None:
        self.done_bytes, self.total_bytes = done, total

    def row(self) -> list[Any]:
        return [
            self.partition.number, self.doing, self.done_bytes, self.total_bytes, self.note, self.error, self.stored,
        ]  # fmt: skip


@dataclass
class Round:
    """This node's part in one round of one backup."""

    copies: dict[PartitionNumber, Copy]
    asked_at: float
    sending: asyncio.Task[None] | None = None


class Copies:
    def __init__(self, home: Snapshots, objects: Objects, hosted: Mapping[PartitionNumber, Partition]) -> None:
        self._home = home
        self._objects = objects
        self._hosted = hosted
        self._rounds: dict[str, Round] = {}
        self._watching: asyncio.Task[None] | None = None
        self.stopping = False
        self.handlers: dict[str, Callable[[Any], Any]] = {
            "backup-hold": self.hold,
            "backup-begin": self.begin,
            "backup-release": self.release,
            "backup-send": self.send,
            "backup-status": self.status,
            "backup-abort": self.abort,
        }
        for method, handler in self.handlers.items():
            home.rpc.serve(method, partial(_asked, handler))

    @property
    def directory(self) -> Path:
        return self._home.config.data / "backups"

    def remove_leftovers(self) -> None:
        """Remove the files of a killed process. They are not a backup."""
        shutil.rmtree(self.directory, ignore_errors=True)

    # -- the consistent point ----------------------------------------------------------------------------------------

    def _led(self, numbers: Iterable[Any]) -> list[Partition]:
        if self.stopping:
            raise Refused("Stopping", f"{self._home.config.node} is shutting down")
        found = []
        for number in numbers:
            partition = self._hosted.get(number)
            if partition is None or not partition.group.is_leader:
                raise Refused("NotLeader", f"{self._home.config.node} does not lead partition {number!r:.10}")
            found.append(partition)
        return found

    async def hold(self, argument: Any) -> None:
        token, numbers, seconds = argument
        for partition in self._led(numbers):
            partition.messages.begin(token, seconds)

    async def release(self, argument: Any) -> None:
        token, numbers = argument
        for number in numbers:
            if (partition := self._hosted.get(number)) is not None:
                partition.messages.end(token)

    async def begin(self, argument: Any) -> list[list[Any]]:
        """Open the read transactions that will be copied, and return their marks by partition."""
        token, numbers = argument
        partitions = self._led(numbers)
        if token in self._rounds:
            raise Refused("Begun", "this round has already begun")
        round_ = self._rounds[token] = Round({}, self._home.clock.monotonic_s())
        if self._watching is None:
            self._watching = asyncio.ensure_future(self._watch())
        try:
            # A new leader may not have applied yet what its predecessor acknowledged.
            await asyncio.gather(*(partition.group.read_index() for partition in partitions))
            loop = asyncio.get_running_loop()
            for partition in partitions:
                partition.objects.begin(token, LEASE_S)  # Before reading the state that refers to them.
                copy = round_.copies[partition.number] = Copy(
                    partition, loop.create_future(), self._home.environment.event()
                )
                copy.cutting = asyncio.ensure_future(self._cut(token, copy))
            return [[number, *await self._marks(copy)] for number, copy in round_.copies.items()]
        except ProposalError as error:
            await self.abort(token)
            raise Refused(type(error).__name__, str(error)) from None
        except BaseException:
            await self.abort(token)
            raise

    async def _marks(self, copy: Copy) -> Marks:
        assert copy.cutting is not None
        await asyncio.wait((copy.marks, copy.cutting), return_when=asyncio.FIRST_COMPLETED)
        if copy.marks.done():
            return copy.marks.result()
        try:
            await copy.cutting
        except (SnapshotError, OSError) as error:
            raise Refused("SnapshotError", str(error)) from None
        raise AssertionError("the marks of a state are read before it is copied")

    async def _cut(self, token: str, copy: Copy) -> SnapshotFile:
        home, partition = self._home, copy.partition
        loop, group, status = asyncio.get_running_loop(), partition.group.id, partition.group.status()
        directory = self.directory / token.replace("/", ".") / f"{partition.number:04d}"

        def told(marks: Marks) -> None:
            if not copy.marks.done():
                copy.marks.set_result(marks)

        def cut(work: Work) -> SnapshotFile:
            def describe(txn: lmdb.Transaction[bytes]) -> Meta:
                copy.whole = is_whole(txn)
                loop.call_soon_threadsafe(told, read_marks(LmdbTxn(txn)))
                while not copy.go.wait(0.1):
                    work.check()
                work.check()
                index, term = read_applied(txn)
                schema = read_schema(txn) or schema_of(FIRST)
                return Meta(
                    cluster=home.identity(),
                    group=group,
                    index=index,
                    term=term,
                    epoch=status.epoch,
                    members=tuple(status.members),
                    schema=schema,
                    node=home.config.node,
                )

            def stop() -> None:
                """The state has to grow or is replaced, and cannot wait for the copy."""
                work.cancel()
                copy.go.set()

            with partition.state.lend(stop) as env:
                return cut_blocking(
                    env,
                    describe,
                    directory,
                    work,
                    token=self._home.environment.entropy.token(8),
                    now_s=self._home.clock.wall_s,
                )

        partition.state.make_room()
        return await in_thread(cut, progress=copy.show)

    # -- copying and sending -----------------------------------------------------------------------------------------

    def _round(self, token: Any) -> Round:
        round_ = self._rounds.get(token)
        if round_ is None:
            raise Refused("Unknown", f"{self._home.config.node} does not know this backup; it may have been restarted")
        round_.asked_at = self._home.clock.monotonic_s()
        for copy in round_.copies.values():
            if copy.doing in (WAITING, COPYING):
                copy.partition.objects.begin(token, LEASE_S)
        return round_

    async def send(self, argument: Any) -> None:
        token, url, prefix = argument
        round_ = self._round(token)
        if round_.sending is None:
            round_.sending = asyncio.ensure_future(self._send(round_, url, prefix))

    async def _send(self, round_: Round, url: str, prefix: str) -> None:
        try:
            store = await in_thread(lambda _: self._home.environment.open_store(url))
        except SnapshotError as error:
            for copy in round_.copies.values():
                copy.doing, copy.error = FAILED, (str(error), False)
            return
        await asyncio.gather(*(self._copy_and_upload(copy, store, prefix) for copy in round_.copies.values()))

    async def _copy_and_upload(self, copy: Copy, store: Store, prefix: str) -> None:
        assert copy.cutting is not None
        try:
            async with self._home.cuts:
                copy.doing = COPYING
                copy.go.set()
                file = await copy.cutting
                if not copy.whole:
                    file = await in_thread(partial(self._fill, copy, file), progress=copy.show)
            async with self._home.uploads:
                copy.doing = UPLOADING
                copy.stored = await self._upload(copy, file, store, prefix)
            await asyncio.to_thread(remove_quietly, file.path)
            copy.doing = DONE
        except Cancelled:
            copy.doing = FAILED
            copy.error = ("the state of the partition had to grow during the copy", True)
        except _Outrun as error:
            copy.doing, copy.error = FAILED, (str(error), True)
        except (SnapshotError, OSError) as error:
            copy.doing, copy.error = FAILED, (str(error), False)
        except Exception as error:
            logger.exception("partition %d: copying it for a backup failed", copy.partition.number)
            copy.doing, copy.error = FAILED, (f"{type(error).__name__}: {error}", False)

    def _fill(self, copy: Copy, file: SnapshotFile, work: Work) -> SnapshotFile:
        number, objects = copy.partition.number, self._objects

        def fetch(blob: bytes, name: str) -> bytes:
            for failures in range(1, UPLOAD_TRIES + 1):
                try:
                    return objects.read(self._home.store(), number, blob, name)
                except NotFound:
                    raise _Outrun(name) from None
                except SnapshotError as error:
                    if not error.retryable or failures == UPLOAD_TRIES:
                        raise
                    copy.note = f"try {failures + 1} of {UPLOAD_TRIES}: {error}"
                    work.pause(backoff(UPLOAD_RETRY_S, failures - 1, UPLOAD_RETRY_S_MAX))
            raise AssertionError("it returns, or raises")

        whole = fill_blocking(file, file.path.parent, number, copy.partition.machine.partitions, fetch=fetch, work=work)
        copy.note = None
        return whole

    async def _upload(self, copy: Copy, file: SnapshotFile, store: Store, prefix: str) -> dict[str, Any]:
        number, meta = copy.partition.number, file.header.meta
        name = part_name(number, file.name)

        def upload(work: Work) -> str:
            verify(file.path)  # Read back: a copy that the disk damaged must not become a backup.
            digest = digest_of(file.path, Work())
            store.put(file.path, f"{prefix}{name}", work)
            size = store.stat(f"{prefix}{name}").size
            if size != file.header.file_bytes:
                raise StoreFailed(store.url, f"{name} has {size} bytes instead of {file.header.file_bytes}")
            return digest

        for failures in range(1, UPLOAD_TRIES + 1):
            try:
                digest = await in_thread(upload, progress=copy.show, abandon_after_s=ABANDON_S)
                break
            except SnapshotError as error:
                if not error.retryable or failures == UPLOAD_TRIES:
                    raise
                copy.note = f"try {failures + 1} of {UPLOAD_TRIES}: {error}"
                logger.warning("partition %d: uploading its copy failed and is retried: %s", number, error)
                await asyncio.sleep(backoff(UPLOAD_RETRY_S, failures - 1, UPLOAD_RETRY_S_MAX))
        copy.note = None
        return {
            "object": name, "bytes": file.header.file_bytes, "sha256": digest, "partition": number,
            "index": meta.index, "term": meta.term, "node": meta.node,
        }  # fmt: skip

    async def status(self, token: Any) -> list[list[Any]]:
        return [copy.row() for copy in self._round(token).copies.values()]

    # -- ending -----------------------------------------------------------------------------------------------------

    async def abort(self, token: Any) -> None:
        """Remove everything of a round from this node, whether it failed or was sent completely."""
        round_ = self._rounds.pop(token, None)
        if round_ is None:
            return
        tasks: list[asyncio.Task[Any]] = [copy.cutting for copy in round_.copies.values() if copy.cutting is not None]
        if round_.sending is not None:
            tasks.append(round_.sending)
        for task in tasks:
            task.cancel()
        for copy in round_.copies.values():
            copy.partition.messages.end(token)
            copy.partition.objects.end(token)
            copy.go.set()  # The waiting thread then notices the cancellation.
        await asyncio.gather(*tasks, return_exceptions=True)
        directory = self.directory / token.replace("/", ".")
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    async def _watch(self) -> None:
        while self._rounds:
            await asyncio.sleep(1.0)
            late = self._home.clock.monotonic_s() - LEASE_S
            for token in [token for token, round_ in self._rounds.items() if round_.asked_at < late]:
                logger.warning("the coordinator of the backup %s is silent, removing its copies here", token)
                await self.abort(token)
        self._watching = None

    async def stop(self) -> None:
        """On return, no thread of ours reads a state."""
        if self._watching is not None:
            self._watching.cancel()
        for token in list(self._rounds):
            await self.abort(token)


class _Outrun(Exception):
    """A new leader of the partition, unaware of the copy, has deleted an object that the copy refers to."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the object {name} is no longer in the store of large values")


async def _asked(handler: Callable[[Any], Any], _: str, argument: Any) -> Any:
    return await handler(argument)
