"""Sends notices to the receivers of webhooks: one line per webhook, so that a dead receiver holds up no other.

A receiver that fails is left alone for a while, longer after each failure. Every leadership of this node that has notices for
it waits meanwhile. Addresses are checked where each connection is made, and redirects are not followed, because whoever may
create a webhook must not reach through the nodes what only nodes can reach.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple

import aiohttp

from holdfast import __version__
from holdfast.cluster.addresses import Addresses
from holdfast.cluster.clock import Clock
from holdfast.cluster.handlers.protocols.native.dialing import Dialing, refusal
from holdfast.statemachine.webhooks import HookId, Webhook, Webhooks, name_of

logger = logging.getLogger(__name__)

#: A receiver must answer within this time.
ANSWER_S: Final = 10.0
#: Requests to one receiver at a time, from one node.
AT_A_TIME: Final = 4
BACKOFF_S: Final = 1.0
BACKOFF_S_MAX: Final = 300.0
_DOUBLINGS_MAX: Final = 20
_ERROR_LENGTH_MAX: Final = 300
#: Answers by which a receiver refuses an event although it works. Others may be different the next time.
_REFUSALS: Final = frozenset(range(400, 500)) - {401, 403, 404, 408, 425, 429}


class Sent(NamedTuple):
    """What became of one request."""

    status: int  # 0: there was no answer.
    error: str  # Empty: the receiver has taken the event.
    retry_after_s: float = 0.0

    @property
    def is_refused(self) -> bool:
        return self.status in _REFUSALS


class Line:
    """One webhook as this node reaches it."""

    def __init__(self, node: str, hook: HookId, clock: Clock) -> None:
        self._salt = node.encode() + hook
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._open = asyncio.Event()
        self._not_before = 0.0
        self.slots = asyncio.Semaphore(AT_A_TIME)
        self.delivered = 0
        self.failed = 0
        self.failures = 0  # Consecutive.
        self.failing_since_ms = 0
        self.last_success_ms = 0
        self.last_error = ""
        self.last_error_ms = 0
        self.next_try_ms = 0

    @property
    def is_open(self) -> bool:
        return self._loop.time() >= self._not_before

    async def opens(self) -> None:
        """Returns when the receiver may be tried again."""
        while (delay_s := self._not_before - self._loop.time()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._open.wait()

    def note(self, sent: Sent) -> None:
        now_ms = self._clock.now_ms()
        if not sent.error:
            self.delivered += 1
            self.failures = self.failing_since_ms = self.next_try_ms = 0
            self.last_success_ms = now_ms
            self._not_before = 0.0
            self._open.set()
            return
        self.failed += 1
        self.failures += 1
        self.failing_since_ms = self.failing_since_ms or now_ms
        self.last_error, self.last_error_ms = sent.error[:_ERROR_LENGTH_MAX], now_ms
        pause_s = min(BACKOFF_S * 2.0 ** min(self.failures - 1, _DOUBLINGS_MAX), BACKOFF_S_MAX)
        pause_s = min(max(pause_s * self._jitter(), sent.retry_after_s), BACKOFF_S_MAX)
        self._open.clear()
        self._not_before = self._loop.time() + pause_s
        self.next_try_ms = now_ms + round(pause_s * 1000)

    def _jitter(self) -> float:
        """From 0.75 to 1.25, so that nodes do not try at the same time."""
        digest = hashlib.sha256(self._salt + self.failures.to_bytes(8, "big")).digest()
        return 0.75 + digest[0] / 510


class Courier:
    """One per node. `webhooks` is what the meta group knows."""

    def __init__(
        self,
        node: str,
        webhooks: Callable[[], Webhooks],
        *,
        addresses: Addresses,
        clock: Clock,
        cluster: str,
        show: Callable[[Any], Mapping[str, Any]],
    ) -> None:
        """`show`: the facts about an invocation, as the admin API has them."""
        self._node = node
        self._webhooks = webhooks
        self._clock = clock
        self.cluster = cluster
        self.show = show
        self.lines: dict[HookId, Line] = {}
        self._dialing = Dialing(addresses, timeout=aiohttp.ClientTimeout(total=ANSWER_S), auto_decompress=False)

    @property
    def webhooks(self) -> Webhooks:
        return self._webhooks()

    def line(self, hook: HookId) -> Line:
        found = self.lines.get(hook)
        if found is None:
            for gone in self.lines.keys() - self.webhooks.by_id.keys():
                del self.lines[gone]
            found = self.lines[hook] = Line(self._node, hook, self._clock)
        return found

    async def deliver(self, hook: Webhook, event: str, body: bytes) -> Sent:
        """Send an event once."""
        line = self.line(hook.id)
        async with line.slots:
            sent = await self.send(hook, event, body)
        line.note(sent)
        if sent.error:
            level = logging.WARNING if line.failures in (1, 5) else logging.DEBUG
            logger.log(level, "webhook %s did not take %s: %s", name_of(hook.id), event, sent.error)
        return sent

    async def send(self, hook: Webhook, event: str, body: bytes) -> Sent:
        """One request. The body of the answer is not read."""
        headers = {
            "Content-Type": "application/json",
            "User-Agent": f"holdfast/{__version__}",
            "X-Holdfast-Webhook": name_of(hook.id),
            "X-Holdfast-Event-Id": event,
            "X-Holdfast-Signature": sign(hook.secret, self._clock.now_ms() // 1000, body),
        }
        try:
            session = self._dialing.session(hook.url)
            async with session.post(hook.url, data=body, headers=headers, allow_redirects=False) as response:
                status, after = response.status, response.headers.get("Retry-After", "")
                response.release()
        except TimeoutError:
            return Sent(0, f"no answer within {ANSWER_S:.0f} s")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            refused = refusal(error)
            if refused is not None:
                return Sent(0, f"webhook_addresses does not allow its address: {refused.strerror}")
            return Sent(0, _explain(error))
        if 200 <= status < 300:
            return Sent(status, "")
        if 300 <= status < 400:
            return Sent(status, f"it answered {status}, and redirects are not followed: give the address itself")
        wait_s = float(after) if after.isascii() and after.isdigit() and len(after) < 6 else 0.0
        return Sent(status, f"it answered {status}", wait_s)

    async def close(self) -> None:
        await self._dialing.close()


def _explain(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect to {error.host}:{error.port}: {error.os_error.strerror or error.os_error}"
    return str(error) or type(error).__name__


def sign(secret: str, now_s: int, body: bytes) -> str:
    """The header by which a receiver knows that a request comes from this cluster, and when it was made."""
    digest = hmac.new(secret.encode(), f"{now_s}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={now_s},v1={digest}"


def encode_body(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=True, separators=(",", ":")).encode()
