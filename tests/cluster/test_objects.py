"""Large values in the shared store: writing, reading, and a store that fails or lost objects."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path
from random import Random
from typing import Any

import pytest

from holdfast.cluster.handlers import large
from holdfast.cluster.handlers.protocols.native.stream import Stream
from holdfast.cluster.values import shared_store as objects
from holdfast.cluster.values.shared_store import StoreDown, ValueLost
from holdfast.sdk.ids import (
    PartitionNumber,
    format_awakeable,
    format_id,
    parse_id,
    partition_of,
)
from holdfast.sdk.journal import Op, unpack_step
from holdfast.snapshots.directory import DirectoryStore
from holdfast.statemachine import explain, queries, refs, tables
from holdfast.statemachine.commands import Resume, SetState
from holdfast.statemachine.effects import Status
from tests.cluster.harness import Handled, echo, eventually
from tests.cluster.large_values import MovedClock, rows, twice
from tests.cluster.stored_values import LARGE, OTHER, Place, check, storing, usable

pytestmark = pytest.mark.usefixtures("patient")


# -- there and back ---------------------------------------------------------------------------------------------------


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
        it.node.ground.objects.forget()
        assert (await client.get(f"/holdfast/invocation/{id_}/attach"))[:2] == (200, LARGE)
        assert it.node.ground.objects.gets == 1
        shown = await client.admin("/cluster")
        assert shown["blobs"] == {
            "in": "store", "store": str(store.path), "why_not_in_store": None, "error": None, "lost": 0,
        }  # fmt: skip
        async with client.http.get(it.node.doors.urls.admin + "/metrics") as scraped:
            metrics = await scraped.text()
        for line in (
            "holdfast_blobs_stored 1.0", "holdfast_blob_stored_bytes 1.048576e+06", "holdfast_blob_bytes 0.0",
            "holdfast_blob_puts_total 1.0", "holdfast_blob_gets_total 1.0", "holdfast_blob_store_usable 1.0",
        ):  # fmt: skip
            assert line in metrics
        check(it)


async def test_a_long_journal_in_the_store_is_replayed_in_order(tmp_path: Path, store: Place) -> None:
    """No value is cached, so every frame waits for the one before, and later frames wait behind it."""
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
        it.node.ground.objects.forget()

        status, _, _ = await client.post(f"/holdfast/awakeables/{format_awakeable(id_, 5)}/resolve", LARGE)

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
        await it.node.serving.router.submit_to(PartitionNumber(0), command)
        it.node.ground.objects.forget()

        assert await it.call("thing/look", key="k") == [0, value]
        it.node.ground.objects.forget()
        shown = await client.admin("/services/thing/k/state")
        assert shown["complete"] and len(store.values()) == 1
        keyed = await it.node.serving.reader.keyed("thing", "k")
        assert keyed.state == {"small": b"1", "large": value}


async def test_requests_carry_values_of_the_store_too(tmp_path: Path, store: Place) -> None:
    async with storing(tmp_path, store.path) as client:
        it = client.it
        await it.register({"echo/say": echo}, modes=("request-response",))
        it.node.ground.objects._remember = lambda *_: None  # type: ignore[method-assign]

        assert await it.call("echo/say", LARGE) == [0, LARGE]
        assert it.node.ground.objects.gets >= 2


async def test_a_call_to_another_partition_puts_the_value_there_too(tmp_path: Path, store: Place) -> None:
    async def relay(handled: Handled) -> None:
        index = handled.step(Op.CALL, "0/call/0", ["echo", "say", "there", handled.input, {}])
        handled.output((await handled.completion(index))[1])

    async with storing(tmp_path, store.path, partitions=4) as client:
        it = client.it
        await it.register({"relay:object/go:exclusive": relay, "echo:object/say:exclusive": echo})
        it.node.ground.objects._remember = lambda *_: None  # type: ignore[method-assign]
        there = partition_of(it.node.serving.router.mint("echo", "there"), 4)
        keys = [str(number) for number in range(40)]
        key = next(k for k in keys if partition_of(it.node.serving.router.mint("relay", k), 4) != there)

        assert await it.call("relay/go", LARGE, key=key) == [0, LARGE]

        here = partition_of(it.node.serving.router.mint("relay", key), 4)
        assert [len(store.values(number)) for number in range(4)] == [int(n in (here, there)) for n in range(4)]
        check(it)


# -- a store that fails -----------------------------------------------------------------------------------------------


async def test_a_store_that_is_down_holds_up_no_write_and_is_used_again(tmp_path: Path, store: Place) -> None:
    async with storing(tmp_path, store.path) as client:
        it = client.it
        await it.register({"echo/say": echo})
        store.take_away()

        status, body, _ = await client.post("/echo/say", LARGE)

        assert (status, body == LARGE) == (200, True)
        assert rows(it.node.partitions[0], tables.CHUNK) == 4 and it.node.ground.objects.fallbacks == 1
        shown = await client.admin("/cluster")
        assert shown["blobs"]["in"] == "log" and "does not exist" in shown["blobs"]["why_not_in_store"]
        assert (await client.post("/echo/say", OTHER))[:2] == (200, OTHER)
        assert it.node.ground.objects.fallbacks == 1, "what is known to fail is not tried"

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
            assert rows(it.node.partitions[0], tables.CHUNK) == 4 and it.node.ground.objects.fallbacks == 1
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
        it.node.ground.objects.forget()
        endpoint.cut()

        record = await it.reaches(id_, Status.BACKING_OFF)

        assert (record.failures, record.failures_total) == (0, 0)
        shown = await client.admin(f"/invocations/{format_id(id_)}")
        assert "StoreDown" in shown["why_not_running"] and "does not exist" in shown["why_not_running"]
        assert (await client.admin("/cluster"))["blobs"]["error"] is not None
        assert (await it.call("echo/say", b"small")) == [0, b"small"], "nobody else waits for it"
        store.bring_back()
        outcome = await it.completed(id_)
        assert await it.node.serving.reader.value(id_, outcome[1]) == LARGE
        record = await it.reaches(id_, Status.COMPLETED)
        assert record.failures_total == 0
        assert (await client.admin("/cluster"))["blobs"]["error"] is None


async def test_a_client_gets_retry_after_while_the_store_is_down(tmp_path: Path, store: Place) -> None:
    async with storing(tmp_path, store.path) as client:
        it = client.it
        await it.register({"echo/say": echo})
        _, _, headers = await client.post("/echo/say", LARGE)
        path = f"/holdfast/invocation/{headers['x-holdfast-id']}/output"
        it.node.ground.objects.forget()
        store.take_away()

        status, body, headers = await client.get(path)

        assert status == 503 and "Retry-After" in headers and str(store.path).encode() in body
        store.bring_back()
        assert (await client.get(path))[:2] == (200, LARGE)


async def test_a_slow_value_delays_no_other_attempt_on_its_stream(
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
        it.node.ground.objects._remember = lambda *_: None  # type: ignore[method-assign]
        try:
            id_ = await it.send("echo/say", LARGE)
            await eventually(lambda: it.node.ground.objects._getting, "a value that is being fetched")
            assert await it.call("echo/say", b"small") == [0, b"small"]
            attempt = it.node.ground.invoker.attempts[id_]
            attempt.last_frame_at -= 1e6
            it.node.ground.invoker._sweeper.cancel()
            it.node.ground.invoker._sweep()
            assert not attempt.asked_at, "it is we who let it wait"
        finally:
            comes.set()
        await it.completed(id_)


async def test_values_are_fetched_for_a_stream_as_it_sends_them(
    tmp_path: Path, store: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large, "FETCHED_BYTES_MAX", 2 * len(LARGE) + 1000)
    async with storing(tmp_path, store.path) as client:
        it = client.it
        await it.register({"echo/say": echo})
        assert await it.call("echo/say", b"small") == [0, b"small"]
        [endpoint] = it.node.ground.invoker.endpoints.values()
        stream = endpoint.carrier
        assert isinstance(stream, Stream)
        encoded, reads, most = stream._encoded, asyncio.Event(), 0

        async def stuck(frames: Any) -> Any:
            nonlocal most
            most = max(most, stream._fetches._bytes)
            await reads.wait()
            return await encoded(frames)

        stream._encoded = stuck  # type: ignore[method-assign]
        ids = [await it.send("echo/say", LARGE[number:]) for number in range(6)]
        await eventually(lambda: len(stream._fetches._waiting) >= 3, "values that wait until others are sent")
        reads.set()

        for number, id_ in enumerate(ids):
            outcome = await it.completed(id_)
            assert await it.node.serving.reader.value(id_, outcome[1]) == LARGE[number:]
        assert most <= large.FETCHED_BYTES_MAX
        await eventually(lambda: stream._fetches._bytes == 0 and not stream._behind, "nothing held")


# -- a store that lost something --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["missing", "damaged"])
async def test_a_lost_value_pauses_the_invocation_until_an_operator_brings_it_back(
    tmp_path: Path, store: Place, how: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "SECOND_LOOK_S", 0.01)
    async with storing(tmp_path, store.path) as client:
        it = client.it
        it.node.ground.objects._remember = lambda *_: None  # type: ignore[method-assign]
        reached = asyncio.Event()

        async def once_more(handled: Handled) -> None:
            if handled.start.attempt == 1:
                reached.set()
                await asyncio.Event().wait()
            handled.output(handled.input)

        endpoint = await it.register({"echo/once": once_more})
        id_ = await it.send("echo/once", LARGE)
        await reached.wait()
        assert isinstance(it.node.environment.clock, MovedClock)
        it.node.environment.clock.ahead_ms += objects.SETTLED_MS
        if how == "missing":
            store.value.rename(tmp_path / "lost")
            lost = next(iter(store.path.glob("blobs/*/0000")))
        else:
            lost = store.value
            lost.write_bytes(LARGE[:-1] + b"?")
        endpoint.cut()

        await it.reaches(id_, Status.PAUSED)

        with it.node.partitions[0].state.read() as txn:
            why = explain.why_not_running(txn, id_)
            name = queries.place(txn, refs.make(LARGE)[0].data)
        assert "ValueLost" in why and name in why
        assert any(name in record.getMessage() for record in caplog.records if record.levelname == "ERROR")
        assert (await client.admin("/cluster"))["blobs"]["lost"] >= 1
        if how == "missing":
            (tmp_path / "lost").rename(lost / name)
        else:
            lost.write_bytes(LARGE)
        await it.node.serving.router.submit(id_, Resume(id_, None))
        await it.completed(id_)


async def test_an_empty_directory_in_the_place_of_the_store_loses_nothing(
    tmp_path: Path, store: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like a mount point without its mount."""
    monkeypatch.setattr(objects, "SECOND_LOOK_S", 0.01)
    async with storing(tmp_path, store.path) as client:
        it = client.it
        await it.register({"echo/say": echo})
        _, _, headers = await client.post("/echo/say", LARGE)
        id_ = parse_id(headers["x-holdfast-id"])
        it.node.ground.objects.forget()
        store.take_away()
        store.path.mkdir()
        ref = refs.make(LARGE)[0]

        with pytest.raises(StoreDown, match="no data of this cluster"):
            await it.node.serving.reader.value(id_, ref)

        shutil.rmtree(store.path)
        store.bring_back()
        assert await it.node.serving.reader.value(id_, ref) == LARGE


