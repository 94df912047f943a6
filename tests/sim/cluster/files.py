"""The files of simulated machines: real files in memory, and their contents after a power loss.

The code under test opens, writes and renames real files, and LMDB maps them. Only the guarantee of the disk is
replaced: `fsync` records what is durable. After a power loss a machine finds the durable names and bytes, or those that
the kernel happened to write, or a torn file. A state of LMDB that was not closed is a mixture of old and new pages:
here it opens, and is wrong.

The process may die in each of these calls (`Crashed`). Writes of the code while it handles such a crash do not reach
the disk.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

import lmdb

from holdfast.cluster.partition.state import State
from holdfast.snapshots.errors import SnapshotError
from holdfast.snapshots.format import BLOCK_BYTES, SUFFIX, decode, verify

if TYPE_CHECKING:
    from tests.sim.cluster.world import Process, World

#: Memory that behaves like a disk, where available.
SHM: Final = Path("/dev/shm")
DATA: Final = "data.mdb"
#: The likelihood of a crash at these calls, relative to the steps of a snapshot: some are frequent.
CRASHES: Final = {"fsync": 0.1, "rename": 0.2, "renamed": 0.6, "unlink": 0.3}
CRASHES_OF_TOOLS: Final = 15.0  # Tools run only once and make few of these calls.


class Crashed(BaseException):
    """The process died in the middle of a call."""


class SimState(State):
    """The real state on real files. Closing it makes it durable, without a sync by LMDB."""

    files: Files
    forget: Callable[[], object]

    def discard(self) -> None:
        super().discard()
        self.forget()

    def close(self) -> None:
        if self.files.process.up:  # A dead process closes nothing on its way out.
            super().close()
            self.files.sync_state(self.path)

    def vanish(self) -> None:
        """The process dies, and leaves the file unchanged."""
        self._env.close()


class File:
    """The durable content of one file, under any name; None until it is synced."""

    def __init__(self) -> None:
        self.synced: bytes | None = None


class Files:
    """One machine's directory."""

    def __init__(self, process: Process, root: Path) -> None:
        self.root = root
        self.process = process
        self._files: dict[Path, File] = {}  # In the kernel,
        self._durable: dict[Path, File | None] = {}  # and on the disk; None is a directory.
        self.root.mkdir()

    def _file(self, path: Path) -> File:
        return self._files.setdefault(path, File())

    # -- what the process does -------------------------------------------------------------------------------------------

    def sync(self, path: Path) -> None:
        if self.process.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if path.is_dir():
            self._sync_directory(path)
        else:
            self._file(path).synced = path.read_bytes()

    def _sync_directory(self, path: Path) -> None:
        with os.scandir(path) as entries:
            there = {entry.name: entry.is_dir() for entry in entries}
        for name, is_directory in there.items():
            self._durable[path / name] = None if is_directory else self._file(path / name)
        prefix = f"{path}{os.sep}"
        for known in [known for known in self._durable if str(known).startswith(prefix)]:
            if first_below(prefix, known) not in there:
                del self._durable[known]

    def sync_state(self, path: Path) -> None:
        self._file(path / DATA).synced = (path / DATA).read_bytes()
        self._sync_directory(path)

    def rename(self, source: Path, target: Path) -> None:
        if source in self._files:
            self._files[target] = self._files.pop(source)
        else:
            self._files.pop(target, None)

    def forget(self, path: Path) -> None:
        self._files.pop(path, None)

    # -- what happens to the machine -------------------------------------------------------------------------------------

    def lose_power(self, rng: Random) -> None:
        """Names: all that the kernel had, or only the synced ones. Bytes: the synced ones, or more."""
        tree: dict[Path, bytes | None] = {}
        if rng.random() < 0.5:
            for path in sorted(self.root.rglob("*")):
                if path.is_dir():
                    tree[path] = None
                    continue
                there, synced = path.read_bytes(), self._file(path).synced
                if path.name == DATA:  # LMDB itself would crash on missing pages; see `_mix`.
                    synced = there
                torn = there[: rng.randrange(len(there) + 1)]
                tree[path] = there if there == synced else rng.choice([there, torn, synced or b""])
        else:
            for path, file in sorted(self._durable.items()):
                if path.parent == self.root or path.parent in tree:
                    tree[path] = None if file is None else file.synced or b""
                    if path.name == DATA and path.exists():
                        tree[path] = path.read_bytes()
        shutil.rmtree(self.root)
        self.root.mkdir()
        self._files, self._durable = {}, {}
        for path, content in tree.items():
            if path.name == "lock.mdb":
                continue
            if content is None:
                path.mkdir()
                self._durable[path] = None
            else:
                path.write_bytes(content)
                self._durable[path] = self._file(path)
                self._file(path).synced = content
        for path in sorted(self.root.glob(f"state/*/{DATA}")):
            if b'"clean": true' not in _read(path.with_name("MARK")):
                _mix(path.parent)
                self._file(path).synced = path.read_bytes()

    def wipe(self, pattern: str) -> None:
        """Remove files of a process that is down."""
        for path in sorted(self.root.glob(pattern)):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        gone = [path for path in self._durable if not path.exists()]
        for path in gone:
            del self._durable[path]
            self._files.pop(path, None)

    def damage(self, rng: Random, pattern: str) -> None:
        for path in sorted(self.root.glob(pattern)):
            content = damaged(rng, path.read_bytes(), path.with_name(".damaging"))
            path.write_bytes(content)
            self._file(path).synced = content

    def durable_snapshot(self, directory: Path) -> int:
        """The index of the newest snapshot that survives a power loss intact, or 0."""
        found = 0
        for path, file in self._durable.items():
            if path.parent != directory or path.suffix != SUFFIX or file is None or not path.exists():
                continue
            if any(
                above not in self._durable for above in path.parents if above.is_relative_to(self.root / "snapshots")
            ):
                continue  # A power loss removes its directory.
            if path.read_bytes() == file.synced:
                with suppress(SnapshotError):
                    found = max(found, verify(path).header.meta.index)
        return found


