"""P4: plain Python. Control flow of every kind is resumed, because the code simply runs again over the journal."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.promises.handlers import maze
from tests.promises.processes import World


@pytest.mark.slow("handlers are killed many times, and started again")
async def test_loops_branches_exceptions_and_tasks_resume_after_kills(here: World) -> None:
    chance = random.Random(4)
    async with here.client() as client:
        calls = [asyncio.ensure_future(client.call(maze, number)) for number in range(30)]
        for _ in range(4):
            await here.kill_somebody(chance)

        answers = await asyncio.gather(*calls)

        assert answers == [solution(number) for number in range(30)]


def solution(number: int) -> list[str]:
    """The result of the handler, computed without anything durable."""
    path = []
    for turn in range(3):
        if (number + turn) % 3 == 0:
            path.append(f"caught {turn}")
        path += [f"{turn}.{side}" for side in range(2 + number % 2)]
    return [*path, f"sum {sum(range(5))}"]
