"""P3: retries survive failures."""

from __future__ import annotations

import random

import pytest

from holdfast.sdk import CallFailed
from tests.promises.handlers import crashes, run_fails, terminal
from tests.promises.processes import World


async def test_attempts_of_a_step_are_counted_over_kills_of_leader_and_handlers(here: World) -> None:
    async with here.client() as client:
        sent = await client.send(run_fails, {"mark": "P3 a", "succeeds": 99, "attempts": 6, "initial": 0.4})
        await here.saw("try", 2, mark="P3 a")
        here.handlers.kill()
        here.handlers.start()
        await here.saw("try", 4, mark="P3 a")
        await here.kill_leader(sent, random.Random(3))

        with pytest.raises(CallFailed) as failed:
            await client.attach(sent)

        assert "try" in failed.value.message
        # A try that ran but was not journaled when its process or its leader died may be repeated: once per kill.
        assert 6 <= here.counts(mark="P3 a")["try"] <= 8


async def test_a_step_that_works_at_last_is_not_tried_again(here: World) -> None:
    async with here.client() as client:
        sent = await client.send(run_fails, {"mark": "P3 b", "succeeds": 3, "attempts": 10})
        assert await client.attach(sent) == "worked at try 3"
        await here.kill_leader(sent, random.Random(3))

        assert await client.attach(sent) == "worked at try 3"
        assert here.counts(mark="P3 b")["try"] == 3


async def test_a_handler_that_fails_is_run_again(here: World) -> None:
    async with here.client() as client:
        assert await client.call(crashes, {"mark": "P3 c", "succeeds": 3}) == "worked at attempt 3"
        assert here.counts(mark="P3 c")["attempt"] == 3


async def test_a_terminal_error_is_never_retried(here: World) -> None:
    async with here.client() as client:
        sent = await client.send(terminal, "P3 d")
        with pytest.raises(CallFailed, match="no seats"):
            await client.attach(sent)
        await here.kill_leader(sent, random.Random(3))

        with pytest.raises(CallFailed, match="no seats") as failed:
            await client.attach(sent)
        assert failed.value.code == 409
        assert here.counts(mark="P3 d")["terminal"] == 1
