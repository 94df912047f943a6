"""All groups of a node and its turns: what leaves when, which sessions count, and which disks peers have."""

from __future__ import annotations

from holdfast.log.errors import NotLeader
from holdfast.log.messages import (
    COMMANDS,
    App,
    Append,
    AppendAck,
    AppendAcks,
    Config,
    Envelope,
    GroupId,
    Heartbeat,
    HeartbeatAck,
    NodeId,
    RequestVote,
    Vote,
    decode,
)
from tests.log.cluster import A, B, C, Cluster, Waiter, kinds

# The turn


def test_one_commit_contains_the_writes_of_all_groups() -> None:
    c = Cluster(groups=range(1, 9))
    for group in range(1, 9):
        c.elect("a", group=group)
    c.run(0.2)
    fsyncs = c.disk("a").fsyncs
    waiters = [c.propose("a", b"x", group=group) for group in range(1, 9)]
    c.turn("a")
    c.fsync("a")

    assert c.disk("a").fsyncs == fsyncs + 1
    c.settle()
    assert all(waiter.index for waiter in waiters)


def test_appends_leave_before_our_own_disk_and_acknowledgements_after_it() -> None:
    c = Cluster()
    c.elect("a")
    c.run(0.2)
    c.propose("a", b"x")
    c.turn("a")
    assert c.members[A].committing and Append in kinds(c, "a", "b")

    c.deliver("a", "b")
    assert c.members[B].committing and AppendAck not in kinds(c, "b", "a")
    c.fsync("b")
    assert AppendAck in kinds(c, "b", "a")


def test_there_is_one_commit_at_a_time_and_later_writes_share_the_next() -> None:
    c = Cluster()
    c.elect("a")
    c.run(0.2)
    fsyncs = c.disk("a").fsyncs
    waiters = []
    for i in range(10):
        waiters.append(c.propose("a", b"%d" % i))
        c.turn("a")
    c.fsync("a")
    c.fsync("a")

    assert c.disk("a").fsyncs == fsyncs + 2
    assert not c.members[A].committing
    c.settle()
    assert all(waiter.index for waiter in waiters)


def test_a_promise_outlives_a_stalled_disk_but_not_its_session() -> None:
    c = Cluster()
    c.elect("a")
    c.run(0.2)
    c.propose("a", b"x")
    c.turn("a")
    c.deliver("a", "b")
    c.unlink("a", "b")
    c.link("a", "b")  # b's disk answers now, in a new session: the old promise belongs to the old session.

    assert AppendAck not in kinds(c, "b", "a")
    c.settle()
    assert c.log("b").durable == c.log("a").last_index


def busy_disk() -> tuple[Cluster, int]:
    """c has acknowledged entry `index` of a's term 1, which waits for the current commit."""
    c = Cluster()
    c.elect("a")
    c.run(0.2)
    c.propose("a", b"x")
    c.turn("a")
    c.deliver("a", "c")
    c.propose("a", b"y")
    c.turn("a")
    c.deliver("a", "c")
    assert c.members[C].committing and c.log("c").last_index == c.log("a").last_index
    return c, c.log("a").last_index


def sync_all(c: Cluster, name: str) -> None:
    while c.members[NodeId(name)].committing:
        c.fsync(name)


def test_an_acknowledgement_leaves_only_with_its_entry_on_disk_though_a_newer_leader_replaces_it() -> None:
    c, index = busy_disk()
    prev_term = c.log("c").term_of(index - 1)
    assert prev_term is not None
    c.inject("b", "c", Append(9, index - 1, prev_term, 0, ((bytes([COMMANDS]) + b"\x90", index, 9),)))
    sync_all(c, "c")

    assert [m.index for m in c.waiting("c", "a") if isinstance(m, AppendAck)] == [index - 1]
    assert [m for m in c.waiting("c", "b") if isinstance(m, AppendAck)] == [AppendAck(9, index)]


def test_a_vote_leaves_only_when_it_is_on_disk_though_a_later_term_takes_its_place() -> None:
    c, index = busy_disk()
    c.inject("b", "c", RequestVote(8, index, 1, True))
    c.inject("a", "c", RequestVote(9, index, 1, True))
    sync_all(c, "c")

    assert [m for m in c.waiting("c", "b") if isinstance(m, Vote)] == [], "its disk has never held that vote"
    assert Vote(9, True) in c.waiting("c", "a")


