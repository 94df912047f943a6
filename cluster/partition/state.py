"""The state of one partition on this node's disk: an LMDB environment, and the mark that says whether to believe it.

The log is the truth. The state is not fsynced with every batch: a killed process leaves it whole, because the kernel still
has every page, but a machine that lost power may leave any mixture of old and new pages. So beside the environment stands a
mark with the boot id of the machine that opened it. Found again under another boot id, without a clean close in between, the
state is thrown away and built again from the newest snapshot and the log. It is never repaired, and never trusted because it
looks well.

A snapshot takes the state's place by one rename of a file that is on disk already (`swap`), so a crash leaves the old state
or the new one. The mark stays as it is: it says which machine writes here and that nobody has closed it, and both stay true.
After a power loss, old and new alike are thrown away.
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
from typing import Final

import lmdb
import msgpack

from holdfast.log.errors import DiskFailed, NoSpace, WrongVersion
from holdfast.log.lmdb_file import is_out_of_space
from holdfast.snapshots.restore import Staged, remove_staged
from holdfast.statemachine.tables import SCHEMA

logger = logging.getLogger(__name__)

FORMAT: Final = 1
MAP_BYTES: Final = 4 << 30  # Where the map starts: address space, not memory and not disk. It grows by itself.
READERS_MAX: Final = 512

_MARK: Final = "MARK"
_DATA: Final = "data.mdb"
_APPLIED: Final = b"\x00applied"
_SCHEMA: Final = b"\x00schema"
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Another one after every start of the machine. Where nobody tells, only a clean close is believed."""
    with suppress(OSError):
        return _BOOT_ID.read_text().strip()
    return f"unknown-{uuid.uuid4()}"


class LmdbTxn:
    """One flat, ordered key space inside an LMDB transaction, as the state machine wants it."""

    __slots__ = ("delete", "get", "put", "raw")

    def __init__(self, raw: lmdb.Transaction[bytes]) -> None:
        self.raw = raw
        self.get = raw.get
        self.put = raw.put
        self.delete = raw.delete

    def scan(self, low: bytes, high: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Items with low <= key < high, in order. What is written behind the position meanwhile is seen."""
        with self.raw.cursor() as cursor:
            if cursor.set_range(low):
                for item in cursor:
                    if item[0] >= high:
                        return
                    yield item


class State:
    """Use `open`. Everything happens on the loop's thread; a read transaction never outlives the call that began it.

    The one exception is a thread that the environment is lent to, for a copy that takes long (`lend`).
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
    ) -> State:
        """`owner` names the log that this state belongs to: another log's state is not ours to go on with.

        `restore` puts the newest snapshot into an empty directory, if there is one.
        """
        path.mkdir(parents=True, exist_ok=True)
        remove_staged(path)
        doubt = _doubt(path, owner=owner, boot=boot)
        if doubt is None:
            _write_mark(path, owner=owner, boot=boot, clean=False)
            try:
                return cls(path, owner=owner, boot=boot, map_bytes=map_bytes)
            except (lmdb.Error, ValueError) as error:
                doubt = f"it cannot be read: {error}"
        if (path / _DATA).exists():
            logger.warning("%s: the state is built again, because %s", path, doubt)
        shutil.rmtree(path)
        path.mkdir(parents=True)
        restore(path)  # Before the mark: without one, nothing here is believed.
        _write_mark(path, owner=owner, boot=boot, clean=False)
        return cls(path, owner=owner, boot=boot, map_bytes=map_bytes)

    def __init__(self, path: Path, *, owner: str, boot: str, map_bytes: int) -> None:
        self.path = path
        self._owner = owner
        self._boot = boot
        self._readers = 0
        self._map_bytes = map_bytes
        self._loans: dict[int, Callable[[], None]] = {}
        self._returned = threading.Condition()
        self._open()

    def _open(self) -> None:
        file = self.path / _DATA
        size = file.stat().st_size if file.exists() else 0
        self._env = lmdb.open(
            str(self.path),
            map_size=max(self._map_bytes, 2 * size),
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
                raise ValueError(f"the file has {size} bytes, but {pages} pages")  # Reading on would be a SIGBUS.
            with self._env.begin() as txn:
                self.applied, self.schema = read_applied(txn), read_schema(txn)
            if self.schema > SCHEMA:
                raise WrongVersion(self.path, found=self.schema, understood=SCHEMA)
        except BaseException:
            self._env.close()
            raise

    def begin(self) -> LmdbTxn:
        """The one write transaction. End it by `commit` or `abort`."""
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
        """What went wrong with a write, in our words. After `NoSpace` nothing of the transaction has happened."""
        if is_out_of_space(error.code, self.path):
            return NoSpace(self.path, f"the disk is full ({error})")
        return DiskFailed(self.path, f"the state cannot be written ({error})")

    def grow(self) -> None:
        """After MapFullError, with the transaction aborted."""
        assert self._readers == 0, "the map moves: nobody may be reading"
        self._recall()
        self._env.set_mapsize(2 * self._env.info()["map_size"])

    def make_room(self) -> None:
        """Before a long copy: while somebody reads old pages, what is written needs new ones, and the map cannot grow."""
        info = self._env.info()
        if 2 * (info["last_pgno"] + 1) * self._env.stat()["psize"] > info["map_size"]:
            self.grow()

    @contextmanager
    def lend(self, stop: Callable[[], None]) -> Iterator[lmdb.Environment]:
        """The environment, for reading in another thread. Called there; `stop` must make that thread give it back soon."""
        me = threading.get_ident()
        with self._returned:
            self._loans[me] = stop
        try:
            yield self._env
        finally:
            with self._returned:
                del self._loans[me]
                self._returned.notify_all()

    def _recall(self) -> None:
        """Nobody else may be reading: whoever copies is stopped, and begins again another time."""
        with self._returned:
            for stop in self._loans.values():
                stop()
            self._returned.wait_for(lambda: not self._loans)

    def swap(self, staged: Staged) -> None:
        """A snapshot takes the place of this state. Quick, atomic and durable."""
        assert self._readers == 0, "the file is replaced: nobody may be reading"
        self._recall()
        self._env.close()
        try:
            staged.swap()
        finally:
            self._open()  # The old or the new: never none.

    @contextmanager
    def read(self) -> Iterator[LmdbTxn]:
        """A consistent view of what is committed. Never hold it over an await: it keeps old pages alive."""
        self._readers += 1
        try:
            with self._env.begin() as raw:
                yield LmdbTxn(raw)
        finally:
            self._readers -= 1

    def bytes_used(self) -> int:
        """Of pages that hold something. The file itself does not shrink, but what is freed in it is used again."""
        stat = self._env.stat()
        used: int = (stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]) * stat["psize"]
        return used

    def discard(self) -> None:
        """Nobody needs it any more: close it as it is. Without a word in its mark, and to be deleted."""
        self._recall()
        self._env.close()

    def close(self) -> None:
        """Make it durable and say so: after this, even a machine that restarts finds a state to go on with."""
        self._recall()
        try:
            self._env.sync(True)
            self._env.close()
            _write_mark(self.path, owner=self._owner, boot=self._boot, clean=True)
        except (lmdb.Error, OSError) as error:
            # The log is the truth: at worst, the state is built again from it.
            logger.error("%s: the state could not be closed cleanly: %s", self.path, error)


