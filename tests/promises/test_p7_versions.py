"""P7: an invocation resumes on the code that started it."""

from __future__ import annotations

import random

from tests.promises.handlers import current, wait
from tests.promises.processes import World


async def test_running_invocations_stay_on_their_deployment_and_new_ones_use_the_newest(here: World) -> None:
    async with here.client() as client:
        first = here.handlers.version
        old = await client.send(wait, key="P7 old")
        await here.saw("waits", mark="P7 old")
        await here.succeed()
        second = here.handlers.version
        new = await client.send(wait, key="P7 new")
        await here.saw("waits", mark="P7 new")
        await here.kill_leader(old, random.Random(7))
        await here.kill_leader(new, random.Random(7))
        for effect in [each for each in here.effects() if each["step"] == "waits"]:
            await client.resolve_awakeable(effect["awakeable"], "go")

        assert first != second
        assert await client.attach(old) == [first] * 3
        assert await client.attach(new) == [second] * 3
        assert await client.call(current, key="P7") == second
