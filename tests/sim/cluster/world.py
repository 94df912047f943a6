"""Whole clusters in one thread: processes, their machines, the network between them, and virtual time.

All random numbers come from one seeded generator, and all events go through one queue, so a seed determines a run byte for
byte. Nodes draw their random numbers from the same generator (`node.SimEntropy`).
"""

from __future__ import annotations

import gc
import heapq
import logging
import zlib
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager, suppress
from random import Random
from typing import Any, Final, NoReturn
from unittest.mock import patch

from holdfast.cluster.handlers.protocols.native.manifest import read_manifest
from holdfast.cluster.http.exchange import Exchange
from holdfast.cluster.node import Node
from holdfast.cluster.registry.offer import Offer
from holdfast.cluster.snapshotting import keeper
from holdfast.cluster.snapshotting import service as snapshots
from holdfast.cluster.values import janitor
from holdfast.cluster.values import shared_store as objects
from holdfast.log.engine import Timing
from holdfast.log.environment import LinkEvents
from holdfast.log.node import Group
from holdfast.sdk.ids import PartitionNumber
from holdfast.statemachine import blobs
from tests.sim.cluster import steps
from tests.sim.cluster.files import Crashed, Disks, SimState
from tests.sim.cluster.handlers import Handlers
from tests.sim.cluster.loop import Fiber, SimLoop
from tests.sim.cluster.node import T0_MS, SimLinks, node_of, start
from tests.sim.cluster.oracle import Oracle
from tests.sim.cluster.profile import Profile
from tests.sim.cluster.store import SimStore, Vault
from tests.sim.disk import SimDisk
from tests.sim.oracle import Violation

#: A session that carries nothing for this long is broken by the link (`log.connection.LinkLimits.idle_s`).
SILENCE_S: Final = 3.0
#: Minutes and hours of large values, in seconds. They keep their proportions.
QUICK_BLOBS: Final = tuple(
    (module, name, quick, getattr(module, name))
    for module, name, quick in (
        (blobs, "KEPT_MS", 5000),
        (blobs, "KEEP_MS", 2499),
        (janitor, "ORPHAN_MS", 6000),
        (janitor, "SWEEP_S", 0.5),
        (janitor, "FIRST_SWEEP_S", 0.2),
        (objects, "SECOND_LOOK_S", 0.0),
        (objects, "CLOCKS_S", 1.0),
    )
)


