"""Addresses of the other nodes: from the settings, from the cluster's table, and from nodes that know more than we do.

A node that joins, or was away for long, may have settings that name only nodes that are long gone. So each node stores
the addresses that the cluster reports, for its next start, and sends them to every node that connects.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from holdfast.cluster.config import Config, HostPort, read_host_port, read_name
from holdfast.cluster.groups import META_GROUP
from holdfast.cluster.members.founding import write_record
from holdfast.cluster.peers.rpc import Rpc
from holdfast.cluster.registry.machine import MetaMachine
from holdfast.log.node import LogNode
from holdfast.log.sockets import Address
from holdfast.sdk.ids import NodeId
from holdfast.statemachine.members import REMOVED

logger = logging.getLogger(__name__)

_FILE: Final = "PEERS"


def read_places(data: Path) -> dict[NodeId, HostPort]:
    """The last known addresses of the other nodes, because the settings may name only nodes that are long gone."""
    try:
        found: Any = json.loads((data / _FILE).read_bytes())
        return {NodeId(read_name(name)): read_host_port(address) for name, address in found.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, AttributeError, OSError) as error:
        logger.warning("%s cannot be read, so only nodes in the setting peers are known: %s", data / _FILE, error)
        return {}


def write_places(data: Path, places: Mapping[str, str]) -> None:
    write_record(data, _FILE, dict(places))


def addresses(config: Config, heard: Mapping[NodeId, HostPort]) -> dict[str, Address]:
    """The nodes to dial before the cluster has said which there are."""
    return {name: Address(place.host, place.port) for name, place in {**heard, **_configured_peers(config)}.items()}


def _configured_peers(config: Config) -> dict[NodeId, HostPort]:
    return {NodeId(name): place for name, place in config.peers.items()}


class Places:
    """One per node. Keeps the log's links pointed at the members of the cluster."""

    def __init__(
        self, config: Config, heard: Mapping[NodeId, HostPort], rpc: Rpc, meta: MetaMachine, log: LogNode
    ) -> None:
        self._config = config
        self._rpc = rpc
        self._meta = meta
        self._log = log
        self._known: dict[NodeId, HostPort] = {}  # From the cluster's table,
        self._heard = dict(heard)  # and from nodes, which may know more than we do.
        self._dialled: dict[str, Address] = {}
        self._gone: set[NodeId] = set()  # Removed nodes that no longer hold anything.
        self._stopped = False
        rpc.listen("places", self._on_places)

    @property
    def heard(self) -> Mapping[NodeId, HostPort]:
        """Addresses that are not from the settings."""
        return self._heard

    def stop(self) -> None:
        """Change no more links."""
        self._stopped = True

    def update(self) -> None:
        """Make every member of the cluster a peer. A removed node stays one until it holds nothing."""
        if self._stopped:
            return
        config, log, membership = self._config, self._log, self._meta.state.membership
        holding = {name for replicas in membership.table.values() for name in replicas.members}
        if META_GROUP in log.host.replicas:
            holding.update(log.group(META_GROUP).status().members)
        gone = {name for name, node in membership.nodes.items() if node.state == REMOVED and name not in holding}
        known = {
            name: read_host_port(node.address)
            for name, node in membership.nodes.items()
            if node.address and name != config.node and name not in gone
        }
        heard = {name: place for name, place in self._heard.items() if name not in membership.nodes}
        # Our own settings win: they say how this node reaches it.
        wanted = {
            **heard,
            **known,
            **{name: place for name, place in _configured_peers(config).items() if name not in gone},
        }
        if known and known != self._known:
            self._known = known
            self._write()
            self.tell()
        places: dict[str, Address] = {name: Address(place.host, place.port) for name, place in wanted.items()}
        if (places, gone) != (self._dialled, self._gone):
            self._dialled, self._gone = places, gone
            log.set_peers(places, gone)

    def tell(self) -> None:
        """Tell all peers. A node that joins or was away may know too few of us, and even refuse the leader it needs."""
        places = {name: str(place) for name, place in self._known.items()}
        for peer in self._log.connected() if places else ():
            self._rpc.tell(peer, "places", places)

    def _on_places(self, peer: str, places: Any) -> None:
        heard = {NodeId(read_name(name)): read_host_port(place) for name, place in dict(places).items()}
        heard.pop(NodeId(self._config.node), None)
        if heard.items() - self._heard.items():
            self._heard |= heard
            self._log.loop.call_soon(self.update)

    def _write(self) -> None:
        try:
            write_places(self._config.data, {name: str(place) for name, place in self._known.items()})
        except OSError as error:  # A full disk, for example. The current peers do not depend on the file.
            logger.warning("the addresses of the other nodes could not be written down: %s", error)
