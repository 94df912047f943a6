"""Stores in files, and processes that use them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.log.errors import Corrupt, StorageError
from holdfast.log.store import LmdbStore, Op, Store

WAIT_S = 30.0


ROOT = Path(__file__).resolve().parents[2]


def open_store(path: Path, *, node: str = "n1", cluster: str = "c1") -> LmdbStore:
    return LmdbStore.open(path, node=node, cluster=cluster)


def key(number: int) -> bytes:
    return number.to_bytes(8, "big")


def write(store: Store, *ops: Op) -> None:
    store.stage(ops)
    store.commit()


def scan_all(store: Store, table: str) -> list[tuple[bytes, bytes]]:
    return store.scan(table, b"", b"\xff" * 9, bytes_max=1 << 40, count_max=1 << 40)


def close_after(path: Path, *ops: Op) -> None:
    store = open_store(path)
    write(store, *ops)
    store.close()


@contextmanager
def child(source: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process with a store of its own; it is killed at the end if it is still running."""
    process = subprocess.Popen(
        [sys.executable, "-c", source, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(WAIT_S)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def refusal(path: Path) -> str:
    with pytest.raises(Corrupt) as caught:
        open_store(path)
    assert isinstance(caught.value, StorageError) and not caught.value.retryable
    assert "Restore this node from its peers" in str(caught.value)
    # The refusal released the directory and repeats the next time: nothing was repaired.
    with pytest.raises(Corrupt):
        open_store(path)
    return str(caught.value)
