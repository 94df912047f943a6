"""The newest records of the logs of all nodes, in the order of their times.

Every node answers for itself (`cluster.log_ring`). The node that an operator asks collects them over the peer links, so
operators need to reach one node only, and one token is enough. Records are ordered by the clocks of their nodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, NamedTuple

from holdfast.cluster.log_ring import Kept, LogRing, Page, Place, Wanted
from holdfast.cluster.peers.rpc import Refused, Rpc, Unanswered

ASK_S: Final = 2.0
#: Records of one answer.
LIMIT_MAX: Final = 1000
_METHOD: Final = "logs"


class Found(NamedTuple):
    """Pages by node. `silent`: members that did not answer, or run a release that cannot."""

    pages: Mapping[str, Page]
    silent: list[str]

    def records(self) -> list[tuple[str, Kept]]:
        """Of all nodes, oldest first, each with its node."""
        rows = [(name, record) for name, page in self.pages.items() for record in page.records]
        return sorted(rows, key=lambda row: (row[1].at_ms, row[0], row[1].sequence))


class AllLogs:
    """One per node. It also answers the others."""

    def __init__(
        self,
        node: str,
        ring: LogRing,
        rpc: Rpc,
        *,
        members: Callable[[], Collection[str]],
        connected: Callable[[], Collection[str]],
    ) -> None:
        """`members`: all nodes of the cluster that were not removed, and this one."""
        self._node = node
        self._ring = ring
        self._rpc = rpc
        self.members = members
        self._connected = connected
        rpc.serve(_METHOD, self._serve)

    async def read(
        self, wanted: Wanted, limit: int, *, nodes: Collection[str], after: Mapping[str, Place] | None = None
    ) -> Found:
        """Of these nodes, the newest records; or with `after`, those after the place in each, and all of further nodes."""
        assert 0 < limit <= LIMIT_MAX
        connected = {self._node, *self._connected()}
        asked = [name for name in sorted(nodes) if name in connected]
        pages = await asyncio.gather(
            *(
                self._page(name, wanted, limit, None if after is None else after.get(name, Place(0, 0)))
                for name in asked
            )
        )
        found = {name: page for name, page in zip(asked, pages, strict=True) if page is not None}
        return Found(found, sorted(set(nodes) - found.keys()))

    async def _page(self, name: str, wanted: Wanted, limit: int, after: Place | None) -> Page | None:
        if name == self._node:
            return self._ring.read(wanted, limit, after)
        try:
            async with asyncio.timeout(ASK_S):
                answer = await self._rpc.ask(name, _METHOD, (*wanted, limit, after))
            records, place, rest, lost = answer
            kept = [
                Kept(int(sequence), int(at_ms), int(level), bytes(line)) for sequence, at_ms, level, line in records
            ]
            return Page(kept, Place(*place), rest=bool(rest), lost=bool(lost))
        except (Refused, Unanswered, TimeoutError, TypeError, ValueError):
            return None

    async def _serve(self, peer: str, argument: Any) -> Any:
        try:
            level, invocation, since_ms, until_ms, limit, after = argument
            wanted = Wanted(int(level), str(invocation), int(since_ms), int(until_ms))
            place = None if after is None else Place(*map(int, after))
            return tuple(self._ring.read(wanted, min(max(int(limit), 1), LIMIT_MAX), place))
        except (TypeError, ValueError) as error:
            raise Refused("Malformed", f"cannot decode a request for the log from {peer}: {error}") from None
