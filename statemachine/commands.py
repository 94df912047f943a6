"""The commands that a committed entry of a partition may hold.

A proposal is a `Batch`: all commands of one turn of the leader, with one reading of the leader's clock. `apply` handles
its commands in order. Invalid commands are refused before they are proposed. A command that a race made obsolete gets a
result, never an exception.

Ids are raw bytes (`sdk.ids`). Payloads are opaque bytes, or a reference to bytes that were staged before
(`refs`, `blobs`). There are no floats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import msgpack

from holdfast.sdk.ids import DeploymentId, InvocationId, PartitionNumber
from holdfast.statemachine.levels import LEVEL, TooNew, trimmed
from holdfast.statemachine.webhooks import HookId

if TYPE_CHECKING:

    class Ref(NamedTuple):
        """Stands for a large value: see `refs`."""

        code: int
        data: bytes

else:
    Ref = msgpack.ExtType  # Which has just these fields, and no types.

Payload: TypeAlias = bytes | Ref

#: How many calls may wait for each other in a chain, unless a setting says otherwise.
CALL_DEPTH_MAX: Final = 100


class Mode(IntEnum):
    """How a handler shares its key."""

    PLAIN = 0  # no key
    EXCLUSIVE = 1  # one at a time per key, in order of arrival
    SHARED = 2  # keyed, beside whatever else runs
    WORKFLOW = 3  # the main handler of a workflow: once per key


class Retry(NamedTuple):
    """How failed work is tried again. Zero attempts or duration: no limit."""

    initial_ms: int = 100
    factor_permille: int = 2000
    max_interval_ms: int = 60_000
    max_attempts: int = 50
    max_duration_ms: int = 0
    jitter_permille: int = 0


class Announce(NamedTuple):
    """The first command of a leader, from which on its decisions count. Raft puts no entry of an older leader after it."""

    term: int
    node: str


class Invoke(NamedTuple):
    """Begin an invocation, unless its id is known. The proposer has resolved the service."""

    id: InvocationId
    service: str
    handler: str
    key: str | None
    mode: int
    payload: Payload
    headers: dict[str, str]
    start_at_ms: int  # 0: at once
    caller: InvocationId | None  # whose step this is; None: a client's request
    caller_step: int  # which step waits for the outcome; -1: nobody does
    retention_ms: int  # how long the record stays after completion
    idempotency_key: str | None = None  # for people; the id already follows from it
    request_hash: bytes = b""  # of the body of a client's request with an idempotency key
    chain: Sequence[str] = ()  # "service/key" of the keys that its callers hold while they wait for it, outermost first
    depth: int = 0  # how many invocations wait for it, each for the next; 0: only a client, or nobody
    callers: Sequence[str] = ()  # the nearest of them, nearest last, if `depth` is close to its limit
    tags: Mapping[str, str] | None = None  # to find it by; None: none


class Redispatch(NamedTuple):
    """Attempt `epoch` is lost (its stream broke, its leader changed): start another, if it is still the current one."""

    id: InvocationId
    epoch: int


class RecordStep(NamedTuple):
    """Append a step to the journal. For CALL and SEND, `child` is a complete Invoke that the proposer has resolved.

    `digest` (`sdk.journal.digest`) replaces what the journal does not keep: the payload of a CALL or SEND, the outcome of a
    RESOLVE or RESOLVE_AWAKEABLE. The proposer computes it, because apply may see a reference in place of the value.
    """

    id: InvocationId
    epoch: int
    step: int
    op: int
    key: str
    argument: list[Any]
    outcome: list[Any] | None
    deployment: DeploymentId | None  # pins the invocation with its first step
    child: list[Any] | None = None
    digest: bytes = b""
    began_ms: int = 0  # when the function of a RUN began, by the clock of the handler's process; 0: not known


class RecordRunFailure(NamedTuple):
    """A RUN failed and may be retried. The failure is counted in the journal, so no crash resets the count."""

    id: InvocationId
    epoch: int
    step: int
    key: str
    name: str
    failure: list[Any]
    retry: Retry
    jitter_ms: int
    deployment: DeploymentId | None
    retry_after_ms: int = 0  # when the function asked to be tried again; 0: as the policy says
    began_ms: int = 0


class RecordIntent(NamedTuple):
    """An at-most-once RUN is about to happen."""

    id: InvocationId
    epoch: int
    step: int
    key: str
    name: str
    deployment: DeploymentId | None


class RecordRunOutcome(NamedTuple):
    """The outcome of a RUN that is in the journal already."""

    id: InvocationId
    epoch: int
    step: int
    outcome: list[Any]
    began_ms: int = 0


class AbandonStep(NamedTuple):
    """The code no longer waits for this step, and must not wait for it in replay either."""

    id: InvocationId
    epoch: int
    step: int


class SuspendAttempt(NamedTuple):
    """The attempt ended because it waits for nothing but these steps."""

    id: InvocationId
    epoch: int
    steps: list[int]


class Complete(NamedTuple):
    """The handler returned, or failed for good. `length`: the length of the journal as the attempt knows it; -1: unknown."""

    id: InvocationId
    epoch: int
    outcome: list[Any]
    deployment: DeploymentId | None
    length: int = -1
    #: Whether the SDK can tell the code about a cancellation that came before the output. Then another attempt begins.
    notices: bool = False


class FailAttempt(NamedTuple):
    """An attempt failed. Back off by the policy; pause after too many failures, or at once if `pause` is set."""

    id: InvocationId
    epoch: int
    failure: list[Any]
    retry: Retry
    jitter_ms: int
    retry_after_ms: int  # 0: as the policy says
    pause: bool
    lost: bool = False  # The process of its handler ended: see `attempts.lose`.


class Cancel(NamedTuple):
    """Cancel an invocation: everything it waits for fails as cancelled, and its calls are cancelled too. The code may
    clean up."""

    id: InvocationId


class Kill(NamedTuple):
    """End an invocation and its calls now, without telling the code."""

    id: InvocationId


class Pause(NamedTuple):
    id: InvocationId


class Resume(NamedTuple):
    """Run a paused or backing-off invocation now; `deployment` moves it to another one."""

    id: InvocationId
    deployment: DeploymentId | None


class Restart(NamedTuple):
    """Start a new invocation with the input of a completed one and its journal before `step` (0: only the input).

    If `new_id` is `id`, the new one replaces the old one. A workflow is always restarted in place, because its key
    decides its id; `new_id` then only identifies the request. The result's message is the id, as text, of the invocation
    that now runs.
    """

    id: InvocationId
    new_id: InvocationId
    step: int
    deployment: DeploymentId | None  # for a copied prefix; None: where the original ran


class Purge(NamedTuple):
    """Forget a completed invocation."""

    id: InvocationId


class DecideStep(NamedTuple):
    """An operator or a reconcile hook decides about a RUN in doubt: its outcome, or None to run it again."""

    id: InvocationId
    step: int
    outcome: list[Any] | None


class CompleteStep(NamedTuple):
    """Complete an awakeable. With `answer`, complete a step that waits for another invocation or a promise: only the
    state machine sends that, so nobody else can invent the result of a call."""

    id: InvocationId
    step: int
    outcome: list[Any]
    answer: bool = False
    secret: bytes = b""  # of the awakeable: a part of its id


class CompletePromise(NamedTuple):
    """A client resolves or rejects a promise of a workflow."""

    service: str
    key: str
    name: str
    outcome: list[Any]


class SetState(NamedTuple):
    """An operator edits the state of a key that nobody is writing to. A value of None removes the name.

    Nothing changes unless each name in `expect` has the value with this fingerprint (`values.fingerprint`; None: no value).
    """

    service: str
    key: str
    values: Mapping[str, Payload | None]
    replace: bool  # remove what is not in `values`
    expect: Mapping[str, bytes | None] | None = None


class AttachTo(NamedTuple):
    """A step of another invocation wants the outcome of this one."""

    id: InvocationId
    caller: InvocationId
    caller_step: int


class FireTimers(NamedTuple):
    """Fire the timers that are due by the batch's time, at most `limit`."""

    limit: int


