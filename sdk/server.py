"""The built-in server: an endpoint on aiohttp, for processes that have no web server of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import time
from collections.abc import Iterable
from typing import Final
from urllib.parse import quote

from aiohttp import WSCloseCode, WSMsgType, web
from aiohttp.typedefs import Handler

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
    VERSION,
    VERSION_HEADER,
)
from holdfast.sdk.hosts import HOST_REFUSED, is_for_another_host, is_loopback_host
from holdfast.sdk.identity import SignatureRefused, load_identity, warn_if_open
from holdfast.sdk.journal import ProtocolError
from holdfast.sdk.loop import new_event_loop
from holdfast.sdk.signatures import SIGNATURE_HEADER, SIGNED_HEADER
from holdfast.sdk.watchdog import LATE_S, Lifeline

logger = logging.getLogger("holdfast.sdk")

PING_S: Final = 10.0  # A node that is silent for this long is pinged,
SILENCE_S: Final = 45.0  # and after this long it counts as gone.
_ENDPOINT: Final = web.AppKey("holdfast_endpoint", Endpoint)
#: The host that it listens on, if that is a loopback address and requests are not signed.
_LOOPBACK: Final = web.AppKey("holdfast_loopback", list[str])


def application(endpoint: Endpoint) -> web.Application:
    """The routes of an endpoint as an aiohttp application, to run or to mount as a sub-application."""
    app = web.Application(client_max_size=BATCH_BYTES_MAX, middlewares=[_refuse_pages])
    app[_ENDPOINT] = endpoint
    app[_LOOPBACK] = []
    app.router.add_get("/discover", _discover)
    app.router.add_get("/stream", _stream)
    app.router.add_post("/invoke/{service}/{handler}", _invoke)
    return app


def _check(request: web.Request, path: str) -> str | None:
    """That a node of the cluster sent it; before anything else of it is read. Raises SignatureRefused."""
    identity = request.app[_ENDPOINT].identity
    if identity is None:
        return None
    headers = request.headers
    return identity.check(request.method, path, headers.get(SIGNED_HEADER), headers.get(SIGNATURE_HEADER))


@web.middleware
async def _refuse_pages(request: web.Request, handler: Handler) -> web.StreamResponse:
    if is_from_page(request.headers.get(ORIGIN_HEADER), request.headers.get(SITE_HEADER)):
        return _refuse(403, PAGE_REFUSED)
    loopback = request.app[_LOOPBACK]
    if loopback and is_for_another_host(request.headers.get("Host"), loopback):
        return _refuse(403, HOST_REFUSED)
    return await handler(request)


async def _discover(request: web.Request) -> web.Response:
    try:
        _check(request, "/discover")
    except SignatureRefused as refused:
        return _refuse(refused.status, str(refused), refused.headers)
    return web.json_response(request.app[_ENDPOINT].manifest)


async def _invoke(request: web.Request) -> web.Response:
    endpoint = request.app[_ENDPOINT]
    service, handler = request.match_info["service"], request.match_info["handler"]
    try:
        digest = _check(request, f"/invoke/{quote(service, safe='')}/{quote(handler, safe='')}")
        if endpoint.stopping:
            return _refuse(503, "the endpoint is shutting down", {"Retry-After": "1"})
        version = body_version(request.headers.get(VERSION_HEADER))
        body = await request.read()
        if digest is not None and endpoint.identity is not None:
            await endpoint.identity.check_body(digest, body)
        answer = await endpoint.invoke(service, handler, body, version)
    except SignatureRefused as refused:
        return _refuse(refused.status, str(refused), refused.headers)
    except ProtocolError as error:
        return _refuse(400, str(error))
    except Superseded:
        return _refuse(409, "a newer attempt of this invocation runs here")
    headers = {VERSION_HEADER: str(version), HIGHEST_HEADER: str(VERSION)}
    return web.Response(body=answer, content_type=MEDIA_TYPE, headers=headers)


def _refuse(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        status=status,
        text=json.dumps({"code": status, "message": message}),
        content_type="application/json",
        headers={HIGHEST_HEADER: str(VERSION), **(headers or {})},
    )


async def _stream(request: web.Request) -> web.StreamResponse:
    endpoint = request.app[_ENDPOINT]
    try:
        _check(request, "/stream")
        if endpoint.stopping:
            return _refuse(503, "the endpoint is shutting down", {"Retry-After": "1"})
        version = stream_version(request.headers.get(VERSION_HEADER), request.headers.get(HIGHEST_HEADER))
    except SignatureRefused as refused:
        return _refuse(refused.status, str(refused), refused.headers)
    except ProtocolError as error:
        return _refuse(400, str(error))
    socket = web.WebSocketResponse(max_msg_size=BATCH_BYTES_MAX, autoping=False, compress=False)
    socket.headers[VERSION_HEADER] = str(version)
    socket.headers[MESSAGE_BYTES_HEADER] = str(BATCH_BYTES_MAX)
    lifeline = Lifeline.of(request.transport)
    if lifeline is not None:
        socket.headers[HEARTBEAT_HEADER] = "thread"
    try:
        await socket.prepare(request)
    except BaseException:
        if lifeline is not None:
            lifeline.close()
        raise

    async def write(data: bytes) -> None:
        if lifeline is None:
            await socket.send_bytes(data)
            return
        with lifeline.lock:
            await socket.send_bytes(data)

    stream = Stream(endpoint, write, version=version)
    endpoint.watchdog.enter(lifeline)
    writer = asyncio.create_task(_write(stream, socket))
    node = _Node(socket)
    listener = asyncio.create_task(node.listen())
    try:
        async for message in socket:
            node.heard()
            if message.type is WSMsgType.PING:
                await socket.pong(message.data)
            elif message.type is WSMsgType.BINARY:
                stream.receive(message.data)
            elif message.type is not WSMsgType.PONG:
                raise ProtocolError("messages must be binary")
    except ProtocolError as error:
        logger.error("a node broke the protocol: %s", error)
        await socket.close(code=WSCloseCode.POLICY_VIOLATION, message=str(error).encode()[:120])
    finally:
        endpoint.watchdog.leave(lifeline)
        stream.close()
        writer.cancel()
        listener.cancel()
        await asyncio.gather(writer, listener, return_exceptions=True)
    return socket


class _Node:
    """Monitors whether the node at the other end is alive. Time in which our own loop did not run does not count."""

    def __init__(self, socket: web.WebSocketResponse) -> None:
        self._socket = socket
        self._heard_at = time.monotonic()

    def heard(self) -> None:
        self._heard_at = time.monotonic()

    async def listen(self) -> None:
        while True:
            asked_at = time.monotonic()
            await asyncio.sleep(PING_S)
            now = time.monotonic()
            if now - asked_at > PING_S + LATE_S:
                self._heard_at = now
            elif now - self._heard_at > SILENCE_S:
                logger.warning("a node was silent for %.0f s: closing its stream", now - self._heard_at)
                await self._socket.close(code=WSCloseCode.GOING_AWAY)
                return
            if now - self._heard_at >= PING_S:
                with contextlib.suppress(ConnectionError, RuntimeError):
                    await self._socket.ping()


async def _write(stream: Stream, socket: web.WebSocketResponse) -> None:
    try:
        await stream.run()
    except (ConnectionError, RuntimeError) as error:  # RuntimeError: the socket was closed in between.
        logger.info("writing to a stream failed: %s", error)
    # A stream whose attempts have ended must not look alive to its node.
    await socket.close(code=WSCloseCode.GOING_AWAY)


class Server:
    """A running endpoint. `serve` creates one and waits; use this class in programs that do other things too::

    server = Server([trips])
    await server.start(port=9080)
    ...
    await server.stop()
    """

    def __init__(
        self,
        services: Iterable[AnyService] | Endpoint,
        *,
        suspend_after: float = 1.0,
        identity_keys: Iterable[str] | None = None,
        identity_audience: Iterable[str] | None = None,
    ) -> None:
        if isinstance(services, Endpoint):
            if identity_keys is not None or identity_audience is not None:
                raise ValueError("an Endpoint has its own identity: give identity_keys to it")
            self.endpoint = services
        else:
            identity = load_identity(identity_keys, identity_audience)
            self.endpoint = Endpoint(services, suspend_after=suspend_after, identity=identity)
        self.host = ""
        self.port = 0
        self._runner: web.AppRunner | None = None

    async def start(self, *, host: str = "127.0.0.1", port: int = 9080) -> None:
        """Listen. Port 0 means any free port; `port` has its number afterwards."""
        warn_if_open(host, self.endpoint.identity)
        app = application(self.endpoint)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except BaseException:
            await runner.cleanup()
            raise
        self._runner = runner
        self.host, self.port = runner.addresses[0][:2]
        if self.endpoint.identity is None and all(is_loopback_host(address[0]) for address in runner.addresses):
            app[_LOOPBACK].append(host.rstrip(".").lower())

    @property
    def uri(self) -> str:
        """The address at which a node reaches it: register this as a deployment."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    async def stop(self, grace: float = 10.0) -> None:
        """Finish or hand back running attempts, for at most `grace` seconds, and stop listening."""
        await self.endpoint.stop(grace)
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None


