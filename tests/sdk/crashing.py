"""Runs a handler again with a crash at every frame."""

import asyncio
from collections.abc import Callable
from typing import Any

from holdfast.sdk.frames import Frame
from tests.sdk.fake_node import FakeNode, Invocation


async def in_every_attempt(
    services: list[Any], begin: Callable[[FakeNode], Invocation], *, eager_state: bool = True
) -> tuple[bytes, Invocation]:
    """Run once without a crash; then once for every frame, with a crash after it. All results must be equal."""
    node = FakeNode(eager_state=eager_state)
    node.connect(services)
    invocation = begin(node)
    result = await node.result(invocation)
    frames = node.applied
    for at in range(2, frames):
        for when in ("before", "after"):
            again = FakeNode(eager_state=eager_state)
            seen = 0

            def crash_at(frame: Frame, at: int = at, when: str = when) -> str | None:
                nonlocal seen
                seen += 1
                return when if seen == at else None

            again.crash_at = crash_at
            again.connect(services)
            second = begin(again)
            while not second.done.is_set():
                if again.link is None:
                    again.connect(services)
                await asyncio.sleep(0.001)
            assert not second.errors, (at, when, second.errors)
            assert second.outcome == [0, result], (at, when)
    return result, invocation
