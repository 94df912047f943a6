"""Rows: the entries that one commit appended to several groups, written together as one value of the table `recent`.

A commit that adds an entry to each of many tables writes several pages per table; a row is written once. An entry stays in its
row. Later, many at a time, the *places* of entries are written to the table of their group: the number of the row, and the
offset and length of the entry in it (ADR 8).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple
from zlib import crc32

import msgpack

from holdfast.log.messages import Entry, GroupId

RECENT: Final = "recent"

_ROW: Final = struct.Struct(">II")  # Checksum and length of the table of contents.
ROW_BYTES: Final = _ROW.size  # The header, which precedes the entries.
_CONTENTS_LAST: Final = (
    1 << 31
)  # A flag in that length: the contents follow the entries. In rows of format 3 they precede them.

#: Row number, offset, length and checksum of the entry. The checksum tells it from another entry of the same index elsewhere.
_PLACE: Final = struct.Struct(">QII4s")
PLACED: Final = (
    1 << 63
)  # A flag in the row number. The value of an entry begins with its term, which is never that high.
pack_place = _PLACE.pack
_pack = msgpack.Packer(autoreset=True).pack


@dataclass(frozen=True, slots=True)
class Rows:
    """When entries share a row, and how many rows are kept."""

    groups_min: int = 4  # Commits of fewer groups write to the groups' own tables.
    group_bytes_max: int = 16 * 1024  # Larger writes of one group fill whole pages of its own table.
    row_bytes_max: int = 1024 * 1024
    recent_bytes: int = 2 * 1024 * 1024  # Above this, groups are filed, the one that waited longest first.
    filed_every: int = 64  # Rows filed before a record tells the next opening to skip them.
    retired_max: int = 64  # Rows deleted per commit, so that no single commit pays for many.
    kept_bytes: int = 32 * 1024 * 1024  # Below this, rows kept for a few entries do not matter.
    sparse: int = 4  # Rows are sparse when fewer than one byte in this many is needed.
    moved_max: int = 256  # Entries moved out of sparse rows per commit.
    commits_every: int = 8  # Commits of many groups per write of the commit indices, which would cost each a page.


class Place(NamedTuple):
    row: int
    offset: int
    length: int
    checksum: bytes


class RowEntry(NamedTuple):
    """An entry found in a row, and its place as a value."""

    entry: Entry
    place: bytes


def place_in(value: bytes) -> Place | None:
    """The place that a value of a group's table holds; None if it holds the entry itself."""
    if len(value) != _PLACE.size or value[0] < 0x80:
        return None
    row, offset, length, checksum = _PLACE.unpack(value)
    return Place(row ^ PLACED, offset, length, checksum)


def row_of(value: bytes) -> int:
    """The row number of a value that is a place."""
    return int.from_bytes(value[:8], "big") ^ PLACED


def encode_row(key: bytes, contents: list[Any], parts: list[bytes]) -> bytes:
    """Encode entries of several groups. `parts` has the header and the command of each entry.

    `contents` has, for each group, its id, the index of the first entry, and a list of the entries' lengths. The row's checksum
    covers the contents; each entry has a checksum of its own.
    """
    table = _pack(contents)
    return b"".join((_ROW.pack(crc32(table, crc32(key)), len(table) | _CONTENTS_LAST), *parts, table))


def decode_row(key: bytes, value: bytes) -> list[tuple[GroupId, int, list[tuple[int, int]]]] | None:
    """Return (group, index of the first entry, [(start, stop) of each entry]) for each group, or None if the row is damaged.

    The entries themselves are not checked."""
    if len(value) < ROW_BYTES:
        return None
    checksum, size = _ROW.unpack_from(value)
    start, stop = ROW_BYTES, len(value)  # Where the entries begin and end.
    if size & _CONTENTS_LAST:
        stop -= size ^ _CONTENTS_LAST
        table = value[max(stop, 0) :]
    else:
        start += size
        table = value[ROW_BYTES:start]
    if checksum != crc32(table, crc32(key)):
        return None
    parts = []
    flat = iter(msgpack.unpackb(table))
    for group, first, lengths in zip(flat, flat, flat, strict=True):
        ends = list(accumulate(lengths, initial=start))
        parts.append((group, first, list(pairwise(ends))))
        start = ends[-1]
    return parts if start == stop else None
