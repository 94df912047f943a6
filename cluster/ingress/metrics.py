"""Prometheus metrics of the ingress."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from holdfast.cluster.http.server import HttpServer
from holdfast.cluster.ingress.ingress import Ingress


def of_ingress(ingress: Ingress, server: HttpServer) -> Iterator[Metric]:
    exchange = server.exchange
    yield GaugeMetricFamily("holdfast_ingress_requests", "Requests in progress.", exchange.active)
    yield GaugeMetricFamily("holdfast_ingress_waiting", "Requests that wait for an outcome.", ingress.waiting)
    yield GaugeMetricFamily(
        "holdfast_ingress_body_bytes", "Bytes of request bodies in progress.", exchange.active_bytes
    )
    yield GaugeMetricFamily("holdfast_ingress_connections", "Open client connections.", server.connections)
    yield CounterMetricFamily("holdfast_ingress_accepted", "Requests accepted.", ingress.accepted)
    yield CounterMetricFamily(
        "holdfast_ingress_refused", "Requests refused because a limit was reached.", exchange.refused
    )
    acceptance = HistogramMetricFamily(
        "holdfast_ingress_accept_seconds",
        "Holdfast's own time until a new invocation is durable on a majority of the nodes.",
    )
    acceptance.add_metric([], ingress.acceptance.cumulative(), ingress.acceptance.sum)
    yield acceptance
    latency = HistogramMetricFamily("holdfast_ingress_seconds", "Time from a request to its response.")
    latency.add_metric([], exchange.latency.cumulative(), exchange.latency.sum)
    yield latency
