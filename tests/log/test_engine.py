"""The engine: one test per rule of Raft that we rely on, and per way in which the stock engine broke it.

The numbers in docstrings are those of docs/raft-hardening.md. Each scenario is made by hand on a few hosts that are wired
back to back; most are the natural flow of messages in which stock pysyncobj loses, contradicts or blocks.
"""

from __future__ import annotations

import hashlib
import inspect
from random import Random

import pysyncobj.pickle
import pytest
from pysyncobj import syncobj as stock

from holdfast.log.audit import AUDITED, check_parent, source_hashes
from holdfast.log.engine import (
    FOLLOWER,
    Engine,
    Limits,
    Timing,
    decode_seal,
    encode_seal,
)
from holdfast.log.errors import EngineFault, EngineNotAudited, NotLeader, OutcomeUnknown, Superseded
from holdfast.log.messages import (
    COMMANDS,
    Append,
    AppendAck,
    AppendReject,
    Config,
    Entry,
    Envelope,
    GroupId,
    Heartbeat,
    HeartbeatAck,
    Message,
    NodeId,
    Offer,
    PreVote,
    PreVoteReply,
    RequestVote,
    TimeoutNow,
    Vote,
)
from tests.log.cluster import Cluster

A, B, C, D = NodeId("a"), NodeId("b"), NodeId("c"), NodeId("d")
SMALL = Limits(append_bytes_max=40, entry_bytes_max=40, window_messages=4)


def entry(index: int, term: int, text: bytes = b"x") -> Entry:
    return bytes([COMMANDS]) + b"\x91\xc4" + bytes([len(text)]) + text, index, term


def pick(messages: list[Message], kind: type) -> list[Message]:
    return [message for message in messages if type(message) is kind]


def lone_follower() -> Cluster:
    """`a` follows in term 1 with an empty log; its peers are played by the test."""
    c = Cluster()
    c.inject("b", "a", Heartbeat(1, 0, 1))
    c.fsync("a")
    for peer in "bc":
        c.lose("a", peer)
    return c


def answers(c: Cluster, to: str = "b", name: str = "a") -> list[Message]:
    """What `name` says to `to` once its disk has answered."""
    c.turn(name)
    while c.members[NodeId(name)].committing:
        c.fsync(name)
    return c.lose(name, to)


def everywhere(c: Cluster, command: bytes, names: str) -> bool:
    return all(command in c.applied(name) for name in names)


# Following: entries (Raft §5.3)


def test_only_a_real_conflict_truncates() -> None:
    """1: an append that repeats the beginning of what we hold takes nothing away."""
    c = lone_follower()
    held = tuple(entry(i, 1) for i in range(1, 7))
    c.inject("b", "a", Append(1, 0, 0, 0, held))
    c.fsync("a")
    c.lose("a", "b")
    c.inject("b", "a", Append(1, 0, 0, 0, held[:2]))

    assert c.log("a").last_index == 6
    assert answers(c) == [AppendAck(1, 2)], "and only what was compared is acknowledged"


def test_a_conflicting_entry_is_replaced_with_all_that_follow_it() -> None:
    c = lone_follower()
    c.inject("b", "a", Append(1, 0, 0, 0, tuple(entry(i, 1) for i in range(1, 7))))
    c.inject("c", "a", Append(3, 2, 1, 0, (entry(3, 1), entry(4, 3))))

    assert c.terms("a") == [1, 1, 1, 3]
    assert answers(c, "c")[-1] == AppendAck(3, 4)


def test_a_late_rejection_does_not_make_a_leader_resend_what_was_acknowledged() -> None:
    """1: two rejections, a resend, an acknowledgement, and the second rejection arrives: no acked write is lost."""
    c = Cluster(limits=SMALL)
    c.elect("a")
    c.run(0.2)
    c.isolate("c")
    c.unlink("a", "b")
    writes = []
    for i in range(6):
        writes.append(c.propose("a", b"%d" % i + bytes(20)))
        c.turn("a")
        c.fsync("a")
    c.link("a", "b")
    stale = [AppendReject(1, c.log("b").last_index + 2, c.log("b").last_index + 1)] * 2
    c.inject("b", "a", stale[0])
    c.settle("ab")
    assert all(waiter.index for waiter in writes)

    c.inject("b", "a", stale[1])
    c.deliver("a", "b", 1)
    assert c.log("b").last_index == c.log("a").last_index
    c.crash("a")
    c.link("b", "c")
    c.elect("b", "bc")
    c.run(0.3, "bc")
    assert len(c.applied("b")) == len(c.applied("c")) == 6


