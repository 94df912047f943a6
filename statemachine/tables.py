"""The tables of a partition: one prefix byte each, and how their keys are made.

Numbers in keys are big-endian, so that the order of keys is their order. Active and completed invocations are apart: a
new leader reads the former and never the latter.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from holdfast.statemachine.levels import LEVEL, schema_of

#: The newest schema of the records below that this release reads. An older release refuses a state of a newer schema.
SCHEMA: Final = schema_of(LEVEL)

META: Final = b"M"  # the one record about the partition itself
ACTIVE: Final = b"A"  # id -> Invocation
COMPLETED: Final = b"C"  # id -> Invocation and its outcome
CREATED: Final = b"c"  # position (see `listing`) -> nothing: all invocations, newest first
JOURNAL: Final = b"J"  # id, step -> packed step
PENDING: Final = b"W"  # id, step -> operation (1 byte): the steps that wait for an outcome
LISTENER: Final = b"L"  # id, caller, step -> nothing: who else wants the outcome of `id`
FAILURE: Final = b"F"  # id -> the last failed attempt
HISTORY: Final = b"H"  # id -> the newest attempts that ended neither in an outcome nor by waiting
TIMER: Final = b"T"  # due, id, step -> nothing
EXPIRY: Final = b"E"  # due, id -> nothing: when a completed invocation is forgotten
OBJECT: Final = b"K"  # object id -> Object
QUEUE: Final = b"Q"  # object id, place -> id
VALUE: Final = b"S"  # object id, name -> payload; nothing for one that is kept as a blob, and then
LARGE: Final = b"s"  # object id, name -> reference (packed)
PROMISE: Final = b"P"  # object id, name -> Promise
OUTBOX: Final = b"O"  # target, sequence -> packed command
PARCEL: Final = b"x"  # target, sequence -> the references in that command, if there are any
SENT: Final = b"o"  # target -> the newest sequence in its outbox
TAKEN: Final = b"i"  # source -> the newest sequence taken from it
SERVICE: Final = b"N"  # service name -> counters
BLOB: Final = b"B"  # blob -> Blob
CHUNK: Final = b"b"  # blob, offset of the piece -> its bytes; none for one that is in the shared store
BLOB_DUE: Final = b"G"  # due, blob -> nothing: when one that nothing refers to goes
GONE: Final = b"g"  # name -> nothing: objects of the shared store that nothing refers to, until they are deleted
DEPLOYMENT: Final = b"D"  # deployment -> how many active invocations are pinned to it

#: The step of a timer that concerns the invocation itself: its start or its next attempt.
NO_STEP: Final = 0xFFFFFFFF
#: The step of a timer that concerns the promises of a workflow; its id is that of the object.
PROMISES_STEP: Final = 0xFFFFFFFE
TIME_MAX: Final = 2**63 - 1

step_bytes = Struct(">I").pack
long_bytes = Struct(">Q").pack
partition_bytes = Struct(">I").pack


def timer_key(due_ms: int, invocation: bytes, step: int = NO_STEP) -> bytes:
    return TIMER + long_bytes(due_ms) + invocation + step_bytes(step)


def expiry_key(due_ms: int, invocation: bytes) -> bytes:
    return EXPIRY + long_bytes(due_ms) + invocation


def outbox_key(target: int, sequence: int) -> bytes:
    return OUTBOX + partition_bytes(target) + long_bytes(sequence)


def parcel_key(target: int, sequence: int) -> bytes:
    return PARCEL + partition_bytes(target) + long_bytes(sequence)


def after(prefix: bytes) -> bytes:
    """The first key behind all that begin with `prefix`."""
    number = int.from_bytes(prefix, "big") + 1
    assert number >> 8 * len(prefix) == 0, "no table and no id is all ones from its first byte on"
    return number.to_bytes(len(prefix), "big")
