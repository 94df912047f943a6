"""What Prometheus is told. Everything is read when it is scraped; the hot path only adds to plain numbers.

Names follow Prometheus: a unit at the end, `_total` for what only grows, labels with few values (never an id or a key).
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from holdfast import __version__
from holdfast.statemachine.queries import Statistics

if TYPE_CHECKING:
    from holdfast.cluster.ingress import Ingress, IngressServer
    from holdfast.cluster.node import Node
    from holdfast.cluster.reader import Reader

BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)


class Histogram:
    """A third of a microsecond per observation: no lock, because one thread observes, and no labels."""

    __slots__ = ("bounds", "buckets", "sum")

    def __init__(self, bounds: tuple[float, ...] = BUCKETS_S) -> None:
        self.bounds = bounds
        self.buckets = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.buckets[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self.buckets)

    def cumulative(self) -> list[tuple[str, float]]:
        total = 0
        rows = []
        for bound, count in zip((*self.bounds, float("inf")), self.buckets, strict=True):
            total += count
            rows.append(("+Inf" if bound == float("inf") else repr(bound), float(total)))
        return rows


class Metrics:
    """Of one node. `scrape` reads statistics from the partitions first, then formats in a thread of its own."""

    def __init__(self, node: Node, reader: Reader, ingress: Ingress, server: IngressServer) -> None:
        self._node = node
        self._reader = reader
        self._ingress = ingress
        self._server = server
        self._registry = CollectorRegistry()
        self._found: list[Metric] = []
        self._registry.register(self)
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._registry)

    async def scrape(self) -> tuple[bytes, str]:
        statistics = await self._reader.statistics_here()
        self._found = [*self._log(), *self._partitions(), *self._snapshots(), *self._work(statistics), *self._edges()]
        return await asyncio.to_thread(generate_latest, self._registry), CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus-client."""
        yield from self._found

    def _log(self) -> Iterator[Metric]:
        node = self._node
        yield InfoMetricFamily(
            "holdfast", "This node.", {"version": __version__, "node": node.config.node, "cluster": node.config.cluster}
        )
        counters = node.log.counters()
        yield CounterMetricFamily(
            "holdfast_log_turns", "Turns of the node's loop that stepped the log.", counters.turns
        )
        yield CounterMetricFamily("holdfast_log_commits", "Durable transactions (fsyncs) of the log.", counters.commits)
        yield CounterMetricFamily(
            "holdfast_log_commit_seconds", "Time of the writer thread in these transactions.", counters.commit_s
        )
        yield GaugeMetricFamily(
            "holdfast_log_commit_seconds_max", "The longest since the start.", counters.commit_s_max
        )
        yield CounterMetricFamily("holdfast_log_proposals", "Proposals to the log.", counters.proposals)
        yield CounterMetricFamily("holdfast_log_dropped_messages", "Messages of peers not taken.", counters.dropped)
        links = node.log.links()
        up = GaugeMetricFamily("holdfast_peer_connected", "Whether the link to a peer is up.", labels=["peer"])
        sent = CounterMetricFamily("holdfast_peer_bytes", "Bytes on links to peers.", labels=["peer", "direction"])
        for peer, status in links.items():
            up.add_metric([peer], float(status.connected))
            sent.add_metric([peer, "in"], status.bytes_in)
            sent.add_metric([peer, "out"], status.bytes_out)
        yield up
        yield sent

    def _partitions(self) -> Iterator[Metric]:
        label = ["partition"]
        leader = GaugeMetricFamily("holdfast_partition_leader", "1 where this node leads the partition.", labels=label)
        term = GaugeMetricFamily("holdfast_partition_term", "Raft term.", labels=label)
        commit = GaugeMetricFamily(
            "holdfast_partition_commit_index", "Newest entry known to be committed.", labels=label
        )
        commit_lag = GaugeMetricFamily(
            "holdfast_partition_commit_lag_entries", "Entries in the log that are not committed yet.", labels=label
        )
        apply_lag = GaugeMetricFamily(
            "holdfast_partition_apply_lag_entries", "Committed entries that are not applied yet.", labels=label
        )
        under_way = GaugeMetricFamily(
            "holdfast_partition_commands_under_way", "Commands between door and answer.", labels=label
        )
        commands = CounterMetricFamily("holdfast_partition_commands", "Commands proposed here.", labels=label)
        batches = CounterMetricFamily("holdfast_partition_batches", "Batches they were proposed in.", labels=label)
        bytes_ = GaugeMetricFamily("holdfast_partition_state_bytes", "Size of the partition's state.", labels=label)
        took = HistogramMetricFamily(
            "holdfast_partition_commit_seconds", "From a batch's proposal until it is applied here.", labels=label
        )
        for partition in self._node.partitions:
            name = [str(partition.number)]
            took.add_metric(name, partition.took.cumulative(), partition.took.sum)
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
        yield from (leader, term, commit, commit_lag, apply_lag, under_way, commands, batches, bytes_, took)

    def _snapshots(self) -> Iterator[Metric]:
        home = self._node.snapshots
        label = ["partition"]
        age = GaugeMetricFamily(
            "holdfast_snapshot_age_seconds",
            "Of the newest snapshot here, or since the start if there is none.",
            labels=label,
        )
        index = GaugeMetricFamily("holdfast_snapshot_index", "Newest entry in it; 0: there is none.", labels=label)
        size = GaugeMetricFamily("holdfast_snapshot_bytes", "Size of the newest snapshot.", labels=label)
        cuts = CounterMetricFamily("holdfast_snapshot_cuts", "Snapshots cut.", labels=label)
        moved = CounterMetricFamily("holdfast_snapshot_moved_bytes", "Bytes of snapshots.", labels=[*label, "how"])
        failures = CounterMetricFamily(
            "holdfast_snapshot_failures", "Cuts, uploads and fetches that failed.", labels=[*label, "how"]
        )
        failing = GaugeMetricFamily("holdfast_snapshot_failures_in_a_row", "0: it works.", labels=[*label, "how"])
        installs = CounterMetricFamily("holdfast_snapshot_installs", "Snapshots of others installed.", labels=label)
        base = GaugeMetricFamily("holdfast_partition_log_base_index", "The log begins behind this entry.", labels=label)
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
        yield CounterMetricFamily("holdfast_snapshot_served_bytes", "Sent to peers that fetch.", home.bytes_served)

    def _work(self, statistics: Statistics) -> Iterator[Metric]:
        now = GaugeMetricFamily("holdfast_invocations", "Invocations by status.", labels=["service", "status"])
        ever = CounterMetricFamily("holdfast_invocations_invoked", "Invocations begun.", labels=["service"])
        ended = CounterMetricFamily(
            "holdfast_invocations_ended", "Invocations ended, and how.", labels=["service", "end"]
        )
        attempts = CounterMetricFamily("holdfast_attempts", "Attempts begun.", labels=["service"])
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
            "holdfast_completed_bytes", "Of completed invocations that are kept.", statistics.completed_bytes
        )
        yield GaugeMetricFamily("holdfast_blobs", "Large values that are kept, each counted once.", statistics.blobs)
        yield GaugeMetricFamily(
            "holdfast_blob_bytes", "Of large values that are kept in pieces, in the state.", statistics.blob_bytes
        )
        yield GaugeMetricFamily(
            "holdfast_blobs_stored", "Of the large values that are kept, those in the shared store.", statistics.stored
        )
        yield GaugeMetricFamily("holdfast_blob_stored_bytes", "Of large values there.", statistics.stored_bytes)
        yield GaugeMetricFamily(
            "holdfast_blob_objects_gone",
            "Objects there that nothing refers to, until they are deleted.",
            statistics.gone,
        )

    def _objects(self) -> Iterator[Metric]:
        objects = self._node.objects
        yield GaugeMetricFamily(
            "holdfast_blob_store_usable", "1: large values go to the shared store.", float(objects.why_not() is None)
        )
        yield CounterMetricFamily("holdfast_blob_puts", "Large values put into the store.", objects.puts)
        yield CounterMetricFamily("holdfast_blob_put_bytes", "Of them.", objects.put_bytes)
        yield CounterMetricFamily(
            "holdfast_blob_fallbacks", "Large values that the store did not take, and the log did.", objects.fallbacks
        )
        yield CounterMetricFamily("holdfast_blob_gets", "Large values fetched from the store.", objects.gets)
        yield CounterMetricFamily("holdfast_blob_get_bytes", "Of them.", objects.get_bytes)
        yield CounterMetricFamily("holdfast_blob_cache_hits", "Not fetched, because at hand.", objects.cache_hits)
        yield CounterMetricFamily(
            "holdfast_blob_get_failures", "Fetches that failed, and are tried again.", objects.reading.failures_total
        )
        yield CounterMetricFamily(
            "holdfast_blob_lost", "Times that a value was missing from the store, or damaged there.", objects.lost
        )
        yield CounterMetricFamily("holdfast_blob_objects_deleted", "Objects deleted.", objects.deleted)
        yield CounterMetricFamily(
            "holdfast_blob_objects_swept", "Objects deleted that no state had heard of.", objects.swept
        )
        yield CounterMetricFamily(
            "holdfast_blob_chore_failures", "Tries to delete or to list that failed.", objects.chores.failures_total
        )

    def _edges(self) -> Iterator[Metric]:
        invoker = self._node.invoker
        label = ["deployment"]
        running = GaugeMetricFamily("holdfast_endpoint_attempts_running", "Attempts at an endpoint now.", labels=label)
        waiting = GaugeMetricFamily(
            "holdfast_endpoint_attempts_waiting", "Attempts waiting for its turn.", labels=label
        )
        failures = GaugeMetricFamily(
            "holdfast_endpoint_failures_in_a_row",
            "0: the endpoint is well; else it could not be reached.",
            labels=label,
        )
        for name, endpoint in invoker.endpoints.items():
            running.add_metric([name], endpoint.running)
            waiting.add_metric([name], len(endpoint.waiting))
            failures.add_metric([name], endpoint.failures)
        yield from (running, waiting, failures)
        yield CounterMetricFamily("holdfast_invoker_frames_in", "Frames received from endpoints.", invoker.frames_in)
        stager = self._node.stager
        yield CounterMetricFamily("holdfast_blobs_staged", "Large values brought into a partition.", stager.staged)
        yield CounterMetricFamily("holdfast_blobs_staged_bytes", "Of large values brought.", stager.staged_bytes)
        yield CounterMetricFamily("holdfast_blobs_found", "Large values that were there already.", stager.found)
        yield GaugeMetricFamily(
            "holdfast_blobs_staging_bytes", "Of large values of handlers that no log has yet.", invoker.staging_bytes
        )
        yield from self._objects()
        yield CounterMetricFamily(
            "holdfast_handovers_hurried",
            "Partitions given up before all their attempts had ended a step: such a step runs again elsewhere.",
            self._node.handover.hurried,
        )
        ingress = self._ingress
        yield GaugeMetricFamily("holdfast_ingress_requests", "Requests in progress.", ingress.active)
        yield GaugeMetricFamily("holdfast_ingress_waiting", "Requests that wait for an outcome.", ingress.waiting)
        yield GaugeMetricFamily("holdfast_ingress_body_bytes", "Of the bodies in progress.", ingress.active_bytes)
        yield GaugeMetricFamily("holdfast_ingress_connections", "Open connections.", self._server.connections)
        yield CounterMetricFamily("holdfast_ingress_accepted", "Requests accepted.", ingress.accepted)
        yield CounterMetricFamily("holdfast_ingress_refused", "Requests refused for want of room.", ingress.refused)
        took = HistogramMetricFamily("holdfast_ingress_seconds", "From a request to its answer.")
        took.add_metric([], ingress.took.cumulative(), ingress.took.sum)
        yield took
