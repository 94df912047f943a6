"""The handler protocol: ids, journal operations and frames between a node and an SDK (docs/protocol.md is its text).

Both sides import this module, so it is the one place that says what a byte means. It does no I/O, and `decode_batch` is
total: it returns frames whose every field has the right type and lies within its bound, or raises `ProtocolError`.

A message of the stream (and the body of a request or response) is one msgpack array of frames; a frame is an array that
begins with its number. Payloads (inputs, results, state) are bytes that a node never looks into.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, Final, NamedTuple, NewType, TypeAlias

import msgpack

VERSION: Final = 1

# -- ids ------------------------------------------------------------------------------------------------------------

#: 16 bytes: the partition key (32 bits, big-endian), then 96 bits that are random or derived.
InvocationId = NewType("InvocationId", bytes)

ID_BYTES: Final = 16
_ID_PREFIX: Final = "inv_"
_AWAKEABLE_PREFIX: Final = "awk_"


class BadId(ValueError):
    """A text is not an id of the expected kind."""


def format_id(raw: bytes) -> str:
    return _ID_PREFIX + raw.hex()


def parse_id(text: str) -> InvocationId:
    return InvocationId(_parse(text, _ID_PREFIX, ID_BYTES))


def format_awakeable(invocation: bytes, index: int) -> str:
    """An awakeable is a step of an invocation that anybody who knows its name may complete."""
    return _AWAKEABLE_PREFIX + invocation.hex() + index.to_bytes(4, "big").hex()


def parse_awakeable(text: str) -> tuple[InvocationId, int]:
    raw = _parse(text, _AWAKEABLE_PREFIX, ID_BYTES + 4)
    return InvocationId(raw[:ID_BYTES]), int.from_bytes(raw[ID_BYTES:], "big")


def _parse(text: str, prefix: str, size: int) -> bytes:
    body = text.removeprefix(prefix)
    if body == text or len(body) != 2 * size or not body.isascii():
        raise BadId(f"not an id: it should be {prefix} and {2 * size} hexadecimal digits")
    try:
        return bytes.fromhex(body)
    except ValueError:
        raise BadId(f"not an id: it should be {prefix} and {2 * size} hexadecimal digits") from None


def _digest(size: int, *parts: bytes) -> bytes:
    """Parts are length-prefixed, so that no two lists of parts are hashed alike."""
    hasher = blake2b(digest_size=size)
    for part in parts:
        hasher.update(len(part).to_bytes(4, "big"))
        hasher.update(part)
    return hasher.digest()


def partition_key(service: str, key: str) -> bytes:
    """Where a keyed service's key lives: all its invocations share these first four bytes of their ids."""
    return _digest(4, b"key", service.encode(), key.encode())


def object_id(service: str, key: str) -> bytes:
    """One virtual object or workflow, as the tables of its partition name it."""
    return _digest(16, b"object", service.encode(), key.encode())


def new_id(service: str, key: str | None, entropy: bytes) -> InvocationId:
    """A fresh id from 16 random bytes. Without a key the first four of them choose the partition."""
    assert len(entropy) == ID_BYTES
    head = partition_key(service, key) if key is not None else entropy[:4]
    return InvocationId(head + entropy[4:])


def idempotent_id(service: str, key: str | None, handler: str, idempotency_key: str) -> InvocationId:
    """The same request gives the same id, so a second one finds the first."""
    tail = _digest(
        12, b"idempotent", service.encode(), (key or "").encode(), handler.encode(), idempotency_key.encode()
    )
    head = partition_key(service, key) if key is not None else tail[:4]
    return InvocationId(head + tail)


def workflow_id(service: str, key: str) -> InvocationId:
    """A workflow runs once per key: the key decides the id of its main handler's invocation."""
    return InvocationId(partition_key(service, key) + _digest(12, b"workflow", service.encode(), key.encode()))


def child_id(caller: bytes, index: int, service: str, key: str | None, *, spread: bool) -> InvocationId:
    """The id of what step `index` of `caller` calls or sends: known before the step is journaled, on both sides.

    Without a key, a call stays in its caller's partition, because somebody waits for it; a send is spread over all.
    """
    tail = _digest(12, b"child", caller, index.to_bytes(4, "big"))
    if key is not None:
        return InvocationId(partition_key(service, key) + tail)
    return InvocationId((tail[-4:] if spread else caller[:4]) + tail)


