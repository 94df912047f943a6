"""The invariants, seen from outside all nodes at once, checked after every event.

The oracle sees every disk, every message and every answer. It keeps one history of committed entries, which nothing may
contradict: no node's log, no state, no answer to a client, no later leader. It looks at three places: transactions that
a node stages for its disk (`staged`), messages to its peers (`sent`), and its memory after an event (`look`).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgpack

from holdfast.log.engine import decode_seal
from holdfast.log.errors import ProposalError
from holdfast.log.group_log import GroupLog
from holdfast.log.messages import (
    ACKS_WIDTH,
    APPENDS_WIDTH,
    SEAL,
    Append,
    AppendAck,
    AppendAcks,
    Appends,
    Envelope,
    GroupId,
    Heartbeat,
    NodeId,
    RequestVote,
    TimeoutNow,
    Vote,
)
from holdfast.log.records import COMMITS, FILED, HARD, PINS, TOMBSTONES, table_of
from holdfast.log.rows import RECENT, decode_row, place_in
from holdfast.log.store import Cut, Drop, Extend, Op, Put
from tests.sim.machine import Saved

if TYPE_CHECKING:
    from holdfast.log.replica import Committed, Replica
    from tests.sim.world import SimNode, World


class Violation(Exception):
    """The log broke a promise."""


@dataclass(eq=False)
class Operation:
    number: int
    group: GroupId
    kind: str  # write, read or change
    command: bytes = b""
    members: tuple[NodeId, ...] = ()
    floor: int = 0  # The newest index that any client had seen at the time of the request.
    outcome: str = "open"  # open, ok, failed (definitely), unknown
    node: str = ""
    index: int = 0


class Hard:
    """A group's record of term, vote and configuration on a disk."""

    def __init__(self, value: bytes) -> None:
        fields: list[Any] = msgpack.unpackb(value[4:])
        self.term, self.vote, self.commit, self.base = fields[:4]
        self.epoch = fields[6]


class Stone:
    """The tombstone of a group whose log was deleted, on a disk."""

    def __init__(self, value: bytes) -> None:
        fields: list[Any] = msgpack.unpackb(value[4:])
        self.term, self.vote, self.epoch = fields[:3]


class Ledger:
    """The one history of a group."""

    def __init__(self, founders: tuple[NodeId, ...]) -> None:
        self.terms: dict[int, int] = {}  # index -> term of the committed entry
        self.commands: dict[int, bytes] = {}
        self.chains: dict[int, int] = {0: 0}
        self.where: dict[bytes, int] = {}  # command -> index where it is committed
        self.leaders: dict[tuple[int, int], tuple[NodeId, int]] = {}  # (epoch, term) -> the leader, and its life
        self.newest = (0, 0)
        self.epochs: dict[int, tuple[tuple[NodeId, ...], int, int]] = {0: (founders, 0, 0)}  # members and seed
        self.seals: dict[int, int] = {}  # epoch -> index of the committed entry that ended it
        self.written: dict[tuple[int, int, int], tuple[int, int | None]] = {}  # (epoch, index, term) -> content, before
        self.votes: dict[tuple[NodeId, int], NodeId] = {}  # (voter, term) -> the candidate, as sent to a peer
        self.shown = 0  # The newest index acknowledged to a writer or seen by a reader.
        self.top = 0


