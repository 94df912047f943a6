"""The Raft engine of one group: pysyncobj 0.3.17, hardened.

It is told what happened (`STEPS`, `tick`, `propose`, `persisted`, `peer_up`, `peer_down`) and says what should follow:
messages that may leave at once (`out`), messages that must wait until everything before them is on disk (`promises`),
and how far the log is committed. It has no thread, no socket, no clock and no randomness of its own.

**Why the class below is called SyncObj.** pysyncobj keeps its state and steps in names with two leading underscores,
which Python mangles with the *name of the class*. A subclass of the same name therefore reads and overrides them as if
it stood in the same file. What we keep of the parent: the bookkeeping of state, term and vote, the granting of votes, the
counting of them and the first steps of a new leader. What we replace, and which deviation from
Raft each replacement closes, is listed in docs/raft-hardening.md; `check_parent` refuses a parent whose source is not the
one that was audited.

**Invariants**, each checked where it could break: entries at or below `commit` are never truncated; an
acknowledgement names only entries that were compared with the leader's; nothing counts before it is durable, our own log
included; a vote is durable before anybody hears of it, and a term before its leader leads; of two epochs of a group, only
one can commit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgpack
from pysyncobj import syncobj as _parent

from holdfast.log.audit import check_parent
from holdfast.log.errors import EngineFault, NotLeader, Overloaded
from holdfast.log.messages import (
    ENTRIES_MAX,
    NOOP,
    SEAL,
    Append,
    AppendAck,
    AppendReject,
    Config,
    Entry,
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
    build,
)
from holdfast.log.progress import REPLICATE, SNAPSHOT, Progress

if TYPE_CHECKING:
    from random import Random

    from holdfast.log.journal import GroupLog

FOLLOWER: Final = _parent._RAFT_STATE.FOLLOWER
CANDIDATE: Final = _parent._RAFT_STATE.CANDIDATE
LEADER: Final = _parent._RAFT_STATE.LEADER
ROLE_NAMES: Final = {FOLLOWER: "follower", CANDIDATE: "candidate", LEADER: "leader"}
NEVER: Final = float("-inf")
FAR: Final = float("inf")
PATIENCE_MAX: Final = 5  # A node that cannot lead asks around less and less often, down to once in 2^5 timeouts.
OFFERS_MAX: Final = 16
HURRIES_MAX: Final = 8  # So often an election after a broken connection is tried again without waiting a timeout.
#: An append that is sent: its first and its last index, the bytes of its commands, and itself.
_Sending: TypeAlias = tuple[int, int, int, Append]


@dataclass(frozen=True, slots=True)
class Timing:
    """All in seconds. A leader gives up before its followers may: `quorum` is not above `election_min`."""

    heartbeat: float = 0.1
    election_min: float = 0.5
    election_max: float = 1.0
    quorum: float = 0.5
    resend: float = 1.0
    broken_max: float = 0.03  # A broken connection to the leader starts an election within this time.
    apply: float = 0.02  # Who follows applies at most so often, and then what has come since of all groups together.


@dataclass(frozen=True, slots=True)
class Limits:
    command_bytes_max: int = 1024 * 1024
    entry_bytes_max: int = 1024 * 1024  # Commands of one turn share an entry up to this size.
    append_bytes_max: int = 1024 * 1024
    window_messages: int = 64
    window_bytes: int = 8 * 1024 * 1024
    uncommitted_bytes_max: int = 64 * 1024 * 1024
    apply_entries_max: int = 512
    apply_lag_max: int = 64  # So many committed entries of a group are not kept waiting.
    proposals_max: int = 100_000


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A durable copy of a group's state; `detail` tells a follower how to get it."""

    index: int
    term: int
    detail: bytes


class _Member(str):
    """A node as pysyncobj sees it: something hashable with an id."""

    __slots__ = ()

    @property
    def id(self) -> str:
        return self


class _Outlet:
    """pysyncobj's Transport. The only thing the kept code still sends is a granted vote."""

    ready = True

    def __init__(self) -> None:
        self.engine: SyncObj | None = None

    def send(self, node: NodeId, message: dict[str, Any]) -> bool:
        assert self.engine is not None and message["type"] == "response_vote", message["type"]
        self.engine.promise(node, Vote(message["term"], True))
        return True

    def destroy(self) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("setOn"):
            return lambda *_: None  # The parent registers callbacks for sockets we do not have.
        raise AttributeError(name)


