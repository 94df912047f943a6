"""Members change while processes die: nothing acknowledged is lost, and every change is completed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.fleet import Counting, fleet


@pytest.mark.slow("nodes join and are replaced under load, with real processes")
async def test_a_node_joins_and_a_dead_one_is_replaced_while_processes_are_killed(tmp_path: Path) -> None:
    async with fleet(tmp_path) as here:
        async with Counting(here) as counting:
            await counting.more(80)
            newcomer = await here.join()
            await here.changing(newcomer.name)
            newcomer.kill()  # While it catches up,
            controller = await here.controller()
            controller.kill()  # and the controller.
            newcomer.start()
            controller.start()
            await here.settled("n1", "n2", "n3", "n4")
            await counting.more()

            dead = await here.leader(0)
            here.lose(dead)
            assert f"{dead.name}: removed" in await here.order("cluster", "remove", dead.name)
            await here.settled(*here.nodes)
            await counting.more()

        await counting.check()
        assert set(here.nodes) == {"n1", "n2", "n3", "n4"} - {dead.name}
