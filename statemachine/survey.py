"""Looking through the tables of a partition for people: keys and their queues, promises, what waits, and calls.

Every function reads a bounded slice. A slice that filters has rows with their ranks, which compare as bytes, and the rank up
to which it looked; the next slice begins after that. Ranks of one question order the rows of all partitions, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import islice
from typing import Any, Final, NamedTuple, assert_never

from holdfast.sdk.ids import ID_BYTES, InvocationId, ObjectId, object_id
from holdfast.sdk.journal import By, Op
from holdfast.statemachine import ops, timers
from holdfast.statemachine.approvals import Asked
from holdfast.statemachine.effects import Status
from holdfast.statemachine.queries import load, load_object
from holdfast.statemachine.records import Invocation, Object, unpack, unpack_object
from holdfast.statemachine.tables import (
    JOURNAL,
    OBJECT,
    PENDING,
    PROMISE,
    QUEUE,
    TIMER,
    after,
    step_bytes,
)
from holdfast.statemachine.txn import ReadTxn

#: The most rows that one call examines: a few milliseconds.
LOOKED_AT_MAX: Final = 500
#: The most steps of one journal that one call examines, and about as many of their bytes.
STEPS_LOOKED_AT_MAX: Final = 2000
BYTES_LOOKED_AT_MAX: Final = 1024 * 1024
RANK_BYTES: Final = ID_BYTES + 4
TIMER_RANK_BYTES: Final = 8 + ID_BYTES + 4
_OP_AT: Final = 1  # in a packed step
_FIRST_MORE: Final = 2  # the argument of a RUN in doubt is its name alone: see `steps.Tries`

AWAKEABLE: Final = "awakeable"
IN_DOUBT: Final = "in-doubt"
PROMISED: Final = "promise"
APPROVAL: Final = "approval"
TIMED: Final = "timer"
#: What waits for somebody, by what completes the step.
_KINDS: Final = {By.CLIENT: AWAKEABLE, By.PROMISE: PROMISED, By.ENDPOINT: IN_DOUBT, By.PERSON: APPROVAL}
_DUE_AT: Final = Asked._fields.index("due_ms")
_INVOKES: Final = ops.those(lambda row: row.invokes)


# -- keys ----------------------------------------------------------------------------------------------------------------


def keys(
    txn: ReadTxn, service: str | None, prefix: str, after_rank: bytes, limit: int
) -> tuple[list[tuple[bytes, Object]], bytes | None]:
    """Objects and workflows that have a holder, state or promises, in the order of their ids, which is that of no name."""
    found: list[tuple[bytes, Object]] = []
    first = OBJECT + after_rank + b"\0" if after_rank else OBJECT
    for looked_at, (key, raw) in enumerate(txn.scan(first, after(OBJECT)), start=1):
        record = unpack_object(ObjectId(key[1:]), raw)
        if service in (None, record.service) and record.key.startswith(prefix):
            found.append((key[1:], record))
        if len(found) >= limit or looked_at >= LOOKED_AT_MAX:
            return found, key[1:]
    return found, None


class Queue(NamedTuple):
    holder: Invocation | None
    waiting: list[Invocation]  # in their order
    more: bool


def queue(txn: ReadTxn, service: str, key: str, limit: int) -> Queue:
    keyed = load_object(txn, service, key)
    if keyed is None:
        return Queue(None, [], False)
    holder = load(txn, keyed.holder) if keyed.holder else None
    prefix = QUEUE + keyed.id
    ids = [InvocationId(raw) for _, raw in islice(txn.scan(prefix, after(prefix)), limit + 1)]
    waiting = [record for ident in ids[:limit] if (record := load(txn, ident)) is not None]
    return Queue(holder, waiting, len(ids) > limit)


def promises(txn: ReadTxn, service: str, key: str, limit: int) -> tuple[list[tuple[str, list[Any] | None]], bool]:
    """Names and outcomes of the promises of a workflow, and whether there are more."""
    prefix = PROMISE + object_id(service, key)
    rows = [
        (name[len(prefix) :].decode(), unpack(raw)[0])
        for name, raw in islice(txn.scan(prefix, after(prefix)), limit + 1)
    ]
    return rows[:limit], len(rows) > limit


# -- what waits ----------------------------------------------------------------------------------------------------------


class Wait(NamedTuple):
    """A step that waits for somebody, or something that a timer starts. New fields go to the end, with a default."""

    kind: str
    invocation: InvocationId
    service: str
    handler: str
    key: str | None
    step: int | None  # None: the invocation itself, for its start or its next attempt
    name: str | None
    since_ms: int
    due_ms: int  # 0: nobody knows when
    secret: bytes = b""  # of an awakeable


def waiting(
    txn: ReadTxn, kinds: Collection[str], service: str | None, after_rank: bytes, limit: int
) -> tuple[list[tuple[bytes, Wait]], bytes | None]:
    """Steps that wait for somebody, in the order of their invocations."""
    wanted: dict[int, str] = {op: kind for op, row in ops.ROWS.items() if (kind := _KINDS.get(row.by, "")) in kinds}
    found: list[tuple[bytes, Wait]] = []
    first = PENDING + after_rank + b"\0" if after_rank else PENDING
    for looked_at, (key, op) in enumerate(txn.scan(first, after(PENDING)), start=1):
        if op[0] in wanted:
            ident, index = InvocationId(key[1 : 1 + ID_BYTES]), int.from_bytes(key[1 + ID_BYTES :], "big")
            row = _wait_of(txn, ident, index, wanted[op[0]])
            if row is not None and service in (None, row.service):
                found.append((key[1:], row))
        if len(found) >= limit or looked_at >= LOOKED_AT_MAX:
            return found, key[1:]
    return found, None


def _wait_of(txn: ReadTxn, ident: InvocationId, index: int, kind: str) -> Wait | None:
    record, raw = load(txn, ident), txn.get(JOURNAL + ident + step_bytes(index))
    if record is None or raw is None:
        return None
    step = unpack(raw)
    argument = step[2]
    if kind == IN_DOUBT and (len(argument) >= _FIRST_MORE or record.status == Status.RUNNING):
        return None  # It is retried, or its attempt is at it.
    return Wait(
        kind=kind,
        invocation=ident,
        service=record.service,
        handler=record.handler,
        key=record.key,
        step=index,
        name=argument[0] if kind != AWAKEABLE else None,
        since_ms=_journaled_ms(step) or record.since_ms,
        due_ms=argument[_DUE_AT] if kind == APPROVAL else 0,
        secret=argument[0] if kind == AWAKEABLE and argument else b"",
    )


def _journaled_ms(step: list[Any]) -> int | None:
    """When the step was last changed; None: before level 2."""
    return step[7] if len(step) > 7 else None


def timed(
    txn: ReadTxn, service: str | None, after_rank: bytes, limit: int
) -> tuple[list[tuple[bytes, Wait]], bytes | None]:
    """What timers will start: sleeps that end, steps and attempts that are tried again, scheduled starts. Earliest first."""
    found: list[tuple[bytes, Wait]] = []
    first = TIMER + after_rank + b"\0" if after_rank else TIMER
    for looked_at, (key, _) in enumerate(txn.scan(first, after(TIMER)), start=1):
        row = _timed_of(txn, timers.unpack_key(key))
        if row is not None and service in (None, row.service):
            found.append((key[1:], row))
        if len(found) >= limit or looked_at >= LOOKED_AT_MAX:
            return found, key[1:]
    return found, None


def _timed_of(txn: ReadTxn, timer: timers.Timer) -> Wait | None:
    if timer.kind is timers.Kind.PROMISES:
        return None
    ident = InvocationId(timer.id)
    record = load(txn, ident)
    if record is None:
        return None
    name, since_ms, index = None, record.since_ms, None
    if timer.kind is timers.Kind.STEP:
        raw = txn.get(JOURNAL + ident + step_bytes(timer.step))
        if raw is None:
            return None
        step, index = unpack(raw), timer.step
        name, since_ms = "sleep" if step[0] == Op.SLEEP else step[2][0], _journaled_ms(step) or since_ms
    elif timer.kind is timers.Kind.INVOCATION:
        name = "start" if record.status == Status.SCHEDULED else "next attempt"
    else:
        assert_never(timer.kind)
    return Wait(
        kind=TIMED,
        invocation=ident,
        service=record.service,
        handler=record.handler,
        key=record.key,
        step=index,
        name=name,
        since_ms=since_ms,
        due_ms=timer.due_ms,
    )


# -- calls ---------------------------------------------------------------------------------------------------------------


class Child(NamedTuple):
    """An invocation that a step called or sent. New fields go to the end, with a default."""

    step: int
    id: InvocationId
    service: str
    handler: str
    key: str | None


def children(txn: ReadTxn, ident: InvocationId, start: int, limit: int) -> tuple[list[Child], int | None]:
    """At most `limit` invocations that steps from `start` on called or sent, and the step to go on with (None: these are
    all)."""
    found: list[Child] = []
    read = 0
    steps: Iterator[tuple[bytes, bytes]] = txn.scan(JOURNAL + ident + step_bytes(start), after(JOURNAL + ident))
    for looked_at, (key, raw) in enumerate(steps, start=1):
        index = int.from_bytes(key[1 + ID_BYTES :], "big")
        read += len(raw)
        if raw[_OP_AT] in _INVOKES and (child := _child_of(index, raw)) is not None:
            found.append(child)
        if len(found) >= limit or looked_at >= STEPS_LOOKED_AT_MAX or read >= BYTES_LOOKED_AT_MAX:
            return found, index + 1
    return found, None


def _child_of(index: int, raw: bytes) -> Child | None:
    op, _, argument = unpack(raw)[:3]
    if not argument or type(argument[-1]) is not bytes or len(argument[-1]) != ID_BYTES:
        return None  # It was refused, and began nothing.
    named = dict(zip((kept.name for kept in ops.ROWS[op].kept), argument[:-1], strict=False))
    return Child(
        step=index,
        id=InvocationId(argument[-1]),
        service=named["service"],
        handler=named["handler"],
        key=named.get("key"),
    )


def records(txn: ReadTxn, ids: list[InvocationId]) -> list[Invocation]:
    """Those of these invocations that are known."""
    return [record for ident in ids if (record := load(txn, ident)) is not None]
