"""Members change by sealing an epoch, and no command is lost or repeated."""

from __future__ import annotations

import pytest

from holdfast.log.errors import BadChange, NotLeader, OutcomeUnknown, Superseded
from holdfast.log.messages import NodeId, decode
from tests.log.cluster import Cluster

# Changing members


def test_a_member_is_added_while_clients_write() -> None:
    c = Cluster("abcd", members="abc")
    c.elect("a")
    early = [c.propose("a", b"%d" % i) for i in range(3)]
    change = c.change("a", "abcd")
    for _ in range(20):
        early.append(c.propose("a", b"during"))
        c.run(0.05)
    c.run(2.0)

    assert change.index is not None
    assert {c.replica(name).epoch for name in "abcd"} == {1}
    assert c.engine("d").members == tuple("abcd")
    acked = sum(1 for waiter in early if waiter.index)
    assert all(len(waiter.answers) == 1 for waiter in early)
    assert all(waiter.error.definite for waiter in early if waiter.error), "refused ones can be tried again"
    (leader,) = c.leaders()
    assert c.write(leader, b"after").index
    c.run(0.3)
    assert len(c.applied(leader)) == acked + 1
    assert c.applied("d") == c.applied(leader)


@pytest.mark.parametrize("leader_goes", [False, True])
def test_a_member_is_removed_also_the_leader_itself(leader_goes: bool) -> None:
    c = Cluster()
    c.elect("a")
    c.write("a", b"x")
    change = c.change("a", "bc" if leader_goes else "ab")
    c.run(2.5)

    assert change.index is not None
    stay = "bc" if leader_goes else "ab"
    gone = "a" if leader_goes else "c"
    (leader,) = c.leaders()
    assert leader in stay
    assert c.write(leader, b"y").index
    c.run(0.3)
    assert all(c.applied(name) == [b"x", b"y"] for name in stay)
    assert c.replica(gone).epoch == 1 and not c.engine(gone).is_member, "it was told"
    assert isinstance(c.write(gone, b"z").error, NotLeader)


def test_a_member_is_replaced() -> None:
    c = Cluster("abcd", members="abc")
    c.elect("a")
    c.write("a", b"x")
    c.crash("c")
    change = c.change("a", "abd")
    c.run(2.5)

    assert change.index is not None
    (leader,) = c.leaders()
    assert c.write(leader, b"y").index
    c.run(0.3)
    assert c.applied("d") == [b"x", b"y"]


@pytest.mark.parametrize("wish", ["abcde", "a", "abc", "ade", ""])
def test_a_change_of_more_than_one_member_or_of_none_is_refused(wish: str) -> None:
    c = Cluster("abcde", members="abc")
    c.elect("a")
    change = c.change("a", wish)
    c.run(0.5)

    assert isinstance(change.error, BadChange)
    assert change.error.definite
    assert {c.replica(name).epoch for name in "abc"} == {0}


def test_one_change_at_a_time() -> None:
    c = Cluster("abcde", members="abc")
    c.elect("a")
    first, second = c.change("a", "abcd"), c.change("a", "abce")
    c.run(2.5)

    assert first.index is not None
    assert isinstance(second.error, BadChange)


def test_a_newcomer_that_does_not_catch_up_leaves_the_group_unchanged() -> None:
    c = Cluster("abcd", members="abc")
    c.elect("a")
    c.crash("d")
    change = c.change("a", "abcd", seconds=1.0)
    c.run(1.5)

    assert isinstance(change.error, BadChange) and "catch up" in str(change.error)
    assert c.replica("a").epoch == 0
    assert c.write("a", b"x").index


def test_a_seal_needs_a_majority_of_the_old_and_of_the_new_members() -> None:
    c = Cluster("abcd", members="ab")
    c.elect("a")
    c.run(0.2)
    c.seal("a", "abc")
    seal = c.engine("a").seal_index
    assert seal is not None
    c.fsync("a")

    c.deliver("a", "c")
    c.fsync("c")
    c.deliver("c", "a")
    assert c.engine("a").commit < seal, "a and c: two of the new three, one of the old two"
    c.deliver("a", "b")
    c.fsync("b")
    c.deliver("b", "a")
    assert c.replica("a").epoch == 1


def test_a_majority_of_the_old_members_alone_does_not_seal() -> None:
    """Otherwise the successor could begin without the seal, and without the entries before it."""
    c = Cluster("abcd", members="abc")
    c.elect("a")
    c.run(0.2)
    c.seal("a", "abcd")
    seal = c.engine("a").seal_index
    assert seal is not None
    c.fsync("a")

    c.deliver("a", "b")
    c.fsync("b")
    c.deliver("b", "a")
    assert c.engine("a").commit < seal, "a and b: two of the old three, two of the new four"
    c.deliver("a", "d")
    c.fsync("d")
    c.deliver("d", "a")
    assert c.replica("a").epoch == 1


