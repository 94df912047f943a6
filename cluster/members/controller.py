"""Makes the groups of the log follow the nodes of the cluster: whoever leads the meta group sees to it.

It has no memory. What to do next follows from the meta state (`statemachine.members.next_change`) and from who can be reached,
so a controller that dies in the middle of something is succeeded by one that goes on. A change is made in the partition's own
log, by sealing, at whoever leads it: one member at a time, a newcomer only when it has caught up. The leader of a partition
writes into the meta group what its members are since (`record`), whoever asked for the change.

Every node holds the meta group, because every node needs to know what is in it.
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
from holdfast.statemachine.members import ACTIVE, DRAINING, REMOVED, AssignPartition, Membership, next_change

logger = logging.getLogger(__name__)

AT_A_TIME: Final = 2  # Partitions whose members change: each copies a state to a newcomer.
CHANGE_S: Final = 60.0  # For a newcomer to catch up; then it is tried again.
META_S: Final = 5.0  # The same in the meta group, whose log is small: nothing else is decided while it waits for one.
ASK_S: Final = 5.0
BEHIND_ENTRIES: Final = 1000  # A replica with fewer entries to go has caught up, as far as a busy partition allows.
LOOK_S: Final = 1.0  # For what is only shown.
BUSY_S: Final = 0.2  # Between two looks while there is something to do,
IDLE_S: Final = 5.0  # and while there is not.


class Controller:
    def __init__(
        self,
        node: str,
        hosted: Mapping[int, Partition],
        rpc: Rpc,
        handover: Handover,
        *,
        meta_group: Callable[[], Group],
        membership: Callable[[], Membership],
        connected: Callable[[], Collection[str]],
        leader: Callable[[int], str | None],
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
        self._changing: dict[int, tuple[str, ...]] = {}
        self._meta_turn = 0  # Which newcomer the meta group waits for next.
        self._recording = False
        #: What is being done, or why nothing can be, for operators.
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
        """What whoever sees to the replicas is doing, for operators of any node; empty: nothing, or nobody says."""
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
        """Have the meta group know the members of what we lead. Doing it twice is harmless, so nobody waits for it."""
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
            self._handover.changed()  # There may be more by now.

    async def _serve_ready(self, peer: str, argument: Any) -> Any:
        return True  # Served from the moment on at which partitions can be opened here.

    async def _serve_change(self, peer: str, argument: Any) -> Any:
        """Goes on if whoever asked for it dies meanwhile: half a change would keep its successor from making one."""
        number, members = argument
        task = asyncio.ensure_future(self._change_here(number, tuple(members)))
        self._served.keep(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    @staticmethod
    def _ended(task: asyncio.Task[list[str]]) -> None:
        if not task.cancelled():
            task.exception()  # Told to whoever asked, if it is still there.

    async def _change_here(self, number: int, members: tuple[str, ...]) -> list[str]:
        partition = self._hosted.get(number)
        if partition is None or not partition.group.is_leader:
            raise Refused("NotLeader", f"{self._node} does not lead partition {number}", self._leader(number))
        self._check_copies(number, partition.group, members)
        try:
            if self._node not in members:
                # A leader that seals itself out leaves its group without one: another does it.
                staying = [name for name in partition.group.status().members if name in members]
                await self._handover.transfer(number, staying[0] if staying else None, self._node)
                raise Refused("NotLeader", f"{self._node} handed partition {number} over first", self._leader(number))
            await self._handover.change_members(partition, members, CHANGE_S)
        except ProposalError as error:
            raise Refused(type(error).__name__, str(error)) from None
        self.record()
        return list(partition.group.status().members)

    def _check_copies(self, number: int, group: Group, members: tuple[str, ...]) -> None:
        """Give up a good replica for a better place only if all that stay have what it has. Raises Refused."""
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
                "Behind", f"partition {number} keeps its replica on {given_up[0]} until {', '.join(behind)} caught up"
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
                logger.exception("the replicas could not be looked after; it is tried again")
                busy = True
            if not busy:
                self.doing = ""
            wait_s = BUSY_S if busy else IDLE_S

    async def _round(self) -> bool:
        """Do what can be done now. Whether there is more to do, or to wait for."""
        busy = await self._change_meta()
        membership = self._membership()
        near = {self._node, *self._connected()}
        if all(next_change(membership, number, ready=near, present=near) is None for number in membership.table):
            return busy
        # A full disk declines every invitation, and would be chosen again and again.
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

    async def _ready(self, names: Collection[str]) -> set[str]:
        async def ask(name: str) -> str | None:
            try:
                async with asyncio.timeout(ASK_S):
                    return name if name == self._node or await self._rpc.ask(name, "ready", None) else None
            except (Unanswered, Refused, TimeoutError):
                return None

        return {name for name in await asyncio.gather(*(ask(name) for name in sorted(names))) if name is not None}

    async def _change(self, number: int, after: tuple[str, ...]) -> None:
        """Ask the partition's leader. What came of it is in the table, or it is tried again."""
        try:
            leader = self._leader(number)
            async with asyncio.timeout(CHANGE_S + ASK_S):
                if leader == self._node:
                    await self._change_here(number, after)
                elif leader is not None:
                    await self._rpc.ask(leader, "change-members", (number, after))
                else:
                    raise Refused("NotLeader", "nobody leads it")
            logger.info("partition %d: its members are %s now", number, ", ".join(after))
            await self._recorded(number, after)
        except (Refused, Unanswered, TimeoutError) as error:
            self.doing = f"partition {number}: members do not become {', '.join(after)} yet: {error}"
            logger.info("%s", self.doing)
            await asyncio.sleep(BUSY_S)
        finally:
            self._changing.pop(number, None)
            self.changed()

    async def _recorded(self, number: int, after: tuple[str, ...]) -> None:
        """Until the table says so: deciding by what was true before would only be refused."""
        for _ in range(50):
            if self._membership().table[number].members == after:
                return
            await asyncio.sleep(0.02)

    async def _change_meta(self) -> bool:
        """One member more or less in the meta group. Whether there was anything to do."""
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
            """A newcomer that was removed meanwhile gets no vote: an operator may have stopped it, seeing that it had none. So
            no entry that removes it may stand before the seal unseen. No safety rests on this: it only delays."""
            status = group.status()
            return comes is None or (status.applied == status.last and self._membership().nodes[comes].state != REMOVED)

        try:
            await group.change_members(tuple(after), META_S, may_seal)
            logger.info("the meta group's members are %s now", ", ".join(after))
        except ProposalError as error:
            self._meta_turn += 1  # Another newcomer may be quicker.
            self.doing += f": not yet: {error}"
            logger.info("%s", self.doing)
        return True