def test_an_append_beyond_our_end_is_rejected_with_where_we_end() -> None:
    c = lone_follower()
    c.inject("b", "a", Append(1, 0, 0, 0, (entry(1, 1),)))
    c.inject("b", "a", Append(1, 7, 1, 0, (entry(8, 1),)))

    assert answers(c)[-1] == AppendReject(1, 7, 2)
    assert c.log("a").last_index == 1


def test_an_append_behind_an_entry_of_another_term_is_rejected_down_to_our_commit() -> None:
    """21: everything up to the commit index matches, so one round trip finds the place."""
    c = lone_follower()
    c.inject("b", "a", Append(1, 0, 0, 2, tuple(entry(i, 1) for i in range(1, 300))))
    c.inject("c", "a", Append(2, 299, 2, 0, ()))

    assert answers(c, "c")[-1] == AppendReject(2, 299, 3)


def test_an_append_below_our_base_is_answered_with_our_commit() -> None:
    c = Cluster()
    c.elect("b")
    for i in range(5):
        c.write("b", b"%d" % i)
    c.run(0.2)
    c.machine("a").cut_snapshot()
    c.replica("a").trim(4)
    c.settle()
    c.inject("b", "a", Append(1, 1, 1, 0, (entry(2, 1),)))

    assert answers(c) == [AppendAck(1, c.engine("a").commit)]


def test_commit_moves_only_over_entries_that_were_compared_with_the_leaders() -> None:
    """2: our own tail is nobody's word; a commit index beyond what a message verified does not cover it."""
    c = lone_follower()
    c.inject("b", "a", Append(1, 0, 0, 0, tuple(entry(i, 1, b"mine") for i in range(1, 6))))
    c.inject("c", "a", Append(2, 2, 1, 5, ()))
    assert c.engine("a").commit == 2, "5 is committed somewhere, but not these 3, 4 and 5"

    c.inject("c", "a", Offer(2, 20, 2, b""))
    c.fsync("a")
    c.inject("c", "a", Heartbeat(2, 2, 1))
    assert c.engine("a").commit == 2
    assert c.applied("a") == [b"mine"] * 2


def test_a_cut_off_leader_that_is_offered_a_snapshot_applies_nothing_of_its_own() -> None:
    """2: the whole story. Its clients are not told success for what nobody else has."""
    c = Cluster()
    c.elect("a")
    c.run(0.2)
    c.isolate("a")
    own = [c.propose("a", b"own") for _ in range(3)]
    c.turn("a")
    c.fsync("a")
    c.elect("b", "bc")
    for i in range(20):
        c.write("b", b"%d" % i, "bc")
    c.machine("b").cut_snapshot()
    c.replica("b").trim(c.replica("b").applied)
    c.settle("bc")
    c.link("a", "b")
    c.run(0.5)
    assert c.applied("a") == []
    assert c.install("a")
    c.run(0.5)

    assert c.applied("a") == c.applied("b") == [b"%d" % i for i in range(20)]
    assert all(isinstance(waiter.error, OutcomeUnknown | Superseded) for waiter in own)


def test_a_heartbeat_carries_no_more_commit_than_its_receiver_acknowledged() -> None:
    c = Cluster()
    c.elect("a")
    c.run(0.2)
    c.unlink("a", "c")
    c.write("a", b"x", "ab")
    c.link("a", "c")
    c.lose("a", "c")
    c.now += 0.1
    c.tick("a")
    beats = pick(c.waiting("a", "c"), Heartbeat)

    assert beats and all(beat.commit <= c.log("c").last_index for beat in beats if isinstance(beat, Heartbeat))


def test_a_deposed_leader_is_told_the_new_term() -> None:
    """24: silence would leave it queueing commands for half a minute."""
    c = lone_follower()
    c.inject("c", "a", Heartbeat(5, 0, 1))
    c.lose("a", "b")
    for stale in (Append(1, 0, 0, 0, ()), Offer(1, 9, 1, b"")):
        c.inject("b", "a", stale)
        (answer,) = answers(c)
        assert isinstance(answer, AppendReject) and answer.term == 5
    c.inject("b", "a", Heartbeat(1, 0, 2))
    assert c.waiting("a", "b") == [HeartbeatAck(5, 2)]


# Following: what must never happen stops the node


def faulty_messages() -> list[tuple[str, Message]]:
    return [
        ("contradicts committed entry 2", Append(4, 2, 3, 0, ())),
        ("would overwrite committed entry 2", Append(4, 1, 1, 0, (entry(2, 3),))),
        ("our log ends at 3: .* add it under a new name", Heartbeat(4, 9, 1)),
    ]