def partition_of(raw: bytes, partitions: int) -> int:
    """Which of `partitions` an id belongs to: ranges of equal size over its first 32 bits."""
    return int.from_bytes(raw[:4], "big") * partitions >> 32


def effect_key(invocation: bytes, step_key: str) -> str:
    """Stable over attempts and restarts of processes: what to hand to a payment provider as idempotency key."""
    return "eff_" + _digest(16, b"effect", invocation, step_key.encode()).hex()


# -- outcomes --------------------------------------------------------------------------------------------------------


class Failure(NamedTuple):
    """A failure as it is journaled: `code` is an HTTP status, `kind` names the error class for people and filters."""

    code: int
    message: str
    kind: str = ""


#: On the wire and in the journal an outcome is [0, payload] or [1, code, message, kind].
Outcome: TypeAlias = bytes | Failure

CANCELLED: Final = Failure(409, "the invocation was cancelled", "Cancelled")
KILLED: Final = Failure(409, "the invocation was killed", "Killed")

MESSAGE_BYTES_MAX: Final = 8 * 1024  # Of a failure's text; longer ones are cut.


def pack_outcome(outcome: Outcome) -> list[Any]:
    return [0, outcome] if isinstance(outcome, bytes) else [1, *outcome]


def unpack_outcome(value: Any) -> Outcome:
    if type(value) is list:
        if len(value) == 2 and value[0] == 0 and type(value[1]) is bytes:
            return value[1]
        if len(value) == 4 and value[0] == 1 and [type(field) for field in value[1:]] == [int, str, str]:
            if not 100 <= value[1] <= 999:
                raise ProtocolError(f"a failure's code is an HTTP status, not {value[1]}")
            return Failure(value[1], cut_text(value[2]), value[3][:200])
    raise ProtocolError("an outcome is [0, payload] or [1, code, message, kind]")


def cut_text(text: str) -> str:
    """At most MESSAGE_BYTES_MAX bytes of it, and always encodable."""
    raw = text.encode(errors="replace")
    return raw.decode() if len(raw) <= MESSAGE_BYTES_MAX else raw[: MESSAGE_BYTES_MAX - 3].decode(errors="ignore") + "…"


# -- operations of a journal -----------------------------------------------------------------------------------------


class Op:
    """What a step does. Those in `AWAITED` may be journaled without an outcome and complete later.

    argument of each (msgpack): see docs/protocol.md. INPUT is step 0 of every journal: what the invocation was given.
    """

    INPUT: Final = 0  # argument [headers]; outcome: the input
    RUN: Final = 1  # argument [name] or, to be run (again) when due, [name, failures, due_ms, message]; outcome: result
    SLEEP: Final = 2  # argument [milliseconds], stored with the due time: [milliseconds, due_ms]
    #: argument [service, handler, key or nil, payload, headers], stored as [service, handler, key, nil, nil, child id]
    CALL: Final = 3
    #: argument as CALL, and delay_ms: stored as [service, handler, key, nil, nil, delay_ms, child id]
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
    RESOLVE: Final = 12  # argument [name, outcome]; completed by the node at once
    AWAKEABLE: Final = 13  # argument []
    RESOLVE_AWAKEABLE: Final = 14  # argument [invocation, index, outcome]
    ATTACH: Final = 15  # argument [invocation]
    CANCEL: Final = 16  # argument [invocation]
    VALUE: Final = 17  # argument [name]; outcome given: a value the SDK drew, such as the time


OPS: Final = frozenset(range(18))
OP_NAMES: Final = {value: name.lower() for name, value in vars(Op).items() if not name.startswith("_")}
#: Journaled without an outcome, completed later by a timer, another invocation, a client or the node itself.
AWAITED: Final = frozenset(
    {Op.SLEEP, Op.CALL, Op.GET, Op.KEYS, Op.PROMISE, Op.PEEK, Op.RESOLVE, Op.AWAKEABLE, Op.ATTACH}
)  # fmt: skip

#: The payload of GET and PEEK for "there is none" (a real value is one byte longer: see `some`).
NOTHING: Final = b""


def some(payload: bytes) -> bytes:
    """How a value that may be absent is told from NOTHING."""
    return b"\x01" + payload


