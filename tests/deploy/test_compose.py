"""The compose file in operation: the commands of a new user, and the promises when a container dies."""

from __future__ import annotations

import json
import secrets
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from testcontainers.compose import DockerCompose

from tests.snapshots.servers import why_no_docker

ROOT = Path(__file__).resolve().parents[2]
NODES = ("n1", "n2", "n3")
PATIENCE_S = 180.0

#: Free ports and separate names: the developer's own stack may be running.
OVERRIDE = """
name: holdfast-test-{unique}
services:
  n1: {{ ports: !override ["8080", "9070"] }}
  n2: {{ ports: !override ["8080", "9070"] }}
  n3: {{ ports: !override ["8080", "9070"] }}
  prometheus: {{ ports: !override ["9090"] }}
"""


class Stack:
    def __init__(self, compose: DockerCompose) -> None:
        self.compose = compose
        self.token = ""

    def run(self, *words: str) -> str:
        """`docker compose ...`"""
        command = [*self.compose.compose_command_property, *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout

    def ask(self, service: str, port: int, path: str, body: Any = None) -> Any:
        """GET, or POST of JSON."""
        host, published = self.compose.get_service_host_and_port(service, port)
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.token}"}
        request = urllib.request.Request(f"http://{host}:{published}{path}", data=data, headers=headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    def up(self) -> set[str]:
        """The nodes that Prometheus scrapes successfully."""
        targets = self.ask("prometheus", 9090, "/api/v1/targets")["data"]["activeTargets"]
        return {each["labels"]["instance"].partition(":")[0] for each in targets if each["health"] == "up"}


def eventually(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            if condition():
                return
            found = "not yet"
        except (OSError, urllib.error.URLError) as error:
            found = str(error)
        assert time.monotonic() < deadline, f"{what}: not within {PATIENCE_S:.0f} s ({found})"
        time.sleep(0.5)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    if (reason := why_no_docker()) is not None:
        pytest.skip(f"the compose file is brought up by an engine: {reason}")
    if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode != 0:
        pytest.skip("the docker client has no compose plugin")
    override = tmp_path / "override.yml"
    override.write_text(OVERRIDE.format(unique=secrets.token_hex(4)))
    with DockerCompose(ROOT, [str(ROOT / "docker-compose.yml"), str(override)], build=True) as compose:
        yield Stack(compose)


@pytest.mark.slow("builds an image and starts six containers")
def test_the_stack_serves_although_a_container_dies(stack: Stack) -> None:
    stack.run("run", "--rm", "register")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        stack.ask("n1", 8080, "/hello/greet", "Ada")
    stack.token = stack.run("run", "--rm", "-T", "holdfast", "token", "create", "tests", "--role", "admin").strip()
    for node in NODES:
        assert stack.ask(node, 8080, "/hello/greet", "Ada") == "Hello, Ada!"
    eventually(lambda: stack.up() == {*NODES}, "Prometheus scrapes every node")
    stack.ask("n2", 9070, "/cluster/partitions/0/snapshot", {})
    eventually(lambda: stack.ask("n2", 9070, "/snapshots")["snapshots"], "a snapshot is in MinIO")

    stack.run("kill", "-s", "KILL", "n1")

    for node in ("n2", "n3"):
        assert stack.ask(node, 8080, "/hello/greet", "Grace") == "Hello, Grace!"
    eventually(lambda: stack.up() == {"n2", "n3"}, "Prometheus misses the killed node")
    stack.run("start", "n1")
    eventually(lambda: stack.ask("n1", 8080, "/hello/greet", "Linus") == "Hello, Linus!", "the killed node is back")
    eventually(lambda: stack.up() == {*NODES}, "Prometheus scrapes it again")
