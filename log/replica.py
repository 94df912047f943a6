"""One group on one node: its log, the engine of its current epoch, its state machine, and the callers that wait.

It turns the proposals of one turn into one entry, hands committed entries to the machine in order and exactly once, answers
waiting callers, and follows the group from epoch to epoch. An epoch ends with a *seal*: an entry that names the next members. A
seal commits only when a majority of the old members and a majority of the new members hold it. Nothing of the old epoch after
the seal takes effect. Each node that applies the seal, or is shown proof of it, enters the next epoch with the same log.

It does no I/O and has no clock: the host drives it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import msgpack

from holdfast.log.engine import ROLE_NAMES, Engine, Limits, Snapshot, Timing, decode_seal, encode_seal
from holdfast.log.errors import (
    BadChange,
    Corrupt,
    NoSpace,
    NotLeader,
    OutcomeUnknown,
    Overloaded,
    ProposalError,
    Superseded,
    TooLarge,
)
from holdfast.log.group_log import GroupLog
from holdfast.log.messages import COMMANDS, SEAL, Config, GroupId, NodeId, Offer, build
from holdfast.log.records import Configuration

if TYPE_CHECKING:
    from random import Random

_packer = msgpack.Packer(autoreset=False)  # Shared: making a packer costs more than packing.
_unpack = msgpack.unpackb
#: A learner this close to the end of the log no longer delays a change of members.
LEARNER_LAG_MAX: Final = 64
#: The delay between two attempts to apply when the disk is full.
STALLED_S: Final = 0.2


class Committed(NamedTuple):
    """A committed entry. No-ops and seals have no commands but are handed over too, so no index is skipped."""

    index: int  # type: ignore[assignment]
    term: int
    commands: Sequence[bytes]


class Machine(Protocol):
    """The state that a group replicates. `apply` is total: any exception except `NoSpace` stops the node."""

    @property
    def applied(self) -> tuple[int, int]:
        """(index, term) of the newest applied entry, stored with the state."""

    def apply(self, entries: Sequence[Committed]) -> None:
        """Apply all entries, or raise `NoSpace` and apply none: they are retried until there is room."""

    def snapshot(self) -> Snapshot | None:
        """The newest durable snapshot, for followers that fell behind the log."""


class Done(NamedTuple):
    """Entry `index` is committed and applied, so these callers can continue."""

    waiting: list[object]
    index: int  # type: ignore[assignment]


class Failed(NamedTuple):
    waiting: list[object]
    error: ProposalError


class SnapshotWanted(NamedTuple):
    """The state at (index, term) must be fetched from `peer` and installed."""

    group: GroupId
    peer: NodeId
    index: int  # type: ignore[assignment]
    term: int
    detail: bytes


class Status(NamedTuple):
    group: GroupId
    epoch: int
    members: tuple[NodeId, ...]
    role: str
    term: int
    leader: NodeId | None
    commit: int
    applied: int
    last: int
    base: int
    match: dict[NodeId, int]
    elections: int  # that this node began in this epoch
    role_changes: int  # the same, of this node


def config_message(configuration: Configuration) -> Config:
    return Config(configuration.members, configuration.seed_index, configuration.seed_term)


def _encode(proposals: list[bytes]) -> bytes:
    """Encode the kind of the entry, which msgpack writes as one byte, and the list of commands."""
    try:
        _packer.pack(COMMANDS)
        _packer.pack(proposals)
        return bytes(_packer.bytes())
    finally:
        _packer.reset()


class Change(NamedTuple):
    """A change of members in progress."""

    next_members: tuple[NodeId, ...]
    deadline: float
    waiting: object
    may_seal: Callable[[], bool]


class Replica:
    __slots__ = (  # As in `GroupLog`.
        "_apply_at",
        "_limits",
        "_proposed_bytes",
        "_proposers",
        "_rng",
        "_timing",
        "_waiters",
        "applied",
        "change",
        "engine",
        "group",
        "is_behind",
        "log",
        "machine",
        "node",
        "proposals",
        "reads",
        "results",
        "seen_changes",
        "seen_epoch",
        "stalled",
    )

    def __init__(
        self,
        *,
        node: NodeId,
        log: GroupLog,
        machine: Machine,
        timing: Timing,
        limits: Limits,
        rng: Random,
        now: float,
        connected: frozenset[NodeId],
    ) -> None:
        self.node = node
        self.log = log
        self.group = log.group
        self.machine = machine
        self.results: list[Done | Failed] = []
        self.stalled: str | None = None  # Why committed entries cannot be applied now.
        self.is_behind = False  # Whether the host delays applying, to apply more entries at once.
        self._apply_at = 0.0  # While stalled, the time of the next attempt.
        self._timing, self._limits, self._rng = timing, limits, rng
        self.proposals: list[bytes] = []
        self._proposers: list[object] = []  # The caller that waits for each proposal.
        self._proposed_bytes = 0
        #: (index, term, callers, commands) of entries proposed here and not applied yet, ascending.
        self._waiters: deque[tuple[int, int, list[object], Sequence[bytes]]] = deque()
        self.reads: list[tuple[int, object]] = []
        self.change: Change | None = None
        self._match_machine()
        # A group of one need not wait for other nodes.
        alone = log.configuration.members == (node,)
        self.engine = self._new_engine(now, connected, lead_at_once=alone)
        self.seen_changes, self.seen_epoch = self.engine.role_changes, self.epoch
        if self.engine.seal_index is not None and self.engine.seal_index <= log.commit:
            # We stopped between applying the seal and storing the new epoch.
            self._enter_sealed(self.engine.seal_index)

    def _match_machine(self) -> None:
        """Continue from the state's own applied index: everything in the state is committed."""
        index, term = self.machine.applied
        log = self.log
        if index < log.base_index:
            raise Corrupt(
                str(getattr(self.machine, "path", "the state machine")),
                f"the state ends at entry {index}, but the log begins after entry {log.base_index}",
                group=self.group,
                index=index,
            )
        if index <= log.commit and log.term_of(index) != term:
            raise Corrupt(
                str(getattr(self.machine, "path", "the state machine")),
                f"the state ends at entry {index} of term {term}, but the log has term {log.term_of(index)} there",
                group=self.group,
                index=index,
            )
        if index > log.commit:
            if log.term_of(index) == term:
                log.set_commit(index)
            else:
                log.reset(index, term)  # We stopped between installing a snapshot and rebasing the log.
        self.applied = index

    def _new_engine(self, now: float, connected: frozenset[NodeId], *, lead_at_once: bool) -> Engine:
        return Engine(
            node=self.node,
            members=self.log.configuration.members,
            log=self.log,
            timing=self._timing,
            limits=self._limits,
            rng=self._rng,
            now=now,
            connected=connected,
            newest_snapshot=self.machine.snapshot,
            lead_at_once=lead_at_once,
        )

    @property
    def epoch(self) -> int:
        return self.log.configuration.epoch

    @property
    def config_message(self) -> Config:
        return config_message(self.log.configuration)

    @property
    def is_left_over(self) -> bool:
        """Whether the group does not need our log: we are not a member of its epoch, and hold no seal that could make us one.

        Our acknowledgement of such a seal counts towards the majority of the next epoch.
        """
        return not self.engine.is_member and self.engine.seal_index is None

    def status(self) -> Status:
        engine, log = self.engine, self.log
        match = {peer: progress.match for peer, progress in engine.progress.items()}
        role = ROLE_NAMES[engine.role] if engine.is_member else "learner"
        return Status(
            group=self.group,
            epoch=self.epoch,
            members=engine.members,
            role=role,
            term=engine.term,
            leader=engine.leader,
            commit=engine.commit,
            applied=self.applied,
            last=log.last_index,
            base=log.base_index,
            match=match,
            elections=engine.campaigns,
            role_changes=engine.role_changes,
        )

    # -- the door ----------------------------------------------------------------------------------------------------

    def propose(self, command: bytes, waiting: object) -> None:
        """Queue a command for this turn's entry. The answer comes through `results`."""
        size, limits, proposals = len(command), self._limits, self.proposals
        if size > limits.command_bytes_max:
            error = TooLarge(f"command of {size} bytes exceeds the limit of {limits.command_bytes_max}")
            self.results.append(Failed([waiting], error))
        elif len(proposals) >= limits.proposals_max:
            self.results.append(Failed([waiting], Overloaded("too many proposals in one turn")))
        else:
            proposals.append(command)
            self._proposers.append(waiting)
            self._proposed_bytes += size

    def read(self, waiting: object) -> None:
        """Answer with an index once this node has applied everything acknowledged before now."""
        self.engine.read_index(waiting)

    def flush(self, no_room: ProposalError | None) -> None:
        """Turn the proposals of this turn into one entry, or into a few if they are large."""
        if self.proposals:
            proposals, self.proposals = self.proposals, []
            proposers, self._proposers = self._proposers, []
            fits = self._proposed_bytes <= self._limits.entry_bytes_max
            self._proposed_bytes = 0
            if fits:
                self._propose(proposals, proposers, no_room)
            else:
                self._propose_in_parts(proposals, proposers, no_room)
        if self.change is not None:
            self._maybe_seal()
        engine = self.engine
        if engine.must_send or engine.must_beat:
            engine.flush()

    def _propose_in_parts(self, proposals: list[bytes], waiting: list[object], no_room: ProposalError | None) -> None:
        size, first = 0, 0
        for offset, command in enumerate(proposals):
            if size + len(command) > self._limits.entry_bytes_max and offset > first:
                self._propose(proposals[first:offset], waiting[first:offset], no_room)
                size, first = 0, offset
            size += len(command)
        self._propose(proposals[first:], waiting[first:], no_room)

    def _propose(self, proposals: list[bytes], waiting: list[object], no_room: ProposalError | None) -> None:
        engine = self.engine
        index = engine.propose(_encode(proposals)) if no_room is None else None
        if index is not None:
            self._waiters.append((index, self.log.term, waiting, proposals))
        else:
            refusal = engine.refusal() or no_room
            assert refusal is not None
            self.results.append(Failed(waiting, refusal))

    # -- changing members ----------------------------------------------------------------------------------------------

    def change_members(
        self,
        next_members: tuple[NodeId, ...],
        deadline: float,
        waiting: object,
        may_seal: Callable[[], bool] = lambda: True,
    ) -> None:
        """Add, remove or replace one member. Answered when the epoch has ended and its successor owns the log.

        `may_seal` is asked when everything is ready, and again in every turn of the group until it returns true, so that the
        leader's work can come to rest before its term ends.
        """
        next_members = tuple(sorted(next_members))
        now, after = set(self.engine.members), set(next_members)
        refusal: ProposalError | None = self.engine.refusal()
        if refusal is None and self.change is not None:
            refusal = BadChange("another change of members is in progress")
        if refusal is None and (not after or now == after or len(after - now) > 1 or len(now - after) > 1):
            refusal = BadChange("a change must add, remove or replace exactly one member")
        if refusal is not None:
            self.results.append(Failed([waiting], refusal))
            return
        self.change = Change(next_members, deadline, waiting, may_seal)
        self.engine.add_learners(next_members)

    def _maybe_seal(self) -> None:
        """Seal once the new member has caught up and a majority of the next members answers."""
        assert self.change is not None
        next_members, deadline, waiting, may_seal = self.change
        engine = self.engine
        if engine.refusal() is not None or engine.now > deadline:
            late = BadChange("the new member did not catch up in time; the group is unchanged")
            self.results.append(Failed([waiting], engine.refusal() or late))
            self.change = None
            engine.add_learners(())
            return
        since = engine.now - self._timing.quorum
        near = engine.log.last_index - LEARNER_LAG_MAX
        ready = [
            member == self.node
            or (engine.progress[member].contact >= since and engine.progress[member].match >= max(near, 1))
            for member in next_members
        ]
        learners_ready = all(
            is_ready for member, is_ready in zip(next_members, ready, strict=True) if member in engine.learners
        )
        if engine.term_committed and learners_ready and 2 * sum(ready) > len(next_members) and may_seal():
            index = engine.seal(next_members, encode_seal(self.epoch + 1, next_members))
            self._waiters.append((index, engine.term, [waiting], ()))
            self.change = None

    def learn_epoch(self, epoch: int, config: Config, now: float, connected: frozenset[NodeId]) -> None:
        """A peer in a later epoch proves that ours was sealed at (seed_index, seed_term)."""
        assert epoch > self.epoch
        seed_index, seed_term = config.seed_index, config.seed_term
        if self.log.term_of(seed_index) == seed_term:
            self.engine.know_committed(seed_index)
        else:
            # Our tail may contradict the sealed log, and with it we could look newer than the nodes that hold that log.
            if self.log.last_index > self.engine.commit:
                self.log.truncate(self.engine.commit + 1)
            commit = self.engine.commit
            self._abandon(lambda index, _: index > commit, OutcomeUnknown("the group continued with other members"))
        self._enter(Configuration(epoch, config.members, seed_index, seed_term), now, connected)

    def _enter_sealed(self, seal_index: int) -> None:
        command, index, term = self.log.entries(seal_index, seal_index)[0]
        epoch, members = decode_seal(command)
        self._enter(Configuration(epoch, members, index, term), self.engine.now, frozenset(self.engine.connected))

    def _enter(self, configuration: Configuration, now: float, connected: frozenset[NodeId]) -> None:
        """Enter a later epoch. Entries of the old epoch after the seed are dropped."""
        old, log = self.engine, self.log
        seed = configuration.seed_index
        if log.term_of(seed) == configuration.seed_term and log.last_index > seed:
            log.truncate(seed + 1)
        led = old.is_leader
        log.set_configuration(configuration)
        self._abandon(lambda index, _: index > seed, Superseded("the group continued with other members; try again"))
        if self.change is not None:
            self.results.append(Failed([self.change.waiting], OutcomeUnknown("the group continued with other members")))
            self.change = None
        self.reads += old.reads_ready  # These were confirmed before the seal was committed.
        unread = [ctx for _, _, ctx in old.reads] + old.reads_failed
        if unread:
            self.results.append(Failed(unread, NotLeader(None)))
        alone = configuration.members == (self.node,)
        self.engine = self._new_engine(now, connected, lead_at_once=led or alone)
        # Tell the old members and the new one, which would otherwise wait for a timeout.
        others = sorted({*old.peers, *old.learners, *configuration.members} - {self.node})
        self.engine.out += [(peer, self.config_message) for peer in others]

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def wants(self, peer: NodeId, offer: Offer) -> list[SnapshotWanted]:
        """The offered state, if it may replace ours."""
        if not self.engine.may_install(offer.index, offer.index_term):
            return []
        return [SnapshotWanted(self.group, peer, index=offer.index, term=offer.index_term, detail=offer.detail)]

    def install(self, index: int, term: int, swap: Callable[[], None]) -> bool:
        """Replace the state by the offered one, which `swap` puts in place durably. False if it is of no use."""
        if not self.engine.may_install(index, term):
            return False
        swap()
        assert self.machine.applied == (index, term), "the machine must hold the installed state"
        self.applied = index
        self.stalled = None
        self.engine.installed(index, term)
        self._abandon(lambda *_: True, OutcomeUnknown("a snapshot replaced the log"))
        return True

    def trim(self, index: int) -> None:
        """Delete entries up to `index`, which a durable snapshot covers."""
        snapshot = self.machine.snapshot()
        assert snapshot is not None and index <= min(snapshot.index, self.applied), "only behind a durable snapshot"
        self.log.trim(index)

    # -- committed entries ---------------------------------------------------------------------------------------------

    def apply(self) -> bool:
        """Hand committed entries to the machine, a slice per turn. True if there is more."""
        high = self._applicable
        if self.applied >= high or (self.stalled is not None and self.engine.now < self._apply_at):
            return False
        try:
            # After a full disk, try one entry: a whole slice would be computed each time in vain.
            upto = self.applied + (self._limits.apply_entries_max if self.stalled is None else 1)
            self._apply_slice(high if high < upto else upto)
        except NoSpace as error:
            self._stall(error)
            return False
        self.stalled = None
        return self.applied < high

    @property
    def _applicable(self) -> int:
        """The last entry that is committed and on our own disk: a crash must not leave a state ahead of its log."""
        commit, durable = self.log.commit, self.log.durable
        return commit if commit < durable else durable

    @property
    def is_idle(self) -> bool:
        """Whether a turn would find no work here. The second of two acknowledgements leaves most groups idle."""
        engine = self.engine
        if engine.promises or engine.out or engine.must_send or engine.must_beat:
            return False
        if self.applied < self.log.commit and not self.is_behind and self.applied < self._applicable:
            return False
        if engine.reads_ready or engine.reads_failed or self.proposals or self.change is not None:
            return False
        return engine.role_changes == self.seen_changes and engine.epoch == self.seen_epoch

    def _apply_slice(self, high: int) -> None:
        if self._waiters:
            index, term, waiting, commands = self._waiters[0]
            if index == high == self.applied + 1 and commands and self.log.term_of(index) == term:
                # The usual case: one entry, proposed here.
                self._apply_batch([build(Committed, (index, term, commands))])
                self._waiters.popleft()
                self.results.append(build(Done, (waiting, index)))
                return
        batch: list[Committed] = []
        sealed: int | None = None
        waiters = iter(self._waiters)
        own = next(waiters, None)
        for command, index, term in self.log.entries(self.applied + 1, high):
            if command[0] == COMMANDS:
                while own is not None and own[0] < index:
                    own = next(waiters, None)
                # Commands proposed here need not be decoded again.
                is_own = own is not None and own[0] == index and own[1] == term
                commands = own[3] if is_own else _unpack(command[1:])  # type: ignore[index]
                batch.append(build(Committed, (index, term, commands)))
                continue
            batch.append(Committed(index, term, ()))
            if command[0] == SEAL and decode_seal(command)[0] > self.epoch:
                sealed = index
                break
        self._apply_batch(batch)
        if sealed is not None:
            self._enter_sealed(sealed)
        if self._waiters:
            self._answer_waiters(batch[-1].term)

    def _apply_batch(self, batch: list[Committed]) -> None:
        self.machine.apply(batch)
        self.applied, term, _ = batch[-1]
        assert self.machine.applied == (self.applied, term), "the machine must report what it applied"

    def _stall(self, error: NoSpace) -> None:
        """Wait for room: the log is durable, so nothing is lost. Callers do not wait, because another node may answer them."""
        self.stalled = str(error)
        self._apply_at = self.engine.now + STALLED_S
        self.let_go()

    def let_go(self) -> None:
        """Fail the waiting callers: our disk is full, and they need not wait for room."""
        self._abandon(
            lambda *_: True, OutcomeUnknown(f"the disk of {self.node} is full; the command may or may not be committed")
        )
        if self.reads:
            self.results.append(Failed([ctx for _, ctx in self.reads], NotLeader(None)))
            self.reads = []

    def _answer_waiters(self, applied_term: int) -> None:
        waiters, applied = self._waiters, self.applied
        while waiters and waiters[0][0] <= applied:
            index, term, waiting, _ = waiters.popleft()
            known = applied_term if index == applied else self.log.term_of(index)
            if known == term:
                self.results.append(build(Done, (waiting, index)))
            elif known is None:
                self.results.append(
                    Failed(waiting, OutcomeUnknown("the entry was trimmed before its caller was answered"))
                )
            else:
                self.results.append(Failed(waiting, Superseded("an entry of another leader took the command's place")))

    def answer_reads(self) -> None:
        engine = self.engine
        if engine.reads_failed:
            self.results.append(Failed(engine.reads_failed, NotLeader(engine.leader)))
            engine.reads_failed = []
        if engine.reads_ready:
            self.reads += engine.reads_ready
            engine.reads_ready = []
        if self.reads:
            ready = [read for read in self.reads if read[0] <= self.applied]
            self.reads = [read for read in self.reads if read[0] > self.applied]
            self.results += [Done([ctx], index) for index, ctx in ready]

    def stop(self) -> None:
        """Fail every waiting caller: the outcome is unknown."""
        stopped = OutcomeUnknown("this node stopped")
        self._abandon(lambda *_: True, stopped)
        waiting = self._proposers + [ctx for _, ctx in self.reads]
        waiting += [ctx for _, _, ctx in self.engine.reads] + [ctx for _, ctx in self.engine.reads_ready]
        waiting += self.engine.reads_failed
        if self.change is not None:
            waiting.append(self.change.waiting)
        if waiting:
            self.results.append(Failed(waiting, stopped))

    def notice_role(self) -> None:
        """The leader, term or epoch changed: fail the callers that wait for entries of the previous one."""
        same_epoch = self.epoch == self.seen_epoch
        self.seen_changes, self.seen_epoch = self.engine.role_changes, self.epoch
        if same_epoch:
            commit, term = self.engine.commit, self.engine.term if self.engine.is_leader else None
            lost = OutcomeUnknown("the leadership ended before the command was committed")
            self._abandon(lambda index, led: index > commit and led != term, lost)
            if self.change is not None and not self.engine.is_leader:
                self.results.append(Failed([self.change.waiting], NotLeader(self.engine.leader)))
                self.change = None

    def _abandon(self, is_lost: Callable[[int, int], bool], error: ProposalError) -> None:
        lost = [caller for index, term, waiting, _ in self._waiters if is_lost(index, term) for caller in waiting]
        self._waiters = deque(waiter for waiter in self._waiters if not is_lost(waiter[0], waiter[1]))
        if lost:
            self.results.append(Failed(lost, error))
