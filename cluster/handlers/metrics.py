"""Prometheus metrics of handlers."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from holdfast.cluster.handlers.invoker import Invoker


def of_handlers(invoker: Invoker) -> Iterator[Metric]:
    label = ["deployment"]
    running = GaugeMetricFamily(
        "holdfast_endpoint_attempts_running", "Attempts that run at the endpoint.", labels=label
    )
    waiting = GaugeMetricFamily(
        "holdfast_endpoint_attempts_waiting", "Attempts that wait for room at the endpoint.", labels=label
    )
    failures = GaugeMetricFamily(
        "holdfast_endpoint_failures_in_a_row",
        "Consecutive failures to reach the endpoint; 0 if it can be reached.",
        labels=label,
    )
    blocked = CounterMetricFamily(
        "holdfast_endpoint_blocked_seconds",
        "Time that handlers blocked the event loop of the endpoint.",
        labels=label,
    )
    for deployment, endpoint in invoker.endpoints.items():
        blocked.add_metric([deployment], endpoint.blocked_ms / 1000)
        running.add_metric([deployment], endpoint.queue.running)
        waiting.add_metric([deployment], len(endpoint.queue))
        failures.add_metric([deployment], endpoint.failures)
    yield from (running, waiting, failures, blocked)
    timings = invoker.timings
    for name, about, histogram in (
        (
            "holdfast_attempt_start_seconds",
            "Holdfast's own time before an attempt: from the decision to start it until it is sent to its endpoint.",
            timings.start,
        ),
        (
            "holdfast_attempt_ours_seconds",
            "Holdfast's own time during an attempt: its handler waited until steps were durable. Attempts that answered.",
            timings.ours,
        ),
        (
            "holdfast_attempt_handler_seconds",
            "Time that an attempt spent in its handler, on the network to it, and awaiting something. Attempts that answered.",
            timings.handler,
        ),
    ):
        seconds = HistogramMetricFamily(name, about)
        seconds.add_metric([], histogram.cumulative(), histogram.sum)
        yield seconds
    yield GaugeMetricFamily(
        "holdfast_pauses",
        "Pauses in force, of keys, services or everything: see `holdfast pause --list`.",
        len(invoker.registry.state.pauses.by_scope),
    )
    yield GaugeMetricFamily(
        "holdfast_attempts_withheld", "Attempts that this node does not start because of a pause.", len(invoker.pauses)
    )
    yield CounterMetricFamily("holdfast_invoker_frames_in", "Frames received from endpoints.", invoker.frames_in)
    yield GaugeMetricFamily(
        "holdfast_blobs_staging_bytes",
        "Bytes of large values from handlers that are not in a log yet.",
        invoker.staging_bytes,
    )
