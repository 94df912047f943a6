"""What a leader counts, sends and answers."""

from __future__ import annotations

from random import Random

import pytest

from holdfast.log.engine import Limits
from holdfast.log.errors import NotLeader
from holdfast.log.messages import (
    Append,
    AppendAck,
    AppendReject,
    Heartbeat,
    HeartbeatAck,
    Message,
    NodeId,
    Offer,
    PreVote,
    Vote,
)
from tests.log.cluster import A, C, Cluster
from tests.log.engines import SMALL, everywhere, pick

# Leading: counting (Raft §5.3, §5.4.2)


def test_an_acknowledgement_of_an_older_term_counts_nothing() -> None:
    """3: with five nodes, an acknowledgement that was in transit for two terms committed an entry that no node had."""
    c = Cluster("abcde")
    c.elect("a")
    c.run(0.2)
    for x in "cde":
        c.unlink("a", x)
        c.unlink("b", x)
    for i in range(4):
        c.propose("a", b"old%d" % i)
        c.turn("a")
        c.fsync("a")
    c.deliver("a", "b")
    c.fsync("b")
    c.fsync("b")
    late = pick(c.lose("b", "a"), AppendAck)
    assert late
    c.elect("c", "cde")
    c.run(1.1)
    for x in "ab":
        c.link("c", x)
    c.run(0.5)
    assert c.terms("a") == c.terms("c")
    c.crash("c")
    for x in "de":
        c.link("a", x)
    c.elect("a", "ade")
    news = [c.propose("a", b"new%d" % i) for i in range(3)]
    c.turn("a")
    c.fsync("a")
    c.deliver("a", "d")
    c.fsync("d")
    c.deliver("d", "a")
    commit = c.engine("a").commit

    c.link("a", "b")
    c.lose("a", "b")
    for ack in late:
        c.inject("b", "a", ack)

    assert c.engine("a").commit == commit
    assert all(waiter.answers == [] for waiter in news)


def test_a_leader_commits_only_entries_of_its_own_term_by_counting() -> None:
    """Raft §5.4.2, figure 8: an entry of an older term on a majority can still be overwritten."""
    c = Cluster(limits=Limits(append_bytes_max=1))
    c.elect("a")
    c.run(0.2)
    c.unlink("a", "c")
    c.propose("a", b"x")
    c.turn("a")
    c.fsync("a")
    c.deliver("a", "b")
    c.fsync("b")
    old = c.log("b").last_index
    c.crash("a")
    c.timeout("b")
    seen = []
    for _ in range(100):
        if c.engine("b").commit > old:
            break
        c.deliver("b", "c", 1)
        c.fsync("c")
        c.deliver("c", "b", 1)
        c.fsync("b")
        if c.engine("b").is_leader:
            seen.append((c.engine("b").progress[C].match, c.engine("b").commit))

    assert (old, old - 1) in seen, "on b and c, and not committed: it is of the term before"
    assert seen[-1] == (old + 1, old + 1), "together with the leader's own no-op, it is"


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7])
def test_the_majority_matches_a_naive_count(size: int) -> None:
    """For every index: is it on more than half of the disks?"""
    rng = Random(size)
    names = "abcdefg"[:size]
    c = Cluster(names)
    if size == 1:
        c.run(0.2)
    else:
        c.elect("a")
    engine = c.engine("a")
    members = tuple(NodeId(name) for name in names)
    for _ in range(50):
        for progress in engine.progress.values():
            progress.match = rng.randint(0, 9)
        engine.log.durable = rng.randint(0, 9)
        durable = [engine.log.durable, *(progress.match for progress in engine.progress.values())]
        naive = max(index for index in range(10) if 2 * sum(mark >= index for mark in durable) > size)
        assert engine._majority(members) == naive


def test_an_answer_from_a_node_that_is_not_a_member_is_dropped() -> None:
    """31: the stock engine died of a KeyError."""
    c = Cluster("abcd", members="abc")
    c.elect("a")
    dropped = c.host("a").dropped
    c.inject("d", "a", AppendAck(1, 1), HeartbeatAck(1, 1), AppendReject(1, 1, 1), Vote(1, True), PreVote(9, 9, 9))

    assert c.host("a").dropped == dropped + 5
    assert c.engine("a").is_leader


# Leading: sending


