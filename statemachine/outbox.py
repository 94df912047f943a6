"""Messages to other partitions: written with what caused them, taken exactly once by the receiver.

A message is a packed command. Each pair of partitions has one sequence without gaps, so the receiver needs to remember
one number per source. Whatever is for the partition itself is not written at all: it is handled in the same apply, after
the command that caused it.

A message that refers to large values keeps them here until it is taken (`PARCEL`). The receiver takes it only if it has them
too, so whoever carries it stages them there first.
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
from holdfast.statemachine.effects import OK, FlushOutbox, Result
from holdfast.statemachine.levels import LEVEL, TooNew
from holdfast.statemachine.records import pack, unpack
from holdfast.statemachine.state import State
from holdfast.statemachine.tables import OUTBOX, PARCEL, outbox_key, parcel_key, partition_bytes

#: What one invocation may tell another.
MESSAGES: Final = (Invoke, CompleteStep, AttachTo, Cancel, Kill)


def post(state: State, message: Invoke | CompleteStep | AttachTo | Cancel | Kill) -> None:
    """To the partition of `message.id`, in order of posting."""
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
        return Result(409, f"messages {taken + 1} to {command.first - 1} of partition {command.source} are missing")
    new = command.messages[taken + 1 - command.first :] if command.first > 0 else []
    if not new:
        return Result(200, f"everything up to {taken} was taken before")
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

    Such a message stops the node, as an unknown command of the log does: a replica that passed it over would differ from
    the replicas of a release that can read it. `Router` refuses it before it is in the log.
    """
    return [_read_message(source, sequence, message) for sequence, message in enumerate(raw, first)]


def _readable_messages(source: int, first: int, raw: list[bytes]) -> list[Command]:
    """Level 1 passes over messages that it cannot read."""
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
    return OK if keys else Result(200, "trimmed before")
