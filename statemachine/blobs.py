"""Large values, each kept once, under its sha256 and size; collected when nothing refers to it.

Whoever has a large value to say stages it first: `TouchBlob` asks whether it is here; `KeepBlob` says under which name it is
in the store that all nodes share, and where there is none, `PutBlob` brings it piece by piece. The command that refers to it
comes behind. A reference to what is not here is refused (`missing`), and whoever proposed it stages it again; so nothing in
the state ever refers to nothing.

Each record that refers to a blob is counted: a step, an outcome, a value of a key, a promise, a message in an outbox. One that
nothing refers to stays for a while (KEPT_MS) after it was last staged or let go, so that it is still there for who is about to
refer to it, or to read it for a client. Then it goes, by timers. The name of an object that nothing refers to any more is
written down (GONE) until the leader has deleted the object.

A name of an object is taken once at most, although the command that says it may come twice, late, or from who was long
believed dead. It holds the time of its making, and counts only while the time of the state is within KEEP_MS of that. That is
less than half of KEPT_MS: so when it could come again, what it was first taken for is still here (docs/adr/0005).
"""

from __future__ import annotations

import re
from hashlib import sha256
from itertools import islice
from typing import Any, Final

from holdfast.statemachine import refs
from holdfast.statemachine.commands import Command, ForgetObjects, KeepBlob, Payload, PutBlob, Ref, TouchBlob
from holdfast.statemachine.effects import OK, DeleteObjects, Result
from holdfast.statemachine.records import Blob, Invocation, pack_blob, unpack_blob
from holdfast.statemachine.state import State
from holdfast.statemachine.tables import BLOB, BLOB_DUE, CHUNK, GONE, TIME_MAX, after, long_bytes, step_bytes
from holdfast.statemachine.txn import ReadTxn

#: Every piece but the last has this many bytes, whoever staged it: so pieces of several proposers fit together.
CHUNK_BYTES: Final = 256 * 1024
KEPT_MS: Final = 10 * 60_000
#: How far the making of an object may be from the time of the state that takes its name, before or behind it.
KEEP_MS: Final = KEPT_MS // 2 - 1
STALE: Final = 410
MISSING: Final = 424
_MALFORMED: Final = Result(400, "not a piece of a blob")
_WRONG: Final = Result(422, "the bytes do not match the name of the blob; stage it again")
_HERE: Final = Result(200, "it is here already")
_STALE: Final = Result(STALE, "the object was not made just now: make another one, or bring the value in pieces")
_NO_OBJECT: Final = Result(400, "not an object of this blob")
_OBJECT: Final = re.compile(r"([0-9]{13})-([0-9a-f]{64})-[0-9a-f]{16}")


def chunks_of(size: int) -> int:
    return -(-size // CHUNK_BYTES)


def chunk_key(blob: bytes, index: int) -> bytes:
    return CHUNK + blob + step_bytes(index)


def find(txn: ReadTxn, blob: bytes) -> Blob | None:
    raw = txn.get(BLOB + blob)
    return None if raw is None else unpack_blob(blob, raw)


def is_whole(found: Blob) -> bool:
    return found.object != "" or found.chunks == chunks_of(refs.stored_size(found.id))


def _is_name(blob: Any) -> bool:
    return type(blob) is bytes and len(blob) == refs.ID_BYTES and 0 < refs.stored_size(blob) <= refs.SIZE_MAX


# -- objects of the shared store ---------------------------------------------------------------------------------------


def object_name(blob: bytes, created_ms: int, nonce: bytes) -> str:
    """Of a new object, below the names of the partition. By age, and never the same again: `nonce` is random."""
    return f"{created_ms:013d}-{blob[:32].hex()}-{nonce.hex()}"


def created_ms_of(name: str) -> int | None:
    """When the object was made, by the clock of who made it; None: it is no name of an object."""
    match = _OBJECT.fullmatch(name)
    return int(match[1]) if match is not None else None


def is_known(txn: ReadTxn, name: str) -> bool:
    """Whether the state has heard of this object: it has a value in it, or is to be deleted anyway."""
    match = _OBJECT.fullmatch(name)
    if match is None:
        return False
    if txn.get(GONE + name.encode()) is not None:
        return True
    prefix = BLOB + bytes.fromhex(match[2])
    rows = txn.scan(prefix, after(prefix))
    return any(unpack_blob(key[1:], raw).object == name for key, raw in rows)


# -- a state that is to need no store: a copy for a backup ----------------------------------------------------------------


def next_stored(txn: ReadTxn, after_blob: bytes) -> Blob | None:
    """The first behind this one that is in the shared store."""
    for key, raw in txn.scan(BLOB + after_blob + b"\0" if after_blob else BLOB, after(BLOB)):
        found = unpack_blob(key[1:], raw)
        if found.object:
            return found
    return None


def bring_back(state: State, blob: bytes, data: bytes) -> None:
    """From the shared store into pieces here. Nothing else changes."""
    found = find(state, blob)
    assert found is not None and found.object and len(data) == refs.stored_size(blob), "it is in the store"
    for index in range(chunks_of(len(data))):
        state.put(chunk_key(blob, index), data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES])
    state.meta.stored -= 1
    state.meta.stored_bytes -= len(data)
    state.meta.blob_bytes += len(data)
    found.chunks, found.object = chunks_of(len(data)), ""
    _store(state, found)


