"""What a deployment offers, independent of the protocol of its endpoint, and the bounds that apply to every protocol.

The registry does not ask endpoints itself. It is handed a `Discover` by the handler protocol, which asks, reads the answer and
checks it against these bounds.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple, TypeAlias

from holdfast.cluster.registry.machine import DAY_MS
from holdfast.statemachine.meta import NATIVE, Service

SERVICES_MAX: Final = 256  # of one deployment
HANDLERS_MAX: Final = 256  # of one service
RETENTION_MS_MAX: Final = 10 * 365 * DAY_MS
INTERVAL_MS_MAX: Final = 365 * DAY_MS
MODES_BY_KIND: Final = {
    "service": ("plain",),
    "object": ("exclusive", "shared"),
    "workflow": ("main", "shared"),
}
#: The first segment of the ingress paths that are not services.
RESERVED: Final = frozenset({"holdfast"})
#: A name is one segment of a path, readable without quoting.
NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")


class Offer(NamedTuple):
    services: list[Service]
    sdk: str
    modes: list[str]  # The ways to reach the endpoint, in the words of its protocol.
    protocol: list[int]  # The lowest and the highest version that it speaks.
    protocol_name: str = NATIVE  # The one that discovered it.


#: Asks the endpoint at a uri. Raises EndpointFailed or BadManifest.
Discover: TypeAlias = Callable[[str], Awaitable[Offer]]
