"""Facts that are spread over the partitions: keys and what is in front of them, and what waits.

Lists come in pages (`merging`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final, NamedTuple

from holdfast.cluster.errors import BadRequest
from holdfast.cluster.routing.merging import Slice, format_cursor, merge, parse_cursor
from holdfast.cluster.routing.reader import Reader
from holdfast.sdk.ids import ID_BYTES, PartitionNumber, numbers_of, partition_key, partition_of
from holdfast.statemachine.records import Object
from holdfast.statemachine.survey import (
    RANK_BYTES,
    TIMED,
    TIMER_RANK_BYTES,
    Queue,
    Wait,
)

PROMISES_MAX: Final = 1000
#: The first byte of a cursor: which of two lists it continues.
_STEPS: Final = b"s"
_TIMERS: Final = b"t"


class Keys(NamedTuple):
    records: list[Object]
    cursor: str | None


class Waits(NamedTuple):
    rows: list[Wait]
    cursor: str | None


class Surveys:
    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    async def keys(self, service: str, prefix: str, cursor: str | None, limit: int) -> Keys:
        async def read(number: PartitionNumber, after: bytes, size: int) -> Slice[Object]:
            rows, more = await self._reader.ask(number, "keys", service, prefix, after, size)
            return rows, more

        after = parse_cursor(cursor, (ID_BYTES,)) if cursor is not None else b""
        records, more = await merge(numbers_of(self._reader.count), after, limit, read)
        return Keys(records, format_cursor(more) if more is not None else None)

    async def queue(self, service: str, key: str, limit: int) -> Queue:
        found: Queue = await self._reader.ask(self._of(service, key), "queue", service, key, limit, fresh=True)
        return found

    async def promises(self, service: str, key: str) -> tuple[Sequence[tuple[str, list[Any] | None]], bool]:
        """Names and outcomes, and whether there are more."""
        found, more = await self._reader.ask(self._of(service, key), "promises", service, key, PROMISES_MAX, fresh=True)
        return found, more

    def _of(self, service: str, key: str) -> PartitionNumber:
        return partition_of(partition_key(service, key), self._reader.count)

    async def waits(self, kinds: Collection[str], service: str | None, cursor: str | None, limit: int) -> Waits:
        """What waits for somebody, and after that what waits for its time."""
        asked = [kind for kind in kinds if kind != TIMED]
        mark, after = _parse_cursor(cursor, asked, timed=TIMED in kinds)
        rows: list[Wait] = []
        if mark == _STEPS and asked:

            async def read(number: PartitionNumber, position: bytes, size: int) -> Slice[Wait]:
                found, looked = await self._reader.ask(number, "waiting", asked, service, position, size)
                return found, looked

            rows, more = await merge(numbers_of(self._reader.count), after, limit, read)
            if more is not None:
                return Waits(rows, format_cursor(_STEPS + more))
        if TIMED not in kinds:
            return Waits(rows, None)
        if len(rows) >= limit:
            return Waits(rows, format_cursor(_TIMERS))

        async def read_timers(number: PartitionNumber, position: bytes, size: int) -> Slice[Wait]:
            found, looked = await self._reader.ask(number, "timed", service, position, size)
            return found, looked

        after = after if mark == _TIMERS else b""
        timed, more = await merge(numbers_of(self._reader.count), after, limit - len(rows), read_timers)
        return Waits([*rows, *timed], format_cursor(_TIMERS + more) if more is not None else None)


def _parse_cursor(cursor: str | None, asked: Collection[str], *, timed: bool) -> tuple[bytes, bytes]:
    """Which of the two lists a page continues, and after which rank."""
    if cursor is None:
        return _STEPS, b""
    raw = parse_cursor(cursor, (1, 1 + RANK_BYTES, 1 + TIMER_RANK_BYTES))
    mark, after = raw[:1], raw[1:]
    if (mark == _STEPS and asked and len(after) == RANK_BYTES) or (
        mark == _TIMERS and timed and len(after) in (0, TIMER_RANK_BYTES)
    ):
        return mark, after
    raise BadRequest("the cursor belongs to a list of another kind", "pass `kind` as for the previous page")
