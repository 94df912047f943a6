"""What requests to the admin API say, read and checked, and how answers and errors are written."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

from aiohttp import HttpVersion11, web

from holdfast.cluster.errors import (
    BadRequest,
    Circumstance,
    Conflict,
    Internal,
    NotFound,
    TooLarge,
    UnsupportedEncoding,
    WrongMethod,
    circumstance,
    error_body,
)
from holdfast.sdk.bounds import TooComplex, load_json
from holdfast.sdk.ids import (
    BadId,
    InvocationId,
    parse_id,
)
from holdfast.statemachine.effects import STATUS_NAMES
from holdfast.statemachine.records import END_NAMES, End

logger = logging.getLogger(__name__)
BODY_BYTES_MAX: Final = 1024 * 1024  # One character in a text beyond 16 bits, and all of it takes four times as much.
BODY_ELEMENTS_MAX: Final = 64 * 1024
STATUS_BY_NAME: Final = {name: status for status, name in STATUS_NAMES.items()}
END_BY_NAME: Final = {name: end for end, name in END_NAMES.items() if end != End.NONE}


def id_of(request: web.Request) -> InvocationId:
    try:
        return parse_id(request.match_info["id"])
    except BadId as error:
        raise BadRequest(str(error), "it is in the header x-holdfast-id of every answer about an invocation") from None


def read_statuses(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    found: list[int] = []
    for name in text.split(","):
        name = name.strip().lower().replace("_", "-")
        if name == "active":
            found += [status for status in STATUS_NAMES if STATUS_NAMES[status] != "completed"]
        elif name in STATUS_BY_NAME:
            found.append(STATUS_BY_NAME[name])
        else:
            raise BadRequest(f"there is no status {name!r:.60}", f"there are: {', '.join(STATUS_BY_NAME)}, active")
    return tuple(dict.fromkeys(found))


def read_ends(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    names = [name.strip().lower() for name in text.split(",")]
    for name in names:
        if name not in END_BY_NAME:
            raise BadRequest(f"there is no outcome {name!r:.60}", f"there are: {', '.join(END_BY_NAME)}")
    return tuple(dict.fromkeys(END_BY_NAME[name] for name in names))


class Parameters:
    """The parameters of a request, known ones only: a misspelt filter must not be no filter."""

    def __init__(self, request: web.Request, *known: str) -> None:
        self._query = request.query
        for name in self._query:
            if name not in known:
                raise BadRequest(f"there is no parameter {name!r:.60}", f"there are: {', '.join(known)}")

    def text(self, name: str) -> str | None:
        value = self._query.get(name)
        if value == "":
            raise BadRequest(f"{name}: it is empty")
        return value

    def truth(self, name: str) -> bool:
        value = self._query.get(name, "false").lower()
        if value not in ("true", "false", "1", "0"):
            raise BadRequest(f"{name}: true or false expected")
        return value in ("true", "1")

    def number(self, name: str, default: int, low: int, high: int) -> int:
        value = self._query.get(name)
        if value is None:
            return default
        if not (value.isascii() and value.isdigit() and len(value) < 12 and low <= int(value) <= high):
            raise BadRequest(f"{name}: a whole number from {low} to {high} expected")
        return int(value)


async def answer_expectation(request: web.Request) -> web.StreamResponse | None:
    """A client waits to be told that its body is wanted (RFC 9110, 10.1.1)."""
    if request.content_length is not None and request.content_length > BODY_BYTES_MAX:
        response = refusal(TooLarge(f"the body is larger than {BODY_BYTES_MAX} bytes"))
        response.force_close()
        await response.prepare(request)
        await response.write_eof()
        request.protocol.force_close()
        return response
    if request.headers["Expect"].lower() == "100-continue" and request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # The response has not begun.
    return None


async def read_body(request: web.Request, known: set[str]) -> dict[str, Any]:
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise UnsupportedEncoding("the admin API takes bodies as they are, not compressed")
    try:
        given = load_json(await request.read(), BODY_ELEMENTS_MAX)
    except TooComplex as error:
        raise TooLarge(f"the body is not taken: {error}") from None
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise BadRequest("the body is a JSON object")
    unknown = sorted(set(given) - known)
    if unknown:
        raise BadRequest(f"there is no field {unknown[0]!r:.60}", f"there are: {', '.join(sorted(known))}")
    return given


def read_size(text: str) -> int:
    """In bytes; 0 for what cannot be encoded, which JSON can express and nobody can store."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return 0


def check_encodable(texts: dict[str, str]) -> dict[str, str]:
    return {
        name.encode(errors="replace").decode(): value.encode(errors="replace").decode() for name, value in texts.items()
    }


def json_answer(status: int, value: Any) -> web.Response:
    return web.Response(
        status=status, body=json.dumps(value, ensure_ascii=True).encode(), headers={"Content-Type": "application/json"}
    )


@web.middleware
async def errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Whatever goes wrong becomes the one shape of an error."""
    try:
        return await handler(request)
    except web.HTTPRequestEntityTooLarge:
        return refusal(TooLarge(f"the body is larger than {BODY_BYTES_MAX} bytes"))
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        return refusal(WrongMethod(allowed, f"{request.method} does not work here"))
    except web.HTTPNotFound:
        return refusal(NotFound(f"there is nothing at {request.path!r:.200}", "GET / lists what there is"))
    except web.HTTPException:
        raise
    except Exception as error:
        known = circumstance(error)
        if known is None:
            logger.exception("%s %.200s failed", request.method, request.path)
            known = Internal("an internal error; its cause is in the log of the node")
        return refusal(known)


def refusal(error: Circumstance) -> web.Response:
    body = json.loads(error_body(error.status, error.message, source="admin", hint=error.hint))
    if isinstance(error, Conflict) and error.details:
        body["details"] = list(error.details)
    response = json_answer(error.status, body)
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(error.retry_after_s)
    if isinstance(error, WrongMethod):
        response.headers["Allow"] = error.allowed
    return response
