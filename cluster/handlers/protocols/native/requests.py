"""Request and response instead of a stream: one POST per attempt, for serverless platforms and plain HTTP servers.

The request carries the whole journal, the response all that the attempt did until it had to wait. Nothing can be told to the
attempt in between, and nothing needs to be: what completes meanwhile is in the journal of the next one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from email.utils import parsedate_to_datetime
from typing import Any, Final
from urllib.parse import quote

import aiohttp

from holdfast.cluster.handlers.attempts import Attempt, Opening
from holdfast.cluster.handlers.dispatch import Station
from holdfast.cluster.handlers.protocols.native.deferred import Deferred, encode
from holdfast.cluster.handlers.protocols.native.hearing import Hearing
from holdfast.cluster.handlers.protocols.native.opening import frames_of
from holdfast.cluster.handlers.protocols.native.translate import LAST
from holdfast.cluster.values.shared_store import StoreDown, ValueLost
from holdfast.sdk.frames import (
    BATCH_BYTES_MAX,
    HIGHEST_HEADER,
    TO_NODE,
    VERSION,
    VERSION_HEADER,
    VERSIONS,
    Began,
    Blocked,
    Credit,
    Goaway,
    Journal,
    Piece,
    Start,
    choose_version,
    decode_slices,
    encode_batch,
    read_version,
)
from holdfast.sdk.journal import ProtocolError, cut_text
from holdfast.statemachine.meta import Deployment

logger = logging.getLogger(__name__)

CONTENT_TYPE: Final = "application/x-msgpack"
RETRY_AFTER_S_MAX: Final = 300.0
#: Of a batch around the journal: names, eager state.
HEAD_BYTES: Final = 1024 * 1024
#: Of the attempts of one deployment, so many may have large values in their journals at a time: a request carries all of it.
LARGE_MAX: Final = 8


class Requests:
    """Carries attempts to one deployment as requests."""

    def __init__(self, endpoint: Station, deployment: Deployment) -> None:
        self.attempts: dict[bytes, Attempt] = {}
        self._endpoint = endpoint
        self._invoker = endpoint.invoker
        self._uri = deployment.uri
        #: Of the protocol: as the endpoint was registered, and from its first answer on, as it says.
        self.version = choose_version(deployment.protocol[0], deployment.protocol[1])
        self.drains = False
        self._hearing = Hearing(endpoint.invoker)
        self._tasks: dict[Attempt, asyncio.Task[None]] = {}
        self._large = asyncio.Semaphore(LARGE_MAX)

    @property
    def connected(self) -> bool:
        return False

    @property
    def attempts_max(self) -> int:
        limits = self._invoker.limits
        return min(limits.requested, limits.streamed)

    @property
    def can_start(self) -> bool:
        return not self.drains and self._endpoint.may_try

    def begin(self, attempt: Attempt, opening: Opening) -> None:
        self.attempts[attempt.id] = attempt
        frames = frames_of(attempt, opening)
        size = sum(frame.size for frame in frames if isinstance(frame, Deferred))
        plain = [frame.frame if isinstance(frame, Deferred) else frame for frame in frames]
        start = plain[0]
        assert type(start) is Start
        if len(plain) > 1:
            rest = [step for frame in plain[1:] if type(frame) is Journal for step in frame.journal]
            start = start._replace(journal=start.journal + rest, more=False)
        self._tasks[attempt] = asyncio.get_running_loop().create_task(self._run(attempt, start, size))
        self._endpoint.expect_trust(attempt)  # Nothing tells when it begins.

    def abort(self, attempt: Attempt, reason: str) -> None:
        task = self._tasks.get(attempt)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    # Nobody is there to be told the rest, and it can wait: it is in the journal of the next attempt.

    def acknowledge(self, attempt: Attempt) -> None: ...

    def complete(self, attempt: Attempt, step: int, order: int, outcome: list[Any]) -> None: ...

    def retry(self, attempt: Attempt, step: int) -> None: ...

    def cancelled(self, attempt: Attempt) -> None: ...

    def suspend(self, attempt: Attempt) -> None: ...

    def drain(self) -> None:
        """Take no new attempts; those that run end as requests."""
        self.drains = True
        self._endpoint.drain(self)
        if not self.attempts:
            self._endpoint.gone(self)

    def let_go(self, attempt: Attempt) -> None:
        if self.attempts.get(attempt.id) is attempt:
            del self.attempts[attempt.id]
            self._endpoint.let_go(attempt)
            if self.drains and not self.attempts:
                self._endpoint.gone(self)

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
                    message = await encode([whole], self._gone, attempt.version)
                    if message is not None:
                        await self._request(attempt, start, message)
            else:
                await self._request(attempt, start, encode_batch([start], attempt.version))
        except (StoreDown, ValueLost) as error:
            self._invoker.unreadable(attempt, error)
        except ProtocolError as error:
            self._invoker.blame(attempt, f"the endpoint does not speak the protocol: {error}")
        except TimeoutError:
            self._invoker.fail(attempt, [1, 504, "the handler did not answer in time", "Timeout"])
        except aiohttp.ClientConnectorError as error:
            self._endpoint.back_off(f"{self._uri}: {error}")
            self._invoker.lost(attempt, "the endpoint cannot be reached")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            why = f"{self._uri}: {error or type(error).__name__}"
            self._endpoint.back_off(why)
            attempt.begun = True
            self._invoker.crashed(attempt, why)
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
                    VERSION_HEADER: str(attempt.version),
                    HIGHEST_HEADER: str(VERSION),
                },
                allow_redirects=False,
            ) as response,
        ):
            body = await _read(response)
            highest = read_version(response.headers.get(HIGHEST_HEADER), VERSIONS[0])
            if response.status in (200, 400):
                self.version = choose_version(min(highest, VERSIONS[0]), highest)
            if response.status == 400 and self.version < attempt.version:
                # Registered with a later SDK than answers now: the next attempt speaks as it does.
                self._invoker.lost(attempt, f"the endpoint speaks version {self.version} of the protocol")
                return
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
        await self._take_in(attempt, body)

    async def _take_in(self, attempt: Attempt, body: bytes) -> None:
        """Slice by slice: a response of many frames must not keep the loop from everything else."""
        ended = False
        for frames in decode_slices(body, TO_NODE, attempt.version):
            for frame in frames:
                if isinstance(frame, Credit | Goaway | Piece | Began | Blocked):
                    raise ProtocolError(f"{type(frame).__name__} belongs to a stream")
                if (frame.invocation, frame.epoch) != (attempt.id, attempt.epoch):
                    raise ProtocolError("a response speaks of the attempt that it was asked about")
                if ended:
                    raise ProtocolError(_LAST_OF_A_RESPONSE)
                ended = type(frame) in LAST
            self._hearing.take(self, frames)
            if attempt.over and not ended:
                return
            await asyncio.sleep(0)
        if not ended:
            raise ProtocolError(_LAST_OF_A_RESPONSE)
        self._endpoint.is_well()


_LAST_OF_A_RESPONSE: Final = "the last frame of a response, and no other, is Waiting, Output or Error"


async def _read(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > BATCH_BYTES_MAX:
            raise ProtocolError(f"a response of more than {BATCH_BYTES_MAX} bytes")
    return bytes(body)


def _bad_status(url: str, status: int, body: bytes) -> list[Any]:
    text = body[:500].decode(errors="replace").strip()
    if 300 <= status < 400:
        text = "redirects are not followed; register the address itself"
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
