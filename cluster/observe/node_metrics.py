"""Prometheus metrics of the node itself: its state, its disk, its clock and its event loop."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from holdfast import __version__
from holdfast.cluster.config import Config
from holdfast.cluster.observe.watchdog import Watchdog

#: What a node is. `unhealthy`: it serves, but requests may fail; its health says why.
STATES: Final = ("starting", "serving", "unhealthy", "stopping", "removed")


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
