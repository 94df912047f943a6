"""The ingress: HTTP requests become invocations, and their outcomes become responses.

The id and the time of an invocation are minted here, once; from then on a retry, by us or by the client with the same
Idempotency-Key, finds the first one. A client that goes away takes only its connection with it: the invocation goes on.

This is the hot path, so there is no router, no middleware and no application object: one function looks at the path. It
knows nothing of aiohttp; `IngressServer` below does, and a test can call `Ingress.answer` with plain values.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from time import perf_counter
from typing import Any, Final, NamedTuple, Protocol, cast
from urllib.parse import parse_qsl, unquote, urlsplit

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from holdfast.cluster.config import BODY_BYTES_MAX, Config
from holdfast.cluster.doors import Door
from holdfast.cluster.durations import parse_duration_ms
from holdfast.cluster.errors import (
    BadRequest,
    Circumstance,
    Conflict,
    Forbidden,
    Internal,
    NotFound,
    NotReady,
    Overloaded,
    Stopping,
    TooLarge,
    TooSlow,
    Unavailable,
    UnknownInvocation,
    UnsupportedEncoding,
    WrongMethod,
    check,
    circumstance,
    error_body,
    status_of,
)
from holdfast.cluster.metrics import Histogram
from holdfast.cluster.registry import Registry, Target
from holdfast.sdk.protocol import (
    KEY_BYTES_MAX,
    NAME_BYTES_MAX,
    BadId,
    Failure,
    InvocationId,
    cut_text,
    format_id,
    idempotent_id,
    parse_awakeable,
    parse_id,
    partition_key,
    workflow_id,
)
from holdfast.statemachine import refs
from holdfast.statemachine.commands import Command, CompletePromise, CompleteStep, Invoke, Mode, Ref
from holdfast.statemachine.effects import Result

logger = logging.getLogger(__name__)

IDEMPOTENCY_KEY_BYTES_MAX: Final = 512
HEADERS_MAX: Final = 64
HEADER_BYTES_MAX: Final = 16 * 1024
JSON: Final = "application/json"
BODY_TIMEOUT_S: Final = 60.0
#: A connection without a request for so long is closed, also one that never finishes its first line: places are bounded.
#: Longer than the 60 seconds after which proxies usually give an idle one up, so that they are the ones who close.
IDLE_S: Final = 75.0
ROOM_S: Final = 30.0  # How long a large outcome waits for others to be sent.
SENT_ALONE_BYTES: Final = 1024 * 1024  # A larger answer counts as in progress until the client has it.
ANSWER_S: Final = 2.0  # How long clients of a node that stops get to take their last answers.
INFLATED_BYTES_MAX: Final = 256 * 1024  # of a compressed body at a time

#: Headers that say something about this connection or this client, not about the work; and credentials, which have no
#: place in a journal. Everything else reaches the handler.
_NOT_PASSED_ON: Final = frozenset(
    {
        "accept", "accept-charset", "accept-encoding", "accept-language", "authorization", "cache-control",
        "connection", "content-encoding", "content-length", "cookie", "dnt", "expect", "host", "http2-settings",
        "idempotency-key", "if-modified-since", "if-none-match", "keep-alive", "max-forwards", "origin", "pragma",
        "priority", "proxy-authorization", "proxy-connection", "referer", "te", "trailer", "transfer-encoding",
        "upgrade", "upgrade-insecure-requests", "user-agent", "via",
    }
)  # fmt: skip

_HEALTHY: Final = b'{"status":"ok"}'


class Answer(NamedTuple):
    status: int
    body: bytes
    content_type: str = JSON
    id: str | None = None  # for x-holdfast-id
    headers: Mapping[str, str] | None = None
    held: int = 0  # of the bound of bytes, until it is sent: whoever sends it calls `Ingress.sent`


class Found(NamedTuple):
    """An invocation as an ingress needs to know it."""

    outcome: list[Any] | None  # None: not completed
    service: str
    handler: str
    deployment: str | None


class Router(Protocol):
    """The way to whoever leads the partition of an id."""

    async def submit(self, invocation: bytes, command: Command, /) -> Result: ...

    def mint(self, service: str, key: str | None, /) -> InvocationId: ...


class Replies(Protocol):
    def wait(self, invocation: bytes, /) -> AbstractContextManager[asyncio.Future[list[Any]]]: ...


class Body(Protocol):
    """The body of a request, not read yet."""

    length: int | None  # as announced

    def chunks(self) -> AsyncIterator[bytes]: ...


class Ingress:
    def __init__(
        self,
        config: Config,
        registry: Registry,
        router: Router,
        replies: Replies,
        *,
        lookup: Callable[[InvocationId], Awaitable[Found | None]],
        load: Callable[[bytes, Ref], Awaitable[bytes]],
        now_ms: Callable[[], int],
        unhealthy: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._config = config
        self._registry = registry
        self._router = router
        self._replies = replies
        self._lookup = lookup
        self._load = load  # a large value of the partition of an id
        self._now_ms = now_ms
        self._unhealthy = unhealthy
        self._waiting: dict[asyncio.Future[list[Any]], None] = {}  # As a set, in the order in which they came.
        self._tasks: dict[asyncio.Task[Any], None] = {}  # One for each request in progress, likewise.
        self._stopping = False
        self.active = 0
        self.active_bytes = 0
        self.refused = 0  # for want of room, since the start
        self.accepted = 0
        self.took = Histogram()  # seconds from request to answer

    def stop(self) -> None:
        """No new work; whoever waits is told to ask again. The invocations themselves go on."""
        self._stopping = True
        for future in list(self._waiting):
            if not future.done():
                future.set_exception(Stopping("this node is shutting down; the invocation goes on"))

    def give_up(self) -> None:
        """Answer whatever is still in progress: 503. What came of it is found under the id, or by the same question."""
        assert self._stopping, "told to stop before"
        for task in list(self._tasks):
            task.cancel()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def answer(self, method: str, target: str, headers: Mapping[str, str], body: Body) -> Answer:
        """Total: whatever comes in, an answer goes out, and a 500 has its cause in the log."""
        if self.active >= self._config.requests_max:
            self.refused += 1
            return _refusal(Overloaded(f"{self.active} requests are in progress here, and no more are taken"))
        self.active += 1
        began = perf_counter()
        held = [0]
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = None
        try:
            if self._stopping:
                raise Stopping("this node is shutting down")
            path, parameters = _split(target)
            if path[0] == "holdfast":
                return await self._own(method, path, parameters, headers, body, held)
            return await self._invoke(method, path, parameters, headers, body, held)
        except (Exception, asyncio.CancelledError) as error:
            return self._failed(error, method, target)
        finally:
            self._tasks.pop(task, None)
            self.active -= 1
            self._let_go(held)
            self.took.observe(perf_counter() - began)

    def sent(self, answer: Answer) -> None:
        """The answer left this node, or nobody waits for it any more."""
        self.active_bytes -= answer.held

    def _let_go(self, held: list[int]) -> None:
        self.active_bytes -= held[0]
        held[0] = 0

    def _failed(self, error: BaseException, method: str, target: str, id_: str | None = None) -> Answer:
        if isinstance(error, asyncio.CancelledError):
            if not self._stopping:
                raise error  # The client is gone.
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            error = Stopping("this node is shutting down, and does not know what becomes of this request")
        known = circumstance(error)
        if known is None:
            logger.exception("%s %.200s failed", method, target)
            known = Internal("an internal error; its cause is in the log of the node")
        elif isinstance(known, Overloaded):
            self.refused += 1
        return _refusal(known, id_)

    # -- invocations -------------------------------------------------------------------------------------------------

    async def _invoke(
        self,
        method: str,
        path: list[str],
        parameters: dict[str, str],
        headers: Mapping[str, str],
        body: Body,
        held: list[int],
    ) -> Answer:
        target, key, send = self._target(path)
        if method != "POST":
            raise WrongMethod("POST", f"{method} on a handler: handlers are called with POST")
        if target.options.private:
            raise Forbidden(
                f"{target.service}/{target.handler} is private",
                "only other handlers may call it, through their context",
            )
        delay_ms = _delay_ms(parameters, send=send)
        id_, idempotency_key = self._mint(target, key, headers)
        passed_on = _passed_on(headers)
        # In a list, so that whoever proposes it is the last who holds it: a body is not kept while its outcome is awaited.
        work = [
            Invoke(
                id_,
                target.service,
                target.handler,
                key,
                target.mode,
                await self._read(body, held),
                passed_on,
                self._now_ms() + delay_ms if delay_ms else 0,
                None,
                -1,
                target.options.retention_ms,
                idempotency_key,
            )
        ]
        name = format_id(id_)
        try:
            return await (self._send(id_, work, name) if send else self._call(id_, work, name, target, held))
        except (Exception, asyncio.CancelledError) as error:
            # From here on there is an id: whatever the answer says, the client can ask for the invocation by it.
            return self._failed(error, method, "/".join(path), name)

    async def _call(self, id_: InvocationId, work: list[Invoke], name: str, target: Target, held: list[int]) -> Answer:
        with self._replies.wait(id_) as reply:  # Registered first: no outcome slips through in between.
            self._waiting[reply] = None
            try:
                result = await self._router.submit(id_, work.pop())
                self._let_go(held)
                self.accepted += 1
                outcome = result.outcome
                if outcome is None:
                    check(result)
                    outcome = await reply
            finally:
                self._waiting.pop(reply, None)
        return await self._outcome_answer(id_, outcome, name, target.output_type)

    async def _send(self, id_: InvocationId, work: list[Invoke], name: str) -> Answer:
        result = check(await self._router.submit(id_, work.pop()))
        self.accepted += 1
        status = b"PreviouslyAccepted" if result.code == 200 else b"Accepted"
        return Answer(202, b'{"invocationId":"%s","status":"%s"}' % (name.encode(), status), JSON, name)

    def _target(self, path: list[str]) -> tuple[Target, str | None, bool]:
        """(handler, key, whether it is a send). What a segment means depends on the kind of the service."""
        service = path[0]
        known = self._registry.service(service)
        if known is None:
            raise self._registry.unknown(service, "")
        keyed = known[0].kind != "service"
        count = 3 if keyed else 2
        send = len(path) == count + 1 and path[-1] == "send"
        if len(path) - send != count:
            shape = f"/{service}/{{key}}/{{handler}}" if keyed else f"/{service}/{{handler}}"
            raise NotFound(
                f"{service} is a {known[0].kind}, and this path has {len(path)} segments",
                f"its handlers are at {shape}, and {shape}/send does not wait",
            )
        target = self._registry.resolve(service, path[count - 1])
        if not keyed:
            return target, None, send
        key = path[1]
        if not key or len(key.encode()) > KEY_BYTES_MAX:
            raise BadRequest(
                f"a key has 1 to {KEY_BYTES_MAX} bytes", "percent-encode slashes and other special characters"
            )
        return target, key, send

    def _mint(self, target: Target, key: str | None, headers: Mapping[str, str]) -> tuple[InvocationId, str | None]:
        idempotency_key = headers.get("Idempotency-Key")
        if idempotency_key is not None:
            try:
                size = len(idempotency_key.encode())
            except UnicodeEncodeError:
                size = 0
            if not 0 < size <= IDEMPOTENCY_KEY_BYTES_MAX:
                raise BadRequest(f"an Idempotency-Key has 1 to {IDEMPOTENCY_KEY_BYTES_MAX} bytes of UTF-8")
        if target.mode == Mode.WORKFLOW:
            assert key is not None, "a workflow's handlers are keyed"
            return workflow_id(target.service, key), idempotency_key
        if idempotency_key is not None:
            return idempotent_id(target.service, key, target.handler, idempotency_key), idempotency_key
        return self._router.mint(target.service, key), None

    async def _read(self, body: Body, held: list[int]) -> bytes:
        """The whole body, counted against the bounds while it comes in."""
        most = self._config.body_bytes_max
        if body.length is not None and body.length > most:
            raise _too_large(most)
        payload: bytes | bytearray = b""
        async for chunk in body.chunks():
            size = len(chunk)
            if len(payload) + size > most:
                raise _too_large(most)
            if self.active_bytes + size > self._config.request_bytes_max:
                raise Overloaded("the bodies of the requests in progress fill this node's bound")
            self.active_bytes += size
            held[0] += size
            if not payload:
                payload = chunk  # As a rule, it is all there is.
            elif type(payload) is bytearray:
                payload += chunk
            else:
                payload = bytearray(payload) + chunk  # Many small ones must not be copied again and again.
        return bytes(payload)

    # -- the ingress's own paths -------------------------------------------------------------------------------------

    async def _own(
        self,
        method: str,
        path: list[str],
        parameters: dict[str, str],
        headers: Mapping[str, str],
        body: Body,
        held: list[int],
    ) -> Answer:
        if parameters:
            raise BadRequest(f"there is no parameter {next(iter(parameters))!r:.60} here")
        match path[1:]:
            case ["health"]:
                _allow(method, "GET", "HEAD")
                return self._health()
            case ["invocation", text, ("attach" | "output") as which]:
                _allow(method, "GET")
                return await self._outcome(_invocation(text), wait=which == "attach")
            case ["workflow", name, key, ("attach" | "output") as which]:
                _allow(method, "GET")
                self._workflow(name)
                return await self._outcome(workflow_id(name, key), wait=which == "attach")
            case ["workflow", name, key, "promises", promise, ("resolve" | "reject") as which]:
                _allow(method, "POST")
                self._workflow(name)
                if not 0 < len(promise.encode()) <= NAME_BYTES_MAX:
                    raise BadRequest(f"a promise's name has 1 to {NAME_BYTES_MAX} bytes")
                outcome = self._outcome_of_client(which, await self._read(body, held))
                command = CompletePromise(name, key, promise, outcome)
                return await self._complete(command, partition_key(name, key), which, None)
            case ["awakeables", text, ("resolve" | "reject") as which]:
                _allow(method, "POST")
                try:
                    id_, step = parse_awakeable(text)
                except BadId as error:
                    raise BadRequest(str(error), "it is what ctx.awakeable() returned") from None
                outcome = self._outcome_of_client(which, await self._read(body, held))
                return await self._complete(CompleteStep(id_, step, outcome), id_, which, format_id(id_))
            case _:
                raise NotFound(
                    f"there is nothing at /{'/'.join(path):.200}",
                    "here are: health, invocation/{id}/attach|output, workflow/{name}/{key}/attach|output, "
                    "workflow/{name}/{key}/promises/{promise}/resolve|reject, awakeables/{id}/resolve|reject",
                )

    def _health(self) -> Answer:
        problem = self._unhealthy()
        if problem is not None:
            return _refusal(Unavailable(problem))
        return Answer(200, _HEALTHY)

    def _workflow(self, name: str) -> None:
        known = self._registry.service(name)
        if known is None:
            raise self._registry.unknown(name, "")
        if known[0].kind != "workflow":
            raise BadRequest(f"{name} is a {known[0].kind}, not a workflow")

    async def _outcome(self, id_: InvocationId, *, wait: bool) -> Answer:
        name = format_id(id_)
        try:
            with self._replies.wait(id_) as reply:
                found = await self._lookup(id_)
                if found is None:
                    raise UnknownInvocation(f"there is no invocation {name}")
                outcome = found.outcome
                if outcome is None and not wait:
                    raise NotReady(f"{name} has not completed", "ask again later, or wait for it at .../attach")
                if outcome is None:
                    self._waiting[reply] = None
                    try:
                        outcome = await reply
                    finally:
                        self._waiting.pop(reply, None)
            return await self._outcome_answer(id_, outcome, name, self._output_type(found))
        except (Exception, asyncio.CancelledError) as error:
            return self._failed(error, "GET", name, name)

    async def _outcome_answer(self, id_: InvocationId, outcome: list[Any], name: str, content_type: str) -> Answer:
        if outcome[0] != 0:
            failure = Failure(*outcome[1:])
            body = error_body(failure.code, failure.message, source="invocation", hint=None)
            return Answer(status_of(failure), body, JSON, name)
        ref = refs.in_outcome(outcome)
        if ref is None:
            return Answer(200, outcome[1], content_type, name)
        size = refs.size_of(ref)
        await self._await_room(size)
        self.active_bytes += size
        try:
            return Answer(200, await self._load(id_, ref), content_type, name, held=size)
        except BaseException:
            self.active_bytes -= size
            raise

    async def _await_room(self, size: int) -> None:
        """For a large outcome. The work is done, so it is worth waiting for; one alone is always let through."""
        deadline = asyncio.get_running_loop().time() + ROOM_S
        while self.active_bytes and self.active_bytes + size > self._config.request_bytes_max:
            if asyncio.get_running_loop().time() > deadline:
                raise Unavailable(
                    "the bodies of the requests in progress fill this node's bound",
                    "the invocation is completed: ask for its outcome at /holdfast/invocation/{id}/attach",
                )
            await asyncio.sleep(0.02)

    def _output_type(self, found: Found) -> str:
        target = None
        if found.deployment is not None:
            target = self._registry.target(found.deployment, found.service, found.handler)
        target = target or self._registry.find(found.service, found.handler)
        return target.output_type if target is not None else JSON

    async def _complete(self, command: Command, route: bytes, which: str, name: str | None) -> Answer:
        try:
            result = await self._router.submit(route, command)
            if result.code == 404:
                raise NotFound(result.message or "there is nothing that waits under this name")
            if result.code == 409:
                raise Conflict(result.message or "it was completed with another outcome before")
            check(result)
        except (Exception, asyncio.CancelledError) as error:
            return self._failed(error, "POST", which, name)
        done = "Resolved" if which == "resolve" else "Rejected"
        status = done if result.code == 0 else f"Already{done}"
        return Answer(200, b'{"status":"%s"}' % status.encode(), JSON, name)

    def _outcome_of_client(self, which: str, payload: bytes) -> list[Any]:
        """A resolution is any bytes; a rejection is a text, or JSON with "message" and "code"."""
        if which == "resolve":
            return [0, payload]
        code, message = 500, payload.decode(errors="replace")
        try:
            given = json.loads(payload) if payload else {}
        except (ValueError, RecursionError):
            given = None
        if isinstance(given, str):
            message = given
        elif isinstance(given, dict):
            message, code = given.get("message", ""), given.get("code", 500)
            if not isinstance(message, str) or type(code) is not int or not 400 <= code <= 599:
                raise BadRequest(
                    "a rejection's message is a text and its code a number from 400 to 599",
                    'send a text, or JSON as in {"message": "no budget", "code": 409}',
                )
        return [1, code, cut_text(message or "rejected"), "Rejected"]


# -- helpers -----------------------------------------------------------------------------------------------------------


def _split(target: str) -> tuple[list[str], dict[str, str]]:
    """(decoded segments, parameters) of a request's target."""
    if target[:1] != "/":  # A proxy may send the whole URL.
        try:
            parts = urlsplit(target)
        except ValueError:
            raise BadRequest("the target of the request is not a path") from None
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    path, _, query = target.partition("?")
    try:
        path.encode()
        segments = path[1:].split("/")
        if "%" in path:
            segments = [unquote(segment, errors="strict") for segment in segments]
        parameters = dict(parse_qsl(query, keep_blank_values=True, max_num_fields=16)) if query else {}
    except (UnicodeError, ValueError):
        raise BadRequest("the path or query is not UTF-8, or too long", "percent-encode keys as UTF-8") from None
    if not segments[0]:
        raise NotFound(
            "there is nothing here: this is the ingress",
            "POST /{service}/{handler} calls a handler; the admin API has a page about it all at its /",
        )
    return segments, parameters


