"""Large values in the store that all nodes share: written, read, deleted, and a store that fails at any of it."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import aiohttp
import pytest

from holdfast.cluster.backup.restoring import restore
from holdfast.cluster.clock import Clock
from holdfast.cluster.config import Config
from holdfast.cluster.handlers.protocols.native import stream as streams
from holdfast.cluster.handlers.protocols.native.stream import Stream
from holdfast.cluster.node import Node
from holdfast.cluster.partition.door import Partition
from holdfast.cluster.snapshotting.service import Snapshots
from holdfast.cluster.values import janitor
from holdfast.cluster.values import shared_store as objects
from holdfast.cluster.values.janitor import Janitor
from holdfast.cluster.values.shared_store import StoreDown, ValueLost
from holdfast.cluster.values.staging import Stager
from holdfast.sdk.ids import (
    InvocationId,
    format_awakeable,
    format_id,
    parse_id,
    partition_of,
)
from holdfast.sdk.journal import Op, unpack_step
from holdfast.snapshots.backups import find_backup, verify_backup
from holdfast.snapshots.directory import DirectoryStore
from holdfast.snapshots.policy import Policy
from holdfast.statemachine import queries, refs, tables
from holdfast.statemachine.blobs import KEPT_MS, STALE
from holdfast.statemachine.commands import Complete, KeepBlob, Purge, PutBlob, Resume, SetState, TouchBlob
from holdfast.statemachine.effects import Result, Status
from holdfast.statemachine.tables import SCHEMA
from tests.cluster.harness import PATIENCE_S, Handled, World, echo, eventually
from tests.cluster.test_blobs import Client, MovedClock, pass_time, rows, twice
from tests.cluster.test_snapshots import snapshot
from tests.cluster.test_store_faults import place
from tests.cluster.test_three_nodes import Three, three
from tests.snapshots.conftest import credentials, proxy, rclone  # noqa: F401 - fixtures
from tests.snapshots.fault_proxy import Fault, FaultProxy, error
from tests.statemachine import invariants

#: The same in every run. A value that begins with the mark of `refs` is stored without it, and could equal its neighbour then.
LARGE = Random(1).randbytes(1 << 20)
OTHER = Random(2).randbytes(256 * 1024 + 77)
assert 1 not in LARGE[:8] + OTHER[:1], "no tail of it that a test uses begins with the mark"
QUICK = Policy(retry_s=0.05, retry_max_s=0.1)


class Place:
    """A store in a directory, as a mount that can be lost."""

    def __init__(self, path: Path) -> None:
        self.path = path / "store"
        self.path.mkdir(parents=True)

    def take_away(self) -> None:
        self.path.rename(self.path.with_suffix(".away"))

    def bring_back(self) -> None:
        self.path.with_suffix(".away").rename(self.path)

    def values(self, partition: int | None = None) -> list[Path]:
        """Files with large values, of one partition or of all."""
        folder = "*" if partition is None else f"{partition:04d}"
        found = [*self.path.glob(f"blobs/*/{folder}/*")]
        return sorted(path for path in found if path.is_file() and path.parent.name.isdigit())

    @property
    def value(self) -> Path:
        [path] = self.values()
        return path


@pytest.fixture
def store(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still for a while is not a store that does not answer."""
    monkeypatch.setattr(objects, "PUT_S", PATIENCE_S)
    monkeypatch.setattr(objects, "GET_S", PATIENCE_S)


async def usable(node: Node) -> None:
    node.snapshots.store_policy = QUICK
    await eventually(lambda: node.objects.why_not() is None, "a store that may be used")


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
        if it.node.snapshots.shared:
            await looked.wait()  # Else the node's own first look may meet a store that a test has taken away.
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


# -- there and back ----------------------------------------------------------------------------------------------------


