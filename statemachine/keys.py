"""One writer per key: an exclusive handler holds its key from the moment it may run until it completes.

Later ones wait in a queue, in order of arrival. Shared handlers hold nothing.
"""

from __future__ import annotations

from itertools import islice

from holdfast.sdk.ids import NO_INVOCATION, InvocationId
from holdfast.statemachine.records import Invocation, Object
from holdfast.statemachine.state import State
from holdfast.statemachine.tables import QUEUE, after, long_bytes


def object_of(state: State, record: Invocation) -> Object:
    return state.object(record.oid, record.service, record.key or "")


def acquire(state: State, record: Invocation) -> bool:
    """Whether the invocation holds the key now. If not, it is in the queue."""
    keyed = object_of(state, record)
    state.touch_object(keyed)
    if not keyed.holder:
        keyed.holder = record.id
        return True
    keyed.place += 1
    keyed.waiting += 1
    record.place = keyed.place
    state.put(QUEUE + record.oid + long_bytes(record.place), record.id)
    return False


def leave(state: State, record: Invocation) -> None:
    """Leave the queue."""
    keyed = object_of(state, record)
    _one_less(keyed)
    state.touch_object(keyed)
    state.delete(QUEUE + record.oid + long_bytes(record.place))


def release(state: State, record: Invocation) -> Invocation | None:
    """Give the key to the next invocation in the queue, and return that."""
    keyed = object_of(state, record)
    assert keyed.holder == record.id, "only the holder releases a key"
    keyed.holder = NO_INVOCATION
    state.touch_object(keyed)
    if not keyed.waiting:
        return None
    queue = QUEUE + record.oid
    [(key, raw)] = islice(state.scan(queue, after(queue)), 1)
    ident = InvocationId(raw)
    state.delete(key)
    next_holder = state.load(ident)
    assert next_holder is not None, "every queued invocation is active"
    _one_less(keyed)
    keyed.holder = ident
    return next_holder


def _one_less(keyed: Object) -> None:
    """Places start again from zero with every queue, so an idle object needs no record."""
    keyed.waiting -= 1
    if not keyed.waiting:
        keyed.place = 0
