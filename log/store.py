"""Ordered byte tables on the node's disk, with one writer and atomic durable batches (LMDB underneath).

It knows nothing of Raft: the journal of all groups sits on it, and the simulator puts a twin of `Store` over a
simulated disk in its place. It never repairs: a file that is not what was written is refused, by name.

Who may do what, and why that is safe. `stage` fills the write transaction on the loop thread, because each put
releases the GIL and a writer thread would wait for it again every time; `commit` goes to a writer thread, because
fsync blocks. LMDB's own locks would tie a transaction to a thread, so they are off (`lock=False`) and three rules
take their place. One process: we hold an exclusive flock on the directory. One writer: no transaction begins while
another is open or being committed; what is staged meanwhile waits in memory. Readers: every read happens under
`_lock` on one read transaction, which `commit` replaces by one of the new snapshot before the next write
transaction can begin. So whoever reads, reads the newest committed snapshot, and LMDB never reuses pages of that
one while the next is being written.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
import struct
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol, assert_never

import lmdb

from holdfast.log.errors import (
    Corrupt,
    DirectoryInUse,
    DiskFailed,
    NoSpace,
    StorageError,
    WrongDirectory,
    WrongVersion,
)

FORMAT = 4
FORMATS_READ = (2, 3, FORMAT)  # 2 had no rows (`log/rows.py`), and 3 moved out of them what tables now only point to.
KEY_BYTES_MAX = 511  # LMDB's bound on keys and on names of tables.
TABLES_MAX = 4096

_OWN_TABLE = "node"  # Who owns the directory; hidden from callers.
_IDENTITY = b"identity"
_INCARNATION = b"incarnation"

_LOCK_FILE = "LOCK"
_IDENTITY_FILE = "IDENTITY"
_DATA_FILE = "data.mdb"
_CREATING = "creating"
_HARMLESS = {"lost+found", _LOCK_FILE, _IDENTITY_FILE + ".new", _CREATING}

_MEASURE_EVERY_S = 0.2
_MEASURE_EVERY_BYTES = 4 << 20
_FULL_BYTES = 1 << 20
_OUT_OF_SPACE = {errno.ENOSPC, errno.EDQUOT}
_DAMAGE = (
    lmdb.BadTxnError,  # What every read says after the first one met damage.
    lmdb.CorruptedError,
    lmdb.CursorFullError,
    lmdb.IncompatibleError,
    lmdb.InvalidError,
    lmdb.NotFoundError,
    lmdb.PageFullError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
)


class Put(NamedTuple):
    table: str
    key: bytes
    value: bytes


class Extend(NamedTuple):
    """Items whose keys rise and are expected behind all others of the table: pages are filled before a new one begins."""

    table: str
    items: Sequence[tuple[bytes, bytes]]


class Cut(NamedTuple):
    """Delete low <= key < high."""

    table: str
    low: bytes
    high: bytes


class Drop(NamedTuple):
    table: str


Op = Put | Extend | Cut | Drop


class Store(Protocol):
    """A table is there as long as it holds a key. Reads see what is committed, never what is only staged."""

    def get(self, table: str, key: bytes) -> bytes | None: ...

    def part(self, table: str, key: bytes, offset: int, length: int) -> bytes | None:
        """Of a value so many bytes from there on, or those that it has; the rest of it is not read."""
        ...

    def scan(self, table: str, low: bytes, high: bytes, *, bytes_max: int, count_max: int) -> list[tuple[bytes, bytes]]:
        """Items with low <= key < high in order, as many as fit both bounds, but at least one if there is one."""
        ...

    def first(self, table: str) -> tuple[bytes, bytes] | None: ...

    def last(self, table: str) -> tuple[bytes, bytes] | None: ...

    def count(self, table: str) -> int: ...

    def tables(self) -> list[str]: ...

    def stage(self, ops: Sequence[Op]) -> None:
        """Add to the next commit. On the loop thread; does not wait for a commit under way."""
        ...

    def commit(self) -> None:
        """Return when all that was staged before the call is durable. Blocks; any thread.

        After `NoSpace` nothing of it is durable, all of it is kept, and calling again writes it. Every other
        error is final.
        """
        ...

    def room(self) -> str | None:
        """None, or why nothing more may be appended now."""
        ...

    def close(self) -> None:
        """Let go of the directory. What was staged and not committed is gone."""
        ...


class LmdbStore:
    """`Store` on a real directory: `data.mdb` (the tables), `IDENTITY` (that there must be one), `LOCK`."""

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        node: str,
        cluster: str,
        bytes_max: int = 16 << 30,
        free_bytes_min: int = 64 << 20,
        map_bytes: int = 1 << 30,
    ) -> LmdbStore:
        """Open the directory of this node, or make one. `map_bytes` is where the map starts; it grows by itself."""
        file = path / _DATA_FILE
        with _EdgeOfLmdb(file):
            _make_directory(path)
            _refuse_foreign(path)
            lock_fd = _lock(path)
            try:
                marker = _read_marker(path)
                if marker is not None:
                    _check_owner(path, marker, node=node, cluster=cluster)
                if not file.exists():
                    if marker is not None:
                        # A wiped log under a known name is amnesia: the node would vote a second time.
                        raise Corrupt(file, "the journal file is missing")
                    _create(path, node=node, cluster=cluster)
                _inspect(file)
                env = _open_env(path, map_bytes=max(map_bytes, 2 * file.stat().st_size))
                try:
                    identity, incarnation, tables = _enter(env, path, node=node, cluster=cluster)
                    if marker is not None and marker["disk"] != identity["disk"]:
                        raise WrongDirectory(
                            path,
                            f"{_DATA_FILE} is of disk {identity['disk']}, {_IDENTITY_FILE} of disk {marker['disk']}",
                            "Someone replaced a file: put the right one back, or remove the directory and add the "
                            "node again under a new name",
                        )
                    if marker != identity:
                        _write_marker(path, identity)
                    store = cls(path, env, lock_fd, tables, bytes_max=bytes_max, free_bytes_min=free_bytes_min)
                except BaseException:
                    env.close()
                    raise
            except BaseException:
                os.close(lock_fd)
                raise
        store.disk = str(identity["disk"])
        store.incarnation = incarnation
        return store

    def __init__(
        self,
        path: Path,
        env: lmdb.Environment,
        lock_fd: int,
        tables: dict[str, lmdb._Database],
        *,
        bytes_max: int,
        free_bytes_min: int,
    ) -> None:
        """Use `open`."""
        self.path = path
        self.bytes_max = bytes_max
        self.free_bytes_min = free_bytes_min
        self.disk = ""
        self.incarnation = 0
        self._file = path / _DATA_FILE
        self._edge_of_lmdb = _EdgeOfLmdb(self._file)
        self._env = env
        self._lock_fd = lock_fd
        self._closed = False
        self._failed: StorageError | None = None

        self._commit_lock = threading.Lock()  # Held for a whole commit: commits take turns, `close` waits.
        self._lock = threading.Lock()  # Guards all below; never held across an fsync.
        self._committing = False
        self._reader = env.begin(buffers=True)
        self._tables = tables  # Of the committed snapshot, without the hollow ones.
        self._hollow: set[str] = set()  # Dropped and committed; the next transaction gives the name back.

        self._txn: lmdb.Transaction[bytes] | None = None
        self._staged: list[Op] = []  # Kept until a commit succeeded, so that it can be written again.
        self._filled = 0  # How many of them are in the transaction.
        self._opened: dict[str, lmdb._Database] = {}  # Tables that the transaction made.
        self._dropped: set[str] = set()  # Tables that it dropped.

        self._unmeasured_bytes = 0
        self._measure_due = 0.0
        self._live_bytes = 0
        self._free_bytes = 0
        self._measure_error: str | None = None

    # Reading

    def get(self, table: str, key: bytes) -> bytes | None:
        with self._lock, self._edge_of_lmdb:
            found = self._value(table, key)
            return None if found is None else bytes(found)

    def part(self, table: str, key: bytes, offset: int, length: int) -> bytes | None:
        with self._lock, self._edge_of_lmdb:
            found = self._value(table, key)
            return None if found is None else bytes(found[offset : offset + length])

    def _value(self, table: str, key: bytes) -> memoryview | None:
        """In the map, as long as the read transaction lasts."""
        db = self._find(table)
        return None if db is None else self._reader.get(key, db=db)

    def scan(self, table: str, low: bytes, high: bytes, *, bytes_max: int, count_max: int) -> list[tuple[bytes, bytes]]:
        items: list[tuple[bytes, bytes]] = []
        with self._lock, self._edge_of_lmdb:
            db = self._find(table)
            if db is None:
                return items
            with self._reader.cursor(db) as cursor:
                if not cursor.set_range(low):
                    return items
                size = 0
                for found, value in cursor:
                    key = bytes(found)
                    size += len(key) + len(value)
                    if key >= high or (items and (size > bytes_max or len(items) >= count_max)):
                        break
                    items.append((key, bytes(value)))
        return items

    def first(self, table: str) -> tuple[bytes, bytes] | None:
        return self._edge(table, last=False)

    def last(self, table: str) -> tuple[bytes, bytes] | None:
        return self._edge(table, last=True)

    def count(self, table: str) -> int:
        with self._lock, self._edge_of_lmdb:
            db = self._find(table)
            return 0 if db is None else self._reader.stat(db)["entries"]

    def tables(self) -> list[str]:
        with self._lock, self._edge_of_lmdb:
            assert not self._closed
            return sorted(name for name, db in self._tables.items() if self._reader.stat(db)["entries"])

    def _edge(self, table: str, *, last: bool) -> tuple[bytes, bytes] | None:
        with self._lock, self._edge_of_lmdb:
            db = self._find(table)
            if db is None:
                return None
            with self._reader.cursor(db) as cursor:
                if not (cursor.last() if last else cursor.first()):
                    return None
                return bytes(cursor.key()), bytes(cursor.value())

    def _find(self, table: str) -> lmdb._Database | None:
        assert not self._closed, "the store is closed"
        return self._tables.get(table)

    # Writing

    def stage(self, ops: Sequence[Op]) -> None:
        size = 0
        for op in ops:
            table = op.table
            for key, value in _items(op):
                assert 0 < len(key) <= KEY_BYTES_MAX, f"a key of {len(key)} bytes"
                size += len(key) + len(value)
            assert table != _OWN_TABLE and 0 < len(table) <= KEY_BYTES_MAX, f"no table for callers: {table!r}"
        with self._lock:
            self._check_usable()
            self._staged.extend(ops)
            self._unmeasured_bytes += size
            if not self._committing:
                # A very large batch may spill to a full disk already here. All is kept, and `commit` will say so.
                with suppress(NoSpace):
                    self._fill()

    def commit(self) -> None:
        with self._commit_lock:
            with self._lock:
                self._check_usable()
                if not self._staged:
                    return
                self._fill()
                txn, count = self._take_txn()
                self._committing = True
            try:
                while True:
                    try:
                        with self._edge_of_lmdb:
                            txn.commit()
                        break
                    except _MapFull:
                        with self._lock, self._edge_of_lmdb:
                            self._abandon()
                            self._grow()
                            self._fill()
                            txn, count = self._take_txn()
                with self._lock, self._edge_of_lmdb:
                    self._turn_over(count)
            except StorageError as error:
                with self._lock:
                    self._abandon()
                    self._note(error)
                raise
            finally:
                with self._lock:
                    self._committing = False

    def close(self) -> None:
        with self._commit_lock, self._lock:
            if self._closed:
                return
            self._closed = True
            self._abandon()
            self._reader.abort()
            self._env.close()
            os.close(self._lock_fd)

    def _take_txn(self) -> tuple[lmdb.Transaction[bytes], int]:
        """The filled transaction and how much is in it. From here on only `commit` knows it."""
        assert self._txn is not None and self._filled == len(self._staged)
        txn, self._txn = self._txn, None
        return txn, self._filled

    def _check_usable(self) -> None:
        assert not self._closed, "the store is closed"
        if self._failed is not None:
            raise self._failed

    def _note(self, error: StorageError) -> None:
        self._measure_due = 0.0
        if not error.retryable:
            # After a failed fsync the kernel may drop the pages and call the next fsync a success.
            self._failed = error

    def _fill(self) -> None:
        """Bring everything staged into the write transaction, however often the map must grow for it."""
        map_full = False
        while True:
            try:
                with self._edge_of_lmdb:
                    if map_full:
                        self._grow()
                    txn = self._txn or self._begin()
                    for op in self._staged[self._filled :]:
                        self._execute(txn, op)
                    self._filled = len(self._staged)
                    return
            except _MapFull:
                self._abandon()
                map_full = True
            except StorageError as error:
                self._abandon()
                self._note(error)
                raise

    def _begin(self) -> lmdb.Transaction[bytes]:
        self._filled = 0
        self._opened.clear()
        self._dropped.clear()
        txn = self._txn = self._env.begin(write=True)
        # LMDB closes a handle the moment its table is deleted, even for readers of the older snapshot. So `Drop`
        # only empties a table, and its name goes one transaction later, when no reader asks for it any more.
        for name in self._hollow:
            txn.drop(self._env.open_db(name.encode(), txn=txn, create=False), delete=True)
        return txn

    def _execute(self, txn: lmdb.Transaction[bytes], op: Op) -> None:
        db = self._opened.get(op.table) or self._tables.get(op.table)
        match op:
            case Put():
                if db is None:
                    db = self._opened[op.table] = self._env.open_db(op.table.encode(), txn=txn)
                self._dropped.discard(op.table)
                txn.put(op.key, op.value, db=db)
            case Extend():
                if db is None:
                    db = self._opened[op.table] = self._env.open_db(op.table.encode(), txn=txn)
                self._dropped.discard(op.table)
                _extend(txn, db, op.items)
            case Cut():
                if db is not None:
                    _cut(txn, db, op.low, op.high)
            case Drop():
                if db is not None:
                    txn.drop(db, delete=False)
                    self._dropped.add(op.table)
            case _:
                assert_never(op)

    def _abandon(self) -> None:
        """Forget the write transaction, not what was staged."""
        if self._txn is not None:
            self._txn.abort()
            self._txn = None

    def _grow(self) -> None:
        self._reader.abort()  # No transaction at all may be open while the map moves.
        try:
            self._env.set_mapsize(2 * self._env.info()["map_size"])
        finally:
            self._reader = self._env.begin(buffers=True)

    def _turn_over(self, count: int) -> None:
        """The commit is durable: show it to readers and forget what was staged for it."""
        self._reader.abort()
        self._reader = self._env.begin(buffers=True)
        self._tables.update(self._opened)
        for name in self._dropped:
            del self._tables[name]
        self._hollow = set(self._dropped)
        del self._staged[:count]

    # Room

    def room(self) -> str | None:
        if self._unmeasured_bytes >= _MEASURE_EVERY_BYTES or time.monotonic() >= self._measure_due:
            self._measure()
        live_bytes = self._live_bytes + self._unmeasured_bytes
        if live_bytes >= self.bytes_max:
            return (
                f"{self._file} holds {live_bytes} bytes, its bound is {self.bytes_max}: "
                "it must be trimmed or the bound raised"
            )
        if self._measure_error is not None:
            return f"the free space of {self.path} is unknown: {self._measure_error}"
        free_bytes = self._free_bytes - self._unmeasured_bytes
        if free_bytes < self.free_bytes_min:
            return f"the disk of {self.path} has {free_bytes} bytes left, {self.free_bytes_min} must stay free"
        return None

    def _measure(self) -> None:
        with self._lock, self._edge_of_lmdb:
            assert not self._closed, "the store is closed"
            stats = [self._reader.stat(db) for db in self._tables.values()]
            page_bytes = self._env.stat()["psize"]
            self._live_bytes = page_bytes * sum(
                stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats
            )
            self._unmeasured_bytes = sum(len(key) + len(value) for op in self._staged for key, value in _items(op))
            try:
                # The file never shrinks, but pages freed by a trim are written again before it grows. If they
                # did not count, a journal that filled its disk would be refused for ever.
                reusable_bytes = self._file.stat().st_size - self._live_bytes
                disk = os.statvfs(self.path)
                self._free_bytes = disk.f_bavail * disk.f_frsize + max(reusable_bytes, 0)
                self._measure_error = None
            except OSError as error:
                self._measure_error = str(error)
        self._measure_due = time.monotonic() + _MEASURE_EVERY_S


def _items(op: Op) -> Sequence[tuple[bytes, bytes]]:
    """What an op writes."""
    if type(op) is Extend:
        return op.items
    return ((op.key, op.value),) if type(op) is Put else ()


def _extend(txn: lmdb.Transaction[bytes], db: lmdb._Database, items: Sequence[tuple[bytes, bytes]]) -> None:
    # Without the hint LMDB splits a full page in the middle, and a log would fill half of each page.
    if len(items) == 1:
        ((key, value),) = items
        fits = txn.put(key, value, db=db, append=True)
    else:
        with txn.cursor(db=db) as cursor:
            fits = cursor.putmulti(items, append=True)[1] == len(items)
    if not fits:  # LMDB leaves out what is not behind the last key.
        for key, value in items:
            txn.put(key, value, db=db)


def _cut(txn: lmdb.Transaction[bytes], db: lmdb._Database, low: bytes, high: bytes) -> None:
    with txn.cursor(db) as cursor:
        if not cursor.set_range(low):
            return
        key = cursor.key()
        whole = cursor.last() and cursor.key() < high and cursor.first() and cursor.key() == key
        if not whole:
            cursor.set_key(key)
            while b"" < cursor.key() < high:  # The key is empty behind the last item.
                cursor.delete()
    if whole:
        txn.drop(db, delete=False)  # By pages, not by items.


class _MapFull(Exception):
    """Never leaves this module: the map grows and the work is done again."""


class _EdgeOfLmdb:
    """The one boundary where errors of LMDB and of the operating system become ours."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        if isinstance(error, lmdb.MapFullError):
            raise _MapFull from error
        if isinstance(error, lmdb.Error):
            code = error.code
        elif isinstance(error, OSError):
            code = error.errno or 0
        else:
            return
        if isinstance(error, _DAMAGE):
            raise Corrupt(self.file, f"the file is damaged ({error})") from error
        if is_out_of_space(code, self.file.parent):
            raise NoSpace(self.file, f"the disk is full ({error})") from error
        raise DiskFailed(self.file, f"the operation failed ({error})") from error


