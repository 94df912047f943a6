"""What Prometheus is told of the members of the cluster."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)

from holdfast.cluster.members.handover import Handover
from holdfast.statemachine.members import REMOVED, Membership


def of_members(membership: Membership, handover: Handover) -> Iterator[Metric]:
    full = GaugeMetricFamily(
        "holdfast_disk_full", "1 for a node without room for more, as this node knows it.", labels=["node"]
    )
    for name, member in sorted(membership.nodes.items()):
        if member.state != REMOVED:
            full.add_metric([name], float(name in handover.full))
    yield full
    yield CounterMetricFamily(
        "holdfast_handovers_hurried",
        "Partitions given up before all their attempts had ended a step: such a step runs again elsewhere.",
        handover.hurried,
    )