async def test_a_value_goes_to_the_store_once_and_comes_back_to_handlers_and_clients(
    tmp_path: Path, store: Place
) -> None:
    async with storing(tmp_path, store.path) as client:
        it = client.it
        await it.register({"echo/twice": twice})

        answers = await asyncio.gather(*(client.post("/echo/twice", LARGE) for _ in range(4)))

        assert [(status, body == LARGE) for status, body, _ in answers] == [(200, True)] * 4
        assert store.value.read_bytes() == LARGE, "once, and as it is"
        assert rows(it.node.partitions[0], tables.BLOB) == 1 and rows(it.node.partitions[0], tables.CHUNK) == 0
        id_ = answers[0][2]["x-holdfast-id"]
        shown = await client.admin(f"/invocations/{id_}")
        assert (shown["large_values"], shown["large_bytes"]) == (3, 3 * len(LARGE))
        it.node.objects.forget()
        assert (await client.get(f"/holdfast/invocation/{id_}/attach"))[:2] == (200, LARGE)
        assert it.node.objects.gets == 1
        shown = await client.admin("/cluster")
        assert shown["blobs"] == {
            "in": "store", "store": str(store.path), "why_not_in_store": None, "error": None, "lost": 0,
        }  # fmt: skip
        async with client.http.get(it.node.admin_url + "/metrics") as scraped:
            metrics = await scraped.text()
        for line in (
            "holdfast_blobs_stored 1.0", "holdfast_blob_stored_bytes 1.048576e+06", "holdfast_blob_bytes 0.0",
            "holdfast_blob_puts_total 1.0", "holdfast_blob_gets_total 1.0", "holdfast_blob_store_usable 1.0",
        ):  # fmt: skip
            assert line in metrics
        check(it)


async def test_a_long_journal_in_the_store_is_replayed_in_order(tmp_path: Path, store: Place) -> None:
    """Nothing of it is at hand, so every frame waits for the one before, and what is said meanwhile waits behind."""
    values = [LARGE[number:] for number in range(4)]
    told: list[bytes] = []

    async def work(handled: Handled) -> None:
        if handled.start.attempt == 1:
            for number, value in enumerate(values):
                handled.run(f"step {number}", value)
            handled.wait_for(handled.step(Op.AWAKEABLE, "0/awakeable/0", []))
            return
        steps, more = list(handled.journal), handled.start.more
        while more:
            frame = await handled.receive()
            steps += [unpack_step(raw) for raw in frame.journal]  # type: ignore[union-attr]
            more = frame.more  # type: ignore[union-attr]
        told.extend(step.outcome[1] for step in steps if step.outcome)
        handled.output(b"done")

    async with storing(tmp_path, store.path) as client:
        it = client.it
        await it.register({"large/work": work})
        id_ = await it.send("large/work", OTHER)
        await it.reaches(id_, Status.SUSPENDED)
        assert len(store.values()) == 5
        it.node.objects.forget()

        status, _, _ = await client.post(
            f"/holdfast/awakeables/{format_awakeable(InvocationId(id_), 5)}/resolve", LARGE
        )

        assert status == 200 and await it.completed(id_) == [0, b"done"]
        assert told == [OTHER, *values, LARGE]
        check(it)


async def test_state_in_the_store_is_read_by_handlers_and_operators(tmp_path: Path, store: Place) -> None:
    async def look(handled: Handled) -> None:
        assert handled.start.state == {"small": b"1"} and not handled.start.state_complete
        if handled.length == 1:
            handled.step(Op.GET, "0/get/0", ["large"])
            outcome = await handled.completion(1)
            handled.output(outcome[1][1:])

    async with storing(tmp_path, store.path, blob_threshold_bytes=4096) as client:
        it = client.it
        await it.register({"thing:object/look:exclusive": look})
        value = Random(3).randbytes(5000)
        command = SetState("thing", "k", {"small": b"1", "large": value}, False)
        await it.node.router.submit_to(0, command)
        it.node.objects.forget()

        assert await it.call("thing/look", key="k") == [0, value]
        it.node.objects.forget()
        shown = await client.admin("/services/thing/k/state")
        assert shown["complete"] and len(store.values()) == 1
        keyed = await it.node.reader.keyed("thing", "k")
        assert keyed.state == {"small": b"1", "large": value}