async def test_only_an_up_to_date_replica_reports_that_a_value_is_lost(
    tmp_path: Path, store: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "SECOND_LOOK_S", 0.01)
    async with storing(tmp_path, store.path) as client:
        it = client.it
        await it.register({"echo/say": echo})
        _, _, headers = await client.post("/echo/say", LARGE)
        id_, ref = parse_id(headers["x-holdfast-id"]), refs.make(LARGE)[0]
        it.node.ground.objects.forget()
        store.value.unlink()

        with pytest.raises(StoreDown, match="not visible in the store yet"):
            await it.node.serving.reader.value(id_, ref)
        assert isinstance(it.node.environment.clock, MovedClock)
        it.node.environment.clock.ahead_ms += objects.SETTLED_MS
        with pytest.raises(ValueLost):
            await it.node.serving.reader.value(id_, ref)

        behind = it.node.serving.reader._ask

        async def ask(number: PartitionNumber, question: str, *arguments: Any, fresh: bool = True) -> Any:
            found = await behind(number, question, *arguments, fresh=fresh)
            return None if question == "blob" and fresh else found

        monkeypatch.setattr(it.node.serving.reader, "_ask", ask)
        with pytest.raises(Exception, match="no longer exists"):
            await it.node.serving.reader.value(id_, ref)
        assert it.node.ground.objects.lost == 1