class SyncObj(_parent.SyncObj):
    """One group's engine in one epoch. Its members are fixed: a change of members is a new epoch and a new engine."""

    # As in `GroupLog`: near each other, and so are those of the parent's hundred attributes that we use.
    __slots__ = (
        "__raftCommitIndex",
        "__raftCurrentTerm",
        "__raftLastApplied",
        "__raftLeader",
        "__raftLog",
        "__raftState",
        "__votedForNodeId",
        "__votesCount",
        "_acknowledged",
        "_deadline",
        "_hurries",
        "_leader_contact",
        "_patience",
        "_poller",
        "_prevotes",
        "_sequence",
        "_transfer_deadline",
        "_uncommitted",
        "_votes",
        "connected",
        "elected_at",
        "epoch",
        "is_leader",
        "is_member",
        "learners",
        "limits",
        "log",
        "members",
        "must_beat",
        "must_send",
        "newest_snapshot",
        "next_members",
        "node",
        "now",
        "offers",
        "out",
        "peers",
        "progress",
        "promises",
        "reads",
        "reads_failed",
        "reads_ready",
        "rng",
        "role_changes",
        "seal_index",
        "timing",
        "transferee",
        "uncommitted_bytes",
    )
    __raftLeader: NodeId | None

    def __init__(
        self,
        *,
        node: NodeId,
        members: tuple[NodeId, ...],
        log: GroupLog,
        timing: Timing,
        limits: Limits,
        rng: Random,
        now: float,
        connected: frozenset[NodeId] = frozenset(),
        newest_snapshot: Callable[[], Snapshot | None] = lambda: None,
        lead_at_once: bool = False,
    ) -> None:
        check_parent()
        others = [member for member in members if member != node]
        # Our own state first: the parent's constructor looks at every attribute, properties included.
        self.log = log
        self.node = node
        self.members = members
        self.peers = tuple(sorted(others))
        self.learners: tuple[NodeId, ...] = ()
        self.is_member = node in members
        self.is_leader = False  # As the parent's state says, which is changed in `__setState` alone.
        self.epoch = log.configuration.epoch
        self.timing = timing
        self.limits = limits
        self.rng = rng
        self.now = now
        self.connected = set(connected)
        self.newest_snapshot = newest_snapshot
        self.out: list[tuple[NodeId, Message]] = []
        self.promises: list[tuple[NodeId, Message]] = []
        self.progress: dict[NodeId, Progress] = {}
        self.next_members: tuple[NodeId, ...] | None = None  # Of a seal in our log, committed or not.
        self.seal_index: int | None = None
        self.transferee: NodeId | None = None
        self.uncommitted_bytes = 0
        self._uncommitted: deque[tuple[int, int]] = deque()  # (index, bytes) of what we proposed and is not committed
        self.reads: list[tuple[int, int, object]] = []  # (round to be answered, commit index when asked, who asked)
        self.reads_ready: list[tuple[int, object]] = []
        self.reads_failed: list[object] = []
        self.role_changes = 0
        self.elected_at = NEVER
        self.offers: dict[int, int] = {}  # index -> term of the snapshots that leaders of this epoch offered us
        self._patience = 0
        self._transfer_deadline = NEVER
        self._hurries = 0
        self._votes: set[NodeId] = set()
        self._prevotes: set[NodeId] | None = None
        self._leader_contact = NEVER
        self._sequence = 0
        self._acknowledged = 0  # The highest index that a follower acknowledged to us, in this term or an earlier one.
        self.must_beat = False  # Whether the next flush sends a heartbeat,
        self.must_send = False  # and whether it looks for entries to send.
        self._deadline = now if lead_at_once else self._next_deadline()

        outlet = _Outlet()
        conf = _parent.SyncObjConf(autoTick=False, commandsWaitLeader=False, pollerType="select")
        super().__init__(_Member(node), others, conf, nodeClass=_Member, transport=outlet)
        outlet.engine = self
        self._poller = None
        # The parent began with an empty journal in memory. This is the real one, as it was left.
        self.__raftLog = log
        self.__raftCurrentTerm = log.term
        self.__votedForNodeId = log.vote
        self.__raftCommitIndex = log.commit
        self.__raftLastApplied = 0
        self._find_seal()

    # -- what others may ask ---------------------------------------------------------------------------------------

    @property
    def term(self) -> int:
        return self.__raftCurrentTerm

    @property
    def commit(self) -> int:
        return self.__raftCommitIndex

    @property
    def role(self) -> int:
        return self.__raftState  # type: ignore[no-any-return]

    @property
    def leader(self) -> NodeId | None:
        return self.__raftLeader

    @property
    def seeded(self) -> bool:
        """Whether we hold what the epoch before ours committed. Without it we may follow, never lead."""
        seed = self.log.configuration
        return self.log.base_index > seed.seed_index or self.log.term_of(seed.seed_index) == seed.seed_term

    @property
    def sealed(self) -> bool:
        """Whether this epoch is over: its successor may have acknowledged what we know nothing of."""
        return self.seal_index is not None and self.commit >= self.seal_index

    @property
    def term_committed(self) -> bool:
        """Whether an entry of our own term is committed: only then is our commit index known to be the newest."""
        return self.is_leader and self.log.term_of(self.commit) == self.term

    # -- the door ----------------------------------------------------------------------------------------------------

    def refusal(self) -> NotLeader | Overloaded | None:
        """Why nothing can be proposed here now; None if it can."""
        if not self.is_leader:
            return NotLeader(self.leader)
        if self.seal_index is not None or self.transferee is not None:
            return NotLeader(None)
        if self.uncommitted_bytes >= self.limits.uncommitted_bytes_max:
            return Overloaded("too much is waiting for a majority of the group")
        return None

    def propose(self, command: bytes) -> int | None:
        """Append a command (its kind byte first) to our log. None: it is not, and `refusal` says why."""
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
        """End this epoch: nothing proposed after this entry will ever commit in it."""
        assert self.refusal() is None and self.term_committed
        index = self.propose(command)
        assert index is not None
        self.seal_index, self.next_members = index, next_members
        return index

    def read_index(self, ctx: object) -> None:
        """Ask for an index such that a state applied up to it includes everything acknowledged before now."""
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
        """Replicate to nodes that do not vote yet."""
        self.learners = tuple(sorted(set(learners) - set(self.members)))
        last = self.log.last_index
        self.progress = {
            peer: self.progress.get(peer) or Progress(last + 1, self.now) for peer in (*self.peers, *self.learners)
        }
        self.must_send = True

    # -- what happened -----------------------------------------------------------------------------------------------

    def peer_up(self, peer: NodeId) -> None:
        """A new session: whatever was in flight in an older one is lost or will be dropped."""
        self.connected.add(peer)
        self.learner_began(peer)  # It may have forgotten the group while we did not hear of it.
        progress = self.progress.get(peer)
        if self.is_leader and progress is not None and progress.flow is not SNAPSHOT:
            progress.restart(progress.match + 1 if progress.match else progress.next)
            self.must_send = True
        elif self.is_member and not self.is_leader and self.leader not in self.connected:
            # We know of none, or of one that we cannot hear. This peer may be what a majority lacked.
            self.ask_soon()

    def ask_soon(self) -> None:
        """Nobody leads that we hear. If there is a leader after all, we hear it before we ask, or the others refuse."""
        self._hurries = HURRIES_MAX
        self._hurry()

    def learner_began(self, peer: NodeId) -> None:
        """A learner says that its log is empty, or may be: who is no member may forget a group, and be invited again."""
        if self.is_leader and peer in self.learners:
            self.progress[peer] = Progress(self.log.last_index + 1, self.now)
            self.must_send = True

    def peer_down(self, peer: NodeId) -> None:
        self.connected.discard(peer)
        if peer == self.transferee:
            self.transferee = None  # It will not lead, and until we give it up nothing can be proposed.
        if peer == self.leader and not self.is_leader:
            # The leader's process is gone or unreachable from here. Ask the others at once; if they still hear it,
            # they refuse, and nothing is disturbed.
            self._leader_contact = NEVER
            self._hurries = HURRIES_MAX
            self._deadline = self.now + self.rng.uniform(0.0, self.timing.broken_max)

    @property
    def wake_at(self) -> float:
        """When `tick` has something to do besides the regular beat."""
        return FAR if self.is_leader else self._deadline

    def beat(self) -> None:
        """The node's heartbeat is due: one for all its groups, so that one message carries them all."""
        self.must_beat = True

    def tick(self, now: float) -> None:
        self.now = now
        if self.is_leader:
            self._lead()
        elif now >= self._deadline:
            heard = self._hears_leader()
            # Appends are too many to set a new deadline with each, so it counts from the last one.
            self._deadline = self._next_deadline(self._leader_contact if heard else now)
            if heard:
                return
            if self.is_member and self.seeded:
                self._ask_for_prevotes()
            else:
                self._ask_around()

    def persisted(self) -> None:
        """Our log's durable mark may have moved."""
        if self.is_leader:
            # What is not committed yet is on a majority only if another member holds it too, or there is none. As a rule our
            # own disk is the first.
            commit = self.__raftCommitIndex
            if self.log.durable > commit and (self._acknowledged > commit or not self.peers):
                self._maybe_commit()
        elif self.__raftState == CANDIDATE and not self.peers and self.log.durable_term == self.term:
            self.__onBecomeLeader()

    def flush(self) -> None:
        """Put into `out` what the followers should have. Called once per turn, so one turn makes one message."""
        if not self.is_leader:
            self.must_beat = self.must_send = False  # Whoever leads next begins with both.
            return
        if self.must_beat:
            self._send_heartbeats()
        if self.must_send:
            self.must_send = False
            self._send_appends()
            if self.transferee is not None:
                self._maybe_hand_over()

    # -- following ---------------------------------------------------------------------------------------------------

    def _follow(self, sender: NodeId, term: int, commit: int) -> bool:
        """A message of a leader. False if it is a deposed one. Commit may rise to `commit`, which must be verified."""
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
            # The parent's bookkeeping of term, leader and role, by a message without entries.
            super().__onMessageReceived(sender, {"type": "append_entries", "term": term, "commit_index": 0})
        if commit > self.__raftCommitIndex:
            self._learn_commit(sender, commit)
        return True

    def _learn_commit(self, sender: NodeId, index: int) -> None:
        if index > self.log.last_index:
            raise EngineFault(f"{sender} says {index} is committed and ours; our log ends at {self.log.last_index}")
        self.log.set_commit(index)
        self.__raftCommitIndex = index

    def follow(self, sender: NodeId, term: int, prev: int, prev_term: int, commit: int, entry: Entry) -> bool:
        """An append of one entry that follows what our leader sent before: so it is as a rule, and takes few steps.

        True: we have it, and owe an acknowledgement. False: nothing is done, and `_on_append` sorts it out.
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
        elif log.term_of(prev) == prev_term:  # It has none outside our log.
            self._take_entries(sender, m)
        elif prev > log.last_index:
            self.promise(sender, AppendReject(self.term, prev, log.last_index + 1))
        elif prev < log.base_index:
            # What is below our base is committed, so equal to the leader's. Let it go on behind our commit.
            self.promise(sender, AppendAck(self.term, self.commit))
        elif prev <= self.commit:
            raise EngineFault(f"{sender} contradicts committed entry {prev}")
        else:
            # Everything up to our commit index is known to match: one round trip instead of one per entry.
            self.promise(sender, AppendReject(self.term, prev, self.commit + 1))
        return True  # It is answered, always.

    def _take_entries(self, sender: NodeId, m: Append) -> None:
        """The logs agree at `prev`. Skip what we hold already; only a real conflict truncates (Raft §5.3)."""
        _, verified, _, commit, rest = m
        log, changed = self.log, False  # Whether where the epoch ends may have changed.
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
        """The parent's acknowledgement, with a term, and only of what was compared."""
        if reset or not success or nextNodeIdx is None:
            raise EngineFault("an acknowledgement that names nothing verified")
        self.promise(node, AppendAck(self.term, nextNodeIdx - 1))

    def _on_heartbeat(self, sender: NodeId, m: Heartbeat) -> None:
        if m.commit > self.log.last_index and not self.is_member:
            # It counts what we held before we forgot the group, which only a learner may, and has not heard yet that we began
            # again: somebody else invited us. A member that lost what it acknowledged must not go on (`_learn_commit`).
            if self._follow(sender, m.term, 0):
                self._tell_epoch(sender)
            return
        self._follow(sender, m.term, m.commit)
        # Does not wait for the disk: it promises nothing about entries, and the majority that elected this leader has
        # its votes on disk (docs/raft-hardening.md, "answers that need no disk").
        self.out.append((sender, HeartbeatAck(self.term, m.sequence)))

    def _on_offer(self, sender: NodeId, m: Offer) -> None:
        if not self._follow(sender, m.term, 0):
            self.promise(sender, AppendReject(self.term, m.index, self.log.last_index + 1))
        elif m.index <= self.commit:
            self.promise(sender, AppendAck(self.term, self.commit))
        elif self.log.settled:
            # Not before our term and epoch are on disk. A state is durable as soon as it is installed, and if a crash left
            # it with an older epoch than it was offered in, we could lead an epoch that is over. Offers are repeated.
            self.offers = {index: term for index, term in self.offers.items() if index > self.commit}
            if len(self.offers) < OFFERS_MAX:
                self.offers[m.index] = m.index_term

    def may_install(self, index: int, term: int) -> bool:
        """Whether a state at (index, term) may replace ours.

        Only what a leader of this epoch offered: a state from behind our seal would let us lead an epoch that is over. Never
        below our commit, which would drop entries that we acknowledged. And never under a leader: if it is deposed without
        knowing it, its log and the state contradict each other.
        """
        return index > self.commit and self.offers.get(index) == term and not self.is_leader

    def installed(self, index: int, term: int) -> None:
        """The state at (index, term) is in place and durable; the log begins behind it. Never below our commit."""
        if index <= self.commit:
            raise EngineFault(f"a snapshot at {index} was installed over commit {self.commit}")
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

    # -- elections ---------------------------------------------------------------------------------------------------

    def _hurry(self) -> None:
        """An election came to nothing, because two asked at once, or one asked who is behind. We know that the leader is gone:
        try again soon, at another moment than the others, and not for ever."""
        if self._hurries:
            self._hurries -= 1
            self._deadline = min(self._deadline, self.now + self.timing.broken_max * self.rng.uniform(1.0, 5.0))

    def _next_deadline(self, since: float | None = None) -> float:
        timeout = self.rng.uniform(self.timing.election_min, self.timing.election_max)
        return (self.now if since is None else since) + timeout

    def _hears_leader(self) -> bool:
        if self.is_leader:
            return True
        return self.leader is not None and self.now - self._leader_contact < self.timing.election_min

    def _log_is_current(self, last_term: int, last_index: int) -> bool:
        """Raft §5.4.1, and: nobody leads an epoch without what the epoch before it committed."""
        ours = (self.log.last_term, self.log.last_index)
        return (last_term, last_index) >= ours and last_index >= self.log.configuration.seed_index

    def _ask_around(self) -> None:
        """Nobody leads us and we cannot lead: whoever knows a later epoch answers this with it.

        The last who know that an epoch is over may be outside its successor, and have nothing to do in it. So whoever is
        left behind asks, less and less often: it may also have been removed for good.
        """
        self._deadline = self.now + (self._deadline - self.now) * 2.0**self._patience
        self._patience = min(self._patience + 1, PATIENCE_MAX)
        for peer in sorted({*self.members, *(self.next_members or ())} - {self.node}):
            self._tell_epoch(peer)

    def _ask_for_prevotes(self) -> None:
        if not self.peers and self.role == CANDIDATE:
            return  # Elected; only our own disk has not said so yet.
        self._prevotes = set()
        self._count_prevotes()
        for peer in self.peers:
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
        self._prevotes = None
        self._votes = set()
        self._deadline = self._next_deadline()
        self.__raftLeader = None
        self.__setState(CANDIDATE)
        self.__setCurrentTerm(self.term + 1, self.node)
        self.__votesCount = 1
        for peer in self.peers:
            self.promise(peer, RequestVote(self.term, self.log.last_index, self.log.last_term, transfer))
        # Alone, we lead when our term is on disk (see `persisted`). Sooner, a crash could make us lead the same term twice,
        # with other entries, and a learner could hold either.

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
            super().__onMessageReceived(_Member(sender), ballot | {"last_log_term": m.last_term})
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
        """The parent sends whenever it likes. We send once per turn, in `flush`."""
        self.must_send = True

    # -- leading -----------------------------------------------------------------------------------------------------

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
        """Whether a majority answered lately. If not, clients must not wait for us (check-quorum)."""
        since = self.now - self.timing.quorum
        heard = sum(self.progress[peer].contact >= since for peer in self.peers)
        return 2 * (heard + 1) > len(self.members)

    def _send_heartbeats(self) -> None:
        self.must_beat = False
        self._sequence += 1
        for peer, progress in self.progress.items():
            if progress.sequence == 0:  # Never answered us: it may not know of this epoch, or of the group.
                self._tell_epoch(peer)
            self.out.append((peer, Heartbeat(self.term, min(self.commit, progress.match), self._sequence)))
            if progress.flow is SNAPSHOT and (snapshot := self.newest_snapshot()) is not None:
                self.out.append((peer, Offer(self.term, snapshot.index, snapshot.term, snapshot.detail)))
        self._serve_reads()

    def _heard(self, sender: NodeId, term: int) -> Progress | None:
        """The progress of a follower whose answer belongs to our leadership; None if the answer does not."""
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

    def _on_append_ack(self, sender: NodeId, m: AppendAck) -> bool | None:
        return self.acknowledge(sender, m.term, m.index)

    def acknowledge(self, sender: NodeId, term: int, index: int) -> bool | None:
        """A follower holds what we sent it. Whether a turn has something to do then; None: who knows."""
        if term == self.__raftCurrentTerm and self.is_leader and sender in self.progress:
            progress = self.progress[sender]
            progress.contact = self.now
        else:
            self._heard(sender, term)  # It is not for us, and may depose us.
            return None
        last = self.log.last_index
        if index > last:
            raise EngineFault(f"{sender} acknowledged {index}; our log ends at {last}")
        commit = self.__raftCommitIndex
        if progress.acknowledged(index, self.now) and index > commit:
            if index > self._acknowledged:
                self._acknowledged = index
            self._maybe_commit()
        if progress.next <= last or self.transferee == sender:
            self.must_send = True
        # Whoever waits to make a learner a member looks how far it is.
        return self.must_send or self.__raftCommitIndex > commit or bool(self.learners)

    def _on_append_reject(self, sender: NodeId, m: AppendReject) -> None:
        progress = self._heard(sender, m.term)
        if progress is not None and progress.rejected(m.index, m.hint):
            self.must_send = True

    def _send_appends(self) -> None:
        """Send everybody what fits its window. Followers that keep up are sent the same."""
        limits, last, connected, now = self.limits, self.log.last_index, self.connected, self.now
        newest: _Sending | None = None
        for peer, progress in self.progress.items():  # Of the peers, then of the learners.
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
        """Entries from `low` on; None if the one before it is trimmed."""
        log = self.log
        prev, last = low - 1, log.last_index
        prev_term = log.term_of(prev)
        if prev_term is None:
            return None
        entries: tuple[Entry, ...]
        if low == last and log.tail:  # As a rule.
            entries = (log.tail[-1],)
            size = len(entries[0][0])
        else:
            high = last if last < low + ENTRIES_MAX else low + ENTRIES_MAX - 1
            entries = tuple(log.entries(low, high, bytes_max=self.limits.append_bytes_max)) if low <= last else ()
            size = sum([len(entry[0]) for entry in entries])
        fields = self.__raftCurrentTerm, prev, prev_term, self.__raftCommitIndex, entries
        return low, prev + len(entries), size, build(Append, fields)

    def _maybe_commit(self) -> None:
        """Commit what is durable on a majority, if it is of our own term (Raft §5.4.2)."""
        log, index = self.log, self._majority(self.members)
        if index <= self.__raftCommitIndex:
            return
        if self.__raftCurrentTerm != (log.last_term if index == log.last_index else log.term_of(index)):
            return
        if self.seal_index is not None and self.next_members is not None and index >= self.seal_index:
            # Nothing behind a seal takes effect; and the successor must own it, or it could begin without it.
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
        """The highest index that is durable on more than half of `members`. Our own log counts as far as it is on disk."""
        if not self.learners and members is self.members:
            durable = [self._own_durable()]
            for progress in self.progress.values():  # A comprehension would be a call.
                durable.append(progress.match)
            durable.sort()
            return durable[(len(durable) - 1) // 2]
        durable = [self._own_durable()] if self.node in members else []
        for member, progress in self.progress.items():
            if member in members:
                durable.append(progress.match)
        if len(durable) < len(members):
            durable += [0] * (len(members) - len(durable))  # Of those we know nothing.
        durable.sort()
        return durable[(len(durable) - 1) // 2]

    def _own_durable(self) -> int:
        return self.log.durable

    def _serve_reads(self) -> None:
        """A read is safe when a majority answered a round that began after it came (Raft thesis §6.4)."""
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
        # A read asked for before our term's first entry was committed may have noted a commit index that was behind.
        floor: int = self.__noopIDx
        return floor

    def _maybe_hand_over(self) -> None:
        to = self.transferee
        if to is not None and to in self.connected and self.progress[to].match == self.log.last_index:
            self.out.append((to, TimeoutNow(self.term)))

    def _find_seal(self) -> None:
        """Whether our log ends this epoch. Entries at or below the seed ended earlier ones."""
        self.seal_index = self.next_members = None
        index, low = self.log.last_index, max(self.log.base_index, self.log.configuration.seed_index)
        while index > low:
            command = self.log.entries(index, index)[0][0]
            if command[0] == SEAL:
                self.seal_index, self.next_members = index, decode_seal(command)[1]
            if command[0] != NOOP:  # After a seal only no-ops of new leaders follow.
                return
            index -= 1

    def _tell_epoch(self, peer: NodeId) -> None:
        epoch = self.log.configuration
        self.out.append((peer, Config(epoch.members, epoch.seed_index, epoch.seed_term)))

    # -- plumbing ----------------------------------------------------------------------------------------------------

    def promise(self, peer: NodeId, message: Message) -> None:
        """Say it once everything we hold now is on disk."""
        self.promises.append((peer, message))

    def __generateRaftTimeout(self) -> float:  # noqa: N802
        return 0.0  # The parent's election timer is not used; ours runs on the time we are told.

    def __forbidden(self, *_: object, **__: object) -> Any:
        raise EngineFault("a path of pysyncobj that must not be reached was reached")

    _onTick = _checkCommandsToApply = _applyCommand = __forbidden  # noqa: N815
    __applyLogEntries = __doApplyCommand = __loadDumpFile = __tryLogCompaction = __forbidden
    __parseChangeClusterRequest = __doChangeCluster = __changeCluster = __forbidden
    __updateClusterConfiguration = __deleteEntriesTo = __forbidden

    #: How to take each kind of message, of a member of this epoch or, for a learner, from its leader. They may say whether a
    #: turn has something to do then.
    STEPS: Final[dict[type, Callable[[Any, NodeId, Any], bool | None]]] = {
        Append: _on_append,
        AppendAck: _on_append_ack,
        AppendReject: _on_append_reject,
        Heartbeat: _on_heartbeat,
        HeartbeatAck: _on_heartbeat_ack,
        PreVote: _on_prevote,
        PreVoteReply: _on_prevote_reply,
        RequestVote: _on_request_vote,
        Vote: _on_vote,
        TimeoutNow: _on_timeout_now,
        Offer: _on_offer,
    }


Engine = SyncObj


def encode_seal(epoch: int, next_members: tuple[NodeId, ...]) -> bytes:
    """The command that ends an epoch and names the members of the next, `epoch`."""
    body: bytes = msgpack.packb([epoch, list(next_members)])
    return bytes([SEAL]) + body


def decode_seal(command: bytes) -> tuple[int, tuple[NodeId, ...]]:
    epoch, members = msgpack.unpackb(command[1:])
    return epoch, tuple(members)
