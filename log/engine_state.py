"""The bottom layer of the engine: its state, its constructor, and the parent's methods that must not run.

pysyncobj keeps its state and steps in names with two leading underscores, which Python mangles with the *name of the class*. A
subclass of the same name reads and overrides them as if it were in the same file. So each layer of the engine is a class
called SyncObj: this one, then `elections.py`, `following.py`, `leading.py`, and `engine.py` on top. A layer calls only itself,
the layers below it, and the parent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgpack
from pysyncobj import syncobj as _parent

from holdfast.log.audit import check_parent
from holdfast.log.errors import EngineFault
from holdfast.log.messages import NOOP, SEAL, Config, Message, NodeId, Vote
from holdfast.log.positions import Positions
from holdfast.log.progress import Progress

if TYPE_CHECKING:
    from random import Random

    from holdfast.log.group_log import GroupLog

FOLLOWER: Final = _parent._RAFT_STATE.FOLLOWER
CANDIDATE: Final = _parent._RAFT_STATE.CANDIDATE
LEADER: Final = _parent._RAFT_STATE.LEADER
NEVER: Final = float("-inf")


@dataclass(frozen=True, slots=True)
class Timing:
    """All in seconds. A leader steps down before its followers may elect: `quorum` must not exceed `election_min`."""

    heartbeat: float = 0.1
    election_min: float = 0.5
    election_max: float = 1.0
    quorum: float = 0.5
    resend: float = 1.0
    broken_max: float = 0.03  # A broken connection to the leader starts an election within this time.
    apply: float = 0.02  # Followers apply committed entries at most this often, all groups in one batch.


@dataclass(frozen=True, slots=True)
class Limits:
    command_bytes_max: int = 1024 * 1024
    entry_bytes_max: int = 1024 * 1024  # Commands of one turn share an entry up to this size.
    append_bytes_max: int = 1024 * 1024
    window_messages: int = 64
    window_bytes: int = 8 * 1024 * 1024
    uncommitted_bytes_max: int = 64 * 1024 * 1024
    apply_entries_max: int = 512
    apply_lag_max: int = 64  # A follower with this many committed entries in a group applies them at once.
    proposals_max: int = 100_000


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A durable copy of a group's state. `detail` tells a follower how to fetch it."""

    index: int
    term: int
    detail: bytes


class Member(str):
    """A node as pysyncobj expects it: hashable, with an id."""

    __slots__ = ()

    @property
    def id(self) -> str:
        return self


class _Outlet:
    """pysyncobj's Transport. The parent's remaining code sends only granted votes."""

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
            return lambda *_: None  # The parent registers callbacks for sockets that do not exist here.
        raise AttributeError(name)


def encode_seal(epoch: int, next_members: tuple[NodeId, ...]) -> bytes:
    """The command that ends an epoch and names the members of the next one, `epoch`."""
    body: bytes = msgpack.packb([epoch, list(next_members)])
    return bytes([SEAL]) + body


def decode_seal(command: bytes) -> tuple[int, tuple[NodeId, ...]]:
    epoch, members = msgpack.unpackb(command[1:])
    return epoch, tuple(members)


