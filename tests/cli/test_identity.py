"""`holdfast identity ...`: what endpoints are given, alone on standard output."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from holdfast.sdk.signatures import parse_key
from tests.cli.running import Cli, running
from tests.cluster.harness import PATIENCE_S, eventually


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    with running(tmp_path_factory.mktemp("node"), register=False) as cli:
        made = eventually(lambda: cli.at.node.ground.meta.state.identity.keys)
        asyncio.run_coroutine_threadsafe(made, cli.loop).result(PATIENCE_S)
        yield cli


def test_show_prints_what_endpoints_are_given_and_rotate_makes_another(cli: Cli) -> None:
    first = cli.ok("identity", "show").strip()

    second = cli.ok("identity", "rotate").strip()
    both = cli.run("identity", "show")
    finished = cli.ok("identity", "rotate", "--finish").strip()

    assert parse_key(first) != parse_key(second)
    assert both.stdout.strip() == f"{first},{second}" and "A rotation is under way" in both.stderr
    assert finished == second == cli.ok("identity", "show").strip()


def test_a_rotation_that_is_not_under_way_cannot_be_finished(cli: Cli) -> None:
    result = cli.run("identity", "rotate", "--finish")

    assert result.exit_code == 1
    assert "no rotation is under way" in result.stderr and "identity rotate" in result.stderr
