"""What the state machine needs of a transaction: ordered byte keys in one flat key space.

A node backs it with an LMDB transaction of the partition's environment, tests with `memory.Memory`. The methods have
the shape of LMDB's own, so that a node may hand their bound methods over and pay for no layer between. Keys are at most
400 bytes (LMDB takes 511). Keys that begin with a zero byte belong to whoever owns the transaction.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol


class ReadTxn(Protocol):
    """A consistent view."""

    def get(self, key: bytes, /) -> bytes | None: ...

    def scan(self, first: bytes, end: bytes, /) -> Iterator[tuple[bytes, bytes]]:
        """Pairs with `first <= key < end`, in order of their keys. Nothing is written while it is being read."""


class Txn(ReadTxn, Protocol):
    """A view that sees its own writes."""

    def put(self, key: bytes, value: bytes, /) -> object: ...

    def delete(self, key: bytes, /) -> object:
        """A key that is not there is no error."""
