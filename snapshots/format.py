"""The format of a snapshot file: one header block that describes it, then the data.

    offset  bytes
    0       8      "HFSNAP\\r\\n": reveals a transfer that converts line ends
    8       2      version of this format, big-endian
    10      4      length of the description, big-endian
    14      32     sha256 of everything else in this block
    46      ...    the description: JSON, UTF-8
    ...     ...    zeros up to 4096
    4096    size   the data: a compact copy of an LMDB environment

The data's own sha256 and size are in the description, so the 32 bytes at offset 14 cover the whole file. No part of a
file is used before `verify`, or a restore that checks while it copies, has read all of it.

A reader ignores unknown fields in a description of its own version. A change that old readers must not ignore gets a
new version, which they refuse explicitly.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from holdfast.snapshots.errors import Corrupted, NewerVersion, SnapshotError, WrongSnapshot
from holdfast.snapshots.work import PIECE_BYTES, Work

MAGIC: Final = b"HFSNAP\r\n"
VERSION: Final = 1
BLOCK_BYTES: Final = 4096
SUFFIX: Final = ".snapshot"

_HEAD: Final = struct.Struct(">8sHI")
_DIGEST_BYTES: Final = 32
_BODY_AT: Final = _HEAD.size + _DIGEST_BYTES
_BODY_BYTES_MAX: Final = BLOCK_BYTES - _BODY_AT
_INT_MAX: Final = 2**63 - 1

KIND_LMDB: Final = "lmdb"


@dataclass(frozen=True)
class Meta:
    """Identifies the state in the snapshot. The state at (index, term) of a group is the same on every member."""

    cluster: str
    group: int
    index: int
    term: int
    epoch: int
    members: tuple[str, ...]
    schema: int
    """The state machine's schema version of the records."""
    node: str
    """The node that cut it."""


@dataclass(frozen=True)
class Header:
    meta: Meta
    created_ms: int
    size: int
    """Size of the data in bytes."""
    sha256: str
    """Checksum of the data."""
    kind: str = KIND_LMDB
    layout: int = 0
    """Which LMDB wrote the data: 0 is 0.9, 1 is 1.0. Neither opens the other's files."""
    byteorder: str = sys.byteorder

    @property
    def file_bytes(self) -> int:
        return BLOCK_BYTES + self.size

    @property
    def id(self) -> str:
        """Covers every byte of the file."""
        return encode(self)[_HEAD.size : _BODY_AT].hex()

    @property
    def name(self) -> str:
        return name_of(term=self.meta.term, index=self.meta.index, id=self.id)


@dataclass(frozen=True)
class SnapshotFile:
    path: Path
    header: Header

    @property
    def name(self) -> str:
        return self.header.name


# Names

_NAME: Final = re.compile(r"(\d{20})-(\d{20})-([0-9a-f]{16})" + re.escape(SUFFIX))


def name_of(*, term: int, index: int, id: str) -> str:
    """Names sort by age, and equal names mean equal bytes. So no snapshot can overwrite a different one."""
    return f"{term:020d}-{index:020d}-{id[:16]}{SUFFIX}"


