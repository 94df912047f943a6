"""The clock of a node: the wall clock at its start, and from then on the time that has really passed.

Setting the wall clock an hour ahead must not make every timer of the cluster fire an hour early, and setting it back must
not stall them. So this clock reads the machine's steady clock, which also counts the time that a machine is suspended, and
follows the wall clock no faster than clocks are disciplined anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

_PERIOD_MS: Final = 1000
_SLEW_PPM: Final = 500


def steady_ms() -> float:
    """Milliseconds since some moment, without jumps."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    return (time.clock_gettime(boottime) if boottime is not None else time.monotonic()) * 1000


def wall_ms() -> float:
    return time.time() * 1000


class Clock:
    """Never goes back, never jumps."""

    def __init__(self, *, steady: Callable[[], float] = steady_ms, wall: Callable[[], float] = wall_ms) -> None:
        self._steady = steady
        self._wall = wall
        self._looked = steady()
        self._offset = wall() - self._looked

    def wall_s(self) -> float:
        """Seconds since 1970, as the wall clock shows them now: for people and for files, not for deadlines."""
        return self._wall() / 1000

    def monotonic_s(self) -> float:
        """Seconds since some moment: for durations inside this process."""
        return time.monotonic()

    def now_ms(self) -> int:
        now = self._steady()
        passed = now - self._looked
        if passed >= _PERIOD_MS:
            self._looked = now
            off = self._wall() - (now + self._offset)
            step = passed * _SLEW_PPM / 1_000_000
            self._offset += max(-step, min(step, off))
        return int(now + self._offset)
