"""Who leads what, and how leaderships move without anybody noticing: by wish, for balance, off a node that drains or stops.

To hand a partition over, its leader first holds: no new attempt is started, and those that run are asked back. Each ends the
step it is in, and that step is in the log, before it goes; so nothing runs twice. Then the log transfers the leadership to a
replica that has everything, and the new leader starts what should run. If it does not come to that, the old one lets go of the
hold and nothing has happened. A step that takes longer than the hold is not waited for when the node must go: it runs again
elsewhere. For mere balance, the partition stays where it is instead, and another time will be better.

Nodes tell each other what they lead, and whether they are about to stop: whoever stops, drains or has not said a word since it
was connected is given nothing, unless there is nobody else. So two nodes that stop at the same time do not hand back and forth.

They also tell each other whose disk is full. Such a node hands over to whoever has room, and is given nothing until it has
had room for a while. If nobody has room, everybody stays where they are, and clients are told why.
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
from holdfast.statemachine.members import ACTIVE, Membership

logger = logging.getLogger(__name__)

HOLD_S: Final = 0.25  # How long attempts get to hand themselves back before their partition is handed over.
TRANSFER_S: Final = 2.0  # The log gives a transfer up after one election timeout.
LAG_MAX: Final = 64  # Entries that a replica may miss and still be given a partition for balance.
ROUND_S: Final = 3.0  # Between two looks at the balance, and two reminders of what we lead.
BUSY_ROUNDS_MAX: Final = (
    20  # After a hold in vain, a partition is left alone for longer and longer: at most so many looks.
)
ANNOUNCE_S: Final = 0.25  # How long a node that stops waits for the others to take notice.
SETTLED_S: Final = 3.0  # Nothing is moved for balance so soon after a change.
ROOM_S: Final = 0.2  # Between two looks at the disk; the store measures no more often.
ROOMY_S: Final = 5.0  # How long a disk that was full has room before we believe it.
_POLL_S: Final = 0.005


class Handover:
    """One per node. Everything here happens on the loop's thread."""

    def __init__(
        self,
        node: str,
        hosted: Mapping[int, Partition],
        rpc: Rpc,
        *,
        meta_group: Callable[[], Group],
        membership: Callable[[], Membership],
        connected: Callable[[], Collection[str]],
        hint: Callable[[int, str], None],
        no_room: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._node = node
        self._hosted = hosted
        self._rpc = rpc
        self._meta_group = meta_group
        self._membership = membership
        self._connected = connected
        self._hint = hint
        self._no_room = no_room
        #: Called when leaders may have changed.
        self.on_round: Callable[[], None] = lambda: None
        self._led: dict[str, int] = {}  # How many partitions the others lead, as they say.
        self._stopping: set[str] = set()  # Peers that said so, and nothing else since.
        self._busy: dict[int, int] = {}  # Partitions that were held in vain -> how often,
        self._left_alone: dict[int, int] = {}  # and how many more looks they are left alone for.
        self.hurried = 0  # Partitions that were handed over although a step was still running.
        self.full: set[str] = set()  # Nodes without room for more, ourselves among them,
        self._wary: dict[str, float] = {}  # and until when those that were are given nothing for mere balance.
        self._moving: set[int] = set()
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
        """Something that concerns leaders changed: a role, a peer, the nodes."""
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
        """How many partitions a node leads, as it says; None: it says nothing."""
        return len(self.led_here()) if name == self._node else self._led.get(name)

    def _tell(self) -> None:
        led = [partition.number for partition in self.led_here()]
        for peer in self._connected():
            self._tell_one(peer, led)

    def _tell_one(self, peer: str, led: list[int]) -> None:
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
        """Have everybody know that we stop, and know who else does, before anything is handed to anyone."""

        async def ask(peer: str) -> None:
            try:
                async with asyncio.timeout(ANNOUNCE_S):
                    self._note(peer, stops=bool(await self._rpc.ask(peer, "stops", None)))
            except (Refused, Unanswered, TimeoutError):
                pass  # It is as good a choice as before, or has no link to us.

        self._tell()
        await asyncio.gather(*(ask(peer) for peer in list(self._connected())))

    async def _serve_stops(self, peer: str, argument: Any) -> Any:
        """A peer stops. Whether we do, too."""
        self._note(peer, stops=True)
        return self.stops

    # -- room --------------------------------------------------------------------------------------------------------

    def _look_for_room(self) -> None:
        self._room_timer = asyncio.get_running_loop().call_later(ROOM_S, self._look_for_room)
        reason = self._no_room()
        if (reason is not None) is not (self._node in self.full):
            if reason is not None:
                logger.error("this node leads nothing while others have room: %s", reason)
            else:
                logger.info("there is room again on this node")
            self._on_full(self._node, reason is not None)
            self._tell()

    def _on_full(self, name: str, is_full: Any) -> None:
        if is_full is (name in self.full):
            return
        if is_full:
            self.full.add(name)
        else:
            self.full.discard(name)
            # A disk at the edge must not have leaderships move to and fro.
            self._wary[name] = asyncio.get_running_loop().time() + ROOMY_S
        self.changed()

    def outvoted(self, group: Group) -> ProposalError | None:
        """So many members of a group have no room that nothing new would be committed: better say so than have it wait."""
        if not self.full:
            return None
        members = group.status().members
        if self.has_room(members):
            return None
        full = ", ".join(sorted(self.full.intersection(members)))
        return NoRoomHere(f"no majority of {', '.join(members)} takes anything new: no room on {full}")

    def has_room(self, members: Collection[str]) -> bool:
        """Whether so many of these have room that something new would be committed, as far as we know."""
        return 2 * len(self.full.intersection(members)) < len(members)

    # -- moving ------------------------------------------------------------------------------------------------------

    def _heirs(self, group: Group, *, lag_max: int | None = None) -> list[str]:
        """Who may lead instead of us, the most advanced first. If we stop, anybody is better than nobody."""
        status = group.status()
        match: Mapping[Any, int] = status.match
        nodes = self._membership().nodes
        connected = self._connected()
        able: list[str] = [
            name
            for name in status.members
            if name != self._node
            and name in connected
            and name not in self._stopping
            and (lag_max is None or status.last - match.get(name, 0) <= lag_max)
        ]
        able.sort(key=lambda name: (-match.get(name, 0), self._led.get(name, 0), name))
        # Who has not told what it leads is still starting, and would lead without doing anything about it.
        welcome = [
            name
            for name in able
            if name in self._led and name not in self.full and (name not in nodes or nodes[name].state == ACTIVE)
        ]
        return welcome or (able if self.stops else [])

    def _spread(self, group: Group, given: Counter[str]) -> str | None:
        """Of those that miss next to nothing, whoever leads least, with what was `given` to it already."""
        heirs = self._heirs(group, lag_max=LAG_MAX)
        heir = min(heirs, key=lambda name: self._led.get(name, 0) + given[name], default=None)
        if heir is None:
            heir = next(iter(self._heirs(group)), None)
        if heir is not None:
            given[heir] += 1
        return heir

    async def move(self, partition: Partition, to: str, *, patient: bool = False) -> bool:
        """Hand one partition over. Whether another leads it now. `patient`: not while a step is running."""
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
                    logger.info("partition %d: handed over before all its attempts had ended a step", partition.number)
            await self._transfer(group, to)
            if not group.is_leader:
                logger.info("partition %d: handed over to %s", partition.number, group.leader or to)
            return not group.is_leader
        finally:
            self._moving.discard(partition.number)
            if leadership is not None and group.is_leader and partition.leadership is leadership:
                leadership.release()

    async def change_members(self, partition: Partition, members: tuple[str, ...], seconds: float) -> None:
        """Seal a partition that we lead. That begins a new term, so it is held like one that is handed over, from the moment
        on when the newcomer has caught up. Raises ProposalError."""
        hold = _Hold(partition, self._moving)
        try:
            await partition.group.change_members(members, seconds, hold.is_over)
        finally:
            self.hurried += hold.end()

    async def _transfer(self, group: Group, to: str) -> None:
        if group.is_leader and group.transfer(to):
            # If the log gives it up, because the heir died or takes too long, nobody has to be held any longer.
            await _until(lambda: not group.is_transferring if group.is_leader else group.leader is not None, TRANSFER_S)

    async def hand_over_all(self, seconds: float) -> None:
        """Lead nothing any more, if others can: all partitions at once, and again what comes back to us."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while loop.time() < deadline:
            meta = self._meta_group()
            given: Counter[str] = Counter()
            moves = [
                self.move(partition, heir)
                for partition in self.led_here()
                if (heir := self._spread(partition.group, given)) is not None
            ]
            if meta.is_leader and (heirs := self._heirs(meta)):
                moves.append(self._move_meta(meta, heirs[0]))
            if not moves:
                return
            await asyncio.wait([asyncio.ensure_future(move) for move in moves], timeout=deadline - loop.time())
            self._tell()
            await asyncio.sleep(_POLL_S)  # A group whose members change refuses at once, for a moment.

    async def _move_meta(self, group: Group, to: str) -> bool:
        await self._transfer(group, to)
        return not group.is_leader

    async def leave(self, seconds: float) -> None:
        """This node stops: the others are told, and take over."""
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
                await asyncio.sleep(0.02)  # What changes together is told together.
            except TimeoutError:
                pass
            try:
                self.on_round()
                self._tell()
                mine = self._membership().nodes.get(self._node)
                if self.stops:
                    continue
                if self._node in self.full or (mine is not None and mine.state != ACTIVE):
                    await self.hand_over_all(TRANSFER_S)
                elif loop.time() >= self._settled_at:
                    await self._balance()
            except Exception:
                logger.exception("leaderships could not be looked after; it is tried again")

    async def _balance(self) -> None:
        """One partition to a replica that leads two less than we do, or fewer. So it never comes back for the same reason."""
        led = self.led_here()
        for partition in led:
            now = asyncio.get_running_loop().time()
            heirs = [name for name in self._heirs(partition.group, lag_max=LAG_MAX) if now >= self._wary.get(name, 0.0)]
            heir = min(heirs, key=lambda name: (self._led.get(name, 0), name), default=None)
            if heir is None or len(led) - self._led.get(heir, 0) < 2 or self._is_left_alone(partition.number):
                continue
            if await self.move(partition, heir, patient=True):
                self._busy.pop(partition.number, None)
            else:
                times = self._busy[partition.number] = self._busy.get(partition.number, 0) + 1
                self._left_alone[partition.number] = min(2**times, BUSY_ROUNDS_MAX)
            return

    def _is_left_alone(self, number: int) -> bool:
        looks = self._left_alone.pop(number, 0)
        if looks > 1:
            self._left_alone[number] = looks - 1
        return looks > 0

    # -- by wish -----------------------------------------------------------------------------------------------------

    async def transfer(self, number: int, to: str | None, leader: str | None) -> str:
        """Have `to` (or anybody else) lead a partition, wherever it is led now. Who leads it then. Raises ProposalError."""
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
        heirs = self._heirs(group)
        if to == self._node:
            return to
        if to is not None and to not in members:
            raise CannotMove(f"{to} has no replica of partition {partition.number}: {', '.join(members)} have")
        if to is not None and to not in heirs:
            raise CannotMove(f"{to} cannot lead now: it is not connected, or drains, or stops, or its disk is full")
        if not heirs:
            raise CannotMove(f"nobody else can lead partition {partition.number} now")
        if not await self.move(partition, to or heirs[0]):
            raise CannotMove(
                f"partition {partition.number} stayed with {self._node}: {to or heirs[0]} did not take over"
            )
        await _until(lambda: group.leader is not None, TRANSFER_S)
        return group.leader or to or heirs[0]

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
    """Of a partition, while its log waits to be sealed. `is_over` is called in turns of the log, so nothing waits in it."""

    def __init__(self, partition: Partition, moving: set[int]) -> None:
        self._partition = partition
        self._leadership = partition.leadership
        self._moving = moving
        self._loop = asyncio.get_running_loop()
        self._deadline: float | None = None  # None: it has not begun.
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
        """The newcomer fell behind again, so the log asks no more: nobody is held for it. It may ask once more later."""
        self._lapse = None
        self._release()

    def end(self) -> bool:
        """Whatever came of it: go on. Whether a step was running when the log was sealed."""
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
    """Short and rare, so it looks again and again: nobody tells when a role has changed or an attempt has ended."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not condition():
        if loop.time() >= deadline:
            return False
        await asyncio.sleep(_POLL_S)
    return True