@pytest.mark.parametrize(("reason", "message"), faulty_messages())
def test_a_message_that_contradicts_what_is_committed_stops_the_node(reason: str, message: Message) -> None:
    """11: the stock engine clamps its indices and goes on with a state that differs for ever."""
    c = lone_follower()
    c.inject("b", "a", Append(1, 0, 0, 2, tuple(entry(i, 1) for i in range(1, 4))))
    c.fsync("a")

    with pytest.raises(EngineFault, match=reason):
        c.inject("c", "a", message)
    assert c.terms("a") == [1, 1, 1]


def test_a_second_leader_of_the_same_term_stops_the_node() -> None:
    c = Cluster()
    c.elect("a")

    with pytest.raises(EngineFault, match="two leaders in term 1"):
        c.inject("b", "a", Heartbeat(1, 0, 1))


def test_an_acknowledgement_beyond_the_leaders_log_stops_the_node() -> None:
    c = Cluster()
    c.elect("a")

    with pytest.raises(EngineFault, match="acknowledged 99"):
        c.inject("b", "a", AppendAck(1, 99))


def test_the_parent_may_acknowledge_nothing_that_was_not_compared() -> None:
    """8, 10: after a snapshot the stock engine acknowledged its own last index, whatever it held."""
    c = lone_follower()
    engine = c.engine("a")

    for arguments in ({"success": True}, {"reset": True, "nextNodeIdx": 5}, {"success": False, "nextNodeIdx": 5}):
        with pytest.raises(EngineFault, match="must name a verified entry"):
            engine._SyncObj__sendNextNodeIdx(B, **arguments)


# Promises wait for the disk


def test_an_acknowledgement_waits_for_the_disk() -> None:
    """7"""
    c = lone_follower()
    c.inject("b", "a", Append(1, 0, 0, 0, (entry(1, 1),)))
    assert c.waiting("a", "b") == []

    c.fsync("a")
    assert c.waiting("a", "b") == [AppendAck(1, 1)]


def test_an_acknowledgement_of_what_a_commit_under_way_does_not_hold_waits_for_the_next() -> None:
    """7"""
    c = lone_follower()
    c.inject("b", "a", Append(1, 0, 0, 0, (entry(1, 1),)))
    c.inject("b", "a", Append(1, 1, 1, 0, (entry(2, 1),)))
    c.fsync("a")
    assert c.waiting("a", "b") == [AppendAck(1, 1)]

    c.fsync("a")
    assert c.waiting("a", "b") == [AppendAck(1, 1), AppendAck(1, 2)]


def test_a_repeated_append_is_not_acknowledged_before_the_first_one_is_durable() -> None:
    """7: we hold the entry, but only in memory."""
    c = lone_follower()
    append = Append(1, 0, 0, 0, (entry(1, 1),))
    c.inject("b", "a", append)
    c.inject("b", "a", append)

    assert c.waiting("a", "b") == []


def test_a_vote_waits_for_the_disk() -> None:
    """7: a forgotten vote is a second leader."""
    c = Cluster()
    c.inject("b", "a", RequestVote(1, 0, 0, False))
    assert c.waiting("a", "b") == []

    c.fsync("a")
    assert c.waiting("a", "b") == [Vote(1, True)]


def test_a_vote_that_a_crash_undid_was_never_heard_and_a_durable_one_is_kept() -> None:
    """7, 12"""
    c = Cluster()
    c.inject("b", "a", RequestVote(1, 0, 0, False))
    c.crash("a")
    c.restart("a")
    c.inject("c", "a", RequestVote(1, 0, 0, False))
    c.fsync("a")
    assert pick(c.waiting("a", "c"), Vote) == [Vote(1, True)]
    assert pick(c.waiting("a", "b"), Vote) == []

    c.crash("a")
    c.restart("a")
    c.lose("a", "b")
    c.inject("b", "a", RequestVote(1, 5, 1, False))
    assert pick(answers(c), Vote) == [Vote(1, False)]


def test_a_candidate_asks_for_votes_when_its_own_is_on_disk() -> None:
    """7"""
    c = Cluster()
    c.timeout("a")
    c.deliver("a", "b")
    c.deliver("b", "a")
    assert c.engine("a").term == 1 and pick(c.waiting("a", "c"), RequestVote) == []

    c.fsync("a")
    assert pick(c.waiting("a", "c"), RequestVote) == [RequestVote(1, 0, 0, False)]


