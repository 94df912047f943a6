"""One group on a few nodes: entries, answers, changes of members, snapshots. Every step is made by hand."""

from __future__ import annotations

import msgpack
import pytest

from holdfast.log.engine import Limits
from holdfast.log.errors import Corrupt, NoRoom, NotLeader, OutcomeUnknown, Overloaded, Superseded, TooLarge
from holdfast.log.messages import Append, AppendAck, NodeId, Offer, decode
from tests.log.cluster import Cluster, Waiter

# Proposals


def test_proposals_of_one_turn_become_one_entry_and_share_its_index() -> None:
    c = Cluster()
    c.elect("a")
    before = c.log("a").last_index
    waiters = [c.propose("a", b"%d" % i) for i in range(50)]
    c.settle()

    assert c.log("a").last_index == before + 1
    assert {waiter.index for waiter in waiters} == {before + 1}
    assert c.applied("a") == [b"%d" % i for i in range(50)]


def test_proposals_too_large_for_one_entry_become_a_few_in_order() -> None:
    c = Cluster(limits=Limits(command_bytes_max=100, entry_bytes_max=100))
    c.elect("a")
    waiters = [c.propose("a", bytes([i]) * 40) for i in range(5)]
    c.settle()

    first = waiters[0].index
    assert first is not None
    assert [waiter.index for waiter in waiters] == [first, first, first + 1, first + 1, first + 2]
    assert c.applied("a") == [bytes([i]) * 40 for i in range(5)]


def test_a_proposal_is_answered_when_it_is_committed_and_applied_here() -> None:
    c = Cluster()
    c.elect("a")
    waiter = c.propose("a", b"x")
    c.turn("a")
    c.deliver("a", "b")
    c.fsync("b")

    assert waiter.answers == [], "one disk"
    c.deliver("b", "a")
    assert waiter.answers == [], "b's disk has it, ours does not: no majority"
    c.fsync("a")
    assert waiter.index == c.log("a").last_index
    assert c.applied("a") == [b"x"]


def test_a_follower_refuses_and_names_the_leader() -> None:
    c = Cluster()
    c.elect("a")
    c.run(0.2)
    waiter = c.write("b", b"x")

    assert isinstance(waiter.error, NotLeader)
    assert waiter.error.leader == "a"
    assert waiter.error.definite


def test_an_oversized_command_is_refused_for_good() -> None:
    c = Cluster(limits=Limits(command_bytes_max=10))
    c.elect("a")
    too_large, fits = c.propose("a", bytes(11)), c.propose("a", bytes(10))
    c.settle()

    assert isinstance(too_large.error, TooLarge)
    assert too_large.error.definite and not too_large.error.retryable
    assert fits.index is not None


def test_more_proposals_than_a_turn_may_take_are_refused() -> None:
    c = Cluster(limits=Limits(proposals_max=3))
    c.elect("a")
    waiters = [c.propose("a", b"x") for _ in range(5)]
    c.settle()

    assert [type(waiter.error) for waiter in waiters] == [type(None)] * 3 + [Overloaded] * 2


def test_a_leader_without_a_majority_stops_taking_at_its_bound() -> None:
    c = Cluster(limits=Limits(uncommitted_bytes_max=1000))
    c.elect("a")
    for peer in "bc":
        c.unlink("a", peer)
    waiters = []
    for _ in range(30):
        waiters.append(c.propose("a", bytes(100)))
        c.turn("a")
        c.fsync("a")

    refused = [waiter for waiter in waiters if waiter.answers]
    assert {type(waiter.error) for waiter in refused} == {Overloaded}
    assert 1000 <= c.engine("a").uncommitted_bytes < 1300
    c.link("a", "b")
    c.settle("ab")
    assert all(waiter.index for waiter in waiters if waiter not in refused)
    assert c.engine("a").uncommitted_bytes == 0
    assert c.write("a", b"again", "ab").index


def test_a_full_disk_refuses_proposals_before_they_are_appended() -> None:
    c = Cluster()
    c.elect("a")
    last = c.log("a").last_index
    c.disk("a").full = True
    refused = c.write("a", b"x")

    assert isinstance(refused.error, NoRoom)
    assert refused.error.definite and refused.error.retryable
    assert c.log("a").last_index == last
    c.disk("a").full = False
    assert c.write("a", b"y").index == last + 1


# Answers


def cut_off_leader(c: Cluster) -> Waiter:
    """`a` leads and has appended a command that no other node has; then it is isolated."""
    c.elect("a")
    c.run(0.2)
    c.isolate("a")
    waiter = c.propose("a", b"lonely")
    c.turn("a")
    c.fsync("a")
    assert waiter.answers == []
    return waiter


