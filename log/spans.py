"""The rows that a group's table points into, as a few marks in memory.

A *span* is (index, row, bytes): from this index on, entries filed as places are in this row or later ones. It is a lower bound,
so two spans can be merged into one, and one is enough after opening (ADR 8).
"""

from __future__ import annotations

from typing import Final

SPANS_MAX: Final = 64


class Spans:
    __slots__ = ("_spans", "placed_last")

    def __init__(self) -> None:
        self._spans: list[tuple[int, int, int]] = []
        self.placed_last = 0  # No entry after this index is filed as a place.

    def add(self, index: int, row: int, size: int) -> None:
        spans = self._spans
        if len(spans) >= SPANS_MAX:  # Merge pairs: the lower bound of the first holds for the second.
            pairs = zip(spans[::2], spans[1::2], strict=True)
            spans[:] = [(first[0], first[1], first[2] + second[2]) for first, second in pairs]
        spans.append((index, row, size))

    def cut(self, low: int) -> None:
        """Drop the spans of entries from `low` on."""
        self.placed_last = min(self.placed_last, low - 1)
        while self._spans and self._spans[-1][0] >= low:
            self._spans.pop()

    def clear(self) -> None:
        self._spans.clear()

    def first_row(self, base_index: int) -> int | None:
        """A row at or before the oldest row with an entry after `base_index`; None if no row has one."""
        spans = self._spans
        if self.placed_last <= base_index:
            spans.clear()
        while len(spans) > 1 and spans[1][0] <= base_index + 1:
            del spans[0]
        return spans[0][1] if spans else None

    @property
    def oldest(self) -> tuple[int, int]:
        """The index and row of the first span."""
        index, row, _ = self._spans[0]
        return index, row

    @property
    def placed_bytes(self) -> int:
        return sum([size for _, _, size in self._spans])

    def moved(self, low: int, row: int, size: int) -> None:
        """The oldest entries, of `size` bytes, left their rows. Entries from `low` on are in `row` or later ones."""
        spans = self._spans
        spans[0] = low, row, max(spans[0][2] - size, 0)
        if low > self.placed_last:
            spans.clear()
        elif len(spans) > 1 and low >= spans[1][0]:
            del spans[0]
