"""The records of a partition, decoded.

Fields are packed in the order in which they are declared. New ones go to the end, with a default, so that records of
older releases can be read. Records never hold payloads, because they are rewritten with every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from operator import attrgetter
from typing import Any, Final

import msgpack

from holdfast.sdk.ids import NO_INVOCATION, DeploymentId, InvocationId, ObjectId
from holdfast.statemachine.commands import CALL_DEPTH_MAX
from holdfast.statemachine.effects import Status
from holdfast.statemachine.levels import FIRST, trimmed
from holdfast.statemachine.webhooks import HookId

#: One packer is enough: each call packs a whole value, so no state is shared between calls.
pack: Final = msgpack.Packer(autoreset=True).pack
unpack: Final = msgpack.unpackb


#: The object of a handler without a key.
NO_OBJECT: Final = ObjectId(b"")


class End(IntEnum):
    """How an invocation ended."""

    NONE = 0  # not yet
    SUCCEEDED = 1
    FAILED = 2
    CANCELLED = 3
    KILLED = 4


END_NAMES: Final = {end: end.name.lower() for end in End}


@dataclass(slots=True)
class Invocation:
    """The part of an invocation that every step rewrites. `status` stays first: see STATUS_AT."""

    id: InvocationId  # The key; not packed.
    status: Status
    epoch: int  # of the newest attempt; 0 before the first
    service: str
    handler: str
    key: str | None
    mode: int
    oid: ObjectId  # the id of the object or workflow; empty for a handler without a key
    created_ms: int
    since_ms: int  # when it came to its status
    retention_ms: int
    caller: InvocationId | None
    caller_step: int
    idempotency_key: str | None
    due_ms: int = 0  # scheduled: its start; backing off: its next attempt; completed: when it is forgotten
    length: int = 0  # of the journal
    size: int = 0  # of the journal, in bytes
    order: int = 0  # of the newest event in the journal
    pending: int = 0  # steps that wait for an outcome
    listeners: int = 0  # beside the caller
    place: int = 0  # in the queue of its key
    cancelled: bool = False  # a cancellation that no step has noticed yet
    deployment: DeploymentId | None = None
    failures: int = 0  # of attempts, since the last progress
    failing_since_ms: int = 0
    failures_total: int = 0
    origin: InvocationId = NO_INVOCATION  # what it was restarted from; empty: nothing
    end: End = End.NONE
    code: int = 0  # of the failure it ended with; 0 for success
    request: InvocationId = NO_INVOCATION  # what asked for it, if it was restarted in its place
    blobs: int = 0  # references in the journal
    blob_bytes: int = 0  # what they, and the outcome, stand for
    request_hash: bytes = b""  # of the body that came with its idempotency key
    losses: int = 0  # of streams under its attempts, since the last progress
    nearly_full: bool = False  # the journal passed four fifths of a limit
    step_failures: int = 0  # failed tries of steps that have no outcome yet
    lapses: int = 0  # attempts that ended neither in an outcome nor by waiting: see `history`
    chain: Sequence[str] = ()  # as in `Invoke`
    depth: int = 0  # as in `Invoke`
    callers: Sequence[str] = ()  # as in `Invoke`

    @property
    def seed(self) -> int:
        """The seed of the handler's random numbers. A restarted invocation uses that of the invocation whose steps it
        begins with."""
        return int.from_bytes((self.origin or self.id)[8:16], "big") >> 1


@dataclass(slots=True)
class Step:
    """A step of a journal, decoded to be changed. The fields are those of `sdk.journal.Step`."""

    op: int
    key: str
    argument: list[Any]
    made: int
    done: int
    outcome: list[Any] | None
    abandoned: bool
    journaled_ms: int | None = None  # Since level 2. None: the step was last changed before.
    began_ms: int = 0
    epoch: int = 0

    @property
    def is_pending(self) -> bool:
        """Whether its outcome may still come."""
        return not self.done and not self.abandoned


_FIRST_STEP_FIELDS: Final = 7
_step_row = attrgetter(*[field.name for field in fields(Step)])


def pack_step(step: Step) -> bytes:
    row = _step_row(step)
    raw: bytes = pack(row[:_FIRST_STEP_FIELDS] if step.journaled_ms is None else row)
    return raw


def unpack_step(raw: bytes) -> Step:
    return Step(*unpack(raw))


#: The offset of the status in a packed invocation, so that a scan can skip others without unpacking them.
STATUS_AT: Final = 3
_HEADER_BYTES: Final = 4

#: The defaults of the fields that each record got in level 2, in order. They are left out while they have their defaults.
_INVOCATION_LATER: Final[tuple[Any, ...]] = (b"", 0, False, 0, 0, (), 0, ())
_OBJECT_LATER: Final[tuple[Any, ...]] = ()

_STATUSES: Final = tuple(Status)
_ENDS: Final = tuple(End)
assert [*_STATUSES] == [*range(len(_STATUSES))] and [*_ENDS] == [*range(len(_ENDS))]

_invocation_row = attrgetter(*[field.name for field in fields(Invocation)][1:])
_INVOCATION_BASE: Final = len(fields(Invocation)) - 1 - len(_INVOCATION_LATER)


def pack_invocation(record: Invocation) -> bytes:
    row = _invocation_row(record)
    is_plain = row[_INVOCATION_BASE:] == _INVOCATION_LATER  # As mostly; `trimmed` would cost a microsecond.
    raw: bytes = pack(row[:_INVOCATION_BASE] if is_plain else trimmed(row, _INVOCATION_LATER))
    return raw


def unpack_invocation(ident: InvocationId, raw: bytes) -> Invocation:
    return _invocation(ident, raw)


def _invocation(ident: InvocationId, raw: bytes) -> Invocation:
    record = Invocation(ident, *unpack(raw))
    record.status = _STATUSES[record.status]
    record.end = _ENDS[record.end]
    return record


def pack_completed(record: Invocation, outcome: list[Any]) -> bytes:
    """The record, preceded by its length, then the outcome, so that a list of invocations need not decode outcomes."""
    raw = pack_invocation(record)
    packed: bytes = pack(outcome)
    return len(raw).to_bytes(_HEADER_BYTES, "big") + raw + packed


def unpack_completed(ident: InvocationId, raw: bytes) -> Invocation:
    end = _HEADER_BYTES + int.from_bytes(raw[:_HEADER_BYTES], "big")
    return _invocation(ident, raw[_HEADER_BYTES:end])


def unpack_completed_outcome(raw: bytes) -> list[Any]:
    outcome: list[Any] = unpack(raw[_HEADER_BYTES + int.from_bytes(raw[:_HEADER_BYTES], "big") :])
    return outcome


@dataclass(slots=True)
class Object:
    """A virtual object or a workflow: the holder of its key, and the size of its state. It is removed when it is idle."""

    id: ObjectId  # The key; not packed.
    service: str
    key: str
    holder: InvocationId = NO_INVOCATION  # the exclusive invocation that may write; empty: nobody
    waiting: int = 0  # behind the holder
    place: int = 0  # of the newest in the queue
    names: int = 0  # of its state
    size: int = 0  # of its state, in bytes
    promises: int = 0

    @property
    def is_idle(self) -> bool:
        return not (self.holder or self.waiting or self.names or self.promises)


_object_row = attrgetter(*[field.name for field in fields(Object)][1:])


def pack_object(record: Object) -> bytes:
    raw: bytes = pack(trimmed(_object_row(record), _OBJECT_LATER))
    return raw


def unpack_object(oid: ObjectId, raw: bytes) -> Object:
    return Object(oid, *unpack(raw))


@dataclass(slots=True)
class Blob:
    """A large value: an object of the shared store, or pieces here, perhaps not all of them yet."""

    name: bytes  # The key; not packed. sha256 and size.
    chunks: int = 0  # how many pieces are here
    refs: int = 0  # how many records refer to it
    due_ms: int = 0  # when it is removed; 0: something refers to it
    object: str = ""  # its name in the shared store, below the partition's; empty: it is in pieces here


_blob_row = attrgetter(*[field.name for field in fields(Blob)][1:])


def pack_blob(record: Blob) -> bytes:
    raw: bytes = pack(_blob_row(record))
    return raw


def unpack_blob(name: bytes, raw: bytes) -> Blob:
    return Blob(name, *unpack(raw))


@dataclass(slots=True)
class Hook:
    """What a webhook wants to be told, and how many notices wait for it."""

    id: HookId  # The key; not packed.
    events: int = 0
    services: Sequence[str] = ()  # Empty: all.
    gone: bool = False  # It was deleted. The record stays until its notices are removed.
    pending: int = 0
    dropped: int = 0


_hook_row = attrgetter(*[field.name for field in fields(Hook)][1:])


def pack_hook(record: Hook) -> bytes:
    raw: bytes = pack(_hook_row(record))
    return raw


def unpack_hook(hook: HookId, raw: bytes) -> Hook:
    return Hook(hook, *unpack(raw))


@dataclass(slots=True)
class Meta:
    """The record about the partition itself. Limits are state, not settings: all replicas must apply the same ones."""

    now_ms: int = 0  # the newest time seen: it never goes back
    term: int = 0  # of the leader that announced itself last
    leader: str = ""
    completed: int = 0
    completed_bytes: int = 0
    journal_steps_max: int = 100_000
    journal_bytes_max: int = 64 * 1024 * 1024
    completed_max: int = 1_000_000
    completed_bytes_max: int = 4 * 1024 * 1024 * 1024
    journal_blob_bytes_max: int = 256 * 1024 * 1024  # of large values in one journal
    blobs: int = 0
    blob_bytes: int = 0  # of the pieces that are here
    stored: int = 0  # of the blobs, those that are in the shared store,
    stored_bytes: int = 0
    gone: int = 0  # and objects there that are still to be deleted
    level: int = FIRST  # see `levels`
    indexed: bytes = b""  # up to which id invocations of before level 2 are in the index; INDEXED: all of them
    call_depth_max: int = CALL_DEPTH_MAX
    hooks: int = 0  # the version of the webhooks that the partition knows; 0: it never had any
    notices: int = 0  # the newest notice for a webhook


#: The index is complete: see `listing`. No id has this length.
INDEXED: Final = b"\xff"
_META_LATER: Final = (FIRST, b"", CALL_DEPTH_MAX, 0, 0)
_meta_row = attrgetter(*[field.name for field in fields(Meta)])


def pack_meta(record: Meta) -> bytes:
    raw: bytes = pack(trimmed(_meta_row(record), _META_LATER))
    return raw


def unpack_meta(raw: bytes) -> Meta:
    return Meta(*unpack(raw))


class Count:
    """Offsets in the counters of a service. The first seven are the numbers of invocations by `Status`."""

    INVOKED: Final = 7
    SUCCEEDED: Final = 8
    FAILED: Final = 9
    CANCELLED: Final = 10
    KILLED: Final = 11
    ATTEMPTS: Final = 12
    ATTEMPTS_FAILED: Final = 13
    STEPS: Final = 14


COUNTS: Final = 15