def test_clients_of_a_leader_that_loses_its_majority_get_an_unknown_outcome() -> None:
    c = Cluster()
    waiter = cut_off_leader(c)
    c.run(1.0, "a")

    assert isinstance(waiter.error, OutcomeUnknown)
    assert not waiter.error.definite


def test_a_command_superseded_by_another_leader_s_entry_is_answered_once() -> None:
    c = Cluster()
    waiter = cut_off_leader(c)
    c.elect("b", "bc")
    assert c.write("b", b"other", "bc").index
    c.link("a", "b")
    c.run(0.3, "abc")

    assert len(waiter.answers) == 1
    assert isinstance(waiter.error, OutcomeUnknown | Superseded)
    assert c.applied("a") == c.applied("b") == [b"other"]


def test_an_unknown_outcome_may_be_a_success_and_is_reported_once() -> None:
    c = Cluster()
    c.elect("a")
    c.run(0.2)
    waiter = c.propose("a", b"x")
    c.turn("a")
    c.fsync("a")
    c.deliver("a", "b")
    c.isolate("a")
    c.run(1.0, "a")
    assert isinstance(waiter.error, OutcomeUnknown)

    c.fsync("b")
    c.elect("b", "bc")
    c.link("a", "b")
    c.run(0.5)
    assert c.applied("a") == c.applied("b") == [b"x"]
    assert len(waiter.answers) == 1


def test_callers_are_answered_once_when_the_node_stops() -> None:
    c = Cluster()
    c.elect("a")
    c.run(0.2)
    c.isolate("a")
    appended = c.propose("a", b"x")
    c.turn("a")
    queued, read = c.propose("a", b"y"), c.read("a")
    replica = c.replica("a")
    replica.stop()

    told = [who for result in replica.results for who in result.waiting]
    assert sorted(map(id, told)) == sorted(map(id, [appended, queued, read]))


def test_a_read_that_was_confirmed_when_the_node_stopped_is_answered() -> None:
    c = Cluster()
    c.elect("a")
    c.run(0.2)
    read = c.read("a")
    c.turn("a")
    c.deliver("a", "b")
    session = c.host("a").sessions[NodeId("b")]
    for _, frame in c.wires[NodeId("b"), NodeId("a")]:
        c.host("a").deliver(NodeId("b"), session, decode(frame), c.now)
    assert c.engine("a").reads_ready, "confirmed, and not yet answered"

    c.replica("a").stop()

    assert [result.waiting for result in c.replica("a").results] == [[read]]


def test_entries_replayed_after_a_restart_answer_no_caller_and_are_applied_once() -> None:
    c = Cluster()
    c.elect("a")
    for i in range(5):
        c.write("a", b"%d" % i)
    c.run(0.2)
    c.crash("b")
    c.restart("b")
    c.run(0.3)
    assert c.applied("b") == [b"0", b"1", b"2", b"3", b"4"], "a killed process: the state is where it was"

    c.crash("b", power=True)
    c.restart("b")
    c.run(0.3)
    assert c.applied("b") == [b"0", b"1", b"2", b"3", b"4"], "a lost state: all is applied again, from the log"


def test_nothing_is_applied_that_our_own_disk_does_not_hold() -> None:
    """A killed process must not leave a state that is ahead of its log."""
    c = Cluster()
    c.elect("a")
    c.run(0.2)
    waiter = c.propose("a", b"x")
    c.turn("a")
    for peer in "bc":
        c.deliver("a", peer)
        c.fsync(peer)
        c.deliver(peer, "a")

    assert c.engine("a").commit == c.log("a").last_index, "b and c are a majority"
    assert c.applied("a") == [] and waiter.answers == []
    c.fsync("a")
    assert c.applied("a") == [b"x"] and waiter.index


def test_a_long_replay_goes_in_slices() -> None:
    c = Cluster("a", limits=Limits(apply_entries_max=10))
    c.run(0.2)
    for i in range(35):
        c.write("a", b"%d" % i)
    c.crash("a", power=True)
    c.restart("a")
    sizes = []
    machine = c.machine("a")
    apply = machine.apply
    machine.apply = lambda entries: (sizes.append(len(entries)), apply(entries))[1]  # type: ignore[method-assign, func-returns-value]
    c.run(0.2)

    assert max(sizes) == 10
    assert c.applied("a") == [b"%d" % i for i in range(35)]


