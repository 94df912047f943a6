"""How a group elects its leader: pre-votes, votes and their counting, and stepping down (Raft §5.2, thesis §9.6)."""

from __future__ import annotations

from typing import Final

from holdfast.log import engine_state
from holdfast.log.engine_state import CANDIDATE, FOLLOWER, LEADER, Member
from holdfast.log.messages import NodeId, PreVote, PreVoteReply, RequestVote, TimeoutNow, Vote

PATIENCE_MAX: Final = 5  # A node that cannot lead asks around ever less often, down to once in 2^5 timeouts.
HURRIES_MAX: Final = 8  # Retries of an election after a broken connection, without waiting for a timeout.


class SyncObj(engine_state.SyncObj):
    """The layer that requests votes, grants them, and steps down."""

    __slots__ = ()

    # -- when to ask ----------------------------------------------------------------------------------------------

    def ask_soon(self) -> None:
        """We hear no leader: ask for votes soon. If there is a leader after all, we hear it first or the others refuse."""
        self._hurries = HURRIES_MAX
        self._hurry()

    def _hurry(self) -> None:
        """Retry a failed election soon: two nodes asked at once, or one that is behind asked. The leader is known to be gone.

        The delay is random, so that nodes ask at different moments, and the number of retries is bounded.
        """
        if self._hurries:
            self._hurries -= 1
            self._deadline = min(self._deadline, self.now + self.timing.broken_max * self.rng.uniform(1.0, 5.0))

    def _hears_leader(self) -> bool:
        if self.is_leader:
            return True
        return self.leader is not None and self.now - self._leader_contact < self.timing.election_min

    def _log_is_current(self, last_term: int, last_index: int) -> bool:
        """Raft §5.4.1; and no node leads an epoch without everything that the previous epoch committed."""
        ours = (self.log.last_term, self.log.last_index)
        return (last_term, last_index) >= ours and last_index >= self.log.configuration.seed_index

    def _ask_around(self) -> None:
        """Ask for a later epoch: we have no leader and cannot lead. A node that knows a later epoch answers with it.

        The last nodes that know that an epoch is over may not be members of its successor, and have no part in it. So a node
        that was left behind asks, ever less often, because it may also have been removed for good.
        """
        self._deadline = self.now + (self._deadline - self.now) * 2.0**self._patience
        self._patience = min(self._patience + 1, PATIENCE_MAX)
        for peer in sorted({*self.members, *(self.next_members or ())} - {self.node}):
            self._tell_epoch(peer)

    # -- asking and voting ----------------------------------------------------------------------------------------

    def _ask_for_prevotes(self) -> None:
        """Ask the other members whether they would vote for us, and tell them of the epoch.

        A member may not know that it is one: it may have been a learner that forgot the group (ADR 2, rule 7) before the seal
        reached it. Leaders tell such a member of the epoch, but without it there may be no majority to elect a leader.
        Telling is safe: our epoch exists whether or not we lead it, and a member accepts it from any other member. It keeps the
        term and vote of its tombstone, and votes only for a log that reaches the seal, which a majority of the epoch holds.
        Founders create the group of epoch 0 themselves, so no node is invited to it here.
        """
        if not self.peers and self.role == CANDIDATE:
            return  # We are elected as soon as our own disk has the term.
        self._prevotes = set()
        self._count_prevotes()
        for peer in self.peers:
            if self.epoch:
                self._tell_epoch(peer)
            self.out.append((peer, PreVote(self.term + 1, self.log.last_index, self.log.last_term)))

    def _on_prevote(self, sender: NodeId, m: PreVote) -> None:
        granted = (
            self.is_member
            and sender in self.peers
            and m.term > self.term
            and not self._hears_leader()
            and self._log_is_current(m.last_term, m.last_index)
        )
        self.out.append((sender, PreVoteReply(self.term, m.term, granted)))

    def _on_prevote_reply(self, sender: NodeId, m: PreVoteReply) -> None:
        if m.term > self.term:
            self._step_down(m.term)
        elif self._prevotes is not None and m.granted and m.asked == self.term + 1 and sender in self.peers:
            self._prevotes.add(sender)
            self._count_prevotes()
        elif self._prevotes is not None and not m.granted and m.asked == self.term + 1:
            self._hurry()

    def _count_prevotes(self) -> None:
        if self._prevotes is not None and 2 * (len(self._prevotes) + 1) > len(self.members):
            self._campaign(transfer=False)

    def _campaign(self, *, transfer: bool) -> None:
        self.campaigns += 1
        self._prevotes = None
        self._votes = set()
        self._deadline = self._next_deadline()
        self.__raftLeader = None
        self.__setState(CANDIDATE)
        self.__setCurrentTerm(self.term + 1, self.node)
        self.__votesCount = 1
        for peer in self.peers:
            self.promise(peer, RequestVote(self.term, self.log.last_index, self.log.last_term, transfer))
        # A group of one leads when its term is on disk (see `persisted`). If it led sooner, a crash could make it lead the same
        # term twice with different entries, and a learner could hold either.

    def _on_request_vote(self, sender: NodeId, m: RequestVote) -> None:
        if sender not in self.peers or not self.is_member:
            return
        if m.term < self.term or (self._hears_leader() and not m.transfer):
            self.promise(sender, Vote(self.term, False))
            return
        if m.term == self.term and self.log.vote == sender:
            self.promise(sender, Vote(self.term, True))  # Our first answer was lost.
            return
        if m.term > self.term:
            self._step_down(m.term)
        if self._log_is_current(m.last_term, m.last_index) and self.role != LEADER:
            ballot = {"type": "request_vote", "term": m.term, "last_log_index": m.last_index}
            super().__onMessageReceived(Member(sender), ballot | {"last_log_term": m.last_term})
        if self.log.vote == sender:
            self._deadline = self._next_deadline()
        else:
            self.promise(sender, Vote(self.term, False))
            self._hurry()

    def _on_vote(self, sender: NodeId, m: Vote) -> None:
        if m.term > self.term:
            self._step_down(m.term)
        elif self.role == CANDIDATE and m.term == self.term and m.granted and sender in self._unheard:
            self._votes.add(sender)
            super().__onMessageReceived(sender, {"type": "response_vote", "term": m.term})
        elif self.role == CANDIDATE and m.term == self.term and not m.granted:
            self._hurry()

    @property
    def _unheard(self) -> set[NodeId]:
        return set(self.peers) - self._votes

    def _on_timeout_now(self, sender: NodeId, m: TimeoutNow) -> None:
        if m.term == self.term and sender == self.leader and self.is_member and self.seeded:
            self._campaign(transfer=True)

    # -- changing role --------------------------------------------------------------------------------------------

    def _step_down(self, term: int) -> None:
        assert term > self.term
        self.__setCurrentTerm(term, None)
        self._become_follower()

    def _become_follower(self) -> None:
        self._prevotes = None
        self.__raftLeader = None
        self.__setState(FOLLOWER)
        self._deadline = self._next_deadline()

    def __setState(self, newState: int) -> None:  # noqa: N802, N803
        changed = newState != self.__raftState
        super().__setState(newState)
        self.is_leader = newState == LEADER
        if changed:
            self.role_changes += 1
            if newState != LEADER:
                self.transferee = None
                self.learners = ()
                self.progress = {}
                self.reads_failed += [ctx for _, _, ctx in self.reads]
                self.reads = []
