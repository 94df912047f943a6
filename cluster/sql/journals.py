"""The tables about steps: `journal`, and of those that wait, `awakeables`, `approvals` and `in_doubt`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from holdfast.cluster.admin.views import show_decision, show_step
from holdfast.cluster.sql.invocations import route_ids
from holdfast.cluster.sql.relations import (
    INTEGER,
    PAYLOAD,
    SHOWN_BYTES_MAX,
    TEXT,
    Column,
    Table,
    Value,
    View,
    Wanted,
    payload,
    payload_bytes,
    times,
)
from holdfast.sdk.ids import InvocationId, format_approval, format_awakeable, format_id
from holdfast.sdk.journal import OP_NAMES, Op, Step, unpack_decided, unpack_step
from holdfast.statemachine import refs
from holdfast.statemachine.approvals import Asked
from holdfast.statemachine.effects import Status
from holdfast.statemachine.ops import ROWS
from holdfast.statemachine.outcomes import failure_of, is_success, payload_of
from holdfast.statemachine.records import Invocation
from holdfast.statemachine.tables import JOURNAL, PENDING, after, step_bytes


class Row:
    """A step, decoded as far as its columns are needed."""

    __slots__ = ("_record", "_step", "id", "index", "raw", "view")

    def __init__(self, view: View, key: bytes, raw: bytes) -> None:
        self.view = view
        self.id = InvocationId(key[1:17])
        self.index = int.from_bytes(key[17:], "big")
        self.raw = raw
        self._step: Step | None = None
        self._record: Invocation | None = None

    @property
    def step(self) -> Step:
        if self._step is None:
            self._step = unpack_step(self.raw)
        return self._step

    @property
    def record(self) -> Invocation | None:
        if self._record is None:
            self._record = self.view.load(self.id)
        return self._record


def _name(row: Row) -> Value:
    """The first part of most arguments: the name of a run, a promise or a value of state, or the called service."""
    step = row.step
    known = ROWS.get(step.op)
    names = [kept.name for kept in known.kept] if known is not None else []
    if "service" in names:
        service, handler = (step.argument[names.index(each)] for each in ("service", "handler"))
        return f"{service}/{handler}"
    value = step.argument[0] if names[:1] in (["name"], ["title"]) and step.argument else None
    return value if isinstance(value, str) else None


def _kind(row: Row) -> Value:
    outcome = row.step.outcome
    if outcome is not None:
        return "value" if is_success(outcome) else "failure"
    return "abandoned" if row.step.abandoned else None


def _failure(field: str) -> Any:
    def get(row: Row) -> Value:
        outcome = row.step.outcome
        return getattr(failure_of(outcome), field, None) or None if outcome is not None else None

    return get


def _output(row: Row) -> Any:
    """What the code gets. Values that may be absent have a leading mark in the journal."""
    step = row.step
    if step.outcome is None or not is_success(step.outcome):
        return None
    value, known = payload_of(step.outcome), ROWS.get(step.op)
    if step.op == Op.APPROVAL and isinstance(value, bytes):
        return json.dumps(show_decision(unpack_decided(value)), ensure_ascii=False).encode()
    if known is not None and known.signature.maybe and isinstance(value, bytes):
        return value[1:]
    return value


def _input(row: Row) -> Value:
    if len(row.raw) > SHOWN_BYTES_MAX:
        return None
    shown = show_step(row.id, row.index, row.step._replace(outcome=None), with_ids=False)["argument"]
    return json.dumps(shown, ensure_ascii=False) if shown else None


def _input_bytes(row: Row) -> Value:
    sizes = [refs.size_of(part) for part in row.step.argument if isinstance(part, bytes) or refs.is_ref(part)]
    return sum(sizes) if sizes and row.step.op == Op.SET else None


def _scan(view: View, wanted: Wanted) -> Iterator[tuple[bytes, Row]]:
    """A position is an id and the number of a step."""
    ids = wanted.ids("invocation")
    steps = wanted.values("step")
    if ids is None:
        for key, raw in view.txn.scan(JOURNAL + _next(wanted.position), after(JOURNAL)):
            yield key[1:], Row(view, key, raw)
        return
    for ident in ids:
        if ident < wanted.position[:16]:
            continue
        if steps is not None:
            found = [(JOURNAL + ident + step_bytes(step)) for step in sorted({*steps}) if _is_step(step)]
            for key in found:
                if key[1:] > wanted.position and (one := view.txn.get(key)) is not None:
                    yield key[1:], Row(view, key, one)
            continue
        prefix = JOURNAL + ident
        for key, raw in view.txn.scan(max(prefix, JOURNAL + _next(wanted.position)), after(prefix)):
            yield key[1:], Row(view, key, raw)


def _next(position: bytes) -> bytes:
    return position + b"\0" if position else b""


def _is_step(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**32


def _duration(row: Row) -> int | None:
    step = row.step
    return step.journaled_ms - step.began_ms if step.began_ms and step.done and step.journaled_ms else None


_INVOCATION: Final = Column("invocation", TEXT, "the id of its invocation", lambda it: format_id(it.id))
_STEP: Final = Column("step", INTEGER, "its index in the journal, from 0", lambda it: it.index)

JOURNAL_TABLE: Final = Table(
    "journal",
    "The steps of all invocations. Give the invocation, or join on it: without that, all steps are read.",
    (
        _INVOCATION,
        _STEP,
        Column("op", TEXT, f"{', '.join(OP_NAMES.values())}", lambda it: OP_NAMES.get(it.step.op, str(it.step.op))),
        Column("key", TEXT, "the step key, with which a replay finds it", lambda it: it.step.key),
        Column(
            "name",
            TEXT,
            "of a run, a promise or a value of state, the title of an approval; service/handler of a call or send",
            _name,
        ),
        *times("began", "when its function began", lambda it: it.step.began_ms),
        *times("journaled", "when it was last written", lambda it: it.step.journaled_ms),
        Column("duration_ms", INTEGER, "how long it took, if it has an outcome", _duration),
        Column("attempt", INTEGER, "the attempt that journaled it", lambda it: it.step.epoch or None),
        Column("made", INTEGER, "the position of its beginning in the order of the journal", lambda it: it.step.made),
        Column("done", INTEGER, "the position of its outcome in that order", lambda it: it.step.done or None),
        Column("outcome", TEXT, "value, failure or abandoned; null if it has none (yet)", _kind),
        Column("failure_code", INTEGER, "the code of its failure", _failure("code")),
        Column("failure_message", TEXT, "the message of its failure", _failure("message")),
        Column("failure_kind", TEXT, "the kind of its failure: the name of the exception", _failure("kind")),
        Column("input", TEXT, "its argument as JSON; null if it has more than 16 KiB", _input, filters=False),
        Column("input_bytes", INTEGER, "the size of the value that it sets", _input_bytes, filters=False),
        Column(
            "output",
            PAYLOAD,
            "the value of its outcome; null if it has more than 16 KiB",
            lambda it: payload(_output(it)),
            filters=False,
        ),
        Column("output_bytes", INTEGER, "the size of that value", lambda it: payload_bytes(_output(it)), filters=False),
        Column("bytes", INTEGER, "the size of the step in the journal", lambda it: len(it.raw)),
    ),
    scan=_scan,
    route=lambda wanted, count: route_ids(wanted, "invocation", count),
    keys=(("invocation", "step"), ("invocation",)),
)


# -- steps that wait -------------------------------------------------------------------------------------------------


def _scan_waiting(view: View, wanted: Wanted, op: int) -> Iterator[tuple[bytes, Row]]:
    mark = bytes([op])
    ids = wanted.ids("invocation")
    if ids is None:
        ranges = [(PENDING + _next(wanted.position), after(PENDING))]
    else:
        ranges = [(max(PENDING + each, PENDING + _next(wanted.position)), after(PENDING + each)) for each in ids]
    for first, end in ranges:
        for key, value in view.txn.scan(first, end):
            if value == mark and (raw := view.txn.get(JOURNAL + key[1:])) is not None:
                yield key[1:], Row(view, key, raw)


def _scan_awakeables(view: View, wanted: Wanted) -> Iterator[tuple[bytes, Row]]:
    return _scan_waiting(view, wanted, Op.AWAKEABLE)


def _scan_in_doubt(view: View, wanted: Wanted) -> Iterator[tuple[bytes, Row]]:
    for position, row in _scan_waiting(view, wanted, Op.RUN):
        # A RUN whose argument is its name alone may or may not have been carried out: see `statemachine.steps.Tries`.
        if len(row.step.argument) == 1 and row.record is not None and row.record.status != Status.RUNNING:
            yield position, row


def _of(field: str) -> Any:
    return lambda row: getattr(row.record, field, None)


def _awakeable_id(row: Row) -> Value:
    return format_awakeable(row.id, row.index, *row.step.argument) if row.view.with_ids else None


_WAITING: Final = (
    _INVOCATION,
    _STEP,
    Column("service", TEXT, "the service of its invocation", _of("service")),
    Column("handler", TEXT, "the handler of its invocation", _of("handler")),
    Column("key", TEXT, "the key of its invocation", _of("key")),
    Column("attempt", INTEGER, "the attempt that journaled it", lambda it: it.step.epoch or None),
    *times("since", "when it was journaled", lambda it: it.step.journaled_ms),
)
AWAKEABLES: Final = Table(
    "awakeables",
    "Awakeables that wait for a client or a handler to resolve them.",
    (
        Column(
            "id",
            TEXT,
            "its id (awk_…), with which it can be resolved; null without a token that may invoke all services",
            _awakeable_id,
            filters=False,
        ),
        *_WAITING,
    ),
    scan=_scan_awakeables,
    route=lambda wanted, count: route_ids(wanted, "invocation", count),
    keys=(("invocation",),),
)


def _scan_approvals(view: View, wanted: Wanted) -> Iterator[tuple[bytes, Row]]:
    return _scan_waiting(view, wanted, Op.APPROVAL)


def _asked(field: str) -> Any:
    return lambda row: getattr(Asked(*row.step.argument), field)


APPROVALS: Final = Table(
    "approvals",
    "Approvals that wait for somebody to decide. Decisions are in `journal`, where `op` is approval.",
    (
        Column("id", TEXT, "its name (apr_…), for the admin API", lambda it: format_approval(it.id, it.index)),
        Column("title", TEXT, "what is asked", _asked("title")),
        Column("assignee", TEXT, "whom it is meant for", _asked("assignee")),
        Column(
            "choices",
            TEXT,
            "what may be decided, as a JSON array",
            lambda it: json.dumps(list(Asked(*it.step.argument).choices), ensure_ascii=False),
        ),
        Column(
            "payload",
            PAYLOAD,
            "what is shown; null if it has more than 16 KiB",
            lambda it: payload(Asked(*it.step.argument).payload),
            filters=False,
        ),
        Column("payload_bytes", INTEGER, "the size of that payload", lambda it: len(Asked(*it.step.argument).payload)),
        Column(
            "editable", INTEGER, "1 if the payload may be edited", lambda it: int(Asked(*it.step.argument).editable)
        ),
        *_WAITING,
        *times("due", "its deadline", _asked("due_ms")),
        *times("remind", "when a reminder is sent", _asked("remind_ms")),
    ),
    scan=_scan_approvals,
    route=lambda wanted, count: route_ids(wanted, "invocation", count),
    keys=(("invocation",),),
)
IN_DOUBT: Final = Table(
    "in_doubt",
    "Runs that an attempt began and that may or may not have been carried out: the attempt was lost, and the step is not "
    "to be repeated without a decision.",
    (*_WAITING, Column("name", TEXT, "the name of the run", _name)),
    scan=_scan_in_doubt,
    route=lambda wanted, count: route_ids(wanted, "invocation", count),
    keys=(("invocation",),),
)
