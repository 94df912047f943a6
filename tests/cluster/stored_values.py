"""A shared store in tests: a directory that can disappear, and nodes that keep large values there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import aiohttp

from holdfast.cluster.node import Node
from holdfast.cluster.snapshotting.service import Snapshots
from holdfast.snapshots.policy import Policy
from holdfast.statemachine import tables
from tests.cluster.harness import World, eventually
from tests.cluster.large_values import Client, MovedClock, rows
from tests.snapshots.conftest import credentials, proxy, rclone  # noqa: F401 - fixtures
from tests.statemachine import invariants

#: The same in every run. A value with the mark of `refs` as its prefix is stored without it, and could equal its
#: neighbour.
LARGE = Random(1).randbytes(1 << 20)
OTHER = Random(2).randbytes(256 * 1024 + 77)
assert 1 not in LARGE[:8] + OTHER[:1], "no tail of it that a test uses begins with the mark"
QUICK = Policy(retry_s=0.05, retry_max_s=0.1)


class Place:
    """A store in a directory, like a mount that can disappear."""

    def __init__(self, path: Path) -> None:
        self.path = path / "store"
        self.path.mkdir(parents=True)

    def take_away(self) -> None:
        self.path.rename(self.path.with_suffix(".away"))

    def bring_back(self) -> None:
        self.path.with_suffix(".away").rename(self.path)

    def values(self, partition: int | None = None) -> list[Path]:
        """The files of large values, of one partition or of all."""
        folder = "*" if partition is None else f"{partition:04d}"
        found = [*self.path.glob(f"blobs/*/{folder}/*")]
        return sorted(path for path in found if path.is_file() and path.parent.name.isdigit())

    @property
    def value(self) -> Path:
        [path] = self.values()
        return path


async def usable(node: Node) -> None:
    node.ground.snapshots.store_policy = QUICK
    await eventually(lambda: node.ground.objects.why_not() is None, "a store that may be used")


@asynccontextmanager
async def storing(path: Path, url: Any, partitions: int = 1, **settings: Any) -> AsyncIterator[Client]:
    it = World(path, partitions=partitions, snapshots=str(url), **settings)
    it.clock = MovedClock()
    looked, look = asyncio.Event(), Snapshots._check_store

    async def look_and_tell(snapshots: Snapshots) -> None:
        await look(snapshots)
        looked.set()

    with patch.object(Snapshots, "_check_store", look_and_tell):
        await it.start()
        if it.node.ground.snapshots.shared:
            await looked.wait()  # Otherwise the node's first check may find a store that a test has removed.
    await usable(it.node)
    try:
        async with aiohttp.ClientSession() as http:
            yield Client(it, http)
    finally:
        await it.stop()


def gone(it: World) -> int:
    return sum(rows(partition, tables.GONE) for partition in it.node.partitions)


def check(it: World) -> None:
    for partition in it.node.partitions:
        with partition.state.read() as txn:
            invariants.check(txn)