async def serve_async(
    services: Iterable[AnyService],
    *,
    host: str = "127.0.0.1",
    port: int = 9080,
    suspend_after: float = 1.0,
    grace: float = 10.0,
    stop: asyncio.Event | None = None,
    identity_keys: Iterable[str] | None = None,
    identity_audience: Iterable[str] | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT or `stop`; then finish or hand back running attempts."""
    server = Server(
        services, suspend_after=suspend_after, identity_keys=identity_keys, identity_audience=identity_audience
    )
    await server.start(host=host, port=port)
    logger.info("serving %s at %s", ", ".join(server.endpoint.services), server.uri)
    stop = stop or asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = []
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # not in the main thread
            loop.add_signal_handler(number, stop.set)
            signals.append(number)
    try:
        await stop.wait()
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
        await server.stop(grace)


def serve(
    services: Iterable[AnyService],
    *,
    host: str = "127.0.0.1",
    port: int = 9080,
    suspend_after: float = 1.0,
    grace: float = 10.0,
    identity_keys: Iterable[str] | None = None,
    identity_audience: Iterable[str] | None = None,
) -> None:
    """Run the services of this process until SIGTERM or Ctrl-C::

    if __name__ == "__main__":
        serve([trips, counter], port=9080)

    An attempt that only waits for `suspend_after` seconds is dropped from memory and started again by its node when
    there is something to do. On SIGTERM running attempts have `grace` seconds to finish; the rest is handed back.

    `identity_keys` are the public keys of the cluster (`holdfast identity show`): requests that it did not sign are refused.
    Default: those in HOLDFAST_IDENTITY_KEYS, separated by commas. `identity_audience` are the URIs at which the endpoint is
    registered (HOLDFAST_IDENTITY_AUDIENCE): requests that were signed for another endpoint of the cluster are refused, too.
    """
    serving = serve_async(
        services,
        host=host,
        port=port,
        suspend_after=suspend_after,
        grace=grace,
        identity_keys=identity_keys,
        identity_audience=identity_audience,
    )
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(serving)
