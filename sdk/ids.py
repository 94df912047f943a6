"""Ids of invocations, awakeables, approvals, objects and effects: their derivation, and the partition of each."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, NamedTuple, NewType, TypeAlias, cast

#: 16 bytes: the partition key (32 bits, big-endian), then 96 bits that are random or derived.
InvocationId = NewType("InvocationId", bytes)
#: In the place of an invocation's id where there is none.
NO_INVOCATION: Final = InvocationId(b"")
#: 16 bytes that name a virtual object or a workflow, derived from its service and key.
ObjectId = NewType("ObjectId", bytes)
#: The first 4 bytes of the ids of all invocations with one service and key.
PartitionKey = NewType("PartitionKey", bytes)
#: From 0; the group of the log with its entries has another number (`cluster/groups.py`).
PartitionNumber = NewType("PartitionNumber", int)
#: The name of a node.
NodeId = NewType("NodeId", str)
#: dp_…: an endpoint with the services that it offered when it was registered.
DeploymentId = NewType("DeploymentId", str)
#: What belongs to a partition: an invocation, or a key.
Route: TypeAlias = InvocationId | PartitionKey

ID_BYTES: Final = 16
SECRET_BYTES: Final = 8  # of an awakeable or an approval
_ID_PREFIX: Final = "inv_"
_AWAKEABLE_PREFIX: Final = "awk_"
_APPROVAL_PREFIX: Final = "apr_"


class BadId(ValueError):
    """A text is not an id of the expected kind."""


def format_id(raw: InvocationId) -> str:
    return _ID_PREFIX + raw.hex()


def parse_id(text: str) -> InvocationId:
    return InvocationId(_parse(text, _ID_PREFIX, ID_BYTES))


class AwakeableId(NamedTuple):
    invocation: InvocationId
    step: int
    secret: bytes  # Random, so that the id cannot be made from that of the invocation; empty before it was introduced.


def format_awakeable(invocation: InvocationId, index: int, secret: bytes = b"") -> str:
    """An awakeable is a step of an invocation that any client or handler with this id may complete."""
    return _AWAKEABLE_PREFIX + (invocation + index.to_bytes(4, "big") + secret).hex()


def parse_awakeable(text: str) -> AwakeableId:
    raw = _parse(text, _AWAKEABLE_PREFIX, ID_BYTES + 4, ID_BYTES + 4 + SECRET_BYTES)
    return AwakeableId(
        InvocationId(raw[:ID_BYTES]), int.from_bytes(raw[ID_BYTES : ID_BYTES + 4], "big"), raw[ID_BYTES + 4 :]
    )


class ApprovalId(NamedTuple):
    invocation: InvocationId
    step: int
    secret: bytes  # Random; empty in the name of an approval, which is for people who have the role to decide.


def format_approval(invocation: InvocationId, index: int, secret: bytes = b"") -> str:
    """An approval is a step of an invocation. With the secret, its id permits a decision at the ingress. Without the secret,
    it is only a name."""
    return _APPROVAL_PREFIX + (invocation + index.to_bytes(4, "big") + secret).hex()


def parse_approval(text: str) -> ApprovalId:
    raw = _parse(text, _APPROVAL_PREFIX, ID_BYTES + 4, ID_BYTES + 4 + SECRET_BYTES)
    return ApprovalId(
        InvocationId(raw[:ID_BYTES]), int.from_bytes(raw[ID_BYTES : ID_BYTES + 4], "big"), raw[ID_BYTES + 4 :]
    )


def _parse(text: str, prefix: str, *sizes: int) -> bytes:
    body = text.removeprefix(prefix)
    digits = " or ".join(str(2 * size) for size in sizes)
    why = f"an id of this kind must be {prefix} followed by {digits} hexadecimal digits"
    if body == text or len(body) not in [2 * size for size in sizes] or not body.isascii():
        raise BadId(why)
    try:
        raw = bytes.fromhex(body)
    except ValueError:
        raise BadId(why) from None
    if len(raw) not in sizes:  # Spaces are not digits.
        raise BadId(why)
    return raw


def derive(size: int, *parts: bytes) -> bytes:
    """Parts are length-prefixed, so that different lists of parts never give the same hash input."""
    hasher = blake2b(digest_size=size)
    for part in parts:
        hasher.update(len(part).to_bytes(4, "big"))
        hasher.update(part)
    return hasher.digest()


def partition_key(service: str, key: str) -> PartitionKey:
    """The partition key of a service's key: all its invocations share these first four bytes of their ids."""
    return PartitionKey(derive(4, b"key", service.encode(), key.encode()))


def object_id(service: str, key: str) -> ObjectId:
    """The id of one virtual object or workflow in the tables of its partition."""
    return ObjectId(derive(16, b"object", service.encode(), key.encode()))


def new_id(service: str, key: str | None, entropy: bytes) -> InvocationId:
    """A fresh id from 16 random bytes. Without a key the first four of them choose the partition."""
    assert len(entropy) == ID_BYTES
    head = partition_key(service, key) if key is not None else entropy[:4]
    return InvocationId(head + entropy[4:])


def idempotent_id(service: str, key: str | None, handler: str, idempotency_key: str) -> InvocationId:
    """The same request gives the same id, so a second request finds the first."""
    tail = derive(12, b"idempotent", service.encode(), (key or "").encode(), handler.encode(), idempotency_key.encode())
    head = partition_key(service, key) if key is not None else tail[:4]
    return InvocationId(head + tail)


def workflow_id(service: str, key: str) -> InvocationId:
    """A workflow runs once per key: the key decides the id of its main handler's invocation."""
    return InvocationId(partition_key(service, key) + derive(12, b"workflow", service.encode(), key.encode()))


def child_id(caller: InvocationId, index: int, service: str, key: str | None, *, spread: bool) -> InvocationId:
    """The id of the invocation that step `index` of `caller` calls or sends: both sides know it before the step is
    journaled.

    Without a key, a call stays in its caller's partition, because the caller waits for it; sends spread over all
    partitions.
    """
    tail = derive(12, b"child", caller, index.to_bytes(4, "big"))
    if key is not None:
        return InvocationId(partition_key(service, key) + tail)
    return InvocationId((tail[-4:] if spread else caller[:4]) + tail)


def partition_of(route: Route, partitions: int) -> PartitionNumber:
    """The partition, of `partitions`, that an invocation or a key belongs to: ranges of equal size over its first 32 bits."""
    return int.from_bytes(route[:4], "big") * partitions >> 32  # type: ignore[return-value]  # Hot: no call for a type.


def numbers_of(partitions: int) -> Sequence[PartitionNumber]:
    """The numbers of that many partitions."""
    return cast("Sequence[PartitionNumber]", range(partitions))


def effect_key(invocation: InvocationId, step_key: str) -> str:
    """The same in all attempts and processes: pass it to a payment provider as the idempotency key."""
    return "eff_" + derive(16, b"effect", invocation, step_key.encode()).hex()
