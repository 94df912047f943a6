"""The headers that a call or send of a handler passes on: those given, the tags, and the trace of the invocation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from holdfast.sdk import tracing
from holdfast.sdk.arguments import checked_headers
from holdfast.sdk.attempt import Attempt
from holdfast.sdk.errors import BadArgument
from holdfast.sdk.tags import BadTags, with_tags

#: Headers that an invocation passes on with its calls and sends, unless the call sets them.
TRACE_HEADERS: Final = frozenset({"traceparent", "tracestate", "baggage"})


def headers_for(
    attempt: Attempt, given: dict[str, str] | None, tags: Mapping[str, str] | None, step_key: str
) -> dict[str, str]:
    """If the cluster exports the trace, what is called is a child of this step. Tags are not passed on: each call has
    those that the code gives it."""
    headers = checked_headers(given)
    if tags is not None:
        try:
            headers = checked_headers(with_tags(headers, tags))
        except BadTags as error:
            raise BadArgument(str(error)) from None
    own = {name.lower() for name in headers}
    passed = {
        name: text
        for name, text in attempt.headers.items()
        if name.lower() in TRACE_HEADERS and name.lower() not in own
    }
    if "tracestate" in passed and "traceparent" in passed:
        passed["traceparent"] = tracing.traceparent_of(attempt, step_key) or passed["traceparent"]
    try:
        return checked_headers({**passed, **headers})
    except BadArgument:
        return headers  # Both together exceed the limit.
