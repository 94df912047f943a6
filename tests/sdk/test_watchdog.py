"""A loop that is blocked is told from a process that hangs: real processes, and a node."""

import asyncio
import json
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from tests.cluster.harness import FAST, World, eventually
from tests.promises.processes import Handlers

#: Streams that are silent for three seconds are broken; a thread has to speak up earlier.
TIMING = FAST._replace(prompt_s=2.0)


@asynccontextmanager
async def handlers_and_node(path: Path) -> AsyncIterator[tuple[World, Handlers]]:
    oracle = path / "oracle"
    oracle.touch()
    handlers = Handlers(path, oracle)
    handlers.start()
    it = World(path)
    it.timing = TIMING
    await it.start()
    try:
        async with asyncio.timeout(30), aiohttp.ClientSession() as session:
            while True:
                try:
                    async with session.get(f"{handlers.url}/discover"):
                        break
                except aiohttp.ClientError:
                    await asyncio.sleep(0.02)
        await it.node.registry.register(handlers.url, force=True)
        yield it, handlers
    finally:
        handlers.kill()
        await it.stop()


def effects(handlers: Handlers) -> Counter[str]:
    return Counter(json.loads(line)["step"] for line in handlers.oracle.read_text().splitlines())


@pytest.mark.limit(60)
def test_a_blocked_loop_is_named_and_its_attempts_go_on(tmp_path: Path) -> None:
    async def run() -> None:
        async with handlers_and_node(tmp_path) as (it, handlers):
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
            (health,) = it.node.healths.here()
            assert health.blocked == 1
            assert health.last_block.startswith("the handler `neighbours/block` blocked the event loop for 5.")

    asyncio.run(run())


@pytest.mark.limit(60)
def test_a_process_that_hangs_is_noticed_and_its_attempts_are_started_again(tmp_path: Path) -> None:
    async def run() -> None:
        async with handlers_and_node(tmp_path) as (it, handlers):
            ident = await it.send("neighbours/take_time", json.dumps({"mark": "a", "seconds": 1}).encode())
            await eventually(lambda: effects(handlers)["slow begins"])
            stopped_at = time.monotonic()
            handlers.signal(signal.SIGSTOP)

            await eventually(lambda: it.node.healths.here()[0].is_down)

            print(f"noticed after {time.monotonic() - stopped_at:.1f} s")
            await eventually(lambda: (record := it.record(ident)) is not None and record.epoch == 2)
            handlers.signal(signal.SIGCONT)
            assert await it.completed(ident) == [0, b'"slow"']

    asyncio.run(run())