class Log(logging.Handler):
    """An error that a node only logs is still an error."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        running = self._world.running
        if running is not None and (not running.up or (running.full and "No space left" in record.getMessage())):
            return
        if record.getMessage().startswith(self._world.excused):
            return
        error = f": {record.exc_info[1]!r}" if record.exc_info else ""
        self._world.violate(f"a node logged: {record.getMessage()}{error}")


class Process:
    """A machine with a disk and a clock, and the node on it, which may be down."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.disk = SimDisk(f"{name}-0")
        self.disk.disk = self.disk.disk_id  # type: ignore[attr-defined]
        self.files = world.disks.of(self)
        self.states: dict[int, SimState] = {}  # Of the current life,
        self.fibers: list[Fiber] = []  # and its threads that wait for something.
        self.tool: Callable[[], Coroutine[Any, Any, None]] | None = None  # A program that runs here instead of a node.
        self.full = False
        self.peers: set[str] = set()  # The peers that it dials, and whose calls it accepts.
        self.is_member = True  # Whether it should be up.
        self.calm = False  # Whether no fault excuses an error that it answers now.
        self.troubled_at = 0.0  # The time of its last disturbance.
        self.wiped: set[int] = set()  # Groups whose snapshots were removed or damaged.
        self.crashing = False
        self._lost_power = False
        self._left: list[SimState] = []
        self._left_fibers: list[Fiber] = []
        self.rate = 1.0 + world.rng.uniform(-world.profile.skew, world.profile.skew)
        self.offset = world.rng.uniform(0, 1000)
        self.wall_off_ms = world.rng.uniform(-world.profile.wall_ms, world.profile.wall_ms)
        self.jumped_ms = 0.0
        self.boots = self.power_losses = 0
        self.paused_until = 0.0
        self.slow_until = 0.0
        self.hears_late_s = 0.0  # The extra delay of the next thread's report.
        self.loop: SimLoop | None = None
        self.loops: list[SimLoop] = []  # The loops of all its lives.
        self.node: Node | None = None
        self.door: Exchange | None = None  # The door for clients, while it serves.
        self.links: SimLinks | None = None
        self.linked = False  # Whether its links are open.
        self.serving = False
        self.on_death: list[Callable[[], None]] = []  # Tells the clients and streams connected to it.

    def now(self) -> float:
        return self.world.now * self.rate + self.offset

    def when(self, local: float) -> float:
        """The world's time at a time of this process."""
        return (local - self.offset) / self.rate

    def wall_ms(self) -> float:
        return T0_MS + self.world.now * 1000 + self.wall_off_ms + self.jumped_ms

    @property
    def up(self) -> bool:
        return self.loop is not None

    def boot(self) -> None:
        assert self.loop is None
        self.clear_up()
        self.disk.lose_power(keep_pending=False)  # A process that died in a turn of its log may have staged something.
        self.boots += 1
        self.paused_until = self.slow_until = self.jumped_ms = 0.0
        loop = self.loop = SimLoop(self)  # type: ignore[abstract]
        self.loops.append(loop)

        def begin() -> None:
            if self.tool is not None:
                loop.create_task(self.tool())
                return
            self.node = node_of(self)
            task = loop.create_task(start(self, self.node))
            task.add_done_callback(started)

        def started(task: Any) -> None:
            error = None if task.cancelled() else task.exception()
            if loop.alive and self.full and isinstance(error, OSError):
                self.world.counts["starts on a full disk"] += 1
                self.kill(power=False)
                self.world.after(0.5, self.boot_if_down)
            elif loop.alive and error is not None:
                self.world.violate(f"{self.name} does not start: {error!r}")

        loop.call_soon(begin)

    def run(self, action: Callable[[], object]) -> None:
        """Run an action in the process if it is up."""
        if self.loop is not None:
            self.loop.call_soon(action)

    def kill(self, *, power: bool) -> None:
        if self.loop is None:
            return
        self.world.counts["power losses" if power else "kills"] += 1
        self.troubled_at = self.world.now
        self.loop.kill()
        self.loop = self.node = self.door = None
        self.linked = self.serving = False
        self.disk.lose_power(keep_pending=self.world.rng.random() < 0.5)
        self._left = list(self.states.values())
        self._left_fibers = self.fibers
        self.states, self.fibers = {}, []
        self._lost_power = power
        self.world.after(0.0, self.clear_up)  # Not now: the killed process may be in the middle of an action.
        self.world.break_links(self)
        bereaved, self.on_death = self.on_death, []
        for tell in bereaved:
            tell()

    def clear_up(self) -> None:
        """Remove what a dead process left behind."""
        fibers, self._left_fibers = self._left_fibers, []
        if fibers:
            self.crashing = True  # Their last writes do not reach the disk.
        for fiber in fibers:
            fiber.end()
        left, self._left = self._left, []
        for each in left:
            each.vanish()
        self.crashing = False
        if self._lost_power:
            self._lost_power = False
            self.power_losses += 1
            self.files.lose_power(self.world.rng)

    def crash(self) -> NoReturn:
        """Die in the middle of the current action."""
        rng = self.world.rng
        self.kill(power=rng.random() < 0.5)
        self.crashing = True
        self.world.after(rng.uniform(0.02, 1.0), self.boot_if_down)
        raise Crashed

    def boot_if_down(self) -> None:
        if not self.up and self.is_member:
            self.boot()

    @property
    def boot_id(self) -> str:
        """The id of the machine's boot: a new one after every start."""
        return f"{self.name}-{self.power_losses}"

    def begin_work(self, work: Callable[[], None]) -> None:
        """Run the work of a thread: at one moment, after a while."""
        world, boots = self.world, self.boots
        delay = world.rng.uniform(0.0005, 0.02)
        if world.chance("threads stalled", world.profile.thread_stall):
            delay = world.rng.uniform(0.1, 1.5)
        if self.slow_until > world.now:
            delay += world.rng.uniform(0.05, 0.5)

        def go() -> None:
            if self.loop is None or self.boots != boots:
                return
            if self.paused_until > world.now:
                world.at(self.paused_until, go)
                return
            with suppress(Crashed):
                self.loop.lend(work)

        world.after(delay, go)

    def begin_fsync(self, done: Callable[[], None]) -> None:
        world, boots = self.world, self.boots
        if self.loop is None:
            return
        self.disk.begun = True
        delay = world.rng.uniform(0.0002, world.profile.fsync_max)
        if world.rng.random() < world.profile.stall and world.is_faulty:
            world.counts["fsyncs stalled"] += 1
            self.troubled_at = world.now + 1.0
            delay = world.rng.uniform(0.05, 1.0)
        if self.slow_until > world.now:
            delay += world.rng.uniform(0.01, 0.2)

        def finish() -> None:
            if self.loop is not None and self.boots == boots:
                self.disk.commit()
                self.loop.call_soon(done)

        world.at(world.now + delay, finish)


