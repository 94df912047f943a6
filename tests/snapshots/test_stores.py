"""The contract of every store; the same tests run on a directory and on real S3 servers."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.snapshots import files
from holdfast.snapshots.directory import DirectoryStore
from holdfast.snapshots.errors import BadStoreUrl, BucketMissing, Cancelled, Denied, NotFound
from holdfast.snapshots.opening import open_store
from holdfast.snapshots.s3 import S3Store
from holdfast.snapshots.stores import (
    S3Place,
    Store,
    check_name,
    parse_s3_url,
)
from holdfast.snapshots.work import Throttle, Work
from tests.snapshots.conftest import s3_place
from tests.snapshots.servers import Server

MIB = 1 << 20


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Two and a half parts of a multipart upload."""
    path = tmp_path / "source"
    path.write_bytes(os.urandom(11 * MIB + 17))
    return path


def test_a_get_returns_the_bytes_that_were_put(store: Store, source: Path, tmp_path: Path) -> None:
    store.put(source, "a/large")
    store.put_bytes(b"small", "a/small")
    store.put_bytes(b"", "a/empty")

    for name in ("a/large", "a/small", "a/empty"):
        store.get(name, tmp_path / "got" if name == "a/large" else tmp_path / name.replace("/", "-"))

    assert (tmp_path / "got").read_bytes() == source.read_bytes()
    assert (tmp_path / "a-small").read_bytes() == b"small"
    assert (tmp_path / "a-empty").read_bytes() == b""
    assert store.read("a/small") == b"small"
    assert store.read("a/empty") == b""


