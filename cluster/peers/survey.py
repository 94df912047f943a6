"""A question to all peers at once, for what is shown to operators: silent nodes are waited for only a moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any, Final, TypeVar

from holdfast.cluster.peers.rpc import Refused, Rpc, Unanswered

T = TypeVar("T")

ASK_S: Final = 1.0  # How long an operator's request waits for silent nodes.


async def ask_all(
    rpc: Rpc, peers: Collection[str], method: str, argument: Any, *, read: Callable[[Any], T]
) -> dict[str, T]:
    """Peer -> its answer, decoded. Left out are peers that are down, or run a release that does not understand the call."""

    async def ask(peer: str) -> tuple[T] | None:
        try:
            async with asyncio.timeout(ASK_S):
                return (read(await rpc.ask(peer, method, argument)),)
        except (Refused, Unanswered, TimeoutError, TypeError, ValueError):
            return None

    asked = list(peers)
    answers = await asyncio.gather(*(ask(peer) for peer in asked))
    return {peer: answer[0] for peer, answer in zip(asked, answers, strict=True) if answer is not None}
