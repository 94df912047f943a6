"""Prometheus metrics of the cluster's members."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)

from holdfast.cluster.members.handover import Handover
from holdfast.statemachine.members import ACTIVE, DRAINING, LEAVING, REMOVED, Membership


def of_members(membership: Membership, handover: Handover) -> Iterator[Metric]:
    full = GaugeMetricFamily(
        "holdfast_disk_full", "1 if the node's disk is full, as far as this node knows.", labels=["node"]
    )
    states = GaugeMetricFamily(
        "holdfast_member_state",
        "1 for the state of each member of the cluster, 0 for the others: active, draining (it leads nothing), leaving (its "
        "replicas move away too) or removed.",
        labels=["node", "state"],
    )
    for name, member in sorted(membership.nodes.items()):
        if member.state != REMOVED:
            full.add_metric([name], float(name in handover.full))
        for state in (ACTIVE, DRAINING, LEAVING, REMOVED):
            states.add_metric([name, state], float(member.state == state))
    yield full
    yield states
    yield CounterMetricFamily(
        "holdfast_handovers_hurried",
        "Partitions handed over before every attempt had finished its step. Unfinished steps run again elsewhere.",
        handover.hurried,
    )
