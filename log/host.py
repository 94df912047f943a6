"""All groups of one node, and the turn in which everything happens.

The host is told what arrived and what time it is, and asks for two things: to send messages, and to make the journal's
staged writes durable. Sockets, threads and clocks are its driver's (`node.py`), or the simulator's: both run this very code.

`turn` is the safety argument of the log on one screen. Messages of a leader may race our own disk. Acknowledgements and
votes never leave before everything they speak of has been committed to the store: they are held while a commit is under way,
and a commit takes along all that was written before them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeAlias

from holdfast.log.engine import FAR, Engine, Limits, Timing
from holdfast.log.errors import NoRoomHere, NotHosted, ProposalError
from holdfast.log.journal import Configuration, Journal
from holdfast.log.messages import (
    ACKS_WIDTH,
    APPENDS_WIDTH,
    App,
    Append,
    AppendAck,
    AppendAcks,
    Appends,
    Config,
    Envelope,
    GroupId,
    Heartbeat,
    Message,
    NodeId,
    Offer,
    build,
)
from holdfast.log.replica import Done, Failed, Machine, Replica, SnapshotWanted, config_message

if TYPE_CHECKING:
    from random import Random

BATCH_GROUPS_MAX = 4096  # In one message about several groups,
BATCH_BYTES_MAX = 1024 * 1024  # and of their commands, give or take one.
EARLY_MESSAGES_MAX = 10_000  # Of a session that has not begun; a disk that is full may keep it from that for long.
APP_GROUP = GroupId(0)  # Messages of the rooms above, and those about several groups, belong to none.

_first = itemgetter(0)
#: What was promised, one after the other, to one peer in one session.
_Promises: TypeAlias = tuple[NodeId, int, list[Envelope]]


def _without(group: GroupId, envelopes: list[Envelope]) -> list[Envelope]:
    """What is said of other groups. (Of a group that we leave we have no `Appends`: we do not lead it.)"""
    kept = []
    for envelope in envelopes:
        message = envelope.message
        if type(message) is AppendAcks:
            left = [field for at in range(0, len(message.flat), ACKS_WIDTH) if message.flat[at] != group
                    for field in message.flat[at : at + ACKS_WIDTH]]  # fmt: skip
            if left:
                kept.append(Envelope(APP_GROUP, 0, AppendAcks(left)))
        elif envelope.group != group:
            kept.append(envelope)
    return kept


def _promises_without(group: GroupId, promises: list[_Promises]) -> list[_Promises]:
    kept = [(peer, session, _without(group, some)) for peer, session, some in promises]
    return [run for run in kept if run[2]]


class Host:
    def __init__(
        self,
        *,
        node: NodeId,
        journal: Journal,
        open_machine: Callable[[GroupId], Machine],
        send: Callable[[NodeId, int, list[Envelope]], None],
        begin_commit: Callable[[], None],
        rng: Random,
        now: float,
        timing: Timing | None = None,
        limits: Limits | None = None,
        may_join: Callable[[GroupId], bool] = lambda _: True,
        keep_hollow: bool = False,
        applied_at_once: frozenset[GroupId] = frozenset(),
    ) -> None:
        self.node = node
        self.journal = journal
        self.replicas: dict[GroupId, Replica] = {}
        self.hollow: dict[GroupId, Machine] = {}  # Their state ends before their log begins; see `fill`.
        self.sessions: dict[NodeId, int] = {}
        self.begun: list[NodeId] = []  # Peers with which a session has begun.
        self.results: list[Done | Failed] = []
        self.wanted: list[SnapshotWanted] = []
        self.received: list[tuple[NodeId, bytes]] = []  # App payloads, in order per peer.
        self.role_changes: list[GroupId] = []
        self.forgotten: list[GroupId] = []  # Their logs are deleted, durably; what belongs to them may go too.
        self.timing = timing or Timing()
        self.limits = limits or Limits()
        self.wake_at = now
        self.dropped = 0
        self._open_machine = open_machine
        self._may_join = may_join
        self._keep_hollow = keep_hollow
        self._applied_at_once = applied_at_once  # Groups on whose state somebody acts also where it follows.
        self._send_to = send
        self._begin_commit = begin_commit
        self._rng = rng
        self._now = now
        self._beat_at = now
        self._touched: dict[GroupId, Replica] = {}
        self._behind: dict[GroupId, Replica] = {}  # Followers that wait with what is committed,
        self._apply_at = now  # until then.
        self._outbox: dict[NodeId, list[Envelope]] = {}
        self._promised: list[_Promises] = []  # Waiting for the next commit to begin,
        self._held: list[_Promises] = []  # and for the one under way to end.
        self._committing = False
        self._new_pins: set[NodeId] = set()  # Peers whose disk id is not durable yet: in the next commit,
        self._flying_pins: set[NodeId] = set()  # and in the one under way.
        self._forgetting: list[GroupId] = []  # Groups whose log goes with the next commit,
        self._flying_forgetting: list[GroupId] = []  # and with the one under way.
        #: Sessions that begin when it is, and what came on them so far: a link loses nothing while it is up.
        self._unpinned: dict[tuple[NodeId, int], list[Envelope]] = {}
        for group in sorted(journal.groups):
            machine = self._open_machine(group)
            if machine.applied[0] < journal.groups[group].base_index and self._may_be_hollow(group):
                self.hollow[group] = machine
            else:
                self._open(group, machine)

    # -- groups --------------------------------------------------------------------------------------------------------

    def create(self, group: GroupId, members: tuple[NodeId, ...]) -> Replica:
        """Host a group from its beginning. All first members must be told the same members. Idempotent."""
        if group in self.replicas:
            return self.replicas[group]
        if self.node not in members or group in (APP_GROUP, *self.hollow, *self.journal.tombstones):
            raise ValueError(f"group {group} of {members} cannot be created on {self.node}")
        replica = self._begin(group, Configuration(0, tuple(sorted(members))))
        if self.sessions:
            replica.engine.ask_soon()
            self.wake_at = min(self.wake_at, replica.engine.wake_at)
        return replica

    def _begin(self, group: GroupId, configuration: Configuration) -> Replica:
        machine = self._open_machine(group)
        # A state that an earlier stay here left may be ahead of what survives a loss of power, and nothing but our own log
        # could bring it there again.
        is_back = group in self.journal.tombstones
        assert not is_back or machine.applied[0] == 0, f"group {group} begins again with an empty state"
        self.journal.create(group, configuration)
        return self._open(group, machine)

    def forget(self, group: GroupId) -> bool:
        """Delete the log of a group that went on without us. False: it may still need what we hold.

        `forgotten` names the group once that is durable. It comes back if we are invited again, with an empty log; its
        state must be gone by then (`may_join`).
        """
        replica = self.replicas.get(group)
        if replica is None or not replica.is_left_over:
            return False
        replica.stop()
        self.results += replica.results
        del self.replicas[group]
        self._touched.pop(group, None)
        self._behind.pop(group, None)
        # What we were about to acknowledge, we no longer hold.
        self._promised = _promises_without(group, self._promised)
        self._held = _promises_without(group, self._held)
        for peer, envelopes in self._outbox.items():
            self._outbox[peer] = _without(group, envelopes)
        self.journal.forget(group)
        self._forgetting.append(group)
        return True

    def is_forgotten(self, group: GroupId) -> bool:
        """Whether nothing of the group's log is on our disk, so that its state is of no use to anybody."""
        return group not in (*self.journal.groups, *self._forgetting, *self._flying_forgetting)

    def _may_be_hollow(self, group: GroupId) -> bool:
        """Whether somebody will fetch the state that is gone here. Alone, it is lost."""
        return self._keep_hollow and self.journal.groups[group].configuration.members != (self.node,)

    def why_not_fill(self, group: GroupId, index: int, term: int, epoch: int) -> str | None:
        """Whether a hollow group can go on from the state at (index, term), which was cut in `epoch`."""
        log = self.journal.groups[group]
        if not log.settled:
            return "the epoch that it is of is not on disk yet"
        if index < log.base_index:
            return f"the state ends at entry {index}, but the log begins behind {log.base_index}"
        known = log.term_of(index)
        if known is not None and known != term and index <= log.commit:
            return f"entry {index} is of term {term} there, and of term {known} here"
        if known != term and epoch != log.configuration.epoch:
            # It is not in our log, and a seal between the two would be lost to us: we could lead an epoch that is over.
            return f"the state is of epoch {epoch}, the log of epoch {log.configuration.epoch}"
        return None

    def fill(self, group: GroupId, swap: Callable[[], None]) -> Replica:
        """A hollow group gets a state, which `why_not_fill` has nothing against, and takes part from now on."""
        machine = self.hollow[group]
        swap()
        assert machine.applied[0] >= self.journal.groups[group].base_index, "the state reaches the log"
        del self.hollow[group]
        return self._open(group, machine)

    def _open(self, group: GroupId, machine: Machine) -> Replica:
        replica = self.replicas[group] = Replica(
            node=self.node,
            log=self.journal.groups[group],
            machine=machine,
            timing=self.timing,
            limits=self.limits,
            rng=self._rng,
            now=self._now,
            connected=frozenset(self.sessions),
        )
        self._touch(replica)
        self.wake_at = min(self.wake_at, replica.engine.wake_at)
        return replica

    def _touch(self, replica: Replica) -> None:
        replica.engine.now = self._now
        self._touched[replica.group] = replica

    # -- what happened ---------------------------------------------------------------------------------------------------

    def propose(self, group: GroupId, command: bytes, waiting: object) -> None:
        # As a rule, an earlier one of this turn has touched it.
        if (replica := self._touched.get(group) or self._hosted(group, waiting)) is not None:
            replica.propose(command, waiting)

    def read(self, group: GroupId, waiting: object) -> None:
        if (replica := self._hosted(group, waiting)) is not None:
            replica.read(waiting)

    def change_members(
        self,
        group: GroupId,
        members: tuple[NodeId, ...],
        seconds: float,
        waiting: object,
        may_seal: Callable[[], bool] = lambda: True,
    ) -> None:
        if (replica := self._hosted(group, waiting)) is not None:
            replica.change_members(members, self._now + seconds, waiting, may_seal)

    def nudge(self, group: GroupId) -> None:
        """Have the group looked at in the next turn, although nothing happened to it."""
        if (replica := self.replicas.get(group)) is not None:
            self._touch(replica)

    def _hosted(self, group: GroupId, waiting: object) -> Replica | None:
        replica = self.replicas.get(group)
        if replica is None:
            self.results.append(Failed([waiting], NotHosted(f"group {group} is not on {self.node}")))
        else:
            self._touch(replica)
        return replica

    def transfer(self, group: GroupId, to: NodeId) -> bool:
        replica = self.replicas[group]
        self._touch(replica)
        return replica.engine.transfer(to)

    def install(self, group: GroupId, index: int, term: int, swap: Callable[[], None]) -> bool:
        replica = self.replicas.get(group)
        if replica is None:
            return False  # Forgotten meanwhile.
        self._touch(replica)
        return replica.install(index, term, swap)

    def peer_up(self, peer: NodeId, session: int, disk: str, now: float) -> bool:
        """A session began. False: this peer's disk is not the one it had, so what it acknowledged is lost."""
        self._now = now
        self.peer_down(peer, self.sessions.get(peer, session), now)
        pinned = self.journal.pin(peer)
        if pinned is None:
            self.journal.set_pin(peer, disk)
            self._new_pins.add(peer)
        elif pinned != disk:
            return False
        if peer in self._new_pins or peer in self._flying_pins:
            self._unpinned[peer, session] = []
        else:
            self._begin_session(peer, session)
        return True

    def _begin_session(self, peer: NodeId, session: int) -> None:
        self.sessions[peer] = session
        self.begun.append(peer)
        for replica in self.replicas.values():
            self._touch(replica)
            replica.engine.peer_up(peer)
            self.wake_at = min(self.wake_at, replica.engine.wake_at)

    def peer_down(self, peer: NodeId, session: int, now: float) -> None:
        self._now = now
        self._unpinned.pop((peer, session), None)
        if self.sessions.get(peer) != session:
            return
        del self.sessions[peer]
        self._outbox.pop(peer, None)
        for replica in self.replicas.values():
            self._touch(replica)
            replica.engine.peer_down(peer)
            self.wake_at = min(self.wake_at, replica.engine.wake_at)

    def hears(self, peer: NodeId, session: int) -> bool:
        """Whether this is the peer's present session, begun or about to begin."""
        return self.sessions.get(peer) == session or (peer, session) in self._unpinned

    def deliver(self, peer: NodeId, session: int, envelopes: list[Envelope], now: float) -> None:
        """Messages of one frame, decoded and checked. Those of an older session are dropped, whatever they say."""
        self._now = now
        if self.sessions.get(peer) != session:
            early = self._unpinned.get((peer, session))
            if early is None or len(early) > EARLY_MESSAGES_MAX:
                self.dropped += len(envelopes)
            else:
                early += envelopes  # The peer's disk is faster than ours: heard when the session begins.
            return
        replicas, touched, steps = self.replicas, self._touched, Engine.STEPS
        asked, full = False, None
        for group, epoch, message in envelopes:
            kind = type(message)
            replica = replicas.get(group)
            step = steps.get(kind)
            if replica is None or step is None:
                self._deliver_elsewhere(peer, group, epoch, message)
                continue
            engine = replica.engine
            engine.now = now
            if epoch != engine.epoch:
                # Whichever of us is behind learns of the newer epoch: the peer from this, we from its answer to this.
                touched[group] = replica
                self._post(peer, replica, replica.config_message)
                continue
            if kind is Append and message.entries:  # type: ignore[union-attr]
                if not asked:
                    asked, full = True, self.no_room()
                if full is not None:
                    continue  # Refused before append: the leader sends it again when we answer.
            if peer in engine.members or peer in engine.progress:
                stirred = step(engine, peer, message)
                if stirred:
                    touched[group] = replica
                elif stirred is None:
                    if kind is Offer:
                        self._consider(peer, replica, message)  # type: ignore[arg-type]
                    if engine.wake_at < self.wake_at:
                        self.wake_at = engine.wake_at  # An election came to nothing, and is tried again soon.
                    if not replica.is_idle:
                        touched[group] = replica
            else:
                self.dropped += 1

    def _deliver_elsewhere(self, peer: NodeId, group: GroupId, epoch: int, message: Message) -> None:
        """What is not for the engine of a group that we host."""
        if type(message) is App:
            self.received.append((peer, message.payload))
        elif type(message) is Config:
            self._on_config(peer, group, epoch, message)
        elif type(message) is Appends:
            self._take_appends(peer, message.flat)
        elif type(message) is AppendAcks:
            self._take_acks(peer, message.flat)
        else:  # Whoever leads the group will tell us about it.
            self._recall(peer, group, epoch, is_beat=type(message) is Heartbeat)

    def _take_appends(self, peer: NodeId, flat: Sequence[Any]) -> None:
        if self.no_room() is not None:
            return  # As a single one: refused before append.
        replicas, touched, now, lag_max = self.replicas, self._touched, self._now, self.limits.apply_lag_max
        acks: list[int] = []
        fields = iter(flat)
        for group, epoch, term, prev, prev_term, commit, entry_term, command in zip(
            *[fields] * APPENDS_WIDTH, strict=True
        ):
            replica = replicas.get(group)
            entry = command, prev + 1, entry_term
            if replica is not None and epoch == (engine := replica.engine).epoch:
                engine.now = now
                if engine.follow(peer, term, prev, prev_term, commit, entry):
                    if engine.promises:
                        engine.promise(peer, AppendAck(term, prev + 1))  # Behind what was said before.
                        touched[group] = replica
                        continue
                    acks += group, epoch, term, prev + 1
                    # Who waits to apply what is committed anyway need not be looked at for it.
                    if not replica.is_behind or commit - replica.applied >= lag_max:
                        touched[group] = replica
                    continue
            envelope = Envelope(group, epoch, Append(term, prev, prev_term, commit, (entry,)))
            self.deliver(peer, self.sessions[peer], [envelope], now)
        if acks:
            group, epoch, term, index = acks[:ACKS_WIDTH]
            said = Envelope(APP_GROUP, 0, AppendAcks(acks))
            if len(acks) == ACKS_WIDTH:
                said = Envelope(GroupId(group), epoch, AppendAck(term, index))
            self._promised.append((peer, self.sessions[peer], [said]))

    def _take_acks(self, peer: NodeId, flat: Sequence[int]) -> None:
        replicas, touched, now = self.replicas, self._touched, self._now
        numbers = iter(flat)
        for group, epoch, term, index in zip(*[numbers] * ACKS_WIDTH, strict=True):
            replica = replicas.get(group)
            if replica is not None and epoch == (engine := replica.engine).epoch and peer in engine.progress:
                engine.now = now
                stirred = engine.acknowledge(peer, term, index)
                if stirred is None and engine.wake_at < self.wake_at:
                    self.wake_at = engine.wake_at  # It deposed us.
                if stirred is not False:
                    touched[group] = replica
            else:
                envelope = Envelope(GroupId(group), epoch, AppendAck(term, index))
                self.deliver(peer, self.sessions[peer], [envelope], now)

    def _consider(self, peer: NodeId, replica: Replica, offer: Offer) -> None:
        if replica.engine.may_install(offer.index, offer.index_term):
            self.wanted.append(SnapshotWanted(replica.group, peer, offer.index, offer.index_term, offer.detail))

    def _on_config(self, peer: NodeId, group: GroupId, epoch: int, config: Config) -> None:
        replica = self.replicas.get(group)
        if group in self.hollow:
            self._learn_while_hollow(group, epoch, config)
            return
        if replica is None:
            before = self.journal.tombstones.get(group)
            if before is not None and epoch < before.configuration.epoch:
                self._recall(peer, group, epoch, is_beat=False)
                return
            configuration = Configuration(epoch, config.members, config.seed_index, config.seed_term)
            # Whoever may not join yet, or has no room, is invited again with the next heartbeat.
            if group != APP_GROUP and peer in config.members and self._may_join(group) and self.no_room() is None:
                try:
                    replica = self._begin(group, configuration)
                except OSError:
                    return  # There is no place for its state now; nothing of it is written yet. `open_machine` says why.
                if before is not None:
                    self._post(peer, replica, replica.config_message)  # It may count what we held before.
        elif epoch > replica.epoch:
            self._touch(replica)
            replica.learn_epoch(epoch, config, self._now, frozenset(self.sessions))
        elif epoch < replica.epoch:
            self._touch(replica)
            self._post(peer, replica, replica.config_message)
        else:
            self._touch(replica)
            replica.engine.learner_began(peer)

    def _learn_while_hollow(self, group: GroupId, epoch: int, config: Config) -> None:
        """We are down to this group, but for this: the state that we are given will be of the epoch that the others are in.

        The log is cut as by any node that enters an epoch (ADR 2, rule 3).
        """
        log = self.journal.groups[group]
        if epoch <= log.configuration.epoch:
            return
        if log.term_of(config.seed_index) == config.seed_term and config.seed_index >= log.commit:
            log.set_commit(config.seed_index)
        if log.last_index > log.commit:
            log.truncate(log.commit + 1)
        log.set_configuration(Configuration(epoch, config.members, config.seed_index, config.seed_term))

    def _recall(self, peer: NodeId, group: GroupId, epoch: int, *, is_beat: bool) -> None:
        """Somebody speaks of a group whose log we deleted: it should know the epoch in which we were not needed any more.

        Also the leader of that very epoch, for whom we may have been a learner: it counts what we held, and we do not. It is
        told once per heartbeat, because it answers at once by sending.
        """
        known = self.journal.tombstones.get(group)
        if known is None or peer not in self.sessions:
            return
        if epoch < known.configuration.epoch or (epoch == known.configuration.epoch and is_beat):
            envelope = Envelope(group, known.configuration.epoch, config_message(known.configuration))
            self._outbox.setdefault(peer, []).append(envelope)

    def send_app(self, peer: NodeId, payload: bytes) -> bool:
        """Bytes for the same room on another node. False if there is no session; lost if the session ends."""
        if peer not in self.sessions:
            return False
        self._outbox.setdefault(peer, []).append(Envelope(APP_GROUP, 0, App(payload)))
        return True

    def tick(self, now: float) -> None:
        """Something timed is due: a heartbeat of the groups we lead, or an election."""
        self._now = now
        beat = now >= self._beat_at
        if beat:
            self._beat_at = now + self.timing.heartbeat
        wake = self._beat_at
        for replica in self.replicas.values():
            engine = replica.engine
            leads = engine.is_leader
            engine.tick(now)
            if leads and beat:
                engine.beat()
            if leads or engine.is_leader or engine.out or engine.promises or replica.stalled is not None:
                self._touch(replica)
            if engine.wake_at < wake:
                wake = engine.wake_at
        self.wake_at = wake

    def no_room(self) -> ProposalError | None:
        reason = self.journal.store.room()
        return None if reason is None else NoRoomHere(reason)

    # -- the turn --------------------------------------------------------------------------------------------------------

    def turn(self, now: float) -> None:
        """One turn of the node. The order of these lines is the safety proof."""
        self._now = now
        touched, self._touched = self._touched, {}
        full = self.no_room()
        speaking: list[Replica] = []
        promising: list[Replica] = []
        for replica in touched.values():
            engine = replica.engine
            engine.now = now
            if replica.proposals or engine.must_send or engine.must_beat or replica.change is not None:
                replica.flush(full)
            if engine.out:
                speaking.append(replica)
            if engine.promises:
                promising.append(replica)
        self._take_out(speaking)
        self._take_promises(promising)
        self._send_outbox()  # Appends and heartbeats: they may race our disk (Raft thesis §10.2.1).
        if not self._committing:
            if self.journal.dirty:
                self._committing = True
                self._held, self._promised = self._promised, []
                self._flying_pins, self._new_pins = self._new_pins, set()
                self._flying_forgetting, self._forgetting = self._forgetting, []
                self.journal.store.stage(self.journal.take_writes())  # One transaction for all groups,
                self._begin_commit()  # one fsync; `committed` is called when it is done.
            else:
                self._promised = self._release(self._promised)  # Nothing is unwritten: it is all on disk.
        self._apply(touched)

    def committed(self, now: float) -> None:
        """The store's commit has returned: what was promised before it may leave, and our own log counts."""
        self._now = now
        self._committing = False
        replicas, touched = self.replicas, self._touched
        for log in self.journal.persisted():
            group = log.group
            replica = replicas.get(group)
            if replica is None or replica.log is not log:
                continue
            engine = replica.engine
            if replica.is_behind and engine.peers and not engine.is_leader:
                continue  # It follows: what may be applied now is, when it is due.
            engine.now = now
            engine.persisted()
            if group not in touched and not replica.is_idle:
                touched[group] = replica
        self._held = self._release(self._held)
        self._flying_pins = set()
        self.forgotten += self._flying_forgetting
        self._flying_forgetting = []
        for peer, session in [waiting for waiting in self._unpinned if waiting[0] not in self._new_pins]:
            early = self._unpinned.pop((peer, session))
            self._begin_session(peer, session)
            if early:
                self.deliver(peer, session, early, now)

    def no_space(self) -> None:
        """The commit under way does not fit the disk, and is tried again. Nothing was promised; others may do better."""
        for replica in self.replicas.values():
            replica.let_go()
            self.results += replica.results
            replica.results = []

    def _take_out(self, speaking: list[Replica]) -> None:
        """Followers that keep up are sent the same, and as a rule one entry of each group: then one message says it all."""
        sessions, outbox = self.sessions, self._outbox
        #: What was said last to `listeners`, if it was an append of one entry; as a list, once it is of several groups.
        last: tuple[Any, ...] | list[Any] = ()
        listeners: tuple[NodeId, ...] | None = None
        size = 0
        for replica in speaking:
            group, engine = replica.group, replica.engine
            out, engine.out = engine.out, []
            said = out[0][1]
            is_shared = type(said) is Append and len(said[4]) == 1
            for _, message in out:
                if message is not said:
                    is_shared = False
            if is_shared:
                term, prev_index, prev_term, commit, ((command, _, entry_term),) = said  # type: ignore[misc]
                fields = group, engine.epoch, term, prev_index, prev_term, commit, entry_term, command
                peers = tuple(map(_first, out))
                if peers == listeners and size < BATCH_BYTES_MAX and len(last) < APPENDS_WIDTH * BATCH_GROUPS_MAX:
                    size += len(command)
                    if type(last) is list:
                        last += fields
                        continue
                    last = [*last, *fields]
                    envelope = Envelope(APP_GROUP, 0, Appends(last))
                    for peer in peers:
                        if peer in sessions:
                            outbox[peer][-1] = envelope
                    continue
                last, listeners, size = fields, peers, len(command)
            else:
                listeners = None
            envelope = build(Envelope, (group, engine.epoch, said))
            for peer, message in out:
                if peer in sessions:
                    if message is not said:
                        said, envelope = message, build(Envelope, (group, engine.epoch, message))
                    outbox.setdefault(peer, []).append(envelope)

    def _post(self, peer: NodeId, replica: Replica, message: Message) -> None:
        if peer in self.sessions:
            self._outbox.setdefault(peer, []).append(Envelope(replica.group, replica.epoch, message))

    def _take_promises(self, promising: list[Replica]) -> None:
        """They join those that wait for the next commit: the one under way may not hold what they speak of."""
        run: list[Envelope] = []
        run_peer: NodeId | None = None
        acks: list[int] | None = None  # The last of the run, if it is of several groups.
        for replica in promising:
            group, engine = replica.group, replica.engine
            for peer, message in engine.promises:
                if peer != run_peer:
                    session = self.sessions.get(peer)
                    if session is None:
                        continue
                    run, run_peer, acks = [], peer, None
                    self._promised.append((peer, session, run))
                if type(message) is not AppendAck:
                    acks = None
                elif acks is not None and len(acks) < ACKS_WIDTH * BATCH_GROUPS_MAX:
                    acks += group, engine.epoch, *message
                    continue
                elif run and type(run[-1].message) is AppendAck:
                    # Of many groups, as a rule, follow one another: one message says it all.
                    first_group, first_epoch, first = run.pop()
                    acks = [first_group, first_epoch, *first, group, engine.epoch, *message]
                    run.append(Envelope(APP_GROUP, 0, AppendAcks(acks)))
                    continue
                run.append(build(Envelope, (group, engine.epoch, message)))
            engine.promises = []

    def _release(self, promises: list[_Promises]) -> list[_Promises]:
        for peer, session, envelopes in promises:
            if self.sessions.get(peer) == session:
                self._outbox.setdefault(peer, []).extend(envelopes)
        self._send_outbox()
        return []

    def _send_outbox(self) -> None:
        if self._outbox:
            outbox, self._outbox = self._outbox, {}
            for peer, envelopes in outbox.items():
                session = self.sessions.get(peer)
                if session is not None:
                    self._send_to(peer, session, envelopes)

    def _apply(self, touched: dict[GroupId, Replica]) -> None:
        """Hand over what is committed, and answer who waits.

        As a rule nobody waits for a follower to apply, and many entries at once cost it little more than one. So it does from
        time to time, or when much has come.
        """
        behind, due, lag_max = self._behind, self._now >= self._apply_at, self.limits.apply_lag_max
        if due:
            self._apply_at = self._now + self.timing.apply
            for replica in behind.values():
                replica.engine.now = self._now
            touched |= behind
            behind.clear()
        for group, replica in touched.items():
            engine = replica.engine
            if engine.role_changes != replica.seen_changes or engine.epoch != replica.seen_epoch:
                replica.notice_role()
                self.role_changes.append(group)
            lag = replica.log.commit - replica.applied
            replica.is_behind = (
                lag > 0 and not due and not engine.is_leader and lag < lag_max and group not in self._applied_at_once
            )
            if replica.is_behind:
                behind[group] = replica
            elif lag and replica.apply():
                self._touch(replica)  # More is committed than one turn applies.
            engine = replica.engine  # A seal begins a new one.
            if replica.reads or engine.reads_ready or engine.reads_failed:
                replica.answer_reads()
            if replica.results:
                self.results += replica.results
                replica.results = []
            if engine.out or engine.promises:
                self._touch(replica)

    @property
    def turn_at(self) -> float:
        """When a turn is due although nothing happens: what is committed is applied then."""
        return self._apply_at if self._behind else FAR

    @property
    def busy(self) -> bool:
        """Whether another turn has something to do without anything new happening."""
        idle_disk = not self._committing and (self.journal.dirty or bool(self._promised))
        return bool(self._touched or self._outbox or idle_disk)
