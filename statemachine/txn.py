"""What the state machine needs of a transaction: ordered byte keys in one flat key space.

A node implements it by an LMDB transaction of the partition's environment, tests by `memory.Memory`. The methods have the
signatures of LMDB's own, so a node can pass bound methods without a layer between. Keys have at most 400 bytes (LMDB
allows 511). Keys that begin with a zero byte belong to the owner of the transaction.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol


class ReadTxn(Protocol):
    """A consistent view."""

    def get(self, key: bytes, /) -> bytes | None: ...

    def scan(self, first: bytes, end: bytes, /) -> Iterator[tuple[bytes, bytes]]:
        """Pairs with `first <= key < end`, in key order. Nothing may be written during the scan."""


class TwoWayTxn(ReadTxn, Protocol):
    """A view that is also read backwards: apply never needs that, lists for people do."""

    def scan_back(self, first: bytes, end: bytes, /) -> Iterator[tuple[bytes, bytes]]:
        """The same pairs as those of `scan`, last first."""


class Txn(ReadTxn, Protocol):
    """A view that sees its own writes."""

    def put(self, key: bytes, value: bytes, /) -> object: ...

    def delete(self, key: bytes, /) -> object:
        """Deleting a missing key is no error."""
