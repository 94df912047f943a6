"""A store in a directory, either local or mounted by all nodes."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from holdfast.snapshots.errors import BucketMissing, Denied, NoSpace, NotFound, StoreFailed
from holdfast.snapshots.files import (
    OUT_OF_SPACE,
    SteadyWriter,
    make_directory,
    move_into_place,
    open_private,
    remove_quietly,
)
from holdfast.snapshots.stores import Stat, check_name, check_prefix, probe
from holdfast.snapshots.work import PIECE_BYTES, Work

# Object names never begin with a dot, so a draft cannot be mistaken for an object.
_DRAFT: Final = ".draft-"


class DirectoryStore:
    """Objects are files below the directory. The directory must exist: a missing mount is not an empty store."""

    def __init__(self, directory: Path, *, create: bool = False) -> None:
        self.directory = Path(os.path.abspath(directory))
        if create:
            make_directory(self.directory)

    @property
    def url(self) -> str:
        return self.directory.as_uri()

    def put(self, source: Path, name: str, work: Work | None = None) -> None:
        work = work or Work()
        with source.open("rb") as file, self._edge(name):
            work.begin(os.fstat(file.fileno()).st_size)
            self._write(name, iter(lambda: file.read(PIECE_BYTES), b""), work)
        work.end()

    def put_bytes(self, data: bytes, name: str) -> None:
        with self._edge(name):
            self._write(name, iter((data,)), Work())

    def _write(self, name: str, pieces: Iterator[bytes], work: Work) -> None:
        path = self._path(name)
        if not self.directory.is_dir():
            raise BucketMissing(self.url, "the directory does not exist")
        make_directory(path.parent)
        draft = path.parent / f"{_DRAFT}{secrets.token_hex(8)}"
        try:
            with open(draft, "xb", buffering=0, opener=open_private) as target:
                writer = SteadyWriter(target.fileno())
                for piece in pieces:
                    writer.write(piece)
                    work.step(len(piece))
                writer.finish()
            move_into_place(draft, path)
        except BaseException:
            remove_quietly(draft)
            raise

    def get(self, name: str, to: Path, work: Work | None = None) -> None:
        work = work or Work()
        # Only errors of the store's file are translated. An error while writing `to` comes from the caller's disk.
        with self._edge(name):
            source = self._path(name).open("rb")
        with source, open(to, "ab", buffering=0, opener=open_private) as target:
            size = os.fstat(source.fileno()).st_size
            have = target.tell()
            if have > size:
                target.truncate(0)  # Not a prefix of this object.
                have = 0
            source.seek(have)
            work.begin(size, have)
            writer = SteadyWriter(target.fileno())
            while True:
                with self._edge(name):
                    piece = source.read(PIECE_BYTES)
                if not piece:
                    break
                writer.write(piece)
                work.step(len(piece))
            writer.finish()
        work.end()

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        with self._edge(name), self._path(name).open("rb") as file:
            file.seek(offset)
            return file.read(-1 if length is None else length)

    def stat(self, name: str) -> Stat:
        with self._edge(name):
            found = self._path(name).stat()
        return Stat(name, found.st_size, found.st_mtime_ns // 1_000_000)

    def list(self, prefix: str = "") -> list[Stat]:
        head, _, tail = check_prefix(prefix).rpartition("/")
        if not self.directory.is_dir():
            raise BucketMissing(self.url, "the directory does not exist")
        with self._edge(prefix):
            return sorted(self._walk(self.directory / head, f"{head}/" if head else "", tail))

    def _walk(self, folder: Path, prefix: str, beginning: str) -> Iterator[Stat]:
        try:
            entries = tuple(os.scandir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in entries:
            if entry.name.startswith(".") or not entry.name.startswith(beginning):
                continue
            try:
                if entry.is_dir():
                    yield from self._walk(folder / entry.name, f"{prefix}{entry.name}/", "")
                else:
                    stat = entry.stat()
                    yield Stat(prefix + entry.name, stat.st_size, stat.st_mtime_ns // 1_000_000)
            except FileNotFoundError:
                continue  # Deleted in the meantime.

    def delete(self, name: str) -> None:
        path = self._path(name)
        if not self.directory.is_dir():
            raise BucketMissing(self.url, "the directory does not exist")
        with self._edge(name):
            path.unlink(missing_ok=True)

    def check(self) -> None:
        probe(self)

    def _path(self, name: str) -> Path:
        return self.directory / check_name(name)

    @contextmanager
    def _edge(self, name: str) -> Iterator[None]:
        """The only place that translates errors of the operating system to ours."""
        try:
            yield
        except FileNotFoundError as error:
            if not self.directory.is_dir():
                raise BucketMissing(self.url, "the directory does not exist") from error
            raise NotFound(self.url, name) from error
        except IsADirectoryError as error:
            raise NotFound(self.url, name) from error
        except PermissionError as error:
            raise Denied(self.url, f"no permission to use {name or 'the directory'} ({error.strerror})") from error
        except OSError as error:
            if error.errno in OUT_OF_SPACE:
                raise NoSpace(self.directory, f"the disk is full ({error.strerror})") from error
            raise StoreFailed(self.url, f"{name or 'the directory'}: {error.strerror}") from error