def test_a_follower_whose_tail_diverged_over_many_messages_rejoins() -> None:
    """20: pipelined rejections raised `next` again and again, and the follower never recovered."""
    c = Cluster(limits=SMALL)
    c.elect("a")
    c.run(0.2)
    c.isolate("a")
    for i in range(15):
        c.propose("a", b"own%d" % i + bytes(15))
        c.turn("a")
        c.fsync("a")
    c.elect("b", "bc")
    for i in range(25):
        c.write("b", b"%d" % i + bytes(20), "bc")
    c.link("a", "b")
    c.link("a", "c")
    c.run(1.0)

    assert c.terms("a") == c.terms("b")
    assert c.applied("a") == c.applied("b")


def test_a_divergent_follower_is_found_in_a_few_messages_not_one_per_entry() -> None:
    """21: 300 entries took the stock engine 300 heartbeats."""
    c = Cluster()
    c.elect("a")
    c.run(0.2)
    c.isolate("a")
    for i in range(300):
        c.propose("a", b"own%d" % i)
        c.turn("a")
        c.fsync("a")
    c.elect("b", "bc")
    for i in range(400):
        c.write("b", b"%d" % i, "bc")
    c.link("a", "b")
    sent = 0
    while c.engine("b").progress[A].match < c.log("b").last_index and sent < 100:
        c.turn("b")
        sent += len(pick(c.waiting("b", "a"), Append))
        c.deliver("b", "a")
        c.fsync("a")
        c.deliver("a", "b")

    assert sent <= 4
    assert c.terms("a") == c.terms("b")


def test_appends_in_flight_to_a_follower_are_bounded_in_messages_and_bytes() -> None:
    """37"""
    c = Cluster(limits=Limits(append_bytes_max=1000, window_messages=4, window_bytes=2500, entry_bytes_max=1000))
    c.elect("a")
    c.run(0.2)
    c.lose("a", "b")
    for _ in range(50):
        c.propose("a", bytes(900))
        c.turn("a")
        c.fsync("a")
    large = pick(c.waiting("a", "b"), Append)
    assert len(large) == 3, "two and a half thousand bytes"

    c.settle()
    assert c.log("b").last_index == c.log("a").last_index
    for _ in range(50):
        c.propose("a", b"x")
        c.turn("a")
        c.fsync("a")
    assert len(pick(c.waiting("a", "b"), Append)) == 4


def test_an_entry_larger_than_a_message_should_be_travels_alone_and_whole() -> None:
    """27: the stock engine cut such entries into pickled pieces."""
    c = Cluster(limits=Limits(append_bytes_max=100, entry_bytes_max=100_000, command_bytes_max=100_000))
    c.elect("a")
    c.run(0.2)
    c.propose("a", bytes(50_000))
    c.turn("a")

    (append,) = pick(c.waiting("a", "b"), Append)
    assert isinstance(append, Append) and len(append.entries) == 1 and len(append.entries[0][0]) > 50_000
    c.settle()
    c.run(0.2)
    assert everywhere(c, bytes(50_000), "abc")


def test_uncommitted_proposals_are_counted_exactly() -> None:
    """37: for any number of entries, and while commits trickle."""
    c = Cluster(limits=Limits(uncommitted_bytes_max=10**9, append_bytes_max=10_000, window_messages=2))
    c.elect("a")
    for peer in "bc":
        c.unlink("a", peer)
    for _ in range(6000):
        c.propose("a", bytes(100))
        c.turn("a")
        c.fsync("a")
    c.link("a", "b")
    c.turn("a")
    for _ in range(6):
        c.deliver("a", "b", 1)
        c.fsync("b")
        c.deliver("b", "a", 1)
    engine, log = c.engine("a"), c.log("a")

    assert 0 < engine.commit < 2000
    left = sum(len(log.entries(i, i)[0][0]) for i in range(engine.commit + 1, log.last_index + 1))
    assert engine.uncommitted_bytes == left


def test_appends_that_were_lost_without_a_broken_session_are_sent_again() -> None:
    c = Cluster()
    c.elect("a")
    c.run(0.2)
    waiter = c.propose("a", b"x")
    c.turn("a")
    c.fsync("a")
    for peer in "bc":
        c.lose("a", peer)
    c.run(2.0)

    assert waiter.index
    assert everywhere(c, b"x", "abc")


def test_a_new_session_resends_entries_lost_with_the_old_one() -> None:
    c = Cluster()
    c.elect("a")
    c.run(0.2)
    waiter = c.propose("a", b"x")
    c.turn("a")
    for peer in "bc":
        c.unlink("a", peer)
        c.lose("a", peer)
        c.link("a", peer)
    c.settle()

    assert waiter.index


