"""Makes the copy of a state whole: what it only refers to in the shared store is put into it, in pieces.

So a backup holds all that it needs, in the format that it always had, and whoever restores it needs no store: it does not
matter that the cluster which made it deletes its objects, or is gone. The copy says the same as the state it was made from,
but for where its large values are.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

import lmdb

from holdfast.cluster.partition.state import LmdbTxn
from holdfast.snapshots.cut import cut_blocking
from holdfast.snapshots.files import remove_quietly, room_on_disk
from holdfast.snapshots.format import SnapshotFile
from holdfast.snapshots.restore import restore_blocking
from holdfast.snapshots.work import Work
from holdfast.statemachine import blobs, queries
from holdfast.statemachine.state import State

MAP_BYTES: Final = 256 << 20  # Beside what is copied and what is put in.


def is_whole(txn: lmdb.Transaction[bytes]) -> bool:
    about = queries.meta(LmdbTxn(txn))
    return not about.stored and not about.gone


def fill_blocking(
    file: SnapshotFile, directory: Path, number: int, partitions: int, fetch: Callable[[bytes, str], bytes], work: Work
) -> SnapshotFile:
    """A copy that needs no store, in the place of `file`. `fetch` gives a value by its id and the name of its object."""
    scratch = directory / "filling"
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        with room_on_disk(directory):
            restore_blocking(file.path, scratch, work=work)
            with lmdb.open(str(scratch), sync=False) as env:
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
    """Value by value: each is a transaction, and nothing of the others is in memory."""
    after = b""
    while True:
        with env.begin() as txn:
            found = blobs.next_stored(LmdbTxn(txn), after)
        if found is None:
            break
        work.check()
        after = found.id
        data = fetch(found.id, found.object)
        with env.begin(write=True) as txn:
            state.begin(LmdbTxn(txn))
            blobs.bring_back(state, found.id, data)
            state.flush()
    with env.begin(write=True) as txn:
        state.begin(LmdbTxn(txn))
        blobs.forget_all(state)
        state.flush()
