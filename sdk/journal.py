"""The journal of an invocation: its operations, its steps and their outcomes, as they are stored and sent.

The node's state machine and the SDK both import this module. It knows nothing of frames: a second handler protocol has
the same journal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, IntEnum, auto
from hashlib import blake2b
from typing import Any, Final, NamedTuple, TypeAlias

import msgpack

from holdfast.sdk.ids import InvocationId, derive

NAME_BYTES_MAX: Final = 128  # of services, handlers, steps, promises, state
KEY_BYTES_MAX: Final = 512  # of virtual objects and workflows
STEP_KEY_BYTES_MAX: Final = 512
PAYLOAD_BYTES_MAX: Final = 32 * 1024 * 1024
TITLE_BYTES_MAX: Final = 512  # of an approval
DETAILS_BYTES_MAX: Final = 64 * 1024  # of what an approval shows to people
CHOICES_MAX: Final = 16
CHOICE_BYTES_MAX: Final = 64
COMMENT_BYTES_MAX: Final = 4 * 1024  # of a decision
INT_MAX: Final = 2**63 - 1


class ProtocolError(Exception):
    """The other side sent something that no correct implementation sends. `invocation` and `epoch` name the attempt
    that it concerns. If there is none, the stream that carried it ends."""

    def __init__(self, message: str, invocation: InvocationId | None = None, epoch: int = 0) -> None:
        super().__init__(message)
        self.invocation = invocation
        self.epoch = epoch


# -- digests ------------------------------------------------------------------------------------------------------------

DIGEST_BYTES: Final = 16


def digest(given: bytes | list[Any]) -> bytes:
    """Replaces a payload or outcome in a journal, for the comparison in replay."""
    if isinstance(given, bytes):
        return blake2b(given, digest_size=DIGEST_BYTES).digest()
    if given[0] == 0:
        return digest(given[1])
    _, code, message, kind = given[:4]  # The details of a failure are meant for people.
    return derive(DIGEST_BYTES, b"failure", str(code).encode(), message.encode(), kind.encode())


# -- outcomes --------------------------------------------------------------------------------------------------------


class Success(NamedTuple):
    """The successful outcome of a step or an invocation."""

    payload: bytes


class Failure(NamedTuple):
    """The failed outcome of a step or an invocation. `code` is an HTTP status; `kind` names the class of the error.

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

MESSAGE_BYTES_MAX: Final = 8 * 1024  # For the text of a failure; longer texts are cut.


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


# -- decisions about approvals -----------------------------------------------------------------------------------------


class Decided(NamedTuple):
    """The outcome of an approval. It is packed as the payload of a success."""

    choice: str | None  # None: its deadline passed first
    by: str = ""  # who decided, for people
    by_id: str = ""  # the id of their token
    comment: str = ""
    at_ms: int = 0
    payload: bytes | None = None  # as it was edited; None: as it was shown


def pack_decided(decided: Decided) -> bytes:
    packed: bytes = msgpack.packb(decided)
    return packed


def unpack_decided(payload: bytes) -> Decided:
    return Decided(*msgpack.unpackb(payload)[: len(Decided._fields)])


# -- operations of a journal -----------------------------------------------------------------------------------------


class Op(IntEnum):
    """What a step does. SIGNATURES says what the node and the SDK have to know of each operation.

    Numbers are for ever. On Python 3.11, reading a member through the class takes three times as long as a plain attribute:
    hot paths bind the members they need to names of their module.
    """

    INPUT = 0  # step 0 of every journal: the input of the invocation
    RUN = 1
    SLEEP = 2
    CALL = 3
    SEND = 4
    GET = 5
    SET = 6
    CLEAR = 7
    CLEAR_ALL = 8
    KEYS = 9
    PROMISE = 10
    PEEK = 11
    RESOLVE = 12
    AWAKEABLE = 13
    RESOLVE_AWAKEABLE = 14
    ATTACH = 15
    CANCEL = 16
    VALUE = 17
    APPROVAL = 18


