"""Times as the APIs show them."""

from __future__ import annotations

from datetime import UTC, datetime


def show_time(milliseconds: int) -> str | None:
    if not milliseconds:
        return None
    try:
        return (
            datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        )
    except (OverflowError, ValueError, OSError):
        return f"{milliseconds} ms"
