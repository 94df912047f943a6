"""The metrics of SQL queries."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from holdfast.cluster.sql.queries import Queries


def of_queries(queries: Queries) -> Iterator[Metric]:
    yield GaugeMetricFamily("holdfast_sql_queries_running", "SQL queries in progress.", len(queries.running))
    yield CounterMetricFamily("holdfast_sql_queries", "SQL queries begun.", queries.begun)
    yield CounterMetricFamily(
        "holdfast_sql_queries_refused", "SQL queries refused because too many were in progress.", queries.refused
    )
    yield CounterMetricFamily(
        "holdfast_sql_rows_read", "Rows examined by SQL queries that have ended.", queries.examined
    )
