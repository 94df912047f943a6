"""The Prometheus endpoint. Each package yields its own metrics, which are collected at scrape time.

The hot path only increments plain numbers. Names follow Prometheus conventions: the unit at the end, `_total` for
counters, labels with few values (never an id or a key).
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from holdfast import __version__
from holdfast.cluster.certificates import Certificates
from holdfast.cluster.config import Config
from holdfast.cluster.observe.watchdog import Watchdog
from holdfast.cluster.traces import Tracer
from holdfast.log.node import LogNode
from holdfast.statemachine.queries import Statistics

#: What a node is. `unhealthy`: it serves, but requests may fail; its health says why.
STATES: Final = ("starting", "serving", "unhealthy", "stopping", "removed")


class Metrics:
    """The metrics of one node. `scrape` first reads statistics from the partitions, then formats them in a separate thread.

    `statistics`: None while there are no partitions yet.
    """

    def __init__(
        self,
        statistics: Callable[[], Awaitable[Statistics]] | None,
        *rooms: Callable[[], Iterable[Metric]],
        process: bool = True,
    ) -> None:
        self._statistics = statistics
        self._rooms = rooms
        self._registry = CollectorRegistry()
        self._found: list[Metric] = []
        self._registry.register(self)
        for collector in (ProcessCollector, PlatformCollector, GCCollector) if process else ():
            collector(registry=self._registry)

    async def families(self) -> list[Metric]:
        """Of the rooms of this node. prometheus-client adds those of the process."""
        statistics = [*of_invocations(await self._statistics())] if self._statistics is not None else []
        return [*statistics, *(metric for room in self._rooms for metric in room())]

    async def scrape(self) -> tuple[bytes, str]:
        self._found = await self.families()
        return await asyncio.to_thread(generate_latest, self._registry), CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus-client."""
        yield from self._found


def of_state(state: str) -> Iterator[Metric]:
    assert state in STATES, state
    found = GaugeMetricFamily(
        "holdfast_node_state",
        "1 for the state of this node, 0 for the others: starting (it has not joined its cluster yet), serving, "
        "unhealthy (requests may fail, and GET /health says why), stopping, or removed from the cluster.",
        labels=["state"],
    )
    for each in STATES:
        found.add_metric([each], float(each == state))
    yield found


def of_node(config: Config, dog: Watchdog, now_ms: Callable[[], int]) -> Iterator[Metric]:
    yield InfoMetricFamily(
        "holdfast", "This node.", {"version": __version__, "node": config.node, "cluster": config.cluster}
    )
    disk = shutil.disk_usage(config.data)
    yield GaugeMetricFamily(
        "holdfast_disk_free_bytes",
        "Bytes on the file system of the data directory that this node may still use.",
        disk.free,
    )
    yield GaugeMetricFamily(
        "holdfast_disk_used_bytes", "Used bytes on the file system of the data directory, by anything.", disk.used
    )
    yield GaugeMetricFamily("holdfast_disk_size_bytes", "Size of the file system of the data directory.", disk.total)
    yield GaugeMetricFamily(
        "holdfast_clock_timestamp_seconds", "The clock of this node, in seconds since 1970.", now_ms() / 1000
    )
    yield GaugeMetricFamily("holdfast_loop_lag_seconds", "Delay of the last timer of the event loop.", dog.lag_s)
    yield GaugeMetricFamily(
        "holdfast_loop_lag_seconds_max",
        "Longest delay of a timer of the event loop since the start.",
        dog.lag_s_max,
    )
    yield CounterMetricFamily(
        "holdfast_loop_blocked", "Times that the event loop did not run for a second or more.", dog.blocked
    )
    yield CounterMetricFamily(
        "holdfast_loop_blocked_seconds", "Time that the event loop was blocked in these cases.", dog.blocked_s
    )


def of_certificates(certificates: Certificates) -> Iterator[Metric]:
    expires = GaugeMetricFamily(
        "holdfast_certificate_expires_timestamp_seconds",
        "When a certificate of this node expires, in seconds since 1970: of ingress, admin or peer, or of an authority (-ca).",
        labels=["use"],
    )
    stale = GaugeMetricFamily(
        "holdfast_certificate_stale",
        "1 if the files of a certificate changed and cannot be used, so the previous one still is.",
        labels=["use"],
    )
    for each in certificates.all:
        stale.add_metric([each.use], float(bool(each.broken)))
        for use, valid in each.valid.items():
            expires.add_metric([use], valid.ends_ms / 1000)
    yield expires
    yield stale


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
    links = log.links()
    up = GaugeMetricFamily("holdfast_peer_connected", "1 if the link to the peer is up.", labels=["peer"])
    sent = CounterMetricFamily("holdfast_peer_bytes", "Bytes on links to peers.", labels=["peer", "direction"])
    for peer, status in links.items():
        up.add_metric([peer], float(status.connected))
        sent.add_metric([peer, "in"], status.bytes_in)
        sent.add_metric([peer, "out"], status.bytes_out)
    yield up
    yield sent


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


def of_traces(tracer: Tracer | None) -> Iterator[Metric]:
    exported = tracer.exported if tracer is not None else 0
    dropped = tracer.dropped if tracer is not None else 0
    yield CounterMetricFamily("holdfast_traces_spans", "Spans that the collector accepted.", exported)
    yield CounterMetricFamily(
        "holdfast_traces_dropped", "Spans that were lost: too many, or not accepted by the collector.", dropped
    )
    yield GaugeMetricFamily(
        "holdfast_traces_waiting", "Spans that wait to be sent.", tracer.waiting if tracer is not None else 0
    )
