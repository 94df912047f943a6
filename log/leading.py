"""What a leader does: it proposes, replicates, commits, confirms reads and hands over (Raft §5.3, §5.4)."""

from __future__ import annotations

from typing import TypeAlias

from holdfast.log import following
from holdfast.log.errors import EngineFault, NotLeader, Overloaded
from holdfast.log.messages import (
    ENTRIES_MAX,
    Append,
    AppendAck,
    AppendReject,
    Entry,
    Heartbeat,
    HeartbeatAck,
    NodeId,
    Offer,
    TimeoutNow,
    build,
)
from holdfast.log.progress import REPLICATE, SNAPSHOT, Progress

#: An append to send: its first index, its last index, the bytes of its commands, and the message.
_Sending: TypeAlias = tuple[int, int, int, Append]


class SyncObj(following.SyncObj):
    """The layer that leads: it replicates its log and commits the entries that a majority holds."""

    __slots__ = ()

    # -- the door -------------------------------------------------------------------------------------------------

    def refusal(self) -> NotLeader | Overloaded | None:
        """Why a proposal would be refused now; None if it would be accepted."""
        if not self.is_leader:
            return NotLeader(self.leader)
        if self.seal_index is not None or self.transferee is not None:
            return NotLeader(None)
        if self.uncommitted_bytes >= self.limits.uncommitted_bytes_max:
            return Overloaded("too many uncommitted bytes wait for a majority of the group")
        return None

    def propose(self, command: bytes) -> int | None:
        """Append a command, which begins with its kind byte, to our log. None if refused; `refusal` says why."""
        if not self.is_leader or self.seal_index is not None or self.transferee is not None:
            return None
        if self.uncommitted_bytes >= self.limits.uncommitted_bytes_max:
            return None
        log, size = self.log, len(command)
        index = log.last_index + 1
        log.append((command, index, self.__raftCurrentTerm))
        self.uncommitted_bytes += size
        self._uncommitted.append((index, size))
        self.must_send = True
        return index

    def seal(self, next_members: tuple[NodeId, ...], command: bytes) -> int:
        """End this epoch: no entry after this one will ever commit in it."""
        assert self.refusal() is None and self.term_committed
        index = self.propose(command)
        assert index is not None
        self.seal_index, self.next_members = index, next_members
        return index

    def read_index(self, ctx: object) -> None:
        """Ask for a read index: a state applied up to it includes everything acknowledged before now."""
        if not self.is_leader or self.sealed:
            self.reads_failed.append(ctx)
            return
        self.reads.append((self._sequence + 1, self.commit, ctx))
        self.must_beat = True

    def transfer(self, to: NodeId) -> bool:
        if not self.is_leader or to not in self.peers or self.seal_index is not None:
            return False
        self.transferee = to
        self._transfer_deadline = self.now + self.timing.election_max
        self.must_send = True
        return True

    def add_learners(self, learners: tuple[NodeId, ...]) -> None:
        """Replicate to nodes that do not vote yet, too."""
        self.learners = tuple(sorted(set(learners) - set(self.members)))
        last = self.log.last_index
        self.progress = {
            peer: self.progress.get(peer) or Progress(last + 1, self.now) for peer in (*self.peers, *self.learners)
        }
        self.must_send = True

    def learner_began(self, peer: NodeId) -> None:
        """A learner's log is empty, or may be: a node that is not a member may forget a group and be invited again."""
        if self.is_leader and peer in self.learners:
            self.progress[peer] = Progress(self.log.last_index + 1, self.now)
            self.must_send = True

    # -- the leadership -------------------------------------------------------------------------------------------

    def __onBecomeLeader(self) -> None:  # noqa: N802
        self.progress = {peer: Progress(self.log.last_index + 1, self.now) for peer in self.peers}
        self.uncommitted_bytes = 0
        self._uncommitted.clear()
        self.elected_at = self.now
        self.must_beat = True
        super().__onBecomeLeader()  # Appends the no-op of the term.
        self._find_seal()
        if self.next_members is not None:
            self.add_learners(self.next_members)

    def __sendAppendEntries(self) -> None:  # noqa: N802
        """The parent sends at any time. We send once per turn, in `flush`."""
        self.must_send = True

    def _lead(self) -> None:
        if not self._quorum_heard():
            self._become_follower()
            return
        if self.transferee is not None and self.now >= self._transfer_deadline:
            self.transferee = None
        for progress in self.progress.values():
            if progress.waiting_since is not None and self.now - progress.waiting_since > self.timing.resend:
                progress.restart(progress.match + 1 if progress.match else progress.next)
                self.must_send = True
        self._maybe_commit()

    def _quorum_heard(self) -> bool:
        """Whether a majority answered recently. If not, clients must not wait for us (check-quorum)."""
        since = self.now - self.timing.quorum
        heard = sum(self.progress[peer].contact >= since for peer in self.peers)
        return 2 * (heard + 1) > len(self.members)

    def _send_heartbeats(self) -> None:
        self.must_beat = False
        self._sequence += 1
        for peer, progress in self.progress.items():
            if progress.sequence == 0:  # It never answered, so it may not know this epoch or the group.
                self._tell_epoch(peer)
            self.out.append((peer, Heartbeat(self.term, min(self.commit, progress.match), self._sequence)))
            if progress.flow is SNAPSHOT and (snapshot := self.newest_snapshot()) is not None:
                self.out.append((peer, Offer(self.term, snapshot.index, snapshot.term, snapshot.detail)))
        self._serve_reads()

    def _heard(self, sender: NodeId, term: int) -> Progress | None:
        """The progress of the sender if its answer belongs to our leadership, else None."""
        if term > self.__raftCurrentTerm:
            self._step_down(term)
        if term != self.__raftCurrentTerm or not self.is_leader:
            return None
        progress = self.progress.get(sender)
        if progress is not None:
            progress.contact = self.now
        return progress

    def _on_heartbeat_ack(self, sender: NodeId, m: HeartbeatAck) -> None:
        progress = self._heard(sender, m.term)
        if progress is not None:
            progress.sequence = max(progress.sequence, m.sequence)
            if self.reads:
                self._serve_reads()

    def _maybe_hand_over(self) -> None:
        to = self.transferee
        if to is not None and to in self.connected and self.progress[to].match == self.log.last_index:
            self.out.append((to, TimeoutNow(self.term)))

    # -- replication ----------------------------------------------------------------------------------------------

    def _on_append_ack(self, sender: NodeId, m: AppendAck) -> bool | None:
        return self.acknowledge(sender, m.term, m.index)

    def acknowledge(self, sender: NodeId, term: int, index: int) -> bool | None:
        """A follower holds our entries up to `index`. Return whether a turn has work to do; None if unknown."""
        if term == self.__raftCurrentTerm and self.is_leader and sender in self.progress:
            progress = self.progress[sender]
            progress.contact = self.now
        else:
            self._heard(sender, term)  # The answer is not for this leadership, and may end it.
            return None
        last = self.log.last_index
        if index > last:
            raise EngineFault(f"{sender} acknowledged {index}, but our log ends at {last}")
        commit = self.__raftCommitIndex
        if progress.acknowledged(index, self.now) and index > commit:
            if index > self._acknowledged:
                self._acknowledged = index
            self._maybe_commit()
        if progress.next <= last or self.transferee == sender:
            self.must_send = True
        # A pending change of members checks how far its learner is.
        return self.must_send or self.__raftCommitIndex > commit or bool(self.learners)

    def _on_append_reject(self, sender: NodeId, m: AppendReject) -> None:
        progress = self._heard(sender, m.term)
        if progress is not None and progress.rejected(m.index, m.hint):
            self.must_send = True

    def _send_appends(self) -> None:
        """Send each follower what fits its window. Followers that keep up receive the same message."""
        limits, last, connected, now = self.limits, self.log.last_index, self.connected, self.now
        newest: _Sending | None = None
        for peer, progress in self.progress.items():  # The peers, then the learners.
            if peer not in connected:
                continue
            while True:
                low = progress.next
                if progress.flow is REPLICATE:
                    if low > last or len(progress.in_flight) >= limits.window_messages:
                        break
                    if progress.in_flight_bytes >= limits.window_bytes:
                        break
                elif progress.waiting_since is not None or progress.flow is SNAPSHOT:
                    break
                if newest is None or newest[0] != low:
                    made = self._make_append(low)
                    if made is None:
                        progress.offer_snapshot()
                        break
                    newest = made
                _, high, size, append = newest
                self.out.append((peer, append))
                progress.sent(high, size, now)
                if high >= last:
                    break

    def _make_append(self, low: int) -> _Sending | None:
        """An append of the entries from `low` on; None if the entry before `low` is trimmed."""
        log = self.log
        prev, last = low - 1, log.last_index
        prev_term = log.term_of(prev)
        if prev_term is None:
            return None
        entries: tuple[Entry, ...]
        if low == last and log.tail:  # The usual case.
            entries = (log.tail[-1],)
            size = len(entries[0][0])
        else:
            high = last if last < low + ENTRIES_MAX else low + ENTRIES_MAX - 1
            entries = tuple(log.entries(low, high, bytes_max=self.limits.append_bytes_max)) if low <= last else ()
            size = sum([len(entry[0]) for entry in entries])
        fields = self.__raftCurrentTerm, prev, prev_term, self.__raftCommitIndex, entries
        return low, prev + len(entries), size, build(Append, fields)

    # -- commit and reads -----------------------------------------------------------------------------------------

    def _maybe_commit(self) -> None:
        """Commit entries that are durable on a majority, if the last is of our own term (Raft §5.4.2)."""
        log, index = self.log, self._majority(self.members)
        if index <= self.__raftCommitIndex:
            return
        if self.__raftCurrentTerm != (log.last_term if index == log.last_index else log.term_of(index)):
            return
        if self.seal_index is not None and self.next_members is not None and index >= self.seal_index:
            # Nothing after a seal takes effect. And a majority of the successor must hold it, or it could begin without it.
            owned = self._majority(self.next_members) >= self.seal_index
            index = self.seal_index if owned else self.seal_index - 1
        if index > self.__raftCommitIndex:
            log.set_commit(index)
            self.__raftCommitIndex = index
            waiting = self._uncommitted
            while waiting and waiting[0][0] <= index:
                self.uncommitted_bytes -= waiting.popleft()[1]
            if self.reads:
                self._serve_reads()

    def _majority(self, members: tuple[NodeId, ...]) -> int:
        """The highest index that is durable on more than half of `members`. Our own log counts only as far as it is on disk."""
        if not self.learners and members is self.members:
            durable = [self._own_durable()]
            for progress in self.progress.values():  # A comprehension would cost a call.
                durable.append(progress.match)
            durable.sort()
            return durable[(len(durable) - 1) // 2]
        durable = [self._own_durable()] if self.node in members else []
        for member, progress in self.progress.items():
            if member in members:
                durable.append(progress.match)
        if len(durable) < len(members):
            durable += [0] * (len(members) - len(durable))  # We know nothing about the others.
        durable.sort()
        return durable[(len(durable) - 1) // 2]

    def _own_durable(self) -> int:
        return self.log.durable

    def _serve_reads(self) -> None:
        """Confirm reads: a read is safe once a majority answered a round that began after it (Raft thesis §6.4)."""
        if not self.reads or not self.term_committed:
            return
        answered = sorted(self._sequence if m == self.node else self.progress[m].sequence for m in self.members)
        confirmed = answered[(len(answered) - 1) // 2]
        waiting = []
        for round_, index, ctx in self.reads:
            if round_ <= confirmed:
                self.reads_ready.append((max(index, self._read_floor), ctx))
            else:
                waiting.append((round_, index, ctx))
        self.reads = waiting

    @property
    def _read_floor(self) -> int:
        # A read that came before our term's first entry was committed may have noted a commit index that was behind.
        floor: int = self.__noopIDx
        return floor
