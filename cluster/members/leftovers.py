"""Removes what partitions leave on a node from which they moved away: log, state and snapshots.

The order is the safety. First the log forgets the group and writes a tombstone in its place (docs/adr/0002, "Forgetting"); it
refuses where the group may still need it. When that is durable, nothing can make this node believe the state or the snapshots
again, and they are deleted. Until they are, the group is kept away (`going`): it comes back only with nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Final

from holdfast.cluster.partition.door import Partition
from holdfast.cluster.snapshotting.service import Snapshots
from holdfast.cluster.tasks import Tasks
from holdfast.log.messages import GroupId
from holdfast.log.node import LogNode
from holdfast.statemachine.members import Membership

logger = logging.getLogger(__name__)

LOOK_S: Final = 1.0
#: So long nobody must have sent us anything of the partition: a newcomer that catches up is no member yet either.
QUIET_S: Final = 5.0
RETRY_S: Final = 10.0


class Leftovers:
    """One per node. Everything here happens on the loop's thread, but for the deleting of files."""

    def __init__(
        self,
        node: str,
        kept: MutableMapping[int, Partition],
        *,
        group_of: Callable[[int], int],
        log: Callable[[], LogNode],
        snapshots: Callable[[], Snapshots],
        membership: Callable[[], Membership],
        close: Callable[[int], None],
        delete: Callable[[int], Awaitable[None]],
    ) -> None:
        self._node = node
        self._kept = kept
        self._group_of = group_of
        self._log = log
        self._snapshots = snapshots
        self._membership = membership
        self._close = close
        self._delete = delete
        #: Partitions that must not come back yet, because something of their last stay is still here.
        self.going: set[int] = set()
        self._since: dict[int, float] = {}
        self._tasks = Tasks()

    def start(self) -> None:
        self._run(self._look_again_and_again())

    async def stop(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _run(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.keep(task)

    def found(self, number: int) -> None:
        """Files of a partition that the log forgot in an earlier life of this node."""
        if number not in self.going:
            self.going.add(number)
            self._run(self._delete_files(number))

    def forgotten(self, number: int) -> None:
        """The log of a partition is gone, durably."""
        self._run(self._delete_files(number))

    async def _look_again_and_again(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LOOK_S)
            for number in list(self._kept):
                if not self._is_left_over(number):
                    self._since.pop(number, None)
                elif loop.time() - self._since.setdefault(number, loop.time()) >= QUIET_S:
                    await self._let_go(number)

    def _is_left_over(self, number: int) -> bool:
        """The cluster says that others have it, our own log agrees, and nobody talks to us about it."""
        status, replicas = self._kept[number].group.status(), self._membership().table.get(number)
        return (
            replicas is not None
            and self._node not in replicas.members
            and self._node not in status.members
            and replicas.epoch >= status.epoch
            and status.leader is None
        )

    async def _let_go(self, number: int) -> None:
        group = self._group_of(number)
        await self._snapshots().detach(group)  # From here on nobody reads the state.
        self._since.pop(number, None)
        self.going.add(number)
        if not self._is_left_over(number) or not self._log().forget_group(group):
            self.going.discard(number)
            self._snapshots().attach(self._kept[number])
            return
        del self._kept[number]
        self._close(number)

    async def _delete_files(self, number: int) -> None:
        forgotten = self._log().host.is_forgotten(GroupId(self._group_of(number)))
        assert forgotten, "a state is deleted only after its log"
        while True:
            try:
                await self._delete(number)
                break
            except OSError as error:
                logger.error("partition %d: what it left here cannot be deleted yet: %s", number, error)
                await asyncio.sleep(RETRY_S)
        self.going.discard(number)
        logger.info("partition %d: it is on other nodes now, and what it left here is deleted", number)