def test_a_leader_counts_its_own_log_only_as_far_as_it_is_on_disk() -> None:
    """7: its append may race its disk (Raft thesis §10.2.1), its own count may not."""
    c = Cluster()
    c.elect("a")
    c.run(0.2)
    c.crash("c")
    waiter = c.propose("a", b"x")
    c.turn("a")
    assert pick(c.waiting("a", "b"), Append), "sent before our own disk has it"
    commit = c.engine("a").commit
    c.deliver("a", "b")
    c.fsync("b")
    c.deliver("b", "a")

    assert c.engine("a").commit == commit
    c.fsync("a")
    assert c.engine("a").commit == commit + 1 and waiter.index == commit + 1


def test_power_loss_of_all_nodes_at_once_loses_nothing_acknowledged() -> None:
    """7"""
    c = Cluster()
    c.elect("a")
    acked = [c.write("a", b"%d" % i) for i in range(10)]
    assert all(waiter.index for waiter in acked)
    c.propose("a", b"in flight")
    c.turn("a")
    for name in "abc":
        c.crash(name, power=True)
    for name in "abc":
        c.restart(name)
    c.run(3.0)

    (leader,) = c.leaders()
    assert c.applied(leader)[:10] == [b"%d" % i for i in range(10)]


def test_a_heartbeat_is_answered_without_the_disk() -> None:
    """docs/raft-hardening.md, "answers that need no disk": it promises nothing about entries."""
    c = lone_follower()
    c.inject("b", "a", Append(1, 0, 0, 0, (entry(1, 1),)))
    c.inject("b", "a", Heartbeat(1, 0, 7))

    assert c.waiting("a", "b") == [HeartbeatAck(1, 7)]


def test_a_node_that_forgot_the_term_of_a_heartbeat_it_answered_elects_nobody_in_it() -> None:
    """docs/raft-hardening.md: the leader's majority has its votes on disk, so one forgetful node is not enough."""
    c = Cluster()
    c.elect("a", "ab")
    term = c.engine("a").term
    c.now += 0.1
    c.tick("a")
    c.deliver("a", "c")
    assert HeartbeatAck(term, c.engine("a")._sequence) in c.waiting("c", "a")
    c.crash("c", keep_pending=False)
    c.isolate("a")
    c.restart("c", link=False)
    assert c.engine("c").term < term
    c.link("b", "c")
    c.timeout("c")
    c.settle("bc")

    assert not (c.engine("c").is_leader and c.engine("c").term <= term)


# Leading: counting (Raft §5.3, §5.4.2)


def test_an_acknowledgement_of_an_older_term_counts_nothing() -> None:
    """3: with five nodes, an acknowledgement that was on its way for two terms committed what nobody had."""
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
def test_the_majority_is_what_a_naive_count_says(size: int) -> None:
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


def test_an_answer_from_somebody_who_is_no_member_is_dropped() -> None:
    """31: the stock engine died of a KeyError."""
    c = Cluster("abcd", members="abc")
    c.elect("a")
    dropped = c.host("a").dropped
    c.inject("d", "a", AppendAck(1, 1), HeartbeatAck(1, 1), AppendReject(1, 1, 1), Vote(1, True), PreVote(9, 9, 9))

    assert c.host("a").dropped == dropped + 5
    assert c.engine("a").is_leader


# Leading: sending


def test_a_follower_whose_tail_diverged_over_many_messages_rejoins() -> None:
    """20: pipelined rejections raised `next` again and again, and the follower never came back."""
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


def test_what_is_in_flight_to_a_follower_is_bounded_in_messages_and_bytes() -> None:
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


def test_what_is_proposed_and_not_committed_is_counted_exactly() -> None:
    """37: however many entries it is, and while commits trickle."""
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


def test_a_new_session_sends_again_what_the_old_one_lost() -> None:
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
    """33: nothing is half appended, the group works on, and the node keeps following."""
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


# Elections (Raft §5.2, §5.4.1, thesis §9.6)


def test_somebody_leads_soon_after_the_start_and_only_one() -> None:
    c = Cluster("abcde")
    c.run(3.0)

    assert len(c.leaders()) == 1


def test_nobody_votes_for_a_log_that_is_behind_its_own() -> None:
    c = lone_follower()
    c.inject("b", "a", Append(1, 0, 0, 0, (entry(1, 1), entry(2, 1))))
    c.fsync("a")
    c.now += 2.0
    for last_index, last_term, granted in ((1, 1, False), (9, 0, False), (2, 1, True), (1, 2, True)):
        c.lose("a", "c")
        term = c.engine("a").term + 1
        c.inject("c", "a", PreVote(term, last_index, last_term))
        assert c.lose("a", "c") == [PreVoteReply(term - 1, term, granted)]
        c.inject("c", "a", RequestVote(term, last_index, last_term, False))
        assert pick(answers(c, "c"), Vote) == [Vote(term, granted)]