def test_an_acknowledgement_leaves_only_with_its_entry_on_disk_though_a_later_epoch_cuts_it_off() -> None:
    c, index = busy_disk()
    later = Envelope(GroupId(1), 1, Config((A, B, C), index, 7))
    c.host("c").deliver(B, c.host("c").sessions[B], [later], c.now)
    c.turn("c")
    assert c.replica("c").epoch == 1 and c.log("c").last_index < index
    sync_all(c, "c")

    assert [m.index for m in c.waiting("c", "a") if isinstance(m, AppendAck)] == [index - 1]


def test_only_held_promises_of_the_group_in_a_later_epoch_are_dropped() -> None:
    c = Cluster(groups=(1, 2, 3))
    for group in (1, 2, 3):
        c.elect("a", group=group)
    c.run(0.2)
    for command in (b"x", b"y"):
        for group in (1, 2, 3):
            c.propose("a", command, group=group)
        c.turn("a")
        c.deliver("a", "c")
    assert c.members[C].committing
    c.inject("b", "c", RequestVote(9, 100, 1, True), group=2)
    sync_all(c, "c")

    acks = [m.flat for m in c.waiting("c", "a") if isinstance(m, AppendAcks)]
    assert [[flat[at] for at in range(0, len(flat), 4)] for flat in acks] == [[1, 2, 3], [1, 3]]


def test_a_node_at_rest_has_nothing_to_do() -> None:
    c = Cluster()
    c.elect("a")
    c.run(1.0)

    assert not any(c.host(name).busy for name in "abc")
    assert all(c.host(name).wake_at > c.now for name in "abc")


def test_a_node_wakes_for_the_earliest_of_its_groups() -> None:
    c = Cluster(groups=(1, 2, 3))
    c.tick("a")
    earliest = min(c.engine("a", group).wake_at for group in (1, 2, 3))

    assert c.host("a").wake_at <= earliest


# Sessions


def test_messages_of_an_older_session_are_dropped() -> None:
    c = Cluster()
    c.elect("a")
    c.run(0.2)
    c.propose("a", b"x")
    c.turn("a")
    late = len(c.waiting("a", "b"))
    assert late
    c.unlink("a", "b")
    c.link("a", "b")
    dropped, last = c.host("b").dropped, c.log("b").last_index
    wire = c.wires[A, B]
    while wire and wire[0][0] != c.sessions[frozenset((A, B))]:
        c.deliver("a", "b", 1)

    assert c.host("b").dropped == dropped + late
    assert c.log("b").last_index == last


def test_messages_before_a_session_began_are_dropped() -> None:
    c = Cluster("ab")
    c.isolate("b")
    c.host("b").deliver(A, 77, [Envelope(GroupId(1), 0, Heartbeat(9, 0, 1))], c.now)
    c.turn("b")

    assert c.host("b").dropped == 1
    assert c.engine("b").term == 0


def test_the_end_of_an_older_session_does_not_end_the_newer_one() -> None:
    c = Cluster()
    old = c.sessions[frozenset((A, B))]
    c.host("a").peer_up(B, 1000, c.disk("b").disk_id, c.now)
    c.host("a").peer_down(B, old, c.now)

    assert c.host("a").sessions[B] == 1000
    assert B in c.engine("a").connected


def test_the_queue_of_a_session_ends_with_it() -> None:
    c = Cluster()
    c.host("a").send_app(B, b"late")
    c.unlink("a", "b")
    c.link("a", "b")
    c.turn("a")

    assert [m for m in c.waiting("a", "b") if isinstance(m, App)] == []


# Disks of peers


def test_a_peer_that_comes_back_with_another_disk_is_refused() -> None:
    """12: it has forgotten its votes and acknowledgements."""
    c = Cluster()
    c.elect("a")
    c.write("a", b"x")
    c.crash("b")
    c.disk("b").tables_.clear()
    c.members[B].states.clear()
    c.disk("b").disk_id = "a new disk"
    c.members[B].boot()
    c.host("b").create(GroupId(1), (A, B, C))

    assert not c.link("a", "b")
    assert B not in c.host("a").sessions
    assert B not in c.engine("a").connected


def test_a_peers_disk_is_remembered_over_our_own_restart() -> None:
    """12"""
    c = Cluster()
    c.crash("a")
    c.restart("a", link=False)

    assert not c.host("a").peer_up(B, 50, "another disk", c.now)
    assert c.host("a").peer_up(B, 51, c.disk("b").disk_id, c.now)


def test_a_session_with_a_new_peer_begins_when_its_disk_is_on_record() -> None:
    """12: even when another commit is running, which began before."""
    c = Cluster("ab", members="a")
    c.run(0.2)
    c.propose("a", b"x")
    c.turn("a")
    assert c.members[A].committing
    assert c.host("a").peer_up(NodeId("z"), 99, "disk of z", c.now)
    c.turn("a")
    c.fsync("a")
    assert NodeId("z") not in c.host("a").sessions

    c.fsync("a")
    assert c.host("a").sessions[NodeId("z")] == 99