def is_out_of_space(code: int, path: Path) -> bool:
    """Whether an operation on an environment in `path` failed because the disk is full.

    LMDB calls a write that did not fit whole an I/O error. Writing again is safe even if it was a real one: all pages of the
    batch are written anew, and LMDB refuses to go on after a failed write of its header.
    """
    if code != errno.EIO:
        return code in _OUT_OF_SPACE
    try:
        disk = os.statvfs(path)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < _FULL_BYTES


# The directory


def _make_directory(path: Path) -> None:
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)
        _sync_directory(directory.parent)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _refuse_foreign(path: Path) -> None:
    """Before anything is written into it: a directory with files but without a journal is someone else's."""
    names = set(os.listdir(path))
    strangers = sorted(names - _HARMLESS)
    if strangers and not names & {_DATA_FILE, _IDENTITY_FILE}:
        raise WrongDirectory(
            path,
            f"not empty, and not a data directory of Holdfast (it holds {', '.join(strangers[:3])})",
            "Give this node an empty directory or one that does not exist yet",
        )


def _lock(path: Path) -> int:
    fd = os.open(path / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 32, 0).strip()
        os.close(fd)
        raise DirectoryInUse(path, int(holder) if holder.isdigit() else None) from None
    except BaseException:
        os.close(fd)
        raise
    os.ftruncate(fd, 0)
    os.pwrite(fd, b"%d\n" % os.getpid(), 0)
    return fd