def test_a_machine_that_raises_stops_the_node_instead_of_being_asked_again() -> None:
    c = Cluster()
    c.elect("a")
    c.propose("a", b"poison")
    c.turn("a")
    for name in "bc":
        c.deliver("a", name)
        c.fsync(name)
        c.deliver(name, "a")

    def broken(_: object) -> None:
        raise RuntimeError("a bug of the state machine")

    c.machine("a").apply = broken  # type: ignore[method-assign, assignment]
    with pytest.raises(RuntimeError, match="a bug of the state machine"):
        c.fsync("a")


def test_a_state_that_ends_before_the_log_begins_is_refused() -> None:
    c = Cluster()
    c.elect("a")
    for i in range(5):
        c.write("a", b"%d" % i)
    c.machine("a").cut_snapshot()
    c.replica("a").trim(4)
    c.settle()
    c.crash("a")
    c.members[NodeId("a")].states.clear()

    with pytest.raises(Corrupt, match="the state ends at entry 0, but the log begins after entry 4") as refusal:
        c.restart("a")
    assert (refusal.value.group, refusal.value.index) == (1, 0)


def test_a_state_of_another_log_is_refused() -> None:
    """A copy of another node's or an older cluster's state, put in place by hand."""
    c = Cluster()
    c.elect("a")
    for i in range(5):
        c.write("a", b"%d" % i)
    c.run(0.2)
    c.crash("a")
    state = c.members[NodeId("a")].states[c.replica("b").group]
    state.live.index, state.live.term = 3, 7

    with pytest.raises(Corrupt, match="entry 3 of term 7, but the log has term 1 there") as refusal:
        c.restart("a")
    assert (refusal.value.group, refusal.value.index) == (1, 3)


# Snapshots


def follower_behind(c: Cluster) -> None:
    """`c` was away; the entry that it needs next is trimmed on `a`, which leads."""
    c.elect("a")
    c.write("a", b"0")
    c.run(0.2)
    c.crash("c")
    for i in range(1, 6):
        c.write("a", b"%d" % i)
    for name in "ab":
        c.run(0.2)
        c.machine(name).cut_snapshot()
        c.replica(name).trim(c.replica(name).applied)
    c.settle()
    c.restart("c")


def test_a_follower_that_fell_behind_the_log_installs_an_offered_state_and_follows() -> None:
    c = Cluster()
    follower_behind(c)
    c.run(0.5)
    assert c.applied("c") == [b"0"]
    assert {(want.peer, want.index) for name, want in c.wanted if name == "c"} == {("a", c.log("a").base_index)}

    assert c.install("c")
    c.run(0.5)
    assert c.applied("c") == [b"%d" % i for i in range(6)]
    assert c.write("a", b"6").index
    c.run(0.3)
    assert c.applied("c")[-1] == b"6"


def test_an_installed_state_is_acknowledged_only_when_the_log_was_rebased_on_disk() -> None:
    c = Cluster()
    follower_behind(c)
    c.run(0.5)
    before = c.engine("a").progress[NodeId("c")].match
    assert c.install("c")
    c.deliver("c", "a")
    assert c.engine("a").progress[NodeId("c")].match == before

    c.fsync("c")
    c.deliver("c", "a")
    assert c.engine("a").progress[NodeId("c")].match == c.log("c").base_index


def test_a_state_that_cannot_be_installed_is_not_acknowledged() -> None:
    """The exception reaches the driver, which stops the node; no acknowledgement leaves."""
    c = Cluster()
    follower_behind(c)
    c.run(0.5)
    c.lose("c", "a")
    match = c.engine("a").progress[NodeId("c")].match
    want = [want for name, want in c.wanted if name == "c"][-1]

    def broken() -> None:
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        c.host("c").install(want.group, want.index, want.term, broken)
    c.turn("c")
    c.fsync("c")
    c.deliver("c", "a")
    assert c.engine("a").progress[NodeId("c")].match == match
    assert c.log("c").base_index == 0


def test_a_snapshot_at_or_below_our_commit_is_not_installed() -> None:
    c = Cluster()
    follower_behind(c)
    c.run(0.5)
    assert c.install("c")
    c.run(0.3)
    swapped = []

    offered = c.log("c").base_index
    assert not c.host("c").install(c.replica("c").group, offered, 1, lambda: swapped.append(1))
    assert swapped == []


def test_a_state_that_was_not_offered_is_not_installed() -> None:
    c = Cluster()
    follower_behind(c)
    c.run(0.5)
    swapped = []

    index = c.log("a").base_index
    assert not c.host("c").install(c.replica("c").group, index + 1, 1, lambda: swapped.append(1))
    assert not c.host("c").install(c.replica("c").group, index, 9, lambda: swapped.append(1))
    assert swapped == []


