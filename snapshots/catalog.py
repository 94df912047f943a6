"""The snapshots of one group in a store: publish, find the newest valid one, remove old ones.

    <cluster>/<group>/<term>-<index>-<id>.snapshot          numbers with leading zeros, so names sort by age

Why a deposed leader does no harm: its snapshots hold committed state, only older. Committed terms never decrease as
indexes grow, so (term, index) orders snapshots by age regardless of which node cut them. A name contains term, index
and an id derived from the content, so a deposed leader cannot overwrite another snapshot. Its snapshots sort as older
than those of a later leader, so they cannot hide them. It removes only snapshots that are older than `keep` valid ones
in its own listing.

A listing may be stale. Snapshots that this process published or was told about are looked up by name even if the
listing lacks them. A listed snapshot may be gone; then the next one is used.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from holdfast.snapshots.errors import Corrupted, NotFound, SnapshotError, StoreFailed
from holdfast.snapshots.format import BLOCK_BYTES, Expected, Header, SnapshotFile, decode, parse_name
from holdfast.snapshots.policy import Kept, Policy, names_to_delete
from holdfast.snapshots.stores import Store
from holdfast.snapshots.work import Work

logger = logging.getLogger(__name__)

_CLUSTER: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")


class Listed(NamedTuple):
    """An object with a snapshot's name. Its content has not been read."""

    name: str
    """Name in the store."""
    term: int
    index: int  # type: ignore[assignment]
    size: int
    """0 if the snapshot is known by name only."""


class Found(NamedTuple):
    """A snapshot with a valid header and the right size. Its data is checked when it is fetched."""

    name: str
    header: Header


class Catalog:
    def __init__(self, store: Store, *, cluster: str, group: int, schema_max: int | None = None) -> None:
        if not _CLUSTER.fullmatch(cluster):
            raise ValueError(f"{cluster!r} cannot be part of a name: use letters, digits, '.', '-' and '_'")
        self.store = store
        self.expected = Expected(cluster=cluster, group=group, schema_max=schema_max)
        self.prefix = f"{cluster}/{group:010d}/"
        self._told: set[str] = set()

    def name_in_store(self, file: SnapshotFile | Header) -> str:
        return self.prefix + file.name

    def tell(self, name: str) -> None:
        """Remember a name from the log's offer or from a peer. The snapshot may be gone by now."""
        if name.startswith(self.prefix) and parse_name(name.removeprefix(self.prefix)) is not None:
            self._told.add(name)

    def publish(self, file: SnapshotFile, work: Work | None = None) -> str:
        """Upload a snapshot and check that it is there. On return it is as durable as the store."""
        self.expected.check(file.header, file.path)
        name = self.name_in_store(file)
        self.store.put(file.path, name, work)
        try:
            found = self.look(name)
        except (NotFound, Corrupted) as error:
            raise StoreFailed(
                self.store.url, f"{name} differs from what was just written ({error.__class__.__name__})"
            ) from error
        assert found.header == file.header, "equal names mean equal bytes"
        self._told.add(name)
        return name

    def look(self, name: str) -> Found:
        """Check header and size of one snapshot by name. Raises if either is wrong."""
        header = decode(self.store.read(name, length=BLOCK_BYTES), f"{self.store.url}: {name}")
        self.expected.check(header, name)
        size = self.store.stat(name).size
        if size != header.file_bytes:
            raise Corrupted(name, f"the object is truncated or padded: {size} bytes instead of {header.file_bytes}")
        if self.name_in_store(header) != name:
            raise Corrupted(name, f"the object holds another snapshot, {header.name}")
        return Found(name, header)

    def list(self) -> list[Listed]:
        """All snapshots, newest first."""
        sizes = {found.name: found.size for found in self.store.list(self.prefix)}
        listed = []
        for name in {*sizes, *self._told}:
            numbers = parse_name(name.removeprefix(self.prefix))
            if numbers is not None:
                listed.append(Listed(name, *numbers, sizes.get(name, 0)))
        return sorted(listed, key=lambda found: (found.term, found.index, found.name), reverse=True)

    def sound(self, *, index_min: int = 0) -> Iterator[Found]:
        """Valid snapshots, newest first. Each damaged or mismatched one is skipped with a warning."""
        for listed in self.list():
            if listed.index < index_min:
                continue
            try:
                yield self.look(listed.name)
            except NotFound:
                self._told.discard(listed.name)
            except SnapshotError as error:
                if error.retryable:
                    raise
                logger.warning("skipping a snapshot: %s", error)

    def newest(self, *, index_min: int = 0) -> Found | None:
        return next(self.sound(index_min=index_min), None)

    def prune(self, policy: Policy, *, pinned: Iterable[str] = ()) -> tuple[str, ...]:
        """Delete the snapshots that the policy no longer keeps, and return their names."""
        sound = {found.name for found in self.sound()}
        listed = [Kept(found.name, found.term, found.index, found.name in sound) for found in self.list()]
        names = names_to_delete(policy, listed, pinned=pinned)
        for name in names:
            self.store.delete(name)
            self._told.discard(name)
        return tuple(names)
