"""A node ends on SIGTERM within seconds although its shared store accepts connections and never answers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import parse_headers
from pathlib import Path

import pytest

from tests.cluster.harness import PATIENCE_S
from tests.ports import free_ports

#: Far below the read timeout of the store, 30 seconds for each of several attempts.
END_S = 15.0


class SilentStore:
    """It reads requests, and answers none of them."""

    def __init__(self, server: socket.socket) -> None:
        self.url = f"http://127.0.0.1:{server.getsockname()[1]}"
        self.requests: list[str] = []
        self._server = server
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                self._open.append(connection)
                threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        with suppress(OSError), connection.makefile("rb") as reader:
            request, headers = reader.readline().decode(), parse_headers(reader)
            reader.read(int(headers["Content-Length"]))  # What is cancelled before its body is sent ends at once.
            self.requests.append(request)

    def is_sent_a_snapshot(self) -> bool:
        return any(line.startswith("PUT /") and "/0000000002/" in line for line in [*self.requests])

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        for connection in self._open:
            connection.close()


@pytest.fixture
def silent() -> Iterator[SilentStore]:
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
        store = SilentStore(server)
        yield store
        store.close()


@contextmanager
def node(path: Path, **settings: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    ingress, admin, peer = free_ports(3)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("HOLDFAST_", "AWS_"))},
        "HOLDFAST_DATA": str(path / "data"),
        "HOLDFAST_INGRESS": f"127.0.0.1:{ingress}",
        "HOLDFAST_ADMIN": f"127.0.0.1:{admin}",
        "HOLDFAST_PEER": f"127.0.0.1:{peer}",
        "HOLDFAST_PARTITIONS": "1",
        "HOLDFAST_AUTH": "off",
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        **settings,
    }
    with (path / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "holdfast", "serve"], env=environment, stdout=log, stderr=log)
    try:
        yield process, f"http://127.0.0.1:{admin}"
    finally:
        process.kill()
        process.wait()


def cut_a_snapshot(admin: str) -> bool:
    request = urllib.request.Request(f"{admin}/cluster/partitions/0/snapshot", method="POST")
    try:
        with urllib.request.urlopen(request, timeout=30.0) as answer:
            return bool(answer.status == 201)
    except OSError:
        return False  # The node is starting.


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def test_a_node_ends_while_it_uploads_a_snapshot_to_a_silent_store(tmp_path: Path, silent: SilentStore) -> None:
    place = f"s3://bucket/prefix?endpoint_url={silent.url}"
    with node(tmp_path, HOLDFAST_SNAPSHOTS=place) as (process, admin):
        until(lambda: cut_a_snapshot(admin), "a snapshot")
        until(silent.is_sent_a_snapshot, "the upload of the snapshot")

        process.send_signal(signal.SIGTERM)

        assert process.wait(END_S) == 0, (tmp_path / "log").read_text()
        assert process.wait(END_S) == 0, (tmp_path / "log").read_text()
