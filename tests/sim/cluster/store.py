"""The shared store: objects in memory, behind the interface of the real stores, with the faults of real ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from holdfast.snapshots.errors import NotFound, StoreFailed, Unreachable
from holdfast.snapshots.stores import Stat, check_name, check_prefix, probe
from holdfast.snapshots.work import Work
from tests.sim.cluster.files import damaged

if TYPE_CHECKING:
    from tests.sim.cluster.world import World


VALUES: Final = "blobs/"


class SimStore:
    """Implements `snapshots.stores.Store`."""

    url = "s3://simulated"

    def __init__(self, world: World) -> None:
        self.world = world
        self.objects: dict[str, tuple[bytes, int]] = {}  # name -> content, when it was written
        self.down_until = 0.0
        self._listed: list[Stat] = []  # The content of a stale listing.

    def _fail_at_times(self, name: str) -> None:
        world = self.world
        if self.down_until > world.now:
            world.counts["store: down"] += 1
            self._trouble(name)
            raise Unreachable(self.url, "no answer")
        if world.chance("store: failed", 0.03):
            self._trouble(name)
            raise StoreFailed(self.url, f"{name}: internal error")

    def _trouble(self, name: str) -> None:
        """A reader of a value that is here has an excuse."""
        if name.startswith(VALUES) and self.world.running is not None:
            self.world.running.troubled_at = self.world.now

    def put(self, source: Path, name: str, work: Work | None = None) -> None:
        self.put_bytes(source.read_bytes(), name)

    def put_bytes(self, data: bytes, name: str) -> None:
        self._fail_at_times(check_name(name))
        self.objects[name] = (data, int(self.world.now * 1000))
        self.world.counts["store: written"] += 1
        if name.startswith(VALUES) and self.world.chance("store: slow to answer", 0.1) and self.world.running:
            self.world.running.hears_late_s = self.world.rng.uniform(0.1, 3.0)
        if self.world.chance("store: written, and said it was not", 0.06):
            raise Unreachable(self.url, "the connection broke before the answer")

    def get(self, name: str, to: Path, work: Work | None = None) -> None:
        self._fail_at_times(check_name(name))
        data = self._data(name)
        with to.open("ab", buffering=0) as target:
            have = target.tell()
            if have > len(data):
                target.truncate(0)
                have = 0
            if self.world.chance("store: broke off", 0.3):
                target.write(data[have : (have + len(data)) // 2])
                raise Unreachable(self.url, "the connection broke")
            target.write(data[have:])
            os.fsync(target.fileno())
        self.world.counts["store: read"] += 1

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        self._fail_at_times(check_name(name))
        return self._data(name)[offset : None if length is None else offset + length]

    def _data(self, name: str) -> bytes:
        if name not in self.objects:
            raise NotFound(self.url, name)
        return self.objects[name][0]

    def stat(self, name: str) -> Stat:
        data = self._data(check_name(name))
        return Stat(name, len(data), self.objects[name][1])

    def list(self, prefix: str = "") -> list[Stat]:
        self._fail_at_times(check_prefix(prefix))
        if not self.world.chance("store: stale listing", 0.3):
            self._listed = [self.stat(name) for name in sorted(self.objects)]
        return [found for found in self._listed if found.name.startswith(prefix)]

    def delete(self, name: str) -> None:
        self._fail_at_times(check_name(name))
        found = self.objects.pop(name, None)
        if name.startswith(VALUES):
            if found is not None:
                self.world.oracle.deleted(name)
            if self.world.chance("store: deleted, and said it was not", 0.2):
                raise Unreachable(self.url, "the connection broke before the answer")

    def check(self) -> None:
        probe(self, self.world.tokens.randbytes(8).hex())

    def values(self, number: int) -> dict[str, bytes]:
        """The large values of a partition, by the names in its state."""
        found = ((name.split("/"), data) for name, (data, _) in self.objects.items() if name.startswith(VALUES))
        return {parts[3]: data for parts, data in found if parts[2] == f"{number:04d}"}

    # -- faults ----------------------------------------------------------------------------------------------------------

    def _snapshots(self) -> tuple[str, ...]:
        """Snapshots are dispensable for nodes. A lost value needs an operator."""
        return tuple(sorted(name for name in self.objects if not name.startswith(VALUES)))

    def lose(self) -> None:
        if names := self._snapshots():
            del self.objects[self.world.rng.choice(names)]

    def damage(self) -> None:
        if names := self._snapshots():
            newest = {name.rpartition("/")[0]: name for name in names}  # Snapshots that are fetched.
            name = self.world.rng.choice(sorted(newest.values()))
            content, at = self.objects[name]
            self.objects[name] = (damaged(self.world.rng, content, self.world.disks.root / "damaging"), at)


class Vault(SimStore):
    """The place of backups: another store, which outlives the cluster."""

    url = "s3://vault/sim"
