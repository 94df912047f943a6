"""Scenarios that rarely arise by chance. The order of events is fixed; their timing and the nodes are drawn.

Each is a known way to break a promise of Raft or of sealing (docs/adr/0002-change-members-by-sealing.md), or of
availability. The hardened log survives them; without the rule that a scenario is about (`mutants.py`), it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from holdfast.log.messages import GroupId, NodeId
from holdfast.log.replica import Replica
from tests.sim.driver import Driver, heal
from tests.sim.oracle import Operation, Violation
from tests.sim.world import SimNode, World

GROUP: Final = GroupId(1)


def _void(_: object) -> None: ...


def _replica(node: SimNode) -> Replica | None:
    return None if node.host is None else node.host.replicas.get(GROUP)


def _leader(world: World) -> SimNode:
    leader = world.leader(GROUP)
    assert leader is not None
    return leader


def _until(world: World, holds: Callable[[], bool], seconds: float = 3.0) -> bool:
    """Wait, a millisecond at a time, because a scenario acts at an exact moment."""
    deadline = world.now + seconds
    while not holds():
        if world.now >= deadline:
            return False
        world.run_until(world.now + 0.001)
    return True


def _cut(world: World, side: Iterable[NodeId], other: Iterable[NodeId], *, noticed: bool = False) -> None:
    for a in side:
        for b in other:
            if a != b:
                world.counts["cuts"] += 2
                world.cuts |= {(a, b), (b, a)}
                if noticed:
                    world.break_link(a, b)


def _write(driver: Driver, node: SimNode, count: int) -> list[Operation]:
    written = []
    for _ in range(count):
        operation = driver.operation(GROUP, "write")
        operation.command += b"x" * 60
        driver.world.submit(node, operation)
        driver.world.run_until(driver.world.now + 0.0005)
        written.append(operation)
    return written


def _change(driver: Driver, leader: SimNode, members: Iterable[NodeId]) -> Operation:
    operation = driver.operation(GROUP, "change")
    operation.members = tuple(sorted(members))
    driver.world.submit(leader, operation)
    return operation


def _sealed(node: SimNode) -> Callable[[], bool]:
    """Whether a leader knows that its seal is committed, or has already moved on."""
    replica = _replica(node)
    epoch = None if replica is None else replica.epoch

    def holds() -> bool:
        now = _replica(node)
        if now is None:
            return False
        seal = now.engine.seal_index
        return now.epoch != epoch or (seal is not None and now.log.commit >= seal)

    return holds


def _leads(world: World, side: Iterable[NodeId], but: SimNode | None = None, epoch: int = 0) -> Callable[[], bool]:
    """Whether a node on one side of a cut leads, in a given epoch or later."""

    def holds() -> bool:
        for name in side:
            replica = _replica(world.nodes[name])
            if (
                replica is not None
                and replica.engine.is_leader
                and replica.epoch >= epoch
                and name != (but and but.name)
            ):
                return True
        return False

    return holds


def _in_epoch(world: World, names: Iterable[NodeId], epoch: int) -> Callable[[], bool]:
    names = tuple(names)

    def holds() -> bool:
        return all((r := _replica(world.nodes[name])) is not None and r.epoch >= epoch for name in names)

    return holds


def older_terms(driver: Driver) -> None:
    """Raft's figure 8: an old entry reaches a majority under a new leader, and a third leader does not know it."""
    world, rng = driver.world, driver.rng
    for _ in range(3):
        heal(world)
        first = _leader(world)
        rest = [name for name in world.names if name != first.name]
        rng.shuffle(rest)
        friend, *others = rest
        _cut(world, (first.name, friend), others, noticed=True)
        _write(driver, first, rng.choice((8, 16)))  # Held by two of five.
        if not _until(world, _leads(world, others)):
            continue
        second = world.nodes[next(name for name in others if _leads(world, (name,))())]
        _cut(world, (second.name,), world.names, noticed=True)  # Its no-op stays on its own disk.
        world.run_until(world.now + 0.6)
        world.cuts -= {pair for pair in world.cuts if second.name not in pair}
        if not _until(world, _leads(world, world.names, but=second)):
            continue
        third = _leader(world)
        # It replicates the old entries to a majority, but not yet its own.
        world.run_until(world.now + rng.uniform(0.0, 0.3))
        world.cuts.clear()
        _cut(world, (first.name, friend), (name for name in others), noticed=True)
        if third.name in others:
            _cut(world, (third.name,), world.names, noticed=True)
        world.run_until(world.now + 2.0)


