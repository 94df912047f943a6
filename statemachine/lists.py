"""Invocations of a partition in the order in which they were created, either way, as a list of them is read.

Every invocation has a *rank* in an order. Ranks compare as bytes, and a page continues after the last rank of the page
before it. The index (`listing`) is sorted newest first, so the rank in that order is the position itself, and the rank in the
other order is its complement.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from holdfast.sdk.ids import NO_INVOCATION, InvocationId
from holdfast.statemachine import listing
from holdfast.statemachine.effects import Status
from holdfast.statemachine.queries import Filter, admits, load, meta
from holdfast.statemachine.records import INDEXED, STATUS_AT, Invocation, unpack, unpack_invocation
from holdfast.statemachine.tables import ACTIVE, CREATED, SERVICE, after
from holdfast.statemachine.txn import ReadTxn, TwoWayTxn

#: The most invocations that one call examines: a few milliseconds.
LOOKED_AT_MAX: Final = 400
#: If no more are active, those of the wanted statuses are examined at once, if they are no more than that.
ACTIVE_MAX: Final = 20_000
WANTED_MAX: Final = 2000
_EVERY_BIT: Final = (1 << 8 * listing.POSITION_BYTES) - 1
_DONE: Final = Status.COMPLETED
#: The statuses that a record may have while it is shown as backing off: see `queries.shown_status`.
_FAILING: Final = (Status.RUNNING, Status.SUSPENDED)


def rank(record: Invocation, *, oldest: bool) -> bytes:
    where = listing.position(record.created_ms, record.id)
    return _turned(where) if oldest else where


def _turned(where: bytes) -> bytes:
    """The rank of a position in the other order, and back."""
    return (int.from_bytes(where, "big") ^ _EVERY_BIT).to_bytes(len(where), "big")


def ordered(
    txn: TwoWayTxn, wanted: Filter, after_rank: bytes, limit: int, *, oldest: bool = False
) -> tuple[list[Invocation], bytes | None] | None:
    """At most `limit` invocations that match after a rank, in order, and the rank up to which this looked (None: there are
    no more). It may be short: see LOOKED_AT_MAX.

    Returns None while the index is incomplete.
    """
    about = meta(txn)
    if about.level < 2 or about.indexed != INDEXED:
        return None
    if wanted.statuses is not None and _DONE not in wanted.statuses and _are_few(txn, wanted.statuses):
        return _ordered_active(txn, wanted, after_rank, limit, oldest=oldest)
    found: list[Invocation] = []
    for looked_at, key in enumerate(_keys(txn, wanted, after_rank, oldest=oldest), start=1):
        record = load(txn, InvocationId(key[9:]))
        assert record is not None, "an invocation in the index exists"
        if admits(txn, wanted, record):
            found.append(record)
        if len(found) >= limit or looked_at >= LOOKED_AT_MAX:
            return found, _turned(key[1:]) if oldest else key[1:]
    return found, None


def _keys(txn: TwoWayTxn, wanted: Filter, after_rank: bytes, *, oldest: bool) -> Iterator[bytes]:
    """Rows of the index that may match, in order."""
    first, end = CREATED, after(CREATED)
    befores = [time for time in (wanted.created_before_ms, wanted.completed_before_ms) if time is not None]
    if befores:  # Nothing completes before it is created.
        first = CREATED + listing.position(min(befores) - 1, NO_INVOCATION)
    if wanted.created_since_ms is not None and wanted.created_since_ms > 0:
        end = CREATED + listing.position(wanted.created_since_ms - 1, NO_INVOCATION)
    if after_rank and oldest:
        end = min(end, CREATED + _turned(after_rank))
    elif after_rank:
        first = max(first, CREATED + after_rank + b"\0")
    rows = txn.scan_back(first, end) if oldest else txn.scan(first, end)
    return (key for key, _ in rows)


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


def _ordered_active(
    txn: ReadTxn, wanted: Filter, after_rank: bytes, limit: int, *, oldest: bool
) -> tuple[list[Invocation], bytes | None]:
    """Examine active invocations alone, because they are few among many."""
    assert wanted.statuses is not None
    counted = _recorded(wanted.statuses)
    records = (
        unpack_invocation(InvocationId(key[1:]), raw)
        for key, raw in txn.scan(ACTIVE, after(ACTIVE))
        if raw[STATUS_AT] in counted
    )
    found = [(rank(record, oldest=oldest), record) for record in records if admits(txn, wanted, record)]
    behind = sorted((pair for pair in found if pair[0] > after_rank), key=lambda pair: pair[0])
    page = behind[:limit]
    return [record for _, record in page], page[-1][0] if len(behind) > limit else None
