"""The records of a partition, decoded.

Their fields are packed in the order they are written here. New ones go to the end, with a default, so that what an older
release stored is still read. Payloads are never in them: they are rewritten with every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, Final

import msgpack

from holdfast.statemachine.levels import FIRST, trimmed

#: One packer for all: what it is given is packed at once and in whole, so there is nothing to share.
pack: Final = msgpack.Packer(autoreset=True).pack
unpack: Final = msgpack.unpackb


class End:
    """How an invocation ended."""

    NONE: Final = 0  # not yet
    SUCCEEDED: Final = 1
    FAILED: Final = 2
    CANCELLED: Final = 3
    KILLED: Final = 4


END_NAMES: Final = {value: name.lower() for name, value in vars(End).items() if name[0] != "_"}


@dataclass(slots=True)
class Invocation:
    """What is rewritten with every step of an invocation. `status` stays first: see STATUS_AT."""

    id: bytes  # The key; not packed.
    status: int
    epoch: int  # of the newest attempt; 0 before the first
    service: str
    handler: str
    key: str | None
    mode: int
    oid: bytes  # the id of the object or workflow; empty for a handler without a key
    created_ms: int
    since_ms: int  # when it came to its status
    retention_ms: int
    caller: bytes | None
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
    deployment: str | None = None
    failures: int = 0  # of attempts, since the last progress
    failing_since_ms: int = 0
    failures_total: int = 0
    origin: bytes = b""  # what it was restarted from; empty: nothing
    end: int = End.NONE
    code: int = 0  # of the failure it ended with; 0 for success
    request: bytes = b""  # what asked for it, if it was restarted in its place
    blobs: int = 0  # references in the journal
    blob_bytes: int = 0  # what they, and the outcome, stand for
    request_hash: bytes = b""  # of the body that came with its idempotency key
    losses: int = 0  # of streams under its attempts, since the last progress
    nearly_full: bool = False  # the journal passed four fifths of a limit
    step_failures: int = 0  # failed tries of steps that have no outcome yet
    lapses: int = 0  # attempts that ended neither in an outcome nor by waiting: see `history`
    chain: Sequence[str] = ()  # as in `Invoke`

    @property
    def seed(self) -> int:
        """For the handler's random numbers. A restarted invocation draws as the one whose steps it begins with."""
        return int.from_bytes((self.origin or self.id)[8:16], "big") >> 1


#: Where the status of a packed invocation stands, so that a scan need not unpack what it passes over.
STATUS_AT: Final = 3
_HEADER_BYTES: Final = 4

#: The defaults of the fields of each record since level 2, in order. They are left out while they have them.
_INVOCATION_LATER: Final[tuple[Any, ...]] = (b"", 0, False, 0, 0, ())
_OBJECT_LATER: Final[tuple[Any, ...]] = ()

_invocation_row = attrgetter(*[field.name for field in fields(Invocation)][1:])


def pack_invocation(record: Invocation) -> bytes:
    raw: bytes = pack(trimmed(_invocation_row(record), _INVOCATION_LATER))
    return raw


def unpack_invocation(ident: bytes, raw: bytes) -> Invocation:
    return Invocation(ident, *unpack(raw))


def pack_completed(record: Invocation, outcome: list[Any]) -> bytes:
    """The record, preceded by its length, then the outcome: a list of invocations need not look into outcomes."""
    raw = pack_invocation(record)
    packed: bytes = pack(outcome)
    return len(raw).to_bytes(_HEADER_BYTES, "big") + raw + packed


def unpack_completed(ident: bytes, raw: bytes) -> Invocation:
    end = _HEADER_BYTES + int.from_bytes(raw[:_HEADER_BYTES], "big")
    return Invocation(ident, *unpack(raw[_HEADER_BYTES:end]))


def unpack_completed_outcome(raw: bytes) -> list[Any]:
    outcome: list[Any] = unpack(raw[_HEADER_BYTES + int.from_bytes(raw[:_HEADER_BYTES], "big") :])
    return outcome


@dataclass(slots=True)
class Object:
    """A virtual object or a workflow: who holds its key, and what there is of it. Gone when there is nothing."""

    id: bytes  # The key; not packed.
    service: str
    key: str
    holder: bytes = b""  # the exclusive invocation that may write; empty: nobody
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


def unpack_object(oid: bytes, raw: bytes) -> Object:
    return Object(oid, *unpack(raw))


@dataclass(slots=True)
class Blob:
    """A large value: an object of the shared store, or pieces here, or as many of them as were staged."""

    id: bytes  # The key; not packed. sha256 and size.
    chunks: int = 0  # how many pieces are here
    refs: int = 0  # how many records refer to it
    due_ms: int = 0  # when it goes; 0: not while something refers to it
    object: str = ""  # its name in the shared store, below the partition's; empty: it is in pieces here


_blob_row = attrgetter(*[field.name for field in fields(Blob)][1:])


def pack_blob(record: Blob) -> bytes:
    raw: bytes = pack(_blob_row(record))
    return raw


def unpack_blob(ident: bytes, raw: bytes) -> Blob:
    return Blob(ident, *unpack(raw))


@dataclass(slots=True)
class Meta:
    """What a partition knows about itself. Limits are state, not settings: all replicas must draw the same line."""

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


#: There is nothing left to add to the index: see `listing`. No id has this length.
INDEXED: Final = b"\xff"
_META_LATER: Final = (FIRST, b"")
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
