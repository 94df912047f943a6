"""Long work outside the event loop: threads that report progress, respect a rate limit and can be cancelled.

A cut, an upload or a restore reads and writes gigabytes. It runs in its own thread; each such function takes a `Work`
and calls `step` for every piece. A cancelled task ends only after the thread has ended and released its files and the LMDB
environment. Only a thread that does no more than talk to a store may be abandoned, since a silent store holds it up for
minutes.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Final, ParamSpec, TypeVar

from holdfast.snapshots.errors import Cancelled

T = TypeVar("T")
P = ParamSpec("P")
Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in total; the total is 0 while it is unknown."""

PIECE_BYTES = 1 << 20
#: How long a store may take to end a cancelled request before its thread is abandoned.
ABANDON_S: Final = 3.0
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
    function: Callable[[Work], T],
    *,
    progress: Progress | None = None,
    throttle: Throttle | None = None,
    abandon_after_s: float | None = None,
) -> T:
    """Run `function` in its own thread. `progress` is called on the event loop.

    A cancelled caller waits for the end of the thread, or for `abandon_after_s` seconds if `function` only talks to a
    store and holds nothing that the caller gives to others afterwards.

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
    abandon_at: float | None = None
    while not ended.done():
        try:
            await asyncio.wait((ended,), timeout=None if abandon_at is None else max(abandon_at - loop.time(), 0.0))
        except asyncio.CancelledError as error:
            if interrupted is None and abandon_after_s is not None:
                abandon_at = loop.time() + abandon_after_s
            interrupted = error
            work.cancel()
        if interrupted is not None and abandon_at is not None and loop.time() >= abandon_at:
            raise interrupted
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


def _fulfil(future: Future[T], function: Callable[[], T]) -> None:
    try:
        result = function()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


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
            _fulfil(future, lambda: function(*args, **options))

        threading.Thread(target=run, name=self._name, daemon=True).start()
        return future


class FewThreads(Executor):
    """Up to `max_workers` threads, started as they are needed, which do not keep the process from ending.

    In the place of `concurrent.futures.ThreadPoolExecutor`, where the threads talk to a store: the end of a process waits for
    the threads of that one, and so for a silent store.
    """

    def __init__(self, max_workers: int) -> None:
        self._max_workers = max_workers
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._is_shut = False

    def submit(self, function: Callable[P, T], /, *args: P.args, **options: P.kwargs) -> Future[T]:
        future: Future[T] = Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                _fulfil(future, lambda: function(*args, **options))

        with self._lock:
            if self._is_shut:
                raise RuntimeError("no work is taken after shutdown")
            self._work.put(work)
            if not self._idle.acquire(blocking=False) and len(self._threads) < self._max_workers:
                thread = threading.Thread(target=self._run, name="holdfast-store", daemon=True)
                self._threads.append(thread)
                thread.start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        assert not cancel_futures, "nobody asks for it"
        with self._lock:
            self._is_shut = True
            for _ in self._threads:
                self._work.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work
            self._idle.release()


_SNAPSHOTS: Final = Threads("holdfast-snapshots")
_STORE: Final = Threads("holdfast-store")
