"""Whether handlers are reachable, as all nodes see it."""

import asyncio
from typing import Any

from holdfast.cluster.handlers.health import Health, Healths
from holdfast.cluster.peers.rpc import Rpc
from holdfast.sdk.ids import DeploymentId, InvocationId

DP_1 = DeploymentId("dp_1")

SEEN = Health("n1", DP_1, "http://h:1", 0, 0, "", 0, 3, 0)


class Seen:
    """Replaces `Endpoint`: the observations of one node."""

    def __init__(self, health: Health) -> None:
        self._health = health

    def health(self, node: str, invocation: InvocationId | None = None) -> Health:
        return self._health._replace(node=node)


def seen(**healths: Health) -> dict[DeploymentId, Seen]:
    return {DeploymentId(id_): Seen(health) for id_, health in healths.items()}


def net(*names: str) -> dict[str, Rpc]:
    """Nodes whose links deliver every message at once."""
    rpcs: dict[str, Rpc] = {}

    def send_from(sender: str) -> Any:
        def send(peer: str, payload: bytes) -> bool:
            if peer not in rpcs:
                return False
            asyncio.get_running_loop().call_soon(rpcs[peer].receive, sender, payload)
            return True

        return send

    rpcs.update({name: Rpc(send_from(name)) for name in names})
    return rpcs


def test_every_node_reports_what_it_sees_and_silent_or_older_ones_are_left_out() -> None:
    async def run() -> None:
        rpcs = net("n1", "n2", "older")
        down = SEEN._replace(down_since_ms=5, failures=7, last_error="refused", next_try_ms=9, waiting=4)

        def healths(name: str, health: Health) -> Healths:
            peers = {"n1", "n2", "older", "gone"} - {name}
            return Healths(name, seen(dp_1=health), rpcs[name], lambda: peers)

        first, _ = healths("n1", SEEN), healths("n2", down)

        assert first.here() == [SEEN]
        assert await first.everywhere(DP_1) == [SEEN, down._replace(node="n2")]
        assert await first.everywhere() == [SEEN, down._replace(node="n2")]
        assert await first.everywhere(DeploymentId("dp_2")) == []

    asyncio.run(run())


def test_a_later_release_may_add_fields_to_a_deployment() -> None:
    async def run() -> None:
        rpcs = net("n1", "later")

        async def later(peer: str, argument: Any) -> Any:
            return [(*SEEN._replace(node="later"), "more", 17)]

        rpcs["later"].serve("endpoint-health", later)
        here = Healths("n1", {}, rpcs["n1"], lambda: {"later"})

        assert await here.everywhere() == [SEEN._replace(node="later")]

    asyncio.run(run())