def unsome(payload: bytes) -> bytes | None:
    return payload[1:] if payload else None


class Step(NamedTuple):
    """A step of a journal, as it is stored and as a START frame carries it (packed).

    `order` numbers all events of one journal in log order: `made` when the step was journaled, `done` when its outcome
    was (0: not yet). A step journaled together with its outcome is one event: `done == made`; only one that was
    journaled without it and completed later, even in the same apply, has `done > made`. That tells an SDK in replay
    whether the code once waited. An abandoned step completes for nobody.
    """

    op: int
    key: str
    argument: list[Any]
    made: int
    done: int
    outcome: list[Any] | None
    abandoned: bool = False


def pack_step(step: Step) -> bytes:
    packed: bytes = msgpack.packb(step)
    return packed


def unpack_step(raw: bytes) -> Step:
    return Step(*msgpack.unpackb(raw))


# -- frames ------------------------------------------------------------------------------------------------------------


class Start(NamedTuple):
    """Node to SDK: run this attempt. `journal` holds packed steps from step 0 on; `more`: JOURNAL frames follow."""

    invocation: bytes
    epoch: int
    service: str
    handler: str
    key: str | None
    attempt: int  # Counts attempts from 1; for people and logs.
    now_ms: int
    seed: int  # The same in every attempt of an invocation.
    journal: list[bytes]
    more: bool
    state: dict[str, bytes] | None  # Eager state of an object or workflow; None: not applicable
    state_complete: bool  # Whether `state` is all there is: a name not in it is absent.
    cancelled: bool  # A cancellation is waiting to be noticed.


class Journal(NamedTuple):
    """Node to SDK: more of the journal of a START."""

    invocation: bytes
    epoch: int
    journal: list[bytes]
    more: bool


class Ack(NamedTuple):
    """Node to SDK: steps below `length` are durable and applied.

    Acks and COMPLETIONs of an attempt are in log order: before a COMPLETION with order `o`, the ack of every step with
    `made < o` is sent, and none of a later one. Between two completions acks may be merged. An SDK orders its own results by
    this.
    """

    invocation: bytes
    epoch: int
    length: int


class Completion(NamedTuple):
    """Node to SDK: step `index` has its outcome; `order` places it among all events of the journal."""

    invocation: bytes
    epoch: int
    index: int  # type: ignore[assignment]
    order: int
    outcome: list[Any]


class RetryRun(NamedTuple):
    """Node to SDK: the backoff of failed step `index` is over, run it again. Also the answer to an Intent that repeats a
    step of the journal: it may run now."""

    invocation: bytes
    epoch: int
    index: int  # type: ignore[assignment]


class Cancelled(NamedTuple):
    """Node to SDK: the invocation is being cancelled; the next RUN must fail instead of running (docs/protocol.md)."""

    invocation: bytes
    epoch: int


class Suspend(NamedTuple):
    """Node to SDK: please hand this attempt back at the next point where it only waits."""

    invocation: bytes
    epoch: int


class Abort(NamedTuple):
    """Node to SDK: this attempt is over; nothing it sends from now on counts."""

    invocation: bytes
    epoch: int
    reason: str


class StepFrame(NamedTuple):
    """SDK to node: journal this step. `outcome` is given for what the SDK did itself."""

    invocation: bytes
    epoch: int
    index: int  # type: ignore[assignment]
    op: int
    key: str
    argument: list[Any]
    outcome: list[Any] | None


class RunFailed(NamedTuple):
    """SDK to node: a RUN raised an error that may be retried. The node counts, backs off, or gives up for good.

    `retry`: [initial_ms, factor_permille, max_interval_ms, max_attempts (0: no limit), max_duration_ms (0: no limit),
    jitter_permille], or nil for the default. `intent` repeats a step journaled earlier: same index.
    """

    invocation: bytes
    epoch: int
    index: int  # type: ignore[assignment]
    key: str
    name: str
    failure: list[Any]
    retry: list[int] | None


class Intent(NamedTuple):
    """SDK to node: an at-most-once RUN is about to happen. Answered by an ACK (or, for a step that is in the journal
    already, by RetryRun); the outcome follows as RunDone."""

    invocation: bytes
    epoch: int
    index: int  # type: ignore[assignment]
    key: str
    name: str


