"""The health of endpoints in the admin API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypedDict

from holdfast.cluster.handlers.health import Health
from holdfast.cluster.schemas import Time, one_of
from holdfast.cluster.times import show_time
from holdfast.statemachine.texts import utc


class NodeHealth(TypedDict):
    """The health of a deployment as one node sees it."""

    node: str
    down_since: Annotated[Time | None, "since when the node cannot reach it"]
    failures: Annotated[int, "consecutive failures to reach it"]
    error: Annotated[str | None, "of the last try"]
    restraint: Annotated[str | None, "why the node holds attempts back although it reaches the deployment"]
    stalled_since: Annotated[Time | None, "since when it does not respond"]
    stall: Annotated[str | None, "what blocks it, and where"]
    blocked: Annotated[int, "how often its event loop did not run for more than a second"]
    last_block: Annotated[str | None, "by which code, where, and for how long"]
    next_try_at: Time | None
    running: Annotated[int, "attempts that run there"]
    waiting: Annotated[int, "attempts that wait for their turn"]


class DeploymentHealth(TypedDict):
    status: Annotated[
        str,
        "down: a node cannot reach it; stalled: it does not respond; crashing: attempts end its process; idle: no node has "
        "needed it",
        one_of(["ok", "idle", "down", "stalled", "crashing"]),
    ]
    nodes: list[NodeHealth]


def show_health(healths: Sequence[Health]) -> DeploymentHealth:
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