def _events(process: Process) -> LinkEvents:
    assert process.links is not None, "it is linked"
    return process.links.events


class Network:
    """Sessions between processes deliver in order and at most once; frames on their way are lost when a session ends."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.sessions: dict[frozenset[str], int] = {}
        self.cuts: set[tuple[str, str]] = set()
        self.slow: dict[tuple[str, str], float] = {}  # Until when a direction is slow.
        self._count = 0
        self._arrivals: dict[tuple[str, int], float] = {}  # (to, session): when the last frame arrives
        self._held: dict[tuple[str, str], list[tuple[int, bytes]]] = {}

    def mend(self) -> None:
        """Dial every missing session, as peers do all the time."""
        world = self.world
        for i, a in enumerate(world.names):
            for b in world.names[i + 1 :]:
                pair = frozenset((a, b))
                blocked = (a, b) in self.cuts or (b, a) in self.cuts
                left, right = world.processes[a], world.processes[b]
                ready = left.linked and right.linked and b in left.peers and a in right.peers
                if pair not in self.sessions and ready and not blocked:
                    self._begin(a, b)
        world.at(world.now + world.rng.uniform(0.02, 0.06), self.mend)

    def _begin(self, a: str, b: str) -> None:
        world = self.world
        self._count += 1
        session = self.sessions[frozenset((a, b))] = self._count
        for x, y in ((a, b), (b, a)):
            process = world.processes[x]
            arrival = self._arrivals[x, session] = world.now + world.rng.uniform(0.0005, 0.01)
            node, disk = process.node, world.processes[y].disk.disk_id
            assert node is not None
            world.at(arrival, lambda p=process, y=y, n=node, d=disk: self._tell_up(p, n, y, session, d))  # type: ignore[misc]

    def _tell_up(self, process: Process, node: Node, peer: str, session: int, disk: str) -> None:
        if self.sessions.get(frozenset((process.name, peer))) == session and process.node is node:
            process.run(lambda: _events(process).up(peer, session, disk))

    def break_session(self, a: str, b: str) -> None:
        session = self.sessions.pop(frozenset((a, b)), None)
        if session is None:
            return
        world = self.world
        world.counts["sessions broken"] += 1
        for x, y in ((a, b), (b, a)):
            if world.processes[x].up and world.processes[y].up:
                world.processes[x].troubled_at = world.now
            self._held.pop((x, y), None)
            process = world.processes[x]
            node = process.node
            if node is not None:
                # Frames that arrived before the end are reported before it.
                when = max(world.now + world.rng.uniform(0, 0.01), self._arrivals.get((x, session), 0.0) + 1e-6)
                when = min(when, world.now + 0.05)
                world.at(when, lambda p=process, n=node, y=y: self._tell_down(p, n, y, session))  # type: ignore[misc]

    @staticmethod
    def _tell_down(process: Process, node: Node, peer: str, session: int) -> None:
        if process.node is node:
            process.run(lambda: _events(process).down(peer, session))

    def transmit(self, sender: str, to: str, session: int, frame: bytes) -> None:
        world = self.world
        # Errors may name files, and the place of the simulated disks depends on the machine, not on the seed.
        world.trace = zlib.crc32(frame.replace(world.disks.root_bytes, b""), world.trace)
        world.counts["frames"] += 1
        if self.sessions.get(frozenset((sender, to))) != session:
            return
        if (sender, to) in self.cuts:
            self._held.setdefault((sender, to), []).append((session, frame))
            return
        delay = world.rng.uniform(0.0002, world.profile.delay_max)
        if self.slow.get((sender, to), 0.0) > world.now:
            delay += world.rng.uniform(0.02, 0.25)
        arrival = max(world.now + delay, self._arrivals[to, session] + 1e-7)
        self._arrivals[to, session] = arrival
        world.at(arrival, lambda: self._arrive(sender, to, session, frame))

    def _arrive(self, sender: str, to: str, session: int, frame: bytes) -> None:
        process = self.world.processes[to]
        node = process.node
        if self.sessions.get(frozenset((sender, to))) != session or node is None:
            return
        if (sender, to) in self.cuts:
            self._held.setdefault((sender, to), []).append((session, frame))
            return
        process.run(lambda: deque(_events(process).frame(sender, session, frame) or (), maxlen=0))

    def cut(self, directions: list[tuple[str, str]], seconds: float) -> None:
        """Let nothing through for a while. A short cut delays frames; one longer than the link's timeout ends the session."""
        world = self.world
        new = [direction for direction in directions if direction not in self.cuts]
        self.cuts.update(new)

        def break_them() -> None:
            for sender, to in new:
                if (sender, to) in self.cuts:
                    self.break_session(sender, to)

        if seconds > SILENCE_S:
            world.at(world.now + SILENCE_S, break_them)
        elif world.rng.random() < 0.5:  # A reset, instead of silence.
            world.at(world.now + world.rng.uniform(0, seconds), break_them)
        world.at(world.now + seconds, lambda: self.join(new))

    def join(self, directions: list[tuple[str, str]]) -> None:
        for direction in directions:
            self.cuts.discard(direction)
            held = self._held.pop(direction, [])
            for session, frame in held:
                self.transmit(*direction, session, frame)


