"""Request and response instead of a stream: one POST per attempt, for serverless platforms and plain HTTP servers.

The request carries the whole journal, and the response everything that the attempt did until it had to wait. Nothing
can be sent to the attempt in between, and nothing needs to be: steps that complete meanwhile are in the journal of the
next attempt.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import Any, Final
from urllib.parse import quote

import aiohttp

from holdfast.cluster.addresses import AddressRefused
from holdfast.cluster.handlers.attempts import Attempt, Opening, Stall
from holdfast.cluster.handlers.dispatch import Station
from holdfast.cluster.handlers.large import LargeOutcome, LargeSteps
from holdfast.cluster.handlers.protocols.native.deferred import encoded
from holdfast.cluster.handlers.protocols.native.dialing import explain
from holdfast.cluster.handlers.protocols.native.hearing import Hearing
from holdfast.cluster.handlers.protocols.native.opening import start_of
from holdfast.cluster.handlers.protocols.native.session import Session
from holdfast.cluster.handlers.protocols.native.signing import UNTRUSTED_S, Signer, refusal_in
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
    Piece,
    Start,
    choose_version,
    decode_slices,
    encode_batch,
    read_version,
)
from holdfast.sdk.ids import InvocationId
from holdfast.sdk.journal import ProtocolError, cut_text
from holdfast.sdk.signatures import digest_of
from holdfast.statemachine import queries
from holdfast.statemachine.meta import Deployment
from holdfast.statemachine.outcomes import failed

logger = logging.getLogger(__name__)

CONTENT_TYPE: Final = "application/x-msgpack"
RETRY_AFTER_S_MAX: Final = 300.0
#: Overhead of a batch around the journal: names, eager state.
HEAD_BYTES: Final = 1024 * 1024


class Requests:
    """Carries attempts to one deployment as requests."""

    def __init__(
        self,
        endpoint: Station,
        deployment: Deployment,
        session: Callable[[str], aiohttp.ClientSession],
        signer: Signer,
        *,
        attempts_max: int,
    ) -> None:
        self.attempts: dict[InvocationId, Attempt] = {}
        self._endpoint = endpoint
        self._invoker = endpoint.invoker
        self._uri = deployment.uri
        self._session = session
        self._signer = signer
        self._attempts_max = attempts_max
        #: The protocol version: at first as registered, and after the first answer as the endpoint says.
        self.version = choose_version(deployment.protocol[0], deployment.protocol[1])
        self.drains = False
        self._hearing = Hearing(endpoint.invoker)
        self._tasks: dict[Attempt, asyncio.Task[None]] = {}

    @property
    def connected(self) -> bool:
        return False

    @property
    def stall(self) -> Stall | None:
        return None

    @property
    def attempts_max(self) -> int:
        return min(self._attempts_max, self._invoker.limits.attempts)

    @property
    def can_start(self) -> bool:
        return not self.drains and self._endpoint.may_try

    def begin(self, attempt: Attempt, opening: Opening) -> None:
        self.attempts[attempt.id] = attempt
        attempt.session = Session(self.version)
        start = start_of(attempt, opening, opening.steps, more=False)
        large = LargeSteps(attempt.partition, opening.steps, sum(opening.sizes)) if opening.is_large else None
        self._tasks[attempt] = asyncio.get_running_loop().create_task(self._run(attempt, start, large))
        self._endpoint.expect_trust(attempt)  # There is no signal when it begins.

    def abort(self, attempt: Attempt, reason: str) -> None:
        task = self._tasks.get(attempt)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    # The rest cannot be sent, and can wait: it is in the journal of the next attempt.

    def acknowledge(self, attempt: Attempt) -> None: ...

    def complete(self, attempt: Attempt, step: int, order: int, outcome: list[Any] | LargeOutcome) -> None: ...

    def retry(self, attempt: Attempt, step: int) -> None: ...

    def cancelled(self, attempt: Attempt) -> None: ...

    def suspend(self, attempt: Attempt) -> None: ...

    def owes(self, attempt: Attempt) -> bool:
        return False

    def drain(self) -> None:
        """Accept no new attempts; the running ones end as requests."""
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

    async def _run(self, attempt: Attempt, start: Start, large: LargeSteps | None) -> None:
        version = attempt.session.version
        try:
            if large is None:
                await self._request(attempt, start, encode_batch([start], version))
            elif large.size > BATCH_BYTES_MAX - HEAD_BYTES:
                text = (
                    f"its journal has {large.size} bytes, but an endpoint without a stream accepts at most "
                    f"{BATCH_BYTES_MAX - HEAD_BYTES}: offer a stream, or keep large values elsewhere"
                )
                self._invoker.fail(attempt, failed(413, text, "TooLarge"), pause=True)
            else:
                async with self._endpoint.loads.loaded(large) as steps:
                    message = await encoded([start._replace(journal=steps)], version, size=large.size)
                    del steps
                    await self._request(attempt, start, message)
        except (StoreDown, ValueLost, queries.Gone) as error:
            self._invoker.unreadable(attempt, error)
        except ProtocolError as error:
            self._invoker.blame(attempt, f"the endpoint violates the protocol: {error}")
        except TimeoutError:
            self._invoker.fail(attempt, failed(504, "the handler did not answer in time", "Timeout"))
        except (aiohttp.ClientConnectorError, AddressRefused) as error:
            self._endpoint.back_off(f"{self._uri}: {explain(error)}")
            self._invoker.lost(attempt, "the endpoint cannot be reached")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            why = f"{self._uri}: {error or type(error).__name__}"
            self._endpoint.back_off(why)
            attempt.begun = True
            self._invoker.crashed(attempt, why)
        except Exception:
            logger.exception("deployment %s: internal error, a request failed", self._endpoint.deployment)
            self._invoker.lost(attempt, "internal error of this node")
        finally:
            self._tasks.pop(attempt, None)
            self.let_go(attempt)

    async def _request(self, attempt: Attempt, start: Start, message: bytes) -> None:
        options, version = attempt.target.options, attempt.session.version
        path = f"/invoke/{quote(start.service, safe='')}/{quote(start.handler, safe='')}"
        url = self._uri + path
        seconds = (options.inactivity_ms + options.abort_ms) / 1000
        async with (
            asyncio.timeout(seconds),
            self._session(self._uri).post(
                url,
                data=message,
                headers={
                    "Content-Type": CONTENT_TYPE,
                    "Accept": CONTENT_TYPE,
                    "Accept-Encoding": "identity",
                    VERSION_HEADER: str(version),
                    HIGHEST_HEADER: str(VERSION),
                    **self._signer.headers("POST", self._uri, path, await digest_of(message)),
                },
                allow_redirects=False,
            ) as response,
        ):
            refused = refusal_in(response.status, response.headers)
            if refused is not None:
                self._endpoint.back_off(refused, UNTRUSTED_S)
                self._invoker.lost(attempt, refused)
                return
            body = await _read(response)
            highest = read_version(response.headers.get(HIGHEST_HEADER), VERSIONS[0])
            if response.status in (200, 400):
                self.version = choose_version(min(highest, VERSIONS[0]), highest)
            if response.status == 400 and self.version < version:
                # The endpoint was registered with a newer SDK than it runs now. The next attempt uses the older
                # version.
                self._invoker.lost(attempt, f"the endpoint speaks version {self.version} of the protocol")
                return
            if response.status in (429, 503):
                self._endpoint.back_off(
                    f"{url} answered {response.status}", retry_after_s(response.headers.get("Retry-After"))
                )
                self._invoker.lost(attempt, "the endpoint asked for a pause")
                return
            if response.status != 200:
                self._invoker.fail(attempt, _bad_status(url, response.status, body))
                return
        if attempt.over:
            return
        await self._take_in(attempt, body)

    async def _take_in(self, attempt: Attempt, body: bytes) -> None:
        """Process a response in slices, so that many frames do not block the event loop."""
        ended = False
        for frames in decode_slices(body, TO_NODE, attempt.session.version):
            for frame in frames:
                if isinstance(frame, Credit | Goaway | Piece | Began | Blocked):
                    raise ProtocolError(f"{type(frame).__name__} belongs to a stream")
                if (frame.invocation, frame.epoch) != (attempt.id, attempt.epoch):
                    raise ProtocolError("a response must contain only frames of its own attempt")
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


_LAST_OF_A_RESPONSE: Final = "the last frame of a response, and no other, must be Waiting, Output or Error"


async def _read(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > BATCH_BYTES_MAX:
            raise ProtocolError(f"a response must have at most {BATCH_BYTES_MAX} bytes")
    return bytes(body)


def _bad_status(url: str, status: int, body: bytes) -> list[Any]:
    text = body[:500].decode(errors="replace").strip()
    if 300 <= status < 400:
        text = "redirects are not followed; register the final address"
    return failed(502, cut_text(f"{url} answered {status}" + (f": {text}" if text else "")), "EndpointError")


def retry_after_s(text: str | None) -> float:
    """The delay of a Retry-After header in seconds, bounded; 0 if it cannot be parsed."""
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
