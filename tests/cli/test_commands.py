"""The commands against a real node: their output for people and scripts, and their errors."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from holdfast import __version__
from holdfast.cli.cluster import _behind
from holdfast.cli.main import main
from tests.cli.running import Cli, running
from tests.cluster.harness import PATIENCE_S


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    with running(tmp_path_factory.mktemp("node")) as cli:
        yield cli


def test_a_call_prints_the_outcome_and_nothing_else(cli: Cli) -> None:
    assert cli.ok("call", "echo/say", '{"a": 1}') == '{"a": 1}\n'
    assert cli.ok("call", "echo/say", "-", input="from stdin\n") == "from stdin\n"
    assert cli.ok("call", "counter/x/add") == "1\n"
    assert cli.ok("call", "counter/add", "--key", "x") == "2\n"
    assert cli.ok("call", "echo/say", "") == ""
    shown = cli.json("call", "echo/say", '{"a": 1}')
    assert shown["id"].startswith("inv_") and shown["outcome"] == {"a": 1}


def test_a_call_of_an_unknown_handler_fails_with_a_hint(cli: Cli) -> None:
    result = cli.run("call", "nothing/run")

    assert result.exit_code == 1
    assert "Error: there is no service 'nothing' (404)" in result.stderr
    assert "Hint: register the deployment that offers it" in result.stderr
    assert result.stdout == ""


def test_a_failed_call_is_json_too_if_that_is_asked_for(cli: Cli) -> None:
    result = cli.run("call", "nothing/run", "--json")

    shown = json.loads(result.stdout)
    assert result.exit_code == 1 and shown["id"] is None
    assert (shown["error"]["code"], shown["error"]["source"]) == (404, "ingress")


def test_a_send_prints_the_id_and_finds_the_first_again(cli: Cli) -> None:
    first = cli.ok("send", "agent/wait", "--idempotency-key", "k").strip()
    again = cli.ok("send", "agent/wait", "--idempotency-key", "k").strip()
    delayed = cli.json("send", "echo/say", "1", "--delay", "1h")

    assert first.startswith("inv_")
    assert again == f"{first} (accepted before)"
    assert delayed["status"] == "Accepted"
    assert cli.run("send", "echo/say", "--delay", "soon").exit_code == 1


def test_invocations_are_sent_with_tags_and_found_by_them(cli: Cli) -> None:
    first = cli.ok("send", "agent/wait", "--tag", "tenant=acme, Inc", "--tag", "order=17").strip()
    other = cli.ok("send", "agent/wait", "--tag", "tenant=other", "--tag", "order=17").strip()
    assert cli.ok("call", "echo/say", "1", "--tag", "order=18") == "1\n"

    def found(*arguments: str) -> list[str]:
        return [each["id"] for each in cli.json("invocations", "list", *arguments)["invocations"]]

    assert found("--tag", "order=17") == [other, first]
    assert found("--tag", "order=17", "--tag", "tenant=acme, Inc") == [first]
    assert len(found("--tag", "order=18", "--order", "completed")) == 1
    assert found("--root", first) == [first]
    assert "tenant=acme, Inc, order=17" in cli.ok("invocations", "describe", first)
    counted = cli.ok("invocations", "kill", "--tag", "order=17", "--tag", "tenant=other", "--dry-run")
    assert "kill would act on 1 invocations with tag order=17 and tenant=other" in counted
    for wrong in ("tenant", "tenant=", "a b=c", f"tenant={'x' * 257}"):
        refused = cli.run("send", "agent/wait", "--tag", wrong)
        assert refused.exit_code == 2 and "--tag" in refused.stderr
    twice = cli.run("call", "echo/say", "--tag", "a=1", "--tag", "a=2")
    assert twice.exit_code == 2 and "'a' is given twice" in twice.stderr


def test_deployments_and_services_are_listed_and_described(cli: Cli) -> None:
    [deployment] = cli.json("deployments", "list")["deployments"]
    again = cli.ok("deployments", "register", cli.at.endpoint.uri)

    assert again.startswith(f"Unchanged: {deployment['id']}")
    assert deployment["id"] in cli.ok("deployments", "list")
    assert "counter" in cli.ok("deployments", "describe", deployment["id"])
    assert "virtual" not in cli.ok("services", "list")
    assert "exclusive" in cli.ok("services", "describe", "counter")
    assert cli.json("services", "describe", "signup")["kind"] == "workflow"
    refused = cli.run("deployments", "remove", deployment["id"])
    assert refused.exit_code == 1 and "or --force" in refused.stderr
    assert cli.run("deployments", "describe", "dp_none").exit_code == 1
    assert cli.run("deployments", "register", "nonsense").exit_code == 1


def test_an_invocation_is_described_with_its_journal_and_why_it_waits(cli: Cli) -> None:
    id_ = cli.ok("send", "agent/wait").strip()
    cli.reaches(id_, "suspended")

    text = cli.ok("invocations", "describe", id_)
    shown = cli.json("invocations", "describe", id_)

    assert "why not running" in text and "the awakeable awk_" in text
    assert "waiting" in text
    assert [step["op"] for step in shown["journal"]] == ["input", "awakeable"]
    assert id_ in cli.ok("invocations", "list", "--status", "suspended")
    assert "awakeable" in cli.ok("invocations", "journal", id_)


def test_the_sizes_of_an_invocation_are_shown(cli: Cli) -> None:
    id_ = cli.ok("send", "echo/say", "-", input="x" * 3_000_000).strip()
    cli.reaches(id_, "completed")

    text = cli.ok("invocations", "describe", id_)

    assert "bytes of journal, 5.7 MiB in 2 large values" in text
    assert '"bytes": 3000000' in text
    assert cli.json("invocations", "describe", id_)["large_bytes"] == 6_000_000


def test_invocations_are_acted_on_one_by_one(cli: Cli) -> None:
    id_ = cli.ok("send", "agent/wait").strip()
    cli.reaches(id_, "suspended")

    killed = cli.ok("invocations", "kill", id_)
    cli.reaches(id_, "completed")
    restarted = cli.json("invocations", "restart", id_)
    too_late = cli.run("invocations", "pause", id_)
    purged = cli.ok("invocations", "purge", id_)

    assert killed.strip() == f"Killed {id_}"
    assert restarted[0]["new_id"].startswith("inv_")
    assert too_late.exit_code == 1 and id_ in too_late.stderr
    assert purged.strip() == f"Purged {id_}"


def test_many_are_acted_on_after_asking(cli: Cli) -> None:
    ids = [cli.ok("send", "flaky/stop").strip() for _ in range(3)]
    for id_ in ids:
        cli.reaches(id_, "paused")

    declined = cli.run("invocations", "kill", "--service", "flaky", "--status", "paused", input="n\n")
    agreed = cli.ok("invocations", "kill", "--service", "flaky", "--status", "paused", "--yes")

    assert declined.exit_code == 1 and "service flaky" in declined.output
    assert "kill: 3 of 3 done" in agreed
    assert cli.run("invocations", "kill").exit_code == 2
    assert cli.run("invocations", "kill", ids[0], "--service", "flaky").exit_code == 2


def test_state_is_shown_and_edited(cli: Cli) -> None:
    cli.ok("call", "counter/edited/add")

    assert cli.ok("state", "get", "counter", "edited", "count").strip() == "1"
    cli.ok("state", "set", "counter", "edited", "count=41", 'tags=["a"]')
    assert cli.ok("call", "counter/edited/add") == "42\n"
    assert cli.json("state", "get", "counter", "edited")["state"] == {"count": 42, "tags": ["a"]}
    cli.ok("state", "set", "counter", "edited", "--remove", "tags")
    assert "tags" not in cli.ok("state", "get", "counter", "edited")
    assert "has no state" in cli.ok("state", "get", "counter", "never")
    wrong = cli.run("state", "set", "counter", "edited", "name=Ann")
    assert wrong.exit_code == 2 and "needs quotes" in wrong.stderr


def test_no_node_is_an_error_with_a_hint() -> None:
    result = CliRunner().invoke(main, ["services", "list", "--admin-url", "http://127.0.0.1:1"])

    assert result.exit_code == 1
    assert "no node answers at http://127.0.0.1:1" in result.stderr
    assert "HOLDFAST_ADMIN_URL" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [[], ["dev"], ["serve"], ["call"], ["send"], ["state", "set"], ["deployments", "register"], ["invocations"],
     *(["invocations", action] for action in ("list", "describe", "cancel", "kill", "pause", "resume", "restart", "purge"))],
)  # fmt: skip
def test_every_command_explains_itself(arguments: list[str]) -> None:
    result = CliRunner().invoke(main, [*arguments, "--help"])

    assert result.exit_code == 0
    assert len(result.output.splitlines()) > 3


def test_serve_names_the_setting_that_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('ingres = ":80"\n')

    result = CliRunner().invoke(main, ["serve", "--config", str(file)])

    assert result.exit_code == 1
    assert "ingres: there is no such setting; did you mean ingress?" in result.stderr


def test_serve_names_every_port_it_wants_if_one_is_taken(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s" * 32)
    secret.chmod(0o600)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        peer = f"127.0.0.1:{taken.getsockname()[1]}"
        file = tmp_path / "node.toml"
        file.write_text(
            f'node = "n1"\ndata = "{tmp_path}/data"\ningress = "127.0.0.1:0"\nadmin = "127.0.0.1:0"\npeer = "{peer}"\n'
            f'secret_file = "{secret}"\n[peers]\nn1 = "{peer}"\nn2 = "127.0.0.1:1"\nn3 = "127.0.0.1:2"\n'
        )

        command = [sys.executable, "-m", "holdfast", "serve", "--config", str(file)]
        root = Path(__file__).resolve().parents[2]
        answer = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=PATIENCE_S, check=False)

    assert answer.returncode == 1 and "a port is already in use" in answer.stderr
    assert f"peer {peer}" in answer.stderr


def test_dev_refuses_an_invalid_app_with_its_name() -> None:
    result = CliRunner().invoke(main, ["dev", "--app", "trips"])

    assert result.exit_code == 2
    assert "is not MODULE:VARIABLE" in result.stderr


def test_config_check_explains_mistakes_and_prints_effective_settings(cli: Cli, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret that nobody may read")
    file = tmp_path / "node.toml"
    file.write_text(f'node = "n1"\nsecret_file = "{secret}"\nfounders = ["n1", "n2"]\n[peers]\nn2 = "10.0.0.2:5122"\n')

    result = cli.run("config", "check", "--config", str(file))
    assert result.exit_code == 0
    assert "n2=10.0.0.2:5122" in result.output and "a secret" not in result.output
    assert "Note: founders: a cluster of two nodes stops when either node stops" in result.output
    assert cli.json("config", "check", "--config", str(file))["settings"]["founders"] == "n1, n2"

    file.write_text('node = "n1"\nreplicas = 3\n')
    result = cli.run("config", "check", "--config", str(file))
    assert result.exit_code == 1
    assert "replicas: there is no such setting; did you mean replication?" in result.output


def test_config_check_finds_a_data_directory_that_cannot_be_used(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file")
    file = tmp_path / "node.toml"
    file.write_text(f'data = "{tmp_path / "data"}"\n')

    result = cli.run("config", "check", "--config", str(file), "--json")

    assert result.exit_code == 1
    assert "is not a directory; name another place" in result.output


def test_every_command_that_ends_prints_json_and_every_option_has_a_help_text() -> None:
    def commands(group: click.Group, *names: str) -> Iterator[tuple[str, click.Command]]:
        for name, command in group.commands.items():
            if isinstance(command, click.Group):
                yield from commands(command, *names, name)
            if not isinstance(command, click.Group) or command.invoke_without_command:
                yield " ".join((*names, name)), command

    found = dict(commands(main))
    without_json = [name for name, it in found.items() if not any("--json" in option.opts for option in it.params)]
    assert without_json == ["dev", "serve"]
    for name, command in found.items():
        assert command.help, name
        for option in command.params:
            assert not isinstance(option, click.Option) or option.help, f"{name} {option.name}"


def test_a_snapshot_is_cut_listed_and_read_to_its_end(cli: Cli, tmp_path: Path) -> None:
    cli.ok("call", "counter/snapshots/add")
    made = cli.json("snapshot", "create")
    listed = cli.json("snapshot", "list")
    first = made[0]
    directory = Path(listed["directory"])
    (file,) = directory.glob(f"*/*/{first['name']}")

    assert {each["partition"] for each in made} == {each["partition"] for each in listed["partitions"]}
    assert listed["store"] is None and listed["error"] is None
    assert [each["index"] for each in listed["partitions"]] == [each["index"] for each in made]
    assert cli.json("snapshot", "verify", str(file))["index"] == first["index"]
    assert "Sound." in cli.ok("snapshot", "verify", str(file))
    assert "INDEX" in cli.ok("snapshot", "list")

    damaged = tmp_path / file.name
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    damaged.write_bytes(raw)
    result = cli.run("snapshot", "verify", str(damaged))
    assert result.exit_code == 1 and "its data is damaged" in result.stderr


@pytest.mark.parametrize(
    ("level", "levels", "said"),
    [
        (1, {"n1": 1, "n2": 2, "n3": None}, "Level 1 of 2, which rises when every node is connected and supports it: "
         "waits for n1, n3."),
        (1, {"n1": 2, "n2": 2}, "Level 1 of 2, which rises when every node is connected and supports it."),
        (2, {"n1": 2, "n2": None}, None),
        (None, {"n1": None}, None),
    ],
    ids=["mixed", "in a moment", "risen", "an older node answers"],
)  # fmt: skip
def test_the_status_shows_why_the_level_does_not_rise(
    level: int | None, levels: dict[str, Any], said: str | None
) -> None:
    nodes = [{"name": name, "state": "active", "level": each} for name, each in levels.items()]

    assert _behind({"level": level, "nodes": [*nodes, {"name": "n9", "state": "removed", "level": None}]}) == said


def test_a_snapshot_of_an_unknown_partition_is_refused(cli: Cli) -> None:
    result = cli.run("snapshot", "create", "77")

    assert result.exit_code == 1 and "there is no partition '77' (404)" in result.stderr
    assert "has no shared store" in cli.run("snapshot", "list", "--stored").stderr


def test_cluster_commands_show_nodes_and_explain_refusals(cli: Cli) -> None:
    shown = cli.ok("cluster", "status")
    assert "n1" in shown and "active" in shown and "PARTITION" in shown
    assert re.search(rf"VERSION.*\nn1 +{re.escape(__version__)} +active", shown) and "Level" not in shown
    assert [node["leads"] for node in cli.json("cluster", "status")["nodes"]] == [2]

    stays = cli.run("cluster", "transfer", "0")
    assert stays.exit_code == 1 and "no other node can lead partition 0" in stays.output
    last = cli.run("cluster", "remove", "n1", "--force")
    assert last.exit_code == 1 and "n1 is the last node" in last.output
    assert cli.run("cluster", "drain", "n7").exit_code == 1
    assert cli.run("cluster", "drain", "n1", "--undo", "--move").exit_code == 2
    assert cli.json("cluster", "drain", "n1", "--undo")["state"] == "active"
    assert cli.run("cluster", "add", "n2", "nowhere").exit_code == 1


def test_the_level_of_the_log_is_shown_changed_and_reset(cli: Cli) -> None:
    node = cli.at.node.config.node
    try:
        assert cli.ok("log-level") == f"{node} logs info\n"
        assert cli.ok("log-level", "debug", "--for", "10m").startswith(f"{node} logs debug until 20")
        assert cli.ok("log-level", "error") == f"{node} logs error (setting: info)\n"
        assert cli.json("log-level", "reset")["level"] == "info"
        assert cli.run("log-level", "--for", "10m").exit_code == 2
        assert "is not a duration" in cli.run("log-level", "debug", "--for", "soon").stderr
    finally:
        cli.ok("log-level", "reset")
