"""Which messages a follower accepts, how it answers, and when its promises leave."""

from __future__ import annotations

import pytest

from holdfast.log.errors import EngineFault, OutcomeUnknown, Superseded
from holdfast.log.messages import (
    Append,
    AppendAck,
    AppendReject,
    Heartbeat,
    HeartbeatAck,
    Message,
    Offer,
    RequestVote,
    Vote,
)
from tests.log.cluster import B, Cluster
from tests.log.engines import SMALL, answers, entry, lone_follower, pick

# Following: entries (Raft §5.3)


def test_only_a_real_conflict_truncates() -> None:
    """1: an append that repeats the beginning of our log truncates nothing."""
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


def test_a_late_rejection_does_not_make_a_leader_resend_acknowledged_entries() -> None:
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


def test_an_append_after_an_entry_of_another_term_is_rejected_down_to_our_commit() -> None:
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
    """2: our own tail is unverified, so a commit index beyond the verified entries does not cover it."""
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
    """2: the complete scenario. Its clients get no success for entries that no other node has."""
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
def test_a_message_that_contradicts_committed_entries_stops_the_node(reason: str, message: Message) -> None:
    """11: the stock engine clamps its indices and continues with a state that differs for ever."""
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


def test_the_parent_may_acknowledge_only_compared_entries() -> None:
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


def test_an_acknowledgement_of_an_entry_outside_the_current_commit_waits_for_the_next() -> None:
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


def test_a_vote_undone_by_a_crash_was_never_sent_and_a_durable_one_is_kept() -> None:
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
    """7: its append may race its disk (Raft thesis §10.2.1), but its own count may not."""
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