def late_acks(driver: Driver) -> None:
    """An acknowledgement of an old leadership arrives when its leader leads again, with other entries (AUDIT 3)."""
    world, rng = driver.world, driver.rng
    for _ in range(3):
        heal(world)
        first = _leader(world)
        rest = [name for name in world.names if name != first.name]
        rng.shuffle(rest)
        slow, *others = rest
        world.stalled.add((NodeId(slow), first.name))
        _cut(world, (first.name, slow), others)
        _write(driver, first, 6)
        if _until(world, _leads(world, others)):
            world.run_until(world.now + 0.1)
            world.cuts.clear()
            second = world.nodes[next(name for name in others if _leads(world, (name,))())]
            world.run_until(world.now + 0.3)  # The logs of the first and the slow are overwritten.
            host = second.host
            assert host is not None
            world.after(0.0, second, lambda host=host, to=first.name: _void(host.transfer(GROUP, to)))  # type: ignore[misc]
            if _until(world, _leads(world, (first.name,))):
                _cut(world, (first.name,), [name for name in rest if name != others[0]])
                _write(driver, first, 8)
                world.run_until(world.now + rng.uniform(0.0, 0.05))
                world.cuts -= {(NodeId(slow), first.name)}
        world.stalled.clear()
        world.run_until(world.now + 0.3)


def _replaced(driver: Driver, leader: SimNode) -> tuple[NodeId, NodeId, NodeId]:
    """(the node that stays besides the leader, the one that leaves, the one that joins) in a group of three of four."""
    replica = _replica(leader)
    assert replica is not None
    stays, goes = driver.rng.sample(replica.engine.peers, 2)
    (comes,) = [name for name in driver.world.names if name not in replica.engine.members]
    return stays, goes, comes


def stale_reads(driver: Driver) -> None:
    """The leader that sealed has a slow disk: it cannot apply its seal, while the successor acknowledges writes."""
    world, rng = driver.world, driver.rng
    for _ in range(3):
        heal(world)
        leader = _leader(world)
        stays, goes, comes = _replaced(driver, leader)
        replica = _replica(leader)
        assert replica is not None
        epoch = replica.epoch
        _change(driver, leader, (leader.name, stays, comes))
        if not _until(world, lambda replica=replica: replica.engine.seal_index is not None):  # type: ignore[misc]
            continue
        world.stalled_disks.add(leader.name)
        if _until(world, _sealed(leader)) and replica.epoch == epoch:
            world.cuts |= {
                (leader.name, goes),
                (stays, leader.name),
                (comes, leader.name),
                (stays, goes),
                (comes, goes),
            }
            if _until(world, _in_epoch(world, (stays, comes), epoch + 1)):
                world.nodes[comes].offset += 1.5  # It was suspended, and waits for no timeout.
            if _until(world, _leads(world, (stays, comes), epoch=epoch + 1)):
                successor = _leader(world)
                written = _write(driver, successor, 2)
                _until(world, lambda written=written: any(o.outcome == "ok" for o in written))  # type: ignore[misc]
                world.cuts -= {(leader.name, goes)}
                world.submit(leader, driver.operation(GROUP, "read"))
                world.run_until(world.now + rng.uniform(0.02, 0.3))
        world.stalled_disks.clear()
        world.run_until(world.now + 0.2)


def two_epochs(driver: Driver) -> None:
    """A cut just after a seal is committed: one side continues in the successor, the other elects in the old epoch."""
    world, rng = driver.world, driver.rng
    for _ in range(3):
        heal(world)
        leader = _leader(world)
        stays, goes, comes = _replaced(driver, leader)
        replica = _replica(leader)
        assert replica is not None
        epoch = replica.epoch
        _change(driver, leader, (leader.name, stays, comes))
        if not _until(world, _sealed(leader)):
            continue
        old, new = (stays, goes), (leader.name, comes)
        _cut(world, old, new, noticed=True)
        for _ in range(rng.choice((1, 2, 3))):  # The old epoch changes its leader: its terms overtake the successor's.
            if _until(world, _leads(world, old)):
                mine = next(name for name in old if _leads(world, (name,))())
                _write(driver, world.nodes[mine], 2)
                world.submit(world.nodes[mine], driver.operation(GROUP, "read"))
                world.run_until(world.now + rng.uniform(0.0, 0.1))
                world.crash(world.nodes[mine], power=False)
                world.boot(world.nodes[mine])
        if _until(world, _leads(world, new, epoch=epoch + 1)):
            _write(driver, _leader(world), 4)
            world.run_until(world.now + 0.2)
        world.cuts.clear()
        _until(world, _in_epoch(world, (stays,), epoch + 1))
        _cut(world, (leader.name,), world.names, noticed=True)  # Now the successor needs the late member.
        world.run_until(world.now + 2.0)