class World:
    def __init__(self, seed: int, profile: Profile) -> None:
        self.seed = seed
        self.profile = profile
        self.rng = Random(f"cluster:{profile.name}:{seed}")
        self.nonces = Random()  # For unique ids and numbers; seeded in `determined`,
        self.tokens = Random(f"tokens:{seed}")  # and for parts of names of files and backups.
        self.now = 0.0
        self.trace = 0
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []
        self.is_faulty = True
        self.timing = Timing()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self.running: Process | None = None  # The process whose code runs now,
        self.fiber: Fiber | None = None  # and the thread, if it is one of its threads.
        self.era = 0  # The number of clusters lost so far.
        #: The beginnings of errors that nodes may log.
        self.excused: tuple[str, ...] = ("this node hands its partitions over to nodes with free space",)
        self.disks = Disks(self)
        self.store = SimStore(self)
        self.vault = Vault(self)
        self.names = [f"n{number}" for number in range(1, profile.nodes + 1)]
        self.founders = self.names[: profile.nodes - profile.joiners]
        self.processes = {name: Process(self, name) for name in self.names}
        for name in self.names[len(self.founders) :]:
            self.processes[name].is_member = False
        self.network = Network(self)
        self.handlers = Handlers(self)
        self.oracle = Oracle(self)
        self.network.mend()
        self.look()

    # -- time ----------------------------------------------------------------------------------------------------------

    def at(self, when: float, action: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._queue, (when, self._sequence, action))

    def after(self, delay: float, action: Callable[[], None]) -> None:
        self.at(self.now + delay, action)

    def run_until(self, when: float, *, done: Callable[[], bool] = lambda: False) -> bool:
        """Run events until then. True: it is done. Raises Violation."""
        queue = self._queue
        looked = self.now
        while queue and queue[0][0] <= when:
            at, sequence, action = heapq.heappop(queue)
            if at > self.now:
                self.now = at
            self.trace = zlib.crc32(b"%.9f %d" % (at, sequence), self.trace)
            action()
            if self.violations:
                raise Violation(self.violations[0])
            if self.now > looked + 0.05:
                looked = self.now
                if done():
                    return True
        self.now = max(self.now, when)
        return done()

    def chance(self, name: str, probability: float) -> bool:
        """Whether a random fault occurs now."""
        happens = self.is_faulty and probability > 0 and self.rng.random() < probability
        if happens:
            self.counts[name] += 1
        return happens

    def violate(self, what: str) -> None:
        self.violations.append(f"at {self.now:.3f} s: {what}")

    # -- processes -----------------------------------------------------------------------------------------------------

    def break_links(self, process: Process) -> None:
        for other in self.names:
            if other != process.name:
                self.network.break_session(process.name, other)

    def living(self) -> list[Process]:
        return [process for process in self.processes.values() if process.up]

    def serving(self) -> list[Process]:
        return [process for process in self.processes.values() if process.serving]

    def members(self) -> list[Process]:
        """The processes that must be up in the end."""
        return [process for process in self.processes.values() if process.is_member]

    def replace_machines(self, names: list[str]) -> None:
        """Lose all machines for ever, at this moment, and get new ones on which nothing runs."""
        for process in self.members():
            process.is_member = False
            process.kill(power=True)
        self.era += 1
        self.names = self.founders = names
        self.processes |= {name: Process(self, name) for name in names}

    # -- trouble -------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Note again and again which nodes are disturbed. The code that causes a short disturbance notes it itself."""
        self.after(0.05, self.look)
        able = []
        for process in self.processes.values():
            now = self.now
            is_slow = process.slow_until > now or process.paused_until > now
            if not process.serving or is_slow or process.full:
                process.troubled_at = now
            else:
                able.append(process.name)
        network = self.network
        for i, a in enumerate(able):
            for b in able[i + 1 :]:
                cut = any(d in network.cuts or network.slow.get(d, 0.0) > self.now for d in ((a, b), (b, a)))
                if cut or frozenset((a, b)) not in network.sessions:
                    self.processes[a].troubled_at = self.processes[b].troubled_at = self.now

    def is_calm(self, process: Process, since: float) -> bool:
        """Whether a node was undisturbed since then, and so were all others but one: any three replicas had a majority."""
        members = self.members()
        others = [other for other in members if other is not process and other.troubled_at >= since]
        return process.troubled_at < since and len(others) <= (len(members) > 2)

    @staticmethod
    def hosts(process: Process, number: int) -> bool:
        """Whether a replica of the partition belongs on this node, as far as the node knows."""
        node = process.node
        if not process.is_member:
            return False
        if node is None or not process.serving:
            return True
        replicas = node.ground.meta.state.membership.table.get(PartitionNumber(number))
        return replicas is not None and process.name in replicas.members

    async def discover(self, uri: str) -> Offer:
        """The answer of the endpoint at `uri` to discovery."""
        return read_manifest(self.handlers.manifest(uri))

    def _trimming(self, trim: Callable[[Group, int], None]) -> Callable[[Group, int], None]:
        def watched(group: Group, index: int) -> None:
            assert self.running is not None
            self.oracle.about_to_trim(self.running, group.id, index)
            trim(group, index)

        return watched

    @contextmanager
    def determined(self) -> Iterator[None]:
        """The environment of nodes depends only on the seed (`node.SimEnvironment`). This sets up the rest: what the
        oracle watches, where processes die, and periods of minutes and hours that take seconds.
        """
        self.nonces = Random(self.rng.getrandbits(64))
        log = Log(self)
        root = logging.getLogger("holdfast")
        propagate = root.propagate
        with ExitStack() as stack:
            for module in (keeper, snapshots):
                stack.enter_context(patch.object(module, "TICK_S", 0.1))
            if self.profile.stored:
                for module, name, quick, usual in QUICK_BLOBS:
                    if getattr(module, name) == usual:  # A mutant may have replaced it.
                        stack.enter_context(patch.object(module, name, quick))
            stack.enter_context(patch.object(Group, "trim", self._trimming(Group.trim)))
            stack.enter_context(steps.watched(self))
            stack.enter_context(self.disks.watched())
            root.addHandler(log)
            root.propagate = False
            gc.disable()  # A random allocation must not end the coroutines of killed processes.
            try:
                yield
            finally:
                self.is_faulty = False
                logging.disable()  # Messages of dead processes during the cleanup.
                for process in self.processes.values():
                    for loop in process.loops:
                        loop.bury()
                    process.clear_up()
                    for fiber in list(process.fibers):
                        fiber.end()
                    for each in process.states.values():
                        each.vanish()
                logging.disable(logging.NOTSET)
                root.removeHandler(log)
                self.disks.remove()
                gc.enable()
                root.propagate = propagate
