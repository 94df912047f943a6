"""How the deliveries to a webhook fare, in the admin API."""

from __future__ import annotations

from typing import Any

from holdfast.cluster.leading.webhooks import Faring
from holdfast.cluster.times import show_time


def show_faring(faring: Faring) -> dict[str, Any]:
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
