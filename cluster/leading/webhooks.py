"""How the webhooks of the cluster fare: what waits for each of them, and how its receiver answered, on all nodes.

Only the leader of a partition delivers its notices, so each node knows about the partitions that it leads. For the whole
picture it asks all connected nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, NamedTuple

from holdfast.cluster.leading.courier import Courier
from holdfast.cluster.partition.door import Partition
from holdfast.cluster.peers.rpc import Rpc
from holdfast.cluster.peers.survey import ask_all
from holdfast.sdk.ids import PartitionNumber
from holdfast.statemachine import queries
from holdfast.statemachine.webhooks import HookId, name_of

_METHOD: Final = "webhooks"
#: A receiver that fails for this long is reported in /health.
FAILING_MS: Final = 60_000


class Faring(NamedTuple):
    """One webhook as one node sees it. New fields go to the end, with a default, because two releases may exchange it."""

    hook: HookId
    pending: int = 0
    dropped: int = 0
    delivered: int = 0
    failed: int = 0
    failing_since_ms: int = 0  # 0: it does not fail.
    last_success_ms: int = 0
    last_error: str = ""
    last_error_ms: int = 0
    next_try_ms: int = 0  # 0: nothing waits for a try.

    def and_(self, other: Faring) -> Faring:
        """What two nodes know together."""
        newest = max(self, other, key=lambda each: each.last_error_ms)
        return Faring(
            hook=self.hook,
            pending=self.pending + other.pending,
            dropped=self.dropped + other.dropped,
            delivered=self.delivered + other.delivered,
            failed=self.failed + other.failed,
            failing_since_ms=min(filter(None, (self.failing_since_ms, other.failing_since_ms)), default=0),
            last_success_ms=max(self.last_success_ms, other.last_success_ms),
            last_error=newest.last_error,
            last_error_ms=newest.last_error_ms,
            next_try_ms=min(filter(None, (self.next_try_ms, other.next_try_ms)), default=0),
        )


class Farings:
    def __init__(
        self,
        courier: Courier,
        hosted: Mapping[PartitionNumber, Partition],
        rpc: Rpc,
        *,
        leads: Callable[[PartitionNumber], bool],
        connected: Callable[[], Collection[str]],
        now_ms: Callable[[], int],
    ) -> None:
        self._courier = courier
        self._hosted = hosted
        self._rpc = rpc
        self._leads = leads
        self._connected = connected
        self._now_ms = now_ms
        rpc.serve(_METHOD, self._serve)

    def here(self) -> dict[HookId, Faring]:
        """What this node knows: its own deliveries, and what waits in the partitions that it leads."""
        found = {id_: Faring(id_) for id_ in self._courier.webhooks.by_id}
        if not found:
            return found
        for number, partition in self._hosted.items():
            if not self._leads(number):
                continue
            with partition.state.read() as txn:
                for hook in queries.hooks(txn):
                    if (faring := found.get(hook.id)) is not None:
                        found[hook.id] = faring._replace(
                            pending=faring.pending + hook.pending, dropped=faring.dropped + hook.dropped
                        )
        for id_, line in self._courier.lines.items():
            if (faring := found.get(id_)) is not None:
                found[id_] = faring._replace(
                    delivered=line.delivered,
                    failed=line.failed,
                    failing_since_ms=line.failing_since_ms,
                    last_success_ms=line.last_success_ms,
                    last_error=line.last_error,
                    last_error_ms=line.last_error_ms,
                    next_try_ms=line.next_try_ms,
                )
        return found

    async def everywhere(self) -> dict[HookId, Faring]:
        """What the nodes that answer in time know together."""

        def read(rows: Any) -> list[Faring]:
            return [Faring(*row[: len(Faring._fields)]) for row in rows]

        found = self.here()
        for rows in (await ask_all(self._rpc, self._connected(), _METHOD, None, read=read)).values():
            for row in rows:
                if row.hook in found:
                    found[row.hook] = found[row.hook].and_(row)
        return found

    async def _serve(self, peer: str, _: Any) -> Any:
        return [tuple(each) for each in self.here().values()]

    def warnings(self) -> list[str]:
        """For /health: receivers that do not answer this node, and lost events."""
        found = []
        for id_, faring in self.here().items():
            if faring.failing_since_ms and self._now_ms() - faring.failing_since_ms >= FAILING_MS:
                found.append(
                    f"webhook {name_of(id_)} takes no events, and {faring.pending} wait for it here: {faring.last_error}"
                )
            if faring.dropped:
                found.append(
                    f"webhook {name_of(id_)} did not get {faring.dropped} events, because its receiver failed for too long; "
                    "delete it and create another one to reset this"
                )
        return found
