"""Elections: which node wins, when, and how leadership is handed over."""

from __future__ import annotations

from holdfast.log.engine import FOLLOWER, Timing
from holdfast.log.errors import NotLeader, OutcomeUnknown
from holdfast.log.messages import Append, GroupId, PreVote, PreVoteReply, RequestVote, TimeoutNow, Vote
from tests.log.cluster import A, B, C, Cluster, D
from tests.log.engines import answers, entry, everywhere, lone_follower, pick

# Elections (Raft §5.2, §5.4.1, thesis §9.6)


def test_exactly_one_node_leads_soon_after_the_start() -> None:
    c = Cluster("abcde")
    c.run(3.0)

    assert len(c.leaders()) == 1


def test_no_node_votes_for_a_log_that_is_behind_its_own() -> None:
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
    """23: stickiness. A node that lost only its own link to the leader disturbs no other node."""
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
    c.members[A].running = None  # It becomes silent; no connection breaks.
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


def test_two_leaderless_nodes_elect_when_they_connect() -> None:
    """As after a second failure soon after the first."""
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


def test_a_node_that_waits_for_a_majority_elects_without_a_timeout_when_it_connects() -> None:
    """Nodes that start together, and the last survivor of a group whose members return."""
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


def test_a_node_that_rejoins_a_group_with_a_leader_requests_no_votes() -> None:
    c = Cluster()
    c.elect("a")
    c.crash("c")
    c.run(0.2, "ab")

    c.restart("c")
    c.run(1.0)

    assert c.leaders() == ["a"] and c.engine("a").term == 1


def test_two_simultaneous_candidates_after_a_broken_connection_retry_soon() -> None:
    c = Cluster()
    c.elect("a")
    c.run(0.2)
    c.crash("a")
    for name in "bc":
        c.engine(name)._campaign(transfer=False)  # Each has voted for itself: no node can win this term.
    split = c.engine("b").term

    c.run(c.timing.election_min - 0.1, "bc", step=0.005)

    (leader,) = set(c.leaders()) - {"a"}
    assert c.engine(leader).term > split


def test_a_lagging_candidate_does_not_delay_the_other() -> None:
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


def test_a_broken_connection_of_one_follower_starts_no_election() -> None:
    c = Cluster()
    c.elect("a")
    c.run(0.2)
    c.unlink("a", "b")
    c.run(2.0)

    assert c.leaders() == ["a"] and c.engine("a").term == 1


def test_a_term_survives_a_restart_and_no_node_leads_it_twice() -> None:
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
    """7: otherwise a crash makes it lead the same term again, with other entries, and a learner could hold either."""
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


def test_proposals_stop_while_leadership_moves_and_resume_if_it_does_not() -> None:
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
    """30: proposals need not wait for the time limit of the transfer."""
    c = Cluster()
    c.elect("a")
    c.run(0.2)
    assert c.host("a").transfer(GroupId(1), B)

    c.unlink("a", "b")

    assert c.leaders() == ["a"]
    assert c.write("a", b"x", "ac").index


def test_a_transfer_passes_the_stickiness_of_the_others() -> None:
    """30: they hear the old leader, but vote nevertheless."""
    c = Cluster()
    c.elect("a")
    c.run(0.2)
    c.lose("b", "c")
    c.inject("c", "b", RequestVote(2, 99, 1, True))

    assert pick(answers(c, "c", "b"), Vote) == [Vote(2, True)]


def test_only_the_current_leader_can_ask_a_node_to_campaign() -> None:
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
