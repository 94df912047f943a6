"""Stores, and states to cut snapshots of."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.snapshots.directory import DirectoryStore
from holdfast.snapshots.s3 import S3Store
from holdfast.snapshots.stores import S3Place, Store
from tests.snapshots import servers
from tests.snapshots.fault_proxy import FaultProxy, fault_proxy
from tests.snapshots.servers import BUCKET, Server
from tests.snapshots.states import State


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with servers.rclone_server(tmp_path_factory.mktemp("rclone") / "root") as server:
        yield server


@pytest.fixture(scope="session")
def minio() -> Iterator[Server]:
    if (reason := servers.why_no_docker()) is not None:
        pytest.skip(f"MinIO runs in a container: {reason}")
    with servers.minio_server() as server:
        yield server


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Credentials as a user would give them, without the developer's own settings."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", servers.ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", servers.SECRET_KEY)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)


def s3_place(server_url: str) -> S3Place:
    """Each test has a prefix of its own, so that tests do not see each other's objects."""
    place = S3Place(BUCKET, prefix=f"t{secrets.token_hex(6)}/", endpoint_url=server_url, region="eu-test-1")
    return replace(place, part_bytes=5 << 20, attempts=4, connect_timeout_s=20, read_timeout_s=20)


@pytest.fixture(params=["directory", "rclone", "minio"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "directory":
        yield DirectoryStore(tmp_path / "store", create=True)
        return
    request.getfixturevalue("credentials")
    server: Server = request.getfixturevalue(request.param)
    s3 = S3Store(s3_place(server.endpoint_url))
    yield s3
    s3.close()


@pytest.fixture
def proxy(rclone: Server, credentials: None) -> Iterator[FaultProxy]:
    with fault_proxy(rclone.address) as proxy:
        yield proxy


@pytest.fixture
def s3(proxy: FaultProxy) -> Iterator[S3Store]:
    """A store behind the proxy, that gives up after two attempts and few seconds."""
    store = S3Store(replace(s3_place(proxy.endpoint_url), attempts=2))
    yield store
    store.close()


@pytest.fixture
def state(tmp_path: Path) -> Iterator[State]:
    state = State(tmp_path / "state")
    yield state
    state.close()


@pytest.fixture
def unused_port() -> Iterator[int]:
    """Bound, so that no other process uses it; not listening, so that connections are refused."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]
