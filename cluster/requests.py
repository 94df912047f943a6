"""Request and response instead of a stream: one POST per attempt, for serverless platforms and plain HTTP servers.

The request carries the whole journal, the response all that the attempt did until it had to wait. Nothing can be told to the
attempt in between, and nothing needs to be: what completes meanwhile is in the journal of the next one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import aiohttp

from holdfast.cluster.attempts import Attempt, Deferred, encode
from holdfast.cluster.frames import LAST
from holdfast.cluster.objects import StoreDown, ValueLost
from holdfast.sdk.protocol import (
    BATCH_BYTES_MAX,
    TO_NODE,
    VERSION,
    Abort,
    Credit,
    Frame,
    Goaway,
    Journal,
    ProtocolError,
    Start,
    cut_text,
    decode_batch,
    encode_batch,
)

if TYPE_CHECKING:
    from holdfast.cluster.endpoint import Endpoint

logger = logging.getLogger(__name__)

CONTENT_TYPE: Final = "application/x-msgpack"
RETRY_AFTER_S_MAX: Final = 300.0
#: Of a batch around the journal: names, eager state.
HEAD_BYTES: Final = 1024 * 1024
#: Of the attempts of one deployment, so many may have large values in their journals at a time: a request carries all of it.
LARGE_MAX: Final = 8


class Requests:
    """Carries attempts to one deployment as requests."""

    def __init__(self, endpoint: Endpoint, uri: str) -> None:
        self.attempts: dict[bytes, Attempt] = {}
        self._endpoint = endpoint
        self._invoker = endpoint.invoker
        self._uri = uri
        self._tasks: dict[Attempt, asyncio.Task[None]] = {}
        self._large = asyncio.Semaphore(LARGE_MAX)

    def begin(self, attempt: Attempt, frames: list[Frame | Deferred]) -> None:
        self.attempts[attempt.id] = attempt
        size = sum(frame.size for frame in frames if isinstance(frame, Deferred))
        plain = [frame.frame if isinstance(frame, Deferred) else frame for frame in frames]
        start = plain[0]
        assert type(start) is Start
        if len(plain) > 1:
            rest = [step for frame in plain[1:] if type(frame) is Journal for step in frame.journal]
            start = start._replace(journal=start.journal + rest, more=False)
        self._tasks[attempt] = asyncio.get_running_loop().create_task(self._run(attempt, start, size))

    def send(self, frame: Frame | Deferred) -> None:
        """All but the end of an attempt can wait: it is in the journal."""
        if type(frame) is Abort:
            attempt = self.attempts.get(frame.invocation)
            task = self._tasks.get(attempt) if attempt is not None and attempt.epoch == frame.epoch else None
            if task is not None and task is not asyncio.current_task():
                task.cancel()

    def acknowledge(self, attempt: Attempt) -> None:
        """Nobody is there to be told."""

    def let_go(self, attempt: Attempt) -> None:
        if self.attempts.get(attempt.id) is attempt:
            del self.attempts[attempt.id]
            self._endpoint.let_go()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, attempt: Attempt, start: Start, large: int) -> None:
        try:
            if large > BATCH_BYTES_MAX - HEAD_BYTES:
                text = (
                    f"its journal has {large} bytes, and an endpoint without a stream takes at most "
                    f"{BATCH_BYTES_MAX - HEAD_BYTES} at once: offer a stream, or keep large values elsewhere"
                )
                self._invoker.fail(attempt, [1, 413, text, "TooLarge"], pause=True)
            elif large:
                async with self._large:
                    whole = Deferred(attempt, start, large)
                    await whole.fetch(self._invoker.objects)
                    message = await encode([whole], self._gone)
                    if message is not None:
                        await self._request(attempt, start, message)
            else:
                await self._request(attempt, start, encode_batch([start]))
        except (StoreDown, ValueLost) as error:
            self._invoker.unreadable(attempt, error)
        except ProtocolError as error:
            text = f"the endpoint does not speak the protocol: {error}"
            logger.error("deployment %s: %s", self._endpoint.deployment, text)
            self._invoker.fail(attempt, [1, 500, text, "ProtocolError"])
        except TimeoutError:
            self._invoker.fail(attempt, [1, 504, "the handler did not answer in time", "Timeout"])
        except (aiohttp.ClientError, OSError, ValueError) as error:
            self._endpoint.back_off(f"{self._uri}: {error or type(error).__name__}")
            self._invoker.lost(attempt, "the endpoint cannot be reached")
        except Exception:
            logger.exception("deployment %s: a request ended by an error of this node", self._endpoint.deployment)
            self._invoker.lost(attempt, "an error of this node")
        finally:
            self._tasks.pop(attempt, None)
            self.let_go(attempt)

    def _gone(self, attempt: Attempt, error: Exception) -> None:
        logger.error("deployment %s: %s", self._endpoint.deployment, error)
        self._invoker.fail(attempt, [1, 500, str(error), "ValueGone"])

    async def _request(self, attempt: Attempt, start: Start, message: bytes) -> None:
        options = attempt.target.options
        url = f"{self._uri}/invoke/{quote(start.service, safe='')}/{quote(start.handler, safe='')}"
        seconds = (options.inactivity_ms + options.abort_ms) / 1000
        async with (
            asyncio.timeout(seconds),
            self._invoker.session.post(
                url,
                data=message,
                headers={
                    "Content-Type": CONTENT_TYPE,
                    "Accept": CONTENT_TYPE,
                    "Accept-Encoding": "identity",
                    "x-holdfast-protocol": str(VERSION),
                },
                allow_redirects=False,
            ) as response,
        ):
            body = await _read(response)
            if response.status in (429, 503):
                self._endpoint.back_off(
                    f"{url} answered {response.status}", retry_after_s(response.headers.get("Retry-After"))
                )
                self._invoker.lost(attempt, "the endpoint wants to be left alone")
                return
            if response.status != 200:
                self._invoker.fail(attempt, _bad_status(url, response.status, body))
                return
        if attempt.over:
            return
        frames = decode_batch(body, TO_NODE)
        if not frames or type(frames[-1]) not in LAST or any(type(frame) in LAST for frame in frames[:-1]):
            raise ProtocolError("the last frame of a response, and no other, is Waiting, Output or Error")
        for frame in frames:
            if isinstance(frame, Credit | Goaway):
                raise ProtocolError(f"{type(frame).__name__} belongs to a stream")
            if (frame.invocation, frame.epoch) != (attempt.id, attempt.epoch):
                raise ProtocolError("a response speaks of the attempt that it was asked about")
        self._endpoint.is_well()
        self._invoker.receive(self, frames)


async def _read(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > BATCH_BYTES_MAX:
            raise ProtocolError(f"a response of more than {BATCH_BYTES_MAX} bytes")
    return bytes(body)


def _bad_status(url: str, status: int, body: bytes) -> list[Any]:
    text = body[:500].decode(errors="replace").strip()
    return [1, 502, cut_text(f"{url} answered {status}" + (f": {text}" if text else "")), "EndpointError"]


def retry_after_s(text: str | None) -> float:
    """What a Retry-After header asks for, in seconds from now, within reason; 0: nothing that can be understood."""
    if not text:
        return 0.0
    try:
        seconds = float(int(text))
    except ValueError:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - time.time()
        except (ValueError, OverflowError):
            return 0.0
    return min(max(seconds, 0.0), RETRY_AFTER_S_MAX)
