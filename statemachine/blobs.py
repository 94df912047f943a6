"""Large values. Each is stored once, under its sha256 and size, and collected when nothing refers to it.

A proposer stages a large value first: `TouchBlob` asks whether it is here; `KeepBlob` gives its name in the shared store;
without a store, `PutBlob` brings it piece by piece. The command that refers to it follows. A reference to a missing value
is refused (`missing`), and the proposer stages the value again. So every reference in the state has its value.

Each record that refers to a blob is counted: a step, an outcome, a value of a key, a promise, a message in an outbox. A
blob without references stays for KEPT_MS after it was last staged or released, so that a command about to refer to it, or
a client about to read it, still finds it. Then a timer removes it. The name of an unused object is noted (GONE) until the
leader has deleted the object.

An object name is accepted at most once, although its command may arrive twice, late, or from a node that was long
believed dead. The name holds the time at which it was made, and is accepted only while the time of the state is within
KEEP_MS of it. That is less than half of KEPT_MS, so when the name could come again, the blob that it was first used for
is still here (docs/adr/0005).
"""

from __future__ import annotations

import re
from hashlib import sha256
from itertools import islice
from typing import Any, Final

from holdfast.statemachine import refs
from holdfast.statemachine.commands import Command, ForgetObjects, KeepBlob, Payload, PutBlob, Ref, TouchBlob
from holdfast.statemachine.effects import OK, Code, DeleteObjects, Result
from holdfast.statemachine.records import Blob, Invocation, pack_blob, unpack_blob
from holdfast.statemachine.state import State
from holdfast.statemachine.tables import BLOB, BLOB_DUE, CHUNK, GONE, TIME_MAX, after, long_bytes, step_bytes
from holdfast.statemachine.txn import ReadTxn

#: Every piece but the last has this many bytes, so pieces of several proposers fit together.
CHUNK_BYTES: Final = 256 * 1024
KEPT_MS: Final = 10 * 60_000
#: The largest difference between the time in an object's name and the time of the state that accepts it.
KEEP_MS: Final = KEPT_MS // 2 - 1
_MALFORMED: Final = Result(Code.MALFORMED, "this is not a piece of a blob")
_WRONG: Final = Result(Code.MISMATCH, "the bytes do not match the name of the blob; stage it again")
_HERE: Final = Result(Code.UNCHANGED, "the value is already here")
_STALE: Final = Result(
    Code.OUTDATED,
    "the object was made too long ago, or later than now: upload it again under a new name, or send the value in pieces",
)
_NO_OBJECT: Final = Result(Code.MALFORMED, "the name is not that of an object of this blob")
_OBJECT: Final = re.compile(r"([0-9]{13})-([0-9a-f]{64})-[0-9a-f]{16}")


