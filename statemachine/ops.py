"""What a node knows of each operation of a journal: one row per operation, which everybody reads.

`sdk.journal.SIGNATURES` has the half that the SDK needs too: the argument as it is sent, and what completes the step. A row
adds the rest: what `apply` accepts, whether the operation needs a key, and how people see it. Only the functions that carry
the operations out are elsewhere, in `journal`. Hot paths read a row once, when their module is imported (`those`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Any, Final, NamedTuple, TypeAlias

from holdfast.sdk.ids import ID_BYTES, SECRET_BYTES, InvocationId, format_awakeable, format_id
from holdfast.sdk.journal import (
    CHOICES_MAX,
    DETAILS_BYTES_MAX,
    SIGNATURES,
    TITLE_BYTES_MAX,
    By,
    Kind,
    Op,
    Signature,
)
from holdfast.statemachine import refs, values
from holdfast.statemachine.texts import counted, utc


class Brings(Enum):
    """Whether a step comes with its outcome."""

    ALWAYS = auto()
    IF_KNOWN = auto()
    NEVER = auto()


class Kept(NamedTuple):
    """One part of an argument as the journal keeps it, for people. A part without a name is not for them."""

    name: str
    is_time: bool = False
    is_invocation: bool = False


#: What a waiting step waits for, as part of a sentence: of its invocation, its index and its argument as it is kept.
Waits: TypeAlias = Callable[[InvocationId, int, list[Any]], str]


class Row(NamedTuple):
    signature: Signature
    #: Whether `apply` takes this argument. It sees arguments that a handler protocol has checked more closely: this check
    #: protects the tables, and must answer as it always did. None: only a step that brings its outcome is taken.
    accepts: Callable[[list[Any]], bool] | None = None
    keyed: bool = False  # It needs an object or a workflow.
    writes: bool = False  # It changes the state of the key.
    kept: tuple[Kept, ...] = ()  # what people see of the argument
    waits: Waits | None = None

    @property
    def op(self) -> Op:
        return self.signature.op

    @property
    def by(self) -> By:
        return self.signature.by

    @property
    def cancellable(self) -> bool:
        return self.signature.cancellable

    @property
    def invokes(self) -> bool:
        """Whether the step begins another invocation, whose id ends the argument that the journal keeps."""
        return self.signature.offset_of(Kind.INPUT) is not None

    @property
    def resolves(self) -> bool:
        """Whether the last part of the argument is an outcome for somebody else."""
        return self.signature.offset_of(Kind.OUTCOME) is not None

    @property
    def brings(self) -> Brings:
        if self.by is By.ENDPOINT:
            return Brings.ALWAYS
        # Nobody reads an outcome of a write. It was never refused, so it is ignored.
        return Brings.IF_KNOWN if self.signature.eager or self.writes else Brings.NEVER


def _row(
    op: Op,
    accepts: Callable[[list[Any]], bool] | None = None,
    *,
    keyed: bool = False,
    writes: bool = False,
    kept: tuple[Kept, ...] | None = None,
    waits: Waits | None = None,
) -> Row:
    signature = SIGNATURES[op]
    if kept is None:
        # As it was sent, up to what became a digest.
        sent = signature.parts[: signature.offset_of(Kind.INPUT, Kind.OUTCOME)]
        kept = tuple(
            Kept(part.name, is_invocation=part.kind in (Kind.INVOCATION, Kind.AWAKEABLE))
            for part in sent
            if part.kind is not Kind.SECRET
        )
    return Row(signature=signature, accepts=accepts, keyed=keyed, writes=writes, kept=kept, waits=waits)


# -- arguments that apply takes ------------------------------------------------------------------------------------------


def _is_id(value: Any) -> bool:
    return type(value) is bytes and len(value) == ID_BYTES


def _is_id_of_step(value: Any) -> bool:
    """With the secret of an awakeable since level 2."""
    return type(value) is bytes and len(value) in (ID_BYTES, ID_BYTES + SECRET_BYTES)


def _is_outcome(value: Any) -> bool:
    return type(value) is list and (
        (len(value) == 2 and value[0] == 0 and refs.is_payload(value[1])) or (len(value) in (4, 5) and value[0] == 1)
    )


def _anything(argument: list[Any]) -> bool:
    return True


def _one_name(argument: list[Any]) -> bool:
    return len(argument) == 1 and values.is_name(argument[0])


def _one_id(argument: list[Any]) -> bool:
    return len(argument) == 1 and _is_id(argument[0])


def _milliseconds(argument: list[Any]) -> bool:
    return len(argument) == 1 and type(argument[0]) is int


def _call(argument: list[Any]) -> bool:
    return len(argument) in (5, 6)  # With an idempotency key since level 2.


def _send(argument: list[Any]) -> bool:
    return len(argument) in (6, 7)


def _name_and_value(argument: list[Any]) -> bool:
    return len(argument) == 2 and values.is_name(argument[0]) and refs.is_payload(argument[1])


def _name_and_outcome(argument: list[Any]) -> bool:
    return len(argument) == 2 and values.is_name(argument[0]) and _is_outcome(argument[1])


def _step_and_outcome(argument: list[Any]) -> bool:
    return len(argument) == 3 and _is_id_of_step(argument[0]) and type(argument[1]) is int and _is_outcome(argument[2])


def _asks(argument: list[Any]) -> bool:
    if len(argument) != len(SIGNATURES[Op.APPROVAL].parts):
        return False
    title, payload, choices, assignee, timeout_ms, remind_after_ms, editable, secret = argument
    return (
        type(title) is str
        and 0 < len(title.encode()) <= TITLE_BYTES_MAX
        and type(payload) is bytes
        and len(payload) <= DETAILS_BYTES_MAX
        and type(choices) is list
        and 0 < len(choices) <= CHOICES_MAX
        and all(type(choice) is str for choice in choices)
        and (assignee is None or values.is_name(assignee))
        and type(timeout_ms) is type(remind_after_ms) is int
        and type(editable) is bool
        and type(secret) is bytes
        and len(secret) == SECRET_BYTES
    )


# -- what a step waits for -----------------------------------------------------------------------------------------------


def _waits_for_run(_: InvocationId, index: int, argument: list[Any]) -> str:
    if len(argument) <= 3:
        return f"a decision about {argument[0]!r}, which is in doubt (step {index})"
    name, failures, due_ms, message = argument[:4]
    tried = f"the next try of {name!r} at {utc(due_ms)}" if due_ms else f"the try of {name!r} that is under way"
    last = f": {message}" if message else ""
    return f"{tried} after {counted(failures, 'failure')} (step {index}){last}"


def _waits_for_timer(_: InvocationId, index: int, argument: list[Any]) -> str:
    return f"a timer at {utc(argument[1])} (step {index})"


def _waits_for_call(_: InvocationId, index: int, argument: list[Any]) -> str:
    return f"{argument[0]}/{argument[1]} {format_id(argument[-1])} (step {index})"


def _waits_for_promise(_: InvocationId, index: int, argument: list[Any]) -> str:
    return f"the promise {argument[0]!r} (step {index})"


def _waits_for_awakeable(ident: InvocationId, index: int, argument: list[Any]) -> str:
    if argument:
        return f"an awakeable (step {index})"  # Its id is for those who may complete it.
    return f"the awakeable {format_awakeable(ident, index)} (step {index})"


def _waits_for_invocation(_: InvocationId, index: int, argument: list[Any]) -> str:
    return f"{format_id(argument[0])} (step {index})"


def _waits_for_approval(_: InvocationId, index: int, argument: list[Any]) -> str:
    title, assignee, since_ms, due_ms = argument[0], argument[3], argument[8], argument[9]
    by = f" by {assignee}" if assignee else ""
    until = f", until {utc(due_ms)}" if due_ms else ""
    return f"an approval of {title!r}{by} since {utc(since_ms)}{until} (step {index})"


# -- the rows ------------------------------------------------------------------------------------------------------------

#: A RUN that failed keeps more than its name: see `steps`.
_RUN: Final = (
    Kept("name"),
    Kept("failures"),
    Kept("next_try_at", is_time=True),
    Kept("last_error"),
    Kept("failing_since", is_time=True),
    Kept("trace"),
)
_SLEEP: Final = (Kept("milliseconds"), Kept("due_at", is_time=True))
#: As `approvals.Asked`.
_ASKED: Final = (
    Kept("title"),
    Kept("payload"),
    Kept("choices"),
    Kept("assignee"),
    Kept("timeout_ms"),
    Kept("remind_after_ms"),
    Kept("editable"),
    Kept(""),  # Its secret.
    Kept("since", is_time=True),
    Kept("due_at", is_time=True),
    Kept("remind_at", is_time=True),
)

_ROWS: Final = (
    _row(Op.INPUT),
    _row(Op.RUN, kept=_RUN, waits=_waits_for_run),
    _row(Op.SLEEP, _milliseconds, kept=_SLEEP, waits=_waits_for_timer),
    _row(Op.CALL, _call, waits=_waits_for_call),
    _row(Op.SEND, _send),
    _row(Op.GET, _one_name, keyed=True),
    _row(Op.SET, _name_and_value, keyed=True, writes=True),
    _row(Op.CLEAR, _one_name, keyed=True, writes=True),
    _row(Op.CLEAR_ALL, _anything, keyed=True, writes=True),
    _row(Op.KEYS, _anything, keyed=True),
    _row(Op.PROMISE, _one_name, keyed=True, waits=_waits_for_promise),
    _row(Op.PEEK, _one_name, keyed=True),
    _row(Op.RESOLVE, _name_and_outcome, keyed=True),
    _row(Op.AWAKEABLE, _anything, waits=_waits_for_awakeable),
    _row(Op.RESOLVE_AWAKEABLE, _step_and_outcome),
    _row(Op.ATTACH, _one_id, waits=_waits_for_invocation),
    _row(Op.CANCEL, _one_id),
    _row(Op.VALUE),
    _row(Op.APPROVAL, _asks, kept=_ASKED, waits=_waits_for_approval),
)
ROWS: Final[Mapping[int, Row]] = {row.op: row for row in _ROWS}
assert [*ROWS] == [*Op], "every operation has one row"


def those(fact: Callable[[Row], object]) -> frozenset[int]:
    """The operations of which this is true, for a hot path that cannot afford to read rows."""
    return frozenset(row.op for row in _ROWS if fact(row))