def _delay_ms(parameters: dict[str, str], *, send: bool) -> int:
    if not parameters:
        return 0
    unknown = next((name for name in parameters if name != "delay"), None)
    if unknown is not None:
        raise BadRequest(
            f"there is no parameter {unknown!r:.60}", "/send takes ?delay=10s; a handler's input is the body"
        )
    if not send:
        raise BadRequest("a call does not wait for a delay", "use the path with /send at its end")
    try:
        return parse_duration_ms(parameters["delay"])
    except ValueError as error:
        raise BadRequest(f"delay: {error}") from None


def _passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    passed: dict[str, str] = {}
    size = 0
    for name, value in headers.items():
        name = name.lower()
        if name in _NOT_PASSED_ON or name.startswith(("sec-", "x-forwarded-")):
            continue
        if name in passed:
            value = f"{passed[name]}, {value}"
        passed[name] = value
        size += len(name) + len(value)
    if size > HEADER_BYTES_MAX or len(passed) > HEADERS_MAX:
        raise BadRequest(
            f"the headers for the handler are too large: at most {HEADERS_MAX} of together {HEADER_BYTES_MAX} bytes"
        )
    if not all(value.isascii() for value in passed.values()):
        # Latin-1 or broken UTF-8 came in as surrogates, which nobody can write to a journal.
        passed = {name: value.encode(errors="replace").decode() for name, value in passed.items()}
    return passed