class Deliver(NamedTuple):
    """Messages `first`, `first + 1`, ... from the outbox of partition `source`: packed commands."""

    source: PartitionNumber
    first: int
    messages: list[bytes]


class TrimOutbox(NamedTuple):
    """Partition `target` has accepted all messages up to `sequence`."""

    target: PartitionNumber
    sequence: int


class SetLimits(NamedTuple):
    """Limits of the partition. They are part of its state, because all replicas must apply the same limits."""

    journal_steps_max: int
    journal_bytes_max: int
    completed_max: int  # how many completed invocations are kept, and
    completed_bytes_max: int  # their bytes, regardless of their retention
    journal_blob_bytes_max: int = 256 * 1024 * 1024
    call_depth_max: int = CALL_DEPTH_MAX  # how many calls may wait for each other in a chain


class TouchBlob(NamedTuple):
    """Ask whether this large value is completely here, and if so, keep it until a command that refers to it can follow."""

    blob: bytes  # sha256 and size: see `refs`
    intake: bool  # for a client's new work, which is refused when there is no room


class PutBlob(NamedTuple):
    """A piece of a large value."""

    blob: bytes
    index: int  # type: ignore[assignment]
    data: bytes


class KeepBlob(NamedTuple):
    """A large value is in the shared store, under this name: see `blobs.object_name`."""

    blob: bytes
    object: str