def test_a_new_peer_that_reconnects_in_the_meantime_still_waits_for_the_record() -> None:
    """12"""
    c = Cluster("ab", members="a")
    c.run(0.2)
    z = NodeId("z")
    c.host("a").peer_up(z, 99, "disk of z", c.now)
    c.turn("a")
    c.host("a").peer_down(z, 99, c.now)
    c.host("a").peer_up(z, 100, "disk of z", c.now)
    c.turn("a")
    assert z not in c.host("a").sessions

    c.fsync("a")
    assert c.host("a").sessions[z] == 100


def test_messages_of_a_new_peer_are_delivered_when_its_disk_is_on_record() -> None:
    """Its own record of us may be on disk sooner, and the link loses nothing while it is up."""
    c = Cluster("ab", members="a")
    c.run(0.2)
    z, host = NodeId("z"), c.host("a")
    host.peer_up(z, 99, "disk of z", c.now)
    c.turn("a")
    host.deliver(z, 99, [Envelope(GroupId(0), 0, App(b"one"))], c.now)
    host.deliver(z, 98, [Envelope(GroupId(0), 0, App(b"of an older session"))], c.now)
    host.deliver(z, 99, [Envelope(GroupId(0), 0, App(b"two"))], c.now)
    assert host.received == []

    c.fsync("a")
    assert host.received == [(z, b"one"), (z, b"two")]


# What the rooms above send


def test_bytes_for_the_rooms_above_arrive_in_order_or_not_at_all() -> None:
    c = Cluster()
    for i in range(5):
        assert c.host("a").send_app(B, b"%d" % i)
    c.turn("a")
    c.deliver("a", "b")

    assert c.host("b").received == [(A, b"%d" % i) for i in range(5)]
    c.unlink("a", "b")
    assert not c.host("a").send_app(B, b"nobody")


# Everything at once


def test_every_waiter_is_answered_exactly_once_under_any_faults() -> None:
    """Leaders come and go, members change, disks stall; in the end every waiter has exactly one answer."""
    c = Cluster("abcd", members="abc")
    waiters: list[Waiter] = []
    script = [
        "propose",
        "run",
        "crash",
        "propose",
        "restart",
        "change abcd",
        "run",
        "isolate",
        "propose",
        "mend",
        "run",
    ]
    for round_ in range(6):
        for action in script:
            leaders = [name for name in c.up() if GroupId(1) in c.host(name).replicas and c.engine(name).is_leader]
            victim = NodeId("abc"[round_ % 3])
            match action.split():
                case ["propose"]:
                    for name in c.up():
                        waiters += [c.propose(name, b"%d" % len(waiters)) for _ in range(3)]
                        waiters.append(c.read(name))
                        c.turn(name)
                case ["run"]:
                    c.run(1.5)
                case ["crash"] if victim in c.up():
                    dead = c.replica(victim)
                    c.turn(victim)
                    dead.stop()
                    for result in dead.results:
                        for waiter in result.waiting:
                            assert isinstance(waiter, Waiter)
                            waiter.answers.append(0)
                    c.crash(victim, power=round_ % 2 == 0, keep_pending=round_ % 4 == 0)
                case ["restart"]:
                    for name in set(c.names) - set(c.up()):
                        c.restart(name)
                case ["change", members] if leaders:
                    current = "".join(c.engine(leaders[0]).members)
                    waiters.append(c.change(leaders[0], members if current != members else members[:3], 2.0))
                case ["isolate"]:
                    for name in leaders:
                        c.isolate(name)
                case ["mend"]:
                    for offset, name in enumerate(c.up()):
                        for other in c.up()[offset + 1 :]:
                            if frozenset((name, other)) not in c.sessions:
                                c.link(name, other)
    for name in c.names:
        for other in c.names:
            if name < other:
                c.link(name, other)
    c.run(8.0)

    assert len(waiters) > 100
    assert [waiter for waiter in waiters if len(waiter.answers) != 1] == []
    assert any(waiter.index for waiter in waiters)
    states = {tuple(c.applied(name)) for name in c.names if c.engine(name).is_member}
    assert len(states) == 1


def test_the_codec_reads_every_frame() -> None:
    c = Cluster()
    c.elect("a")
    c.now += 0.2
    c.tick("a")
    (_, frame) = c.wires[A, B][-1]

    assert all(isinstance(each.message, Heartbeat | Append | Config | HeartbeatAck) for each in decode(frame))
    assert isinstance(c.write("b", b"x").error, NotLeader)