class RunDone(NamedTuple):
    """SDK to node: the outcome of a RUN whose step is in the journal already (retried, or at most once).

    Answered by a COMPLETION of the step, as any outcome that comes after its step: so the SDK learns its order.
    """

    invocation: bytes
    epoch: int
    index: int  # type: ignore[assignment]
    outcome: list[Any]


class Abandon(NamedTuple):
    """SDK to node: the code stopped waiting for step `index` (a plain asyncio timeout or cancellation).

    A RUN that was cancelled while its function ran is not in the journal yet: its INTENT goes first, then this.
    """

    invocation: bytes
    epoch: int
    index: int  # type: ignore[assignment]


class Waiting(NamedTuple):
    """SDK to node: this attempt ends here and holds nothing. Start another when any of these steps has an outcome."""

    invocation: bytes
    epoch: int
    steps: list[int]


class Output(NamedTuple):
    """SDK to node: the invocation completes with this outcome (a failure is terminal)."""

    invocation: bytes
    epoch: int
    outcome: list[Any]


class Error(NamedTuple):
    """SDK to node: this attempt failed; try again (`retry_after_ms`: not before), or `pause` for an operator."""

    invocation: bytes
    epoch: int
    failure: list[Any]
    retry_after_ms: int
    pause: bool


class Credit(NamedTuple):
    """Both ways: the sender of this frame can take `frames` more frames. A stream begins with one from each side."""

    frames: int


class Goaway(NamedTuple):
    """SDK to node: no new attempts on this stream, please; the endpoint is shutting down."""

    reason: str


Frame: TypeAlias = (
    Start | Journal | Ack | Completion | RetryRun | Cancelled | Suspend | Abort
    | StepFrame | RunFailed | Intent | RunDone | Abandon | Waiting | Output | Error | Credit | Goaway
)  # fmt: skip

NUMBERS: Final[dict[type[Any], int]] = {
    Start: 1, Journal: 2, Ack: 3, Completion: 4, RetryRun: 5, Cancelled: 6, Suspend: 7, Abort: 8,
    StepFrame: 16, RunFailed: 17, Intent: 18, RunDone: 19, Abandon: 20, Waiting: 21, Output: 22, Error: 23,
    Credit: 32, Goaway: 33,
}  # fmt: skip
KINDS: Final = {number: kind for kind, number in NUMBERS.items()}
TO_SDK: Final = frozenset({Start, Journal, Ack, Completion, RetryRun, Cancelled, Suspend, Abort, Credit})
TO_NODE: Final = frozenset({StepFrame, RunFailed, Intent, RunDone, Abandon, Waiting, Output, Error, Credit, Goaway})

NAME_BYTES_MAX: Final = 128  # of services, handlers, steps, promises, state
KEY_BYTES_MAX: Final = 512  # of virtual objects and workflows
STEP_KEY_BYTES_MAX: Final = 512
FRAMES_MAX: Final = 65536  # in one batch
BATCH_BYTES_MAX: Final = 40 * 1024 * 1024
PAYLOAD_BYTES_MAX: Final = 32 * 1024 * 1024
INT_MAX: Final = 2**63 - 1


class ProtocolError(Exception):
    """The other side sent what no correct implementation sends. The stream that carried it ends."""


_pack = msgpack.Packer(use_bin_type=True, autoreset=True).pack


def encode_batch(frames: list[Frame]) -> bytes:
    packed: bytes = _pack([(NUMBERS[type(frame)], *frame) for frame in frames])
    return packed


def decode_batch(raw: bytes, allowed: frozenset[type[Any]]) -> list[Frame]:
    """The frames of one message, each checked; `allowed` says which side we are (TO_SDK or TO_NODE)."""
    if len(raw) > BATCH_BYTES_MAX:
        raise ProtocolError(f"a batch of {len(raw)} bytes; at most {BATCH_BYTES_MAX} are allowed")
    try:
        rows = msgpack.unpackb(raw, raw=False, strict_map_key=False, use_list=True, ext_hook=_no_extension)
    except Exception as error:
        raise ProtocolError(f"not msgpack: {error}") from None
    if type(rows) is not list or len(rows) > FRAMES_MAX:
        raise ProtocolError("a batch is a bounded list of frames")
    return [_decode(row, allowed) for row in rows]


