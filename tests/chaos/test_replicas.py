"""The final check of the disks: states that differ at one index and torn snapshots are found."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import lmdb
import msgpack

from holdfast.chaos.replicas import compare, unsound_snapshots
from holdfast.snapshots.cut import cut_blocking
from holdfast.snapshots.format import Meta


def write_state(path: Path, index: int, items: Mapping[bytes, bytes]) -> None:
    path.mkdir(parents=True)
    with lmdb.open(str(path)) as env, env.begin(write=True) as txn:
        txn.put(b"\x00applied", msgpack.packb((index, 1)))
        for key, value in items.items():
            txn.put(key, value)


def places(root: Path) -> dict[str, Path]:
    return {name: root / name for name in ("n1", "n2", "n3")}


def test_replicas_at_one_index_are_compared(tmp_path: Path) -> None:
    for name in ("n1", "n2"):
        write_state(tmp_path / name / "state" / "0003", 7, {b"a": b"1"})
    write_state(tmp_path / "n3" / "state" / "0003", 6, {b"a": b"0"})  # It lags behind, so it is no evidence.

    found = compare(places(tmp_path))

    assert (found.equal, found.wrong) == (2, [])


def test_a_differing_replica_is_found_with_the_difference(tmp_path: Path) -> None:
    write_state(tmp_path / "n1" / "state" / "0003", 7, {b"a": b"1", b"b": b"2"})
    write_state(tmp_path / "n2" / "state" / "0003", 7, {b"a": b"1"})

    found = compare(places(tmp_path))

    (sentence,) = found.wrong
    assert "partition 3 at entry 7 differs between n1, n2" in sentence and "b'b' is [b'2', None]" in sentence


def test_a_torn_snapshot_is_found_and_a_whole_one_is_counted(tmp_path: Path) -> None:
    write_state(tmp_path / "n1" / "state" / "0000", 7, {b"a": b"1"})
    directory = tmp_path / "n1" / "snapshots" / "disk" / "0000000002"
    with lmdb.open(str(tmp_path / "n1" / "state" / "0000")) as env:
        whole = cut_blocking(env, lambda _: Meta("c", 2, 7, 1, 0, ("n1",), 1, "n1"), directory)
        torn = cut_blocking(env, lambda _: Meta("c", 2, 8, 1, 0, ("n1",), 1, "n1"), directory)
    assert unsound_snapshots(places(tmp_path)) == ([], 2)

    torn.path.write_bytes(torn.path.read_bytes()[:-1])

    wrong, sound = unsound_snapshots(places(tmp_path))
    assert sound == 1 and len(wrong) == 1 and torn.path.name in wrong[0] and whole.path.name not in wrong[0]
