"""The state of virtual objects and workflows: names and payloads, written by the holder of the key."""

from __future__ import annotations

from typing import Any, Final

from holdfast.sdk.ids import ObjectId, object_id
from holdfast.sdk.journal import NAME_BYTES_MAX, Op
from holdfast.statemachine import blobs, refs
from holdfast.statemachine.commands import Payload, Ref, SetState
from holdfast.statemachine.effects import OK, Code, Result
from holdfast.statemachine.records import Object, pack, unpack
from holdfast.statemachine.state import State
from holdfast.statemachine.tables import LARGE, VALUE, after
from holdfast.statemachine.txn import ReadTxn

_SET: Final = Op.SET
_CLEAR: Final = Op.CLEAR
_CLEAR_ALL: Final = Op.CLEAR_ALL


def is_name(value: object) -> bool:
    return type(value) is str and 0 < len(value.encode()) <= NAME_BYTES_MAX


def get(state: State, oid: ObjectId, name: str) -> Payload | None:
    key = VALUE + oid + name.encode()
    raw = state.get(key)
    return None if raw is None else stored(state, key, raw)


def stored(txn: ReadTxn, key: bytes, raw: bytes) -> Payload:
    """The payload of a row. An empty value is empty, unless there is a reference for it."""
    if raw:
        return raw
    ref = txn.get(LARGE + key[1:])
    return b"" if ref is None else unpack(ref)


def apply(state: State, keyed: Object, op: int, argument: list[Any]) -> None:
    """Carry out a SET, CLEAR or CLEAR_ALL of a journal."""
    if op == _SET:
        put(state, keyed, argument[0], argument[1])
    elif op == _CLEAR:
        remove(state, keyed, argument[0])
    elif op == _CLEAR_ALL:
        clear(state, keyed)


def put(state: State, keyed: Object, name: str, payload: Payload) -> None:
    key = VALUE + keyed.id + name.encode()
    before = get(state, keyed.id, name)
    size = refs.size_of(payload)
    if before is None:
        keyed.names += 1
        keyed.size += len(key) + size
        state.touch_object(keyed)
    elif size != refs.size_of(before):
        keyed.size += size - refs.size_of(before)
        state.touch_object(keyed)
    blobs.acquire(state, payload)
    blobs.release(state, before)
    if type(payload) is bytes:
        state.put(key, payload)
        if type(before) is Ref:
            state.delete(LARGE + key[1:])
    else:
        state.put(key, b"")
        state.put(LARGE + key[1:], pack(payload))


def remove(state: State, keyed: Object, name: str) -> None:
    key = VALUE + keyed.id + name.encode()
    before = get(state, keyed.id, name)
    if before is not None:
        keyed.names -= 1
        keyed.size -= len(key) + refs.size_of(before)
        state.touch_object(keyed)
        state.delete(key)
        if type(before) is Ref:
            state.delete(LARGE + key[1:])
            blobs.release(state, before)


def clear(state: State, keyed: Object) -> int:
    """Remove all names. Returns how many there were."""
    if not keyed.names:
        return 0
    prefix = VALUE + keyed.id
    keys = [key for key, _ in state.scan(prefix, after(prefix))]
    for key in keys:
        state.delete(key)
    large = LARGE + keyed.id
    for key, raw in list(state.scan(large, after(large))):
        state.delete(key)
        blobs.release(state, unpack(raw))
    keyed.names = 0
    keyed.size = 0
    state.touch_object(keyed)
    return len(keys)


def names(state: State, oid: ObjectId) -> list[str]:
    prefix = VALUE + oid
    return [key[17:].decode() for key, _ in state.scan(prefix, after(prefix))]


def fingerprint(payload: Payload) -> bytes:
    """The same for the same value, whether it is here or somewhere else."""
    ref = refs.make(payload)[0] if isinstance(payload, bytes) else payload
    return bytes([ref.code]) + ref.data


def _fingerprint_of(state: State, keyed: Object, name: str) -> bytes | None:
    payload = get(state, keyed.id, name)
    return None if payload is None else fingerprint(payload)


def edit(state: State, command: SetState) -> Result:
    """Edit state for an operator, while no invocation may write it."""
    if not all(is_name(name) for name in command.values):
        return Result(Code.MALFORMED, f"a name of state must have 1 to {NAME_BYTES_MAX} bytes")
    keyed = state.object(object_id(command.service, command.key), command.service, command.key)
    if keyed.holder:
        return Result(Code.CONFLICT, "an invocation holds this key: wait until it is completed, or cancel it")
    if command.expect is not None:
        if state.level < 2:  # Proposed when every node supports level 2, and before this partition was told.
            return Result(Code.CONFLICT, "the partition is being upgraded: try again in a moment")
        differing = [name for name, mark in command.expect.items() if mark != _fingerprint_of(state, keyed, name)]
        if differing:
            return Result(Code.CONFLICT, "the state has changed", differing)
    if command.replace:
        clear(state, keyed)
    for name, payload in command.values.items():
        if payload is None:
            remove(state, keyed, name)
        else:
            put(state, keyed, name, payload)
    return OK
