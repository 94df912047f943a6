"""Many nodes in one thread: the real host, engine and journal over a virtual clock, network and disk.

Everything random comes from one seeded generator and everything happens through one queue of events, so a seed is a
run: the same twice, byte for byte. After every event the invariants of the node it touched are checked (`oracle.py`).
"""

from __future__ import annotations

import heapq
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

from holdfast.log.engine import Limits, Timing
from holdfast.log.errors import Corrupt, EngineFault
from holdfast.log.host import Host
from holdfast.log.journal import Journal
from holdfast.log.messages import Envelope, GroupId, NodeId, decode, encode
from holdfast.log.replica import Done
from holdfast.log.rows import Rows
from holdfast.log.store import Op
from tests.sim.disk import SimDisk
from tests.sim.machine import SimMachine, SimState
from tests.sim.oracle import Operation, Oracle, Violation


@dataclass(frozen=True)
class Profile:
    """The kind of world of a seed."""

    name: str
    nodes: int = 5
    members: int = 3
    groups: int = 1
    events: int = 600
    loss: float = 0.0
    duplicate: float = 0.0
    reorder: bool = False
    drag: float = 0.0  # Probability that a frame takes seconds although its session lives.
    delay_max: float = 0.02
    fsync_max: float = 0.01
    stall: float = 0.01  # Probability that an fsync takes seconds,
    fail: float = 0.001  # and that it fails.
    lazy: float = 0.1  # Probability that a turn waits for further arrivals.
    together: float = 0.0  # Probability that a write goes to all groups at once.
    late: float = 0.02  # Probability that a copy of a frame arrives long after its session.
    skew: float = 0.1
    limits: Limits = field(default_factory=lambda: Limits(append_bytes_max=120, window_messages=4, entry_bytes_max=120))
    heat: float | None = None  # Frequency of faults; None: every seed draws its own.
    weights: dict[str, int] = field(default_factory=dict)


#: As in production, where few commits here make a row; and so small that every commit makes one, and rows come and go.
ROWS: Final = (
    Rows(),
    Rows(groups_min=1, recent_bytes=400, filed_every=1, retired_max=2, kept_bytes=100, sparse=1, moved_max=1),
    Rows(
        groups_min=1,
        group_bytes_max=100,
        row_bytes_max=200,
        recent_bytes=1500,
        filed_every=3,
        kept_bytes=400,
        sparse=2,
        moved_max=3,
    ),
)


class SimCrash(BaseException):
    """The process died here. Not an Exception: no handler in between may survive it."""


