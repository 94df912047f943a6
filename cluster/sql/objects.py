"""The tables about virtual objects and workflows: `objects`, `state` and `promises`; and `timers`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from holdfast.cluster.sql.invocations import route_keys
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
from holdfast.sdk.ids import InvocationId, ObjectId, PartitionNumber, object_id
from holdfast.statemachine import timers, values
from holdfast.statemachine.outcomes import failure_of, is_success, payload_of
from holdfast.statemachine.records import Object, unpack, unpack_object
from holdfast.statemachine.tables import OBJECT, PROMISE, TIMER, VALUE, after
from holdfast.statemachine.timers import Kind, Timer

_KEYED: Final = (("service", "key"),)


def _oids(wanted: Wanted) -> list[ObjectId] | None:
    services, keys = wanted.values("service"), wanted.values("key")
    if services is None or keys is None:
        return None
    return sorted({object_id(service, key) for service in services for key in keys})


def _rows(view: View, wanted: Wanted, table: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The rows of a table whose keys begin with the id of an object, after the position."""
    first = table + wanted.position + b"\0" if wanted.position else table
    oids = _oids(wanted)
    if oids is None:
        yield from view.txn.scan(first, after(table))
        return
    for oid in oids:
        yield from view.txn.scan(max(first, table + oid), after(table + oid))


# -- objects ---------------------------------------------------------------------------------------------------------


class _Keyed:
    __slots__ = ("partition", "record")

    def __init__(self, record: Object, partition: PartitionNumber) -> None:
        self.record = record
        self.partition = partition


def _scan_objects(view: View, wanted: Wanted) -> Iterator[tuple[bytes, _Keyed]]:
    for key, raw in _rows(view, wanted, OBJECT):
        yield key[1:], _Keyed(unpack_object(ObjectId(key[1:]), raw), view.partition)


def _of(field: str) -> Any:
    return lambda it: getattr(it.record, field)


OBJECTS: Final = Table(
    "objects",
    "Virtual objects and workflows that have a holder, state or promises.",
    (
        Column("service", TEXT, "the virtual object or workflow", _of("service")),
        Column("key", TEXT, "its key", _of("key")),
        Column(
            "holder",
            TEXT,
            "the id of the invocation that holds the key; null if it is free",
            lambda it: show_id(it.record.holder),
        ),
        Column("waiting", INTEGER, "invocations that wait for the key", _of("waiting")),
        Column("value_count", INTEGER, "named values of its state", _of("names")),
        Column("bytes", INTEGER, "the size of its state", _of("size")),
        Column("promises", INTEGER, "its durable promises", _of("promises")),
        Column("partition", INTEGER, "the number of its partition", lambda it: it.partition),
    ),
    scan=_scan_objects,
    route=route_keys,
    keys=_KEYED,
)


# -- state and promises ----------------------------------------------------------------------------------------------


class _Named:
    """A named value or promise of an object."""

    __slots__ = ("_key", "_raw", "_row", "name", "view")

    def __init__(self, view: View, key: bytes, raw: bytes) -> None:
        self.view = view
        self.name = key[17:].decode()
        self._key = key
        self._raw = raw
        self._row: list[Any] | None = None

    @property
    def record(self) -> Object | None:
        return self.view.load_object(ObjectId(self._key[1:17]))

    @property
    def value(self) -> Any:
        return values.stored(self.view.txn, self._key, self._raw)

    @property
    def promise(self) -> list[Any]:
        """[outcome or None, waiters]"""
        if self._row is None:
            self._row = unpack(self._raw)
        assert self._row is not None
        return self._row


def _scan_state(view: View, wanted: Wanted) -> Iterator[tuple[bytes, _Named]]:
    for key, raw in _rows(view, wanted, VALUE):
        yield key[1:], _Named(view, key, raw)


def _scan_promises(view: View, wanted: Wanted) -> Iterator[tuple[bytes, _Named]]:
    for key, raw in _rows(view, wanted, PROMISE):
        yield key[1:], _Named(view, key, raw)


_SERVICE: Final = Column(
    "service", TEXT, "the virtual object or workflow", lambda it: it.record.service if it.record is not None else None
)
_KEY: Final = Column("key", TEXT, "its key", lambda it: it.record.key if it.record is not None else None)

