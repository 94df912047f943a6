"""What Prometheus is told of handlers."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)

from holdfast.cluster.handlers.invoker import Invoker


def of_handlers(invoker: Invoker) -> Iterator[Metric]:
    label = ["deployment"]
    running = GaugeMetricFamily("holdfast_endpoint_attempts_running", "Attempts at an endpoint now.", labels=label)
    waiting = GaugeMetricFamily("holdfast_endpoint_attempts_waiting", "Attempts waiting for its turn.", labels=label)
    failures = GaugeMetricFamily(
        "holdfast_endpoint_failures_in_a_row",
        "0: the endpoint is well; else it could not be reached.",
        labels=label,
    )
    blocked = CounterMetricFamily(
        "holdfast_endpoint_blocked_seconds",
        "Time in which the event loop of an endpoint did not run.",
        labels=label,
    )
    for name, endpoint in invoker.endpoints.items():
        blocked.add_metric([name], endpoint.blocked_ms / 1000)
        running.add_metric([name], endpoint.running)
        waiting.add_metric([name], len(endpoint.waiting))
        failures.add_metric([name], endpoint.failures)
    yield from (running, waiting, failures, blocked)
    yield CounterMetricFamily("holdfast_invoker_frames_in", "Frames received from endpoints.", invoker.frames_in)
    yield GaugeMetricFamily(
        "holdfast_blobs_staging_bytes", "Of large values of handlers that no log has yet.", invoker.staging_bytes
    )
