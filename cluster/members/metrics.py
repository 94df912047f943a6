"""Prometheus metrics of the cluster's members."""

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
        "holdfast_disk_full", "1 if the node's disk is full, as far as this node knows.", labels=["node"]
    )
    for name, member in sorted(membership.nodes.items()):
        if member.state != REMOVED:
            full.add_metric([name], float(name in handover.full))
    yield full
    yield CounterMetricFamily(
        "holdfast_handovers_hurried",
        "Partitions handed over before every attempt had finished its step. Unfinished steps run again elsewhere.",
        handover.hurried,
    )
