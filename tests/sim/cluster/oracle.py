"""The invariants of a cluster, which hold under all faults.

The oracle keeps a reference of each partition: the real state machine over every entry in log order, fed by the first
replica that applies it. So it is never behind any node, and can examine each command in the state that it meets. It
checks by its own means: the epoch of an attempt, the numbers of messages between partitions and the time of a timer are
compared here, not by the code under test.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

from holdfast.log.messages import GroupId
from holdfast.log.replica import Committed
from holdfast.sdk.ids import InvocationId, PartitionNumber, partition_of
from holdfast.sdk.journal import Op, Step, unpack_step
from holdfast.statemachine import blobs, explain, queries, refs, tables
from holdfast.statemachine.commands import (
    AbandonStep,
    Announce,
    Batch,
    Command,
    Complete,
    Deliver,
    FailAttempt,
    FireTimers,
    Invoke,
    KeepBlob,
    Payload,
    PutBlob,
    RecordIntent,
    RecordRunFailure,
    RecordRunOutcome,
    RecordStep,
    Ref,
    SuspendAttempt,
    TrimOutbox,
    decode_batch,
)
from holdfast.statemachine.effects import Code, Reply, Result, Status
from holdfast.statemachine.levels import FIRST
from holdfast.statemachine.machine import apply
from holdfast.statemachine.memory import Memory
from holdfast.statemachine.records import Invocation, unpack, unpack_blob, unpack_invocation
from holdfast.statemachine.state import State
from tests.sim.cluster.node import T0_MS
from tests.statemachine import invariants
from tests.statemachine.found import objects_in

if TYPE_CHECKING:
    from tests.sim.cluster.world import Process, World

#: Commands of attempts, which only the newest attempt may issue.
OF_ATTEMPTS: Final = (
    RecordStep, RecordIntent, RecordRunFailure, RecordRunOutcome, AbandonStep, SuspendAttempt, Complete, FailAttempt,
)  # fmt: skip
#: The maximum difference of the nodes' clocks, including their drift in a run.
CLOCKS_MS: Final = 150


class Reference:
    def __init__(self, number: int, partitions: int) -> None:
        self.number = number
        self.txn = Memory()
        self.core = State(number, partitions, level=FIRST)  # The initial state of every partition.
        self.index = 0
        self.seen: list[int] = [0]  # A checksum of each entry,
        self.entries: list[Sequence[bytes]] = [()]  # and its content.
        self.term = 0
        self.sleeps: dict[tuple[InvocationId, int], int] = {}  # when they are due

    def sent(self, target: int) -> int:
        raw = self.txn.get(tables.SENT + tables.partition_bytes(target))
        return 0 if raw is None else int(unpack(raw))

    def taken(self, source: int) -> int:
        raw = self.txn.get(tables.TAKEN + tables.partition_bytes(source))
        return 0 if raw is None else int(unpack(raw))

    def kept(self, target: int) -> int:
        """The oldest message to another partition that is still kept; if there is none, the next one."""
        first, messages = queries.outbox(self.txn, PartitionNumber(target), 0, 1)
        return first if messages else self.sent(target) + 1

    def step(self, ident: InvocationId, index: int) -> Step | None:
        raw = queries.journal(self.txn, ident, index, 1)
        return unpack_step(raw[0]) if raw else None

    def steps(self, ident: InvocationId) -> dict[str, Step]:
        """By their keys."""
        return {step.key: step for step in map(unpack_step, queries.journal(self.txn, ident, 0, 10_000))}

    def active(self) -> list[Invocation]:
        rows = self.txn.scan(tables.ACTIVE, tables.after(tables.ACTIVE))
        return [unpack_invocation(InvocationId(key[1:]), raw) for key, raw in rows]


class Oracle:
    def __init__(self, world: World) -> None:
        self.world = world
        self.partitions = world.profile.partitions
        self.references = [Reference(number, self.partitions) for number in range(self.partitions)]
        self.invoked: set[InvocationId] = set()
        self.completed: dict[InvocationId, list[Any]] = {}
        self.told: dict[InvocationId, list[Any]] = {}  # The answers that clients got.
        self.taken: dict[tuple[int, int], int] = defaultdict(int)  # (source, target): newest message taken

    def reference(self, ident: InvocationId) -> Reference:
        return self.references[partition_of(ident, self.partitions)]

    # -- the log -------------------------------------------------------------------------------------------------------

    def about_to_apply(self, name: str, number: int, entries: Sequence[Committed]) -> None:
        reference = self.references[number]
        for entry in entries:
            mark = zlib.crc32(b"".join(entry.commands), entry.term)
            if entry.index <= reference.index:
                if reference.seen[entry.index] != mark:
                    self.violate(f"{name} applies another entry {entry.index} in partition {number}")
            elif entry.index == reference.index + 1:
                reference.index = entry.index
                reference.seen.append(mark)
                reference.entries.append(entry.commands)
                for raw in entry.commands:
                    self._apply(reference, decode_batch(raw))
            else:
                self.violate(f"{name} skips entries {reference.index + 1} to {entry.index - 1} of partition {number}")

    def _apply(self, reference: Reference, batch: Batch) -> None:
        core, txn = reference.core, reference.txn
        for command in batch.commands:
            record = queries.load(txn, command.id) if isinstance(command, OF_ATTEMPTS) else None
            core.begin(txn)
            result = apply(core, batch.now_ms, command)
            core.flush()
            self._look(reference, command, result, record)
            self._remember(reference, command, result)
            for effect in core.take_effects():
                if isinstance(effect, Reply):
                    self._completed(effect)

    def _look(self, reference: Reference, command: Command, result: Result, record: Invocation | None) -> None:
        self.world.counts["commands"] += 1
        match command:
            case Announce() if command.term <= reference.term:
                self.violate(f"two leaders announced term {command.term} of partition {reference.number}")
            case Invoke() if result.code == 0 and command.id in self.invoked:
                self.violate(f"{command.id.hex()} began twice")
            case Deliver():
                self._delivered(reference, command, result)
            case PutBlob() if result.code == 0:
                self.world.counts["values staged"] += 1
            case KeepBlob():
                self._kept(reference, command, result)
            case TrimOutbox():
                if command.sequence > self.taken[reference.number, command.target]:
                    self.violate(f"partition {reference.number} forgets messages that {command.target} has not taken")
            case FireTimers():
                self._fired(reference)
            case _ if isinstance(command, OF_ATTEMPTS) and result.code == 0:
                epoch = getattr(command, "epoch", 0)
                if record is None or record.epoch != epoch or record.status != Status.RUNNING:
                    self.violate(f"{type(command).__name__} of attempt {epoch} was taken, but it is over: {record}")

    def _remember(self, reference: Reference, command: Command, result: Result) -> None:
        match command:
            case Announce():
                reference.term = command.term
            case Invoke() if result.code == 0:
                self.invoked.add(command.id)
            case RecordStep() if result.code == 0 and command.op == Op.SLEEP:
                due_ms = queries.meta(reference.txn).now_ms + command.argument[0]
                reference.sleeps[command.id, command.step] = due_ms

    def _kept(self, reference: Reference, command: KeepBlob, result: Result) -> None:
        self.world.counts["values kept in the store" if result.code == 0 else f"values not kept: {result.code}"] += 1
        if result.code == 0:
            self.whole(reference, Ref(1, command.blob))

    def whole(self, reference: Reference, ref: Ref) -> bytes:
        """A value, wherever it is stored. It is where the state says, and unchanged."""
        name = queries.place(reference.txn, ref.data)
        if not name:
            return queries.whole(reference.txn, ref)
        data = self.world.store.values(reference.number).get(name)
        if data is None or sha256(data).digest() != ref.data[:32]:
            self.violate(f"partition {reference.number} refers to {name}, which the store does not have")
            return b""
        return refs.restored(ref, data)

    def deleted(self, name: str) -> None:
        """An object of the store was deleted. Nothing may refer to it, now or later."""
        self.world.counts["objects deleted"] += 1
        _, _, number, last = name.split("/")
        if number.isdigit() and last in self._objects(self.references[int(number)]):
            self.violate(f"{name} is deleted, and partition {int(number)} refers to it")

    @staticmethod
    def _objects(reference: Reference) -> set[str]:
        rows = reference.txn.scan(tables.BLOB, tables.after(tables.BLOB))
        return {unpack_blob(key[1:], raw).object for key, raw in rows} - {""}

    def is_tidy(self) -> bool:
        """The store has no value that is unknown to all states."""
        return all(
            self.world.store.values(reference.number).keys() <= self._objects(reference)
            and not queries.objects_to_delete(reference.txn, 1)
            for reference in self.references
        )

    def _completed(self, effect: Reply) -> None:
        if effect.id in self.completed:
            self.violate(f"{effect.id.hex()} completed twice")
        # The value of a reference exists when it is applied; the check of the leftovers finds out whether it stays.
        self.completed[effect.id] = self._whole_outcome(effect.id, effect.outcome) or []

    def _whole_outcome(self, ident: InvocationId, outcome: list[Any] | None) -> list[Any] | None:
        return refs.filled_outcome(outcome, partial(self.whole, self.reference(ident)))

    def _delivered(self, reference: Reference, command: Deliver, result: Result) -> None:
        """Each message once, in order, and unchanged."""
        pair = (command.source, reference.number)
        taken, last = self.taken[pair], command.first + len(command.messages) - 1
        if command.first > taken + 1:
            if result.code != 409:
                self.violate(f"partition {pair[1]} took message {command.first} of {pair[0]} before {taken + 1}")
            self.world.counts["deliveries with gaps refused"] += 1
        elif last <= taken:
            self.world.counts["deliveries doubled"] += 1
            if result.code != 200:
                self.violate(f"partition {pair[1]} took messages {command.first} to {last} of {pair[0]} again")
        elif result.code == Code.VALUE_MISSING:
            self.world.counts["deliveries before their values refused"] += 1
        else:
            first, sent = queries.outbox(
                self.references[command.source].txn, PartitionNumber(pair[1]), taken, last - taken
            )
            if first != taken + 1 or sent != command.messages[taken + 1 - command.first :]:
                self.violate(f"partition {pair[1]} took messages that {pair[0]} never sent")
            self.taken[pair] = last
            self.world.counts["messages delivered"] += len(sent)

    def _fired(self, reference: Reference) -> None:
        now_ms = T0_MS + self.world.now * 1000
        for (ident, index), due_ms in list(reference.sleeps.items()):
            raw = queries.journal(reference.txn, ident, index, 1)
            step = unpack_step(raw[0]) if raw else None
            if step is not None and not step.done and not step.abandoned:
                continue
            del reference.sleeps[ident, index]
            if step is not None and step.outcome is not None and step.outcome[0] == 0 and now_ms < due_ms - CLOCKS_MS:
                self.violate(f"a timer rang {due_ms - now_ms:.0f} ms early")

    # -- snapshots -------------------------------------------------------------------------------------------------------

    def about_to_trim(self, process: Process, group: int, index: int) -> None:
        """A snapshot has everything that the log forgets, and survives a power loss at this very moment."""
        assert process.node is not None
        durable = process.files.durable_snapshot(process.node.ground.snapshots.directory(GroupId(group)))
        if durable < index:
            self.violate(f"{process.name} trims group {group} to {index}, and its durable snapshot is at {durable}")
        process.wiped.discard(group)
        self.world.counts["trims"] += 1

    def is_hollow(self, process: Process, group: int) -> None:
        """Its state and its snapshots are gone, which only the removal of files can cause."""
        self.world.counts["hollow groups"] += 1
        if group not in process.wiped:
            self.violate(f"{process.name} has nothing to begin group {group} with, and nobody removed anything")

    # -- backups ---------------------------------------------------------------------------------------------------------

    def rewind(self, indexes: Sequence[int]) -> Oracle:
        """The expectations of a cluster that continues from these entries of the partitions' logs."""
        made = Oracle(self.world)
        for reference, old, index in zip(made.references, self.references, indexes, strict=True):
            reference.index, reference.seen = index, old.seen[: index + 1]
            reference.entries = old.entries[: index + 1]
            for raw in (raw for commands in reference.entries for raw in commands):
                batch = decode_batch(raw)
                for command in batch.commands:
                    reference.core.begin(reference.txn)
                    result = apply(reference.core, batch.now_ms, command)
                    reference.core.flush()
                    made._remember(reference, command, result)
                    for effect in reference.core.take_effects():
                        if isinstance(effect, Reply):
                            outcome = queries.whole_outcome(reference.txn, effect.outcome)
                            made.completed[effect.id] = outcome or []
            for source in range(self.partitions):
                made.taken[source, reference.number] = reference.taken(source)
        made.told = self.told  # A repeated request gets the same answer.
        return made

    def why_not_together(self) -> str | None:
        """Whether a message between the partitions is lost or invented."""
        for source in self.references:
            for target in self.references:
                kept, taken, sent = source.kept(target.number), target.taken(source.number), source.sent(target.number)
                if not kept - 1 <= taken <= sent:
                    pair = f"{source.number} has messages {kept} to {sent} for {target.number}"
                    return f"partition {pair}, which took {taken}"
        return None

    def begins_with(self, process: Process, number: int, state: Any) -> None:
        """A replica opens its state in a cluster that was restored from a backup."""
        reference = self.references[number]
        if state.applied[0] == reference.index and any(reference.entries):  # Entries were applied and left their rows.
            self.world.counts["states compared with the backup's"] += 1
            with state.read() as held:
                if queries.digest(held) != queries.digest(reference.txn):
                    self.violate(f"{process.name} begins partition {number} with another state than the backup's")

    # -- the world outside ---------------------------------------------------------------------------------------------

    def about_to_run(self, ident: InvocationId, epoch: int, key: str) -> None:
        """A journaled result is never computed again by the current attempt."""
        txn = self.reference(ident).txn
        record = queries.load(txn, ident)
        if record is not None and record.epoch == epoch and record.status == Status.RUNNING:
            for raw in queries.journal(txn, ident, 0, 10_000):
                step = unpack_step(raw)
                if step.key == key and step.done:
                    self.violate(f"{key} of {ident.hex()} runs again, although its result is journaled")

    def was_told(self, ident: InvocationId, outcome: list[Any]) -> None:
        self.told[ident] = outcome
        known = self.completed.get(ident)
        if known != outcome:
            self.violate(f"a client was told {outcome} of {ident.hex()}, and the log says {known}")

    def violate(self, what: str) -> None:
        self.world.violate(what)

    # -- the end -------------------------------------------------------------------------------------------------------

    def is_quiet(self) -> bool:
        """No work is left, and every replica knows it."""
        if any(reference.active() for reference in self.references) or not self.is_tidy():
            return False
        for reference in self.references:
            for process in self.world.processes.values():
                state = process.states.get(reference.number)
                if self.world.hosts(process, reference.number) and (
                    state is None or state.applied[0] < reference.index
                ):
                    return False
        return all(
            reference.sent(target) == self.taken[reference.number, target]
            for reference in self.references
            for target in range(self.partitions)
            if target != reference.number
        )

    def what_is_left(self) -> str:
        left = [
            f"{record.id.hex()} {record.service}/{record.key}: {explain.why_not_running(reference.txn, record.id)}"
            for reference in self.references
            for record in reference.active()
        ]
        sent = [
            f"{reference.number} sent {reference.sent(target)} messages to {target}, which took {taken}"
            for reference in self.references
            for target in range(self.partitions)
            if target != reference.number and reference.sent(target) != (taken := self.taken[reference.number, target])
        ]
        applied = [
            f"partition {reference.number}: {reference.index} in the log, "
            + ", ".join(f"{name} {p.states[reference.number].applied[0]}" for name, p in self.world.processes.items()
                        if reference.number in p.states)
            for reference in self.references
        ]  # fmt: skip
        untidy = [
            f"partition {reference.number}: the store has {sorted(unknown)}"
            for reference in self.references
            if (unknown := self.world.store.values(reference.number).keys() - self._objects(reference))
        ]
        return "; ".join([*left, *sent, *applied, *untidy])

    def conclude(self) -> None:
        for reference in self.references:
            invariants.check(reference.txn)
            for key, _ in reference.txn.scan(tables.BLOB, tables.after(tables.BLOB)):
                blob = blobs.find(reference.txn, key[1:])
                if blob is not None and blob.object:
                    self.whole(reference, Ref(1, blob.name))
            digest = queries.digest(reference.txn)
            for name, process in self.world.processes.items():
                if not self.world.hosts(process, reference.number):
                    continue
                state = process.states[reference.number]
                with state.read() as held:
                    if state.applied[0] == reference.index and queries.digest(held) != digest:
                        self.violate(f"{name} holds another state of partition {reference.number}")
        for ident, outcome in self.told.items():
            if self._whole_outcome(ident, queries.outcome(self.reference(ident).txn, ident)) != outcome:
                self.violate(f"{ident.hex()} is not what a client was told")

    def objects(self) -> tuple[dict[str, int], dict[str, list[str]]]:
        """The sums by key, and the messages seen of each sender."""
        by_txn = {id(reference.txn): reference for reference in self.references}

        def value_in(txn: Any, payload: Payload) -> bytes:
            return payload if isinstance(payload, bytes) else self.whole(by_txn[id(txn)], payload)

        return objects_in((reference.txn for reference in self.references), value_in)
