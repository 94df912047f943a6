"""A door: where clients connect, and how it closes without hurting anybody who was let in.

A client that was refused a connection asks elsewhere. One whose connection breaks does not know what became of its request. So
a node that stops may refuse, and must not break: what the kernel has accepted in its name is let in and answered, every
answer says that it is the last one on its connection, and a connection from which nothing comes is closed only after a
while, and never with a request unread.

The listening sockets are ours and not a server's of the loop, for two reasons. A server that is closed throws out whoever waits
in the kernel's queue. And the sockets can be passed on: to the real doors, from whoever stood there before they opened.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import select
import socket
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, cast

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from holdfast.cluster.config import Endpoint
from holdfast.cluster.errors import error_body
from holdfast.cluster.tasks import Tasks

logger = logging.getLogger(__name__)

BACKLOG: Final = 1024
ACCEPTS_PER_TURN: Final = 64
FULL_S: Final = 0.5  # Before a process without a free descriptor tries to let somebody in again.
IDLE_S: Final = 0.3  # How long a connection that was used before is kept for another request, once we leave,
FRESH_S: Final = 1.0  # and one on which nothing was asked yet.
LOOK_S: Final = 0.01
LOOKED_AT: Final = 16  # Connections, for one that could be closed, each time that there is no room for another.
#: Errors of accept that say something about this process and not about the one connection.
_FULL: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Door:
    """`protocol` makes one for each connection, all of them of `server`.

    With `connections_max` of them, the oldest from which nothing comes makes room for the next one; if there is none, that one
    is told to come back later. So clients that only connect keep nobody out, and take no descriptors from the rest of the node.
    """

    def __init__(
        self,
        server: web.Server,
        protocol: Callable[[], asyncio.BaseProtocol] | None = None,
        *,
        connections_max: int | None = None,
        source: str = "node",
    ) -> None:
        self._server = server
        self._protocol = protocol or server
        self._connections_max = connections_max
        self._source = source
        self._oldest: list[RequestHandler] = []  # Those that are still to be looked at, the oldest last.
        self.turned_away = 0
        self.closed_idle = 0
        self._sockets: list[socket.socket] = []
        self._entering = Tasks()
        self._ushering: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self.port = 0  # Also when the door is closed already.

    @property
    def connections(self) -> int:
        return len(self._server.connections)

    @property
    def leaving(self) -> bool:
        """Whether answers should say that they are the last on their connection."""
        return self._ushering is not None

    # -- opening -----------------------------------------------------------------------------------------------------

    async def open(self, place: Endpoint, sockets: Sequence[socket.socket] = ()) -> None:
        """Let clients in: at a place, or through sockets that listen already. Raises OSError."""
        self._sockets = list(sockets) or await _listen(place)
        self.port = self._sockets[0].getsockname()[1]
        for each in self._sockets:
            self._loop.add_reader(each, self._accept, each)

    def _accept(self, door: socket.socket) -> bool:
        """Let in who waits there. Whether there may be more of them."""
        for _ in range(ACCEPTS_PER_TURN):
            try:
                connected, _ = door.accept()
            except (BlockingIOError, InterruptedError):
                return False
            except ConnectionError:
                continue  # It went away before we came.
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                logger.error("no client can be let in: %s", error)
                self._loop.remove_reader(door)
                self._loop.call_later(FULL_S, self._accept_again, door)
                return False
            if self._enter(connected):
                return True  # One a turn: whoever made room for it gives its descriptor back only at the end of one.
        return True

    def _accept_again(self, door: socket.socket) -> None:
        if door in self._sockets:
            self._loop.add_reader(door, self._accept, door)

    def _enter(self, connected: socket.socket) -> bool:
        """Whether there was no room for it."""
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        protocol: Callable[[], asyncio.BaseProtocol] = self._protocol
        most = self._connections_max
        full = most is not None and self.connections + len(self._entering) >= most
        if full and not self._make_room():
            self.turned_away += 1
            protocol = self._turn_away
        entering = self._loop.create_task(self._connect(connected, protocol))
        self._entering.keep(entering)
        return full

    def _make_room(self) -> bool:
        """Close the oldest idle connection, if there is one. A few are looked at each time, because each client that comes
        asks for it; of the younger half none, because their first request may be on its way."""
        for _ in range(LOOKED_AT):
            if not self._oldest:
                self._oldest = list(self._server.connections)[: (self.connections + 1) // 2][::-1]
                if not self._oldest:
                    return False
            each = self._oldest.pop()
            if each.transport is not None and not _is_busy(each) and not _has_something(each):
                each.force_close()
                self.closed_idle += 1
                return True
        return False

    def _turn_away(self) -> asyncio.BaseProtocol:
        return _Refused(self._source)

    async def _connect(self, connected: socket.socket, protocol: Callable[[], asyncio.BaseProtocol]) -> None:
        try:
            await self._loop.connect_accepted_socket(protocol, connected)
        except OSError as error:
            logger.debug("a client was gone before it was let in: %s", error)
            connected.close()

    # -- closing -----------------------------------------------------------------------------------------------------

    def pass_on(self) -> list[socket.socket]:
        """Listen no more, and let another door do so. Who waits in the kernel's queue is let in by that one."""
        sockets, self._sockets = self._sockets, []
        for each in sockets:
            self._loop.remove_reader(each)
        return sockets

    def leave(self) -> None:
        """From now on connections are closed: after their next answer, or when nothing comes from them for a while."""
        if self._ushering is None:
            self._ushering = self._loop.create_task(self._usher_out())

    async def finish(self, seconds: float) -> None:
        """Let nobody in who has not connected yet. Returns when all connections are closed, or time is up."""
        self.leave()
        for door in self.pass_on():
            while self._accept(door):
                pass
            door.close()
        deadline = self._loop.time() + seconds
        while (self._entering or self.connections) and self._loop.time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)

    async def close(self, shutdown: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Break what is left. `shutdown` does it for the server."""
        for door in self.pass_on():
            door.close()
        if self._ushering is not None:
            self._ushering.cancel()
            await asyncio.gather(self._ushering, return_exceptions=True)
        await (shutdown() if shutdown is not None else self._server.shutdown(timeout=0.1))

    async def _usher_out(self) -> None:
        """Close connections from which nothing comes, one by one."""
        since: dict[RequestHandler, tuple[int, float]] = {}  # How many requests it had made when we first saw it idle.
        while True:
            now = self._loop.time()
            idle = [each for each in self._server.connections if not _is_busy(each)]
            before, since = since, {}
            for each in idle:
                asked, at = before.get(each, (-1, now))
                since[each] = (each._request_count, at if asked == each._request_count else now)
                patience = IDLE_S if each._request_count else FRESH_S
                if now - since[each][1] >= patience and not _has_something(each):
                    each.force_close()
            await asyncio.sleep(LOOK_S)


class _Refused(asyncio.Protocol):
    """A connection beyond the bound: told so, and closed."""

    def __init__(self, source: str) -> None:
        self._source = source

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name.
        body = error_body(503, "too many connections to this node", source=self._source, hint=None)
        transport.write(
            b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
            b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        transport.close()


def _is_busy(connection: RequestHandler) -> bool:
    return connection._request_in_progress or bool(connection._messages)


def _has_something(connection: RequestHandler) -> bool:
    """Whether something of the client waits to be read: closing now would be answered by a reset."""
    transport = connection.transport
    sock = transport.get_extra_info("socket") if transport is not None else None
    if sock is None or sock.fileno() < 0:
        return False
    look = select.poll()
    look.register(sock.fileno(), select.POLLIN)
    return any(event & select.POLLIN for _, event in look.poll(0))


async def _listen(place: Endpoint) -> list[socket.socket]:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(place.host or None, place.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            each = socket.socket(family, kind, protocol)
            sockets.append(each)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            each.bind(address)
            each.listen(BACKLOG)
            each.setblocking(False)
    except BaseException:
        for each in sockets:
            each.close()
        raise
    return sockets