def chunks_of(size: int) -> int:
    return -(-size // CHUNK_BYTES)


def chunk_key(blob: bytes, index: int) -> bytes:
    return CHUNK + blob + step_bytes(index)


def find(txn: ReadTxn, blob: bytes) -> Blob | None:
    raw = txn.get(BLOB + blob)
    return None if raw is None else unpack_blob(blob, raw)


def is_whole(found: Blob) -> bool:
    return found.object != "" or found.chunks == chunks_of(refs.stored_size(found.name))


def _is_name(blob: Any) -> bool:
    return type(blob) is bytes and len(blob) == refs.ID_BYTES and 0 < refs.stored_size(blob) <= refs.SIZE_MAX


# -- objects of the shared store ---------------------------------------------------------------------------------------


def object_name(blob: bytes, created_ms: int, nonce: bytes) -> str:
    """The name of a new object, below the partition's prefix. Names sort by age and never repeat: `nonce` is random."""
    return f"{created_ms:013d}-{blob[:32].hex()}-{nonce.hex()}"


def created_ms_of(name: str) -> int | None:
    """When the object was made, by the clock of its maker. None: this is not the name of an object."""
    match = _OBJECT.fullmatch(name)
    return int(match[1]) if match is not None else None


def is_known(txn: ReadTxn, name: str) -> bool:
    """Whether the state knows this object: it holds a value, or is about to be deleted."""
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
    """The first blob after this one that is in the shared store."""
    for key, raw in txn.scan(BLOB + after_blob + b"\0" if after_blob else BLOB, after(BLOB)):
        found = unpack_blob(key[1:], raw)
        if found.object:
            return found
    return None


def bring_back(state: State, blob: bytes, data: bytes) -> None:
    """Move a blob from the shared store into pieces here. Nothing else changes."""
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
    """Forget the objects to be deleted. They belong to the cluster that was backed up."""
    for key, _ in list(state.scan(GONE, after(GONE))):
        state.delete(key)
    state.meta.gone = 0


# -- staging -----------------------------------------------------------------------------------------------------------


def touch(state: State, command: TouchBlob) -> Result:
    """Whether the blob is here. If so, it stays for a while."""
    found = find(state, command.blob) if _is_name(command.blob) else None
    if found is None or not is_whole(found):
        return Result(Code.NOT_FOUND, "the value is not here, or not all of it")
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
    """The first complete copy wins. A later object that is not needed is deleted."""
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
    """Whether the bytes match the name. This is the last check: from here on they are trusted."""
    hasher = sha256()
    for index in range(chunks_of(refs.stored_size(blob))):
        data = state.get(chunk_key(blob, index))
        assert data is not None, "all of it is here"
        hasher.update(data)
    return hasher.digest() == blob[:32]


def missing(state: State, command: Command) -> Result | None:
    """The refusal of a command that refers to a missing value. None: everything is here."""
    for ref in refs.in_command(command):
        found = find(state, ref.data) if refs.is_ref(ref) else None
        if found is None or not is_whole(found):
            return Result(Code.VALUE_MISSING, "the command refers to a large value that is not here: stage it again")
    return None


# -- counting ----------------------------------------------------------------------------------------------------------


def acquire(state: State, payload: Payload | None) -> None:
    """Count one more reference."""
    if type(payload) is not Ref:
        return
    found = find(state, payload.data)
    assert found is not None and is_whole(found), "a blob is here before anything refers to it"
    found.refs += 1
    if found.due_ms:
        state.delete(due_key(found.due_ms, found.name))
        found.due_ms = 0
    _store(state, found)


def release(state: State, payload: Payload | None) -> None:
    """Count one reference less. Where a value replaces another, the new one is acquired first; KEPT_MS makes the order
    safe either way."""
    if type(payload) is not Ref:
        return
    found = find(state, payload.data)
    assert found is not None and found.refs > 0, "a referenced blob is here"
    found.refs -= 1
    _keep(state, found)
    _store(state, found)


def add_to_journal(state: State, record: Invocation, ref: Ref) -> None:
    acquire(state, ref)
    record.blobs += 1
    record.blob_bytes += refs.size_of(ref)


def drop_step(state: State, record: Invocation, step: list[Any]) -> None:
    """Release the references of a step whose journal is being removed. The size of the journal stays: nothing is appended
    to it any more."""
    for ref in refs.in_step(step[0], step[2], step[5]):
        release(state, ref)
        record.blobs -= 1


def _keep(state: State, found: Blob) -> None:
    """Schedule the removal of a blob if nothing refers to it."""
    if found.refs:
        return
    if found.due_ms:
        state.delete(due_key(found.due_ms, found.name))
    found.due_ms = min(state.now_ms + KEPT_MS, TIME_MAX)
    state.put(due_key(found.due_ms, found.name), b"")
    state.remind_of(found.due_ms)


def _store(state: State, found: Blob) -> None:
    state.put(BLOB + found.name, pack_blob(found))


# -- collecting --------------------------------------------------------------------------------------------------------


def due_key(due_ms: int, blob: bytes) -> bytes:
    return BLOB_DUE + long_bytes(due_ms) + blob


def collect(state: State, budget: int) -> None:
    """Remove blobs that are due: about `budget` pieces at most, but at least one blob."""
    end = BLOB_DUE + long_bytes(min(state.now_ms + 1, TIME_MAX))
    due = [key[9:] for key, _ in islice(state.scan(BLOB_DUE, end), max(budget, 1))]
    for blob in due:
        if budget <= 0:
            return
        found = find(state, blob)
        assert found is not None and not found.refs, "a blob that is due exists, and nothing refers to it"
        budget -= 1 if found.object else chunks_of(refs.stored_size(blob))
        _remove(state, found)


def _remove(state: State, found: Blob) -> None:
    if found.object:
        _delete_object(state, found.object)
        state.meta.stored -= 1
        state.meta.stored_bytes -= refs.stored_size(found.name)
    _remove_chunks(state, found)
    if found.due_ms:
        state.delete(due_key(found.due_ms, found.name))
    state.delete(BLOB + found.name)
    state.meta.blobs -= 1


def _remove_chunks(state: State, found: Blob) -> None:
    if not found.chunks:
        return
    for index in range(chunks_of(refs.stored_size(found.name))):
        data = state.get(chunk_key(found.name, index))
        if data is not None:
            state.meta.blob_bytes -= len(data)
            state.delete(chunk_key(found.name, index))
    found.chunks = 0


def _delete_object(state: State, name: str) -> None:
    """Note an object for deletion. Readers that still use it started long ago: see KEPT_MS."""
    if state.get(GONE + name.encode()) is None:
        state.put(GONE + name.encode(), b"")
        state.meta.gone += 1
    state.effects.append(DeleteObjects())


def next_due(txn: ReadTxn) -> int | None:
    for key, _ in txn.scan(BLOB_DUE, after(BLOB_DUE)):
        return int.from_bytes(key[1:9], "big")
    return None
