"""Health of the handlers: whether each deployment is reachable from this node and from the others.

Every node has its own connection to a deployment, so one may reach it and another may not. A node answers for itself.
For the whole picture it asks all connected nodes, and leaves out those that are silent or too old to answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, NamedTuple, Protocol

from holdfast.cluster.peers.rpc import Rpc
from holdfast.cluster.peers.survey import ask_all
from holdfast.sdk.ids import DeploymentId, InvocationId

_METHOD: Final = "endpoint-health"


class Health(NamedTuple):
    """One deployment as one node sees it. New fields go to the end, with a default, because two releases may exchange it."""

    node: str
    deployment: DeploymentId
    uri: str
    down_since_ms: int  # 0: it is reachable, or was not tried yet.
    failures: int  # Consecutive failures of this node to reach it.
    last_error: str
    next_try_ms: int  # 0: nothing waits for it, so there is no next try.
    in_flight: int  # Attempts that run there.
    waiting: int  # Attempts that wait for their turn.
    blocked: int = 0  # How often its event loop did not run for more than a second,
    last_block: str = ""  # and the last time: by which code, where, and for how long.
    restraint: str = ""  # Why attempts are held back although it is reachable.
    stalled_since_ms: int = 0  # 0: it responds, or is not connected.
    stall: str = ""  # Why it does not respond: what blocks its event loop, and where.
    wait: str = ""  # Why the invocation that was asked about waits here; empty if it does not.

    @property
    def is_down(self) -> bool:
        return self.down_since_ms > 0


class HasHealth(Protocol):
    def health(self, node: str, invocation: InvocationId | None = None) -> Health: ...


class Healths:
    def __init__(
        self, node: str, endpoints: Mapping[DeploymentId, HasHealth], rpc: Rpc, connected: Callable[[], Collection[str]]
    ) -> None:
        self._node = node
        self._endpoints = endpoints
        self._rpc = rpc
        self._connected = connected
        rpc.serve(_METHOD, self._serve)

    def here(self, deployment: DeploymentId | None = None, invocation: InvocationId | None = None) -> list[Health]:
        """What this node knows about one deployment, or about all that it has used. With an invocation, also why it waits."""
        endpoints = self._endpoints
        wanted = (
            endpoints.values() if deployment is None else [endpoints[deployment]] if deployment in endpoints else []
        )
        return [endpoint.health(self._node, invocation) for endpoint in wanted]

    async def everywhere(
        self, deployment: DeploymentId | None = None, invocation: InvocationId | None = None
    ) -> list[Health]:
        """What the nodes that answer in time know, sorted by deployment and node."""

        def read(rows: Any) -> list[Health]:
            found = [Health(*row[: len(Health._fields)]) for row in rows]
            # A release that does not know the question about an invocation answers for all deployments.
            return [each for each in found if deployment in (None, each.deployment)]

        argument = deployment if invocation is None else [deployment, invocation]
        answers = await ask_all(self._rpc, self._connected(), _METHOD, argument, read=read)
        return sorted(
            [*self.here(deployment, invocation), *(each for answer in answers.values() for each in answer)], key=_order
        )

    async def _serve(self, peer: str, argument: Any) -> Any:
        deployment, invocation = (
            argument if isinstance(argument, list | tuple) and len(argument) == 2 else (argument, None)
        )
        return [
            tuple(each)
            for each in self.here(
                DeploymentId(deployment) if isinstance(deployment, str) else None,
                InvocationId(invocation) if isinstance(invocation, bytes) else None,
            )
        ]


def _order(health: Health) -> tuple[str, str]:
    return health.deployment, health.node