def test_a_refused_vote_is_answered() -> None:
    """24"""
    c = lone_follower()
    c.inject("c", "a", RequestVote(1, 0, 0, False))

    assert answers(c, "c") == [Vote(1, False)]


def test_a_vote_whose_answer_was_lost_is_given_again_to_the_same_candidate_only() -> None:
    """25"""
    c = Cluster()
    for _ in range(2):
        c.inject("b", "a", RequestVote(1, 0, 0, False))
        assert answers(c) == [Vote(1, True)]
    c.inject("c", "a", RequestVote(1, 0, 0, False))
    assert answers(c, "c") == [Vote(1, False)]


def candidate(names: str = "abcde") -> Cluster:
    """`a` has won its pre-vote and asks for votes in term 1."""
    c = Cluster(names)
    c.timeout("a")
    for name in names[1:]:
        c.deliver("a", name)
        c.deliver(name, "a")
    c.fsync("a")
    assert c.engine("a").term == 1 and not c.engine("a").is_leader
    return c


def test_a_vote_counts_once_however_often_it_arrives() -> None:
    """25: a repeated message made a minority elect a leader."""
    c = candidate()
    for _ in range(5):
        c.inject("b", "a", Vote(1, True))
    assert not c.engine("a").is_leader

    c.inject("c", "a", Vote(1, True))
    assert c.engine("a").is_leader


def test_votes_of_another_term_or_refused_ones_do_not_count() -> None:
    """25"""
    c = candidate()
    c.inject("b", "a", Vote(0, True), Vote(1, False))
    c.inject("c", "a", Vote(0, True))
    assert not c.engine("a").is_leader

    c.inject("d", "a", Vote(2, False))
    assert (c.engine("a").term, c.engine("a").role) == (2, FOLLOWER), "a higher term ends the candidacy"


def test_a_pre_vote_changes_nothing_on_either_side() -> None:
    """23"""
    c = Cluster()
    c.elect("b")
    c.run(0.2)
    before = {name: (c.engine(name).term, c.log(name).vote) for name in "abc"}
    c.timeout("a")
    c.settle()

    assert {name: (c.engine(name).term, c.log(name).vote) for name in "abc"} == before
    assert c.leaders() == ["b"]


def test_a_node_that_was_cut_off_comes_back_without_disturbing_the_leader() -> None:
    """23: without pre-vote its term would have grown, and deposed a healthy leader."""
    c = Cluster()
    c.elect("a")
    c.run(0.2)
    term = c.engine("a").term
    c.isolate("c")
    c.run(10.0)
    for peer in "ab":
        c.link("c", peer)
    c.run(2.0)

    assert (c.leaders(), c.engine("a").term, c.engine("c").term) == (["a"], term, term)


def test_a_follower_that_hears_its_leader_refuses_votes_and_pre_votes() -> None:
    """23: stickiness. A node that lost only its own link to the leader disturbs nobody."""
    c = Cluster()
    c.elect("a")
    c.run(0.2)
    term = c.engine("a").term
    c.lose("b", "c")
    c.inject("c", "b", PreVote(term + 1, 99, term), RequestVote(term + 1, 99, term, False))

    assert answers(c, "c", "b") == [PreVoteReply(term, term + 1, False), Vote(term, False)]
    assert c.engine("b").term == term
    c.inject("b", "a", RequestVote(term + 1, 99, term, False))
    assert c.engine("a").is_leader


def test_a_one_way_or_partial_cut_does_not_make_leaders_take_turns() -> None:
    """23: a and c cannot talk, b talks to both."""
    c = Cluster()
    c.elect("a")
    c.run(0.2)
    c.unlink("a", "c")
    c.run(10.0)

    assert c.leaders() == ["a"] and c.engine("a").term == 1
    assert c.write("a", b"x").index


def test_a_leader_that_hears_no_majority_steps_down_before_its_followers_may_elect() -> None:
    """18, 23: check-quorum."""
    c = Cluster()
    c.elect("a")
    c.run(0.2)
    c.isolate("a")
    c.run(c.timing.quorum + 0.15, "a")

    assert not c.engine("a").is_leader
    assert Timing().quorum <= Timing().election_min


