"""A door is a listener for clients, which closes without breaking any accepted connection.

A client whose connection is refused tries another node. A client whose connection breaks does not know the outcome of
its request. So a stopping node may refuse connections but must not break them. It accepts and answers every connection
that the kernel has accepted for it. Every answer announces that it is the last one on its connection. An idle
connection is closed only after a while, and never with an unread request.

The listening sockets are ours, not those of a server of the loop, for two reasons. A server that closes drops the
connections in the kernel's queue. And the sockets can be passed on, to the real doors from the ones that were open
before.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import select
import socket
import ssl
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final, cast

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from holdfast.cluster.config import HostPort
from holdfast.cluster.errors import error_body
from holdfast.cluster.http.crowd import Crowd, Place, Strangers
from holdfast.cluster.tasks import Tasks

logger = logging.getLogger(__name__)

BACKLOG: Final = 1024
ACCEPTS_PER_TURN: Final = 64
FULL_S: Final = 0.5  # Before a process without a free descriptor tries to accept again.
IDLE_S: Final = 0.3  # While leaving, how long a used connection is kept for another request,
FRESH_S: Final = 1.0  # and one without any request yet.
LOOK_S: Final = 0.01
LOOKED_AT: Final = 16  # Connections checked for an idle one each time the limit is reached.
#: Time limit for the client's first byte and the whole TLS handshake. Slower clients are dropped,
HANDSHAKE_S: Final = 10.0
HANDSHAKES_MAX: Final = 1024  # and the oldest of them sooner if there are more than this.
#: From this age on, a connection without an authenticated request makes room for others before any other does.
STRANGER_S: Final = 1.0
#: How long a refused client has to read the reason, and how many refused connections are open meanwhile.
REFUSED_S: Final = 1.0
REFUSED_MAX: Final = 64
#: How long we wait for the client's end of TLS after ours.
SHUTDOWN_S: Final = 1.0
CLIENT_HELLO: Final = b"\x16"  # The first byte of TLS, and never that of a request.
#: Errors of accept that concern this process and not the connection.
_FULL: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Door:
    """`protocol` makes one for each connection, all of them of `server`.

    At `connections_max` connections, the oldest idle one is closed for a new one; if none is idle, the new one is
    refused and asked to retry later. The same holds for the connections of one address, at `per_address_max`. So
    clients that only connect do not lock others out, and take no descriptors from the rest of the node.

    A connection is a stranger's until a request on it is authenticated. At `strangers_per_address_max` of them, the
    oldest one of the address is closed for the next, and at `connections_max` the oldest of all, busy or not. So clients
    without a token cannot lock others out with slow requests either. None: every client may do everything.
    """

    def __init__(
        self,
        server: web.Server,
        protocol: Callable[[], asyncio.BaseProtocol] | None = None,
        *,
        connections_max: int | None = None,
        per_address_max: int | None = None,
        strangers_per_address_max: int | None = None,
        source: str = "node",
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        """`tls` is asked for the context of each new connection. Strangers: `protocol` makes instances of `Client`."""
        self._server = server
        self._protocol = protocol or server
        self._connections_max = connections_max
        self._crowd = Crowd(per_address_max)
        self._strangers = Strangers(strangers_per_address_max) if strangers_per_address_max is not None else None
        self._ending: set[RequestHandler] = set()  # Connections of strangers that were closed a moment ago.
        self._refused: dict[_Refused, None] = {}  # The oldest first.
        self._source = source
        self._tls = tls
        self._greeting: dict[socket.socket, Place] = {}  # Connections before TLS, the oldest first.
        self.handshakes_failed = 0
        self._oldest: list[RequestHandler] = []  # Connections that are still to be checked, the oldest last.
        self.turned_away = 0
        self.closed_idle = 0
        self.closed_strangers = 0
        self._sockets: list[socket.socket] = []
        self._entering = Tasks()
        self._refusing = Tasks()
        self._closing: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self.port = 0  # Kept after the door is closed.

    @property
    def connections(self) -> int:
        return len(self._server.connections)

    @property
    def leaving(self) -> bool:
        """Whether answers should announce that they are the last on their connection."""
        return self._closing is not None

    # -- opening -----------------------------------------------------------------------------------------------------

    async def open(self, place: HostPort, sockets: Sequence[socket.socket] = ()) -> None:
        """Listen at an address, or through sockets that already listen. Raises OSError."""
        self._sockets = list(sockets) or await _listen(place)
        self.port = self._sockets[0].getsockname()[1]
        for each in self._sockets:
            self._loop.add_reader(each, self._accept, each)

    def _accept(self, door: socket.socket) -> bool:
        """Accept a waiting connection. Returns whether there may be more."""
        for _ in range(ACCEPTS_PER_TURN):
            try:
                connected, address = door.accept()
            except (BlockingIOError, InterruptedError):
                return False
            except ConnectionError:
                continue  # It was closed before we accepted it.
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                logger.error("cannot accept clients: %s", error)
                self._loop.remove_reader(door)
                self._loop.call_later(FULL_S, self._accept_again, door)
                return False
            if self._enter(connected, address):
                # One per turn: the connection closed for it releases its descriptor only at the end of a turn.
                return True
        return True

    def _accept_again(self, door: socket.socket) -> None:
        if door in self._sockets:
            self._loop.add_reader(door, self._accept, door)

    def _enter(self, connected: socket.socket, address: Any) -> bool:
        """Whether there was no room for it."""
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        most = self._connections_max
        full = most is not None and self._is_full(most)
        oldest = self._strangers.oldest_beyond(address) if self._strangers is not None else None
        replaces = oldest is not None
        crowded = oldest is not None and not self._close_stranger(oldest)
        place = self._crowd.enter(address, connected) if not crowded else None
        if place is None and not crowded:
            replaces = self._crowd.make_room(address, self._close_if_idle)
            place = self._crowd.enter(address, connected) if replaces else None
        crowded = place is None
        makes_room = len(self._greeting) >= (HANDSHAKES_MAX if most is None else min(HANDSHAKES_MAX, most // 2 + 1))
        if makes_room and not crowded:
            waiting = self._greeting.values()
            first = self._strangers.first_to_go(waiting) if self._strangers is not None else next(iter(waiting))
            assert first is not None, "there are many"
            self._hang_up(first.socket)
        if crowded or (full and not makes_room and not self._make_room()):
            self.turned_away += 1
            if self._tls is not None:  # Sending the reason would take a handshake.
                connected.close()
                return True
            why = "too many connections from this address" if crowded else "too many connections"
            self._refusing.keep(self._loop.create_task(self._turn_away(connected, f"{why} to this node")))
            return full
        assert place is not None, "otherwise it was crowded"
        place.since_s = self._loop.time()
        if self._strangers is not None:
            self._strangers.enter(address, place)
        entering = self._loop.create_task(self._connect(connected, place))
        self._entering.keep(entering)
        return full or replaces or makes_room

    def _is_full(self, most: int) -> bool:
        """Connections of strangers that are about to end take no place."""
        count = self.connections + len(self._entering)
        if count < most:
            return False
        self._ending.intersection_update(self._server.connections)
        return count - len(self._ending) >= most

    def _make_room(self) -> bool:
        """Close a connection for a new one. That of a stranger, if it had a second to send a token, or if strangers have
        half of the places: then only strangers make room for each other. Otherwise the oldest idle one."""
        first = self._strangers.first_to_go() if self._strangers is not None else None
        if self._strangers is not None and first is not None and self._connections_max is not None:
            is_flood = 2 * len(self._strangers) >= self._connections_max
            if is_flood or self._loop.time() - first.since_s >= STRANGER_S:
                return self._close_stranger(first)
        return self._close_oldest_idle()

    def _close_oldest_idle(self) -> bool:
        """Only a few are checked each time, because each new client causes a check; of the younger half none, because
        their first request may be in transit."""
        for _ in range(LOOKED_AT):
            if not self._oldest:
                self._oldest = list(self._server.connections)[: (self.connections + 1) // 2][::-1]
                if not self._oldest:
                    return False
            if self._close_if_idle(self._oldest.pop()):
                return True
        return False

    def _close_stranger(self, place: Place) -> bool:
        """Whether it could be closed. Busy or not: whoever sends or reads slowly must not keep its place."""
        connection, greeting = place.owner, place.socket in self._greeting
        if connection is None or connection.transport is None:
            if not greeting:
                return False  # It connects in this very turn.
            self._hang_up(place.socket)
        else:
            self._ending.add(connection)
            if _is_busy(connection) or connection.transport.get_write_buffer_size():
                connection.transport.abort()  # Closing it would first wait for the client to read what is written.
            else:
                connection.force_close()
        place.leave_strangers()
        self.closed_strangers += 1
        return True

    def _close_if_idle(self, each: RequestHandler) -> bool:
        if each.transport is None or _is_busy(each) or _has_something(each):
            return False
        each.force_close()
        self.closed_idle += 1
        return True

    async def _turn_away(self, connected: socket.socket, why: str) -> None:
        """Tell a client why it is refused."""
        if len(self._refused) >= REFUSED_MAX:
            next(iter(self._refused)).end()
        try:
            await self._loop.connect_accepted_socket(lambda: _Refused(self._source, why, self._refused), connected)
        except OSError as error:
            logger.debug("a client disconnected before it was refused: %s", error)
            connected.close()

    async def _connect(self, connected: socket.socket, place: Place) -> None:
        def serve() -> asyncio.BaseProtocol:
            serving = self._protocol()
            if isinstance(serving, Client):
                serving.place = place
            if isinstance(serving, RequestHandler):
                place.owner = serving
            return serving

        try:
            if self._tls is None:
                await self._loop.connect_accepted_socket(serve, connected)
            else:
                await self._connect_tls(place, serve, self._tls)
        except OSError as error:
            logger.debug("a client disconnected before it was accepted: %s", error)
            connected.close()
        finally:
            if place.socket.fileno() < 0:
                place.leave_strangers()

    async def _connect_tls(
        self,
        place: Place,
        protocol: Callable[[], asyncio.BaseProtocol],
        tls: Callable[[], ssl.SSLContext],
    ) -> None:
        """A client that only connects costs a descriptor: memory for TLS is allocated when it begins the handshake."""
        connected = place.socket
        self._greeting[connected] = place
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await self._readable(connected)
            first = connected.recv(1, socket.MSG_PEEK)
            if first not in (b"", CLIENT_HELLO):
                await self._say_tls(connected)
            if first != CLIENT_HELLO:
                connected.close()
                return
            await self._loop.connect_accepted_socket(
                protocol,
                connected,
                ssl=tls(),
                ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=SHUTDOWN_S,
            )
        except OSError:  # Including a TimeoutError, or an error of TLS.
            self.handshakes_failed += 1
            raise
        finally:
            self._greeting.pop(connected, None)

    def _hang_up(self, greeting: socket.socket) -> None:
        """End a handshake, although the loop's own code waits for its next byte."""
        place = self._greeting.pop(greeting, None)
        if place is not None:
            place.leave_strangers()
        with suppress(OSError):
            greeting.shutdown(socket.SHUT_RDWR)

    async def _readable(self, connected: socket.socket) -> None:
        ready = self._loop.create_future()
        self._loop.add_reader(connected, _wake, ready)
        try:
            await ready
        finally:
            self._loop.remove_reader(connected)

    async def _say_tls(self, connected: socket.socket) -> None:
        """The answer to a client that sends HTTP to an HTTPS port, in plain HTTP."""
        connected.recv(65536)
        text = "this address speaks HTTPS"
        body = error_body(400, text, source=self._source, hint="use https:// in the URL")
        connected.send(_plain_answer(b"400 Bad Request", body))
        connected.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(SHUTDOWN_S):  # Closing with unread bytes would discard the answer.
            while True:
                await self._readable(connected)
                if not connected.recv(65536):
                    return

    # -- closing -----------------------------------------------------------------------------------------------------

    def pass_on(self) -> list[socket.socket]:
        """Stop listening, and pass the sockets to another door, which accepts the connections in the kernel's queue."""
        sockets, self._sockets = self._sockets, []
        for each in sockets:
            self._loop.remove_reader(each)
        return sockets

    def leave(self) -> None:
        """From now on connections are closed: after their next answer, or after being idle for a while."""
        if self._closing is None:
            self._closing = self._loop.create_task(self._close_idle())

    async def finish(self, seconds: float) -> None:
        """Accept no more connections. Returns when all connections are closed, or when the time is up."""
        self.leave()
        for door in self.pass_on():
            while self._accept(door):
                pass
            door.close()
        deadline = self._loop.time() + seconds
        while (self._entering or self.connections) and self._loop.time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)

    async def close(self, shutdown: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Break the remaining connections. `shutdown` does it for the server."""
        for door in self.pass_on():
            door.close()
        for greeting in list(self._greeting):
            self._hang_up(greeting)
        for refused in list(self._refused):
            refused.end()
        if entering := [*self._entering, *self._refusing]:
            await asyncio.wait(entering, timeout=SHUTDOWN_S)
        if self._closing is not None:
            self._closing.cancel()
            await asyncio.gather(self._closing, return_exceptions=True)
        await (shutdown() if shutdown is not None else self._server.shutdown(timeout=0.1))

    async def _close_idle(self) -> None:
        """Close idle connections, one by one."""
        since: dict[RequestHandler, tuple[int, float]] = {}  # The number of its requests when we first saw it idle.
        while True:
            now = self._loop.time()
            for greeting in [each for each, place in self._greeting.items() if now - place.since_s >= FRESH_S]:
                self._hang_up(greeting)
            idle = [each for each in self._server.connections if not _is_busy(each)]
            before, since = since, {}
            for each in idle:
                asked, at = before.get(each, (-1, now))
                since[each] = (each._request_count, at if asked == each._request_count else now)
                patience = IDLE_S if each._request_count else FRESH_S
                if now - since[each][1] >= patience and not _has_something(each):
                    each.force_close()
            await asyncio.sleep(LOOK_S)


class Client(RequestHandler):
    """A connection that knows its place among those of its door."""

    __slots__ = ("place",)
    place: Place | None

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.place = None

    def recognize(self) -> None:
        """A request on it was authenticated."""
        if self.place is not None:
            self.place.leave_strangers()

    def connection_lost(self, exc: BaseException | None) -> None:
        self.recognize()
        task = self._task_handler
        super().connection_lost(exc)
        if task is not None and not self._request_in_progress:
            task.cancel()  # It would go on waiting for the rest of a body that nobody wants, and keep its place meanwhile.


class _Refused(asyncio.Protocol):
    """A connection beyond the limit: it gets the reason, and is closed. Its request is read first, because closing a
    connection with unread bytes resets it, and the client would not see the reason."""

    def __init__(self, source: str, why: str, among: dict[_Refused, None]) -> None:
        self._source = source
        self._why = why
        self._among = among

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport has the same interface.
        self._among[self] = None
        self._timer = asyncio.get_running_loop().call_later(REFUSED_S, self.end)
        body = error_body(503, self._why, source=self._source, hint=None)
        self._transport.write(_plain_answer(b"503 Service Unavailable\r\nRetry-After: 1", body))
        with suppress(OSError):  # The client is gone already.
            self._transport.write_eof()

    def data_received(self, data: bytes) -> None:
        """Its request is not looked at."""

    def end(self) -> None:
        self._among.pop(self, None)
        self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._timer.cancel()
        self._among.pop(self, None)


def _plain_answer(status: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (
        status,
        len(body),
        body,
    )


def _wake(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def _is_busy(connection: RequestHandler) -> bool:
    return connection._request_in_progress or bool(connection._messages)


def _has_something(connection: RequestHandler) -> bool:
    """Whether unread bytes of the client wait: closing now would cause a reset."""
    transport = connection.transport
    sock = transport.get_extra_info("socket") if transport is not None else None
    if sock is None or sock.fileno() < 0:
        return False
    look = select.poll()
    look.register(sock.fileno(), select.POLLIN)
    return any(event & select.POLLIN for _, event in look.poll(0))


async def _listen(place: HostPort) -> list[socket.socket]:
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
