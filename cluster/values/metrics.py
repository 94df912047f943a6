"""Prometheus metrics of large values."""

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
    yield CounterMetricFamily("holdfast_blobs_staged", "Large values written to a partition.", stager.staged)
    yield CounterMetricFamily(
        "holdfast_blobs_staged_bytes", "Bytes of large values written to a partition.", stager.staged_bytes
    )
    yield CounterMetricFamily("holdfast_blobs_found", "Large values that a partition already had.", stager.found)
    yield GaugeMetricFamily(
        "holdfast_blob_store_usable", "1 if large values go to the shared store.", float(objects.why_not() is None)
    )
    yield CounterMetricFamily("holdfast_blob_puts", "Large values written to the shared store.", objects.puts)
    yield CounterMetricFamily(
        "holdfast_blob_put_bytes", "Bytes of large values written to the shared store.", objects.put_bytes
    )
    yield CounterMetricFamily(
        "holdfast_blob_fallbacks",
        "Large values that went to the log because the shared store did not accept them.",
        objects.fallbacks,
    )
    yield CounterMetricFamily("holdfast_blob_gets", "Large values read from the shared store.", objects.gets)
    yield CounterMetricFamily(
        "holdfast_blob_get_bytes", "Bytes of large values read from the shared store.", objects.get_bytes
    )
    yield CounterMetricFamily(
        "holdfast_blob_cache_hits", "Reads of large values that were served from memory.", objects.cache_hits
    )
    yield CounterMetricFamily(
        "holdfast_blob_get_failures",
        "Failed reads from the shared store. They are retried.",
        objects.reading.failures_total,
    )
    yield CounterMetricFamily(
        "holdfast_blob_lost", "Reads that found a large value missing or damaged in the shared store.", objects.lost
    )
    yield CounterMetricFamily(
        "holdfast_blob_objects_deleted", "Objects deleted from the shared store.", objects.deleted
    )
    yield CounterMetricFamily(
        "holdfast_blob_objects_swept", "Orphaned objects deleted from the shared store.", objects.swept
    )
    yield CounterMetricFamily(
        "holdfast_blob_chore_failures",
        "Failed deletions and listings in the shared store.",
        objects.chores.failures_total,
    )
