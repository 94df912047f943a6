"""Messages to other partitions: written with what caused them, taken exactly once by the receiver.

A message is a packed command. Each pair of partitions has one sequence without gaps, so the receiver needs to remember
one number per source. Whatever is for the partition itself is not written at all: it is handled in the same apply, after
the command that caused it.

A message that refers to large values keeps them here until it is taken (`PARCEL`). The receiver takes it only if it has them
too, so whoever carries it stages them there first.
"""

from __future__ import annotations

from typing import Final

from holdfast.sdk.protocol import partition_of
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
    messages = [message for message in map(_decode, new) if message is not None]
    for message in messages:
        refusal = blobs.missing(state, message)
        if refusal is not None:
            return refusal
    state.set_taken(command.source, taken + len(new))
    state.todo.extend(messages)
    return OK


def _decode(raw: bytes) -> Command | None:
    """A message that no release of ours wrote is passed over: it must not stop the ones behind it."""
    try:
        message = decode_command(raw)
    except Exception:
        return None
    return message if isinstance(message, MESSAGES) else None


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
