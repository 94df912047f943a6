"""What the parameters and the headers of a client's request mean."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from holdfast.cluster.config import BODY_BYTES_MAX
from holdfast.cluster.durations import parse_duration_ms
from holdfast.cluster.errors import (
    BadRequest,
    TooLarge,
)
from holdfast.cluster.spans import in_share
from holdfast.sdk.ids import (
    BadId,
    InvocationId,
    parse_id,
)
from holdfast.sdk.trace_context import marked, read_parent, root_id, trace_id_for, traceparent

HEADERS_MAX: Final = 64
HEADER_BYTES_MAX: Final = 16 * 1024
HASHED_AT_ONCE_BYTES: Final = 256 * 1024  # A larger body is hashed in a thread.
#: Headers about the connection or the client rather than the work, and credentials for this node, which must not be journaled.
#: All others reach the handler, unless the setting `redact_headers` names them.
_NOT_PASSED_ON: Final = frozenset(
    {
        "accept", "accept-charset", "accept-encoding", "accept-language", "authorization", "cache-control",
        "connection", "content-encoding", "content-length", "cookie", "dnt", "expect", "host", "http2-settings",
        "idempotency-key", "if-modified-since", "if-none-match", "keep-alive", "max-forwards", "origin", "pragma",
        "priority", "proxy-authorization", "proxy-connection", "referer", "te", "trailer", "transfer-encoding",
        "upgrade", "upgrade-insecure-requests", "user-agent", "via",
    }
)  # fmt: skip


class Sent(NamedTuple):
    """An invocation that the body of a request asks for. Headers include the Idempotency-Key, if there is one."""

    service: str
    handler: str
    key: str | None
    payload: bytes
    headers: Mapping[str, str]
    delay: str | None


def read_delay_ms(parameters: Mapping[str, str], *, send: bool) -> int:
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
    """The digest by which a second request with the same Idempotency-Key is compared. The id covers service, key and handler.
    Headers do not count: proxies and tracing change them from one try to the next."""
    if len(body) > HASHED_AT_ONCE_BYTES:
        return await asyncio.to_thread(_hash, body)
    return _hash(body)


def _hash(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16, person=b"holdfast request").digest()


class Hidden:
    """The headers that do not reach a handler."""

    def __init__(self, redacted: Sequence[str]) -> None:
        self.names = _NOT_PASSED_ON | {name for name in redacted if name[-1] != "*"}
        self.beginnings = ("sec-", "x-forwarded-", *(name[:-1] for name in redacted if name[-1] == "*"))


def passed_on(headers: Mapping[str, str], hidden: Hidden) -> dict[str, str]:
    passed: dict[str, str] = {}
    size = 0
    for name, value in headers.items():
        name = name.lower()
        if name in hidden.names or name.startswith(hidden.beginnings):
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
        # Latin-1 or broken UTF-8 arrived as surrogates, which cannot be journaled.
        passed = {name: value.encode(errors="replace").decode() for name, value in passed.items()}
    return passed


def too_large(most: int) -> TooLarge:
    return TooLarge(
        f"the body is larger than {most} bytes",
        f"raise body_bytes_max, which can be up to {BODY_BYTES_MAX} bytes, or put it into a store and send its address",
    )


def read_invocation(text: str) -> InvocationId:
    try:
        return parse_id(text)
    except BadId as error:
        raise BadRequest(str(error), "it is in the header x-holdfast-id of every answer about an invocation") from None


def trace(headers: dict[str, str], id_: InvocationId, ratio: float) -> None:
    """Say in the headers of an invocation which trace it belongs to, and that the cluster exports its spans.

    Derived from the id, so that a retry says the same. A caller who decided not to be traced is left alone."""
    parent = read_parent(headers)
    if parent is None:
        trace_id = trace_id_for(id_)
        sampled = in_share(trace_id, ratio)
        headers["traceparent"] = traceparent(trace_id, root_id(id_), sampled=sampled)
        headers.pop("tracestate", None)  # It belongs to the header that is missing or not valid.
    else:
        sampled = parent.sampled
    if sampled:
        headers["tracestate"] = marked(headers.get("tracestate", ""))