class Kind(Enum):
    """What a part of an argument is. A handler protocol decides how it checks each kind."""

    NAME = auto()  # text of 1 to NAME_BYTES_MAX bytes
    KEY = auto()  # text of at most KEY_BYTES_MAX bytes, or nil
    IDEMPOTENCY_KEY = auto()  # text of 1 to KEY_BYTES_MAX bytes
    DELAY = auto()  # milliseconds
    HEADERS = auto()  # texts under names; not compared in replay, because traces differ between attempts
    VALUE = auto()  # a payload that the journal keeps
    INPUT = auto()  # a payload for another invocation: the journal keeps a digest
    OUTCOME = auto()  # an outcome for another step or a promise: the journal keeps a digest
    INVOCATION = auto()  # the id of an invocation
    AWAKEABLE = auto()  # the id of an invocation, followed by the secret of one of its awakeables, if it has one
    SECRET = auto()  # random bytes, drawn once: not compared in replay, and not shown
    STEP = auto()  # the index of a step
    TITLE = auto()  # text of 1 to TITLE_BYTES_MAX bytes
    DETAILS = auto()  # a payload of at most DETAILS_BYTES_MAX that the journal keeps
    CHOICES = auto()  # 1 to CHOICES_MAX different texts of 1 to CHOICE_BYTES_MAX bytes
    ASSIGNEE = auto()  # text of 1 to NAME_BYTES_MAX bytes, or nil
    TRUTH = auto()


class Part(NamedTuple):
    """One part of an operation's argument."""

    name: str
    kind: Kind
    text: str = ""  # for messages, if the name alone does not say enough
    optional: bool = False  # since version 2 of the protocol, at the end


class By(Enum):
    """What gives a step of an operation its outcome."""

    NOTHING = auto()  # It has none.
    CALLER = auto()  # The caller, when it starts the invocation.
    ENDPOINT = auto()  # The process that runs the handler.
    NODE = auto()  # The node, when it journals the step.
    TIMER = auto()
    INVOCATION = auto()  # The invocation that the step names, when it completes.
    PROMISE = auto()  # The resolver of the promise.
    CLIENT = auto()  # A client or another handler that has the id of the step.
    PERSON = auto()  # Somebody who decides about it, or its deadline.


class Signature(NamedTuple):
    """What the node and the SDK have to know of one operation: a row of the table in docs/protocol.md.

    The rest of what the node knows is in `statemachine.ops`.
    """

    op: Op
    parts: tuple[Part, ...]  # of the argument, as the code sends it
    by: By
    eager: bool = False  # The endpoint may give the outcome itself, from the state that came with START.
    maybe: bool = False  # The outcome tells a value from none: see `some`.
    foreign: bool = False  # The value comes from a client or another handler, which may not know its type.

    @property
    def awaited(self) -> bool:
        """Whether the step may be journaled without an outcome and complete later, without the endpoint."""
        return self.cancellable or self.by is By.NODE

    @property
    def cancellable(self) -> bool:
        """Whether a cancellation completes the step. It does if the outcome would come from outside, after a while."""
        return self.by in (By.TIMER, By.INVOCATION, By.PROMISE, By.CLIENT, By.PERSON)

    @property
    def parts_min(self) -> int:
        return sum(not part.optional for part in self.parts)

    def offset_of(self, *kinds: Kind) -> int | None:
        """Where the first part of one of these kinds is."""
        return next((offset for offset, part in enumerate(self.parts) if part.kind in kinds), None)


_NAME: Final = Part("name", Kind.NAME)
_INVOCATION: Final = Part("invocation", Kind.INVOCATION)
_IDEMPOTENCY_KEY: Final = Part("idempotency_key", Kind.IDEMPOTENCY_KEY, "idempotency key", optional=True)
_TARGET: Final = (
    Part("service", Kind.NAME),
    Part("handler", Kind.NAME),
    Part("key", Kind.KEY),
    Part("argument", Kind.INPUT),
    Part("headers", Kind.HEADERS),
)

