"""The tables about invocations as a whole: `invocations`, `attempts` and `statistics`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from holdfast.cluster.admin.views import MODE_NAMES
from holdfast.cluster.errors import Unavailable
from holdfast.cluster.sql.relations import (
    INTEGER,
    PAYLOAD,
    TEXT,
    Column,
    Table,
    Value,
    View,
    Wanted,
    payload,
    payload_bytes,
    show_id,
    times,
)
from holdfast.sdk.ids import NO_INVOCATION, InvocationId, PartitionNumber, format_id, partition_key, partition_of
from holdfast.statemachine import history, listing, queries
from holdfast.statemachine.effects import STATUS_NAMES, Status
from holdfast.statemachine.history import ENDED_NAMES, EndedAttempt
from holdfast.statemachine.outcomes import failure_of, is_success, payload_of
from holdfast.statemachine.queries import FailedAttempt, shown_status
from holdfast.statemachine.records import (
    END_NAMES,
    INDEXED,
    Invocation,
    unpack_completed,
    unpack_completed_outcome,
    unpack_invocation,
)
from holdfast.statemachine.tables import ACTIVE, COMPLETED, CREATED, HISTORY, after

_DONE: Final = STATUS_NAMES[Status.COMPLETED]


class Entry:
    """An invocation, decoded as far as its columns are needed."""

    __slots__ = ("_failure", "_raw", "_record", "id", "is_done", "view")

    def __init__(self, view: View, ident: InvocationId, raw: bytes, *, is_done: bool) -> None:
        self.view = view
        self.id = ident
        self.is_done = is_done
        self._raw = raw
        self._record: Invocation | None = None
        self._failure: FailedAttempt | None = None

    @property
    def record(self) -> Invocation:
        if self._record is None:
            unpack = unpack_completed if self.is_done else unpack_invocation
            self._record = unpack(self.id, self._raw)
        return self._record

    @property
    def outcome(self) -> list[Any] | None:
        return unpack_completed_outcome(self._raw) if self.is_done else None

    @property
    def failure(self) -> FailedAttempt | None:
        """What it failed with, or if it is not completed, its last failed attempt."""
        if self._failure is None:
            if not self.is_done:
                self._failure = queries.last_failure(self.view.txn, self.id)
            elif self.record.code:
                failure = failure_of(unpack_completed_outcome(self._raw))
                if failure is not None:
                    self._failure = FailedAttempt(
                        epoch=0, at_ms=0, code=failure.code, message=failure.message, kind=failure.kind
                    )
        return self._failure


def _status(entry: Entry) -> Value:
    return _DONE if entry.is_done else STATUS_NAMES[shown_status(entry.record)]


def _output(entry: Entry) -> Any:
    outcome = entry.outcome
    return payload_of(outcome) if outcome is not None and is_success(outcome) else None


def _failure(field: str) -> Any:
    return lambda entry: getattr(entry.failure, field, None) or None


def _due(*statuses: Status) -> Any:
    return lambda entry: entry.record.due_ms if entry.record.status in statuses else None


def _of(field: str) -> Any:
    return lambda entry: getattr(entry.record, field)


_COLUMNS: Final = (
    Column("id", TEXT, "its id: inv_…", lambda it: format_id(it.id)),
    Column("service", TEXT, "the service of its handler", _of("service")),
    Column("handler", TEXT, "its handler", _of("handler")),
    Column("key", TEXT, "the key of its virtual object or workflow; null for a plain service", _of("key")),
    Column("status", TEXT, f"{', '.join(STATUS_NAMES.values())}", _status),
    Column(
        "end",
        TEXT,
        "how it completed: succeeded, failed, cancelled or killed; null before",
        lambda it: END_NAMES[it.record.end] if it.is_done else None,
    ),
    Column("mode", TEXT, "plain, exclusive, shared or main", lambda it: MODE_NAMES[it.record.mode]),
    *times("created", "when it was created", _of("created_ms")),
    *times("since", "when it came to its status", _of("since_ms")),
    *times("completed", "when it completed", lambda it: it.record.since_ms if it.is_done else None),
    *times(
        "due",
        "scheduled: when it starts; backing off: when its next attempt starts",
        _due(Status.SCHEDULED, Status.BACKING_OFF),
    ),
    *times("forgotten", "when it is removed, if it is completed", lambda it: it.record.due_ms if it.is_done else None),
    Column("deployment", TEXT, "the deployment that it is pinned to; null before its first attempt", _of("deployment")),
    Column("parent", TEXT, "the id of the invocation that called or sent it", lambda it: show_id(it.record.caller)),
    Column(
        "parent_step",
        INTEGER,
        "the step of its parent that did",
        lambda it: it.record.caller_step if it.record.caller else None,
    ),
    Column("call_depth", INTEGER, "how many callers are above it", _of("depth")),
    Column("idempotency_key", TEXT, "the Idempotency-Key that it was created with", _of("idempotency_key")),
    Column(
        "copied_from",
        TEXT,
        "the id of the invocation whose steps it began with, if it was restarted",
        lambda it: show_id(it.record.origin),
    ),
    Column("attempts", INTEGER, "attempts so far", _of("epoch")),
    Column(
        "failures",
        INTEGER,
        "failed attempts and tries of steps since its last progress",
        lambda it: it.record.failures + it.record.step_failures,
    ),
    Column("failures_total", INTEGER, "failed attempts since it was created", _of("failures_total")),
    Column("lost_streams", INTEGER, "connections that broke under its attempts since its last progress", _of("losses")),
    Column(
        "failure_code",
        INTEGER,
        "the code that it failed with, or of its last failed attempt",
        _failure("code"),
    ),
    Column("failure_message", TEXT, "the message of that failure", _failure("message")),
    Column("failure_kind", TEXT, "the kind of that failure: the name of the exception", _failure("kind")),
    Column("cancelling", INTEGER, "1 if a cancellation is on its way", lambda it: int(it.record.cancelled)),
    Column("steps", INTEGER, "steps in its journal", _of("length")),
    Column("waiting_steps", INTEGER, "steps that wait for an outcome", _of("pending")),
    Column("journal_bytes", INTEGER, "size of its journal", _of("size")),
    Column("large_values", INTEGER, "large values that its journal refers to", _of("blobs")),
    Column("large_bytes", INTEGER, "their size", _of("blob_bytes")),
    Column(
        "output",
        PAYLOAD,
        "its result, if it succeeded; null if it has more than 16 KiB",
        lambda it: payload(_output(it)),
        filters=False,
    ),
    Column("output_bytes", INTEGER, "the size of its result", lambda it: payload_bytes(_output(it)), filters=False),
    Column("partition", INTEGER, "the number of its partition", lambda it: it.view.partition),
)


def _scan(view: View, wanted: Wanted) -> Iterator[tuple[bytes, Entry]]:
    ids = wanted.ids("id")
    if ids is not None:
        return _these(view, wanted, ids)
    lowest, highest = wanted.lowest("created_ms"), wanted.highest("created_ms")
    about = queries.meta(view.txn)
    is_indexed = about.level >= 2 and about.indexed == INDEXED
    if wanted.newest_first or (is_indexed and lowest is not None):
        if not is_indexed:
            raise Unavailable(
                f"the index of invocations by time in partition {view.partition} is not complete: an upgrade is "
                "completing it",
                "try again in a few seconds, or leave out `order by created_ms desc`",
            )
        return _by_time(view, wanted, lowest, highest)
    return _by_id(view, wanted)


def _these(view: View, wanted: Wanted, ids: list[InvocationId]) -> Iterator[tuple[bytes, Entry]]:
    for ident in ids:
        if ident > wanted.position and (entry := _load(view, ident)) is not None:
            yield ident, entry


def _load(view: View, ident: InvocationId) -> Entry | None:
    raw = view.txn.get(COMPLETED + ident)
    if raw is not None:
        return Entry(view, ident, raw, is_done=True)
    raw = view.txn.get(ACTIVE + ident)
    return None if raw is None else Entry(view, ident, raw, is_done=False)


def _by_time(view: View, wanted: Wanted, lowest: int | None, highest: int | None) -> Iterator[tuple[bytes, Entry]]:
    """Newest first."""
    first, end = CREATED + (wanted.position + b"\0" if wanted.position else b""), after(CREATED)
    if highest is not None:
        first = max(first, CREATED + listing.position(highest, NO_INVOCATION))
    if lowest is not None and lowest > 0:
        end = min(end, CREATED + listing.position(lowest - 1, NO_INVOCATION))
    for key, _ in view.txn.scan(first, end):
        entry = _load(view, InvocationId(key[9:]))
        assert entry is not None, "an invocation in the index exists"
        yield key[1:], entry


def _by_id(view: View, wanted: Wanted) -> Iterator[tuple[bytes, Entry]]:
    """All of them, once each: whatever becomes of an invocation meanwhile, a slice finds it in exactly one table."""
    statuses = wanted.values("status")
    start = wanted.position + b"\0" if wanted.position else b""
    active = view.txn.scan(ACTIVE + start, after(ACTIVE)) if statuses is None or {*statuses} - {_DONE} else iter(())
    done = view.txn.scan(COMPLETED + start, after(COMPLETED)) if statuses is None or _DONE in statuses else iter(())
    running, completed = next(active, None), next(done, None)
    while running is not None or completed is not None:
        if completed is None or (running is not None and running[0][1:] < completed[0][1:]):
            assert running is not None
            ident = InvocationId(running[0][1:])
            yield ident, Entry(view, ident, running[1], is_done=False)
            running = next(active, None)
        else:
            ident = InvocationId(completed[0][1:])
            yield ident, Entry(view, ident, completed[1], is_done=True)
            completed = next(done, None)


def route_ids(wanted: Wanted, column: str, count: int) -> set[PartitionNumber] | None:
    ids = wanted.ids(column)
    return None if ids is None else {partition_of(ident, count) for ident in ids}


def route_keys(wanted: Wanted, count: int) -> set[PartitionNumber] | None:
    services, keys = wanted.values("service"), wanted.values("key")
    if services is None or keys is None:
        return None
    return {partition_of(partition_key(service, key), count) for service in services for key in keys}


def _route(wanted: Wanted, count: int) -> set[PartitionNumber] | None:
    found = route_ids(wanted, "id", count)
    return found if found is not None else route_keys(wanted, count)


INVOCATIONS: Final = Table(
    "invocations",
    "Invocations, active ones and those that completed and are still kept. A condition on `id`, on `service` and `key`, "
    "or on `created_ms` reads only what it needs; so does `order by created_ms desc limit …`.",
    _COLUMNS,
    scan=_scan,
    route=_route,
    keys=(("id",),),
    newest_first=True,
)


# -- attempts --------------------------------------------------------------------------------------------------------


class _Attempt:
    __slots__ = ("ended", "id")

    def __init__(self, ident: InvocationId, ended: EndedAttempt) -> None:
        self.id = ident
        self.ended = ended


def _scan_attempts(view: View, wanted: Wanted) -> Iterator[tuple[bytes, _Attempt]]:
    """A position is an id and the number of an attempt."""
    ids = wanted.ids("invocation")
    if ids is None:
        rows = view.txn.scan(HISTORY + wanted.position[:16], after(HISTORY))
        ids_in_order = (InvocationId(key[1:]) for key, _ in rows)
    else:
        ids_in_order = (ident for ident in ids if ident >= wanted.position[:16])
    for ident in ids_in_order:
        for ended in history.attempts(view.txn, ident):
            position = ident + ended.epoch.to_bytes(8, "big")
            if position > wanted.position:
                yield position, _Attempt(ident, ended)


ATTEMPTS: Final = Table(
    "attempts",
    "The newest attempts of each invocation that failed or were lost: at most 20. Attempts that went well are only "
    "counted, in `invocations.attempts`.",
    (
        Column("invocation", TEXT, "the id of the invocation", lambda it: format_id(it.id)),
        Column("attempt", INTEGER, "its number, from 1", lambda it: it.ended.epoch),
        *times("started", "when it started", lambda it: it.ended.started_ms),
        *times("ended", "when it ended", lambda it: it.ended.ended_ms),
        Column(
            "how",
            TEXT,
            f"how it ended: {', '.join(ENDED_NAMES.values())}",
            lambda it: ENDED_NAMES.get(it.ended.how, str(it.ended.how)),
        ),
        Column("deployment", TEXT, "the deployment that it ran on", lambda it: it.ended.deployment),
        Column("node", TEXT, "the node that led its partition", lambda it: it.ended.node or None),
        Column("failure_code", INTEGER, "the code of its failure", lambda it: it.ended.code or None),
        Column("failure_message", TEXT, "the message, at most 300 characters", lambda it: it.ended.message or None),
        Column("failure_kind", TEXT, "the kind: the name of the exception", lambda it: it.ended.kind or None),
    ),
    scan=_scan_attempts,
    route=lambda wanted, count: route_ids(wanted, "invocation", count),
    keys=(("invocation",),),
)


# -- statistics ------------------------------------------------------------------------------------------------------


def _scan_statistics(view: View, wanted: Wanted) -> Iterator[tuple[bytes, tuple[str, str, int, int]]]:
    found = [
        (service, status, count, view.partition)
        for service, figures in queries.statistics(view.txn).services.items()
        for status, count in figures.by_status.items()
        if count
    ]
    for offset, row in enumerate(sorted(found), start=1):
        position = offset.to_bytes(4, "big")
        if position > wanted.position:
            yield position, row


STATISTICS: Final = Table(
    "statistics",
    "How many invocations each service has in each status, from counters: it costs nothing, however many there are. "
    "`select status, sum(count) from statistics group by status` counts the invocations of the cluster. An invocation "
    "whose step is being retried is counted as running or suspended here, and has the status backing-off in "
    "`invocations`.",
    (
        Column("service", TEXT, "the service", lambda it: it[0]),
        Column("status", TEXT, "as in `invocations`", lambda it: it[1]),
        Column("count", INTEGER, "how many there are in this partition", lambda it: it[2]),
        Column("partition", INTEGER, "the number of the partition", lambda it: it[3]),
    ),
    scan=_scan_statistics,
)
