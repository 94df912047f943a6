"""The release that every node runs, and when the cluster may use features of the newest one.

Nodes ask each other when they connect. The leader of the meta group raises the cluster's level (`statemachine.levels`)
as soon as every member is connected and supports it, because a disconnected node may run any release. The leader of a
partition raises the partition's level to the cluster's. Both are commands in a log, and both are repeated until
committed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, Final, NamedTuple

from holdfast import __version__
from holdfast.cluster.peers.rpc import Refused, Rpc, Unanswered
from holdfast.log.errors import ProposalError
from holdfast.statemachine.levels import FIRST, LEVEL
from holdfast.statemachine.members import REMOVED
from holdfast.statemachine.meta import MetaState, RaiseLevel

logger = logging.getLogger(__name__)

ASK_S: Final = 5.0
AGAIN_S: Final = 1.0
VERSION_CHARS_MAX: Final = 64


class Release(NamedTuple):
    version: str
    level: int


OURS: Final = Release(__version__, LEVEL)
#: For nodes that do not know the method.
BEFORE_LEVELS: Final = Release("0.1.0 or older", FIRST)


class Releases:
    def __init__(
        self,
        node: str,
        rpc: Rpc,
        *,
        connected: Callable[[], Collection[str]],
        meta: Callable[[], MetaState],
        leads_meta: Callable[[], bool],
        propose: Callable[[RaiseLevel], Awaitable[object]],
    ) -> None:
        self._node = node
        self._rpc = rpc
        self._connected = connected
        self._meta = meta
        self._leads_meta = leads_meta
        self._propose = propose
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._known: dict[str, Release] = {}
        self.ours = OURS
        rpc.serve("release", self._serve)

    @property
    def known(self) -> Mapping[str, Release]:
        """Releases of this node and of the peers connected to it."""
        return {self._node: self.ours, **self._known}

    async def _serve(self, peer: str, argument: Any) -> Any:
        return list(self.ours)

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def changed(self) -> None:
        """Call it when a node came or went, or when the meta group's leader or state changed."""
        self._changed.set()

    def peer_changed(self, peer: str, *, up: bool) -> None:
        if not up:
            self._known.pop(peer, None)  # It may come back with another release.
        self.changed()

    async def common_level(self, names: Collection[str]) -> int:
        """The level that all of these nodes report to support; FIRST if one of them does not answer."""
        others = sorted(name for name in names if name != self._node)
        found = await asyncio.gather(*(self._ask(name) for name in others))
        return min((self.ours.level, *(FIRST if release is None else release.level for release in found)))

    async def _ask(self, peer: str) -> Release | None:
        try:
            async with asyncio.timeout(ASK_S):
                version, level = await self._rpc.ask(peer, "release", None)
            release = Release(str(version)[:VERSION_CHARS_MAX], int(level))
        except Refused as refusal:
            if refusal.kind != "unknown":
                return None
            release = BEFORE_LEVELS
        except (Unanswered, TimeoutError, ValueError, TypeError):
            return None
        self._known[peer] = release
        return release

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            try:
                settled = await self._round()
            except (ProposalError, TimeoutError) as error:
                logger.debug("the level of the cluster is not raised yet: %s", error)
                settled = False
            try:
                async with asyncio.timeout(None if settled else AGAIN_S):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _round(self) -> bool:
        """Returns whether there is nothing to do until something changes."""
        missing = sorted(name for name in self._connected() if name not in self._known)
        answers = await asyncio.gather(*(self._ask(name) for name in missing))
        meta = self._meta()
        if self._leads_meta() and meta.partitions and meta.level < self.ours.level:
            members = {name for name, node in meta.membership.nodes.items() if node.state != REMOVED}
            level = min((self.known[name].level if name in self.known else FIRST for name in members), default=FIRST)
            if level > meta.level:
                await self._propose(RaiseLevel(level))
                logger.info("every node supports level %d: the cluster uses it from now on", level)
        return None not in answers
