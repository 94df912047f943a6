"""The messages of a partition that wait for other partitions, and their delivery."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Final

from holdfast.cluster.backoff import backoff
from holdfast.cluster.partition.door import Partition
from holdfast.cluster.routing.router import Router
from holdfast.cluster.values.shared_store import Objects, StoreDown, ValueLost
from holdfast.cluster.values.staging import Chunk, pieces_of
from holdfast.log.errors import ProposalError
from holdfast.sdk.ids import PartitionNumber
from holdfast.statemachine import queries, refs
from holdfast.statemachine.commands import Deliver, Ref, TrimOutbox
from holdfast.statemachine.effects import Code

logger = logging.getLogger(__name__)

DELIVERY_MESSAGES: Final = 512
DELIVERY_BYTES: Final = 512 * 1024
#: Size of the large values staged for one delivery. They must not expire before the delivery arrives.
DELIVERY_BLOB_BYTES: Final = 64 * 1024 * 1024
RETRY_S: Final = 0.05
RETRY_S_MAX: Final = 2.0


class Outbox:
    """Messages to one other partition: one batch in flight at a time, repeated until it is accepted.

    Delivery is exactly once: the receiver accepts each number once and refuses gaps. Only accepted messages are
    trimmed.
    """

    def __init__(self, partition: Partition, router: Router, objects: Objects, target: PartitionNumber) -> None:
        self.failures = 0  # Consecutive.
        self._partition = partition
        self._router = router
        self._objects = objects
        self._target = target
        self._taken = 0  # Newest message that the receiver is known to have.
        self._more = False
        self._task: asyncio.Task[None] | None = None

    def flush(self) -> None:
        """Deliver new messages."""
        self._more = True
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def end(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            while self._more:
                self._more = False
                while await self._deliver_or_pause():
                    pass
        finally:
            self._task = None

    async def _deliver_or_pause(self) -> bool:
        try:
            return await self._deliver()
        except Exception as error:  # After any error, the outbox must not wait for the next message.
            logger.exception("partition %d: delivering to %d failed", self._partition.number, self._target)
            await self._pause(str(error))
            return True

    async def _deliver(self) -> bool:
        """Deliver the next batch. False when there is nothing left."""
        await self._partition.messages.over()
        with self._partition.state.read() as txn:
            first, messages = queries.outbox(txn, self._target, self._taken, DELIVERY_MESSAGES)
        if not messages:
            return False
        messages = _fit(messages)
        with self._partition.state.read() as txn:
            parcels = queries.parcels(txn, self._target, first, first + len(messages) - 1)
        messages, large = _fit_parcels(first, messages, parcels)
        last = first + len(messages) - 1
        try:
            for ref in large:
                await self._router.stage(self._target, ref, partial(self._source, ref))
            command = Deliver(self._partition.number, first, messages)
            result = await self._router.submit_to(self._target, command)
        except (ProposalError, StoreDown) as error:
            await self._pause(str(error))
            return True
        except ValueLost as error:
            # Messages are accepted in order, so the later ones wait too, until the object is restored.
            self._objects.report(
                error, f"partition {self._partition.number}: messages to partition {self._target} are waiting"
            )
            await self._pause(str(error))
            return True
        if result.code == Code.CONFLICT:
            # The receiver lacks messages that we assumed it had: start again with all we have.
            self._taken = 0
            await self._pause(result.message)
            return True
        if result.code == Code.VALUE_MISSING:
            await self._pause(result.message)  # Then stage it again.
            return True
        self.failures = 0
        self._taken = last
        await self._partition.messages.over()
        self._partition.submit(TrimOutbox(self._target, last))
        return True

    async def _source(self, ref: Ref) -> Chunk:
        """The message keeps the value here until the receiver has it."""
        with self._partition.state.read() as txn:
            name = queries.place(txn, ref.data)
        if not name:
            return partial(self._chunk, ref)
        return pieces_of(await self._objects.get(self._partition.number, ref.data, name))

    def _chunk(self, ref: Ref, index: int) -> bytes:
        with self._partition.state.read() as txn:
            return queries.chunk(txn, ref.data, index)

    async def _pause(self, why: str) -> None:
        level = logging.WARNING if self.failures == 5 else logging.DEBUG
        logger.log(
            level, "partition %d: partition %d accepts no messages: %s", self._partition.number, self._target, why
        )
        await asyncio.sleep(backoff(RETRY_S, self.failures, RETRY_S_MAX))
        self.failures += 1


def _fit(messages: list[bytes]) -> list[bytes]:
    """As many messages as fit one command; at least one."""
    size = 0
    for offset, message in enumerate(messages):
        size += len(message)
        if size > DELIVERY_BYTES and offset:
            return messages[:offset]
    return messages


def _fit_parcels(
    first: int, messages: list[bytes], parcels: list[tuple[int, list[Ref]]]
) -> tuple[list[bytes], list[Ref]]:
    """As many messages as the bound on their large values permits, at least one; and those values."""
    large: list[Ref] = []
    size = 0
    for sequence, found in parcels:
        size += sum(map(refs.size_of, found))
        if size > DELIVERY_BLOB_BYTES and sequence > first:
            return messages[: sequence - first], large
        large += found
    return messages, large