def test_a_follower_with_a_full_disk_refuses_entries_and_catches_up_when_there_is_room() -> None:
    """33: no entry is half appended, the group continues, and the node keeps following."""
    c = Cluster()
    c.elect("a")
    c.run(0.2)
    c.disk("b").full = True
    assert c.write("a", b"x").index
    c.run(3.0)
    assert c.log("b").last_index < c.log("a").last_index
    assert c.leaders() == ["a"] and c.engine("b").leader == "a"

    c.disk("b").full = False
    c.run(2.5)
    assert everywhere(c, b"x", "abc")


def test_offers_come_once_per_heartbeat_and_name_the_newest_snapshot() -> None:
    """26: trimming during a transfer neither restarts it from the middle nor floods the link."""
    c = Cluster()
    c.elect("a")
    c.run(0.2)
    c.crash("c")
    for round_ in range(3):
        c.write("a", b"%d" % round_, "ab")
        c.machine("a").cut_snapshot()
        c.replica("a").trim(c.replica("a").applied)
        c.settle("ab")
    c.restart("c")
    c.run(0.3)
    c.lose("a", "c")
    offers: list[Message] = []
    for round_ in range(10):
        c.write("a", b"more %d" % round_, "ab")
        c.machine("a").cut_snapshot()
        c.replica("a").trim(c.replica("a").applied)
        c.now += 0.1
        c.tick("a")
        offers += pick(c.waiting("a", "c"), Offer)
        c.settle()

    assert len(offers) == 10
    assert isinstance(offers[-1], Offer) and offers[-1].index == c.log("a").base_index
    assert c.install("c")
    c.run(0.5)
    assert c.applied("c") == c.applied("a")


# Reads (Raft thesis §6.4)


def test_a_read_waits_for_a_majority_that_answered_after_it_came() -> None:
    """18"""
    c = Cluster()
    c.elect("a")
    c.run(0.2)
    c.write("a", b"x")
    c.now += 0.1
    c.tick("a")
    c.deliver("a", "b")
    before = c.read("a")
    c.turn("a")
    c.deliver("b", "a")
    assert before.answers == [], "that answer left before the read came"

    c.deliver("a", "b")
    c.deliver("b", "a")
    assert before.index == c.engine("a").commit


def test_a_deposed_leader_answers_no_reads() -> None:
    """18: it still believes to lead after another leader acknowledged a write."""
    c = Cluster()
    c.elect("a")
    c.run(0.2)
    for peer in "bc":
        c.lose("a", peer)
    c.engine("b")._leader_contact = c.engine("c")._leader_contact = float("-inf")
    c.elect("b", "bc")
    assert c.write("b", b"new", "bc").index
    assert c.engine("a").is_leader, "nobody has told it"
    read = c.read("a")
    c.settle()

    assert isinstance(read.error, NotLeader)


def test_a_new_leader_answers_reads_when_an_entry_of_its_own_term_is_committed() -> None:
    """18: until then its commit index may be behind its predecessor's acknowledgements."""
    c = Cluster()
    c.elect("a")
    c.run(0.2)
    acked = c.propose("a", b"x")
    c.turn("a")
    c.fsync("a")
    c.deliver("a", "b")
    c.fsync("b")
    c.deliver("b", "a")
    assert acked.index
    c.crash("a")
    c.timeout("b")
    c.deliver("b", "c")
    c.deliver("c", "b")
    c.fsync("b")
    c.deliver("b", "c")
    c.fsync("c")
    c.deliver("c", "b")
    assert c.engine("b").is_leader and c.engine("b").commit < acked.index
    read = c.read("b")
    c.turn("b")
    c.deliver("b", "c")
    c.deliver("c", "b")
    assert read.answers == []

    c.settle("bc")
    assert read.index is not None and read.index >= acked.index
    assert c.applied("b") == [b"x"]


def test_a_read_on_a_follower_names_the_leader() -> None:
    c = Cluster()
    c.elect("a")
    c.run(0.2)
    read = c.read("b")
    c.settle()

    assert isinstance(read.error, NotLeader) and read.error.leader == "a"


def test_reads_of_one_round_share_it() -> None:
    c = Cluster()
    c.elect("a")
    c.run(0.2)
    reads = [c.read("a") for _ in range(100)]
    c.turn("a")

    assert len(pick(c.waiting("a", "b"), Heartbeat)) == 1
    c.settle()
    assert all(read.index for read in reads)
