"""A blocked loop is distinguished from a hung process: real processes, and a node."""

import asyncio
import json
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner

from holdfast.cli.main import main
from holdfast.cluster.handlers.protocols.native.protocol import Native
from holdfast.cluster.handlers.protocols.native.settings import Settings
from holdfast.cluster.handlers.protocols.table import Protocols
from holdfast.sdk.ids import format_id
from holdfast.statemachine.meta import NATIVE
from tests.cluster.harness import World, eventually
from tests.promises.processes import Handlers

#: Streams that are silent for three seconds are closed; the thread must send a heartbeat earlier.
SETTINGS = Settings(prompt_s=2.0)
#: How precisely a node knows when it last heard from an endpoint (`heard_at`).
HEARD_TO_S = 1.0


SERVERS = [
    pytest.param((), id="serve"),
    pytest.param(("uvicorn",), id="uvicorn"),
    pytest.param(("uvicorn", "--websockets", "wsproto"), id="wsproto"),
    pytest.param(("uvicorn", "--websockets", "websockets"), id="websockets"),
]


@asynccontextmanager
async def handlers_and_node(path: Path, server: tuple[str, ...] = ()) -> AsyncIterator[tuple[World, Handlers]]:
    oracle = path / "oracle"
    oracle.touch()
    handlers = Handlers(path, oracle, server=server)
    handlers.start()
    it = World(path)
    it.protocols = lambda means: Protocols({NATIVE: Native(means, SETTINGS)})
    await it.start()
    try:
        async with asyncio.timeout(30), aiohttp.ClientSession() as session:
            while True:
                try:
                    async with session.get(f"{handlers.url}/discover"):
                        break
                except aiohttp.ClientError:
                    await asyncio.sleep(0.02)
        await it.node.ground.registry.register(handlers.url, force=True)
        yield it, handlers
    finally:
        handlers.kill()
        await it.stop()


def effects(handlers: Handlers) -> Counter[str]:
    return Counter(json.loads(line)["step"] for line in handlers.oracle.read_text().splitlines())


@pytest.mark.limit(60)
@pytest.mark.parametrize("server", SERVERS)
def test_a_blocked_loop_is_reported_and_its_attempts_continue(tmp_path: Path, server: tuple[str, ...]) -> None:
    async def run() -> None:
        async with handlers_and_node(tmp_path, server) as (it, handlers):
            blocking = await it.send("neighbours/block", json.dumps({"mark": "a", "seconds": 5}).encode())
            await eventually(lambda: effects(handlers)["before"])
            behind = await it.send("neighbours/take_time", json.dumps({"mark": "b", "seconds": 0}).encode())

            assert await it.completed(blocking) == [0, b'"done"']
            assert await it.completed(behind) == [0, b'"slow"']

            for ident in (blocking, behind):
                record = it.record(ident)
                assert record is not None and (record.epoch, record.losses) == (1, 0), "no attempt was lost"
            assert effects(handlers)["before"] == 1
            log = handlers.log.read_text()
            assert "the handler `neighbours/block` blocks the event loop at" in log
            assert "tests/promises/handlers.py:" in log
            await eventually(lambda: "it was blocked for" in handlers.log.read_text())
            (health,) = it.node.ground.healths.here()
            assert health.blocked == 1
            assert health.last_block.startswith("the handler `neighbours/block` blocked the event loop for 5.")

    asyncio.run(run())


@pytest.mark.limit(60)
@pytest.mark.parametrize("server", SERVERS)
def test_a_blocked_loop_is_shown_while_it_is_blocked(tmp_path: Path, server: tuple[str, ...]) -> None:
    async def run() -> None:
        async with handlers_and_node(tmp_path, server) as (it, handlers):

            async def ask(path: str) -> dict[str, Any]:
                async with aiohttp.ClientSession() as session, session.get(it.node.doors.urls.admin + path) as answer:
                    assert answer.status == 200
                    shown: dict[str, Any] = await answer.json()
                    return shown

            def said(nodes: list[dict[str, Any]]) -> str:
                (node,) = nodes
                assert node["stalled_since"] is not None
                return str(node["stall"])

            blocking = await it.send("neighbours/block", json.dumps({"mark": "a", "seconds": 6}).encode())
            await eventually(lambda: effects(handlers)["before"])
            await eventually(lambda: it.node.ground.healths.here()[0].stall)
            behind = await it.send("neighbours/take_time", json.dumps({"mark": "b", "seconds": 0}).encode())

            (listed,) = (await ask("/deployments"))["deployments"]
            described = await ask(f"/deployments/{listed['id']}")
            assert listed["health"]["status"] == described["health"]["status"] == "stalled"
            for shown in (listed, described):
                stall = said(shown["health"]["nodes"])
                assert stall.startswith("the handler `neighbours/block` blocks the event loop of its process at ")
                assert "tests/promises/handlers.py:" in stall
            why = (await ask(f"/invocations/{format_id(behind)}"))["why_not_running"]
            assert why is not None and "the handler `neighbours/block` blocks the event loop" in why
            line = await asyncio.to_thread(
                lambda: (
                    CliRunner().invoke(main, ["deployments", "list", "--admin-url", it.node.doors.urls.admin]).output
                )
            )
            assert "stalled for" in line and "neighbours/block" in line

            assert await it.completed(behind) == [0, b'"slow"']
            assert (await ask("/deployments"))["deployments"][0]["health"]["status"] == "ok", "the loop runs again"
            assert await it.completed(blocking) == [0, b'"done"']

    asyncio.run(run())


