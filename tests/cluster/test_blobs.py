"""Large values: staged in pieces, kept once, sent to clients, and collected."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from random import Random
from typing import Any

import aiohttp

from holdfast.cluster.partition.door import Partition
from holdfast.sdk import Context, ObjectContext, Service, VirtualObject
from holdfast.sdk.ids import PartitionNumber, parse_id
from holdfast.sdk.journal import Op
from holdfast.sdk.server import Server
from holdfast.statemachine import queries, refs, tables
from holdfast.statemachine.blobs import CHUNK_BYTES
from holdfast.statemachine.commands import Command, Purge, PutBlob, TouchBlob
from holdfast.statemachine.effects import Result
from tests.cluster.harness import Handled, World, echo, eventually
from tests.cluster.large_values import LARGE, MIB, OTHER, Client, MovedClock, blobs, clients, pass_time, rows, twice
from tests.cluster.test_snapshots import snapshot
from tests.cluster.test_three_nodes import Three, three

# -- through the doors ------------------------------------------------------------------------------------------------


async def test_a_body_of_32_mib_and_a_step_of_20_reach_handlers_and_clients_and_are_replayed(tmp_path: Path) -> None:
    """With the SDK, over HTTP. The attempt is lost after its step, so the next one gets everything from the journal."""
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
        await client.it.node.ground.registry.register(f"http://127.0.0.1:{server.port}")
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
        statistics = await client.it.node.serving.reader.statistics()
        assert (statistics.blobs, statistics.blob_bytes) == (2, 52 * MIB), "each once"
        assert client.it.node.ground.invoker.staging_bytes == 0
        async with client.http.get(client.it.node.doors.urls.admin + "/metrics") as scraped:
            metrics = await scraped.text()
        assert "holdfast_blobs 2.0" in metrics and "holdfast_blobs_staged_total 2.0" in metrics
    await server.stop()


async def test_a_body_beyond_the_bound_is_refused_with_a_hint(tmp_path: Path) -> None:
    async with clients(tmp_path, partitions=1, body_bytes_max=MIB) as client:
        await client.it.register({"echo/say": echo})

        status, found, _ = await client.post("/echo/say", LARGE + b"x")

        assert status == 413 and b"body_bytes_max" in found and b"33554432" in found
        assert (await client.post("/echo/say", LARGE))[1] == LARGE


async def test_bodies_beyond_the_limit_of_a_node_are_refused_and_others_answered(tmp_path: Path) -> None:
    async with clients(tmp_path, partitions=1, request_bytes_max=4 * MIB) as client:
        await client.it.register({"echo/say": echo})

        answers = await asyncio.gather(*(client.post("/echo/say", LARGE) for _ in range(24)))

        found = {status for status, _, _ in answers}
        assert found <= {200, 429} and 200 in found
        assert all(body == LARGE for status, body, _ in answers if status == 200)
        assert all("Retry-After" in headers for status, _, headers in answers if status == 429)
        await eventually(lambda: client.it.node.doors.ingress.exchange.active_bytes == 0, "nothing held")
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
    assert it.node.ground.stager.staged == 1 and it.node.ground.stager.found >= 23
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
        await client.it.node.ground.registry.register(f"http://127.0.0.1:{server.port}")
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
        assert client.it.node.doors.ingress is not None and client.it.node.doors.ingress.exchange.active_bytes == 0


async def test_a_large_answer_waits_until_others_are_sent(tmp_path: Path) -> None:
    async with clients(tmp_path, partitions=1, request_bytes_max=4 * MIB) as client:
        await client.it.register({"echo/say": echo})
        assert client.it.node.doors.ingress is not None
        exchange = client.it.node.doors.ingress.exchange
        _, _, headers = await client.post("/echo/say/send", LARGE)
        await client.it.completed(parse_id(headers["x-holdfast-id"]))
        exchange.active_bytes += 4 * MIB  # Held by another request.

        asked = asyncio.ensure_future(client.get(f"/holdfast/invocation/{headers['x-holdfast-id']}/output"))
        await eventually(lambda: exchange.active == 1, "the question")
        await asyncio.sleep(0.05)
        assert not asked.done()
        exchange.active_bytes -= 4 * MIB
        assert (await asked)[:2] == (200, LARGE)


# -- between partitions, restarts, leaders ----------------------------------------------------------------------------


async def parent(handled: Handled) -> None:
    """Calls `echo/say` of another key with its own input, and returns the outcome."""
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


async def test_half_staged_values_are_removed_after_a_crash(tmp_path: Path) -> None:
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
        len({digest(seat.node.ground.replicas.hosted[number]) for seat in cluster.up()}) == 1
        for number in cluster.up()[0].node.ground.replicas.hosted
    )


async def test_a_leader_that_dies_in_the_middle_of_staging_costs_the_client_nothing(tmp_path: Path) -> None:
    """Applied pieces stay, and the next leader accepts the rest. A wiped node gets everything from a snapshot."""
    body = Random(4).randbytes(6 * MIB)
    settings = {"body_bytes_max": 8 * MIB, "log_tail": 0}
    async with three(tmp_path, {"echo:object/twice:exclusive": twice}, partitions=1, **settings) as cluster:
        await cluster.led()
        victim = await cluster.leader(0)
        living = next(seat for seat in cluster.up() if seat is not victim)
        async with aiohttp.ClientSession() as http:
            client, killed = Client(living, http), asyncio.Event()
            submit = living.node.serving.router._submit

            async def halted(number: PartitionNumber, command: Command, *more: Any, **named: Any) -> Result:
                if isinstance(command, PutBlob) and command.index >= 10:
                    await killed.wait()
                return await submit(number, command, *more, **named)

            living.node.serving.router._submit = halted  # type: ignore[method-assign]
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
