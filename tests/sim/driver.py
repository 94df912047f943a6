"""The profiles of simulated worlds, and the driver that draws the next event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Final

from holdfast.log.engine import Limits
from holdfast.log.errors import Corrupt
from holdfast.log.messages import GroupId, NodeId
from holdfast.log.records import COMMITS, FILED, HARD, PINS, TOMBSTONES, table_of
from holdfast.log.rows import RECENT, place_in
from tests.sim.oracle import Hard, Operation, Violation
from tests.sim.world import Profile, SimCrash, SimNode, World

#: Places where a process may die. All of them touch the outside world; between two of them, a crash makes no observable
#: difference.
FAILPOINTS: Final = (
    "stage.before",
    "stage.entries",
    "stage.row",
    "stage.file",
    "stage.filed",
    "stage.move",
    "stage.retire",
    "stage.truncate",
    "stage.vote",
    "stage.epoch",
    "stage.trim",
    "stage.install",
    "stage.create",
    "stage.forget",
    "stage.return",
    "stage.pin",
    "commit.begun",
    "commit.done",
    "commit.told",
    "commit.advanced",
    "send.before",
    "send.after",
    "send.Append",
    "send.AppendAck",
    "send.AppendAcks",
    "send.Appends",
    "send.AppendReject",
    "send.Heartbeat",
    "send.HeartbeatAck",
    "send.PreVote",
    "send.RequestVote",
    "send.Vote",
    "send.TimeoutNow",
    "send.Offer",
    "send.Config",
    "elected",
    "epoch.entered",
    "apply.before",
    "apply.between",
    "apply.after",
    "answer.before",
    "snapshot.before",
    "snapshot.after",
    "trim.before",
    "trim.after",
    "install.before",
    "install.between",
    "install.after",
)
OPENING: Final = ("open.journal", "open.replayed")

#: Relative frequencies of events. Those above `kill` are work; the others are faults, with a frequency that each seed
#: draws: a cluster with constant faults commits too little to lose.
WORK: Final = {"write": 300, "read": 60, "boot": 60, "heal": 40, "snapshot": 20, "trim": 15, "forget": 0}
FAULTS: Final = {
    "kill": 6,
    "power": 3,
    "blackout": 1,
    "break": 12,
    "cut": 5,
    "one_way": 5,
    "isolate": 5,
    "split": 3,
    "ring": 1,
    "pause": 5,
    "failpoint": 20,
    "transfer": 6,
    "change": 8,
    "attack": 0,
    "full": 3,
    "hang": 3,
    "skew": 3,
    "jump": 1,
    "wipe": 0,
    "corrupt": 0,
    "usurp": 0,
    "hollow": 0,
}
HEATS: Final = (0.15, 0.5, 1.0)

PROFILES: Final = {
    profile.name: profile
    for profile in (
        Profile("plain"),
        Profile("three", nodes=3, weights={"change": 2}),
        Profile("five", nodes=5, members=5, weights={"change": 2}),
        Profile("two-groups", groups=2, events=500),
        Profile("four-groups", nodes=3, groups=4, events=400, together=0.8, weights={"change": 2, "write": 600}),
        Profile("lossy", loss=0.02, delay_max=0.05),
        Profile("hostile", members=5, loss=0.02, duplicate=0.05, reorder=True, delay_max=0.3, weights={"change": 2}),
        Profile("slow-disk", fsync_max=0.2, stall=0.05, fail=0.01),
        Profile(
            "calm", weights={"kill": 1, "power": 1, "blackout": 0, "cut": 2, "isolate": 1, "failpoint": 2, "break": 60}
        ),
        Profile("movers", members=2, weights={"change": 40, "kill": 4}),
        Profile("leavers", nodes=5, weights={"change": 60, "forget": 60, "boot": 100, "kill": 10}),
        Profile(
            "hollow",
            nodes=4,
            heat=1.0,
            weights={
                "hollow": 60,
                "change": 60,
                "snapshot": 80,
                "trim": 80,
                "kill": 40,
                "boot": 80,
                "forget": 20,
                "failpoint": 5,
                "blackout": 0,
            },
        ),
        Profile("sealing", nodes=4, fsync_max=0.05, weights={"attack": 60, "change": 0, "snapshot": 40, "trim": 40}),
        Profile("snapshots", weights={"snapshot": 60, "trim": 60, "isolate": 20, "split": 10}),
        Profile("wide", limits=Limits(), weights={"write": 150}),
        Profile("wipes", nodes=6, members=5, weights={"wipe": 10, "change": 12, "kill": 20}),
        Profile("corruption", nodes=3, weights={"corrupt": 60, "kill": 20, "change": 0}),
        Profile(
            "storm", members=5, loss=0.05, duplicate=0.1, reorder=True, delay_max=0.8, weights={"change": 2, "cut": 0}
        ),
        Profile("usurpers", members=5, heat=1.0, weights={"usurp": 80, "change": 0, "read": 200, "heal": 15}),
        Profile(
            "drag",
            members=5,
            reorder=True,
            drag=0.05,
            heat=1.0,
            weights={"usurp": 60, "transfer": 100, "change": 0, "blackout": 0},
        ),
        Profile(
            "hermits",
            nodes=3,
            members=1,
            fsync_max=0.05,
            weights={"change": 80, "forget": 40, "kill": 12, "failpoint": 60},
        ),
        # The scripts of scripts.py, without other faults.
        Profile("older-terms", members=5, stall=0, fail=0, skew=0.02),
        Profile("late-acks", members=5, stall=0, fail=0, skew=0.02),
        Profile("stale-reads", nodes=4, stall=0, fail=0, skew=0.02),
        Profile("two-epochs", nodes=4, stall=0, fail=0, skew=0.02),
        Profile("stray-snapshots", nodes=4, stall=0, fail=0, skew=0.02),
        Profile("hasty-installs", nodes=4, stall=0, fail=0, skew=0.02),
        Profile("last-witness", nodes=3, members=1, stall=0, fail=0),
        Profile("lost-member", nodes=3, members=2, stall=0, fail=0),
        Profile("reads-at-the-seal", nodes=4, stall=0, fail=0),
        Profile("steady", events=20),
    )
}


class Driver:
    """Draws the next event."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = world.rng
        self.number = 0
        self.over = False
        heat = world.profile.heat or self.rng.choice(HEATS)
        weights: dict[str, float] = dict(WORK)
        weights |= {name: weight * heat for name, weight in FAULTS.items()}
        weights |= {n: weight * (heat if n in FAULTS else 1) for n, weight in world.profile.weights.items()}
        self.names, self.weights = list(weights), list(accumulate(weights.values()))
        for node in world.nodes.values():
            if self.rng.random() < 0.02:
                node.failpoint = "stage.pin"  # Only the first sessions of a life get here.

    def drive(self) -> None:
        for _ in range(self.world.profile.events):
            self.world.run_until(self.world.now + self.rng.expovariate(1 / 0.02))
            (name,) = self.rng.choices(self.names, cum_weights=self.weights)
            getattr(self, f"do_{name}")()
        self.over = True

    def up(self) -> list[SimNode]:
        return [node for node in self.world.nodes.values() if node.host is not None]

    def any_node(self) -> SimNode:
        return self.rng.choice(list(self.world.nodes.values()))

    def group(self) -> GroupId:
        return self.rng.choice(list(self.world.founders))

    def some_node(self, group: GroupId) -> SimNode | None:
        """Mostly the leader, sometimes any node, often a deposed leader that does not know it yet."""
        leaders = self.world.leaders(group)
        draw = self.rng.random()
        if leaders and draw < 0.9:
            return leaders[-1] if draw < 0.7 else self.rng.choice(leaders)
        up = self.up()
        return self.rng.choice(up) if up else None

    def victim(self) -> SimNode:
        """Faults hit leaders more often than others, because leaders make promises."""
        leader = self.world.leader(self.group())
        return leader if leader is not None and self.rng.random() < 0.4 else self.any_node()

    def operation(self, group: GroupId, kind: str) -> Operation:
        self.number += 1
        return Operation(self.number, group, kind, command=b"<%d:%d>" % (self.world.seed, self.number))

    def do_write(self) -> None:
        groups = [self.group()]
        node = self.some_node(groups[0])
        if node is None:
            return
        times = self.rng.choice((1, 1, 2, 6))
        if self.world.profile.together and self.rng.random() < self.world.profile.together:
            groups, times = list(self.world.founders), 1  # An entry in each, in one turn, where the node leads them.
        for group in groups:
            for _ in range(times):
                operation = self.operation(group, "write")
                operation.command += b"x" * self.rng.choice((0, 10, 40))
                self.world.submit(node, operation, lazy=len(groups) > 1)

    def do_read(self) -> None:
        group = self.group()
        node = self.some_node(group)
        if node is not None:
            self.world.submit(node, self.operation(group, "read"))

    def do_kill(self) -> None:
        self.world.crash(self.victim(), power=False)

    def do_power(self) -> None:
        self.world.crash(self.victim(), power=True)

    def do_blackout(self) -> None:
        self.world.counts["blackouts"] += 1
        for node in self.world.nodes.values():
            self.world.crash(node, power=True)

    def do_boot(self) -> None:
        for node in self.world.nodes.values():
            if node.host is None and self.rng.random() < 0.7:
                self.world.boot(node)

    def pair(self) -> tuple[NodeId, NodeId]:
        a, b = self.rng.sample(self.world.names, 2)
        return a, b

    def do_break(self) -> None:
        self.world.break_link(*self.pair())

    def cut(self, a: NodeId, b: NodeId, *, noticed: bool) -> None:
        self.world.counts["cuts"] += 1
        self.world.cuts.add((a, b))
        if noticed:
            self.world.break_link(a, b)

    def do_cut(self) -> None:
        a, b = self.pair()
        noticed = self.rng.random() < 0.5
        self.cut(a, b, noticed=noticed)
        self.cut(b, a, noticed=noticed)

    def do_one_way(self) -> None:
        self.cut(*self.pair(), noticed=self.rng.random() < 0.2)

    def do_isolate(self) -> None:
        self.isolate(self.victim().name)

    def isolate(self, node: NodeId, *, noticed_chance: float = 0.5) -> None:
        noticed = self.rng.random() < noticed_chance
        for other in self.world.names:
            if other != node:
                self.cut(node, other, noticed=noticed)
                self.cut(other, node, noticed=noticed)

    def do_usurp(self) -> None:
        """Cut a leader off just after its election, and let it return soon: leaders with entries of their own."""
        leader = self.world.leader(self.group())
        if leader is None:
            return
        name, before = leader.name, set(self.world.cuts)

        def strike() -> None:
            self.isolate(name, noticed_chance=0.9)  # The others continue at once.
            self.world.at(self.world.now + self.rng.uniform(0.02, 0.6), back)

        def back() -> None:
            self.world.cuts -= {cut for cut in self.world.cuts if name in cut and cut not in before}

        self.world.at(self.world.now + self.rng.uniform(0.0, 0.03), self.unless_over(strike))

    def do_split(self) -> None:
        """Two sides that cannot reach each other."""
        side = {name for name in self.world.names if self.rng.random() < 0.5}
        noticed = self.rng.random() < 0.5
        for a in self.world.names:
            for b in self.world.names:
                if (a in side) != (b in side):
                    self.cut(a, b, noticed=noticed)

    def do_ring(self) -> None:
        """Each node talks to its neighbours only."""
        names = list(self.world.names)
        self.rng.shuffle(names)
        for i, a in enumerate(names):
            for j, b in enumerate(names):
                if i != j and (i - j) % len(names) not in (1, len(names) - 1):
                    self.cut(a, b, noticed=False)

    def do_heal(self) -> None:
        self.world.cuts.clear()

    def do_pause(self) -> None:
        self.pause(self.victim())

    def pause(self, node: SimNode) -> None:
        self.world.counts["pauses"] += 1
        node.paused_until = self.world.now + self.rng.uniform(0.05, 3.0)

    def do_failpoint(self) -> None:
        node = self.victim()
        node.failpoint = self.rng.choice(OPENING if node.host is None else FAILPOINTS)

    def do_snapshot(self) -> None:
        node, group = self.any_node(), self.group()
        machine = node.machine(group)
        if machine is not None:
            self.world.counts["snapshots cut"] += 1
            self.world.guarded(node, lambda: self.world.cut(node, group))

    def do_trim(self) -> None:
        node, group = self.any_node(), self.group()
        replica = None if node.host is None else node.host.replicas.get(group)
        if replica is None:
            return
        snapshot = replica.machine.snapshot()
        if snapshot is not None:
            self.world.counts["trims"] += 1
            index = min(snapshot.index, replica.applied) - self.rng.choice((0, 0, 3, 20))

            def trim() -> None:
                node.reach("trim.before")
                replica.trim(index)
                node.reach("trim.after")

            if index > 0:
                self.world.guarded(node, trim)

    def do_transfer(self) -> None:
        group = self.group()
        leader = self.world.leader(group)
        if leader is not None and leader.host is not None:
            peers = leader.host.replicas[group].engine.peers
            if peers:
                self.world.counts["transfers"] += 1
                to = self.rng.choice(peers)
                host = leader.host
                self.world.after(0.0, leader, lambda: void(host.transfer(group, to)))

    def do_change(self) -> None:
        group = self.group()
        leader = self.world.leader(group)
        if leader is None or leader.host is None:
            return
        members = set(leader.host.replicas[group].engine.members)
        spare = sorted(name for name in set(self.world.names) - members if not self.world.nodes[name].wiped)
        wiped = sorted(name for name in members if self.world.nodes[name].wiped)
        leave = self.rng.choice(wiped or sorted(members))
        kinds = ["replace" if spare else "remove", "add" if spare else "remove", "remove"]
        if {
            "wipe",
            "hollow",
        } & self.world.profile.weights.keys():  # A group that shrinks and loses a disk may lose its majority for good.
            kinds = ["replace"] if spare else []
        if not kinds:
            return
        kind = self.rng.choice(kinds)
        if kind != "add" and (len(members) > 1 or kind == "replace"):
            members.discard(leave)
        if kind != "remove":
            members.add(self.rng.choice(spare))
        operation = self.operation(group, "change")
        operation.members = tuple(sorted(members))
        self.world.submit(leader, operation)

    def do_forget(self) -> None:
        """Delete the log of a group that continued without this node."""
        left = [
            (node, group)
            for node in self.up()
            for group, replica in (node.host.replicas.items() if node.host is not None else ())
            if replica.is_left_over
        ]
        if not left:
            return
        node, group = self.rng.choice(left)
        if self.rng.random() < 0.2:
            node.failpoint = self.rng.choice(("stage.forget", "commit.begun", "commit.told", "stage.return"))
        self.forget(node, group)

    def forget(self, node: SimNode, group: GroupId) -> None:
        def forget() -> None:
            assert node.host is not None
            if node.host.forget(group):
                self.world.counts["groups forgotten"] += 1
                self.world.oracle.forgot(node, group)

        self.world.after(0.0, node, forget)

    def do_attack(self) -> None:
        """Replace a member, with a fault at a random moment of it: the old and the new majority may be disjoint."""
        group = self.group()
        leader = self.world.leader(group)
        if leader is None or leader.host is None:
            return
        members = leader.host.replicas[group].engine.members
        spare = [name for name in self.world.names if name not in members]
        if len(members) < 3 and spare:
            after = {*members, self.rng.choice(spare)}
        elif spare:
            after = {*members, self.rng.choice(spare)} - {self.rng.choice(members)}
        else:
            after = set(members) - {self.rng.choice(members)}
        operation = self.operation(group, "change")
        operation.members = tuple(sorted(after))
        self.world.submit(leader, operation)
        strikes = [
            lambda: self.isolate(leader.name),
            lambda: self.hang(leader),
            lambda: self.pause(leader),
            lambda: self.world.crash(leader, power=False),
            self.do_split,
            self.do_split,
            lambda: self.isolate(self.rng.choice(sorted(after))),
        ]
        for _ in range(self.rng.choice((1, 1, 2))):
            self.world.at(self.world.now + self.rng.uniform(0.0, 0.25), self.unless_over(self.rng.choice(strikes)))

    def unless_over(self, strike: Callable[[], None]) -> Callable[[], None]:
        return lambda: None if self.over else strike()

    def do_full(self) -> None:
        self.world.counts["disks full"] += 1
        node = self.victim()
        node.disk.full = True
        node.disk.to_the_last_byte = self.rng.random() < 0.5

        def free() -> None:
            node.disk.full = node.disk.to_the_last_byte = False

        self.world.at(self.world.now + self.rng.uniform(0.1, 2.0), free)

    def do_skew(self) -> None:
        """Clocks run faster or slower; a monotonic clock never goes back."""
        node = self.any_node()
        before = node.now()
        node.rate = 1.0 + self.rng.uniform(-2 * self.world.profile.skew, 2 * self.world.profile.skew)
        node.offset += before - node.now()

    def do_hang(self) -> None:
        self.hang(self.victim())

    def hang(self, node: SimNode) -> None:
        """Its disk does not respond for a while."""
        self.world.counts["disks hung"] += 1
        node.stalled_until = self.world.now + self.rng.uniform(0.5, 4.0)

    def do_jump(self) -> None:
        """The machine was suspended: its clock is ahead of the time that it experienced."""
        self.world.counts["clock jumps"] += 1
        self.any_node().offset += self.rng.uniform(0.3, 30.0)

    def do_wipe(self) -> None:
        # Only a disk that all peers know can be missed by all: a peer that never met the old one trusts the new one.
        nodes = self.world.nodes.values()
        down = [
            node
            for node in nodes
            if node.host is None and all(o is node or o.disk.get(PINS, node.name.encode()) is not None for o in nodes)
        ]
        if down and not any(node.wiped for node in self.world.nodes.values()):
            self.world.wipe(self.rng.choice(down))

    def do_hollow(self) -> None:
        """The states and snapshots of a stopped node are deleted. Its log exists, but begins too late.

        One node at a time: trimmed entries must exist somewhere.
        """
        nodes = self.world.nodes.values()
        down = [node for node in nodes if node.host is None and node.states]
        if down and not any(node.lost_states for node in nodes):
            self.world.counts["states deleted"] += 1
            node = self.rng.choice(down)
            node.lost_states, node.states = node.states, {}

    def do_corrupt(self) -> None:
        """One bit of a stopped node's disk flips. The node must refuse to start, and must not touch the damage."""
        down = [node for node in self.world.nodes.values() if node.host is None and node.disk.keys(HARD)]
        if not down:
            return
        node = self.rng.choice(down)
        bases = {table_of(GroupId(g)): Hard(v).base for g, v in node.disk.hards()}
        places = [(table, key) for table in (HARD, COMMITS, FILED, PINS, TOMBSTONES) for key in node.disk.keys(table)]
        places += [(RECENT, key) for key in node.disk.keys(RECENT) if int.from_bytes(key, "big") >= node.disk.filed]
        live = [(t, k) for t, base in bases.items() for k in node.disk.keys(t) if int.from_bytes(k, "big") > base]
        table, key = self.rng.choice(self.rng.choice([places, live or places]))
        at = self.rng.getrandbits(20)
        place = place_in(node.disk.get(table, key) or b"") if table in bases else None
        if place is not None and self.rng.random() < 0.5:  # Not in the place record, but in the entry itself.
            table, key = RECENT, place.row.to_bytes(8, "big")
            at = 8 * place.offset + at % (8 * place.length)
        node.disk.flip_bit(table, key, at)
        fsyncs = node.disk.fsyncs
        try:
            node.boot()
        except Corrupt:
            self.world.counts["corruptions refused"] += 1
        except SimCrash:
            pass
        else:
            raise Violation(f"{node.name} starts on a damaged disk: {table}, {key.hex()}, bit {at}")
        if node.disk.fsyncs != fsyncs:
            raise Violation(f"{node.name} wrote to a damaged disk")
        node.disk.flip_bit(table, key, at)


def void(_: object) -> None: ...


def heal(world: World, seconds: float = 60.0) -> None:
    """Stop the faults and expect the cluster to recover."""
    world.cuts.clear()
    world.stalled.clear()
    world.stalled_disks.clear()
    quiet = replace(
        world.profile,
        loss=0.0,
        duplicate=0.0,
        stall=0.0,
        fail=0.0,
        late=0.0,
        drag=0.0,
        reorder=False,
        delay_max=0.005,
        fsync_max=0.005,
    )
    world.profile = quiet
    for node in world.nodes.values():
        node.failpoint = None
        node.paused_until = min(node.paused_until, world.now)
        node.stalled_until = 0.0
        node.disk.full = node.disk.to_the_last_byte = False
        world.boot(node)
    deadline = world.now + seconds
    missing: str | None = "nothing was tried"
    while world.now < deadline:
        world.run_until(world.now + 0.2)
        for node in world.nodes.values():
            world.boot(node)  # A commit that was bound to fail before the repair may have stopped it since.
        missing = world.oracle.converged()
        if missing is None:
            break
    if missing is not None:
        raise Violation(f"no convergence within {seconds:.0f} s after healing: {missing}")
