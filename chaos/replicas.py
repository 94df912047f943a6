"""Checks the disks after a run, when every process is dead: replicas must be equal, and snapshots valid.

Replicas that applied the same entries hold the same bytes, even if they were killed, wiped, or restored from a snapshot
of their own or of another node. So two states at the same index are compared byte by byte, and every snapshot that a
node would trust is read completely.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import lmdb

from holdfast.cluster.partition.state import read_applied
from holdfast.snapshots.errors import SnapshotError
from holdfast.snapshots.format import SUFFIX, verify


@dataclass(slots=True)
class Compared:
    """`equal` counts replicas that were found equal to another one."""

    equal: int = 0
    wrong: list[str] = field(default_factory=list)


def compare(places: Mapping[str, Path]) -> Compared:
    """`places` are the data directories of nodes that are dead."""
    found = Compared()
    by_partition: dict[str, dict[str, Path]] = defaultdict(dict)
    for node, data in places.items():
        for path in sorted((data / "state").glob("*")):
            if (path / "data.mdb").exists():
                by_partition[path.name][node] = path
    for partition, paths in by_partition.items():
        digests: dict[int, dict[str, str]] = defaultdict(dict)
        for node, path in paths.items():
            index, digest = _read(path)
            digests[index][node] = digest
        for index, by_node in digests.items():
            if len(set(by_node.values())) > 1:
                nodes = [paths[node] for node in sorted(by_node)]
                found.wrong.append(
                    f"partition {int(partition)} at entry {index} differs between {', '.join(sorted(by_node))}: "
                    f"{first_difference(nodes)}"
                )
            elif len(by_node) > 1:
                found.equal += len(by_node)
    return found


def _read(path: Path) -> tuple[int, str]:
    """(the index of the last entry applied, a digest of all that the state holds)."""
    digest = hashlib.sha256()
    with lmdb.open(str(path), readonly=True, lock=False) as env, env.begin() as txn:
        for key, value in txn.cursor():
            digest.update(b"%d %d " % (len(key), len(value)))
            digest.update(key)
            digest.update(value)
        return read_applied(txn)[0], digest.hexdigest()


def first_difference(paths: list[Path]) -> str:
    """The first difference between states, to help find the cause."""
    states = []
    for path in paths:
        with lmdb.open(str(path), readonly=True, lock=False) as env, env.begin() as txn:
            states.append({bytes(key): bytes(value) for key, value in txn.cursor()})
    for key in sorted(set().union(*states)):
        values = [state.get(key) for state in states]
        if any(value != values[0] for value in values):
            shown = [None if value is None else value[:100] for value in values]
            return f"key {key!r:.200} is {shown}"
    return "nothing any more"


def unsound_snapshots(places: Mapping[str, Path]) -> tuple[list[str], int]:
    """Problems, and the number of valid snapshots. Unfinished cuts and fetches have another name or place."""
    wrong, sound = [], 0
    for node, data in places.items():
        for path in sorted(data.glob(f"snapshots/*/*/*{SUFFIX}")):
            try:
                verify(path)
                sound += 1
            except (SnapshotError, OSError) as error:
                wrong.append(f"{node}: {error}")
    return wrong, sound
