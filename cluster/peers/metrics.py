"""Prometheus metrics of the links to peers."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from holdfast.log.node import LogNode


def of_links(log: LogNode) -> Iterator[Metric]:
    links = log.links()
    up = GaugeMetricFamily("holdfast_peer_connected", "1 if the link to the peer is up.", labels=["peer"])
    sent = CounterMetricFamily("holdfast_peer_bytes", "Bytes on links to peers.", labels=["peer", "direction"])
    for peer, status in links.items():
        up.add_metric([peer], float(status.connected))
        sent.add_metric([peer, "in"], status.bytes_in)
        sent.add_metric([peer, "out"], status.bytes_out)
    yield up
    yield sent
