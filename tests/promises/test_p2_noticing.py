"""P2: failures are noticed without any client or cron job."""

from __future__ import annotations

import time

from tests.promises.handlers import run
from tests.promises.processes import World


async def test_work_continues_after_leader_and_handlers_died_without_any_client(here: World) -> None:
    async with here.client() as client:
        sent = await client.send(run, {"mark": "P2 a", "gate": here.gate("P2 a")})
    await here.saw("three begins", mark="P2 a")
    here.handlers.kill()
    async with here.without_leader(here.partition(sent)):
        here.handlers.start()
        await here.saw("three begins", 2, mark="P2 a")
        here.open("P2 a")

        await here.saw("three", mark="P2 a")
    counts = here.counts(mark="P2 a")
    assert (counts["one"], counts["two"]) == (1, 1)


async def test_a_broken_connection_is_noticed_at_once(here: World) -> None:
    """The handlers restart before a timeout alone could notice the kill."""
    async with here.client() as client:
        await client.send(run, {"mark": "P2 b", "gate": here.gate("P2 b")})
    await here.saw("three begins", mark="P2 b")
    here.handlers.kill()
    here.handlers.start()
    started = time.time()
    await here.saw("three begins", 2, mark="P2 b")

    begins = [each for each in here.effects() if each["step"] == "three begins" and each["mark"] == "P2 b"]
    print(f"dispatched again {begins[1]['at'] - started:.2f} s after the new process was launched")
    here.open("P2 b")
    await here.saw("three", mark="P2 b")
