"""Counts of invocations in the admin API, from the counters of the partitions: nothing is scanned."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from holdfast.cluster.admin.parameters import AdminRequest, Parameters, json_answer
from holdfast.cluster.admin.shapes.invocations import ServiceCounts, Statistics
from holdfast.cluster.admin.views import show_figures
from holdfast.cluster.http.exchange import Answer
from holdfast.cluster.routing.approvals import Approvals
from holdfast.cluster.routing.reader import Reader
from holdfast.cluster.times import show_time
from holdfast.statemachine.effects import STATUS_NAMES
from holdfast.statemachine.queries import ServiceStatistics

#: Approvals of each partition that are counted.
APPROVALS_MAX: Final = 2000


class StatisticsAdmin:
    def __init__(self, reader: Reader, approvals: Approvals, now_ms: Callable[[], int]) -> None:
        self._reader = reader
        self._approvals = approvals
        self._now_ms = now_ms

    async def on_statistics(self, request: AdminRequest) -> Answer:
        Parameters(request)
        services = (await self._reader.statistics()).services
        waiting, oldest_ms = await self._approvals.figures(APPROVALS_MAX)
        shown: Statistics = {
            "services": {name: _show(figures) for name, figures in sorted(services.items())},
            "totals": _show(_total(services.values())),
            "approvals": {"waiting": waiting, "oldest_since": show_time(oldest_ms)},
            "at": show_time(self._now_ms()),
        }
        return json_answer(200, shown)


def _show(figures: ServiceStatistics) -> ServiceCounts:
    return {"by_status": figures.by_status, **show_figures(figures)}


def _total(services: Iterable[ServiceStatistics]) -> ServiceStatistics:
    rows = list(services)
    names = [field for field in ServiceStatistics._fields if field != "by_status"]
    by_status = {status: sum(row.by_status[status] for row in rows) for status in STATUS_NAMES.values()}
    return ServiceStatistics(by_status, **{name: sum(getattr(row, name) for row in rows) for name in names})
