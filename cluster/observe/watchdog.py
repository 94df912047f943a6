"""Detects a blocked event loop: a thread watches the loop, and answers health probes on its behalf.

A node does everything on one loop. While the loop is blocked, no port answers, and a client cannot know why. The thread
notes when the loop last ran, and logs where it is blocked. If the setting `health` names an address, the thread answers
probes there itself. It reports nothing about the cluster: that is what `/health` of ingress and admin is for.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import FrameType
from typing import Any, Final

from holdfast.cluster.config import HostPort
from holdfast.cluster.http.crowd import Crowd

logger = logging.getLogger(__name__)

BEAT_S: Final = 0.1
BLOCKED_S: Final = 1.0  # Time without a beat before the log says where the loop is blocked.
HUNG_S: Final = 5.0  # Time without a beat before probes report that the node hangs.
FRAMES_MAX: Final = 12
REQUEST_S: Final = 2.0  # For a whole request, however its bytes arrive.
CONNECTIONS_MAX: Final = 32
PER_ADDRESS_MAX: Final = 16


class Watchdog:
    """`blocked` counts how often the loop was blocked for `BLOCKED_S`; `lag_s` is the delay of its last beat."""

    def __init__(self, health: HostPort | None = None, *, now: Callable[[], float] = time.monotonic) -> None:
        self.blocked = 0
        self.blocked_s = 0.0  # in total
        self.lag_s = 0.0
        self.lag_s_max = 0.0
        self._health = health
        self._now = now
        self._beat_at = 0.0
        self._ending = threading.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._server: _Server | None = None

    @property
    def port(self) -> int:
        """The port for probes; 0 if there is none."""
        return self._server.server_address[1] if self._server is not None else 0

    def start(self) -> None:
        """Watch the running event loop. Raises OSError if the address for probes is not available."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        if self._health is not None:
            self._server = _Server((self._health.host, self._health.port), self.look, self._now)
            threading.Thread(target=self._server.serve_forever, args=(0.1,), name="health", daemon=True).start()
        self._beat_at = self._now()
        self._beat()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    async def stop(self) -> None:
        self._ending.set()
        if self._timer is not None:
            self._timer.cancel()
        server, self._server = self._server, None
        if server is not None:
            await asyncio.to_thread(server.shutdown)
            server.server_close()

    def look(self) -> tuple[bool, str]:
        """Whether the loop runs, and an explanation. Callable from any thread."""
        silent_s = self._now() - self._beat_at
        if silent_s < HUNG_S:
            return True, f"the loop runs; its last turn was {max(self.lag_s, silent_s - BEAT_S, 0.0):.3f} s late"
        return False, f"the loop has not run for {silent_s:.0f} s, at {self._where()}"

    def _beat(self) -> None:
        now = self._now()
        self.lag_s = max(now - self._beat_at - BEAT_S, 0.0)
        self.lag_s_max = max(self.lag_s_max, self.lag_s)
        self._beat_at = now
        self._timer = self._loop.call_later(BEAT_S, self._beat)

    # -- the thread --------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        reported_at = 0.0
        while not (self._ending.wait(BLOCKED_S / 4) or self._loop.is_closed()):
            beat_at = self._beat_at
            silent_s = self._now() - beat_at
            if reported_at and beat_at != reported_at:
                self.blocked_s += beat_at - reported_at
                logger.warning("the loop runs again, after %.1f s", beat_at - reported_at)
                reported_at = 0.0
            elif not reported_at and silent_s > BLOCKED_S:
                reported_at = beat_at
                self.blocked += 1
                frame = self._frame()
                stack = "".join(traceback.format_stack(frame, FRAMES_MAX)) if frame is not None else ""
                logger.warning("the loop has not run for %.1f s, at %s\n%s", silent_s, _place(frame), stack)

    def _frame(self) -> FrameType | None:
        return sys._current_frames().get(self._thread)

    def _where(self) -> str:
        return _place(self._frame())


def _place(frame: FrameType | None) -> str:
    if frame is None:
        return "an unknown place"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


class _Server(ThreadingHTTPServer):
    """One short-lived thread per probe, bounded in number and time. The oldest connection makes room for the next, so slow
    clients keep no probe out."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, place: tuple[str, int], look: Callable[[], tuple[bool, str]], now: Callable[[], float]) -> None:
        self._now = now
        self._open: dict[socket.socket, float] = {}  # The oldest first, each with the time when it must be answered.
        self._lock = threading.Lock()
        self._crowd = Crowd(PER_ADDRESS_MAX)
        self.address_family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
        super().__init__(place, _Probe)
        self.look = look

    def process_request(self, request: Any, client_address: Any) -> None:
        seat = self._crowd.enter(client_address, request)
        if seat is None and self._crowd.make_room(client_address, self._hang_up):
            seat = self._crowd.enter(client_address, request)
        if seat is None:
            self.shutdown_request(request)
            return
        seat.owner = request
        with self._lock:
            oldest = next(iter(self._open)) if len(self._open) >= CONNECTIONS_MAX else None
            self._open[request] = self._now() + REQUEST_S
        if oldest is not None:
            self._hang_up(oldest)
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Called by `serve_forever` several times a second."""
        now = self._now()
        with self._lock:
            late = [each for each, until in self._open.items() if until <= now]
        for each in late:
            self._hang_up(each)

    def _hang_up(self, connected: socket.socket) -> bool:
        """The thread that reads from it sees its end, and closes it."""
        with self._lock:
            self._open.pop(connected, None)
        with suppress(OSError):
            connected.shutdown(socket.SHUT_RDWR)
        return True

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("answering a probe from %s failed", client_address, exc_info=True)


class _Probe(BaseHTTPRequestHandler):
    timeout = REQUEST_S
    server: _Server

    def do_GET(self) -> None:
        runs, text = self.server.look()
        body = json.dumps({"status": "ok" if runs else "hung", "message": text}).encode()
        self.send_response(200 if runs else 503)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Probes come every few seconds, so they are not logged."""
