"""`--wait` and `--timeout`: what they wait for, and the exit codes that say how it went."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from holdfast.cli import client, waits
from holdfast.cli import cluster as cluster_commands
from holdfast.cli.client import Failed, Unanswered
from holdfast.cli.main import main
from holdfast.cli.waits import Look, TimedOut, wait_until
from tests.cli.running import Cli, running, three_nodes
from tests.cluster.harness import PATIENCE_S, FakeEndpoint
from tests.cluster.serving import HANDLERS


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    with running(tmp_path_factory.mktemp("node")) as cli:
        yield cli


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "LOOK_S", 0.02)


def suspended(cli: Cli, count: int = 1) -> list[str]:
    ids = [cli.ok("send", "agent/wait").strip() for _ in range(count)]
    for id_ in ids:
        cli.reaches(id_, "suspended")
    return ids


# -- the wait itself


def test_a_wait_ends_when_the_work_is_done_and_says_what_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    looks: Iterator[Look | Exception] = iter(
        [Look(False, "2 left"), Look(False, "2 left"), Unanswered("nobody"), Look(False, "1 left"), Look(True)]
    )

    def look() -> Look:
        found = next(looks)
        if isinstance(found, Exception):
            raise found
        return found

    wait_until(look, work="draining n2", timeout_s=None)

    assert capsys.readouterr().err.splitlines() == [
        "draining n2: 2 left", "draining n2: nobody; trying again", "draining n2: 1 left",
    ]  # fmt: skip


def test_a_wait_that_takes_too_long_has_an_exit_code_of_its_own() -> None:
    with pytest.raises(TimedOut) as ended:
        wait_until(lambda: Look(False, "2 left"), work="draining n2", timeout_s=0.05)

    assert ended.value.exit_code == 124
    assert (ended.value.message, ended.value.hint) == ("not done after 50ms: 2 left", "the cluster goes on draining n2")


def test_a_wait_is_given_up_when_nobody_answers_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent() -> Look:
        raise Unanswered("no node answers")

    monkeypatch.setattr(waits, "SILENT_S", 0.05)
    with pytest.raises(Failed, match="no node answers; the cluster goes on draining n2"):
        wait_until(silent, work="draining n2", timeout_s=None)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("cluster", "drain", "n1", "--timeout", "1m"), "--timeout needs --wait"),
        (("cluster", "drain", "n1", "--wait", "--timeout", "soon"), "is not a duration"),
        (("cluster", "drain", "n1", "--wait", "--undo"), "neither --move nor --wait"),
        (("deployments", "remove", "dp_1", "--wait", "--force"), "leave out --wait"),
        (("pause", "--list", "--wait"), "--list takes no other options"),
        (("backup", "--no-wait", "list", "--from", "x"), "for making a backup"),
    ],
)
def test_options_that_do_not_belong_together_are_refused(arguments: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(main, arguments)

    assert result.exit_code == 2 and said in result.output


def test_everything_that_takes_time_can_be_waited_for_in_the_same_way() -> None:
    def options(*path: str) -> set[str]:
        command: click.Command = main
        for name in path:
            assert isinstance(command, click.Group)
            command = command.commands[name]
        return {name for each in command.params for name in each.opts}

    for path in (
        *(("cluster", name) for name in ("drain", "add", "remove")),
        *(("invocations", name) for name in ("cancel", "kill", "pause", "resume", "restart")),
        ("deployments", "remove"), ("pause",), ("backup", "status"),
    ):  # fmt: skip
        assert {"--wait", "--timeout", "--json"} <= options(*path), path


# -- invocations


def test_a_cancelled_invocation_is_waited_for(cli: Cli) -> None:
    [id_] = suspended(cli)

    shown = cli.ok("invocations", "cancel", id_, "--wait")

    assert shown.splitlines() == [f"Cancelling {id_}", f"{id_} succeeded"], "its code caught it"
    assert cli.json("invocations", "describe", id_)["status"] == "completed"


def test_what_is_waited_for_is_what_a_filter_matched(cli: Cli) -> None:
    suspended(cli, 3)

    result = cli.run("invocations", "kill", "--service", "agent", "--status", "suspended", "--wait", "--yes", "--json")
    declined = cli.run("invocations", "kill", "--service", "agent", "--wait", input="n\n")

    assert json.loads(result.stdout) == {
        "action": "kill", "matched": 3, "done": 3, "unchanged": 0, "failed": 0, "reasons": {}, "more": False,
        "settled": {"killed": 3},
    }  # fmt: skip
    assert result.exit_code == 0 and declined.exit_code == 1
    assert cli.json("invocations", "list", "--service", "agent", "--status", "active")["invocations"] == []


def test_an_invocation_that_does_not_complete_in_time_goes_on(cli: Cli) -> None:
    [id_] = suspended(cli)
    cli.ok("invocations", "kill", id_, "--wait")

    result = cli.run("invocations", "restart", id_, "--wait", "--timeout", "100ms")

    new = result.stdout.split()[-1]
    assert result.exit_code == 124 and "not done after 100ms" in result.stderr
    assert "the cluster goes on restarting 1 invocation" in result.stderr
    assert cli.json("invocations", "describe", new)["status"] != "completed"
    cli.ok("invocations", "kill", new)


def test_the_exit_code_says_how_restarted_work_ended(cli: Cli) -> None:
    done = json.loads(cli.ok("call", "echo/say", "1", "--json"))["id"]
    [killed] = suspended(cli)
    cli.ok("invocations", "kill", killed, "--wait")
    stopped = cli.ok("send", "flaky/stop").strip()
    cli.reaches(stopped, "paused")

    assert cli.run("invocations", "restart", done, "--wait").exit_code == 0
    paused_again = cli.run("invocations", "resume", stopped, "--wait")
    [waiting] = suspended(cli)
    unknown = cli.run("invocations", "kill", "inv_" + "00" * 16, waiting, "--wait", "--json")

    assert paused_again.exit_code == 1 and f"{stopped} paused" in paused_again.stdout
    assert unknown.exit_code == 1
    assert [each.get("settled") for each in json.loads(unknown.stdout)] == ["killed", None]
    assert cli.run("invocations", "kill", stopped, "--wait").exit_code == 0


def test_ctrl_c_leaves_the_work_running_and_says_so(cli: Cli) -> None:
    [id_] = suspended(cli)
    command = [sys.executable, "-m", "holdfast", "invocations", "resume", id_, "--wait"]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **cli.environ}, text=True
    )
    try:
        assert process.stderr is not None
        assert "resuming 1 invocation" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait()

    assert process.returncode == 130
    assert said.endswith("Interrupted: the cluster goes on resuming 1 invocation.\n")
    assert cli.json("invocations", "describe", id_)["status"] == "suspended"
    cli.ok("invocations", "kill", id_)


# -- deployments, pauses, backups


def test_a_deployment_is_removed_once_it_has_drained(tmp_path: Path) -> None:
    with running(tmp_path) as cli:
        [old] = [each["id"] for each in cli.json("deployments", "list")["deployments"]]
        [id_] = suspended(cli)
        current = cli.run("deployments", "remove", old, "--wait")
        newer = FakeEndpoint(HANDLERS)
        asyncio.run_coroutine_threadsafe(newer.start(), cli.loop).result(PATIENCE_S)
        try:
            cli.ok("deployments", "register", newer.uri)
            early = cli.run("deployments", "remove", old, "--wait", "--timeout", "100ms")
            cli.ok("invocations", "kill", id_)
            removed = cli.ok("deployments", "remove", old, "--wait")
        finally:
            asyncio.run_coroutine_threadsafe(newer.stop(), cli.loop).result(PATIENCE_S)

    assert current.exit_code == 1 and "so it does not drain" in current.stderr
    assert early.exit_code == 124 and "1 invocation on it" in early.stderr and f"{old} is not removed" in early.stderr
    assert removed == f"Removed {old}\n"


def test_a_pause_is_waited_for_until_every_node_obeys_and_nothing_runs(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Any] = [
        {"service": None, "key": None, "not_confirmed": ["n2"]},
        {"service": None, "key": None, "not_confirmed": ["n2"]},
        {"service": None, "key": None, "not_confirmed": []},
        {"invocations": [{}]},
        {"invocations": []},
    ]
    asked: list[tuple[str, str]] = []

    def admin(url: str, method: str, where: str, **more: Any) -> Any:
        asked.append((method, where))
        return answers.pop(0)

    monkeypatch.setattr(client, "admin", admin)
    result: Result = cli.run("pause", "--all", "--reason", "x", "--stop", "--wait", "--json")

    assert json.loads(result.stdout)["not_confirmed"] == [] and answers == []
    assert asked == [("POST", "/pauses")] * 3 + [("GET", "/invocations")] * 2
    assert "n2 has not confirmed it" in result.stderr and "1 still running" in result.stderr


def test_a_backup_can_be_begun_and_waited_for_later(cli: Cli, tmp_path: Path) -> None:
    id_ = cli.ok("backup", "--to", str(tmp_path), "--no-wait").strip()

    waited = cli.ok("backup", "status", id_, "--wait")
    shown = cli.json("backup", "status", id_)

    assert id_.startswith("backup-") and waited.startswith(f"{id_}: ")
    assert shown["status"] == "succeeded" and cli.run("backup", "status", "backup-none").exit_code == 1
    assert [each["id"] for each in cli.json("backup", "list", "--from", str(tmp_path))] == [id_]


# -- the cluster


def test_nodes_are_drained_and_removed_before_the_command_returns(tmp_path: Path) -> None:
    with three_nodes(tmp_path) as (cluster, _):
        url = cluster.seats["n1"].node.doors.urls.admin

        def run(*arguments: str) -> Result:
            return CliRunner().invoke(main, arguments, env={"HOLDFAST_ADMIN_URL": url})

        drained = run("cluster", "drain", "n2", "--wait", "--timeout", f"{PATIENCE_S}s", "--json")
        leaders = {each["leader"] for each in json.loads(run("cluster", "status", "--json").stdout)["partitions"]}
        removed = run("cluster", "remove", "n2", "--force", "--wait", "--timeout", f"{PATIENCE_S}s")

        assert drained.exit_code == 0 and json.loads(drained.stdout)["leads"] == 0, drained.output
        assert "n2" not in leaders
        assert removed.exit_code == 0, removed.output
        assert "n2: removed, replicas 0" in removed.stdout and "stop it, and delete its directory" in removed.stdout


def test_a_node_that_cannot_give_its_leaderships_away_is_not_drained(cli: Cli) -> None:
    began = time.monotonic()
    result = cli.run("cluster", "drain", "n1", "--wait", "--timeout", "100ms")
    cli.ok("cluster", "undrain", "n1")

    assert result.exit_code == 124 and "2 leaderships left" in result.stderr
    assert time.monotonic() - began < PATIENCE_S


@pytest.mark.parametrize(
    ("node", "changing", "found"),
    [
        ({"connected": False, "replicas": 0}, None, Look(False, "it has not connected yet")),
        ({"connected": True, "replicas": 0}, None, Look(False, "it has no replicas yet")),
        ({"connected": True, "replicas": 1}, "n4 catches up", Look(False, "n4 catches up")),
        ({"connected": True, "replicas": 1}, None, Look(True, "None")),
    ],
)
def test_a_node_has_been_added_when_it_has_its_share(
    monkeypatch: pytest.MonkeyPatch, node: dict[str, Any], changing: str | None, found: Look
) -> None:
    shown = {"nodes": [{"name": "n4", **node}], "changing": changing}
    monkeypatch.setattr(client, "admin", lambda *arguments, **more: shown)

    assert cluster_commands._joined("", "n4") == found
    with pytest.raises(Failed, match="there is no node 'n5' any more"):
        cluster_commands._joined("", "n5")


def test_a_removed_node_that_is_asked_itself_says_when_it_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def admin(*arguments: Any, **more: Any) -> Any:
        raise Unanswered(said)

    monkeypatch.setattr(client, "admin", admin)
    seen = {"replicas": 2}

    said = "node n2 was removed from the cluster for ever: ask another node (503)"
    assert cluster_commands._let_go("", "n2", seen).done and seen["replicas"] == 0
    said = "no node answers"
    with pytest.raises(Unanswered):
        cluster_commands._let_go("", "n2", {"replicas": 2})
