"""The journal of an invocation: its operations, its steps and their outcomes, as they are stored and as they are sent.

The node's state machine and the SDK both import this module. It knows nothing of frames: a second handler protocol has the
same journal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final, NamedTuple, TypeAlias

import msgpack

from holdfast.sdk.ids import derive

NAME_BYTES_MAX: Final = 128  # of services, handlers, steps, promises, state
KEY_BYTES_MAX: Final = 512  # of virtual objects and workflows
STEP_KEY_BYTES_MAX: Final = 512
PAYLOAD_BYTES_MAX: Final = 32 * 1024 * 1024
INT_MAX: Final = 2**63 - 1


class ProtocolError(Exception):
    """The other side sent what no correct implementation sends. `invocation` and `epoch` name the attempt that it concerns. If
    there is none, the stream that carried it ends."""

    def __init__(self, message: str, invocation: bytes | None = None, epoch: int = 0) -> None:
        super().__init__(message)
        self.invocation = invocation
        self.epoch = epoch


# -- digests ------------------------------------------------------------------------------------------------------------

DIGEST_BYTES: Final = 16


def digest(given: bytes | list[Any]) -> bytes:
    """What a journal keeps in place of a payload or outcome, to compare it in replay."""
    if isinstance(given, bytes):
        return blake2b(given, digest_size=DIGEST_BYTES).digest()
    if given[0] == 0:
        return digest(given[1])
    _, code, message, kind = given[:4]  # The details of a failure are for people.
    return derive(DIGEST_BYTES, b"failure", str(code).encode(), message.encode(), kind.encode())


# -- outcomes --------------------------------------------------------------------------------------------------------


class Success(NamedTuple):
    """The outcome of a step or an invocation that gave a result."""

    payload: bytes


class Failure(NamedTuple):
    """The outcome of a step or an invocation that failed. `code` is an HTTP status; `kind` names the class of the error.

    `extra` holds optional details: "metadata", a map of texts that the code attached for its callers, and "trace", the
    innermost frames ("orders.py:123 in charge"). It is None, never an empty map, if there are none.
    """

    code: int
    message: str
    kind: str = ""
    extra: dict[str, Any] | None = None


#: On the wire and in the journal an outcome is [0, payload], [1, code, message, kind] or [1, code, message, kind, extra].
#: Version 1 of the protocol has no `extra`. `pack_outcome` and `unpack_outcome` translate.
Outcome: TypeAlias = Success | Failure

CANCELLED: Final = Failure(409, "the invocation was cancelled", "Cancelled")
KILLED: Final = Failure(409, "the invocation was killed", "Killed")

MESSAGE_BYTES_MAX: Final = 8 * 1024  # Of a failure's text; longer ones are cut.


METADATA_BYTES_MAX: Final = 4 * 1024  # of all names and values of a failure's metadata
TRACE_MAX: Final = 8  # frames of a failure's trace, and
TRACE_BYTES_MAX: Final = 2 * 1024  # bytes of all of them


def pack_outcome(outcome: Outcome) -> list[Any]:
    if isinstance(outcome, Success):
        return [0, outcome.payload]
    code, message, kind, extra = outcome
    return [1, code, message, kind, extra] if extra else [1, code, message, kind]


def pack_success(payload: bytes) -> list[Any]:
    return [0, payload]


def unpack_outcome(value: Any) -> Outcome:
    """The outcome. Parts of a failure that are too long are cut to their bounds."""
    if type(value) is list:
        if len(value) == 2 and value[0] == 0 and type(value[1]) is bytes:
            return Success(value[1])
        if len(value) in (4, 5) and value[0] == 1 and [type(field) for field in value[1:4]] == [int, str, str]:
            if not 100 <= value[1] <= 999:
                raise ProtocolError(f"the code of a failure must be an HTTP status, not {value[1]}")
            extra = _cut_extra(value[4]) if len(value) == 5 else None
            return Failure(value[1], cut_text(value[2]), value[3][:200], extra)
    raise ProtocolError("an outcome must be [0, payload] or [1, code, message, kind], optionally followed by a map")


def without_extra(outcome: list[Any]) -> list[Any]:
    """The outcome for a receiver that does not know the fifth element of a failure."""
    return outcome[:4] if outcome[:1] == [1] else outcome


def _cut_extra(value: Any) -> dict[str, Any] | None:
    """The details of a failure within their bounds. Unknown names are dropped."""
    if type(value) is not dict:
        raise ProtocolError("the fifth element of a failure must be a map")
    extra: dict[str, Any] = {}
    metadata = value.get("metadata")
    if metadata is not None:
        if type(metadata) is not dict or not all(type(k) is str and type(v) is str for k, v in metadata.items()):
            raise ProtocolError("the metadata of a failure must be a map of texts")
        kept = cut_metadata(metadata)
        if kept:
            extra["metadata"] = kept
    trace = value.get("trace")
    if trace is not None:
        if type(trace) is not list or not all(type(line) is str for line in trace):
            raise ProtocolError("the trace of a failure must be a list of texts")
        lines = cut_trace(trace)
        if lines:
            extra["trace"] = lines
    return extra or None


def cut_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    """The entries that fit into METADATA_BYTES_MAX, in their order, and always encodable."""
    kept: dict[str, str] = {}
    size = 0
    for name, text in metadata.items():
        name, text = _encodable(name), _encodable(text)
        size += len(name.encode()) + len(text.encode())
        if size > METADATA_BYTES_MAX:
            break
        kept[name] = text
    return kept


def cut_trace(lines: Sequence[str]) -> list[str]:
    """The last lines that fit into their bounds: the innermost frames."""
    kept: list[str] = []
    size = 0
    for line in reversed(lines[-TRACE_MAX:]):
        line = _encodable(line)
        size += len(line.encode())
        if size > TRACE_BYTES_MAX:
            break
        kept.append(line)
    return kept[::-1]


def _encodable(text: str) -> str:
    return text.encode(errors="replace").decode()


def cut_text(text: str) -> str:
    """At most MESSAGE_BYTES_MAX bytes of it, and always encodable."""
    raw = text.encode(errors="replace")
    return raw.decode() if len(raw) <= MESSAGE_BYTES_MAX else raw[: MESSAGE_BYTES_MAX - 3].decode(errors="ignore") + "…"


# -- operations of a journal -----------------------------------------------------------------------------------------


class Op:
    """What a step does. Operations in `AWAITED` may be journaled without an outcome and complete later.

    docs/protocol.md describes the argument of each. INPUT is step 0 of every journal: the input of the invocation.

    Plain integers behind names: on Python 3.11, reading a member of an IntEnum takes three times as long, and the hot paths
    of SDK and state machine read several per step.
    """

    INPUT: Final = 0  # argument [headers]; outcome: the input
    RUN: Final = 1  # argument [name] or, to be run (again) when due, [name, failures, due_ms, message]; outcome: result
    SLEEP: Final = 2  # argument [milliseconds], stored with the due time: [milliseconds, due_ms]
    #: argument [service, handler, key or nil, payload, headers], stored as [service, handler, key, digest, nil, child id].
    #: Journals of older nodes have nil for the digest, here and below.
    CALL: Final = 3
    #: argument as CALL, and delay_ms: stored as [service, handler, key, digest, nil, delay_ms, child id]
    SEND: Final = 4
    GET: Final = (
        5  # argument [name]; outcome given from eager state, or completed by the node; nil is an empty payload list
    )
    SET: Final = 6  # argument [name, payload]
    CLEAR: Final = 7  # argument [name]
    CLEAR_ALL: Final = 8  # argument []
    KEYS: Final = 9  # argument []; outcome: msgpack list of names
    PROMISE: Final = 10  # argument [name]
    PEEK: Final = 11  # argument [name]; completed by the node at once
    RESOLVE: Final = 12  # argument [name, outcome], stored as [name, digest]; completed by the node at once
    AWAKEABLE: Final = 13  # argument []
    RESOLVE_AWAKEABLE: Final = 14  # argument [invocation, index, outcome], stored as [invocation, index, digest]
    ATTACH: Final = 15  # argument [invocation]
    CANCEL: Final = 16  # argument [invocation]
    VALUE: Final = 17  # argument [name]; outcome given: a value the SDK drew, such as the time


OPS: Final = frozenset(range(18))
OP_NAMES: Final = {value: name.lower() for name, value in vars(Op).items() if not name.startswith("_")}
#: Journaled without an outcome, completed later by a timer, another invocation, a client or the node itself.
AWAITED: Final = frozenset(
    {Op.SLEEP, Op.CALL, Op.GET, Op.KEYS, Op.PROMISE, Op.PEEK, Op.RESOLVE, Op.AWAKEABLE, Op.ATTACH}
)  # fmt: skip

#: Where the argument of an operation has what is stored as a digest.
DIGESTED: Final = {Op.CALL: 3, Op.SEND: 3, Op.RESOLVE: 1, Op.RESOLVE_AWAKEABLE: 2}

#: The payload of GET and PEEK for "there is none" (a real value is one byte longer: see `some`).
NOTHING: Final = b""


def some(payload: bytes) -> bytes:
    """Mark a value that may be absent as present: NOTHING means that it is absent."""
    return b"\x01" + payload


def unsome(payload: bytes) -> bytes | None:
    return payload[1:] if payload else None


class Step(NamedTuple):
    """A step of a journal, as it is stored and as a START frame carries it (packed).

    `order` numbers all events of one journal in log order: `made` when the step was journaled, `done` when its outcome
    was (0: not yet). A step journaled together with its outcome is one event: `done == made`; only one that was
    journaled without it and completed later, even in the same apply, has `done > made`. That tells an SDK in replay
    whether the code once waited. The outcome of an abandoned step is never delivered.
    """

    op: int
    key: str
    argument: list[Any]
    made: int
    done: int
    outcome: list[Any] | None
    abandoned: bool = False
    journaled_ms: int = 0  # when its newest event was journaled: its outcome, if it has one; 0: not known
    began_ms: int = 0  # when its function began its last try; of other steps, when they were journaled first
    epoch: int = 0  # the attempt that journaled it, or its outcome if that attempt brought it


#: What every version of the protocol has of a step. The rest is for people, and not sent before version 2.
STEP_FIELDS: Final = 7


def pack_step(step: Step) -> bytes:
    packed: bytes = msgpack.packb(step if step.journaled_ms else step[:STEP_FIELDS])
    return packed


def unpack_step(raw: bytes) -> Step:
    return Step(*msgpack.unpackb(raw))
