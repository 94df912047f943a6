"""What a handler's frames mean as commands: the node's half of docs/protocol.md, without sockets.

`sdk.frames` has checked the shape of every frame. Here the arguments of each operation are checked, calls are resolved to
what the registry knows today, and the first frame that changes anything pins the invocation to its deployment. What is wrong
is a `ProtocolError`: a correct SDK does not send it, so whoever sent it is not trusted with the rest of its stream either.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, Final, Protocol, TypeAlias

from holdfast.cluster.handlers.failures import Failures
from holdfast.cluster.registry.machine import Target
from holdfast.cluster.values.staging import HASHED_BYTES_MAX
from holdfast.sdk.frames import (
    Abandon,
    Error,
    Frame,
    Intent,
    Output,
    RunDone,
    RunFailed,
    StepFrame,
    Waiting,
)
from holdfast.sdk.ids import (
    ID_BYTES,
    child_id,
    idempotent_id,
    workflow_id,
)
from holdfast.sdk.journal import (
    DIGESTED,
    INT_MAX,
    KEY_BYTES_MAX,
    NAME_BYTES_MAX,
    Failure,
    Op,
    ProtocolError,
    cut_text,
    digest,
    pack_outcome,
    unpack_outcome,
)
from holdfast.statemachine.commands import (
    AbandonStep,
    Command,
    Complete,
    FailAttempt,
    Invoke,
    Mode,
    RecordIntent,
    RecordRunFailure,
    RecordRunOutcome,
    RecordStep,
    Redispatch,
    Retry,
    SuspendAttempt,
    row_of,
)

HEADERS_MAX: Final = 64
HEADER_BYTES_MAX: Final = 16 * 1024  # of all together
WAITING_STEPS_MAX: Final = 10_000
#: A timer further away than this is a mistake of units.
DELAY_MS_MAX: Final = 100 * 366 * 24 * 3600 * 1000


_NOT_YET: Final = (
    1, 503, "idempotency_key of a call or send works once every node of the cluster runs this release", "Upgrading",
)  # fmt: skip
#: The frames that end an attempt.
LAST: Final = frozenset({Waiting, Output, Error})


class Unresolved(Exception):
    """A call or send of a handler that this node does not know; other nodes may."""


class Directory(Protocol):
    """What the registry knows."""

    def find(self, service: str, handler: str) -> Target | None: ...


class Sender(Protocol):
    """The attempt that a frame belongs to."""

    id: bytes
    epoch: int
    target: Target
    pinned: bool
    sent: int  # steps of its journal, as it believes
    progressed: bool  # Whether it sent anything for the journal.
    asked_back: bool  # Whether this node asked it to hand itself back.

    @property
    def level(self) -> int:
        """Of its partition: what may be proposed there."""

    version: int  # of the protocol, as it speaks it

    def now_ms(self) -> int: ...


class Translator:
    def __init__(self, directory: Directory, rng: Random) -> None:
        self._directory = directory
        self._rng = rng
        self._failures = Failures(rng)

    def command(self, sender: Sender, frame: Frame, *, is_fresh: bool = False) -> Command:
        """The command that a frame of this attempt asks for. Raises ProtocolError, and Unresolved unless `is_fresh`: every
        handler is known here that was registered before the frame came."""
        kind = type(frame)
        if kind is StepFrame:
            return self._step(sender, frame, is_fresh)  # type: ignore[arg-type]
        translate = _OTHERS.get(kind)
        if translate is None:
            raise ProtocolError(f"{kind.__name__}: not a frame of an attempt")
        return translate(self, sender, frame)

    def _step(self, sender: Sender, frame: StepFrame, is_fresh: bool) -> RecordStep | FailAttempt:
        op, argument, outcome = frame.op, frame.argument, frame.outcome
        check = _ARGUMENTS[op]
        if not check(argument):
            raise ProtocolError(f"a step of operation {op} has a wrong argument: {argument!r:.100}")
        if outcome is None:
            if op in _GIVEN:
                raise ProtocolError(f"a step of operation {op} comes without its outcome")
        elif op in _PENDING:
            raise ProtocolError(f"a step of operation {op} comes with an outcome that is not the handler's to give")
        child = None
        hashed = _digest(frame) if sender.level >= 2 and op in DIGESTED else b""
        if outcome is not None:
            outcome = _bounded(sender, outcome)
        elif op in _RESOLVES:
            argument = [*argument[:-1], _bounded(sender, argument[-1])]
        if op == Op.CALL or op == Op.SEND:
            if sender.level < 2 and len(argument) > (5 if op == Op.CALL else 6):
                return self._failures.of_attempt(sender, list(_NOT_YET))  # Older nodes would not know what it is.
            argument, outcome, child = self._child(sender, frame, is_fresh)
            if outcome is not None and op == Op.SEND:
                # Nobody waits for a send, so nobody would ever hear that it went nowhere: the attempt fails instead, and
                # its next one may find who it is for.
                return self._failures.of_attempt(sender, outcome)
        sender.sent = max(sender.sent, frame.index + 1)
        sender.progressed = True
        return RecordStep(
            frame.invocation,
            frame.epoch,
            frame.index,
            op,
            frame.key,
            argument,
            outcome,
            _pin(sender),
            child,
            hashed,
            began_ms=_began(sender, frame.began_ms),
        )

    def _child(
        self, sender: Sender, frame: StepFrame, is_fresh: bool
    ) -> tuple[list[Any], list[Any] | None, list[Any] | None]:
        """A call or send as it is journaled, and the invocation that it begins. Payload and headers go with the child."""
        service, handler, key, payload, headers, *rest = frame.argument
        is_send = frame.op == Op.SEND
        delay_ms = rest[0] if is_send else 0
        idempotency_key = rest[-1] if len(rest) > is_send else None
        argument = [service, handler, key, b"", {}, *rest]
        target = self._directory.find(service, handler)
        if target is None and not is_fresh:
            raise Unresolved
        if target is None:
            text = f"there is no handler {service}/{handler}; is its deployment registered?"
            return argument, [1, 404, cut_text(text), "NotFound"], None
        if target.keyed != (key is not None):
            text = f"{service}/{handler} " + ("needs a key" if target.keyed else "has no keys")
            return argument, [1, 400, cut_text(text), "BadRequest"], None
        if target.mode == Mode.WORKFLOW:
            ident = workflow_id(service, key)
        elif idempotency_key is not None:
            ident = idempotent_id(service, key, handler, idempotency_key)
        else:
            ident = child_id(frame.invocation, frame.index, service, key, spread=is_send)
        start_at_ms = sender.now_ms() + delay_ms if delay_ms else 0
        child = Invoke(
            ident, service, handler, key, target.mode, payload, headers, start_at_ms,
            caller=frame.invocation, caller_step=-1 if is_send else frame.index,
            retention_ms=target.options.retention_ms, idempotency_key=idempotency_key,
        )  # fmt: skip
        return argument, None, row_of(child)

    def _run_failed(self, sender: Sender, frame: RunFailed) -> RecordRunFailure:
        if frame.retry is None:
            retry = Retry(max_attempts=0)
        else:
            initial, factor, interval, attempts, duration, jitter = frame.retry
            # Not at once, whatever the handler says: a step that fails for ever would take all there is.
            retry = Retry(max(initial, 1), max(factor, 1000), max(interval, 1), attempts, duration, min(jitter, 1000))
        sender.sent = max(sender.sent, frame.index + 1)
        sender.progressed = True
        return RecordRunFailure(
            frame.invocation, frame.epoch, frame.index, frame.key, frame.name, _bounded(sender, frame.failure),
            retry, self._jitter(), _pin(sender),
            retry_after_ms=min(frame.retry_after_ms, DELAY_MS_MAX) if sender.level >= 2 else 0,
            began_ms=_began(sender, frame.began_ms),
        )  # fmt: skip

    def _intent(self, sender: Sender, frame: Intent) -> RecordIntent:
        sender.sent = max(sender.sent, frame.index + 1)
        sender.progressed = True
        return RecordIntent(frame.invocation, frame.epoch, frame.index, frame.key, frame.name, _pin(sender))

    def _run_done(self, sender: Sender, frame: RunDone) -> RecordRunOutcome:
        sender.progressed = True
        return RecordRunOutcome(
            frame.invocation, frame.epoch, frame.index, _bounded(sender, frame.outcome),
            began_ms=_began(sender, frame.began_ms),
        )  # fmt: skip

    def _abandon(self, sender: Sender, frame: Abandon) -> AbandonStep:
        return AbandonStep(frame.invocation, frame.epoch, frame.index)

    def _waiting(self, sender: Sender, frame: Waiting) -> SuspendAttempt | Redispatch | FailAttempt:
        if len(frame.steps) > WAITING_STEPS_MAX:
            # Any step that completes starts the invocation again: naming some of them is as good as all.
            return SuspendAttempt(frame.invocation, frame.epoch, frame.steps[:WAITING_STEPS_MAX])
        if frame.steps:
            return SuspendAttempt(frame.invocation, frame.epoch, frame.steps)
        if sender.progressed or sender.asked_back:
            return Redispatch(frame.invocation, frame.epoch)  # "Start me again at once."
        # The next attempt would do the same, and the one after it: without a failure that is counted, for ever and at once.
        text = "the attempt was handed back although nobody asked for it, without a step done or waited for"
        return self._failures.of_attempt(sender, [1, 500, text, "NoProgress"])

    def _output(self, sender: Sender, frame: Output) -> Complete:
        notices = sender.level >= 2 and sender.version >= 2
        return Complete(
            frame.invocation, frame.epoch, _bounded(sender, frame.outcome), _pin(sender), sender.sent, notices
        )

    def _error(self, sender: Sender, frame: Error) -> FailAttempt:
        after = min(frame.retry_after_ms, DELAY_MS_MAX)
        return self._failures.of_attempt(
            sender, _bounded(sender, frame.failure), retry_after_ms=after, pause=frame.pause
        )

    def _jitter(self) -> int:
        return self._rng.getrandbits(31)


def _digest(frame: StepFrame) -> bytes:
    """Of what the journal does not keep of this step. Empty: it is large, and `digested` does that in a thread."""
    given = frame.argument[DIGESTED[frame.op]]
    payload = given if isinstance(given, bytes) else given[1]
    return b"" if isinstance(payload, bytes) and len(payload) > HASHED_BYTES_MAX else digest(given)


def _began(sender: Sender, began_ms: int) -> int:
    """Left out where older nodes apply it."""
    return began_ms if sender.level >= 2 else 0


def _bounded(sender: Sender, outcome: list[Any]) -> list[Any]:
    """As it may be stored: the texts of a failure are cut, and what goes with it is left out where older nodes apply it."""
    if outcome[0] == 0:
        return outcome
    failure = unpack_outcome(outcome)
    assert isinstance(failure, Failure)
    return pack_outcome(failure if sender.level >= 2 else failure._replace(extra=None))


def _pin(sender: Sender) -> str | None:
    """The deployment, with the first command that leaves a trace: from then on only this code may go on."""
    if sender.pinned:
        return None
    sender.pinned = True
    return sender.target.deployment


_Translate: TypeAlias = Callable[[Translator, Any, Any], Command]
_OTHERS: Final[dict[type[Any], _Translate]] = {
    RunFailed: Translator._run_failed,
    Intent: Translator._intent,
    RunDone: Translator._run_done,
    Abandon: Translator._abandon,
    Waiting: Translator._waiting,
    Output: Translator._output,
    Error: Translator._error,
}


# -- arguments of operations -------------------------------------------------------------------------------------------


def _is_name(value: Any) -> bool:
    return type(value) is str and 0 < len(value) <= NAME_BYTES_MAX and len(value.encode()) <= NAME_BYTES_MAX


def _is_key(value: Any) -> bool:
    return value is None or (type(value) is str and len(value.encode()) <= KEY_BYTES_MAX)


def _is_id(value: Any) -> bool:
    return type(value) is bytes and len(value) == ID_BYTES


def _is_headers(value: Any) -> bool:
    if type(value) is not dict or len(value) > HEADERS_MAX:
        return False
    size = 0
    for name, text in value.items():
        if type(name) is not str or type(text) is not str:
            return False
        size += len(name.encode()) + len(text.encode())
    return size <= HEADER_BYTES_MAX


def _is_outcome(value: Any) -> bool:
    try:
        unpack_outcome(value)
    except ProtocolError:
        return False
    return True


def _is_delay(value: Any) -> bool:
    return type(value) is int and 0 <= value <= DELAY_MS_MAX


def _is_named(argument: list[Any]) -> bool:
    return len(argument) == 1 and _is_name(argument[0])


def _is_empty(argument: list[Any]) -> bool:
    return not argument


def _is_one_id(argument: list[Any]) -> bool:
    return len(argument) == 1 and _is_id(argument[0])


def _is_call(argument: list[Any]) -> bool:
    if len(argument) not in (5, 6) or (len(argument) == 6 and not _is_idempotency_key(argument[5])):
        return False
    service, handler, key, payload, headers = argument[:5]
    return _is_name(service) and _is_name(handler) and _is_key(key) and type(payload) is bytes and _is_headers(headers)


def _is_idempotency_key(value: Any) -> bool:
    return type(value) is str and 0 < len(value) <= KEY_BYTES_MAX and len(value.encode()) <= KEY_BYTES_MAX


def _is_send(argument: list[Any]) -> bool:
    return len(argument) in (6, 7) and _is_call([*argument[:5], *argument[6:]]) and _is_delay(argument[5])


_ARGUMENTS: Final[dict[int, Callable[[list[Any]], bool]]] = {
    Op.RUN: _is_named,
    Op.SLEEP: lambda argument: len(argument) == 1 and _is_delay(argument[0]),
    Op.CALL: _is_call,
    Op.SEND: _is_send,
    Op.GET: _is_named,
    Op.SET: lambda argument: len(argument) == 2 and _is_name(argument[0]) and type(argument[1]) is bytes,
    Op.CLEAR: _is_named,
    Op.CLEAR_ALL: _is_empty,
    Op.KEYS: _is_empty,
    Op.PROMISE: _is_named,
    Op.PEEK: _is_named,
    Op.RESOLVE: lambda argument: len(argument) == 2 and _is_name(argument[0]) and _is_outcome(argument[1]),
    Op.AWAKEABLE: _is_empty,
    Op.RESOLVE_AWAKEABLE: lambda argument: (
        len(argument) == 3
        and _is_id(argument[0])
        and type(argument[1]) is int
        and 0 <= argument[1] < 2**32
        and _is_outcome(argument[2])
    ),
    Op.ATTACH: _is_one_id,
    Op.CANCEL: _is_one_id,
    Op.VALUE: _is_named,
}
#: The SDK did it itself, so it has the outcome.
_GIVEN: Final = frozenset({Op.RUN, Op.VALUE})
_RESOLVES: Final = frozenset({Op.RESOLVE, Op.RESOLVE_AWAKEABLE})  # The last of their arguments is an outcome.
#: The node, a timer or somebody else completes it.
_PENDING: Final = frozenset(
    {
        Op.SLEEP,
        Op.CALL,
        Op.SEND,
        Op.PROMISE,
        Op.PEEK,
        Op.RESOLVE,
        Op.AWAKEABLE,
        Op.RESOLVE_AWAKEABLE,
        Op.ATTACH,
        Op.CANCEL,
    }
)
assert INT_MAX >= DELAY_MS_MAX
