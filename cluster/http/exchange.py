"""One request and its answer: the common path of all requests of both listeners.

`Exchange.answer` enforces limits, determines the sender, measures, and maps errors to answers. The meaning of a path is
up to its `Handler`: the ingress and the admin API are one each. Nothing here depends on aiohttp (`http.server` does),
so a test or a simulated client can use plain values.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from time import perf_counter
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import parse_qsl, unquote, urlsplit

from holdfast.cluster.config import Config
from holdfast.cluster.errors import (
    BadRequest,
    Circumstance,
    Conflict,
    Forbidden,
    Internal,
    Overloaded,
    Paused,
    Stopping,
    TooLarge,
    TooSlow,
    Unauthorized,
    Unavailable,
    WrongMethod,
    circumstance,
    error_body,
)
from holdfast.cluster.histogram import Histogram
from holdfast.cluster.http.access import ANYBODY, STRANGER, Access, Principal
from holdfast.cluster.http.audit import Audit
from holdfast.cluster.http.browsers import SAFE, Browsers
from holdfast.cluster.http.sessions import Sessions
from holdfast.cluster.http.streams import Stream, Streams

logger = logging.getLogger(__name__)

JSON: Final = "application/json"
PARAMETERS_MAX: Final = 64  # of a query
ROOM_LOOK_S: Final = 0.02
#: The body of a request whose sender is not known.
STRANGER_BODY_BYTES_MAX: Final = 4096
STRANGER_BODY_S: Final = 5.0


class Answer(NamedTuple):
    status: int
    body: bytes
    content_type: str = JSON
    id: str | None = None  # for x-holdfast-id
    headers: Mapping[str, str] | None = None
    held: int = 0  # bytes counted against the limit until the answer is sent: its sender calls `Exchange.sent`
    stream: Stream | None = None  # in place of the body


class Body(Protocol):
    """The body of a request, not read yet."""

    length: int | None  # as announced

    def whole(self) -> bytes | None:
        """The whole body, if it has arrived already and can be taken as it is. It is taken once."""

    def chunks(self) -> AsyncIterator[bytes]: ...


class Request:
    __slots__ = (
        "_body", "_exchange", "action", "gone", "headers", "held", "id", "method", "principal", "target", "targets",
    )  # fmt: skip

    def __init__(
        self,
        exchange: Exchange,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: Body,
        principal: Principal,
        gone: Callable[[], bool],
    ) -> None:
        """`gone`: whether the client has closed its connection."""
        self._exchange = exchange
        self.gone = gone
        self._body = body
        self.method = method
        self.target = target
        self.headers = headers
        self.principal = principal
        #: The invocation, for x-holdfast-id: set as soon as it is known, so that errors have it too.
        self.id: str | None = None
        self.held = 0  # Bytes counted against the exchange's limit.
        #: The change, for the audit trail; empty: none. `targets` names the objects, never their content: no payloads,
        #: no secrets.
        self.action = ""
        self.targets: dict[str, object] = {}

    def acts(self, action: str, **targets: object) -> None:
        """This request changes something, if its sender is permitted to: it belongs in the audit trail."""
        self.action = action
        self.targets |= targets

    @property
    def length(self) -> int | None:
        """Of the body, as announced."""
        return self._body.length

    async def read(self, most: int, too_large: Callable[[int], TooLarge]) -> bytes:
        """The whole body, counted against the limits while it arrives. Strangers may send little, and not slowly."""
        if self.principal.roles:
            return await self._read(most, too_large)
        try:
            async with asyncio.timeout(STRANGER_BODY_S):
                return await self._read(min(most, STRANGER_BODY_BYTES_MAX), too_large)
        except TimeoutError:
            raise TooSlow(f"request body did not arrive within {STRANGER_BODY_S:g} seconds") from None

    async def _read(self, most: int, too_large: Callable[[int], TooLarge]) -> bytes:
        body = self._body
        if body.length is not None and body.length > most:
            raise too_large(most)
        arrived = body.whole()  # As for most requests: a loop over chunks would cost several microseconds.
        if arrived is not None:
            self._count(len(arrived), 0, most, too_large)
            return arrived
        payload: bytes | bytearray = b""
        async for chunk in body.chunks():
            self._count(len(chunk), len(payload), most, too_large)
            if not payload:
                payload = chunk  # Usually the only chunk.
            elif type(payload) is bytearray:
                payload += chunk
            else:
                payload = bytearray(payload) + chunk  # Avoids repeated copies of many small chunks.
        return bytes(payload)

    def _count(self, size: int, before: int, most: int, too_large: Callable[[int], TooLarge]) -> None:
        """Count another part of the body against the limits."""
        exchange = self._exchange
        if before + size > most:
            raise too_large(most)
        if exchange.active_bytes + size > exchange.bytes_max:
            raise Overloaded("the bodies of the requests in progress have reached the limit of this node")
        exchange.active_bytes += size
        self.held += size

    def let_go(self) -> None:
        """The body is no longer needed."""
        self._exchange.active_bytes -= self.held
        self.held = 0

    async def hold(self, size: int, patience_s: float) -> bool:
        """Whether there is room for an answer of this size before patience ends. A single one is always allowed."""
        exchange = self._exchange
        deadline = asyncio.get_running_loop().time() + patience_s
        while exchange.active_bytes and exchange.active_bytes + size > exchange.bytes_max:
            if asyncio.get_running_loop().time() > deadline:
                return False
            await asyncio.sleep(ROOM_LOOK_S)
        exchange.active_bytes += size
        self.held += size
        return True


class Handler(Protocol):
    """The application behind a listener."""

    async def handle(self, request: Request) -> Answer:
        """Raises circumstances, and errors of other rooms that amount to one."""

    def name_act(self, request: Request) -> None:
        """Make the request name its change (`Request.acts`). Raises circumstances."""

    def stop(self, why: str) -> None:
        """There are no more requests. Waiting ones must give up."""


class Exchange:
    def __init__(
        self,
        config: Config,
        handler: Handler,
        *,
        source: str,
        access: Access | None = None,
        audit: Audit | None = None,
        sessions: Sessions | None = None,
    ) -> None:
        """`source`: the origin named in errors. Without `access`, every sender may do everything."""
        self.source = source
        self.browsers = Browsers(config, source)
        self._access = access
        self._audit = audit
        self._sessions = sessions
        self.bytes_max = config.request_bytes_max
        self._requests_max = config.requests_max
        self.handler = handler
        self._tasks: dict[asyncio.Task[Any], None] = {}  # One per request in progress, in order of arrival.
        self._stopping = ""  # Why requests are refused, if they are.
        self.active = 0
        self.active_bytes = 0
        self.refused = 0  # for want of room, since the start
        self.latency = Histogram()  # seconds from request to answer, or to the beginning of a stream
        #: Answers by the first digit of their status. At 0: the client was gone before its answer.
        self.statuses = [0] * 6
        self.streams = Streams()

    def stop(self, why: str = "this node is shutting down") -> None:
        """Accept no new work; waiting clients are asked to retry. The invocations themselves continue."""
        self._stopping = self._stopping or why
        self.streams.end_all(self._stopping)
        self.handler.stop(self._stopping)

    def give_up(self) -> None:
        """Answer everything still in progress with 503. The outcome is found under the id, or by the same request."""
        assert self._stopping, "told to stop before"
        for task in list(self._tasks):
            task.cancel()

    @property
    def has_strangers(self) -> bool:
        """Whether senders must be known."""
        return self._access is not None

    async def answer(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: Body,
        address: str = "",
        recognize: Callable[[], None] = lambda: None,
        gone: Callable[[], bool] = lambda: False,
    ) -> Answer:
        """Total: every request gets an answer, and the cause of a 500 is in the log. `address`: of the client.
        `recognize` is called when its sender is known."""
        if self.active >= self._requests_max:
            self.refused += 1
            answer = refusal(
                Overloaded(f"{self.active} requests are in progress on this node, which is the limit"), self.source
            )
            self.statuses[answer.status // 100] += 1
            return self._share(answer, headers)
        request = Request(
            exchange=self, method=method, target=target, headers=headers, body=body, principal=ANYBODY, gone=gone
        )
        self.active += 1
        began = perf_counter()
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = None
        held = status = 0
        kind = ""
        try:
            if self._access is not None:
                request.principal = STRANGER
            self.browsers.check(method, target, headers)
            if method == "OPTIONS" and (allowed := self.browsers.preflight(headers)) is not None:
                status = 204
                return self._share(Answer(204, b"", headers=allowed), headers)
            if self._stopping:
                raise Stopping(self._stopping)
            if self._access is not None:
                await self._authenticate(request, self._access)
                if request.principal.roles:
                    recognize()
            answer = await self.handler.handle(request)
            if answer.stream is not None:
                self._begin(answer.stream, request)
            held, status = answer.held, answer.status
            return self._share(answer, headers) if self.browsers.shares else answer
        except (Exception, asyncio.CancelledError) as error:
            known = self._known(error, request)
            status, kind = known.status, type(known).__name__
            if self._audit is not None and isinstance(known, (Unauthorized, Forbidden)):
                self._name_act(request)
            return self._share(refusal(known, self.source, request.id), headers)
        finally:
            if request.action and self._audit is not None:
                self._audit.note(
                    request.principal,
                    door=self.source,
                    address=address,
                    method=method,
                    action=request.action,
                    targets=request.targets,
                    status=status,
                    error=kind,
                )
            self._tasks.pop(task, None)
            self.active -= 1
            self.active_bytes -= request.held - held
            self.statuses[status // 100] += 1
            self.latency.observe(perf_counter() - began)

    async def _authenticate(self, request: Request, access: Access) -> None:
        authorization = request.headers.get("Authorization")
        if authorization is None and self._sessions is not None and "Cookie" in request.headers:
            await self._use_session(request, self._sessions)
        else:
            request.principal = await access.authenticate(authorization)

    def _begin(self, stream: Stream, request: Request) -> None:
        """Let a stream begin, and end it when its sender would no longer be who it is now. Raises Unavailable."""
        self.streams.enter()
        access, principal = self._access, request.principal
        if access is None:
            return

        async def is_refused() -> bool:
            try:
                await self._authenticate(request, access)
            except Unavailable:
                return False  # No majority answers, so the token may be valid.
            except Circumstance:
                return True
            return request.principal != principal

        stream.refused = is_refused

    async def _use_session(self, request: Request, sessions: Sessions) -> None:
        """A browser adds a cookie to requests of other pages on its host, too. So the cookie alone changes nothing."""
        request.principal = await sessions.authenticate(request.headers)
        if request.principal.id and request.method not in SAFE and not self.browsers.is_same_origin(request.headers):
            raise Forbidden(
                "a session may change something only from a page of this node: the request has neither its Origin nor "
                "Sec-Fetch-Site: same-origin",
                "programs send a token: Authorization: Bearer hf_…",
            )

    def _name_act(self, request: Request) -> None:
        """The change of a request that was refused before its handler saw it."""
        if not request.action:
            with suppress(Circumstance):  # For example an invalid path.
                self.handler.name_act(request)

    def _share(self, answer: Answer, headers: Mapping[str, str]) -> Answer:
        """Let a page of another origin read the answer, if it may."""
        if not self.browsers.shares:
            return answer
        return answer._replace(headers={**(answer.headers or {}), **self.browsers.shared(headers)})

    def sent(self, answer: Answer) -> None:
        """The answer left this node, or its client is gone."""
        self.active_bytes -= answer.held
        if answer.stream is not None:
            self.streams.leave()

    def _known(self, error: BaseException, request: Request) -> Circumstance:
        if isinstance(error, asyncio.CancelledError):
            if not self._stopping:
                raise error  # The client is gone.
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            return Stopping(f"{self._stopping}, and the outcome of this request is unknown")
        known = circumstance(error)
        if known is None:
            logger.exception("%s %.200r of %r failed", request.method, request.target, request.principal.name)
            return Internal("an internal error; its cause is in the log of the node")
        if isinstance(known, Overloaded):
            self.refused += 1
        return known


def refusal(error: Circumstance, source: str, id_: str | None = None) -> Answer:
    headers: dict[str, str] | None = None
    if error.retry_after_s is not None:
        headers = {"Retry-After": str(error.retry_after_s)}
    elif isinstance(error, Unauthorized):
        headers = {"WWW-Authenticate": 'Bearer realm="holdfast"'}
    elif isinstance(error, WrongMethod):
        headers = {"Allow": error.allowed}
    elif isinstance(error, Paused):
        headers = {"x-holdfast-status": "paused"}
    body = error_body(error.status, error.message, source=source, hint=error.hint)
    if isinstance(error, Conflict) and error.details:
        body = json.dumps(json.loads(body) | {"details": list(error.details)}).encode()
    return Answer(status=error.status, body=body, content_type=JSON, id=id_, headers=headers)


def split_target(target: str) -> tuple[list[str], dict[str, str]]:
    """(decoded segments, parameters) of a request's target. The path / is one empty segment."""
    if target[:1] != "/":  # A proxy may send the whole URL.
        try:
            parts = urlsplit(target)
        except ValueError:
            raise BadRequest("the target of the request is not a path") from None
        if not parts.netloc:  # CONNECT and OPTIONS may name something else than a path.
            raise BadRequest("the target of the request is not a path")
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    path, _, query = target.partition("?")
    try:
        path.encode()
        segments = path[1:].split("/")
        if "%" in path:
            segments = [unquote(segment, errors="strict") for segment in segments]
        if query.count("&") >= PARAMETERS_MAX:
            raise BadRequest(f"the query has more than {PARAMETERS_MAX} parameters")
        parameters = dict(parse_qsl(query, keep_blank_values=True)) if query else {}
    except (UnicodeError, ValueError):
        raise BadRequest("the path or query is not UTF-8", "percent-encode keys as UTF-8") from None
    return segments, parameters
