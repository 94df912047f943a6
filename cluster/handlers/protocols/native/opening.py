"""The first frames of an attempt: START with the beginning of the journal, and JOURNAL frames with the rest."""

from __future__ import annotations

from typing import Final

from holdfast.cluster.handlers.attempts import Attempt, Opening
from holdfast.cluster.handlers.large import LargeSteps
from holdfast.cluster.handlers.protocols.native.deferred import Deferred
from holdfast.sdk.frames import Frame, Journal, Start

JOURNAL_FRAME_BYTES: Final = 1024 * 1024  # A longer journal is spread over several frames.


def frames_of(attempt: Attempt, opening: Opening) -> list[Frame | Deferred]:
    pieces, large = _split(opening.steps, opening.sizes)
    plain: list[Start | Journal] = [start_of(attempt, opening, pieces[0], more=len(pieces) > 1)]
    plain += [Journal(attempt.id, attempt.epoch, piece, more=piece is not pieces[-1]) for piece in pieces[1:]]
    frames: list[Frame | Deferred] = [*plain]
    for offset, size in large.items():
        frame = plain[offset]
        frames[offset] = Deferred(attempt, frame, LargeSteps(attempt.partition, frame.journal, size))
    return frames


def start_of(attempt: Attempt, opening: Opening, steps: list[bytes], *, more: bool) -> Start:
    return Start(
        invocation=attempt.id,
        epoch=attempt.epoch,
        service=opening.service,
        handler=opening.handler,
        key=opening.key,
        attempt=attempt.epoch,
        now_ms=opening.now_ms,
        seed=opening.seed,
        journal=steps,
        more=more,
        state=opening.state,
        state_complete=opening.state_complete,
        cancelled=opening.cancelled,
        suspects_max=opening.suspects_max,
        journal_steps_max=opening.journal_steps_max,
        journal_bytes_max=opening.journal_bytes_max,
        secrets=attempt.level >= 2,
    )


def _split(steps: list[bytes], sizes: list[int]) -> tuple[list[list[bytes]], dict[int, int]]:
    """Parts of about JOURNAL_FRAME_BYTES, at least one; and the sizes of the parts that refer to large values."""
    pieces: list[list[bytes]] = [[]]
    large: dict[int, int] = {}
    size = 0
    for step, whole in zip(steps, sizes, strict=True):
        if size and size + whole > JOURNAL_FRAME_BYTES:
            pieces.append([])
            size = 0
        pieces[-1].append(step)
        size += whole
        if whole > len(step) or len(pieces) - 1 in large:
            large[len(pieces) - 1] = size
    return pieces, large
