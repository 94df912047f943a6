"""The health of endpoints in the admin API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.cluster.handlers.health import Health
from holdfast.cluster.times import show_time
from holdfast.statemachine.texts import utc


def show_health(healths: Sequence[Health]) -> dict[str, Any]:
    """Of one deployment. `status`: down if a node fails to reach it, stalled if it does not respond, crashing if a node holds
    attempts back because they end their process, idle if no node has had anything for it."""
    if any(each.is_down for each in healths):
        status = "down"
    elif any(each.stalled_since_ms for each in healths):
        status = "stalled"
    elif any(each.restraint for each in healths):
        status = "crashing"
    else:
        status = "ok" if healths else "idle"
    return {
        "status": status,
        "nodes": [
            {
                "node": each.node,
                "down_since": show_time(each.down_since_ms),
                "failures": each.failures,
                "error": each.last_error or None,
                "restraint": each.restraint or None,
                "stalled_since": show_time(each.stalled_since_ms),
                "stall": each.stall or None,
                "blocked": each.blocked,
                "last_block": each.last_block or None,
                "next_try_at": show_time(each.next_try_ms),
                "running": each.in_flight,
                "waiting": each.waiting,
            }
            for each in healths
        ],
    }


def why_down(healths: Sequence[Health]) -> str | None:
    """A sentence, if the handlers of an invocation that should run are unreachable, or are held back."""
    down = next((each for each in healths if each.is_down), None)
    if down is None:
        stalled = next((each for each in healths if each.stalled_since_ms), None)
        if stalled is not None:
            return (
                f"Its handlers at {stalled.uri} ({stalled.deployment}) do not respond to {stalled.node} since "
                f"{utc(stalled.stalled_since_ms)}: {stalled.stall}."
            )
        if (waiting := next((each for each in healths if each.wait), None)) is not None:
            return f"It is waiting for its turn at {waiting.uri} ({waiting.deployment}): {waiting.wait}."
        held = next((each for each in healths if each.restraint), None)
        return (
            f"It may have to wait: at {held.uri} ({held.deployment}), {held.restraint}." if held is not None else None
        )
    tries = "1 try" if down.failures == 1 else f"{down.failures} tries"
    following = f" The next try is at {utc(down.next_try_ms)}." if down.next_try_ms else ""
    return (
        f"Its handlers at {down.uri} ({down.deployment}) cannot be reached by {down.node} since {utc(down.down_since_ms)} "
        f"({tries}): {down.last_error}.{following}"
    )
