"""Large values in a store that several nodes share, and in backups."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from holdfast.cluster.backup.restoring import restore
from holdfast.cluster.config import Config
from holdfast.cluster.partition.door import Partition
from holdfast.cluster.values import shared_store as objects
from holdfast.sdk.ids import (
    InvocationId,
    PartitionNumber,
    parse_id,
)
from holdfast.snapshots.backups import find_backup, verify_backup
from holdfast.snapshots.directory import DirectoryStore
from holdfast.statemachine import queries, refs, tables
from holdfast.statemachine.commands import Purge
from holdfast.statemachine.tables import SCHEMA
from tests.cluster.harness import World, echo, eventually
from tests.cluster.large_values import Client, pass_time, rows, twice
from tests.cluster.stored_values import LARGE, OTHER, Place, check, gone, storing, usable
from tests.cluster.test_snapshots import snapshot
from tests.cluster.test_store_faults import place
from tests.cluster.test_three_nodes import Three, three
from tests.snapshots.conftest import credentials, proxy, rclone  # noqa: F401 - fixtures
from tests.snapshots.fault_proxy import Fault, FaultProxy, error

pytestmark = pytest.mark.usefixtures("patient")


# -- several nodes ----------------------------------------------------------------------------------------------------


async def all_usable(cluster: Three) -> None:
    await asyncio.gather(*(usable(seat.node) for seat in cluster.up()))


async def goes_around(path: Path, url: str, count: Callable[[], int]) -> None:
    """A value passes through every node; then a leader dies, and a node is wiped and catches up."""
    handlers = {"echo:object/twice:exclusive": twice}
    async with three(path, handlers, partitions=1, snapshots=url, log_tail=0) as cluster:
        await cluster.led()
        await all_usable(cluster)
        async with aiohttp.ClientSession() as http:
            for seat in cluster.up():
                status, body, headers = await Client(seat, http).post("/echo/k/twice", LARGE)
                assert (status, body == LARGE) == (200, True), body[:300]
            assert count() == 1
            victim = await cluster.leader(0)
            await victim.kill()
            await cluster.led()
            living = await cluster.leader(0)
            assert (await Client(living, http).post("/echo/k/twice", OTHER))[:2] == (200, OTHER)
            assert rows(living.node.partitions[0], tables.CHUNK) == 0 and count() == 2
            await snapshot(living)
            shutil.rmtree(victim.path / "state")
            await victim.start()
            await cluster.led()
            here = f"/holdfast/invocation/{headers['x-holdfast-id']}/attach"
            assert (await Client(victim, http).get(here))[:2] == (200, LARGE)
            await eventually(lambda: equal_everywhere(cluster), "equal states")
            for seat in cluster.up():
                check(seat)


def equal_everywhere(cluster: Three) -> bool:
    found = set()
    for seat in cluster.up():
        partition = seat.node.ground.replicas.hosted.get(PartitionNumber(0))
        if partition is None:
            return False
        with partition.state.read() as txn:
            found.add(queries.digest(txn))
    return len(found) == 1


async def test_three_nodes_share_a_directory(tmp_path: Path, store: Place) -> None:
    await goes_around(tmp_path, str(store.path), lambda: len(store.values()))


async def test_three_nodes_share_a_bucket(tmp_path: Path, proxy: FaultProxy) -> None:  # noqa: F811
    def puts() -> int:
        paths = {question.path for question in proxy.requests if question.method == "PUT"}
        return len({path for path in paths if "/blobs/" in path and "/nodes/" not in path})

    await goes_around(tmp_path, place(proxy.endpoint_url, prefix=tmp_path.name), puts)


async def test_a_bucket_that_fails_at_writing_and_reading_is_borne(
    tmp_path: Path,
    proxy: FaultProxy,  # noqa: F811
) -> None:
    def is_value(method: str) -> Callable[[Any], bool]:
        return lambda question: question.method == method and "/blobs/" in question.path

    url = place(proxy.endpoint_url, prefix=tmp_path.name)
    async with storing(tmp_path, url) as client:
        it = client.it
        await it.register({"echo/say": echo})
        unavailable = error(503, "ServiceUnavailable")
        unavailable.matches = is_value("PUT")
        proxy.faults.append(unavailable)
        assert (await client.post("/echo/say", OTHER))[:2] == (200, OTHER)
        assert it.node.ground.objects.fallbacks == 1
        proxy.heal()
        await usable(it.node)

        _, _, headers = await client.post("/echo/say", LARGE)
        assert it.node.ground.objects.puts == 1
        path = f"/holdfast/invocation/{headers['x-holdfast-id']}/attach"
        it.node.ground.objects.forget()
        proxy.faults.append(Fault(matches=is_value("GET"), down=True))
        status, body, answered = await client.get(path)
        assert status == 503 and "Retry-After" in answered and b"s3://" in body
        assert b"secretkey" not in body
        proxy.heal()
        assert (await client.get(path))[:2] == (200, LARGE)


async def test_directories_that_are_not_the_same_on_all_nodes_are_never_used(tmp_path: Path) -> None:
    cluster = Three(tmp_path, 1)
    for seat in cluster.seats.values():
        own = tmp_path / f"store of {seat.name}"
        own.mkdir()
        seat._settings["snapshots"] = str(own)
    await cluster.start({"echo:object/say:exclusive": echo})
    try:
        await cluster.led()
        node = cluster.seats["n1"].node
        await eventually(lambda: "a different store" in str(node.ground.objects.why_not()), "a refusal")

        assert await cluster.seats["n1"].call("echo/say", LARGE, key="k") == [0, LARGE]

        assert not [*tmp_path.glob("store of */blobs/*/0000")] and node.ground.objects.puts == 0
    finally:
        await cluster.stop()


async def test_a_node_that_is_down_does_not_block_the_store_that_it_used_before(tmp_path: Path, store: Place) -> None:
    async with three(tmp_path, {"echo:object/say:exclusive": echo}, partitions=1, snapshots=str(store.path)) as cluster:
        await cluster.led()
        await all_usable(cluster)
        await cluster.seats["n3"].kill()
        first = cluster.seats["n1"]
        await first.kill()
        await first.start()
        await cluster.led()

        await usable(first.node)
        assert await first.call("echo/say", LARGE, key="k") == [0, LARGE]
        assert len(store.values()) == 1

        shutil.rmtree(next(iter(store.path.glob("blobs/*/nodes/n3"))))
        await first.kill()
        await first.start()
        await cluster.led()
        await eventually(lambda: "n3 has not confirmed" in str(first.node.ground.objects.why_not()), "a doubt about n3")


async def test_nothing_is_put_into_the_store_while_a_node_of_an_older_release_is_a_member(
    tmp_path: Path, store: Place
) -> None:
    """It could not apply the command that names an object."""
    cluster = Three(tmp_path, 1, snapshots=str(store.path))
    await cluster.start({"echo:object/say:exclusive": echo})
    try:
        await cluster.led()
        old, new = cluster.seats["n3"].node, cluster.seats["n1"].node
        await all_usable(cluster)
        for seat in cluster.up():
            seat.node.ground.objects._confirmed.clear()
        del old.ground.rpc._handlers["blob-mark"]
        await eventually(lambda: "older release" in str(new.ground.objects.why_not()), "a refusal")

        assert await cluster.seats["n1"].call("echo/say", LARGE, key="k") == [0, LARGE]

        assert not store.values()
        old.ground.rpc.serve("blob-mark", old.ground.objects._serve_mark)
        await all_usable(cluster)
    finally:
        await cluster.stop()


async def test_with_blobs_through_the_log_stored_values_are_still_read(tmp_path: Path, store: Place) -> None:
    async with storing(tmp_path, store.path) as client:
        await client.it.register({"echo/say": echo})
        _, _, headers = await client.post("/echo/say", LARGE)
    it = World(tmp_path, partitions=1, snapshots=str(store.path), blobs="log")
    await it.start()
    try:
        await it.register({"echo/say": echo})
        assert await it.call("echo/say", OTHER) == [0, OTHER]
        id_ = parse_id(headers["x-holdfast-id"])
        assert await it.node.serving.reader.value(id_, refs.make(LARGE)[0]) == LARGE
        assert len(store.values()) == 1 and it.node.ground.objects.why_not() == 'blobs = "log"'
    finally:
        await it.stop()


# -- backups ----------------------------------------------------------------------------------------------------------


async def backed_up(it: World, place: Path) -> None:
    job = it.node.serving.backups.begin(str(place))
    await eventually(lambda: it.node.serving.backups.recent()[0]["status"] != "running", f"the backup {job['id']}")
    assert it.node.serving.backups.recent()[0]["status"] == "succeeded", it.node.serving.backups.recent()[0]


async def test_a_backup_has_the_values_without_the_store(tmp_path: Path, store: Place) -> None:
    backups = tmp_path / "backups"
    backups.mkdir()
    async with storing(tmp_path / "old", store.path, partitions=2) as client:
        it = client.it
        await it.register({"echo/twice": twice})
        first = parse_id((await client.post("/echo/twice", LARGE))[2]["x-holdfast-id"])
        second = parse_id((await client.post("/echo/twice", OTHER))[2]["x-holdfast-id"])
        for partition in it.node.partitions:
            await partition.propose(Purge(second))
        await pass_time(it)
        it.node.ground.objects.forget()
        await backed_up(it, backups)
        await eventually(lambda: len(store.values()) <= 2, "what was purged is deleted")
        for partition in it.node.partitions:
            await partition.propose(Purge(first))
        await pass_time(it)
        await eventually(lambda: not store.values(), "nothing in the store")
    shutil.rmtree(store.path)

    kept = DirectoryStore(backups)
    manifest = find_backup(kept, None, schema_max=SCHEMA)
    verify_backup(kept, manifest, tmp_path / "scratch", first_group=2, schema_max=SCHEMA)
    new = World(tmp_path / "new", partitions=2)
    restore(Config(data=tmp_path / "new" / "node"), kept, manifest)
    await new.start()
    try:
        await new.register({"echo/twice": twice})
        assert await new.node.serving.reader.value(first, refs.make(LARGE)[0]) == LARGE
        assert gone(new) == 0
        check(new)
        assert await new.call("echo/twice", LARGE) == [0, LARGE]
    finally:
        await new.stop()


async def test_objects_are_not_deleted_while_a_copy_that_refers_to_them_is_made(
    tmp_path: Path, store: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    backups = tmp_path / "backups"
    backups.mkdir()
    async with storing(tmp_path, store.path) as client:
        it = client.it
        await it.register({"echo/say": echo})
        id_ = parse_id((await client.post("/echo/say", LARGE))[2]["x-holdfast-id"])
        copies = it.node.serving.backups.copies
        fill, filling, go = copies._fill, asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def late(*args: Any) -> Any:
            loop.call_soon_threadsafe(filling.set)
            go.wait()
            return fill(*args)

        monkeypatch.setattr(copies, "_fill", late)
        it.node.serving.backups.begin(str(backups))
        await filling.wait()
        await it.node.partitions[0].propose(Purge(id_))
        await pass_time(it)
        assert gone(it) == 1 and len(store.values()) == 1
        go.set()

        await eventually(lambda: it.node.serving.backups.recent()[0]["status"] != "running", "the backup")
        assert (
            it.node.serving.backups.recent()[0]["status"] == "succeeded"
            and it.node.serving.backups.recent()[0]["rounds"] == 1
        )
        await eventually(lambda: not store.values(), "it is deleted afterwards")


async def test_a_copy_whose_objects_are_gone_is_repeated(
    tmp_path: Path, store: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another node became leader and does not know of the copy."""
    monkeypatch.setattr(objects, "SECOND_LOOK_S", 0.01)
    backups = tmp_path / "backups"
    backups.mkdir()
    async with storing(tmp_path, store.path) as client:
        it = client.it
        await it.register({"echo/say": echo})
        id_ = parse_id((await client.post("/echo/say", LARGE))[2]["x-holdfast-id"])
        partition, copies = it.node.partitions[0], it.node.serving.backups.copies
        fill, rounds = copies._fill, 0

        def deleted_before(*args: Any) -> Any:
            nonlocal rounds
            rounds += 1
            if rounds == 1:
                asyncio.run_coroutine_threadsafe(forget(partition, id_), loop).result()
                store.value.unlink()
            return fill(*args)

        async def forget(partition: Partition, id_: InvocationId) -> None:
            await partition.propose(Purge(id_))
            await pass_time(it)

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(copies, "_fill", deleted_before)
        await backed_up(it, backups)
        assert it.node.serving.backups.recent()[0]["rounds"] == 2
