"""All groups of a node and its turns: what leaves when, which sessions count, whose disk is whose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest

from holdfast.log.engine import Limits, Timing
from holdfast.log.errors import NoRoom, NotHosted, NotLeader, OutcomeUnknown
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
    PreVote,
    RequestVote,
    Vote,
    decode,
)
from holdfast.log.replica import Replica
from tests.log.cluster import Cluster, Waiter

A, B, C, D = NodeId("a"), NodeId("b"), NodeId("c"), NodeId("d")


@contextmanager
def applies_of(replica: Replica) -> Iterator[list[int]]:
    """How many entries it applies, or tries to, each time."""
    sizes: list[int] = []
    apply_slice = Replica._apply_slice

    def watched(self: Replica, high: int) -> None:
        if self is replica:
            sizes.append(high - replica.applied)
        apply_slice(self, high)

    with patch.object(Replica, "_apply_slice", watched):
        yield sizes


def kinds(c: Cluster, sender: str, to: str) -> list[type]:
    return [type(message) for message in c.waiting(sender, to)]


# The turn


def test_one_commit_takes_along_what_all_groups_wrote() -> None:
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


def test_there_is_one_commit_at_a_time_and_what_came_meanwhile_shares_the_next() -> None:
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
    c.link("a", "b")  # b's disk answers now, in a new session: the old promise belongs to the old one.

    assert AppendAck not in kinds(c, "b", "a")
    c.settle()
    assert c.log("b").durable == c.log("a").last_index


def busy_disk() -> tuple[Cluster, int]:
    """c has acknowledged entry `index` of a's term 1, which waits behind a commit under way."""
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


def test_of_what_is_held_for_the_disk_only_promises_of_the_group_that_went_on_are_dropped() -> None:
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


def test_messages_of_an_older_session_are_dropped_whatever_they_say() -> None:
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


def test_what_was_queued_for_a_session_ends_with_it() -> None:
    c = Cluster()
    c.host("a").send_app(B, b"late")
    c.unlink("a", "b")
    c.link("a", "b")
    c.turn("a")

    assert [m for m in c.waiting("a", "b") if isinstance(m, App)] == []


# Disks of peers


def test_a_peer_that_comes_back_with_another_disk_is_refused() -> None:
    """12: it has forgotten what it voted and acknowledged."""
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
    """12: also when another commit is under way, which began before."""
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


def test_a_new_peer_that_left_and_came_back_meanwhile_still_waits_for_the_record() -> None:
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


def test_what_a_new_peer_says_before_its_disk_is_on_record_is_heard_then() -> None:
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


# Groups


def test_groups_are_independent() -> None:
    c = Cluster(groups=(1, 2))
    c.elect("a", group=1)
    c.elect("b", group=2)
    c.write("a", b"one", group=1)
    c.write("b", b"two", group=2)
    c.run(0.3)

    assert all(c.applied(name, 1) == [b"one"] and c.applied(name, 2) == [b"two"] for name in "abc")


def test_a_group_that_is_not_here_is_refused_by_name() -> None:
    c = Cluster()
    waiters = [c.propose("a", b"x", group=9), c.read("a", group=9), c.change("a", "ab", group=9)]
    c.turn("a")

    assert all(isinstance(waiter.error, NotHosted) and waiter.error.definite for waiter in waiters)


def test_creating_a_group_again_changes_nothing() -> None:
    c = Cluster()
    c.elect("a")
    c.write("a", b"x")
    replica = c.replica("a")

    assert c.host("a").create(GroupId(1), (A, B)) is replica
    assert replica.engine.members == (A, B, C)


@pytest.mark.parametrize(("group", "members"), [(0, (A, B)), (5, (B, C))])
def test_a_group_without_us_or_with_the_number_of_none_cannot_be_created(
    group: int, members: tuple[NodeId, ...]
) -> None:
    c = Cluster()

    with pytest.raises(ValueError, match="cannot be created"):
        c.host("a").create(GroupId(group), members)


def test_groups_come_back_after_a_restart_without_being_created() -> None:
    c = Cluster(groups=(1, 2, 3))
    c.crash("a")
    c.restart("a")

    assert sorted(c.host("a").replicas) == [1, 2, 3]


