"""Log records as lines of JSON, one object per record: for nodes and for handlers."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any, Final

#: A longer message or traceback is cut: one record must not fill the log.
TEXT_MAX: Final = 32 * 1024
FIELD_MAX: Final = 2 * 1024
FIELDS_MAX: Final = 32
#: Names that records have for invocations, and their names in a line.
NAMES: Final = {"invocation_id": "invocation"}

_OWN: Final = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"})
_RESERVED: Final = frozenset({"time", "level", "logger", "message", "node", "error"})


class JsonFormatter(logging.Formatter):
    """Each line has `time` (UTC), `level`, `logger` and `message`. Nodes add `node`.

    `invocation`, `attempt`, `step`, `trace_id` and `span_id` are there where they are known, and so are all other fields that
    a record was given as `extra`. `error` is the traceback.
    """

    def __init__(self, node: str = "") -> None:
        super().__init__()
        self._node = node

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line: dict[str, Any] = {
            "time": at,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _cut(record.getMessage(), TEXT_MAX),
        }
        if self._node:
            line["node"] = self._node
        given = [(name, value) for name, value in vars(record).items() if name not in _OWN and value is not None]
        for name, value in given[:FIELDS_MAX]:
            shown = NAMES.get(name, name)
            line[f"{shown}_" if shown in _RESERVED else shown] = _value(value)
        if record.exc_info:
            line["error"] = _cut(self.formatException(record.exc_info), TEXT_MAX)
        elif record.exc_text:
            line["error"] = _cut(record.exc_text, TEXT_MAX)
        if record.stack_info:
            line["stack"] = _cut(record.stack_info, TEXT_MAX)
        return json.dumps(line, ensure_ascii=False)


def _value(value: Any) -> Any:
    """As JSON if it is a number or a truth value; anything else as text."""
    if value is True or value is False or type(value) is int:
        return value
    if type(value) is float:
        return value if value - value == 0 else str(value)  # JSON has neither infinity nor NaN.
    return _cut(str(value), FIELD_MAX)


def _cut(text: str, most: int) -> str:
    text = text.encode(errors="replace").decode()  # Half of a surrogate pair cannot be written.
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"
