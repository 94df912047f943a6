"""Who else can read what a node writes, and the secrets that it is given."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.cluster.advice import advise, find_faults
from holdfast.cluster.config import BadConfig, Config, HostPort, build
from holdfast.cluster.node import Node
from holdfast.cluster.private import check_secrets, find_exposure, make_private
from tests.cluster.harness import FAST, PATIENCE_S, eventually
from tests.cluster.serving import Serving, run

STRANGER = 54_321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that everybody can enter, unlike those of pytest."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def open_to_others(folder: Path) -> dict[str, str]:
    """What others can get at below a folder, with its mode."""
    found = {}
    for path in (folder, *folder.rglob("*")):
        mode = stat.S_IMODE(path.lstat().st_mode)
        if mode & 0o077:
            found[str(path.relative_to(folder))] = oct(mode)
    return found


@pytest.mark.usefixtures("open_umask")
def test_all_that_a_node_writes_is_for_its_user_alone(tmp_path: Path) -> None:
    """With no umask to help: log, state, snapshots, marks, the store that all nodes share, and a backup."""
    store, place = tmp_path / "store", tmp_path / "backups"

    async def scenario(at: Serving) -> None:
        data = at.node.config.data
        await at.call("counter/k/add")
        for number in (0, 1):
            assert (await at.admin("POST", f"/cluster/partitions/{number}/snapshot"))[0] == 201
        await eventually(lambda: [path for path in store.rglob("*") if path.is_file()])
        status, job = await at.admin("POST", "/cluster/backups", json={"to": str(place)})
        assert status in (201, 202), job
        await eventually(lambda: any(path.name.startswith("backup-") for path in place.rglob("*")))
        async with asyncio.timeout(PATIENCE_S):
            while (await at.admin("GET", f"/cluster/backups/{job['id']}"))[1]["status"] not in ("succeeded", "failed"):
                await asyncio.sleep(0.01)

        assert {"data.mdb", "LOCK", "PEERS"} & {path.name for path in data.rglob("*")}
        assert open_to_others(data) == {}
        for folder in (store, place):
            assert len([*folder.rglob("*")]) > 2
            assert {name for name in open_to_others(folder) if name != "."} == set(), "what it made there itself"

    store.mkdir()
    place.mkdir()
    run(tmp_path, scenario, snapshots=str(store))


def test_the_headers_with_secrets_of_a_request_are_nowhere_on_disk(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        headers = {"X-Api-Key": "a key that nobody may see", "X-Tenant": "a tenant that may be seen"}
        assert (await at.call("trips/book", headers=headers))[0] == 200
        assert (await at.admin("POST", "/cluster/partitions/0/snapshot"))[0] == 201

        written = b"".join(path.read_bytes() for path in at.node.config.data.rglob("*") if path.is_file())
        assert headers["X-Tenant"].encode() in written, "the test looks where headers are"
        assert headers["X-Api-Key"].encode() not in written

    run(tmp_path, scenario)


def config_of(data: Path) -> Config:
    free = HostPort("127.0.0.1", 0)
    return Config(data=data, partitions=1, ingress=free, admin=free, peer=free)


async def started_once(data: Path) -> None:
    node = Node(config_of(data), timing=FAST)
    await node.start()
    await node.stop()


def test_a_directory_that_others_could_look_into_is_closed_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = tmp_path / "data"
    asyncio.run(started_once(data))
    (tmp_path / "elsewhere").touch(mode=0o644)
    (data / "link").symlink_to(tmp_path / "elsewhere")
    for path in (data, *data.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else 0o644)

    with caplog.at_level(logging.WARNING):
        asyncio.run(started_once(data))
        asyncio.run(started_once(data))

    (data / "link").unlink()
    assert open_to_others(data) == {}
    assert stat.S_IMODE((tmp_path / "elsewhere").stat().st_mode) == 0o644, "links are not followed"
    said = [record.getMessage() for record in caplog.records if "could look into" in record.getMessage()]
    assert len(said) == 1 and f"other users could look into {data}, " in said[0] and " more; now only user" in said[0]


def test_a_folder_that_is_no_data_directory_keeps_its_modes(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir(mode=0o755)
    (project / "main.py").touch(mode=0o644)
    before = open_to_others(project)

    with pytest.raises(Exception, match="not a data directory"):
        asyncio.run(started_once(project))

    assert before and open_to_others(project) == before


@as_root
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    os.chown(data, STRANGER, STRANGER)

    [fault] = find_faults(config_of(data))

    assert fault.startswith(f"data: {data} belongs to user {STRANGER}, and this node runs as user {os.geteuid()}")
    assert f"run: chown -R {os.geteuid()} {data}" in fault
    with pytest.raises(BadConfig, match="belongs to user"):
        make_private(data)


SETTINGS = ("secret_file", "tls_key", "ingress_tls_key", "admin_tls_key", "admin_token_file")


def naming(setting: str, path: Path) -> Config:
    config = Config()
    object.__setattr__(config, setting, path)
    return config


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o444])
def test_a_secret_that_others_can_read_or_write_is_refused(public: Path, setting: str, mode: int) -> None:
    secret = public / "the secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(mode)

    with pytest.raises(BadConfig) as refused:
        check_secrets(naming(setting, secret))

    assert str(refused.value) == (
        f"{setting}: other users of this machine can read or write {secret}; run: chmod 600 '{secret}'"
    )
    assert find_faults(naming(setting, secret)) == [str(refused.value)]
    secret.chmod(0o600)
    check_secrets(naming(setting, secret))


def test_a_node_refuses_such_a_secret_before_it_opens_anything(public: Path, tmp_path: Path) -> None:
    secret = public / "secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o644)
    config = build({"data": str(tmp_path / "data"), "secret_file": str(secret), "ingress": 0, "admin": 0, "peer": 0})

    with pytest.raises(BadConfig, match="chmod 600"):
        asyncio.run(Node(config).start())

    assert not (tmp_path / "data").exists()


def test_a_secret_in_a_directory_that_others_cannot_enter_is_only_advised_on(public: Path) -> None:
    (public / "closed" / "below").mkdir(parents=True)
    (public / "closed").chmod(0o700)
    secret = public / "closed" / "below" / "secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o644)

    assert find_exposure(secret) is None
    assert find_exposure(secret, anywhere=True) is not None
    assert [note for note in advise(naming("secret_file", secret)) if note.startswith("secret_file: ")]


def test_a_secret_on_a_read_only_mount_is_taken_as_it_is(public: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Kubernetes and Docker show it: of root, readable by every process of the container."""
    secret = public / "secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o444)
    real = os.statvfs

    class ReadOnly:
        f_flag = os.ST_RDONLY

    monkeypatch.setattr(os, "statvfs", lambda path: ReadOnly() if Path(path).is_relative_to(public) else real(path))

    check_secrets(naming("secret_file", secret))
    assert find_exposure(secret, anywhere=True) is None


@as_root
def test_a_secret_of_another_user_is_used_with_a_warning(public: Path, caplog: pytest.LogCaptureFixture) -> None:
    secret = public / "secret"
    secret.write_text("0123456789abcdef")
    os.chown(secret, STRANGER, STRANGER)

    secret.chmod(0o640)
    check_secrets(naming("secret_file", secret))
    assert caplog.records == [], "its group was chosen by its owner"
    secret.chmod(0o644)
    check_secrets(naming("secret_file", secret))

    [record] = caplog.records
    assert f"secret_file: every user of this machine can read or write {secret}" in record.getMessage()
    assert [note for note in advise(naming("secret_file", secret)) if note.startswith("secret_file: ")]
