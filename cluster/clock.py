"""The node's idea of the time: wall clock when it starts, and from then on the time that really passed.

Somebody who sets the wall clock an hour ahead must not make every timer of the cluster fire an hour early, and setting it
back must not stall them. So the clock is read from the machine's steady clock, which also counts a suspended machine's
sleep, and follows the wall clock at no more than the rate at which clocks are disciplined anyway.
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

    def now_ms(self) -> int:
        now = self._steady()
        passed = now - self._looked
        if passed >= _PERIOD_MS:
            self._looked = now
            off = self._wall() - (now + self._offset)
            step = passed * _SLEW_PPM / 1_000_000
            self._offset += max(-step, min(step, off))
        return int(now + self._offset)
