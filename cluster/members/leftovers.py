"""Removes log, state and snapshots of partitions that have moved to other nodes.

Safety depends on the order. First the log forgets the group and writes a tombstone in its place (docs/adr/0002,
"Forgetting"); it refuses if the group may still need it. Once that is durable, this node can no longer trust the state
or the snapshots, and they are deleted. Until they are, the group may not return (`going`): it must start from nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from holdfast.cluster.groups import group_of
from holdfast.cluster.snapshotting.replicas import Replicas
from holdfast.cluster.snapshotting.service import Snapshots
from holdfast.cluster.tasks import Tasks
from holdfast.log.node import LogNode
from holdfast.sdk.ids import PartitionNumber
from holdfast.statemachine.members import Membership

logger = logging.getLogger(__name__)

LOOK_S: Final = 1.0
#: No peer may have sent us messages of the partition for this long: a new member that catches up is not a member yet.
QUIET_S: Final = 5.0
RETRY_S: Final = 10.0


class Leftovers:
    """One per node. Everything except the deletion of files runs on the event loop's thread."""

    def __init__(
        self,
        node: str,
        replicas: Replicas,
        log: LogNode,
        snapshots: Snapshots,
        *,
        membership: Callable[[], Membership],
    ) -> None:
        self._node = node
        self._replicas = replicas
        self._kept = replicas.every
        self._log = log
        self._snapshots = snapshots
        self._membership = membership
        #: Partitions that must not return yet, because their old files are still here.
        self.going: set[PartitionNumber] = set()
        self._since: dict[PartitionNumber, float] = {}
        self._tasks = Tasks()

    def start(self) -> None:
        self._run(self._check_forever())

    async def stop(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _run(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.keep(task)

    def keep_out(self, numbers: Iterable[PartitionNumber]) -> None:
        """Keep these partitions closed until the log is open and `tidy` decides about them."""
        self.going.update(numbers)

    def tidy(self) -> None:
        """Delete partitions on disk that this node gave up before it restarted. The others are in use."""
        left = {number for number in self.going if self._replicas.is_forgotten(number)}
        self.going.clear()
        for number in sorted(left):
            self._found(number)

    def _found(self, number: PartitionNumber) -> None:
        """Delete files of a partition that the log forgot before this node restarted."""
        if number not in self.going:
            self.going.add(number)
            self._run(self._delete_files(number))

    def forgotten(self, number: PartitionNumber) -> None:
        """The log has durably forgotten a partition: delete its files."""
        self._run(self._delete_files(number))

    async def _check_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LOOK_S)
            for number in list(self._kept):
                if not self._is_left_over(number):
                    self._since.pop(number, None)
                elif loop.time() - self._since.setdefault(number, loop.time()) >= QUIET_S:
                    await self._let_go(number)

    def _is_left_over(self, number: PartitionNumber) -> bool:
        """Whether the cluster's table and our own log place the partition elsewhere, and no peer sends messages for it."""
        status, replicas = self._kept[number].group.status(), self._membership().table.get(number)
        return (
            replicas is not None
            and self._node not in replicas.members
            and self._node not in status.members
            and replicas.epoch >= status.epoch
            and status.leader is None
        )

    async def _let_go(self, number: PartitionNumber) -> None:
        group = group_of(number)
        await self._snapshots.detach(group)  # From here on nothing reads the state.
        self._since.pop(number, None)
        self.going.add(number)
        if not self._is_left_over(number) or not self._log.forget_group(group):
            self.going.discard(number)
            self._snapshots.attach(self._kept[number])
            return
        del self._kept[number]
        self._replicas.close(number)

    async def _delete_files(self, number: PartitionNumber) -> None:
        forgotten = self._log.host.is_forgotten(group_of(number))
        assert forgotten, "a state is deleted only after its log"
        while True:
            try:
                await self._replicas.delete(number)
                break
            except OSError as error:
                logger.error("partition %d: its files cannot be deleted yet: %s", number, error)
                await asyncio.sleep(RETRY_S)
        self.going.discard(number)
        logger.info("partition %d: moved to other nodes, and its files here are deleted", number)
