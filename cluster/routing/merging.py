"""One ordered list made of the lists of all partitions, a page at a time, and the cursors of pages.

Rows have ranks, which compare as bytes over all partitions. A partition is read in slices, and a slice may be short, because
it examines a bounded number of rows. So a page may be short, too, and still have a cursor.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from typing import Final, Generic, TypeAlias, TypeVar

from holdfast.cluster.errors import BadRequest
from holdfast.sdk.ids import PartitionNumber

Row = TypeVar("Row")
#: Rows with their ranks, and the rank up to which this looked (None: there are no more).
Slice: TypeAlias = tuple[list[tuple[bytes, Row]], bytes | None]

#: Slices that one page reads, or four per partition.
SLICES_MAX: Final = 500
SLICE_ROWS_MIN: Final = 16  # per request


class _Source(Generic[Row]):
    """One partition."""

    def __init__(self, number: PartitionNumber, position: bytes) -> None:
        self.number = number
        self.position = position  # read up to here
        self.more = True  # after that
        self.rows: deque[tuple[bytes, Row]] = deque()  # read, but not returned yet

    @property
    def is_dry(self) -> bool:
        return self.more and not self.rows

    def head(self) -> bytes:
        return self.rows[0][0]


async def merge(
    numbers: Collection[PartitionNumber],
    after: bytes,
    limit: int,
    read: Callable[[PartitionNumber, bytes, int], Awaitable[Slice[Row]]],
) -> tuple[list[Row], bytes | None]:
    """At most `limit` rows of these partitions after a rank, in order, and the rank for the next page (None: this is the
    last). `read` reads a slice of a partition after a rank, of up to a number of rows."""
    sources: list[_Source[Row]] = [_Source(number, after) for number in numbers]
    size = limit if len(sources) == 1 else max(2 * limit // len(sources), SLICE_ROWS_MIN)
    budget = max(SLICES_MAX, 4 * len(sources))

    async def fill(source: _Source[Row]) -> None:
        rows, more = await read(source.number, source.position, size)
        source.rows.extend(rows)
        source.more = more is not None
        if more is not None:
            source.position = more

    found: list[Row] = []
    last, stuck = after, b""
    while len(found) < limit:
        while budget > 0 and (dry := [each for each in sources if each.is_dry]):
            await asyncio.gather(*(fill(source) for source in dry))
            budget -= len(dry)
        # A source without results so far may still have some after the position it was read to.
        stuck = min((each.position for each in sources if each.is_dry), default=b"")
        heads = [each for each in sources if each.rows]
        if not heads:
            break
        first = min(heads, key=_Source.head)
        if stuck and first.head() > stuck:
            break
        last, row = first.rows.popleft()
        found.append(row)
    if len(found) < limit and stuck:
        return found, stuck
    return found, last if any(each.rows or each.is_dry for each in sources) else None


def format_cursor(where: bytes) -> str:
    return base64.urlsafe_b64encode(where).decode().rstrip("=")


def parse_cursor(cursor: str, sizes: Collection[int]) -> bytes:
    """The bytes of a cursor, which has one of these sizes."""
    try:
        raw = base64.b64decode(cursor.encode() + b"=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, UnicodeEncodeError):
        raw = b""
    if len(raw) not in sizes:
        raise BadRequest("the cursor is invalid", "pass the cursor of the previous page unchanged")
    return raw
