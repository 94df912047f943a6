"""P5: two writers are impossible."""

from __future__ import annotations

import asyncio
import random
import signal
from typing import Any

import pytest

from tests.promises.handlers import add, hold, read
from tests.promises.processes import World


def overlaps(effects: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """(running, entering) for every key with two invocations inside at once."""
    inside: dict[str, str] = {}
    found = []
    for effect in effects:
        if effect["step"] == "enter":
            other = inside.get(effect["key"])
            if other is not None and other != effect["id"]:
                found.append((other, effect["id"]))
            inside[effect["key"]] = effect["id"]
        elif effect["step"] == "leave" and inside.get(effect["key"]) == effect["id"]:
            del inside[effect["key"]]
    return found


@pytest.mark.slow("nodes and handlers are killed in turn, and started again")
async def test_a_counter_counts_exactly_while_everything_is_killed(here: World) -> None:
    chance = random.Random(5)
    async with here.client() as client:
        calls = [asyncio.ensure_future(client.call(add, "P5 a", key=f"P5 k{number % 5}")) for number in range(200)]
        for _ in range(5):
            await here.kill_somebody(chance)
        answers = await asyncio.gather(*calls)

        for key in range(5):
            mine = [answer for number, answer in enumerate(answers) if number % 5 == key]
            assert sorted(mine) == list(range(1, 41)), "every call counted once"
            assert await client.call(read, key=f"P5 k{key}") == 40
        assert overlaps([effect for effect in here.effects() if effect.get("mark") == "P5 a"]) == []


async def test_a_zombie_that_wakes_cannot_write(here: World) -> None:
    """The handler process is stopped in the middle; another takes over and finishes; then the first one wakes."""
    async with here.client() as client:
        sent = await client.send(hold, {"mark": "P5 b", "gate": here.gate("P5 b")}, key="P5 zombie")
        await here.saw("hold begins", mark="P5 b")
        zombie = here.handlers
        zombie.signal(signal.SIGSTOP)
        # The next leader does not know the old stream, and the old address does not answer.
        await here.kill_leader(sent, random.Random(5))
        successor = await here.succeed(force=True)
        await here.ask("POST", f"/invocations/{sent.invocation_id}/pause")
        await here.ask("POST", f"/invocations/{sent.invocation_id}/resume?to={successor}")
        await here.saw("hold begins", 2, mark="P5 b")
        here.open("P5 b")

        assert await client.attach(sent) == 1
        zombie.signal(signal.SIGCONT)
        await here.saw("hold", 2, mark="P5 b")  # The zombie's own step ended too,
        assert await client.call(add, "after", key="P5 zombie") == 2  # but changed nothing.


async def test_a_double_click_runs_once(here: World) -> None:
    """Even if the second click arrives under another leader."""
    async with here.client() as client:
        answers = await asyncio.gather(
            *(client.call(add, "P5 c", key="P5 click", idempotency_key="order 42") for _ in range(20))
        )
        sent = await client.send(add, "P5 c", key="P5 click", idempotency_key="order 42")
        await here.kill_leader(sent, random.Random(5))
        answers.append(await client.call(add, "P5 c", key="P5 click", idempotency_key="order 42"))

        assert answers == [1] * 21
        assert here.counts(mark="P5 c")["enter"] == 1
