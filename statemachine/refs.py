"""References: the sha256 and size that replace a large value in a command or a record.

A large value is stored once, in pieces (`blobs`). It is replaced by a msgpack extension. Nothing else here uses
extensions: users' payloads are msgpack `bin`, and an extension in a handler's frame is refused. So no bytes of a user are
taken for a reference, and no user can forge one.

The code of the extension is one more than the number of bytes 1 in front of the value. GET and PEEK add one
(`sdk.journal.some`), and the value after it is still stored only once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any, Final, NamedTuple

import msgpack

from holdfast.sdk.journal import SIGNATURES, Kind, some
from holdfast.statemachine.commands import (
    Command,
    Complete,
    CompletePromise,
    CompleteStep,
    DecideStep,
    Invoke,
    Payload,
    RecordRunOutcome,
    RecordStep,
    Ref,
    SetState,
)
from holdfast.statemachine.records import unpack

ID_BYTES: Final = 40  # sha256, then the size in 8 bytes
#: No message of a handler is larger, so no value is.
SIZE_MAX: Final = 40 * 1024 * 1024
_CODE: Final = 1
_CODE_MAX: Final = 3  # A value that itself begins with a byte 1, after GET.
_MARK: Final = b"\x01"


def make(payload: bytes) -> tuple[Ref, memoryview]:
    """The reference to a value, and the bytes to be stored for it."""
    stored = memoryview(payload)
    code = _CODE
    if payload[:1] == _MARK and len(payload) > 1:
        stored = stored[1:]
        code += 1
    return Ref(code, sha256(stored).digest() + len(stored).to_bytes(8, "big")), stored


def is_ref(value: Any) -> bool:
    return (
        type(value) is Ref
        and _CODE <= value.code <= _CODE_MAX
        and len(value.data) == ID_BYTES
        and 0 < stored_size(value.data) <= SIZE_MAX
    )


def is_payload(value: Any) -> bool:
    return type(value) is bytes or is_ref(value)


def stored_size(blob: bytes) -> int:
    return int.from_bytes(blob[32:], "big")


def size_of(payload: Payload) -> int:
    """The size of the value, wherever it is."""
    if isinstance(payload, bytes):
        return len(payload)
    return stored_size(payload.data) + payload.code - _CODE


def restored(ref: Ref, stored: bytes) -> bytes:
    """The value of a reference."""
    return _MARK * (ref.code - _CODE) + stored


def some_of(payload: Payload) -> Payload:
    """Like `sdk.journal.some`, wherever the value is."""
    if isinstance(payload, bytes):
        return some(payload)
    return Ref(min(payload.code + 1, _CODE_MAX), payload.data)


#: Where the argument of an operation ends in a value that stays in the journal; and operations whose argument ends in an
#: outcome for somebody else.
_VALUE_AT: Final[dict[int, int]] = {
    op: offset for op, signature in SIGNATURES.items() if (offset := signature.offset_of(Kind.VALUE)) is not None
}
_RESOLVES: Final = frozenset(
    op for op, signature in SIGNATURES.items() if signature.offset_of(Kind.OUTCOME) is not None
)


#: Operations whose argument may hold a value of either kind.
_GIVES: Final = _RESOLVES | _VALUE_AT.keys()
assert not _RESOLVES & _VALUE_AT.keys()


# -- where references stand --------------------------------------------------------------------------------------------


def in_outcome(outcome: Sequence[Any] | None) -> Ref | None:
    if outcome is not None and outcome[0] == 0 and type(outcome[1]) is Ref:
        return outcome[1]
    return None


def in_step(op: int, argument: Sequence[Any], outcome: Sequence[Any] | None) -> list[Ref]:
    """The references in a stored step. It no longer has what a call or a resolution was given."""
    found = []
    if outcome is not None and outcome[0] == 0 and type(outcome[1]) is Ref:
        found.append(outcome[1])
    at = _VALUE_AT.get(op)
    if at is not None and type(argument[at]) is Ref:
        found.append(argument[at])
    return found


def in_packed_step(raw: bytes) -> list[Ref]:
    step = unpack(raw)
    return in_step(step[0], step[2], step[5])


def filled_step(raw: bytes, value_of: Callable[[Ref], bytes]) -> bytes:
    """A packed step with the values in place of the references."""
    step = unpack(raw)
    if not in_step(step[0], step[2], step[5]):
        return raw
    at = _VALUE_AT.get(step[0])
    if at is not None and type(step[2][at]) is Ref:
        step[2][at] = value_of(step[2][at])
    step[5] = filled_outcome(step[5], value_of)
    packed: bytes = msgpack.packb(step)  # Not by the shared packer, because this may be called in a thread.
    return packed


def filled_outcome(outcome: list[Any] | None, value_of: Callable[[Ref], bytes]) -> list[Any] | None:
    ref = in_outcome(outcome)
    return outcome if ref is None else [0, value_of(ref)]


def in_command(command: Command) -> list[Ref]:
    """The references in a command, except `Deliver`, whose messages are packed."""
    bearer = _BEARERS.get(type(command))
    if bearer is None:
        return []
    # A hot path: every command of every replica passes here.
    return [payload for payload in bearer.payloads(command) if type(payload) is Ref]


def payloads(command: Command) -> list[Payload]:
    """All values of a command that a reference may replace."""
    bearer = _BEARERS.get(type(command))
    return [] if bearer is None else bearer.payloads(command)


def replaced(command: Command, new: Sequence[Payload]) -> Command:
    """The command with these in place of its `payloads`."""
    bearer = _BEARERS.get(type(command))
    return command if bearer is None else bearer.replaced(command, new)


_SEQUENCES: Final = (list, tuple)


class _Bearer(NamedTuple):
    payloads: Callable[[Any], list[Payload]]
    replaced: Callable[[Any, Sequence[Payload]], Command]


def _given(outcome: Any) -> list[Payload]:
    return [outcome[1]] if type(outcome) in _SEQUENCES and len(outcome) == 2 and outcome[0] == 0 else []


def _with_outcome(command: Any, new: Sequence[Payload]) -> Command:
    changed: Command = command._replace(outcome=[0, new[0]]) if new else command
    return changed


def _of_state(command: SetState) -> list[Payload]:
    return [payload for payload in command.values.values() if payload is not None]


def _with_state(command: SetState, new: Sequence[Payload]) -> Command:
    rest = iter(new)
    return command._replace(
        values={name: None if payload is None else next(rest) for name, payload in command.values.items()}
    )


_CHILD_PAYLOAD: Final = Invoke._fields.index("payload")


def _of_step(command: RecordStep) -> list[Payload]:
    op, argument, outcome, child = command.op, command.argument, command.outcome, command.child
    found = [] if outcome is None else _given(outcome)
    if op in _GIVES:
        at = _VALUE_AT.get(op)
        if at is None:
            found += _given(argument[-1]) if argument else ()
        elif len(argument) == at + 1:
            found.append(argument[at])
    if child is not None and len(child) > _CHILD_PAYLOAD:
        found.append(child[_CHILD_PAYLOAD])
    return found


def _with_step(command: RecordStep, new: Sequence[Payload]) -> Command:
    rest = iter(new)
    argument, child, outcome = list(command.argument), command.child, command.outcome
    if _given(outcome):
        outcome = [0, next(rest)]
    at = _VALUE_AT.get(command.op)
    if at is not None and len(argument) == at + 1:
        argument[at] = next(rest)
    elif command.op in _RESOLVES and argument and _given(argument[-1]):
        argument[-1] = [0, next(rest)]
    if child is not None and len(child) > _CHILD_PAYLOAD:
        child = [*child[:_CHILD_PAYLOAD], next(rest), *child[_CHILD_PAYLOAD + 1 :]]
    return command._replace(argument=argument, outcome=outcome, child=child)


_ENDING: Final = _Bearer(lambda command: _given(command.outcome), _with_outcome)
_BEARERS: Final[dict[type[Any], _Bearer]] = {
    Invoke: _Bearer(lambda command: [command.payload], lambda command, new: command._replace(payload=new[0])),
    RecordStep: _Bearer(_of_step, _with_step),
    RecordRunOutcome: _ENDING,
    Complete: _ENDING,
    CompleteStep: _ENDING,
    CompletePromise: _ENDING,
    DecideStep: _ENDING,
    SetState: _Bearer(_of_state, _with_state),
}
