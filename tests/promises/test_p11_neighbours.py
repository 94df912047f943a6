"""P11: one bad neighbour hurts nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.promises.handlers import end_process, take_time
from tests.promises.processes import World, eventually


@asynccontextmanager
async def supervised(here: World) -> AsyncIterator[None]:
    """The process of the handlers is restarted whenever it ends, as under any supervisor."""

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


@pytest.mark.slow("five crashes of a process that is started again, and steps of three seconds between them")
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
            await client.attach(each)
        record = await here.record(culprit)
        assert "the handler process ended 5 times while it ran this invocation" in record["why_not_running"]
        assert "after the step 'before'" in record["why_not_running"]
        counts = here.counts(mark="P11 end")
        assert (counts["before"], counts["end"]) == (1, 5)


@pytest.mark.slow("six steps of three seconds, most of which run one after the other, between crashes")
async def test_while_a_handler_ends_its_process_again_and_again_the_others_finish_and_none_is_paused(
    here: World,
) -> None:
    """New invocations of it arrive constantly, so there is always one that was not hit often."""
    async with here.client() as client, supervised(here):
        innocent = [await client.send(take_time, {"mark": f"P11 steady {number}", "seconds": 3}) for number in range(6)]
        enough = asyncio.Event()

        async def send_culprits() -> None:
            number = 0
            while not enough.is_set():
                await client.send(end_process, {"mark": f"P11 culprit {number}"})
                number += 1
                await asyncio.sleep(0.3)

        culprits = asyncio.create_task(send_culprits())
        waiting = list(innocent)
        convicted = False
        try:
            async with asyncio.timeout(300):
                while waiting or not convicted:
                    records = [await here.record(each) for each in waiting]
                    for record in records:
                        assert record["status"] != "paused", record
                    waiting = [
                        each for each, record in zip(waiting, records, strict=True) if record["status"] != "completed"
                    ]
                    for deployment in (await here.ask("GET", "/deployments"))["deployments"]:
                        convicted |= any(
                            "the handler neighbours/end_process ended the process" in str(node["restraint"])
                            for node in deployment["health"]["nodes"]
                        )
                    await asyncio.sleep(0.2)
        finally:
            enough.set()
            await culprits
            # They would end the process in the tests that follow.
            await here.ask("POST", "/invocations/kill?handler=end_process&status=active")
        for each in innocent:
            assert (await here.record(each))["end"] == "succeeded"
