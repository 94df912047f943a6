"""P1: recovery lands on the failing step."""

from __future__ import annotations

import asyncio
import random

import pytest

from holdfast.sdk import SendHandle
from tests.promises.handlers import branches, quick, run
from tests.promises.processes import PATIENCE_S, World


async def test_work_resumes_at_the_step_that_did_not_finish(here: World) -> None:
    async with here.client() as client:
        sent = await client.send(run, {"mark": "P1 a", "gate": here.gate("P1 a")})
        await here.saw("three begins", mark="P1 a")
        await here.kill_leader(sent, random.Random(1))
        await here.saw("three begins", 2, mark="P1 a")
        here.handlers.kill()
        here.handlers.start()
        await here.saw("three begins", 3, mark="P1 a")
        here.open("P1 a")

        assert await client.attach(sent) == ["one", "two", "three"]
        counts = here.counts(mark="P1 a")
        assert (counts["one"], counts["two"]) == (1, 1), "what was journaled is not run again"


async def test_of_ten_branches_the_five_finished_ones_are_not_run_again(here: World) -> None:
    async with here.client() as client:
        sent = await client.send(branches, {"mark": "P1 b", "gate": here.gate("P1 b")})
        for number in range(10):
            await here.saw(f"branch {number} begins", mark="P1 b")
        for number in (1, 3, 4, 7, 8):
            here.open(f"P1 b-{number}")
            await here.saw(f"branch {number}", mark="P1 b")
        await journaled(here, sent, 5)
        here.handlers.kill()
        here.handlers.start()
        for number in (0, 2, 5, 6, 9):
            await here.saw(f"branch {number} begins", 2, mark="P1 b")
        await here.kill_leader(sent, random.Random(2))
        for number in (0, 2, 5, 6, 9):
            await here.saw(f"branch {number} begins", 3, mark="P1 b")
            here.open(f"P1 b-{number}")

        assert await client.attach(sent) == [f"branch {number}" for number in range(10)]
        counts = here.counts(mark="P1 b")
        for number in (1, 3, 4, 7, 8):
            assert (counts[f"branch {number} begins"], counts[f"branch {number}"]) == (1, 1)


async def journaled(here: World, sent: SendHandle[list[str]], steps: int) -> None:
    """Wait until the invocation's journal holds this many finished steps besides its input."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            journal = (await here.ask("GET", f"/invocations/{sent.invocation_id}/journal"))["steps"]
            if sum(step["op"] == "run" and step["outcome"] is not None for step in journal) >= steps:
                return
            await asyncio.sleep(0.05)


@pytest.mark.slow("nodes and handlers are killed at random, and started again")
@pytest.mark.parametrize("seed", range(2))
async def test_kills_at_random_moments_lose_nothing_and_repeat_no_journaled_step(here: World, seed: int) -> None:
    """Handlers and leaders die in turn. A step may run again only if it was not journaled: at most once per kill."""
    chance = random.Random(seed)
    marks = [f"P1 {seed} {number}" for number in range(150)]
    async with here.client() as client:
        calls = [asyncio.ensure_future(client.call(quick, mark)) for mark in marks]
        kills = 0
        while not all(call.done() for call in calls) and kills < 5:
            await here.kill_somebody(chance)
            kills += 1

        assert await asyncio.gather(*calls) == [["one", "two", "three"]] * 150
        effects = [effect for effect in here.effects() if effect.get("mark") in marks]
        keys = {(effect["mark"], effect["step"]): effect["key"] for effect in effects}
        for effect in effects:
            assert effect["key"] == keys[effect["mark"], effect["step"]], "a step's effect key never changes"
        for mark in marks:
            counts = here.counts(mark=mark)
            assert all(1 <= counts[step] <= 1 + kills for step in ("one", "two", "three")), counts
