"""The state of one partition inside a transaction, with its hot records decoded.

Records that are found by their key alone are decoded once, changed in memory and written back by `flush`, before the
transaction commits: one step of an invocation then costs one write, however often its record changes. What is read in
order (journals, timers, queues, keyed state) is written through. Decoded records outlive their transaction, up to a
bound; a transaction that is not committed must be followed by `forget`.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from holdfast.sdk.ids import partition_of
from holdfast.statemachine.commands import Command
from holdfast.statemachine.effects import ArmTimer, Effect
from holdfast.statemachine.levels import LEVEL
from holdfast.statemachine.records import (
    COUNTS,
    INDEXED,
    Invocation,
    Meta,
    Object,
    pack,
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
    META,
    OBJECT,
    SENT,
    SERVICE,
    TAKEN,
    TIME_MAX,
    partition_bytes,
)
from holdfast.statemachine.txn import Txn

#: Decoded invocations, and as many objects, kept from one transaction to the next (about 600 bytes each).
CACHED_MAX: Final = 4096


class State:
    """One partition's state. Not for two threads at once."""

    def __init__(self, partition: int, partitions: int, *, level: int = LEVEL) -> None:
        """`level` is that of a state that begins with nothing."""
        assert 0 <= partition < partitions
        self._first_level = level
        self.level = level  # See `levels`.
        self.partition = partition
        self.partitions = partitions
        self.effects: list[Effect] = []
        self.todo: deque[Command] = deque()  # Messages to this partition itself, handled before `apply` returns.
        self.now_ms = 0
        self.invocations: dict[bytes, Invocation] = {}
        self.changed: dict[bytes, Invocation] = {}
        self._objects: dict[bytes, Object] = {}
        self._changed_objects: dict[bytes, Object] = {}
        self._counters: dict[str, list[int]] = {}
        self._deployments: dict[str, int] = {}
        self._sent: dict[int, int] = {}
        self._taken: dict[int, int] = {}
        self._flushing: dict[int, None] = {}  # Targets that the leader was told about in this transaction.
        self._armed_ms = TIME_MAX
        self._meta: Meta | None = None
        self.meta = Meta(level=level)  # of the last transaction

    # -- transactions ------------------------------------------------------------------------------------------------

    def begin(self, txn: Txn) -> None:
        assert not self.changed and not self._changed_objects, (
            "the transaction before was neither flushed nor forgotten"
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
        """Of a state that begins with nothing: nothing is missing in its index."""
        return Meta(level=self._first_level, indexed=INDEXED if self._first_level >= 2 else b"")

    def flush(self) -> None:
        """Write back what changed. Nothing may be applied between this and the commit."""
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
        self._changed_objects.clear()
        self._forget_small()
        if len(self.invocations) > CACHED_MAX:
            self.invocations.clear()
        if len(self._objects) > CACHED_MAX:
            self._objects.clear()

    def forget(self) -> None:
        """The transaction was aborted, or the state replaced: nothing decoded is true any more."""
        self.invocations.clear()
        self.changed.clear()
        self._objects.clear()
        self._changed_objects.clear()
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

    # -- invocations -------------------------------------------------------------------------------------------------

    def load(self, ident: bytes) -> Invocation | None:
        """An active invocation. Whoever changes it says so with `touch`."""
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
        """It is no longer active."""
        ident = record.id
        self.invocations.pop(ident, None)
        self.changed.pop(ident, None)
        self.delete(ACTIVE + ident)

    # -- what is read and written back by key ----------------------------------------------------------------------------

    def object(self, oid: bytes, service: str, key: str) -> Object:
        """The object's record; a fresh one if there is nothing of it. Whoever changes it says so with `touch_object`."""
        record = self._objects.get(oid)
        if record is None:
            raw = self.get(OBJECT + oid)
            record = self._objects[oid] = Object(oid, service, key) if raw is None else unpack_object(oid, raw)
        return record

    def find_object(self, oid: bytes) -> Object | None:
        """The object's record, if there is anything of it. Not to be read past: what is decoded is newer than the table."""
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
        """See `records.Count`. They are written back in any case."""
        counters = self._counters.get(service)
        if counters is None:
            raw = self.get(SERVICE + service.encode())
            counters = [0] * COUNTS if raw is None else unpack(raw)
            self._counters[service] = counters
        return counters

    def count_deployment(self, deployment: str, change: int) -> None:
        count = self._deployments.get(deployment)
        if count is None:
            raw = self.get(DEPLOYMENT + deployment.encode())
            count = 0 if raw is None else unpack(raw)
        self._deployments[deployment] = count + change

    def sent(self, target: int) -> int:
        """The newest sequence in the outbox for `target`."""
        sequence = self._sent.get(target)
        if sequence is None:
            raw = self.get(SENT + partition_bytes(target))
            sequence = 0 if raw is None else unpack(raw)
        return sequence

    def set_sent(self, target: int, sequence: int) -> None:
        self._sent[target] = sequence

    def taken(self, source: int) -> int:
        """The newest sequence taken from `source`."""
        sequence = self._taken.get(source)
        if sequence is None:
            raw = self.get(TAKEN + partition_bytes(source))
            sequence = 0 if raw is None else unpack(raw)
        return sequence

    def set_taken(self, source: int, sequence: int) -> None:
        self._taken[source] = sequence

    # -- reminders -------------------------------------------------------------------------------------------------------

    def remind_of(self, due_ms: int) -> None:
        """Once per transaction is enough, unless it is earlier."""
        if due_ms < self._armed_ms:
            self._armed_ms = due_ms
            self.effects.append(ArmTimer(due_ms))

    def is_first_for(self, target: int) -> bool:
        """Whether nothing was sent to `target` yet in this transaction."""
        if target in self._flushing:
            return False
        self._flushing[target] = None
        return True

    def is_here(self, ident: bytes) -> bool:
        return partition_of(ident, self.partitions) == self.partition
