"""Reading a partition's state: for a new leader, for operators and for clients.

Every function takes a transaction that only reads, and sees what is committed. Long results come in slices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from hashlib import blake2b
from itertools import islice
from typing import Any, Final, NamedTuple

from holdfast.sdk.ids import DeploymentId, InvocationId, ObjectId, PartitionNumber, object_id
from holdfast.sdk.journal import Op
from holdfast.statemachine import blobs, listing, refs, retention, timers, values
from holdfast.statemachine.commands import Payload, Ref
from holdfast.statemachine.effects import (
    STATUS_NAMES,
    ArmTimer,
    DeleteObjects,
    DeliverNotices,
    Effect,
    FlushOutbox,
    RecoverAttempt,
    Status,
)
from holdfast.statemachine.records import (
    STATUS_AT,
    Count,
    End,
    Hook,
    Invocation,
    Meta,
    Object,
    unpack,
    unpack_completed,
    unpack_completed_outcome,
    unpack_hook,
    unpack_invocation,
    unpack_meta,
    unpack_object,
)
from holdfast.statemachine.tables import (
    ACTIVE,
    COMPLETED,
    DEPLOYMENT,
    FAILURE,
    GONE,
    HOOK,
    JOURNAL,
    META,
    OBJECT,
    OUTBOX,
    PENDING,
    PROMISE,
    SENT,
    SERVICE,
    VALUE,
    after,
    notices_of,
    outbox_key,
    parcel_key,
    partition_bytes,
    partition_in_key,
    step_bytes,
)
from holdfast.statemachine.txn import ReadTxn
from holdfast.statemachine.webhooks import HookId

#: The most records that one call of `list_invocations` examines. A filter that matches little must not hold up a node.
LOOKED_AT_MAX: Final = 10_000
_DONE: Final = Status.COMPLETED
_RUNNING: Final = Status.RUNNING
_STEPS_LOOKED_AT: Final = 100  # waiting steps of one invocation, for one that fails
_LAST_ERROR: Final = 3  # in the argument of a RUN that failed: see `steps.Tries`


# -- one invocation ------------------------------------------------------------------------------------------------------


def load(txn: ReadTxn, ident: InvocationId) -> Invocation | None:
    """Active or completed."""
    raw = txn.get(ACTIVE + ident)
    if raw is not None:
        return unpack_invocation(ident, raw)
    raw = txn.get(COMPLETED + ident)
    return None if raw is None else unpack_completed(ident, raw)


def outcome(txn: ReadTxn, ident: InvocationId) -> list[Any] | None:
    """Of a completed invocation."""
    raw = txn.get(COMPLETED + ident)
    return None if raw is None else unpack_completed_outcome(raw)


def journal(txn: ReadTxn, ident: InvocationId, start: int, limit: int) -> list[bytes]:
    """At most `limit` packed steps from `start` on."""
    first, end = JOURNAL + ident + step_bytes(start), JOURNAL + ident + step_bytes(min(start + limit, 2**32 - 1))
    return [raw for _, raw in txn.scan(first, end)]


class FailedAttempt(NamedTuple):
    epoch: int
    at_ms: int
    code: int
    message: str
    kind: str
    extra: dict[str, Any] | None = None  # as in `sdk.journal.Failure`


def last_failure(txn: ReadTxn, ident: InvocationId) -> FailedAttempt | None:
    """The newest attempt that failed."""
    raw = txn.get(FAILURE + ident)
    return None if raw is None else FailedAttempt(*unpack(raw))


class ShownFailure(NamedTuple):
    """Why an invocation failed, or why it is not done yet. New fields go to the end, with a default."""

    code: int | None  # None: a step failed, which has no code
    message: str
    kind: str


def shown_failure(txn: ReadTxn, record: Invocation) -> ShownFailure | None:
    """The failure that a completed invocation ended with, or the last one of an active invocation."""
    if record.status == _DONE:
        ended = outcome(txn, record.id) if record.end != End.SUCCEEDED else None
        return ShownFailure(*ended[1:4]) if ended is not None and ended[0] == 1 else None
    if record.step_failures:
        for _, step in waiting_steps(txn, record.id, _STEPS_LOOKED_AT):
            if step[0] == Op.RUN and len(step[2]) > _LAST_ERROR:
                return ShownFailure(None, step[2][_LAST_ERROR], "")
    failure = last_failure(txn, record.id) if record.failures_total or record.lapses else None
    return ShownFailure(failure.code, failure.message, failure.kind) if failure is not None else None


def completed_ms(record: Invocation) -> int:
    """When it completed; 0: it has not."""
    return record.since_ms if record.status == _DONE else 0


def paused(txn: ReadTxn, ids: list[InvocationId]) -> list[InvocationId]:
    """Which of these are paused."""
    found = [(ident, txn.get(ACTIVE + ident)) for ident in ids]
    return [ident for ident, raw in found if raw is not None and raw[STATUS_AT] == Status.PAUSED]


def waiting_steps(txn: ReadTxn, ident: InvocationId, limit: int) -> list[tuple[int, list[Any]]]:
    """At most `limit` steps that wait for an outcome: index and step."""
    prefix, found = PENDING + ident, []
    for key, _ in txn.scan(prefix, after(prefix)):
        raw = txn.get(JOURNAL + key[1:])
        if raw is not None:
            found.append((int.from_bytes(key[17:], "big"), unpack(raw)))
        if len(found) >= limit:
            break
    return found


def shown_status(record: Invocation) -> Status:
    """The status for people. An invocation whose step failed and will be retried is shown as backing off, whatever its
    attempt does meanwhile."""
    failing = record.step_failures and record.status in (Status.RUNNING, Status.SUSPENDED)
    return Status.BACKING_OFF if failing else record.status


# -- many invocations --------------------------------------------------------------------------------------------------


class Filter(NamedTuple):
    """The conditions of a list of invocations. None: no condition."""

    statuses: tuple[int, ...] | None = None
    service: str | None = None
    handler: str | None = None
    key: str | None = None
    deployment: DeploymentId | None = None
    created_before_ms: int | None = None
    ends: tuple[int, ...] | None = None  # how it completed: see `records.End`
    created_since_ms: int | None = None
    idempotency_key: str | None = None
    key_prefix: str | None = None
    failure_code: int | None = None
    failure: str | None = None  # contained in the message or the kind of its failure, in lower case
    parent: InvocationId | None = None
    completed_since_ms: int | None = None
    completed_before_ms: int | None = None
    tags: Sequence[Sequence[str]] = ()  # names and values: all of them
    root: InvocationId | None = (
        None  # in the tree of calls below this one. Records cannot tell: see `routing.families`.
    )

    def matches(self, record: Invocation) -> bool:
        """Whether the record alone lets it pass. `admits` looks at its failure, too."""
        return (
            (self.statuses is None or shown_status(record) in self.statuses)
            and (self.service is None or record.service == self.service)
            and (self.handler is None or record.handler == self.handler)
            and (self.key is None or record.key == self.key)
            and (self.deployment is None or record.deployment == self.deployment)
            and (self.created_before_ms is None or record.created_ms < self.created_before_ms)
            and (self.ends is None or (record.status == _DONE and record.end in self.ends))
            and (self.created_since_ms is None or record.created_ms >= self.created_since_ms)
            and (self.idempotency_key is None or record.idempotency_key == self.idempotency_key)
            and (self.key_prefix is None or (record.key is not None and record.key.startswith(self.key_prefix)))
            and (self.parent is None or record.caller == self.parent)
            and (self.completed_since_ms is None or completed_ms(record) >= max(self.completed_since_ms, 1))
            and (self.completed_before_ms is None or 0 < completed_ms(record) < self.completed_before_ms)
            and (not self.tags or _has_tags(record, self.tags))
        )

    @property
    def asks_for_failures(self) -> bool:
        return self.failure_code is not None or self.failure is not None


def _has_tags(record: Invocation, wanted: Sequence[Sequence[str]]) -> bool:
    tags = record.tags or {}
    return all(tags.get(name) == value for name, value in wanted)


def admits(txn: ReadTxn, wanted: Filter, record: Invocation) -> bool:
    if not wanted.matches(record):
        return False
    if not wanted.asks_for_failures:
        return True
    found = shown_failure(txn, record)
    return (
        found is not None
        and wanted.failure_code in (None, found.code)
        and (wanted.failure is None or any(wanted.failure in text.lower() for text in (found.message, found.kind)))
    )


def list_invocations(
    txn: ReadTxn, wanted: Filter, after_cursor: bytes, limit: int
) -> tuple[list[Invocation], bytes | None]:
    """At most `limit` invocations that match, active ones first, and the cursor of the next page (None: this is the
    last).

    A page may be short or empty and still have a next page: see LOOKED_AT_MAX.
    """
    found: list[Invocation] = []
    looked_at = 0
    for table in (ACTIVE, COMPLETED):
        if after_cursor[:1] > table:
            continue
        if wanted.statuses is not None and not any(
            (status == _DONE) == (table == COMPLETED) for status in wanted.statuses
        ):
            continue
        first = after_cursor + b"\0" if after_cursor[:1] == table else table
        for key, raw in txn.scan(first, after(table)):
            ident = InvocationId(key[1:])
            record = unpack_invocation(ident, raw) if table == ACTIVE else unpack_completed(ident, raw)
            looked_at += 1
            if admits(txn, wanted, record):
                found.append(record)
            if len(found) >= limit or looked_at >= LOOKED_AT_MAX:
                return found, key
    return found, None


# -- objects -----------------------------------------------------------------------------------------------------------


def load_object(txn: ReadTxn, service: str, key: str) -> Object | None:
    oid = object_id(service, key)
    raw = txn.get(OBJECT + oid)
    return None if raw is None else unpack_object(oid, raw)


def eager_state(txn: ReadTxn, oid: ObjectId, bytes_max: int) -> tuple[dict[str, Payload], bool]:
    """State up to this many bytes, and whether that is all of it. A value in the shared store stays a reference."""
    prefix, size = VALUE + oid, 0
    found: dict[str, Payload] = {}
    for key, raw in txn.scan(prefix, after(prefix)):
        payload = values.stored(txn, key, raw)
        size += len(key) + refs.size_of(payload)
        if size > bytes_max:
            return found, False
        if not isinstance(payload, bytes) and not place(txn, payload.data):
            payload = whole(txn, payload)
        found[key[17:].decode()] = payload
    return found, True


def state_value(txn: ReadTxn, oid: ObjectId, name: str) -> Payload | None:
    key = VALUE + oid + name.encode()
    raw = txn.get(key)
    return None if raw is None else values.stored(txn, key, raw)


def promise_outcome(txn: ReadTxn, oid: ObjectId, name: str) -> list[Any] | None:
    """None: the promise has no outcome yet."""
    raw = txn.get(PROMISE + oid + name.encode())
    found: list[Any] | None = None if raw is None else unpack(raw)[0]
    return found


# -- large values --------------------------------------------------------------------------------------------------------


class Gone(LookupError):
    """The blob of a reference is not here any more: the record that held it has released it since."""


def chunk(txn: ReadTxn, blob: bytes, index: int) -> bytes:
    """A piece of a blob, as it was staged. Raises Gone, also for a blob in the shared store: see `place`."""
    found = blobs.find(txn, blob)
    data = txn.get(blobs.chunk_key(blob, index)) if found is not None and blobs.is_whole(found) else None
    if data is None:
        raise Gone(f"blob {blob[:32].hex()} is not here")
    return data


def place(txn: ReadTxn, blob: bytes) -> str:
    """The name of its object in the shared store; empty if the blob is in pieces here. Raises Gone."""
    found = blobs.find(txn, blob)
    if found is None or not blobs.is_whole(found):
        raise Gone(f"blob {blob[:32].hex()} is not here")
    return found.object


def objects_to_delete(txn: ReadTxn, limit: int) -> list[str]:
    """At most `limit` names of unused objects in the shared store."""
    return [key[1:].decode() for key, _ in islice(txn.scan(GONE, after(GONE)), limit)]


def whole(txn: ReadTxn, ref: Ref) -> bytes:
    """The value of a reference, if it is in pieces here. Raises Gone."""
    count = blobs.chunks_of(refs.stored_size(ref.data))
    return refs.restored(ref, b"".join([chunk(txn, ref.data, index) for index in range(count)]))


def whole_step_size(raw: bytes) -> int:
    """The approximate size of a packed step with the values in place of the references."""
    step = unpack(raw)
    return len(raw) + sum(refs.size_of(ref) for ref in refs.in_step(step[0], step[2], step[5]))


def whole_step(txn: ReadTxn, raw: bytes) -> bytes:
    """A packed step with the values in place of the references. Raises Gone."""
    return refs.filled_step(raw, partial(whole, txn))


def whole_outcome(txn: ReadTxn, outcome: list[Any] | None) -> list[Any] | None:
    """Raises Gone."""
    return refs.filled_outcome(outcome, partial(whole, txn))


# -- what a leader needs -------------------------------------------------------------------------------------------------


def meta(txn: ReadTxn) -> Meta:
    raw = txn.get(META)
    return Meta() if raw is None else unpack_meta(raw)


def next_due(txn: ReadTxn) -> int | None:
    """When `FireTimers` next has something to do."""
    about = meta(txn)
    dues = (timers.next_due(txn), retention.next_due(txn, about), blobs.next_due(txn), listing.next_due(about))
    found = [due_ms for due_ms in dues if due_ms is not None]
    return min(found) if found else None


def due_timers(txn: ReadTxn, now_ms: int, limit: int) -> tuple[int, int]:
    """(how many timers are due at this time, at most `limit`; when the oldest of them was due, or 0)."""
    return timers.count_due(txn, now_ms, limit)


def outbox_length(txn: ReadTxn) -> int:
    """How many messages wait for other partitions."""
    total = 0
    for key, raw in txn.scan(SENT, after(SENT)):
        target = partition_in_key(key)
        for first, _ in txn.scan(outbox_key(target, 0), after(OUTBOX + partition_bytes(target))):
            total += int(unpack(raw)) - int.from_bytes(first[5:], "big") + 1
            break
    return total


def outbox(txn: ReadTxn, target: PartitionNumber, after_sequence: int, limit: int) -> tuple[int, list[bytes]]:
    """At most `limit` messages behind `after_sequence`, and the sequence of the first (0 if there is none)."""
    first = 0
    messages: list[bytes] = []
    for key, raw in txn.scan(outbox_key(target, after_sequence + 1), after(OUTBOX + partition_bytes(target))):
        first = first or int.from_bytes(key[5:], "big")
        messages.append(raw)
        if len(messages) >= limit:
            break
    return first, messages


def parcels(txn: ReadTxn, target: PartitionNumber, first: int, last: int) -> list[tuple[int, list[Ref]]]:
    """Those of these messages that refer to large values, with their references."""
    rows = txn.scan(parcel_key(target, first), parcel_key(target, last + 1))
    return [(int.from_bytes(key[5:], "big"), unpack(raw)) for key, raw in rows]


def outbox_targets(txn: ReadTxn) -> list[PartitionNumber]:
    """Partitions that messages are waiting for."""
    targets = [partition_in_key(key) for key, _ in txn.scan(SENT, after(SENT))]
    return [target for target in targets if outbox(txn, target, 0, 1)[1]]


def pending_effects(txn: ReadTxn, after_id: bytes, limit: int) -> tuple[list[Effect], bytes | None]:
    """A slice of what a new leader starts again, and the position of the next slice (None: this was the last).

    The first slice, at an empty position, has everything beside attempts. Each slice looks at no more than `limit` active
    invocations, in the order of their ids. Entries may be applied between two slices: what they change comes as effects of
    their own, so the slices and those effects together leave nothing out (`tests/statemachine/test_model.py`).
    """
    found: list[Effect] = [] if after_id else [*standing_effects(txn)]
    first = ACTIVE + after_id + b"\0" if after_id else ACTIVE
    for looked_at, (key, raw) in enumerate(txn.scan(first, after(ACTIVE)), start=1):
        if raw[STATUS_AT] == _RUNNING:
            record = unpack_invocation(InvocationId(key[1:]), raw)
            found.append(
                RecoverAttempt(
                    id=record.id,
                    epoch=record.epoch,
                    service=record.service,
                    handler=record.handler,
                    deployment=record.deployment,
                    key=record.key,
                )
            )
        if looked_at >= limit:
            return found, key[1:]
    return found, None


def standing_effects(txn: ReadTxn) -> Iterator[ArmTimer | DeleteObjects | DeliverNotices | FlushOutbox]:
    """What a new leader starts again beside attempts. Bounded by the number of partitions."""
    due_ms = next_due(txn)
    if due_ms is not None:
        yield ArmTimer(due_ms)
    if objects_to_delete(txn, 1):
        yield DeleteObjects()
    if any(hook.pending or hook.gone for hook in hooks(txn)):
        yield DeliverNotices()
    for target in outbox_targets(txn):
        yield FlushOutbox(target)


# -- webhooks ----------------------------------------------------------------------------------------------------------


def hooks(txn: ReadTxn) -> list[Hook]:
    """What each webhook wants, and how much waits for it."""
    return [unpack_hook(HookId(key[1:]), raw) for key, raw in txn.scan(HOOK, after(HOOK))]


class Notice(NamedTuple):
    sequence: int
    at_ms: int
    event: int  # see `webhooks.EVENTS`
    invocation: Invocation  # as it was then
    failure: list[Any] | None  # code, message, kind
    #: What an approval asks: its step, title, choices, assignee, and until when; 0: it has no deadline.
    approval: list[Any] | None = None


def notices(txn: ReadTxn, hook: HookId, limit: int) -> list[Notice]:
    """The oldest notices that wait for a hook."""
    found = []
    for key, raw in txn.scan(*notices_of(hook)):
        at_ms, event, ident, record, failure, *asked = unpack(raw)
        found.append(
            Notice(
                sequence=int.from_bytes(key[-8:], "big"),
                at_ms=at_ms,
                event=event,
                invocation=unpack_invocation(InvocationId(ident), record),
                failure=failure,
                approval=asked[0] if asked else None,
            )
        )
        if len(found) >= limit:
            break
    return found


# -- figures -----------------------------------------------------------------------------------------------------------


class ServiceStatistics(NamedTuple):
    by_status: dict[str, int]  # how many there are now
    invoked: int  # and how many there ever were
    succeeded: int
    failed: int
    cancelled: int
    killed: int
    attempts: int
    attempts_failed: int
    steps: int


class Statistics(NamedTuple):
    services: dict[str, ServiceStatistics]
    deployments: dict[DeploymentId, int]  # active invocations pinned to each
    completed: int
    completed_bytes: int
    blobs: int = 0  # large values, each counted once
    blob_bytes: int = 0  # of those that are in pieces here
    stored: int = 0  # of the large values, those that are in the shared store,
    stored_bytes: int = 0
    gone: int = 0  # and objects there that are still to be deleted

    @property
    def by_status(self) -> dict[str, int]:
        return {
            name: sum(service.by_status[name] for service in self.services.values()) for name in STATUS_NAMES.values()
        }


def statistics(txn: ReadTxn) -> Statistics:
    about = meta(txn)
    services = {key[1:].decode(): unpack(raw) for key, raw in txn.scan(SERVICE, after(SERVICE))}
    return Statistics(
        services={
            name: ServiceStatistics(
                {STATUS_NAMES[status]: counters[status] for status in STATUS_NAMES}, *counters[Count.INVOKED :]
            )
            for name, counters in services.items()
        },
        deployments={
            DeploymentId(key[1:].decode()): unpack(raw) for key, raw in txn.scan(DEPLOYMENT, after(DEPLOYMENT))
        },
        completed=about.completed,
        completed_bytes=about.completed_bytes,
        blobs=about.blobs,
        blob_bytes=about.blob_bytes,
        stored=about.stored,
        stored_bytes=about.stored_bytes,
        gone=about.gone,
    )


def digest(txn: ReadTxn) -> bytes:
    """A digest of all replicated state. Two replicas that applied the same entries have equal digests."""
    hasher = blake2b(digest_size=16)
    for key, value in txn.scan(b"\x01", b"\xff"):
        hasher.update(len(key).to_bytes(4, "big") + key + len(value).to_bytes(4, "big") + value)
    return hasher.digest()
