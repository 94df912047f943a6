"""Running tasks, in the order in which they began.

An event loop holds its tasks weakly, so the code that starts a task must keep a reference until it is done. A set would do,
but its order depends on memory addresses: a stopping node would cancel its tasks in a different order each time, and a
simulated run would depend on what ran before it in the same process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any


class Tasks:
    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[Any], None] = {}

    def keep(self, task: asyncio.Task[Any]) -> None:
        """Until it is done."""
        self._tasks[task] = None
        task.add_done_callback(self.drop)

    def drop(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        """Over a copy: tasks may begin and end during the iteration."""
        return iter(list(self._tasks))

    def __len__(self) -> int:
        return len(self._tasks)