def forget_all(state: State) -> None:
    """Objects that are to be deleted are somebody else's to delete."""
    for key, _ in list(state.scan(GONE, after(GONE))):
        state.delete(key)
    state.meta.gone = 0


# -- staging -----------------------------------------------------------------------------------------------------------


def touch(state: State, command: TouchBlob) -> Result:
    """Whether it is here; if so, it stays a while."""
    found = find(state, command.blob) if _is_name(command.blob) else None
    if found is None or not is_whole(found):
        return Result(404, "it is not here, or not all of it")
    _keep(state, found)
    _store(state, found)
    return _HERE


def put(state: State, command: PutBlob) -> Result:
    blob, index, data = command
    if not _is_name(blob) or type(data) is not bytes:
        return _MALFORMED
    size = refs.stored_size(blob)
    if not 0 <= index < chunks_of(size) or len(data) != min(CHUNK_BYTES, size - index * CHUNK_BYTES):
        return _MALFORMED
    found = find(state, blob)
    if found is None:
        found = Blob(blob)
        state.meta.blobs += 1
    known = found.object != "" or state.get(chunk_key(blob, index)) is not None
    if not known:
        state.put(chunk_key(blob, index), data)
        state.meta.blob_bytes += len(data)
        found.chunks += 1
        if is_whole(found) and not _is_sound(state, blob):
            _remove(state, found)
            return _WRONG
    _keep(state, found)
    _store(state, found)
    return _HERE if known else OK


def keep(state: State, command: KeepBlob) -> Result:
    """The first that is whole wins. What comes later, and is not needed, is deleted."""
    blob, name = command
    match = _OBJECT.fullmatch(name) if _is_name(blob) and type(name) is str else None
    if match is None or match[2] != blob[:32].hex():
        return _NO_OBJECT
    if abs(state.now_ms - int(match[1])) > KEEP_MS:
        return _STALE
    found = find(state, blob)
    if found is not None and is_whole(found):
        if found.object != name:
            _delete_object(state, name)
        _keep(state, found)
        _store(state, found)
        return _HERE
    if found is None:
        found = Blob(blob)
        state.meta.blobs += 1
    _remove_chunks(state, found)
    found.object = name
    state.meta.stored += 1
    state.meta.stored_bytes += refs.stored_size(blob)
    _keep(state, found)
    _store(state, found)
    return OK


def forget(state: State, command: ForgetObjects) -> Result:
    for name in command.objects:
        if created_ms_of(name) is not None and state.get(GONE + name.encode()) is not None:
            state.delete(GONE + name.encode())
            state.meta.gone -= 1
    return OK


def _is_sound(state: State, blob: bytes) -> bool:
    """The last moment to find out: from now on it is believed."""
    hasher = sha256()
    for index in range(chunks_of(refs.stored_size(blob))):
        data = state.get(chunk_key(blob, index))
        assert data is not None, "all of it is here"
        hasher.update(data)
    return hasher.digest() == blob[:32]