async def test_requests_carry_values_of_the_store_too(tmp_path: Path, store: Place) -> None:
    async with storing(tmp_path, store.path) as client:
        it = client.it
        await it.register({"echo/say": echo}, modes=("request-response",))
        it.node.objects._remember = lambda *_: None  # type: ignore[method-assign]

        assert await it.call("echo/say", LARGE) == [0, LARGE]
        assert it.node.objects.gets >= 2


async def test_a_call_to_another_partition_puts_the_value_there_too(tmp_path: Path, store: Place) -> None:
    async def relay(handled: Handled) -> None:
        index = handled.step(Op.CALL, "0/call/0", ["echo", "say", "there", handled.input, {}])
        handled.output((await handled.completion(index))[1])

    async with storing(tmp_path, store.path, partitions=4) as client:
        it = client.it
        await it.register({"relay:object/go:exclusive": relay, "echo:object/say:exclusive": echo})
        it.node.objects._remember = lambda *_: None  # type: ignore[method-assign]
        there = partition_of(it.node.router.mint("echo", "there"), 4)
        keys = [str(number) for number in range(40)]
        key = next(k for k in keys if partition_of(it.node.router.mint("relay", k), 4) != there)

        assert await it.call("relay/go", LARGE, key=key) == [0, LARGE]

        here = partition_of(it.node.router.mint("relay", key), 4)
        assert [len(store.values(number)) for number in range(4)] == [int(n in (here, there)) for n in range(4)]
        check(it)


# -- a store that fails ------------------------------------------------------------------------------------------------


async def test_a_store_that_is_down_holds_up_no_write_and_is_used_again(tmp_path: Path, store: Place) -> None:
    async with storing(tmp_path, store.path) as client:
        it = client.it
        await it.register({"echo/say": echo})
        store.take_away()

        status, body, _ = await client.post("/echo/say", LARGE)

        assert (status, body == LARGE) == (200, True)
        assert rows(it.node.partitions[0], tables.CHUNK) == 4 and it.node.objects.fallbacks == 1
        shown = await client.admin("/cluster")
        assert shown["blobs"]["in"] == "log" and "does not exist" in shown["blobs"]["why_not_in_store"]
        assert (await client.post("/echo/say", OTHER))[:2] == (200, OTHER)
        assert it.node.objects.fallbacks == 1, "what is known to fail is not tried"

        store.bring_back()
        await usable(it.node)
        assert (await client.post("/echo/say", LARGE[1:]))[:2] == (200, LARGE[1:])
        assert store.value.read_bytes() == LARGE[1:]
        assert (await client.post("/echo/say", LARGE))[:2] == (200, LARGE), "in pieces still"
        check(it)


