"""The metrics of a node that has not joined its cluster yet, so that monitoring sees it start, or fail to.

A token can be checked only by what this node knows already, which is its own admin token and little else: tokens are in the
meta group, which may be without a majority. So everybody else is told the state of the node alone, as they are by each of
its other answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import Metric

from holdfast.cluster.errors import Circumstance, Unavailable
from holdfast.cluster.http.access import Access
from holdfast.cluster.observe.metrics import Metrics
from holdfast.cluster.observe.node_metrics import of_state
from holdfast.statemachine.access import READ, permits


class StartingMetrics:
    """`access`: None if requests need no token."""

    def __init__(
        self, state: Callable[[], str], access: Callable[[], Access | None], *rooms: Callable[[], Iterable[Metric]]
    ) -> None:
        self._access = access
        self._brief = Metrics(None, lambda: of_state(state()), process=False)
        self._full = Metrics(None, lambda: of_state(state()), *rooms)

    async def scrape(self, headers: Mapping[str, str]) -> tuple[bytes, str]:
        metrics = self._full if await self._may_read(headers.get("Authorization")) else self._brief
        return await metrics.scrape()

    async def _may_read(self, authorization: str | None) -> bool:
        access = self._access()
        if access is None:
            return True
        try:
            principal = await access.authenticate(authorization)
        except Circumstance:
            return False
        return permits(principal.roles, READ)


async def cannot_ask() -> None:
    """In place of asking the cluster for tokens."""
    raise Unavailable("this node has not joined its cluster yet")
