"""Callers that wait for an invocation which is paused are told so: nobody knows when an operator resumes it.

Nothing announces a pause to the nodes at which callers wait, so the status of invocations that are waited for is looked up
every second: in one batch per partition, and only of those that were waited for a second ago too.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from holdfast.cluster.errors import Paused
from holdfast.cluster.routing.reader import Description
from holdfast.cluster.routing.replies import Replies
from holdfast.log.errors import ProposalError
from holdfast.sdk.ids import InvocationId, format_id, partition_of
from holdfast.statemachine.effects import Status
from holdfast.statemachine.queries import failure_text

logger = logging.getLogger(__name__)

LOOK_S: Final = 1.0
SLICE: Final = 1000  # of the invocations that are asked about at once
DESCRIBED_MAX: Final = 100  # of those that seem to be paused, looked at closely in one round


class Reader(Protocol):
    async def paused(self, number: int, ids: list[bytes], /) -> list[bytes]: ...

    async def describe(self, id_: InvocationId, /) -> Description | None: ...


class PausedCallers:
    def __init__(
        self,
        partitions: int,
        replies: Replies,
        reader: Reader,
        *,
        after_s: float,
        now_ms: Callable[[], int],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`after_s`: how long an invocation is paused before its callers are told."""
        self._partitions = partitions
        self._replies = replies
        self._reader = reader
        self._after_s = after_s
        self._now_ms = now_ms
        self._sleep = sleep
        self._seen: set[bytes] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self._sleep(LOOK_S)
            try:
                await self.look()
            except Exception:
                logger.exception("callers of paused invocations could not be told; it is tried again")

    async def look(self) -> None:
        """Answer the callers of invocations that have been paused for long enough."""
        waiting = self._replies.waiting()
        lasting = [id_ for id_ in waiting if id_ in self._seen]
        self._seen = set(waiting)
        by_partition: dict[int, list[bytes]] = defaultdict(list)
        for id_ in lasting:
            by_partition[partition_of(id_, self._partitions)].append(id_)
        paused: list[bytes] = []
        for number, ids in by_partition.items():
            for first in range(0, len(ids), SLICE):
                try:
                    paused += await self._reader.paused(number, ids[first : first + SLICE])
                except ProposalError:
                    continue  # Nobody leads it, or no replica answers: it is asked again in the next round.
                await asyncio.sleep(0)
        for id_ in paused[:DESCRIBED_MAX]:
            try:
                found = await self._reader.describe(InvocationId(id_))
            except ProposalError:
                continue
            if found is not None and self._is_to_be_told(found):
                self._replies.refuse(id_, refusal(found))

    def _is_to_be_told(self, found: Description) -> bool:
        record = found.record
        return record.status == Status.PAUSED and self._now_ms() - record.since_ms >= self._after_s * 1000


def refusal(found: Description) -> Paused:
    name, failure = format_id(found.record.id), found.last_failure
    why = failure_text(failure) if failure is not None else "by an operator"
    return Paused(
        f"{name} is paused: {why}",
        f"it goes on after `holdfast invocations resume {name}`; its outcome is then at /holdfast/invocation/{name}/attach, "
        "or found by the same request with the same Idempotency-Key",
    )
