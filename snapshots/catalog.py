"""The snapshots of one group in a store: publish, find the newest that is sound, remove the old.

    <cluster>/<group>/<term>-<index>-<id>.snapshot          numbers with leading zeros, so names sort by age

Why a deposed leader does no harm. What it cut is committed state, only older; committed terms never fall as indexes grow, so
(term, index) orders snapshots by age whoever cut them. Its name has its own term and index, and an id of its own bytes,
so it can't overwrite anything else, and it sorts behind whatever a later leader cut, so it can't hide that. When it removes
old ones, it removes only what is older than `keep` sound ones that it sees itself.

A listing may be stale. What this process published, or was told of, is looked for by name even if no listing shows
it, and what a listing shows may be gone: then the next one is taken.
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
    """An object whose name is a snapshot's. Nothing of it has been read."""

    name: str
    """In the store."""
    term: int
    index: int  # type: ignore[assignment]
    size: int
    """0 if it is known by name only."""


class Found(NamedTuple):
    """A snapshot whose header is sound and whose size is right. Its data is checked when it is fetched."""

    name: str
    header: Header


class Catalog:
    def __init__(self, store: Store, *, cluster: str, group: int, schema_max: int | None = None) -> None:
        if not _CLUSTER.fullmatch(cluster):
            raise ValueError(f"{cluster!r} cannot be a part of names: letters, digits, '.', '-' and '_'")
        self.store = store
        self.expected = Expected(cluster=cluster, group=group, schema_max=schema_max)
        self.prefix = f"{cluster}/{group:010d}/"
        self._told: set[str] = set()

    def name_in_store(self, file: SnapshotFile | Header) -> str:
        return self.prefix + file.name

    def tell(self, name: str) -> None:
        """There is, or was, a snapshot of this name (from the log's offer, or from a peer)."""
        if name.startswith(self.prefix) and parse_name(name.removeprefix(self.prefix)) is not None:
            self._told.add(name)

    def publish(self, file: SnapshotFile, work: Work | None = None) -> str:
        """Upload, then look whether it is there. When this returns, the snapshot is as durable as the store is."""
        self.expected.check(file.header, file.path)
        name = self.name_in_store(file)
        self.store.put(file.path, name, work)
        try:
            found = self.look(name)
        except (NotFound, Corrupted) as error:
            raise StoreFailed(
                self.store.url, f"{name} is not what was written a moment ago ({error.__class__.__name__})"
            ) from error
        assert found.header == file.header, "the same name is the same bytes"
        self._told.add(name)
        return name

    def look(self, name: str) -> Found:
        """Header and size of one snapshot, by its name; raises what is wrong with it."""
        header = decode(self.store.read(name, length=BLOCK_BYTES), f"{self.store.url}: {name}")
        self.expected.check(header, name)
        size = self.store.stat(name).size
        if size != header.file_bytes:
            raise Corrupted(name, f"the object is torn: it has {size} bytes instead of {header.file_bytes}")
        if self.name_in_store(header) != name:
            raise Corrupted(name, f"the object is another snapshot, {header.name}")
        return Found(name, header)

    def list(self) -> list[Listed]:
        """Newest first."""
        sizes = {found.name: found.size for found in self.store.list(self.prefix)}
        listed = []
        for name in {*sizes, *self._told}:
            numbers = parse_name(name.removeprefix(self.prefix))
            if numbers is not None:
                listed.append(Listed(name, *numbers, sizes.get(name, 0)))
        return sorted(listed, key=lambda found: (found.term, found.index, found.name), reverse=True)

    def sound(self, *, index_min: int = 0) -> Iterator[Found]:
        """Newest first, without those that are gone, torn, or not for us; each of these is said once in the log."""
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
                logger.warning("a snapshot is passed over: %s", error)

    def newest(self, *, index_min: int = 0) -> Found | None:
        return next(self.sound(index_min=index_min), None)

    def prune(self, policy: Policy, *, pinned: Iterable[str] = ()) -> tuple[str, ...]:
        """Remove what the policy no longer keeps; the names of what was removed."""
        sound = {found.name for found in self.sound()}
        listed = [Kept(found.name, found.term, found.index, found.name in sound) for found in self.list()]
        names = names_to_delete(policy, listed, pinned=pinned)
        for name in names:
            self.store.delete(name)
            self._told.discard(name)
        return tuple(names)
