"""Steps as parents of the spans that libraries make inside of them.

The cluster exports the spans of invocations, attempts and steps from the journal, once an invocation has completed. Here,
while the function of a step runs, its span is the current one of OpenTelemetry, if that is installed: a span that the HTTP
client or the database driver makes then is a child of the step. Code outside of steps runs again in each attempt, so it has
no current span, and neither has replay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.sdk.trace_context import is_exported, read_parent, step_span, traceparent

if TYPE_CHECKING:
    from holdfast.sdk.attempt import Attempt

_api: Any = None  # (opentelemetry.trace, opentelemetry.context); False: not installed; None: nobody looked.


def traceparent_of(attempt: Attempt, key: str) -> str | None:
    """The header with which what a step calls becomes a child of the step. None: the invocation is not traced."""
    headers = attempt.headers
    if "tracestate" not in headers or not is_exported(headers):
        return None
    parent = read_parent(headers)
    assert parent is not None, "an exported invocation has one"
    return traceparent(parent.trace_id, step_span(attempt.id, key))


def enter(attempt: Attempt, key: str) -> object:
    """Make the step the current span. `leave` takes what this returns; None: there is nothing to leave."""
    if "tracestate" not in attempt.headers:
        return None  # The usual case: it costs one look.
    return _enter(attempt, key)


def _enter(attempt: Attempt, key: str) -> object:
    global _api
    header = traceparent_of(attempt, key)
    if header is None:
        return None
    if _api is None:
        _api = _load()
    if _api is False:
        return None
    trace, context = _api
    found = read_parent({"traceparent": header})
    assert found is not None
    span_context = trace.SpanContext(
        trace_id=int(found.trace_id, 16),
        span_id=int(found.span_id, 16),
        is_remote=True,
        trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
    )
    return context.attach(trace.set_span_in_context(trace.NonRecordingSpan(span_context)))


def leave(token: object) -> None:
    if token is not None:
        _api[1].detach(token)


def _load() -> Any:
    try:
        from opentelemetry import context, trace
    except ImportError:
        return False
    return trace, context