def read_applied(txn: lmdb.Transaction[bytes]) -> tuple[int, int]:
    """(index, term) of the newest entry in the state, as this very transaction sees it."""
    raw = txn.get(_APPLIED)
    if raw is None:
        return (0, 0)
    index, term = msgpack.unpackb(raw)
    return (index, term)


def read_schema(txn: lmdb.Transaction[bytes]) -> int:
    """Of the records; 0 while nobody wrote it down, which states before there were numbers share with empty ones."""
    raw = txn.get(_SCHEMA)
    return 0 if raw is None else int(msgpack.unpackb(raw))


def _doubt(path: Path, *, owner: str, boot: str) -> str | None:
    """Why the state in `path` cannot be gone on with, or None."""
    try:
        mark = json.loads((path / _MARK).read_bytes())
    except FileNotFoundError:
        return "nothing says who wrote it"
    except (OSError, ValueError) as error:
        return f"its mark cannot be read: {error}"
    if not isinstance(mark, dict) or type(mark.get("format")) is not int:
        return "it is of another format"
    if mark["format"] > FORMAT:
        raise WrongVersion(path, found=mark["format"], understood=FORMAT)
    if mark.get("owner") != owner:
        return "it belongs to another log"
    if not (path / _DATA).exists():
        return "its file is gone"
    if mark.get("clean") is not True and mark.get("boot") != boot:
        return "the machine ended without closing it"
    return None


def _write_mark(path: Path, *, owner: str, boot: str, clean: bool) -> None:
    new = path / (_MARK + ".new")
    with new.open("w") as file:
        json.dump({"format": FORMAT, "owner": owner, "boot": boot, "clean": clean}, file)
        file.flush()
        os.fsync(file.fileno())
    new.rename(path / _MARK)
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