class Oracle:
    def __init__(self, world: World) -> None:
        self.world = world
        self.ledgers: dict[GroupId, Ledger] = {group: Ledger(names) for group, names in world.founders.items()}
        self.operations: list[Operation] = []
        self._open: dict[NodeId, set[Operation]] = {name: set() for name in world.names}
        self._seen: dict[
            tuple[NodeId, GroupId], tuple[int, ...]
        ] = {}  # boots, epoch, role, term, commit, applied, last
        self._led: dict[tuple[NodeId, GroupId], tuple[int, int]] = {}

    # -- clients -------------------------------------------------------------------------------------------------------

    def invoked(self, operation: Operation, node: SimNode) -> None:
        operation.node = node.name
        operation.floor = self.ledgers[operation.group].shown
        self.operations.append(operation)
        self._open[node.name].add(operation)

    def _close(self, operation: Operation, outcome: str) -> None:
        if not (operation.outcome == "open"):
            raise Violation(f"operation {operation.number} was answered twice")
        operation.outcome = outcome
        self._open[NodeId(operation.node)].discard(operation)
        self.world.counts[f"{operation.kind} {outcome}"] += 1

    def succeeded(self, operation: Operation, index: int, replica: Replica) -> None:
        self._close(operation, "ok")
        operation.index = index
        ledger = self.ledgers[operation.group]
        if not (index <= replica.applied):
            raise Violation(f"entry {index} was answered and is not applied")
        if operation.kind == "read":
            floor = operation.floor
            if not (index >= floor):
                raise Violation(f"a read at {index} misses entry {floor}, which somebody had been shown before")
            ledger.shown = max(ledger.shown, replica.applied)  # A reader sees everything that is applied.
            return
        if index not in ledger.terms:
            raise Violation(f"entry {index} was acknowledged and is not committed")
        if operation.kind == "write":
            committed = ledger.commands[index]
            if operation.command not in committed:
                raise Violation(f"entry {index} was acknowledged with another content")
        ledger.shown = max(ledger.shown, index)

    def failed(self, operation: Operation, error: ProposalError) -> None:
        self._close(operation, "failed" if error.definite else "unknown")

    def stopped(self, node: SimNode) -> None:
        """The callers of a process that died do not know the outcome."""
        for operation in self._open[node.name]:
            operation.outcome = "unknown"
        self._open[node.name].clear()

    # -- what nodes apply ------------------------------------------------------------------------------------------------

    def applied(self, name: NodeId, group: GroupId, saved: Saved, entry: Committed) -> None:
        ledger = self.ledgers[group]
        expected = ledger.chains.get(saved.index)
        if expected is None:
            ledger.chains[saved.index] = saved.chain
        if expected not in (None, saved.chain):
            raise Violation(f"{name}: its state at entry {saved.index} differs from another's")
        for command in entry.commands:
            where = ledger.where.setdefault(command, entry.index)
            if not (where == entry.index):
                raise Violation(f"{command!r} took effect at {where} and again at {entry.index}")

    def installed(self, name: NodeId, group: GroupId, saved: Saved) -> None:
        expected = self.ledgers[group].chains.get(saved.index)
        if not (expected == saved.chain):
            raise Violation(f"{name}: installed a state at {saved.index} that nobody had")

    # -- what nodes write ------------------------------------------------------------------------------------------------

    def staged(self, node: SimNode, ops: Sequence[Op]) -> list[str]:
        """One transaction on its way to a disk. Returns the kinds of writes in it, for the failpoints."""
        kinds: set[str] = set()
        terms: dict[tuple[str, int], int | None] = {}
        gone = {op.low for op in ops if type(op) is Cut and op.table == HARD}
        for op in ops:
            match op:
                case Put(table, key, value) if table == TOMBSTONES:
                    kinds.add("forget")
                case Put(table, key, value) if table == HARD:
                    kinds |= self._staged_hard(node, key, Hard(value), is_back=key in gone)
                case Put(table, key, value) if table == COMMITS:
                    self._staged_commits(node, key, value, gone)
                case Put(table, key, value) if table == PINS:
                    kinds.add("pin")
                case Extend(table, items) if table == RECENT:
                    kinds |= {"entries", "row"}
                    row = items[0][1]
                    for group, first, places in decode_row(*items[0]) or ():
                        for index, (start, stop) in enumerate(places, first):
                            self._staged_entry(node, table_of(group), index, row[start:stop], terms)
                case Extend(table, items):
                    for key, value in items:
                        place = place_in(value)
                        kinds.add("entries" if place is None else "file")
                        if place is None:
                            self._staged_entry(node, table, int.from_bytes(key, "big"), value, terms)
                case Put(table, _, _) if table == FILED:
                    kinds.add("filed")
                case Put(table, key, value):
                    kinds.add("move")
                    self._must(
                        node.disk.entry(GroupId(int(table.removeprefix("log."))), int.from_bytes(key, "big")) == value,
                        f"{node.name}: what is moved out of a row is another entry than was there",
                    )
                case Cut(table, _, _) if table == RECENT:
                    kinds.add("retire")
                case Cut(table, low, _) if table not in (HARD, COMMITS, PINS, TOMBSTONES, FILED):
                    oldest = node.disk.first(table)
                    kinds.add("trim" if oldest is None or low <= oldest[0] else "truncate")
                    cut = int.from_bytes(low, "big")
                    for cut_off in [known for known in terms if known[0] == table and known[1] >= cut]:
                        terms[cut_off] = None
                case Drop():
                    kinds.add("install")
        return sorted(kinds)

    def _staged_commits(self, node: SimNode, key: bytes, value: bytes, gone: set[bytes]) -> None:
        stored = node.disk.get(COMMITS, key)
        old: dict[int, int] = {} if stored is None else msgpack.unpackb(stored[4:], strict_map_key=False)
        new: dict[int, int] = msgpack.unpackb(value[4:], strict_map_key=False)
        for group, commit in old.items():
            if group.to_bytes(4, "big") in gone:
                continue
            if not (new.get(group, -1) >= commit):
                raise Violation(f"{node.name}: the durable commit of group {group} falls")

    def _staged_hard(self, node: SimNode, key: bytes, new: Hard, *, is_back: bool) -> set[str]:
        """The promises of a node in a group that it keeps, even across the loss of the group's log (`is_back`)."""
        value, stone = node.disk.get(HARD, key), node.disk.get(TOMBSTONES, key)
        if value is None and stone is None:
            return {"create"}
        old = Hard(value) if value is not None else Stone(stone or b"")
        name = node.name
        if not (new.term >= old.term):
            raise Violation(f"{name}: its durable term falls from {old.term} to {new.term}")
        if not (new.epoch >= old.epoch):
            raise Violation(f"{name}: its durable epoch falls from {old.epoch} to {new.epoch}")
        kept = new.term > old.term or old.vote in (None, new.vote)
        if not kept:
            raise Violation(f"{name}: its durable vote in term {old.term} changes from {old.vote} to {new.vote}")
        if isinstance(old, Stone) or is_back:
            return {"create", "return"}
        if not (new.commit >= old.commit):
            raise Violation(f"{name}: its durable commit falls from {old.commit} to {new.commit}")
        if not (new.base >= old.base):
            raise Violation(f"{name}: its durable base falls from {old.base} to {new.base}")
        kinds = set()
        if new.vote is not None and (new.term, new.vote) != (old.term, old.vote):
            kinds.add("vote")
        if new.epoch > old.epoch:
            kinds.add("epoch")
        return kinds

    def _staged_entry(
        self, node: SimNode, table: str, index: int, value: bytes, terms: dict[tuple[str, int], int | None]
    ) -> None:
        """Log matching (Raft §5.3): an entry's index and term determine its content, and the entries before it."""
        group = GroupId(int(table.removeprefix("log.")))
        term = int.from_bytes(value[:8], "big")
        before = terms.get((table, index - 1))
        if before is None:
            held = node.disk.entry(group, index - 1)
            before = None if held is None else int.from_bytes(held[:8], "big")
        terms[table, index] = term
        assert node.host is not None
        configuration = node.host.journal.groups[group].configuration
        if index <= configuration.seed_index:
            return  # Of an earlier epoch, hence committed: compared with the one history.
        known = self.ledgers[group].written.setdefault(
            (configuration.epoch, index, term), (zlib.crc32(value[12:]), before)
        )
        if not (known[0] == zlib.crc32(value[12:])):
            raise Violation(f"{node.name}: entry {index} of term {term} has two contents")
        agrees = before is None or known[1] is None or known[1] == before
        if not agrees:
            raise Violation(f"{node.name}: before entry {index} of term {term} stand terms {before} and {known[1]}")

    # -- what nodes say --------------------------------------------------------------------------------------------------

    def sent(self, node: SimNode, peer: NodeId, envelopes: list[Envelope]) -> set[str]:
        """A frame leaves. Returns the kinds of messages in it, for the failpoints."""
        self._must(
            node.disk.get(PINS, peer.encode()) is not None, f"{node.name} talks to {peer}, whose disk is not pinned"
        )
        kinds: set[str] = set()
        for group, epoch, message in envelopes:
            kind = type(message)
            kinds.add(kind.__name__)
            if isinstance(message, AppendAcks):
                for at in range(0, len(message.flat), ACKS_WIDTH):
                    number, their_epoch, spoken, acknowledged = message.flat[at : at + ACKS_WIDTH]
                    self._acknowledged(node, GroupId(number), their_epoch, spoken, acknowledged)
                continue
            if isinstance(message, Appends):
                for at in range(0, len(message.flat), APPENDS_WIDTH):
                    number, their_epoch, spoken = message.flat[at : at + 3]
                    self._leads(node, self.ledgers[GroupId(number)], their_epoch, spoken)
                continue
            ledger = self.ledgers[group]
            match message:
                case Vote(term, granted):
                    if granted:
                        self._voted(node, group, epoch, term, peer)
                case RequestVote(term):
                    self._voted(node, group, epoch, term, node.name)
                case AppendAck(term, index):
                    self._acknowledged(node, group, epoch, term, index)
                case Append(term) | Heartbeat(term) | TimeoutNow(term):
                    self._leads(node, ledger, epoch, term)
                case _:
                    pass
        return kinds

    def _voted(self, node: SimNode, group: GroupId, epoch: int, term: int, candidate: NodeId) -> None:
        if node.wiped:
            return
        name = node.name
        first = self.ledgers[group].votes.setdefault((name, term), candidate)
        if not (first == candidate):
            raise Violation(f"{name} voted for {first} and for {candidate} in term {term}")
        hard = self._promised_in(node, group, epoch, term)
        self._must(
            hard.vote == candidate, f"{name} tells of its vote for {candidate} in term {term}, which is not on its disk"
        )

    def _acknowledged(self, node: SimNode, group: GroupId, epoch: int, spoken: int, index: int) -> None:
        assert node.host is not None
        hard = self._promised_in(node, group, epoch, spoken)
        if index <= hard.base:
            return
        value, log = node.disk.entry(group, index), node.host.replicas[group].log
        # In memory it may already be in a later term or epoch, and the entry replaced: that is not on its disk yet.
        term = log.term_of(index) if (log.configuration.epoch, log.term) == (epoch, spoken) else None
        holds = value is not None and term in (None, int.from_bytes(value[:8], "big"))
        if not holds:
            raise Violation(f"{node.name} acknowledges entry {index}, which is not on its disk")

    def _promised_in(self, node: SimNode, group: GroupId, epoch: int, term: int) -> Hard:
        """A promise leaves when the transaction that makes it true is on disk, and before any later one."""
        value = node.disk.get(HARD, group.to_bytes(4, "big"))
        if not (value is not None):
            raise Violation(f"{node.name} promises something in group {group}, which is not on its disk")
        hard = Hard(value or b"")
        now = (hard.epoch, hard.term)
        if not (now == (epoch, term)):
            raise Violation(f"{node.name} promises in epoch {epoch}, term {term}; its disk is in {now}")
        return hard

    def _leads(self, node: SimNode, ledger: Ledger, epoch: int, term: int) -> None:
        life = (node.name, node.boots)
        first = ledger.leaders.setdefault((epoch, term), life)
        if not (first == life):
            raise Violation(f"{first} and {life} both lead epoch {epoch} in term {term}")

    # -- what nodes hold -------------------------------------------------------------------------------------------------

    def forgot(self, node: SimNode, group: GroupId) -> None:
        """A node deletes its log of a group: earlier observations do not constrain its new log."""
        node.forgot.add(group)
        self._seen.pop((node.name, group), None)
        self._led.pop((node.name, group), None)

    def look(self, node: SimNode) -> None:
        assert node.host is not None
        for group, replica in node.host.replicas.items():
            self._look(node, group, replica)

    def _look(self, node: SimNode, group: GroupId, replica: Replica) -> None:
        engine, log, ledger = replica.engine, replica.log, self.ledgers[group]
        name = node.name
        seen = self._seen.get((name, group))
        found = (node.boots, replica.epoch, engine.role, log.term, log.commit, replica.applied, log.last_index)
        if engine.is_leader:
            self._check_leader(node, group, replica, ledger)
        if found == seen:
            return
        self._seen[name, group] = found
        if not (engine.commit == log.commit):
            raise Violation(f"{name}: engine and journal disagree on commit")
        if not (engine.term == log.term):
            raise Violation(f"{name}: engine and journal disagree on term")
        if not (replica.applied <= log.commit <= log.last_index):
            raise Violation(f"{name}: applied, commit, last out of order")
        if not (log.durable <= log.last_index):
            raise Violation(f"{name}: more is durable than there is")
        start = log.base_index
        if seen is not None and seen[0] == node.boots:
            _, epoch, _, term, commit, applied, _ = seen
            if not (replica.epoch >= epoch):
                raise Violation(f"{name}: epoch fell from {epoch} to {replica.epoch}")
            if not (log.term >= term):
                raise Violation(f"{name}: term fell from {term} to {log.term}")
            if not (log.commit >= commit):
                raise Violation(f"{name}: commit fell from {commit} to {log.commit}")
            if not (replica.applied >= applied):
                raise Violation(f"{name}: applied fell from {applied} to {replica.applied}")
            start = max(start, commit)
        self._check_committed(name, group, log, start, ledger)
        self._check_epoch(name, replica, ledger)

    def _check_epoch(self, name: NodeId, replica: Replica, ledger: Ledger) -> None:
        """A group has one chain of epochs: each begins where the previous one was sealed and ended."""
        log = replica.log
        mine = log.configuration
        here = (mine.members, mine.seed_index, mine.seed_term)
        known = ledger.epochs.setdefault(mine.epoch, here)
        if not (known == here):
            raise Violation(f"{name}: epoch {mine.epoch} is {here} here and {known} elsewhere")
        sealed = mine.epoch == 0 or ledger.terms.get(mine.seed_index) == mine.seed_term
        if not sealed:
            raise Violation(f"{name}: entered epoch {mine.epoch}, but entry {mine.seed_index} is not committed")
        end = ledger.seals.get(mine.epoch)
        if not (end is None or log.commit <= end):
            raise Violation(f"{name}: epoch {mine.epoch} ended at {end}, commit {log.commit}")

    def _check_committed(self, name: NodeId, group: GroupId, log: GroupLog, start: int, ledger: Ledger) -> None:
        low = start + 1
        while low <= log.commit:
            for command, index, term in log.entries(low, log.commit):
                low = index + 1
                known = ledger.terms.get(index)
                if known is None:
                    self._check_durable(group, index, term, command, log)
                    ledger.terms[index], ledger.commands[index] = term, command
                    ledger.top = max(ledger.top, index)
                else:
                    same = known == term and ledger.commands[index] == command
                    if not same:
                        raise Violation(f"{name}: committed entry {index} differs from another's")

    def _check_durable(self, group: GroupId, index: int, term: int, command: bytes, log: GroupLog) -> None:
        """The first node that reports an entry as committed has a majority of disks that hold it; for a seal, two
        majorities."""
        ledger, configuration = self.ledgers[group], log.configuration
        epoch = configuration.epoch if index > configuration.seed_index else configuration.epoch - 1
        owners = [ledger.epochs.get(epoch, (configuration.members, 0, 0))[0]]
        if command[0] == SEAL:
            successor, members = decode_seal(command)
            owners.append(members)
            ledger.seals[successor - 1] = index
        for members in owners:
            holders = sum(self._holds(self.world.nodes[member], group, index, term) for member in members)
            enough = 2 * holders > len(members)
            if not enough:
                raise Violation(f"entry {index} is committed on {holders} of the {len(members)} disks of {members}")

    def _holds(self, node: SimNode, group: GroupId, index: int, term: int) -> bool:
        """Whether a node's disk holds the entry, or held it before the disk was replaced."""
        for disk in (node.disk, node.lost_disk):
            if disk is not None:
                value = disk.entry(group, index)
                if value is not None and int.from_bytes(value[:8], "big") == term:
                    return True
        return any(
            group in states and states[group].durable.index >= index for states in (node.states, node.lost_states)
        )

    def _check_leader(self, node: SimNode, group: GroupId, replica: Replica, ledger: Ledger) -> None:
        engine, log, name = replica.engine, replica.log, node.name
        key = (replica.epoch, engine.term)
        for peer, progress in engine.progress.items():
            match = progress.match
            if not (match < progress.next):
                raise Violation(f"{name}: next {progress.next} <= match {match}")
            other = self.world.nodes[peer]
            if peer not in engine.members and group in other.forgot:
                # A learner that forgot the group. The leader learns of it before it counts: a seal is checked below.
                continue
            if match and other.checked.get((name, group)) != (key, match):
                other.checked[name, group] = (key, match)
                self._check_match(name, group, log, other, match)
        if self._led.get((name, group)) == key:
            return
        self._led[name, group] = key
        self._leads(node, ledger, *key)
        voters = [v for v in engine.members if v == name or ledger.votes.get((v, engine.term)) == name]
        elected = 2 * len(voters) > len(engine.members)
        if not elected:
            raise Violation(f"{name} leads term {engine.term} with the votes of {voters} of {engine.members}")
        if key > ledger.newest:
            ledger.newest = key
            for index in range(log.base_index + 1, ledger.top + 1):
                known = ledger.terms.get(index)
                if known not in (None, log.term_of(index)):
                    raise Violation(f"the new leader {name} lacks committed entry {index}")

    def _check_match(self, name: NodeId, group: GroupId, log: GroupLog, other: SimNode, match: int) -> None:
        """Entries that a leader counts on a follower are on its disk, unless the follower has moved on: a newer leader
        may have replaced them, and a node that enters a later epoch without its seal cuts its log at its commit index
        (ADR 2, rule 3)."""
        key = group.to_bytes(4, "big")
        value, stone = other.disk.get(HARD, key), other.disk.get(TOMBSTONES, key)
        now = Hard(value) if value is not None else Stone(stone) if stone is not None else None
        gone_on = now is not None and (now.term > log.term or now.epoch > log.configuration.epoch)
        term = log.term_of(match)
        if other.wiped or term is None or gone_on:
            return
        holds = self._holds(other, group, match, term)
        if not holds:
            raise Violation(f"{name} counts {other.name} up to {match}, but its disk does not hold that")

    # -- the end -------------------------------------------------------------------------------------------------------

    def converged(self) -> str | None:
        """None if every member of the newest epoch has applied everything; otherwise what is missing."""
        for group, ledger in self.ledgers.items():
            leader = self.world.leader(group)
            if leader is None or leader.host is None:
                return f"group {group} has no leader"
            replica = leader.host.replicas[group]
            if not replica.engine.term_committed:
                return f"the leader {leader.name} has committed nothing of its own"
            for member in replica.engine.members:
                if self.world.nodes[member].wiped:
                    continue
                host = self.world.nodes[member].host
                other = None if host is None else host.replicas.get(group)
                if other is None or other.epoch != replica.epoch:
                    return f"{member} is not in epoch {replica.epoch}"
                if other.applied != replica.log.last_index or replica.log.last_index < ledger.top:
                    return f"{member} applied {other.applied}, {leader.name} ends at {replica.log.last_index}"
        return None

    def conclude(self) -> None:
        for group, ledger in self.ledgers.items():
            leader = self.world.leader(group)
            assert leader is not None and leader.host is not None
            for member in leader.host.replicas[group].engine.members:
                if self.world.nodes[member].wiped:
                    continue
                live = self.world.nodes[member].states[group].live
                if not (live.chain == ledger.chains[live.index]):
                    raise Violation(f"{member}: its final state differs")
                if not (len(live.commands) == len(set(live.commands))):
                    raise Violation(f"{member}: a command took effect twice")
                present = set(live.commands)
                for operation in self.operations:
                    if operation.group != group or operation.kind != "write":
                        continue
                    if operation.outcome == "ok":
                        if operation.command not in present:
                            raise Violation(f"{operation.command!r} was acknowledged and is lost")
                    elif operation.outcome == "failed":
                        absent = operation.command not in present
                        if not absent:
                            raise Violation(f"{operation.command!r} definitely failed, and took effect")
        waiting = [operation.number for operation in self.operations if operation.outcome == "open"]
        if waiting:
            raise Violation(f"operations {waiting[:5]} were never answered")

    def _must(self, holds: bool, message: str) -> None:
        if not holds:
            raise Violation(message)


__all__ = ["Hard", "Ledger", "Operation", "Oracle", "Violation"]
