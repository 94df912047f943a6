"""The snapshots of a group in a store, on every kind of store."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.snapshots.catalog import Catalog
from holdfast.snapshots.cut import cut_blocking
from holdfast.snapshots.errors import Corrupted, WrongSnapshot
from holdfast.snapshots.format import SnapshotFile
from holdfast.snapshots.policy import Policy
from holdfast.snapshots.stores import Store
from holdfast.snapshots.transfer import fetch_blocking
from tests.snapshots.states import CLUSTER, GROUP, State

KEEP_TWO = Policy(keep=2)


def catalog_of(store: Store) -> Catalog:
    """The catalog of another node, or of this one after a restart."""
    return Catalog(store, cluster=CLUSTER, group=GROUP, schema_max=1)


def cut_at(state: State, directory: Path, count: int, *, term: int = 1) -> SnapshotFile:
    state.apply(count - state.applied[0], term=term)
    return cut_blocking(state.env, state.describe, directory)


def test_the_newest_snapshot_is_found_and_fetched(store: Store, state: State, tmp_path: Path) -> None:
    files = [cut_at(state, tmp_path / "cut", count) for count in (10, 20, 30)]
    for file in files:
        catalog_of(store).publish(file)

    found = catalog_of(store).newest()
    assert found is not None
    fetched = fetch_blocking(store, found.name, tmp_path / "fetched")

    assert found.header == files[-1].header == fetched.header
    assert fetched.path.read_bytes() == files[-1].path.read_bytes()
    assert [path.name for path in (tmp_path / "fetched").iterdir()] == [files[-1].name]


def test_nothing_is_found_where_nothing_is(store: Store) -> None:
    assert catalog_of(store).newest() is None
    assert catalog_of(store).prune(KEEP_TWO) == ()


def test_a_deposed_leader_neither_overwrites_nor_hides_a_newer_snapshot(
    store: Store, state: State, tmp_path: Path
) -> None:
    """The old leader cut at term 1 and was cut off; the new one published at term 2; then the old one's upload arrives."""
    old = cut_at(state, tmp_path / "old", 10, term=1)
    new = cut_at(state, tmp_path / "new", 20, term=2)
    newer_name = catalog_of(store).publish(new)

    catalog_of(store).publish(old)
    deposed = catalog_of(store)
    deposed.prune(Policy(keep=1))

    found = catalog_of(store).newest()
    assert found is not None
    assert (found.name, found.header) == (newer_name, new.header)


def test_two_nodes_that_cut_at_the_same_index_do_not_meet(store: Store, state: State, tmp_path: Path) -> None:
    first = cut_at(state, tmp_path / "a", 10)
    second = cut_at(state, tmp_path / "b", 10)
    if first.name == second.name:
        assert first.path.read_bytes() == second.path.read_bytes()
        return
    catalog_of(store).publish(first)
    catalog_of(store).publish(second)

    assert len(catalog_of(store).list()) == 2


def test_old_ones_are_removed(store: Store, state: State, tmp_path: Path) -> None:
    for count in (10, 20, 30, 40):
        catalog_of(store).publish(cut_at(state, tmp_path / "cut", count))

    removed = catalog_of(store).prune(KEEP_TWO)

    assert len(removed) == 2
    assert [listed.index for listed in catalog_of(store).list()] == [40, 30]


@pytest.mark.parametrize("keep_bytes", [0, 100, 4096, 9000])
def test_a_torn_newest_one_is_passed_over(store: Store, state: State, tmp_path: Path, keep_bytes: int) -> None:
    good = cut_at(state, tmp_path / "cut", 10)
    bad = cut_at(state, tmp_path / "cut", 20)
    catalog_of(store).publish(good)
    store.put_bytes(bad.path.read_bytes()[:keep_bytes], catalog_of(store).name_in_store(bad))

    found = catalog_of(store).newest()
    removed = catalog_of(store).prune(Policy(keep=1))

    assert found is not None
    assert found.header == good.header
    assert removed == (), "the only sound one is kept"


def test_damage_that_a_header_does_not_show_is_found_when_it_is_fetched(
    store: Store, state: State, tmp_path: Path
) -> None:
    file = cut_at(state, tmp_path / "cut", 10)
    data = bytearray(file.path.read_bytes())
    data[-1] ^= 1
    name = catalog_of(store).name_in_store(file)
    store.put_bytes(bytes(data), name)

    with pytest.raises(Corrupted, match="checksum"):
        fetch_blocking(store, name, tmp_path / "fetched")

    assert list((tmp_path / "fetched").iterdir()) == []


def test_a_snapshot_under_anothers_name_is_not_taken(store: Store, state: State, tmp_path: Path) -> None:
    file = cut_at(state, tmp_path / "cut", 10)
    other = cut_at(state, tmp_path / "cut", 20)
    catalog = catalog_of(store)
    store.put(file.path, catalog.name_in_store(other))

    assert catalog.newest() is None
    with pytest.raises(Corrupted, match="another snapshot"):
        fetch_blocking(store, catalog.name_in_store(other), tmp_path / "fetched")


def test_a_snapshot_missing_in_a_listing_is_found_by_its_name(store: Store, state: State, tmp_path: Path) -> None:
    file = cut_at(state, tmp_path / "cut", 10)
    catalog = catalog_of(store)
    name = catalog.publish(file)
    store.delete(name)
    assert catalog.newest() is None, "what is gone is not insisted on"

    store.put(file.path, name)
    catalog.tell(name)
    catalog.tell("elsewhere/" + file.name)

    assert [listed.name for listed in catalog.list()] == [name]


def test_other_clusters_groups_and_strangers_are_not_seen(store: Store, state: State, tmp_path: Path) -> None:
    file = cut_at(state, tmp_path / "cut", 10)
    store.put_bytes(b"x", f"{catalog_of(store).prefix}readme.txt")
    other = Catalog(store, cluster="other", group=GROUP)

    with pytest.raises(WrongSnapshot):
        other.publish(file)
    with pytest.raises(ValueError):
        Catalog(store, cluster="../x", group=1)

    assert other.list() == catalog_of(store).list() == []


def test_a_fetch_continues_and_verifies_the_existing_bytes(store: Store, state: State, tmp_path: Path) -> None:
    file = cut_at(state, tmp_path / "cut", 2000)
    name = catalog_of(store).publish(file)
    part = tmp_path / "fetched" / (file.name + ".part")
    part.parent.mkdir()

    for beginning in (file.path.read_bytes()[:300_000], b"\0" * 300_000):
        part.write_bytes(beginning)
        fetched = fetch_blocking(store, name, tmp_path / "fetched")
        assert fetched.path.read_bytes() == file.path.read_bytes()
        assert not part.exists()
        fetched.path.unlink()
