"""The health of handlers, as the sender of a request may see it.

Why an address does not answer tells what listens there. A client that may register deployments could scan a network that
only nodes reach, by changing what a name resolves to. So the reasons are shown to administrators, and to everyone where
the setting `deployment_addresses` restricts the addresses.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from holdfast.cluster.admin.parameters import AdminRequest
from holdfast.cluster.handlers.health import Health
from holdfast.sdk.ids import DeploymentId, InvocationId
from holdfast.statemachine.access import ADMIN, permits

WITHHELD: Final = (
    "the connection failed (only a token with the role admin is told why, unless deployment_addresses is set)"
)


class Healths:
    def __init__(
        self,
        everywhere: Callable[[DeploymentId | None, InvocationId | None], Awaitable[Sequence[Health]]],
        *,
        open_to_all: bool,
    ) -> None:
        """`everywhere` asks all nodes. `open_to_all`: addresses are restricted, or everyone is an administrator."""
        self._everywhere = everywhere
        self._open_to_all = open_to_all

    async def of(
        self, request: AdminRequest, deployment: DeploymentId | None, invocation: InvocationId | None = None
    ) -> Sequence[Health]:
        """As all answering nodes see it; `deployment` None: of every one."""
        if permits(request.request.principal.roles, ADMIN):
            return await self._everywhere(deployment, invocation)
        return await self.for_all(deployment, invocation)

    async def for_all(
        self, deployment: DeploymentId | None, invocation: InvocationId | None = None
    ) -> Sequence[Health]:
        """The same, for anyone who may read."""
        found = await self._everywhere(deployment, invocation)
        if self._open_to_all:
            return found
        return [each._replace(last_error=WITHHELD) if each.last_error else each for each in found]
