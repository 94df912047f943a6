"""Prometheus metrics of backups."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from holdfast.cluster.backup.newest import NewestBackup


def of_backups(newest: NewestBackup) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "holdfast_backup_newest_timestamp_seconds",
        "When the newest complete backup that this node knows of was finished, in seconds since 1970; 0 if it knows none.",
        newest.made_ms / 1000,
    )
    ended = CounterMetricFamily(
        "holdfast_backups", "Backups that this node made, or failed to make, since its start.", labels=["outcome"]
    )
    ended.add_metric(["succeeded"], newest.succeeded)
    ended.add_metric(["failed"], newest.failed)
    yield ended
