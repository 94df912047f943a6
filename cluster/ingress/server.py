"""The sockets of the ingress: aiohttp on one side, `Ingress` on the other."""

from __future__ import annotations

import asyncio
import logging
import socket
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final

from aiohttp import HttpVersion11, web
from aiohttp.web_protocol import RequestHandler

from holdfast.cluster.config import Config
from holdfast.cluster.errors import (
    BadRequest,
    TooSlow,
    UnsupportedEncoding,
    error_body,
)
from holdfast.cluster.http import descriptors
from holdfast.cluster.http.doors import Door
from holdfast.cluster.ingress.ingress import SENT_ALONE_BYTES, Ingress
from holdfast.cluster.ingress.requests import JSON, Answer

logger = logging.getLogger(__name__)
BODY_TIMEOUT_S: Final = 60.0
#: A connection without a request for so long is closed, also one that never finishes its first line: places are bounded.
#: Longer than the 60 seconds after which proxies usually give an idle one up, so that they are the ones who close.
IDLE_S: Final = 75.0
ANSWER_S: Final = 2.0  # How long clients of a node that stops get to take their last answers.
REFUSE_S: Final = 0.1  # Before requests in progress are given up where nothing can come of them any more.
INFLATED_BYTES_MAX: Final = 256 * 1024  # of a compressed body at a time


class _AiohttpBody:
    __slots__ = ("_content", "_encoding", "_request", "is_awaited", "length")

    def __init__(self, request: web.BaseRequest) -> None:
        self._request = request
        #: Whether the client waits to be told that its body is wanted (RFC 9110, 10.1.1).
        self.is_awaited = (
            "Expect" in request.headers
            and request.headers["Expect"].lower() == "100-continue"
            and request.version >= HttpVersion11
            and not request.content.is_eof()
        )
        self._content = request.content
        self._encoding = request.headers.get("Content-Encoding")
        self.length = request.content_length

    async def chunks(self) -> AsyncIterator[bytes]:
        content = self._content
        inflate = _inflater(self._encoding) if self._encoding is not None else None
        try:
            if content.is_eof() and inflate is None:  # All of it came with the headers, as for most requests.
                yield content.read_nowait()
                return
            async with asyncio.timeout(BODY_TIMEOUT_S):
                if self.is_awaited:
                    self.is_awaited = False
                    writer = self._request.writer
                    await writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                    writer.output_size = 0  # The response has not begun.
                while not content.at_eof():
                    raw = await content.readany()
                    if inflate is None:
                        yield raw
                        continue
                    while raw:
                        yield inflate.decompress(raw, INFLATED_BYTES_MAX)
                        raw = inflate.unconsumed_tail
                    if inflate.unused_data:  # It would grow with all that follows.
                        raise BadRequest("the body cannot be read: it goes on behind its end")
            if inflate is not None and not inflate.eof and self.length != 0:
                raise BadRequest("the body cannot be read: it is cut off")
        except TimeoutError:
            raise TooSlow(f"the body did not arrive within {BODY_TIMEOUT_S:.0f} seconds") from None
        except (web.RequestPayloadError, ConnectionError, zlib.error) as error:
            raise BadRequest(f"the body cannot be read: {error}") from None


def _inflater(encoding: str) -> zlib._Decompress | None:
    """Unpacks in pieces, so that a small body which unpacks to a huge one meets the bound before it fills the memory."""
    match encoding.strip().lower():
        case "identity" | "":
            return None
        case "gzip" | "x-gzip" | "deflate":
            return zlib.decompressobj(zlib.MAX_WBITS | 32)  # 32: the header says which of the two it is.
        case other:
            raise UnsupportedEncoding(
                f"{other!r:.60} is not understood here", "send gzip, deflate, or the body as it is"
            )


class _Connection(RequestHandler):
    """One client's connection. Errors of HTTP itself have the shape of all others."""

    __slots__ = ()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        if status >= 500:
            logger.error("a request failed inside the HTTP server", exc_info=exc)
        text = (message or "").split("\n", 1)[0].strip(" :\r") or "not a request of HTTP/1.1"
        body = error_body(status, text[:300], source="ingress", hint=None)
        response = web.Response(status=status, body=body, content_type=JSON)
        response.force_close()
        return response


class _Server(web.Server):
    def __init__(self, handler: Callable[[web.BaseRequest], Awaitable[web.Response]]) -> None:
        super().__init__(
            handler, handler_cancellation=True, access_log=None, auto_decompress=False, keepalive_timeout=IDLE_S
        )

    def connection(self) -> asyncio.BaseProtocol:
        return _Connection(self, loop=self._loop, **self._kwargs)


class IngressServer:
    """Listens, and translates between aiohttp and the ingress. A client that disconnects ends its wait, nothing else."""

    def __init__(self, config: Config, ingress: Ingress) -> None:
        self._config = config
        self._ingress = ingress
        self._door: Door | None = None

    async def start(self, sockets: Sequence[socket.socket] = ()) -> None:
        """At the configured place, or through sockets that listen there already."""
        self._web = _Server(self._handle)
        most = min(self._config.connections_max, descriptors.for_ingress())
        door = Door(self._web, self._web.connection, connections_max=most, source="ingress")
        await door.open(self._config.ingress, sockets)
        self._door = door

    @property
    def port(self) -> int:
        assert self._door is not None, "started"
        return self._door.port

    @property
    def connections(self) -> int:
        return self._door.connections if self._door is not None else 0

    def leave(self) -> None:
        """Close connections after their next answer, or when nothing comes from them. New ones are still let in."""
        if self._door is not None:
            self._door.leave()

    async def finish(self, seconds: float) -> None:
        """Let nobody in any more, and let what is in progress end."""
        if self._door is not None:
            await self._door.finish(seconds)

    def refuse(self, why: str) -> None:
        """Answer 503 from now on, also whoever waits. The door stays open, so that all who come are told why."""
        self._ingress.stop(why)
        asyncio.get_running_loop().call_later(REFUSE_S, self._ingress.give_up)
        self.leave()

    async def stop(self) -> None:
        """Refuse what is new, answer what waits, then close. Nothing to do if it never started."""
        self._ingress.stop()
        if self._door is None:
            return
        await self._door.finish(ANSWER_S)
        if self._door.connections:
            self._ingress.give_up()
            await self._door.finish(ANSWER_S)
        await self._door.close()

    async def _handle(self, request: web.BaseRequest) -> web.Response:
        body = _AiohttpBody(request)
        answer = await self._ingress.answer(request.method, request.raw_path, request.headers, body)
        try:
            response = await self._respond(request, answer)
            if body.is_awaited:
                # The client still keeps its body to itself. Nobody can tell whether it sends it after all, so the next bytes
                # of this connection could mean anything.
                response.force_close()
                await response.prepare(request)
                await response.write_eof()
                request.protocol.force_close()
            return response
        finally:
            self._ingress.sent(answer)

    async def _respond(self, request: web.BaseRequest, answer: Answer) -> web.Response:
        status, body, content_type, id_, headers, held = answer
        sent = {"Content-Type": content_type, "Server": "holdfast"}
        if id_ is not None:
            sent["x-holdfast-id"] = id_
        if headers is not None:
            sent.update(headers)
        response = web.Response(body=body, status=status, headers=sent)
        if self._door is None or self._door.leaving:
            response.force_close()
        if held > SENT_ALONE_BYTES:
            try:
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    await response.prepare(request)
                    await response.write_eof()
            except TimeoutError:  # Whoever reads this slowly keeps others from their answers.
                if request.transport is not None:
                    request.transport.abort()
        return response