def test_a_newcomer_is_invited_by_a_leader_and_only_by_a_member() -> None:
    c = Cluster("abcd", members="abc")
    invitation = Envelope(GroupId(7), 0, Config((A, B, C), 0, 0))
    c.host("d").deliver(D, c.host("d").sessions[A], [invitation], c.now)
    stranger = Envelope(GroupId(8), 0, Config((B, C), 0, 0))
    c.host("d").deliver(A, c.host("d").sessions[A], [invitation, stranger], c.now)
    c.turn("d")

    assert sorted(c.host("d").replicas) == [7]
    assert not c.engine("d", 7).is_member


def test_who_may_not_join_yet_is_invited_again() -> None:
    c = Cluster("abcd", members="abc")
    host, session = c.host("d"), c.host("d").sessions[A]
    invitation = Envelope(GroupId(7), 0, Config((A, B, C), 0, 0))
    host._may_join = lambda _: False
    host.deliver(A, session, [invitation], c.now)
    assert host.replicas == {}

    host._may_join = lambda _: True
    host.deliver(A, session, [invitation], c.now)
    assert sorted(host.replicas) == [7]


def test_a_message_for_an_unknown_group_is_ignored() -> None:
    c = Cluster("abcd", members="abc")
    c.host("d").deliver(A, c.host("d").sessions[A], [Envelope(GroupId(1), 0, Heartbeat(1, 0, 1))], c.now)
    c.turn("d")

    assert c.host("d").replicas == {}
    assert c.waiting("d", "a") == []


def left(members: str = "abd") -> Cluster:
    """c was a member, and the group has gone on without it."""
    c = Cluster("abcd", members="abc")
    c.elect("a")
    c.write("a", b"x")
    c.change("a", members)
    c.run(2.5)
    assert c.replica("c").epoch == 1 and not c.engine("c").is_member
    return c


def forget(c: Cluster, name: str) -> None:
    assert c.host(name).forget(GroupId(1))
    c.turn(name)
    c.fsync(name)
    del c.members[NodeId(name)].states[GroupId(1)]


def test_a_group_that_went_on_without_us_is_forgotten_and_the_promises_in_it_are_not() -> None:
    c = left()
    term = c.log("c").term

    assert c.host("c").forget(GroupId(1))
    assert c.host("c").forgotten == [], "not before it is durable"
    c.turn("c")
    c.fsync("c")
    assert c.host("c").forgotten == [1]
    c.crash("c", power=True)
    c.restart("c", link=False)

    assert c.host("c").replicas == {}
    assert c.disk("c").tables() == ["pins", "tombstones"]
    assert c.host("c").journal.tombstones[GroupId(1)].term == term


def test_of_what_is_held_for_the_disk_only_the_promises_of_a_forgotten_group_go() -> None:
    c = Cluster("abcd", members="abc", groups=(1, 2))
    for group in (1, 2):
        c.elect("a", group=group)
        c.write("a", b"x", group=group)
    c.change("a", "abd")
    c.run(2.5)
    assert c.host("c").replicas[GroupId(1)].is_left_over
    frame = []
    for group in (GroupId(1), GroupId(2)):
        replica, log = c.replica("c", group), c.log("c", group)
        entry = bytes([COMMANDS]) + b"\x90", log.last_index + 1, log.term
        append = Append(log.term, log.last_index, log.last_term, log.commit, (entry,))
        frame.append(Envelope(group, replica.epoch, append))
    c.host("c").deliver(A, c.host("c").sessions[A], frame, c.now)
    c.turn("c")
    assert c.members[C].committing and AppendAcks not in kinds(c, "c", "a")

    assert c.host("c").forget(GroupId(1))
    c.fsync("c")

    log = c.log("c", 2)
    assert AppendAcks([2, c.replica("c", 2).epoch, log.term, log.last_index]) in c.waiting("c", "a")
    assert [m for m in c.waiting("c", "a") if isinstance(m, AppendAcks)][1:] == []


def test_a_member_cannot_forget_its_group() -> None:
    c = left()

    assert not c.host("a").forget(GroupId(1)) and not c.host("d").forget(GroupId(1))
    assert not c.host("c").forget(GroupId(7)), "nor what is not here"


def test_a_learner_that_holds_a_seal_cannot_forget_it() -> None:
    """Its acknowledgement counts for the successor's majority."""
    c = Cluster("ab", members="a")
    c.elect("a")
    c.seal("a", "b")
    c.deliver("a", "b")
    c.fsync("b")

    assert c.engine("b").seal_index is not None
    assert not c.host("b").forget(GroupId(1))