@pytest.mark.usefixtures("credentials")
def test_a_proxy_of_the_environment_is_not_asked_for_a_store_on_this_machine(
    rclone: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # A closed port.
    monkeypatch.delenv("no_proxy", raising=False)
    here = S3Store(s3_place(rclone.endpoint_url))

    here.put_bytes(b"x", "a")

    assert here.read("a") == b"x"
    elsewhere = S3Store(s3_place("http://s3.example.com"))
    assert elsewhere._client.meta.config.proxies is None, "as the environment says"
    here.close()
    elsewhere.close()


def test_putting_the_same_again_changes_nothing(store: Store, source: Path) -> None:
    store.put(source, "a/large")
    store.put(source, "a/large")

    assert [(found.name, found.size) for found in store.list()] == [("a/large", 11 * MIB + 17)]


def test_a_range_is_read_and_less_at_the_end(store: Store) -> None:
    store.put_bytes(b"0123456789", "digits")

    assert store.read("digits", offset=3, length=4) == b"3456"
    assert store.read("digits", offset=8, length=4) == b"89"
    assert store.read("digits", offset=4) == b"456789"
    assert store.read("digits", offset=10, length=4) == b""
    assert store.read("digits", offset=2, length=0) == b""


def test_a_download_continues_after_the_existing_bytes(store: Store, source: Path, tmp_path: Path) -> None:
    store.put(source, "a/large")
    data = source.read_bytes()
    (tmp_path / "half").write_bytes(data[: 5 * MIB])
    seen: list[tuple[int, int]] = []

    store.get("a/large", tmp_path / "half", Work(lambda done, total: seen.append((done, total))))

    assert (tmp_path / "half").read_bytes() == data
    assert seen[0] == (5 * MIB, len(data))
    assert seen[-1] == (len(data), len(data))


def test_a_download_starts_again_if_there_is_more_than_the_object_has(store: Store, tmp_path: Path) -> None:
    store.put_bytes(b"short", "a/short")
    (tmp_path / "got").write_bytes(b"much longer than that")

    store.get("a/short", tmp_path / "got")

    assert (tmp_path / "got").read_bytes() == b"short"


def test_a_listing_shows_the_objects_below_a_prefix(store: Store) -> None:
    for name in ("b/2", "b/1", "b/11", "c/1", "d"):
        store.put_bytes(b"x", name)

    assert [found.name for found in store.list()] == ["b/1", "b/11", "b/2", "c/1", "d"]
    assert [found.name for found in store.list("b/")] == ["b/1", "b/11", "b/2"]
    assert [found.name for found in store.list("b/1")] == ["b/1", "b/11"]
    assert store.list("nothing/") == []


def test_a_stat_returns_size_and_time(store: Store) -> None:
    store.put_bytes(b"12345", "a/five")

    found = store.stat("a/five")

    assert (found.name, found.size) == ("a/five", 5)
    assert found.modified_ms > 1_600_000_000_000


def test_a_deleted_object_is_gone_and_deleting_it_again_succeeds(store: Store) -> None:
    store.put_bytes(b"x", "a/x")

    store.delete("a/x")
    store.delete("a/x")

    assert store.list() == []


def test_a_missing_object_is_not_found(store: Store, tmp_path: Path) -> None:
    for call in (
        lambda: store.read("a/none"),
        lambda: store.stat("a/none"),
        lambda: store.get("a/none", tmp_path / "got"),
    ):
        with pytest.raises(NotFound, match="a/none"):
            call()


def test_a_cancelled_upload_leaves_nothing(store: Store, source: Path) -> None:
    work = Work()
    work.cancel()

    with pytest.raises(Cancelled):
        store.put(source, "a/large", work)

    assert store.list() == []


def test_an_upload_can_be_cancelled_in_the_middle(store: Store, source: Path) -> None:
    def cancel_soon(done: int, _: int) -> None:
        if done:
            work.cancel()

    work = Work(cancel_soon, Throttle(4 * MIB))

    with pytest.raises(Cancelled):
        store.put(source, "a/large", work)

    assert store.list() == []


def test_a_cancelled_download_keeps_the_received_bytes(store: Store, source: Path, tmp_path: Path) -> None:
    store.put(source, "a/large")

    def cancel_soon(done: int, _: int) -> None:
        if done >= 2 * MIB:
            work.cancel()

    work = Work(cancel_soon, Throttle(8 * MIB))
    with pytest.raises(Cancelled):
        store.get("a/large", tmp_path / "got", work)
    part = (tmp_path / "got").read_bytes()
    store.get("a/large", tmp_path / "got")

    assert source.read_bytes().startswith(part)
    assert 0 < len(part) < 11 * MIB
    assert (tmp_path / "got").read_bytes() == source.read_bytes()


def test_a_store_that_works_passes_its_check_and_is_left_clean(store: Store) -> None:
    store.check()

    assert store.list() == []


@pytest.mark.parametrize(
    "name", ["", "/a", "a/", "a//b", "../a", "a/../b", ".hidden", "a/.draft-1", "a\0", "ä", "x" * 600]
)
def test_a_name_that_could_lead_astray_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        check_name(name)
    with pytest.raises(ValueError):
        DirectoryStore(tmp_path, create=True).put_bytes(b"", name)


# A directory


def test_a_missing_directory_is_not_created_on_the_fly(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "mount")

    for call in (lambda: store.put_bytes(b"x", "a/x"), lambda: store.read("a/x"), store.list, store.check):
        with pytest.raises(BucketMissing, match="Create it"):
            call()
    assert not (tmp_path / "mount").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is denied to root")
def test_a_directory_without_rights_is_denied(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store", create=True)
    (tmp_path / "store").chmod(0o500)

    with pytest.raises(Denied, match="credentials"):
        store.put_bytes(b"x", "a/x")


# URLs


def test_a_path_and_a_file_url_name_a_directory(tmp_path: Path) -> None:
    by_path = open_store(str(tmp_path / "my snapshots"))
    by_url = open_store((tmp_path / "my snapshots").as_uri())

    assert isinstance(by_path, DirectoryStore)
    assert isinstance(by_url, DirectoryStore)
    assert by_path.directory == by_url.directory == tmp_path / "my snapshots"


def test_an_s3_url_names_everything_but_credentials() -> None:
    url = "s3://my-bucket/a/b/?endpoint_url=https://s3.example:9000&region=eu-1&style=path&profile=p&attempts=3"

    place = parse_s3_url(url + "&read_timeout_s=1.5")

    assert place == S3Place(
        "my-bucket", "a/b/", "https://s3.example:9000", "eu-1", "path", "p", attempts=3, read_timeout_s=1.5
    )
    assert parse_s3_url("s3://my-bucket") == S3Place("my-bucket")


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("", "empty"),
        ("ftp://host/x", "kind of store"),
        ("file://host/x", "three slashes"),
        ("s3:///prefix", "bucket"),
        ("s3://Bucket_X/a", "bucket"),
        ("s3://bucket/../x", "prefix"),
        ("s3://bucket/a?style=odd", "style"),
        ("s3://bucket/a?stlye=path", "unknown option 'stlye'"),
        ("s3://bucket/a?endpoint_url=host:9000", "https://"),
        ("s3://bucket/a?attempts=none", "attempts"),
        ("s3://bucket/a?part_bytes=1000", "part_bytes"),
        ("s3://bucket/a?region", "name=value"),
    ],
)
def test_an_invalid_url_is_refused_with_the_reason(url: str, hint: str) -> None:
    with pytest.raises(BadStoreUrl, match=hint):
        open_store(url)


def test_credentials_in_a_url_are_refused_and_not_repeated() -> None:
    with pytest.raises(BadStoreUrl, match="do not belong") as caught:
        open_store("s3://key:hunter2secret@bucket/prefix")

    assert "hunter2secret" not in str(caught.value)


def test_a_directory_that_could_not_be_made_durable_is_not_taken_for_one_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []

    def fails_once(path: Path) -> None:
        synced.append(path)
        if len(synced) == 1:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "sync_directory", fails_once)
    with pytest.raises(OSError, match="No space"):
        files.make_directory(tmp_path / "a")
    files.make_directory(tmp_path / "a")

    assert synced == [tmp_path, tmp_path] and (tmp_path / "a").is_dir()


def test_nothing_is_deleted_from_a_directory_that_is_not_there(tmp_path: Path) -> None:
    """An unmounted directory: the caller would forget an object that is reported as deleted."""
    with pytest.raises(BucketMissing):
        DirectoryStore(tmp_path / "away").delete("a/b")


def test_a_hasty_store_gives_up_sooner_and_not_later() -> None:
    patient = parse_s3_url("s3://bucket/prefix?read_timeout_s=4")

    assert patient.hasty() == replace(patient, attempts=2, connect_timeout_s=3.0, read_timeout_s=4.0)
