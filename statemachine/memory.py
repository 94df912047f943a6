"""A transaction's table in memory, so that tests and tools can run the state machine without a disk."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator


class Memory:
    """A sorted map of bytes. Every write is final: there is nothing to commit."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._keys: list[bytes] = []

    def get(self, key: bytes, /) -> bytes | None:
        return self._values.get(key)

    def put(self, key: bytes, value: bytes, /) -> None:
        assert 0 < len(key) <= 511, "LMDB takes no other keys"
        if key not in self._values:
            insort(self._keys, key)
        self._values[key] = value

    def delete(self, key: bytes, /) -> None:
        if self._values.pop(key, None) is not None:
            del self._keys[bisect_left(self._keys, key)]

    def scan(self, first: bytes, end: bytes, /) -> Iterator[tuple[bytes, bytes]]:
        begin, stop = bisect_left(self._keys, first), bisect_left(self._keys, end)
        size = len(self._keys)
        for offset in range(begin, stop):
            assert len(self._keys) == size, "nothing is written during a scan"
            key = self._keys[offset]
            yield key, self._values[key]

    def scan_back(self, first: bytes, end: bytes, /) -> Iterator[tuple[bytes, bytes]]:
        yield from reversed(list(self.scan(first, end)))
