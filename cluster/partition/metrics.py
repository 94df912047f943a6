"""Prometheus metrics of partitions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from holdfast.cluster.partition.door import Partition
from holdfast.log.node import Group, LogNode
from holdfast.statemachine import inbox, queries

#: A scrape counts no more due timers than this per partition.
DUE_TIMERS_MAX: Final = 1000
#: And no more approvals than this.
APPROVALS_MAX: Final = 2000


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


def of_groups(groups: Iterable[tuple[str, Group]]) -> Iterator[Metric]:
    """How the Raft groups of this node elect and follow their leaders. The meta group is called meta."""
    label = ["partition"]
    elections = CounterMetricFamily(
        "holdfast_partition_elections",
        "Elections of a leader that this node began: it lost its leader, or took the partition over.",
        labels=label,
    )
    changes = CounterMetricFamily(
        "holdfast_partition_role_changes", "How often this node changed between leader and follower.", labels=label
    )
    headless = GaugeMetricFamily(
        "holdfast_partition_without_leader", "1 if this node knows no leader of the partition.", labels=label
    )
    lag = GaugeMetricFamily(
        "holdfast_partition_follower_lag_entries",
        "Entries of the log that a follower has not acknowledged. Only the leader of the partition knows.",
        labels=[*label, "node"],
    )
    for name, group in groups:
        status = group.status()
        elections.add_metric([name], status.elections)
        changes.add_metric([name], status.role_changes)
        headless.add_metric([name], float(status.leader is None))
        for peer, match in status.match.items() if group.is_leader else ():
            lag.add_metric([name, peer], max(status.last - match, 0))
    yield from (elections, changes, headless, lag)


def of_queues(partitions: Iterable[Partition]) -> Iterator[Metric]:
    """What waits in the partitions that this node leads."""
    label = ["partition"]
    due = GaugeMetricFamily(
        "holdfast_timers_due",
        f"Timers that are due and have not fired yet, in partitions that this node leads; at most {DUE_TIMERS_MAX}.",
        labels=label,
    )
    behind = GaugeMetricFamily(
        "holdfast_timers_behind_seconds",
        "Time since the oldest timer that has not fired yet was due; 0 if none is due.",
        labels=label,
    )
    outbox = GaugeMetricFamily(
        "holdfast_partition_outbox_messages",
        "Messages to other partitions that these have not accepted yet.",
        labels=label,
    )
    for partition in partitions:
        if partition.leadership is None:
            continue
        name, now_ms = [str(partition.number)], partition.now_ms()
        with partition.state.read() as txn:
            count, oldest_ms = queries.due_timers(txn, now_ms, DUE_TIMERS_MAX)
            messages = queries.outbox_length(txn)
        due.add_metric(name, count)
        behind.add_metric(name, max(now_ms - oldest_ms, 0) / 1000 if count else 0.0)
        outbox.add_metric(name, messages)
    yield from (due, behind, outbox)


def of_approvals(partitions: Iterable[Partition]) -> Iterator[Metric]:
    """What waits for people in the partitions that this node leads."""
    label = ["service"]
    waiting = GaugeMetricFamily(
        "holdfast_approvals_waiting",
        "Approvals that wait for a decision, in partitions that this node leads; at most "
        f"{APPROVALS_MAX} per partition are counted.",
        labels=label,
    )
    age = GaugeMetricFamily(
        "holdfast_approvals_oldest_seconds",
        "Time since the oldest of these approvals was requested.",
        labels=label,
    )
    counts: Counter[str] = Counter()
    ages_ms: dict[str, int] = {}
    for partition in partitions:
        if partition.leadership is None:
            continue
        now_ms = partition.now_ms()
        with partition.state.read() as txn:
            figures = inbox.figures(txn, APPROVALS_MAX)
        for service, (count, since_ms) in figures.items():
            counts[service] += count
            ages_ms[service] = max(ages_ms.get(service, 0), now_ms - since_ms)
    for service, count in counts.items():
        waiting.add_metric([service], count)
        age.add_metric([service], ages_ms[service] / 1000)
    yield from (waiting, age)


def of_log(log: LogNode) -> Iterator[Metric]:
    counters = log.counters()
    yield CounterMetricFamily("holdfast_log_turns", "Turns of the node's loop that stepped the log.", counters.turns)
    yield CounterMetricFamily("holdfast_log_commits", "Durable transactions (fsyncs) of the log.", counters.commits)
    yield CounterMetricFamily(
        "holdfast_log_commit_seconds",
        "Time that the writer thread spent in durable transactions of the log.",
        counters.commit_s,
    )
    yield GaugeMetricFamily(
        "holdfast_log_commit_seconds_max",
        "Longest durable transaction of the log since the start.",
        counters.commit_s_max,
    )
    yield CounterMetricFamily("holdfast_log_proposals", "Proposals to the log.", counters.proposals)
    yield CounterMetricFamily(
        "holdfast_log_dropped_messages", "Messages from peers that were dropped.", counters.dropped
    )
