"""The sockets of a listener: aiohttp on one side, an `Exchange` on the other."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from aiohttp import web

from holdfast.cluster.config import HostPort
from holdfast.cluster.errors import error_body
from holdfast.cluster.http import descriptors
from holdfast.cluster.http.bodies import AiohttpBody
from holdfast.cluster.http.doors import Client, Door
from holdfast.cluster.http.exchange import JSON, Answer, Exchange
from holdfast.cluster.http.streams import Stream

logger = logging.getLogger(__name__)
#: How long a client may take to read a large answer.
SEND_S: Final = 60.0
SENT_ALONE_BYTES: Final = 1024 * 1024  # A larger answer counts as in progress until the client has received it.
#: A connection without a request for this long is closed, even one that never finishes its first line, because
#: connections are limited. Longer than the 60 seconds after which proxies usually close an idle one, so that the
#: proxies do the closing.
IDLE_S: Final = 75.0
LINGER_S: Final = 5.0  # How long the rest of a body that nobody wants is read, so that its client sees the answer.
ANSWER_S: Final = 2.0  # How long clients of a stopping node have to receive their last answers.
LEAVING: Final = "this node is shutting down"
REFUSE_S: Final = 0.1  # Before requests in progress that cannot succeed any more are abandoned.


class _Connection(Client):
    """One client's connection. Errors of the HTTP protocol have the same shape as all others."""

    __slots__ = ()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        if status >= 500:
            logger.error("a request failed inside the HTTP server", exc_info=exc)
        text = (message or "").split("\n", 1)[0].strip(" :\r") or "not an HTTP/1.1 request"
        assert isinstance(self._manager, _Server), "it made this connection"
        body = error_body(status, text[:300], source=self._manager.source, hint=None)
        response = web.Response(status=status, body=body, content_type=JSON, headers=self._manager.headers)
        response.force_close()
        return response


class _Server(web.Server):
    source = ""
    headers: Mapping[str, str] = {}

    def connection(self) -> asyncio.BaseProtocol:
        return _Connection(self, loop=self._loop, **self._kwargs)


class HttpServer:
    """Listens, and translates between aiohttp and an exchange."""

    def __init__(
        self,
        place: HostPort,
        exchange: Exchange,
        *,
        connections_max: Callable[[], int],
        per_address_max: int,
        abandon: bool,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        """`connections_max` is read when the door opens. `abandon`: a client that disconnects ends its request, for
        requests that only wait; the requests of operators are completed even if they disconnect."""
        self.exchange = exchange
        self._place = place
        self._connections_max = connections_max
        self._per_address_max = per_address_max
        self._abandon = abandon
        self._tls = tls
        self._door: Door | None = None

    async def start(self, sockets: Sequence[socket.socket] = ()) -> None:
        """At the configured address, or through sockets that already listen there."""
        web_server = _Server(
            self._handle,
            handler_cancellation=self._abandon,
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=IDLE_S,
            lingering_time=LINGER_S,
        )
        web_server.source = self.exchange.source
        web_server.headers = self.exchange.browsers.headers
        most = self._connections_max()
        self.exchange.streams.limit(most)
        door = Door(
            web_server,
            web_server.connection,
            connections_max=most,
            per_address_max=descriptors.for_one_address(most, self._per_address_max),
            strangers_per_address_max=(
                descriptors.for_strangers_of_one_address(most, self._per_address_max)
                if self.exchange.has_strangers
                else None
            ),
            source=self.exchange.source,
            tls=self._tls,
        )
        await door.open(self._place, sockets)
        self._door = door

    @property
    def port(self) -> int:
        assert self._door is not None, "started"
        return self._door.port

    @property
    def scheme(self) -> str:
        return "http" if self._tls is None else "https"

    @property
    def connections(self) -> int:
        return self._door.connections if self._door is not None else 0

    def leave(self) -> None:
        """End all streams. Close connections after their next answer, or when they are idle. New ones are still accepted."""
        self.exchange.streams.end_all(LEAVING)
        if self._door is not None:
            self._door.leave()

    async def finish(self, seconds: float) -> None:
        """Accept no more connections, and finish the requests in progress."""
        self.exchange.streams.end_all(LEAVING)
        if self._door is not None:
            await self._door.finish(seconds)

    def refuse(self, why: str) -> None:
        """Answer 503 from now on, also to waiting clients. The door stays open, so that all clients get the reason."""
        self.exchange.stop(why)
        asyncio.get_running_loop().call_later(REFUSE_S, self.exchange.give_up)
        self.leave()

    async def stop(self) -> None:
        """Refuse new requests, answer waiting ones, then close. Does nothing if it was never started."""
        self.exchange.stop()
        if self._door is None:
            return
        await self._door.finish(ANSWER_S)
        if self._door.connections:
            self.exchange.give_up()
            await self._door.finish(ANSWER_S)
        await self._door.close()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        body = AiohttpBody(request)
        connection = request.protocol
        assert isinstance(connection, Client), "the server made it"
        answer = await self.exchange.answer(
            request.method,
            request.raw_path,
            request.headers,
            body,
            address=request.remote or "",
            recognize=connection.recognize,
            gone=lambda: request.transport is None or request.transport.is_closing(),
        )
        try:
            if answer.stream is not None:
                return await self._stream(request, answer, answer.stream)
            response = await self._respond(request, answer)
            if body.is_awaited:
                # The client has not sent its body. It is unknown whether it still will, so the next bytes of this
                # connection could mean anything.
                response.force_close()
                await response.prepare(request)
                await response.write_eof()
                request.protocol.force_close()
            return response
        finally:
            self.exchange.sent(answer)

    async def _respond(self, request: web.BaseRequest, answer: Answer) -> web.Response:
        response = web.Response(body=answer.body, status=answer.status, headers=self._headers(answer))
        if self._door is None or self._door.leaving:
            response.force_close()
        if answer.held > SENT_ALONE_BYTES:
            try:
                async with asyncio.timeout(SEND_S):
                    await response.prepare(request)
                    await response.write_eof()
            except TimeoutError:  # A slow reader would keep others from their answers.
                if request.transport is not None:
                    request.transport.abort()
        return response

    async def _stream(self, request: web.BaseRequest, answer: Answer, stream: Stream) -> web.StreamResponse:
        """The last answer of its connection, because the end of the stream may be that of the node."""
        headers = {**self._headers(answer), "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        response = web.StreamResponse(status=answer.status, headers=headers)
        response.force_close()

        def is_gone() -> bool:
            return request.transport is None or request.transport.is_closing()

        try:
            await response.prepare(request)
            if not await self.exchange.streams.run(stream, response.write, is_gone):
                raise ConnectionResetError("the client is gone, or does not read")
            async with asyncio.timeout(ANSWER_S):
                await response.write_eof()
        except (ConnectionError, TimeoutError):
            if request.transport is not None:
                request.transport.abort()
        return response

    def _headers(self, answer: Answer) -> dict[str, str]:
        sent = {"Content-Type": answer.content_type, "Server": "holdfast", **self.exchange.browsers.headers}
        if answer.id is not None:
            sent["x-holdfast-id"] = answer.id
        if answer.headers is not None:
            sent.update(answer.headers)
        return sent
