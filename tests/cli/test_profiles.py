"""`holdfast profile ...` and `--profile`: a cluster under a name."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from holdfast.cli.main import main
from holdfast.cli.profiles import Profile, Profiles, read, write
from tests.cli.running import Cli, running


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    with running(tmp_path_factory.mktemp("node"), auth="tokens", register=False) as cli:
        yield cli


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "settings of Ada" / "profiles.toml"
    monkeypatch.setenv("HOLDFAST_PROFILES", str(path))
    for name in ("HOLDFAST_ADMIN_URL", "HOLDFAST_INGRESS_URL", "HOLDFAST_TOKEN", "HOLDFAST_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    return path


def run(*arguments: str, input: str | None = None, **environ: str) -> Result:
    return CliRunner().invoke(main, arguments, input=input, env=environ)


def ok(*arguments: str, input: str | None = None, **environ: str) -> str:
    result = run(*arguments, input=input, **environ)
    assert result.exit_code == 0, result.output
    return result.output


def own_token(cli: Cli) -> str:
    return (cli.at.node.config.data / "admin-token").read_text()


def test_a_profile_has_the_addresses_and_the_token_of_a_cluster(cli: Cli, file: Path) -> None:
    ok("profile", "set", "prod", "--admin-url", cli.at.node.doors.urls.admin, "--token-file", "-", input=own_token(cli))

    assert "n1" in ok("--profile", "prod", "cluster", "status")
    assert "n1" in ok("cluster", "status", HOLDFAST_PROFILE="prod")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert own_token(cli).strip() not in ok("profile", "list") + ok("profile", "list", "--json")


def test_the_current_profile_is_used_when_none_is_named(cli: Cli, file: Path) -> None:
    ok("profile", "set", "prod", "--admin-url", cli.at.node.doors.urls.admin, "--token-file", "-", input=own_token(cli))

    ok("profile", "use", "prod")
    assert "n1" in ok("cluster", "status")

    ok("profile", "use", "--none")
    assert (
        "no node answers at http://127.0.0.1:1" in run("cluster", "status", "--admin-url", "http://127.0.0.1:1").output
    )


def test_options_and_variables_win_over_a_profile(cli: Cli, file: Path) -> None:
    ok("profile", "set", "dead", "--admin-url", "http://127.0.0.1:1", "--token-file", "-", input="hf_a_b\n")
    url = cli.at.node.doors.urls.admin

    by_option = run("--profile", "dead", "token", "list", "--admin-url", url, HOLDFAST_TOKEN=own_token(cli))
    by_variable = run("--profile", "dead", "token", "list", HOLDFAST_ADMIN_URL=url, HOLDFAST_TOKEN=own_token(cli))

    assert (by_option.exit_code, by_variable.exit_code) == (0, 0)
    assert "http://127.0.0.1:1:" in run("--profile", "dead", "token", "list").output


def test_the_token_of_a_profile_is_sent_to_no_other_address(cli: Cli, file: Path) -> None:
    ok("profile", "set", "prod", "--admin-url", "http://127.0.0.1:1", "--token-file", "-", input=own_token(cli))

    result = run("--profile", "prod", "cluster", "status", "--admin-url", cli.at.node.doors.urls.admin)

    assert "Error: this request needs a token (401)" in result.output


def test_a_token_file_of_a_profile_is_read_by_every_command(cli: Cli, file: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("hf_old_secret")
    ok("profile", "set", "prod", "--admin-url", cli.at.node.doors.urls.admin, "--token-file", str(token))
    assert "the token is not valid" in run("--profile", "prod", "cluster", "status").output

    token.write_text(own_token(cli))
    assert "n1" in ok("--profile", "prod", "cluster", "status")

    token.chmod(0o644)
    assert "chmod 600" in run("--profile", "prod", "cluster", "status").output


def test_a_file_that_others_can_read_or_that_is_damaged_is_refused(file: Path) -> None:
    write(Profiles({"a": Profile(token="hf_a_b")}, "a"))
    file.chmod(0o644)
    lax = run("cluster", "status")
    file.chmod(0o600)
    broken = []
    for text in (
        "current = ",
        'current = "b"',
        "x = 1",
        "profiles = 1",
        "[profiles.a]\nadmin = 'x'",
        "[profiles]\na = 1",
    ):
        file.write_text(text)
        broken.append(run("cluster", "status"))
    file.write_bytes(b"\xff")
    broken.append(run("cluster", "status"))

    assert lax.exit_code == 1 and f"chmod 600 '{file}'" in lax.output
    assert [result.exit_code for result in broken] == [1] * len(broken)
    assert all("cannot be used" in result.output and "correct the file" in result.output for result in broken)
    assert run("version").exit_code == 0, "it asks no node"


def test_a_profile_is_changed_and_removed(file: Path) -> None:
    ok("profile", "set", "a", "--admin-url", "https://a.internal:9070", "--token-file", "-", input="hf_a_b\n")
    ok("profile", "set", "a", "--ingress-url", "https://a.internal:8080")
    ok("profile", "use", "a")
    assert read() == Profiles({"a": Profile("https://a.internal:9070", "https://a.internal:8080", "hf_a_b")}, "a")

    ok("profile", "set", "a", "--token-file", "")
    assert read().by_name["a"].token == ""

    ok("profile", "remove", "a")
    assert read() == Profiles({})
    assert ok("profile", "list").startswith("No profiles.")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("profile", "set", "a b"), "is not a name of a profile"),
        (("profile", "set", "a", "--admin-url", "a.internal"), "is not the address of a node"),
        (
            ("profile", "set", "a", "--admin-url", "http://user:secret@a.internal"),
            "the URL of a.internal has credentials",
        ),
        (("profile", "set", "a", "--token-file", "-"), "standard input has no token"),
        (("profile", "use", "b"), "there is no profile 'b'"),
        (("profile", "use"), "give the NAME of a profile, or --none"),
        (("profile", "remove", "b"), "there is no profile 'b'"),
        (("--profile", "b", "cluster", "status"), "there is no profile 'b'"),
    ],
)
def test_an_invalid_profile_is_refused(file: Path, arguments: tuple[str, ...], said: str) -> None:
    result = run(*arguments, input="")

    assert result.exit_code in (1, 2) and said in result.output
    assert not file.exists()


def test_any_text_survives_the_file(file: Path) -> None:
    odd = Profiles({"a": Profile(token_file='/tmp/"ü\\\t\x7f☃/t')})

    write(odd)

    assert read() == odd
