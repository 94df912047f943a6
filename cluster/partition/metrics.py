"""Prometheus metrics of partitions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from holdfast.cluster.partition.door import Partition


def of_partitions(partitions: Iterable[Partition]) -> Iterator[Metric]:
    label = ["partition"]
    leader = GaugeMetricFamily("holdfast_partition_leader", "1 if this node leads the partition.", labels=label)
    term = GaugeMetricFamily("holdfast_partition_term", "Raft term of the partition.", labels=label)
    commit = GaugeMetricFamily("holdfast_partition_commit_index", "Newest entry known to be committed.", labels=label)
    commit_lag = GaugeMetricFamily(
        "holdfast_partition_commit_lag_entries", "Entries in the log that are not committed yet.", labels=label
    )
    apply_lag = GaugeMetricFamily(
        "holdfast_partition_apply_lag_entries", "Committed entries that are not applied yet.", labels=label
    )
    under_way = GaugeMetricFamily(
        "holdfast_partition_commands_under_way", "Commands that were proposed and are not answered yet.", labels=label
    )
    commands = CounterMetricFamily("holdfast_partition_commands", "Commands proposed here.", labels=label)
    batches = CounterMetricFamily("holdfast_partition_batches", "Batches of commands proposed here.", labels=label)
    bytes_ = GaugeMetricFamily("holdfast_partition_state_bytes", "Size of the partition's state.", labels=label)
    latency = HistogramMetricFamily(
        "holdfast_partition_commit_seconds", "Time from the proposal of a batch until it is applied here.", labels=label
    )
    for partition in partitions:
        name = [str(partition.number)]
        latency.add_metric(name, partition.latency.cumulative(), partition.latency.sum)
        status = partition.group.status()
        leader.add_metric(name, float(partition.group.is_leader))
        term.add_metric(name, status.term)
        commit.add_metric(name, status.commit)
        commit_lag.add_metric(name, max(status.last - status.commit, 0))
        apply_lag.add_metric(name, max(status.commit - status.applied, 0))
        under_way.add_metric(name, partition.under_way)
        commands.add_metric(name, partition.commands)
        batches.add_metric(name, partition.batches)
        bytes_.add_metric(name, partition.state.bytes_used())
    yield from (leader, term, commit, commit_lag, apply_lag, under_way, commands, batches, bytes_, latency)
