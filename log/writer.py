"""The writer thread: it commits the store, so an fsync never blocks the loop.

It touches nothing but the store. On a full disk it waits for room: nothing staged was promised to a peer yet.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from time import perf_counter
from typing import Final

from holdfast.log.errors import NoSpace
from holdfast.log.store import LmdbStore

logger = logging.getLogger(__name__)

NO_SPACE_RETRY_S: Final = 0.2


class Writer:
    """A thread that commits the store and reports back to the loop."""

    def __init__(
        self,
        store: LmdbStore,
        loop: asyncio.AbstractEventLoop,
        on_done: Callable[[], None],
        on_fatal: Callable[[BaseException], None],
        on_no_space: Callable[[], None] = lambda: None,
    ) -> None:
        self.no_space: str | None = None  # Why the current commit waits.
        self._on_no_space = on_no_space
        self._store = store
        self._loop = loop
        self._on_done = on_done
        self._on_fatal = on_fatal
        self._work: SimpleQueue[None] = (
            SimpleQueue()
        )  # Implemented in C: waking the thread costs the loop next to nothing.
        self.commit_s = self.commit_s_max = 0.0  # Only the thread writes these.
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    def commit(self) -> None:
        self._work.put(None)

    async def stop(self) -> None:
        self._stop.set()
        self._work.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        while True:
            self._work.get()
            if self._stop.is_set():
                return
            try:
                began = perf_counter()
                self._commit()
                latency_s = perf_counter() - began
                self.commit_s += latency_s
                self.commit_s_max = max(self.commit_s_max, latency_s)
            except BaseException as error:
                self._loop.call_soon_threadsafe(self._on_fatal, error)
                return
            if self._stop.is_set():
                return
            self._loop.call_soon_threadsafe(self._on_done)

    def _commit(self) -> None:
        """Commit, and retry while the disk is full: nothing staged was promised, so waiting loses nothing."""
        while True:
            try:
                self._store.commit()
                self.no_space = None
                return
            except NoSpace as error:
                if self.no_space is None:
                    logger.error("%s", error)
                self.no_space = str(error)
                self._loop.call_soon_threadsafe(self._on_no_space)
                if self._stop.wait(NO_SPACE_RETRY_S):
                    return
