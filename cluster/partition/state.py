"""The state of one partition on disk: an LMDB environment, and a mark that says whether it can be trusted.

The log is the truth. The state is not fsynced with every batch: a killed process leaves it whole, because the kernel
still has every page, but a machine that lost power may leave any mixture of old and new pages. So a mark next to the
environment holds the boot id of the machine that opened it. If the boot id differs on the next open, and the state was
not closed cleanly, the state is discarded and rebuilt from the newest snapshot and the log. It is never repaired, and
never trusted just because it looks intact.

A snapshot replaces the state by one rename of a file that is durable already (`swap`), so a crash leaves the old state
or the new one. The mark is unchanged: it says which machine writes here and that the state is open, and both remain
true. After a power loss, the old and the new state alike are discarded.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Protocol, Self

import lmdb
import msgpack

from holdfast.log.errors import DiskFailed, NoSpace, WrongVersion
from holdfast.log.lmdb_file import PRIVATE_DIRECTORY, is_out_of_space
from holdfast.snapshots.files import PRIVATE_FILE, open_private
from holdfast.snapshots.restore import Staged, remove_staged
from holdfast.statemachine.tables import SCHEMA

logger = logging.getLogger(__name__)

FORMAT: Final = 1
MAP_BYTES: Final = 4 << 30  # Initial size of the map: address space, not memory or disk. It grows as needed.
READERS_MAX: Final = 512

_MARK: Final = "MARK"
_DATA: Final = "data.mdb"
_APPLIED: Final = b"\x00applied"
_SCHEMA: Final = b"\x00schema"
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """An id that changes with every boot of the machine. Where it is unavailable, only a clean close is trusted."""
    with suppress(OSError):
        return _BOOT_ID.read_text().strip()
    return f"unknown-{uuid.uuid4()}"


class LmdbTxn:
    """One flat, ordered key space inside an LMDB transaction: the state machine's interface."""

    __slots__ = ("delete", "get", "put", "raw")

    def __init__(self, raw: lmdb.Transaction[bytes]) -> None:
        self.raw = raw
        self.get = raw.get
        self.put = raw.put
        self.delete = raw.delete

    def scan(self, low: bytes, high: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Items with low <= key < high, in order. Writes ahead of the position are seen."""
        with self.raw.cursor() as cursor:
            if cursor.set_range(low):
                for item in cursor:
                    if item[0] >= high:
                        return
                    yield item

    def scan_back(self, low: bytes, high: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The same items, last first."""
        with self.raw.cursor() as cursor:
            found = cursor.prev() if cursor.set_range(high) else cursor.last()
            while found and (key := cursor.key()) >= low:
                yield key, cursor.value()
                found = cursor.prev()


class Condition(Protocol):
    """Of `threading.Condition`, what is used."""

    def __enter__(self) -> object: ...

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> object: ...

    def notify_all(self) -> None: ...

    def wait_for(self, predicate: Callable[[], bool], /) -> object: ...


class State:
    """Use `open`. Everything runs on the event loop's thread; a read transaction never outlives the call that began it.

    The exception is a thread that borrows the environment for a long copy (`lend`).
    """

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        owner: str,
        boot: str,
        map_bytes: int = MAP_BYTES,
        restore: Callable[[Path], object] = lambda _: None,
        condition: Callable[[], Condition] = threading.Condition,
    ) -> Self:
        """Open a state. `owner` names the log that it must belong to.

        `restore` puts the newest snapshot, if there is one, into an empty directory.
        """
        path.parent.mkdir(parents=True, exist_ok=True, mode=PRIVATE_DIRECTORY)
        path.mkdir(exist_ok=True, mode=PRIVATE_DIRECTORY)
        remove_staged(path)
        doubt = _doubt(path, owner=owner, boot=boot)
        if doubt is None:
            _write_mark(path, owner=owner, boot=boot, clean=False)
            try:
                return cls(path, owner=owner, boot=boot, map_bytes=map_bytes, condition=condition)
            except (lmdb.Error, ValueError) as error:
                doubt = f"it cannot be read: {error}"
        if (path / _DATA).exists():
            logger.warning("%s: rebuilding the state, because %s", path, doubt)
        shutil.rmtree(path)
        path.mkdir(mode=PRIVATE_DIRECTORY)
        restore(path)  # Before the mark: without a mark the state is not trusted.
        _write_mark(path, owner=owner, boot=boot, clean=False)
        return cls(path, owner=owner, boot=boot, map_bytes=map_bytes, condition=condition)

    def __init__(
        self,
        path: Path,
        *,
        owner: str,
        boot: str,
        map_bytes: int,
        condition: Callable[[], Condition] = threading.Condition,
    ) -> None:
        self.path = path
        self._owner = owner
        self._boot = boot
        self._readers = 0
        self._map_bytes = map_bytes
        self._loans: dict[int, Callable[[], None]] = {}
        self._returned = condition()
        self._open()

    def _open(self) -> None:
        file = self.path / _DATA
        size = file.stat().st_size if file.exists() else 0
        self._env = lmdb.open(
            str(self.path),
            map_size=max(self._map_bytes, 2 * size),
            mode=PRIVATE_FILE,
            sync=False,
            metasync=False,
            readahead=False,
            max_readers=READERS_MAX,
            max_spare_txns=4,
        )
        try:
            self._env.reader_check()
            pages = self._env.info()["last_pgno"] + 1
            if size and size < pages * self._env.stat()["psize"]:
                raise ValueError(
                    f"the file has {size} bytes, but {pages} pages"
                )  # Reading beyond the end would raise SIGBUS.
            with self._env.begin() as txn:
                self.applied, self.schema = read_applied(txn), read_schema(txn)
            if self.schema > SCHEMA:
                raise WrongVersion(self.path, found=self.schema, understood=SCHEMA)
        except BaseException:
            self._env.close()
            raise

    def begin(self) -> LmdbTxn:
        """Begin the only write transaction. End it with `commit` or `abort`."""
        return LmdbTxn(self._env.begin(write=True))

    def commit(self, txn: LmdbTxn, applied: tuple[int, int], *, schema: int = SCHEMA) -> None:
        txn.put(_APPLIED, msgpack.packb(applied))
        if self.schema != schema:
            txn.put(_SCHEMA, msgpack.packb(schema))
        txn.raw.commit()
        self.applied, self.schema = applied, schema

    def abort(self, txn: LmdbTxn) -> None:
        txn.raw.abort()

    def translate(self, error: lmdb.Error) -> Exception:
        """Translate an error of a write to ours. After `NoSpace`, the transaction had no effect."""
        if is_out_of_space(error.code, self.path):
            return NoSpace(self.path, f"the disk is full ({error})")
        return DiskFailed(self.path, f"the state cannot be written ({error})")

    def grow(self) -> None:
        """Enlarge the map after MapFullError. The transaction must be aborted."""
        assert self._readers == 0, "growing moves the map, so there must be no readers"
        with self._recalled():
            self._env.set_mapsize(2 * self._env.info()["map_size"])

    def make_room(self) -> None:
        """Enlarge the map before a long copy. During the copy, writes need new pages, and the map cannot grow."""
        info = self._env.info()
        if 2 * (info["last_pgno"] + 1) * self._env.stat()["psize"] > info["map_size"]:
            self.grow()

    @contextmanager
    def lend(self, stop: Callable[[], None]) -> Iterator[lmdb.Environment]:
        """Lend the environment to another thread for reading. Call it there; `stop` must make that thread return it soon.

        The environment of a state that was closed meanwhile raises lmdb.Error when it is used."""
        me = threading.get_ident()
        with self._returned:
            self._loans[me] = stop
        try:
            yield self._env
        finally:
            with self._returned:
                del self._loans[me]
                self._returned.notify_all()

    @contextmanager
    def _recalled(self) -> Iterator[None]:
        """Take the environment back: running copies are stopped, and start again later. Nobody borrows it inside."""
        with self._returned:
            for stop in self._loans.values():
                stop()
            self._returned.wait_for(lambda: not self._loans)
            yield

    def swap(self, staged: Staged) -> None:
        """Replace this state with a snapshot. Quick, atomic and durable."""
        assert self._readers == 0, "the file is replaced, so there must be no readers"
        with self._recalled():
            self._env.close()
            try:
                staged.swap()
            finally:
                self._open()  # Either the old or the new state.

    @contextmanager
    def read(self) -> Iterator[LmdbTxn]:
        """A consistent view of the committed state. Never hold it across an await: it keeps old pages alive."""
        self._readers += 1
        try:
            with self._env.begin() as raw:
                yield LmdbTxn(raw)
        finally:
            self._readers -= 1

    def bytes_used(self) -> int:
        """Size of the pages in use. The file itself does not shrink, but its free pages are reused."""
        stat = self._env.stat()
        used: int = (stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]) * stat["psize"]
        return used

    def discard(self) -> None:
        """Close a state that will be deleted, without marking it as clean."""
        with self._recalled():
            self._env.close()

    def close(self) -> None:
        """Make the state durable and mark it as clean, so that it can be used even after the machine restarts."""
        try:
            with self._recalled():
                self._env.sync(True)
                self._env.close()
            _write_mark(self.path, owner=self._owner, boot=self._boot, clean=True)
        except (lmdb.Error, OSError) as error:
            # The log is the truth: at worst, the state is rebuilt from it.
            logger.error("%s: the state could not be closed cleanly: %s", self.path, error)


