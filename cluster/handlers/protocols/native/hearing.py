"""Turns the frames of attempts into commands, in order. A frame that violates the protocol fails its attempt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from holdfast.cluster.handlers.attempts import Attempt, Carrier
from holdfast.cluster.handlers.dispatch import Dispatcher
from holdfast.cluster.handlers.protocols.native.translate import LAST, Translator
from holdfast.cluster.handlers.recording import Unresolved
from holdfast.sdk.frames import Frame, Wrong
from holdfast.sdk.journal import ProtocolError


class Hearing:
    def __init__(self, invoker: Dispatcher) -> None:
        self._invoker = invoker
        self._translator = Translator(invoker.registry, invoker.rng)

    def take(self, carrier: Carrier, frames: Sequence[Frame | Wrong]) -> int:
        """Process frames of attempts on this carrier. Frames of attempts that do not run there are dropped and counted."""
        heard = self._invoker.heard
        strays = 0
        for frame in frames:
            attempt = heard(carrier, frame.invocation, frame.epoch)  # type: ignore[union-attr]
            if attempt is None:
                strays += 1
            elif attempt.unresolved:
                self._invoker.ask_directory(attempt, self._later(attempt, frame), _weight(frame))
            else:
                self._take(attempt, frame)
        return strays

    def _take(self, attempt: Attempt, frame: Frame | Wrong, *, is_fresh: bool = False) -> None:
        try:
            if type(frame) is Wrong:
                raise ProtocolError(frame.why)
            wanted = self._translator.command(attempt, frame, is_fresh=is_fresh)  # type: ignore[arg-type]
        except ProtocolError as error:
            self._invoker.blame(attempt, f"its SDK violates the protocol: {error}")
        except Unresolved:
            self._invoker.ask_directory(attempt, self._later(attempt, frame), _weight(frame))
        else:
            self._invoker.submit(attempt, wanted, last=type(frame) in LAST)

    def _later(self, attempt: Attempt, frame: Frame | Wrong) -> Callable[[bool], None]:
        return lambda is_fresh: self._take(attempt, frame, is_fresh=is_fresh)


def _weight(frame: Any) -> int:
    """Approximate number of bytes a frame takes while it waits."""
    lists = [field for field in frame if type(field) is list]
    return 200 + sum(len(part) for field in lists for part in field if type(part) is bytes)
