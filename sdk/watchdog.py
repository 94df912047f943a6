"""A thread that watches the event loop: it names the code that blocks the loop, and keeps the process's connections
alive.

A handler that calls `time.sleep(50)` stops everything else in its process, including the answers to the nodes'
heartbeats. To a node, the process would look hung, and its attempts would be started again and again. So while the loop
does not run, this thread sends the heartbeat. It bypasses the loop and writes an unsolicited WebSocket pong to the
socket, which no receiver needs to answer (RFC 6455, 5.5.3), and which says what blocks the loop. It must not end up
inside another frame, so the loop writes under the same lock, and the thread sends nothing while output of the loop is
pending. That is impossible with TLS, and where the socket is not accessible, as in some ASGI servers: such a stream has
no lifeline, and its node is more patient.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Final

from holdfast.sdk.pongs import Blocking, pack_blocking

logger = logging.getLogger("holdfast.sdk")

BEAT_S: Final = 0.5  # Interval at which the loop reports to the thread.
LATE_S: Final = 1.0  # Without a report for this long, the loop is blocked.
#: After this long it counts as hung: the thread stops answering, and nodes will detect that.
HOPELESS_S: Final = 300.0
_PONG: Final = 0x8A  # FIN, and the opcode. A server's frames are not masked.
_FULL_S: Final = 0.01  # Between two tries to write the rest of a frame.
_NOT_THEIRS: Final = tuple(
    os.path.realpath(place) + os.sep
    for place in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), os.path.dirname(__file__))
)


class Lifeline:
    """One connection on which the thread may signal that the process is alive. Its owner writes under `lock`."""

    def __init__(self, transport: asyncio.Transport, descriptor: int) -> None:
        self.lock = threading.Lock()
        self._transport = transport
        # A descriptor of our own: a number that the loop closes may soon belong to another connection.
        self._descriptor: int | None = os.dup(descriptor)

    @classmethod
    def of(cls, transport: asyncio.Transport | None) -> Lifeline | None:
        """None: it is not plain TCP."""
        if transport is None or transport.is_closing() or transport.get_extra_info("sslcontext") is not None:
            return None
        socket = transport.get_extra_info("socket")
        return cls(transport, socket.fileno()) if socket is not None and socket.fileno() >= 0 else None

    def sign(self, said: bytes) -> None:
        """Send a pong with these bytes. Called by the thread."""
        frame = bytes((_PONG, len(said))) + said
        if not self.lock.acquire(blocking=False):
            return  # The loop is writing, or waits until it can.
        try:
            if self._descriptor is None or self._transport.is_closing() or self._transport.get_write_buffer_size():
                return
            with contextlib.suppress(OSError):  # The buffer is full or the connection is closed: the loop will notice.
                written = os.write(self._descriptor, frame)
                while written < len(frame):
                    time.sleep(_FULL_S)
                    with contextlib.suppress(BlockingIOError):
                        written += os.write(self._descriptor, frame[written:])
        finally:
            self.lock.release()

    def close(self) -> None:
        with self.lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None


class Watchdog:
    """Runs while there are streams. `whose` names the handler of a task, for people."""

    def __init__(
        self,
        whose: Callable[[asyncio.Task[object] | None], str | None],
        was_blocked: Callable[[float, str, str], None],
    ) -> None:
        """`was_blocked` is called on the loop, with the seconds for which it did not run, and with the handler and
        place."""
        self.blocked = 0  # How many times the loop was blocked.
        self._whose = whose
        self._was_blocked = was_blocked
        self._found: tuple[str, str] | None = None  # The handler and the place that the thread saw.
        self._lifelines: set[Lifeline] = set()
        self._users = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._beat_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._stop = threading.Event()

    def enter(self, lifeline: Lifeline | None) -> None:
        """A stream begins. Called on the loop."""
        self._users += 1
        if lifeline is not None:
            self._lifelines = self._lifelines | {lifeline}  # The thread iterates over the old set.
        if self._users == 1:
            self._loop = asyncio.get_running_loop()
            self._loop_thread = threading.get_ident()
            self._stop = threading.Event()
            self._beat()
            threading.Thread(target=self._watch, args=(self._stop,), name="holdfast-watchdog", daemon=True).start()

    def leave(self, lifeline: Lifeline | None) -> None:
        self._users -= 1
        if lifeline is not None:
            self._lifelines = self._lifelines - {lifeline}
            lifeline.close()
        if self._users == 0:
            self._stop.set()
            if self._timer is not None:
                self._timer.cancel()

    def _beat(self) -> None:
        assert self._loop is not None
        now = time.monotonic()
        found, self._found = self._found, None
        if found is not None:
            self._was_blocked(now - self._beat_at, *found)
        self._beat_at = now
        self._timer = self._loop.call_later(BEAT_S, self._beat)

    # -- in the thread

    def _watch(self, stop: threading.Event) -> None:
        warned_at: float | None = None  # When the loop was found blocked.
        while not stop.wait(BEAT_S):
            beat_at, now = self._beat_at, time.monotonic()
            if now - beat_at < BEAT_S + LATE_S:
                if warned_at is not None:
                    logger.warning("the event loop runs again; it was blocked for %.1f s", beat_at - warned_at)
                    warned_at = None
                continue
            if warned_at is None:
                warned_at = beat_at
                self.blocked += 1
                self._warn()
            if now - beat_at < HOPELESS_S and self._lifelines:
                said = pack_blocking(Blocking(round((now - beat_at) * 1000), *(self._found or ("", ""))))
                for lifeline in self._lifelines:
                    lifeline.sign(said)

    def _warn(self) -> None:
        frame = sys._current_frames().get(self._loop_thread)
        where = _place(frame) if frame is not None else "an unknown place"
        try:
            task = asyncio.current_task(self._loop)
        except RuntimeError:  # Python 3.14 allows this only on the loop's own thread.
            task = None
        handler = self._whose(task)
        self._found = handler or "", where
        logger.warning(
            "%s blocks the event loop at %s: nothing else runs in this process. Await instead, or move it to a plain "
            "function and pass that to ctx.run, which runs it in a thread",
            f"the handler `{handler}`" if handler else "something",
            where,
        )


def _place(frame: FrameType) -> str:
    """file:line of the innermost frame outside Python, libraries and Holdfast; if there is none, of the innermost
    frame."""
    each: FrameType | None = frame
    while each is not None:
        if not os.path.realpath(each.f_code.co_filename).startswith(_NOT_THEIRS):
            return f"{each.f_code.co_filename}:{each.f_lineno}"
        each = each.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
