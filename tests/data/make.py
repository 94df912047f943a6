"""Makes a data directory, a snapshot and a backup for tests/cluster/test_upgrades.py, as this release writes them.

    python -m tests.data.make schema-3
    python -m tests.data.make backup-1

One node with one partition: a counter at 30, an invocation that waits for an awakeable, a trimmed log with entries behind
its snapshot, and a state that nobody closed. From schema 2 on, a completed invocation with a value that counts as large; from
schema 3 on, that value is in a store beside the node, and in a backup nevertheless.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

from holdfast.statemachine.effects import Status
from tests.cluster.harness import World, eventually
from tests.cluster.test_snapshots import base, snapshot
from tests.cluster.test_upgrades import HANDLERS, LARGE, LARGE_VALUE, WAITING

HERE = Path(__file__).resolve().parent


async def make(name: str) -> None:
    backup = name.startswith("backup-")
    with tempfile.TemporaryDirectory() as scratch:
        store = Path(scratch) / "store"
        store.mkdir()
        settings = {"log_tail": 0, "blob_threshold_bytes": 4096, "snapshots": str(store), "snapshot_entries": 10**6}
        it = World(Path(scratch), partitions=1, **settings)
        it.boot = "the boot that wrote it"
        await it.start()
        await it.register(HANDLERS)
        await eventually(lambda: it.node.ground.objects.why_not() is None, "a store that may be used")
        command = it.invoke("agent/wait", ident=WAITING)
        await it.node.serving.router.submit(WAITING, command)
        await it.reaches(WAITING, Status.SUSPENDED)
        assert await it.call("agent/echo", LARGE_VALUE, ident=LARGE) == [0, LARGE_VALUE]
        for _ in range(20):
            await it.call("counter/add", key="k")
        file = await snapshot(it)
        await eventually(lambda: base(it) > 0, "a trimmed log")
        for _ in range(10):
            await it.call("counter/add", key="k")
        place = Path(scratch) / "place"
        place.mkdir()
        if backup:
            job = it.node.serving.backups.begin(str(place))
            await eventually(
                lambda: it.node.serving.backups.recent()[0]["status"] == "succeeded", f"the backup {job['id']}"
            )
        else:
            shutil.copy(file.path, HERE / f"{name}.snapshot")
        assert len([*store.glob("blobs/*/0000/*")]) == 1, "the large value"
        await it.kill()
        for endpoint in it.endpoints:
            await endpoint.stop()
        if backup:
            with tarfile.open(HERE / "backups" / f"{name}.tar.gz", "w:gz") as packed:
                packed.add(place, "place")
        else:
            with tarfile.open(HERE / f"{name}.tar.gz", "w:gz") as packed:
                packed.add(Path(scratch) / "node", "node")
                packed.add(store / "blobs", "store/blobs")


if __name__ == "__main__":
    asyncio.run(make(sys.argv[1]))
