"""P6: waiting is free and durable."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from holdfast.sdk import SendHandle
from tests.promises.handlers import approval, waiting
from tests.promises.processes import PATIENCE_S, World


async def test_a_timer_keeps_its_deadline_over_kills(here: World) -> None:
    async with here.client() as client:
        sent = await client.send(approval, 4.0, key="P6 timer")
        await until_suspended(here, [sent])
        here.handlers.kill()
        await here.kill_leader(sent, random.Random(6))
        here.handlers.start()

        assert await client.attach_workflow(waiting, "P6 timer", str) == "late"
        (late,) = (effect for effect in here.effects() if effect["step"] == "late" and effect["mark"] == "P6 timer")
        assert late["waited"] >= 4.0, "not early"


async def test_an_approval_beats_the_timer_over_kills(here: World) -> None:
    async with here.client() as client:
        sent = await client.send(approval, 3600.0, key="P6 approval")
        await until_suspended(here, [sent])
        async with here.without_leader(here.partition(sent)) as survivor, here.client(survivor) as other:
            await other.resolve_promise(waiting, "P6 approval", "yes", "Ada")

        assert await client.attach_workflow(waiting, "P6 approval", str) == "approved by Ada"
        assert here.counts(mark="P6 approval")["late"] == 0


async def test_a_waiting_invocation_holds_nothing_in_the_handler_process(here: World) -> None:
    async with here.client() as client:
        sent = [await client.send(approval, 3600.0, key=f"P6 w{number}") for number in range(20)]
        await until_suspended(here, sent)
        here.handlers.kill()
        await here.kill_leader(sent[7], random.Random(6))

        # No process serves the handlers, and everything still waits: nothing was running.
        await until_suspended(here, sent)
        here.handlers.start()
        await client.resolve_promise(waiting, "P6 w7", "yes", "Ada")
        assert await client.attach_workflow(waiting, "P6 w7", str) == "approved by Ada"


async def until_suspended(here: World, sent: Sequence[SendHandle[Any]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        for each in sent:
            while (await here.record(each))["status"] != "suspended":
                await asyncio.sleep(0.05)
