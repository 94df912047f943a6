"""Hosts wired back to back: no thread, no socket, no sleep. Nothing moves unless the test moves it.

A test decides when a message arrives, when a disk has synced, and what time it is. `settle` does all of that until
nothing is left to do. Messages pass through the real codec, disks are `SimDisk`s, and everything above them is the real
code.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from random import Random

from holdfast.log.engine import Engine, Limits, Timing
from holdfast.log.errors import ProposalError
from holdfast.log.group_log import GroupLog
from holdfast.log.host import Host
from holdfast.log.journal import Journal
from holdfast.log.messages import Envelope, GroupId, Message, NodeId, decode, encode
from holdfast.log.replica import Done, Replica, SnapshotWanted
from tests.sim.disk import SimDisk
from tests.sim.machine import SimMachine, SimState

A, B, C, D = NodeId("a"), NodeId("b"), NodeId("c"), NodeId("d")

G = GroupId(1)


class Waiter:
    """A caller, and all the answers that it got."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.answers: list[int | ProposalError] = []

    def __repr__(self) -> str:
        return f"<{self.label}: {self.answers}>"

    @property
    def index(self) -> int | None:
        """Where the command was committed; None without an answer or after an error."""
        assert len(self.answers) <= 1, f"answered twice: {self}"
        answer = self.answers[0] if self.answers else None
        return answer if isinstance(answer, int) else None

    @property
    def error(self) -> ProposalError | None:
        assert len(self.answers) <= 1, f"answered twice: {self}"
        answer = self.answers[0] if self.answers else None
        return answer if isinstance(answer, ProposalError) else None


class Member:
    """One node: its disk and state, which survive it, and the process that runs on it now."""

    def __init__(self, cluster: Cluster, name: NodeId) -> None:
        self.cluster = cluster
        self.name = name
        self.disk = SimDisk(f"disk of {name}")
        self.states: dict[GroupId, SimState] = {}
        self.running: Host | None = None
        self.committing = False

    @property
    def host(self) -> Host:
        assert self.running is not None, f"{self.name} is down"
        return self.running

    def boot(self) -> None:
        self.committing = False

        def send(peer: NodeId, session: int, envelopes: list[Envelope]) -> None:
            self.cluster.wires[self.name, peer].append((session, encode(envelopes)))

        def begin_commit() -> None:
            self.committing = self.disk.begun = True

        self.running = Host(
            node=self.name,
            journal=Journal(self.disk),
            open_machine=lambda group: SimMachine(
                self.states.setdefault(group, SimState()),
                lambda *_: None,
                lambda _: None,
                lambda: self.disk.to_the_last_byte,
            ),
            send=send,
            begin_commit=begin_commit,
            rng=Random(self.name),
            now=self.cluster.now,
            timing=self.cluster.timing,
            limits=self.cluster.limits,
        )


