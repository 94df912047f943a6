"""Streams that break, and endpoints that are down, silent or send invalid frames: each costs an attempt, but no
invocation.
"""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest

from holdfast.cluster.handlers.protocols.native.stream import Stream
from holdfast.sdk.frames import (
    Goaway,
    Suspend,
    encode_batch,
)
from holdfast.sdk.ids import PartitionNumber
from holdfast.sdk.journal import Op, unpack_step
from holdfast.statemachine.commands import Command, Deliver
from tests.cluster.harness import Handled, echo, eventually, three_steps, world


def test_a_broken_stream_restarts_its_attempts_after_the_last_step(tmp_path: Path) -> None:
    stuck = asyncio.Event()

    async def stops_after_two(handled: Handled) -> None:
        if handled.epoch == 1:
            await handled.acks(handled.run("a", b"1") + 1)
            await handled.acks(handled.run("b", b"2") + 1)
            stuck.set()
            return
        await three_steps(handled)

    async def run() -> None:
        async with world(tmp_path) as it:
            endpoint = await it.register({"greeter/go": stops_after_two})
            ident = await it.send("greeter/go")
            await stuck.wait()

            endpoint.cut()

            assert await it.completed(ident) == [0, b"done"]
            first, second = endpoint.starts
            assert (first.epoch, second.epoch) == (1, 2)
            assert [unpack_step(raw).key for raw in second.journal[1:]] == ["0/a/1", "0/b/2"]
            record = it.record(ident)
            assert record is not None and record.failures_total == 0, "a broken stream is nobody's failure"

    asyncio.run(run())


def test_an_endpoint_that_is_down_is_waited_for_without_counting_failures(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path) as it:
            endpoint = await it.register({"greeter/echo": echo})
            await endpoint.stop()
            idents = [await it.send("greeter/echo", b"%d" % number) for number in range(20)]
            await asyncio.sleep(0.2)

            await endpoint.start()

            for number, ident in enumerate(idents):
                assert await it.completed(ident) == [0, b"%d" % number]
                record = it.record(ident)
                assert record is not None and record.failures_total == 0

    asyncio.run(run())


def test_an_error_of_the_node_costs_an_attempt_and_not_an_invocation(tmp_path: Path) -> None:
    async def slow(handled: Handled) -> None:
        await asyncio.sleep(0.02)
        handled.output(b"done")

    async def caller(handled: Handled) -> None:
        if handled.length == 1:
            handled.wait_for(handled.step(Op.CALL, "0/call/1", ["kv", "put", handled.input.decode(), b"", {}]))
        else:
            handled.output(b"done")

    async def run() -> None:
        async with world(tmp_path, attempts_max=1) as it:
            await it.register({"greeter/go": slow, "caller/go": caller, "kv:object/put:exclusive": slow})
            invoker, router = it.node.ground.invoker, it.node.serving.router
            build, submit_to = invoker.build, router.submit_to
            failed: list[str] = []

            def cannot_build(*given: Any, **more: Any) -> Any:
                if len(failed) < 2 and invoker.started:
                    failed.append("build")
                    raise MemoryError
                return build(*given, **more)

            async def cannot_submit(number: PartitionNumber, command: Command, **more: Any) -> Any:
                if type(command) is Deliver and failed.count("deliver") < 2:
                    failed.append("deliver")
                    raise MemoryError
                return await submit_to(number, command, **more)

            invoker.build = cannot_build  # type: ignore[method-assign]
            router.submit_to = cannot_submit  # type: ignore[method-assign]
            idents = [await it.send("greeter/go") for _ in range(4)]
            idents += [await it.send("caller/go", b"%d" % number) for number in range(4)]

            for ident in idents:
                assert await it.completed(ident) == [0, b"done"]
            assert sorted(failed) == ["build", "build", "deliver", "deliver"]

    asyncio.run(run())


