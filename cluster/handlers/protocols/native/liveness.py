"""Whether the endpoint of a stream responds: what its pongs say while its event loop is blocked, and how long it is silent.

aiohttp pings a stream on which nothing arrives, and ends it if nothing arrives for long enough after that. An endpoint whose
watchdog can speak while the loop is blocked gets little time. One that cannot gets a lot, because a blocked loop looks like a
process that hangs; meanwhile, `stall` tells operators.
"""

from __future__ import annotations

import asyncio
import logging

import aiohttp

from holdfast.cluster.handlers.attempts import Stall
from holdfast.cluster.handlers.dispatch import Station
from holdfast.sdk.pongs import read_blocking

logger = logging.getLogger(__name__)


class Liveness:
    def __init__(self, station: Station, socket: aiohttp.ClientWebSocketResponse, silence_s: float) -> None:
        """`silence_s`: an endpoint that is silent for this long does not respond."""
        self._station = station
        self._socket = socket
        self._silence_s = silence_s
        self._blocked: Stall | None = None
        self._loop = asyncio.get_running_loop()

    def take_pong(self, data: bytes) -> None:
        """A pong without such content is an answer of the loop, or of its server: it runs."""
        blocking = read_blocking(data)
        if blocking is None:
            self._blocked = None
            return
        if self._blocked is None:
            by = f"the handler `{blocking.handler}`" if blocking.handler else "something"
            why = f"{by} blocks the event loop of its process at {blocking.place}"
            self._blocked = Stall(self._station.invoker.clock.now_ms() - blocking.milliseconds, why)
            logger.warning("deployment %s: %s: nothing else runs there meanwhile", self._station.deployment, why)

    def runs(self) -> None:
        """A message came, so the event loop runs."""
        self._blocked = None

    @property
    def stall(self) -> Stall | None:
        """Why the endpoint does not respond, if so."""
        if self._blocked is not None:
            return self._blocked
        silent_s = self._loop.time() - heard_at(self._socket)
        if silent_s < self._silence_s:
            return None
        why = "it does not answer pings: its process hangs, or something blocks its event loop"
        return Stall(self._station.invoker.clock.now_ms() - round(silent_s * 1000), why)


def heard_at(socket: aiohttp.ClientWebSocketResponse) -> float:
    """When the last byte arrived, to a second: aiohttp keeps only when it would ping after that."""
    return socket._heartbeat_when - (socket._heartbeat or 0.0)


def give_up_after(socket: aiohttp.ClientWebSocketResponse, silent_s: float) -> None:
    """Set how long a stream may be silent. aiohttp takes only the time to the ping when a stream is opened."""
    assert socket._heartbeat is not None and silent_s > socket._heartbeat
    socket._pong_heartbeat = silent_s - socket._heartbeat
