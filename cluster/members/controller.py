"""Adapts the members of partitions to the nodes of the cluster. It runs on the leader of the meta group.

It has no memory. The next step follows from the meta state (`statemachine.members.next_change`) and from which nodes
are reachable, so if a controller dies in the middle of a change, its successor continues. The partition's leader makes
a change in the partition's own log, by sealing: one member at a time, and a new member only once it has caught up. The
leader then records the partition's members in the meta group (`record`).

Every node is a member of the meta group, because every node needs its state.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, Final

from holdfast.cluster.members.handover import Handover
from holdfast.cluster.partition.door import Partition
from holdfast.cluster.peers.rpc import Refused, Rpc, Unanswered
from holdfast.cluster.tasks import Tasks
from holdfast.log.errors import ProposalError
from holdfast.log.node import Group
from holdfast.sdk.ids import NodeId, PartitionNumber
from holdfast.statemachine.members import ACTIVE, DRAINING, REMOVED, AssignPartition, Membership, next_change

logger = logging.getLogger(__name__)

AT_A_TIME: Final = 2  # Partitions that change members at a time: each copies a state to a new member.
CHANGE_S: Final = 60.0  # Time for a new member to catch up, before the change is retried.
META_S: Final = 5.0  # The same in the meta group, whose log is small. No other change is decided meanwhile.
ASK_S: Final = 5.0
BEHIND_ENTRIES: Final = (
    1000  # A replica that lags by fewer entries counts as caught up: a busy partition never stands still.
)
LOOK_S: Final = 1.0  # Timeout for information that is only displayed.
BUSY_S: Final = 0.2  # Interval between rounds while there is something to do,
IDLE_S: Final = 5.0  # and while there is not.


class Controller:
    def __init__(
        self,
        node: NodeId,
        hosted: Mapping[PartitionNumber, Partition],
        rpc: Rpc,
        handover: Handover,
        *,
        meta_group: Callable[[], Group],
        membership: Callable[[], Membership],
        connected: Callable[[], Collection[NodeId]],
        leader: Callable[[PartitionNumber], str | None],
        propose: Callable[[AssignPartition], Awaitable[object]],
    ) -> None:
        self._node = node
        self._hosted = hosted
        self._rpc = rpc
        self._handover = handover
        self._meta_group = meta_group
        self._membership = membership
        self._connected = connected
        self._leader = leader
        self._propose = propose
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._served = Tasks()
        self._changing: dict[PartitionNumber, tuple[NodeId, ...]] = {}
        self._meta_turn = 0  # The new member that the meta group waits for next.
        self._recording = False
        #: The current change, or why no change is possible, for operators.
        self.doing = ""
        rpc.serve("ready", self._serve_ready)
        rpc.serve("change-members", self._serve_change)
        rpc.serve("doing", self._serve_doing)

    def start(self) -> None:
        self._tasks = [asyncio.ensure_future(self._run())]

    async def stop(self) -> None:
        tasks = [*self._tasks, *self._served]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def changed(self) -> None:
        self._changed.set()

    async def doing_now(self) -> str:
        """What the controller is doing, as seen from any node; empty if nothing, or unknown."""
        leader = self._meta_group().leader
        if leader is None or leader == self._node:
            return self.doing
        try:
            async with asyncio.timeout(LOOK_S):
                return str(await self._rpc.ask(leader, "doing", None))
        except (Unanswered, Refused, TimeoutError):
            return ""

    async def _serve_doing(self, peer: str, argument: Any) -> Any:
        return self.doing

    # -- the partition's leader --------------------------------------------------------------------------------------

    def record(self) -> None:
        """Record the members of the partitions we lead in the meta group. Repeating it is harmless, so nothing waits for it."""
        table = self._membership().table
        news = [
            AssignPartition(number, list(status.members), status.epoch)
            for number, partition in self._hosted.items()
            if partition.group.is_leader
            and (status := partition.group.status()).epoch > (table[number].epoch if number in table else 0)
        ]
        if news and not self._recording:
            self._recording = True
            task = asyncio.ensure_future(self._record(news))
            self._tasks.append(task)
            task.add_done_callback(self._tasks.remove)

    async def _record(self, news: list[AssignPartition]) -> None:
        try:
            for command in news:
                await self._propose(command)
        except (ProposalError, TimeoutError) as error:
            logger.debug("the partition table is not up to date yet: %s", error)
        finally:
            self._recording = False
            self._handover.changed()  # More may have changed by now.

    async def _serve_ready(self, peer: str, argument: Any) -> Any:
        return True  # Served as soon as partitions can be opened here.

    async def _serve_change(self, peer: str, argument: Any) -> Any:
        """Continues if the requesting controller dies: half a change would keep its successor from making one."""
        number, members = argument
        task = asyncio.ensure_future(self._change_here(number, tuple(members)))
        self._served.keep(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    @staticmethod
    def _ended(task: asyncio.Task[list[str]]) -> None:
        if not task.cancelled():
            task.exception()  # The requester got it, if it is still there.

    async def _change_here(self, number: PartitionNumber, members: tuple[NodeId, ...]) -> list[str]:
        partition = self._hosted.get(number)
        if partition is None or not partition.group.is_leader:
            raise Refused("NotLeader", f"{self._node} does not lead partition {number}", self._leader(number))
        self._check_copies(number, partition.group, members)
        try:
            if self._node not in members:
                # A leader that removes itself leaves its group without a leader, so another member must do it.
                staying = [name for name in partition.group.status().members if name in members]
                await self._handover.transfer(number, staying[0] if staying else None, self._node)
                raise Refused("NotLeader", f"{self._node} first handed partition {number} over", self._leader(number))
            await self._handover.change_members(partition, members, CHANGE_S)
        except ProposalError as error:
            raise Refused(type(error).__name__, str(error)) from None
        self.record()
        return list(partition.group.status().members)

    def _check_copies(self, number: PartitionNumber, group: Group, members: tuple[NodeId, ...]) -> None:
        """Give up a good replica for a better placement only if all remaining ones have caught up. Raises Refused."""
        nodes, status = self._membership().nodes, group.status()
        near = {self._node, *self._connected()}
        given_up = [
            name
            for name in status.members
            if name not in members and name in near and name in nodes and nodes[name].state in (ACTIVE, DRAINING)
        ]
        behind = [
            name
            for name in status.members
            if name in members
            and name != self._node
            and (name not in near or status.last - status.match.get(name, 0) > BEHIND_ENTRIES)
        ]
        if given_up and behind:
            raise Refused(
                "Behind",
                f"partition {number} keeps its replica on {given_up[0]} until {', '.join(behind)} has caught up",
            )

    # -- the meta group's leader -------------------------------------------------------------------------------------

    async def _run(self) -> None:
        wait_s = IDLE_S
        while True:
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()
            try:
                busy = self._meta_group().is_leader and await self._round()
            except Exception:
                logger.exception("managing the replicas failed; retrying")
                busy = True
            if not busy:
                self.doing = ""
            wait_s = BUSY_S if busy else IDLE_S

    async def _round(self) -> bool:
        """Make the changes that are possible now. Returns whether there is more to do, or to wait for."""
        busy = await self._change_meta()
        membership = self._membership()
        near = {self._node, *self._connected()}
        if all(next_change(membership, number, ready=near, present=near) is None for number in membership.table):
            return busy
        # A node with a full disk declines every invitation, and would be chosen again and again.
        ready = await self._ready((near & {*self._meta_group().status().members}) - self._handover.full)
        for number in sorted(membership.table):
            if len(self._changing) >= AT_A_TIME:
                break
            if number in self._changing:
                continue
            after = next_change(membership, number, ready=ready, present=near, moving=self._changing)
            if after is not None:
                self._changing[number] = after
                self.doing = f"partition {number}: members become {', '.join(after)}"
                task = asyncio.ensure_future(self._change(number, after))
                self._tasks.append(task)
                task.add_done_callback(self._tasks.remove)
        return True

    async def _ready(self, names: Collection[NodeId]) -> set[NodeId]:
        async def ask(name: NodeId) -> NodeId | None:
            try:
                async with asyncio.timeout(ASK_S):
                    return name if name == self._node or await self._rpc.ask(name, "ready", None) else None
            except (Unanswered, Refused, TimeoutError):
                return None

        return {name for name in await asyncio.gather(*(ask(name) for name in sorted(names))) if name is not None}

    async def _change(self, number: PartitionNumber, after: tuple[NodeId, ...]) -> None:
        """Ask the partition's leader for a change. The table shows whether it succeeded; if not, it is retried."""
        try:
            leader = self._leader(number)
            async with asyncio.timeout(CHANGE_S + ASK_S):
                if leader == self._node:
                    await self._change_here(number, after)
                elif leader is not None:
                    await self._rpc.ask(leader, "change-members", (number, after))
                else:
                    raise Refused("NotLeader", "it has no leader")
            logger.info("partition %d: its members are now %s", number, ", ".join(after))
            await self._recorded(number, after)
        except (Refused, Unanswered, TimeoutError) as error:
            self.doing = f"partition {number}: members do not become {', '.join(after)} yet: {error}"
            logger.info("%s", self.doing)
            await asyncio.sleep(BUSY_S)
        finally:
            self._changing.pop(number, None)
            self.changed()

    async def _recorded(self, number: PartitionNumber, after: tuple[NodeId, ...]) -> None:
        """Wait until the table shows the change: a decision based on the old members would only be refused."""
        for _ in range(50):
            if self._membership().table[number].members == after:
                return
            await asyncio.sleep(0.02)

    async def _change_meta(self) -> bool:
        """Add or remove one member of the meta group. Returns whether there was anything to do."""
        group, nodes = self._meta_group(), self._membership().nodes
        members = group.status().members
        connected = self._connected()
        holding = {name for replicas in self._membership().table.values() for name in replicas.members}
        gone = [
            name
            for name in members
            if name != self._node
            and name in nodes
            and nodes[name].state == REMOVED
            and (name not in holding or name not in connected)
        ]
        new = sorted(
            name for name, node in nodes.items() if name not in members and node.state != REMOVED and name in connected
        )
        if not gone and not new:
            return False
        comes = None if gone else new[self._meta_turn % len(new)]
        after = sorted({*members} - {*gone[:1]} if comes is None else {*members, comes})
        self.doing = f"meta group: members become {', '.join(after)}"

        def may_seal() -> bool:
            """Deny a vote to a new member that was removed meanwhile.

            An operator who saw it without a vote may have stopped it. So every entry before the seal must be applied,
            because one of them may remove it. Safety does not depend on this check; at worst it delays the change.
            """
            status = group.status()
            return comes is None or (status.applied == status.last and self._membership().nodes[comes].state != REMOVED)

        try:
            await group.change_members(tuple(after), META_S, may_seal)
            logger.info("the meta group's members are now %s", ", ".join(after))
        except ProposalError as error:
            self._meta_turn += 1  # Another new member may be quicker.
            self.doing += f": not yet: {error}"
            logger.info("%s", self.doing)
        return True