_SIGNATURES: Final = (
    Signature(Op.INPUT, (Part("headers", Kind.HEADERS),), By.CALLER),
    Signature(Op.RUN, (_NAME,), By.ENDPOINT),
    Signature(Op.SLEEP, (Part("milliseconds", Kind.DELAY, "duration in milliseconds"),), By.TIMER),
    Signature(Op.CALL, (*_TARGET, _IDEMPOTENCY_KEY), By.INVOCATION),
    Signature(Op.SEND, (*_TARGET, Part("delay_ms", Kind.DELAY, "delay in milliseconds"), _IDEMPOTENCY_KEY), By.NOTHING),
    Signature(Op.GET, (_NAME,), By.NODE, eager=True, maybe=True),
    Signature(Op.SET, (_NAME, Part("value", Kind.VALUE)), By.NOTHING),
    Signature(Op.CLEAR, (_NAME,), By.NOTHING),
    Signature(Op.CLEAR_ALL, (), By.NOTHING),
    Signature(Op.KEYS, (), By.NODE, eager=True),
    Signature(Op.PROMISE, (_NAME,), By.PROMISE, foreign=True),
    Signature(Op.PEEK, (_NAME,), By.NODE, maybe=True, foreign=True),
    Signature(Op.RESOLVE, (_NAME, Part("outcome", Kind.OUTCOME)), By.NODE),
    Signature(Op.AWAKEABLE, (Part("secret", Kind.SECRET, optional=True),), By.CLIENT, foreign=True),
    Signature(
        Op.RESOLVE_AWAKEABLE,
        (Part("invocation", Kind.AWAKEABLE), Part("step", Kind.STEP), Part("outcome", Kind.OUTCOME)),
        By.NOTHING,
    ),
    Signature(Op.ATTACH, (_INVOCATION,), By.INVOCATION),
    Signature(Op.CANCEL, (_INVOCATION,), By.NOTHING),
    Signature(Op.VALUE, (_NAME,), By.ENDPOINT),
    Signature(
        Op.APPROVAL,
        (
            Part("title", Kind.TITLE),
            Part("payload", Kind.DETAILS),
            Part("choices", Kind.CHOICES),
            Part("assignee", Kind.ASSIGNEE),
            Part("timeout_ms", Kind.DELAY, "timeout in milliseconds"),
            Part("remind_after_ms", Kind.DELAY, "delay of the reminder in milliseconds"),
            Part("editable", Kind.TRUTH),
            Part("secret", Kind.SECRET),
        ),
        By.PERSON,
        foreign=True,
    ),
)
SIGNATURES: Final[Mapping[int, Signature]] = {signature.op: signature for signature in _SIGNATURES}
assert [*SIGNATURES] == [*Op], "every operation has one signature"

OP_NAMES: Final[Mapping[int, str]] = {op: op.name.lower() for op in Op}
#: Journaled without an outcome, completed later by a timer, another invocation, a client or the node itself.
AWAITED: Final = frozenset(signature.op for signature in _SIGNATURES if signature.awaited)
#: Where the argument of an operation has what is stored as a digest. Journals of older nodes have nil there.
DIGESTED: Final[Mapping[int, int]] = {
    signature.op: offset
    for signature in _SIGNATURES
    if (offset := signature.offset_of(Kind.INPUT, Kind.OUTCOME)) is not None
}

#: The payload of GET and PEEK for an absent value (a real value is one byte longer: see `some`).
NOTHING: Final = b""


def some(payload: bytes) -> bytes:
    """Mark a value that may be absent as present: NOTHING means that it is absent."""
    return b"\x01" + payload


def unsome(payload: bytes) -> bytes | None:
    return payload[1:] if payload else None


class Step(NamedTuple):
    """A step of a journal, as it is stored and as a START frame carries it (packed).

    `order` numbers all events of one journal in log order: `made` when the step was journaled, `done` when its outcome
    was (0: not yet). A step journaled together with its outcome is one event: `done == made`. A step that was journaled
    without its outcome and completed later, even in the same apply, has `done > made`. That tells an SDK in replay
    whether the code once waited. The outcome of an abandoned step is never delivered.
    """

    op: int
    key: str
    argument: list[Any]
    made: int
    done: int
    outcome: list[Any] | None
    abandoned: bool = False
    journaled_ms: int = 0  # when its newest event was journaled: its outcome, if it has one; 0: unknown
    began_ms: int = 0  # when the last try of its function began; of other steps, when they were first journaled
    epoch: int = 0  # the attempt that journaled it, or its outcome if that attempt brought it


#: The fields of a step in every version of the protocol. The others are for people, and not sent before version 2.
STEP_FIELDS: Final = 7


def pack_step(step: Step) -> bytes:
    packed: bytes = msgpack.packb(step if step.journaled_ms else step[:STEP_FIELDS])
    return packed


def unpack_step(raw: bytes) -> Step:
    return Step(*msgpack.unpackb(raw))
