"""Long work beside the loop: threads that report progress, keep to a rate and can be cancelled.

A cut, an upload or a restore reads and writes gigabytes. It runs in a thread of its own, and each function that does
so takes a `Work` and calls `step` for every piece. Cancelling never abandons a thread: whoever cancels an awaiting task gets
control back when the thread has ended and has let go of its files and of the LMDB environment.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from holdfast.snapshots.errors import Cancelled

T = TypeVar("T")
Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in total; the total is 0 while it is unknown."""

PIECE_BYTES = 1 << 20
_REPORT_EVERY_S = 0.1


class Throttle:
    """A rate that any number of threads share. A piece is paid for after it went, so a large one only delays the next."""

    def __init__(self, bytes_per_second: int) -> None:
        if bytes_per_second <= 0:
            raise ValueError(f"a rate must be positive, not {bytes_per_second}")
        self.bytes_per_second = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = 0.0

    def delay_s(self, size: int) -> float:
        """Account for `size` bytes; how long to wait before the next piece."""
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + size / self.bytes_per_second
            return self._free_at - now


class Work:
    """What the thread that works and whoever waits for it say to each other."""

    def __init__(self, progress: Progress | None = None, throttle: Throttle | None = None) -> None:
        self.throttle = throttle
        self.total = 0
        self.done = 0
        self._progress = progress
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
        """`size` more bytes are done. Waits as the rate demands; raises `Cancelled`."""
        self.done += size
        if self.throttle is not None:
            self._cancelled.wait(self.throttle.delay_s(size))
        self.check()
        self._report(always=False)

    def show(self, done: int) -> None:
        """Somebody else keeps to the rate; this is how far it is."""
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
        now = time.monotonic()
        if always or now - self._reported_at >= _REPORT_EVERY_S:
            self._reported_at = now
            self._progress(self.done, self.total)


async def in_thread(
    function: Callable[[Work], T], *, progress: Progress | None = None, throttle: Throttle | None = None
) -> T:
    """Run `function` in a thread of its own. `progress` is called on the loop.

    Not the loop's default executor: that one has few threads, and a download that waits for a store must not keep
    others from theirs. Whoever starts many at once bounds them.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    outcome: list[tuple[T | None, BaseException | None]] = []

    def report(done: int, total: int) -> None:
        assert progress is not None
        loop.call_soon_threadsafe(progress, done, total)

    work = Work(report if progress is not None else None, throttle)

    def run() -> None:
        try:
            outcome.append((function(work), None))
        except BaseException as error:
            outcome.append((None, error))
        loop.call_soon_threadsafe(ended.set_result, None)

    threading.Thread(target=run, name="holdfast-snapshots", daemon=True).start()
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
    """Run `function` in a thread that may be left behind: for a request that holds nothing of ours and may hang.

    The future is done when the thread is. Whoever stops waiting shields it, and bounds how many there are.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[T] = loop.create_future()
    ended.add_done_callback(_hear)

    def tell(result: T | None, error: BaseException | None) -> None:
        if ended.done():
            return
        if error is not None:
            ended.set_exception(error)
        else:
            ended.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            outcome: tuple[T | None, BaseException | None] = (function(), None)
        except Exception as error:
            outcome = (None, error)
        with suppress(RuntimeError):  # The loop is closed: nobody wants to know any more.
            loop.call_soon_threadsafe(tell, *outcome)

    threading.Thread(target=run, name="holdfast-store", daemon=True).start()
    return ended


def _hear(ended: asyncio.Future[T]) -> None:
    """An error that nobody waits for any more is no news."""
    if not ended.cancelled():
        ended.exception()
