"""Queries of one node: how many run at a time, and what ends them.

Each query has a thread of its own while it runs. It ends with its result, with its time, when its client has gone, or when
the node stops.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from holdfast.cluster.errors import Stopping, Unavailable
from holdfast.cluster.sql.engine import Engine
from holdfast.cluster.sql.source import Reading, Source
from holdfast.sdk.ids import numbers_of

RUNNING_MAX: Final = 2
_LOOK_S: Final = 0.25
#: How long a thread may keep the interpreter while others want it, during queries. The default of 5 ms is long for the
#: event loop, which wants it back after each system call.
SWITCH_S: Final = 0.0005
_GONE: Final = "the client has gone"


class Queries:
    def __init__(self, source: Source, *, now_ms: Callable[[], int]) -> None:
        self.source = source
        self._now_ms = now_ms
        self._threads = ThreadPoolExecutor(RUNNING_MAX, thread_name_prefix="sql")
        #: The queries in progress.
        self.running: set[Reading] = set()
        self.begun = self.refused = self.examined = 0  # since the start
        self._switch_s = sys.getswitchinterval()
        self._stopping = ""

    async def run(
        self,
        sql: str,
        *,
        limit: int,
        timeout_s: float,
        fresh: bool,
        with_ids: bool,
        gone: Callable[[], bool],
    ) -> bytes:
        """The answer as JSON. Raises circumstances and ProposalErrors. `gone`: whether nobody waits for the result any more."""
        if self._stopping:
            raise Stopping(self._stopping)
        if len(self.running) >= RUNNING_MAX:
            self.refused += 1
            raise Unavailable(
                f"{RUNNING_MAX} queries are running on this node, which is the limit",
                "send the query again after the time in Retry-After, or to another node",
            )
        loop = asyncio.get_running_loop()
        reading = Reading(self.source, loop, deadline_s=timeout_s, with_ids=with_ids, fresh=fresh)
        if not self.running:
            self._switch_s = sys.getswitchinterval()
            sys.setswitchinterval(SWITCH_S)
        self.running.add(reading)
        self.begun += 1
        work: asyncio.Future[bytes] | None = None
        try:
            if fresh:
                await self.source.make_fresh(list(numbers_of(self.source.count)))
            engine = Engine(reading, now_ms=self._now_ms())
            work = loop.run_in_executor(self._threads, partial(_answer, engine, reading, sql=sql, limit=limit))
            work.add_done_callback(partial(self._ended, reading))
            while not work.done():
                await asyncio.wait([work], timeout=_LOOK_S)
                if gone():
                    reading.cancel(_GONE)
            return work.result()
        except asyncio.CancelledError:
            reading.cancel(_GONE)
            raise
        finally:
            if work is None:
                self._ended(reading)

    def _ended(self, reading: Reading, work: asyncio.Future[bytes] | None = None) -> None:
        self.running.discard(reading)
        self.examined += reading.examined
        if not self.running:
            sys.setswitchinterval(self._switch_s)
        if work is not None and not work.cancelled():
            work.exception()  # Nobody else may be left to see it.

    def stop(self, why: str = "this node is shutting down") -> None:
        """End the queries in progress and take no more."""
        self._stopping = why
        for reading in self.running:
            reading.cancel(why)
        self._threads.shutdown(wait=False)
        self.source.stop()


def _answer(engine: Engine, reading: Reading, *, sql: str, limit: int) -> bytes:
    result = engine.run(sql, limit)
    return result.encode(took_ms=reading.took_ms, rows_read=reading.examined)