def parse_name(name: str) -> tuple[int, int] | None:
    """(term, index), or None if `name` is not a snapshot's name."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


# The block


def encode(header: Header) -> bytes:
    description = {**asdict(header.meta), **asdict(header)}
    del description["meta"]
    body = json.dumps(description, separators=(",", ":"), sort_keys=True, ensure_ascii=False).encode()
    assert len(body) <= _BODY_BYTES_MAX, "names of clusters, nodes and members are bounded where they are created"
    head = _HEAD.pack(MAGIC, VERSION, len(body))
    rest = body + bytes(_BODY_BYTES_MAX - len(body))
    return head + hashlib.sha256(head + rest).digest() + rest


def decode(block: bytes, place: Path | str) -> Header:
    """The header in the first 4096 bytes of a file. `place` names the file in errors."""
    if block[: len(MAGIC)] != MAGIC:
        raise Corrupted(place, "this is not a Holdfast snapshot, or its beginning is damaged")
    if len(block) < BLOCK_BYTES:
        raise Corrupted(place, f"the file is truncated: it ends after {len(block)} bytes, inside its header")
    _, version, length = _HEAD.unpack_from(block)
    # Checked before the checksum, which a newer version may compute differently.
    if version > VERSION:
        raise NewerVersion(place, "snapshot format", found=version, understood=VERSION)
    rest = block[_BODY_AT:BLOCK_BYTES]
    if hashlib.sha256(block[: _HEAD.size] + rest).digest() != block[_HEAD.size : _BODY_AT]:
        raise Corrupted(place, "its header is damaged")
    if version != VERSION or length > _BODY_BYTES_MAX:
        raise Corrupted(place, f"its header has version {version}, which does not exist")
    try:
        return _parse(json.loads(rest[:length]))
    except (ValueError, TypeError, KeyError) as error:
        raise Corrupted(place, f"its description is invalid ({error})") from None


def _parse(found: dict[str, object]) -> Header:
    members = found["members"]
    if not isinstance(members, list):
        raise TypeError("members is not a list")
    return Header(
        meta=Meta(
            cluster=_text(found, "cluster"),
            group=_number(found, "group"),
            index=_number(found, "index"),
            term=_number(found, "term"),
            epoch=_number(found, "epoch"),
            members=tuple(_text({"member": member}, "member") for member in members),
            schema=_number(found, "schema"),
            node=_text(found, "node"),
        ),
        created_ms=_number(found, "created_ms"),
        size=_number(found, "size"),
        sha256=_text(found, "sha256"),
        kind=_text(found, "kind"),
        layout=_number(found, "layout"),
        byteorder=_text(found, "byteorder"),
    )


def _text(found: dict[str, object], name: str) -> str:
    value = found[name]
    if not isinstance(value, str):
        raise TypeError(f"{name} is not text")
    return value


def _number(found: dict[str, object], name: str) -> int:
    value = found[name]
    if type(value) is not int or not 0 <= value <= _INT_MAX:
        raise TypeError(f"{name} is not a number")
    return value


# Trust


@dataclass(frozen=True)
class Expected:
    """What a snapshot must match to be usable here. None matches anything."""

    cluster: str | None = None
    group: int | None = None
    schema_max: int | None = None

    def check(self, header: Header, place: Path | str) -> None:
        meta = header.meta
        if self.cluster is not None and meta.cluster != self.cluster:
            raise WrongSnapshot(place, f"it belongs to cluster {meta.cluster!r}, not {self.cluster!r}")
        if self.group is not None and meta.group != self.group:
            raise WrongSnapshot(place, f"it belongs to group {meta.group}, not group {self.group}")
        if self.schema_max is not None and meta.schema > self.schema_max:
            raise NewerVersion(place, "state schema", found=meta.schema, understood=self.schema_max)
        if header.kind != KIND_LMDB or header.byteorder != sys.byteorder:
            raise WrongSnapshot(
                place, f"its data is {header.kind} ({header.byteorder}-endian), which this machine cannot open"
            )


ANY: Final = Expected()


def read_header(path: Path, expected: Expected = ANY) -> Header:
    """Read and check the header and the length of the file. The data is not read."""
    with path.open("rb") as file:
        header = decode(file.read(BLOCK_BYTES), path)
        size = os.fstat(file.fileno()).st_size
    expected.check(header, path)
    if size != header.file_bytes:
        raise Corrupted(path, f"the file is truncated or padded: {size} bytes instead of {header.file_bytes}")
    return header


def verify(path: Path, expected: Expected = ANY, work: Work | None = None) -> SnapshotFile:
    """Read and check the whole file. The returned SnapshotFile can be trusted as far as the disk can."""
    work = work or Work()
    header = read_header(path, expected)
    work.begin(header.size)
    with path.open("rb") as file:
        file.seek(BLOCK_BYTES)
        digest = hashlib.sha256()
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
            work.step(len(piece))
    if digest.hexdigest() != header.sha256:
        raise Corrupted(path, "its data is damaged: checksum mismatch")
    work.end()
    return SnapshotFile(path, header)


def listed(directory: Path) -> list[Path]:
    """Files with a snapshot's name, newest first. Their content has not been read."""
    names = [(parse_name(path.name), path) for path in directory.glob(f"*{SUFFIX}")]
    return [path for numbers, path in sorted((n, p) for n, p in names if n is not None)][::-1]


def is_sound(path: Path) -> bool:
    """Whether its header can be read."""
    try:
        read_header(path)
    except (SnapshotError, OSError):
        return False
    return True
