"""Notices that what `/cluster`, `/deployments` or `/approvals` show has changed. What has changed is read there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple

from holdfast.cluster.handlers.health import Health
from holdfast.cluster.registry.machine import MetaMachine

CLUSTER: Final = "cluster"
DEPLOYMENTS: Final = "deployments"
APPROVALS: Final = "approvals"
LOOK_S: Final = 0.2
#: All nodes are asked for the health of their handlers.
HANDLERS_S: Final = 2.0
_UNKNOWN: Final = object()


class _Facts(NamedTuple):
    """Of the meta group."""

    version: int
    members: Any
    deployments: Any


class Signals:
    """One per node. It looks only while somebody watches."""

    def __init__(
        self,
        meta: MetaMachine,
        *,
        cluster: Callable[[], object],
        healths: Callable[[], Awaitable[Sequence[Health]]],
        approvals: Callable[[], object] = lambda: None,
    ) -> None:
        """`cluster`: a value that changes with what this node knows of the others, beside the table of members.
        `approvals`: one that changes with the inboxes of the partitions that have a replica here."""
        self._approvals = approvals
        self._inboxes: object = _UNKNOWN
        self._meta = meta
        self._cluster = cluster
        self._healths = healths
        self._tell: Callable[[str], None] = lambda _: None
        self._facts = self._facts_now()
        self._seen: object = _UNKNOWN
        self._health: object = _UNKNOWN

    def restart(self, tell: Callable[[str], None]) -> None:
        """Notice what changes from now on."""
        self._tell = tell
        self._facts = self._facts_now()
        self._seen = self._cluster()
        self._inboxes = self._approvals()
        self._health = _UNKNOWN

    def _facts_now(self) -> _Facts:
        state = self._meta.state
        offers = {name: tuple(deployments) for name, deployments in state.offers.items()}
        return _Facts(self._meta.version, (state.membership.pack(), state.level), (dict(state.deployments), offers))

    async def look(self) -> float:
        before, self._seen = self._seen, self._cluster()
        is_changed = self._seen != before
        if self._meta.version != self._facts.version:
            old, self._facts = self._facts, self._facts_now()
            is_changed |= self._facts.members != old.members
            if self._facts.deployments != old.deployments:
                self._tell(DEPLOYMENTS)
        if is_changed:
            self._tell(CLUSTER)
        inboxes, self._inboxes = self._inboxes, self._approvals()
        if inboxes != self._inboxes:
            self._tell(APPROVALS)
        return LOOK_S

    async def look_at_handlers(self) -> float:
        found = [
            (each.node, each.deployment, each.is_down, bool(each.stalled_since_ms), bool(each.restraint))
            for each in await self._healths()
        ]
        before, self._health = self._health, found
        if before not in (_UNKNOWN, found):
            self._tell(DEPLOYMENTS)
        return HANDLERS_S
