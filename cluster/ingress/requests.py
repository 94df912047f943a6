"""What the path, the parameters and the headers of a client's request mean, and what an error answers."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping
from typing import Final, NamedTuple, Protocol
from urllib.parse import parse_qsl, unquote, urlsplit

from holdfast.cluster.config import BODY_BYTES_MAX
from holdfast.cluster.durations import parse_duration_ms
from holdfast.cluster.errors import (
    BadRequest,
    Circumstance,
    NotFound,
    Paused,
    TooLarge,
    WrongMethod,
    error_body,
)
from holdfast.sdk.ids import (
    BadId,
    InvocationId,
    parse_id,
)

HEADERS_MAX: Final = 64
HEADER_BYTES_MAX: Final = 16 * 1024
JSON: Final = "application/json"
HASHED_AT_ONCE_BYTES: Final = 256 * 1024  # A larger body is hashed in a thread.
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


class Answer(NamedTuple):
    status: int
    body: bytes
    content_type: str = JSON
    id: str | None = None  # for x-holdfast-id
    headers: Mapping[str, str] | None = None
    held: int = 0  # of the bound of bytes, until it is sent: whoever sends it calls `Ingress.sent`


class Body(Protocol):
    """The body of a request, not read yet."""

    length: int | None  # as announced

    def chunks(self) -> AsyncIterator[bytes]: ...


def split_target(target: str) -> tuple[list[str], dict[str, str]]:
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


def read_delay_ms(parameters: dict[str, str], *, send: bool) -> int:
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


async def hash_request(body: bytes) -> bytes:
    """What a second request with the same Idempotency-Key is compared by. The id stands for service, key and handler; headers
    do not count, because proxies and tracing change them from one try to the next."""
    if len(body) > HASHED_AT_ONCE_BYTES:
        return await asyncio.to_thread(_hash, body)
    return _hash(body)


def _hash(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16, person=b"holdfast request").digest()


def passed_on(headers: Mapping[str, str]) -> dict[str, str]:
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


def refusal(error: Circumstance, id_: str | None = None) -> Answer:
    headers: dict[str, str] | None = None
    if error.retry_after_s is not None:
        headers = {"Retry-After": str(error.retry_after_s)}
    elif isinstance(error, WrongMethod):
        headers = {"Allow": error.allowed}
    elif isinstance(error, Paused):
        headers = {"x-holdfast-status": "paused"}
    body = error_body(error.status, error.message, source="ingress", hint=error.hint)
    return Answer(error.status, body, JSON, id_, headers)


def too_large(most: int) -> TooLarge:
    return TooLarge(
        f"the body is larger than {most} bytes",
        f"raise body_bytes_max, which can be up to {BODY_BYTES_MAX} bytes, or put it into a store and send its address",
    )


def allow(method: str, *allowed: str) -> None:
    if method not in allowed:
        raise WrongMethod(", ".join(allowed), f"{method} does not work here")


def read_invocation(text: str) -> InvocationId:
    try:
        return parse_id(text)
    except BadId as error:
        raise BadRequest(str(error), "it is in the header x-holdfast-id of every answer about an invocation") from None
