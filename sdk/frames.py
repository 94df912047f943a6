"""Frames: the protocol between a node and an SDK about attempts (docs/protocol.md is the specification).

Both sides import this module, so the meaning of every byte is defined once. It does no I/O, and `decode_batch` is
total: it returns frames whose every field has the right type and lies within its bound, or raises `ProtocolError`.

A message of the stream (and the body of a request or response) is one msgpack array of frames; a frame is an array that
begins with its number. Payloads (inputs, results, state) are bytes that a node never interprets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import call
from typing import Any, Final, NamedTuple, TypeAlias

import msgpack

from holdfast.sdk.bounds import SMALL_BYTES, TooComplex, Walk, check_msgpack, shown
from holdfast.sdk.fields import (
    is_ack,
    is_argument,
    is_bool,
    is_bytes,
    is_failure,
    is_id,
    is_index,
    is_int,
    is_journal,
    is_key,
    is_name,
    is_op,
    is_outcome,
    is_outcome_or_none,
    is_output,
    is_retry,
    is_state,
    is_step,
    is_step_key,
    is_steps,
    is_text,
)
from holdfast.sdk.ids import InvocationId
from holdfast.sdk.journal import (
    SIGNATURES,
    STEP_FIELDS,
    Kind,
    ProtocolError,
    without_extra,
)

VERSIONS: Final = (1, 2)
VERSION: Final = VERSIONS[-1]
#: In a request: the version of its body. In the answer: the version of the stream, or of the body.
VERSION_HEADER: Final = "x-holdfast-protocol"
#: The highest version that the sender supports.
HIGHEST_HEADER: Final = "x-holdfast-protocol-max"
#: In the answer that opens a stream: the largest WebSocket message that the endpoint accepts. Larger batches are sent
#: in pieces.
MESSAGE_BYTES_HEADER: Final = "x-holdfast-message-bytes"
#: In the same answer: "thread" if the endpoint answers heartbeats even while its event loop is blocked.
HEARTBEAT_HEADER: Final = "x-holdfast-heartbeat"


class Start(NamedTuple):
    """Node to SDK: run this attempt. `journal` holds packed steps from step 0 on; `more`: JOURNAL frames follow."""

    invocation: InvocationId
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
    state_complete: bool  # Whether `state` is complete: a name not in it is absent.
    cancelled: bool  # A cancellation has not been noticed yet.
    #: Not 0: processes ended while earlier attempts ran. At most this many such attempts run in a process at a time;
    #: the others wait. The endpoint answers BEGAN when the attempt begins.
    suspects_max: int = 0
    journal_steps_max: int = 0  # At this length the code gets an error, and has a reserve to compensate; 0: not given.
    journal_bytes_max: int = 0
    secrets: bool = False  # The node takes secrets of awakeables.


class Journal(NamedTuple):
    """Node to SDK: more of the journal of a START."""

    invocation: InvocationId
    epoch: int
    journal: list[bytes]
    more: bool


class Ack(NamedTuple):
    """Node to SDK: steps below `length` are durable and applied.

    Acks and COMPLETIONs of an attempt are in log order: before a COMPLETION with order `o`, the node sends the ack of
    every step with `made < o`, and none of a later one. Between two completions acks may be merged. An SDK orders its
    own results by this.
    """

    invocation: InvocationId
    epoch: int
    length: int


class Completion(NamedTuple):
    """Node to SDK: step `index` has its outcome; `order` places it among all events of the journal."""

    invocation: InvocationId
    epoch: int
    index: int  # type: ignore[assignment]
    order: int
    outcome: list[Any]


class RetryRun(NamedTuple):
    """Node to SDK: the backoff of failed step `index` is over, run it again. Also the answer to an Intent that repeats
    a journaled step: it may run now."""

    invocation: InvocationId
    epoch: int
    index: int  # type: ignore[assignment]


class Cancelled(NamedTuple):
    """Node to SDK: the invocation is being cancelled; the next RUN must fail instead of running (docs/protocol.md)."""

    invocation: InvocationId
    epoch: int


class Suspend(NamedTuple):
    """Node to SDK: please hand this attempt back at the next point where it only waits."""

    invocation: InvocationId
    epoch: int


class Abort(NamedTuple):
    """Node to SDK: this attempt is over; the node ignores everything that it sends from now on."""

    invocation: InvocationId
    epoch: int
    reason: str


class StepFrame(NamedTuple):
    """SDK to node: journal this step. `outcome` is given for operations that the SDK executes itself."""

    invocation: InvocationId
    epoch: int
    index: int  # type: ignore[assignment]
    op: int
    key: str
    argument: list[Any]
    outcome: list[Any] | None
    began_ms: int = 0


class RunFailed(NamedTuple):
    """SDK to node: a RUN raised an error that may be retried. The node counts failures, backs off, or gives up.

    `retry`: [initial_ms, factor_permille, max_interval_ms, max_attempts (0: no limit), max_duration_ms (0: no limit),
    jitter_permille], or nil for the default. `intent` repeats a step journaled earlier: same index.
    """

    invocation: InvocationId
    epoch: int
    index: int  # type: ignore[assignment]
    key: str
    name: str
    failure: list[Any]
    retry: list[int] | None
    began_ms: int = 0
    retry_after_ms: int = 0


class Began(NamedTuple):
    """SDK to node: an attempt whose START has `suspects_max` begins to run."""

    invocation: InvocationId
    epoch: int


class Intent(NamedTuple):
    """SDK to node: an at-most-once RUN is about to happen. Answered by an ACK (or, for a step that is already in the
    journal, by RetryRun); the outcome follows as RunDone."""

    invocation: InvocationId
    epoch: int
    index: int  # type: ignore[assignment]
    key: str
    name: str


class RunDone(NamedTuple):
    """SDK to node: the outcome of a RUN whose step is already in the journal (retried, or at most once).

    Answered by a COMPLETION of the step, like every outcome that follows its step, so that the SDK learns its order.
    """

    invocation: InvocationId
    epoch: int
    index: int  # type: ignore[assignment]
    outcome: list[Any]
    began_ms: int = 0


class Abandon(NamedTuple):
    """SDK to node: the code stopped waiting for step `index` (a plain asyncio timeout or cancellation).

    A RUN that was cancelled while its function ran is not in the journal yet: its INTENT goes first, then this.
    """

    invocation: InvocationId
    epoch: int
    index: int  # type: ignore[assignment]


class Waiting(NamedTuple):
    """SDK to node: this attempt ends here and holds nothing. Start another when any of these steps has an outcome."""

    invocation: InvocationId
    epoch: int
    steps: list[int]


class Output(NamedTuple):
    """SDK to node: the invocation completes with this outcome (a failure is terminal)."""

    invocation: InvocationId
    epoch: int
    outcome: list[Any]


class Error(NamedTuple):
    """SDK to node: this attempt failed; try again (`retry_after_ms`: not before), or `pause` for an operator."""

    invocation: InvocationId
    epoch: int
    failure: list[Any]
    retry_after_ms: int
    pause: bool


class Credit(NamedTuple):
    """Both ways: the sender of this frame can receive `frames` more frames. A stream begins with one from each side."""

    frames: int


class Piece(NamedTuple):
    """Node to SDK: a part of a batch that exceeds the endpoint's message size; alone in its message. `more`: others
    follow, with nothing in between."""

    data: bytes
    more: bool


class Blocked(NamedTuple):
    """SDK to node: the event loop of the process did not run for a while. `handler` is empty if it is unknown."""

    milliseconds: int
    handler: str
    place: str  # file:line


class Goaway(NamedTuple):
    """SDK to node: no new attempts on this stream, please; the endpoint is shutting down."""

    reason: str


Frame: TypeAlias = (
    Start | Journal | Ack | Completion | RetryRun | Cancelled | Suspend | Abort
    | StepFrame | RunFailed | Intent | RunDone | Abandon | Waiting | Output | Error | Began | Credit
    | Goaway | Piece | Blocked
)  # fmt: skip

NUMBERS: Final[dict[type[Any], int]] = {
    Start: 1, Journal: 2, Ack: 3, Completion: 4, RetryRun: 5, Cancelled: 6, Suspend: 7, Abort: 8,
    StepFrame: 16, RunFailed: 17, Intent: 18, RunDone: 19, Abandon: 20, Waiting: 21, Output: 22, Error: 23, Began: 24,
    Blocked: 25,
    Credit: 32, Goaway: 33, Piece: 34,
}  # fmt: skip
KINDS: Final = {number: kind for kind, number in NUMBERS.items()}
TO_SDK: Final = frozenset({Start, Journal, Ack, Completion, RetryRun, Cancelled, Suspend, Abort, Credit, Piece})
TO_NODE: Final = frozenset(
    {StepFrame, RunFailed, Intent, RunDone, Abandon, Waiting, Output, Error, Began, Blocked, Credit, Goaway}
)
#: Frames that version 1 does not have.
LATER_FRAMES: Final = frozenset({Began, Blocked, Piece})

FRAMES_MAX: Final = 65536  # per batch
#: Lists, maps and their items in one frame: a journal that is sent at once has a few ten thousand steps.
FRAME_ELEMENTS_MAX: Final = 256 * 1024
FRAME_ELEMENTS_MAX_TO_NODE: Final = 32 * 1024
DEPTH_MAX: Final = 16
TEXT_BYTES_MAX: Final = 1024 * 1024  # of any text in a frame; most have a lower limit of their own
#: A batch is decoded in slices, because decoding all of it at once would block the event loop for too long.
SLICE_FRAMES: Final = 256
SLICE_ELEMENTS: Final = 16 * 1024
SLICE_BYTES: Final = 1024 * 1024
BATCH_BYTES_MAX: Final = 40 * 1024 * 1024
#: A suspect that has run for this long no longer counts as a running suspect: others need not wait for it.
SUSPICION_S: Final = 30.0
MESSAGE_BYTES_LEAST: Final = 64 * 1024  # Every endpoint accepts messages of this size.
_PIECE_HEAD_BYTES: Final = 16  # Bytes of a batch with one piece, without its data.


_pack = msgpack.Packer(use_bin_type=True, autoreset=True).pack


def choose_version(low: int, high: int) -> int:
    """The highest version that both sides support; the other supports `low` to `high`. Raises ProtocolError."""
    for version in reversed(VERSIONS):
        if low <= version <= high:
            return version
    spoken = f"version {low}" if low == high else f"versions {low} to {high}"
    raise ProtocolError(f"no common version of the protocol: this side speaks {_SPOKEN}, the other {spoken}")


def read_version(text: str | None, absent: int) -> int:
    """A version in a header. Raises ProtocolError."""
    if text is None:
        return absent
    if not (text.isascii() and text.isdigit() and len(text) < 5):
        raise ProtocolError(
            f"the version of the protocol must be a number, not {text!r:.20}; this side speaks {_SPOKEN}"
        )
    return int(text)


_SPOKEN: Final = " and ".join(f"version {version}" for version in VERSIONS)


def encode_batch(frames: list[Frame], version: int = VERSION) -> bytes:
    """One message. Fields of a later version are omitted, and so are trailing fields that have their default."""
    if version < 2:
        frames = [_as_version_1(frame) for frame in frames]
    packed: bytes = _pack(
        [
            (NUMBERS[kind], *frame) if (kind := type(frame)) not in _OPTIONAL else _row(frame, version)
            for frame in frames
        ]
    )
    return packed


def encode_pieces(batch: bytes, message_bytes_max: int) -> Iterator[bytes]:
    """Cut a batch into messages of at most `message_bytes_max` bytes."""
    size = message_bytes_max - _PIECE_HEAD_BYTES
    for begin in range(0, len(batch), size):
        yield encode_batch([Piece(batch[begin : begin + size], begin + size < len(batch))])


def _row(frame: Frame, version: int) -> tuple[Any, ...]:
    kind = type(frame)
    required, defaults = _OPTIONAL[kind]
    count = required
    if version > 1:
        for offset, default in enumerate(defaults, required):
            if frame[offset] != default:
                count = offset + 1
    return NUMBERS[kind], *frame[:count]


def _as_version_1(frame: Frame) -> Frame:
    """With failures of four elements. `_row` omits the fields that version 2 added."""
    match frame:
        case Start() | Journal():
            return frame._replace(journal=[_step_as_version_1(row) for row in frame.journal])
        case Completion() | RunDone() | Output():
            return frame._replace(outcome=without_extra(frame.outcome))
        case RunFailed() | Error():
            return frame._replace(failure=without_extra(frame.failure))
        case StepFrame():
            argument = frame.argument
            if frame.op in _RESOLVES and argument and type(argument[-1]) is list:
                argument = [*argument[:-1], without_extra(argument[-1])]
            outcome = None if frame.outcome is None else without_extra(frame.outcome)
            return frame._replace(argument=argument, outcome=outcome)
    return frame


#: Operations whose last argument is an outcome.
_RESOLVES: Final = frozenset(
    op for op, signature in SIGNATURES.items() if signature.parts and signature.parts[-1].kind is Kind.OUTCOME
)


def _step_as_version_1(row: bytes) -> bytes:
    fields = msgpack.unpackb(row)
    outcome = fields[5]
    if len(fields) <= STEP_FIELDS and (outcome is None or outcome[0] == 0 or len(outcome) == 4):
        return row
    fields[5] = outcome and without_extra(outcome)
    packed: bytes = msgpack.packb(fields[:STEP_FIELDS])
    return packed


class Wrong(NamedTuple):
    """Replaces a frame that no correct implementation sends, of an attempt that can be named. The other frames are
    valid."""

    invocation: InvocationId
    epoch: int
    why: str


def decode_batch(raw: bytes, allowed: frozenset[type[Any]], version: int = VERSION) -> list[Frame]:
    """The frames of one message, each checked; `allowed` says which side we are (TO_SDK or TO_NODE)."""
    found: list[Frame] = []
    for frames in decode_slices(raw, allowed, version):
        for frame in frames:
            if type(frame) is Wrong:
                raise ProtocolError(frame.why, frame.invocation, frame.epoch)
            found.append(frame)  # type: ignore[arg-type]
    return found


def decode_slices(raw: bytes, allowed: frozenset[type[Any]], version: int = VERSION) -> Iterator[list[Frame | Wrong]]:
    """The same in short slices: the event loop may do other work between two of them.

    A batch that cannot be decoded to its end raises ProtocolError, after all earlier frames were returned.
    """
    if len(raw) > BATCH_BYTES_MAX:
        raise ProtocolError(f"a batch must have at most {BATCH_BYTES_MAX} bytes, not {len(raw)}")
    if len(raw) > SMALL_BYTES:
        yield from _decode_large(raw, allowed, version)
        return
    try:
        check_msgpack(raw)
        rows = _unpack(raw)
    except Exception as error:
        raise ProtocolError(f"not msgpack: {error}") from None
    if type(rows) is not list or len(rows) > FRAMES_MAX:
        raise ProtocolError(f"a batch must be a list of at most {FRAMES_MAX} frames")
    for first in range(0, len(rows), SLICE_FRAMES):
        frames: list[Frame | Wrong] = []
        try:
            for row in rows[first : first + SLICE_FRAMES]:
                frames.append(_decode(row, allowed, version))
        except ProtocolError:
            if frames:
                yield frames
            raise
        yield frames


def _decode_large(raw: bytes, allowed: frozenset[type[Any]], version: int) -> Iterator[list[Frame | Wrong]]:
    """Decode frame by frame: a frame becomes objects only after its elements are counted and the frames before it are
    used."""
    most = FRAME_ELEMENTS_MAX if Start in allowed else FRAME_ELEMENTS_MAX_TO_NODE
    walk = Walk(raw)
    count = walk.header()
    if count is None or count > FRAMES_MAX:
        raise ProtocolError(f"a batch must be a list of at most {FRAMES_MAX} frames")
    view = memoryview(raw)
    frames: list[Frame | Wrong] = []
    pause_at = walk.seen + SLICE_ELEMENTS
    slice_at = 0
    try:
        for _ in range(count):
            begin = walk.at
            try:
                walk.skip(most, DEPTH_MAX)
                row = _unpack(view[begin : walk.at])
            except TooComplex as error:
                raise ProtocolError(f"a frame is too complex: {error}", *_read_sender(raw, begin)) from None
            except Exception as error:
                raise ProtocolError(f"not msgpack: {error}", *_read_sender(raw, begin)) from None
            frames.append(_decode(row, allowed, version))
            if len(frames) >= SLICE_FRAMES or walk.seen >= pause_at or walk.at - slice_at >= SLICE_BYTES:
                yield frames
                frames = []
                pause_at = walk.seen + SLICE_ELEMENTS
                slice_at = walk.at
        if walk.at != len(raw):
            raise ProtocolError("not msgpack: extra data after the end of the batch")
    except ProtocolError:
        if frames:
            yield frames
        raise
    if frames:
        yield frames


def _unpack(raw: bytes | memoryview) -> Any:
    return msgpack.unpackb(
        raw, raw=False, strict_map_key=True, use_list=True, ext_hook=_no_extension, max_str_len=TEXT_BYTES_MAX
    )


def _read_sender(raw: bytes, begin: int) -> tuple[InvocationId, int] | tuple[()]:
    """The invocation and epoch of the frame at `begin`, as far as they can be read."""
    unpacker = msgpack.Unpacker(max_buffer_size=64)
    unpacker.feed(raw[begin : begin + 64])
    try:
        unpacker.read_array_header()
        row = [unpacker.unpack() for _ in range(3)]
    except Exception:
        return ()
    return _sender(row)


def _sender(row: list[Any]) -> tuple[InvocationId, int] | tuple[()]:
    """Every frame of an attempt begins with its number, invocation and epoch."""
    if len(row) >= 3 and type(row[0]) is int and is_id(row[1]) and is_int(row[2]):
        return row[1], row[2]
    return ()


def _no_extension(code: int, data: bytes) -> Any:
    """A node uses extensions for values that no handler may send."""
    raise ValueError(f"extension {code} has no meaning here")


def _decode(row: Any, allowed: frozenset[type[Any]], version: int) -> Frame | Wrong:
    if type(row) is not list or not row or type(row[0]) is not int:
        raise ProtocolError("a frame must be a list that begins with its number")
    kind = KINDS.get(row[0])
    if kind is None or kind not in allowed or (version == 1 and kind in LATER_FRAMES):
        return _wrong(row, f"unknown frame {row[0]}: this is version {version} of the protocol")
    checks = _CHECKS[kind]
    count = len(row) - 1
    if count != len(checks):
        # Only the last fields may be missing, and only those with a default, which version 2 added.
        required = _OPTIONAL[kind][0] if kind in _OPTIONAL else len(checks)
        if not required <= count <= (len(checks) if version > 1 else required):
            return _wrong(row, f"{kind.__name__}: {required} fields expected, {count} found")
    elif version == 1 and kind in _OPTIONAL:
        return _wrong(row, f"{kind.__name__}: {_OPTIONAL[kind][0]} fields expected, {count} found")
    values = row[1:]
    quick = _QUICK.get(kind)
    if not (quick is not None and count == len(checks) and quick(values)) and not all(map(call, checks, values)):
        offset = [check(value) for check, value in zip(checks, values, strict=False)].index(False)
        return _wrong(row, f"{kind.__name__}: field {kind._fields[offset]} is wrong: {shown(values[offset])}")
    # Avoids Python's __new__ where no field has a default: every frame passes through here.
    frame: Frame = _new_tuple(kind, values) if count == len(checks) else kind(*values)
    return frame


_new_tuple: Final = tuple.__new__


def _wrong(row: list[Any], why: str) -> Wrong:
    sender = _sender(row)
    if not sender:
        raise ProtocolError(why)
    return Wrong(*sender, why)


_CHECKS: Final[dict[type[Any], tuple[Any, ...]]] = {
    Start: (
        is_id, is_int, is_name, is_name, is_key, is_int, is_int, is_int, is_journal, is_bool, is_state,
        is_bool, is_bool, is_index, is_int, is_int, is_bool,
    ),
    Began: (is_id, is_int),
    Blocked: (is_int, is_text, is_text),
    Journal: (is_id, is_int, is_journal, is_bool),
    Ack: (is_id, is_int, is_index),
    Completion: (is_id, is_int, is_index, is_int, is_outcome),
    RetryRun: (is_id, is_int, is_index),
    Cancelled: (is_id, is_int),
    Suspend: (is_id, is_int),
    Abort: (is_id, is_int, is_text),
    StepFrame: (is_id, is_int, is_index, is_op, is_step_key, is_argument, is_outcome_or_none, is_int),
    RunFailed: (is_id, is_int, is_index, is_step_key, is_name, is_failure, is_retry, is_int, is_int),
    Intent: (is_id, is_int, is_index, is_step_key, is_name),
    RunDone: (is_id, is_int, is_index, is_outcome, is_int),
    Abandon: (is_id, is_int, is_index),
    Waiting: (is_id, is_int, is_steps),
    Output: (is_id, is_int, is_outcome),
    Error: (is_id, is_int, is_failure, is_int, is_bool),
    Credit: (is_int,),
    Goaway: (is_text,),
    Piece: (is_bytes, is_bool),
}  # fmt: skip


#: The checks of the most frequent frames in one call each, since they are made for every step. What does not pass is checked
#: field by field, which decides.
_QUICK: Final[dict[type[Any], Callable[[list[Any]], bool]]] = {StepFrame: is_step, Output: is_output, Ack: is_ack}

#: Frames with fields that version 2 added: the number of required fields, and the defaults of the others.
_OPTIONAL: Final[dict[type[Any], tuple[int, tuple[Any, ...]]]] = {
    kind: (len(kind._fields) - len(kind._field_defaults), tuple(kind._field_defaults.values()))
    for kind in NUMBERS
    if kind._field_defaults
}