def test_an_offer_at_or_below_our_commit_is_answered_with_our_commit() -> None:
    c = Cluster()
    c.elect("a")
    for i in range(5):
        c.write("a", b"%d" % i)
    c.run(0.2)
    commit = c.engine("c").commit
    c.inject("a", "c", Offer(c.engine("a").term, 2, 1, b""))

    assert c.wanted == []
    assert [m.index for m in c.waiting("c", "a") if isinstance(m, AppendAck)][-1] == commit


def test_a_crash_between_installing_a_state_and_rebasing_the_log_is_made_good() -> None:
    c = Cluster()
    follower_behind(c)
    c.run(0.5)
    assert c.install("c")
    c.crash("c", keep_pending=False)
    c.restart("c")

    assert c.log("c").base_index == c.replica("c").applied == c.log("a").base_index
    c.run(0.5)
    assert c.applied("c") == c.applied("a")


def test_waiters_whose_entries_a_snapshot_covers_get_an_unknown_outcome() -> None:
    c = Cluster()
    c.elect("c")
    c.run(0.2)
    c.isolate("c")
    waiter = c.propose("c", b"lonely")
    c.turn("c")
    c.fsync("c")
    c.elect("a", "ab")
    for i in range(6):
        c.write("a", b"%d" % i, "ab")
    c.machine("a").cut_snapshot()
    c.replica("a").trim(c.replica("a").applied)
    c.settle("ab")
    c.link("a", "c")
    c.run(0.5)
    if not waiter.answers:
        assert c.install("c")
    c.run(0.5)

    assert isinstance(waiter.error, OutcomeUnknown)


def test_a_snapshot_is_not_asked_for_before_the_epoch_it_was_offered_in_is_on_disk() -> None:
    """A state is durable at once. If its epoch were not, a crash would let the node lead an epoch that is over."""
    c = Cluster("abcd", members="abc")
    c.elect("a")
    c.run(0.2)
    c.isolate("b")
    c.seal("a", "abd")
    c.deliver("a", "c")
    c.fsync("c")
    c.deliver("c", "a")
    c.isolate("c")
    c.run(2.0, "ad")
    assert (c.replica("a").epoch, c.replica("d").epoch, c.replica("c").epoch) == (1, 1, 0)
    (leader,) = [name for name in "ad" if c.engine(name).is_leader]
    for i in range(5):
        assert c.write(leader, b"%d" % i, "ad").index
    c.machine(leader).cut_snapshot()
    c.replica(leader).trim(c.replica(leader).applied)
    c.settle("ad")

    c.link(leader, "b")
    for _ in range(20):  # b's disk does not respond.
        c.now += 0.05
        c.tick(leader)
        c.fsync(leader)
        c.deliver(leader, "b")
        c.deliver("b", leader)
    assert c.replica("b").epoch == 1
    if any(name == "b" for name, _ in c.wanted):
        assert c.install("b")
    c.crash("b")
    c.restart("b", link=False)
    c.link("b", "c")
    c.run(3.0, "bc")

    leaders = [name for name in "bc" if c.engine(name).is_leader]
    for name in leaders:
        assert isinstance(c.write(name, b"split brain", "bc").error, NotLeader), "epoch 0 is over"
    assert "b" not in leaders


def test_the_log_is_trimmed_only_up_to_a_durable_snapshot() -> None:
    c = Cluster()
    c.elect("a")
    for i in range(5):
        c.write("a", b"%d" % i)

    with pytest.raises(AssertionError, match="only behind a durable snapshot"):
        c.replica("a").trim(3)
    c.machine("a").cut_snapshot()
    c.replica("a").trim(3)
    assert c.log("a").base_index == 3


def test_the_body_of_an_entry_is_a_list_of_commands() -> None:
    c = Cluster()
    c.elect("a")
    c.propose("a", b"x")
    c.propose("a", b"y")
    c.turn("a")

    (append,) = [m for m in c.waiting("a", "b") if isinstance(m, Append)]
    assert msgpack.unpackb(append.entries[-1][0][1:]) == [b"x", b"y"]


def test_status_shows_the_leader_and_the_progress_of_every_member() -> None:
    c = Cluster()
    c.elect("a")
    c.write("a", b"x")
    c.run(0.2)

    leader, follower = c.replica("a").status(), c.replica("b").status()

    assert (leader.role, follower.role, follower.leader) == ("leader", "follower", "a")
    assert (leader.term, leader.commit, leader.applied, leader.last, leader.base) == (1, 2, 2, 2, 0)
    assert leader.match == {"b": 2, "c": 2}
