"""The bytes that the journal writes: entries, records of groups and of the node, and the tables that hold them.

Every value carries a checksum that covers its key too, so a value under the wrong key is detected.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final
from zlib import crc32

import msgpack

from holdfast.log.messages import Entry, GroupId, NodeId

_HEADER: Final = struct.Struct(">QI")  # Term and checksum.
_SUBJECT: Final = struct.Struct(">IQQ")  # Group, index and term: covered by the checksum, with the command.
HEADER_BYTES: Final = _HEADER.size
_pack_header, _pack_subject = _HEADER.pack, _SUBJECT.pack
_CHECKSUM: Final = struct.Struct(">I")
CHECKSUM_AT: Final = slice(8, HEADER_BYTES)  # Of an entry on disk, which begins with its header.
KEY: Final = struct.Struct(">Q")  # The index of an entry, or the number of a row.

LOGS: Final = "log."  # Prefix of the names of the groups' own tables.
HARD: Final = "hard"  # One record per group: term, vote, configuration, base, and the commit index at the time.
COMMITS: Final = (
    "commits"  # The commit indices of `COMMITS_GROUPS` groups per record, because they change with every entry.
)
COMMITS_GROUPS: Final = 64
FILED: Final = "filed"  # One record: the first row that may not be wholly filed, and the oldest row.
PINS: Final = "pins"  # The disk id of each peer at the first session with it.
TOMBSTONES: Final = "tombstones"  # The promises we made in groups whose log we deleted.


@dataclass(frozen=True, slots=True)
class Configuration:
    """An epoch of a group: its members, and the entry of the previous epoch after which it begins."""

    epoch: int
    members: tuple[NodeId, ...]
    seed_index: int = 0
    seed_term: int = 0


@dataclass(frozen=True, slots=True)
class Tombstone:
    """What remains of a group that continued without us: its epoch at that time, and our vote.

    Without it, a late message of an older epoch would make us a member of that epoch again, with an empty log and a new
    vote. With it, we can still tell nodes that have not heard of the newer epoch (ADR 2, "Forgetting").
    """

    term: int
    vote: NodeId | None
    configuration: Configuration


def table_of(group: GroupId) -> str:
    return f"{LOGS}{group}"


def header_of(group: GroupId, entry: Entry) -> bytes:
    """The bytes before the command of an entry on disk: its term and checksum."""
    command, index, term = entry
    return _pack_header(term, crc32(command, crc32(_pack_subject(group, index, term))))


def decode_entry(group: GroupId, index: int, value: bytes) -> Entry | None:
    """Return None if the entry does not match its checksum."""
    term, checksum = _HEADER.unpack_from(value)
    command = value[HEADER_BYTES:]
    return (command, index, term) if checksum == crc32(command, crc32(_pack_subject(group, index, term))) else None


def with_checksum(key: bytes, record: bytes) -> bytes:
    return _CHECKSUM.pack(crc32(record, crc32(key))) + record


def checked(key: bytes, value: bytes) -> bytes | None:
    """The record in a value; None if it does not match its checksum."""
    if len(value) < _CHECKSUM.size or _CHECKSUM.unpack_from(value)[0] != crc32(value[4:], crc32(key)):
        return None
    return value[4:]


@dataclass(frozen=True, slots=True)
class Hard:
    """The record of one group in the table `hard`."""

    term: int
    vote: NodeId | None
    commit: int
    base_index: int
    base_term: int
    trim_from: int
    configuration: Configuration
    recent_from: int


def encode_hard(group: GroupId, hard: Hard) -> bytes:
    epoch = hard.configuration
    mine = (hard.term, hard.vote, hard.commit, hard.base_index, hard.base_term, hard.trim_from)
    lives = (epoch.epoch, epoch.members, epoch.seed_index, epoch.seed_term)
    record: bytes = msgpack.packb((*mine, *lives, hard.recent_from))
    return _CHECKSUM.pack(crc32(record, group)) + record


def decode_hard(group: GroupId, value: bytes | None) -> Hard | None:
    """Return None if the record is missing or does not match its checksum."""
    if value is None or len(value) <= 4 or _CHECKSUM.unpack_from(value)[0] != crc32(value[4:], group):
        return None
    fields = msgpack.unpackb(value[4:])
    term, vote, commit, base_index, base_term, trim_from = fields[:6]
    epoch, members, seed_index, seed_term, *rest = fields[6:]
    return Hard(
        term=term,
        vote=None if vote is None else NodeId(vote),
        commit=commit,
        base_index=base_index,
        base_term=base_term,
        trim_from=trim_from,
        configuration=Configuration(epoch, tuple(members), seed_index, seed_term),
        recent_from=rest[0] if rest else 0,  # Not in records of format 2.
    )


def encode_tombstone(key: bytes, tombstone: Tombstone) -> bytes:
    epoch = tombstone.configuration
    record: bytes = msgpack.packb(
        (tombstone.term, tombstone.vote, epoch.epoch, epoch.members, epoch.seed_index, epoch.seed_term)
    )
    return with_checksum(key, record)


def decode_tombstone(key: bytes, value: bytes) -> Tombstone | None:
    """Return None if the record does not match its checksum."""
    record = checked(key, value)
    if not record:
        return None
    term, vote, epoch, members, *seed = msgpack.unpackb(record)
    return Tombstone(term, None if vote is None else NodeId(vote), Configuration(epoch, tuple(members), *seed))
