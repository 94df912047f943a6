"""Server-sent events as text: https://html.spec.whatwg.org/multipage/server-sent-events.html."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

EVENT_STREAM: Final = "text/event-stream"
SIGN_OF_LIFE: Final = b": still here\n"
SIGN_OF_LIFE_S: Final = 15.0
RETRY: Final = b"retry: 1000\n"  # How long a browser waits before it connects again, in milliseconds.


def block(event: str, data: Any, id_: str | None = None) -> bytes:
    """JSON has no line breaks, so its text is one line."""
    return line_of(id_) + f"event: {event}\ndata: {json.dumps(data)}\n\n".encode()


def line_of(id_: str | None) -> bytes:
    return b"" if id_ is None else b"id: %b\n" % id_.encode()


def is_wanted(headers: Mapping[str, str]) -> bool:
    """Whether a client asks for events in place of one answer. `*/*` does not."""
    accepted = headers.get("Accept", "")
    return any(each.partition(";")[0].strip().lower() == EVENT_STREAM for each in accepted.split(","))
