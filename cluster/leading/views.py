"""How the deliveries to a webhook fare, in the admin API."""

from __future__ import annotations

from typing import Annotated, TypedDict

from holdfast.cluster.leading.webhooks import Faring
from holdfast.cluster.schemas import Time
from holdfast.cluster.times import show_time


class Deliveries(TypedDict):
    """To one webhook."""

    pending: Annotated[int, "events that wait to be sent"]
    dropped: Annotated[int, "events that were given up"]
    delivered: int
    failed: Annotated[int, "tries that failed"]
    failing_since: Time | None
    last_success_at: Time | None
    last_error: str | None
    last_error_at: Time | None
    next_try_at: Time | None


def show_faring(faring: Faring) -> Deliveries:
    return {
        "pending": faring.pending,
        "dropped": faring.dropped,
        "delivered": faring.delivered,
        "failed": faring.failed,
        "failing_since": show_time(faring.failing_since_ms),
        "last_success_at": show_time(faring.last_success_ms),
        "last_error": faring.last_error or None,
        "last_error_at": show_time(faring.last_error_ms),
        "next_try_at": show_time(faring.next_try_ms),
    }
