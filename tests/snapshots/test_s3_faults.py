"""S3 that fails in every way: a typed error that says what to do, no damage, and recovery afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.snapshots.catalog import Catalog
from holdfast.snapshots.cut import cut_blocking
from holdfast.snapshots.errors import (
    BucketMissing,
    Corrupted,
    Denied,
    StoreError,
    StoreFailed,
    Unreachable,
)
from holdfast.snapshots.format import SnapshotFile
from holdfast.snapshots.policy import Policy
from holdfast.snapshots.s3 import S3Store
from holdfast.snapshots.transfer import fetch_blocking
from tests.snapshots.conftest import s3_place
from tests.snapshots.fault_proxy import ALWAYS, Fault, FaultProxy, error, flipped, stale_listing, truncated
from tests.snapshots.servers import SECRET_KEY
from tests.snapshots.states import CLUSTER, GROUP, State

SPOILED_AT = 200_000


@pytest.fixture
def file(state: State, tmp_path: Path) -> SnapshotFile:
    state.apply(2000)
    return cut_blocking(state.env, state.describe, tmp_path / "cut")


@pytest.fixture
def catalog(s3: S3Store) -> Catalog:
    return Catalog(s3, cluster=CLUSTER, group=GROUP)


@pytest.fixture
def impatient(proxy: FaultProxy) -> Iterator[S3Store]:
    store = S3Store(replace(s3_place(proxy.endpoint_url), attempts=1, read_timeout_s=1))
    yield store
    store.close()


FAULTS: dict[str, tuple[Callable[[], Fault], type[StoreError]]] = {
    "down": (lambda: Fault(down=True), Unreachable),
    "internal error": (lambda: error(500, "InternalError"), StoreFailed),
    "throttled": (lambda: error(503, "SlowDown"), StoreFailed),
    "denied": (lambda: error(403, "AccessDenied"), Denied),
    "bucket removed": (lambda: error(404, "NoSuchBucket"), BucketMissing),
    "nonsense": (lambda: error(418, "Teapot"), StoreFailed),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_failing_store_is_named_by_its_fault_and_heals(
    name: str, proxy: FaultProxy, catalog: Catalog, file: SnapshotFile, tmp_path: Path
) -> None:
    make, kind = FAULTS[name]
    proxy.faults.append(make())

    for call in (
        lambda: catalog.publish(file),
        catalog.newest,
        lambda: catalog.prune(Policy()),
        catalog.store.check,
        lambda: catalog.store.delete("a/b"),
        lambda: fetch_blocking(catalog.store, catalog.name_in_store(file), tmp_path / "fetched"),
    ):
        with pytest.raises(kind) as caught:
            call()
        assert isinstance(caught.value, StoreError)
        assert catalog.store.url in str(caught.value)
        assert SECRET_KEY not in str(caught.value)

    proxy.heal()
    assert catalog.list() == [], "nothing is there of what failed"
    name_in_store = catalog.publish(file)
    assert fetch_blocking(catalog.store, name_in_store, tmp_path / "fetched").header == file.header


def test_an_upload_whose_answer_was_lost_is_repeated(proxy: FaultProxy, catalog: Catalog, file: SnapshotFile) -> None:
    proxy.faults.append(error(500, "InternalError", reaches=True))

    with pytest.raises(StoreFailed):
        catalog.publish(file)
    proxy.heal()
    assert len(catalog.list()) == 1, "it took effect all the same"

    catalog.publish(file)
    assert len(catalog.list()) == 1


def test_a_few_errors_are_retried_unnoticed(
    proxy: FaultProxy, catalog: Catalog, file: SnapshotFile, tmp_path: Path
) -> None:
    proxy.faults += [error(503, "SlowDown", times=1)]
    name = catalog.publish(file)
    proxy.faults += [error(500, "InternalError", times=1)]
    fetched = fetch_blocking(catalog.store, name, tmp_path / "fetched")

    assert fetched.header == file.header


def test_a_silent_store_is_given_up_after_its_timeout(proxy: FaultProxy, impatient: S3Store) -> None:
    proxy.faults.append(Fault(delay_s=30))

    with pytest.raises(Unreachable, match="timeout"):
        impatient.stat("a/b")

    proxy.heal()
    impatient.check()


def test_a_body_that_breaks_off_is_gone_on_with(
    proxy: FaultProxy, catalog: Catalog, file: SnapshotFile, tmp_path: Path
) -> None:
    """Each answer breaks off after 200 kB, but the whole file arrives."""
    name = catalog.publish(file)
    proxy.faults.append(truncated(SPOILED_AT))
    proxy.requests.clear()

    fetched = fetch_blocking(catalog.store, name, tmp_path / "fetched")

    assert fetched.path.read_bytes() == file.path.read_bytes()
    assert sum(request.is_download for request in proxy.requests) >= file.header.file_bytes // SPOILED_AT


def test_a_body_that_always_breaks_off_is_abandoned_and_the_received_bytes_are_kept(
    proxy: FaultProxy, catalog: Catalog, file: SnapshotFile, tmp_path: Path
) -> None:
    name = catalog.publish(file)
    proxy.faults += [truncated(SPOILED_AT, times=1), truncated(0)]

    with pytest.raises(Unreachable):
        fetch_blocking(catalog.store, name, tmp_path / "fetched")
    part = (tmp_path / "fetched" / (file.name + ".part")).read_bytes()
    proxy.heal()
    fetched = fetch_blocking(catalog.store, name, tmp_path / "fetched")

    assert len(part) == SPOILED_AT
    assert file.path.read_bytes().startswith(part)
    assert fetched.path.read_bytes() == file.path.read_bytes()


def test_a_corrupted_download_is_never_accepted_and_heals(
    proxy: FaultProxy, catalog: Catalog, file: SnapshotFile, tmp_path: Path
) -> None:
    name = catalog.publish(file)
    proxy.faults.append(flipped(SPOILED_AT))

    with pytest.raises(Corrupted, match="checksum"):
        fetch_blocking(catalog.store, name, tmp_path / "fetched")
    assert list((tmp_path / "fetched").iterdir()) == []

    proxy.heal()
    assert fetch_blocking(catalog.store, name, tmp_path / "fetched").header == file.header


def test_a_corrupted_header_is_passed_over_for_an_older_snapshot(
    proxy: FaultProxy, catalog: Catalog, file: SnapshotFile, state: State, tmp_path: Path
) -> None:
    catalog.publish(file)
    state.apply(10)
    newer = cut_blocking(state.env, state.describe, tmp_path / "cut")
    catalog.publish(newer)

    proxy.faults.append(flipped(100, times=1))
    found = catalog.newest()
    healed = catalog.newest()

    assert found is not None
    assert healed is not None
    assert found.header == file.header
    assert healed.header == newer.header


def test_wrong_credentials_are_denied(proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret")
    store = S3Store(s3_place(proxy.endpoint_url))

    with pytest.raises(Denied, match="credentials") as caught:
        store.check()

    assert "not-the-secret" not in str(caught.value)
    store.close()


def test_no_credentials_at_all_are_denied(proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    store = S3Store(s3_place(proxy.endpoint_url))

    with pytest.raises(Denied, match="credentials"):
        store.list()
    store.close()


def test_an_unknown_profile_is_denied(credentials: None) -> None:
    with pytest.raises(Denied, match="nobody"):
        S3Store(replace(s3_place("http://127.0.0.1:1"), profile="nobody"))


def test_a_missing_bucket_is_named_and_not_created(proxy: FaultProxy, tmp_path: Path) -> None:
    store = S3Store(replace(s3_place(proxy.endpoint_url), bucket="no-such-bucket"))

    for call in (
        lambda: store.put_bytes(b"x", "a/x"),
        lambda: store.stat("a/x"),
        lambda: store.read("a/x"),
        lambda: store.get("a/x", tmp_path / "got"),
        store.list,
        store.check,
    ):
        with pytest.raises(BucketMissing, match=r"no-such-bucket.*Create it"):
            call()
    store.close()


def test_a_closed_port_is_unreachable(credentials: None, unused_port: int) -> None:
    store = S3Store(replace(s3_place(f"http://127.0.0.1:{unused_port}"), attempts=1))

    with pytest.raises(Unreachable, match="endpoint"):
        store.list()
    store.close()


def test_a_stale_listing_hides_nothing_that_this_node_published(
    proxy: FaultProxy, catalog: Catalog, file: SnapshotFile, state: State, tmp_path: Path
) -> None:
    proxy.faults.append(stale_listing())
    assert catalog.newest() is None

    catalog.publish(file)
    state.apply(10)
    newer = cut_blocking(state.env, state.describe, tmp_path / "cut")
    catalog.publish(newer)
    other_node = Catalog(catalog.store, cluster=CLUSTER, group=GROUP)

    assert proxy.faults[0].times < ALWAYS
    found = catalog.newest()
    assert found is not None
    assert found.header == newer.header
    assert other_node.newest() is None, "another node does not know yet"
    other_node.tell(catalog.name_in_store(newer))
    told = other_node.newest()
    assert told is not None
    assert told.header == newer.header


def test_a_stale_listing_with_deleted_objects_does_no_harm(
    proxy: FaultProxy, catalog: Catalog, file: SnapshotFile, state: State, tmp_path: Path
) -> None:
    catalog.publish(file)
    state.apply(10)
    newer = cut_blocking(state.env, state.describe, tmp_path / "cut")
    newer_name = catalog.publish(newer)
    proxy.faults.append(stale_listing())
    assert len(catalog.list()) == 2

    catalog.store.delete(newer_name)
    other_node = Catalog(catalog.store, cluster=CLUSTER, group=GROUP)
    found = other_node.newest()
    removed = other_node.prune(Policy(keep=1))

    assert found is not None
    assert found.header == file.header
    assert removed == ()
