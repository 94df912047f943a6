"""A backup in a store: one snapshot per partition, the meta group's state, and a manifest that ties them together.

    backup-<when>-<six digits>/begun.json                            first: the node that began it, and when
    backup-<when>-<six digits>/partitions/<partition>/<snapshot>     one file of `format` each
    backup-<when>-<six digits>/meta.msgpack                          deployments and services
    backup-<when>-<six digits>/manifest.json                         last: names all others, with their sha256

A backup without a manifest is not a backup: it is listed as interrupted and can be deleted. Every backup uses new
names, so nothing is ever overwritten, and a store only has to keep the objects it is given. docs/snapshots.md lists the
fields; docs/adr/0003 explains why the parts fit together.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import lmdb

from holdfast.sdk.ids import PartitionNumber
from holdfast.snapshots.errors import Corrupted, NewerVersion, NotFound, SnapshotError
from holdfast.snapshots.files import remove_quietly
from holdfast.snapshots.format import Expected, parse_name, read_header
from holdfast.snapshots.restore import stage_blocking
from holdfast.snapshots.stores import Store
from holdfast.snapshots.transfer import fetch_blocking
from holdfast.snapshots.work import PIECE_BYTES, Work
from holdfast.statemachine import queries
from holdfast.statemachine.marks import Marks, read_marks, why_not_together

FORMAT: Final = 1
PREFIX: Final = "backup-"
BEGUN: Final = "begun.json"
MANIFEST: Final = "manifest.json"
META: Final = "meta.msgpack"
MANIFEST_BYTES_MAX: Final = 16 << 20

_ID: Final = re.compile(r"backup-\d{8}-\d{6}-[0-9a-f]{6}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


def new_id(now_s: float, token: str) -> str:
    """A new backup id. Ids sort by time, in UTC; `token` is 6 random hexadecimal digits."""
    return f"{PREFIX}{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now_s))}-{token}"


@dataclass(frozen=True)
class Stored:
    """An object of a backup. `object` is its name relative to the backup."""

    object: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Part(Stored):
    """The snapshot of one partition."""

    partition: PartitionNumber
    index: int
    term: int
    node: str
    """The node that cut it."""


@dataclass(frozen=True)
class Manifest:
    id: str
    cluster: str
    identity: str
    """Distinguishes the cluster from others of the same name. Snapshots carry the same identity."""
    created_ms: int
    release: str
    """The release that wrote the backup."""
    schema: int
    """Schema version of the records in the states."""
    partitions: int
    parts: tuple[Part, ...]
    """In order of partition."""
    meta: Stored

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts) + self.meta.bytes

    @property
    def digest(self) -> str:
        """Covers every byte of the backup."""
        return str(_described(self)["sha256"])


@dataclass(frozen=True)
class Interrupted:
    """A backup that was never finished, or is still in progress."""

    id: str


def part_name(partition: PartitionNumber, snapshot: str) -> str:
    return f"partitions/{partition:04d}/{snapshot}"


def _described(manifest: Manifest) -> dict[str, Any]:
    described = {"format": FORMAT, **asdict(manifest)}
    return {**described, "sha256": hashlib.sha256(_canonical(described)).hexdigest()}


def _canonical(described: dict[str, Any]) -> bytes:
    return json.dumps(described, sort_keys=True, separators=(",", ":")).encode()


def encode_manifest(manifest: Manifest) -> bytes:
    return json.dumps(_described(manifest), indent=1).encode() + b"\n"


def decode_manifest(raw: bytes, place: str, *, schema_max: int | None = None) -> Manifest:
    """Decode any bytes to a complete manifest, or raise an error that says what is wrong."""
    try:
        found = json.loads(raw)
        if found["format"] > FORMAT:
            raise NewerVersion(place, "backup format", found=found["format"], understood=FORMAT)
        digest = found.pop("sha256")
        if digest != hashlib.sha256(_canonical(found)).hexdigest():
            raise ValueError("checksum mismatch")
        if schema_max is not None and found["schema"] > schema_max:
            raise NewerVersion(place, "state schema", found=found["schema"], understood=schema_max)
        known = {name: found[name] for name in Manifest.__dataclass_fields__}
        known["meta"] = _stored(Stored, known["meta"])
        known["parts"] = tuple(_stored(Part, part) for part in known["parts"])
        manifest = Manifest(**known)
        if [part.partition for part in manifest.parts] != list(range(manifest.partitions)) or not manifest.parts:
            raise ValueError("partitions are missing")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Corrupted(place, f"the manifest is damaged ({error})") from None
    return manifest


def _stored(kind: type[Any], found: dict[str, Any]) -> Any:
    """Build a `kind` from the known fields. Unknown fields are ignored."""
    made = kind(**{name: found[name] for name in kind.__dataclass_fields__})
    if not _DIGEST.fullmatch(made.sha256) or type(made.bytes) is not int:
        raise ValueError(f"{made.object!r:.100} has an invalid size or sha256")
    if kind is Part and parse_name(made.object.rpartition("/")[2]) is None:
        raise ValueError(f"{made.object!r:.100} is not a snapshot")
    return made


# Backups in a store


def list_backups(store: Store, *, schema_max: int | None = None) -> list[Manifest | Interrupted | SnapshotError]:
    """All backups, newest first. A backup that cannot be read is listed as its error."""
    named: dict[str, bool] = {}
    for found in store.list(PREFIX):
        id_, _, rest = found.name.partition("/")
        if _ID.fullmatch(id_):
            named[id_] = named.get(id_, False) or rest == MANIFEST
    listed: list[Manifest | Interrupted | SnapshotError] = []
    for id_ in sorted(named, reverse=True):
        if not named[id_]:
            listed.append(Interrupted(id_))
            continue
        try:
            listed.append(read_manifest(store, id_, schema_max=schema_max))
        except NotFound:
            listed.append(Interrupted(id_))  # It is being deleted.
        except SnapshotError as error:
            if error.retryable:
                raise
            listed.append(error)
    return listed


def read_manifest(store: Store, id_: str, *, schema_max: int | None = None) -> Manifest:
    """Raises NotFound if there is no such backup, or if it was never finished."""
    if not _ID.fullmatch(id_):
        raise NotFound(store.url, f"backup {id_!r:.100}")
    name = f"{id_}/{MANIFEST}"
    raw = store.read(name, length=MANIFEST_BYTES_MAX)
    manifest = decode_manifest(raw, f"{store.url}: {name}", schema_max=schema_max)
    if manifest.id != id_:
        raise Corrupted(f"{store.url}: {name}", f"it is the manifest of another backup, {manifest.id}")
    return manifest


def find_backup(store: Store, id_: str | None, *, schema_max: int | None = None) -> Manifest:
    """The backup `id_`, or the newest complete one."""
    if id_ is not None:
        return read_manifest(store, id_, schema_max=schema_max)
    for found in list_backups(store, schema_max=schema_max):
        if isinstance(found, Manifest):
            return found
        if isinstance(found, SnapshotError):
            raise found  # Do not silently fall back to an older backup.
    raise NotFound(store.url, "backup")


def delete_backup(store: Store, id_: str) -> int:
    """Delete a backup and return how many objects it had.

    The manifest goes first, so an interrupted deletion leaves no valid backup.
    """
    if not _ID.fullmatch(id_):
        raise NotFound(store.url, f"backup {id_!r:.100}")
    names = [found.name for found in store.list(f"{id_}/")]
    if not names:
        raise NotFound(store.url, f"backup {id_}")
    store.delete(f"{id_}/{MANIFEST}")
    for name in names:
        store.delete(name)
    return len(names)


def read_meta(store: Store, manifest: Manifest) -> bytes:
    """The meta group's state in the backup."""
    name = f"{manifest.id}/{manifest.meta.object}"
    raw = store.read(name, length=manifest.meta.bytes + 1)
    check_stored(raw, manifest.meta, f"{store.url}: {name}")
    return raw


