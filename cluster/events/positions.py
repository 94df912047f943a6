"""How far a reader of events has come, in every partition: the id of an event, which any node understands.

Replicas apply the same entries, so a position in a partition means the same on each of them. An id also says of which
cluster it is, because the entries of another one have the same indexes.

    version (1 byte) · cluster (4 bytes) · number of partitions · for each: 0, or 1 + the index of an entry ·
    for each partition that is in the midst of an entry: its number, and how many changes of that entry were read

Numbers are LEB128. The text is base64url without padding.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Sequence
from typing import Final, TypeAlias

from holdfast.cluster.partition.changes import ALL, Position
from holdfast.sdk.ids import PartitionNumber

VERSION: Final = 1
MARK_BYTES: Final = 4
CHARS_MAX: Final = 8 * 1024  # Of an id: about as many as a header has.
_NUMBER_BYTES_MAX: Final = 10

#: By partition. None: nothing is known about it, because no node with a replica was reachable.
Positions: TypeAlias = Sequence[Position | None]


Around: TypeAlias = tuple[bytes, bytes, bytes]


class BadPositions(ValueError):
    """A text is not the id of an event."""


class OtherCluster(Exception):
    """The id of an event is of another cluster, or of another form of this one."""


class Encoder:
    """Makes the ids of one cluster."""

    def __init__(self, identity: str, partitions: int) -> None:
        self._mark = hashlib.sha256(identity.encode()).digest()[:MARK_BYTES]
        self._partitions = partitions
        self._head = bytes([VERSION]) + self._mark + number_bytes(partitions)

    def encode(self, positions: Positions) -> str:
        assert len(positions) == self._partitions, "one for each partition"
        return _text(self._head + b"".join(map(_index_bytes, positions)) + _midst(positions))

    def around(self, positions: Positions, number: PartitionNumber) -> Around:
        """What an id says about all partitions but one: before its index, after it, and in the end."""
        packed = [_index_bytes(each) for each in positions]
        others = [*positions[:number], None, *positions[number + 1 :]]
        return self._head + b"".join(packed[:number]), b"".join(packed[number + 1 :]), _midst(others)

    @staticmethod
    def encode_at(around: Around, number: PartitionNumber, position: Position) -> str:
        """The id with this position in one partition. Quick: there is one for each event."""
        before, after, rest = around
        index, count = position
        mine = b"" if count == ALL else number_bytes(number) + number_bytes(count)
        return _text(before + number_bytes(index + 1) + after + rest + mine)

    def decode(self, text: str) -> list[Position | None]:
        """Raises BadPositions or OtherCluster."""
        try:
            raw = base64.b64decode(text.encode() + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, UnicodeEncodeError):
            raise BadPositions from None
        if len(text) > CHARS_MAX or len(raw) < 1 + MARK_BYTES:
            raise BadPositions
        if raw[0] != VERSION or raw[1 : 1 + MARK_BYTES] != self._mark:
            raise OtherCluster
        numbers = _numbers(raw[1 + MARK_BYTES :])
        count = numbers[0] if numbers else 0
        indexes, rest = numbers[1 : 1 + count], numbers[1 + count :]
        if not numbers or len(indexes) != count or len(rest) % 2:
            raise BadPositions
        if count != self._partitions:
            raise OtherCluster
        found: list[Position | None] = [(each - 1, ALL) if each else None for each in indexes]
        for number, changes in zip(rest[::2], rest[1::2], strict=True):
            at = found[number] if number < count else None
            if at is None or changes > ALL:
                raise BadPositions
            found[number] = (at[0], changes)
        return found


def _index_bytes(position: Position | None) -> bytes:
    return b"\0" if position is None else number_bytes(position[0] + 1)


def _midst(positions: Positions) -> bytes:
    """The partitions that are in the midst of an entry."""
    return b"".join(
        number_bytes(number) + number_bytes(each[1])
        for number, each in enumerate(positions)
        if each is not None and each[1] != ALL
    )


def number_bytes(number: int) -> bytes:
    """LEB128: seven bits per byte, the lowest first; the highest bit says that more follow."""
    if number < 0x80:
        return bytes((number,))
    packed = bytearray()
    while number > 0x7F:
        packed.append(number & 0x7F | 0x80)
        number >>= 7
    packed.append(number)
    return bytes(packed)


def _numbers(raw: bytes) -> list[int]:
    found: list[int] = []
    number = shift = 0
    for byte in raw:
        number |= (byte & 0x7F) << shift
        shift += 7
        if shift > 7 * _NUMBER_BYTES_MAX:
            raise BadPositions
        if not byte & 0x80:
            found.append(number)
            number = shift = 0
    if shift:
        raise BadPositions
    return found


def _text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")