def _create(path: Path, *, node: str, cluster: str) -> None:
    """Make the journal file aside and move it into place whole: a crash leaves either none or a complete one."""
    creating = path / _CREATING
    shutil.rmtree(creating, ignore_errors=True)
    creating.mkdir()
    identity = {"format": FORMAT, "node": node, "cluster": cluster, "disk": secrets.token_hex(16)}
    env = _open_env(creating, map_bytes=1 << 20)
    try:
        with env.begin(write=True) as txn:
            own = env.open_db(_OWN_TABLE.encode(), txn=txn)
            txn.put(_IDENTITY, json.dumps(identity).encode(), db=own)
            txn.put(_INCARNATION, bytes(8), db=own)
    finally:
        env.close()
    (creating / _DATA_FILE).rename(path / _DATA_FILE)
    _sync_directory(path)
    creating.rmdir()


def _read_marker(path: Path) -> dict[str, object] | None:
    file = path / _IDENTITY_FILE
    try:
        return _parse_identity(file, file.read_bytes())
    except FileNotFoundError:
        return None


def _parse_identity(file: Path, text: bytes) -> dict[str, object]:
    try:
        identity = json.loads(text)
    except ValueError:
        raise Corrupt(file, "the record of who owns the directory is damaged") from None
    if not isinstance(identity, dict):
        raise Corrupt(file, "the record of who owns the directory is damaged")
    if identity.get("format") not in FORMATS_READ:
        raise WrongVersion(file, found=identity.get("format"), understood=FORMAT)
    if not all(isinstance(identity.get(name), str) for name in ("node", "cluster", "disk")):
        raise Corrupt(file, "the record of who owns the directory is damaged")
    return identity


