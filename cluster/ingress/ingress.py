"""The ingress: HTTP requests become invocations, and their outcomes become responses.

The id and the time of an invocation are minted here, once; from then on a retry, by us or by the client with the same
Idempotency-Key, finds the first one. A client that goes away takes only its connection with it: the invocation goes on.

This is the hot path, so there is no router, no middleware and no application object: one function looks at the path.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from time import perf_counter
from typing import Any, Final

from holdfast.cluster.config import Config
from holdfast.cluster.errors import (
    BadRequest,
    Conflict,
    Forbidden,
    NotFound,
    NotReady,
    Stopping,
    TooLarge,
    Unavailable,
    UnknownInvocation,
    WrongMethod,
    check,
    status_of,
)
from holdfast.cluster.histogram import Histogram
from holdfast.cluster.http.event_stream import EVENT_STREAM, is_wanted
from holdfast.cluster.http.exchange import JSON, Answer, Request, split_target
from holdfast.cluster.http.routes import PUBLIC, match
from holdfast.cluster.http.streams import Stream
from holdfast.cluster.ingress.following import Replies, body_of, follow
from holdfast.cluster.ingress.openapi import openapi
from holdfast.cluster.ingress.requests import (
    Hidden,
    Sent,
    hash_request,
    passed_on,
    read_delay_ms,
    read_invocation,
    read_tags,
    too_large,
    trace,
)
from holdfast.cluster.ingress.routes import PREFIX, ROUTES
from holdfast.cluster.registry.machine import Target
from holdfast.cluster.registry.registry import Registry
from holdfast.cluster.routing.approvals import Inbox, read_approval_id, read_draft
from holdfast.cluster.routing.channel import Channel
from holdfast.cluster.routing.reader import Summary
from holdfast.cluster.routing.router import Leaders
from holdfast.sdk.bounds import load_json
from holdfast.sdk.ids import (
    BadId,
    InvocationId,
    Route,
    format_id,
    idempotent_id,
    parse_approval,
    parse_awakeable,
    partition_key,
    workflow_id,
)
from holdfast.sdk.journal import (
    KEY_BYTES_MAX,
    NAME_BYTES_MAX,
    cut_text,
)
from holdfast.statemachine import refs
from holdfast.statemachine.commands import Command, CompletePromise, CompleteStep, Invoke, Mode, Ref
from holdfast.statemachine.effects import Code
from holdfast.statemachine.levels import LEVEL
from holdfast.statemachine.outcomes import failed, failure_of, payload_of, succeeded

logger = logging.getLogger(__name__)
IDEMPOTENCY_KEY_BYTES_MAX: Final = 512
#: JSON values in a rejection. One with more of them counts as plain text, which is cut to 8 KiB.
REJECTION_BYTES_MAX: Final = 64 * 1024
REJECTION_ELEMENTS_MAX: Final = 1024
#: A larger resolution or rejection is read only if its invocation exists.
UNASKED_BYTES_MAX: Final = 64 * 1024
DECISION_BYTES_MAX: Final = 512 * 1024
DECISION_ELEMENTS_MAX: Final = 10_000
ROOM_S: Final = 30.0  # How long a large outcome waits for others to be sent.
#: A kind of service in a sentence.
KIND_NAMES: Final = {"service": "a service", "object": "a virtual object", "workflow": "a workflow"}
_HEALTHY: Final = b'{"status":"ok"}'


class Ingress:
    def __init__(
        self,
        config: Config,
        registry: Registry,
        router: Leaders,
        replies: Replies,
        *,
        approvals: Inbox,
        lookup: Callable[[InvocationId], Awaitable[Summary | None]],
        load: Callable[[InvocationId, Ref], Awaitable[bytes]],
        now_ms: Callable[[], int],
        level: Callable[[], int] = lambda: LEVEL,
        unhealthy: Callable[[], str | None] = lambda: None,
        warnings: Callable[[], list[str]] = list,
        closed: Callable[[], str] = lambda: "",
    ) -> None:
        self._config = config
        self._hidden = Hidden(config.redact_headers)
        self._registry = registry
        self._router = router
        self._replies = replies
        self._approvals = approvals
        self._lookup = lookup
        self._load = load  # a large value of the partition of an id
        self._now_ms = now_ms
        self._level = level  # The cluster's: see `statemachine.levels`.
        self._unhealthy = unhealthy
        self._warnings = warnings
        self._closed = closed  # Why no request is taken yet.
        self._waiting: dict[Channel, None] = {}  # Used as a set, in order of arrival.
        self.accepted = 0
        self.acceptance = Histogram()  # Seconds until an invocation is durable.

    def stop(self, why: str) -> None:
        for channel in list(self._waiting):
            channel.refuse(Stopping(f"{why}; the invocation goes on"))

    def name_act(self, request: Request) -> None:
        path = split_target(request.target)[0]
        for route in ROUTES:
            if route.method == request.method == "POST" and (places := match(route, path)) is not None:
                _name_act(request, route.name.partition("_")[0], places)
                return

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def handle(self, request: Request) -> Answer:
        if reason := self._closed():
            raise Unavailable(reason, "nothing was accepted; send the request again after the time in Retry-After")
        path, parameters = split_target(request.target)
        if path[0] == PREFIX:
            return await self._own(request, path, parameters)
        if not path[0]:
            raise NotFound(
                "there is nothing here: this is the ingress",
                "POST /{service}/{handler} calls a handler; the admin API has a page about it all at its /",
            )
        request.principal.check_service(path[0])
        return await self._invoke(request, path, parameters)

    # -- invocations -------------------------------------------------------------------------------------------------

    async def _invoke(self, request: Request, path: list[str], parameters: dict[str, str]) -> Answer:
        try:
            target, key, send = self._target(path)
        except NotFound:
            target, key, send = await self._registry.certainly(lambda: self._target(path))
        if request.method != "POST":
            raise WrongMethod("POST", f"{request.method} on a handler: handlers are called with POST")
        return await self._start(
            request, target, key=key, headers=request.headers, parameters=parameters, payload=None, send=send
        )

    async def send(self, request: Request, sent: Sent) -> Answer:
        """Start an invocation for the admin API, where a body says what path, parameters and headers of /send say here."""
        if reason := self._closed():
            raise Unavailable(reason, "nothing was accepted; send the request again after the time in Retry-After")
        request.principal.check_service(sent.service)
        target = await self._registry.certainly(lambda: self._registry.resolve(sent.service, sent.handler))
        if (target.kind == "service") != (sent.key is None):
            needs = "has no keys" if sent.key is not None else "needs a key"
            raise BadRequest(f"{sent.service} is {KIND_NAMES[target.kind]}, which {needs}")
        if sent.key is not None:
            _check_key(sent.key)
        if len(sent.payload) > self._config.body_bytes_max:
            raise too_large(self._config.body_bytes_max)
        parameters = {} if sent.delay is None else {"delay": sent.delay}
        return await self._start(
            request,
            target,
            key=sent.key,
            headers=sent.headers,
            parameters=parameters,
            payload=sent.payload,
            send=True,
        )

    async def _start(
        self,
        request: Request,
        target: Target,
        *,
        key: str | None,
        headers: Mapping[str, str],
        parameters: Mapping[str, str],
        payload: bytes | None,
        send: bool,
    ) -> Answer:
        """`payload`: None if it is the body of the request, which is read when everything else is in order."""
        if target.options.private:
            raise Forbidden(
                f"{target.service}/{target.handler} is private",
                "only other handlers may call it, through their context",
            )
        delay_ms = read_delay_ms(parameters, send=send)
        id_, idempotency_key = self._mint(target, key, headers)
        tags = read_tags(headers) if self._level() >= 2 else None
        passed = passed_on(headers, self._hidden)
        if request.principal.id:
            passed.pop("authorization", None)  # It is ours: a journal must not hold the token.
        if self._config.traces:
            trace(passed, id_, self._config.traces_ratio)
        if payload is None:
            payload = await request.read(self._config.body_bytes_max, too_large)
        request_hash = b"" if idempotency_key is None or self._level() < 2 else await hash_request(payload)
        # In a list, so that the proposal holds the last reference: the body is freed while the outcome is awaited.
        work = [
            Invoke(
                id=id_,
                service=target.service,
                handler=target.handler,
                key=key,
                mode=target.mode,
                payload=payload,
                headers=passed,
                start_at_ms=self._now_ms() + delay_ms if delay_ms else 0,
                caller=None,
                caller_step=-1,
                retention_ms=target.options.retention_ms,
                idempotency_key=idempotency_key,
                request_hash=request_hash,
                tags=tags,
            )
        ]
        del payload
        # From here on there is an id, and every answer carries it, so the client can ask for the invocation.
        request.id = format_id(id_)
        return await (self._send(request, id_, work) if send else self._call(request, id_, work, target))

    async def _call(self, request: Request, id_: InvocationId, work: list[Invoke], target: Target) -> Answer:
        with self._replies.wait(id_) as reply:  # Registered first, so that no outcome is missed.
            self._waiting[reply] = None
            try:
                began = perf_counter()
                result = await self._router.submit(id_, work.pop())
                self.acceptance.observe(perf_counter() - began)
                request.let_go()
                self.accepted += 1
                outcome = result.outcome
                if outcome is None:
                    check(result)
                    outcome = await reply
            finally:
                self._waiting.pop(reply, None)
        return await self._outcome_answer(request, id_, outcome, target.output_type)

    async def _send(self, request: Request, id_: InvocationId, work: list[Invoke]) -> Answer:
        began = perf_counter()
        result = check(await self._router.submit(id_, work.pop()))
        self.acceptance.observe(perf_counter() - began)
        self.accepted += 1
        status = b"PreviouslyAccepted" if result.code == Code.UNCHANGED else b"Accepted"
        name = format_id(id_)
        return Answer(202, b'{"invocationId":"%s","status":"%s"}' % (name.encode(), status), JSON, name)

    def _target(self, path: list[str]) -> tuple[Target, str | None, bool]:
        """(handler, key, whether it is a send). The meaning of a segment depends on the kind of the service."""
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
        _check_key(path[1])
        return target, path[1], send

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

    # -- the ingress's own paths -------------------------------------------------------------------------------------

    async def _own(self, request: Request, path: list[str], parameters: dict[str, str]) -> Answer:
        allowed: list[str] = []
        for route in ROUTES:
            places = match(route, path)
            if places is None:
                continue
            if route.service:
                request.principal.check_service(places[route.service])
            elif route.role != PUBLIC:
                request.principal.check(route.role)
            if route.method == request.method:
                if parameters:
                    raise BadRequest(f"there is no parameter {next(iter(parameters))!r:.60} here")
                answer: Callable[[Request, Mapping[str, str]], Awaitable[Answer]] = getattr(self, f"_on_{route.name}")
                return await answer(request, places)
            allowed.append(route.method)
        if allowed:
            raise WrongMethod(", ".join(allowed), f"{request.method} does not work here")
        raise NotFound(
            f"there is nothing at /{'/'.join(path):.200}",
            "/holdfast/openapi.json describes what there is; POST /{service}/{handler} calls a handler",
        )

    async def _on_health(self, request: Request, places: Mapping[str, str]) -> Answer:
        return self._health()

    async def _on_openapi(self, request: Request, places: Mapping[str, str]) -> Answer:
        known = self._registry.machine.services
        services = [service for name, (service, _) in sorted(known.items()) if request.principal.may_invoke(name)]
        return Answer(200, await asyncio.to_thread(lambda: json.dumps(openapi(services)).encode()))

    async def _on_attach(self, request: Request, places: Mapping[str, str]) -> Answer:
        return await self._attach(request, read_invocation(places["id"]))

    async def _on_output(self, request: Request, places: Mapping[str, str]) -> Answer:
        return await self._outcome(request, read_invocation(places["id"]), wait=False)

    async def _on_attach_workflow(self, request: Request, places: Mapping[str, str]) -> Answer:
        await self._workflow(places["name"])
        return await self._attach(request, workflow_id(places["name"], places["key"]))

    async def _on_output_workflow(self, request: Request, places: Mapping[str, str]) -> Answer:
        await self._workflow(places["name"])
        return await self._outcome(request, workflow_id(places["name"], places["key"]), wait=False)

    async def _on_resolve_promise(self, request: Request, places: Mapping[str, str]) -> Answer:
        return await self._complete_promise(request, places, "resolve")

    async def _on_reject_promise(self, request: Request, places: Mapping[str, str]) -> Answer:
        return await self._complete_promise(request, places, "reject")

    async def _complete_promise(self, request: Request, places: Mapping[str, str], which: str) -> Answer:
        name, key, promise = places["name"], places["key"], places["promise"]
        _name_act(request, which, places)
        await self._workflow(name)
        if not 0 < len(promise.encode()) <= NAME_BYTES_MAX:
            raise BadRequest(f"a promise's name has 1 to {NAME_BYTES_MAX} bytes")
        outcome = await self._outcome_of_client(request, which)
        return await self._complete(CompletePromise(name, key, promise, outcome), partition_key(name, key), which)

    async def _on_resolve_awakeable(self, request: Request, places: Mapping[str, str]) -> Answer:
        return await self._complete_awakeable(request, places, "resolve")

    async def _on_reject_awakeable(self, request: Request, places: Mapping[str, str]) -> Answer:
        return await self._complete_awakeable(request, places, "reject")

    async def _complete_awakeable(self, request: Request, places: Mapping[str, str], which: str) -> Answer:
        _name_act(request, which, places)
        try:
            id_, step, secret = parse_awakeable(places["id"])
        except BadId as error:
            raise BadRequest(str(error), "it is what ctx.awakeable() returned") from None
        if secret and self._level() < 2:
            raise Unavailable("this awakeable requires that every node of the cluster runs this release")
        if request.length is None or request.length > UNASKED_BYTES_MAX:
            await self._must_exist(id_)
        outcome = await self._outcome_of_client(request, which)
        request.id = format_id(id_)
        answer = await self._complete(CompleteStep(id_, step, outcome, secret=secret), id_, which)
        return answer._replace(id=request.id)

    async def _on_decide_approval(self, request: Request, places: Mapping[str, str]) -> Answer:
        _name_act(request, "decide", places)
        id_ = read_approval_id(places["id"])
        if not id_.secret:
            raise NotFound("there is no such approval", "the ingress needs the whole id, which the handler handed out")
        found = await self._approvals.find(id_)
        request.principal.check_service(found.service)
        try:
            given = load_json(await request.read(DECISION_BYTES_MAX, _more_than_enough), DECISION_ELEMENTS_MAX)
        except ValueError as error:
            raise BadRequest(f"the body is not JSON: {error}", 'send JSON as in {"choice": "approve"}') from None
        if not isinstance(given, dict) or not given.keys() <= {"choice", "comment", "payload"}:
            raise BadRequest('the body must be a JSON object with "choice", and maybe "comment" and "payload"')
        draft = read_draft(given, lambda value: json.dumps(value, separators=(",", ":")).encode())
        request.targets["choice"] = draft.choice
        made = await self._approvals.decide(found, draft, request.principal)
        shown = {"status": "Decided" if made.is_new else "AlreadyDecided", "choice": made.decided.choice}
        return Answer(200, json.dumps(shown).encode(), id=format_id(id_.invocation))

    def _health(self) -> Answer:
        problem = self._unhealthy()
        if problem is not None:
            raise Unavailable(problem)
        if warnings := self._warnings():
            return Answer(200, json.dumps({"status": "ok", "warnings": warnings}).encode())
        return Answer(200, _HEALTHY)

    async def _workflow(self, name: str) -> None:
        known = await self._registry.certainly(lambda: self._registry.get_service(name))
        if known[0].kind != "workflow":
            raise BadRequest(f"{name} is {KIND_NAMES[known[0].kind]}, not a workflow")

    async def _attach(self, request: Request, id_: InvocationId) -> Answer:
        if not is_wanted(request.headers):
            return await self._outcome(request, id_, wait=True)
        await self._find(request, id_)
        stream = Stream(follow(id_, self._replies, self._lookup))
        return Answer(200, b"", EVENT_STREAM, request.id, stream=stream)

    async def _find(self, request: Request, id_: InvocationId) -> Summary:
        name = request.id = format_id(id_)
        found = await self._lookup(id_)
        # A token for some services does not learn which invocations of others exist: their ids can be computed.
        if found is None or not request.principal.may_invoke(found.service):
            raise UnknownInvocation(f"there is no invocation {name}")
        return found

    async def _outcome(self, request: Request, id_: InvocationId, *, wait: bool) -> Answer:
        with self._replies.wait(id_) as reply:
            found = await self._find(request, id_)
            outcome = found.outcome
            if outcome is None and not wait:
                raise NotReady(f"{request.id} has not completed", "ask again later, or wait for it at .../attach")
            if outcome is None:
                self._waiting[reply] = None
                try:
                    outcome = await reply
                finally:
                    self._waiting.pop(reply, None)
        return await self._outcome_answer(request, id_, outcome, self._output_type(found))

    async def _outcome_answer(
        self, request: Request, id_: InvocationId, outcome: list[Any], content_type: str
    ) -> Answer:
        failure = failure_of(outcome)
        if failure is not None:
            return Answer(status_of(failure), body_of(failure), JSON, request.id)
        ref = refs.in_outcome(outcome)
        if ref is None:
            payload = payload_of(outcome)
            assert isinstance(payload, bytes), "it is no reference"
            return Answer(200, payload, content_type, request.id)
        size = refs.size_of(ref)
        if not await request.hold(size, ROOM_S):  # The work is done, so waiting is worth it.
            raise Unavailable(
                "the bodies of the requests in progress have reached the limit of this node",
                "the invocation is completed: ask for its outcome at /holdfast/invocation/{id}/attach",
            )
        return Answer(200, await self._load(id_, ref), content_type, request.id, held=size)

    def _output_type(self, found: Summary) -> str:
        target = None
        if found.deployment is not None:
            target = self._registry.target(found.deployment, found.service, found.handler)
        target = target or self._registry.find(found.service, found.handler)
        return target.output_type if target is not None else JSON

    async def _complete(self, command: Command, route: Route, which: str) -> Answer:
        result = await self._router.submit(route, command)
        if result.code == Code.NOT_FOUND:
            raise NotFound(result.message or "nothing waits under this name")
        if result.code == Code.CONFLICT:
            raise Conflict(result.message or "it was completed with another outcome before")
        check(result)
        done = "Resolved" if which == "resolve" else "Rejected"
        status = done if result.code == Code.DONE else f"Already{done}"
        return Answer(200, b'{"status":"%s"}' % status.encode())

    async def _must_exist(self, id_: InvocationId) -> None:
        """Checked before the body is read: a body for an unknown invocation would only be dropped, or even logged."""
        if await self._lookup(id_) is None:
            raise NotFound("nothing waits under this name")

    async def _outcome_of_client(self, request: Request, which: str) -> list[Any]:
        """A resolution is any bytes. A rejection is a text, or JSON with "message" and "code"."""
        if which == "resolve":
            return succeeded(await request.read(self._config.body_bytes_max, too_large))
        payload = await request.read(REJECTION_BYTES_MAX, _more_than_enough)
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
                    "the message of a rejection must be a text, and its code a number from 400 to 599",
                    'send a text, or JSON as in {"message": "no budget", "code": 409}',
                )
        return failed(code, cut_text(message or "rejected"), "Rejected")


def _check_key(key: str) -> None:
    if not key or len(key.encode()) > KEY_BYTES_MAX:
        raise BadRequest(f"a key has 1 to {KEY_BYTES_MAX} bytes", "percent-encode slashes and other special characters")


def _name_act(request: Request, which: str, places: Mapping[str, str]) -> None:
    """Mark completions of promises and awakeables, and decisions, as acts, for the audit trail. Invocations have journals
    instead."""
    if "promise" in places:
        request.acts(f"{which}_promise", service=places["name"], key=places["key"], promise=places["promise"])
        return
    what, parse = ("approval", parse_approval) if which == "decide" else ("awakeable", parse_awakeable)
    try:
        id_, step, _ = parse(places["id"])
    except BadId:
        request.acts(f"{which}_{what}")
    else:  # A reader of the id itself could resolve it.
        request.acts(f"{which}_{what}", invocation=format_id(id_), step=step)


def _more_than_enough(most: int) -> TooLarge:
    return TooLarge(f"the body is larger than {most} bytes, which is enough for what this path takes")
