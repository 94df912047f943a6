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
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from time import perf_counter
from typing import Any, Final, Protocol

from holdfast.cluster.config import Config
from holdfast.cluster.errors import (
    BadRequest,
    Conflict,
    Forbidden,
    Internal,
    NotFound,
    NotReady,
    Overloaded,
    Stopping,
    TooLarge,
    Unavailable,
    UnknownInvocation,
    WrongMethod,
    check,
    circumstance,
    error_body,
    status_of,
)
from holdfast.cluster.histogram import Histogram
from holdfast.cluster.ingress.requests import (
    JSON,
    Answer,
    Body,
    allow,
    hash_request,
    passed_on,
    read_delay_ms,
    read_invocation,
    refusal,
    split_target,
    too_large,
)
from holdfast.cluster.registry.machine import Target
from holdfast.cluster.registry.registry import Registry
from holdfast.cluster.routing.reader import Summary
from holdfast.cluster.routing.router import Leaders
from holdfast.sdk.bounds import load_json
from holdfast.sdk.ids import (
    BadId,
    InvocationId,
    format_id,
    idempotent_id,
    parse_awakeable,
    partition_key,
    workflow_id,
)
from holdfast.sdk.journal import (
    KEY_BYTES_MAX,
    NAME_BYTES_MAX,
    Failure,
    cut_text,
)
from holdfast.statemachine import refs
from holdfast.statemachine.commands import Command, CompletePromise, CompleteStep, Invoke, Mode, Ref
from holdfast.statemachine.levels import LEVEL

logger = logging.getLogger(__name__)
IDEMPOTENCY_KEY_BYTES_MAX: Final = 512
#: Of a rejection, whose text is cut to 8 KiB in any case; one with more values than that is a text.
REJECTION_BYTES_MAX: Final = 64 * 1024
REJECTION_ELEMENTS_MAX: Final = 1024
#: A larger resolution or rejection is read only if the invocation is known for which it is meant.
UNASKED_BYTES_MAX: Final = 64 * 1024
ROOM_S: Final = 30.0  # How long a large outcome waits for others to be sent.
SENT_ALONE_BYTES: Final = 1024 * 1024  # A larger answer counts as in progress until the client has it.
#: A kind of service in a sentence.
KIND_NAMES: Final = {"service": "a service", "object": "a virtual object", "workflow": "a workflow"}
_HEALTHY: Final = b'{"status":"ok"}'


class Replies(Protocol):
    def wait(self, invocation: bytes, /) -> AbstractContextManager[asyncio.Future[list[Any]]]: ...