class SimNode:
    def __init__(self, world: World, name: NodeId, number: int) -> None:
        self.world = world
        self.name = name
        self.disk = SimDisk(f"{name}-0")
        self.states: dict[GroupId, SimState] = {}
        self.host: Host | None = None
        self.boots = 0
        self.rate = 1.0
        self.offset = 0.0
        self.paused_until = 0.0
        self.stalled_until = 0.0  # The disk hangs.
        self.failpoint: str | None = None
        self.wiped = False
        self.lost_disk: SimDisk | None = None
        self.lost_states: dict[GroupId, SimState] = {}
        self.armed = 0.0  # When the next tick is due.
        self.checked: dict[
            tuple[NodeId, GroupId], object
        ] = {}  # The oracle's: the checked knowledge of leaders about us.
        self.number = number
        self.forgot: set[GroupId] = set()  # The oracle's: groups whose log this node once deleted.

    def now(self) -> float:
        return self.world.now * self.rate + self.offset

    def reach(self, name: str) -> None:
        """A named place where a process may die."""
        if self.failpoint == name:
            self.failpoint = None
            self.world.counts[f"crash at {name}"] += 1
            raise SimCrash(name)

    def open_machine(self, group: GroupId) -> SimMachine:
        if group in self.forgot:
            self.world.counts["groups that came back"] += 1
        state = self.states.setdefault(group, SimState())
        return SimMachine(
            state,
            lambda saved, entry: self.world.oracle.applied(self.name, group, saved, entry),
            self.reach,
            self.has_no_space,
        )

    def has_no_space(self) -> bool:
        """Called by a state that needs to grow."""
        self.world.counts["applies without space"] += self.disk.to_the_last_byte
        return self.disk.to_the_last_byte

    def boot(self) -> None:
        self.boots += 1
        self.armed = 0.0
        boots = self.boots

        def stage(ops: Sequence[Op]) -> None:
            self.reach("stage.before")
            for kind in self.world.oracle.staged(self, ops):
                self.reach(f"stage.{kind}")

        def begin_commit() -> None:
            self.disk.begun = True
            self.reach("commit.begun")
            self.world.begin_fsync(self, boots)

        def send(peer: NodeId, session: int, envelopes: list[Envelope]) -> None:
            kinds = self.world.oracle.sent(self, peer, envelopes)
            if self.failpoint is not None:
                self.reach("send.before")
                for kind in sorted(kinds):
                    self.reach(f"send.{kind}")
            self.world.transmit(self, peer, session, encode(envelopes))
            self.reach("send.after")

        journal = Journal(self.disk, self.world.rows)
        self.reach("open.journal")
        for group in [group for group in self.states if group not in journal.groups]:
            # The process died after it forgot the group and before it removed its state.
            self.world.after(self.world.rng.uniform(0.0, 0.5), self, lambda g=group: self.world.remove_state(self, g))  # type: ignore[misc]
        self.disk.on_stage = stage
        host = Host(
            node=self.name,
            journal=journal,
            open_machine=self.open_machine,
            send=send,
            begin_commit=begin_commit,
            rng=Random(self.world.rng.getrandbits(32)),
            now=self.now(),
            timing=self.world.timing,
            limits=self.world.profile.limits,
            may_join=lambda group: group not in self.states,
            keep_hollow="hollow" in self.world.profile.weights,
        )
        self.reach("open.replayed")
        for group, members in self.world.founders.items():
            if self.name in members and group not in (*journal.tombstones, *host.hollow):
                host.create(group, members)
        self.host = host
        if host.hollow:
            self.world.counts["hollow groups"] += len(host.hollow)
            self.world.after(0.1, self, lambda: self.world.fill(self))
        else:
            self.lost_states = {} if self.lost_disk is None else self.lost_states
        self.world.after(0.0, self, _nothing)

    def machine(self, group: GroupId) -> SimMachine | None:
        replica = None if self.host is None else self.host.replicas.get(group)
        if replica is None:
            return None
        assert isinstance(replica.machine, SimMachine)
        return replica.machine


