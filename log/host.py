"""All groups of one node, and the turn in which everything happens.

The host is told what arrived and what time it is. It asks for two things: to send messages, and to make the journal's staged
writes durable. Its driver owns sockets, threads and clocks: `node.py` in production, the simulator in tests.

`turn` is the safety argument of the log on one screen. A leader's messages may race our own disk. Acknowledgements and votes
never leave before everything they refer to is committed to the store: they are held during a commit, and a commit includes all
that was written before them. A group may enter a later term or epoch before that commit begins. The commit then writes the new
vote instead of the old one, or cuts the entry off, and the promise is dropped (`_still_kept`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from holdfast.log.batches import (
    APP_GROUP,
    Promises,
    filtered_promises,
    gather_out,
    gather_promises,
    promises_still_kept,
    without,
)
from holdfast.log.engine import FAR, Engine, Limits, Timing
from holdfast.log.errors import NoRoomHere, NotHosted, ProposalError
from holdfast.log.hollow import enter_epoch, why_not_fill
from holdfast.log.journal import Journal
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
)
from holdfast.log.records import Configuration
from holdfast.log.replica import Done, Failed, Machine, Replica, SnapshotWanted, config_message

if TYPE_CHECKING:
    from random import Random

EARLY_MESSAGES_MAX = 10_000  # Per session that has not begun; a full disk may delay it for long.


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
        self.hollow: dict[GroupId, Machine] = {}  # Groups whose state ends before their log begins; see `fill`.
        self.sessions: dict[NodeId, int] = {}
        self.begun: list[NodeId] = []  # Peers whose session has begun.
        self.results: list[Done | Failed] = []
        self.wanted: list[SnapshotWanted] = []
        self.received: list[tuple[NodeId, bytes]] = []  # Payloads of the rooms above, in order per peer.
        self.role_changes: list[GroupId] = []
        self.forgotten: list[GroupId] = []  # Groups whose logs are durably deleted; their state may be deleted too.
        self.timing = timing or Timing()
        self.limits = limits or Limits()
        self.dropped = 0
        self._open_machine = open_machine
        self._may_join = may_join
        self._applied_at_once = applied_at_once  # Groups whose state is acted on by followers too.
        self._send_to = send
        self._begin_commit = begin_commit
        self._rng = rng
        self.wake_at = self._now = self._beat_at = now
        self._touched: dict[GroupId, Replica] = {}
        self._behind: dict[GroupId, Replica] = {}  # Followers that delay applying committed entries
        self._apply_at = now  # until this time.
        self._outbox: dict[NodeId, list[Envelope]] = {}
        self._promised: list[Promises] = []  # Waiting for the next commit to begin,
        self._held: list[Promises] = []  # and for the current one to end.
        self._committing = False
        self._new_pins: set[NodeId] = set()  # Peers whose disk id is not durable yet: in the next commit,
        self._flying_pins: set[NodeId] = set()  # and in the current one.
        self._forgetting: list[GroupId] = []  # Groups whose log the next commit deletes,
        self._flying_forgetting: list[GroupId] = []  # and those that the current one deletes.
        #: Sessions that begin when that commit ends, with the messages received so far: a live link loses nothing.
        self._unpinned: dict[tuple[NodeId, int], list[Envelope]] = {}
        for group in sorted(journal.groups):
            machine, log = self._open_machine(group), journal.groups[group]
            is_alone = log.configuration.members == (node,)  # Then no other node has the lost state.
            if machine.applied[0] < log.base_index and keep_hollow and not is_alone:
                self.hollow[group] = machine
            else:
                self._open(group, machine)

    # -- groups --------------------------------------------------------------------------------------------------------

    def create(self, group: GroupId, members: tuple[NodeId, ...]) -> Replica:
        """Host a group from its beginning. All founders must name the same members. Idempotent."""
        if group in self.replicas:
            return self.replicas[group]
        if self.node not in members or group in (APP_GROUP, *self.hollow, *self.journal.tombstones):
            raise ValueError(f"group {group} with members {members} cannot be created on {self.node}")
        replica = self._begin(group, Configuration(0, tuple(sorted(members))))
        if self.sessions:
            replica.engine.ask_soon()
            self.wake_at = min(self.wake_at, replica.engine.wake_at)
        return replica

    def _begin(self, group: GroupId, configuration: Configuration) -> Replica:
        machine = self._open_machine(group)
        # A state left over from an earlier membership may be ahead of what survives a power loss, and only our deleted log
        # could rebuild it.
        assert group not in self.journal.tombstones or machine.applied[0] == 0, (
            f"group {group} begins again with an empty state"
        )
        self.journal.create(group, configuration)
        return self._open(group, machine)

    def forget(self, group: GroupId) -> bool:
        """Delete the log of a group that continued without us. False if the group may still need our log.

        `forgotten` names the group once the deletion is durable. If we are invited again, the group returns with an empty
        log; its state must be gone by then (`may_join`).
        """
        replica = self.replicas.get(group)
        if replica is None or not replica.is_left_over:
            return False
        replica.stop()
        self.results += replica.results
        del self.replicas[group]
        self._touched.pop(group, None)
        self._behind.pop(group, None)
        # We no longer hold what we were about to acknowledge.
        self._promised = filtered_promises(self._promised, lambda of, _epoch, _term: of != group)
        self._held = filtered_promises(self._held, lambda of, _epoch, _term: of != group)
        self._outbox = {peer: without(group, envelopes) for peer, envelopes in self._outbox.items()}
        self.journal.forget(group)
        self._forgetting.append(group)
        return True

    def is_forgotten(self, group: GroupId) -> bool:
        """Whether nothing of the group's log is on our disk, so its state is of no use."""
        return group not in (*self.journal.groups, *self._forgetting, *self._flying_forgetting)

    def why_not_fill(self, group: GroupId, index: int, term: int, epoch: int) -> str | None:
        """Why a hollow group cannot continue from the state at (index, term), cut in `epoch`; None if it can."""
        return why_not_fill(self.journal.groups[group], index, term, epoch)

    def fill(self, group: GroupId, swap: Callable[[], None]) -> Replica:
        """Give a hollow group a state that `why_not_fill` accepts. The group takes part from now on."""
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
        # Usually an earlier proposal of this turn has touched the group.
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
        """Visit the group in the next turn although no event touched it."""
        if (replica := self.replicas.get(group)) is not None:
            self._touch(replica)

    def _hosted(self, group: GroupId, waiting: object) -> Replica | None:
        replica = self.replicas.get(group)
        if replica is None:
            self.results.append(Failed([waiting], NotHosted(f"group {group} is not hosted on {self.node}")))
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
            return False  # The group was forgotten in the meantime.
        self._touch(replica)
        return replica.install(index, term, swap)

    def peer_up(self, peer: NodeId, session: int, disk: str, now: float) -> bool:
        """A session began. False: the peer has a different disk than before, so it lost what it acknowledged."""
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
        """Whether this is the peer's current session, begun or about to begin."""
        return self.sessions.get(peer) == session or (peer, session) in self._unpinned

    def deliver(self, peer: NodeId, session: int, envelopes: list[Envelope], now: float) -> None:
        """Take the decoded messages of one frame. Messages of an older session are dropped."""
        self._now = now
        if self.sessions.get(peer) != session:
            early = self._unpinned.get((peer, session))
            if early is None or len(early) > EARLY_MESSAGES_MAX:
                self.dropped += len(envelopes)
            else:
                early += envelopes  # The peer's disk is faster than ours; delivered when the session begins.
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
                # The node that is behind learns of the newer epoch: the peer from this message, or we from its answer.
                touched[group] = replica
                self._post(peer, replica, replica.config_message)
                continue
            if kind is Append and message.entries:  # type: ignore[union-attr]
                if not asked:
                    asked, full = True, self.no_room()
                if full is not None:
                    continue  # Refused before append; the leader resends it.
            if peer in engine.members or peer in engine.progress:
                stirred = step(engine, peer, message)
                if stirred:
                    touched[group] = replica
                elif stirred is None:
                    if kind is Offer:
                        self.wanted += replica.wants(peer, message)  # type: ignore[arg-type]
                    if engine.wake_at < self.wake_at:
                        self.wake_at = engine.wake_at  # An election failed and is retried soon.
                    if not replica.is_idle:
                        touched[group] = replica
            else:
                self.dropped += 1

    def _deliver_elsewhere(self, peer: NodeId, group: GroupId, epoch: int, message: Message) -> None:
        """Take a message that is not for the engine of a hosted group."""
        if type(message) is App:
            self.received.append((peer, message.payload))
        elif type(message) is Config:
            self._on_config(peer, group, epoch, message)
        elif type(message) is Appends:
            self._take_appends(peer, message.flat)
        elif type(message) is AppendAcks:
            self._take_acks(peer, message.flat)
        else:  # The leader of the group will tell us about it.
            self._recall(peer, group, epoch, is_beat=type(message) is Heartbeat)

    def _take_appends(self, peer: NodeId, flat: Sequence[Any]) -> None:
        if self.no_room() is not None:
            return  # Refused before append, as a single append is.
        replicas, touched, now, lag_max = self.replicas, self._touched, self._now, self.limits.apply_lag_max
        acks: list[int] = []
        appends = zip(*[iter(flat)] * APPENDS_WIDTH, strict=True)
        for group, epoch, term, prev, prev_term, commit, entry_term, command in appends:
            replica = replicas.get(group)
            entry = command, prev + 1, entry_term
            if replica is not None and epoch == (engine := replica.engine).epoch:
                engine.now = now
                if engine.follow(peer, term, prev, prev_term, commit, entry):
                    if engine.promises:
                        engine.promise(peer, AppendAck(term, prev + 1))  # After earlier promises.
                        touched[group] = replica
                        continue
                    acks += group, epoch, term, prev + 1
                    # A follower that delays applying need not be visited for more committed entries.
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
        for group, epoch, term, index in zip(*[iter(flat)] * ACKS_WIDTH, strict=True):
            replica = replicas.get(group)
            if replica is not None and epoch == (engine := replica.engine).epoch and peer in engine.progress:
                engine.now = now
                stirred = engine.acknowledge(peer, term, index)
                if stirred is None and engine.wake_at < self.wake_at:
                    self.wake_at = engine.wake_at  # The answer deposed us.
                if stirred is not False:
                    touched[group] = replica
            else:
                envelope = Envelope(GroupId(group), epoch, AppendAck(term, index))
                self.deliver(peer, self.sessions[peer], [envelope], now)

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
            # If we may not join yet or have no room, the next heartbeat brings another invitation.
            if group != APP_GROUP and peer in config.members and self._may_join(group) and self.no_room() is None:
                try:
                    replica = self._begin(group, configuration)
                except OSError:
                    return  # No place for the group's state, and nothing is written yet. `open_machine` reports why.
                if before is not None:
                    self._post(
                        peer, replica, replica.config_message
                    )  # The leader may count entries that we held before.
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
        """Enter a later epoch without a state (`hollow.py`)."""
        if epoch > (log := self.journal.groups[group]).configuration.epoch:
            enter_epoch(log, Configuration(epoch, config.members, config.seed_index, config.seed_term))

    def _recall(self, peer: NodeId, group: GroupId, epoch: int, *, is_beat: bool) -> None:
        """Tell a peer that speaks of a group whose log we deleted the epoch in which we were no longer needed.

        The leader of that same epoch is told too, because we may have been its learner and it counts entries that we no longer
        hold. It is told once per heartbeat, because it answers by sending entries.
        """
        known = self.journal.tombstones.get(group)
        if known is None or peer not in self.sessions:
            return
        if epoch < known.configuration.epoch or (epoch == known.configuration.epoch and is_beat):
            envelope = Envelope(group, known.configuration.epoch, config_message(known.configuration))
            self._outbox.setdefault(peer, []).append(envelope)

    def send_app(self, peer: NodeId, payload: bytes) -> bool:
        """Send bytes to the same room on another node. False without a session; lost if the session ends."""
        if peer not in self.sessions:
            return False
        self._outbox.setdefault(peer, []).append(Envelope(APP_GROUP, 0, App(payload)))
        return True

    def tick(self, now: float) -> None:
        """A timer is due: the heartbeat of the groups that we lead, or an election."""
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
        gather_out(speaking, self.sessions, self._outbox)
        gather_promises(promising, self.sessions, self._promised)
        self._send_outbox()  # Appends and heartbeats: they may race our disk (Raft thesis §10.2.1).
        if not self._committing:
            if self.journal.dirty:
                self._committing = True
                self._held, self._promised = self._still_kept(self._promised), []
                self._flying_pins, self._new_pins = self._new_pins, set()
                self._flying_forgetting, self._forgetting = self._forgetting, []
                self.journal.store.stage(self.journal.take_writes())  # One transaction for all groups,
                self._begin_commit()  # one fsync; then `committed` is called.
            else:
                self._promised = self._release(self._promised)  # Everything is already on disk.
        self._apply(touched)

    def committed(self, now: float) -> None:
        """The store's commit has returned: promises made before it may leave, and our own log counts."""
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
                continue  # A follower applies when that is due.
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
            self.deliver(peer, session, early, now)

    def no_space(self) -> None:
        """The current commit does not fit the disk and is retried. Nothing was promised, and other nodes may have room."""
        for replica in self.replicas.values():
            replica.let_go()
            self.results += replica.results
            replica.results = []

    def _post(self, peer: NodeId, replica: Replica, message: Message) -> None:
        if peer in self.sessions:
            self._outbox.setdefault(peer, []).append(Envelope(replica.group, replica.epoch, message))

    def _still_kept(self, promises: list[Promises]) -> list[Promises]:
        """Promises that the transaction about to be staged makes true."""
        risen = self.journal.take_risen()
        return promises_still_kept(promises, risen) if risen else promises

    def _release(self, promises: list[Promises]) -> list[Promises]:
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
        """Apply committed entries and answer the callers that wait for them.

        Nothing waits for a follower to apply, and many entries at once cost little more than one. So followers apply
        periodically, or when many entries are committed.
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
                self._touch(replica)  # More entries are committed than one turn applies.
            engine = replica.engine  # A seal starts a new engine.
            if replica.reads or engine.reads_ready or engine.reads_failed:
                replica.answer_reads()
            if replica.results:
                self.results += replica.results
                replica.results = []
            if engine.out or engine.promises:
                self._touch(replica)

    @property
    def turn_at(self) -> float:
        """When the next turn is due if nothing happens: followers apply committed entries then."""
        return self._apply_at if self._behind else FAR

    @property
    def busy(self) -> bool:
        """Whether another turn has work to do although nothing new happened."""
        idle_disk = not self._committing and (self.journal.dirty or bool(self._promised))
        return bool(self._touched or self._outbox or idle_disk)
