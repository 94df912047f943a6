"""The requests of a client to the ingress, and the meaning of the answers. Does no I/O."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, Generic, NamedTuple, TypeVar
from urllib.parse import quote, urlsplit

from holdfast.sdk.client.errors import CallFailed, CallTimedOut, InvocationPaused, NotReady, Unreachable
from holdfast.sdk.client.trust import is_distrust
from holdfast.sdk.definition import AnyService, ServiceRef, Target, check_key, resolve_target
from holdfast.sdk.errors import BadPayload
from holdfast.sdk.ids import format_id, idempotent_id, parse_approval, parse_awakeable, parse_id, workflow_id
from holdfast.sdk.policy import milliseconds
from holdfast.sdk.serde import ANY, Serde, serde_for
from holdfast.sdk.tags import with_tags

T = TypeVar("T")
O = TypeVar("O")  # noqa: E741

MISSING: Final[Any] = object()  # The argument of a call without one.
NOT_READY: Final = 470
_TRY_AGAIN: Final = frozenset({429, 502, 503, 504})


class SendHandle(NamedTuple, Generic[O]):
    """An invocation that was sent. `previously`: an earlier request with the same idempotency key had started it."""

    invocation_id: str
    previously: bool
    serde: Serde[O]


class Request(NamedTuple, Generic[T]):
    """One HTTP request, and how to read its answer."""

    method: str
    path: str
    body: bytes
    headers: dict[str, str]
    read: Callable[[bytes], T]
    invocation_id: str | None = None  # if the client can derive it from the request


class Again(Exception):
    """The request must be repeated after `after` seconds or, if `elsewhere`, at another address at once."""

    def __init__(self, after: float, error: CallFailed, *, elsewhere: bool) -> None:
        self.after = after
        self.error = error
        self.elsewhere = elsewhere


class Address(NamedTuple):
    """The address of an ingress."""

    url: str
    scheme: str
    host: str
    port: int | None
    prefix: str

    @classmethod
    def of(cls, url: str) -> Address:
        authority = re.split(r"[/?#]", url.partition("://")[2], maxsplit=1)[0]
        if "@" in authority:  # Errors name the URL.
            raise ValueError(
                f"the URL of {authority.rpartition('@')[2]} has credentials in it: remove them, and pass a token with token="
            )
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"the URL of an ingress must look like http://127.0.0.1:8080, not {url!r}")
        return cls(
            url.rstrip("/"), scheme=parts.scheme, host=parts.hostname, port=parts.port, prefix=parts.path.rstrip("/")
        )


class Requests:
    """Builds the requests of a client and reads their answers. Remembers which address answered last."""

    def __init__(self, url: str | Sequence[str], token: str | None, headers: dict[str, str] | None) -> None:
        self.addresses = [Address.of(each) for each in ([url] if isinstance(url, str) else url)]
        if not self.addresses:
            raise ValueError("a client needs at least one URL of an ingress")
        self._good = 0  # The address that answered last, or the next one to try.
        self.headers = dict(headers or {})
        if token is not None:
            self.headers["Authorization"] = f"Bearer {token}"

    @property
    def address(self) -> Address:
        return self.addresses[self._good]

    def fail_over(self, failed: Address) -> None:
        """Move on to the next address, unless another request already did."""
        if self.address is failed:
            self._good = (self._good + 1) % len(self.addresses)

    def invoke(
        self,
        handler: Any,
        argument: Any,
        *,
        key: str | None,
        idempotency_key: str | None,
        headers: dict[str, str] | None,
        tags: Mapping[str, str] | None,
        delay: float | timedelta | None,
    ) -> Request[Any]:
        target = resolve_target(handler, key)
        segments = [target.service, *([key] if key is not None else []), target.handler]
        path = "/" + "/".join(_segment(segment) for segment in segments)
        body = b"" if argument is MISSING else target.input.dump(argument)
        given = {**self.headers, **with_tags(headers, tags), "Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        if argument is not MISSING:
            given.setdefault("Content-Type", target.input.content_type)
        if delay is None:
            return Request(
                "POST", path, body, given, read=target.output.load, invocation_id=_id_of(target, key, handler, given)
            )
        delay_ms = milliseconds(delay, "delay")
        path += "/send" + (f"?delay={delay_ms}ms" if delay_ms else "")

        def read(answer: bytes) -> SendHandle[Any]:
            found = json.loads(answer)
            return SendHandle(found["invocationId"], found["status"] == "PreviouslyAccepted", target.output)

        return Request("POST", path, body, given, read=read)

    def outcome(self, which: str, invocation: str | SendHandle[Any], result: Any) -> Request[Any]:
        if isinstance(invocation, SendHandle):
            serde = invocation.serde if result is Any else serde_for(result)
            invocation_id = invocation.invocation_id
        else:
            serde, invocation_id = serde_for(result), invocation
        parse_id(invocation_id)
        return Request("GET", f"/holdfast/invocation/{invocation_id}/{which}", b"", self.headers, read=serde.load)

    def workflow(self, which: str, workflow: Any, key: str, result: Any) -> Request[Any]:
        serde = serde_for(result)
        if isinstance(workflow, AnyService) and result is Any:
            serde = next((each.output for each in workflow.handlers.values() if each.is_main), ANY)
        path = f"/holdfast/workflow/{_segment(_name(workflow))}/{_segment(_checked(key))}/{which}"
        return Request("GET", path, b"", self.headers, read=serde.load)

    def complete(
        self, path: str, which: str, value: Any, *, serde: Serde[Any] | None = None, code: int = 0
    ) -> Request[None]:
        refusal = {"message": value, "code": code}
        body = (serde or ANY).dump(value) if which == "resolve" else json.dumps(refusal).encode()
        headers = {**self.headers, "Content-Type": "application/json"}
        return Request("POST", f"/holdfast/{path}/{which}", body, headers, read=lambda _: None)

    def awakeable(self, awakeable_id: str) -> str:
        parse_awakeable(awakeable_id)
        return f"awakeables/{awakeable_id}"

    def decide(
        self, approval_id: str, choice: str, comment: str, payload: Any, serde: Serde[Any] | None
    ) -> Request[None]:
        parse_approval(approval_id)
        given: dict[str, Any] = {"choice": choice, **({"comment": comment} if comment else {})}
        if payload is not MISSING:
            given["payload"] = json.loads((serde or ANY).dump(payload))
        headers = {**self.headers, "Content-Type": "application/json"}
        return Request(
            "POST", f"/holdfast/approvals/{approval_id}", json.dumps(given).encode(), headers, read=lambda _: None
        )

    def promise(self, workflow: Any, key: str, name: str) -> str:
        return f"workflow/{_segment(_name(workflow))}/{_segment(_checked(key))}/promises/{_segment(name)}"

    def answer(self, request: Request[T], status: int, headers: Any, body: bytes) -> T:
        """The value of an answer. Raises `CallFailed`, or `Again` if the request must be repeated."""
        if 200 <= status < 300:
            try:
                return request.read(body)
            except (BadPayload, ValueError, KeyError, TypeError) as error:
                raise CallFailed(f"cannot decode the answer of the ingress: {error}", code=status) from error
        if 300 <= status < 400:
            raise _redirected(status, headers.get("Location"))
        failed = _failure(status, headers, body)
        if status in _TRY_AGAIN and failed.source != "invocation" and not isinstance(failed, InvocationPaused):
            raise Again(_retry_after(headers), failed, elsewhere=status != 429)
        raise failed


def _redirect_origin(location: str | None) -> str | None:
    """Scheme, host and port that a redirect names. None: it names none, or what it names is not a host."""
    try:
        parts = urlsplit(location or "")
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    if parts.scheme not in ("http", "https", "") or not host or not re.fullmatch(r"[A-Za-z0-9_.:\-]+", host):
        return None
    shown = f"[{host}]" if ":" in host else host
    return (f"{parts.scheme}://" if parts.scheme else "") + shown + (f":{port}" if port is not None else "")


def _redirected(status: int, location: str | None) -> CallFailed:
    where = _redirect_origin(location)
    return CallFailed(
        f"the address answers with a redirect{f' to {where}' if where else ''}, which the client does not follow",
        code=status,
        hint=f"if {where or 'the other address'} is an ingress of your cluster, give that address to the client",
    )


def _failure(status: int, headers: Any, body: bytes) -> CallFailed:
    try:
        found = json.loads(body)
        message = str(found["message"])
        source = str(found.get("source", "ingress"))
        hint = found.get("hint")
        metadata = {str(name): str(text) for name, text in found.get("metadata", {}).items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        message, source, hint = body.decode(errors="replace")[:500] or f"HTTP status {status}", "ingress", None
        metadata = {}
    kind = NotReady if status == NOT_READY else CallFailed
    if status == 503 and headers.get("x-holdfast-status") == "paused":
        kind = InvocationPaused
    return kind(
        message, code=status, source=source, hint=hint, invocation_id=headers.get("x-holdfast-id"), metadata=metadata
    )


def _id_of(target: Target, key: str | None, handler: Any, headers: dict[str, str]) -> str | None:
    """The id of a call, derived as the ingress derives it. None for a handler given by name: it may be a workflow's."""
    if isinstance(handler, str):
        return None
    if target.is_main and key is not None:
        return format_id(workflow_id(target.service, key))
    return format_id(idempotent_id(target.service, key, target.handler, headers["Idempotency-Key"]))


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
    raise TypeError(f"workflow must be a Workflow, a ServiceRef or a name, not {workflow!r:.80}")


def _checked(key: str) -> str:
    check_key(key)
    return key


def unreachable(address: Address, error: Exception) -> Unreachable:
    if is_distrust(error):
        text = f"the certificate of {address.url} is not trusted: {getattr(error, 'certificate_error', error)}"
        return Unreachable(text, code=503, hint='give the client the file of the authority: Client(..., ca="ca.pem")')
    text = f"{address.url} does not answer: {error or type(error).__name__}"
    return Unreachable(text, code=503, hint="check that a node is running there")


def timed_out(request: Request[Any], timeout: float | timedelta | None) -> CallTimedOut:
    return CallTimedOut(
        f"the call had no result within {timeout}; the invocation goes on",
        code=504,
        hint="attach to its invocation_id, or call again with the same idempotency key",
        invocation_id=request.invocation_id,
    )


def seconds(timeout: float | timedelta) -> float:
    return timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