def test_a_leader_that_stepped_down_waits_a_full_timeout_before_it_asks_again() -> None:
    """29: the stock engine kept an old deadline and campaigned at once."""
    c = Cluster()
    c.elect("a")
    c.run(0.2)
    c.isolate("a")
    for _ in range(100):
        if not c.engine("a").is_leader:
            break
        c.now += 0.05
        c.tick("a")

    assert not c.engine("a").is_leader
    assert c.engine("a").wake_at >= c.now + c.timing.election_min - 0.05


def test_silence_of_the_leader_starts_an_election_within_its_bounds() -> None:
    c = Cluster()
    c.elect("a")
    c.run(0.5)
    began = c.now
    c.members[A].running = None  # It falls silent; no connection breaks.
    for _ in range(1000):
        if any(c.engine(name).term > 1 for name in "bc"):
            break
        c.run(0.01, step=0.01)

    assert c.timing.election_min - 0.1 <= c.now - began <= c.timing.election_max + 0.1


def test_a_broken_connection_to_the_leader_starts_an_election_at_once() -> None:
    elected = 0
    for seed in range(20):
        c = Cluster()
        for name in "abc":
            c.host(name)._rng.seed(f"{name} {seed}")
        c.elect("a")
        c.run(0.2)
        term = c.engine("b").term
        c.crash("a")
        c.run(c.timing.broken_max + 0.02, "bc", step=0.005)

        assert max(c.engine(name).term for name in "bc") > term, "somebody has asked for votes"
        assert "a" not in c.leaders()
        elected += len(c.leaders())
        c.run(c.timing.election_min, "bc", step=0.005)
        assert len(c.leaders()) == 1, "also those that asked at the same moment did not wait for a timeout"

    assert elected > 12


def test_two_who_lost_their_leader_before_they_found_each_other_elect_when_they_do() -> None:
    """As after a second failure that follows a first too soon."""
    c = Cluster()
    c.elect("a")
    c.run(0.2)
    c.unlink("b", "c")
    c.crash("a")
    c.run(0.15, "bc", step=0.005)
    assert c.leaders() == []

    c.link("b", "c")
    c.run(0.2, "bc", step=0.005)

    assert len(c.leaders()) == 1, "well before any timeout"


def test_who_waits_for_a_majority_does_not_wait_for_a_timeout_when_it_comes() -> None:
    """Nodes that start together, and the last survivor of a group whose members come back."""
    c = Cluster()
    c.run(c.timing.election_min - 0.1, step=0.005)
    assert len(c.leaders()) == 1, "a new group has a leader before any timeout"
    for name in "abc":
        c.crash(name)
    c.restart("a")
    c.run(3.0, "a")

    c.restart("b")
    c.run(c.timing.election_min - 0.1, "ab", step=0.005)

    assert len(c.leaders()) == 1


def test_a_node_that_comes_back_to_a_group_that_is_led_asks_nobody() -> None:
    c = Cluster()
    c.elect("a")
    c.crash("c")
    c.run(0.2, "ab")

    c.restart("c")
    c.run(1.0)

    assert c.leaders() == ["a"] and c.engine("a").term == 1


def test_two_who_ask_at_the_same_moment_after_a_broken_connection_ask_again_soon() -> None:
    c = Cluster()
    c.elect("a")
    c.run(0.2)
    c.crash("a")
    for name in "bc":
        c.engine(name)._campaign(transfer=False)  # Each has voted for itself: nobody can win this term.
    split = c.engine("b").term

    c.run(c.timing.election_min - 0.1, "bc", step=0.005)

    (leader,) = set(c.leaders()) - {"a"}
    assert c.engine(leader).term > split


def test_who_is_behind_does_not_keep_the_other_from_leading_soon() -> None:
    c = Cluster()
    c.elect("a")
    c.run(0.2)
    c.unlink("a", "b")
    c.propose("a", b"x")
    c.run(0.2, "ac")
    c.crash("a")
    c.engine("b")._campaign(transfer=False)

    c.run(c.timing.election_min - 0.1, "bc", step=0.005)

    assert "c" in c.leaders()


def test_a_broken_connection_of_one_follower_elects_nobody() -> None:
    c = Cluster()
    c.elect("a")
    c.run(0.2)
    c.unlink("a", "b")
    c.run(2.0)

    assert c.leaders() == ["a"] and c.engine("a").term == 1


def test_a_term_survives_a_restart_and_nobody_leads_the_same_term_twice() -> None:
    """7, 12"""
    c = Cluster("a")
    terms = []
    for _ in range(4):
        c.run(0.3)
        terms.append(c.engine("a").term)
        c.crash("a")
        c.restart("a")

    assert terms == [1, 2, 3, 4]


