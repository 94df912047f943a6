"""Delivers the notices of one partition to webhooks. Only the partition's leader runs it.

The state holds every notice until it is delivered, so a new leader continues where this one ends: what was sent and not yet
forgotten is sent again, with the same event id and body. Notices for one webhook go out in order, one at a time.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from typing import Any, Final

from holdfast.cluster.leading.courier import Courier, encode_body
from holdfast.cluster.partition.door import Partition
from holdfast.log.errors import ProposalError
from holdfast.sdk.ids import format_approval
from holdfast.statemachine import queries
from holdfast.statemachine.commands import ForgetNotices, SetHooks
from holdfast.statemachine.queries import Notice
from holdfast.statemachine.records import Hook
from holdfast.statemachine.webhooks import EVENT_NAMES, HookId, Webhook, name_of

logger = logging.getLogger(__name__)

LEVEL: Final = 2  # From this one on a partition can keep notices.
#: Notices read, and deliveries reported to the log, at a time.
BATCH: Final = 16
REPORT_S: Final = 1.0
#: Notices of a deleted webhook that are removed at a time.
REMOVED_AT_A_TIME: Final = 256
#: A notice that could not be delivered for this long is dropped.
AGE_MS_MAX: Final = 3 * 24 * 60 * 60 * 1000
#: A receiver that works and refuses an event this many times does not get it again.
REFUSALS_MAX: Final = 10
RETRY_S: Final = 0.1
RETRY_S_MAX: Final = 5.0


class Notices:
    """One per leadership."""

    def __init__(self, partition: Partition, courier: Courier) -> None:
        self._partition = partition
        self._courier = courier
        self._loop = asyncio.get_running_loop()
        self._running = False
        self._agreeing: asyncio.Task[None] | None = None
        self._tasks: dict[HookId, asyncio.Task[None]] = {}
        self._refusals: dict[HookId, tuple[int, int]] = {}  # hook -> the notice that it refuses, and how often it did

    def start(self) -> None:
        self._running = True
        self.changed()

    def end(self) -> None:
        self._running = False
        for task in (*self._tasks.values(), *([self._agreeing] if self._agreeing is not None else [])):
            task.cancel()
        self._tasks.clear()

    # -- what the partition knows about webhooks

    def changed(self) -> None:
        """The meta group may know other webhooks than the partition."""
        if self._running and self._agreeing is None and self._lacks():
            self._agreeing = self._loop.create_task(self._agree())

    def _lacks(self) -> bool:
        wanted = self._courier.webhooks
        if not wanted.version:
            return False
        with self._partition.state.read() as txn:
            known = queries.meta(txn).hooks
        return wanted.version > known and bool(known or wanted.by_id)

    async def _agree(self) -> None:
        """Tell the partition which webhooks there are."""
        try:
            while self._lacks():
                wanted = self._courier.webhooks
                rows: list[list[Any]] = [[hook.id, hook.events, hook.services] for hook in wanted.by_id.values()]
                try:
                    if self._partition.level >= LEVEL:
                        await self._partition.submit_and_wait(SetHooks(wanted.version, rows))
                        continue
                except ProposalError as error:
                    logger.debug("partition %d does not know the webhooks yet: %s", self._partition.number, error)
                await asyncio.sleep(RETRY_S)
        finally:
            self._agreeing = None

    # -- delivery

    def wake(self) -> None:
        """There may be notices."""
        if not self._running:
            return
        for hook in self.hooks():
            if hook.pending and hook.id not in self._tasks:
                self._tasks[hook.id] = self._loop.create_task(self._empty(hook.id))

    def hooks(self) -> list[Hook]:
        with self._partition.state.read() as txn:
            return queries.hooks(txn)

    async def _empty(self, hook: HookId) -> None:
        """Deliver what waits for a webhook."""
        failures = 0
        while True:
            try:
                if not await self._deliver_some(hook):
                    del self._tasks[hook]  # In the turn in which there was nothing: no notice comes in between.
                    return
                failures = 0
            except Exception as error:  # After any error, its notices must not wait for the next one.
                level = logging.DEBUG if isinstance(error, ProposalError) else logging.ERROR
                logger.log(
                    level,
                    "partition %d: delivering to %s failed",
                    self._partition.number,
                    name_of(hook),
                    exc_info=error,
                )
                await asyncio.sleep(min(RETRY_S * 2 ** min(failures, 10), RETRY_S_MAX))
                failures += 1

    async def _deliver_some(self, id_: HookId) -> bool:
        """False when nothing is left, or nothing can be done before the webhooks change."""
        with self._partition.state.read() as txn:
            hook = next((each for each in queries.hooks(txn) if each.id == id_), None)
            if hook is None or not hook.pending:
                return False
            notices = queries.notices(txn, id_, REMOVED_AT_A_TIME if hook.gone else BATCH)
        if hook.gone:
            await self._forget(id_, [notice.sequence for notice in notices])
            return True
        webhook = self._courier.webhooks.by_id.get(id_)
        if webhook is None:
            return False  # The partition is about to be told that it is gone.
        await self._courier.line(id_).opens()
        done: list[int] = []
        try:
            await self._send(webhook, notices, done)
        finally:
            if done:
                await self._forget(id_, done)
        return True

    async def _send(self, webhook: Webhook, notices: list[Notice], done: list[int]) -> None:
        """Until one fails, or it takes long. Those that are delivered or given up are added to `done`."""
        began = self._loop.time()
        for notice in notices:
            if notice.at_ms < self._partition.now_ms() - AGE_MS_MAX:
                await self._drop(webhook, notice, "could not be delivered for too long")
                continue
            sent = await self._courier.deliver(webhook, *self._event(webhook, notice))
            if not sent.error:
                done.append(notice.sequence)
            elif sent.is_refused and self._refused_too_often(webhook.id, notice.sequence):
                await self._drop(webhook, notice, f"was refused {REFUSALS_MAX} times: {sent.error}")
                return
            else:
                return
            if self._loop.time() - began > REPORT_S:
                return

    def _refused_too_often(self, hook: HookId, sequence: int) -> bool:
        before, times = self._refusals.get(hook, (0, 0))
        times = times + 1 if before == sequence else 1
        self._refusals[hook] = (sequence, times)
        return times >= REFUSALS_MAX

    async def _drop(self, webhook: Webhook, notice: Notice, why: str) -> None:
        logger.warning("webhook %s: event %s %s", name_of(webhook.id), self._event_id(webhook, notice), why)
        await self._forget(webhook.id, [notice.sequence], dropped=True)

    async def _forget(self, hook: HookId, sequences: list[int], *, dropped: bool = False) -> None:
        await self._partition.submit_and_wait(ForgetNotices(hook, sequences, dropped))

    def _event_id(self, webhook: Webhook, notice: Notice) -> str:
        """The same whichever node delivers it, and different in every cluster, because ids of webhooks are random."""
        return f"evt_{webhook.id.hex()}_{self._partition.number}_{notice.sequence}"

    def _event(self, webhook: Webhook, notice: Notice) -> tuple[str, bytes]:
        """Its id and its body."""
        code, message, kind = notice.failure or (None, None, None)
        id_ = self._event_id(webhook, notice)
        approval = {"approval": _show_approval(notice)} if notice.approval is not None else {}
        return id_, encode_body({
            "id": id_,
            "event": EVENT_NAMES.get(notice.event, str(notice.event)),
            "at": _time(notice.at_ms),
            "cluster": self._courier.cluster,
            "invocation": self._courier.show(notice.invocation),
            "failure": {"code": code, "message": message, "kind": kind or None} if notice.failure else None,
            **approval,
        })  # fmt: skip


def _show_approval(notice: Notice) -> dict[str, Any]:
    """What somebody is asked. Its id is a name, without the secret: deciding takes the role approve."""
    assert notice.approval is not None
    step, title, choices, assignee, due_ms = notice.approval
    return {
        "id": format_approval(notice.invocation.id, step),
        "title": title,
        "choices": choices,
        "assignee": assignee,
        "due_at": _time(due_ms) if due_ms else None,
    }


def _time(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"
