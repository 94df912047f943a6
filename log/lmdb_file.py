"""The journal's file and directory: their owner, whether they are intact, and what LMDB's errors mean.

Everything here happens before a transaction or when one fails. A directory is created completely or not at all, belongs to one
process at a time, and is opened only by the node that it was created for. A torn or damaged file is refused, by name, before
LMDB maps it.
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
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import lmdb

from holdfast.log.errors import (
    Corrupt,
    DirectoryInUse,
    DiskFailed,
    NoSpace,
    WrongDirectory,
    WrongVersion,
)

FORMAT = 4
FORMATS_READ = (2, 3, FORMAT)  # Format 2 had no rows (`log/rows.py`); format 3 copied entries from rows to tables.
TABLES_MAX = 4096

OWN_TABLE = "node"  # Holds the owner of the directory; hidden from callers.
_IDENTITY = b"identity"
_INCARNATION = b"incarnation"

_LOCK_FILE = "LOCK"
IDENTITY_FILE = "IDENTITY"
DATA_FILE = "data.mdb"
_CREATING = "creating"
_HARMLESS = {"lost+found", _LOCK_FILE, IDENTITY_FILE + ".new", _CREATING}

# What a node writes is for its user alone, whatever the umask is.
PRIVATE_DIRECTORY = 0o700
PRIVATE_FILE = 0o600

_FULL_BYTES = 1 << 20
_OUT_OF_SPACE = {errno.ENOSPC, errno.EDQUOT}
_DAMAGE = (
    lmdb.BadTxnError,  # Raised by every read after the first one found damage.
    lmdb.CorruptedError,
    lmdb.CursorFullError,
    lmdb.IncompatibleError,
    lmdb.InvalidError,
    lmdb.NotFoundError,
    lmdb.PageFullError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
)


class MapFull(Exception):
    """Handled by the store: it grows the map and retries."""


class EdgeOfLmdb:
    """The one boundary where errors of LMDB and the operating system become ours."""

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
            raise MapFull from error
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

    LMDB reports a partial write as an I/O error. Writing again is safe even after a real I/O error: all pages of the batch are
    written again, and LMDB refuses to continue after a failed write of its header.
    """
    if code != errno.EIO:
        return code in _OUT_OF_SPACE
    try:
        disk = os.statvfs(path)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < _FULL_BYTES


# The directory


def make_directory(path: Path) -> None:
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True, mode=PRIVATE_DIRECTORY)
        _sync_directory(directory.parent)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, PRIVATE_FILE)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def refuse_foreign(path: Path) -> None:
    """Refuse a directory that has files but no journal, before anything is written to it."""
    names = set(os.listdir(path))
    strangers = sorted(names - _HARMLESS)
    if strangers and not names & {DATA_FILE, IDENTITY_FILE}:
        raise WrongDirectory(
            path,
            f"not empty, and not a data directory of Holdfast (it holds {', '.join(strangers[:3])})",
            "Give this node an empty directory or one that does not exist yet",
        )


