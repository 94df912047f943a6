"""Pages of one list made of many: every row once, in order, however short the slices are."""

from __future__ import annotations

from random import Random

import pytest

from holdfast.cluster.errors import BadRequest
from holdfast.cluster.routing import merging
from holdfast.cluster.routing.merging import Slice, format_cursor, merge, parse_cursor
from holdfast.sdk.ids import numbers_of


class Lists:
    """Partitions whose slices examine a few rows, of which some match."""

    def __init__(self, random: Random) -> None:
        self.random = random
        ranks = [number.to_bytes(4, "big") for number in random.sample(range(1, 1000), 120)]
        self.rows: list[list[tuple[bytes, bool]]] = [[] for _ in range(4)]
        for rank in sorted(ranks):
            self.rows[random.choice((0, 0, 0, 1, 2))].append((rank, random.random() < 0.3))

    async def read(self, number: int, after: bytes, limit: int) -> Slice[bytes]:
        found: list[tuple[bytes, bytes]] = []
        looked_at_max = self.random.randrange(1, 6)
        for looked_at, (rank, matches) in enumerate((row for row in self.rows[number] if row[0] > after), start=1):
            if matches:
                found.append((rank, rank))
            if looked_at >= looked_at_max or len(found) >= limit:
                return found, rank
        return found, None


@pytest.mark.parametrize("slices", [1, 3, 500])
@pytest.mark.parametrize("seed", range(20))
async def test_pages_have_every_row_once_and_in_order(seed: int, slices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "SLICES_MAX", slices)
    lists = Lists(Random(seed))
    found: list[bytes] = []
    after: bytes | None = b""
    pages = 0
    while after is not None:
        rows, after = await merge(numbers_of(4), after, 5, lists.read)
        assert len(rows) <= 5
        found += rows
        pages += 1
        assert pages < 200, "every page gets further"

    assert found == sorted(rank for rows in lists.rows for rank, matches in rows if matches)


async def test_a_page_without_rows_gets_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "SLICES_MAX", 1)

    async def read(number: int, after: bytes, limit: int) -> Slice[bytes]:
        looked = int.from_bytes(after or b"\0", "big") + 1
        return [], looked.to_bytes(1, "big") if looked < 100 else None

    after: bytes | None = b""
    pages = 0
    while after is not None:
        rows, after = await merge(numbers_of(4), after, 5, read)
        assert rows == []
        pages += 1

    assert pages == 25, "four slices of each partition"


def test_a_cursor_is_read_as_it_was_written() -> None:
    for where in (b"a", b"\x00\xff\xfe", bytes(range(20))):
        assert parse_cursor(format_cursor(where), (len(where),)) == where
        with pytest.raises(BadRequest):
            parse_cursor(format_cursor(where), (len(where) + 1,))
    for wrong in ("", "é", "!", "AA=A", "A" * 1000):
        with pytest.raises(BadRequest):
            parse_cursor(wrong, (3, 20))