def test_a_failed_attempt_is_tried_again_after_its_backoff(tmp_path: Path) -> None:
    async def flaky(handled: Handled) -> None:
        if handled.epoch < 3:
            handled.fail("not yet", retry_after_ms=10)
        else:
            handled.output(b"at last")

    async def run() -> None:
        async with world(tmp_path) as it:
            await it.register({"greeter/go": flaky})

            assert await it.call("greeter/go") == [0, b"at last"]

    asyncio.run(run())


@pytest.mark.parametrize(
    "raw",
    [
        b"\xc1",
        encode_batch([]) + b"x",
        b"\x91\x91\xcc\xfa",
        b"text",
    ],
)
def test_nonsense_ends_the_stream_and_fails_its_attempts(tmp_path: Path, raw: bytes) -> None:
    async def once(handled: Handled) -> None:
        if handled.epoch > 1:
            handled.output(b"recovered")

    async def run() -> None:
        async with world(tmp_path) as it:
            endpoint = await it.register({"greeter/go": once})
            endpoint.options["greeter"] = {"retry": {"initial_ms": 20}}
            await it.node.ground.registry.register(endpoint.uri, force=True)
            ident = await it.send("greeter/go")
            await eventually(lambda: endpoint.starts)

            await endpoint.say(raw)

            assert await it.completed(ident) == [0, b"recovered"]
            record = it.record(ident)
            assert record is not None and record.failures_total == 1

    asyncio.run(run())


def test_a_silent_handler_is_asked_to_suspend_and_then_given_up(tmp_path: Path) -> None:
    asked: list[int] = []

    async def silent(handled: Handled) -> None:
        while True:
            frame = await handled.receive()
            if type(frame) is Suspend:
                asked.append(frame.epoch)
                if frame.epoch == 2:
                    handled.output(b"woke up")
                    return

    async def run() -> None:
        async with world(tmp_path) as it:
            endpoint = await it.register({"greeter/go": silent})
            endpoint.options["greeter"] = {
                "inactivity_timeout_ms": 100,
                "abort_timeout_ms": 100,
                "retry": {"initial_ms": 10},
            }
            await it.node.ground.registry.register(endpoint.uri, force=True)

            outcome = await it.call("greeter/go")

            assert outcome == [0, b"woke up"]
            assert asked == [1, 2]
            assert endpoint.attempts[endpoint.starts[0].invocation].epoch == 2
            record = it.record(endpoint.starts[0].invocation)
            assert record is not None and record.failures_total == 1

    asyncio.run(run())


def test_an_endpoint_that_goes_away_keeps_its_attempts_and_gets_no_new_ones(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def held(handled: Handled) -> None:
        await release.wait()
        handled.output(handled.input)

    async def run() -> None:
        async with world(tmp_path) as it:
            endpoint = await it.register({"greeter/go": held})
            first = await it.send("greeter/go", b"1")
            await eventually(lambda: endpoint.starts)

            await endpoint.say(encode_batch([Goaway("deploying")]))
            second = await it.send("greeter/go", b"2")
            await eventually(lambda: len(endpoint.sockets) == 2)
            release.set()

            assert await it.completed(first) == [0, b"1"]
            assert await it.completed(second) == [0, b"2"]
            assert [start.epoch for start in endpoint.starts] == [1, 1]

    asyncio.run(run())


def test_a_stream_that_is_ended_twice_sends_one_goodbye(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """The second end may come at any moment of the first, as when a node stops while an endpoint dies."""

    async def run() -> None:
        async with world(tmp_path) as it:
            await it.register({"greeter/echo": echo})
            for turns in range(8):
                await it.call("greeter/echo", b"1")
                (endpoint,) = it.node.ground.invoker.endpoints.values()
                stream = endpoint.carrier
                assert isinstance(stream, Stream)
                stream._end("the first time")
                for _ in range(turns):
                    await asyncio.sleep(0)
                stream._end("the second time")
                await stream.close()
                assert stream._socket.closed

    asyncio.run(run())
    gc.collect()

    assert [str(warning.message) for warning in recwarn if "never awaited" in str(warning.message)] == []
