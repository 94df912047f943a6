"""Ordered byte tables on the node's disk, with one writer and atomic durable batches (LMDB underneath).

The store knows nothing about Raft. The journal of all groups uses it, and the simulator replaces it with an
implementation of `Store` on a simulated disk. It never repairs: a damaged file is refused, by name.

Threads, and why this is safe. `stage` fills the write transaction on the loop thread, because each put releases the
GIL and a writer thread would have to wait for it every time. `commit` runs on a writer thread, because fsync blocks.
LMDB's own locks would tie a transaction to a thread, so they are off (`lock=False`) and three rules take their place.
One process: we hold an exclusive flock on the directory. One writer: no transaction begins while another is open or
being committed; operations staged in between wait in memory. Readers: every read happens under `_lock` on one read
transaction, which `commit` replaces by one on the new snapshot before the next write transaction can begin. So every
read sees the newest committed snapshot, and LMDB never reuses its pages while the next one is being written.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol, assert_never

import lmdb

from holdfast.log import lmdb_file
from holdfast.log.errors import Corrupt, NoSpace, StorageError, WrongDirectory
from holdfast.log.lmdb_file import DATA_FILE, IDENTITY_FILE, OWN_TABLE, EdgeOfLmdb, MapFull

KEY_BYTES_MAX = 511  # LMDB's bound on keys and on table names.

_MEASURE_EVERY_S = 0.2
_MEASURE_EVERY_BYTES = 4 << 20


class Put(NamedTuple):
    table: str
    key: bytes
    value: bytes


class Extend(NamedTuple):
    """Add items with ascending keys, expected after all others of the table. Pages are filled before new ones begin."""

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
    """A table exists while it holds a key. Reads see committed data, never data that is only staged."""

    def get(self, table: str, key: bytes) -> bytes | None: ...

    def part(self, table: str, key: bytes, offset: int, length: int) -> bytes | None:
        """Up to `length` bytes of a value from `offset` on. The rest of the value is not read."""
        ...

    def scan(self, table: str, low: bytes, high: bytes, *, bytes_max: int, count_max: int) -> list[tuple[bytes, bytes]]:
        """Items with low <= key < high, in order: as many as fit both bounds, but at least one if there is any."""
        ...

    def first(self, table: str) -> tuple[bytes, bytes] | None: ...

    def last(self, table: str) -> tuple[bytes, bytes] | None: ...

    def count(self, table: str) -> int: ...

    def tables(self) -> list[str]: ...

    def stage(self, ops: Sequence[Op]) -> None:
        """Add operations to the next commit. Call on the loop thread; does not wait for a running commit."""
        ...

    def commit(self) -> None:
        """Return when everything staged before the call is durable. Blocks; call on any thread.

        After `NoSpace` nothing of it is durable, all of it is kept, and calling again writes it. Every other error is final.
        """
        ...

    def room(self) -> str | None:
        """Why nothing more may be appended now; None if there is room."""
        ...

    def close(self) -> None:
        """Release the directory. Staged operations that were not committed are lost."""
        ...


class LmdbStore:
    """`Store` on a real directory: `data.mdb` (the tables), `IDENTITY` (proof that there must be tables) and `LOCK`."""

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
        """Open or create the directory of this node. `map_bytes` is the initial size of the map, which grows as needed."""
        file = path / DATA_FILE
        with EdgeOfLmdb(file):
            lmdb_file.make_directory(path)
            lmdb_file.refuse_foreign(path)
            lock_fd = lmdb_file.lock(path)
            try:
                return cls._open_locked(
                    path,
                    lock_fd,
                    node=node,
                    cluster=cluster,
                    bytes_max=bytes_max,
                    free_bytes_min=free_bytes_min,
                    map_bytes=map_bytes,
                )
            except BaseException:
                os.close(lock_fd)
                raise

    @classmethod
    def _open_locked(
        cls,
        path: Path,
        lock_fd: int,
        *,
        node: str,
        cluster: str,
        bytes_max: int,
        free_bytes_min: int,
        map_bytes: int,
    ) -> LmdbStore:
        file = path / DATA_FILE
        marker = lmdb_file.read_marker(path)
        if marker is not None:
            lmdb_file.check_owner(path, marker, node=node, cluster=cluster)
        if not file.exists():
            if marker is not None:
                # A wiped log under a known name is amnesia: the node would vote twice in one term.
                raise Corrupt(file, "the journal file is missing")
            lmdb_file.create(path, node=node, cluster=cluster)
        lmdb_file.inspect(file)
        env = lmdb_file.open_env(path, map_bytes=max(map_bytes, 2 * file.stat().st_size))
        try:
            identity, incarnation, tables = lmdb_file.enter(env, path, node=node, cluster=cluster)
            if marker is not None and marker["disk"] != identity["disk"]:
                raise WrongDirectory(
                    path,
                    f"{DATA_FILE} belongs to disk {identity['disk']}, but {IDENTITY_FILE} to disk {marker['disk']}",
                    "A file was replaced: restore the right one, or remove the directory and add the node again "
                    "under a new name",
                )
            if marker != identity:
                lmdb_file.write_marker(path, identity)
            store = cls(path, env, lock_fd, tables, bytes_max=bytes_max, free_bytes_min=free_bytes_min)
        except BaseException:
            env.close()
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
        self._file = path / DATA_FILE
        self._edge_of_lmdb = EdgeOfLmdb(self._file)
        self._env = env
        self._lock_fd = lock_fd
        self._closed = False
        self._failed: StorageError | None = None

        self._commit_lock = threading.Lock()  # Held for a whole commit: commits take turns, and `close` waits.
        self._lock = threading.Lock()  # Guards everything below; never held across an fsync.
        self._committing = False
        self._reader = env.begin(buffers=True)
        self._tables = tables  # Tables of the committed snapshot, without the hollow ones.
        self._hollow: set[str] = set()  # Dropped and committed tables; the next transaction frees the name.

        self._txn: lmdb.Transaction[bytes] | None = None
        self._staged: list[Op] = []  # Kept until a commit succeeds, so that they can be written again.
        self._filled = 0  # How many staged operations are in the transaction.
        self._opened: dict[str, lmdb._Database] = {}  # Tables that the transaction created.
        self._dropped: set[str] = set()  # Tables that the transaction dropped.

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
        """A value in the map, valid until the read transaction ends."""
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
                assert 0 < len(key) <= KEY_BYTES_MAX, f"key of {len(key)} bytes"
                size += len(key) + len(value)
            assert table != OWN_TABLE and 0 < len(table) <= KEY_BYTES_MAX, f"table {table!r} is not for callers"
        with self._lock:
            self._check_usable()
            self._staged.extend(ops)
            self._unmeasured_bytes += size
            if not self._committing:
                # A very large batch may spill to a full disk here. Everything is kept, and `commit` raises the error.
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
                    except MapFull:
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
        """Hand the filled transaction to `commit`, with the number of operations in it."""
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
            # After a failed fsync the kernel may drop the pages and report success for the next fsync.
            self._failed = error

    def _fill(self) -> None:
        """Add everything staged to the write transaction, growing the map as often as needed."""
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
            except MapFull:
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
        # LMDB closes a handle the moment its table is deleted, even for readers of the older snapshot. So `Drop` only
        # empties a table, and its name is deleted one transaction later, when no reader uses it.
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
        """Abort the write transaction; staged operations are kept."""
        if self._txn is not None:
            self._txn.abort()
            self._txn = None

    def _grow(self) -> None:
        self._reader.abort()  # No transaction may be open while the map moves.
        try:
            self._env.set_mapsize(2 * self._env.info()["map_size"])
        finally:
            self._reader = self._env.begin(buffers=True)

    def _turn_over(self, count: int) -> None:
        """The commit is durable: show it to readers and drop its staged operations."""
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
                f"{self._file} holds {live_bytes} bytes, and its limit is {self.bytes_max}: "
                "trim the log or raise the limit"
            )
        if self._measure_error is not None:
            return f"the free space of {self.path} is unknown: {self._measure_error}"
        free_bytes = self._free_bytes - self._unmeasured_bytes
        if free_bytes < self.free_bytes_min:
            return f"the disk of {self.path} has {free_bytes} bytes left, but {self.free_bytes_min} must stay free"
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
                # The file never shrinks, but pages freed by a trim are reused before it grows. If they did not count, a
                # journal that filled its disk would be refused for ever.
                reusable_bytes = self._file.stat().st_size - self._live_bytes
                disk = os.statvfs(self.path)
                self._free_bytes = disk.f_bavail * disk.f_frsize + max(reusable_bytes, 0)
                self._measure_error = None
            except OSError as error:
                self._measure_error = str(error)
        self._measure_due = time.monotonic() + _MEASURE_EVERY_S


def _items(op: Op) -> Sequence[tuple[bytes, bytes]]:
    """The items that an operation writes."""
    if type(op) is Extend:
        return op.items
    return ((op.key, op.value),) if type(op) is Put else ()


def _extend(txn: lmdb.Transaction[bytes], db: lmdb._Database, items: Sequence[tuple[bytes, bytes]]) -> None:
    # Without the hint LMDB splits a full page in the middle, and a log would use half of each page.
    if len(items) == 1:
        ((key, value),) = items
        fits = txn.put(key, value, db=db, append=True)
    else:
        with txn.cursor(db=db) as cursor:
            fits = cursor.putmulti(items, append=True)[1] == len(items)
    if not fits:  # LMDB skips items that do not come after the last key.
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
            while b"" < cursor.key() < high:  # The key is empty after the last item.
                cursor.delete()
    if whole:
        txn.drop(db, delete=False)  # Frees whole pages instead of single items.
