"""A client of the ingress: call, send, attach and resolve from programs that are not handlers.

Every call and send carries an idempotency key, its own if none is given, so trying again after a broken connection or a
busy node finds the first try instead of making a second invocation. What a request is and what an answer means is
decided in `_Requests`, without I/O; `Client` sends with aiohttp, `SyncClient` with http.client and no event loop.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import ssl
import threading
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Generic, NamedTuple, TypeVar, overload
from urllib.parse import quote, urlsplit

import aiohttp

from holdfast.sdk import protocol
from holdfast.sdk.errors import BadPayload, HoldfastError, TerminalError
from holdfast.sdk.serde import ANY, Serde, serde_for
from holdfast.sdk.service import (
    AnyService,
    Handler,
    HandlerRef,
    KeyedHandler,
    Nothing,
    ServiceRef,
    check_key,
    milliseconds,
    resolve_target,
)

T = TypeVar("T")
I = TypeVar("I")  # noqa: E741
O = TypeVar("O")  # noqa: E741

_MISSING: Final[Any] = object()
_PAUSE: Final = 0.1  # before the second try; doubled up to
_PAUSE_MAX: Final = 5.0
_LONG: Final = 60.0  # No node holds a request for so long that it cannot accept: such a try waited for its outcome.
NOT_READY: Final = 470
_TRY_AGAIN: Final = frozenset({429, 502, 503, 504})


class CallFailed(HoldfastError):
    """An invocation failed, or the ingress refused a request.

    `code` is an HTTP status, `source` is "invocation" (the handler said so) or "ingress", `hint` says what to do.
    """

    def __init__(
        self,
        message: str,
        *,
        code: int,
        source: str = "ingress",
        hint: str | None = None,
        invocation_id: str | None = None,
    ) -> None:
        super().__init__(f"{message} ({hint})" if hint else message)
        self.message = message
        self.code = code
        self.source = source
        self.hint = hint
        self.invocation_id = invocation_id


class NotReady(CallFailed):
    """`output` was asked of an invocation that has not completed."""


class Unreachable(CallFailed):
    """No node answered in time. With the same idempotency key the request can be made again without danger."""


class SendHandle(NamedTuple, Generic[O]):
    """An invocation that was sent. `previously`: the idempotency key was known, so it is the earlier one."""

    invocation_id: str
    previously: bool
    serde: Serde[O]


class _Request(NamedTuple, Generic[T]):
    method: str
    path: str
    body: bytes
    headers: dict[str, str]
    read: Callable[[bytes], T]


class _Again(Exception):
    """This answer means: try again, not before `after` seconds."""

    def __init__(self, after: float, error: CallFailed) -> None:
        self.after = after
        self.error = error


class _Requests:
    """What to ask for and how to read the answer."""

    def __init__(self, url: str, token: str | None, headers: dict[str, str] | None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"the URL of an ingress is like http://127.0.0.1:8080, not {url!r}")
        self.url = url.rstrip("/")
        self.parts = parts
        self.prefix = parts.path.rstrip("/")
        self.headers = dict(headers or {})
        if token is not None:
            self.headers["Authorization"] = f"Bearer {token}"

    def invoke(
        self,
        handler: Any,
        argument: Any,
        *,
        key: str | None,
        idempotency_key: str | None,
        headers: dict[str, str] | None,
        delay: float | timedelta | None,
    ) -> _Request[Any]:
        target = resolve_target(handler, key)
        segments = [target.service, *([key] if key is not None else []), target.handler]
        path = "/" + "/".join(_segment(segment) for segment in segments)
        body = b"" if argument is _MISSING else target.input.dump(argument)
        given = {**self.headers, **(headers or {}), "Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        if argument is not _MISSING:
            given.setdefault("Content-Type", target.input.content_type)
        if delay is None:
            return _Request("POST", path, body, given, target.output.load)
        delay_ms = milliseconds(delay, "delay")
        path += "/send" + (f"?delay={delay_ms}ms" if delay_ms else "")

        def read(answer: bytes) -> SendHandle[Any]:
            found = json.loads(answer)
            return SendHandle(found["invocationId"], found["status"] == "PreviouslyAccepted", target.output)

        return _Request("POST", path, body, given, read)

    def outcome(self, which: str, invocation: str | SendHandle[Any], result: Any) -> _Request[Any]:
        if isinstance(invocation, SendHandle):
            serde = invocation.serde if result is Any else serde_for(result)
            invocation_id = invocation.invocation_id
        else:
            serde, invocation_id = serde_for(result), invocation
        protocol.parse_id(invocation_id)
        return _Request("GET", f"/holdfast/invocation/{invocation_id}/{which}", b"", self.headers, serde.load)

    def workflow(self, which: str, workflow: Any, key: str, result: Any) -> _Request[Any]:
        serde = serde_for(result)
        if isinstance(workflow, AnyService) and result is Any:
            serde = next((each.output for each in workflow.handlers.values() if each.is_main), ANY)
        path = f"/holdfast/workflow/{_segment(_name(workflow))}/{_segment(_checked(key))}/{which}"
        return _Request("GET", path, b"", self.headers, serde.load)

    def complete(self, path: str, which: str, value: Any, serde: Serde[Any] | None, code: int) -> _Request[None]:
        refusal = {"message": value, "code": code}
        body = (serde or ANY).dump(value) if which == "resolve" else json.dumps(refusal).encode()
        headers = {**self.headers, "Content-Type": "application/json"}
        return _Request("POST", f"/holdfast/{path}/{which}", body, headers, lambda _: None)

    def awakeable(self, awakeable_id: str) -> str:
        protocol.parse_awakeable(awakeable_id)
        return f"awakeables/{awakeable_id}"

    def promise(self, workflow: Any, key: str, name: str) -> str:
        return f"workflow/{_segment(_name(workflow))}/{_segment(_checked(key))}/promises/{_segment(name)}"

    def answer(self, request: _Request[T], status: int, headers: Any, body: bytes) -> T:
        """The value; raises CallFailed, or _Again."""
        if 200 <= status < 300:
            try:
                return request.read(body)
            except (BadPayload, ValueError, KeyError, TypeError) as error:
                raise CallFailed(f"the answer cannot be read: {error}", code=status) from error
        failed = _failure(status, headers, body)
        if status in _TRY_AGAIN and failed.source != "invocation":
            raise _Again(_retry_after(headers), failed)
        raise failed


def _failure(status: int, headers: Any, body: bytes) -> CallFailed:
    try:
        found = json.loads(body)
        message = str(found["message"])
        source = str(found.get("source", "ingress"))
        hint = found.get("hint")
    except (ValueError, KeyError, TypeError, AttributeError):
        message, source, hint = body.decode(errors="replace")[:500] or f"HTTP status {status}", "ingress", None
    kind = NotReady if status == NOT_READY else CallFailed
    return kind(message, code=status, source=source, hint=hint, invocation_id=headers.get("x-holdfast-id"))


def _retry_after(headers: Any) -> float:
    try:
        return min(60.0, max(0.0, float(headers.get("Retry-After", 0))))
    except ValueError:
        return 0.0


def _segment(text: str) -> str:
    return quote(text, safe="")


def _name(workflow: Any) -> str:
    if isinstance(workflow, str):
        return workflow
    if isinstance(workflow, AnyService | ServiceRef):
        return workflow.name
    raise TypeError(f"a workflow or its name expected, not {workflow!r:.80}")


def _checked(key: str) -> str:
    check_key(key)
    return key


class _Pauses:
    """How long to wait before the next try, within a budget for tries that fail.

    Waiting for an outcome costs nothing of it: who waited for an hour when a node was restarted has not failed for an hour.
    """

    def __init__(self, budget: float) -> None:
        self._budget = budget
        self._deadline: float | None = None
        self._pause = _PAUSE
        self._began = 0.0

    def begin(self) -> None:
        """A try."""
        self._began = time.monotonic()

    def next(self, after: float, error: CallFailed) -> float:
        now = time.monotonic()
        if self._deadline is None or now - self._began >= _LONG:
            self._deadline, self._pause = now + self._budget, _PAUSE
        pause = max(after, self._pause * (0.5 + random.random() / 2))
        self._pause = min(self._pause * 2, _PAUSE_MAX)
        if now + pause > self._deadline:
            raise error
        return pause


class Client:
    """Talks to an ingress from async code::

        async with Client("http://127.0.0.1:8080") as client:
            receipt = await client.call(trips.book, trip)
            sent = await client.send("mailer/notify", {"to": "ada"}, delay=timedelta(hours=1))
            result = await client.attach(sent)

    Requests are tried again for `retry_for` seconds after connection errors and when a node is busy; that never makes
    a second invocation.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8080",
        *,
        token: str | None = None,
        headers: dict[str, str] | None = None,
        retry_for: float = 60.0,
        session: aiohttp.ClientSession | None = None,
    ) -> None:
        self._requests = _Requests(url, token, headers)
        self._retry_for = retry_for
        self._session = session
        self._owns_session = session is None

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close its connections."""
        if self._session is not None and self._owns_session:
            await self._session.close()
            self._session = None

    @overload
    async def call(
        self, handler: Handler[Nothing, O], *, idempotency_key: str | None = None, headers: dict[str, str] | None = None
    ) -> O: ...
    @overload
    async def call(
        self,
        handler: Handler[I, O],
        argument: I,
        *,
        idempotency_key: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> O: ...
    @overload
    async def call(
        self,
        handler: KeyedHandler[Nothing, O],
        *,
        key: str,
        idempotency_key: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> O: ...
    @overload
    async def call(
        self,
        handler: KeyedHandler[I, O],
        argument: I,
        *,
        key: str,
        idempotency_key: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> O: ...
    @overload
    async def call(
        self,
        handler: HandlerRef[I, O],
        argument: I = ...,
        *,
        key: str | None = None,
        idempotency_key: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> O: ...
    @overload
    async def call(
        self,
        handler: str,
        argument: Any = ...,
        *,
        key: str | None = None,
        idempotency_key: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> Any: ...
    async def call(
        self,
        handler: Any,
        argument: Any = _MISSING,
        *,
        key: str | None = None,
        idempotency_key: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> Any:
        """Call a handler and wait for its result. Raises `CallFailed` if it failed."""
        return await self._ask(
            self._requests.invoke(
                handler, argument, key=key, idempotency_key=idempotency_key, headers=headers, delay=None
            )
        )

    @overload
    async def send(
        self,
        handler: Handler[Nothing, O],
        *,
        delay: float | timedelta = 0,
        idempotency_key: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> SendHandle[O]: ...
    @overload
    async def send(
        self,
        handler: Handler[I, O],
        argument: I,
        *,
        delay: float | timedelta = 0,
        idempotency_key: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> SendHandle[O]: ...
    @overload
    async def send(
        self,
        handler: KeyedHandler[Nothing, O],
        *,
        key: str,
        delay: float | timedelta = 0,
        idempotency_key: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> SendHandle[O]: ...
    @overload
    async def send(
        self,
        handler: KeyedHandler[I, O],
        argument: I,
        *,
        key: str,
        delay: float | timedelta = 0,
        idempotency_key: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> SendHandle[O]: ...
    @overload
    async def send(
        self,
        handler: HandlerRef[I, O],
        argument: I = ...,
        *,
        key: str | None = None,
        delay: float | timedelta = 0,
        idempotency_key: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> SendHandle[O]: ...
    @overload
    async def send(
        self,
        handler: str,
        argument: Any = ...,
        *,
        key: str | None = None,
        delay: float | timedelta = 0,
        idempotency_key: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> SendHandle[Any]: ...
    async def send(
        self,
        handler: Any,
        argument: Any = _MISSING,
        *,
        key: str | None = None,
        delay: float | timedelta = 0,
        idempotency_key: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> SendHandle[Any]:
        """Begin an invocation, now or after `delay`, and return when it is durably accepted."""
        handle: SendHandle[Any] = await self._ask(
            self._requests.invoke(
                handler, argument, key=key, idempotency_key=idempotency_key, headers=headers, delay=delay
            )
        )
        return handle

    @overload
    async def attach(self, invocation: SendHandle[O]) -> O: ...
    @overload
    async def attach(self, invocation: str, result: type[T]) -> T: ...
    @overload
    async def attach(self, invocation: str) -> Any: ...
    async def attach(self, invocation: Any, result: Any = Any) -> Any:
        """Wait for the result of an invocation, by its id or its handle."""
        return await self._ask(self._requests.outcome("attach", invocation, result))

    @overload
    async def output(self, invocation: SendHandle[O]) -> O: ...
    @overload
    async def output(self, invocation: str, result: type[T]) -> T: ...
    @overload
    async def output(self, invocation: str) -> Any: ...
    async def output(self, invocation: Any, result: Any = Any) -> Any:
        """The result of an invocation if it has completed; raises `NotReady` if not."""
        return await self._ask(self._requests.outcome("output", invocation, result))

    async def attach_workflow(self, workflow: Any, key: str, result: Any = Any) -> Any:
        """Wait for the result of a workflow, by the workflow (or its name) and key."""
        return await self._ask(self._requests.workflow("attach", workflow, key, result))

    async def output_workflow(self, workflow: Any, key: str, result: Any = Any) -> Any:
        """The result of a workflow if it has completed; raises `NotReady` if not."""
        return await self._ask(self._requests.workflow("output", workflow, key, result))

    async def resolve_awakeable(self, awakeable_id: str, value: Any = None, *, serde: Serde[Any] | None = None) -> None:
        """Complete an awakeable with a value."""
        path = self._requests.awakeable(awakeable_id)
        await self._ask(self._requests.complete(path, "resolve", value, serde, 0))

    async def reject_awakeable(self, awakeable_id: str, message: str, *, code: int = 500) -> None:
        """Fail an awakeable: its `await` raises a `TerminalError`."""
        path = self._requests.awakeable(awakeable_id)
        await self._ask(self._requests.complete(path, "reject", message, None, code))

    async def resolve_promise(
        self, workflow: Any, key: str, name: str, value: Any = None, *, serde: Serde[Any] | None = None
    ) -> None:
        """Give a promise of a workflow its value."""
        path = self._requests.promise(workflow, key, name)
        await self._ask(self._requests.complete(path, "resolve", value, serde, 0))

    async def reject_promise(self, workflow: Any, key: str, name: str, message: str, *, code: int = 500) -> None:
        """Fail a promise of a workflow."""
        path = self._requests.promise(workflow, key, name)
        await self._ask(self._requests.complete(path, "reject", message, None, code))

    async def _ask(self, request: _Request[T]) -> T:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10), connector=aiohttp.TCPConnector(limit=0)
            )
        url = self._requests.url + request.path
        pauses = _Pauses(self._retry_for)
        while True:
            pauses.begin()
            try:
                async with self._session.request(
                    request.method, url, data=request.body or None, headers=request.headers
                ) as response:
                    body = await response.read()
                return self._requests.answer(request, response.status, response.headers, body)
            except _Again as again:
                pause = pauses.next(again.after, again.error)
            except (aiohttp.ClientError, OSError) as error:
                pause = pauses.next(0, _unreachable(self._requests.url, error))
            await asyncio.sleep(pause)


def _unreachable(url: str, error: Exception) -> Unreachable:
    text = f"{url} does not answer: {error or type(error).__name__}"
    return Unreachable(text, code=503, hint="is a node running there?")


class SyncClient:
    """The twin of `Client` for code without an event loop; safe to share between threads::

    with SyncClient("http://127.0.0.1:8080") as client:
        receipt = client.call(trips.book, trip)
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8080",
        *,
        token: str | None = None,
        headers: dict[str, str] | None = None,
        retry_for: float = 60.0,
    ) -> None:
        self._requests = _Requests(url, token, headers)
        self._retry_for = retry_for
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()

    def __enter__(self) -> SyncClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close its connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    @overload
    def call(
        self, handler: Handler[Nothing, O], *, idempotency_key: str | None = None, headers: dict[str, str] | None = None
    ) -> O: ...
    @overload
    def call(
        self,
        handler: Handler[I, O],
        argument: I,
        *,
        idempotency_key: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> O: ...
    @overload
    def call(
        self,
        handler: KeyedHandler[Nothing, O],
        *,
        key: str,
        idempotency_key: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> O: ...
    @overload
    def call(
        self,
        handler: KeyedHandler[I, O],
        argument: I,
        *,
        key: str,
        idempotency_key: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> O: ...
    @overload
    def call(
        self,
        handler: HandlerRef[I, O],
        argument: I = ...,
        *,
        key: str | None = None,
        idempotency_key: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> O: ...
    @overload
    def call(
        self,
        handler: str,
        argument: Any = ...,
        *,
        key: str | None = None,
        idempotency_key: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> Any: ...
    def call(
        self,
        handler: Any,
        argument: Any = _MISSING,
        *,
        key: str | None = None,
        idempotency_key: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> Any:
        """Call a handler and wait for its result. Raises `CallFailed` if it failed."""
        return self._ask(
            self._requests.invoke(
                handler, argument, key=key, idempotency_key=idempotency_key, headers=headers, delay=None
            )
        )

    @overload
    def send(
        self,
        handler: Handler[Nothing, O],
        *,
        delay: float | timedelta = 0,
        idempotency_key: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> SendHandle[O]: ...
    @overload
    def send(
        self,
        handler: Handler[I, O],
        argument: I,
        *,
        delay: float | timedelta = 0,
        idempotency_key: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> SendHandle[O]: ...
    @overload
    def send(
        self,
        handler: KeyedHandler[Nothing, O],
        *,
        key: str,
        delay: float | timedelta = 0,
        idempotency_key: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> SendHandle[O]: ...
    @overload
    def send(
        self,
        handler: KeyedHandler[I, O],
        argument: I,
        *,
        key: str,
        delay: float | timedelta = 0,
        idempotency_key: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> SendHandle[O]: ...
    @overload
    def send(
        self,
        handler: HandlerRef[I, O],
        argument: I = ...,
        *,
        key: str | None = None,
        delay: float | timedelta = 0,
        idempotency_key: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> SendHandle[O]: ...
    @overload
    def send(
        self,
        handler: str,
        argument: Any = ...,
        *,
        key: str | None = None,
        delay: float | timedelta = 0,
        idempotency_key: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> SendHandle[Any]: ...
    def send(
        self,
        handler: Any,
        argument: Any = _MISSING,
        *,
        key: str | None = None,
        delay: float | timedelta = 0,
        idempotency_key: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> SendHandle[Any]:
        """Begin an invocation, now or after `delay`, and return when it is durably accepted."""
        handle: SendHandle[Any] = self._ask(
            self._requests.invoke(
                handler, argument, key=key, idempotency_key=idempotency_key, headers=headers, delay=delay
            )
        )
        return handle

    @overload
    def attach(self, invocation: SendHandle[O]) -> O: ...
    @overload
    def attach(self, invocation: str, result: type[T]) -> T: ...
    @overload
    def attach(self, invocation: str) -> Any: ...
    def attach(self, invocation: Any, result: Any = Any) -> Any:
        """Wait for the result of an invocation, by its id or its handle."""
        return self._ask(self._requests.outcome("attach", invocation, result))

    @overload
    def output(self, invocation: SendHandle[O]) -> O: ...
    @overload
    def output(self, invocation: str, result: type[T]) -> T: ...
    @overload
    def output(self, invocation: str) -> Any: ...
    def output(self, invocation: Any, result: Any = Any) -> Any:
        """The result of an invocation if it has completed; raises `NotReady` if not."""
        return self._ask(self._requests.outcome("output", invocation, result))

    def attach_workflow(self, workflow: Any, key: str, result: Any = Any) -> Any:
        """Wait for the result of a workflow, by the workflow (or its name) and key."""
        return self._ask(self._requests.workflow("attach", workflow, key, result))

    def output_workflow(self, workflow: Any, key: str, result: Any = Any) -> Any:
        """The result of a workflow if it has completed; raises `NotReady` if not."""
        return self._ask(self._requests.workflow("output", workflow, key, result))

    def resolve_awakeable(self, awakeable_id: str, value: Any = None, *, serde: Serde[Any] | None = None) -> None:
        """Complete an awakeable with a value."""
        path = self._requests.awakeable(awakeable_id)
        self._ask(self._requests.complete(path, "resolve", value, serde, 0))

    def reject_awakeable(self, awakeable_id: str, message: str, *, code: int = 500) -> None:
        """Fail an awakeable: its `await` raises a `TerminalError`."""
        path = self._requests.awakeable(awakeable_id)
        self._ask(self._requests.complete(path, "reject", message, None, code))

    def resolve_promise(
        self, workflow: Any, key: str, name: str, value: Any = None, *, serde: Serde[Any] | None = None
    ) -> None:
        """Give a promise of a workflow its value."""
        path = self._requests.promise(workflow, key, name)
        self._ask(self._requests.complete(path, "resolve", value, serde, 0))

    def reject_promise(self, workflow: Any, key: str, name: str, message: str, *, code: int = 500) -> None:
        """Fail a promise of a workflow."""
        path = self._requests.promise(workflow, key, name)
        self._ask(self._requests.complete(path, "reject", message, None, code))

    def _ask(self, request: _Request[T]) -> T:
        pauses = _Pauses(self._retry_for)
        while True:
            pauses.begin()
            connection = self._take()
            try:
                try:
                    connection.request(
                        request.method,
                        self._requests.prefix + request.path,
                        body=request.body or None,
                        headers={**request.headers, **({} if request.body else {"Content-Length": "0"})},
                    )
                    response = connection.getresponse()
                    body = response.read()
                except BaseException:
                    connection.close()
                    raise
                with self._lock:
                    self._idle.append(connection)
                return self._requests.answer(request, response.status, response.headers, body)
            except _Again as again:
                pause = pauses.next(again.after, again.error)
            except (http.client.HTTPException, OSError) as error:
                pause = pauses.next(0, _unreachable(self._requests.url, error))
            time.sleep(pause)

    def _take(self) -> http.client.HTTPConnection:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        parts = self._requests.parts
        assert parts.hostname is not None
        if parts.scheme == "https":
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(parts.hostname, parts.port, context=context)
        return http.client.HTTPConnection(parts.hostname, parts.port)


__all__ = ["CallFailed", "Client", "NotReady", "SendHandle", "SyncClient", "TerminalError", "Unreachable"]
