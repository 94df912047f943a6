"""Prometheus metrics of snapshots."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)

from holdfast.cluster.snapshotting.service import Snapshots


def of_snapshots(home: Snapshots) -> Iterator[Metric]:
    label = ["partition"]
    age = GaugeMetricFamily(
        "holdfast_snapshot_age_seconds",
        "Age of the newest local snapshot, or time since the start if there is none.",
        labels=label,
    )
    index = GaugeMetricFamily(
        "holdfast_snapshot_index", "Log index of the newest local snapshot; 0 if there is none.", labels=label
    )
    size = GaugeMetricFamily("holdfast_snapshot_bytes", "Size of the newest local snapshot.", labels=label)
    cuts = CounterMetricFamily("holdfast_snapshot_cuts", "Snapshots cut.", labels=label)
    moved = CounterMetricFamily(
        "holdfast_snapshot_moved_bytes", "Bytes of snapshots uploaded and downloaded.", labels=[*label, "how"]
    )
    failures = CounterMetricFamily(
        "holdfast_snapshot_failures", "Snapshot cuts, uploads and downloads that failed.", labels=[*label, "how"]
    )
    failing = GaugeMetricFamily(
        "holdfast_snapshot_failures_in_a_row",
        "Consecutive failures of snapshots; 0 if the last one succeeded.",
        labels=[*label, "how"],
    )
    installs = CounterMetricFamily(
        "holdfast_snapshot_installs", "Snapshots installed from the store or from a peer.", labels=label
    )
    base = GaugeMetricFamily(
        "holdfast_partition_log_base_index", "Log index up to which the log was trimmed.", labels=label
    )
    for keeper in home.keepers.values():
        name = str(keeper.partition.number)
        newest = keeper.newest
        age.add_metric([name], keeper.age_s)
        index.add_metric([name], newest.header.meta.index if newest is not None else 0)
        size.add_metric([name], newest.header.file_bytes if newest is not None else 0)
        cuts.add_metric([name], keeper.cuts)
        installs.add_metric([name], keeper.installs)
        base.add_metric([name], keeper.group.status().base)
        for how, count in (
            ("cut", keeper.cut_bytes), ("published", keeper.published_bytes), ("fetched", keeper.fetched_bytes)
        ):  # fmt: skip
            moved.add_metric([name, how], count)
        for how, work in (("cut", keeper.cutting), ("publish", keeper.publishing), ("fetch", keeper.fetching)):
            failures.add_metric([name, how], work.failures_total)
            failing.add_metric([name, how], work.failures)
    yield from (age, index, size, cuts, moved, failures, failing, installs, base)
    yield CounterMetricFamily("holdfast_snapshot_served_bytes", "Bytes of snapshots sent to peers.", home.bytes_served)