def test_a_group_of_one_leads_when_its_term_is_on_disk() -> None:
    """7: else a crash makes it lead the same term again, with other entries, and a learner could hold either."""
    c = Cluster("ab", members="a")
    c.run(0.2)
    c.crash("a")
    c.restart("a", link=False)
    c.turn("a")
    c.tick("a")
    assert not c.engine("a").is_leader

    c.fsync("a")
    assert c.engine("a").is_leader


def test_a_group_of_one_does_not_lead_by_a_commit_that_began_before_its_term() -> None:
    """7"""
    c = Cluster("a")
    c.turn("a")
    assert c.members[A].committing, "the group's first record"
    c.tick("a")
    assert c.engine("a").term == 1
    c.fsync("a")
    assert not c.engine("a").is_leader

    c.fsync("a")
    assert c.engine("a").is_leader


def test_a_leader_begins_its_term_with_a_no_op() -> None:
    c = Cluster()
    c.elect("a")

    assert c.log("a").entries(1, 1)[0] == (b"\x01", 1, 1)


# Leadership transfer (Raft thesis §3.10)


def test_leadership_moves_to_the_chosen_node_when_it_holds_everything() -> None:
    """30"""
    c = Cluster()
    c.elect("a")
    c.run(0.2)
    waiter = c.propose("a", b"x")
    c.turn("a")
    assert c.host("a").transfer(GroupId(1), B)
    c.turn("a")
    assert pick(c.waiting("a", "b"), TimeoutNow) == [], "b does not hold x yet"
    c.settle()
    c.run(0.2)

    assert c.leaders() == ["b"]
    assert waiter.index or isinstance(waiter.error, OutcomeUnknown)
    assert everywhere(c, b"x", "abc")


def test_proposals_stop_while_leadership_moves_and_go_on_if_it_does_not() -> None:
    """30"""
    c = Cluster()
    c.elect("a")
    c.run(0.2)
    c.unlink("a", "b")
    assert c.host("a").transfer(GroupId(1), B)
    refused = c.write("a", b"x", "ac")
    assert isinstance(refused.error, NotLeader) and refused.error.definite
    c.run(c.timing.election_max + 0.2, "ac")

    assert c.leaders() == ["a"]
    assert c.write("a", b"y", "ac").index


def test_a_transfer_to_a_node_that_goes_down_is_given_up_at_once() -> None:
    """30: what can be proposed again need not wait for the transfer's time to run out."""
    c = Cluster()
    c.elect("a")
    c.run(0.2)
    assert c.host("a").transfer(GroupId(1), B)

    c.unlink("a", "b")

    assert c.leaders() == ["a"]
    assert c.write("a", b"x", "ac").index


def test_a_transfer_passes_the_stickiness_of_the_others() -> None:
    """30: they hear the old leader, and vote all the same."""
    c = Cluster()
    c.elect("a")
    c.run(0.2)
    c.lose("b", "c")
    c.inject("c", "b", RequestVote(2, 99, 1, True))

    assert pick(answers(c, "c", "b"), Vote) == [Vote(2, True)]


def test_only_the_present_leader_can_ask_a_node_to_campaign() -> None:
    c = Cluster()
    c.elect("a")
    c.run(0.2)
    c.inject("c", "b", TimeoutNow(1))
    c.inject("a", "b", TimeoutNow(0))
    assert c.engine("b").term == 1

    c.inject("a", "b", TimeoutNow(1))
    assert c.engine("b").term == 2


def test_leadership_does_not_move_to_a_stranger_or_from_a_follower() -> None:
    c = Cluster("abcd", members="abc")
    c.elect("a")

    assert not c.host("a").transfer(GroupId(1), D)
    assert not c.host("a").transfer(GroupId(1), A)
    assert not c.host("b").transfer(GroupId(1), C)


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
    """18: it still believes to lead when another one has acknowledged a write."""
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
    """18: until then its commit index may be behind what its predecessor acknowledged."""
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
    """14: a rolled back change is as if it had never been."""
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


def test_a_node_without_what_the_epoch_before_committed_follows_and_never_leads() -> None:
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


def test_nobody_votes_for_a_log_that_ends_before_its_epoch_begins() -> None:
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


# The parent


def test_the_installed_parent_is_the_audited_one() -> None:
    assert source_hashes() == AUDITED
    check_parent()


