"""The engine: one test per rule of Raft that we rely on, and per way in which the stock engine broke it.

The numbers in docstrings are those of docs/raft-hardening.md. Each scenario is made by hand on a few hosts wired back
to back; most are the natural flow of messages in which stock pysyncobj loses, contradicts or blocks.
"""

from __future__ import annotations

from holdfast.log.engine import decode_seal, encode_seal
from holdfast.log.errors import OutcomeUnknown, Superseded
from holdfast.log.messages import Config, Envelope, GroupId, Heartbeat, HeartbeatAck, PreVote, RequestVote, Vote
from tests.log.cluster import A, B, C, Cluster, D
from tests.log.engines import answers, pick

# Membership


def test_a_cut_off_leader_cannot_change_members_by_itself() -> None:
    """4: in the stock engine, a alone added d and e, and committed with them while b and c elected b."""
    c = Cluster("abcde", members="abc")
    c.elect("a")
    c.run(0.2)
    for peer in "bc":
        for other in "ade":
            c.unlink(peer, other)
    change = c.change("a", "abcd")
    second = c.change("a", "abce")
    own = c.propose("a", b"minority")
    c.run(0.45, "ade")
    c.elect("b", "bc")
    assert c.write("b", b"majority", "bc").index
    c.run(2.0)

    assert change.index is None and second.index is None and own.index is None
    assert all(b"minority" not in c.applied(name) for name in "abc")
    assert {c.replica(name).epoch for name in "abc"} == {0}


def test_the_members_after_a_restart_are_those_of_the_log_not_of_the_call() -> None:
    """14"""
    c = Cluster("abcd", members="abc")
    c.elect("a")
    c.change("a", "abcd")
    c.run(2.5)
    for name in "abcd":
        c.crash(name, power=True)
    for name in "abcd":
        c.restart(name)
        c.host(name).create(GroupId(1), (A, B, C))

    assert {c.engine(name).members for name in "abcd"} == {(A, B, C, D)}


def test_a_seal_that_was_overwritten_changes_nothing() -> None:
    """14: a rolled-back change has no effect."""
    c = Cluster("abcd", members="abc")
    c.elect("a")
    c.run(0.2)
    change = c.seal("a", "abcd")
    c.fsync("a")
    c.isolate("a")
    c.elect("b", "bc")
    assert c.write("b", b"x", "bc").index
    for peer in "bc":
        c.link("a", peer)
    c.run(2.0)

    assert c.engine("a").seal_index is None and c.replica("a").epoch == 0
    assert isinstance(change.error, OutcomeUnknown | Superseded)
    assert c.applied("a") == [b"x"]
    (leader,) = c.leaders()
    again = c.change(leader, "abcd")
    c.run(2.5)
    assert again.index is not None


def test_a_node_without_all_entries_of_the_previous_epoch_follows_and_never_leads() -> None:
    c = Cluster("abcd", members="abc")
    session = c.host("d").sessions[A]
    c.host("d").deliver(A, session, [Envelope(GroupId(1), 1, Config((A, B, D), 50, 3))], c.now)
    c.turn("d")
    c.fsync("d")
    assert c.engine("d").is_member and not c.engine("d").seeded
    for _ in range(60):
        c.now += 0.1
        c.tick("d")

    assert pick(c.waiting("d", "b"), PreVote) == []
    assert pick(c.waiting("d", "b"), RequestVote) == []


def test_no_node_votes_for_a_log_that_ends_before_its_epoch_begins() -> None:
    c = Cluster("abcd", members="abc")
    c.elect("a")
    for i in range(5):
        c.write("a", b"%d" % i)
    c.change("a", "abcd")
    c.run(2.5)
    seed = c.log("b").configuration.seed_index
    c.now += 5.0
    c.lose("b", "d")
    term = c.engine("b").term
    c.inject("d", "b", RequestVote(term + 5, seed - 1, term + 4, True))

    assert pick(answers(c, "d", "b"), Vote) == [Vote(term + 5, False)]


def test_a_seal_is_encoded_as_its_epoch_and_members() -> None:
    assert decode_seal(encode_seal(7, (A, B))) == (7, (A, B))


# One message for all groups


def test_one_message_per_peer_and_heartbeat_carries_all_groups() -> None:
    groups = range(1, 25)
    c = Cluster(groups=groups)
    for group in groups:
        c.elect("a", group=group)
    c.run(0.5)
    c.now += c.timing.heartbeat + 0.01
    c.tick("a")

    assert len(c.wires[A, B]) == 1
    assert len(pick(c.waiting("a", "b"), Heartbeat)) == 24
    c.deliver("a", "b")
    assert len(c.wires[B, A]) == 1
    assert len(pick(c.waiting("b", "a"), HeartbeatAck)) == 24


def test_an_idle_cluster_writes_nothing() -> None:
    c = Cluster(groups=range(1, 9))
    for group in range(1, 9):
        c.elect("a", group=group)
    c.run(1.0)
    before = [c.disk(name).fsyncs for name in "abc"]
    c.run(3.0)

    assert [c.disk(name).fsyncs for name in "abc"] == before
