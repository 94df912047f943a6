"""Files that are either complete or absent, and that survive a power loss."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from holdfast.snapshots.errors import NoSpace

OUT_OF_SPACE: Final = {errno.ENOSPC, errno.EDQUOT}
# Data is synced as it is written: one fsync of gigabytes at the end would delay the log's fsyncs on the same disk.
_SYNC_EVERY_BYTES: Final = 32 << 20


#: Snapshots and backups hold payloads: they are for the user of the node alone, whatever the umask is.
PRIVATE_FILE: Final = 0o600


def open_private(path: str | Path, flags: int) -> int:
    """For `open(..., opener=)`."""
    return os.open(path, flags, PRIVATE_FILE)


class SteadyWriter:
    """Appends to a file descriptor and syncs regularly, so that the disk keeps up."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._unsynced = 0

    def write(self, piece: bytes | memoryview) -> None:
        view = memoryview(piece)
        while view:
            view = view[os.write(self._fd, view) :]
        self._unsynced += len(piece)
        if self._unsynced >= _SYNC_EVERY_BYTES:
            os.fdatasync(self._fd)
            self._unsynced = 0

    def finish(self) -> None:
        os.fsync(self._fd)


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directory(path: Path) -> None:
    """Create a directory that survives a power loss.

    An existing directory is assumed to be durable. One left by a killed process may not be: see `sync_path`.
    """
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True, mode=0o700)
        try:
            sync_directory(path.parent)
        except OSError:
            with suppress(OSError):
                path.rmdir()  # The next call must not assume that it is durable.
            raise


def sync_path(top: Path, path: Path) -> None:
    """Make the directories from `top` down to `path`, both included, durable. An earlier process may have created them."""
    for directory in (*reversed(path.parents), path):
        if directory.is_relative_to(top) and directory.is_dir():
            sync_directory(directory)


def move_into_place(draft: Path, path: Path) -> None:
    """Rename `draft`, which must be fsynced already, to `path`. The result survives a power loss."""
    os.rename(draft, path)
    sync_directory(path.parent)


def remove_quietly(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


@contextmanager
def room_on_disk(path: Path) -> Iterator[None]:
    """Translates "no space left" errors to NoSpace."""
    try:
        yield
    except OSError as error:
        if error.errno in OUT_OF_SPACE:
            raise NoSpace(path, f"the disk is full ({error.strerror})") from error
        raise
