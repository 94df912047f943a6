"""The Raft engine of one group: pysyncobj 0.3.17, hardened.

The engine is told what happened (`STEPS`, `tick`, `propose`, `persisted`, `peer_up`, `peer_down`) and returns what should
follow: messages that may leave at once (`out`), messages that must wait until everything before them is on disk (`promises`),
and how far the log is committed. It has no thread, socket, clock or randomness of its own.

**Layers.** The engine is a chain of classes, each called SyncObj (`engine_state.py` says why): shared state, `elections.py`,
`following.py`, `leading.py`, and this one, which is told what happened. The parent still keeps role, term and vote, grants and
counts votes, and takes the first steps of a new leader (ADR 1). docs/raft-hardening.md lists what we replace and which
deviation from Raft each replacement closes; `check_parent` refuses a parent whose source was not audited.

**Invariants**, each checked where it could break: entries at or below `commit` are never truncated; an acknowledgement covers
only entries that were compared with the leader's; nothing counts before it is durable, including our own log; a vote is
durable before any peer learns of it, and a term before its leader leads; of two epochs of a group, only one can commit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from holdfast.log import leading
from holdfast.log.elections import HURRIES_MAX
from holdfast.log.engine_state import (
    CANDIDATE,
    FOLLOWER,
    LEADER,
    NEVER,
    Limits,
    Snapshot,
    Timing,
    decode_seal,
    encode_seal,
)
from holdfast.log.messages import (
    Append,
    AppendAck,
    AppendReject,
    Heartbeat,
    HeartbeatAck,
    NodeId,
    Offer,
    PreVote,
    PreVoteReply,
    RequestVote,
    TimeoutNow,
    Vote,
)
from holdfast.log.progress import SNAPSHOT

# Users of an engine import everything from here, not from its layers.
__all__ = [
    "CANDIDATE",
    "FAR",
    "FOLLOWER",
    "LEADER",
    "ROLE_NAMES",
    "Engine",
    "Limits",
    "Snapshot",
    "Timing",
    "decode_seal",
    "encode_seal",
]

ROLE_NAMES: Final = {FOLLOWER: "follower", CANDIDATE: "candidate", LEADER: "leader"}
FAR: Final = float("inf")


class SyncObj(leading.SyncObj):
    """The whole engine. Events enter here."""

    __slots__ = ()

    def peer_up(self, peer: NodeId) -> None:
        """A session began: everything in flight in an older one is lost or will be dropped."""
        self.connected.add(peer)
        self.learner_began(peer)  # It may have forgotten the group while we were disconnected.
        progress = self.progress.get(peer)
        if progress is not None:
            # The process that answered our heartbeats may have died before the group was on its disk, so tell it again.
            # Reads use `sequence` too: a lower one only confirms less, and answers of older sessions are dropped.
            progress.sequence = 0
        if self.is_leader and progress is not None and progress.flow is not SNAPSHOT:
            progress.restart(progress.match + 1 if progress.match else progress.next)
            self.must_send = True
        elif self.is_member and not self.is_leader and self.leader not in self.connected:
            # We know no leader, or cannot hear it. This peer may complete a majority.
            self.ask_soon()

    def peer_down(self, peer: NodeId) -> None:
        self.connected.discard(peer)
        if peer == self.transferee:
            self.transferee = None  # It will not lead, and proposals wait until we give up the transfer.
        if peer == self.leader and not self.is_leader:
            # The leader's process is gone or unreachable from here. Ask the others at once; if they still hear it, they
            # refuse, and the leader is not disturbed.
            self._leader_contact = NEVER
            self._hurries = HURRIES_MAX
            self._deadline = self.now + self.rng.uniform(0.0, self.timing.broken_max)

    @property
    def wake_at(self) -> float:
        """When `tick` next has work to do besides the regular heartbeat."""
        return FAR if self.is_leader else self._deadline

    def beat(self) -> None:
        """The node's heartbeat is due. All groups share it, so that one message carries them all."""
        self.must_beat = True

    def tick(self, now: float) -> None:
        self.now = now
        if self.is_leader:
            self._lead()
        elif now >= self._deadline:
            heard = self._hears_leader()
            # Appends are too frequent to set a deadline for each, so the deadline counts from the last one.
            self._deadline = self._next_deadline(self._leader_contact if heard else now)
            if heard:
                return
            if self.is_member and self.seeded:
                self._ask_for_prevotes()
            else:
                self._ask_around()

    def persisted(self) -> None:
        """The durable mark of our log may have moved."""
        if self.is_leader:
            # An uncommitted entry is on a majority only if another member holds it too, or there is no other member. Usually
            # our own disk is the first.
            commit = self.__raftCommitIndex
            if self.log.durable > commit and (self._acknowledged > commit or not self.peers):
                self._maybe_commit()
        elif self.__raftState == CANDIDATE and not self.peers and self.log.durable_term == self.term:
            self.__onBecomeLeader()

    def flush(self) -> None:
        """Add the followers' messages to `out`. Called once per turn, so a turn makes one message."""
        if not self.is_leader:
            self.must_beat = self.must_send = False  # The next leader begins with both.
            return
        if self.must_beat:
            self._send_heartbeats()
        if self.must_send:
            self.must_send = False
            self._send_appends()
            if self.transferee is not None:
                self._maybe_hand_over()

    #: The handler of each kind of message, from a member of this epoch or, on a learner, from its leader. A handler returns
    #: whether a turn has work to do then; None if it does not know.
    STEPS: Final[dict[type, Callable[[Any, NodeId, Any], bool | None]]] = {
        Append: leading.SyncObj._on_append,
        AppendAck: leading.SyncObj._on_append_ack,
        AppendReject: leading.SyncObj._on_append_reject,
        Heartbeat: leading.SyncObj._on_heartbeat,
        HeartbeatAck: leading.SyncObj._on_heartbeat_ack,
        PreVote: leading.SyncObj._on_prevote,
        PreVoteReply: leading.SyncObj._on_prevote_reply,
        RequestVote: leading.SyncObj._on_request_vote,
        Vote: leading.SyncObj._on_vote,
        TimeoutNow: leading.SyncObj._on_timeout_now,
        Offer: leading.SyncObj._on_offer,
    }


Engine = SyncObj