STATE: Final = Table(
    "state",
    "The named values of virtual objects and workflows. Give `service` and `key` to read those of one object only.",
    (
        _SERVICE,
        _KEY,
        Column("name", TEXT, "the name of the value", lambda it: it.name),
        Column(
            "value",
            PAYLOAD,
            "the value, usually JSON; null if it has more than 16 KiB",
            lambda it: payload(it.value),
            filters=False,
        ),
        Column("bytes", INTEGER, "its size", lambda it: payload_bytes(it.value)),
    ),
    scan=_scan_state,
    route=route_keys,
    keys=_KEYED,
)


def _outcome(it: _Named) -> Value:
    outcome = it.promise[0]
    return None if outcome is None else "value" if is_success(outcome) else "failure"


def _promised(it: _Named) -> Any:
    outcome = it.promise[0]
    return payload_of(outcome) if outcome is not None and is_success(outcome) else None


def _failure(field: str) -> Any:
    def get(it: _Named) -> Value:
        outcome = it.promise[0]
        return getattr(failure_of(outcome), field, None) or None if outcome is not None else None

    return get


PROMISES: Final = Table(
    "promises",
    "The durable promises of workflows: those with an outcome, and those that a step waits for.",
    (
        _SERVICE,
        _KEY,
        Column("name", TEXT, "the name of the promise", lambda it: it.name),
        Column("outcome", TEXT, "value or failure; null if it has none yet", _outcome),
        Column(
            "value",
            PAYLOAD,
            "the value that it was resolved with; null if it has more than 16 KiB",
            lambda it: payload(_promised(it)),
            filters=False,
        ),
        Column("value_bytes", INTEGER, "the size of that value", lambda it: payload_bytes(_promised(it))),
        Column("failure_code", INTEGER, "the code that it was rejected with", _failure("code")),
        Column("failure_message", TEXT, "the message that it was rejected with", _failure("message")),
        Column("waiting", INTEGER, "steps that wait for it", lambda it: len(it.promise[1])),
    ),
    scan=_scan_promises,
    route=route_keys,
    keys=_KEYED,
)


# -- timers ----------------------------------------------------------------------------------------------------------


class _Armed:
    __slots__ = ("timer", "view")

    def __init__(self, view: View, timer: Timer) -> None:
        self.view = view
        self.timer = timer

    @property
    def invocation(self) -> InvocationId | None:
        return InvocationId(self.timer.id) if self.timer.kind is not Kind.PROMISES else None

    @property
    def record(self) -> Any:
        """The invocation or the object."""
        ident = self.timer.id
        return (
            self.view.load_object(ObjectId(ident)) if self.invocation is None else self.view.load(InvocationId(ident))
        )


def _scan_timers(view: View, wanted: Wanted) -> Iterator[tuple[bytes, _Armed]]:
    first = TIMER + wanted.position + b"\0" if wanted.position else TIMER
    for key, _ in view.txn.scan(first, after(TIMER)):
        yield key[1:], _Armed(view, timers.unpack_key(key))


TIMERS: Final = Table(
    "timers",
    "Timers that have not fired: sleeps, tries to come, and invocations that start later.",
    (
        *times("due", "when it fires", lambda it: it.timer.due_ms),
        Column(
            "kind",
            TEXT,
            "step: a sleep ends or a failed run is tried again; invocation: it starts, or its next attempt does; "
            "promises: those of a workflow that never began are forgotten",
            lambda it: it.timer.kind.name.lower(),
        ),
        Column("invocation", TEXT, "the id of the invocation", lambda it: show_id(it.invocation)),
        Column("step", INTEGER, "the step", lambda it: it.timer.step if it.timer.kind is Kind.STEP else None),
        Column("service", TEXT, "the service", lambda it: getattr(it.record, "service", None)),
        Column("handler", TEXT, "the handler of the invocation", lambda it: getattr(it.record, "handler", None)),
        Column("key", TEXT, "the key", lambda it: getattr(it.record, "key", None)),
    ),
    scan=_scan_timers,
)