def first_below(prefix: str, path: Path) -> str:
    """The name in a directory that a path leads through. `relative_to` takes ten times as long."""
    return str(path)[len(prefix) :].split(os.sep, 1)[0]


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def _mix(path: Path) -> None:
    """Old pages among the new ones: half of the changes are missing, and the applied index does not show it."""
    try:
        with lmdb.open(str(path), map_size=1 << 30, sync=False, lock=False) as env, env.begin(write=True) as txn:
            keys = [key for key, _ in txn.cursor() if key >= b"\x01"]
            for key in keys[::2]:
                txn.delete(key)
    except lmdb.Error:
        return  # It does not even open.


def _is_whole(content: bytes) -> bool:
    """Whether all pages exist: LMDB crashes on pages that earlier damage removed."""
    try:
        return decode(content[:BLOCK_BYTES], "a simulated file").file_bytes == len(content)
    except SnapshotError:
        return False


def damaged(rng: Random, content: bytes, scratch: Path) -> bytes:
    """A damaged snapshot file: a flipped bit in its header or its data, or a missing end.

    In the data it is a bit of a value: LMDB would not notice it, but a checksum must.
    """
    how = rng.choice(["header", "value", "value", "torn"])
    if how == "torn" or len(content) <= BLOCK_BYTES:
        return content[: rng.randrange(len(content) + 1)]
    at = rng.randrange(BLOCK_BYTES)
    if how == "value" and _is_whole(content):
        scratch.write_bytes(content[BLOCK_BYTES:])
        with lmdb.open(str(scratch), subdir=False, readonly=True, lock=False) as env, env.begin() as txn:
            values = [value for key, value in txn.cursor() if key >= b"\x01" and len(value) >= 4]
        scratch.unlink()
        if values:
            value = rng.choice(values)
            at = content.index(value, BLOCK_BYTES) + rng.randrange(len(value))
    turned = bytearray(content)
    turned[at] ^= 1 << rng.randrange(8)
    return bytes(turned)


class Disks:
    """The files of all machines of a world."""

    def __init__(self, world: World) -> None:
        self.world = world
        shm = SHM if os.access(SHM, os.W_OK) else None
        self.root = Path(tempfile.mkdtemp(prefix="holdfast-sim-", dir=shm))
        self.root_bytes = os.fsencode(self.root)
        self.files: dict[str, Files] = {}

    def of(self, process: Process) -> Files:
        files = self.files[process.name] = Files(process, self.root / process.name)
        return files

    def remove(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    def _find(self, path: Path) -> Files | None:
        prefix = f"{self.root}{os.sep}"
        return self.files.get(first_below(prefix, path)) if str(path).startswith(prefix) else None

    def _path(self, fd: int) -> Path:
        return Path(os.readlink(f"/proc/self/fd/{fd}"))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """File operations of the code go through here."""
        real_fsync, real_rename, real_unlink = os.fsync, os.rename, os.unlink

        def fsync(fd: int) -> None:
            path = self._path(fd)
            files = self._find(path)
            if files is None:
                real_fsync(fd)
            elif path.exists():  # Not deleted in the meantime.
                self.check(files, "fsync")
                files.sync(path)

        def rename(source: Any, target: Any, **options: Any) -> None:
            files = self._find(Path(target))
            if files is not None:
                self.check(files, "rename")
            real_rename(source, target, **options)
            if files is not None:
                files.rename(Path(source), Path(target))
                self.check(files, "renamed")

        def unlink(path: Any, *, dir_fd: int | None = None) -> None:
            whole = Path(path) if dir_fd is None else self._path(dir_fd) / path
            files = self._find(whole)
            if files is not None:
                self.check(files, "unlink")
            real_unlink(path, dir_fd=dir_fd)
            if files is not None:
                files.forget(whole)

        with ExitStack() as stack:
            for name, replacement in (("fsync", fsync), ("fdatasync", fsync), ("rename", rename), ("unlink", unlink)):
                stack.enter_context(patch.object(os, name, replacement))
            yield

    def check(self, files: Files, what: str) -> None:
        """The process dies here, or is already dead."""
        process = files.process
        if not process.up:
            if process.crashing:
                raise OSError(errno.EIO, "the process is gone")
            return  # The simulator itself does it.
        chance = self.world.profile.crashes * CRASHES[what] * (1.0 if process.tool is None else CRASHES_OF_TOOLS)
        if self.world.chance(f"crashed at {what}", chance):
            process.crash()