def _write_marker(path: Path, identity: dict[str, object]) -> None:
    draft = path / (_IDENTITY_FILE + ".new")
    with draft.open("wb") as file:
        file.write(json.dumps(identity).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path / _IDENTITY_FILE)
    _sync_directory(path)


def _check_owner(path: Path, identity: dict[str, object], *, node: str, cluster: str) -> None:
    if (identity["node"], identity["cluster"]) != (node, cluster):
        raise WrongDirectory(
            path,
            f"the directory belongs to node {identity['node']!r} of cluster {identity['cluster']!r}, "
            f"this is node {node!r} of cluster {cluster!r}",
            "Give this node its own directory, or start it under the name and in the cluster the directory belongs to",
        )


# The file


def _open_env(path: Path, *, map_bytes: int) -> lmdb.Environment:
    return lmdb.open(
        os.fspath(path),
        map_size=map_bytes,
        max_dbs=TABLES_MAX,
        lock=False,
        lib_version=0,  # `_inspect` reads the layout of LMDB 0.9.
    )


def _enter(
    env: lmdb.Environment, path: Path, *, node: str, cluster: str
) -> tuple[dict[str, object], int, dict[str, lmdb._Database]]:
    """Count this incarnation durably, if the file is ours; return identity, incarnation and the open tables."""
    file = path / _DATA_FILE
    tables: dict[str, lmdb._Database] = {}
    with env.begin(write=True) as txn:
        try:
            names = [key.decode() for key, _ in txn.cursor()]
        except UnicodeDecodeError:
            raise Corrupt(file, "the list of tables is damaged") from None
        if _OWN_TABLE not in names:
            raise Corrupt(file, "the record of who owns the directory is missing")
        own = env.open_db(_OWN_TABLE.encode(), txn=txn, create=False)
        identity = _parse_identity(file, txn.get(_IDENTITY, b"", db=own))
        _check_owner(path, identity, node=node, cluster=cluster)
        if identity["format"] != FORMAT:
            identity["format"] = FORMAT
            txn.put(_IDENTITY, json.dumps(identity).encode(), db=own)
        incarnations = txn.get(_INCARNATION, b"", db=own)
        if len(incarnations) != 8:
            raise Corrupt(file, "the count of incarnations is damaged")
        incarnation = int.from_bytes(incarnations) + 1
        txn.put(_INCARNATION, incarnation.to_bytes(8), db=own)
        for name in names:
            if name == _OWN_TABLE:
                continue
            db = env.open_db(name.encode(), txn=txn, create=False)
            if txn.stat(db)["entries"]:
                tables[name] = db
            else:
                txn.drop(db, delete=True)
    return identity, incarnation, tables


