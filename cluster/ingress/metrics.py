"""What Prometheus is told of the ingress."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from holdfast.cluster.ingress.ingress import Ingress
from holdfast.cluster.ingress.server import IngressServer


def of_ingress(ingress: Ingress, server: IngressServer) -> Iterator[Metric]:
    yield GaugeMetricFamily("holdfast_ingress_requests", "Requests in progress.", ingress.active)
    yield GaugeMetricFamily("holdfast_ingress_waiting", "Requests that wait for an outcome.", ingress.waiting)
    yield GaugeMetricFamily("holdfast_ingress_body_bytes", "Bytes of request bodies in progress.", ingress.active_bytes)
    yield GaugeMetricFamily("holdfast_ingress_connections", "Open client connections.", server.connections)
    yield CounterMetricFamily("holdfast_ingress_accepted", "Requests accepted.", ingress.accepted)
    yield CounterMetricFamily(
        "holdfast_ingress_refused", "Requests refused because a limit was reached.", ingress.refused
    )
    took = HistogramMetricFamily("holdfast_ingress_seconds", "Time from a request to its response.")
    took.add_metric([], ingress.took.cumulative(), ingress.took.sum)
    yield took
