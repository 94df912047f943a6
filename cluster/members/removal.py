"""The end of a node that the cluster has removed: it announces that at its doors for a while, and stops.

A removed node still serves while it holds a replica or a vote, because the others may need it. It learns of its removal
from the meta group, or, if it was down meanwhile, from the nodes that refuse its link.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from holdfast.cluster.config import Config
from holdfast.cluster.groups import META_GROUP
from holdfast.cluster.members.founding import REMOVED_FILE, NodeRemoved, write_record
from holdfast.cluster.registry.machine import MetaMachine
from holdfast.log.node import LogNode
from holdfast.sdk.ids import NodeId
from holdfast.statemachine.members import REMOVED

T = TypeVar("T")
logger = logging.getLogger(__name__)

#: How long a removed node tells clients, probes and operators that it was removed, before it ends.
REMOVED_S: Final = 10.0


def write_removed(data: Path, how: str) -> None:
    """Refuse later starts on this directory, because the cluster no longer accepts this node."""
    write_record(data, REMOVED_FILE, {"known by": how})


class Removal:
    """One per node."""

    def __init__(self, config: Config, meta: MetaMachine, log: LogNode) -> None:
        self._config = config
        self._meta = meta
        self._log = log
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._listeners: list[Callable[[str], None]] = []
        self._stopped = False
        self.why = ""  # The sentence that says that this node was removed; empty: it was not.

    def stop(self) -> None:
        self._stopped = True

    def then(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with the sentence when this node is removed; at once if it has been."""
        self._listeners.append(listener)
        if self.why:
            listener(self.why)

    async def wait(self) -> None:
        """Return when this node was removed and its doors have announced that for a while."""
        await asyncio.shield(self._over)

    async def unless_removed(self, work: Awaitable[T]) -> T:
        """Wait for `work`. Raises NodeRemoved if this node was removed while it was down, so the wait would never end."""
        task = asyncio.ensure_future(work)
        either: set[asyncio.Future[Any]] = {task, self._over}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self.why and not task.done():
                raise NodeRemoved(self._config.node)
            return await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def heard(self, peer: str, reason: str) -> None:
        """Note that a peer refuses the link because this node was removed."""
        self._be_removed(f"{peer}: {reason}")

    def check(self) -> None:
        """Check whether this node is removed and no longer holds anything."""
        node, membership = NodeId(self._config.node), self._meta.state.membership
        mine = membership.nodes.get(node)
        if mine is None or mine.state != REMOVED or any(node in each.members for each in membership.table.values()):
            return
        # A partition may have made it a member just before its removal, and the table does not say so yet.
        groups = [self._log.group(group) for group in self._log.host.replicas if group != META_GROUP]
        if any(node in group.status().members for group in groups):
            return
        if META_GROUP not in self._log.host.replicas or node not in self._log.group(META_GROUP).status().members:
            self._be_removed("the meta group")

    def _be_removed(self, how: str) -> None:
        if self.why or self._stopped:
            return
        removed = NodeRemoved(self._config.node)
        self.why = f"{removed}: ask another node"
        logger.warning("%s (known by %s); it stops in %.0f s", removed, how, REMOVED_S)
        try:
            write_removed(self._config.data, how)
        except OSError as error:  # A full disk, for example. After a restart the others tell us again.
            logger.warning("the removal of this node could not be written down: %s", error)
        for listener in self._listeners:
            listener(self.why)
        self._log.loop.call_later(REMOVED_S, self._end)

    def _end(self) -> None:
        if not self._over.done():
            self._over.set_result(None)
