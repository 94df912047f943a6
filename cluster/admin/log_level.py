"""Show and change the level of the log of the node that is asked, over the admin API."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.cluster.admin.parameters import AdminRequest, json_answer, read_body
from holdfast.cluster.admin.shapes import cluster
from holdfast.cluster.admin.shapes.cluster import LogLevelChange
from holdfast.cluster.durations import parse_duration_ms
from holdfast.cluster.errors import BadRequest
from holdfast.cluster.http.exchange import Answer
from holdfast.cluster.log_level import FOR_MS_MAX, LEVELS, LogLevel
from holdfast.cluster.times import show_time


class LogLevelAdmin:
    def __init__(self, node: str, level: LogLevel, now_ms: Callable[[], int]) -> None:
        self._node = node
        self._level = level
        self._now_ms = now_ms

    async def on_log_level(self, request: AdminRequest) -> Answer:
        return json_answer(200, self._show())

    async def on_set_log_level(self, request: AdminRequest) -> Answer:
        given = await read_body(request, LogLevelChange)
        level, duration = given.get("level"), given.get("for")
        if "level" not in given or level not in (*LEVELS, None):
            raise BadRequest(f'"level" must be one of {", ".join(LEVELS)}, or null for the level of the setting')
        for_ms = 0
        if duration is not None:
            try:
                for_ms = parse_duration_ms(duration) if isinstance(duration, str) else -1
            except ValueError as error:
                raise BadRequest(f'"for": {error}') from None
            if level is None or not 0 < for_ms <= FOR_MS_MAX:
                raise BadRequest('"for" must be a duration of at most 7 days, as in 10m, together with a "level"')
        request.request.acts("set_log_level", level=level or self._level.configured)
        if level is None:
            self._level.revert()
        else:
            self._level.change(level, for_ms=for_ms, now_ms=self._now_ms())
        return json_answer(200, self._show())

    def _show(self) -> cluster.LogLevel:
        until_ms = self._level.until_ms
        return {
            "node": self._node,
            "level": self._level.level,
            "configured": self._level.configured,
            "until": show_time(until_ms) if until_ms else None,
        }
