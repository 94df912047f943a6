"""Prometheus metrics of invocations and of their values, from the statistics of the partitions."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from holdfast.statemachine.queries import Statistics


def of_invocations(statistics: Statistics) -> Iterator[Metric]:
    now = GaugeMetricFamily("holdfast_invocations", "Invocations by status.", labels=["service", "status"])
    ever = CounterMetricFamily("holdfast_invocations_invoked", "Invocations started.", labels=["service"])
    ended = CounterMetricFamily(
        "holdfast_invocations_ended", "Invocations completed, by outcome.", labels=["service", "end"]
    )
    attempts = CounterMetricFamily("holdfast_attempts", "Attempts started.", labels=["service"])
    failed = CounterMetricFamily(
        "holdfast_attempts_failed", "Attempts that failed and are retried.", labels=["service"]
    )
    steps = CounterMetricFamily("holdfast_steps", "Steps journaled.", labels=["service"])
    for name, figures in statistics.services.items():
        for status, count in figures.by_status.items():
            now.add_metric([name, status], count)
        for end in ("succeeded", "failed", "cancelled", "killed"):
            ended.add_metric([name, end], getattr(figures, end))
        ever.add_metric([name], figures.invoked)
        attempts.add_metric([name], figures.attempts)
        failed.add_metric([name], figures.attempts_failed)
        steps.add_metric([name], figures.steps)
    yield from (now, ever, ended, attempts, failed, steps)
    pinned = GaugeMetricFamily(
        "holdfast_deployment_in_flight", "Invocations pinned to a deployment.", labels=["deployment"]
    )
    for deployment, count in statistics.deployments.items():
        pinned.add_metric([deployment], count)
    yield pinned
    yield GaugeMetricFamily(
        "holdfast_completed_bytes", "Bytes of completed invocations that are retained.", statistics.completed_bytes
    )
    yield GaugeMetricFamily("holdfast_blobs", "Distinct large values that are retained.", statistics.blobs)
    yield GaugeMetricFamily(
        "holdfast_blob_bytes", "Bytes of large values that are kept in the partition's state.", statistics.blob_bytes
    )
    yield GaugeMetricFamily(
        "holdfast_blobs_stored", "Large values that are kept in the shared store.", statistics.stored
    )
    yield GaugeMetricFamily(
        "holdfast_blob_stored_bytes",
        "Bytes of large values that are kept in the shared store.",
        statistics.stored_bytes,
    )
    yield GaugeMetricFamily(
        "holdfast_blob_objects_gone",
        "Objects in the shared store that wait for deletion.",
        statistics.gone,
    )