@pytest.mark.parametrize("name", ["_SyncObj__onMessageReceived", "_SyncObj__sendAppendEntries", "_onTick"])
def test_a_parent_whose_source_changed_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def changed(self: object, *_: object) -> None:
        """Not what was audited."""

    monkeypatch.setattr(stock.SyncObj, name, changed)
    check_parent.cache_clear()
    try:
        with pytest.raises(EngineNotAudited, match=name) as refusal:
            Cluster("a")
        assert "pysyncobj==0.3.17" in str(refusal.value)
    finally:
        check_parent.cache_clear()


def test_a_parent_without_a_method_we_know_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(stock.SyncObj, "_SyncObj__loadDumpFile")
    check_parent.cache_clear()
    try:
        with pytest.raises(EngineNotAudited, match=r"0\.3\.17"):
            check_parent()
    finally:
        check_parent.cache_clear()


def test_every_method_we_override_is_audited() -> None:
    """A method of the parent that our class replaces, and that the hashes do not cover, could change unseen."""
    layers = Engine.__mro__[: Engine.__mro__.index(stock.SyncObj)]
    replaced = {name for layer in layers for name in vars(layer)} & set(vars(stock.SyncObj))
    ours = {name for name in replaced if callable(getattr(stock.SyncObj, name))}

    assert [layer.__name__ for layer in layers] == ["SyncObj"] * len(layers) and len(layers) > 1
    assert ours - set(AUDITED) - {"__module__", "__doc__"} == set()
    assert {name for name in AUDITED if name in replaced} >= {
        "_SyncObj__setState",
        "_SyncObj__onBecomeLeader",
        "_onTick",
    }


def test_every_method_of_the_parent_that_touches_the_world_or_the_state_is_forbidden() -> None:
    """5, 6, 8, 10, 13, 15, 16, 26, 38: its paths for dumps, forks, application and membership are not reachable."""
    c = Cluster()
    engine = c.engine("a")
    forbidden = [
        "_onTick", "_checkCommandsToApply", "_applyCommand", "_SyncObj__applyLogEntries", "_SyncObj__doApplyCommand",
        "_SyncObj__loadDumpFile", "_SyncObj__tryLogCompaction", "_SyncObj__parseChangeClusterRequest",
        "_SyncObj__doChangeCluster", "_SyncObj__changeCluster", "_SyncObj__updateClusterConfiguration",
        "_SyncObj__deleteEntriesTo",
    ]  # fmt: skip
    for name in forbidden:
        with pytest.raises(EngineFault, match="must not be reached"):
            getattr(engine, name)()


def test_the_parent_has_no_socket_thread_file_or_journal_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """7, 12, 32, 35, 36: nothing of its transport, its journal files or its encryption is in use."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the parent reached for the world")

    for name in ("threading.Thread.start", "socket.socket", "os.fork"):
        monkeypatch.setattr(name, refuse)
    c = Cluster()
    c.elect("a")
    assert c.write("a", b"x").index
    engine = c.engine("a")
    assert engine._SyncObj__raftLog.log is c.log("a")
    assert type(engine._SyncObj__transport).__name__ == "_Outlet"


def test_nothing_is_unpickled() -> None:
    """34"""
    for load in (pysyncobj.pickle.loads, pysyncobj.pickle.load):
        with pytest.raises(EngineFault, match="pickle is disabled"):
            load(b"anything")
    assert stock.pickle is pysyncobj.pickle


def test_the_documented_hash_is_of_the_source() -> None:
    """So that a reader can check the table of hashes by hand."""
    source = inspect.getsource(stock.SyncObj._SyncObj__setCurrentTerm)

    assert hashlib.sha256(source.encode()).hexdigest()[:16] == AUDITED["_SyncObj__setCurrentTerm"]


def test_the_engine_has_no_clock_and_no_randomness_of_its_own() -> None:
    """Two engines that are told the same do the same."""

    def history() -> list[bytes]:
        c = Cluster("abcde")
        frames: list[bytes] = []
        for _ in range(40):
            c.run(0.1)
            c.crash("e") if c.members[NodeId("e")].running else c.restart("e")
            for wire in c.wires.values():
                frames += [frame for _, frame in wire]
            frames.append(repr([(c.engine(n).term, c.leaders()) for n in "abcd"]).encode())
        return frames

    assert history() == history()


def test_the_engine_stays_small_enough_to_be_worth_keeping() -> None:
    """ADR 1: past this, an engine of our own would be less code to trust."""
    layers = Engine.__mro__[: Engine.__mro__.index(stock.SyncObj)]
    source = [line.strip() for layer in layers for line in inspect.getsource(layer).splitlines()]
    code = [line for line in source if line and not line.startswith("#")]

    assert 100 < len(code) <= 800
