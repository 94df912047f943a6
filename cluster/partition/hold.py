"""A hold on the messages of a partition: while it lasts, none leaves for another partition and none is forgotten here.

Who copies the states of all partitions holds them until every copy has begun: milliseconds. Several may hold at once. A hold
ends by itself, because who began it may die; so it saves work, and nothing is safe that rests on it alone.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress


class Hold:
    def __init__(self) -> None:
        self._until: dict[str, float] = {}
        self._changed = asyncio.Event()

    def begin(self, who: str, seconds: float) -> None:
        self._until[who] = asyncio.get_running_loop().time() + seconds

    def end(self, who: str) -> None:
        if self._until.pop(who, None) is not None:
            self._changed.set()

    async def over(self) -> None:
        """Until nobody holds. Without a hold it does not wait at all: whoever calls it goes on in the same turn."""
        while self._until:
            now = asyncio.get_running_loop().time()
            self._until = {who: until for who, until in self._until.items() if until > now}
            if self._until:
                self._changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(max(self._until.values())):
                        await self._changed.wait()
