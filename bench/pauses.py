"""The pauses of an event loop, and whether they are our doing.

A pause is the delay of a timer of the loop. For each pause, the time in which the loop's thread was ready to run but
had no core is counted separately: on a busy machine it is most of the pause, and nothing here can avoid it. The rest,
"with a core at hand", is ours: a long turn, a write, or waiting for a lock or the GIL.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from typing import Final

WATCH_S: Final = 0.001


class Pauses:
    """How long the loop paused, and how long its thread waited for a core (known on Linux only)."""

    def __init__(self) -> None:
        self._schedstat: int | None = None
        with contextlib.suppress(OSError):
            self._schedstat = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        self.seen: list[tuple[float, float]] = []  # Seconds: in total, and with a core at hand.
        self._watching: asyncio.Task[None] | None = None

    def _waited_s(self) -> float:
        return 0.0 if self._schedstat is None else int(os.pread(self._schedstat, 64, 0).split()[1]) / 1e9

    def begin(self) -> bool:
        """Watch in the background, unless it does already."""
        if self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self.watch())
        return True

    def take_longest(self) -> list[float]:
        """The longest pause since the last call: in total, and with a core at hand."""
        seen, self.seen = self.seen, []
        return [max((each[which] for each in seen), default=0.0) for which in (0, 1)]

    async def watch(self) -> None:
        while True:
            start, waited = time.perf_counter(), self._waited_s()
            await asyncio.sleep(WATCH_S)
            pause = max(time.perf_counter() - start - WATCH_S, 0.0)
            self.seen.append((pause, max(pause - (self._waited_s() - waited), 0.0)))
