"""How every node is doing: since when it runs, its disk, its memory, and how late its event loop is.

A node answers for itself. For the whole picture it asks all connected nodes, and leaves out those that are silent or too old to
answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Annotated, Any, Final, NamedTuple, TypedDict

from holdfast.cluster.peers.rpc import Rpc
from holdfast.cluster.peers.survey import ask_all

_METHOD: Final = "vitals"


class Disk(TypedDict):
    """In bytes."""

    free: int
    total: int


class ShownVitals(TypedDict):
    """What a node says about itself; null if it does not answer."""

    uptime_s: int | None
    disk: Disk | None
    memory_bytes: int | None
    loop_lag_ms: Annotated[int | None, "by how much the last timer of its event loop was late"]


class Vitals(NamedTuple):
    """New fields go to the end, with a default, because two releases may exchange it."""

    uptime_s: int
    disk_free: int
    disk_total: int
    memory_bytes: int  # resident; 0: the system does not tell
    loop_lag_ms: int  # the delay of the last timer of the event loop

    def show(self) -> ShownVitals:
        return {
            "uptime_s": self.uptime_s,
            "disk": {"free": self.disk_free, "total": self.disk_total},
            "memory_bytes": self.memory_bytes or None,
            "loop_lag_ms": self.loop_lag_ms,
        }


#: Of a node that did not answer.
UNKNOWN: Final[ShownVitals] = {"uptime_s": None, "disk": None, "memory_bytes": None, "loop_lag_ms": None}


class AllVitals:
    def __init__(
        self, node: str, rpc: Rpc, *, connected: Callable[[], Collection[str]], here: Callable[[], Vitals]
    ) -> None:
        self._node = node
        self._rpc = rpc
        self._connected = connected
        self._here = here
        rpc.serve(_METHOD, self._serve)

    async def _serve(self, peer: str, argument: Any) -> Any:
        return tuple(self._here())

    async def everywhere(self) -> dict[str, Vitals]:
        """Those of the nodes that answer in time, by name."""

        def read(row: Any) -> Vitals:
            return Vitals(*row[: len(Vitals._fields)])

        return {
            self._node: self._here(),
            **await ask_all(self._rpc, self._connected(), _METHOD, None, read=read),
        }
