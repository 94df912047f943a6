"""Long work outside the event loop: threads that report progress, respect a rate limit and can be cancelled.

A cut, an upload or a restore reads and writes gigabytes. It runs in its own thread; each such function takes a `Work`
and calls `step` for every piece. Cancellation never abandons a thread: a cancelled task ends only after the thread has
ended and released its files and the LMDB environment.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Final, ParamSpec, TypeVar

from holdfast.snapshots.errors import Cancelled

T = TypeVar("T")
P = ParamSpec("P")
Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in total; the total is 0 while it is unknown."""

PIECE_BYTES = 1 << 20
_REPORT_EVERY_S = 0.1


class Throttle:
    """A rate limit shared by any number of threads. A piece is accounted for afterwards, so a large one only delays the
    next.
    """

    def __init__(self, bytes_per_second: int, now_s: Callable[[], float] = time.monotonic) -> None:
        if bytes_per_second <= 0:
            raise ValueError(f"the rate must be positive, not {bytes_per_second}")
        self.bytes_per_second = bytes_per_second
        self._now_s = now_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def delay_s(self, size: int) -> float:
        """Account for `size` bytes and return how long to wait before the next piece."""
        with self._lock:
            now = self._now_s()
            self._free_at = max(self._free_at, now) + size / self.bytes_per_second
            return self._free_at - now


class Work:
    """Connects a working thread and its caller: progress one way, cancellation the other."""

    def __init__(
        self,
        progress: Progress | None = None,
        throttle: Throttle | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.throttle = throttle
        self.total = 0
        self.done = 0
        self._progress = progress
        self._now_s = now_s
        self._cancelled = threading.Event()
        self._reported_at = 0.0

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def cancel(self) -> None:
        self._cancelled.set()

    def check(self) -> None:
        if self._cancelled.is_set():
            raise Cancelled

    def begin(self, total: int, done: int = 0) -> None:
        self.total, self.done = total, done
        self.check()
        self._report(always=True)

    def step(self, size: int) -> None:
        """Report `size` more bytes as done. Waits as the rate limit requires; raises `Cancelled`."""
        self.done += size
        if self.throttle is not None:
            self._cancelled.wait(self.throttle.delay_s(size))
        self.check()
        self._report(always=False)

    def show(self, done: int) -> None:
        """Report progress of work that is throttled elsewhere."""
        self.done = done
        self._report(always=False)

    def pause(self, seconds: float) -> None:
        """Sleep, unless cancelled."""
        self._cancelled.wait(seconds)
        self.check()

    def end(self) -> None:
        self._report(always=True)

    def _report(self, *, always: bool) -> None:
        if self._progress is None:
            return
        now = self._now_s()
        if always or now - self._reported_at >= _REPORT_EVERY_S:
            self._reported_at = now
            self._progress(self.done, self.total)


async def in_thread(
    function: Callable[[Work], T], *, progress: Progress | None = None, throttle: Throttle | None = None
) -> T:
    """Run `function` in its own thread. `progress` is called on the event loop.

    The loop's default executor has few threads, and a download that waits for a store must not block other users of it.
    The caller bounds how many run at once.
    """
    loop = asyncio.get_running_loop()
    outcome: list[tuple[T | None, BaseException | None]] = []

    def report(done: int, total: int) -> None:
        assert progress is not None
        loop.call_soon_threadsafe(progress, done, total)

    work = Work(report if progress is not None else None, throttle, loop.time)

    def run() -> None:
        try:
            outcome.append((function(work), None))
        except BaseException as error:
            outcome.append((None, error))

    ended = loop.run_in_executor(_SNAPSHOTS, run)
    interrupted: asyncio.CancelledError | None = None
    while not ended.done():
        try:
            await asyncio.shield(ended)
        except asyncio.CancelledError as error:
            interrupted = error
            work.cancel()
    result, failure = outcome[0]
    if interrupted is not None:
        raise interrupted
    if failure is not None:
        raise failure
    return result  # type: ignore[return-value]


def beside(function: Callable[[], T]) -> asyncio.Future[T]:
    """Run `function` in a thread that may be abandoned: for a request that may hang and holds no resources of ours.

    The future completes with the thread. A caller that may stop waiting must shield it, and bound how many there are.
    """
    ended = asyncio.get_running_loop().run_in_executor(_STORE, function)
    ended.add_done_callback(_hear)
    return ended


def _hear(ended: asyncio.Future[T]) -> None:
    """Retrieve an error after its last waiter is gone, so that asyncio does not log it."""
    if not ended.cancelled():
        ended.exception()


class Threads(Executor):
    """A thread of its own for each piece of work, which does not keep the process from ending.

    The loop's default executor has few threads, and the end of a process waits for them. That the work goes through the
    event loop lets a simulator run it: `run_in_executor` is where its loop takes over.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def submit(self, function: Callable[P, T], /, *args: P.args, **options: P.kwargs) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            try:
                result = function(*args, **options)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        threading.Thread(target=run, name=self._name, daemon=True).start()
        return future


_SNAPSHOTS: Final = Threads("holdfast-snapshots")
_STORE: Final = Threads("holdfast-store")