_MAGIC = 0xBEEFC0DE
_LAYOUT = 1
_PAGE_SIZES = {1 << power for power in range(9, 17)}
_NO_PAGE = (1 << 64) - 1
_BRANCH, _HEADER = 0x01, 0x08  # Kinds of pages.
_ELSEWHERE = 0x01  # A node whose data is in pages of its own.
_PAGE = struct.Struct("=QHHHH")  # number, padding, kind, end of the pointers, start of the nodes
_META = struct.Struct(
    "=II16xI36xQ48xQQ"
)  # magic, layout, size of a page, root of the free list, last page, transaction
_NODE = struct.Struct("=HHHH")  # size of the data (low, high), flags, size of the key; in a branch a page number
_NUMBER = struct.Struct("=Q")


class _Meta(NamedTuple):
    page_bytes: int
    free_root: int
    last_page: int
    transaction: int


def _inspect(file: Path) -> None:
    """Refuse a damaged header or a torn file before LMDB maps it.

    LMDB takes an empty file for a new one, dies of SIGBUS behind the end of a torn one, and goes back to the
    older of its two headers, which is to forget acknowledged entries, if a flipped bit makes that one look newer.
    """
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        zero = _read_meta(file, fd, number=0, offset=0)
        one = _read_meta(file, fd, number=1, offset=zero.page_bytes)
        # They are written in turns, so they are one transaction apart.
        if one.page_bytes != zero.page_bytes or abs(one.transaction - zero.transaction) != 1:
            raise Corrupt(file, "the two headers contradict each other")
        newest = max(zero, one, key=lambda meta: meta.transaction)
        pages = os.fstat(fd).st_size // newest.page_bytes
        missing = newest.last_page + 1 - pages
        # LMDB does not write pages that were used and freed in one transaction, so a sound file may end before
        # its last page: if what is missing is free.
        if missing > 0:
            free = {page for page in _free_pages(file, fd, newest, pages) if pages <= page <= newest.last_page}
            if len(free) < missing:
                raise Corrupt(file, f"the file is torn: {missing - len(free)} pages are cut off at its end")
    finally:
        os.close(fd)