async def test_a_store_that_hangs_holds_up_a_write_for_a_bounded_time(
    tmp_path: Path, store: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with storing(tmp_path, store.path) as client:
        it = client.it
        await it.register({"echo/say": echo})
        hangs = threading.Event()
        put_bytes = DirectoryStore.put_bytes

        def hang(self: DirectoryStore, data: bytes, name: str) -> None:
            if name.startswith("blobs/"):
                hangs.wait()
            put_bytes(self, data, name)

        monkeypatch.setattr(DirectoryStore, "put_bytes", hang)
        monkeypatch.setattr(objects, "PUT_S", 0.2)
        try:
            assert (await client.post("/echo/say", LARGE))[:2] == (200, LARGE)
            assert rows(it.node.partitions[0], tables.CHUNK) == 4 and it.node.objects.fallbacks == 1
        finally:
            hangs.set()
        await eventually(lambda: len(store.values()) == 1, "what came too late, and nobody refers to")


async def test_an_attempt_waits_for_a_store_that_is_down_and_nothing_is_counted_against_it(
    tmp_path: Path, store: Place
) -> None:
    async with storing(tmp_path, store.path) as client:
        it = client.it
        reached = asyncio.Event()

        async def once_more(handled: Handled) -> None:
            if handled.start.attempt == 1:
                reached.set()
                await asyncio.Event().wait()
            handled.output(handled.input)

        endpoint = await it.register({"echo/say": echo, "echo/once": once_more})
        id_ = await it.send("echo/once", LARGE)
        await reached.wait()
        store.take_away()
        it.node.objects.forget()
        endpoint.cut()

        record = await it.reaches(id_, Status.BACKING_OFF)

        assert (record.failures, record.failures_total) == (0, 0)
        shown = await client.admin(f"/invocations/{format_id(InvocationId(id_))}")
        assert "StoreDown" in shown["why_not_running"] and "does not exist" in shown["why_not_running"]
        assert (await client.admin("/cluster"))["blobs"]["error"] is not None
        assert (await it.call("echo/say", b"small")) == [0, b"small"], "nobody else waits for it"
        store.bring_back()
        outcome = await it.completed(id_)
        assert await it.node.reader.value(id_, outcome[1]) == LARGE
        record = await it.reaches(id_, Status.COMPLETED)
        assert record.failures_total == 0
        assert (await client.admin("/cluster"))["blobs"]["error"] is None


async def test_a_client_is_told_to_come_again_while_the_store_is_down(tmp_path: Path, store: Place) -> None:
    async with storing(tmp_path, store.path) as client:
        it = client.it
        await it.register({"echo/say": echo})
        _, _, headers = await client.post("/echo/say", LARGE)
        path = f"/holdfast/invocation/{headers['x-holdfast-id']}/output"
        it.node.objects.forget()
        store.take_away()

        status, body, headers = await client.get(path)

        assert status == 503 and "Retry-After" in headers and str(store.path).encode() in body
        store.bring_back()
        assert (await client.get(path))[:2] == (200, LARGE)


async def test_a_slow_value_holds_up_nobody_else_on_its_stream(
    tmp_path: Path, store: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with storing(tmp_path, store.path) as client:
        it = client.it
        await it.register({"echo/say": echo})
        assert await it.call("echo/say", b"small") == [0, b"small"]
        comes = threading.Event()
        read = DirectoryStore.read

        def slow(self: DirectoryStore, name: str, **more: Any) -> bytes:
            if name.startswith("blobs/"):
                comes.wait()
            return read(self, name, **more)

        monkeypatch.setattr(DirectoryStore, "read", slow)
        monkeypatch.setattr(objects, "GET_S", 3600.0)
        it.node.objects._remember = lambda *_: None  # type: ignore[method-assign]
        try:
            id_ = await it.send("echo/say", LARGE)
            await eventually(lambda: it.node.objects._getting, "a value that is being fetched")
            assert await it.call("echo/say", b"small") == [0, b"small"]
            attempt = it.node.invoker.attempts[id_]
            attempt.last_frame_at -= 1e6
            it.node.invoker._sweeper.cancel()
            it.node.invoker._sweep()
            assert not attempt.asked_at, "it is we who let it wait"
        finally:
            comes.set()
        await it.completed(id_)


async def test_values_are_fetched_for_a_stream_as_it_sends_them(
    tmp_path: Path, store: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "FETCHED_BYTES_MAX", 2 * len(LARGE) + 1000)
    async with storing(tmp_path, store.path) as client:
        it = client.it
        await it.register({"echo/say": echo})
        assert await it.call("echo/say", b"small") == [0, b"small"]
        [endpoint] = it.node.invoker.endpoints.values()
        stream = endpoint.carrier
        assert isinstance(stream, Stream)
        encoded, reads, most = stream._encoded, asyncio.Event(), 0

        async def stuck(frames: Any) -> Any:
            nonlocal most
            most = max(most, stream._fetched_bytes)
            await reads.wait()
            return await encoded(frames)

        stream._encoded = stuck  # type: ignore[method-assign]
        ids = [await it.send("echo/say", LARGE[number:]) for number in range(6)]
        await eventually(lambda: len(stream._to_fetch) >= 3, "values that wait until others are sent")
        reads.set()

        for number, id_ in enumerate(ids):
            outcome = await it.completed(id_)
            assert await it.node.reader.value(id_, outcome[1]) == LARGE[number:]
        assert most <= streams.FETCHED_BYTES_MAX
        await eventually(lambda: stream._fetched_bytes == 0 and not stream._behind, "nothing held")


# -- a store that lost something ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["missing", "damaged"])
async def test_a_lost_value_pauses_the_invocation_until_an_operator_brings_it_back(
    tmp_path: Path, store: Place, how: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "SECOND_LOOK_S", 0.01)
    async with storing(tmp_path, store.path) as client:
        it = client.it
        it.node.objects._remember = lambda *_: None  # type: ignore[method-assign]
        reached = asyncio.Event()

        async def once_more(handled: Handled) -> None:
            if handled.start.attempt == 1:
                reached.set()
                await asyncio.Event().wait()
            handled.output(handled.input)

        endpoint = await it.register({"echo/once": once_more})
        id_ = await it.send("echo/once", LARGE)
        await reached.wait()
        assert isinstance(it.node.clock, MovedClock)
        it.node.clock.ahead_ms += objects.SETTLED_MS
        if how == "missing":
            store.value.rename(tmp_path / "lost")
            lost = next(iter(store.path.glob("blobs/*/0000")))
        else:
            lost = store.value
            lost.write_bytes(LARGE[:-1] + b"?")
        endpoint.cut()

        await it.reaches(id_, Status.PAUSED)

        with it.node.partitions[0].state.read() as txn:
            why = queries.why_not_running(txn, id_)
            name = queries.place(txn, refs.make(LARGE)[0].data)
        assert "ValueLost" in why and name in why
        assert any(name in record.getMessage() for record in caplog.records if record.levelname == "ERROR")
        assert (await client.admin("/cluster"))["blobs"]["lost"] >= 1
        if how == "missing":
            (tmp_path / "lost").rename(lost / name)
        else:
            lost.write_bytes(LARGE)
        await it.node.router.submit(id_, Resume(id_, None))
        await it.completed(id_)


async def test_an_empty_directory_in_the_place_of_the_store_loses_nothing(
    tmp_path: Path, store: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a mount point that nothing is mounted on."""
    monkeypatch.setattr(objects, "SECOND_LOOK_S", 0.01)
    async with storing(tmp_path, store.path) as client:
        it = client.it
        await it.register({"echo/say": echo})
        _, _, headers = await client.post("/echo/say", LARGE)
        id_ = parse_id(headers["x-holdfast-id"])
        it.node.objects.forget()
        store.take_away()
        store.path.mkdir()
        ref = refs.make(LARGE)[0]

        with pytest.raises(StoreDown, match="nothing of this cluster"):
            await it.node.reader.value(id_, ref)

        shutil.rmtree(store.path)
        store.bring_back()
        assert await it.node.reader.value(id_, ref) == LARGE


async def test_only_who_is_up_to_date_says_that_a_value_is_lost(
    tmp_path: Path, store: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "SECOND_LOOK_S", 0.01)
    async with storing(tmp_path, store.path) as client:
        it = client.it
        await it.register({"echo/say": echo})
        _, _, headers = await client.post("/echo/say", LARGE)
        id_, ref = parse_id(headers["x-holdfast-id"]), refs.make(LARGE)[0]
        it.node.objects.forget()
        store.value.unlink()

        with pytest.raises(StoreDown, match="not seen in the store yet"):
            await it.node.reader.value(id_, ref)
        assert isinstance(it.node.clock, MovedClock)
        it.node.clock.ahead_ms += objects.SETTLED_MS
        with pytest.raises(ValueLost):
            await it.node.reader.value(id_, ref)

        behind = it.node.reader._ask

        async def ask(number: int, question: str, *arguments: Any, fresh: bool = True) -> Any:
            found = await behind(number, question, *arguments, fresh=fresh)
            return None if question == "blob" and fresh else found

        monkeypatch.setattr(it.node.reader, "_ask", ask)
        with pytest.raises(Exception, match="no longer kept"):
            await it.node.reader.value(id_, ref)
        assert it.node.objects.lost == 1


# -- deleting ----------------------------------------------------------------------------------------------------------


async def test_an_object_is_deleted_when_nothing_refers_to_the_value_for_a_while(tmp_path: Path, store: Place) -> None:
    async with storing(tmp_path, store.path) as client:
        it = client.it
        await it.register({"echo/twice": twice})
        ids = [parse_id((await client.post("/echo/twice", LARGE))[2]["x-holdfast-id"]) for _ in range(2)]
        partition = it.node.partitions[0]
        await partition.propose(Purge(ids[0]))
        await pass_time(it)
        assert len(store.values()) == 1
        await partition.propose(Purge(ids[1]))
        await pass_time(it, KEPT_MS - 60_000)
        assert len(store.values()) == 1

        await pass_time(it, 120_000)

        await eventually(lambda: not store.values() and not gone(it), "no object, and nothing to remember of it")
        assert it.node.objects.deleted == 1
        check(it)


async def test_what_could_not_be_deleted_is_deleted_by_the_next_leader(
    tmp_path: Path, store: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(janitor, "RETRY_S", 0.05)
    async with storing(tmp_path, store.path) as client:
        it = client.it
        await it.register({"echo/say": echo})
        id_ = parse_id((await client.post("/echo/say", LARGE))[2]["x-holdfast-id"])
        store.take_away()
        await it.node.partitions[0].propose(Purge(id_))
        await pass_time(it)
        await eventually(lambda: it.node.objects.chores.failures, "a failure")
        assert gone(it) == 1
        ahead = it.clock
        await it.kill()
        store.bring_back()
        it.clock = ahead

        await it.start()

        await eventually(lambda: not store.values() and not gone(it), "no object")


async def test_a_late_delete_of_a_deposed_leader_harms_nobody(tmp_path: Path, store: Place) -> None:
    """It deletes what was gone when it began. The same value, put again since, has another name."""
    async with storing(tmp_path, store.path) as client:
        it = client.it
        await it.register({"echo/say": echo})
        id_ = parse_id((await client.post("/echo/say", LARGE))[2]["x-holdfast-id"])
        old = store.value.name
        await it.node.partitions[0].propose(Purge(id_))
        await pass_time(it)
        await eventually(lambda: not store.values(), "no object")
        _, _, headers = await client.post("/echo/say", LARGE)

        await it.node.objects.delete(0, [old])

        it.node.objects.forget()
        path = f"/holdfast/invocation/{headers['x-holdfast-id']}/attach"
        assert (await client.get(path))[:2] == (200, LARGE) and store.value.name != old


async def test_what_was_put_and_never_said_is_swept_and_nothing_else(
    tmp_path: Path, store: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever put it died before it proposed the name."""
    async with storing(tmp_path, store.path) as client:
        it = client.it
        await it.register({"echo/say": echo})
        await client.post("/echo/say", LARGE)
        kept = store.value
        ref, stored = refs.make(OTHER)
        assert await it.node.objects.put(0, ref.data, bytes(stored)) is not None
        sweeper = Janitor(it.node.partitions[0], it.node.objects)
        foreign = kept.with_name("README")
        foreign.write_bytes(b"not ours")
        await sweeper._sweep()
        assert len(store.values()) == 3, "it may still be said"

        await pass_time(it, janitor.ORPHAN_MS + 60_000)
        await sweeper._sweep()

        assert store.values() == [kept, foreign] and it.node.objects.swept == 1
        with it.node.partitions[0].state.read() as txn:
            assert queries.place(txn, refs.make(LARGE)[0].data) == kept.name


async def test_an_object_that_is_named_too_late_is_put_again(
    tmp_path: Path, store: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """Clocks that differ by minutes: the value goes through the log, and the log says why."""
    async with storing(tmp_path, store.path) as client:
        it = client.it
        await it.register({"echo/say": echo})
        slow = Clock()
        it.node.objects._clock = slow
        assert isinstance(it.node.clock, MovedClock)
        it.node.clock.ahead_ms += KEPT_MS

        assert (await client.post("/echo/say", LARGE))[:2] == (200, LARGE)

        assert rows(it.node.partitions[0], tables.CHUNK) == 4 and it.node.objects.fallbacks == 1
        assert any("set the clocks" in record.getMessage() for record in caplog.records)
        assert (await client.post("/echo/say", OTHER))[:2] == (200, OTHER)
        assert len(store.values()) == 1, "not tried again at once"


# -- staging -----------------------------------------------------------------------------------------------------------


class Shelf:
    """As much of `Objects` as staging needs."""

    def __init__(self, *, takes: bool = True, is_usable: bool = True) -> None:
        self.takes, self.is_usable, self.times_apart = takes, is_usable, 0
        self.held: dict[str, bytes] = {}

    def usable(self, number: int) -> bool:
        return self.is_usable

    async def put(self, number: int, blob: bytes, data: bytes) -> str | None:
        if not self.takes:
            return None
        name = f"object {len(self.held)}"
        self.held[name] = data
        return name

    def apart(self, number: int) -> None:
        self.times_apart += 1


@pytest.mark.parametrize(
    ("shelf", "answer", "pieces", "held"),
    [
        (Shelf(), 0, 0, 1),
        (Shelf(), 200, 0, 1),
        (Shelf(), STALE, 4, 1),
        (Shelf(), 400, 4, 1),
        (Shelf(takes=False), 0, 4, 0),
        (Shelf(is_usable=False), 0, 4, 0),
        (None, 0, 4, 0),
    ],
)
async def test_a_value_goes_to_the_store_or_in_pieces(shelf: Shelf | None, answer: int, pieces: int, held: int) -> None:
    stager = Stager(objects=shelf)  # type: ignore[arg-type]
    said: list[Any] = []

    async def put(command: Any) -> Result:
        said.append(command)
        return Result({TouchBlob: 404, KeepBlob: answer, PutBlob: 0}[type(command)])

    light = await stager.detach(0, Complete(bytes(16), 1, [0, LARGE], None), put)

    assert refs.in_command(light) == [refs.make(LARGE)[0]]
    assert sum(type(command) is PutBlob for command in said) == pieces
    assert len(shelf.held if shelf is not None else {}) == held
    if shelf is not None:
        assert all(data == LARGE for data in shelf.held.values()) and shelf.times_apart == (answer == STALE)
        names = [command.object for command in said if type(command) is KeepBlob]
        assert names == list(shelf.held)


# -- several nodes -----------------------------------------------------------------------------------------------------


async def all_usable(cluster: Three) -> None:
    await asyncio.gather(*(usable(seat.node) for seat in cluster.up()))


async def goes_around(path: Path, url: str, count: Callable[[], int]) -> None:
    """Through every node; then a leader dies, a node is wiped, and catches up."""
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
        partition = seat.node.hosted.get(0)
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
        assert it.node.objects.fallbacks == 1
        proxy.heal()
        await usable(it.node)

        _, _, headers = await client.post("/echo/say", LARGE)
        assert it.node.objects.puts == 1
        path = f"/holdfast/invocation/{headers['x-holdfast-id']}/attach"
        it.node.objects.forget()
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
        await eventually(lambda: "another store" in str(node.objects.why_not()), "a refusal")

        assert await cluster.seats["n1"].call("echo/say", LARGE, key="k") == [0, LARGE]

        assert not [*tmp_path.glob("store of */blobs/*/0000")] and node.objects.puts == 0
    finally:
        await cluster.stop()


async def test_a_node_that_is_down_keeps_nobody_from_the_store_that_it_used_before(
    tmp_path: Path, store: Place
) -> None:
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
        await eventually(lambda: "n3 has not found" in str(first.node.objects.why_not()), "a doubt about n3")


async def test_while_a_node_of_an_older_release_is_there_nothing_is_put_into_the_store(
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
            seat.node.objects._confirmed.clear()
        del old.rpc._handlers["blob-mark"]
        await eventually(lambda: "older release" in str(new.objects.why_not()), "a refusal")

        assert await cluster.seats["n1"].call("echo/say", LARGE, key="k") == [0, LARGE]

        assert not store.values()
        old.rpc.serve("blob-mark", old.objects._serve_mark)
        await all_usable(cluster)
    finally:
        await cluster.stop()


async def test_blobs_through_the_log_are_a_setting_and_what_is_stored_is_still_read(
    tmp_path: Path, store: Place
) -> None:
    async with storing(tmp_path, store.path) as client:
        await client.it.register({"echo/say": echo})
        _, _, headers = await client.post("/echo/say", LARGE)
    it = World(tmp_path, partitions=1, snapshots=str(store.path), blobs="log")
    await it.start()
    try:
        await it.register({"echo/say": echo})
        assert await it.call("echo/say", OTHER) == [0, OTHER]
        id_ = parse_id(headers["x-holdfast-id"])
        assert await it.node.reader.value(id_, refs.make(LARGE)[0]) == LARGE
        assert len(store.values()) == 1 and it.node.objects.why_not() == 'blobs = "log"'
    finally:
        await it.stop()


# -- backups -----------------------------------------------------------------------------------------------------------


async def backed_up(it: World, place: Path) -> None:
    job = it.node.backups.begin(str(place))
    await eventually(lambda: it.node.backups.recent()[0]["status"] != "running", f"the backup {job['id']}")
    assert it.node.backups.recent()[0]["status"] == "succeeded", it.node.backups.recent()[0]


async def test_a_backup_has_the_values_whatever_becomes_of_the_store(tmp_path: Path, store: Place) -> None:
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
        it.node.objects.forget()
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
        assert await new.node.reader.value(first, refs.make(LARGE)[0]) == LARGE
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
        copies = it.node.backups.copies
        fill, filling, go = copies._fill, asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def late(*args: Any) -> Any:
            loop.call_soon_threadsafe(filling.set)
            go.wait()
            return fill(*args)

        monkeypatch.setattr(copies, "_fill", late)
        it.node.backups.begin(str(backups))
        await filling.wait()
        await it.node.partitions[0].propose(Purge(id_))
        await pass_time(it)
        assert gone(it) == 1 and len(store.values()) == 1
        go.set()

        await eventually(lambda: it.node.backups.recent()[0]["status"] != "running", "the backup")
        assert it.node.backups.recent()[0]["status"] == "succeeded" and it.node.backups.recent()[0]["rounds"] == 1
        await eventually(lambda: not store.values(), "it is deleted afterwards")


async def test_a_copy_whose_objects_are_gone_is_made_again(
    tmp_path: Path, store: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another node began to lead, and knows nothing of the copy."""
    monkeypatch.setattr(objects, "SECOND_LOOK_S", 0.01)
    backups = tmp_path / "backups"
    backups.mkdir()
    async with storing(tmp_path, store.path) as client:
        it = client.it
        await it.register({"echo/say": echo})
        id_ = parse_id((await client.post("/echo/say", LARGE))[2]["x-holdfast-id"])
        partition, copies = it.node.partitions[0], it.node.backups.copies
        fill, rounds = copies._fill, 0

        def deleted_before(*args: Any) -> Any:
            nonlocal rounds
            rounds += 1
            if rounds == 1:
                asyncio.run_coroutine_threadsafe(forget(partition, id_), loop).result()
                store.value.unlink()
            return fill(*args)

        async def forget(partition: Partition, id_: bytes) -> None:
            await partition.propose(Purge(id_))
            await pass_time(it)

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(copies, "_fill", deleted_before)
        await backed_up(it, backups)
        assert it.node.backups.recent()[0]["rounds"] == 2
