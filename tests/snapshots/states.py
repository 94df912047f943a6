"""A miniature state environment: records, and the applied index, in one transaction."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import lmdb

from holdfast.snapshots.format import Meta

CLUSTER = "demo"
GROUP = 3
_APPLIED = b"\x00applied"
VALUE_BYTES = 500


class State:
    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.env = lmdb.open(os.fspath(directory), map_size=1 << 30, sync=False)

    def apply(self, count: int, *, term: int = 1) -> None:
        """Entry i writes record i and rewrites an earlier one, so that pages are freed and reused."""
        index = self.applied[0]
        with self.env.begin(write=True) as txn:
            for _ in range(count):
                index += 1
                txn.put(_key(index), _value(index, index))
                txn.put(_key(index // 2), _value(index // 2, index))
            txn.put(_APPLIED, index.to_bytes(8) + term.to_bytes(8))

    @property
    def applied(self) -> tuple[int, int]:
        with self.env.begin() as txn:
            return applied_in(txn)

    def describe(self, txn: lmdb.Transaction[bytes]) -> Meta:
        index, term = applied_in(txn)
        return Meta(
            cluster=CLUSTER, group=GROUP, index=index, term=term, epoch=1, members=("n1", "n2"), schema=1, node="n1"
        )

    def digest(self) -> str:
        with self.env.begin() as txn:
            return digest_of(txn)

    def close(self) -> None:
        self.env.close()


def applied_in(txn: lmdb.Transaction[bytes]) -> tuple[int, int]:
    packed = txn.get(_APPLIED)
    return (0, 0) if packed is None else (int.from_bytes(packed[:8]), int.from_bytes(packed[8:]))


def digest_of(txn: lmdb.Transaction[bytes]) -> str:
    digest = hashlib.sha256()
    for key, value in txn.cursor():
        digest.update(key + value)
    return digest.hexdigest()


def expected_digest(count: int, *, term: int = 1) -> str:
    """The digest of the state after `count` entries, computed without LMDB."""
    items = {}
    for index in range(1, count + 1):
        items[_key(index)] = _value(index, index)
        items[_key(index // 2)] = _value(index // 2, index)
    items[_APPLIED] = count.to_bytes(8) + term.to_bytes(8)
    digest = hashlib.sha256()
    for key in sorted(items):
        digest.update(key + items[key])
    return digest.hexdigest()


def _key(number: int) -> bytes:
    return b"\x01" + hashlib.blake2b(number.to_bytes(8), digest_size=8).digest()


def _value(number: int, index: int) -> bytes:
    seed = number.to_bytes(8) + index.to_bytes(8)
    return (hashlib.sha256(seed).digest() * (VALUE_BYTES // 32 + 1))[:VALUE_BYTES]
