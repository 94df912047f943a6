"""Tells followers the progress of their invocations, and waiting callers that an invocation is paused.

Nothing announces a change of status to the nodes where clients wait, so each node looks it up every second. Followed
invocations are read one by one. The others are only asked whether they are paused, because an operator may not resume them
for a long time: in one batch per partition, and only if a caller has been waiting since the previous round.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from holdfast.cluster.errors import Paused
from holdfast.cluster.routing.channel import Progress
from holdfast.cluster.routing.reader import Description
from holdfast.cluster.routing.replies import Replies
from holdfast.log.errors import ProposalError
from holdfast.sdk.ids import InvocationId, PartitionNumber, format_id, partition_of
from holdfast.statemachine.effects import STATUS_NAMES, Status
from holdfast.statemachine.explain import failure_text

logger = logging.getLogger(__name__)

LOOK_S: Final = 1.0
SLICE: Final = 1000  # invocations per request
DESCRIBED_MAX: Final = 100  # invocations that seem to be paused, checked in detail per round


class Reader(Protocol):
    async def paused(self, number: PartitionNumber, ids: list[InvocationId], /) -> list[InvocationId]: ...

    async def describe(self, id_: InvocationId, /) -> Description | None: ...


class Statuses:
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
        self._seen: set[InvocationId] = set()
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
                logger.exception("reading the status of awaited invocations failed; retrying")

    async def look(self) -> None:
        """Tell followers how far their invocations are, and callers that theirs have been paused for long enough."""
        for id_ in self._replies.followed():
            try:
                found = await self._reader.describe(id_)
            except ProposalError:
                continue  # It has no leader, or no replica answers: the next round asks again.
            if found is not None and found.outcome is None:
                self._replies.tell(id_, progress_of(found))
        waiting = self._replies.waiting()
        lasting = [id_ for id_ in waiting if id_ in self._seen]
        self._seen = set(waiting)
        by_partition: dict[PartitionNumber, list[InvocationId]] = defaultdict(list)
        for id_ in lasting:
            by_partition[partition_of(id_, self._partitions)].append(id_)
        paused: list[InvocationId] = []
        for number, ids in by_partition.items():
            for first in range(0, len(ids), SLICE):
                try:
                    paused += await self._reader.paused(number, ids[first : first + SLICE])
                except ProposalError:
                    continue  # There is no leader, or no replica answers. The next round asks again.
                await asyncio.sleep(0)
        for id_ in paused[:DESCRIBED_MAX]:
            try:
                found = await self._reader.describe(id_)
            except ProposalError:
                continue
            if found is not None and self._must_be_informed(found):
                self._replies.refuse(id_, refusal(found))

    def _must_be_informed(self, found: Description) -> bool:
        record = found.record
        return record.status == Status.PAUSED and self._now_ms() - record.since_ms >= self._after_s * 1000


def progress_of(found: Description) -> Progress:
    record = found.record
    stopped = record.status in (Status.BACKING_OFF, Status.PAUSED)
    return Progress(STATUS_NAMES[record.status], record.epoch, _reason(found) if stopped else None)


def _reason(found: Description) -> str:
    failure = found.last_failure
    return failure_text(failure) if failure is not None else "by an operator"


def refusal(found: Description) -> Paused:
    name = format_id(found.record.id)
    return Paused(
        f"{name} is paused: {_reason(found)}",
        f"resume it with `holdfast invocations resume {name}`; then get its outcome from /holdfast/invocation/{name}/attach, "
        "or repeat the request with the same Idempotency-Key",
    )
