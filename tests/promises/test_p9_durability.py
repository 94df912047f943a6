"""P9: nothing acknowledged is ever lost."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
from pathlib import Path

import pytest

from holdfast.sdk import Client
from tests.promises.handlers import add, read
from tests.promises.processes import World, world


async def accept(client: Client, keys: int) -> list[str]:
    """Send; the returned ones were acknowledged."""
    sent = await asyncio.gather(*(client.send(add, f"m{number}", key=f"k{number}") for number in range(keys)))
    return [handle.invocation_id for handle in sent]


async def check_all(here: World, accepted: list[str]) -> None:
    async with here.client() as client:
        for ident in accepted:
            assert await client.attach(ident) == 1
        for number in range(len(accepted)):
            assert await client.call(read, key=f"k{number}") == 1


@pytest.mark.parametrize("nodes", [1, 3])
async def test_all_nodes_killed_at_once_lose_nothing_acknowledged(tmp_path: Path, nodes: int) -> None:
    async with world(tmp_path, nodes=nodes) as here:
        async with here.client() as client:
            accepted = await accept(client, 40)
        for node in here.nodes:
            node.kill()
        for node in here.nodes:
            node.start()
        await here.ready()

        await check_all(here, accepted)


async def test_a_state_that_power_loss_tore_is_rebuilt_from_the_log(tmp_path: Path) -> None:
    """The state is not synced with every batch: after a power loss it may contain anything. The log is the truth."""
    chance = random.Random(9)
    async with world(tmp_path) as here:
        async with here.client() as client:
            accepted = await accept(client, 40)
        here.node.kill()
        states = sorted((here.node.data / "state").iterdir())
        assert states
        for state in states:
            tear(state, chance)
        here.node.start()
        await here.ready()

        await check_all(here, accepted)


def tear(state: Path, chance: random.Random) -> None:
    """Simulates a power loss: pages of the state are missing, and the machine has another boot id."""
    (data,) = state.rglob("data.mdb")
    size = data.stat().st_size
    with data.open("r+b") as file:
        for _ in range(64):
            file.seek(chance.randrange(0, max(size - 4096, 1)))
            file.write(os.urandom(4096))
    mark = json.loads((state / "MARK").read_text())
    assert "boot" in mark
    (state / "MARK").write_text(json.dumps({**mark, "boot": "another boot of the machine"}))


async def test_a_state_directory_that_is_gone_is_rebuilt_from_the_log(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        async with here.client() as client:
            accepted = await accept(client, 20)
        here.node.kill()
        shutil.rmtree(here.node.data / "state")
        here.node.start()
        await here.ready()

        await check_all(here, accepted)