class Ingress:
    def __init__(
        self,
        config: Config,
        registry: Registry,
        router: Leaders,
        replies: Replies,
        *,
        lookup: Callable[[InvocationId], Awaitable[Summary | None]],
        load: Callable[[bytes, Ref], Awaitable[bytes]],
        now_ms: Callable[[], int],
        level: Callable[[], int] = lambda: LEVEL,
        unhealthy: Callable[[], str | None] = lambda: None,
        warnings: Callable[[], list[str]] = list,
        closed: Callable[[], str] = lambda: "",
    ) -> None:
        self._config = config
        self._registry = registry
        self._router = router
        self._replies = replies
        self._lookup = lookup
        self._load = load  # a large value of the partition of an id
        self._now_ms = now_ms
        self._level = level  # The cluster's: see `statemachine.levels`.
        self._unhealthy = unhealthy
        self._warnings = warnings
        self._closed = closed  # Why no request is taken yet.
        self._waiting: dict[asyncio.Future[list[Any]], None] = {}  # As a set, in the order in which they came.
        self._tasks: dict[asyncio.Task[Any], None] = {}  # One for each request in progress, likewise.
        self._stopping = ""  # Why nothing is taken any more.
        self.active = 0
        self.active_bytes = 0
        self.refused = 0  # for want of room, since the start
        self.accepted = 0
        self.took = Histogram()  # seconds from request to answer

    def stop(self, why: str = "this node is shutting down") -> None:
        """No new work; whoever waits is told to ask again. The invocations themselves go on."""
        self._stopping = self._stopping or why
        for future in list(self._waiting):
            if not future.done():
                future.set_exception(Stopping(f"{self._stopping}; the invocation goes on"))

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
            return refusal(Overloaded(f"{self.active} requests are in progress here, and no more are taken"))
        self.active += 1
        began = perf_counter()
        held = [0]
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = None
        try:
            if self._stopping:
                raise Stopping(self._stopping)
            if reason := self._closed():
                raise Unavailable(reason, "nothing was accepted; send the request again after the time in Retry-After")
            path, parameters = split_target(target)
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
            error = Stopping(f"{self._stopping}, and does not know what becomes of this request")
        known = circumstance(error)
        if known is None:
            logger.exception("%s %.200s failed", method, target)
            known = Internal("an internal error; its cause is in the log of the node")
        elif isinstance(known, Overloaded):
            self.refused += 1
        return refusal(known, id_)

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
        try:
            target, key, send = self._target(path)
        except NotFound:
            target, key, send = await self._registry.certainly(lambda: self._target(path))
        if method != "POST":
            raise WrongMethod("POST", f"{method} on a handler: handlers are called with POST")
        if target.options.private:
            raise Forbidden(
                f"{target.service}/{target.handler} is private",
                "only other handlers may call it, through their context",
            )
        delay_ms = read_delay_ms(parameters, send=send)
        id_, idempotency_key = self._mint(target, key, headers)
        passed = passed_on(headers)
        payload = await self._read(body, held)
        request_hash = b"" if idempotency_key is None or self._level() < 2 else await hash_request(payload)
        # In a list, so that whoever proposes it is the last who holds it: a body is not kept while its outcome is awaited.
        work = [
            Invoke(
                id_,
                target.service,
                target.handler,
                key,
                target.mode,
                payload,
                passed,
                self._now_ms() + delay_ms if delay_ms else 0,
                None,
                -1,
                target.options.retention_ms,
                idempotency_key,
                request_hash,
            )
        ]
        del payload
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
        known = self._registry.get_service(service)
        keyed = known[0].kind != "service"
        count = 3 if keyed else 2
        send = len(path) == count + 1 and path[-1] == "send"
        if len(path) - send != count:
            shape = f"/{service}/{{key}}/{{handler}}" if keyed else f"/{service}/{{handler}}"
            raise NotFound(
                f"{service} is {KIND_NAMES[known[0].kind]}, and this path has {len(path)} segments",
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

    async def _read(self, body: Body, held: list[int], most: int | None = None) -> bytes:
        """The whole body, counted against the bounds while it comes in."""
        bound = self._config.body_bytes_max if most is None else most

        def refusal() -> TooLarge:
            if most is None:
                return too_large(bound)
            return TooLarge(f"the body is larger than {bound} bytes, which is enough for what this path takes")

        if body.length is not None and body.length > bound:
            raise refusal()
        payload: bytes | bytearray = b""
        async for chunk in body.chunks():
            size = len(chunk)
            if len(payload) + size > bound:
                raise refusal()
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
                allow(method, "GET", "HEAD")
                return self._health()
            case ["invocation", text, ("attach" | "output") as which]:
                allow(method, "GET")
                return await self._outcome(read_invocation(text), wait=which == "attach")
            case ["workflow", name, key, ("attach" | "output") as which]:
                allow(method, "GET")
                await self._workflow(name)
                return await self._outcome(workflow_id(name, key), wait=which == "attach")
            case ["workflow", name, key, "promises", promise, ("resolve" | "reject") as which]:
                allow(method, "POST")
                await self._workflow(name)
                if not 0 < len(promise.encode()) <= NAME_BYTES_MAX:
                    raise BadRequest(f"a promise's name has 1 to {NAME_BYTES_MAX} bytes")
                outcome = await self._outcome_of_client(which, body, held)
                command = CompletePromise(name, key, promise, outcome)
                return await self._complete(command, partition_key(name, key), which, None)
            case ["awakeables", text, ("resolve" | "reject") as which]:
                allow(method, "POST")
                try:
                    id_, step = parse_awakeable(text)
                except BadId as error:
                    raise BadRequest(str(error), "it is what ctx.awakeable() returned") from None
                if body.length is None or body.length > UNASKED_BYTES_MAX:
                    await self._must_exist(id_)
                outcome = await self._outcome_of_client(which, body, held)
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
            return refusal(Unavailable(problem))
        if warnings := self._warnings():
            return Answer(200, json.dumps({"status": "ok", "warnings": warnings}).encode())
        return Answer(200, _HEALTHY)

    async def _workflow(self, name: str) -> None:
        known = await self._registry.certainly(lambda: self._registry.get_service(name))
        if known[0].kind != "workflow":
            raise BadRequest(f"{name} is {KIND_NAMES[known[0].kind]}, not a workflow")

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
            metadata = (failure.extra or {}).get("metadata")
            body = error_body(failure.code, failure.message, source="invocation", hint=None, metadata=metadata)
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

    def _output_type(self, found: Summary) -> str:
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

    async def _must_exist(self, id_: InvocationId) -> None:
        """Asked before a body is read that would only be thrown away, or even written to a log, for one that does not."""
        if await self._lookup(id_) is None:
            raise NotFound("there is nothing that waits under this name")

    async def _outcome_of_client(self, which: str, body: Body, held: list[int]) -> list[Any]:
        """A resolution is any bytes; a rejection is a text, or JSON with "message" and "code"."""
        if which == "resolve":
            return [0, await self._read(body, held)]
        payload = await self._read(body, held, REJECTION_BYTES_MAX)
        code, message = 500, payload.decode(errors="replace")
        try:
            given = load_json(payload, REJECTION_ELEMENTS_MAX) if payload else {}
        except ValueError:
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
