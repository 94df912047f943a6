"""Whether the other nodes know a change of the meta group.

A change is acknowledged when a majority has it, and a node applies it when it next hears from the leader. That is a matter of
milliseconds, which matter to an operator who stops the work of a cluster: so this asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any, Final

from holdfast.cluster.peers.rpc import Refused, Rpc, Unanswered
from holdfast.cluster.registry.machine import MetaMachine

WAIT_S: Final = 2.0
_LOOK_S: Final = 0.005
_METHOD: Final = "meta-applied"


class Spread:
    """One per node."""

    def __init__(self, node: str, machine: MetaMachine, rpc: Rpc, *, connected: Callable[[], Collection[str]]) -> None:
        self._node = node
        self._machine = machine
        self._rpc = rpc
        self._connected = connected
        rpc.serve(_METHOD, self._serve)

    async def missing(self) -> list[str]:
        """The members that do not confirm in time that they know everything this node knows now."""
        index = self._machine.applied[0]
        connected = set(self._connected())
        others = sorted(self._machine.others(self._node))
        confirmed = await asyncio.gather(*(self._ask(name, index) for name in others if name in connected))
        return [name for name in others if name not in confirmed]

    async def _ask(self, peer: str, index: int) -> str | None:
        try:
            async with asyncio.timeout(WAIT_S):
                return peer if await self._rpc.ask(peer, _METHOD, index) is True else None
        except (Refused, Unanswered, TimeoutError):
            return None

    async def _serve(self, peer: str, index: Any) -> bool:
        if type(index) is not int:
            return False
        deadline = asyncio.get_running_loop().time() + WAIT_S
        while self._machine.applied[0] < index and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)
        return self._machine.applied[0] >= index
