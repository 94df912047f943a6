"""Cutting a snapshot: a consistent copy of an LMDB environment while its writer goes on.

LMDB makes the copy itself, page by page, from one read transaction, without the GIL (`copyfd`). It writes into a pipe;
this side reads, hashes and writes the file. So one pass does everything, the rate and the cancelling work in the middle of it,
and the loop's thread is not needed. A dump of keys and values would be smaller and independent of LMDB's layout, but it
takes the GIL for every item and has to be inserted again at a restore (docs/snapshots.md has the figures).

What the environment must be: opened with `lock=True`, because only then does its writer leave alone the pages that a reader
still sees; and neither closed nor resized (`set_mapsize`) before the cut has ended, because both unmap what is being read.
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
from holdfast.snapshots.files import SteadyWriter, make_directory, move_into_place, remove_quietly, room_on_disk
from holdfast.snapshots.format import BLOCK_BYTES, Header, Meta, SnapshotFile, encode
from holdfast.snapshots.work import PIECE_BYTES, Progress, Throttle, Work, in_thread

Describe = Callable[["lmdb.Transaction[bytes]"], Meta]
"""Reads index, term and schema from the very transaction that is copied, so that they cannot contradict the data."""

_DRAFT: Final = ".cutting-"


async def cut(
    env: lmdb.Environment,
    describe: Describe,
    directory: Path,
    *,
    progress: Progress | None = None,
    throttle: Throttle | None = None,
) -> SnapshotFile:
    """Cut in a thread. When this returns or raises, also by cancellation, the environment is no longer in use."""
    return await in_thread(
        lambda work: cut_blocking(env, describe, directory, work), progress=progress, throttle=throttle
    )


def cut_blocking(env: lmdb.Environment, describe: Describe, directory: Path, work: Work | None = None) -> SnapshotFile:
    """The file is in `directory` under its name, durable, or not at all."""
    assert env.flags()["lock"], "without LMDB's locks the writer reuses pages that the copy is still reading"
    work = work or Work()
    with room_on_disk(directory):
        make_directory(directory)
        draft = directory / f"{_DRAFT}{secrets.token_hex(8)}"
        try:
            header = _write(env, describe, draft, work)
            path = directory / header.name
            move_into_place(draft, path)
        except BaseException:
            remove_quietly(draft)
            raise
    work.end()
    return SnapshotFile(path, header)


def remove_drafts(directory: Path) -> None:
    """What a killed process left behind. Called when nothing is being cut."""
    for draft in directory.glob(f"{_DRAFT}*"):
        remove_quietly(draft)


def _write(env: lmdb.Environment, describe: Describe, draft: Path, work: Work) -> Header:
    fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        os.lseek(fd, BLOCK_BYTES, os.SEEK_SET)
        txn = env.begin()
        try:
            meta = describe(txn)
            info = env.info()
            work.begin((info["last_pgno"] + 1) * env.stat()["psize"])  # Free pages among them are not copied.
            size, sha256 = _copy(env, txn, fd, work)
        finally:
            txn.abort()
        work.total = work.done
        header = Header(meta, time.time_ns() // 1_000_000, size, sha256, layout=env.lib_version()[0])
        os.pwrite(fd, encode(header), 0)  # Last: a draft has no header, so it can't be taken for a snapshot.
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
        os.close(read_end)  # If we leave early, LMDB's next write fails with EPIPE and the copy ends.
        thread.join()
    if failures:
        error = failures[0]
        if isinstance(error, lmdb.Error) and not isinstance(error, lmdb.MemoryError):
            raise Corrupted(env.path(), f"the state cannot be copied ({error})") from error
        raise error
    return size, digest.hexdigest()