def stray_snapshots(driver: Driver) -> None:
    """A node that lags in an ended epoch is offered a state from after its end."""
    world, rng = driver.world, driver.rng
    heal(world)
    leader = _leader(world)
    stays, goes, comes = _replaced(driver, leader)
    _cut(world, (goes,), world.names, noticed=True)
    _write(driver, leader, 30)
    world.run_until(world.now + 0.5)
    for name in (leader.name, stays):
        _cut_and_trim(world, world.nodes[name])
    _change(driver, leader, (leader.name, stays, comes))
    if not _until(world, _sealed(leader)):
        return
    world.cuts.clear()
    _cut(world, (stays, goes), (leader.name, comes), noticed=True)
    if _until(world, _leads(world, (leader.name, comes), epoch=1)):
        _write(driver, _leader(world), 10)
        world.run_until(world.now + 0.3)
        for name in (leader.name, comes):
            _cut_and_trim(world, world.nodes[name])
    world.run_until(world.now + rng.uniform(1.0, 4.0))


def hasty_installs(driver: Driver) -> None:
    """A node learns of a new epoch and is given its state, and dies before its own record of the epoch is on disk."""
    world, rng = driver.world, driver.rng
    heal(world)
    leader = _leader(world)
    stays, _, comes = _replaced(driver, leader)
    _cut(world, (stays,), world.names, noticed=True)
    _write(driver, leader, 10)
    _change(driver, leader, (leader.name, stays, comes))
    if not _until(world, _in_epoch(world, (leader.name,), 1)) or not _until(world, _leads(world, world.names, epoch=1)):
        return
    _write(driver, _leader(world), 10)
    world.run_until(world.now + 0.5)
    for name in (leader.name, comes):
        _cut_and_trim(world, world.nodes[name])
    late = world.nodes[stays]
    world.stalled_disks.add(stays)
    world.cuts.clear()
    world.run_until(world.now + rng.uniform(0.2, 1.5))
    world.crash(late, power=rng.random() < 0.5)
    world.stalled_disks.clear()
    world.boot(late)
    world.run_until(world.now + rng.uniform(0.0, 1.0))


def _cut_and_trim(world: World, node: SimNode) -> None:
    machine, replica = node.machine(GROUP), _replica(node)
    if machine is not None and replica is not None:
        machine.cut_snapshot()
        world.guarded(node, lambda: replica.trim(replica.applied))


def last_witness(driver: Driver) -> None:
    """The nodes that know that an epoch is over are outside its successor, and silent when they return."""
    world, rng = driver.world, driver.rng
    for _ in range(3):
        heal(world)
        leader = _leader(world)
        (comes,) = rng.sample([name for name in world.names if name != leader.name], 1)
        _write(driver, leader, 3)
        _change(driver, leader, (comes,))
        if _until(world, _sealed(leader)):
            world.crash(leader, power=False)
            _cut(world, (leader.name,), world.names)
            world.run_until(world.now + rng.uniform(0.1, 1.0))


def lost_member(driver: Driver) -> None:
    """A learner forgets the group while it becomes a member of it: it is a member that does not know its group.

    Then it learns of the group and dies before that is on its disk, or the leader that would tell it is gone for long.
    """
    world, rng = driver.world, driver.rng
    heal(world)
    leader = _leader(world)
    replica = _replica(leader)
    assert replica is not None
    (other,), (comes,) = replica.engine.peers, [name for name in world.names if name not in replica.engine.members]
    newcomer = world.nodes[comes]
    _change(driver, leader, world.names)
    if not _until(world, lambda: replica.engine.seal_index is not None):
        return
    _cut(world, (comes,), world.names, noticed=True)  # The seal does not reach it.
    driver.forget(newcomer, GROUP)
    old = (leader.name, other)
    if not _until(world, lambda: _in_epoch(world, old, 1)() and GROUP not in newcomer.states):
        return
    leads = [name for name in old if _leads(world, (name,))()]
    if rng.random() < 0.5 or not leads:
        newcomer.failpoint = "stage.return"  # Messages that do not wait for the disk have left by then.
        world.cuts.clear()
        if _until(world, lambda: newcomer.host is None):
            world.run_until(world.now + rng.uniform(0.1, 1.0))
            world.boot(newcomer)
        return
    (stays,) = set(old) - set(leads)
    world.crash(world.nodes[leads[0]], power=rng.random() < 0.5)
    world.cuts.clear()
    if not _until(world, _leads(world, (stays, comes), epoch=1), seconds=10 * world.timing.election_max):
        raise Violation(f"{stays} and {comes}, two of three members, elect nobody")


