"""The channel through which a caller waits for an invocation: its outcome, once, and for followers its progress until then.

The channel of a caller that only wants the outcome is just a future: most callers are of that kind, and there may be tens of
thousands of them. A follower has a short queue in addition. A follower that reads slowly misses old progress, never the
newest and never the outcome.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Generator
from typing import Any, Final, NamedTuple

#: Of progress that waits to be read.
PROGRESS_MAX: Final = 16


class Progress(NamedTuple):
    status: str
    attempt: int  # The number of the last one that was started; 0: none was.
    reason: str | None  # Why it is backing off or paused.


class Channel:
    """`await channel` returns the packed outcome, or raises the reason why it will not arrive here."""

    __slots__ = ("_changed", "_last", "_outcome", "_progress")

    def __init__(self, *, follows: bool = False) -> None:
        self._outcome: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._progress: deque[Progress] | None = None
        if follows:
            self._progress = deque(maxlen=PROGRESS_MAX)
            self._last: Progress | None = None
            self._changed = asyncio.Event()

    def __await__(self) -> Generator[Any, None, list[Any]]:
        return self._outcome.__await__()

    @property
    def follows(self) -> bool:
        return self._progress is not None

    @property
    def done(self) -> bool:
        return self._outcome.done()

    def tell(self, progress: Progress) -> None:
        """Ignores a report that equals the last one."""
        assert self._progress is not None, "it follows"
        if progress != self._last:
            self._last = progress
            self._progress.append(progress)
            self._changed.set()

    def settle(self, outcome: list[Any]) -> None:
        if not self._outcome.done():
            self._outcome.set_result(outcome)
            if self._progress is not None:
                self._changed.set()

    def refuse(self, error: Exception) -> None:
        if not self._outcome.done():
            self._outcome.set_exception(error)
            if self._progress is not None:
                self._changed.set()

    def close(self) -> None:
        """Close the channel, because its reader is gone."""
        self._outcome.cancel()

    async def progress(self, quiet_s: float | None = None) -> AsyncIterator[Progress | None]:
        """Progress reports, until `await channel` would return. None: nothing happened for `quiet_s`."""
        assert self._progress is not None, "it follows"
        while True:
            while self._progress:
                yield self._progress.popleft()
            if self._outcome.done():
                return
            self._changed.clear()
            try:
                async with asyncio.timeout(quiet_s):
                    await self._changed.wait()
            except TimeoutError:
                yield None
