"""How long a loop was held up, and whether it was our doing.

A pause is how much later than asked for a timer of the loop rings. Of each, the time in which the loop's thread was ready to
run and had no core is told apart: on a busy machine that is most of it, and nothing here can help it. The rest, "with a core
at hand", is ours: a turn that was long, a write, a lock or the GIL that was waited for.
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
    """How long the loop was away, and how much of that its thread waited for a core (Linux tells; elsewhere: nothing)."""

    def __init__(self) -> None:
        self._schedstat: int | None = None
        with contextlib.suppress(OSError):
            self._schedstat = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        self.seen: list[tuple[float, float]] = []  # Seconds: in all, and with a core at hand.

    def _waited_s(self) -> float:
        return 0.0 if self._schedstat is None else int(os.pread(self._schedstat, 64, 0).split()[1]) / 1e9

    async def watch(self) -> None:
        while True:
            start, waited = time.perf_counter(), self._waited_s()
            await asyncio.sleep(WATCH_S)
            pause = max(time.perf_counter() - start - WATCH_S, 0.0)
            self.seen.append((pause, max(pause - (self._waited_s() - waited), 0.0)))