class Cluster:
    """`Cluster("abc")` has three connected nodes that host group 1, without a leader yet."""

    def __init__(
        self,
        names: str = "abc",
        *,
        members: str | None = None,
        groups: Iterable[int] = (1,),
        limits: Limits | None = None,
        timing: Timing | None = None,
    ) -> None:
        self.now = 100.0
        self.timing = timing or Timing(apply=0.0)  # Tests that look at a follower's state need not wait.
        self.limits = limits or Limits()
        self.names = tuple(NodeId(name) for name in names)
        self.wires: defaultdict[tuple[NodeId, NodeId], deque[tuple[int, bytes]]] = defaultdict(deque)
        self.sessions: dict[frozenset[NodeId], int] = {}
        self.wanted: list[tuple[NodeId, SnapshotWanted]] = []
        self._session = 0
        self.members = {name: Member(self, name) for name in self.names}
        first = tuple(NodeId(name) for name in members or names)
        for member in self.members.values():
            member.boot()
            if member.name in first:
                for group in groups:
                    member.host.create(GroupId(group), first)
        for offset, name in enumerate(self.names):
            for other in self.names[offset + 1 :]:
                self.link(name, other)

    # -- looking -----------------------------------------------------------------------------------------------------

    def host(self, name: str) -> Host:
        return self.members[NodeId(name)].host

    def replica(self, name: str, group: int = 1) -> Replica:
        return self.host(name).replicas[GroupId(group)]

    def engine(self, name: str, group: int = 1) -> Engine:
        return self.replica(name, group).engine

    def log(self, name: str, group: int = 1) -> GroupLog:
        return self.replica(name, group).log

    def disk(self, name: str) -> SimDisk:
        return self.members[NodeId(name)].disk

    def machine(self, name: str, group: int = 1) -> SimMachine:
        machine = self.replica(name, group).machine
        assert isinstance(machine, SimMachine)
        return machine

    def applied(self, name: str, group: int = 1) -> list[bytes]:
        return list(self.machine(name, group).state.live.commands)

    def terms(self, name: str, group: int = 1) -> list[int]:
        """The terms of the entries after the base, in order: a log at a glance."""
        log = self.log(name, group)
        return [log.term_of(index) or 0 for index in range(log.base_index + 1, log.last_index + 1)]

    def leaders(self, group: int = 1) -> list[str]:
        return [n for n, m in self.members.items() if m.running is not None and self.engine(n, group).is_leader]

    def waiting(self, sender: str, to: str) -> list[Message]:
        """The messages in transit from one node to another."""
        wire = self.wires[NodeId(sender), NodeId(to)]
        return [envelope.message for _, frame in wire for envelope in decode(frame)]

    # -- moving ------------------------------------------------------------------------------------------------------

    def turn(self, name: str) -> None:
        """Let a node do everything that needs no news from its disk or its peers."""
        member = self.members[NodeId(name)]
        host = member.host
        for _ in range(1000):
            if not host.busy and host.turn_at > self.now:
                break
            host.turn(self.now)
        else:
            raise AssertionError(f"{name} never comes to rest")
        for result in host.results:
            for waiter in result.waiting:
                assert isinstance(waiter, Waiter)
                waiter.answers.append(result.index if isinstance(result, Done) else result.error)
        self.wanted += [(member.name, want) for want in host.wanted]
        host.results, host.wanted, host.role_changes = [], [], []

    def fsync(self, name: str) -> None:
        """The current commit, if any, is durable, and the node learns of it."""
        member = self.members[NodeId(name)]
        if member.committing:
            member.committing = False
            member.disk.commit()
            member.host.committed(self.now)
            self.turn(name)

    def deliver(self, sender: str, to: str, count: int | None = None) -> int:
        """Frames arrive, oldest first, including those of ended sessions. Returns how many."""
        wire = self.wires[NodeId(sender), NodeId(to)]
        done = 0
        while wire and (count is None or done < count):
            session, frame = wire.popleft()
            done += 1
            if self.members[NodeId(to)].running is not None:
                self.host(to).deliver(NodeId(sender), session, decode(frame), self.now)
                self.turn(to)
        return done

    def inject(self, sender: str, to: str, *messages: Message, group: int = 1) -> None:
        """Messages arrive as if `sender` had sent them in the current session."""
        session = self.host(to).sessions[NodeId(sender)]
        epoch = self.replica(to, group).epoch
        frame = encode([Envelope(GroupId(group), epoch, message) for message in messages])
        self.host(to).deliver(NodeId(sender), session, decode(frame), self.now)
        self.turn(to)

    def lose(self, sender: str, to: str) -> list[Message]:
        """Messages in transit never arrive."""
        lost = self.waiting(sender, to)
        self.wires[NodeId(sender), NodeId(to)].clear()
        return lost

    def up(self, names: str | None = None) -> list[NodeId]:
        chosen = self.names if names is None else tuple(NodeId(name) for name in names)
        return [name for name in chosen if self.members[name].running is not None]

    def settle(self, names: str | None = None) -> None:
        """Deliver, sync and turn until nothing is left to do among these nodes. Time stands still."""
        chosen = self.up(names)
        for _ in range(10_000):
            moved = 0
            for name in chosen:
                self.turn(name)
                if self.members[name].committing:
                    self.fsync(name)
                    moved += 1
            for sender in chosen:
                for to in chosen:
                    moved += self.deliver(sender, to) if sender != to else 0
            if not moved:
                return
        raise AssertionError("the cluster never comes to rest")

    def tick(self, name: str) -> None:
        self.host(name).tick(self.now)
        self.turn(name)

    def run(self, seconds: float, names: str | None = None, step: float = 0.05) -> None:
        """Time passes, and everything due happens."""
        for _ in range(round(seconds / step)):
            self.now += step
            for name in self.up(names):
                if self.host(name).wake_at <= self.now:
                    self.tick(name)
                self.turn(name)
            self.settle(names)

    # -- links and processes -----------------------------------------------------------------------------------------

    def link(self, a: str, b: str) -> bool:
        """A new session. False if one of the nodes refuses the other."""
        pair = (NodeId(a), NodeId(b))
        self._session += 1
        self.sessions[frozenset(pair)] = self._session
        accepted = True
        for name, peer in (pair, pair[::-1]):
            accepted &= self.host(name).peer_up(peer, self._session, self.disk(peer).disk_id, self.now)
            self.turn(name)
            self.fsync(name)
        return accepted

    def unlink(self, a: str, b: str) -> None:
        """The session breaks, and both sides see it. Messages in transit may still arrive late."""
        pair = (NodeId(a), NodeId(b))
        session = self.sessions.pop(frozenset(pair), None)
        for name, peer in (pair, pair[::-1]):
            if session is not None and self.members[name].running is not None:
                self.host(name).peer_down(peer, session, self.now)
                self.turn(name)

    def isolate(self, name: str) -> None:
        for other in self.names:
            if other != name:
                self.unlink(name, other)
                self.lose(name, other)
                self.lose(other, name)

    def crash(self, name: str, *, power: bool = False, keep_pending: bool = False) -> None:
        """The process dies; with `power`, the unsynced part of the state is lost too."""
        member = self.members[NodeId(name)]
        member.disk.lose_power(keep_pending=keep_pending)
        member.running = None
        if power:
            for state in member.states.values():
                state.lose_power()
        for other in self.names:
            if other != name:
                self.unlink(name, other)

    def restart(self, name: str, *, link: bool = True) -> None:
        self.members[NodeId(name)].boot()
        for other in self.up() if link else []:
            if other != name:
                self.link(name, other)

    # -- asking ------------------------------------------------------------------------------------------------------

    def propose(self, name: str, command: bytes, group: int = 1) -> Waiter:
        """In this node's next turn."""
        waiter = Waiter(f"propose {command[:20]!r} on {name}")
        self.host(name).propose(GroupId(group), command, waiter)
        return waiter

    def write(self, name: str, command: bytes, names: str | None = None, group: int = 1) -> Waiter:
        """Propose, and let everything that follows happen among `names`."""
        waiter = self.propose(name, command, group)
        self.settle(names)
        return waiter

    def read(self, name: str, group: int = 1) -> Waiter:
        waiter = Waiter(f"read on {name}")
        self.host(name).read(GroupId(group), waiter)
        return waiter

    def change(self, name: str, members: str, seconds: float = 30.0, group: int = 1) -> Waiter:
        waiter = Waiter(f"change to {members} on {name}")
        self.host(name).change_members(GroupId(group), tuple(NodeId(m) for m in members), seconds, waiter)
        return waiter

    def seal(self, name: str, members: str) -> Waiter:
        """Change members until `name` has appended the seal, which no other node and not even its own disk has yet."""
        waiter = self.change(name, members)
        for _ in range(100):
            self.turn(name)
            if self.engine(name).seal_index is not None:
                return waiter
            self.fsync(name)
            self.now += 0.02  # A new node learns of the group with the next heartbeat.
            self.tick(name)
            for peer in self.up():
                if peer != name and self.engine(name).seal_index is None:
                    self.deliver(name, peer)
                    self.fsync(peer)
                    self.deliver(peer, name)
        raise AssertionError(f"{name} does not seal: {waiter}")

    def timeout(self, name: str, group: int = 1) -> None:
        """This node's election timer runs out now."""
        self.engine(name, group)._deadline = self.now
        self.tick(name)

    def elect(self, name: str, names: str | None = None, group: int = 1) -> None:
        """`name` leads. The others must not have a leader."""
        self.timeout(name, group)
        self.settle(names)
        assert self.engine(name, group).is_leader, f"{name} was not elected"

    def install(self, name: str) -> bool:
        """Execute the newest snapshot request of this node, from the peer that offered it."""
        want = [want for asker, want in self.wanted if asker == name][-1]
        saved = self.members[want.peer].states[want.group].durable
        assert (saved.index, saved.term) == (want.index, want.term)
        machine = self.machine(name, want.group)
        done = self.host(name).install(want.group, want.index, want.term, lambda: machine.swap(saved))
        self.turn(name)
        return done


def kinds(c: Cluster, sender: str, to: str) -> list[type]:
    return [type(message) for message in c.waiting(sender, to)]
