"""One seed: a cluster is founded, clients and faults come, everything is repaired, and then everything is checked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from holdfast.cluster.errors import Circumstance
from holdfast.cluster.groups import FIRST_PARTITION_GROUP, META_GROUP
from holdfast.cluster.members.operations import read_node
from holdfast.cluster.node import Node
from holdfast.log.messages import GroupId
from holdfast.sdk.ids import NodeId
from holdfast.statemachine.members import ACTIVE, REMOVED
from tests.sim.cluster.backups import Backups, Restoration
from tests.sim.cluster.clients import Clients
from tests.sim.cluster.profile import Profile
from tests.sim.cluster.world import Process, World
from tests.sim.oracle import Violation

PROFILES: Final = {
    profile.name: profile
    for profile in (
        Profile("calm", heat=0.4, handler_faults=0.3),
        Profile("stormy", heat=2.0),
        Profile("watched", heat=1.2, deaf=True),
        Profile("narrow", heat=1.0, attempts_max=2),
        Profile("spread", nodes=4, partitions=4, heat=1.5),
        Profile("five", nodes=5, partitions=2, heat=2.0),
        Profile(
            "members", nodes=6, joiners=3, partitions=2, heat=2.5, faulty_s=9.0, snapshot_entries=8, log_tail=2, wipes=0
        ),
        Profile("snapshots", heat=1.5, crashes=0.03, snapshot_entries=6, log_tail=2),
        Profile("store", heat=2.0, crashes=0.005, snapshot_entries=4, log_tail=1, store=True, wipes=12),
        Profile("slow", heat=1.0, delay_max=0.04, fsync_max=0.03, stall=0.02),
        Profile("large", heat=1.5, large=4),
        Profile(
            "restore",
            heat=1.0,
            faulty_s=3.0,
            thread_stall=0.06,
            crashes=0.006,
            snapshot_entries=40,
            log_tail=8,
            wipes=1,
            backups=True,
            programs=3,
        ),
        Profile(
            "stored", heat=1.5, faulty_s=9.0, large=4, store=True, stored=True, wipes=4, snapshot_entries=20, log_tail=5
        ),
        Profile("people", heat=1.5, people=True),
    )
}
BEGINS_S: Final = 20.0  # By then a cluster has formed, without faults.
HEALED_S: Final = 60.0  # By then all work has ended.
AFTER_S: Final = 1.5  # Duration of the faults in a restored cluster.


class Faults:
    def __init__(self, world: World, clients: Clients) -> None:
        self.world = world
        self.clients = clients
        self.leaving: Process | None = None  # One node at a time is removed.
        self.ended = False
        several, many = len(world.names) > 1, len(world.names) > 2
        self.kinds: dict[str, tuple[int, Callable[[], None]]] = {
            "kill": (4, lambda: self.crash([self.anybody()], power=False)),
            "power": (2, lambda: self.crash([self.anybody()], power=True)),
            "kill leader": (4, lambda: self.crash(self.leaders(), power=False)),
            "blackout": (1, lambda: self.crash(self.world.living(), power=self.world.rng.random() < 0.5)),
            "stop": (2, lambda: self.stop([self.anybody()])),
            "stops": (many, self.stop_several),
            "full": (2, self.fill),
            "split": (2 if len(world.names) > 3 else 0, self.split),
            "join": (8 if world.profile.joiners else 0, self.join),
            "leave": (5 if world.profile.joiners else 0, self.leave),
            "drain": (6 if world.profile.joiners else 0, self.drain),
            "cut": (3 * several, self.cut),
            "isolate": (3, self.isolate),
            "session": (2 * several, self.break_session),
            "slow link": (2 * several, self.slow_link),
            "slow disk": (2, self.slow_disk),
            "pause": (3, self.pause),
            "transfer": (4, self.transfer),
            "clock": (1, self.jump),
            "hosts": (2, self.kill_host),
            "wipe": (world.profile.wipes * many, self.wipe),
            "store": (world.profile.wipes if world.profile.store else 0, self.break_store),
            "operator": (1, self.clients.pause),
            "vault": (2 * world.profile.backups, self.break_vault),
        }

    def begin(self) -> None:
        self.world.after(self.world.rng.expovariate(self.world.profile.heat), self.strike)

    def strike(self) -> None:
        if not self.world.is_faulty or self.ended:
            return
        names = list(self.kinds)
        [name] = self.world.rng.choices(names, [self.kinds[name][0] for name in names])
        self.world.counts[f"fault: {name}"] += 1
        self.kinds[name][1]()
        self.begin()

    def anybody(self) -> Process:
        return self.world.rng.choice(self.machines())

    def machines(self) -> list[Process]:
        """The existing machines, whatever runs on them."""
        return [self.world.processes[name] for name in self.world.names]

    def leaders(self) -> list[Process]:
        """The nodes that lead some partition."""
        group = FIRST_PARTITION_GROUP + self.world.rng.randrange(self.world.profile.partitions)
        for process in self.world.serving():
            if _leads(process, group):
                return [process]
        return []

    def crash(self, processes: list[Process], *, power: bool) -> None:
        for process in processes:
            if process.up:
                process.kill(power=power)
                self.world.after(self.world.rng.uniform(0.02, 2.0), process.boot_if_down)

    def stop_several(self) -> None:
        self.stop(self.world.rng.sample(self.machines(), self.world.rng.randint(2, 3)))

    def stop(self, processes: list[Process]) -> None:
        """SIGTERM: the nodes hand over, and start again."""
        for process in processes:
            if process.node is not None and process.serving:
                self._stop(process, process.node)

    def _stop(self, process: Process, node: Node) -> None:
        boots = process.boots

        def stopped(task: asyncio.Task[None]) -> None:
            if process.boots == boots and process.up:
                if not task.cancelled() and task.exception() is not None and not process.full:
                    self.world.violate(f"{process.name} does not stop: {task.exception()!r}")
                process.kill(power=False)
                self.world.after(self.world.rng.uniform(0.02, 1.0), process.boot_if_down)

        def stop() -> None:
            if not process.serving:
                return  # Signalled before, while the process was paused; a second SIGTERM changes nothing.
            process.serving = False
            assert process.door is not None
            process.door.stop()
            asyncio.get_running_loop().create_task(node.stop()).add_done_callback(stopped)

        process.run(stop)

    def fill(self) -> None:
        """A disk is full for a while."""
        process = self.anybody()
        process.full = process.disk.full = True

        def make_room() -> None:
            process.full = process.disk.full = False

        self.world.after(self.world.rng.uniform(0.3, 3.0), make_room)

    def split(self) -> None:
        """A minority and the rest."""
        names = self.world.names
        few = self.world.rng.sample(names, (len(names) - 1) // 2)
        rest = [name for name in names if name not in few]
        directions = [(a, b) for a in few for b in rest] + [(b, a) for a in few for b in rest]
        self.world.network.cut(directions, self.world.rng.uniform(0.5, 5.0))

    # -- members -----------------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """A new machine: it is added to the cluster, and starts."""
        new = [p for p in self.world.processes.values() if not p.is_member and not p.boots]
        if new:
            process = new[0]
            process.is_member = True
            process.boot_if_down()
            self.clients.operate_on(lambda operations: operations.add(read_node(process.name, "sim:1", "")), "joins")

    def leave(self) -> None:
        """A node is removed permanently, one at a time and if enough are left: after its death, or while it works."""
        world = self.world
        members = world.members()
        if not self.can_spare_one():
            return
        process = self.leaving = world.rng.choice(members)
        process.is_member = False
        if world.rng.random() < 0.5:
            process.kill(power=True)

        def removed(refusal: Circumstance | None) -> None:
            if refusal is not None:
                process.is_member = True
                process.boot_if_down()
            self._let_go(process)

        self.clients.operate_on(
            lambda operations: operations.remove(NodeId(process.name), force=False), "leaves", removed
        )

    def can_spare_one(self) -> bool:
        """A careful operator checks first: one at a time, and only if each partition has three replicas on four nodes."""
        memberships = [p.node.ground.meta.state.membership for p in self.world.serving() if p.node is not None]
        return (
            self.leaving is None
            and bool(memberships)
            and all(
                sum(node.state == ACTIVE for node in membership.nodes.values()) > 3
                and all(len(replicas.members) >= 3 for replicas in membership.table.values())
                for membership in memberships
            )
        )

    def _let_go(self, process: Process) -> None:
        """The operator waits until every node shows it with 0 replicas, as `holdfast cluster remove` says."""
        world = self.world
        if process.is_member:
            self.leaving = None
            return
        nodes = [p.node for p in world.serving() if p.node is not None and p.node.is_serving and p is not process]
        shown = [
            None
            if (known := node.ground.meta.state.membership.nodes.get(NodeId(process.name))) is None
            else node.serving.operations.show(known)
            for node in nodes
        ]
        if not shown or any(view is None or view["state"] != REMOVED or view["replicas"] for view in shown):
            world.after(0.3, lambda: self._let_go(process))
            return
        voters = {name for node in nodes for name in node.ground.log.group(META_GROUP).status().members}
        if process.name in voters:
            world.violate(f"{process.name} is shown with 0 replicas while it votes in the meta group")
        self.leaving = None
        process.kill(power=False)

    def drain(self) -> None:
        world = self.world
        process, move = world.rng.choice(world.members()), world.rng.random() < 0.5 and self.can_spare_one()
        name = process.name
        if move:
            self.leaving = process

        def drained(refusal: Circumstance | None) -> None:
            if move:
                self.leaving = None
            self.clients.operate_on(
                lambda operations: operations.undrain(NodeId(name)), "undrains", delay=world.rng.uniform(0, 3)
            )

        self.clients.operate_on(lambda operations: operations.drain(NodeId(name), move=move), "drains", drained)

    def wipe(self) -> None:
        """A process dies, and before it restarts, files of one partition are removed or damaged.

        Snapshots are removed from one node at a time: data lost by a majority and by the store is lost.
        """
        world = self.world
        process, number = self.anybody(), world.rng.randrange(world.profile.partitions)
        self.crash([process], power=world.rng.random() < 0.3)
        process.clear_up()
        group = FIRST_PARTITION_GROUP + number
        state, kept = f"state/{number:04d}", f"snapshots/*/{group:010d}"
        what = world.rng.choice(["state", "all", "all", "damage"])
        if any(group in other.wiped for other in world.processes.values() if other is not process):
            what = "state"
        match what:
            case "state":
                process.files.wipe(state)
            case "all":
                process.wiped.add(group)
                process.files.wipe(state)
                process.files.wipe(kept)
            case "damage":
                process.wiped.add(group)
                world.excused += ("skipping a snapshot",)
                process.files.wipe(state)
                process.files.damage(world.rng, f"{kept}/*.snapshot")

    def break_store(self) -> None:
        world = self.world
        match world.rng.choice(["down", "lose", "damage"]):
            case "down":
                world.store.down_until = world.now + world.rng.uniform(0.5, 4.0)
            case "lose":
                world.store.lose()
            case "damage":
                world.store.damage()

    def break_vault(self) -> None:
        self.world.vault.down_until = self.world.now + self.world.rng.uniform(0.2, 2.0)

    def cut(self) -> None:
        a, b = self.world.rng.sample(self.world.names, 2)
        both = self.world.rng.random() < 0.5
        self.world.network.cut([(a, b), *([(b, a)] if both else [])], self.world.rng.uniform(0.1, 5.0))

    def isolate(self) -> None:
        name = self.anybody().name
        others = [other for other in self.world.names if other != name]
        into, out = [(other, name) for other in others], [(name, other) for other in others]
        directions = self.world.rng.choice([into, out, into + out, into + out])
        self.world.network.cut(directions, self.world.rng.uniform(0.1, 5.0))

    def break_session(self) -> None:
        self.world.network.break_session(*self.world.rng.sample(self.world.names, 2))

    def slow_link(self) -> None:
        a, b = self.world.rng.sample(self.world.names, 2)
        self.world.network.slow[a, b] = self.world.now + self.world.rng.uniform(0.2, 3.0)

    def slow_disk(self) -> None:
        self.anybody().slow_until = self.world.now + self.world.rng.uniform(0.2, 3.0)

    def pause(self) -> None:
        """SIGSTOP, and SIGCONT later."""
        process = self.anybody()
        process.paused_until = max(process.paused_until, self.world.now + self.world.rng.uniform(0.05, 4.0))

    def transfer(self) -> None:
        group = self.world.rng.randrange(1, FIRST_PARTITION_GROUP + self.world.profile.partitions)
        to = self.world.rng.choice(self.world.names)
        for process in self.world.serving():
            node = process.node
            assert node is not None
            if _leads(process, group) and process.name != to:
                process.run(lambda n=node: n.ground.log.group(group).transfer(to))  # type: ignore[misc]

    def jump(self) -> None:
        """The wall clock is changed, and corrected before the node restarts."""
        self.anybody().jumped_ms = self.world.rng.choice([-3_600_000.0, -5000.0, 5000.0, 3_600_000.0])

    def kill_host(self) -> None:
        self.world.handlers.kill(self.world.rng.choice(self.world.handlers.hosts))


def _leads(process: Process, group: int) -> bool:
    node = process.node
    replica = node.ground.log.host.replicas.get(GroupId(group)) if node is not None and node.is_open else None
    return replica is not None and replica.engine.is_leader


def heal(world: World) -> None:
    world.is_faulty = False
    world.network.join(sorted(world.network.cuts))
    world.network.slow.clear()
    world.store.down_until = world.vault.down_until = 0.0
    for process in world.processes.values():
        process.slow_until = process.jumped_ms = 0.0
        process.full = process.disk.full = False
        # Turns delayed until the end of a pause come at its end; everything else continues at once.
        process.paused_until = min(process.paused_until, world.now)
        process.boot_if_down()


def run(seed: int, profile: Profile) -> World:
    """The whole run of one seed. Raises Violation."""
    world = World(seed, profile)
    with world.determined():
        _live(world)
    return world


def _live(world: World) -> None:
    clients = Clients(world)
    faults = Faults(world, clients)
    for process in world.members():
        world.after(world.rng.uniform(0.0, 0.3), process.boot)
    clients.open()
    early = world.rng.random() < 0.3  # Faults from the beginning, or once there are clients.
    if early:
        faults.begin()
    if not world.run_until(BEGINS_S, done=lambda: clients.began_at is not None) and not early:
        raise Violation(f"no cluster after {BEGINS_S} s: {_why(world, clients)}")
    if not early:
        faults.begin()
    if world.profile.backups:
        _lose_and_restore(world, clients, faults)
    else:
        world.run_until(world.now + world.profile.faulty_s)
    heal(world)
    world.counts["healed"] += 1

    def is_over() -> bool:
        return clients.answered and world.oracle.is_quiet()

    if not world.run_until(world.now + HEALED_S, done=is_over):
        raise Violation(f"not at an end {HEALED_S} s after healing: {_why(world, clients)}")
    world.run_until(world.now + 2.0)

    def is_idle() -> bool:
        members = [process.node for process in world.members() if process.serving]
        agree = len({node.ground.meta.applied for node in members if node is not None}) == 1
        return agree and len(members) == len(world.members()) and not any(map(_busy, world.serving()))

    # A node may have begun to lead in the meantime, fire a timer, or be about to stop and start, or to wake from a
    # pause.
    world.run_until(world.now + 10.0, done=lambda: is_over() and is_idle())
    _reckon(world, clients)


def _lose_and_restore(world: World, clients: Clients, faults: Faults) -> None:
    """The cluster is backed up while it works, is lost, and another one is restored from one of its backups."""
    backups = Backups(world, clients)
    backups.begin()
    world.run_until(world.now + world.profile.faulty_s + world.rng.uniform(0.0, 1.0))
    if not backups.finished():
        heal(world)
        if not world.run_until(world.now + HEALED_S, done=lambda: bool(backups.finished())):
            raise Violation(f"no backup {HEALED_S} s after healing: {backups.why()}")
        world.is_faulty = True
    faults.ended = True
    judged = backups.judge()
    if world.violations:
        raise Violation(world.violations[0])
    restoration = Restoration(world, clients, judged)
    faults = Faults(world, clients)
    if early := world.rng.random() < 0.5:
        faults.begin()
    if not world.run_until(world.now + BEGINS_S, done=restoration.is_over) and not early:
        raise Violation(f"no cluster {BEGINS_S} s after the loss of the old one: {_why(world, clients)}")
    if not early:
        faults.begin()
    world.run_until(world.now + AFTER_S)


def _why(world: World, clients: Clients) -> str:
    waiting = sum(not asking.done for asking in clients.asking)
    nodes = ", ".join(
        f"{p.name} {'serves' if p.serving else 'is up' if p.up else 'is down'}" for p in world.processes.values()
    )
    return f"{waiting} clients wait; {nodes}; {world.oracle.what_is_left()}"


def _reckon(world: World, clients: Clients) -> None:
    oracle = world.oracle
    if not oracle.is_quiet():
        world.violate(f"it was quiet, and is not any more: {oracle.what_is_left()}")
    oracle.conclude()
    sums, seen = oracle.objects()
    if sums != dict(clients.model.sums):
        world.violate(f"objects hold {sums}, and should {dict(clients.model.sums)}")
    if seen != clients.model.orders:
        world.violate(f"objects saw {seen}, and should have {clients.model.orders}")
    for process in world.members():
        _check_node(world, process, clients)
    if world.violations:
        raise Violation(world.violations[0])


def _check_node(world: World, process: Process, clients: Clients) -> None:
    """Registered deployments are known, and finished work left nothing behind."""
    node = process.node
    if node is None or not process.serving:
        world.violate(f"{process.name} does not serve in the end")
        return
    uris = {deployment.uri for deployment in node.ground.registry.state.deployments.values()}
    if not clients.registered <= uris:
        world.violate(f"{process.name} has forgotten {clients.registered - uris}")
    if len(node.ground.replies):
        world.violate(f"{process.name} still has {len(node.ground.replies)} waiting clients")
    if node.ground.invoker.attempts:
        world.violate(f"{process.name} still has attempts: {list(node.ground.invoker.attempts)}")
    if _busy(process):
        world.violate(f"{process.name} still has commands under way")


def _busy(process: Process) -> bool:
    assert process.node is not None
    return any(partition.under_way or partition.machine.flights for partition in process.node.partitions)
