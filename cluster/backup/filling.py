"""Makes a copy of a state self-contained: values that it refers to in the shared store are embedded in chunks.

So a backup is complete, its format is unchanged, and a restore needs no shared store. It does not matter whether the
original cluster deletes its objects or is gone. The copy differs from the original state only in where its large values
are.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

import lmdb

from holdfast.cluster.partition.state import LmdbTxn
from holdfast.sdk.ids import PartitionNumber
from holdfast.snapshots.cut import cut_blocking
from holdfast.snapshots.files import PRIVATE_FILE, remove_quietly, room_on_disk
from holdfast.snapshots.format import SnapshotFile
from holdfast.snapshots.restore import restore_blocking
from holdfast.snapshots.work import Work
from holdfast.statemachine import blobs, queries
from holdfast.statemachine.state import State

MAP_BYTES: Final = 256 << 20  # In addition to the copy and the embedded values.


def is_whole(txn: lmdb.Transaction[bytes]) -> bool:
    about = queries.meta(LmdbTxn(txn))
    return not about.stored and not about.gone


def fill_blocking(
    file: SnapshotFile,
    directory: Path,
    number: PartitionNumber,
    partitions: int,
    fetch: Callable[[bytes, str], bytes],
    work: Work,
) -> SnapshotFile:
    """Replace `file` with a self-contained copy. `fetch` returns a value by its id and its object's name."""
    scratch = directory / "filling"
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        with room_on_disk(directory):
            restore_blocking(file.path, scratch, work=work)
            with lmdb.open(str(scratch), sync=False, mode=PRIVATE_FILE) as env:
                with env.begin() as txn:
                    about = queries.meta(LmdbTxn(txn))
                env.set_mapsize(file.header.size + about.stored_bytes * 5 // 4 + MAP_BYTES)
                _fill(env, State(number, partitions), fetch, work)
                whole = cut_blocking(env, lambda _: file.header.meta, directory, work)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if whole.path != file.path:
        remove_quietly(file.path)
    return whole


def _fill(env: lmdb.Environment, state: State, fetch: Callable[[bytes, str], bytes], work: Work) -> None:
    """Embed the values one by one, each in its own transaction, so that only one is in memory."""
    after = b""
    while True:
        with env.begin() as txn:
            found = blobs.next_stored(LmdbTxn(txn), after)
        if found is None:
            break
        work.check()
        after = found.name
        data = fetch(found.name, found.object)
        with env.begin(write=True) as txn:
            state.begin(LmdbTxn(txn))
            blobs.bring_back(state, found.name, data)
            state.flush()
    with env.begin(write=True) as txn:
        state.begin(LmdbTxn(txn))
        blobs.forget_all(state)
        state.flush()
