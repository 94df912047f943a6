"""The last resort for code that catches the end of its attempt in a loop."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any, Final


class Never:
    """Every use of it returns the object itself, and an `await` of it never returns."""

    def __await__(self) -> Generator[Any, Any, Any]:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            yield  # The garbage collector closes the coroutine and never resumes it.
            return
        task = asyncio.current_task()
        if task is not None:
            asyncio.tasks._unregister_task(task)  # It catches cancellation too, so nothing may wait for its end.
        yield from loop.create_future()

    __iter__ = __await__

    def __call__(self, *args: object, **kwargs: object) -> Never:
        return self

    def __getattr__(self, name: str) -> Never:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


NEVER: Final = Never()
