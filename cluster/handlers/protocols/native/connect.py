"""Connecting to an endpoint: a stream if it offers one, or else one request per attempt."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

import aiohttp

from holdfast.cluster.handlers.attempts import Carrier
from holdfast.cluster.handlers.dispatch import Station
from holdfast.cluster.handlers.protocols.interface import CannotConnect
from holdfast.cluster.handlers.protocols.native.dialing import explain
from holdfast.cluster.handlers.protocols.native.liveness import Liveness, give_up_after
from holdfast.cluster.handlers.protocols.native.requests import Requests, retry_after_s
from holdfast.cluster.handlers.protocols.native.settings import Settings
from holdfast.cluster.handlers.protocols.native.signing import UNTRUSTED_S, Signer, refusal_in
from holdfast.cluster.handlers.protocols.native.stream import Stream
from holdfast.sdk.frames import (
    BATCH_BYTES_MAX,
    HEARTBEAT_HEADER,
    HIGHEST_HEADER,
    MESSAGE_BYTES_HEADER,
    MESSAGE_BYTES_LEAST,
    VERSION,
    VERSION_HEADER,
    VERSIONS,
    choose_version,
    read_version,
)
from holdfast.sdk.journal import ProtocolError
from holdfast.statemachine.meta import Deployment

logger = logging.getLogger(__name__)

#: How long the size of a message that was refused is remembered.
REFUSED_S: Final = 300.0
#: Answers of an endpoint that offers a stream, but not now.
_NOT_NOW: Final = frozenset({429, 502, 503, 504})


class NativeConnector:
    """Connects to one endpoint. It remembers across streams which message size the endpoint's server refused."""

    def __init__(
        self,
        station: Station,
        session: Callable[[str], aiohttp.ClientSession],
        signer: Signer,
        *,
        settings: Settings,
        connect_s: float,
    ) -> None:
        self._station = station
        self._session = session
        self._signer = signer
        self._settings = settings
        self._connect_s = connect_s
        self._refused_bytes = 0  # The size of a message that was refused,
        self._refused_at = 0.0  # and when.
        self._loop = asyncio.get_running_loop()

    async def connect(self, deployment: Deployment) -> Carrier:
        if "stream" not in deployment.modes:
            return self._requests(deployment)
        try:
            return await self._open(deployment)
        except aiohttp.WSServerHandshakeError as error:
            refused = refusal_in(error.status, error.headers)
            if refused is not None:
                raise CannotConnect(refused, UNTRUSTED_S) from None
            where = f"{deployment.uri}/stream answered {error.status}"
            if "request-response" in deployment.modes and error.status not in _NOT_NOW:
                return self._fall_back(deployment, where)
            after_s = retry_after_s(error.headers.get("Retry-After") if error.headers else None)
            raise CannotConnect(where, after_s) from None
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, ProtocolError) as error:
            raise CannotConnect(f"{deployment.uri}/stream: {explain(error)}") from None

    def _fall_back(self, deployment: Deployment, why: str) -> Requests:
        """Attempts that run as requests end as requests. After a while the next ones may be streamed."""
        logger.warning("deployment %s: %s; using one request per attempt", self._station.deployment, why)
        requests = self._requests(deployment)
        self._loop.call_later(self._settings.fallback_s, requests.drain)
        return requests

    def _requests(self, deployment: Deployment) -> Requests:
        return Requests(
            self._station, deployment, self._session, self._signer, attempts_max=self._settings.requests_max
        )

    async def _open(self, deployment: Deployment) -> Stream:
        settings = self._settings
        async with asyncio.timeout(self._connect_s):
            socket = await self._session(deployment.uri).ws_connect(
                f"{deployment.uri}/stream",
                # An endpoint before version 2 knows only the first header, and answers without one.
                headers={
                    VERSION_HEADER: str(VERSIONS[0]),
                    HIGHEST_HEADER: str(VERSION),
                    **self._signer.headers("GET", deployment.uri, "/stream"),
                },
                heartbeat=settings.prompt_s,
                autoping=False,
                max_msg_size=BATCH_BYTES_MAX,
                compress=0,
                autoclose=False,
            )
        try:
            answer = socket._response.headers
            spoken = read_version(answer.get(VERSION_HEADER), VERSIONS[0])
            version = choose_version(spoken, spoken)
            message_bytes_max = min(_read_bytes(answer.get(MESSAGE_BYTES_HEADER)), self._message_bytes_max(version))
        except ProtocolError:
            await socket.close()
            raise
        is_prompt = answer.get(HEARTBEAT_HEADER) == "thread"
        give_up_after(socket, settings.silence_s if is_prompt else max(settings.patience_s, settings.silence_s))
        liveness = Liveness(self._station, socket, settings.silence_s)
        stream = Stream(
            self._station,
            socket,
            version,
            message_bytes_max=message_bytes_max,
            liveness=liveness,
            refused=self._refused,
        )
        stream.run()
        return stream

    def _refused(self, size: int) -> None:
        """The endpoint's server, or a proxy in front of it, refuses messages of this size."""
        self._refused_bytes = size
        self._refused_at = self._loop.time()

    def _message_bytes_max(self, version: int) -> int:
        """The message size to use, based on recent refusals. They expire, because an operator may raise the limit."""
        if not self._refused_bytes or self._loop.time() - self._refused_at > REFUSED_S:
            return BATCH_BYTES_MAX
        # Pieces can be much smaller. Without pieces, a message is refused only if it certainly does not fit.
        return max(self._refused_bytes // 2 if version > 1 else self._refused_bytes - 1, MESSAGE_BYTES_LEAST)


def _read_bytes(text: str | None) -> int:
    """The largest message that an endpoint says it accepts. Raises ProtocolError."""
    if text is None:
        return BATCH_BYTES_MAX
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) >= MESSAGE_BYTES_LEAST):
        raise ProtocolError(
            f"{MESSAGE_BYTES_HEADER} must be a number of at least {MESSAGE_BYTES_LEAST}, not {text!r:.20}"
        )
    return min(int(text), BATCH_BYTES_MAX)