def lock(path: Path) -> int:
    fd = os.open(path / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
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


def create(path: Path, *, node: str, cluster: str) -> None:
    """Create the journal file aside and move it into place: a crash leaves either none or a complete one."""
    creating = path / _CREATING
    shutil.rmtree(creating, ignore_errors=True)
    creating.mkdir(mode=PRIVATE_DIRECTORY)
    identity = {"format": FORMAT, "node": node, "cluster": cluster, "disk": secrets.token_hex(16)}
    env = open_env(creating, map_bytes=1 << 20)
    try:
        with env.begin(write=True) as txn:
            own = env.open_db(OWN_TABLE.encode(), txn=txn)
            txn.put(_IDENTITY, json.dumps(identity).encode(), db=own)
            txn.put(_INCARNATION, bytes(8), db=own)
    finally:
        env.close()
    (creating / DATA_FILE).rename(path / DATA_FILE)
    _sync_directory(path)
    creating.rmdir()


def read_marker(path: Path) -> dict[str, object] | None:
    file = path / IDENTITY_FILE
    try:
        return _parse_identity(file, file.read_bytes())
    except FileNotFoundError:
        return None


def _parse_identity(file: Path, text: bytes) -> dict[str, object]:
    try:
        identity = json.loads(text)
    except ValueError:
        raise Corrupt(file, "the record of the directory's owner is damaged") from None
    if not isinstance(identity, dict):
        raise Corrupt(file, "the record of the directory's owner is damaged")
    if identity.get("format") not in FORMATS_READ:
        raise WrongVersion(file, found=identity.get("format"), understood=FORMAT)
    if not all(isinstance(identity.get(name), str) for name in ("node", "cluster", "disk")):
        raise Corrupt(file, "the record of the directory's owner is damaged")
    return identity


def write_marker(path: Path, identity: dict[str, object]) -> None:
    draft = path / (IDENTITY_FILE + ".new")
    with open(draft, "wb", opener=_open_private) as file:
        file.write(json.dumps(identity).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path / IDENTITY_FILE)
    _sync_directory(path)


def check_owner(path: Path, identity: dict[str, object], *, node: str, cluster: str) -> None:
    if (identity["node"], identity["cluster"]) != (node, cluster):
        raise WrongDirectory(
            path,
            f"the directory belongs to node {identity['node']!r} of cluster {identity['cluster']!r}, "
            f"this is node {node!r} of cluster {cluster!r}",
            "Give this node its own directory, or start it with the name and cluster that the directory belongs to",
        )


# The file


def open_env(path: Path, *, map_bytes: int) -> lmdb.Environment:
    return lmdb.open(
        os.fspath(path),
        map_size=map_bytes,
        max_dbs=TABLES_MAX,
        mode=PRIVATE_FILE,
        lock=False,
        lib_version=0,  # `inspect` reads the layout of LMDB 0.9.
    )


def enter(
    env: lmdb.Environment, path: Path, *, node: str, cluster: str
) -> tuple[dict[str, object], int, dict[str, lmdb._Database]]:
    """Count this incarnation durably if the file is ours. Return the identity, the incarnation and the open tables."""
    file = path / DATA_FILE
    tables: dict[str, lmdb._Database] = {}
    with env.begin(write=True) as txn:
        try:
            names = [key.decode() for key, _ in txn.cursor()]
        except UnicodeDecodeError:
            raise Corrupt(file, "the list of tables is damaged") from None
        if OWN_TABLE not in names:
            raise Corrupt(file, "the record of the directory's owner is missing")
        own = env.open_db(OWN_TABLE.encode(), txn=txn, create=False)
        identity = _parse_identity(file, txn.get(_IDENTITY, b"", db=own))
        check_owner(path, identity, node=node, cluster=cluster)
        if identity["format"] != FORMAT:
            identity["format"] = FORMAT
            txn.put(_IDENTITY, json.dumps(identity).encode(), db=own)
        incarnations = txn.get(_INCARNATION, b"", db=own)
        if len(incarnations) != 8:
            raise Corrupt(file, "the count of incarnations is damaged")
        incarnation = int.from_bytes(incarnations) + 1
        txn.put(_INCARNATION, incarnation.to_bytes(8), db=own)
        for name in names:
            if name == OWN_TABLE:
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
_BRANCH, _HEADER = 0x01, 0x08  # Page flags.
_ELSEWHERE = 0x01  # Flag of a node whose data is in overflow pages.
_PAGE = struct.Struct("=QHHHH")  # Number, padding, flags, end of the pointers, start of the nodes.
_META = struct.Struct("=II16xI36xQ48xQQ")  # Magic, layout, page size, root of the free list, last page, transaction.
_NODE = struct.Struct("=HHHH")  # Data size (low, high), flags, key size; in a branch, a page number.
_NUMBER = struct.Struct("=Q")


class _Meta(NamedTuple):
    page_bytes: int
    free_root: int
    last_page: int
    transaction: int


def inspect(file: Path) -> None:
    """Refuse a damaged header or a torn file before LMDB maps it.

    LMDB treats an empty file as new, dies of SIGBUS past the end of a torn one, and falls back to the older of its two headers
    if a flipped bit makes that one look newer, which would lose acknowledged entries.
    """
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        zero = _read_meta(file, fd, number=0, offset=0)
        one = _read_meta(file, fd, number=1, offset=zero.page_bytes)
        # They are written alternately, so they are one transaction apart.
        if one.page_bytes != zero.page_bytes or abs(one.transaction - zero.transaction) != 1:
            raise Corrupt(file, "the two headers contradict each other")
        newest = max(zero, one, key=lambda meta: meta.transaction)
        pages = os.fstat(fd).st_size // newest.page_bytes
        missing = newest.last_page + 1 - pages
        # LMDB does not write pages that were used and freed in one transaction. So an intact file may end before its last
        # page, if the missing pages are free.
        if missing > 0:
            free = {page for page in _free_pages(file, fd, newest, pages) if pages <= page <= newest.last_page}
            if len(free) < missing:
                raise Corrupt(file, f"the file is torn: {missing - len(free)} pages are missing at its end")
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
    """The pages in the free list, which is a tree of its own, read without the map."""
    torn = Corrupt(file, "the file is torn: its list of free pages is cut off")
    waiting = [] if meta.free_root == _NO_PAGE else [meta.free_root]
    for _ in range(pages):  # A damaged tree may have a cycle.
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
            raise Corrupt(file, "the list of free pages is damaged") from None
