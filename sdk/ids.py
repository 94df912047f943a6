"""Ids: of invocations, awakeables, objects and effects, how they are derived, and the partition that each belongs to."""

from __future__ import annotations

from hashlib import blake2b
from typing import Final, NewType

#: 16 bytes: the partition key (32 bits, big-endian), then 96 bits that are random or derived.
InvocationId = NewType("InvocationId", bytes)

ID_BYTES: Final = 16
_ID_PREFIX: Final = "inv_"
_AWAKEABLE_PREFIX: Final = "awk_"


class BadId(ValueError):
    """A text is not an id of the expected kind."""


def format_id(raw: bytes) -> str:
    return _ID_PREFIX + raw.hex()


def parse_id(text: str) -> InvocationId:
    return InvocationId(_parse(text, _ID_PREFIX, ID_BYTES))


def format_awakeable(invocation: bytes, index: int) -> str:
    """An awakeable is a step of an invocation that any client or handler with this id may complete."""
    return _AWAKEABLE_PREFIX + invocation.hex() + index.to_bytes(4, "big").hex()


def parse_awakeable(text: str) -> tuple[InvocationId, int]:
    raw = _parse(text, _AWAKEABLE_PREFIX, ID_BYTES + 4)
    return InvocationId(raw[:ID_BYTES]), int.from_bytes(raw[ID_BYTES:], "big")


def _parse(text: str, prefix: str, size: int) -> bytes:
    body = text.removeprefix(prefix)
    if body == text or len(body) != 2 * size or not body.isascii():
        raise BadId(f"an id of this kind must be {prefix} followed by {2 * size} hexadecimal digits")
    try:
        return bytes.fromhex(body)
    except ValueError:
        raise BadId(f"an id of this kind must be {prefix} followed by {2 * size} hexadecimal digits") from None


def derive(size: int, *parts: bytes) -> bytes:
    """Parts are length-prefixed, so that no two lists of parts are hashed alike."""
    hasher = blake2b(digest_size=size)
    for part in parts:
        hasher.update(len(part).to_bytes(4, "big"))
        hasher.update(part)
    return hasher.digest()


def partition_key(service: str, key: str) -> bytes:
    """Where a keyed service's key lives: all its invocations share these first four bytes of their ids."""
    return derive(4, b"key", service.encode(), key.encode())


def object_id(service: str, key: str) -> bytes:
    """One virtual object or workflow, as the tables of its partition name it."""
    return derive(16, b"object", service.encode(), key.encode())


def new_id(service: str, key: str | None, entropy: bytes) -> InvocationId:
    """A fresh id from 16 random bytes. Without a key the first four of them choose the partition."""
    assert len(entropy) == ID_BYTES
    head = partition_key(service, key) if key is not None else entropy[:4]
    return InvocationId(head + entropy[4:])


def idempotent_id(service: str, key: str | None, handler: str, idempotency_key: str) -> InvocationId:
    """The same request gives the same id, so a second one finds the first."""
    tail = derive(12, b"idempotent", service.encode(), (key or "").encode(), handler.encode(), idempotency_key.encode())
    head = partition_key(service, key) if key is not None else tail[:4]
    return InvocationId(head + tail)


def workflow_id(service: str, key: str) -> InvocationId:
    """A workflow runs once per key: the key decides the id of its main handler's invocation."""
    return InvocationId(partition_key(service, key) + derive(12, b"workflow", service.encode(), key.encode()))


def child_id(caller: bytes, index: int, service: str, key: str | None, *, spread: bool) -> InvocationId:
    """The id of what step `index` of `caller` calls or sends: known before the step is journaled, on both sides.

    Without a key, a call stays in its caller's partition, because the caller waits for it; sends spread over all partitions.
    """
    tail = derive(12, b"child", caller, index.to_bytes(4, "big"))
    if key is not None:
        return InvocationId(partition_key(service, key) + tail)
    return InvocationId((tail[-4:] if spread else caller[:4]) + tail)


def partition_of(raw: bytes, partitions: int) -> int:
    """Which of `partitions` an id belongs to: ranges of equal size over its first 32 bits."""
    return int.from_bytes(raw[:4], "big") * partitions >> 32


def effect_key(invocation: bytes, step_key: str) -> str:
    """Stable over attempts and restarts of processes: what to hand to a payment provider as idempotency key."""
    return "eff_" + derive(16, b"effect", invocation, step_key.encode()).hex()
