"""Frames that are completed only when they are sent: acknowledgements, and frames that refer to large values."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from holdfast.cluster.handlers.attempts import Attempt
from holdfast.cluster.handlers.large import Large, Pieces
from holdfast.cluster.values.staging import HASHED_BYTES_MAX
from holdfast.sdk.frames import Completion, Frame, Journal, Start, encode_batch
from holdfast.statemachine import queries

T = TypeVar("T")


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

    __slots__ = ("attempt", "frame", "large", "size")

    def __init__(self, attempt: Attempt, frame: Start | Journal | Completion, large: Large) -> None:
        self.attempt = attempt
        self.frame = frame
        self.large = large
        self.size = large.size

    def filled(self, pieces: Pieces) -> Start | Journal | Completion:
        """The frame with its values. In any thread."""
        frame = self.frame
        if isinstance(frame, Completion):
            return frame._replace(outcome=self.large.whole(pieces))
        return frame._replace(journal=self.large.whole(pieces))


async def encode(
    frames: Sequence[Frame | Deferred], unreadable: Callable[[Attempt, queries.Gone], None], version: int
) -> bytes | None:
    """Encode one message; None if there is nothing left to send.

    `unreadable` is called for attempts whose values cannot be read."""
    filled: dict[int, Pieces] = {}
    size = 0
    for offset, frame in enumerate(frames):
        if isinstance(frame, Deferred) and not frame.attempt.over:
            try:
                filled[offset] = await frame.large.read()
                size += frame.size
            except queries.Gone as error:
                unreadable(frame.attempt, error)

    def put_together() -> bytes | None:
        whole: list[Frame] = []
        for offset, frame in enumerate(frames):
            if not isinstance(frame, Deferred):
                whole.append(frame)
            elif offset in filled:
                whole.append(frame.filled(filled.pop(offset)))
        return encode_batch(whole, version) if whole else None

    return await _assembled(put_together, size)


async def encoded(frames: list[Frame], version: int, *, size: int) -> bytes:
    """One message of about `size` bytes."""
    return await _assembled(lambda: encode_batch(frames, version), size)


async def _assembled(assemble: Callable[[], T], size: int) -> T:
    """Copying much takes a thread, because it would block the event loop for too long."""
    if size <= HASHED_BYTES_MAX:
        return assemble()
    return await asyncio.get_running_loop().run_in_executor(None, assemble)