class ForgetObjects(NamedTuple):
    """These objects of the shared store are deleted."""

    objects: list[str]


class RaiseLevel(NamedTuple):
    """Every node of the cluster supports this level: apply at this level from here on. See `levels`."""

    level: int


class PostponeAttempt(NamedTuple):
    """An attempt cannot continue, through no fault of its own: begin another one later. No failure is counted."""

    id: InvocationId
    epoch: int
    failure: list[Any]
    delay_ms: int


class SetHooks(NamedTuple):
    """Which webhooks want which events of which services, as the meta group knew it in this version: see `hooks`."""

    version: int
    hooks: list[list[Any]]  # id, mask of events, services (none: all)


class ForgetNotices(NamedTuple):
    """These notices of a hook are delivered, or dropped because they cannot be."""

    hook: HookId
    sequences: list[int]
    dropped: bool = False


class Decide(NamedTuple):
    """Somebody decides about an approval. Only the first decision counts; the same one by the same person is repeated
    without harm."""

    id: InvocationId
    step: int
    secret: bytes  # of the approval: a part of its id
    choice: str
    by: str  # who decides, for people
    by_id: str  # the id of their token
    comment: str = ""
    payload: bytes | None = None  # in place of the one that was shown


Command: TypeAlias = (
    Announce | Invoke | Redispatch | RecordStep | RecordRunFailure | RecordIntent | RecordRunOutcome | AbandonStep
    | SuspendAttempt | Complete | FailAttempt | Cancel | Kill | Pause | Resume | Restart | Purge | DecideStep
    | CompleteStep | CompletePromise | SetState | AttachTo | FireTimers | Deliver | TrimOutbox | SetLimits
    | TouchBlob | PutBlob | KeepBlob | ForgetObjects | PostponeAttempt | RaiseLevel | SetHooks | ForgetNotices
    | Decide
)  # fmt: skip