def _read_meta(file: Path, fd: int, *, number: int, offset: int) -> _Meta:
    block = os.pread(fd, _PAGE.size + _META.size, offset)
    if len(block) < _PAGE.size + _META.size:
        raise Corrupt(file, "the file is torn: it ends inside its header")
    page, _, kind, _, _ = _PAGE.unpack_from(block)
    magic, layout, page_bytes, free_root, last_page, transaction = _META.unpack_from(block, _PAGE.size)
    sound = (page, kind & _HEADER, magic, layout, transaction & 1) == (
        number,
        _HEADER,
        _MAGIC,
        _LAYOUT,
        number,
    ) and page_bytes in _PAGE_SIZES
    if not sound:
        raise Corrupt(file, f"header {number} of the file is damaged")
    return _Meta(page_bytes, free_root, last_page, transaction)


def _free_pages(file: Path, fd: int, meta: _Meta, pages: int) -> Iterator[int]:
    """The pages in the free list, a tree of its own, read without the map."""
    torn = Corrupt(file, "the file is torn: its list of free pages is cut off")
    waiting = [] if meta.free_root == _NO_PAGE else [meta.free_root]
    for _ in range(pages):  # A damaged tree may hold a circle.
        if not waiting:
            return
        page = waiting.pop()
        if page >= pages:
            raise torn
        block = os.pread(fd, meta.page_bytes, page * meta.page_bytes)
        try:
            _, _, kind, pointers_end, _ = _PAGE.unpack_from(block)
            for pointer in range(_PAGE.size, pointers_end, 2):
                node = int.from_bytes(block[pointer : pointer + 2], sys.byteorder)
                low, high, flags, key_bytes = _NODE.unpack_from(block, node)
                if kind & _BRANCH:
                    waiting.append(low | high << 16 | flags << 32)
                    continue
                place = node + _NODE.size + key_bytes
                data = block[place : place + (low | high << 16)]
                if flags & _ELSEWHERE:
                    start = _NUMBER.unpack_from(block, place)[0]
                    if start >= pages:
                        raise torn
                    data = os.pread(fd, low | high << 16, start * meta.page_bytes + _PAGE.size)
                count = _NUMBER.unpack_from(data)[0]
                yield from memoryview(data)[_NUMBER.size :].cast("Q")[:count]
        except (struct.error, TypeError, OverflowError):
            raise Corrupt(file, "its list of free pages is damaged") from None
