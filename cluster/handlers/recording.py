"""What attempts do, as commands: the checks that hold for every handler protocol.

A protocol has checked the shape of what it received. This module checks the arguments of each operation and resolves calls with
the registry's current knowledge. The first thing that changes anything pins the invocation to its deployment. Anything wrong
is a `ProtocolError`: correct code of an SDK does not do it.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, Final, Protocol

from holdfast.cluster.handlers.failures import Failures
from holdfast.cluster.registry.machine import Target
from holdfast.cluster.values.staging import HASHED_BYTES_MAX
from holdfast.sdk.ids import (
    ID_BYTES,
    SECRET_BYTES,
    DeploymentId,
    InvocationId,
    child_id,
    idempotent_id,
    workflow_id,
)
from holdfast.sdk.journal import (
    CHOICE_BYTES_MAX,
    CHOICES_MAX,
    DETAILS_BYTES_MAX,
    DIGESTED,
    INT_MAX,
    KEY_BYTES_MAX,
    NAME_BYTES_MAX,
    SIGNATURES,
    TITLE_BYTES_MAX,
    Failure,
    Kind,
    Op,
    ProtocolError,
    Signature,
    cut_text,
    digest,
    pack_outcome,
    unpack_outcome,
)
from holdfast.sdk.tags import BadTags, tags_in
from holdfast.statemachine import ops
from holdfast.statemachine.commands import (
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
from holdfast.statemachine.outcomes import failed, is_success

HEADERS_MAX: Final = 64
HEADER_BYTES_MAX: Final = 16 * 1024  # in total
WAITING_STEPS_MAX: Final = 10_000
#: A longer delay must be a mistake of units.
DELAY_MS_MAX: Final = 100 * 366 * 24 * 3600 * 1000


_NOT_YET: Final = (
    1, 503, "idempotency_key of a call or send requires that every node of the cluster runs this release", "Upgrading",
)  # fmt: skip
_NO_SECRETS_YET: Final = (
    1, 503, "the id of this awakeable requires that every node of the cluster runs this release", "Upgrading",
)  # fmt: skip


_NO_APPROVALS_YET: Final = (
    1, 503, "an approval requires that every node of the cluster runs this release", "Upgrading",
)  # fmt: skip


class Unresolved(Exception):
    """A call or send of a handler that this node does not know; other nodes may."""


class Directory(Protocol):
    """What the registry knows."""

    def find(self, service: str, handler: str) -> Target | None: ...


class Sender(Protocol):
    """The attempt that a frame belongs to."""

    id: InvocationId
    epoch: int
    target: Target
    pinned: bool
    sent: int  # steps of its journal, as the attempt knows it
    progressed: bool  # Whether it sent anything for the journal.
    asked_back: bool  # Whether this node asked it to suspend for a handover.

    @property
    def level(self) -> int:
        """The level of its partition, which decides what may be proposed."""

    def now_ms(self) -> int: ...


class Step(Protocol):
    """A step of the journal, as it arrived."""

    @property
    def index(self) -> int: ...

    @property
    def op(self) -> int: ...

    @property
    def key(self) -> str: ...

    @property
    def argument(self) -> list[Any]: ...

    @property
    def outcome(self) -> list[Any] | None: ...

    @property
    def began_ms(self) -> int: ...


class Recorder:
    """Makes the commands."""

    def __init__(self, directory: Directory, rng: Random) -> None:
        self._directory = directory
        self._rng = rng
        self._failures = Failures(rng)

    def step(self, sender: Sender, step: Step, *, is_fresh: bool = False) -> RecordStep | FailAttempt:
        """Record a step. Raises ProtocolError, and Unresolved unless `is_fresh`.

        `is_fresh`: this node knows every handler registered before the step arrived."""
        op, argument, outcome = step.op, step.argument, step.outcome
        check = _ARGUMENTS[op]
        if not check(argument):
            raise ProtocolError(f"a step of operation {op} has an invalid argument: {argument!r:.100}")
        if outcome is None:
            if op in _GIVEN:
                raise ProtocolError(f"a step of operation {op} must have an outcome")
        elif op in _PENDING:
            raise ProtocolError(f"a step of operation {op} must not have an outcome")
        level = sender.level
        if level < 2 and op == _APPROVAL:
            return self._failures.of_attempt(sender, list(_NO_APPROVALS_YET))
        if level < 2 and _has_secret(op, argument):
            return self._failures.of_attempt(sender, list(_NO_SECRETS_YET))
        child = None
        hashed = _digest(step) if level >= 2 and op in DIGESTED else b""
        if outcome is not None:
            outcome = _bounded(sender, outcome)
        elif op in _RESOLVES:
            argument = [*argument[:-1], _bounded(sender, argument[-1])]
        if op in _INVOKES:
            if level < 2 and len(argument) > SIGNATURES[op].parts_min:
                return self._failures.of_attempt(sender, list(_NOT_YET))  # Older nodes do not support it.
            argument, outcome, child = self._child(sender, step, is_fresh)
            if outcome is not None and op == _SEND:
                # Nothing waits for a send, so its failure would go unnoticed. The attempt fails instead, and the next
                # one may find the handler.
                return self._failures.of_attempt(sender, outcome)
        _count(sender, step.index)
        return RecordStep(
            id=sender.id,
            epoch=sender.epoch,
            step=step.index,
            op=op,
            key=step.key,
            argument=argument,
            outcome=outcome,
            deployment=_pin(sender),
            child=child,
            digest=hashed,
            began_ms=step.began_ms if level >= 2 else 0,
        )

    def _child(
        self, sender: Sender, step: Step, is_fresh: bool
    ) -> tuple[list[Any], list[Any] | None, list[Any] | None]:
        """A call or send as it is journaled, and the invocation that it starts. Payload and headers go to the child."""
        service, handler, key, payload, headers, *rest = step.argument
        is_send = step.op == _SEND
        delay_ms = rest[0] if is_send else 0
        idempotency_key = rest[-1] if len(rest) > is_send else None
        argument = [service, handler, key, b"", {}, *rest]
        target = self._directory.find(service, handler)
        if target is None and not is_fresh:
            raise Unresolved
        if target is None:
            text = f"there is no handler {service}/{handler}; is its deployment registered?"
            return argument, failed(404, cut_text(text), "NotFound"), None
        if target.keyed != (key is not None):
            text = f"{service}/{handler} " + ("needs a key" if target.keyed else "has no keys")
            return argument, failed(400, cut_text(text), "BadRequest"), None
        tags: dict[str, str] | None = None
        if headers and sender.level >= 2:
            try:
                tags = tags_in(headers) or None
            except BadTags as error:
                return argument, failed(400, cut_text(str(error)), "BadRequest"), None
        if target.mode == Mode.WORKFLOW:
            ident = workflow_id(service, key)
        elif idempotency_key is not None:
            ident = idempotent_id(service, key, handler, idempotency_key)
        else:
            ident = child_id(sender.id, step.index, service, key, spread=is_send)
        start_at_ms = sender.now_ms() + delay_ms if delay_ms else 0
        child = Invoke(
            id=ident,
            service=service,
            handler=handler,
            key=key,
            mode=target.mode,
            payload=payload,
            headers=headers,
            start_at_ms=start_at_ms,
            caller=sender.id,
            caller_step=-1 if is_send else step.index,
            retention_ms=target.options.retention_ms,
            idempotency_key=idempotency_key,
            tags=tags,
        )
        return argument, None, row_of(child)

    def run_failed(
        self,
        sender: Sender,
        index: int,
        *,
        key: str,
        name: str,
        failure: list[Any],
        retry: Retry | None,
        retry_after_ms: int = 0,
        began_ms: int = 0,
    ) -> RecordRunFailure:
        """The function of a step raised an error that may be retried. `retry`: None for the default."""
        if retry is None:
            retry = Retry(max_attempts=0)
        else:
            # Never retry immediately, whatever the handler says: a step that always fails would use all capacity.
            retry = retry._replace(
                initial_ms=max(retry.initial_ms, 1),
                factor_permille=max(retry.factor_permille, 1000),
                max_interval_ms=max(retry.max_interval_ms, 1),
                jitter_permille=min(retry.jitter_permille, 1000),
            )
        _count(sender, index)
        return RecordRunFailure(
            id=sender.id,
            epoch=sender.epoch,
            step=index,
            key=key,
            name=name,
            failure=_bounded(sender, failure),
            retry=retry,
            jitter_ms=self._rng.getrandbits(31),
            deployment=_pin(sender),
            retry_after_ms=min(retry_after_ms, DELAY_MS_MAX) if sender.level >= 2 else 0,
            began_ms=_began(sender, began_ms),
        )

    def intent(self, sender: Sender, index: int, *, key: str, name: str) -> RecordIntent:
        """A function that must run at most once is about to run."""
        _count(sender, index)
        return RecordIntent(id=sender.id, epoch=sender.epoch, step=index, key=key, name=name, deployment=_pin(sender))

    def run_done(self, sender: Sender, index: int, outcome: list[Any], began_ms: int = 0) -> RecordRunOutcome:
        """The outcome of a step whose function ran after the step was recorded."""
        sender.progressed = True
        return RecordRunOutcome(
            sender.id, sender.epoch, index, _bounded(sender, outcome), began_ms=_began(sender, began_ms)
        )

    def suspended(self, sender: Sender, steps: list[int]) -> SuspendAttempt | Redispatch | FailAttempt:
        """The attempt ended, and another must start when any of these steps has an outcome."""
        if steps:
            # Any step that completes resumes the invocation, so naming some of them is enough.
            return SuspendAttempt(sender.id, sender.epoch, steps[:WAITING_STEPS_MAX])
        if sender.progressed or sender.asked_back:
            return Redispatch(sender.id, sender.epoch)  # "Start me again at once."
        # The next attempts would do the same. Without a counted failure, they would repeat forever without a pause.
        text = "the attempt suspended without being asked to, and without a completed or pending step"
        return self._failures.of_attempt(sender, failed(500, text, "NoProgress"))

    def completed(self, sender: Sender, outcome: list[Any], *, notices: bool) -> Complete:
        """The invocation completes. `notices`: the code notices a cancellation that came before this."""
        return Complete(
            id=sender.id,
            epoch=sender.epoch,
            outcome=_bounded(sender, outcome),
            deployment=_pin(sender),
            length=sender.sent,
            notices=notices and sender.level >= 2,
        )

    def failed(
        self, sender: Sender, failure: list[Any], *, retry_after_ms: int = 0, pause: bool = False
    ) -> FailAttempt:
        """The attempt failed, and the failure counts."""
        after = min(retry_after_ms, DELAY_MS_MAX)
        return self._failures.of_attempt(sender, _bounded(sender, failure), retry_after_ms=after, pause=pause)


def _count(sender: Sender, index: int) -> None:
    if index >= sender.sent:
        sender.sent = index + 1
    sender.progressed = True


def _digest(step: Step) -> bytes:
    """Digest of the parts of a step that the journal does not keep. Empty if they are large: `digested` hashes in a thread."""
    given = step.argument[DIGESTED[step.op]]
    payload = given if isinstance(given, bytes) else given[1]
    return b"" if isinstance(payload, bytes) and len(payload) > HASHED_BYTES_MAX else digest(given)


def _began(sender: Sender, began_ms: int) -> int:
    """Omitted if older nodes apply it."""
    return began_ms if sender.level >= 2 else 0


def _bounded(sender: Sender, outcome: list[Any]) -> list[Any]:
    """An outcome that may be stored: texts of a failure are truncated, and its extra data is omitted for older nodes."""
    if is_success(outcome):
        return outcome
    failure = unpack_outcome(outcome)
    assert isinstance(failure, Failure)
    return pack_outcome(failure if sender.level >= 2 else failure._replace(extra=None))


def _pin(sender: Sender) -> DeploymentId | None:
    """The deployment, with the first command that leaves a trace: from then on only this code may continue."""
    if sender.pinned:
        return None
    sender.pinned = True
    return sender.target.deployment


# -- arguments of operations -------------------------------------------------------------------------------------------


def _has_secret(op: int, argument: list[Any]) -> bool:
    if op == _RESOLVE_AWAKEABLE:
        return len(argument[0]) > ID_BYTES
    return op == _AWAKEABLE and bool(argument)


def _is_name(value: Any) -> bool:
    return type(value) is str and 0 < len(value) <= NAME_BYTES_MAX and len(value.encode()) <= NAME_BYTES_MAX


def _is_key(value: Any) -> bool:
    return value is None or (type(value) is str and len(value.encode()) <= KEY_BYTES_MAX)


def _is_id(value: Any) -> bool:
    return type(value) is bytes and len(value) == ID_BYTES


def _is_id_of_step(value: Any) -> bool:
    return type(value) is bytes and len(value) in (ID_BYTES, ID_BYTES + SECRET_BYTES)


def _is_secret(value: Any) -> bool:
    return type(value) is bytes and len(value) == SECRET_BYTES


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


def _is_step(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**32


def _is_idempotency_key(value: Any) -> bool:
    return type(value) is str and 0 < len(value) <= KEY_BYTES_MAX and len(value.encode()) <= KEY_BYTES_MAX


def _is_title(value: Any) -> bool:
    return type(value) is str and 0 < len(value) <= TITLE_BYTES_MAX and len(value.encode()) <= TITLE_BYTES_MAX


def _is_details(value: Any) -> bool:
    return type(value) is bytes and len(value) <= DETAILS_BYTES_MAX


def _is_choices(value: Any) -> bool:
    return (
        type(value) is list
        and 0 < len(value) <= CHOICES_MAX
        and all(type(each) is str and 0 < len(each.encode()) <= CHOICE_BYTES_MAX for each in value)
        and len({*value}) == len(value)
    )


def _is_assignee(value: Any) -> bool:
    return value is None or _is_name(value)


def _is_truth(value: Any) -> bool:
    return type(value) is bool


def _is_payload(value: Any) -> bool:
    return type(value) is bytes


_PARTS: Final[dict[Kind, Callable[[Any], bool]]] = {
    Kind.NAME: _is_name,
    Kind.KEY: _is_key,
    Kind.IDEMPOTENCY_KEY: _is_idempotency_key,
    Kind.DELAY: _is_delay,
    Kind.HEADERS: _is_headers,
    Kind.VALUE: _is_payload,
    Kind.INPUT: _is_payload,
    Kind.OUTCOME: _is_outcome,
    Kind.INVOCATION: _is_id,
    Kind.AWAKEABLE: _is_id_of_step,
    Kind.SECRET: _is_secret,
    Kind.STEP: _is_step,
    Kind.TITLE: _is_title,
    Kind.DETAILS: _is_details,
    Kind.CHOICES: _is_choices,
    Kind.ASSIGNEE: _is_assignee,
    Kind.TRUTH: _is_truth,
}
assert _PARTS.keys() == {*Kind}


def _check_of(signature: Signature) -> Callable[[list[Any]], bool]:
    """The check of an operation's argument."""
    checks = [_PARTS[part.kind] for part in signature.parts]
    if len(checks) == signature.parts_min == 1:
        only = checks[0]
        return lambda argument: len(argument) == 1 and only(argument[0])
    parts_min, parts_max = signature.parts_min, len(checks)
    return lambda argument: (
        parts_min <= len(argument) <= parts_max
        and all(check(part) for check, part in zip(checks, argument, strict=False))
    )


_ARGUMENTS: Final = {op: _check_of(row.signature) for op, row in ops.ROWS.items()}
_GIVEN: Final = ops.those(lambda row: row.brings is ops.Brings.ALWAYS)
_PENDING: Final = ops.those(lambda row: row.brings is ops.Brings.NEVER)
_INVOKES: Final = ops.those(lambda row: row.invokes)
_RESOLVES: Final = ops.those(lambda row: row.resolves)
_SEND: Final = Op.SEND
_AWAKEABLE: Final = Op.AWAKEABLE
_RESOLVE_AWAKEABLE: Final = Op.RESOLVE_AWAKEABLE
_APPROVAL: Final = Op.APPROVAL
assert INT_MAX >= DELAY_MS_MAX
