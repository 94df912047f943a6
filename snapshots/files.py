"""Files that are there whole or not at all, and that are still there after a power loss."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from holdfast.snapshots.errors import NoSpace

OUT_OF_SPACE: Final = {errno.ENOSPC, errno.EDQUOT}
# Written back as we go: one fsync of gigabytes at the end would hold up the log's own fsyncs on the same disk.
_SYNC_EVERY_BYTES: Final = 32 << 20


class SteadyWriter:
    """Appends to a file descriptor and has the disk keep up."""

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
    """Durably: the parent knows the new directory after a power loss too."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        try:
            sync_directory(path.parent)
        except OSError:
            with suppress(OSError):
                path.rmdir()  # Or the next who asks would find it there, and take it for durable.
            raise


def move_into_place(draft: Path, path: Path) -> None:
    """`draft` is fsynced already. Afterwards `path` is the new file, also after a power loss."""
    os.rename(draft, path)
    sync_directory(path.parent)


def remove_quietly(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


@contextmanager
def room_on_disk(path: Path) -> Iterator[None]:
    """A full disk, by its name."""
    try:
        yield
    except OSError as error:
        if error.errno in OUT_OF_SPACE:
            raise NoSpace(path, f"the disk is full ({error.strerror})") from error
        raise
