"""Logs of handlers: text or JSON, with the invocation that a record belongs to.

    from holdfast.sdk import logs

    logs.configure(format="json", level="info")

`python -m holdfast.sdk` does this with HOLDFAST_LOG_FORMAT and HOLDFAST_LOG_LEVEL. A program with a configuration of its own
gives its handlers a `JsonFormatter`, and an `InvocationFilter` to find the invocation of records that were not written with
`ctx.log`: of libraries, and of functions of steps. Only `ctx.log` is silent in replay.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any, Final, TextIO

from holdfast.sdk.attempt.machine import Attempt
from holdfast.sdk.ids import format_id
from holdfast.sdk.json_lines import JsonFormatter
from holdfast.sdk.run import running_step
from holdfast.sdk.scopes import current_scope
from holdfast.sdk.trace_context import trace_id_of
from holdfast.sdk.tracing import traceparent_of

__all__ = ["InvocationFilter", "JsonFormatter", "configure"]

FORMATS: Final = ("text", "json")
LEVELS: Final = ("debug", "info", "warning", "error")
TEXT: Final = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


class InvocationFilter(logging.Filter):
    """Lets every record pass, and adds the invocation, attempt, step and trace that it was written in, if it has none."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not hasattr(record, "invocation_id"):
            for name, value in _fields().items():
                if not hasattr(record, name):
                    setattr(record, name, value)
        return True


def _fields() -> dict[str, Any]:
    step, attempt = running_step()
    if attempt is None and (scope := current_scope()) is not None and isinstance(scope.owner, Attempt):
        attempt = scope.owner
    if attempt is None:
        return {}
    start = attempt.start
    header = traceparent_of(attempt, step.key) if step is not None else None
    return {
        "invocation_id": format_id(attempt.id),
        "service": start.service,
        "handler": start.handler,
        "key": start.key,
        "attempt": start.attempt,
        "step": step.key if step is not None else None,
        "trace_id": trace_id_of(attempt.headers),
        "span_id": header.split("-")[2] if header is not None else None,
    }


def configure(*, format: str = "", level: str = "", stream: TextIO | None = None) -> None:
    """Write the log to standard error, as `text` or `json`. Defaults: HOLDFAST_LOG_FORMAT and HOLDFAST_LOG_LEVEL, or else text
    and info. Does nothing if the root logger has a handler already, like `logging.basicConfig`."""
    format = format or os.environ.get("HOLDFAST_LOG_FORMAT", "") or FORMATS[0]
    level = (level or os.environ.get("HOLDFAST_LOG_LEVEL", "") or "info").lower()
    if format not in FORMATS:
        raise ValueError(f"{format!r:.80} is no format of logs: there are {', '.join(FORMATS)}")
    if level not in LEVELS:
        raise ValueError(f"{level!r:.80} is no level of logs: there are {', '.join(LEVELS)}")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.addFilter(InvocationFilter())
    handler.setFormatter(JsonFormatter() if format == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
