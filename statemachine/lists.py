"""Invocations of a partition in the order in which they were created or completed, as a list of them is read.

Every invocation has a *rank* in an order. Ranks compare as bytes, and a page continues after the last rank of the page
before it. The index (`listing`) is sorted newest first, so the rank in that order is the position itself, and the rank in the
other order is its complement.

A list with a tag or a failure among its conditions reads the rows of that tag (`tags`) or failure (`failing`) alone: they have
the same positions. In the order of completion, the table of expiries is read. It is sorted by the end of the retention, so
invocations of one retention are in the order of their completion, and those of several are merged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from enum import IntEnum
from heapq import merge
from itertools import islice
from typing import Final, NamedTuple

from holdfast.sdk.ids import NO_INVOCATION, InvocationId
from holdfast.statemachine import failing, tags
from holdfast.statemachine.effects import Status
from holdfast.statemachine.queries import Filter, admits, completed_ms, load, meta
from holdfast.statemachine.records import INDEXED, STATUS_AT, End, Invocation, unpack, unpack_invocation
from holdfast.statemachine.tables import (
    ACTIVE,
    CREATED,
    EXPIRY,
    KEPT,
    POSITION_BYTES,
    SERVICE,
    TIME_MAX,
    after,
    long_bytes,
    position,
)
from holdfast.statemachine.txn import ReadTxn, TwoWayTxn

#: The most invocations that one call examines: a few milliseconds.
LOOKED_AT_MAX: Final = 400
#: If no more are active, those of the wanted statuses are examined at once, if they are no more than that.
ACTIVE_MAX: Final = 20_000
WANTED_MAX: Final = 2000
#: If no more completed in the wanted time, they are examined at once, whatever the order.
COMPLETED_MAX: Final = 400
#: Of two indexes that serve a list, the one with fewer rows is read. Rows beyond these are not counted.
COUNTED_MAX: Final = 400
_EVERY_BIT: Final = (1 << 8 * POSITION_BYTES) - 1
_DONE: Final = Status.COMPLETED
#: The statuses that a record may have while it is shown as backing off: see `queries.shown_status`.
_FAILING: Final = (Status.RUNNING, Status.SUSPENDED)


class Order(IntEnum):
    NEWEST = 0  # by the time they were created, newest first
    OLDEST = 1
    COMPLETED = 2  # completed ones alone, by the time they completed, newest first


class Found(NamedTuple):
    """A part of a list."""

    records: list[Invocation]
    more: bytes | None  # the rank up to which this looked; None: there are no more
    looked_at: int


def rank(record: Invocation, order: Order) -> bytes:
    if order is Order.COMPLETED:
        return _turned(long_bytes(min(completed_ms(record), TIME_MAX)) + record.id)
    where = position(record.created_ms, record.id)
    return _turned(where) if order is Order.OLDEST else where


def is_in(record: Invocation, order: Order) -> bool:
    """Whether a list in this order has it."""
    return order is not Order.COMPLETED or record.status == _DONE


def _turned(where: bytes) -> bytes:
    """The rank of a position in the other order, and back."""
    return (int.from_bytes(where, "big") ^ _EVERY_BIT).to_bytes(len(where), "big")


def ordered(
    txn: TwoWayTxn, wanted: Filter, after_rank: bytes, limit: int, *, order: Order = Order.NEWEST
) -> Found | None:
    """At most `limit` invocations that match after a rank, in order. It may be short: see LOOKED_AT_MAX.

    Returns None while the indexes are incomplete.
    """
    about = meta(txn)
    if about.level < 2 or about.indexed != INDEXED:
        return None
    if wanted.statuses is not None and _DONE not in wanted.statuses and _are_few(txn, wanted.statuses):
        return _sorted(_active(txn, wanted.statuses), txn, wanted, after_rank, limit=limit, order=order)
    if order is Order.COMPLETED:
        rows = _by_completion(txn, wanted, after_rank)
        return _examined(rows, txn, wanted, limit, order=order)
    if (ids := _completed_few(txn, wanted)) is not None:
        records = (record for ident in ids if (record := load(txn, ident)) is not None)
        return _sorted(records, txn, wanted, after_rank, limit=limit, order=order)
    return _examined(_by_creation(txn, wanted, after_rank, order), txn, wanted, limit, order=order)


def chosen(txn: ReadTxn, wanted: Filter, ids: Collection[InvocationId]) -> list[Invocation]:
    """Those of some invocations that match."""
    found = (load(txn, ident) for ident in ids)
    return [record for record in found if record is not None and admits(txn, wanted, record)]


def _examined(
    rows: Iterator[tuple[bytes, InvocationId]], txn: ReadTxn, wanted: Filter, limit: int, *, order: Order
) -> Found:
    """Those that match among the first rows (rank and id)."""
    found: list[Invocation] = []
    looked_at = 0
    for where, ident in rows:
        looked_at += 1
        record = load(txn, ident)
        assert record is not None, "an invocation in an index exists"
        # An invocation that is being purged is found in the wrong place.
        if is_in(record, order) and rank(record, order) == where and admits(txn, wanted, record):
            found.append(record)
        if len(found) >= limit or looked_at >= LOOKED_AT_MAX:
            return Found(found, where, looked_at)
    return Found(found, None, looked_at)


def _sorted(
    records: Iterator[Invocation], txn: ReadTxn, wanted: Filter, after_rank: bytes, *, limit: int, order: Order
) -> Found:
    """The same for records in any order."""
    ranked: list[tuple[bytes, Invocation]] = []
    looked_at = 0
    for record in records:
        looked_at += 1
        if is_in(record, order) and (where := rank(record, order)) > after_rank and admits(txn, wanted, record):
            ranked.append((where, record))
    ranked.sort(key=lambda pair: pair[0])
    page = ranked[:limit]
    return Found([record for _, record in page], page[-1][0] if len(ranked) > limit else None, looked_at)


# -- in the order of creation --------------------------------------------------------------------------------------------


def _by_creation(
    txn: TwoWayTxn, wanted: Filter, after_rank: bytes, order: Order
) -> Iterator[tuple[bytes, InvocationId]]:
    """Rows of the index that has the fewest."""
    low, high = position(TIME_MAX, NO_INVOCATION), b"\xff" * POSITION_BYTES
    befores = [time for time in (wanted.created_before_ms, wanted.completed_before_ms) if time is not None]
    if befores:  # Nothing completes before it is created.
        low = position(min(befores) - 1, NO_INVOCATION)
    if wanted.created_since_ms is not None and wanted.created_since_ms > 0:
        high = position(wanted.created_since_ms - 1, NO_INVOCATION)
    if after_rank and order is Order.OLDEST:
        high = min(high, _turned(after_rank))
    elif after_rank:
        low = max(low, after_rank + b"\0")
    prefixes = _fewest(txn, _indexes(txn, wanted), low, high)
    if order is Order.OLDEST:
        keys = (key for key, _ in _merged([txn.scan_back(each + low, each + high) for each in prefixes], oldest=True))
        return ((_turned(key[-POSITION_BYTES:]), InvocationId(key[-16:])) for key in keys)
    keys = (key for key, _ in _merged([txn.scan(each + low, each + high) for each in prefixes], oldest=False))
    return ((key[-POSITION_BYTES:], InvocationId(key[-16:])) for key in keys)


def _merged(scans: Sequence[Iterator[tuple[bytes, bytes]]], *, oldest: bool) -> Iterator[tuple[bytes, bytes]]:
    if len(scans) == 1:
        return scans[0]
    return merge(*scans, key=lambda row: row[0][-POSITION_BYTES:], reverse=oldest)


def _indexes(txn: ReadTxn, wanted: Filter) -> list[list[bytes]]:
    """The prefixes of each index that has all invocations that can match."""
    found = [[tags.rows_with(name, value)] for name, value in wanted.tags]
    if wanted.failure_code is not None:
        found.append([failing.rows_of(failing.ACTIVE), failing.rows_ended(wanted.failure_code)])
    elif wanted.failure is not None:
        found.append([failing.rows_of(code) for code in failing.codes(txn)])
    elif wanted.ends is not None and End.SUCCEEDED not in wanted.ends:
        found.append([failing.rows_of(code) for code in failing.codes(txn) if code != failing.ACTIVE])
    return found or [[CREATED]]


def _fewest(txn: ReadTxn, indexes: list[list[bytes]], low: bytes, high: bytes) -> list[bytes]:
    """The one with the fewest rows between two positions."""
    if len(indexes) == 1:
        return indexes[0]

    def rows(prefixes: list[bytes]) -> int:
        keys = (key for each in prefixes for key, _ in txn.scan(each + low, each + high))
        return sum(1 for _ in islice(keys, COUNTED_MAX))

    return min(indexes, key=rows)


# -- in the order of completion ------------------------------------------------------------------------------------------


def _by_completion(txn: TwoWayTxn, wanted: Filter, after_rank: bytes) -> Iterator[tuple[bytes, InvocationId]]:
    """The rows of each retention, merged. Each stream also has rows of the others, in the wrong places."""
    return merge(*[_of_retention(txn, wanted, after_rank, retention) for retention in _retentions(txn)])


def _retentions(txn: ReadTxn) -> list[int]:
    return [int.from_bytes(key[1:], "big") for key, _ in txn.scan(KEPT, after(KEPT))]


def _of_retention(
    txn: TwoWayTxn, wanted: Filter, after_rank: bytes, retention_ms: int
) -> Iterator[tuple[bytes, InvocationId]]:
    first, end = _expiries(wanted, retention_ms)
    if after_rank:
        last = _turned(after_rank)
        end = min(end, EXPIRY + _due(int.from_bytes(last[:8], "big"), retention_ms) + last[8:])
    for key, _ in txn.scan_back(first, end):
        completed = int.from_bytes(key[1:9], "big") - retention_ms
        yield _turned(long_bytes(completed) + key[9:]), InvocationId(key[9:])


def _expiries(wanted: Filter, retention_ms: int) -> tuple[bytes, bytes]:
    """The range in which the expiries are of invocations that completed in the wanted time and have this retention."""
    end = after(EXPIRY)
    if wanted.completed_before_ms is not None:
        end = EXPIRY + _due(wanted.completed_before_ms, retention_ms)
    return EXPIRY + _due(wanted.completed_since_ms or 0, retention_ms), end


def _due(completed: int, retention_ms: int) -> bytes:
    return long_bytes(min(max(completed, 0) + retention_ms, TIME_MAX))


def _completed_few(txn: ReadTxn, wanted: Filter) -> list[InvocationId] | None:
    """The invocations that completed in the wanted time, if they are few. There may be others among them."""
    if wanted.completed_since_ms is None and wanted.completed_before_ms is None:
        return None
    found: dict[InvocationId, None] = {}
    for retention_ms in _retentions(txn):
        keys = (key for key, _ in txn.scan(*_expiries(wanted, retention_ms)))
        for key in keys:
            found[InvocationId(key[9:])] = None
            if len(found) > COMPLETED_MAX:
                return None
    return list(found)


# -- active ones alone ---------------------------------------------------------------------------------------------------


def _are_few(txn: ReadTxn, statuses: tuple[int, ...]) -> bool:
    """Whether it is quick to find all active invocations with one of these statuses."""
    counted = _recorded(statuses)
    services = [unpack(raw) for _, raw in txn.scan(SERVICE, after(SERVICE))]
    return (
        sum(sum(counters[:_DONE]) for counters in services) <= ACTIVE_MAX
        and sum(counters[status] for counters in services for status in counted) <= WANTED_MAX
    )


def _recorded(statuses: tuple[int, ...]) -> frozenset[int]:
    """The statuses of the records that are shown with one of these."""
    return frozenset((*statuses, *(_FAILING if Status.BACKING_OFF in statuses else ())))


def _active(txn: ReadTxn, statuses: tuple[int, ...]) -> Iterator[Invocation]:
    """Active invocations with one of these statuses."""
    counted = _recorded(statuses)
    for key, raw in txn.scan(ACTIVE, after(ACTIVE)):
        if raw[STATUS_AT] in counted:
            yield unpack_invocation(InvocationId(key[1:]), raw)
