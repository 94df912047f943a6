"""Large values that handlers send and receive, and how they are staged."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from holdfast.cluster.handlers import invoker
from holdfast.cluster.handlers.protocols.native import requests
from holdfast.cluster.handlers.protocols.native.stream import Stream
from holdfast.cluster.values.staging import (
    WINDOW_CHUNKS,
    Chunk,
    Stager,
    pieces_of,
)
from holdfast.sdk.frames import Journal, StepFrame
from holdfast.sdk.ids import InvocationId, PartitionNumber, parse_id
from holdfast.sdk.journal import Op, unpack_step
from holdfast.statemachine import queries, refs
from holdfast.statemachine.blobs import CHUNK_BYTES
from holdfast.statemachine.commands import Command, Complete, PutBlob, TouchBlob
from holdfast.statemachine.effects import Result, Status
from tests.cluster.harness import Handled, echo, eventually, world
from tests.cluster.large_values import LARGE, MIB, OTHER, blobs, clients, twice

# -- what handlers say and hear ---------------------------------------------------------------------------------------


async def test_steps_after_a_large_one_keep_their_order(tmp_path: Path) -> None:
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
        stage, held = it.node.ground.stager.stage, asyncio.Event()

        async def slow(*args: Any, **more: Any) -> None:
            if not held.is_set():
                held.set()
                endpoint.cut()
                await eventually(lambda: len(endpoint.starts) > 1, "the next attempt")
            await stage(*args, **more)

        id_ = await it.send("echo/twice", b"small")
        await it.completed(id_)
        it.node.ground.stager.stage = slow  # type: ignore[method-assign]

        async def grow(handled: Handled) -> None:
            handled.run("large", LARGE)
            await handled.acks(handled.length)
            handled.output(b"done")

        endpoint.handlers["echo", "twice"] = grow
        id_ = await it.send("echo/twice", b"small")
        assert await it.completed(id_) == [0, b"done"]
        record = it.record(id_)
        assert record is not None and record.epoch == 2 and record.length == 2
        assert it.node.ground.invoker.staging_bytes == 0


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
    """An endpoint that does not read: only references wait for it. No attempt is given up while its input is on the
    way."""
    async with world(tmp_path, partitions=1) as it:
        await it.register({"echo/say": echo})
        assert await it.call("echo/say", b"small")
        [endpoint] = it.node.ground.invoker.endpoints.values()
        stream = endpoint.carrier
        assert isinstance(stream, Stream)
        encoded, reads = stream._encoded, asyncio.Event()

        async def stuck(frames: Any) -> Any:
            await reads.wait()
            return await encoded(frames)

        stream._encoded = stuck  # type: ignore[method-assign]
        ids = [await it.send("echo/say", LARGE[number:]) for number in range(5)]
        await eventually(lambda: all(id_ in it.node.ground.invoker.attempts for id_ in ids), "five attempts")
        assert stream._bytes < 64 * 1024
        for id_ in ids:
            it.node.ground.invoker.attempts[id_].last_frame_at -= 1e6
        it.node.ground.invoker._sweeper.cancel()
        it.node.ground.invoker._sweep()
        assert not any(it.node.ground.invoker.attempts[id_].asked_at for id_ in ids)
        reads.set()

        for number, id_ in enumerate(ids):
            outcome = await it.completed(id_)
            assert await it.node.serving.reader.value(id_, outcome[1]) == LARGE[number:]
            record = it.record(id_)
            assert record is not None and record.epoch == 1


async def test_requests_carry_large_values_up_to_their_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert await it.node.serving.reader.value(id_, outcome[1]) == LARGE * 3

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
    """An endpoint may not send the msgpack extension of a reference: its stream ends, which counts as a failure."""
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


# -- staging ----------------------------------------------------------------------------------------------------------


async def test_a_value_that_is_gone_again_is_staged_again(tmp_path: Path) -> None:
    async with world(tmp_path, partitions=1) as it:
        await it.register({"echo/say": echo})
        stage, calls = it.node.ground.stager.stage, [0]

        async def forgetful(*args: Any, **more: Any) -> None:
            calls[0] += 1
            if calls[0] > 1:
                await stage(*args, **more)

        it.node.ground.stager.stage = forgetful  # type: ignore[method-assign]
        id_ = await it.send("echo/say", LARGE)
        outcome = await it.completed(id_)
        assert await it.node.serving.reader.value(id_, outcome[1]) == LARGE and calls[0] >= 2


async def test_a_full_partition_refuses_large_bodies_and_finishes_accepted_work(tmp_path: Path) -> None:
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
    lights = await asyncio.gather(
        *(
            stager.detach(PartitionNumber(0), Complete(InvocationId(bytes(16)), 1, [0, each], None), put)
            for each in values
        )
    )

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
        await stager.stage(PartitionNumber(0), ref, source, put)
    failing[0] = False
    await stager.stage(PartitionNumber(0), ref, source, put)
    assert stager.staged == 1
