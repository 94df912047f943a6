"""Commands that show facts: counts, lists, trees, keys, and what waits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cli.running import Cli, running


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    with running(tmp_path_factory.mktemp("node")) as cli:
        yield cli


def test_statistics_have_a_row_per_service_and_their_sum(cli: Cli) -> None:
    cli.ok("call", "echo/say", "1")
    cli.ok("call", "counter/x/add")

    text = cli.ok("statistics")

    assert "echo" in text and "counter" in text and "TOTAL" in text
    assert cli.json("statistics")["services"]["counter"]["succeeded"] == 1