class SyncObj(_parent.SyncObj):
    """One group's engine in one epoch. Its members are fixed: a change of members is a new epoch and a new engine."""

    # Close together in memory, as in `GroupLog`, with those of the parent's hundred attributes that we use.
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
        "campaigns",
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
        # Our own state comes first: the parent's constructor reads every attribute, including properties.
        self.log = log
        self.node = node
        self.members = members
        self.peers = tuple(sorted(others))
        self.learners: tuple[NodeId, ...] = ()
        self.is_member = node in members
        self.is_leader = False  # Mirrors the parent's state, which only `__setState` changes.
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
        self.next_members: tuple[NodeId, ...] | None = None  # Named by a seal in our log, committed or not.
        self.seal_index: int | None = None
        self.transferee: NodeId | None = None
        self.uncommitted_bytes = 0
        self._uncommitted: deque[tuple[int, int]] = deque()  # (index, bytes) of our uncommitted proposals.
        self.reads: list[tuple[int, int, object]] = []  # (round to be answered, commit index at the request, caller).
        self.reads_ready: list[tuple[int, object]] = []
        self.reads_failed: list[object] = []
        self.role_changes = 0
        self.campaigns = 0  # Elections that this node began.
        self.elected_at = NEVER
        self.offers: dict[int, int] = {}  # index -> term of the snapshots that leaders of this epoch offered.
        self._patience = 0
        self._transfer_deadline = NEVER
        self._hurries = 0
        self._votes: set[NodeId] = set()
        self._prevotes: set[NodeId] | None = None
        self._leader_contact = NEVER
        self._sequence = 0
        self._acknowledged = 0  # The highest index that a follower ever acknowledged to us, in any term.
        self.must_beat = False  # Whether the next flush sends a heartbeat,
        self.must_send = False  # and whether it looks for entries to send.
        self._deadline = now if lead_at_once else self._next_deadline()

        outlet = _Outlet()
        conf = _parent.SyncObjConf(autoTick=False, commandsWaitLeader=False, pollerType="select")
        super().__init__(Member(node), others, conf, nodeClass=Member, transport=outlet)
        outlet.engine = self
        self._poller = None
        # The parent created an empty journal in memory. Replace it with the real one, as we left it.
        self.__raftLog = Positions(log)
        self.__raftCurrentTerm = log.term
        self.__votedForNodeId = log.vote
        self.__raftCommitIndex = log.commit
        self.__raftLastApplied = 0
        self._find_seal()

    # -- what others may ask --------------------------------------------------------------------------------------

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
        """Whether we hold everything that the previous epoch committed. Without it we may follow but never lead."""
        seed = self.log.configuration
        return self.log.base_index > seed.seed_index or self.log.term_of(seed.seed_index) == seed.seed_term

    @property
    def sealed(self) -> bool:
        """Whether this epoch is over: its successor may have acknowledged entries that we do not know."""
        return self.seal_index is not None and self.commit >= self.seal_index

    @property
    def term_committed(self) -> bool:
        """Whether an entry of our own term is committed: only then is our commit index known to be the newest."""
        return self.is_leader and self.log.term_of(self.commit) == self.term

    # -- what every layer needs -----------------------------------------------------------------------------------

    def promise(self, peer: NodeId, message: Message) -> None:
        """Send a message once everything we hold now is on disk."""
        self.promises.append((peer, message))

    def _next_deadline(self, since: float | None = None) -> float:
        timeout = self.rng.uniform(self.timing.election_min, self.timing.election_max)
        return (self.now if since is None else since) + timeout

    def _find_seal(self) -> None:
        """Find the seal that ends this epoch, if our log has one. Seals at or below the seed ended earlier epochs."""
        self.seal_index = self.next_members = None
        index, low = self.log.last_index, max(self.log.base_index, self.log.configuration.seed_index)
        while index > low:
            command = self.log.entries(index, index)[0][0]
            if command[0] == SEAL:
                self.seal_index, self.next_members = index, decode_seal(command)[1]
            if command[0] != NOOP:  # Only no-ops of new leaders follow a seal.
                return
            index -= 1

    def _tell_epoch(self, peer: NodeId) -> None:
        epoch = self.log.configuration
        self.out.append((peer, Config(epoch.members, epoch.seed_index, epoch.seed_term)))

    # -- what of the parent must not run --------------------------------------------------------------------------

    def __generateRaftTimeout(self) -> float:  # noqa: N802
        return 0.0  # The parent's election timer is unused; ours runs on the time that we are given.

    def __forbidden(self, *_: object, **__: object) -> Any:
        raise EngineFault("pysyncobj called a method of its own that must not be reached")

    _onTick = _checkCommandsToApply = _applyCommand = __forbidden  # noqa: N815
    __applyLogEntries = __doApplyCommand = __loadDumpFile = __tryLogCompaction = __forbidden
    __parseChangeClusterRequest = __doChangeCluster = __changeCluster = __forbidden
    __updateClusterConfiguration = __deleteEntriesTo = __forbidden
