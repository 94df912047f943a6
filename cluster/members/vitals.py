"""How every node is doing: since when it runs, its processor time, disk and memory, how late its event loop is, and how long
requests and handlers take.

A node answers for itself. For the whole picture it asks all connected nodes, and leaves out those that are silent or too old to
answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, Final, NamedTuple, TypedDict

from holdfast.cluster.histogram import Histogram
from holdfast.cluster.peers.rpc import Rpc
from holdfast.cluster.peers.survey import ask_all

_METHOD: Final = "vitals"


class Disk(TypedDict):
    """In bytes."""

    free: int
    total: int


class ShownLatency(TypedDict):
    """A histogram since the node began."""

    bounds_s: list[float]
    counts: Annotated[list[int], "one more than the bounds: the last is of what is above all of them"]
    sum_s: float


class ShownVitals(TypedDict):
    """What a node says about itself; null if it does not answer."""

    uptime_s: int | None
    disk: Disk | None
    memory_bytes: int | None
    loop_lag_ms: Annotated[int | None, "by how much the last timer of its event loop was late"]
    cpu_ms: Annotated[int | None, "processor time since it started"]
    latency: Annotated[
        dict[str, ShownLatency] | None,
        "`accept`: until a new invocation is durable; `handler`: what attempts spend in handlers",
    ]


class Latency(NamedTuple):
    """How long something took since the node began: a histogram. The last bucket has what is above all bounds."""

    name: str
    bounds_s: Sequence[float]
    counts: Sequence[int]
    sum_s: float

    def show(self) -> ShownLatency:
        return {"bounds_s": list(self.bounds_s), "counts": list(self.counts), "sum_s": round(self.sum_s, 6)}


class Vitals(NamedTuple):
    """New fields go to the end, with a default, because two releases may exchange it."""

    uptime_s: int
    disk_free: int
    disk_total: int
    memory_bytes: int  # resident; 0: the system does not tell
    loop_lag_ms: int  # the delay of the last timer of the event loop
    cpu_ms: int = -1  # processor time since the start; -1: an older node does not tell
    latencies: Sequence[Latency] = ()

    @classmethod
    def read(cls, row: Any) -> Vitals:
        """As a node sent it. Raises TypeError or ValueError. An older node sends fewer fields, a newer one more."""
        plain, latencies = row[:_LATENCIES_AT], row[_LATENCIES_AT] if len(row) > _LATENCIES_AT else ()
        return cls(*plain)._replace(latencies=tuple(Latency(*each[: len(Latency._fields)]) for each in latencies))

    def show(self) -> ShownVitals:
        return {
            "uptime_s": self.uptime_s,
            "disk": {"free": self.disk_free, "total": self.disk_total},
            "memory_bytes": self.memory_bytes or None,
            "loop_lag_ms": self.loop_lag_ms,
            "cpu_ms": self.cpu_ms if self.cpu_ms >= 0 else None,
            "latency": {each.name: each.show() for each in self.latencies} or None,
        }


_LATENCIES_AT: Final = Vitals._fields.index("latencies")

#: Of a node that did not answer.
UNKNOWN: Final[ShownVitals] = {
    "uptime_s": None,
    "disk": None,
    "memory_bytes": None,
    "loop_lag_ms": None,
    "cpu_ms": None,
    "latency": None,
}


class AllVitals:
    def __init__(
        self, node: str, rpc: Rpc, *, connected: Callable[[], Collection[str]], here: Callable[[], Vitals]
    ) -> None:
        self._node = node
        self._rpc = rpc
        self._connected = connected
        self._tell = here
        self._measured: dict[str, Histogram] = {}
        rpc.serve(_METHOD, self._serve)

    def measure(self, name: str, histogram: Histogram) -> None:
        """Tell this histogram too: of the room that observes."""
        self._measured[name] = histogram

    def _here(self) -> Vitals:
        rows = [Latency(name, it.bounds, tuple(it.buckets), it.sum) for name, it in self._measured.items()]
        return self._tell()._replace(latencies=tuple(rows))

    async def _serve(self, peer: str, argument: Any) -> Any:
        return tuple(self._here())

    async def everywhere(self) -> dict[str, Vitals]:
        """Those of the nodes that answer in time, by name."""
        return {
            self._node: self._here(),
            **await ask_all(self._rpc, self._connected(), _METHOD, None, read=Vitals.read),
        }
