"""A thread that watches the event loop: it names the code that blocks the loop, and tells nodes that the process lives.

A handler that calls `time.sleep(50)` stops everything else in its process, also the answers to the nodes' heartbeats. From
outside that looks like a process that hangs for good, and its attempts would be started again and again. So while the loop does
not run, this thread gives the sign of life. It writes it to the socket itself, past the loop: an unsolicited pong of WebSocket,
two bytes that no receiver needs to answer (RFC 6455, 5.5.3). They must not come in the middle of another frame: the loop writes
under the same lock, and the thread leaves it be while anything of the loop's is on its way. That is not possible with TLS, and
not where the socket is out of reach, as in ASGI servers: such a stream has no lifeline, and its node is more patient.
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

logger = logging.getLogger("holdfast.sdk")

BEAT_S: Final = 0.5  # Between two signs of the loop to the thread.
LATE_S: Final = 1.0  # Without one for this long, the loop is blocked.
#: After this long it is blocked for good, like a process that hangs: nodes are left to find that out.
HOPELESS_S: Final = 300.0
_PONG: Final = b"\x8a\x00"
_NOT_THEIRS: Final = tuple(
    os.path.realpath(place) + os.sep
    for place in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), os.path.dirname(__file__))
)


class Lifeline:
    """One connection on which the thread may say that the process lives. Its owner writes under `lock`."""

    def __init__(self, transport: asyncio.Transport, descriptor: int) -> None:
        self.lock = threading.Lock()
        self._transport = transport
        # Our own: a number that the loop closes may belong to another connection a moment later.
        self._descriptor: int | None = os.dup(descriptor)

    @classmethod
    def of(cls, transport: asyncio.Transport | None) -> Lifeline | None:
        """None: it is not plain TCP."""
        if transport is None or transport.is_closing() or transport.get_extra_info("sslcontext") is not None:
            return None
        socket = transport.get_extra_info("socket")
        return cls(transport, socket.fileno()) if socket is not None and socket.fileno() >= 0 else None

    def sign(self) -> None:
        """Called by the thread."""
        if not self.lock.acquire(blocking=False):
            return  # The loop is about to write, or waits until it can.
        try:
            if self._descriptor is None or self._transport.is_closing() or self._transport.get_write_buffer_size():
                return
            with contextlib.suppress(OSError):  # Full, or gone: the loop will see.
                written = os.write(self._descriptor, _PONG)
                while written < len(_PONG):
                    with contextlib.suppress(BlockingIOError):
                        written += os.write(self._descriptor, _PONG[written:])
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
        """`was_blocked` is told, on the loop, for how many seconds it did not run, by which handler and where."""
        self.blocked = 0  # How often the loop was.
        self._whose = whose
        self._was_blocked = was_blocked
        self._found: tuple[str, str] | None = None  # By whom, and where: what the thread saw.
        self._lifelines: set[Lifeline] = set()
        self._users = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._beat_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._stop = threading.Event()

    def enter(self, lifeline: Lifeline | None) -> None:
        """A stream begins. On the loop."""
        self._users += 1
        if lifeline is not None:
            self._lifelines = self._lifelines | {lifeline}  # The thread goes through the one it has.
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
        warned_at: float | None = None  # The beat after which the loop was found blocked.
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
            if now - beat_at < HOPELESS_S:
                for lifeline in self._lifelines:
                    lifeline.sign()

    def _warn(self) -> None:
        frame = sys._current_frames().get(self._loop_thread)
        where = _place(frame) if frame is not None else "an unknown place"
        try:
            task = asyncio.current_task(self._loop)
        except RuntimeError:  # Python 3.14 tells only the loop's own thread.
            task = None
        handler = self._whose(task)
        self._found = handler or "", where
        logger.warning(
            "%s blocks the event loop at %s: nothing else runs in this process meanwhile. Await instead, or move it to a plain "
            "function and pass that to ctx.run, which runs it in a thread",
            f"the handler `{handler}`" if handler else "something",
            where,
        )


def _place(frame: FrameType) -> str:
    """file:line of the innermost frame that is neither Python's, nor a library's, nor ours; or else of the innermost of all."""
    each: FrameType | None = frame
    while each is not None:
        if not os.path.realpath(each.f_code.co_filename).startswith(_NOT_THEIRS):
            return f"{each.f_code.co_filename}:{each.f_lineno}"
        each = each.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
