"""An omitted setting never opens a node to other machines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from holdfast.cli.main import main
from holdfast.cluster.advice import advise, find_faults, find_open_doors
from holdfast.cluster.config import build
from tests.ports import free_ports

PUBLIC = ["0.0.0.0", "[::]", "10.0.0.5", "192.168.1.5", "node.internal", "[fd00::1]"]


@pytest.mark.parametrize("door", ["ingress", "admin"])
@pytest.mark.parametrize("host", PUBLIC)
def test_an_address_that_others_reach_needs_tokens_or_a_word(door: str, host: str) -> None:
    for auth in ("tokens", "off"):
        assert find_open_doors(build({door: f"{host}:80", "auth": auth})) is None
    config = build({door: f"{host}:80"})
    reason = find_open_doors(config)

    assert reason is not None and f"{door} {host}:80" in reason
    assert 'auth = "tokens"' in reason and 'auth = "off"' in reason
    assert find_faults(config) == [reason]


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost", "127.7.7.7"])
def test_on_loopback_no_token_is_needed(host: str) -> None:
    config = build({"ingress": f"{host}:80", "admin": f"{host}:81", "peer": "0.0.0.0:82"})

    assert find_open_doors(config) is None and advise(config) == []


def test_a_node_that_is_open_on_purpose_is_told_so() -> None:
    assert "auth: other machines can reach ingress" in advise(build({"ingress": "0.0.0.0:80", "auth": "off"}))[0]


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (["serve"], {"HOLDFAST_INGRESS": "0.0.0.0:0"}),
        (["serve"], {"HOLDFAST_ADMIN": "[::]:0"}),
        (["dev", "--host", "0.0.0.0"], {}),
        (["dev"], {"HOLDFAST_INGRESS": "0.0.0.0:0"}),
    ],
)
def test_a_command_that_would_open_a_node_does_not_start(
    tmp_path: Path, arguments: list[str], environment: dict[str, str]
) -> None:
    data = tmp_path / "data"

    result = CliRunner().invoke(main, arguments, env={"HOLDFAST_DATA": str(data), **environment})

    assert result.exit_code == 1 and "HOLDFAST_AUTH" in result.output
    assert not data.exists()


@pytest.mark.parametrize("auth", ["tokens", "off"])
def test_a_node_that_was_told_starts_and_stops(tmp_path: Path, auth: str) -> None:
    ingress, admin, peer = free_ports(3)
    process = subprocess.Popen(
        [sys.executable, "-m", "holdfast", "serve"],
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")},
            "HOLDFAST_DATA": str(tmp_path / "data"),
            "HOLDFAST_INGRESS": f"127.0.0.1:{ingress}",
            "HOLDFAST_ADMIN": f"127.0.0.1:{admin}",
            "HOLDFAST_PEER": f"127.0.0.1:{peer}",
            "HOLDFAST_AUTH": auth,
        },
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and "ingress http://" in process.stdout.readline()
        assert (tmp_path / "data/admin-token").exists() == (auth == "tokens")
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
