"""Fixtures that several files of this room use."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from holdfast.log.store import LmdbStore, Store
from tests.log.journal_box import Box, on_lmdb
from tests.log.links import PATIENCE_S, Expected, Run
from tests.sim.disk import SimDisk


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Run a coroutine on the loop under test; an error that only the loop receives fails the test."""

    def run_it(work: Coroutine[Any, Any, None]) -> None:
        unheard: list[dict[str, Any]] = []

        async def watched() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda loop, context: unheard.append(context))
            await asyncio.wait_for(work, 2 * PATIENCE_S)

        with asyncio.Runner(loop_factory=uvloop.new_event_loop if request.param == "uvloop" else None) as runner:
            runner.run(watched())
        assert [context for context in unheard if not isinstance(context.get("exception"), Expected)] == []

    return run_it


@pytest.fixture(params=["lmdb", "simulated"])
def box(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Box]:
    disk = SimDisk("d")
    opened = Box((lambda: on_lmdb(tmp_path)) if request.param == "lmdb" else lambda: disk)
    yield opened
    opened.store.close()


@pytest.fixture(params=["lmdb", "simulated"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """A store of each kind. The tests of the real one have a `store` of their own."""
    found: Store = (
        LmdbStore.open(tmp_path / "data", node="n1", cluster="c1") if request.param == "lmdb" else SimDisk("d")
    )
    yield found
    found.close()
