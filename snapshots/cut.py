"""Cutting a snapshot: a consistent copy of an LMDB environment while writes continue.

LMDB makes the copy itself, page by page, from one read transaction, without the GIL (`copyfd`). It writes into a pipe;
this side reads, hashes and writes the file. So one pass does everything, can be throttled and cancelled at any point,
and does not occupy the event loop. A dump of keys and values would be smaller and independent of LMDB's layout, but it
takes the GIL for every item, and a restore has to insert every item again (docs/snapshots.md has the figures).

The environment must be opened with `lock=True`, because otherwise the writer reuses pages that a reader still sees. It
must not be closed or resized (`set_mapsize`) before the cut has ended, because both unmap the pages being read.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import lmdb

from holdfast.snapshots.errors import Corrupted
from holdfast.snapshots.files import (
    PRIVATE_FILE,
    SteadyWriter,
    make_directory,
    move_into_place,
    remove_quietly,
    room_on_disk,
)
from holdfast.snapshots.format import BLOCK_BYTES, Header, Meta, SnapshotFile, encode
from holdfast.snapshots.work import PIECE_BYTES, Progress, Throttle, Work, in_thread

Describe = Callable[["lmdb.Transaction[bytes]"], Meta]
"""Reads index, term and schema from the transaction that is copied, so that they match the data."""

_DRAFT: Final = ".cutting-"


async def cut(
    env: lmdb.Environment,
    describe: Describe,
    directory: Path,
    *,
    progress: Progress | None = None,
    throttle: Throttle | None = None,
) -> SnapshotFile:
    """Cut in a thread. Once this returns, raises or is cancelled, it no longer uses the environment."""
    return await in_thread(
        lambda work: cut_blocking(env, describe, directory, work), progress=progress, throttle=throttle
    )


def cut_blocking(
    env: lmdb.Environment,
    describe: Describe,
    directory: Path,
    work: Work | None = None,
    *,
    token: str | None = None,
    now_s: Callable[[], float] = time.time,
) -> SnapshotFile:
    """Write a durable snapshot file to `directory`, or nothing at all. `token` makes the name of its draft unique."""
    assert env.flags()["lock"], "without LMDB's locks the writer reuses pages that the copy is still reading"
    work = work or Work()
    with room_on_disk(directory):
        make_directory(directory)
        draft = directory / f"{_DRAFT}{token or secrets.token_hex(8)}"
        try:
            header = _write(env, describe, draft, work=work, now_s=now_s)
            path = directory / header.name
            move_into_place(draft, path)
        except BaseException:
            remove_quietly(draft)
            raise
    work.end()
    return SnapshotFile(path, header)


def remove_drafts(directory: Path) -> None:
    """Remove what a killed process left behind. Call it only while no cut is running."""
    for draft in directory.glob(f"{_DRAFT}*"):
        remove_quietly(draft)


def _write(env: lmdb.Environment, describe: Describe, draft: Path, *, work: Work, now_s: Callable[[], float]) -> Header:
    fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE_FILE)
    try:
        os.lseek(fd, BLOCK_BYTES, os.SEEK_SET)
        txn = env.begin()
        try:
            meta = describe(txn)
            info = env.info()
            work.begin((info["last_pgno"] + 1) * env.stat()["psize"])  # An upper bound: free pages are not copied.
            size, sha256 = _copy(env, txn, fd, work)
        finally:
            txn.abort()
        work.total = work.done
        header = Header(meta, int(now_s() * 1000), size, sha256, layout=env.lib_version()[0])
        os.pwrite(fd, encode(header), 0)  # Last: without a header, a draft cannot be mistaken for a snapshot.
        os.fsync(fd)
    finally:
        os.close(fd)
    return header


def _copy(env: lmdb.Environment, txn: lmdb.Transaction[bytes], fd: int, work: Work) -> tuple[int, str]:
    """(size, sha256) of what LMDB wrote through the pipe."""
    read_end, write_end = os.pipe()
    fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, PIECE_BYTES)
    failures: list[BaseException] = []

    def copy() -> None:
        try:
            env.copyfd(write_end, compact=True, txn=txn)
        except BaseException as error:
            failures.append(error)
        finally:
            os.close(write_end)

    thread = threading.Thread(target=copy, name="holdfast-copy", daemon=True)
    thread.start()
    digest = hashlib.sha256()
    writer = SteadyWriter(fd)
    size = 0
    buffer = memoryview(bytearray(PIECE_BYTES))
    try:
        while count := os.readv(read_end, [buffer]):
            piece = buffer[:count]
            digest.update(piece)
            writer.write(piece)
            size += count
            work.step(count)
    finally:
        os.close(read_end)  # If we stop early, LMDB's next write fails with EPIPE and ends the copy.
        thread.join()
    if failures:
        error = failures[0]
        if isinstance(error, lmdb.Error) and not isinstance(error, lmdb.MemoryError):
            raise Corrupted(env.path(), f"the state cannot be copied ({error})") from error
        raise error
    return size, digest.hexdigest()
