"""`holdfast token ...` against a node that requires tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.cli.running import Cli, running


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    with running(tmp_path_factory.mktemp("node"), auth="tokens", register=False) as cli:
        yield cli


@pytest.fixture
def root(cli: Cli) -> Path:
    return cli.at.node.config.data / "admin-token"


def test_the_own_token_of_a_node_makes_the_first_one(cli: Cli, root: Path, tmp_path: Path) -> None:
    made = tmp_path / "ada.token"
    made.touch(mode=0o600)

    made.write_text(cli.ok("--token-file", str(root), "token", "create", "ada", "--role", "admin"))

    assert "n1" in cli.ok("--token-file", str(made), "cluster", "status")
    assert "ada" in cli.ok("--token-file", str(made), "token", "list")


def test_without_a_token_the_error_says_how_to_get_one(cli: Cli) -> None:
    result = cli.run("cluster", "status")

    assert result.exit_code == 1
    assert "Error: this request needs a token (401)" in result.stderr and "holdfast token create" in result.stderr
    assert "--token-file with the file admin-token in the data directory of the node" in result.stderr


def test_a_token_file_readable_by_others_is_refused_with_a_hint(cli: Cli, tmp_path: Path) -> None:
    lax = tmp_path / "lax token"
    lax.write_text("hf_a_b")
    lax.chmod(0o640)

    result = cli.run("--token-file", str(lax), "token", "list")
    missing = cli.run("--token-file", str(tmp_path / "missing"), "token", "list")

    assert result.exit_code == 1 and "other users of this machine can read or write" in result.stderr
    assert f"chmod 600 '{lax}'" in result.stderr
    assert missing.exit_code == 1 and "cannot read " in missing.stderr and "No such file or directory" in missing.stderr


def test_a_token_is_rotated_and_revoked(cli: Cli, root: Path) -> None:
    own = root.read_text().strip()
    made = cli.json("token", "create", "shop", "--role", "invoke", "--service", "orders", token=own)
    assert (made["roles"], made["services"]) == (["invoke"], ["orders"])
    assert "there is no service" in cli.run("call", "orders/add", token=made["token"]).stderr
    assert "may invoke orders, but not other" in cli.run("call", "other/add", token=made["token"]).stderr

    rotated = cli.ok("token", "rotate", made["id"], token=own).strip()

    assert "is not valid" in cli.run("call", "orders/add", token=made["token"]).stderr
    assert "there is no service" in cli.run("call", "orders/add", token=rotated).stderr
    assert cli.ok("token", "revoke", made["id"], token=own) == f"Revoked {made['id']}\n"
    assert "is not valid" in cli.run("call", "orders/add", token=rotated).stderr
    assert "there is no token" in cli.run("token", "revoke", made["id"], token=own).stderr


def test_the_audit_trail_is_listed_and_followed(cli: Cli, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = root.read_text().strip()
    made = cli.json("token", "create", "audited", "--role", "read", token=own)
    assert cli.run("cluster", "drain", "n1", token=made["token"]).exit_code == 1

    shown = cli.ok("audit", "--since", "1h", token=own)
    refused = cli.json("audit", "--outcome", "refused", "--principal", "audited", token=own)

    assert "create_token" in shown and "name=audited" in shown and "this node's admin token (node)" in shown
    [act] = refused["acts"]
    assert (act["action"], act["principal"]["id"], act["status"]) == ("drain", made["id"], 403)
    assert "needs admin" in cli.run("audit", token=made["token"]).stderr
    assert "exclude each other" in cli.run("audit", "--follow", "--until", "1h", token=own).stderr

    looks = []

    def look(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 1:
            cli.ok("token", "revoke", made["id"], token=own)
        else:
            raise KeyboardInterrupt

    monkeypatch.setattr("holdfast.cli.audit.time", SimpleNamespace(sleep=look))  # Not the sleep of all threads.
    followed = cli.run("audit", "--follow", "--json", "--limit", "1", token=own)
    lines = [json.loads(line) for line in followed.stdout.splitlines() if line.startswith("{")]
    assert [line["action"] for line in lines][-1] == "revoke_token"
    assert [line["sequence"] for line in lines] == sorted({line["sequence"] for line in lines}), "each once, in order"


def test_examples_make_token_files_that_the_command_line_accepts() -> None:
    root = Path(__file__).resolve().parents[2]
    texts = [path.read_text() for path in (root / "README.md", *(root / "docs").rglob("*.md"))]
    blocks = [block for text in texts for block in re.findall(r"```sh\n(.*?)```|(`[^`\n]+`)", text, re.DOTALL)]
    writing = [sh or line for sh, line in blocks if re.search(r"(token create|hf_node_)[^\n]*> ", sh or line)]

    assert len(writing) >= 2
    assert all("umask 077" in each for each in writing), writing
