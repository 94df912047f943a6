"""Following an invocation: its progress and then its outcome, as server-sent events.

    event: progress   {"status", "attempt", "reason"}
    event: outcome    {"value": ...}, {"base64": "..."}, {"bytes": n} if it is too large for an event, or {"failure": {...}}

A client that connects again asks for the same path, and gets the current state.
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

from holdfast.cluster.errors import error_body
from holdfast.cluster.http.event_stream import RETRY, SIGN_OF_LIFE, SIGN_OF_LIFE_S, block
from holdfast.cluster.ingress.shapes import FollowedOutcome
from holdfast.cluster.routing.channel import Channel
from holdfast.cluster.routing.reader import Summary
from holdfast.sdk.bounds import load_json
from holdfast.sdk.ids import InvocationId
from holdfast.sdk.journal import Failure
from holdfast.statemachine import refs
from holdfast.statemachine.outcomes import failure_of, payload_of

INLINE_BYTES_MAX: Final = 256 * 1024
INLINE_ELEMENTS_MAX: Final = 10_000


class Replies(Protocol):
    def wait(self, invocation: InvocationId, /, *, follow: bool = False) -> AbstractContextManager[Channel]: ...


async def follow(
    id_: InvocationId, replies: Replies, lookup: Callable[[InvocationId], Awaitable[Summary | None]]
) -> AsyncIterator[bytes]:
    """Ends after the outcome, or when the invocation is gone."""
    with replies.wait(id_, follow=True) as channel:  # Registered first, so that no outcome is missed.
        yield RETRY + b"\n"
        found = await lookup(id_)
        if found is None:
            return
        outcome = found.outcome
        if outcome is None:
            async for progress in channel.progress(SIGN_OF_LIFE_S):
                yield block("progress", progress._asdict()) if progress is not None else SIGN_OF_LIFE + b"\n"
            outcome = await channel
        yield block("outcome", show_outcome(outcome))


def body_of(failure: Failure) -> bytes:
    """A failure of a handler, as clients get it."""
    metadata = (failure.extra or {}).get("metadata")
    return error_body(failure.code, failure.message, source="invocation", hint=None, metadata=metadata)


def show_outcome(outcome: list[Any]) -> FollowedOutcome:
    failure = failure_of(outcome)
    if failure is not None:
        return {"failure": json.loads(body_of(failure))}
    ref = refs.in_outcome(outcome)
    if ref is not None:
        return {"bytes": refs.size_of(ref)}
    payload = payload_of(outcome)
    assert isinstance(payload, bytes), "it is no reference"
    if len(payload) > INLINE_BYTES_MAX:
        return {"bytes": len(payload)}
    if not payload:
        return {"value": None}
    try:
        return {"value": load_json(payload, INLINE_ELEMENTS_MAX)}
    except ValueError:
        return {"base64": base64.b64encode(payload).decode()}
