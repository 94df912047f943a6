"""Whether the handlers can be reached: each deployment as this node sees it, and as the others do.

Every node has its own connection to a deployment, so one may reach it and another may not. A node answers for itself; who
asks for the whole picture asks all that are connected, and goes on without those that are silent or too old to know.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, NamedTuple, Protocol

from holdfast.cluster.peers.rpc import Refused, Rpc, Unanswered

ASK_S: Final = 1.0  # How long an operator waits for nodes that do not answer.
_METHOD: Final = "endpoint-health"


class Health(NamedTuple):
    """One deployment, as one node sees it. Later fields go to the end, with a default: nodes of two releases send it."""

    node: str
    deployment: str
    uri: str
    down_since_ms: int  # 0: it can be reached, or nobody has tried.
    failures: int  # Of this node to reach it, in a row.
    last_error: str
    next_try_ms: int  # 0: nothing waits for it, so nobody tries.
    in_flight: int  # Attempts that run there.
    waiting: int  # Attempts that wait for their turn.
    blocked: int = 0  # How often its event loop did not run for more than a second,
    last_block: str = ""  # and the last time: whose code, where, and for how long.

    @property
    def is_down(self) -> bool:
        return self.down_since_ms > 0


class HasHealth(Protocol):
    def health(self, node: str) -> Health: ...


class Healths:
    def __init__(
        self, node: str, endpoints: Mapping[str, HasHealth], rpc: Rpc, connected: Callable[[], Collection[str]]
    ) -> None:
        self._node = node
        self._endpoints = endpoints
        self._rpc = rpc
        self._connected = connected
        rpc.serve(_METHOD, self._serve)

    def here(self, deployment: str | None = None) -> list[Health]:
        """What this node knows: of one deployment, or of all that it has had something for."""
        endpoints = self._endpoints
        wanted = (
            endpoints.values() if deployment is None else [endpoints[deployment]] if deployment in endpoints else []
        )
        return [endpoint.health(self._node) for endpoint in wanted]

    async def everywhere(self, deployment: str | None = None) -> list[Health]:
        """What all nodes know that answer in time, sorted by deployment and node."""

        async def ask(peer: str) -> list[Health]:
            try:
                async with asyncio.timeout(ASK_S):
                    rows = await self._rpc.ask(peer, _METHOD, deployment)
                return [Health(*row[: len(Health._fields)]) for row in rows]
            except (Refused, Unanswered, TimeoutError, TypeError):
                return []  # It is away, of an older release, or speaks another language.

        answers = await asyncio.gather(*(ask(peer) for peer in list(self._connected())))
        return sorted([*self.here(deployment), *(each for answer in answers for each in answer)], key=_order)

    async def _serve(self, peer: str, argument: Any) -> Any:
        return [tuple(each) for each in self.here(argument if isinstance(argument, str) else None)]


def _order(health: Health) -> tuple[str, str]:
    return health.deployment, health.node
