"""An endpoint as an ASGI application: for uvicorn and hypercorn, alone or mounted in FastAPI or Starlette.

It depends on ASGI messages only, not on any server. Paths are recognised by their suffix, so any prefix works.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, MutableMapping
from typing import Any, Final
from urllib.parse import quote, unquote

from holdfast.sdk.definition import AnyService
from holdfast.sdk.endpoint import (
    MEDIA_TYPE,
    ORIGIN_HEADER,
    PAGE_REFUSED,
    SITE_HEADER,
    Endpoint,
    Stream,
    Superseded,
    body_version,
    is_from_page,
    stream_version,
)
from holdfast.sdk.frames import (
    BATCH_BYTES_MAX,
    HEARTBEAT_HEADER,
    HIGHEST_HEADER,
    MESSAGE_BYTES_HEADER,
    MESSAGE_BYTES_LEAST,
    VERSION,
    VERSION_HEADER,
)
from holdfast.sdk.hosts import HOST_REFUSED, is_for_another_host, is_from_browser, is_loopback_host
from holdfast.sdk.identity import SignatureRefused, load_identity
from holdfast.sdk.journal import ProtocolError
from holdfast.sdk.signatures import SIGNATURE_HEADER, SIGNED_HEADER
from holdfast.sdk.watchdog import Lifeline

logger = logging.getLogger("holdfast.sdk")

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]

_INVOKE: Final = re.compile(r"/invoke/([^/]+)/([^/]+)\Z")
#: The default limit of servers for one message: 16 MiB in uvicorn (`--ws-max-size`) and hypercorn.
MESSAGE_BYTES_MAX: Final = 16 * 1024 * 1024
_GOING_AWAY: Final = 1001
_POLICY_VIOLATION: Final = 1008


class AsgiEndpoint:
    """The ASGI application that `endpoint` returns."""

    def __init__(self, inner: Endpoint, message_bytes_max: int) -> None:
        self.inner = inner
        self.message_bytes_max = message_bytes_max

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        match scope["type"]:
            case "http":
                await self._http(scope, receive, send)
            case "websocket":
                await self._websocket(scope, receive, send)
            case "lifespan":
                await self._lifespan(receive, send)
            case other:
                raise ValueError(f"unknown type of connection: {other}")

    async def stop(self, grace: float = 10.0) -> None:
        """Finish running attempts or hand them back. A server calls this through the lifespan. In a mounted application, call
        it yourself."""
        await self.inner.stop(grace)

    async def _lifespan(self, receive: _Receive, send: _Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await send({"type": "lifespan.startup.complete"})
            elif message["type"] == "lifespan.shutdown":
                await self.inner.stop()
                await send({"type": "lifespan.shutdown.complete"})
                return

    # -- HTTP

    async def _http(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        if is_from_page(_header(scope, ORIGIN_HEADER), _header(scope, SITE_HEADER)):
            await _answer(send, 403, _error(403, PAGE_REFUSED), "application/json")
            return
        if self.inner.identity is None and _is_rebound(scope):
            await _answer(send, 403, _error(403, HOST_REFUSED), "application/json")
            return
        path, method = scope["path"], scope["method"]
        invoke = _INVOKE.search(path)
        try:
            digest = self._check(scope, method)
        except SignatureRefused as refused:
            await _answer_refusal(send, refused)
            return
        if path.endswith("/discover") and invoke is None:
            if method not in ("GET", "HEAD"):
                await _answer(send, 405, _error(405, "use GET"), "application/json", more=[(b"allow", b"GET")])
                return
            await _answer(send, 200, json.dumps(self.inner.manifest).encode(), "application/json")
        elif invoke is not None:
            if method != "POST":
                await _answer(send, 405, _error(405, "use POST"), "application/json", more=[(b"allow", b"POST")])
                return
            await self._invoke(
                unquote(invoke[1]), unquote(invoke[2]), digest=digest, scope=scope, receive=receive, send=send
            )
        else:
            text = "the paths here are GET /discover, the WebSocket /stream and POST /invoke/{service}/{handler}"
            await _answer(send, 404, _error(404, text), "application/json")

    def _check(self, scope: _Message, method: str) -> str | None:
        """That a node of the cluster sent it; before anything else of it is read. Raises SignatureRefused."""
        if self.inner.identity is None:
            return None
        path = scope["path"]
        invoke = _INVOKE.search(path)
        if invoke is not None:
            below = "".join(f"/{quote(unquote(part), safe='')}" for part in ("invoke", invoke[1], invoke[2]))
        else:
            below = "/" + path.rpartition("/")[2]
        return self.inner.identity.check(method, below, _header(scope, SIGNED_HEADER), _header(scope, SIGNATURE_HEADER))

    async def _invoke(
        self, service: str, handler: str, *, digest: str | None, scope: _Message, receive: _Receive, send: _Send
    ) -> None:
        if self.inner.stopping:
            text = _error(503, "the endpoint is shutting down")
            await _answer(send, 503, text, "application/json", more=[(b"retry-after", b"1")])
            return
        try:
            version = body_version(_header(scope, VERSION_HEADER))
            body = await _read(receive)
            if body is None:
                return
            if digest is not None and self.inner.identity is not None:
                await self.inner.identity.check_body(digest, body)
            attempt = asyncio.ensure_future(self.inner.invoke(service, handler, body, version))
            gone = asyncio.ensure_future(_disconnected(receive))
            try:
                await asyncio.wait((attempt, gone), return_when=asyncio.FIRST_COMPLETED)
            finally:
                gone.cancel()
                if not attempt.done():
                    attempt.cancel()  # The node is gone, so nothing can take its frames.
                await asyncio.gather(attempt, gone, return_exceptions=True)
            if attempt.cancelled():
                return
            answer = attempt.result()
        except SignatureRefused as refused:
            await _answer_refusal(send, refused)
        except ProtocolError as error:
            await _answer(send, 400, _error(400, str(error)), "application/json")
        except Superseded:
            newer = "a newer attempt of this invocation runs here"
            await _answer(send, 409, _error(409, newer), "application/json")
        else:
            await _answer(send, 200, answer, MEDIA_TYPE, more=[(VERSION_HEADER.encode(), str(version).encode())])

    # -- stream

    async def _websocket(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        message = await receive()
        assert message["type"] == "websocket.connect"
        if is_from_page(_header(scope, ORIGIN_HEADER), _header(scope, SITE_HEADER)):
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": PAGE_REFUSED[:120]})
            return
        try:
            self._check(scope, "GET")
        except SignatureRefused as refused:
            await _deny(scope, send, refused)
            return
        try:
            version = stream_version(_header(scope, VERSION_HEADER), _header(scope, HIGHEST_HEADER))
        except ProtocolError as error:
            logger.error("a stream was refused: %s", error)
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": str(error)[:120]})
            return
        if self.inner.stopping or not scope["path"].endswith("/stream"):
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
            return
        headers: dict[str, object] = {VERSION_HEADER: version, MESSAGE_BYTES_HEADER: self.message_bytes_max}
        lifeline = Lifeline.of(_transport(scope, receive))
        if lifeline is not None:
            headers[HEARTBEAT_HEADER] = "thread"
        pairs = [(name.encode(), str(value).encode()) for name, value in headers.items()]
        try:
            await send({"type": "websocket.accept", "headers": pairs})
        except BaseException:
            if lifeline is not None:
                lifeline.close()
            raise
        self.inner.watchdog.enter(lifeline)
        try:
            await self._stream(Stream(self.inner, _writer(send, lifeline), version=version), receive, send)
        finally:
            self.inner.watchdog.leave(lifeline)

    async def _stream(self, stream: Stream, receive: _Receive, send: _Send) -> None:
        writer = asyncio.ensure_future(stream.run())
        reader: asyncio.Future[_Message] | None = None
        try:
            while True:
                reader = asyncio.ensure_future(receive())
                await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
                if writer.done():  # A stream whose attempts have ended must not look alive to its node.
                    with contextlib.suppress(Exception):
                        await send({"type": "websocket.close", "code": _GOING_AWAY})
                    break
                message = reader.result()
                if message["type"] == "websocket.disconnect":
                    break
                data = message.get("bytes")
                if data is None:
                    raise ProtocolError("messages must be binary")
                stream.receive(data)
        except ProtocolError as error:
            logger.error("a node broke the protocol: %s", error)
            stream.close()
            # The connection may already be closed; each server reports that differently.
            with contextlib.suppress(Exception):
                await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": str(error)[:120]})
        finally:
            stream.close()
            writer.cancel()
            if reader is not None:
                reader.cancel()
            await asyncio.gather(writer, *([reader] if reader is not None else []), return_exceptions=True)


def endpoint(
    services: Iterable[AnyService],
    *,
    suspend_after: float = 1.0,
    message_bytes_max: int = MESSAGE_BYTES_MAX,
    identity_keys: Iterable[str] | None = None,
    identity_audience: Iterable[str] | None = None,
) -> AsgiEndpoint:
    """The services as an ASGI application::

        app = endpoint([trips, counter])              # uvicorn module:app
        fastapi_app.mount("/holdfast", endpoint([trips]))     # register http://host/holdfast

    Servers limit the size of WebSocket messages, and an application cannot find out how. Set `message_bytes_max` if
    your server accepts less than 16 MiB, the default of uvicorn and hypercorn. Larger values are sent in pieces of that
    size.

    `identity_keys` and `identity_audience` are those of `serve`: requests that the cluster did not sign are refused.
    """
    if message_bytes_max < MESSAGE_BYTES_LEAST:
        raise ValueError(f"message_bytes_max must be at least {MESSAGE_BYTES_LEAST}")
    inner = Endpoint(services, suspend_after=suspend_after, identity=load_identity(identity_keys, identity_audience))
    return AsgiEndpoint(inner, min(message_bytes_max, BATCH_BYTES_MAX))


def _transport(scope: _Message, receive: _Receive) -> asyncio.Transport | None:
    """The connection under a WebSocket, for the watchdog's signs of life. ASGI hides it, but uvicorn's `receive` is a method
    of the protocol that owns it. None for other servers, and if something in between wraps `receive`."""
    owner = getattr(receive, "__self__", None)
    if not type(owner).__module__.startswith("uvicorn.protocols.websockets.") or scope.get("http_version") != "1.1":
        return None
    transport: asyncio.Transport | None = getattr(owner, "transport", None)
    return transport if hasattr(transport, "get_write_buffer_size") else None


def _is_rebound(scope: _Message) -> bool:
    """Whether a browser asks a loopback address for another host. An application does not know where its server listens: a
    proxy on this machine may pass on the host that its clients asked for. So this concerns browsers only."""
    server = scope.get("server")
    if not server or not isinstance(server[0], str) or not is_loopback_host(server[0]):
        return False
    if not is_from_browser(_header(scope, "user-agent"), _header(scope, "accept-language")):
        return False
    return is_for_another_host(_header(scope, "host"))


def _writer(send: _Send, lifeline: Lifeline | None) -> Callable[[bytes], Coroutine[Any, Any, None]]:
    async def write(data: bytes) -> None:
        await send({"type": "websocket.send", "bytes": data})

    async def write_alone(data: bytes) -> None:
        assert lifeline is not None
        with lifeline.lock:
            await write(data)

    return write if lifeline is None else write_alone


def _header(scope: _Message, name: str) -> str | None:
    wanted = name.encode()
    for key, value in scope["headers"]:
        if key.lower() == wanted:
            text: str = value.decode("latin-1")
            return text
    return None


async def _read(receive: _Receive) -> bytes | None:
    """The body; None if the client went away."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        size += len(part)
        if size > BATCH_BYTES_MAX:
            raise ProtocolError(f"the body must have at most {BATCH_BYTES_MAX} bytes")
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)


async def _disconnected(receive: _Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _error(status: int, message: str) -> bytes:
    return json.dumps({"code": status, "message": message}).encode()


async def _answer_refusal(send: _Send, refused: SignatureRefused) -> None:
    more = [(name.lower().encode(), value.encode()) for name, value in refused.headers.items()]
    await _answer(send, refused.status, _error(refused.status, str(refused)), "application/json", more=more)


async def _deny(scope: _Message, send: _Send, refused: SignatureRefused) -> None:
    """A WebSocket, with the reason if the server can answer with a response (ASGI's websocket.http.response)."""
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": str(refused)[:120]})
        return
    headers = [(name.lower().encode(), value.encode()) for name, value in refused.headers.items()]
    body = _error(refused.status, str(refused))
    headers += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "websocket.http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body})


async def _answer(
    send: _Send, status: int, body: bytes, media_type: str, *, more: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    headers = [
        (b"content-type", media_type.encode()),
        (b"content-length", str(len(body)).encode()),
        (HIGHEST_HEADER.encode(), str(VERSION).encode()),
        *more,
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
