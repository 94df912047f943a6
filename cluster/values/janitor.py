"""Deletes unreferenced objects of one partition from the shared store. Only the partition's leader runs it.

The state records the objects that it no longer needs (`GONE`), until we report them as deleted. Other objects are
orphans: the state never learned of them, because the node that wrote them died first. An occasional listing finds them.
An orphan is deleted when the state's time is long past the object's creation: its name can then no longer be recorded
(`blobs.KEEP_MS`), because the state's time never goes back. No node's clock matters.

Names are never reused. So nothing needs the objects that a deposed leader deletes, however late.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Final

from holdfast.cluster.backoff import backoff
from holdfast.cluster.partition.door import Partition
from holdfast.cluster.values.shared_store import Objects
from holdfast.log.errors import ProposalError
from holdfast.snapshots.errors import SnapshotError
from holdfast.statemachine import queries
from holdfast.statemachine.blobs import created_ms_of, is_known
from holdfast.statemachine.commands import ForgetObjects

logger = logging.getLogger(__name__)

DELETED_AT_A_TIME: Final = 100
SWEPT_AT_A_TIME: Final = 1000
#: Interval between listings of all objects. The first one comes sooner, because leaders may change often.
SWEEP_S: Final = 6 * 3600.0
FIRST_SWEEP_S: Final = 600.0
#: How long an orphan's creation must lie in the past, by the state's time.
ORPHAN_MS: Final = 24 * 3_600_000
RETRY_S: Final = 1.0
RETRY_S_MAX: Final = 300.0


class Janitor:
    def __init__(self, partition: Partition, objects: Objects) -> None:
        self._partition = partition
        self._objects = objects
        self._wake = asyncio.Event()
        self._failures = 0  # Consecutive.
        self._task: asyncio.Task[None] | None = None
        self._sweep_at = 0.0

    def start(self) -> None:
        """Called when our announcement is applied, so that the state has everything that earlier leaders committed."""
        if self._objects.home.shared:
            loop = asyncio.get_running_loop()
            self._sweep_at = loop.time() + FIRST_SWEEP_S
            self._task = loop.create_task(self._run())

    def wake(self) -> None:
        """There is something to delete."""
        self._wake.set()

    def end(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            try:
                while await self._delete():
                    pass
                if loop.time() >= self._sweep_at:
                    await self._sweep()
                    self._sweep_at = loop.time() + SWEEP_S
            except (SnapshotError, TimeoutError) as error:
                self._objects.chores.failed(error)
                await self._pause()
                continue
            except ProposalError:
                await self._pause()
                continue
            except Exception:
                logger.exception("partition %d: deleting objects failed", self._partition.number)
                await self._pause()
                continue
            if self._failures:
                self._failures = 0
                self._objects.chores.went_well()
            with suppress(TimeoutError):
                async with asyncio.timeout(max(self._sweep_at - loop.time(), 0.0)):
                    await self._wake.wait()

    async def _pause(self) -> None:
        await asyncio.sleep(backoff(RETRY_S, self._failures, RETRY_S_MAX))
        self._failures += 1

    async def _delete(self) -> bool:
        """Delete a batch of the objects that the state has released. False when there are none."""
        await self._partition.objects.over()
        with self._partition.state.read() as txn:
            names = queries.objects_to_delete(txn, DELETED_AT_A_TIME)
        if not names:
            return False
        await self._objects.delete(self._partition.number, names)
        self._objects.deleted += len(names)
        await self._partition.submit_and_wait(ForgetObjects(names))
        return True

    async def _sweep(self) -> None:
        """Delete orphans. A listing may be stale: then an orphan is found next time, or deleted twice."""
        partition, number = self._partition, self._partition.number
        names = [
            name
            for name in await self._objects.listed(number)
            if (created_ms_of(name) or 0) < partition.now_ms() - ORPHAN_MS
        ]
        if names:  # Only the state's time counts, and it stands still in an idle partition.
            await partition.submit_and_wait(ForgetObjects([]))
        for first in range(0, len(names), SWEPT_AT_A_TIME):
            orphans = self._orphans(names[first : first + SWEPT_AT_A_TIME])
            if orphans:
                await self._objects.delete(number, orphans)
                self._objects.swept += len(orphans)
            await asyncio.sleep(0)

    def _orphans(self, names: list[str]) -> list[str]:
        with self._partition.state.read() as txn:
            youngest = queries.meta(txn).now_ms - ORPHAN_MS
            old = [name for name in names if (created_ms_of(name) or 0) < youngest]
            return [name for name in old if not is_known(txn, name)]
