"""`Client`, with which async programs talk to the ingress.

`SyncClient` in `synchronous` is generated from this file (`make sync-client`), so the two cannot drift apart.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar, overload

import aiohttp  # asynchronous only

from holdfast.sdk.client.aiohttp_transport import Transport
from holdfast.sdk.client.requests import MISSING, Requests, SendHandle
from holdfast.sdk.definition import Handler, HandlerRef, KeyedHandler, Nothing
from holdfast.sdk.serde import Serde

T = TypeVar("T")
I = TypeVar("I")  # noqa: E741
O = TypeVar("O")  # noqa: E741


class Client:
    """A client of the ingress, for code that runs on an event loop::

        async with Client("http://127.0.0.1:8080") as client:
            receipt = await client.call(trips.book, trip)
            sent = await client.send("mailer/notify", {"to": "ada"}, delay=timedelta(hours=1))
            result = await client.attach(sent)

    The client repeats a request for up to `retry_for` seconds after a connection error or when a node is busy. A repeated
    request never starts a second invocation. With several addresses, `Client(["http://a:8080", "http://b:8080"])`, a
    request moves on to the next one when a node does not answer or answers 503. The client stays with the address that
    answered.

    `ca` is a file with the authority that signed the nodes' certificates, for `https://` addresses that only it vouches for.
    """

    def __init__(
        self,
        url: str | Sequence[str] = "http://127.0.0.1:8080",
        *,
        token: str | None = None,
        ca: str | os.PathLike[str] | None = None,
        headers: dict[str, str] | None = None,
        retry_for: float = 60.0,
        session: aiohttp.ClientSession | None = None,  # asynchronous only
    ) -> None:
        self._requests = Requests(url, token, headers)
        self._transport = Transport(
            self._requests,
            retry_for,
            ca,
            session,  # asynchronous only
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.close()

    @overload
    async def call(
        self,
        handler: Handler[Nothing, O],
        *,
        idempotency_key: str | None = None,
        headers: dict[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
        timeout: float | timedelta | None = None,
    ) -> O: ...
    @overload
    async def call(
        self,
        handler: Handler[I, O],
        argument: I,
        *,
        idempotency_key: str | None = None,
        headers: dict[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
        timeout: float | timedelta | None = None,
    ) -> O: ...
    @overload
    async def call(
        self,
        handler: KeyedHandler[Nothing, O],
        *,
        key: str,
        idempotency_key: str | None = None,
        headers: dict[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
        timeout: float | timedelta | None = None,
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
        tags: Mapping[str, str] | None = None,
        timeout: float | timedelta | None = None,
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
        tags: Mapping[str, str] | None = None,
        timeout: float | timedelta | None = None,
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
        tags: Mapping[str, str] | None = None,
        timeout: float | timedelta | None = None,
    ) -> Any: ...
    async def call(
        self,
        handler: Any,
        argument: Any = MISSING,
        *,
        key: str | None = None,
        idempotency_key: str | None = None,
        headers: dict[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
        timeout: float | timedelta | None = None,
    ) -> Any:
        """Call a handler and wait for its result. Raises `CallFailed` if the invocation fails, and `CallTimedOut` after
        `timeout` (seconds or a timedelta): the invocation then goes on. `tags`: short texts by which people find the
        invocation, `{"tenant": "acme"}`."""
        request = self._requests.invoke(
            handler, argument, key=key, idempotency_key=idempotency_key, headers=headers, tags=tags, delay=None
        )
        return await self._transport.ask(request, timeout)

    @overload
    async def send(
        self,
        handler: Handler[Nothing, O],
        *,
        delay: float | timedelta = 0,
        idempotency_key: str | None = None,
        headers: dict[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
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
        tags: Mapping[str, str] | None = None,
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
        tags: Mapping[str, str] | None = None,
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
        tags: Mapping[str, str] | None = None,
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
        tags: Mapping[str, str] | None = None,
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
        tags: Mapping[str, str] | None = None,
    ) -> SendHandle[Any]: ...
    async def send(
        self,
        handler: Any,
        argument: Any = MISSING,
        *,
        key: str | None = None,
        delay: float | timedelta = 0,
        idempotency_key: str | None = None,
        headers: dict[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> SendHandle[Any]:
        """Start an invocation, now or after `delay`. Returns as soon as the cluster has accepted it durably."""
        handle: SendHandle[Any] = await self._transport.ask(
            self._requests.invoke(
                handler, argument, key=key, idempotency_key=idempotency_key, headers=headers, tags=tags, delay=delay
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
        """Wait for the result of an invocation, given its id or its handle."""
        return await self._transport.ask(self._requests.outcome("attach", invocation, result))

    @overload
    async def output(self, invocation: SendHandle[O]) -> O: ...
    @overload
    async def output(self, invocation: str, result: type[T]) -> T: ...
    @overload
    async def output(self, invocation: str) -> Any: ...
    async def output(self, invocation: Any, result: Any = Any) -> Any:
        """The result of an invocation that has completed. Raises `NotReady` if it has not."""
        return await self._transport.ask(self._requests.outcome("output", invocation, result))

    async def attach_workflow(self, workflow: Any, key: str, result: Any = Any) -> Any:
        """Wait for the result of a workflow, given the workflow (or its name) and its key."""
        return await self._transport.ask(self._requests.workflow("attach", workflow, key, result))

    async def output_workflow(self, workflow: Any, key: str, result: Any = Any) -> Any:
        """The result of a workflow that has completed. Raises `NotReady` if it has not."""
        return await self._transport.ask(self._requests.workflow("output", workflow, key, result))

    async def resolve_awakeable(self, awakeable_id: str, value: Any = None, *, serde: Serde[Any] | None = None) -> None:
        """Complete an awakeable with a value."""
        path = self._requests.awakeable(awakeable_id)
        await self._transport.ask(self._requests.complete(path, "resolve", value, serde=serde))

    async def reject_awakeable(self, awakeable_id: str, message: str, *, code: int = 500) -> None:
        """Reject an awakeable: its `await` raises a `TerminalError`."""
        path = self._requests.awakeable(awakeable_id)
        await self._transport.ask(self._requests.complete(path, "reject", message, code=code))

    async def decide_approval(
        self,
        approval_id: str,
        choice: str,
        *,
        comment: str = "",
        payload: Any = MISSING,
        serde: Serde[Any] | None = None,
    ) -> None:
        """Decide about an approval, given the id that its handler handed out (`approval.id`).

        `payload` replaces the one that was shown. Fails with 409 if it was decided otherwise before, or timed out.
        """
        await self._transport.ask(
            self._requests.decide(approval_id, choice, comment=comment, payload=payload, serde=serde)
        )

    async def resolve_promise(
        self, workflow: Any, key: str, name: str, value: Any = None, *, serde: Serde[Any] | None = None
    ) -> None:
        """Resolve a promise of a workflow with a value."""
        path = self._requests.promise(workflow, key, name)
        await self._transport.ask(self._requests.complete(path, "resolve", value, serde=serde))

    async def reject_promise(self, workflow: Any, key: str, name: str, message: str, *, code: int = 500) -> None:
        """Reject a promise of a workflow: whatever awaits it gets a `TerminalError`."""
        path = self._requests.promise(workflow, key, name)
        await self._transport.ask(self._requests.complete(path, "reject", message, code=code))
