"""One writer per key: exclusive handlers hold their key from the moment they may run until they complete.

Who comes while the key is held waits in a queue, in order of arrival. Shared handlers hold nothing.
"""

from __future__ import annotations

from itertools import islice

from holdfast.statemachine.records import Invocation, Object
from holdfast.statemachine.state import State
from holdfast.statemachine.tables import QUEUE, after, long_bytes


def object_of(state: State, record: Invocation) -> Object:
    return state.object(record.oid, record.service, record.key or "")


def acquire(state: State, record: Invocation) -> bool:
    """Whether it holds the key now. If not, it is in the queue."""
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
    """It no longer wants to wait."""
    keyed = object_of(state, record)
    _one_less(keyed)
    state.touch_object(keyed)
    state.delete(QUEUE + record.oid + long_bytes(record.place))


def release(state: State, record: Invocation) -> Invocation | None:
    """Who holds the key now instead."""
    keyed = object_of(state, record)
    assert keyed.holder == record.id, "only the holder gives a key back"
    keyed.holder = b""
    state.touch_object(keyed)
    if not keyed.waiting:
        return None
    queue = QUEUE + record.oid
    [(key, ident)] = islice(state.scan(queue, after(queue)), 1)
    state.delete(key)
    heir = state.load(ident)
    assert heir is not None, "whoever waits is active"
    _one_less(keyed)
    keyed.holder = ident
    return heir


def _one_less(keyed: Object) -> None:
    """Places start anew with every queue, so that nothing of an idle object has to be remembered."""
    keyed.waiting -= 1
    if not keyed.waiting:
        keyed.place = 0
