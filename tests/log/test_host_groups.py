"""The groups of a host: how they are created, forgotten, wait for space and apply."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest

from holdfast.log.engine import Limits, Timing
from holdfast.log.errors import NoRoom, NotHosted, OutcomeUnknown
from holdfast.log.messages import (
    COMMANDS,
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
)
from holdfast.log.replica import Replica
from tests.log.cluster import A, B, C, Cluster, D, Waiter, kinds


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


# Groups


def test_groups_are_independent() -> None:
    c = Cluster(groups=(1, 2))
    c.elect("a", group=1)
    c.elect("b", group=2)
    c.write("a", b"one", group=1)
    c.write("b", b"two", group=2)
    c.run(0.3)

    assert all(c.applied(name, 1) == [b"one"] and c.applied(name, 2) == [b"two"] for name in "abc")


def test_a_group_that_is_not_hosted_is_refused_with_its_number() -> None:
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


def test_a_newcomer_is_invited_only_by_a_member() -> None:
    c = Cluster("abcd", members="abc")
    invitation = Envelope(GroupId(7), 0, Config((A, B, C), 0, 0))
    c.host("d").deliver(D, c.host("d").sessions[A], [invitation], c.now)
    stranger = Envelope(GroupId(8), 0, Config((B, C), 0, 0))
    c.host("d").deliver(A, c.host("d").sessions[A], [invitation, stranger], c.now)
    c.turn("d")

    assert sorted(c.host("d").replicas) == [7]
    assert not c.engine("d", 7).is_member


def test_a_node_that_may_not_join_yet_is_invited_again() -> None:
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
    """c was a member, and the group has continued without it."""
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


def test_a_group_that_continued_without_us_is_forgotten_but_its_promises_are_not() -> None:
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


def test_only_held_promises_of_the_forgotten_group_are_dropped() -> None:
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


def test_an_invitation_to_a_finished_epoch_is_answered_but_not_accepted() -> None:
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
    """In one session and under one leader, which has counted entries that the learner held before."""
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


def test_a_learner_invited_by_another_node_informs_its_leader() -> None:
    """Otherwise the leader continues to count entries that the learner held before, and reports them as committed
    there."""
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
    """d was a learner when a sealed it in, and forgot the group before the seal reached it. a leads epoch 1 without it."""
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


def test_a_member_that_died_before_its_group_was_on_disk_is_invited_again() -> None:
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


def test_two_of_three_members_elect_although_one_does_not_know_the_group() -> None:
    c = lost_member()
    c.crash("a")
    c.link("b", "d")
    c.run(5.0, "bd")

    assert c.engine("b").is_leader and c.replica("d").epoch == 1
    assert c.write("b", b"y", "bd").index


def test_no_node_is_invited_to_the_first_epoch_without_a_leader() -> None:
    """The founder of the group creates it on each member."""
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


def test_a_message_of_another_epoch_is_answered_with_our_epoch_and_ignored() -> None:
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


def test_a_follower_applies_delayed_entries_in_one_batch() -> None:
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


def test_a_follower_does_not_wait_when_many_entries_are_committed() -> None:
    c = Cluster(timing=Timing(apply=60.0), limits=Limits(apply_lag_max=4))
    c.elect("a")
    c.run(0.2)

    for number in range(9):
        c.write("a", b"%d" % number)

    assert c.replica("b").log.commit - c.replica("b").applied < 4
    assert len(c.applied("b")) >= 4


def test_followers_apply_a_group_that_every_node_acts_on_at_once() -> None:
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


def test_a_newly_elected_leader_applies_delayed_entries() -> None:
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


def test_acknowledgements_of_a_learner_are_checked_at_once_while_a_change_waits_for_it() -> None:
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
