"""The parameters and bodies of requests to the admin API, parsed and checked, and the encoding of answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from holdfast.cluster.durations import parse_duration_ms
from holdfast.cluster.errors import BadRequest, TooLarge, UnsupportedEncoding
from holdfast.cluster.http.browsers import check_no_form
from holdfast.cluster.http.exchange import Answer, Request
from holdfast.sdk.bounds import TooComplex, load_json
from holdfast.sdk.ids import (
    BadId,
    InvocationId,
    parse_id,
)
from holdfast.statemachine.effects import STATUS_NAMES
from holdfast.statemachine.records import END_NAMES, End

BODY_BYTES_MAX: Final = 1024 * 1024  # One character beyond 16 bits in a text quadruples its memory.
BODY_ELEMENTS_MAX: Final = 64 * 1024
STATUS_BY_NAME: Final = {name: status for status, name in STATUS_NAMES.items()}
END_BY_NAME: Final = {name: end for end, name in END_NAMES.items() if end != End.NONE}


class AdminRequest(NamedTuple):
    """A request to the admin API, with its target parsed."""

    request: Request
    path: Mapping[str, str]  # The values of the route's placeholders.
    query: Mapping[str, str]

    def note(self, **targets: object) -> None:
        """For the audit trail: what else this request concerns. No payloads and no secrets."""
        self.request.targets |= targets


def id_of(request: AdminRequest) -> InvocationId:
    return read_id(request.path["id"])


def read_id(text: str) -> InvocationId:
    try:
        return parse_id(text)
    except BadId as error:
        raise BadRequest(str(error), "it is in the header x-holdfast-id of every answer about an invocation") from None


def step_of(request: AdminRequest) -> int:
    text = request.path["step"]
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise BadRequest(f"{text!r:.40} is not the index of a step")
    return int(text)


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
    """The parameters of a request. Unknown ones are refused: a misspelt filter must not be ignored."""

    def __init__(self, request: AdminRequest, *known: str) -> None:
        self._query = request.query
        for name in self._query:
            if name not in known:
                raise BadRequest(f"there is no parameter {name!r:.60}", f"there are: {', '.join(known)}")

    def text(self, name: str) -> str | None:
        value = self._query.get(name)
        if value == "":
            raise BadRequest(f"{name}: must not be empty")
        return value

    def truth(self, name: str) -> bool:
        value = self._query.get(name, "false").lower()
        if value not in ("true", "false", "1", "0"):
            raise BadRequest(f"{name}: true or false expected")
        return value in ("true", "1")

    def choice(self, name: str, known: Sequence[str]) -> str:
        """One of the known words; the first if none is given."""
        value = self._query.get(name, known[0])
        if value not in known:
            raise BadRequest(f"{name}: {' or '.join(known)} expected")
        return value

    def number(self, name: str, default: int, low: int, high: int) -> int:
        value = self._query.get(name)
        if value is None:
            return default
        if not (value.isascii() and value.isdigit() and len(value) < 12 and low <= int(value) <= high):
            raise BadRequest(f"{name}: a whole number from {low} to {high} expected")
        return int(value)


def read_time(parameters: Parameters, name: str, now_ms: int) -> int | None:
    """A time, or a duration before now."""
    text = parameters.text(name)
    if text is None:
        return None
    try:
        if text[:4].isdigit() and text[4:5] == "-":
            time = datetime.fromisoformat(text)
            return round((time if time.tzinfo is not None else time.replace(tzinfo=UTC)).timestamp() * 1000)
        return now_ms - parse_duration_ms(text)
    except (ValueError, OverflowError):
        raise BadRequest(
            f"{name}: {text!r:.60} is neither a time nor a duration", "for example 2026-11-18T04:00:00Z, or 2h"
        ) from None


async def read_body(
    request: AdminRequest, shape: type[Any], *, payloads: bool = False, bytes_max: int = BODY_BYTES_MAX
) -> dict[str, Any]:
    """A JSON object with no other fields than those of `shape`, a TypedDict. Their values are for the caller to check.
    `payloads`: values of users are in it. They may be any JSON, even text that is not Unicode."""
    if request.request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise UnsupportedEncoding("the admin API does not accept compressed bodies")
    check_no_form(request.request.headers)
    try:
        given = load_json(await request.request.read(bytes_max, too_large), BODY_ELEMENTS_MAX)
    except TooComplex as error:
        raise TooLarge(f"the body is refused: {error}") from None
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise BadRequest("the body must be a JSON object")
    if not payloads and not read_size(json.dumps(given, ensure_ascii=False)):
        raise BadRequest(
            "the body has text that is not Unicode", "a surrogate (\\ud800 to \\udfff) needs its other half"
        )
    known = shape.__annotations__.keys()
    unknown = sorted(given.keys() - known)
    if unknown:
        raise BadRequest(f"there is no field {unknown[0]!r:.60}", f"there are: {', '.join(sorted(known))}")
    return given


def read_size(text: str) -> int:
    """In bytes; 0 for text that JSON can express but that cannot be encoded."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return 0


def too_large(most: int) -> TooLarge:
    return TooLarge(f"the body is larger than {most} bytes")


def json_answer(status: int, value: Any) -> Answer:
    return Answer(status, json.dumps(value, ensure_ascii=True).encode())
