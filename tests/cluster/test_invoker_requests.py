"""Endpoints without streams: one request for each piece of an attempt."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from holdfast.sdk.journal import Op
from tests.cluster.harness import Handled, echo, world


async def one_run_per_request(handled: Handled) -> None:
    done = handled.length - 1
    if done < 3:
        handled.run(f"s{done}", b"%d" % done)
        handled.wait_for()
    else:
        handled.output(b"done")


def test_an_endpoint_without_streams_gets_requests(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path) as it:
            endpoint = await it.register({"greeter/go": one_run_per_request}, modes=("request-response",))

            assert await it.call("greeter/go") == [0, b"done"]

            assert endpoint.requests == 4 and not endpoint.sockets

    asyncio.run(run())


def test_an_endpoint_that_refuses_the_upgrade_gets_requests(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path) as it:
            endpoint = await it.register({"greeter/go": one_run_per_request})
            endpoint.stream_status = 404

            assert await it.call("greeter/go") == [0, b"done"]

            assert endpoint.requests == 4

    asyncio.run(run())


def test_requests_suspend_and_resume(tmp_path: Path) -> None:
    async def sleeper(handled: Handled) -> None:
        if handled.length == 1:
            handled.wait_for(handled.step(Op.SLEEP, "0/sleep/1", [50]))
        else:
            handled.output(b"awake")

    async def run() -> None:
        async with world(tmp_path) as it:
            await it.register({"greeter/go": sleeper}, modes=("request-response",))

            assert await it.call("greeter/go") == [0, b"awake"]

    asyncio.run(run())


def test_an_endpoint_that_answers_503_is_left_alone_for_its_retry_after(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path) as it:
            endpoint = await it.register({"greeter/echo": echo}, modes=("request-response",))
            endpoint.invoke_status = [503]
            endpoint.headers = {"Retry-After": "1"}
            begun = time.monotonic()

            assert await it.call("greeter/echo", b"hi") == [0, b"hi"]

            assert time.monotonic() - begun >= 0.95
            assert endpoint.requests == 2
            record = it.record(endpoint.starts[0].invocation)
            assert record is not None and record.failures_total == 0

    asyncio.run(run())


def test_a_stream_refused_with_503_is_retried_after_its_retry_after(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path) as it:
            endpoint = await it.register({"greeter/echo": echo})
            endpoint.stream_status = 503
            endpoint.headers = {"Retry-After": "1"}
            begun = time.monotonic()
            ident = await it.send("greeter/echo", b"hi")
            await asyncio.sleep(0.2)
            endpoint.stream_status = 101

            assert await it.completed(ident) == [0, b"hi"]

            assert time.monotonic() - begun >= 0.95

    asyncio.run(run())


def test_an_endpoint_that_answers_500_fails_the_attempt(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path) as it:
            endpoint = await it.register({"greeter/echo": echo}, modes=("request-response",))
            endpoint.invoke_status = [500]

            assert await it.call("greeter/echo", b"hi") == [0, b"hi"]

            record = it.record(endpoint.starts[0].invocation)
            assert record is not None and record.failures_total == 1

    asyncio.run(run())