def _refusal(error: Circumstance, id_: str | None = None) -> Answer:
    headers: dict[str, str] | None = None
    if error.retry_after_s is not None:
        headers = {"Retry-After": str(error.retry_after_s)}
    elif isinstance(error, WrongMethod):
        headers = {"Allow": error.allowed}
    body = error_body(error.status, error.message, source="ingress", hint=error.hint)
    return Answer(error.status, body, JSON, id_, headers)


def _too_large(most: int) -> TooLarge:
    return TooLarge(
        f"the body is larger than {most} bytes",
        f"raise body_bytes_max, which can be up to {BODY_BYTES_MAX} bytes, or put it into a store and send its address",
    )


def _allow(method: str, *allowed: str) -> None:
    if method not in allowed:
        raise WrongMethod(", ".join(allowed), f"{method} does not work here")


def _invocation(text: str) -> InvocationId:
    try:
        return parse_id(text)
    except BadId as error:
        raise BadRequest(str(error), "it is in the header x-holdfast-id of every answer about an invocation") from None


# -- aiohttp -----------------------------------------------------------------------------------------------------------


class _AiohttpBody:
    __slots__ = ("_content", "_encoding", "length")

    def __init__(self, request: web.BaseRequest) -> None:
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
    """`connections_max` bounds the memory that clients who only connect can take."""

    def __init__(self, handler: Callable[[web.BaseRequest], Awaitable[web.Response]], connections_max: int) -> None:
        super().__init__(
            handler, handler_cancellation=True, access_log=None, auto_decompress=False, keepalive_timeout=IDLE_S
        )
        self.connections_max = connections_max

    def connection(self) -> asyncio.BaseProtocol:
        if len(self._connections) >= self.connections_max:
            return _Refused()
        return _Connection(self, loop=self._loop, **self._kwargs)


class IngressServer:
    """Listens, and translates between aiohttp and the ingress. A client that disconnects ends its wait, nothing else."""

    def __init__(self, config: Config, ingress: Ingress) -> None:
        self._config = config
        self._ingress = ingress
        self._door: Door | None = None

    async def start(self, sockets: Sequence[socket.socket] = ()) -> None:
        """At the configured place, or through sockets that listen there already."""
        self._web = _Server(self._handle, self._config.connections_max)
        door = Door(self._web, self._web.connection)
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
        answer = await self._ingress.answer(request.method, request.raw_path, request.headers, _AiohttpBody(request))
        try:
            return await self._respond(request, answer)
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


class _Refused(asyncio.Protocol):
    """A connection beyond the bound: told so, and closed."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name.
        body = error_body(503, "too many connections to this node", source="ingress", hint=None)
        transport.write(
            b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
            b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        transport.close()
