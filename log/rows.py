"""Rows: what one commit appended to several groups, written together as one value of the table `recent`.

A commit that adds an entry to each of many tables writes several pages for every one of them; a row is written once. An
entry stays where it is: later, many at a time, the table of its group is told its *place*, which is the number of the row, and
where in it the entry begins and ends (ADR 8).
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

_ROW: Final = struct.Struct(">II")  # checksum and length of the contents
ROW_BYTES: Final = _ROW.size  # Before the entries.
_CONTENTS_LAST: Final = 1 << 31  # In that length: they stand behind the entries. In rows of format 3 they stood before.

#: Number of the row, offset and length of the entry in it, and its checksum: another entry of that index may be elsewhere.
_PLACE: Final = struct.Struct(">QII4s")
PLACED: Final = 1 << 63  # In that number. The value of an entry begins with its term, which is never that high.
pack_place = _PLACE.pack
_pack = msgpack.Packer(autoreset=True).pack


@dataclass(frozen=True, slots=True)
class Rows:
    """When entries share a row, and how much of them there is at a time."""

    groups_min: int = 4  # A commit of fewer groups writes to their own tables.
    group_bytes_max: int = 16 * 1024  # More than this of one group fills pages of its own well enough.
    row_bytes_max: int = 1024 * 1024
    recent_bytes: int = 2 * 1024 * 1024  # Above this, groups are filed; the one that waits longest first.
    filed_every: int = 64  # So many rows are filed before it is noted that opening need not look at them.
    retired_max: int = 64  # Rows deleted by one commit, so that none has to make up for many.
    kept_bytes: int = 32 * 1024 * 1024  # Of less it does not matter that it is kept for a few entries.
    sparse: int = 4  # That is so when less than one byte in so many is needed.
    moved_max: int = 256  # Entries that one commit moves out of such rows.
    commits_every: int = 8  # Commits of many groups that share a record of commit indices: a page all would write.


class Place(NamedTuple):
    row: int
    offset: int
    length: int
    checksum: bytes


class Found(NamedTuple):
    """An entry as it was found in a row, and the value that says where."""

    entry: Entry
    place: bytes


def place_in(value: bytes) -> Place | None:
    """Where the entry is, if the value in the table of its group says that instead of holding it."""
    if len(value) != _PLACE.size or value[0] < 0x80:
        return None
    row, offset, length, checksum = _PLACE.unpack(value)
    return Place(row ^ PLACED, offset, length, checksum)


def row_of(value: bytes) -> int:
    """Of a value that is a place."""
    return int.from_bytes(value[:8], "big") ^ PLACED


def encode_row(key: bytes, contents: list[Any], parts: list[bytes]) -> bytes:
    """Entries of several groups: the header and the command of each. `contents` has for each group: its number, the index of
    the first entry, [length of each entry].

    Its checksum covers the contents; each entry has its own, over all that they say of it.
    """
    table = _pack(contents)
    return b"".join((_ROW.pack(crc32(table, crc32(key)), len(table) | _CONTENTS_LAST), *parts, table))


def decode_row(key: bytes, value: bytes) -> list[tuple[GroupId, int, list[tuple[int, int]]]] | None:
    """(group, index of the first entry, where each begins and ends) of each group; None if it is damaged. The entries are not
    looked at."""
    if len(value) < ROW_BYTES:
        return None
    checksum, size = _ROW.unpack_from(value)
    start, stop = ROW_BYTES, len(value)  # Of the entries.
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
