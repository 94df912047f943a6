"""Large payloads, once each, beside the log: named by the day they were put and by the sha256 of their bytes.

    blobs/<day>/<first two digits>/<sha256>

A journal holds a `Ref` instead of the bytes. What no journal refers to is collected by mark and sweep. The race that such
collectors have (a blob is found to be there already and not written again, while the sweep removes it because nothing refers
to it yet) cannot happen here, and without conditional writes: a blob is shared only with puts of the same day, and the
sweep never touches the last `grace_days` days. So nothing is removed that was put, or found, less than that long ago. What
it takes: clocks that are right to within a day, and that what refers to a blob is committed within a day after the put.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from holdfast.snapshots.errors import Corrupted, NotFound
from holdfast.snapshots.stores import Store
from holdfast.snapshots.work import Work

DAY_MS: Final = 86_400_000
GRACE_DAYS_MIN: Final = 2
_NAME: Final = re.compile(r"(\d{10})/[0-9a-f]{2}/([0-9a-f]{64})")


class Ref(NamedTuple):
    """Stands for the bytes in a journal: 44 bytes instead of all of them."""

    day: int
    sha256: bytes
    size: int

    def encode(self) -> bytes:
        return self.day.to_bytes(4) + self.sha256 + self.size.to_bytes(8)

    @classmethod
    def decode(cls, packed: bytes) -> Ref:
        if len(packed) != 44:
            raise ValueError(f"a reference to a blob has 44 bytes, not {len(packed)}")
        return cls(int.from_bytes(packed[:4]), packed[4:36], int.from_bytes(packed[36:]))

    @property
    def name(self) -> str:
        """Below the prefix."""
        digits = self.sha256.hex()
        return f"{self.day:010d}/{digits[:2]}/{digits}"


class Swept(NamedTuple):
    removed: int
    removed_bytes: int
    kept: int


class Blobs:
    """The calls block, as the store's do."""

    def __init__(self, store: Store, *, prefix: str = "blobs/", grace_days: int = GRACE_DAYS_MIN) -> None:
        if grace_days < GRACE_DAYS_MIN:
            raise ValueError(f"at least {GRACE_DAYS_MIN} days of grace: the present one and the one before")
        self._store = store
        self._prefix = prefix
        self._grace_days = grace_days

    def put(self, data: bytes, *, now_ms: int) -> Ref:
        """Durable when this returns. The same bytes on the same day are written once."""
        ref = Ref(now_ms // DAY_MS, hashlib.sha256(data).digest(), len(data))
        if not self.exists(ref):
            self._store.put_bytes(data, self._prefix + ref.name)
        return ref

    def get(self, ref: Ref) -> bytes:
        """The very bytes that were put, or Corrupted, or NotFound."""
        data = self._store.read(self._prefix + ref.name)
        if len(data) != ref.size or hashlib.sha256(data).digest() != ref.sha256:
            raise Corrupted(f"{self._store.url}: {self._prefix}{ref.name}", "the blob's bytes do not match its name")
        return data

    def exists(self, ref: Ref) -> bool:
        try:
            return self._store.stat(self._prefix + ref.name).size == ref.size
        except NotFound:
            return False

    def sweep(self, mark: Callable[[], Iterable[Ref]], *, now_ms: int, work: Work | None = None) -> Swept:
        """Remove what `mark` does not name and what is out of grace.

        `mark` must name every reference of every partition, and is asked after the listing: a reference that was moved
        from one place to another meanwhile is then seen in one of them.
        """
        work = work or Work()
        oldest_kept = now_ms // DAY_MS - self._grace_days + 1
        listed = self._store.list(self._prefix)
        marked = {ref.name for ref in mark()}
        removed = removed_bytes = kept = 0
        for found in listed:
            work.check()
            name = found.name.removeprefix(self._prefix)
            match = _NAME.fullmatch(name)
            if match is None or int(match[1]) >= oldest_kept or name in marked:
                kept += 1  # What we did not write, we do not remove either.
                continue
            self._store.delete(found.name)
            removed += 1
            removed_bytes += found.size
        return Swept(removed, removed_bytes, kept)
