"""The level of a node's log: by setting, and changed while it runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.cluster.config import BadConfig, load
from tests.cluster.harness import eventually
from tests.cluster.serving import Serving, run

OURS = logging.getLogger("holdfast")


@pytest.fixture(autouse=True)
def level_of_the_tests() -> Iterator[None]:
    before = OURS.level
    yield
    assert OURS.level == before, "a node that ends leaves nothing behind"


def test_the_level_changes_for_a_while_and_returns_by_itself(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        before = OURS.level
        status, shown = await at.admin("PUT", "/log-level", json={"level": "debug", "for": "300ms"})
        assert status == 200 and shown["level"] == "debug" and shown["until"] is not None
        assert logging.getLogger("holdfast.cluster.node").getEffectiveLevel() == logging.DEBUG

        await eventually(lambda: OURS.level == before)

        shown = (await at.admin("GET", "/log-level"))[1]
        assert shown == {"node": at.node.config.node, "level": "info", "configured": "info", "until": None}

    run(tmp_path, scenario)


def test_a_later_change_replaces_an_earlier_one_with_its_end(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        await at.admin("PUT", "/log-level", json={"level": "debug", "for": "50ms"})
        await at.admin("PUT", "/log-level", json={"level": "error"})
        await asyncio.sleep(0.1)

        assert OURS.level == logging.ERROR and (await at.admin("GET", "/log-level"))[1]["until"] is None
        assert (await at.admin("PUT", "/log-level", json={"level": None}))[1]["level"] == "info"

    run(tmp_path, scenario)


def test_a_node_that_stops_leaves_the_level_as_it_was(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        await at.admin("PUT", "/log-level", json={"level": "debug"})

    run(tmp_path, scenario)


def test_a_change_is_announced_and_in_the_audit_trail(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(at: Serving) -> None:
        await at.admin("PUT", "/log-level", json={"level": "error", "for": "1h"})

        async def acts() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = (await at.admin("GET", "/audit?action=set_log_level"))[1]["acts"]
            return found

        while not (found := await acts()):
            await asyncio.sleep(0.01)
        assert found[0]["targets"] == {"level": "error"}

    run(tmp_path, scenario)

    assert "the level of the log changes from info to error for 3600 s" in caplog.text
    assert "the level of the log is info again" in caplog.text


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"level": "loud"},
        {"level": 3},
        {"level": "debug", "for": "8d"},
        {"level": "debug", "for": "soon"},
        {"level": "debug", "for": 3},
        {"level": "debug", "for": "0s"},
        {"level": None, "for": "1h"},
        {"log": "debug"},
    ],
)
def test_a_wrong_change_is_refused_and_changes_nothing(tmp_path: Path, body: dict[str, Any]) -> None:
    async def scenario(at: Serving) -> None:
        before = OURS.level
        status, said = await at.admin("PUT", "/log-level", json=body)

        assert status == 400 and said["message"] and OURS.level == before

    run(tmp_path, scenario)


def test_the_settings_are_checked() -> None:
    read = load(None, {"HOLDFAST_LOG_LEVEL": "DEBUG", "HOLDFAST_LOG_FORMAT": "json"})

    assert (read.log_level, read.log_format) == ("debug", "json")
    with pytest.raises(BadConfig, match="none of debug, info, warning, error"):
        load(None, {"HOLDFAST_LOG_LEVEL": "loud"})
    with pytest.raises(BadConfig, match="neither text nor json"):
        load(None, {"HOLDFAST_LOG_FORMAT": "xml"})
