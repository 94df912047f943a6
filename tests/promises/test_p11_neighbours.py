"""P11: one bad neighbour hurts nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.promises.handlers import end_process, take_time
from tests.promises.processes import World, eventually


@asynccontextmanager
async def supervised(here: World) -> AsyncIterator[None]:
    """The process of the handlers is started again whenever it ends, as everybody has it done."""

    async def supervise() -> None:
        while True:
            if not here.handlers.running:
                here.handlers.start()
            await asyncio.sleep(0.02)

    task = asyncio.create_task(supervise())
    try:
        yield
    finally:
        task.cancel()


async def test_a_step_that_ends_its_process_is_paused_and_the_others_finish(here: World) -> None:
    async with here.client() as client, supervised(here):
        innocent = [await client.send(take_time, {"mark": f"P11 {number}", "seconds": 3}) for number in range(3)]
        for number in range(3):
            await here.saw("slow begins", mark=f"P11 {number}")
        culprit = await client.send(end_process, {"mark": "P11 end"})

        for number in range(3):
            await here.saw("slow", mark=f"P11 {number}")
        await eventually(lambda: here.counts(mark="P11 end")["end"] >= 5, "five ends")

        async def paused() -> bool:
            return bool((await here.record(culprit))["status"] == "paused")

        async with asyncio.timeout(30):
            while not await paused():
                await asyncio.sleep(0.05)
        for each in innocent:
            assert (await here.record(each))["end"] == "succeeded"
        record = await here.record(culprit)
        assert "the handler process ended 5 times while it ran this invocation" in record["why_not_running"]
        assert "after the step 'before'" in record["why_not_running"]
        counts = here.counts(mark="P11 end")
        assert (counts["before"], counts["end"]) == (1, 5)