def missing(state: State, command: Command) -> Result | None:
    """Why this command cannot be carried out: it refers to what is not here."""
    for ref in refs.in_command(command):
        found = find(state, ref.data) if refs.is_ref(ref) else None
        if found is None or not is_whole(found):
            return Result(MISSING, "it refers to a value that is not here: stage it again")
    return None


# -- counting ----------------------------------------------------------------------------------------------------------


def acquire(state: State, payload: Payload | None) -> None:
    """One more record refers to it."""
    if type(payload) is not Ref:
        return
    found = find(state, payload.data)
    assert found is not None and is_whole(found), "whoever refers to a blob has seen it here"
    found.refs += 1
    if found.due_ms:
        state.delete(due_key(found.due_ms, found.id))
        found.due_ms = 0
    _store(state, found)


def release(state: State, payload: Payload | None) -> None:
    """One less. What is acquired in the same place is acquired first, though nothing depends on it: see KEPT_MS."""
    if type(payload) is not Ref:
        return
    found = find(state, payload.data)
    assert found is not None and found.refs > 0, "what is referred to is here"
    found.refs -= 1
    _keep(state, found)
    _store(state, found)


def add_to_journal(state: State, record: Invocation, ref: Ref) -> None:
    acquire(state, ref)
    record.blobs += 1
    record.blob_bytes += refs.size_of(ref)


def drop_step(state: State, record: Invocation, step: list[Any]) -> None:
    """A step of its journal goes. How many bytes it had stays as it was: nothing is added to a journal that is going."""
    for ref in refs.in_step(step[0], step[2], step[5]):
        release(state, ref)
        record.blobs -= 1


def _keep(state: State, found: Blob) -> None:
    """Nothing may refer to it: then it goes, but not before its time."""
    if found.refs:
        return
    if found.due_ms:
        state.delete(due_key(found.due_ms, found.id))
    found.due_ms = min(state.now_ms + KEPT_MS, TIME_MAX)
    state.put(due_key(found.due_ms, found.id), b"")
    state.remind_of(found.due_ms)


def _store(state: State, found: Blob) -> None:
    state.put(BLOB + found.id, pack_blob(found))


# -- collecting --------------------------------------------------------------------------------------------------------


def due_key(due_ms: int, blob: bytes) -> bytes:
    return BLOB_DUE + long_bytes(due_ms) + blob


def collect(state: State, budget: int) -> None:
    """Remove what nothing refers to and whose time has come: about `budget` pieces at most, but at least one blob."""
    end = BLOB_DUE + long_bytes(min(state.now_ms + 1, TIME_MAX))
    due = [key[9:] for key, _ in islice(state.scan(BLOB_DUE, end), max(budget, 1))]
    for blob in due:
        if budget <= 0:
            return
        found = find(state, blob)
        assert found is not None and not found.refs, "what is due is there, and nothing refers to it"
        budget -= 1 if found.object else chunks_of(refs.stored_size(blob))
        _remove(state, found)


def _remove(state: State, found: Blob) -> None:
    if found.object:
        _delete_object(state, found.object)
        state.meta.stored -= 1
        state.meta.stored_bytes -= refs.stored_size(found.id)
    _remove_chunks(state, found)
    if found.due_ms:
        state.delete(due_key(found.due_ms, found.id))
    state.delete(BLOB + found.id)
    state.meta.blobs -= 1


def _remove_chunks(state: State, found: Blob) -> None:
    if not found.chunks:
        return
    for index in range(chunks_of(refs.stored_size(found.id))):
        data = state.get(chunk_key(found.id, index))
        if data is not None:
            state.meta.blob_bytes -= len(data)
            state.delete(chunk_key(found.id, index))
    found.chunks = 0


def _delete_object(state: State, name: str) -> None:
    """Nobody will refer to it any more. Who still reads it began long ago: see KEPT_MS."""
    if state.get(GONE + name.encode()) is None:
        state.put(GONE + name.encode(), b"")
        state.meta.gone += 1
    state.effects.append(DeleteObjects())


def next_due(txn: ReadTxn) -> int | None:
    for key, _ in txn.scan(BLOB_DUE, after(BLOB_DUE)):
        return int.from_bytes(key[1:9], "big")
    return None
