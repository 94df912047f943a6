"""Lists of the invocations that one invocation called and sent, or of the whole tree of calls below it.

Journals have the ids of called and sent invocations. So such a list reads these journals and the records of these invocations,
and not those of others. Nothing is written for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, NamedTuple

from holdfast.cluster.errors import Unavailable, UnknownInvocation
from holdfast.cluster.routing.reader import Page, Reader, format_rank, parse_rank
from holdfast.cluster.routing.trees import Members, Trees
from holdfast.log.errors import ProposalError
from holdfast.sdk.ids import InvocationId, format_id
from holdfast.statemachine import lists
from holdfast.statemachine.effects import Status
from holdfast.statemachine.lists import Order
from holdfast.statemachine.queries import Filter
from holdfast.statemachine.records import Invocation

AT_A_TIME: Final = 4  # trees that are walked at once
#: The pages after the first one are of the tree as the first page found it, unless it is older or there were others since.
KEPT_MS: Final = 60_000
KEPT_MAX: Final = 8


class _Walked(NamedTuple):
    members: Members
    at_ms: int


class Families:
    def __init__(self, reader: Reader, trees: Trees, *, now_ms: Callable[[], int]) -> None:
        self._reader = reader
        self._trees = trees
        self._now_ms = now_ms
        self._turns = asyncio.Semaphore(AT_A_TIME)
        self._walked: dict[InvocationId, _Walked] = {}

    async def page(self, wanted: Filter, cursor: str | None, limit: int, order: Order = Order.NEWEST) -> Page:
        """As `Reader.page`, which knows nothing about trees."""
        if wanted.root is not None:
            members = await self._below(wanted.root, cursor)
            return await self._page(members, wanted._replace(root=None), cursor, limit, order=order)
        if wanted.parent is not None:
            called = await self._called(wanted.parent)
            if called is not None:
                return await self._page(called, wanted, cursor, limit, order=order)
        return await self._reader.page(wanted, cursor, limit, order)

    async def _page(self, members: Members, wanted: Filter, cursor: str | None, limit: int, *, order: Order) -> Page:
        position = parse_rank(cursor, order)
        records = await self._reader.chosen(wanted, members.ids)
        ranked = [(lists.rank(record, order), record) for record in records if lists.is_in(record, order)]
        behind = sorted((pair for pair in ranked if pair[0] > position), key=lambda pair: pair[0])
        found = [record for _, record in behind[:limit]]
        return Page(
            records=found,
            cursor=format_rank(behind[limit - 1][0], order) if len(behind) > limit else None,
            failures=await self._reader.failures(found),
            looked_at=len(members.ids),
            complete=members.complete,
        )

    async def _below(self, root: InvocationId, cursor: str | None) -> Members:
        now_ms = self._now_ms()
        known = self._walked.get(root)
        if cursor is not None and known is not None and 0 <= now_ms - known.at_ms < KEPT_MS:
            return known.members
        description = await self._reader.describe(root)
        if description is None:
            raise UnknownInvocation(f"there is no invocation {format_id(root)}: its retention may be over")
        async with self._turns:
            members = await self._trees.members(description.record)
        self._walked.pop(root, None)
        self._walked[root] = _Walked(members, now_ms)
        while len(self._walked) > KEPT_MAX:
            del self._walked[next(iter(self._walked))]
        return members

    def _is_incomplete(self, record: Invocation) -> bool:
        """Whether its journal is being removed, or does not have the calls of a workflow from before it was restarted."""
        is_due = record.status == Status.COMPLETED and record.due_ms <= self._now_ms()
        return is_due or bool(record.request)

    async def _called(self, parent: InvocationId) -> Members | None:
        """What the journal of an invocation says that it called and sent; None: it does not say all."""
        try:
            description = await self._reader.describe(parent)
            if description is None or self._is_incomplete(description.record):
                return None
            called = await self._trees.called(description.record)
        except (Unavailable, ProposalError):
            return None  # Its partition does not answer. Its calls are found anyway.
        return called if called.complete else None
