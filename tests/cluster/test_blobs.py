"""Large values: staged in pieces, kept once, resolved for handlers and clients, and collected."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest

from holdfast.cluster.clock import Clock
from holdfast.cluster.handlers import invoker
from holdfast.cluster.handlers.protocols.native import requests
from holdfast.cluster.handlers.protocols.native.stream import Stream
from holdfast.cluster.partition.door import Partition
from holdfast.cluster.values.staging import (
    WINDOW_CHUNKS,
    Chunk,
    Stager,
    pieces_of,
)
from holdfast.sdk import Context, ObjectContext, Service, VirtualObject
from holdfast.sdk.frames import Journal, StepFrame
from holdfast.sdk.ids import parse_id
from holdfast.sdk.journal import Op, unpack_step
from holdfast.sdk.server import Server
from holdfast.statemachine import queries, refs, tables
from holdfast.statemachine.blobs import CHUNK_BYTES, KEPT_MS
from holdfast.statemachine.commands import Command, Complete, FireTimers, Purge, PutBlob, TouchBlob
from holdfast.statemachine.effects import Result, Status
from tests.cluster.harness import PATIENCE_S, Handled, World, echo, eventually, world
from tests.cluster.test_snapshots import snapshot
from tests.cluster.test_three_nodes import Three, three

MIB = 1 << 20
LARGE = Random(1).randbytes(MIB)
OTHER = Random(2).randbytes(CHUNK_BYTES + 77)


class MovedClock(Clock):
    ahead_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.ahead_ms


class Client:
    """A world, and real HTTP to it."""

    def __init__(self, it: World, http: aiohttp.ClientSession) -> None:
        self.it = it
        self.http = http

    async def post(self, path: str, body: bytes = b"", **more: Any) -> tuple[int, bytes, dict[str, str]]:
        return await self._ask("POST", path, data=body, **more)

    async def get(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        return await self._ask("GET", path)

    async def _ask(self, method: str, path: str, **more: Any) -> tuple[int, bytes, dict[str, str]]:
        async with (
            asyncio.timeout(PATIENCE_S),
            self.http.request(method, self.it.node.ingress_url + path, **more) as it,
        ):
            return it.status, await it.read(), dict(it.headers)

    async def admin(self, path: str, method: str = "GET", **more: Any) -> Any:
        async with self.http.request(method, self.it.node.admin_url + path, **more) as it:
            return await it.json()


@asynccontextmanager
async def clients(path: Path, **settings: Any) -> AsyncIterator[Client]:
    async with world(path, **settings) as it, aiohttp.ClientSession() as http:
        yield Client(it, http)


def rows(partition: Partition, table: bytes) -> int:
    with partition.state.read() as txn:
        return sum(1 for _ in txn.scan(table, tables.after(table)))


def blobs(it: World) -> list[int]:
    """Of each partition."""
    return [rows(partition, tables.BLOB) for partition in it.node.partitions]


async def pass_time(it: World, ms: int = KEPT_MS) -> None:
    assert isinstance(it.node.clock, MovedClock)
    it.node.clock.ahead_ms += ms
    for partition in it.node.partitions:
        await partition.propose(FireTimers(1000))


async def twice(handled: Handled) -> None:
    """A step with the input as its result, and the outcome too."""
    if handled.length == 1:
        handled.run("copy", handled.input)
        await handled.acks(handled.length)
    handled.output(handled.input)


# -- through the doors -------------------------------------------------------------------------------------------------


async def test_a_body_of_32_mib_and_a_step_of_20_reach_handlers_and_clients_and_are_replayed(tmp_path: Path) -> None:
    """With the SDK, over HTTP. The attempt is lost behind its step, so the next one gets all of it from the journal."""
    body = Random(3).randbytes(32 * MIB)
    made = body[: 20 * MIB]
    service = Service("large")
    seen: list[tuple[int, bool, bool]] = []

    @service.handler
    async def echo(ctx: Context, value: bytes) -> bytes:
        def cut_it() -> bytes:
            return made

        cut = await ctx.run("cut", cut_it)
        seen.append((ctx.attempt, value == body, cut == made))
        if ctx.attempt == 1:
            raise RuntimeError("once more")
        return value

    server = Server([service])
    await server.start(port=0)
    async with clients(tmp_path, partitions=1, body_bytes_max=32 * MIB) as client:
        await client.it.node.registry.register(f"http://127.0.0.1:{server.port}")
        headers = {"Content-Type": "application/octet-stream"}

        status, found, answered = await client.post("/large/echo", body, headers=headers)

        assert (status, found == body) == (200, True), found[:300]
        assert seen == [(1, True, True), (2, True, True)]
        id_ = answered["x-holdfast-id"]
        shown = await client.admin(f"/invocations/{id_}")
        assert (shown["large_values"], shown["large_bytes"]) == (3, 84 * MIB) and shown["journal_bytes"] < 1000
        assert shown["outcome"]["value"]["bytes"] == 32 * MIB
        [_, step] = (await client.admin(f"/invocations/{id_}/journal"))["steps"]
        assert step["outcome"]["value"]["bytes"] == 20 * MIB
        statistics = await client.it.node.reader.statistics()
        assert (statistics.blobs, statistics.blob_bytes) == (2, 52 * MIB), "each once"
        assert client.it.node.invoker.staging_bytes == 0
        async with client.http.get(client.it.node.admin_url + "/metrics") as scraped:
            metrics = await scraped.text()
        assert "holdfast_blobs 2.0" in metrics and "holdfast_blobs_staged_total 2.0" in metrics
    await server.stop()


async def test_a_body_beyond_the_bound_is_refused_with_a_hint(tmp_path: Path) -> None:
    async with clients(tmp_path, partitions=1, body_bytes_max=MIB) as client:
        await client.it.register({"echo/say": echo})

        status, found, _ = await client.post("/echo/say", LARGE + b"x")

        assert status == 413 and b"body_bytes_max" in found and b"33554432" in found
        assert (await client.post("/echo/say", LARGE))[1] == LARGE


async def test_bodies_beyond_what_a_node_holds_are_refused_and_the_others_answered(tmp_path: Path) -> None:
    async with clients(tmp_path, partitions=1, request_bytes_max=4 * MIB) as client:
        await client.it.register({"echo/say": echo})

        answers = await asyncio.gather(*(client.post("/echo/say", LARGE) for _ in range(24)))

        found = {status for status, _, _ in answers}
        assert found <= {200, 429} and 200 in found
        assert all(body == LARGE for status, body, _ in answers if status == 200)
        assert all("Retry-After" in headers for status, _, headers in answers if status == 429)
        assert client.it.node.ingress is not None
        await eventually(lambda: client.it.node.ingress._ingress.active_bytes == 0, "nothing held")  # type: ignore[union-attr]
        assert (await client.post("/echo/say", LARGE))[0] == 200
        assert blobs(client.it) == [1]


async def test_equal_values_of_many_at_once_are_kept_once_and_collected_after_the_last(tmp_path: Path) -> None:
    it = World(tmp_path, partitions=1)
    it.clock = MovedClock()
    await it.start()
    await it.register({"echo/twice": twice})
    empty = it.node.partitions[0].state.bytes_used()
    async with aiohttp.ClientSession() as http:
        client = Client(it, http)
        answers = await asyncio.gather(*(client.post("/echo/twice", LARGE) for _ in range(8)))
        assert [(status, found == LARGE) for status, found, _ in answers] == [(200, True)] * 8
    partition = it.node.partitions[0]
    assert (rows(partition, tables.BLOB), rows(partition, tables.CHUNK)) == (1, 4)
    assert it.node.stager.staged == 1 and it.node.stager.found >= 23
    assert partition.state.bytes_used() < empty + 2 * MIB

    ids = [parse_id(headers["x-holdfast-id"]) for _, _, headers in answers]
    for id_ in ids[:-1]:
        assert (await partition.propose(Purge(id_))).code == 0
    await pass_time(it)
    assert rows(partition, tables.CHUNK) == 4
    await partition.propose(Purge(ids[-1]))
    await pass_time(it)
    assert rows(partition, tables.BLOB) == rows(partition, tables.CHUNK) == 0
    assert partition.state.bytes_used() < empty + MIB // 4, "its room is free again"
    await it.stop()


async def test_large_state_and_awakeables_go_the_same_way(tmp_path: Path) -> None:
    thing = VirtualObject("thing")
    names: list[str] = []

    @thing.handler
    async def keep(ctx: ObjectContext) -> bytes:
        name, awaited = ctx.awakeable(bytes)
        names.append(name)
        value = await awaited
        ctx.set("value", value)
        return await ctx.get("value", bytes) or b""

    @thing.handler(shared=True)
    async def read(ctx: ObjectContext) -> bytes:
        return await ctx.get("value", bytes) or b""

    server = Server([thing])
    await server.start(port=0)
    async with clients(tmp_path, partitions=2) as client:
        await client.it.node.registry.register(f"http://127.0.0.1:{server.port}")
        asked = asyncio.ensure_future(client.post("/thing/k/keep"))
        await eventually(lambda: names, "the awakeable")
        for expected in (b"Resolved", b"AlreadyResolved"):
            status, found, _ = await client.post(f"/holdfast/awakeables/{names[0]}/resolve", LARGE)
            assert status == 200 and expected in found

        assert (await asked)[:2] == (200, LARGE)
        assert (await client.post("/thing/k/read"))[:2] == (200, LARGE)
        assert sorted(blobs(client.it)) == [0, 1]
        changes = {"values": {"note": "n" * 300_000, "a": "x" * 200_000, "b": "y" * 200_000}}
        shown = await client.admin("/services/thing/k/state", "PUT", json=changes)
        assert shown["state"]["note"] == "n" * 300_000 and shown["complete"]
        assert sum(blobs(client.it)) == 4, "values that are too large together are kept apart as well"
    await server.stop()


async def test_an_attach_and_a_later_question_find_a_large_outcome(tmp_path: Path) -> None:
    async with clients(tmp_path, partitions=2) as client:
        await client.it.register({"echo/say": echo})
        _, _, headers = await client.post("/echo/say/send", LARGE)
        id_ = headers["x-holdfast-id"]

        assert (await client.get(f"/holdfast/invocation/{id_}/attach"))[:2] == (200, LARGE)
        assert (await client.get(f"/holdfast/invocation/{id_}/output"))[:2] == (200, LARGE)
        assert client.it.node.ingress is not None and client.it.node.ingress._ingress.active_bytes == 0


async def test_a_large_answer_waits_until_others_are_sent(tmp_path: Path) -> None:
    async with clients(tmp_path, partitions=1, request_bytes_max=4 * MIB) as client:
        await client.it.register({"echo/say": echo})
        assert client.it.node.ingress is not None
        ingress = client.it.node.ingress._ingress
        _, _, headers = await client.post("/echo/say/send", LARGE)
        await client.it.completed(parse_id(headers["x-holdfast-id"]))
        ingress.active_bytes += 4 * MIB  # Somebody else's.

        asked = asyncio.ensure_future(client.get(f"/holdfast/invocation/{headers['x-holdfast-id']}/output"))
        await eventually(lambda: ingress.active == 1, "the question")
        await asyncio.sleep(0.05)
        assert not asked.done()
        ingress.active_bytes -= 4 * MIB
        assert (await asked)[:2] == (200, LARGE)


# -- between partitions, restarts, leaders -----------------------------------------------------------------------------


async def parent(handled: Handled) -> None:
    """Calls `echo/say` of another key with its own input, and hands the outcome on."""
    if handled.length == 1:
        index = handled.step(Op.CALL, "call", ["echo", "say", "other", handled.input, {}])
        handled.output((await handled.completion(index))[1])
    else:
        outcome = handled.journal[1].outcome
        if outcome is None:
            handled.output((await handled.completion(1))[1])
        else:
            handled.output(outcome[1])


async def test_a_large_call_between_partitions_is_staged_there_and_answered(tmp_path: Path) -> None:
    async with clients(tmp_path, partitions=4) as client:
        it = client.it
        await it.register({"echo:object/say:exclusive": echo, "calls:object/call:exclusive": parent})

        answers = await asyncio.gather(*(client.post(f"/calls/{key}/call", LARGE) for key in range(8)))

        assert [(status, found == LARGE) for status, found, _ in answers] == [(200, True)] * 8
        assert set(blobs(it)) <= {0, 1} and sum(blobs(it)) >= 2, "once in each partition that needs it"
        await eventually(lambda: not any(rows(each, tables.PARCEL) for each in it.node.partitions), "trimmed outboxes")


async def test_a_value_outlives_a_restart_and_a_snapshot(tmp_path: Path) -> None:
    """Rebuilt from the snapshot and the rest of the log, as after a crash of the machine."""
    async with clients(tmp_path, partitions=1, log_tail=0) as client:
        it = client.it
        await it.register({"echo/twice": twice})
        _, _, first = await client.post("/echo/twice", LARGE)
        await snapshot(it)
        _, _, second = await client.post("/echo/twice", OTHER)
        with it.node.partitions[0].state.read() as txn:
            digest = queries.digest(txn)
        it.boot = "boot 2"
        await it.restart()

        for headers, value in ((first, LARGE), (second, OTHER)):
            assert (await client.get(f"/holdfast/invocation/{headers['x-holdfast-id']}/output"))[:2] == (200, value)
        assert blobs(it) == [2] and it.node.partitions[0].group.status().base > 0 and digest


async def test_what_was_staged_by_halves_before_a_crash_goes(tmp_path: Path) -> None:
    it = World(tmp_path, partitions=1)
    it.clock = MovedClock()
    await it.start()
    ref, stored = refs.make(LARGE)
    await it.node.partitions[0].propose(PutBlob(ref.data, 2, bytes(stored[2 * CHUNK_BYTES : 3 * CHUNK_BYTES])))
    await it.restart()
    assert blobs(it) == [1]
    assert (await it.node.partitions[0].propose(TouchBlob(ref.data, False))).code == 404

    await pass_time(it)

    assert blobs(it) == [0] and rows(it.node.partitions[0], tables.CHUNK) == 0
    await it.stop()


def equal_everywhere(cluster: Three) -> bool:
    def digest(partition: Partition) -> bytes:
        with partition.state.read() as txn:
            return queries.digest(txn)

    return all(
        len({digest(seat.node.hosted[number]) for seat in cluster.up()}) == 1 for number in cluster.up()[0].node.hosted
    )


async def test_a_leader_that_dies_in_the_middle_of_staging_costs_the_client_nothing(tmp_path: Path) -> None:
    """Pieces that were applied stay; the next leader takes the rest. A wiped node gets all of it from a snapshot."""
    body = Random(4).randbytes(6 * MIB)
    settings = {"body_bytes_max": 8 * MIB, "log_tail": 0}
    async with three(tmp_path, {"echo:object/twice:exclusive": twice}, partitions=1, **settings) as cluster:
        await cluster.led()
        victim = await cluster.leader(0)
        living = next(seat for seat in cluster.up() if seat is not victim)
        async with aiohttp.ClientSession() as http:
            client, killed = Client(living, http), asyncio.Event()
            submit = living.node.router._submit

            async def halted(number: int, command: Command, *more: Any, **named: Any) -> Result:
                if isinstance(command, PutBlob) and command.index >= 10:
                    await killed.wait()
                return await submit(number, command, *more, **named)

            living.node.router._submit = halted  # type: ignore[method-assign]
            asked = asyncio.ensure_future(client.post("/echo/k/twice", body))
            await eventually(lambda: rows(victim.node.partitions[0], tables.CHUNK) >= 8, "some pieces")
            await victim.kill()
            killed.set()

            assert [(status, found == body) for status, found, _ in [await asked]] == [(200, True)]
            assert blobs(living) == [1] and rows(living.node.partitions[0], tables.CHUNK) == 24

            await snapshot(await cluster.leader(0))
            shutil.rmtree(victim.path / "state")
            await victim.start()
            await cluster.led()
            await eventually(lambda: equal_everywhere(cluster), "equal states")
            _, _, headers = await client.post("/echo/l/twice", body)
            again = Client(victim, http)
            assert (await again.get(f"/holdfast/invocation/{headers['x-holdfast-id']}/attach"))[:2] == (200, body)
            assert blobs(victim) == [1]


async def test_a_node_without_a_replica_answers_with_a_large_outcome(tmp_path: Path) -> None:
    settings = {"replication": 1}
    async with three(tmp_path, {"echo:object/say:exclusive": echo}, partitions=3, **settings) as cluster:
        await cluster.led()
        async with aiohttp.ClientSession() as http:
            for seat in cluster.up():
                client = Client(seat, http)
                answers = await asyncio.gather(*(client.post(f"/echo/{key}/say", LARGE) for key in range(6)))
                assert [(status, found == LARGE) for status, found, _ in answers] == [(200, True)] * 6


# -- what handlers say and hear ----------------------------------------------------------------------------------------


async def test_steps_behind_a_large_one_keep_their_order(tmp_path: Path) -> None:
    async def work(handled: Handled) -> None:
        for number in range(6):
            handled.run(f"step {number}", LARGE if number % 3 == 0 else OTHER[:number])
        handled.output(OTHER)

    async with clients(tmp_path, partitions=1) as client:
        await client.it.register({"large/work": work})

        status, found, headers = await client.post("/large/work")

        assert (status, found == OTHER) == (200, True)
        with client.it.node.partitions[0].state.read() as txn:
            raws = queries.journal(txn, parse_id(headers["x-holdfast-id"]), 1, 10)
            steps = [unpack_step(queries.whole_step(txn, raw)) for raw in raws]
        expected = [[0, LARGE if number % 3 == 0 else OTHER[:number]] for number in range(6)]
        assert [step.outcome for step in steps] == expected
        assert client.it.record(parse_id(headers["x-holdfast-id"])).epoch == 1  # type: ignore[union-attr]


async def test_an_attempt_that_is_lost_while_its_value_is_staged_is_tried_again(tmp_path: Path) -> None:
    async with world(tmp_path, partitions=1) as it:
        endpoint = await it.register({"echo/twice": twice})
        stage, held = it.node.stager.stage, asyncio.Event()

        async def slow(*args: Any, **more: Any) -> None:
            if not held.is_set():
                held.set()
                endpoint.cut()
                await eventually(lambda: len(endpoint.starts) > 1, "the next attempt")
            await stage(*args, **more)

        id_ = await it.send("echo/twice", b"small")
        await it.completed(id_)
        it.node.stager.stage = slow  # type: ignore[method-assign]

        async def grow(handled: Handled) -> None:
            handled.run("large", LARGE)
            await handled.acks(handled.length)
            handled.output(b"done")

        endpoint.handlers["echo", "twice"] = grow
        id_ = await it.send("echo/twice", b"small")
        assert await it.completed(id_) == [0, b"done"]
        record = it.record(id_)
        assert record is not None and record.epoch == 2 and record.length == 2
        assert it.node.invoker.staging_bytes == 0


async def test_a_value_larger_than_any_may_be_pauses_the_invocation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(handled: Handled) -> None:
        handled.run("huge", LARGE)

    monkeypatch.setattr(invoker, "PAYLOAD_BYTES_MAX", MIB - 1)
    async with world(tmp_path, partitions=1) as it:
        await it.register({"large/work": work})
        id_ = await it.send("large/work")
        await it.reaches(id_, Status.PAUSED)
        with it.node.partitions[0].state.read() as txn:
            failure = queries.last_failure(txn, id_)
        assert failure is not None and failure.kind == "TooLarge" and blobs(it) == [0]


async def test_large_values_that_wait_to_be_sent_take_no_memory(tmp_path: Path) -> None:
    """An endpoint that does not read: what waits for it are references. Nobody who has not got its input is given up."""
    async with world(tmp_path, partitions=1) as it:
        await it.register({"echo/say": echo})
        assert await it.call("echo/say", b"small")
        [endpoint] = it.node.invoker.endpoints.values()
        stream = endpoint.carrier
        assert isinstance(stream, Stream)
        encoded, reads = stream._encoded, asyncio.Event()

        async def stuck(frames: Any) -> Any:
            await reads.wait()
            return await encoded(frames)

        stream._encoded = stuck  # type: ignore[method-assign]
        ids = [await it.send("echo/say", LARGE[number:]) for number in range(5)]
        await eventually(lambda: all(id_ in it.node.invoker.attempts for id_ in ids), "five attempts")
        assert stream._bytes < 64 * 1024
        for id_ in ids:
            it.node.invoker.attempts[id_].last_frame_at -= 1e6
        it.node.invoker._sweeper.cancel()
        it.node.invoker._sweep()
        assert not any(it.node.invoker.attempts[id_].asked_at for id_ in ids)
        reads.set()

        for number, id_ in enumerate(ids):
            outcome = await it.completed(id_)
            assert await it.node.reader.value(id_, outcome[1]) == LARGE[number:]
            record = it.record(id_)
            assert record is not None and record.epoch == 1


async def test_requests_carry_large_values_up_to_what_one_can_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def grow(handled: Handled) -> None:
        if handled.length < 4:
            handled.run("more", LARGE)
            handled.wait_for()
        else:
            handled.output(b"".join(step.outcome[1] for step in handled.journal[1:] if step.outcome))

    async with world(tmp_path, partitions=1) as it:
        await it.register({"large/grow": grow}, modes=("request-response",))
        id_ = await it.send("large/grow")
        outcome = await it.completed(id_)
        assert await it.node.reader.value(id_, outcome[1]) == LARGE * 3

        monkeypatch.setattr(requests, "BATCH_BYTES_MAX", 2 * MIB + requests.HEAD_BYTES)
        id_ = await it.send("large/grow")
        record = await it.reaches(id_, Status.PAUSED)
        with it.node.partitions[0].state.read() as txn:
            failure = queries.last_failure(txn, id_)
        assert record.length == 3 and failure is not None and "offer a stream" in failure.message


async def test_a_long_journal_of_large_values_comes_in_frames_that_fit(tmp_path: Path) -> None:
    async def grow(handled: Handled) -> None:
        if handled.start.attempt == 1:
            for _ in range(3):
                handled.run("large", LARGE)
            handled.run("small", b"1")
            await handled.acks(handled.length)
            handled.fail("once more")
            return
        steps, more = list(handled.journal), handled.start.more
        while more:
            frame = await handled.receive()
            assert type(frame) is Journal and sum(map(len, frame.journal)) < 2 * MIB
            steps += [unpack_step(raw) for raw in frame.journal]
            more = frame.more
        handled.output(str([len(step.outcome[1]) for step in steps if step.outcome]).encode())

    async with world(tmp_path, partitions=1) as it:
        endpoint = await it.register({"large/grow": grow})
        id_ = await it.send("large/grow", OTHER)

        assert await it.completed(id_) == [0, str([len(OTHER), MIB, MIB, MIB, 1]).encode()]
        assert all(len(raw) < 2 * MIB for raw in endpoint.raw)


async def test_a_handler_cannot_make_up_a_reference(tmp_path: Path) -> None:
    """What a node would resolve is no msgpack that an endpoint may say: its stream ends, and it counts as failed."""
    ref, _ = refs.make(LARGE)

    async def forge(handled: Handled) -> None:
        if handled.start.attempt == 1:
            handled.send(StepFrame(handled.id, handled.epoch, 1, Op.RUN, "0/r/1", ["r"], [0, ref]))
        else:
            handled.output(b"honest")

    async with world(tmp_path, partitions=1) as it:
        await it.register({"echo/say": echo, "bad/forge": forge})
        await it.completed(await it.send("echo/say", LARGE))
        id_ = await it.send("bad/forge")

        assert await it.completed(id_) == [0, b"honest"]
        with it.node.partitions[0].state.read() as txn:
            failure = queries.last_failure(txn, id_)
        assert failure is not None and failure.kind == "ProtocolError"


# -- staging -----------------------------------------------------------------------------------------------------------


async def test_a_value_that_is_gone_again_is_staged_again(tmp_path: Path) -> None:
    async with world(tmp_path, partitions=1) as it:
        await it.register({"echo/say": echo})
        stage, calls = it.node.stager.stage, [0]

        async def forgetful(*args: Any, **more: Any) -> None:
            calls[0] += 1
            if calls[0] > 1:
                await stage(*args, **more)

        it.node.stager.stage = forgetful  # type: ignore[method-assign]
        id_ = await it.send("echo/say", LARGE)
        outcome = await it.completed(id_)
        assert await it.node.reader.value(id_, outcome[1]) == LARGE and calls[0] >= 2


async def test_a_full_partition_takes_no_large_body_and_finishes_what_it_has(tmp_path: Path) -> None:
    async with clients(tmp_path, partitions=1) as client:
        it = client.it
        started = asyncio.Event()

        async def grow(handled: Handled) -> None:
            started.set()
            await eventually(lambda: full)
            handled.run("large", LARGE)
            await handled.acks(handled.length)
            handled.output(b"done")

        full: list[int] = []
        await it.register({"echo/say": echo, "large/grow": grow})
        id_ = await it.send("large/grow")
        await started.wait()
        it.node.partitions[0].bounds = it.node.partitions[0].bounds._replace(state_bytes=0)
        it.node.partitions[0]._is_full = True
        full.append(1)

        status, found, _ = await client.post("/echo/say", OTHER)

        assert status == 503 and b"state_bytes_max" in found
        assert await it.completed(id_) == [0, b"done"]
        assert blobs(it) == [1]


async def test_pieces_of_one_value_are_put_a_few_at_a_time_and_equal_values_one_after_the_other() -> None:
    stager, under_way, most, seen = Stager(), 0, 0, []
    whole: set[bytes] = set()

    async def put(command: Command) -> Result:
        nonlocal under_way, most
        if isinstance(command, TouchBlob):
            return Result(200 if command.blob in whole else 404)
        assert isinstance(command, PutBlob)
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.001)
        under_way -= 1
        seen.append(command.index)
        if command.index == 39:
            whole.add(command.blob)
        return Result()

    value = bytes(40 * CHUNK_BYTES)
    values = [value, value[1:], value[2:], value]
    lights = await asyncio.gather(*(stager.detach(0, Complete(bytes(16), 1, [0, each], None), put) for each in values))

    assert most <= WINDOW_CHUNKS and len(seen) == 3 * 40
    assert all(len(refs.in_command(light)) == 1 for light in lights)
    assert (stager.staged, stager.found) == (3, 1)


async def test_a_piece_that_cannot_be_put_fails_the_whole_and_frees_the_way(tmp_path: Path) -> None:
    stager, failing = Stager(), [True]

    async def put(command: Command) -> Result:
        if failing[0] and isinstance(command, PutBlob) and command.index == 2:
            raise ConnectionError("no")
        return Result(404 if isinstance(command, TouchBlob) else 0)

    ref, stored = refs.make(LARGE)

    async def source() -> Chunk:
        return pieces_of(stored)

    with pytest.raises(ConnectionError):
        await stager.stage(0, ref, source, put)
    failing[0] = False
    await stager.stage(0, ref, source, put)
    assert stager.staged == 1