def test_an_invitation_to_an_epoch_that_is_over_is_answered_and_not_followed() -> None:
    c = left()
    forget(c, "c")
    session = c.host("c").sessions[B]
    c.lose("c", "b")
    old = Envelope(GroupId(1), 0, Config((A, B, C), 0, 0))
    c.host("c").deliver(B, session, [old, Envelope(GroupId(1), 0, PreVote(9, 99, 9))], c.now)
    c.turn("c")

    assert c.host("c").replicas == {}
    assert [m.members for m in c.waiting("c", "b") if isinstance(m, Config)] == [(A, B, D), (A, B, D)]
    with pytest.raises(ValueError, match="cannot be created"):
        c.host("c").create(GroupId(1), (A, B, C))


def test_a_group_comes_back_with_an_empty_log_and_the_old_promises() -> None:
    c = left()
    log = c.log("c")
    promised = (log.term, log.vote)
    forget(c, "c")
    c.change("a", "acd")
    c.run(2.5)

    assert c.replica("c").epoch == 2 and c.engine("c").is_member
    assert c.applied("c") == [b"x"]
    assert c.log("c").term >= promised[0] and (c.log("c").term > promised[0] or c.log("c").vote == promised[1])
    assert c.host("c").journal.tombstones == {}


def test_a_learner_that_forgot_the_group_is_sent_everything_again() -> None:
    """In one session and under one leader, which has counted what the learner held before."""
    c = Cluster("abcd", members="abc")
    c.elect("a")
    c.write("a", b"x")
    c.engine("a").add_learners((D,))
    c.run(1.0)
    assert c.engine("a").progress[D].match == c.log("a").last_index
    forget(c, "d")
    c.write("a", b"y")
    c.run(1.0)

    assert c.applied("d") == [b"x", b"y"]


def test_a_learner_that_somebody_else_invited_again_tells_its_leader() -> None:
    """Else the leader goes on to count what the learner held before, and says that it is committed there."""
    c = Cluster("abcd", members="abc")
    c.elect("a")
    c.write("a", b"x")
    c.engine("a").add_learners((D,))
    c.run(1.0)
    forget(c, "d")
    invitation = Envelope(GroupId(1), 0, Config((A, B, C), 0, 0))
    c.host("d").deliver(B, c.host("d").sessions[B], [invitation], c.now)
    c.turn("d")
    c.fsync("d")
    assert c.log("d").last_index == 0 and c.engine("a").progress[D].match > 0

    c.write("a", b"y")
    c.run(1.0)

    assert c.applied("d") == [b"x", b"y"]


def lost_member() -> Cluster:
    """d was a learner when a sealed it in, and forgot the group before it heard of the seal. a leads epoch 1 without it."""
    c = Cluster("abd", members="ab")
    c.elect("a")
    c.write("a", b"x")
    c.seal("a", "abd")
    c.lose("a", "d")
    forget(c, "d")
    c.unlink("a", "d")
    c.unlink("b", "d")
    c.run(2.0, "ab")
    assert c.engine("a").is_leader and c.replica("a").epoch == c.replica("b").epoch == 1
    assert c.engine("a").members == (A, B, D) and GroupId(1) not in c.host("d").replicas
    return c


def test_a_member_that_died_before_its_group_was_on_disk_is_told_of_it_again() -> None:
    c = lost_member()
    c.link("a", "d")
    while HeartbeatAck not in kinds(c, "d", "a"):
        c.now += 0.05
        c.tick("a")
        c.fsync("a")
        c.deliver("a", "d")
    assert c.members[D].committing, "the group is not on its disk"
    c.deliver("d", "a")
    c.crash("d")
    c.restart("d")
    assert GroupId(1) not in c.host("d").replicas
    c.run(2.0)

    assert c.replica("d").epoch == 1 and c.applied("d") == [b"x"]


def test_two_of_three_members_elect_although_one_has_not_heard_of_the_group() -> None:
    c = lost_member()
    c.crash("a")
    c.link("b", "d")
    c.run(5.0, "bd")

    assert c.engine("b").is_leader and c.replica("d").epoch == 1
    assert c.write("b", b"y", "bd").index


def test_nobody_is_invited_to_the_first_epoch_without_a_leader() -> None:
    """Its members are told of it by whoever founds the group, on each of them."""
    c = Cluster("ab", members="a")
    c.host("a").create(GroupId(2), (A, B))
    c.run(5.0)

    assert GroupId(2) not in c.host("b").replicas


