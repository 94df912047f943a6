"""The metrics of the audit trail."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric

from holdfast.cluster.http.audit import Audit


def of_audit(audit: Audit) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "holdfast_audit_acts", "Requests that changed something, or were refused the permission to.", audit.acts
    )
    yield CounterMetricFamily(
        "holdfast_audit_unrecorded",
        "Acts that are not in the audit trail. The log of the node has them, except refused ones beyond an allowance.",
        audit.unrecorded,
    )