def read_applied(txn: lmdb.Transaction[bytes]) -> tuple[int, int]:
    """(index, term) of the newest entry in the state, as seen by this transaction."""
    raw = txn.get(_APPLIED)
    if raw is None:
        return (0, 0)
    index, term = msgpack.unpackb(raw)
    return (index, term)


def read_schema(txn: lmdb.Transaction[bytes]) -> int:
    """Schema version of the records; 0 for an empty state, and for states that predate schema numbers."""
    raw = txn.get(_SCHEMA)
    return 0 if raw is None else int(msgpack.unpackb(raw))


def _doubt(path: Path, *, owner: str, boot: str) -> str | None:
    """Why the state in `path` cannot be used, or None."""
    try:
        mark = json.loads((path / _MARK).read_bytes())
    except FileNotFoundError:
        return "its mark is missing"
    except (OSError, ValueError) as error:
        return f"its mark cannot be read: {error}"
    if not isinstance(mark, dict) or type(mark.get("format")) is not int:
        return "its mark has an unknown format"
    if mark["format"] > FORMAT:
        raise WrongVersion(path, found=mark["format"], understood=FORMAT)
    if mark.get("owner") != owner:
        return "it belongs to another log"
    if not (path / _DATA).exists():
        return "its file is gone"
    if mark.get("clean") is not True and mark.get("boot") != boot:
        return "the machine went down without closing it"
    return None


def _write_mark(path: Path, *, owner: str, boot: str, clean: bool) -> None:
    new = path / (_MARK + ".new")
    with open(new, "w", opener=open_private) as file:
        json.dump({"format": FORMAT, "owner": owner, "boot": boot, "clean": clean}, file)
        file.flush()
        os.fsync(file.fileno())
    new.rename(path / _MARK)
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
