"""The Prometheus endpoint. Each room yields its own metrics, which are collected here at scrape time.

The hot path only increments plain numbers. Names follow Prometheus conventions: the unit at the end, `_total` for
counters, labels with few values (never an id or a key).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from holdfast.cluster.routing.metrics import of_invocations
from holdfast.statemachine.queries import Statistics


class Metrics:
    """The metrics of one node. `scrape` first reads statistics from the partitions, then formats them in a separate thread.

    `statistics`: None while there are no partitions yet.
    """

    def __init__(
        self,
        statistics: Callable[[], Awaitable[Statistics]] | None,
        *rooms: Callable[[], Iterable[Metric]],
        process: bool = True,
    ) -> None:
        self._statistics = statistics
        self._rooms = rooms
        self._registry = CollectorRegistry()
        self._found: list[Metric] = []
        self._registry.register(self)
        for collector in (ProcessCollector, PlatformCollector, GCCollector) if process else ():
            collector(registry=self._registry)

    async def families(self) -> list[Metric]:
        """Of the rooms of this node. prometheus-client adds those of the process."""
        statistics = [*of_invocations(await self._statistics())] if self._statistics is not None else []
        return [*statistics, *(metric for room in self._rooms for metric in room())]

    async def scrape(self) -> tuple[bytes, str]:
        self._found = await self.families()
        return await asyncio.to_thread(generate_latest, self._registry), CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus-client."""
        yield from self._found
