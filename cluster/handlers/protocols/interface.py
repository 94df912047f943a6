"""What a handler protocol is to the rest of the node: it discovers what an endpoint offers, and connects to it.

Sessions, versions, modes and frames are the protocol's own. Everything on this side of `HandlerProtocol` speaks of offers,
attempts and commands. So another protocol is another package beside `native` with a row in `table`, and nothing else changes
for it. tests/cluster/test_protocols.py has a small one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from holdfast.cluster.addresses import Addresses
from holdfast.cluster.handlers.attempts import Carrier
from holdfast.cluster.handlers.dispatch import Station
from holdfast.cluster.registry.offer import Offer
from holdfast.statemachine.identity import IdentityKey
from holdfast.statemachine.meta import Deployment


class Means(NamedTuple):
    """What a node gives every protocol."""

    addresses: Addresses = Addresses()  # Those that may be contacted.
    keys: Callable[[], Sequence[IdentityKey]] = lambda: ()  # Of the cluster, to sign requests with.
    connect_s: float = 5.0  # How long connecting may take.


class CannotConnect(Exception):
    """The endpoint cannot be reached now, or wants to be left alone for `after_s`."""

    def __init__(self, why: str, after_s: float = 0.0) -> None:
        super().__init__(why)
        self.after_s = after_s


class Connector(Protocol):
    """Of one endpoint: it makes the carriers of its attempts."""

    async def connect(self, deployment: Deployment) -> Carrier:
        """Raises CannotConnect."""


class HandlerProtocol(Protocol):
    async def discover(self, uri: str) -> Offer:
        """What the endpoint at `uri` offers.

        Raises EndpointFailed if nothing there speaks this protocol (it may speak another one), BadManifest if it offers what
        nobody may, BadRequest if the address must not be contacted.
        """

    def connector(self, station: Station) -> Connector: ...

    async def close(self) -> None:
        """Called when no carrier is left."""