def test_a_group_never_begins_with_the_state_of_an_earlier_stay() -> None:
    c = left()
    assert c.host("c").forget(GroupId(1))
    invitation = Envelope(GroupId(1), 1, Config((A, B, D), 3, 1))
    with pytest.raises(AssertionError, match="begins again with an empty state"):
        c.host("c").deliver(A, c.host("c").sessions[A], [invitation], c.now)


def test_a_message_of_another_epoch_is_answered_with_ours_and_not_obeyed() -> None:
    c = Cluster()
    c.elect("a")
    c.run(0.2)
    session = c.host("b").sessions[A]
    c.host("b").deliver(A, session, [Envelope(GroupId(1), 5, PreVote(9, 99, 9))], c.now)
    c.host("b").deliver(A, session, [Envelope(GroupId(1), 5, Append(9, 0, 0, 0, ()))], c.now)
    c.turn("b")

    assert c.engine("b").term == 1
    assert kinds(c, "b", "a") == [Config, Config]


def test_an_older_configuration_is_answered_with_the_newer_one() -> None:
    c = Cluster("abcd", members="abc")
    c.elect("a")
    c.change("a", "abcd")
    c.run(2.5)
    c.lose("b", "c")
    session = c.host("b").sessions[C]
    c.host("b").deliver(C, session, [Envelope(GroupId(1), 0, Config((A, B, C), 0, 0))], c.now)
    c.turn("b")

    assert [m.members for m in c.waiting("b", "c") if isinstance(m, Config)] == [(A, B, C, D)]
    assert c.replica("b").epoch == 1


# Room


def test_a_full_disk_stops_appends_and_nothing_else() -> None:
    c = Cluster()
    c.elect("a")
    c.run(0.2)
    for name in "abc":
        c.disk(name).full = True
    refused = c.write("a", b"x")
    read = c.read("a")
    c.run(2.0)
    assert isinstance(refused.error, NoRoom)
    assert read.index is not None
    assert c.leaders() == ["a"], "heartbeats and elections need no room"

    c.crash("a")
    c.run(2.0, "bc")
    (leader,) = c.leaders()
    for name in "bc":
        c.disk(name).full = False
    c.run(2.0, "bc")
    assert c.write(leader, b"y", "bc").index


def test_a_state_without_space_waits_and_its_leader_hands_over() -> None:
    c = Cluster()
    c.elect("a")
    c.run(0.2)
    c.disk("a").to_the_last_byte = True
    unknown = c.write("a", b"x")
    read = c.read("a")
    c.run(1.0)
    assert isinstance(unknown.error, OutcomeUnknown), "it is committed, but nobody waits here for its result"
    assert read.error is not None
    assert c.replica("a").stalled and c.applied("a") == []
    assert c.applied("b") == [b"x"], "the others go on"

    assert c.host("a").transfer(GroupId(1), B)
    c.run(1.0)
    assert c.leaders() == ["b"]
    assert c.write("b", b"y").index

    with applies_of(c.replica("a")) as tried:
        c.run(1.0)
    assert tried and set(tried) == {1}, "a whole slice is not worked out again and again"

    c.disk("a").to_the_last_byte = False
    c.run(1.0)
    assert c.replica("a").stalled is None
    assert c.applied("a") == [b"x", b"y"], "each once"


# Following


def test_a_follower_applies_what_came_meanwhile_together() -> None:
    c = Cluster(timing=Timing(apply=0.02))
    c.elect("a")
    c.run(0.2)

    with applies_of(c.replica("b")) as sizes:
        for number in range(5):
            c.now += 0.001
            c.write("a", b"%d" % number)
        assert c.replica("b").is_behind and c.now < c.host("b").turn_at <= c.now + 0.02
        c.run(0.2)

    assert len(sizes) < 5 and sum(sizes) == 5
    assert c.applied("b") == [b"%d" % number for number in range(5)]


def test_a_leader_applies_at_once() -> None:
    c = Cluster(timing=Timing(apply=0.02))
    c.elect("a")
    c.run(0.2)

    for number in range(5):
        c.now += 0.001
        assert c.write("a", b"%d" % number).index is not None
        assert len(c.applied("a")) == number + 1


