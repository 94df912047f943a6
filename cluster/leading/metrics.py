"""Prometheus metrics of webhooks."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from holdfast.cluster.leading.webhooks import Farings
from holdfast.statemachine.webhooks import name_of


def of_webhooks(farings: Farings) -> Iterator[Metric]:
    """Of the partitions that this node leads."""
    pending = GaugeMetricFamily("holdfast_webhook_pending", "Events that wait for a webhook.", labels=["webhook"])
    delivered = CounterMetricFamily(
        "holdfast_webhook_delivered", "Events that the receiver of a webhook took.", labels=["webhook"]
    )
    failed = CounterMetricFamily(
        "holdfast_webhook_failed", "Requests to a webhook that failed and are repeated.", labels=["webhook"]
    )
    dropped = GaugeMetricFamily(
        "holdfast_webhook_dropped",
        "Events that a webhook did not get, because its receiver failed for too long or refused them.",
        labels=["webhook"],
    )
    for id_, faring in farings.here().items():
        name = [name_of(id_)]
        pending.add_metric(name, faring.pending)
        delivered.add_metric(name, faring.delivered)
        failed.add_metric(name, faring.failed)
        dropped.add_metric(name, faring.dropped)
    yield from (pending, delivered, failed, dropped)
