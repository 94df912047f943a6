"""P8: the orchestrator does not die. Clients of surviving nodes see latency, not errors."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path

import pytest

from tests.promises.handlers import add, quick, read
from tests.promises.processes import world
from tests.promises.test_p5_single_writer import overlaps


@pytest.mark.slow("each of three nodes is killed in turn under load")
async def test_one_of_three_nodes_may_die_at_any_time(tmp_path: Path) -> None:
    chance = random.Random(8)
    async with world(tmp_path, nodes=3, partitions=3) as here:
        survivor = here.nodes[2]  # The clients use this node; leaders die around it.
        async with here.client(survivor) as client:
            results: list[list[str]] = []
            counts: list[int] = []
            stop = asyncio.Event()

            async def steps(number: int) -> None:
                turn = 0
                while not stop.is_set():
                    results.append(await client.call(quick, f"s{number}-{turn}"))
                    turn += 1

            async def adds(number: int) -> None:
                while not stop.is_set():
                    counts.append(await client.call(add, f"a{number}", key="shared"))

            tasks = [asyncio.ensure_future(work(number)) for work in (steps, adds) for number in range(4)]
            for kind in ("kill", "stop", "kill"):
                await asyncio.sleep(chance.uniform(0.5, 1.5))
                victim = here.nodes[chance.randrange(2)]
                if kind == "kill":
                    victim.kill()
                    await asyncio.sleep(1.0)
                    victim.start()
                else:
                    victim.signal(signal.SIGSTOP)
                    await asyncio.sleep(2.5)
                    victim.signal(signal.SIGCONT)
                await here.ready()
            await asyncio.sleep(1.0)
            stop.set()
            await asyncio.gather(*tasks)

            assert results and counts
            assert all(answer == ["one", "two", "three"] for answer in results)
            assert sorted(counts) == list(range(1, len(counts) + 1)), "no addition lost, none doubled"
            assert await client.call(read, key="shared") == len(counts)
            assert overlaps(here.effects()) == []
