"""Descriptors: a node with few of them stays reachable for all its users."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from holdfast.cluster.http import descriptors
from tests.ports import free_ports

PATIENCE_S = 60.0


def test_doors_leave_descriptors_for_the_rest_of_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, used in ((256, 60), (1024, 100), (65536, 300), (1 << 20, 500)):
        monkeypatch.setattr(descriptors, "limit", lambda limit=limit: limit)
        monkeypatch.setattr(descriptors, "in_use", lambda used=used: used)

        left = limit - used - descriptors.for_ingress() - descriptors.for_admin()

        assert left >= descriptors.RESERVED_MIN
        assert descriptors.for_ingress() > limit // 3
        assert descriptors.for_admin() >= 8


def test_the_limit_is_raised_as_far_as_the_system_lets_it() -> None:
    program = (
        "import resource; from holdfast.cluster.http.descriptors import raise_limit; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 300)); "
        "print(raise_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )

    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )

    assert found.stdout.split() == ["300", "300", "300"]


def ask(url: str, data: bytes | None = None) -> tuple[int, dict[str, object]]:
    with urllib.request.urlopen(urllib.request.Request(url, data), timeout=10.0) as response:
        return response.status, json.loads(response.read())


def until_answered(url: str) -> tuple[int, dict[str, object]]:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return ask(url)
        except OSError:
            assert time.monotonic() < deadline, f"{url} does not answer"
            time.sleep(0.1)


def descriptors_of(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir())) if Path("/proc").is_dir() else 0


def test_idle_connections_do_not_lock_clients_out_of_a_node_with_256_descriptors(tmp_path: Path) -> None:
    ingress, admin, peer = free_ports(3)
    environment = os.environ | {
        "HOLDFAST_DATA": str(tmp_path / "data"),
        "HOLDFAST_INGRESS": f"127.0.0.1:{ingress}",
        "HOLDFAST_ADMIN": f"127.0.0.1:{admin}",
        "HOLDFAST_PEER": f"127.0.0.1:{peer}",
        "HOLDFAST_PARTITIONS": "2",
        "HOLDFAST_CORE_DUMPS": "on",  # Otherwise only root may look at its descriptors.
    }
    with (tmp_path / "log").open("wb") as log:
        node = subprocess.Popen(
            [sys.executable, "-m", "holdfast", "serve"],
            env=environment,
            stdout=log,
            stderr=log,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)),
        )
    idle: list[socket.socket] = []
    try:
        until_answered(f"http://127.0.0.1:{ingress}/holdfast/health")
        for port in (ingress, admin):
            idle += [socket.create_connection(("127.0.0.1", port), timeout=10.0) for _ in range(200)]

        healthy = until_answered(f"http://127.0.0.1:{ingress}/holdfast/health")
        status = until_answered(f"http://127.0.0.1:{admin}/cluster")

        assert (healthy[0], status[0]) == (200, 200)
        # Connections that were closed to make room release their descriptors a moment later.
        deadline = time.monotonic() + PATIENCE_S
        while (used := descriptors_of(node.pid)) >= 256 - 32:
            assert time.monotonic() < deadline, f"{used} descriptors are in use"
            time.sleep(0.05)
        assert b"no client can be let in" not in (tmp_path / "log").read_bytes()
    finally:
        for each in idle:
            each.close()
        node.send_signal(signal.SIGTERM)
        try:
            node.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            node.kill()
            node.wait()