class World:
    def __init__(self, seed: int, profile: Profile) -> None:
        self.seed = seed
        self.rows = ROWS[seed // 2 % len(ROWS)]
        self.rng = Random(f"{profile.name}:{seed}")
        self.profile = profile
        self.timing = Timing()
        self.now = 0.0
        self.counts: Counter[str] = Counter()
        self.trace = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self._session = 0
        self.sessions: dict[frozenset[NodeId], int] = {}
        self._last_arrival: dict[tuple[NodeId, NodeId, int], float] = {}
        self.cuts: set[tuple[NodeId, NodeId]] = set()
        self.stalled: set[tuple[NodeId, NodeId]] = set()  # Live connections that deliver nothing for now.
        self.stalled_disks: set[NodeId] = set()
        self.stop_on_failed_fsync = True
        self.names = [NodeId(chr(ord("a") + i)) for i in range(profile.nodes)]
        self.nodes = {name: SimNode(self, name, i) for i, name in enumerate(self.names)}
        self.founders = {GroupId(g): tuple(self.names[: profile.members]) for g in range(1, profile.groups + 1)}
        self.oracle = Oracle(self)
        for node in self.nodes.values():
            node.rate = 1.0 + self.rng.uniform(-profile.skew, profile.skew)
            node.offset = self.rng.uniform(0, 1000)
            self.guarded(node, node.boot)
        self._mend_links()

    # -- time ----------------------------------------------------------------------------------------------------------

    def at(self, when: float, action: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._queue, (when, self._sequence, action))

    def after(self, delay: float, node: SimNode, action: Callable[[], None], *, lazy: bool = False) -> None:
        """Run a function on a node, if the same process still runs then. Lazy: its turn comes later, with further
        arrivals."""
        boots = node.boots

        def event() -> None:
            if node.host is None or node.boots != boots:
                return
            if node.paused_until > self.now:
                self.at(node.paused_until, event)
                return
            self.guarded(node, action, lazy=lazy)

        self.at(self.now + delay, event)

    def guarded(self, node: SimNode, action: Callable[[], None], *, lazy: bool = False) -> None:
        """Run a function on a node, then its turns, then check it."""
        before = None if node.failpoint is None or node.host is None else self._watched(node.host)
        try:
            action()
            host = node.host
            if host is None:
                return
            if lazy:
                self.after(self.rng.uniform(0.0, 0.004), node, _nothing)
                return
            now = node.now()
            for _ in range(200):
                if host.wake_at <= now:
                    host.tick(now)
                if before is not None:
                    before = self._reach_changes(node, before)
                if not host.busy and host.turn_at > now:
                    break
                host.turn(now)
            else:
                raise Violation(f"{node.name} is busy for ever")
            self.oracle.look(node)
            node.reach("answer.before")
            self._take_results(node, host)
            self._arm_tick(node, host)
        except SimCrash:
            if node.host is not None:
                self.oracle.look(node)  # It may have told others what it knew when it died.
            self.crash(node, power=False)
        except (AssertionError, EngineFault, Corrupt, IndexError, KeyError) as error:
            raise Violation(f"{node.name}: {type(error).__name__}: {error}") from error

    @staticmethod
    def _watched(host: Host) -> list[tuple[int, int, bool]]:
        return [(r.log.commit, r.epoch, r.engine.is_leader) for r in host.replicas.values()]

    def _reach_changes(self, node: SimNode, before: list[tuple[int, int, bool]]) -> list[tuple[int, int, bool]]:
        """Places between an event and the turn that reports it, where a process may die."""
        assert node.host is not None
        after = self._watched(node.host)
        for (commit, epoch, led), (now_commit, now_epoch, leads) in zip(before, after, strict=False):
            if now_commit > commit:
                node.reach("commit.advanced")
            if now_epoch > epoch:
                node.reach("epoch.entered")
            if leads and not led:
                node.reach("elected")
        return after

    def _arm_tick(self, node: SimNode, host: Host) -> None:
        due = self.now + min(max(0.0, (min(host.wake_at, host.turn_at) - node.now()) / node.rate), 5.0)
        if self.now < node.armed <= due:
            return
        node.armed = due
        self.after(due - self.now + 1e-6, node, _nothing)

    def step(self) -> bool:
        """One event."""
        if not self._queue:
            return False
        when, sequence, action = heapq.heappop(self._queue)
        self.now = max(self.now, when)
        self.trace = zlib.crc32(b"%.9f %d" % (when, sequence), self.trace)
        action()
        return True

    def run_until(self, when: float) -> None:
        while self._queue and self._queue[0][0] <= when:
            self.step()
        self.now = max(self.now, when)

    # -- disk ----------------------------------------------------------------------------------------------------------

    def begin_fsync(self, node: SimNode, boots: int) -> None:
        delay = self.rng.uniform(0.0001, self.profile.fsync_max)
        if self.rng.random() < self.profile.stall:
            self.counts["fsyncs stalled"] += 1
            delay = self.rng.uniform(0.1, 3.0)
        delay = max(delay, node.stalled_until - self.now)
        fails = self.rng.random() < self.profile.fail
        host = node.host

        def done() -> None:
            # The disk works on while the process is stopped, so this event is the disk's, not the node's.
            if node.host is not host or node.boots != boots:
                return
            if node.name in self.stalled_disks:
                self.at(self.now + 0.005, done)
                return
            if fails:
                # The node stops: a second fsync would report lost pages as written. The content of the disk is unknown.
                self.counts["fsyncs failed"] += 1
                if self.stop_on_failed_fsync:
                    self.crash(node, power=self.rng.random() < 0.5)
                    return
                node.disk.lose_power(keep_pending=False)
            else:
                node.disk.commit()

            def tell() -> None:
                node.reach("commit.done")
                assert node.host is not None
                node.host.committed(node.now())
                node.reach("commit.told")

            self.after(0.0, node, tell)

        self.at(self.now + delay, done)

    # -- network ---------------------------------------------------------------------------------------------------------

    def transmit(self, node: SimNode, peer: NodeId, session: int, frame: bytes) -> None:
        self.counts["frames"] += 1
        self.trace = zlib.crc32(frame, self.trace)
        if (node.name, peer) in self.cuts or self.rng.random() < self.profile.loss:
            self.counts["frames lost"] += 1
            return
        copies = 2 if self.rng.random() < self.profile.duplicate else 1
        for _ in range(copies):
            arrival = self.now + self.rng.uniform(0.0002, self.profile.delay_max)
            if self.rng.random() < self.profile.drag:
                arrival += self.rng.uniform(0.1, 4.0)
            key = (node.name, peer, session)
            if not self.profile.reorder:
                arrival = max(arrival, self._last_arrival.get(key, 0.0) + 1e-7)
                self._last_arrival[key] = arrival
            self.at(arrival, lambda: self._arrive(node.name, peer, session, frame))
        if self.rng.random() < self.profile.late:
            # A closed connection may still deliver: the sender's kernel resends what was never acknowledged.
            self.at(self.now + self.rng.uniform(0.05, 3.0), lambda: self._arrive_late(node.name, peer, session, frame))

    def _arrive_late(self, sender: NodeId, to: NodeId, session: int, frame: bytes) -> None:
        if self.sessions.get(frozenset((sender, to))) != session:
            self.counts["late frames of dead sessions"] += 1
            self._arrive(sender, to, session, frame)

    def _arrive(self, sender: NodeId, to: NodeId, session: int, frame: bytes) -> None:
        """Even when the session is long dead: the host must drop it."""
        if (sender, to) in self.stalled:
            self.at(self.now + 0.005, lambda: self._arrive(sender, to, session, frame))
            return
        if (sender, to) in self.cuts:
            self.counts["frames lost"] += 1
            return
        receiver = self.nodes[to]

        def deliver() -> None:
            host = receiver.host
            assert host is not None
            envelopes = decode(frame)
            dead, dropped = not host.hears(sender, session), host.dropped
            host.deliver(sender, session, envelopes, receiver.now())
            if dead and host.dropped != dropped + len(envelopes):
                raise Violation(f"{to} listens to {sender} of a session that is dead")

        if receiver.host is not None:
            self.after(0.0, receiver, deliver, lazy=self.rng.random() < self.profile.lazy)

    def break_link(self, a: NodeId, b: NodeId) -> None:
        session = self.sessions.pop(frozenset((a, b)), None)
        if session is None:
            return
        self.counts["sessions broken"] += 1
        for x, y in ((a, b), (b, a)):
            node = self.nodes[x]
            if node.host is not None:
                self.after(self.rng.uniform(0, 0.02), node, lambda n=node, y=y: self._down(n, y, session))  # type: ignore[misc]

    @staticmethod
    def _down(node: SimNode, peer: NodeId, session: int) -> None:
        assert node.host is not None
        node.host.peer_down(peer, session, node.now())

    def _mend_links(self) -> None:
        """Peers redial constantly: every possible connection is made sooner or later."""
        for i, a in enumerate(self.names):
            for b in self.names[i + 1 :]:
                pair = frozenset((a, b))
                blocked = (a, b) in self.cuts or (b, a) in self.cuts
                if pair in self.sessions or blocked or self.nodes[a].host is None or self.nodes[b].host is None:
                    continue
                self._session += 1
                self.sessions[pair] = self._session
                for x, y in ((a, b), (b, a)):
                    self.after(self.rng.uniform(0, 0.02), self.nodes[x], self._upper(x, y, self._session))
        self.at(self.now + self.rng.uniform(0.02, 0.1), self._mend_links)

    def _upper(self, x: NodeId, y: NodeId, session: int) -> Callable[[], None]:
        node = self.nodes[x]

        def up() -> None:
            assert node.host is not None
            if self.sessions.get(frozenset((x, y))) != session:
                return
            if not node.host.peer_up(y, session, self.nodes[y].disk.disk_id, node.now()):
                self.counts["wiped disks refused"] += 1
                self.sessions.pop(frozenset((x, y)), None)

        return up

    # -- processes ---------------------------------------------------------------------------------------------------------

    def crash(self, node: SimNode, *, power: bool) -> None:
        if node.host is None:
            return
        self.counts["power losses" if power else "kills"] += 1
        node.disk.lose_power(keep_pending=self.rng.random() < 0.5)
        if power:
            for state in node.states.values():
                state.lose_power()
        self.oracle.stopped(node)
        node.host = None
        node.failpoint = None
        node.stalled_until = 0.0
        for other in self.names:
            if other != node.name:
                self.break_link(node.name, other)

    def boot(self, node: SimNode) -> None:
        if node.host is None:
            node.paused_until = 0.0
            node.disk.full = node.disk.to_the_last_byte = False
            self.guarded(node, node.boot)

    def wipe(self, node: SimNode) -> None:
        """The disk is replaced and the node started under its old name: it has forgotten its promises."""
        assert node.host is None
        self.counts["disks wiped"] += 1
        node.wiped = True
        node.lost_disk, node.lost_states = node.disk, node.states
        node.disk = SimDisk(f"{node.name}-{node.boots}")
        node.states = {}

    # -- clients -----------------------------------------------------------------------------------------------------------

    def leader(self, group: GroupId) -> SimNode | None:
        """A node that believes to lead; the newest epoch and term if there are several."""
        leaders = self.leaders(group)
        return leaders[-1] if leaders else None

    def leaders(self, group: GroupId) -> list[SimNode]:
        """All nodes that believe to lead, the newest last."""
        found = [
            (node.host.replicas[group].epoch, node.host.replicas[group].engine.term, name)
            for name, node in self.nodes.items()
            if node.host is not None and group in node.host.replicas and node.host.replicas[group].engine.is_leader
        ]
        return [self.nodes[name] for _, _, name in sorted(found)]

    def submit(self, node: SimNode, operation: Operation, *, lazy: bool = False) -> None:
        self.oracle.invoked(operation, node)

        def ask() -> None:
            assert node.host is not None
            match operation.kind:
                case "write":
                    node.host.propose(operation.group, operation.command, operation)
                case "read":
                    node.host.read(operation.group, operation)
                case _:
                    node.host.change_members(operation.group, operation.members, 3.0, operation)

        self.after(0.0, node, ask, lazy=lazy)

    def _take_results(self, node: SimNode, host: Host) -> None:
        results, host.results = host.results, []
        for result in results:
            for operation in result.waiting:
                assert isinstance(operation, Operation)
                if isinstance(result, Done):
                    self.oracle.succeeded(operation, result.index, host.replicas[operation.group])
                else:
                    self.oracle.failed(operation, result.error)
        forgotten, host.forgotten = host.forgotten, []
        for group in forgotten:
            self.after(self.rng.uniform(0.0, 0.5), node, lambda g=group: self.remove_state(node, g))  # type: ignore[misc]
        wanted, host.wanted = host.wanted, []
        for want in wanted:
            self.after(self.rng.uniform(0.001, 0.2), node, lambda w=want: self._fetch(node, w.group, w.peer, w.index))  # type: ignore[misc]

    @staticmethod
    def cut(node: SimNode, group: GroupId) -> None:
        machine = node.machine(group)
        if machine is not None and node.host is not None:
            machine.cut_snapshot(node.host.replicas[group].epoch)

    def fill(self, node: SimNode) -> None:
        """A node without its states repeatedly asks another one for a current snapshot."""
        host = node.host
        assert host is not None
        for group, machine in list(host.hollow.items()):
            owner = self.nodes[self.rng.choice(self.names)]
            if owner is not node and owner.machine(group) is not None and owner.paused_until <= self.now:
                self.cut(owner, group)
                saved = owner.states[group].durable
                if saved.index and host.why_not_fill(group, saved.index, saved.term, saved.epoch) is None:
                    assert isinstance(machine, SimMachine)
                    host.fill(group, lambda m=machine, s=saved: m.swap(s))  # type: ignore[misc]
                    self.counts["hollow groups filled"] += 1
                    self.oracle.installed(node.name, group, saved)
        if host.hollow:
            self.after(self.rng.uniform(0.05, 0.3), node, lambda: self.fill(node))
        else:
            node.lost_states = {} if node.lost_disk is None else node.lost_states

    @staticmethod
    def remove_state(node: SimNode, group: GroupId) -> None:
        """The log of the group is gone; its state is removed later, and the group does not return before."""
        assert node.host is not None
        if node.host.is_forgotten(group):
            node.states.pop(group, None)

    def _fetch(self, node: SimNode, group: GroupId, peer: NodeId, index: int) -> None:
        """A follower fetches a snapshot out of band, if its owner still has it; or, as from a store, the newest of any
        node.
        """
        newest = self.rng.random() < 0.3
        owner = self.nodes[self.rng.choice(self.names) if newest else peer]
        state = owner.states.get(group)
        host = node.host
        assert host is not None
        if state is None or (state.durable.index != index and not newest) or (owner.host is None and not newest):
            return
        saved = state.durable
        machine = node.machine(group)
        if machine is not None and host.install(group, saved.index, saved.term, lambda: machine.swap(saved)):
            self.counts["snapshots installed"] += 1
            self.oracle.installed(node.name, group, saved)


def _nothing() -> None: ...
