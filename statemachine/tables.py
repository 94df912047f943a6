"""The tables of a partition: one prefix byte each, and how their keys are made.

Numbers in keys are big-endian, so keys sort by number. Active and completed invocations are in separate tables: a new
leader reads the former and never the latter.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from holdfast.sdk.ids import InvocationId, ObjectId, PartitionNumber
from holdfast.statemachine.levels import LEVEL, schema_of
from holdfast.statemachine.webhooks import HookId

#: The newest schema that this release reads. A release refuses a state with a newer one.
SCHEMA: Final = schema_of(LEVEL)

META: Final = b"M"  # the one record about the partition itself
ACTIVE: Final = b"A"  # id -> Invocation
COMPLETED: Final = b"C"  # id -> Invocation and its outcome
CREATED: Final = b"c"  # position -> nothing: all invocations, newest first; see `listing`
TAGGED: Final = b"t"  # hashes of name and value, position -> nothing: see `tags`
FAILING: Final = b"f"  # code, position -> nothing: see `failing`
KEPT: Final = b"k"  # retention in milliseconds -> nothing: every one that a completed invocation ever had
JOURNAL: Final = b"J"  # id, step -> packed step
PENDING: Final = b"W"  # id, step -> operation (1 byte): the steps that wait for an outcome
LISTENER: Final = b"L"  # id, caller, step -> nothing: who else wants the outcome of `id`
FAILURE: Final = b"F"  # id -> the last failed attempt
HISTORY: Final = b"H"  # id -> the newest attempts that failed or were cut short: see `history`
TIMER: Final = b"T"  # due, id, step or mark -> nothing: see `timers`
EXPIRY: Final = b"E"  # due, id -> nothing: when a completed invocation is removed
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
BLOB_DUE: Final = b"G"  # due, blob -> nothing: when an unused blob is removed
GONE: Final = b"g"  # name -> nothing: unused objects of the shared store, until they are deleted
HOOK: Final = b"h"  # hook -> Hook
NOTICE: Final = b"n"  # hook, sequence -> what the hook is to be told: see `hooks`
APPROVAL: Final = b"p"  # since, id, step -> what lists filter by: see `approvals`
DEPLOYMENT: Final = b"D"  # deployment -> how many active invocations are pinned to it

#: Step numbers are below this. A larger number in the key of a timer is a mark: see `timers`.
STEP_END: Final = 0xFFFFFF00
TIME_MAX: Final = 2**63 - 1

step_bytes = Struct(">I").pack
long_bytes = Struct(">Q").pack
partition_bytes = Struct(">I").pack


def partition_in_key(key: bytes) -> PartitionNumber:
    """The other partition, of a key of SENT or TAKEN."""
    return PartitionNumber(int.from_bytes(key[1:], "big"))


POSITION_BYTES: Final = 24


def position(created_ms: int, ident: InvocationId) -> bytes:
    """The position of an invocation among all, newest first. Positions compare as bytes."""
    return long_bytes(TIME_MAX - min(max(created_ms, 0), TIME_MAX)) + ident


def created_at(where: bytes) -> int:
    """When the invocation at a position was created."""
    return TIME_MAX - int.from_bytes(where[:8], "big")


def kept_key(retention_ms: int) -> bytes:
    return KEPT + long_bytes(min(max(retention_ms, 0), TIME_MAX))


def timer_key(due_ms: int, ident: InvocationId | ObjectId, step_or_mark: int) -> bytes:
    return TIMER + long_bytes(due_ms) + ident + step_bytes(step_or_mark)


def approval_key(since_ms: int, ident: InvocationId, index: int) -> bytes:
    return APPROVAL + long_bytes(since_ms) + ident + step_bytes(index)


def expiry_key(due_ms: int, invocation: InvocationId) -> bytes:
    return EXPIRY + long_bytes(due_ms) + invocation


def outbox_key(target: PartitionNumber, sequence: int) -> bytes:
    return OUTBOX + partition_bytes(target) + long_bytes(sequence)


def parcel_key(target: PartitionNumber, sequence: int) -> bytes:
    return PARCEL + partition_bytes(target) + long_bytes(sequence)


def notice_key(hook: HookId, sequence: int) -> bytes:
    return NOTICE + hook + long_bytes(sequence)


def notices_of(hook: HookId) -> tuple[bytes, bytes]:
    """The range of the notices of a hook."""
    return NOTICE + hook, NOTICE + hook + b"\xff" * 9


def after(prefix: bytes) -> bytes:
    """The first key after all keys that begin with `prefix`."""
    number = int.from_bytes(prefix, "big") + 1
    assert number >> 8 * len(prefix) == 0, "no prefix consists of 0xff bytes alone"
    return number.to_bytes(len(prefix), "big")
