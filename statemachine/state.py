"""The state of one partition inside a transaction, with its hot records decoded.

Records that are only found by key are decoded once, changed in memory, and written back by `flush` before the transaction
commits. So a step of an invocation costs one write, however often its record changes. Tables that are read in order
(journals, timers, queues, keyed state) are written through. Decoded records outlive their transaction, up to a bound.
Call `forget` after a transaction that was not committed.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from holdfast.sdk.ids import DeploymentId, InvocationId, ObjectId, PartitionNumber, partition_of
from holdfast.statemachine.commands import Command
from holdfast.statemachine.effects import ArmTimer, Effect
from holdfast.statemachine.levels import LEVEL
from holdfast.statemachine.records import (
    COUNTS,
    INDEXED,
    Hook,
    Invocation,
    Meta,
    Object,
    pack,
    pack_hook,
    pack_invocation,
    pack_meta,
    pack_object,
    unpack,
    unpack_invocation,
    unpack_meta,
    unpack_object,
)
from holdfast.statemachine.tables import (
    ACTIVE,
    DEPLOYMENT,
    HOOK,
    META,
    OBJECT,
    SENT,
    SERVICE,
    TAKEN,
    TIME_MAX,
    kept_key,
    partition_bytes,
)
from holdfast.statemachine.txn import Txn
from holdfast.statemachine.webhooks import HookId

#: Decoded invocations, and as many objects, kept from one transaction to the next (about 600 bytes each).
CACHED_MAX: Final = 4096


class State:
    """One partition's state, for one thread."""

    def __init__(self, partition: int, partitions: int, *, level: int = LEVEL) -> None:
        """`level` is the level of a new state."""
        assert 0 <= partition < partitions
        self._first_level = level
        self.level = level  # See `levels`.
        self.partition = PartitionNumber(partition)
        self.partitions = partitions
        self.effects: list[Effect] = []
        self.todo: deque[Command] = deque()  # Messages to this partition itself, handled before `apply` returns.
        self.now_ms = 0
        self.invocations: dict[InvocationId, Invocation] = {}
        self.changed: dict[InvocationId, Invocation] = {}
        #: Those whose status or attempt changed, until `take_moved` or the end of the transaction.
        self.moved: dict[InvocationId, Invocation] = {}
        self._objects: dict[ObjectId, Object] = {}
        self._changed_objects: dict[ObjectId, Object] = {}
        self.hooks: dict[HookId, Hook] | None = None  # None: not read yet. See `hooks`.
        self.changed_hooks: dict[HookId, Hook] = {}
        self.retentions: set[int] = set()  # Those that are known to have a row: see `note_retention`.
        self.approvals_version = 0  # Grows with each change of the inbox, in memory alone: for those who watch it.
        self._counters: dict[str, list[int]] = {}
        self._deployments: dict[DeploymentId, int] = {}
        self._sent: dict[PartitionNumber, int] = {}
        self._taken: dict[PartitionNumber, int] = {}
        self._flushing: dict[PartitionNumber, None] = {}  # Targets for which this transaction already has an effect.
        self._armed_ms = TIME_MAX
        self._meta: Meta | None = None
        self.meta = Meta(level=level)  # of the last transaction

    # -- transactions ------------------------------------------------------------------------------------------------

    def begin(self, txn: Txn) -> None:
        assert not self.changed and not self._changed_objects, (
            "the previous transaction was neither flushed nor forgotten"
        )
        self.get = txn.get
        self.put = txn.put
        self.delete = txn.delete
        self.scan = txn.scan
        if self._meta is None:
            raw = txn.get(META)
            self._meta = self._first_meta() if raw is None else unpack_meta(raw)
            self.level = self._meta.level
        self.meta = self._meta
        self.now_ms = self.meta.now_ms
        self._armed_ms = TIME_MAX

    def _first_meta(self) -> Meta:
        """The record of a new state, whose index is complete."""
        return Meta(level=self._first_level, indexed=INDEXED if self._first_level >= 2 else b"")

    def flush(self) -> None:
        """Write back all changes. Nothing may be applied between this and the commit."""
        put = self.put
        self.meta.now_ms = self.now_ms
        put(META, pack_meta(self.meta))
        for ident, record in self.changed.items():
            put(ACTIVE + ident, pack_invocation(record))
        for oid, keyed in self._changed_objects.items():
            if keyed.is_idle:
                self.delete(OBJECT + oid)
            else:
                put(OBJECT + oid, pack_object(keyed))
        if self.changed_hooks:
            self._flush_hooks()
        for service, counters in self._counters.items():
            put(SERVICE + service.encode(), pack(counters))
        for deployment, count in self._deployments.items():
            if count:
                put(DEPLOYMENT + deployment.encode(), pack(count))
            else:
                self.delete(DEPLOYMENT + deployment.encode())
        for target, sequence in self._sent.items():
            put(SENT + partition_bytes(target), pack(sequence))
        for source, sequence in self._taken.items():
            put(TAKEN + partition_bytes(source), pack(sequence))
        self.changed.clear()
        self.moved.clear()
        self._changed_objects.clear()
        self._forget_small()
        if len(self.invocations) > CACHED_MAX:
            self.invocations.clear()
        if len(self._objects) > CACHED_MAX:
            self._objects.clear()

    def _flush_hooks(self) -> None:
        for id_, hook in self.changed_hooks.items():
            self.put(HOOK + id_, pack_hook(hook))
        self.changed_hooks.clear()

    def forget(self) -> None:
        """Drop everything decoded, because the transaction was aborted or the state replaced."""
        self.invocations.clear()
        self.changed.clear()
        self.moved.clear()
        self._objects.clear()
        self._changed_objects.clear()
        self.hooks = None
        self.changed_hooks.clear()
        self.retentions.clear()
        self._forget_small()
        self._meta = None
        self.effects.clear()
        self.todo.clear()

    def _forget_small(self) -> None:
        self._counters.clear()
        self._deployments.clear()
        self._sent.clear()
        self._taken.clear()
        self._flushing.clear()

    def take_effects(self) -> list[Effect]:
        taken, self.effects = self.effects, []
        return taken

    def take_moved(self) -> dict[InvocationId, Invocation]:
        """The invocations whose status or attempt changed, in the order of their first change since the last call."""
        taken, self.moved = self.moved, {}
        return taken

    # -- invocations -------------------------------------------------------------------------------------------------

    def load(self, ident: InvocationId) -> Invocation | None:
        """An active invocation. Call `touch` after changing it."""
        record = self.invocations.get(ident)
        if record is None:
            raw = self.get(ACTIVE + ident)
            if raw is None:
                return None
            record = self.invocations[ident] = unpack_invocation(ident, raw)
        return record

    def touch(self, record: Invocation) -> None:
        self.changed[record.id] = record

    def add(self, record: Invocation) -> None:
        self.invocations[record.id] = self.changed[record.id] = record

    def remove(self, record: Invocation) -> None:
        """Remove an invocation from the active ones."""
        ident = record.id
        self.invocations.pop(ident, None)
        self.changed.pop(ident, None)
        self.delete(ACTIVE + ident)

    def note_retention(self, retention_ms: int) -> None:
        """A completed invocation has this retention. With all of them, the table of expiries is read in the order of
        completion: see `lists`."""
        if self.level >= 2 and retention_ms not in self.retentions:
            self.retentions.add(retention_ms)
            key = kept_key(retention_ms)
            if self.get(key) is None:
                self.put(key, b"")

    # -- what is read and written back by key ----------------------------------------------------------------------------

    def object(self, oid: ObjectId, service: str, key: str) -> Object:
        """The record of an object; a fresh one if it has none. Call `touch_object` after changing it."""
        record = self._objects.get(oid)
        if record is None:
            raw = self.get(OBJECT + oid)
            record = self._objects[oid] = Object(oid, service, key) if raw is None else unpack_object(oid, raw)
        return record

    def find_object(self, oid: ObjectId) -> Object | None:
        """The record of an object, if it has one. Always read through this: decoded records are newer than the table."""
        record = self._objects.get(oid)
        if record is None:
            raw = self.get(OBJECT + oid)
            if raw is None:
                return None
            record = self._objects[oid] = unpack_object(oid, raw)
        return record

    def touch_object(self, record: Object) -> None:
        self._changed_objects[record.id] = record

    def counters(self, service: str) -> list[int]:
        """The counters of a service: see `records.Count`. They are always written back."""
        counters = self._counters.get(service)
        if counters is None:
            raw = self.get(SERVICE + service.encode())
            counters = [0] * COUNTS if raw is None else unpack(raw)
            self._counters[service] = counters
        return counters

    def count_deployment(self, deployment: DeploymentId, change: int) -> None:
        count = self._deployments.get(deployment)
        if count is None:
            raw = self.get(DEPLOYMENT + deployment.encode())
            count = 0 if raw is None else unpack(raw)
        self._deployments[deployment] = count + change

    def sent(self, target: PartitionNumber) -> int:
        """The newest sequence number in the outbox for `target`."""
        sequence = self._sent.get(target)
        if sequence is None:
            raw = self.get(SENT + partition_bytes(target))
            sequence = 0 if raw is None else unpack(raw)
        return sequence

    def set_sent(self, target: PartitionNumber, sequence: int) -> None:
        self._sent[target] = sequence

    def taken(self, source: PartitionNumber) -> int:
        """The newest sequence number accepted from `source`."""
        sequence = self._taken.get(source)
        if sequence is None:
            raw = self.get(TAKEN + partition_bytes(source))
            sequence = 0 if raw is None else unpack(raw)
        return sequence

    def set_taken(self, source: PartitionNumber, sequence: int) -> None:
        self._taken[source] = sequence

    # -- reminders -------------------------------------------------------------------------------------------------------

    def remind_of(self, due_ms: int) -> None:
        """Emit ArmTimer, once per transaction unless this one is earlier."""
        if due_ms < self._armed_ms:
            self._armed_ms = due_ms
            self.effects.append(ArmTimer(due_ms))

    def is_first_for(self, target: PartitionNumber) -> bool:
        """Whether this transaction has sent nothing to `target` yet."""
        if target in self._flushing:
            return False
        self._flushing[target] = None
        return True

    def is_here(self, ident: InvocationId) -> bool:
        return partition_of(ident, self.partitions) == self.partition
