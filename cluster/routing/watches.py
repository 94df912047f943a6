"""Keeps the clients that wait at this node connected to the leaders of their invocations.

The leader sends an outcome to the waiting node in a message, which can be lost with the leader or with the link. So a
leader watches each awaited id during one session of the link to it. When either changes, the id is registered with the
next leader, which answers at once for invocations that completed in between. A leader that resigns drops its watches
and says so, because it may become the next leader itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias

from holdfast.cluster.peers.rpc import Refused, Rpc, Unanswered
from holdfast.cluster.routing.replies import Replies
from holdfast.log.errors import ProposalError
from holdfast.sdk.ids import InvocationId, PartitionNumber, numbers_of, partition_of

logger = logging.getLogger(__name__)

POLL_S: Final = 0.05
SLICE: Final = 1000
RECHECK_S: Final = 5.0  # All watches are renewed this often, in case a message was lost unnoticed.

#: (leader, session of the link to it, or our own term if we lead).
Watcher: TypeAlias = tuple[str, int]


class Watches:
    def __init__(
        self,
        node: str,
        partitions: int,
        replies: Replies,
        rpc: Rpc,
        *,
        leader: Callable[[PartitionNumber], str | None],
        own_term: Callable[[PartitionNumber], int],
        completed_here: Callable[
            [PartitionNumber, list[InvocationId]], Awaitable[list[tuple[InvocationId, list[Any]]]]
        ],
    ) -> None:
        self._node = node
        self._partitions = partitions
        self._replies = replies
        self._rpc = rpc
        self._leader = leader
        self._own_term = own_term
        self._completed_here = completed_here
        self._lives: dict[str, int] = defaultdict(int)
        self._watcher: dict[PartitionNumber, Watcher] = {}
        self._task: asyncio.Task[None] | None = None
        replies.forward = lambda peer, invocation, outcome: rpc.tell(peer, "settle", (invocation, outcome))
        rpc.listen("settle", lambda _, argument: replies.settle(argument[0], argument[1]))
        rpc.listen("unwatched", self._on_unwatched)
        rpc.serve("watch", self._serve_watch)

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def peer_changed(self, peer: str, *, up: bool) -> None:
        """A session began or ended: the peer drops the watches of the old session, and so do we."""
        self._lives[peer] += 1
        if not up:
            self._replies.forget_peer(peer)

    def watched(self, invocation: InvocationId, by: str) -> None:
        """The leader `by` accepted the invocation, and watches it."""
        number = partition_of(invocation, self._partitions)
        if self._watcher.get(number) == (by, self._life(number, by)):
            self._replies.unwatched.pop(invocation, None)

    def resigned(self, number: PartitionNumber) -> None:
        """Our leadership of a partition has ended, and with it our watches for other nodes."""
        for peer in self._replies.forget(lambda invocation: partition_of(invocation, self._partitions) == number):
            self._rpc.tell(peer, "unwatched", number)

    def _on_unwatched(self, peer: str, number: Any) -> None:
        if self._watcher.get(number, ("", 0))[0] == peer:
            del self._watcher[number]

    def _life(self, number: PartitionNumber, leader: str) -> int:
        return self._own_term(number) if leader == self._node else self._lives[leader]

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        recheck = loop.time() + RECHECK_S
        while True:
            if not len(self._replies):
                self._replies.someone.clear()
                await self._replies.someone.wait()
            await asyncio.sleep(POLL_S)
            if loop.time() >= recheck:
                recheck = loop.time() + RECHECK_S
                self._watcher.clear()
            try:
                await self._put_under_watch()
            except Exception:
                logger.exception("renewing the watches failed; retrying")

    async def _put_under_watch(self) -> None:
        moved = False
        for number in numbers_of(self._partitions):
            leader = self._leader(number)
            if leader is None:
                continue
            watcher = (leader, self._life(number, leader))
            if self._watcher.get(number) != watcher:
                self._watcher[number] = watcher
                moved = True
        replies = self._replies
        if moved:
            replies.unwatched.update(dict.fromkeys(replies.waiting()))
        by_partition: dict[PartitionNumber, list[InvocationId]] = defaultdict(list)
        for invocation in replies.unwatched:
            by_partition[partition_of(invocation, self._partitions)].append(invocation)
        for number, ids in by_partition.items():
            current = self._watcher.get(number)
            if current is not None:
                for start in range(0, len(ids), SLICE):
                    await self._watch(number, current[0], ids[start : start + SLICE])

    async def _watch(self, number: PartitionNumber, leader: str, ids: list[InvocationId]) -> None:
        try:
            if leader == self._node:
                completed = await self._completed_here(number, ids)
            else:
                completed = await self._rpc.ask(leader, "watch", (number, ids), about=number)
        except (Unanswered, Refused, ProposalError):
            return  # They stay unwatched until the next round, which may find a new leader.
        for invocation in ids:
            self._replies.unwatched.pop(invocation, None)
        for invocation, outcome in completed:
            self._replies.settle(invocation, outcome)

    async def _serve_watch(self, peer: str, argument: Any) -> Any:
        number, ids = argument
        if self._leader(number) != self._node:
            raise Refused("NotLeader", f"{self._node} does not lead partition {number}", self._leader(number))
        for invocation in ids:
            self._replies.watch(peer, invocation)
        try:
            return await self._completed_here(number, ids)
        except ProposalError as error:  # Its leadership may just have ended: the other node asks the next leader.
            raise Refused(type(error).__name__, str(error)) from None
