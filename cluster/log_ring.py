"""The newest records of a node's log, in memory, for operators who cannot reach its standard error.

A ring keeps what the log of the process says, as the lines of JSON that `log_format = "json"` would write, and nothing that
the log does not say. It is bounded in records and in bytes. Records of level debug have a ring of their own: an operator who
raises the level for a while must not lose the warnings of the night.

Nothing is written per invocation at level info, so a node that works costs nothing here.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from heapq import merge
from typing import Final, NamedTuple

from holdfast.sdk.json_lines import JsonFormatter

RECORDS_MAX: Final = 2000
RING_BYTES_MAX: Final = 1024 * 1024
#: Of one answer: other nodes and clients must not wait long for it.
ANSWER_BYTES_MAX: Final = 512 * 1024


class Kept(NamedTuple):
    """One record. `sequence` counts the records of this run of the node."""

    sequence: int
    at_ms: int
    level: int
    line: bytes


class Wanted(NamedTuple):
    """Which records: of at least this level, that name this invocation, and of this time (until: exclusive; 0: any)."""

    level: int
    invocation: str
    since_ms: int = 0
    until_ms: int = 0

    def has(self, record: Kept) -> bool:
        return (
            record.level >= self.level
            and record.at_ms >= self.since_ms
            and (not self.until_ms or record.at_ms < self.until_ms)
            and self.invocation.encode() in record.line
        )


class Place(NamedTuple):
    """What a reader has read: in which run of the node (when it began), and up to which record."""

    run: int
    sequence: int


class Page(NamedTuple):
    """Records in their order. `rest`: more of them match. `lost`: some were dropped since the reader's place."""

    records: Sequence[Kept]
    place: Place
    rest: bool
    lost: bool


class _Ring:
    def __init__(self) -> None:
        self.kept: deque[Kept] = deque()
        self.gone = 0  # The newest record that was dropped.
        self._bytes = 0

    def add(self, record: Kept) -> None:
        self.kept.append(record)
        self._bytes += len(record.line)
        while len(self.kept) > RECORDS_MAX or (self._bytes > RING_BYTES_MAX and len(self.kept) > 1):
            dropped = self.kept.popleft()
            self.gone = dropped.sequence
            self._bytes -= len(dropped.line)


class LogRing(logging.Handler):
    """One per node. Records come from all threads, under the lock of every handler."""

    def __init__(self, node: str, run: int) -> None:
        """`run` tells one run of the node from the others: when it began."""
        super().__init__(logging.DEBUG)
        self.setFormatter(JsonFormatter(node))
        self._run = run
        self._sequence = 0
        self._records, self._details = _Ring(), _Ring()  # Details: level debug.

    def attach(self) -> None:
        """Keep what the log of the process says from now on."""
        logging.getLogger().addHandler(self)

    def detach(self) -> None:
        logging.getLogger().removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record).encode(errors="replace")
        except Exception:
            self.handleError(record)
            return
        self._sequence += 1
        ring = self._records if record.levelno >= logging.INFO else self._details
        ring.add(Kept(self._sequence, round(record.created * 1000), record.levelno, line))

    def read(self, wanted: Wanted, limit: int, after: Place | None) -> Page:
        """The newest records, or those after a place, oldest first."""
        self.acquire()
        try:
            return self._newest(wanted, limit) if after is None else self._after(wanted, limit, after)
        finally:
            self.release()

    def _rings(self, wanted: Wanted) -> Sequence[_Ring]:
        return (self._records, self._details) if wanted.level < logging.INFO else (self._records,)

    def _newest(self, wanted: Wanted, limit: int) -> Page:
        backwards = merge(*(reversed(ring.kept) for ring in self._rings(wanted)), key=lambda each: -each.sequence)
        found, rest = _bounded((each for each in backwards if wanted.has(each)), limit)
        return Page(found[::-1], Place(self._run, self._sequence), rest=rest, lost=False)

    def _after(self, wanted: Wanted, limit: int, after: Place) -> Page:
        begin = after.sequence if after.run == self._run else 0
        rings = self._rings(wanted)
        found, rest = _bounded(
            (each for each in merge(*(_later(ring, begin) for ring in rings)) if wanted.has(each)), limit
        )
        lost = any(ring.gone > begin for ring in rings)
        end = found[-1].sequence if rest else self._sequence
        return Page(found, Place(self._run, end), rest=rest, lost=lost)


def _later(ring: _Ring, sequence: int) -> list[Kept]:
    found = []
    for record in reversed(ring.kept):
        if record.sequence <= sequence:
            break
        found.append(record)
    return found[::-1]


def _bounded(records: Iterator[Kept], limit: int) -> tuple[list[Kept], bool]:
    """As many as one answer may have, at least one, and whether there are more."""
    found: list[Kept] = []
    size = 0
    for record in records:
        size += len(record.line)
        if len(found) == limit or (found and size > ANSWER_BYTES_MAX):
            return found, True
        found.append(record)
    return found, False
