"""A node that crashes leaves no secrets: no core dump, and none in what it prints."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.cluster.test_descriptors import PATIENCE_S, until_answered
from tests.ports import free_ports

SECRET = "the-peers-of-this-cluster-know-it"
PAYLOAD = "the-card-number-of-ada"


def ask(url: str, token: str, value: object) -> dict[str, object]:
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(value).encode(), headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        answer: dict[str, object] = json.loads(response.read())
        return answer


@pytest.mark.parametrize("crash", [signal.SIGABRT, signal.SIGSEGV])
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_crash_leaves_no_core_and_prints_no_secret(tmp_path: Path, crash: signal.Signals) -> None:
    ingress, admin, peer = free_ports(3)
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text(SECRET)
    environment = os.environ | {
        "HOLDFAST_DATA": str(tmp_path / "data"),
        "HOLDFAST_INGRESS": f"127.0.0.1:{ingress}",
        "HOLDFAST_ADMIN": f"127.0.0.1:{admin}",
        "HOLDFAST_PEER": f"127.0.0.1:{peer}",
        "HOLDFAST_PARTITIONS": "2",
        "HOLDFAST_AUTH": "tokens",
        "HOLDFAST_SECRET_FILE": str(secret),
        "PYTHONFAULTHANDLER": "1",
    }
    log = tmp_path / "log"
    with log.open("wb") as file:
        node = subprocess.Popen(
            [sys.executable, "-m", "holdfast", "serve"], cwd=tmp_path, env=environment, stdout=file, stderr=file
        )
    try:
        until_answered(f"http://127.0.0.1:{ingress}/holdfast/health")
        root = (tmp_path / "data" / "admin-token").read_text().strip()
        made = ask(f"http://127.0.0.1:{admin}/tokens", root, {"name": "ada", "roles": ["invoke"]})
        token = str(made["token"])
        with pytest.raises(urllib.error.HTTPError):
            ask(f"http://127.0.0.1:{ingress}/nobody/say", token, PAYLOAD)
        limits = Path(f"/proc/{node.pid}/limits").read_text()

        node.send_signal(crash)
        _, status = os.waitpid(node.pid, 0)
        node.returncode = status

        assert os.WTERMSIG(status) == crash and not os.WCOREDUMP(status)
        assert not list(tmp_path.glob("core*"))
        assert next(line for line in limits.splitlines() if "core file" in line).split()[4:6] == ["0", "0"]
        printed = log.read_text(errors="replace")
        assert "Fatal Python error" in printed and "Current thread" in printed, "the report is there"
        secrets = [root, root.rpartition("_")[2], token, token.rpartition("_")[2], SECRET, PAYLOAD]
        assert not [each for each in secrets if each in printed]
    finally:
        if node.returncode is None:
            node.kill()
            node.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_a_node_is_not_dumped_even_where_a_program_takes_core_dumps() -> None:
    program = (
        "import ctypes; from holdfast.cluster.observe.core_dumps import forbid_core_dumps; "
        "dumpable = lambda: ctypes.CDLL(None).prctl(3, 0, 0, 0, 0); before = dumpable(); "
        "forbid_core_dumps(); print(before, dumpable()); import os; print(len(os.listdir('/dev/fd')) > 2)"
    )

    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)

    assert found.stdout.split() == ["1", "0", "True"], found.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_core_dumps_are_left_alone_if_the_setting_says_so(tmp_path: Path) -> None:
    ingress, admin, peer = free_ports(3)
    environment = os.environ | {
        "HOLDFAST_DATA": str(tmp_path / "data"),
        "HOLDFAST_INGRESS": f"127.0.0.1:{ingress}",
        "HOLDFAST_ADMIN": f"127.0.0.1:{admin}",
        "HOLDFAST_PEER": f"127.0.0.1:{peer}",
        "HOLDFAST_PARTITIONS": "2",
        "HOLDFAST_CORE_DUMPS": "on",
    }
    node = subprocess.Popen(
        [sys.executable, "-m", "holdfast", "serve"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until_answered(f"http://127.0.0.1:{ingress}/holdfast/health")
        here = resource.getrlimit(resource.RLIMIT_CORE)

        limits = Path(f"/proc/{node.pid}/limits").read_text()

        line = next(line for line in limits.splitlines() if "core file" in line)
        assert line.split()[4] == ("unlimited" if here[0] == resource.RLIM_INFINITY else str(here[0]))
    finally:
        node.terminate()
        node.wait(PATIENCE_S)
