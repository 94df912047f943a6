"""Moves leaderships without disturbing clients: on request, for balance, and off a node that drains or stops.

To hand a partition over, its leader first holds it: no attempt is started, and the running ones are suspended. Each
finishes its current step, which is in the log before the attempt ends, so nothing runs twice. Then the log transfers
the leadership to a replica that has every entry, and the new leader starts the attempts again. If the transfer fails,
the old leader releases the hold, and nothing has happened. If the node must stop, it does not wait for a step that
takes longer than the hold: the step runs again elsewhere. For balance alone, the partition stays and is tried again
later.

Nodes tell each other what they lead, and whether they are stopping. A node that stops, drains, or has not reported
since it connected gets no leadership unless there is no other candidate. So two nodes that stop at the same time do not
hand partitions back and forth.

They also report full disks. A node with a full disk hands over to nodes with free space, and gets no leadership until
it has had space for a while. If no node has space, nothing moves, and clients are told why.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from holdfast.cluster.partition.door import Partition
from holdfast.cluster.peers.rpc import Refused, Rpc, Unanswered
from holdfast.log.errors import NoRoomHere, NotLeader, ProposalError
from holdfast.log.node import Group
from holdfast.sdk.ids import NodeId, PartitionNumber
from holdfast.statemachine.members import ACTIVE, Membership

logger = logging.getLogger(__name__)

HOLD_S: Final = 0.25  # How long attempts have to suspend before their partition is handed over.
TRANSFER_S: Final = 2.0  # The log gives a transfer up after one election timeout.
LAG_MAX: Final = 64  # Entries that a replica may lack and still get a partition for balance.
ROUND_S: Final = 3.0  # Interval of checking the balance and of reporting what we lead.
BUSY_ROUNDS_MAX: Final = (
    20  # After unsuccessful holds, a partition is left alone for more and more rounds, up to this many.
)
ANNOUNCE_S: Final = 0.25  # How long a stopping node waits for its peers to take notice.
SETTLED_S: Final = 3.0  # Nothing is moved for balance this soon after a change.
ROOM_S: Final = 0.2  # Interval of checking the disk; the store measures no more often.
ROOMY_S: Final = 5.0  # How long a disk that was full must have space before we rely on it.
_POLL_S: Final = 0.005


class Handover:
    """One per node. Everything here runs on the event loop's thread."""

    def __init__(
        self,
        node: NodeId,
        hosted: Mapping[PartitionNumber, Partition],
        rpc: Rpc,
        *,
        meta_group: Callable[[], Group],
        membership: Callable[[], Membership],
        connected: Callable[[], Collection[NodeId]],
        hint: Callable[[PartitionNumber, str], None],
        no_room: Callable[[], str | None] = lambda: None,
        on_round: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_round` is called when leaders may have changed, and every few seconds."""
        self._node = node
        self._hosted = hosted
        self._rpc = rpc
        self._meta_group = meta_group
        self._membership = membership
        self._connected = connected
        self._hint = hint
        self._no_room = no_room
        self._on_round = on_round
        self._led: dict[str, int] = {}  # How many partitions each peer says it leads.
        self._stopping: set[str] = set()  # Peers that reported it, and nothing else since.
        self._busy: dict[PartitionNumber, int] = {}  # Partitions with unsuccessful holds -> how many,
        self._left_alone: dict[PartitionNumber, int] = {}  # and for how many more rounds they are left alone.
        self.hurried = 0  # Partitions handed over while a step was still running.
        self.full: set[str] = set()  # Nodes without free space, possibly including us,
        self._wary: dict[str, float] = {}  # and until when recovered nodes get nothing for balance.
        self._moving: set[PartitionNumber] = set()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._room_timer: asyncio.TimerHandle | None = None
        self._settled_at = 0.0
        self.stops = False
        rpc.listen("leads", self._on_leads)
        rpc.listen("full", self._on_full)
        rpc.serve("transfer", self._serve_transfer)
        rpc.serve("stops", self._serve_stops)

    def start(self) -> None:
        self._settled_at = asyncio.get_running_loop().time() + SETTLED_S
        self._task = asyncio.ensure_future(self._run())
        self._look_for_room()

    async def stop(self) -> None:
        if self._room_timer is not None:
            self._room_timer.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def changed(self) -> None:
        """Call it when a role, a peer or the set of nodes changed."""
        self._settled_at = asyncio.get_running_loop().time() + SETTLED_S
        self._changed.set()

    def peer_changed(self, peer: str, *, up: bool) -> None:
        if up:
            self._tell_one(peer, [partition.number for partition in self.led_here()])
        else:
            self._led.pop(peer, None)
            self.full.discard(peer)
        self.changed()

    # -- telling each other ------------------------------------------------------------------------------------------

    def led_here(self) -> list[Partition]:
        return [partition for partition in self._hosted.values() if partition.group.is_leader]

    def leads(self, name: str) -> int | None:
        """How many partitions a node says it leads; None if it has not reported."""
        return len(self.led_here()) if name == self._node else self._led.get(name)

    def _tell(self) -> None:
        led = [partition.number for partition in self.led_here()]
        for peer in self._connected():
            self._tell_one(peer, led)

    def _tell_one(self, peer: str, led: list[PartitionNumber]) -> None:
        self._rpc.tell(peer, "leads", (led, self.stops))
        self._rpc.tell(peer, "full", self._node in self.full)

    def _on_leads(self, peer: str, argument: Any) -> None:
        led, stops = argument
        self._led[peer] = len(led)
        self._note(peer, stops=stops)
        for number in led:
            self._hint(number, peer)

    def _note(self, peer: str, *, stops: bool) -> None:
        if stops:
            self._stopping.add(peer)
        else:
            self._stopping.discard(peer)

    async def _announce(self) -> None:
        """Tell all peers that we stop, and learn which of them stop too, before handing anything over."""

        async def ask(peer: str) -> None:
            try:
                async with asyncio.timeout(ANNOUNCE_S):
                    self._note(peer, stops=bool(await self._rpc.ask(peer, "stops", None)))
            except (Refused, Unanswered, TimeoutError):
                pass  # It is still a candidate, or has no link to us.

        self._tell()
        await asyncio.gather(*(ask(peer) for peer in list(self._connected())))

    async def _serve_stops(self, peer: str, argument: Any) -> Any:
        """A peer stops. Answers whether we do, too."""
        self._note(peer, stops=True)
        return self.stops

    # -- space -------------------------------------------------------------------------------------------------------

    def _look_for_room(self) -> None:
        self._room_timer = asyncio.get_running_loop().call_later(ROOM_S, self._look_for_room)
        reason = self._no_room()
        if (reason is not None) is not (self._node in self.full):
            if reason is not None:
                logger.error("this node hands its partitions over to nodes with free space: %s", reason)
            else:
                logger.info("this node has free space again")
            self._on_full(self._node, reason is not None)
            self._tell()

    def _on_full(self, name: str, is_full: Any) -> None:
        if is_full is (name in self.full):
            return
        if is_full:
            self.full.add(name)
        else:
            self.full.discard(name)
            # A disk that is almost full must not make leaderships move back and forth.
            self._wary[name] = asyncio.get_running_loop().time() + ROOMY_S
        self.changed()

    def outvoted(self, group: Group) -> ProposalError | None:
        """An error if too many members lack space for a new entry to be committed. Failing is better than waiting."""
        if not self.full:
            return None
        members = group.status().members
        if self.has_room(members):
            return None
        full = ", ".join(sorted(self.full.intersection(members)))
        return NoRoomHere(f"no majority of {', '.join(members)} accepts new entries: no space on {full}")

    def has_room(self, members: Collection[str]) -> bool:
        """Whether enough members have space to commit new entries, as far as we know."""
        return 2 * len(self.full.intersection(members)) < len(members)

    # -- moving ------------------------------------------------------------------------------------------------------

    def _successors(self, group: Group, *, lag_max: int | None = None) -> list[NodeId]:
        """The nodes that may lead instead of us, most advanced first. If we stop, any node is better than none."""
        status = group.status()
        match: Mapping[Any, int] = status.match
        nodes = self._membership().nodes
        connected = self._connected()
        able: list[NodeId] = [
            name
            for name in status.members
            if name != self._node
            and name in connected
            and name not in self._stopping
            and (lag_max is None or status.last - match.get(name, 0) <= lag_max)
        ]
        able.sort(key=lambda name: (-match.get(name, 0), self._led.get(name, 0), name))
        # A node that has not reported is still starting, and would lead without carrying out any effects.
        welcome = [
            name
            for name in able
            if name in self._led and name not in self.full and (name not in nodes or nodes[name].state == ACTIVE)
        ]
        return welcome or (able if self.stops else [])

    def _spread(self, group: Group, given: Counter[str]) -> str | None:
        """Of the replicas that lack almost nothing, the node that leads least, including what it was `given` already."""
        successors = self._successors(group, lag_max=LAG_MAX)
        successor = min(successors, key=lambda name: self._led.get(name, 0) + given[name], default=None)
        if successor is None:
            successor = next(iter(self._successors(group)), None)
        if successor is not None:
            given[successor] += 1
        return successor

    async def move(self, partition: Partition, to: str, *, patient: bool = False) -> bool:
        """Hand one partition over. Returns whether another node leads it now. `patient`: not while a step is running."""
        group, leadership = partition.group, partition.leadership
        if partition.number in self._moving:
            return False
        self._moving.add(partition.number)
        try:
            if leadership is not None:
                leadership.hold()
                if not await _until(leadership.quiet, HOLD_S):
                    if patient:
                        return False
                    self.hurried += 1
                    logger.info(
                        "partition %d: handed over before every attempt had finished its step", partition.number
                    )
            await self._transfer(group, to)
            if not group.is_leader:
                logger.info("partition %d: handed over to %s", partition.number, group.leader or to)
            return not group.is_leader
        finally:
            self._moving.discard(partition.number)
            if leadership is not None and group.is_leader and partition.leadership is leadership:
                leadership.release()

    async def change_members(self, partition: Partition, members: tuple[NodeId, ...], seconds: float) -> None:
        """Seal a partition that we lead. Raises ProposalError.

        Sealing begins a new term, so the partition is held as for a handover, once the new member has caught up."""
        hold = _Hold(partition, self._moving)
        try:
            await partition.group.change_members(members, seconds, hold.is_over)
        finally:
            self.hurried += hold.end()

    async def _transfer(self, group: Group, to: str) -> None:
        if group.is_leader and group.transfer(to):
            # If the log gives up, because the next leader died or takes too long, the hold can end.
            await _until(lambda: not group.is_transferring if group.is_leader else group.leader is not None, TRANSFER_S)

    async def hand_over_all(self, seconds: float) -> None:
        """Hand over all partitions at once, if other nodes can lead them, and repeat for any that come back."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while loop.time() < deadline:
            meta = self._meta_group()
            given: Counter[str] = Counter()
            moves = [
                self.move(partition, successor)
                for partition in self.led_here()
                if (successor := self._spread(partition.group, given)) is not None
            ]
            if meta.is_leader and (successors := self._successors(meta)):
                moves.append(self._move_meta(meta, successors[0]))
            if not moves:
                return
            await asyncio.wait([asyncio.ensure_future(move) for move in moves], timeout=deadline - loop.time())
            self._tell()
            await asyncio.sleep(_POLL_S)  # A group whose members are changing refuses immediately.

    async def _move_meta(self, group: Group, to: str) -> bool:
        await self._transfer(group, to)
        return not group.is_leader

    async def leave(self, seconds: float) -> None:
        """This node stops: tell the peers, and hand everything over."""
        self.stops = True
        await self._announce()
        await self.hand_over_all(seconds)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                async with asyncio.timeout(ROUND_S):
                    await self._changed.wait()
                self._changed.clear()
                await asyncio.sleep(0.02)  # Report changes that occur together in one message.
            except TimeoutError:
                pass
            try:
                self._on_round()
                self._tell()
                mine = self._membership().nodes.get(self._node)
                if self.stops:
                    continue
                if self._node in self.full or (mine is not None and mine.state != ACTIVE):
                    await self.hand_over_all(TRANSFER_S)
                elif loop.time() >= self._settled_at:
                    await self._balance()
            except Exception:
                logger.exception("managing leaderships failed; retrying")

    async def _balance(self) -> None:
        """Move one partition to a replica on a node that leads at least two fewer than we do, so that it does not move back."""
        led = self.led_here()
        for partition in led:
            now = asyncio.get_running_loop().time()
            successors = [
                name for name in self._successors(partition.group, lag_max=LAG_MAX) if now >= self._wary.get(name, 0.0)
            ]
            successor = min(successors, key=lambda name: (self._led.get(name, 0), name), default=None)
            if successor is None or len(led) - self._led.get(successor, 0) < 2 or self._is_left_alone(partition.number):
                continue
            if await self.move(partition, successor, patient=True):
                self._busy.pop(partition.number, None)
            else:
                times = self._busy[partition.number] = self._busy.get(partition.number, 0) + 1
                self._left_alone[partition.number] = min(2**times, BUSY_ROUNDS_MAX)
            return

    def _is_left_alone(self, number: PartitionNumber) -> bool:
        looks = self._left_alone.pop(number, 0)
        if looks > 1:
            self._left_alone[number] = looks - 1
        return looks > 0

    # -- on request ---------------------------------------------------------------------------------------------------

    async def transfer(self, number: PartitionNumber, to: str | None, leader: str | None) -> str:
        """Make `to`, or any other node, lead a partition, and return the new leader. Raises ProposalError."""
        partition = self._hosted.get(number)
        if partition is not None and partition.group.is_leader:
            return await self._transfer_here(partition, to)
        if leader is None or leader == self._node:
            raise NotLeader(None)
        try:
            answer: str = await self._rpc.ask(leader, "transfer", (number, to))
        except (Refused, Unanswered) as error:
            raise CannotMove(str(error)) from None
        return answer

    async def _transfer_here(self, partition: Partition, to: str | None) -> str:
        group = partition.group
        members = group.status().members
        successors = self._successors(group)
        if to == self._node:
            return to
        if to is not None and to not in members:
            raise CannotMove(f"{to} has no replica of partition {partition.number}; choose one of {', '.join(members)}")
        if to is not None and to not in successors:
            raise CannotMove(f"{to} cannot lead now: it is disconnected, draining or stopping, or its disk is full")
        if not successors:
            raise CannotMove(f"no other node can lead partition {partition.number} now")
        if not await self.move(partition, to or successors[0]):
            raise CannotMove(
                f"partition {partition.number} stayed with {self._node}: {to or successors[0]} did not take over"
            )
        await _until(lambda: group.leader is not None, TRANSFER_S)
        return group.leader or to or successors[0]

    async def _serve_transfer(self, peer: str, argument: Any) -> Any:
        number, to = argument
        partition = self._hosted.get(number)
        if partition is None or not partition.group.is_leader:
            raise Refused("NotLeader", f"{self._node} does not lead partition {number}")
        try:
            return await self._transfer_here(partition, to)
        except ProposalError as error:
            raise Refused(type(error).__name__, str(error)) from None


class _Hold:
    """Holds a partition while its log waits to be sealed. The log calls `is_over` in its turns, so it must not wait."""

    def __init__(self, partition: Partition, moving: set[PartitionNumber]) -> None:
        self._partition = partition
        self._leadership = partition.leadership
        self._moving = moving
        self._loop = asyncio.get_running_loop()
        self._deadline: float | None = None  # None: not started yet.
        self._poll: asyncio.TimerHandle | None = None
        self._lapse: asyncio.TimerHandle | None = None
        self._hurried = False

    def is_over(self) -> bool:
        leadership, number = self._leadership, self._partition.number
        if leadership is None or self._partition.leadership is not leadership:
            return True
        if self._deadline is None and number not in self._moving:
            self._moving.add(number)
            self._deadline = self._loop.time() + HOLD_S
            self._lapse = self._loop.call_later(2 * HOLD_S, self._let_go)
            leadership.hold()
        if self._deadline is not None:
            self._hurried = self._loop.time() >= self._deadline and not leadership.quiet()
            if self._hurried or leadership.quiet():
                self._stop_lapse()
                return True
        if self._poll is None:
            self._poll = self._loop.call_later(_POLL_S, self._ask_again)
        return False

    def _ask_again(self) -> None:
        self._poll = None
        self._partition.group.nudge()

    def _stop_lapse(self) -> None:
        if self._lapse is not None:
            self._lapse.cancel()
            self._lapse = None

    def _let_go(self) -> None:
        """The new member fell behind again and the log stopped asking, so release the hold. The log may ask again later."""
        self._lapse = None
        self._release()

    def end(self) -> bool:
        """End the hold, whatever the result. Returns whether a step was running when the log was sealed."""
        if self._poll is not None:
            self._poll.cancel()
        self._stop_lapse()
        self._release()
        return self._hurried

    def _release(self) -> None:
        partition, leadership = self._partition, self._leadership
        if self._deadline is not None:
            self._deadline = None
            self._moving.discard(partition.number)
            if leadership is not None and partition.group.is_leader and partition.leadership is leadership:
                leadership.release()


class CannotMove(ProposalError):
    """A leadership stays where it is."""


async def _until(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll for a condition. There is no event for a changed role or an ended attempt, and waits are short and rare."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not condition():
        if loop.time() >= deadline:
            return False
        await asyncio.sleep(_POLL_S)
    return True