def reads_at_the_seal(driver: Driver) -> None:
    """Clients read constantly while members change: each read is answered."""
    world = driver.world
    for _ in range(3):
        heal(world)
        leader = _leader(world)
        replica = _replica(leader)
        assert replica is not None
        epoch = replica.epoch
        stays, _, comes = _replaced(driver, leader)
        _change(driver, leader, (leader.name, stays, comes))
        for _ in range(400):
            now = _replica(leader)
            if now is None or now.epoch != epoch:
                break
            world.submit(leader, driver.operation(GROUP, "read"))
            world.run_until(world.now + driver.rng.uniform(0.0, 0.002))


def steady(driver: Driver) -> None:
    """The availability of a cluster: one fault at a time, with enough time for each to end."""
    world, rng = driver.world, driver.rng
    (group,) = world.founders
    heal(world)
    for _ in range(world.profile.events // 4):
        leader = world.leader(group)
        assert leader is not None and leader.host is not None
        engine = leader.host.replicas[group].engine
        _flap(world, driver, rng.choice(engine.peers), leader.name, engine.term)
        _cut_off(world, driver, leader)
        heal(world)
        _break_leader(world, group)
        heal(world)
        _hand_over(world, driver, group)
        heal(world)


def _flap(world: World, driver: Driver, follower: NodeId, leader: NodeId, term: int) -> None:
    """A follower that repeatedly disconnects does not end a healthy leadership (pre-vote, stickiness)."""
    for _ in range(3):
        driver.isolate(follower)
        world.run_until(world.now + driver.rng.uniform(0.5, 4.0))
        world.cuts.clear()
        world.run_until(world.now + driver.rng.uniform(0.5, 2.0))
        now = world.leader(next(iter(world.founders)))
        if now is None or now.name != leader or now.host is None or now.host.replicas[GroupId(1)].engine.term != term:
            raise Violation(f"{follower} came back, and {leader} no longer leads term {term}")


def _cut_off(world: World, driver: Driver, leader: SimNode) -> None:
    """A leader without answers steps down, and informs its clients (check-quorum)."""
    waiting = [driver.operation(GroupId(1), kind) for kind in ("write", "read")]
    for other in world.names:
        if other != leader.name:
            world.cuts |= {(leader.name, other), (other, leader.name)}
    for operation in waiting:
        world.submit(leader, operation)
    world.run_until(world.now + 3.0)
    if any(operation.outcome == "open" for operation in waiting):
        raise Violation(f"{leader.name} is cut off, and its clients still wait")
    if world.leader(GroupId(1)) in (None, leader):
        raise Violation(f"{leader.name} is cut off, and nobody else leads")


def _break_leader(world: World, group: GroupId) -> None:
    """A broken connection is noticed at once: no timeout passes before there is a new leader."""
    leader = world.leader(group)
    assert leader is not None
    world.crash(leader, power=False)
    begun = world.now
    while world.leader(group) is None and world.now < begun + 5.0:
        world.run_until(world.now + 0.01)
    taken = world.now - begun
    world.counts["failovers"] += 1
    world.counts["failover ms"] += round(taken * 1000)
    if taken > 3 * world.timing.election_max:
        raise Violation(f"no leader {taken:.2f} s after {leader.name} was killed")


def _hand_over(world: World, driver: Driver, group: GroupId) -> None:
    """A leadership that is handed over arrives."""
    leader = world.leader(group)
    assert leader is not None and leader.host is not None
    to = driver.rng.choice(leader.host.replicas[group].engine.peers)
    host = leader.host
    world.after(0.0, leader, lambda: _void(host.transfer(group, to)))
    world.run_until(world.now + world.timing.election_max)
    now = world.leader(group)
    if now is None or now.name != to:
        raise Violation(f"{leader.name} handed its leadership to {to}, and {now.name if now else 'nobody'} leads")


SCRIPTS: Final[dict[str, Callable[[Driver], None]]] = {
    "older-terms": older_terms,
    "late-acks": late_acks,
    "stale-reads": stale_reads,
    "two-epochs": two_epochs,
    "stray-snapshots": stray_snapshots,
    "hasty-installs": hasty_installs,
    "last-witness": last_witness,
    "lost-member": lost_member,
    "reads-at-the-seal": reads_at_the_seal,
    "steady": steady,
}
