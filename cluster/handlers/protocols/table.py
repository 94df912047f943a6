"""The handler protocols of a node, by the names that deployments record.

Another protocol is a package beside `native` and a row here.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.cluster.errors import EndpointFailed
from holdfast.cluster.handlers.dispatch import Station
from holdfast.cluster.handlers.protocols.interface import CannotConnect, Connector, HandlerProtocol, Means
from holdfast.cluster.handlers.protocols.native.protocol import Native
from holdfast.cluster.registry.offer import Offer
from holdfast.statemachine.meta import NATIVE


class Protocols:
    def __init__(self, by_name: Mapping[str, HandlerProtocol]) -> None:
        """In the order in which an unknown endpoint is asked. If none of them finds one there, the first says why."""
        assert by_name, "a node speaks at least one protocol"
        self._by_name = dict(by_name)

    async def discover(self, uri: str) -> Offer:
        """What the endpoint at `uri` offers, and in which protocol. Raises EndpointFailed, BadManifest or BadRequest."""
        failures = []
        for name, protocol in self._by_name.items():
            try:
                offer = await protocol.discover(uri)
            except EndpointFailed as error:
                failures.append(error)
            else:
                return offer._replace(protocol_name=name)
        raise failures[0]

    def connector(self, name: str, station: Station) -> Connector:
        """Raises CannotConnect."""
        protocol = self._by_name.get(name)
        if protocol is None:
            raise CannotConnect(
                f"the deployment speaks {name!r:.100}, and this node knows only {', '.join(self._by_name)}: "
                "run the release here that it was registered with"
            )
        return protocol.connector(station)

    async def close(self) -> None:
        for protocol in self._by_name.values():
            await protocol.close()


def known_protocols(means: Means) -> Protocols:
    return Protocols({NATIVE: Native(means)})
