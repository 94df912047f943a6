"""The worlds that the tests of the promises share: one node, and three nodes whose leaders are killed.

Starting them takes longer than most tests, so they are started once. Each test marks its own invocations.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.promises.processes import World


@pytest.fixture(scope="package", params=[1, 3], ids=["one-node", "three-nodes"])
def shared_world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("world"), request.param, partitions=2)
    try:
        asyncio.run(made.start())
        yield made
    finally:
        made.stop()


@pytest.fixture
async def here(shared_world: World) -> AsyncIterator[World]:
    yield shared_world
    print(shared_world.tails())  # Shown if the test failed.
    await shared_world.heal()
