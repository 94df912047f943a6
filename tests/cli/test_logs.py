"""`holdfast logs`: records of the nodes, as a page and as they come."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import click
import pytest

from holdfast.cli import logs as module
from tests.cli.running import Cli, running
from tests.cluster.harness import PATIENCE_S

ID = "inv_" + "ab" * 16
logger = logging.getLogger("holdfast.of_this_test")


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    with running(tmp_path_factory.mktemp("node")) as cli:
        yield cli


def test_records_are_printed_for_people_and_for_scripts(cli: Cli) -> None:
    logger.error("a disk\x1b[2J is slow", extra={"invocation_id": ID, "attempt": 3})
    logger.warning("later")

    [line, _] = [each for each in cli.ok("logs", "--level", "warning").splitlines() if logger.name in each]
    shown = cli.json("logs", "--invocation", ID, "--node", "n1")
    newest = cli.run("logs", "--level", "warning", "-n", "1")

    assert line.split("  ", 2)[1].strip() == "ERROR"
    assert line.endswith(rf"n1  {logger.name}: a disk\x1b[2J is slow  invocation={ID}  attempt=3")
    assert [each["message"] for each in shown["records"]] == ["a disk\x1b[2J is slow"]
    assert "later" in newest.stdout and "There are older ones than these 1" in newest.stderr
    assert cli.ok("logs", "--until", "1d") == "No records match.\n"


def test_a_traceback_stands_below_its_record() -> None:
    record = {
        "time": "T",
        "level": "error",
        "logger": "x",
        "message": "it broke",
        "node": "n1",
        "error": "Traceback\n  V",
    }

    assert click.unstyle(module.shown(record)) == "T  ERROR    n1  x: it broke\n    Traceback\n      V"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--node", "n9"), 1, "there is no node 'n9'"),
        (("--follow", "--until", "1h"), 2, "exclude each other"),
        (("--level", "loud"), 2, "'loud' is not one of"),
        (("--invocation", "x"), 1, "Error:"),
    ],
)
def test_a_wrong_request_says_so(cli: Cli, arguments: tuple[str, ...], code: int, said: str) -> None:
    result = cli.run("logs", *arguments)

    assert result.exit_code == code and said in result.stderr


def test_records_are_followed_until_an_interrupt(cli: Cli) -> None:
    logger.error("before")
    command = [sys.executable, "-m", "holdfast", "logs", "--follow", "--level", "error", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **cli.environ}, text=True)
    assert process.stdout is not None

    def until(message: str) -> None:
        assert process.stdout is not None
        while (line := process.stdout.readline()) and json.loads(line)["message"] != message:
            pass
        assert line, "the command ended"

    try:
        until("before")
        logger.error("as it happens")
        until("as it happens")
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
    finally:
        process.kill()
        process.wait()


def test_silent_nodes_and_losses_are_named(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, dict[str, Any]]] = [("hello", {}), ("silent", {"node": "n2"}), ("lost", {"node": "n3"})]
    monkeypatch.setattr(module, "follow_events", lambda url, wanted, where: iter(said))

    result = cli.run("logs", "--follow")

    assert "n2 does not answer" in result.stderr and "Some records of n3 were dropped" in result.stderr
    assert result.stdout == ""
