"""Translates a handler's frames to commands: the node's half of docs/protocol.md, without sockets.

`sdk.frames` has checked the shape of every frame, and `handlers.recording` checks what holds in every protocol. Anything wrong
is a `ProtocolError`: a correct SDK does not send it, so the rest of that stream is not trusted either.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, Final, Protocol, TypeAlias

from holdfast.cluster.handlers import recording
from holdfast.cluster.handlers.protocols.native.session import Session
from holdfast.cluster.handlers.recording import Directory, Recorder
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
from holdfast.sdk.journal import ProtocolError
from holdfast.statemachine.commands import AbandonStep, Command, Retry

#: The frames that end an attempt.
LAST: Final = frozenset({Waiting, Output, Error})


class Sender(recording.Sender, Protocol):
    """The attempt that a frame belongs to."""

    session: Session


class Translator:
    def __init__(self, directory: Directory, rng: Random) -> None:
        self._recorder = Recorder(directory, rng)

    def command(self, sender: Sender, frame: Frame, *, is_fresh: bool = False) -> Command:
        """The command for a frame of this attempt. Raises ProtocolError, and Unresolved unless `is_fresh`.

        `is_fresh`: this node knows every handler registered before the frame arrived."""
        kind = type(frame)
        if kind is StepFrame:
            return self._recorder.step(sender, frame, is_fresh=is_fresh)  # type: ignore[arg-type]
        translate = _OTHERS.get(kind)
        if translate is None:
            raise ProtocolError(f"{kind.__name__} is not a frame of an attempt")
        return translate(self._recorder, sender, frame)


def _run_failed(recorder: Recorder, sender: Sender, frame: RunFailed) -> Command:
    return recorder.run_failed(
        sender,
        frame.index,
        key=frame.key,
        name=frame.name,
        failure=frame.failure,
        retry=None if frame.retry is None else Retry(*frame.retry),
        retry_after_ms=frame.retry_after_ms,
        began_ms=frame.began_ms,
    )


def _intent(recorder: Recorder, sender: Sender, frame: Intent) -> Command:
    return recorder.intent(sender, frame.index, key=frame.key, name=frame.name)


def _run_done(recorder: Recorder, sender: Sender, frame: RunDone) -> Command:
    return recorder.run_done(sender, frame.index, frame.outcome, frame.began_ms)


def _abandon(recorder: Recorder, sender: Sender, frame: Abandon) -> Command:
    return AbandonStep(sender.id, sender.epoch, frame.index)


def _waiting(recorder: Recorder, sender: Sender, frame: Waiting) -> Command:
    return recorder.suspended(sender, frame.steps)


def _output(recorder: Recorder, sender: Sender, frame: Output) -> Command:
    return recorder.completed(sender, frame.outcome, notices=sender.session.version >= 2)


def _error(recorder: Recorder, sender: Sender, frame: Error) -> Command:
    return recorder.failed(sender, frame.failure, retry_after_ms=frame.retry_after_ms, pause=frame.pause)


_Translate: TypeAlias = Callable[[Recorder, Any, Any], Command]
_OTHERS: Final[dict[type[Any], _Translate]] = {
    RunFailed: _run_failed,
    Intent: _intent,
    RunDone: _run_done,
    Abandon: _abandon,
    Waiting: _waiting,
    Output: _output,
    Error: _error,
}
