"""Frames that are completed only when they are sent: acknowledgements, and frames that refer to large values."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from holdfast.cluster.handlers.attempts import Attempt
from holdfast.cluster.handlers.large import LargeValues
from holdfast.cluster.values.shared_store import Objects
from holdfast.cluster.values.staging import HASHED_BYTES_MAX
from holdfast.sdk.frames import Completion, Frame, Journal, Start, encode_batch
from holdfast.statemachine import queries, refs
from holdfast.statemachine.commands import Ref


class PendingAck:
    """An acknowledgement in its place among the frames of an attempt.

    Later ones join it until a completion is queued after it. The order of the two is the order of the log, by which an
    SDK places its own results among the completions.
    """

    __slots__ = ("attempt", "length")

    def __init__(self, attempt: Attempt, length: int) -> None:
        self.attempt = attempt
        self.length = length


class Deferred:
    """A frame that refers to large values. They are read when it is sent, so a waiting frame takes no memory."""

    __slots__ = ("attempt", "frame", "held", "size", "values")

    def __init__(self, attempt: Attempt, frame: Start | Journal | Completion, size: int) -> None:
        self.attempt = attempt
        self.frame = frame
        self.size = size  # with the values in it
        self.values = LargeValues(attempt.partition, _refs(frame))
        self.held = 0  # Bytes that count against its carrier's bound on fetched values.

    async def fetch(self, objects: Objects) -> None:
        """Raises StoreDown or ValueLost."""
        await self.values.fetch(objects)

    def filled(self, pieces: dict[bytes, list[bytes]]) -> Start | Journal | Completion:
        """The frame with its values. In any thread."""
        frame = self.frame

        def value_of(ref: Ref) -> bytes:
            return refs.restored(ref, b"".join(pieces[ref.data]))

        if isinstance(frame, Completion):
            outcome = refs.filled_outcome(frame.outcome, value_of)
            assert outcome is not None
            return frame._replace(outcome=outcome)
        return frame._replace(journal=[refs.filled_step(raw, value_of) for raw in frame.journal])


def _refs(frame: Start | Journal | Completion) -> list[Ref]:
    if isinstance(frame, Completion):
        ref = refs.in_outcome(frame.outcome)
        return [] if ref is None else [ref]
    return [ref for raw in frame.journal for ref in refs.in_packed_step(raw)]


async def encode(
    frames: Sequence[Frame | Deferred], gone: Callable[[Attempt, queries.Gone], None], version: int
) -> bytes | None:
    """Encode one message; None if there is nothing left to send.

    Large messages are assembled in a thread, because copying them would block the event loop for too long. `gone` is
    called for attempts whose values cannot be read."""
    filled: dict[int, dict[bytes, list[bytes]]] = {}
    size = 0
    for offset, frame in enumerate(frames):
        if isinstance(frame, Deferred) and not frame.attempt.over:
            try:
                filled[offset] = await frame.values.read()
                size += frame.size
            except queries.Gone as error:
                gone(frame.attempt, error)

    def put_together() -> bytes | None:
        whole: list[Frame] = []
        for offset, frame in enumerate(frames):
            if not isinstance(frame, Deferred):
                whole.append(frame)
            elif offset in filled:
                whole.append(frame.filled(filled.pop(offset)))
        return encode_batch(whole, version) if whole else None

    if size <= HASHED_BYTES_MAX:
        return put_together()
    return await asyncio.get_running_loop().run_in_executor(None, put_together)
