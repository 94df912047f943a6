"""What a follower accepts from its leader and how it answers (Raft §5.3)."""

from __future__ import annotations

from typing import Final

from holdfast.log import elections
from holdfast.log.engine_state import FOLLOWER
from holdfast.log.errors import EngineFault
from holdfast.log.messages import (
    SEAL,
    Append,
    AppendAck,
    AppendReject,
    Entry,
    Heartbeat,
    HeartbeatAck,
    NodeId,
    Offer,
    build,
)

OFFERS_MAX: Final = 16


class SyncObj(elections.SyncObj):
    """The layer that follows a leader: it appends, acknowledges, and accepts offered states."""

    __slots__ = ()

    # -- entries --------------------------------------------------------------------------------------------------

    def _follow(self, sender: NodeId, term: int, commit: int) -> bool:
        """Take a leader's message. False if the leader is deposed. `commit` must cover verified entries only."""
        current = self.__raftCurrentTerm
        if term < current:
            return False
        if term == current and self.is_leader:
            raise EngineFault(f"two leaders in term {term}: {self.node} and {sender}")
        self._leader_contact = self.now
        self._deadline = self._next_deadline()
        self._patience = self._hurries = 0
        self._prevotes = None
        if term > current or self.__raftState != FOLLOWER or self.__raftLeader != sender:
            # Let the parent record term, leader and role, with a message without entries.
            super().__onMessageReceived(sender, {"type": "append_entries", "term": term, "commit_index": 0})
        if commit > self.__raftCommitIndex:
            self._learn_commit(sender, commit)
        return True

    def _learn_commit(self, sender: NodeId, index: int) -> None:
        if index > self.log.last_index:
            raise EngineFault(
                f"{sender} says that we hold committed entry {index}, but our log ends at {self.log.last_index}: "
                "this node lost entries that it had acknowledged. If its directory is an older copy (a backup or a disk "
                "snapshot), do not start it again: remove the node from the cluster, and add it under a new name with an "
                "empty directory"
            )
        self.log.set_commit(index)
        self.__raftCommitIndex = index

    def follow(self, sender: NodeId, term: int, prev: int, prev_term: int, commit: int, entry: Entry) -> bool:
        """Append one entry that directly follows our log: the usual case, in few steps.

        True: the entry is appended, and the caller owes an acknowledgement. False: nothing happened, and `_on_append` decides.
        """
        log = self.log
        if (
            prev != log.last_index
            or prev_term != log.last_term
            or term != self.__raftCurrentTerm
            or sender != self.__raftLeader
            or self.__raftState != FOLLOWER
        ):
            return False
        self._leader_contact = self.now
        self._patience = self._hurries = 0
        self._prevotes = None
        log.append(entry)
        if entry[0][0] == SEAL:
            self._find_seal()
        index = prev + 1
        if commit > index:
            commit = index
        if commit > self.__raftCommitIndex:
            log.set_commit(commit)
            self.__raftCommitIndex = commit
        return True

    def _on_append(self, sender: NodeId, m: Append) -> bool:
        term, prev, prev_term, commit, entries = m
        log = self.log
        if len(entries) == 1 and self.follow(sender, term, prev, prev_term, commit, entries[0]):
            self.promise(sender, build(AppendAck, (term, prev + 1)))
            return True
        if not self._follow(sender, term, 0):
            self.promise(sender, AppendReject(self.term, prev, log.last_index + 1))
        elif log.term_of(prev) == prev_term:  # The term is None outside our log.
            self._take_entries(sender, m)
        elif prev > log.last_index:
            self.promise(sender, AppendReject(self.term, prev, log.last_index + 1))
        elif prev < log.base_index:
            # Entries below our base are committed, so they equal the leader's. Let it continue after our commit index.
            self.promise(sender, AppendAck(self.term, self.commit))
        elif prev <= self.commit:
            raise EngineFault(f"{sender} contradicts committed entry {prev}")
        else:
            # Everything up to our commit index is known to match: one round trip instead of one per entry.
            self.promise(sender, AppendReject(self.term, prev, self.commit + 1))
        return True  # There is always an answer.

    def _take_entries(self, sender: NodeId, m: Append) -> None:
        """The logs agree at `prev`. Skip entries that we already hold; only a real conflict truncates (Raft §5.3)."""
        _, verified, _, commit, rest = m
        log, changed = self.log, False  # Whether the end of the epoch may have moved.
        if rest and verified < log.last_index:
            skip = 0
            while skip < len(rest) and log.term_of(rest[skip][1]) == rest[skip][2]:
                verified = rest[skip][1]
                skip += 1
            rest = rest[skip:]
            if rest and verified < log.last_index:
                if verified < self.__raftCommitIndex:
                    raise EngineFault(f"{sender} would overwrite committed entry {verified + 1}")
                log.truncate(verified + 1)
                changed = True
        for entry in rest:
            log.append(entry)
            verified = entry[1]
            if entry[0][0] == SEAL:
                changed = True
        if changed:
            self._find_seal()
        if commit > verified:
            commit = verified
        if commit > self.__raftCommitIndex:
            log.set_commit(commit)
            self.__raftCommitIndex = commit
        self.promise(sender, build(AppendAck, (self.__raftCurrentTerm, verified)))

    def __sendNextNodeIdx(  # noqa: N802
        self,
        node: NodeId,
        reset: bool = False,
        nextNodeIdx: int | None = None,  # noqa: N803
        success: bool = False,
    ) -> None:
        """The parent's acknowledgement: with a term, and only of compared entries."""
        if reset or not success or nextNodeIdx is None:
            raise EngineFault("an acknowledgement must name a verified entry")
        self.promise(node, AppendAck(self.term, nextNodeIdx - 1))

    def _on_heartbeat(self, sender: NodeId, m: Heartbeat) -> None:
        if m.commit > self.log.last_index and not self.is_member:
            # The leader counts entries that we held before we forgot the group, which only a learner may do, and does not know
            # yet that we began again: another node invited us. A member that lost acknowledged entries must stop instead
            # (`_learn_commit`).
            if self._follow(sender, m.term, 0):
                self._tell_epoch(sender)
            return
        self._follow(sender, m.term, m.commit)
        # The answer does not wait for the disk: it promises nothing about entries, and the majority that elected this leader
        # has its votes on disk (docs/raft-hardening.md, "Answers that need no disk").
        self.out.append((sender, HeartbeatAck(self.term, m.sequence)))

    # -- states in place of entries -------------------------------------------------------------------------------

    def _on_offer(self, sender: NodeId, m: Offer) -> None:
        if not self._follow(sender, m.term, 0):
            self.promise(sender, AppendReject(self.term, m.index, self.log.last_index + 1))
        elif m.index <= self.commit:
            self.promise(sender, AppendAck(self.term, self.commit))
        elif self.log.settled:
            # Accept no offer before our term and epoch are on disk. A state is durable as soon as it is installed, and if a
            # crash left it with an older epoch than that of the offer, we could lead an epoch that is over. Offers repeat.
            self.offers = {index: term for index, term in self.offers.items() if index > self.commit}
            if len(self.offers) < OFFERS_MAX:
                self.offers[m.index] = m.index_term

    def may_install(self, index: int, term: int) -> bool:
        """Whether a state at (index, term) may replace ours.

        It must have been offered by a leader of this epoch: a state from after our seal would let us lead an epoch that is
        over. It must be above our commit index, or we would drop acknowledged entries. And we must not lead: the log of a
        leader that was deposed without knowing it may contradict the state.
        """
        return index > self.commit and self.offers.get(index) == term and not self.is_leader

    def installed(self, index: int, term: int) -> None:
        """The state at (index, term) is in place and durable, so the log begins after it. Never below our commit index."""
        if index <= self.commit:
            raise EngineFault(f"a snapshot at {index} was installed below the commit index {self.commit}")
        self.log.reset(index, term)
        self.__raftCommitIndex = index
        self._find_seal()
        if self.leader is not None and not self.is_leader:
            self.promise(self.leader, AppendAck(self.term, index))

    def know_committed(self, index: int) -> None:
        """A later epoch proves that our log is committed up to `index`."""
        if index > self.commit:
            self.log.set_commit(index)
            self.__raftCommitIndex = index
