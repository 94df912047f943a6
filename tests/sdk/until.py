"""Wait for a condition."""

import asyncio
from collections.abc import Callable
from typing import Any


async def until(condition: Callable[[], Any], seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)
