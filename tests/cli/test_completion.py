"""What shells complete: every command and option, and names that the cluster knows."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from holdfast.cli import complete
from holdfast.cli.completion import SHELLS, VARIABLE
from holdfast.cli.main import main
from tests.cli.running import Cli, running
from tests.cluster.harness import PATIENCE_S

#: Where the command `holdfast` of this environment is.
BIN = str(Path(sys.executable).parent)
#: Values that nothing can offer: names that are made up here, values, addresses, and what is outside of the cluster.
FREE = {
    "approvals decide choice",
    "address", "backup delete id_", "backup verify id_", "body", "cert client name", "cert node name", "cert show files",
    "cluster add node", "deployments register uri", "file", "key", "sql statement", "state get name", "step",
    "token create name", "url", "values",
}  # fmt: skip
#: Options that name something in the cluster; arguments do unless they are above.
NAMED = ("service", "services", "deployment", "nodes", "invocation")


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    with running(tmp_path_factory.mktemp("node")) as cli:
        yield cli


def walk(group: click.Group, *path: str) -> Iterator[tuple[list[str], click.Command]]:
    yield [*path], group
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from walk(command, *path, name)
        else:
            yield [*path, name], command


COMMANDS = [pytest.param(path, command, id=" ".join(path) or "holdfast") for path, command in walk(main)]


def offered(arguments: list[str], incomplete: str = "") -> list[str]:
    shell = ShellComplete(main, {}, "holdfast", VARIABLE)
    return [str(each.value) for each in shell.get_completions(arguments, incomplete)]


@pytest.mark.parametrize(("path", "command"), COMMANDS)
def test_every_command_option_and_choice_is_completed(path: list[str], command: click.Command) -> None:
    options = [each for each in command.params if isinstance(each, click.Option)]
    found = offered(path, "--")

    assert {name for each in options for name in each.opts if name.startswith("--")} <= {*found}
    if isinstance(command, click.Group):
        assert {*command.commands} == {*offered(path)}
    for option in options:
        if isinstance(option.type, click.Choice):
            assert offered([*path, option.opts[0]]) == [*option.type.choices], option.name
    first = next((each for each in command.params if isinstance(each, click.Argument)), None)
    if first is not None and isinstance(first.type, click.Choice):
        assert offered(path) == [*first.type.choices]


@pytest.mark.parametrize(("path", "command"), COMMANDS)
def test_whatever_names_something_in_the_cluster_is_completed(path: list[str], command: click.Command) -> None:
    for each in command.params:
        is_name = isinstance(each, click.Argument) or each.name in NAMED
        if isinstance(each.type, click.Choice) or not is_name:
            continue
        names = {each.name, " ".join([*path, each.name or ""])}
        assert each._custom_shell_complete is not None or names & FREE, names


# -- names of the cluster


def test_names_of_the_cluster_are_offered(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in cli.environ.items():
        monkeypatch.setenv(name, value)
    id_ = cli.ok("send", "agent/wait").strip()
    [deployment] = cli.json("deployments", "list")["deployments"]

    assert offered(["services", "describe"], "ag") == ["agent"]
    assert offered(["invocations", "list", "--service"], "cou") == ["counter"]
    assert offered(["deployments", "describe"]) == [deployment["id"]]
    assert offered(["invocations", "resume", "--to"]) == ["newest", deployment["id"]]
    assert id_ in offered(["invocations", "describe"], "inv_")
    assert id_ in offered(["invocations", "cancel", id_], "inv_")
    assert offered(["cluster", "drain"]) == ["n1"]
    assert offered(["cluster", "transfer"]) == ["0", "1"]
    assert offered(["call"], "echo/") == ["echo/say"] and offered(["call"], "cou") == ["counter/"]
    assert offered(["token", "revoke"]) == [] and offered(["webhooks", "delete"]) == []
    monkeypatch.delenv("HOLDFAST_ADMIN_URL")
    assert offered(["services", "describe", "--admin-url", cli.environ["HOLDFAST_ADMIN_URL"]], "ag") == ["agent"]


def test_a_profile_is_completed_and_used(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOLDFAST_PROFILES", str(tmp_path / "profiles.toml"))
    url = cli.environ["HOLDFAST_ADMIN_URL"]
    assert CliRunner().invoke(main, ["profile", "set", "here", "--admin-url", url]).exit_code == 0

    assert offered(["--profile"], "h") == ["here"] and offered(["profile", "use"]) == ["here"]
    assert offered(["--profile", "here", "services", "describe"], "ag") == ["agent"]


def test_silence_offers_nothing_and_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("HOLDFAST_ADMIN_URL", "http://127.0.0.1:1")
    broken = tmp_path / "profiles.toml"
    broken.write_text("no")
    broken.chmod(0o600)

    assert offered(["services", "describe"]) == []
    assert offered(["--token-file", str(tmp_path / "none"), "services", "describe"]) == []
    monkeypatch.setenv("HOLDFAST_PROFILES", str(broken))
    assert offered(["services", "describe"]) == [] and offered(["--profile"]) == []
    assert capfd.readouterr() == ("", "")


def test_words_that_a_shell_would_interpret_are_not_offered() -> None:
    words = [("fine", "a\x1b[2J\nb"), ("$(reboot)", ""), ("a b", ""), ("-f", ""), ("f*", ""), ("", "")]

    [item] = complete.offered(words, "")

    assert (item.value, item.help) == ("fine", "a\\x1b[2J b")


# -- shells


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_is_printed_with_a_text_that_says_how_to_install_it(shell: str) -> None:
    runner = CliRunner()

    script = runner.invoke(main, ["completion", shell]).stdout
    help_text = runner.invoke(main, ["completion", "--help"]).stdout

    assert VARIABLE in script and f"holdfast completion {shell}" in help_text
    assert runner.invoke(main, ["completion", "tcsh"]).exit_code == 2


def run(shell: str, script: str, environ: dict[str, str] | None = None) -> list[str]:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    env = {**os.environ, **(environ or {}), "PATH": f"{BIN}:{os.environ['PATH']}"}
    done = subprocess.run(
        [shell, "-c", script], env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.split()


def test_bash_completes_commands_options_and_names(cli: Cli) -> None:
    script = """
        source <(holdfast completion bash)
        try() {
            COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
            _holdfast_completion holdfast
            echo "${COMPREPLY[*]}"
        }
        try holdfast cluster tr
        try holdfast invocations list --order ''
        try holdfast services describe age
        complete -p holdfast | grep -c _holdfast_completion
    """

    found = run("bash", script, cli.environ)

    assert found == ["transfer", "newest", "oldest", "completed", "agent", "1"]


def test_fish_completes_commands_and_names(cli: Cli) -> None:
    lines = """
        holdfast completion fish | source
        complete -C 'holdfast statis' | string split -f1 \\t
        complete -C 'holdfast services describe age' | string split -f1 \\t
    """

    assert run("fish", lines, cli.environ) == ["statistics", "agent"]


def test_zsh_defines_the_completion_of_the_command(tmp_path: Path) -> None:
    lines = f"""
        autoload -U compinit; compinit -u -d {tmp_path}/dump
        source <(holdfast completion zsh)
        print $_comps[holdfast]; whence -w _holdfast_completion
    """

    assert run("zsh", lines) == ["_holdfast_completion", "_holdfast_completion:", "function"]


def test_zsh_is_told_what_each_word_means(cli: Cli) -> None:
    words = {"COMP_WORDS": "holdfast services describe age", "COMP_CWORD": "3", VARIABLE: "zsh_complete"}

    assert run("sh", "holdfast", {**cli.environ, **words}) == ["plain", "agent", "service"]