#: Numbers never change: later releases replay logs that were written today.
NUMBERS: Final[dict[type[Any], int]] = {
    Announce: 1, Invoke: 2, Redispatch: 3, RecordStep: 4, RecordRunFailure: 5, RecordIntent: 6, RecordRunOutcome: 7,
    AbandonStep: 8, SuspendAttempt: 9, Complete: 10, FailAttempt: 11, Cancel: 12, Kill: 13, Pause: 14, Resume: 15,
    Restart: 16, Purge: 17, DecideStep: 18, CompleteStep: 19, CompletePromise: 20, SetState: 21, AttachTo: 22,
    FireTimers: 23, Deliver: 24, TrimOutbox: 25, SetLimits: 26, TouchBlob: 27, PutBlob: 28,
    KeepBlob: 29, ForgetObjects: 30, PostponeAttempt: 31, RaiseLevel: 32, SetHooks: 33,
    ForgetNotices: 34, Decide: 35,
}  # fmt: skip
KINDS: Final = {number: kind for kind, number in NUMBERS.items()}
#: The number of trailing fields that a command got in level 2. They are left out while they have their defaults.
_ADDED: Final[dict[type[Any], int]] = {
    Invoke: 5, RecordStep: 2, RecordRunFailure: 2, RecordRunOutcome: 1, Complete: 1, FailAttempt: 1, SetLimits: 1,
    CompleteStep: 1, SetState: 1,
}  # fmt: skip
#: The defaults of those fields.
_LATER: Final = {kind: tuple(kind._field_defaults[name] for name in kind._fields[-n:]) for kind, n in _ADDED.items()}
#: The position of the first of them.
_BASE: Final = {kind: len(kind._fields) - n for kind, n in _ADDED.items()}
_RETRY_AT: Final = {
    RecordRunFailure: RecordRunFailure._fields.index("retry"),
    FailAttempt: FailAttempt._fields.index("retry"),
}


class Batch(NamedTuple):
    """One proposal. By `origin` and `sequence`, its proposer finds those who wait for it."""

    origin: bytes
    sequence: int
    now_ms: int
    commands: list[Command]


_packer: Final = msgpack.Packer()
_pack: Final = _packer.pack


def encode_batch(batch: Batch) -> bytes:
    rows = [encode_command(command) for command in batch.commands]
    return frame_batch(batch.origin, batch.sequence, batch.now_ms, rows)


def batch_head(origin: bytes) -> bytes:
    """The first bytes of every batch of this origin, which identify one without decoding it."""
    head: bytes = _packer.pack_array_header(4) + _pack(origin)
    return head


def sequence_of(raw: bytes) -> int:
    """The sequence of a batch that begins with `batch_head` of an 8-byte origin."""
    kind = raw[11]
    if kind < 0x80:
        return kind
    return int.from_bytes(raw[12 : 12 + (1 << kind - 0xCC)], "big")


def frame_batch(origin: bytes, sequence: int, now_ms: int, rows: list[bytes]) -> bytes:
    """A batch of encoded commands. The caller has encoded them one by one, to bound their sizes."""
    head = batch_head(origin) + _pack(sequence) + _pack(now_ms)
    return b"".join((head, _packer.pack_array_header(len(rows)), *rows))


def decode_batch(raw: bytes) -> Batch:
    origin, sequence, now_ms, rows = msgpack.unpackb(raw, strict_map_key=False)
    return Batch(origin, sequence, now_ms, [_command(row) for row in rows])


def encode_command(command: Command) -> bytes:
    kind = type(command)
    base = _BASE.get(kind)
    fields: Sequence[Any] = command
    if base is not None:
        later = _LATER[kind]
        fields = command[:base] if command[base:] == later else trimmed(command, later)  # Mostly the former.
    packed: bytes = _pack((NUMBERS[kind], *fields))
    return packed


def row_of(command: Invoke) -> list[Any]:
    """A command inside another one: the child of a call in its `RecordStep`."""
    return list(trimmed(command, _LATER[Invoke]))


def decode_command(raw: bytes) -> Command:
    return _command(msgpack.unpackb(raw, strict_map_key=False))


def _command(row: list[Any]) -> Command:
    shape = _SHAPES.get(row[0])
    if shape is None:
        raise TooNew(f"command {row[0]} of the log", LEVEL + 1)
    kind, size = shape
    at = _RETRY_AT.get(kind)
    if at is not None:
        row[at + 1] = Retry(*row[at + 1])
    if len(row) == size:
        complete: Command = _new_tuple(
            kind, row[1:]
        )  # Every replica decodes every command: not through Python's __new__.
        return complete
    if len(row) > size:
        raise TooNew(f"a {kind.__name__} of {len(row) - 1} fields in the log", LEVEL + 1)
    command: Command = kind(*row[1:])  # Written by an older release, or its last fields have their defaults.
    return command


_SHAPES: Final = {number: (kind, len(kind._fields) + 1) for number, kind in KINDS.items()}
_new_tuple: Final = tuple.__new__