@pytest.mark.limit(60)
def test_a_server_whose_socket_is_out_of_reach_is_reported_and_keeps_its_attempts(tmp_path: Path) -> None:
    async def run() -> None:
        async with handlers_and_node(tmp_path, ("hypercorn",)) as (it, handlers):
            blocking = await it.send("neighbours/block", json.dumps({"mark": "a", "seconds": 7}).encode())
            await eventually(lambda: effects(handlers)["before"])
            began_at = time.monotonic()

            await eventually(lambda: it.node.ground.healths.here()[0].stall)

            assert time.monotonic() - began_at < 6, "it is noticed long before the node gives up"
            assert "it does not answer pings" in it.node.ground.healths.here()[0].stall
            assert await it.completed(blocking) == [0, b'"done"']
            record = it.record(blocking)
            assert record is not None and (record.epoch, record.losses) == (1, 0), "no attempt was lost"
            assert not it.node.ground.healths.here()[0].stall

    asyncio.run(run())


@pytest.mark.limit(60)
@pytest.mark.parametrize("server", SERVERS)
def test_a_process_that_hangs_is_noticed_and_its_attempts_are_started_again(
    tmp_path: Path, server: tuple[str, ...]
) -> None:
    async def run() -> None:
        async with handlers_and_node(tmp_path, server) as (it, handlers):
            ident = await it.send("neighbours/take_time", json.dumps({"mark": "a", "seconds": 1}).encode())
            await eventually(lambda: effects(handlers)["slow begins"])
            stopped_at = time.monotonic()
            handlers.signal(signal.SIGSTOP)

            await eventually(lambda: it.node.ground.healths.here()[0].is_down)

            noticed_s = time.monotonic() - stopped_at
            assert noticed_s < SETTINGS.silence_s + 5, "soon after the ping that was not answered"
            await eventually(lambda: (record := it.record(ident)) is not None and record.epoch == 2)
            handlers.signal(signal.SIGCONT)
            assert await it.completed(ident) == [0, b'"slow"']

    asyncio.run(run())


@pytest.mark.limit(60)
def test_a_process_that_hangs_is_shown_within_ten_seconds_under_every_server(tmp_path: Path) -> None:
    """hypercorn's socket is out of reach, so its process may only be blocked: its attempts stay, and operators are told."""

    async def run() -> None:
        async with handlers_and_node(tmp_path, ("hypercorn",)) as (it, handlers), aiohttp.ClientSession() as session:

            async def ask(path: str) -> dict[str, Any]:
                async with session.get(it.node.doors.urls.admin + path) as answer:
                    shown: dict[str, Any] = await answer.json()
                    return shown

            ident = await it.send("neighbours/take_time", json.dumps({"mark": "a", "seconds": 1}).encode())
            await eventually(lambda: effects(handlers)["slow begins"])
            stopped_at = time.monotonic()
            handlers.signal(signal.SIGSTOP)

            await eventually(lambda: it.node.ground.healths.here()[0].stall)

            noticed_s = time.monotonic() - stopped_at
            assert noticed_s < SETTINGS.silence_s + 5, "soon after the ping that was not answered"
            (listed,) = (await ask("/deployments"))["deployments"]
            assert listed["health"]["status"] == "stalled"
            assert "its process hangs, or something blocks" in listed["health"]["nodes"][0]["stall"]
            behind = await it.send("neighbours/take_time", json.dumps({"mark": "b", "seconds": 0}).encode())
            await eventually(lambda: it.record(behind) is not None)
            why = (await ask(f"/invocations/{format_id(behind)}"))["why_not_running"]
            assert why is not None and "does not answer pings" in why

            handlers.signal(signal.SIGCONT)
            assert await it.completed(ident) == [0, b'"slow"']
            record = it.record(ident)
            assert record is not None and (record.epoch, record.losses) == (1, 0), "no attempt was started again"

    assert Settings().silence_s + HEARD_TO_S < 10, "with the times that nodes use"
    asyncio.run(run())
