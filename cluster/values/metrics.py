"""What Prometheus is told of large values."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)

from holdfast.cluster.values.shared_store import Objects
from holdfast.cluster.values.staging import Stager


def of_values(stager: Stager, objects: Objects) -> Iterator[Metric]:
    yield CounterMetricFamily("holdfast_blobs_staged", "Large values brought into a partition.", stager.staged)
    yield CounterMetricFamily("holdfast_blobs_staged_bytes", "Of large values brought.", stager.staged_bytes)
    yield CounterMetricFamily("holdfast_blobs_found", "Large values that were there already.", stager.found)
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