def _no_extension(code: int, data: bytes) -> Any:
    """A node uses them for what no handler may say."""
    raise ValueError(f"extension {code} has no meaning here")


def _decode(row: Any, allowed: frozenset[type[Any]]) -> Frame:
    if type(row) is not list or not row or type(row[0]) is not int:
        raise ProtocolError("a frame is a list that begins with its number")
    kind = KINDS.get(row[0])
    if kind is None or kind not in allowed:
        raise ProtocolError(f"unknown frame {row[0]}: this side speaks version {VERSION} of the protocol")
    checks = _CHECKS[kind]
    if len(row) != len(checks) + 1:
        raise ProtocolError(f"{kind.__name__}: {len(checks)} fields expected, {len(row) - 1} found")
    for offset, check in enumerate(checks):
        if not check(row[offset + 1]):
            raise ProtocolError(f"{kind.__name__}: field {kind._fields[offset]} is wrong: {row[offset + 1]!r:.60}")
    frame: Frame = kind(*row[1:])
    return frame


def _is_id(value: Any) -> bool:
    return type(value) is bytes and len(value) == ID_BYTES


def _is_int(value: Any) -> bool:
    return type(value) is int and 0 <= value <= INT_MAX


def _is_index(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**32


def _is_bool(value: Any) -> bool:
    return type(value) is bool


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_name(value: Any) -> bool:
    return type(value) is str and 0 < len(value.encode(errors="surrogatepass")) <= NAME_BYTES_MAX


def _is_key(value: Any) -> bool:
    return value is None or (type(value) is str and len(value.encode(errors="surrogatepass")) <= KEY_BYTES_MAX)


def _is_step_key(value: Any) -> bool:
    return type(value) is str and 0 < len(value.encode(errors="surrogatepass")) <= STEP_KEY_BYTES_MAX


def _is_op(value: Any) -> bool:
    return type(value) is int and value in OPS and value != Op.INPUT


def _is_argument(value: Any) -> bool:
    return type(value) is list and len(value) <= 8


def _is_outcome(value: Any) -> bool:
    try:
        unpack_outcome(value)
    except ProtocolError:
        return False
    return True


def _is_outcome_or_none(value: Any) -> bool:
    return value is None or _is_outcome(value)


def _is_failure(value: Any) -> bool:
    return _is_outcome(value) and value[0] == 1


def _is_retry(value: Any) -> bool:
    return value is None or (type(value) is list and len(value) == 6 and all(_is_int(number) for number in value))


def _is_journal(value: Any) -> bool:
    return type(value) is list and all(type(row) is bytes for row in value)


def _is_state(value: Any) -> bool:
    if value is None:
        return True
    return type(value) is dict and all(type(k) is str and type(v) is bytes for k, v in value.items())


def _is_steps(value: Any) -> bool:
    return type(value) is list and all(_is_index(index) for index in value)


_CHECKS: Final[dict[type[Any], tuple[Any, ...]]] = {
    Start: (
        _is_id, _is_int, _is_name, _is_name, _is_key, _is_int, _is_int, _is_int, _is_journal, _is_bool, _is_state,
        _is_bool, _is_bool,
    ),
    Journal: (_is_id, _is_int, _is_journal, _is_bool),
    Ack: (_is_id, _is_int, _is_index),
    Completion: (_is_id, _is_int, _is_index, _is_int, _is_outcome),
    RetryRun: (_is_id, _is_int, _is_index),
    Cancelled: (_is_id, _is_int),
    Suspend: (_is_id, _is_int),
    Abort: (_is_id, _is_int, _is_text),
    StepFrame: (_is_id, _is_int, _is_index, _is_op, _is_step_key, _is_argument, _is_outcome_or_none),
    RunFailed: (_is_id, _is_int, _is_index, _is_step_key, _is_name, _is_failure, _is_retry),
    Intent: (_is_id, _is_int, _is_index, _is_step_key, _is_name),
    RunDone: (_is_id, _is_int, _is_index, _is_outcome),
    Abandon: (_is_id, _is_int, _is_index),
    Waiting: (_is_id, _is_int, _is_steps),
    Output: (_is_id, _is_int, _is_outcome),
    Error: (_is_id, _is_int, _is_failure, _is_int, _is_bool),
    Credit: (_is_int,),
    Goaway: (_is_text,),
}  # fmt: skip