def test_nothing_proposed_after_a_seal_takes_effect_in_its_epoch() -> None:
    c = Cluster("abcd", members="abc")
    c.elect("a")
    c.run(0.2)
    c.seal("a", "abcd")
    late = c.propose("a", b"late")
    c.turn("a")

    assert isinstance(late.error, NotLeader), "definite: try on the successor"
    c.run(2.0)
    assert all(c.applied(name) == [] for name in "abcd")


def test_a_new_leader_of_the_old_epoch_finishes_a_seal_that_it_holds() -> None:
    c = Cluster("abcd", members="abc")
    c.elect("a")
    c.run(0.2)
    change = c.seal("a", "abcd")
    for peer in "bcd":
        c.deliver("a", peer)
        c.fsync(peer)
    c.crash("a")
    c.run(3.0, "bcd")

    assert {c.replica(name).epoch for name in "bcd"} == {1}
    (leader,) = c.leaders()
    assert c.write(leader, b"x", "bcd").index
    assert change.answers == [], "its node is dead"


def test_a_leader_whose_seal_is_committed_serves_no_more_reads() -> None:
    """Its own disk is slow, so it has not entered the successor, which may already have acknowledged writes."""
    c = Cluster("abcd", members="abc")
    c.elect("c")
    c.run(0.2)
    c.seal("c", "abd")
    for name in "abd":
        c.deliver("c", name)
        c.fsync(name)
        c.deliver(name, "c")
    assert c.replica("c").epoch == 0 and c.engine("c").commit == c.engine("c").seal_index
    c.now += 0.1
    c.tick("c")
    for name in "ad":
        c.deliver("c", name)
    c.lose("c", "b")
    c.settle("ad")
    for name in "ad":
        c.unlink("c", name)
        c.unlink("b", name)
    c.run(2.0, "ad")
    (leader,) = [name for name in "ad" if c.engine(name).is_leader]
    assert c.write(leader, b"new", "ad").index

    read = c.read("c")
    c.turn("c")
    c.deliver("c", "b")
    c.deliver("b", "c")
    c.fsync("c")

    assert isinstance(read.error, NotLeader), f"it cannot know of {b'new'!r}"


def test_a_leader_elected_after_a_seal_confirms_no_read() -> None:
    """The seal may already be committed, and the successor at work: its own first entry is after it, and never commits."""
    c = Cluster("abcd", members="abc")
    c.elect("a")
    c.run(0.2)
    c.seal("a", "abcd")
    for name in "bcd":
        c.deliver("a", name)
        c.fsync(name)
    c.crash("a")
    c.timeout("b")
    for _ in range(3):
        c.deliver("b", "c")
        if not c.engine("b").is_leader:
            c.fsync("c")
        c.deliver("c", "b")
        c.fsync("b")
    assert c.engine("b").is_leader and c.replica("b").epoch == 0
    read = c.read("b")
    c.turn("b")
    c.deliver("b", "c")  # c's disk is slow: it answers the round, and acknowledges no entry.
    c.deliver("c", "b")

    assert c.engine("b").progress[NodeId("c")].sequence == c.engine("b")._sequence, "the round is answered"
    assert c.replica("b").reads == [] and read.answers == []
    c.run(3.0, "bcd")
    assert isinstance(read.error, NotLeader)


def test_a_read_confirmed_in_the_turn_of_a_seal_is_answered() -> None:
    c = Cluster("abc", members="ab")
    c.elect("a")
    c.run(0.2)
    c.seal("a", "abc")
    read = c.read("a")
    c.turn("a")
    for name in "bc":
        c.deliver("a", name)
        c.fsync(name)
    for name in (NodeId("b"), NodeId("c")):
        for session, frame in c.wires[name, NodeId("a")]:
            c.host("a").deliver(name, session, decode(frame), c.now)
        c.wires[name, NodeId("a")].clear()
    assert c.replica("a").epoch == 0
    c.fsync("a")
    c.run(1.0)

    assert c.replica("a").epoch == 1
    assert len(read.answers) == 1


def test_a_restarted_node_that_applied_the_seal_continues_in_the_next_epoch() -> None:
    c = Cluster("abcd", members="abc")
    c.elect("a")
    c.change("a", "abcd")
    c.run(2.5)
    assert c.replica("b").epoch == 1
    c.crash("b", power=True)
    c.restart("b")

    assert c.replica("b").epoch == 1
    assert c.engine("b").members == tuple("abcd")
    c.run(1.0)
    assert c.applied("b") == c.applied("a")


def test_a_member_that_missed_a_change_learns_of_it_and_drops_its_tail() -> None:
    c = Cluster("abcd", members="abc")
    c.elect("c")
    c.run(0.2)
    c.isolate("c")
    lost = c.propose("c", b"lost")
    c.turn("c")
    c.fsync("c")
    c.elect("a", "abd")
    c.change("a", "abd")
    c.run(2.5, "abd")
    (leader,) = [name for name in "abd" if c.engine(name).is_leader]
    assert c.write(leader, b"x", "abd").index

    c.link("c", "a")
    c.link("c", "b")
    c.run(8.0)
    assert c.replica("c").epoch == 1 and not c.engine("c").is_member
    assert isinstance(lost.error, OutcomeUnknown | Superseded)
    assert b"lost" not in c.applied("a")
