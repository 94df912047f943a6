"""`holdfast pause` and `holdfast resume`: they say what is paused, and refuse to guess."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cli.running import Cli, running


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    with running(tmp_path_factory.mktemp("node")) as cli:
        yield cli


def test_a_pause_is_listed_shown_in_the_status_and_ended(cli: Cli) -> None:
    paused = cli.ok("pause", "--all", "--reason", "incident 4711")
    listed = cli.ok("pause", "--list")
    status = cli.ok("cluster", "status")
    shown = cli.json("pause", "--list")
    resumed = cli.ok("resume", "--all")

    assert paused.startswith("Paused everything.")
    assert "everything" in listed and "incident 4711" in listed
    assert "Paused: everything, by" in status and "incident 4711" in status
    assert shown["all"]["reason"] == "incident 4711"
    assert resumed == "Resumed everything.\n"
    assert cli.ok("pause", "--list") == "Nothing is paused.\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pause", "--reason", "x"], "either --all, or --service"),
        (["pause", "--all", "--service", "a", "--reason", "x"], "either --all, or --service"),
        (["pause", "--all", "--key", "a", "--reason", "x"], "--key needs --service"),
        (["pause", "--all"], "--reason is missing"),
        (["pause", "--list", "--all"], "--list takes no other options"),
        (["resume"], "either --all, or --service"),
    ],
)
def test_a_pause_that_is_not_clear_is_refused(cli: Cli, arguments: list[str], said: str) -> None:
    result = cli.run(*arguments)

    assert result.exit_code == 2 and said in result.stderr


def test_a_service_that_does_not_exist_cannot_be_paused_and_an_unpaused_one_not_resumed(cli: Cli) -> None:
    unknown = cli.run("pause", "--service", "none", "--reason", "x")
    unpaused = cli.run("resume", "--service", "none")

    assert unknown.exit_code == 1 and "there is no service 'none'" in unknown.stderr
    assert unpaused.exit_code == 1 and "service none is not paused" in unpaused.stderr
    assert "pause --list" in unpaused.stderr