def test_a_follower_does_not_wait_when_much_is_committed() -> None:
    c = Cluster(timing=Timing(apply=60.0), limits=Limits(apply_lag_max=4))
    c.elect("a")
    c.run(0.2)

    for number in range(9):
        c.write("a", b"%d" % number)

    assert c.replica("b").log.commit - c.replica("b").applied < 4
    assert len(c.applied("b")) >= 4


def test_a_group_on_which_every_node_acts_is_applied_at_once_also_by_followers() -> None:
    c = Cluster(timing=Timing(apply=60.0), groups=(1, 2))
    c.host("b")._applied_at_once = frozenset({GroupId(2)})
    for group in (1, 2):
        c.elect("a", group=group)
    c.run(0.2)

    for number in range(5):
        for group in (1, 2):
            c.write("a", b"%d" % number, group=group)

    assert c.replica("b", 1).is_behind
    assert c.replica("b", 2).applied == c.log("b", 2).commit


def test_whoever_is_elected_applies_what_it_waited_with() -> None:
    c = Cluster(timing=Timing(apply=60.0))
    c.elect("a")
    c.run(0.2)
    for number in range(5):
        c.write("a", b"%d" % number)
    assert c.replica("b").is_behind and len(c.applied("b")) < 4

    c.crash("a")
    c.run(0.5, "bc")

    (leader,) = c.leaders()
    assert c.applied(leader) == [b"%d" % number for number in range(5)]


# What is said of many groups at once


def test_acknowledgements_of_many_groups_are_one_message() -> None:
    c = Cluster(groups=(1, 2, 3))
    for group in (1, 2, 3):
        c.elect("a", group=group)
    c.run(0.2)
    waiters = [c.propose("a", b"x", group=group) for group in (1, 2, 3)]
    c.turn("a")
    c.deliver("a", "b")
    c.fsync("b")

    (acks,) = c.waiting("b", "a")
    assert isinstance(acks, AppendAcks)
    assert list(acks.flat[::4]) == [1, 2, 3]
    c.deliver("b", "a")
    c.fsync("a")
    assert all(waiter.index is not None for waiter in waiters)


def test_acknowledgements_of_groups_that_are_gone_or_moved_on_are_dropped_and_the_others_count() -> None:
    c = Cluster("abcd", members="abc", groups=(1, 2, 3))
    for group in (1, 2, 3):
        c.elect("a", group=group)
    c.change("a", "abd", group=2)
    c.run(2.5)
    c.propose("a", b"x", group=1)
    c.turn("a")
    commit = c.engine("a", 1).commit
    last, term = c.log("a", 1).last_index, c.engine("a", 1).term
    session = c.host("a").sessions[B]
    flat = [9, 0, 1, 1, 2, 0, 99, 99, 3, 0, 0, 0, 1, c.replica("a", 1).epoch, term, last]

    c.fsync("a")
    c.host("a").deliver(B, session, [Envelope(GroupId(0), 0, AppendAcks(flat))], c.now)

    assert c.engine("a", 1).commit == last > commit
    assert c.engine("a", 2).is_leader and c.engine("a", 3).is_leader


def test_what_a_learner_says_is_looked_at_at_once_while_it_waits_to_be_a_member() -> None:
    c = Cluster("abcd", members="abc")
    c.elect("a")
    c.write("a", b"x")
    members = tuple(NodeId(name) for name in "abcd")
    host = c.host("a")
    host.change_members(GroupId(1), members, 30.0, Waiter("change"), may_seal=lambda: False)
    c.run(1.0)
    assert c.engine("a").learners == (NodeId("d"),) and not host.busy
    envelope = Envelope(GroupId(1), 0, AppendAck(c.engine("a").term, c.log("a").last_index))

    host.deliver(NodeId("d"), host.sessions[NodeId("d")], [envelope], c.now)

    assert host.busy, "though nothing is committed by it, and nothing is to be sent"


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


def test_every_waiter_is_answered_exactly_once_whatever_happens() -> None:
    """Leaders come and go, members change, disks stall; in the end nobody waits and nobody heard two answers."""
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


def test_frames_are_what_the_codec_reads() -> None:
    c = Cluster()
    c.elect("a")
    c.now += 0.2
    c.tick("a")
    (_, frame) = c.wires[A, B][-1]

    assert all(isinstance(each.message, Heartbeat | Append | Config | HeartbeatAck) for each in decode(frame))
    assert isinstance(c.write("b", b"x").error, NotLeader)
