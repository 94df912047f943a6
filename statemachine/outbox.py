"""Messages to other partitions: written together with the change that caused them, and accepted exactly once.

A message is a packed command. Each pair of partitions has one sequence without gaps, so the receiver remembers one number
per source. Messages to the own partition are not written: they are handled in the same apply, after the command that
caused them.

A message that refers to large values keeps them here until it is accepted (`PARCEL`). The receiver accepts it only if it
has the values too, so the sender stages them there first.
"""

from __future__ import annotations

from typing import Final

from holdfast.sdk.ids import partition_of
from holdfast.statemachine import blobs, refs
from holdfast.statemachine.commands import (
    AttachTo,
    Cancel,
    Command,
    CompleteStep,
    Deliver,
    Invoke,
    Kill,
    TrimOutbox,
    decode_command,
    encode_command,
)
from holdfast.statemachine.effects import OK, Code, FlushOutbox, Result
from holdfast.statemachine.levels import LEVEL, TooNew
from holdfast.statemachine.records import pack, unpack
from holdfast.statemachine.state import State
from holdfast.statemachine.tables import OUTBOX, PARCEL, outbox_key, parcel_key, partition_bytes

#: The commands that one invocation may send to another.
MESSAGES: Final = (Invoke, CompleteStep, AttachTo, Cancel, Kill)


def post(state: State, message: Invoke | CompleteStep | AttachTo | Cancel | Kill) -> None:
    """Send a message to the partition of `message.id`, in order of posting."""
    target = partition_of(message.id, state.partitions)
    if target == state.partition:
        state.todo.append(message)
        return
    sequence = state.sent(target) + 1
    state.set_sent(target, sequence)
    state.put(outbox_key(target, sequence), encode_command(message))
    held = refs.in_command(message)
    if held:
        state.put(parcel_key(target, sequence), pack(held))
        for ref in held:
            blobs.acquire(state, ref)
    if state.is_first_for(target):
        state.effects.append(FlushOutbox(target))


def deliver(state: State, command: Deliver) -> Result:
    taken = state.taken(command.source)
    if command.first > taken + 1:
        return Result(
            Code.CONFLICT, f"messages {taken + 1} to {command.first - 1} of partition {command.source} are missing"
        )
    new = command.messages[taken + 1 - command.first :] if command.first > 0 else []
    if not new:
        return Result(Code.UNCHANGED, f"everything up to {taken} was taken before")
    messages = (read_messages if state.level >= 2 else _readable_messages)(command.source, taken + 1, new)
    for message in messages:
        refusal = blobs.missing(state, message)
        if refusal is not None:
            return refusal
    state.set_taken(command.source, taken + len(new))
    state.todo.extend(messages)
    return OK


def read_messages(source: int, first: int, raw: list[bytes]) -> list[Command]:
    """Raises TooNew for a message that this release cannot read.

    Such a message stops the node, as an unknown command of the log does: a replica that skipped it would differ from
    replicas of a release that can read it. `Router` refuses it before it enters the log.
    """
    return [_read_message(source, sequence, message) for sequence, message in enumerate(raw, first)]


def _readable_messages(source: int, first: int, raw: list[bytes]) -> list[Command]:
    """At level 1, messages that cannot be read are skipped."""
    readable = []
    for sequence, message in enumerate(raw, first):
        try:
            readable.append(_read_message(source, sequence, message))
        except TooNew:
            continue
    return readable


def _read_message(source: int, sequence: int, raw: bytes) -> Command:
    what = f"message {sequence} of partition {source}"
    try:
        message = decode_command(raw)
    except Exception as error:
        raise TooNew(f"{what} cannot be read ({str(error) or type(error).__name__}): it", LEVEL + 1) from error
    if not isinstance(message, MESSAGES):
        raise TooNew(f"{what} is a {type(message).__name__}, which is no message: it", LEVEL + 1)
    return message


def trim(state: State, command: TrimOutbox) -> Result:
    first = OUTBOX + partition_bytes(command.target)
    behind = min(max(command.sequence, 0), state.sent(command.target)) + 1
    keys = [key for key, _ in state.scan(first, outbox_key(command.target, behind))]
    for key in keys:
        state.delete(key)
    parcels = PARCEL + partition_bytes(command.target)
    for key, raw in list(state.scan(parcels, parcel_key(command.target, behind))):
        state.delete(key)
        for ref in unpack(raw):
            blobs.release(state, ref)
    return OK if keys else Result(Code.UNCHANGED, "trimmed before")
