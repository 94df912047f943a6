"""Replacing a state with a snapshot: all slow work happens beside it, then one rename swaps it in.

`stage` writes the data next to the file it will replace, checks every byte on the way, fsyncs it and opens it once.
`Staged.swap` is then quick enough for the loop: it renames one file over another, which is atomic, so a crash at any
point leaves either the old state or the new one. Close the environment before the swap, and reopen it afterwards.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Final

import lmdb

from holdfast.snapshots.errors import Corrupted
from holdfast.snapshots.files import (
    SteadyWriter,
    make_directory,
    move_into_place,
    open_private,
    remove_quietly,
    room_on_disk,
)
from holdfast.snapshots.format import ANY, BLOCK_BYTES, Expected, Header, SnapshotFile, read_header
from holdfast.snapshots.work import PIECE_BYTES, Progress, Throttle, Work, in_thread

DATA_FILE: Final = "data.mdb"
_STAGED: Final = ".staged-"
_PREPARE_MAP_BYTES: Final = 64 << 20
_TABLES_MAX: Final = 64

Prepare = Callable[[lmdb.Environment], None]
"""Changes or checks the staged environment before the swap, e.g. writes data that belongs to this machine."""


class Staged:
    """A state on disk, next to the one it will replace."""

    def __init__(self, path: Path, directory: Path, header: Header) -> None:
        self.header = header
        self.directory = directory
        self._path = path

    def swap(self) -> None:
        """Replace the state, durably and atomically. The environment in the directory must be closed."""
        move_into_place(self._path, self.directory / DATA_FILE)

    def discard(self) -> None:
        remove_quietly(self._path)


async def stage(
    file: SnapshotFile | Path,
    directory: Path,
    *,
    expected: Expected = ANY,
    prepare: Prepare | None = None,
    progress: Progress | None = None,
    throttle: Throttle | None = None,
    token: str | None = None,
) -> Staged:
    """Stage in a thread. The old state in `directory` may stay in use."""
    path = file.path if isinstance(file, SnapshotFile) else file
    return await in_thread(
        lambda work: stage_blocking(path, directory, expected=expected, prepare=prepare, work=work, token=token),
        progress=progress,
        throttle=throttle,
    )


def stage_blocking(
    file: Path,
    directory: Path,
    *,
    expected: Expected = ANY,
    prepare: Prepare | None = None,
    work: Work | None = None,
    token: str | None = None,
) -> Staged:
    """`token` makes the name of the staged file unique."""
    work = work or Work()
    header = read_header(file, expected)
    work.begin(header.size)
    with room_on_disk(directory):
        make_directory(directory)
        path = directory / f"{_STAGED}{token or secrets.token_hex(8)}"
        try:
            _copy_data(file, header, path, work)
            _open_once(path, header, prepare)
        except BaseException:
            remove_quietly(path)
            raise
    work.end()
    return Staged(path, directory, header)


def restore_blocking(
    file: Path,
    directory: Path,
    *,
    expected: Expected = ANY,
    prepare: Prepare | None = None,
    work: Work | None = None,
    token: str | None = None,
) -> Header:
    """Stage and swap in one step, for a node that is not running."""
    staged = stage_blocking(file, directory, expected=expected, prepare=prepare, work=work, token=token)
    staged.swap()
    return staged.header


def remove_staged(directory: Path) -> None:
    """Remove what a killed process left behind. Call it only while nothing is being staged."""
    for path in directory.glob(f"{_STAGED}*"):
        remove_quietly(path)


def _copy_data(file: Path, header: Header, path: Path, work: Work) -> None:
    digest = hashlib.sha256()
    with file.open("rb") as source, open(path, "xb", buffering=0, opener=open_private) as target:
        writer = SteadyWriter(target.fileno())
        source.seek(BLOCK_BYTES)
        while piece := source.read(PIECE_BYTES):
            digest.update(piece)
            writer.write(piece)
            work.step(len(piece))
        writer.finish()
    if digest.hexdigest() != header.sha256:
        raise Corrupted(file, "its data is damaged: checksum mismatch")


def _open_once(path: Path, header: Header, prepare: Prepare | None) -> None:
    """The checksum proves that nothing changed in transit; this proves that LMDB can read the data."""
    try:
        with lmdb.open(
            os.fspath(path),
            subdir=False,
            lock=False,  # No other process uses it before the swap.
            readonly=prepare is None,
            map_size=header.size + _PREPARE_MAP_BYTES,
            max_dbs=_TABLES_MAX,
            lib_version=header.layout,
        ) as env:
            with env.begin() as txn:
                txn.stat()
            if prepare is not None:
                prepare(env)
                env.sync(True)
    except lmdb.Error as error:
        raise Corrupted(path, f"LMDB cannot open the data ({error})") from error
