"""The metrics of both doors, and of the audit trail."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from holdfast.cluster.http.audit import Audit
from holdfast.cluster.http.exchange import Exchange


def of_doors(exchanges: Iterable[Exchange]) -> Iterator[Metric]:
    responses = CounterMetricFamily(
        "holdfast_http_responses",
        "Responses by class of their status. The class gone counts clients that disconnected before their response.",
        labels=["door", "class"],
    )
    for exchange in exchanges:
        for digit, count in enumerate(exchange.statuses):
            if digit != 1:  # No request of ours is answered 1xx.
                responses.add_metric([exchange.source, f"{digit}xx" if digit else "gone"], count)
    yield responses


def of_audit(audit: Audit) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "holdfast_audit_acts", "Requests that changed something, or were refused the permission to.", audit.acts
    )
    yield CounterMetricFamily(
        "holdfast_audit_unrecorded",
        "Acts that are not in the audit trail. The log of the node has them, except refused ones beyond an allowance.",
        audit.unrecorded,
    )


def of_streams(*exchanges: Exchange) -> Iterator[Metric]:
    open_ = GaugeMetricFamily("holdfast_streams", "Open streams of a listener.", labels=["listener"])
    refused = CounterMetricFamily(
        "holdfast_streams_refused", "Streams refused because a listener had too many.", labels=["listener"]
    )
    slow = CounterMetricFamily(
        "holdfast_streams_slow", "Streams ended because their clients did not read.", labels=["listener"]
    )
    for exchange in exchanges:
        open_.add_metric([exchange.source], exchange.streams.open)
        refused.add_metric([exchange.source], exchange.streams.refused)
        slow.add_metric([exchange.source], exchange.streams.slow)
    yield from (open_, refused, slow)
