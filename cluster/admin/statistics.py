"""Counts of invocations in the admin API, from the counters of the partitions: nothing is scanned."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from holdfast.cluster.admin.parameters import AdminRequest, Parameters, json_answer
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
        shown = {
            "services": {name: figures._asdict() for name, figures in sorted(services.items())},
            "totals": _totals(services.values()),
            "approvals": {"waiting": waiting, "oldest_since": show_time(oldest_ms)},
            "at": show_time(self._now_ms()),
        }
        return json_answer(200, shown)


def _totals(services: Iterable[ServiceStatistics]) -> dict[str, Any]:
    rows = list(services)
    names = [field for field in ServiceStatistics._fields if field != "by_status"]
    return {
        "by_status": {status: sum(row.by_status[status] for row in rows) for status in STATUS_NAMES.values()},
        **{name: sum(getattr(row, name) for row in rows) for name in names},
    }