def check_stored(raw: bytes, stored: Stored, place: str) -> None:
    if len(raw) != stored.bytes or hashlib.sha256(raw).hexdigest() != stored.sha256:
        raise Corrupted(place, "its size or sha256 differs from the manifest")


# Files


def digest_of(path: Path, work: Work) -> str:
    """sha256 of the whole file, as `sha256sum` prints it."""
    work.begin(path.stat().st_size)
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
            work.step(len(piece))
    return digest.hexdigest()


def fetch_part(
    store: Store, manifest: Manifest, part: Part, directory: Path, *, group: int, schema_max: int, work: Work
) -> Path:
    """Fetch a partition's snapshot into `directory`, durable and checked against the manifest.

    An interrupted fetch resumes.
    """
    name = f"{manifest.id}/{part.object}"
    path = directory / part.object.rpartition("/")[2]
    expected = Expected(group=group, schema_max=schema_max)
    if path.exists() and digest_of(path, work) != part.sha256:
        remove_quietly(path)  # A leftover of an earlier fetch, damaged since.
    if not path.exists():
        fetch_blocking(store, name, directory, expected=expected, work=work)
        if digest_of(path, Work()) != part.sha256:
            remove_quietly(path)
            raise Corrupted(f"{store.url}: {name}", "its sha256 differs from the manifest")
    header = read_header(path, expected)
    if (header.meta.index, header.meta.term) != (part.index, part.term):
        raise Corrupted(f"{store.url}: {name}", "its index or term differs from the manifest")
    return path


def verify_backup(
    store: Store,
    manifest: Manifest,
    scratch: Path,
    *,
    first_group: int,
    schema_max: int,
    work: Callable[[int], Work] = lambda _: Work(),
) -> None:
    """Read every object, open every state, and check that the partitions are consistent with each other.

    Raises if anything is wrong.

    `scratch` needs space for twice the largest partition. `work` is called once per partition.
    """
    read_meta(store, manifest)
    marks: dict[PartitionNumber, Marks] = {}
    for part in manifest.parts:
        group = first_group + part.partition
        file = fetch_part(store, manifest, part, scratch, group=group, schema_max=schema_max, work=work(part.partition))
        try:
            marks[part.partition] = _marks_in(file, scratch / "state")
        finally:
            remove_quietly(file)
    why = why_not_together(marks)
    if why is not None:
        raise Corrupted(f"{store.url}: {manifest.id}", f"its partitions are inconsistent with each other: {why}")


class _Reading:
    """Adapts an LMDB transaction to the state machine's read interface."""

    def __init__(self, txn: lmdb.Transaction[bytes]) -> None:
        self._txn = txn

    def get(self, key: bytes, /) -> bytes | None:
        return self._txn.get(key)

    def scan(self, first: bytes, end: bytes, /) -> Iterator[tuple[bytes, bytes]]:
        with self._txn.cursor() as cursor:
            if cursor.set_range(first):
                for key, value in cursor:
                    if key >= end:
                        return
                    yield key, value


def _marks_in(file: Path, directory: Path) -> Marks:
    found: list[Marks] = []

    def look(env: lmdb.Environment) -> None:
        with env.begin() as txn:
            if queries.meta(_Reading(txn)).stored:
                raise Corrupted(file, "it lacks some large values, which are in the shared store")
            found.append(read_marks(_Reading(txn)))

    staged = stage_blocking(file, directory, prepare=look)
    staged.discard()
    return found[0]
