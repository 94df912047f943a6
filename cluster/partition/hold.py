"""A hold on a partition's messages: while it lasts, none is sent to another partition and none is trimmed here.

A backup holds all partitions until every copy has begun, which takes milliseconds. Several holds may overlap. A hold
expires, because the node that began it may die. So it only saves work; safety must not depend on it.
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
        """Wait until all holds are over. Without a hold, the caller continues in the same turn."""
        while self._until:
            now = asyncio.get_running_loop().time()
            self._until = {who: until for who, until in self._until.items() if until > now}
            if self._until:
                self._changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(max(self._until.values())):
                        await self._changed.wait()
