"""The log of the meta group as any node sees it: a proposal goes to whoever leads it.

Every node applies the meta group, and a proposal carries the process it came from. So the answer never travels: the proposer's
own replica gives it when the entry is applied here, which is also when this node knows what it has just changed. Proposing
twice is harmless: the first one that is applied answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from holdfast.cluster.rpc import Refused, Rpc, Unanswered
from holdfast.log.errors import NotLeader, OutcomeUnknown, ProposalError, TooLarge
from holdfast.log.node import Group

WAIT_S: Final = 20.0
_RETRY_S: Final = 0.05
META: Final = -1  # What a question about the meta group is about; partitions count from 0.


class MetaLog:
    def __init__(self, node: str, group: Callable[[], Group], rpc: Rpc) -> None:
        self._node = node
        self._group = group
        self._rpc = rpc
        rpc.serve("meta-propose", self._serve)

    async def propose(self, raw: bytes) -> None:
        """Returns when the entry is committed. Raises a ProposalError when nobody takes it for a while."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + WAIT_S
        while True:
            try:
                await self._propose_once(raw)
                return
            except TooLarge:
                raise
            except ProposalError as error:
                if loop.time() > deadline:
                    raise error
            await asyncio.sleep(_RETRY_S)

    async def _propose_once(self, raw: bytes) -> None:
        group = self._group()
        if group.is_leader:
            await group.propose(raw)
            return
        leader = group.leader
        if leader is None or leader == self._node:
            raise NotLeader(None)
        try:
            await self._rpc.ask(leader, "meta-propose", raw, about=META)
        except (Refused, Unanswered) as error:
            raise OutcomeUnknown(str(error)) from None

    async def fresh(self) -> None:
        """Returns when this node knows every change that was acknowledged before the call."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + WAIT_S
        while True:
            group = self._group()
            try:
                if group.is_leader:
                    await group.read_index()
                    return
                if group.leader is None or group.leader == self._node:
                    raise NotLeader(None)
                index = await self._rpc.ask(group.leader, "meta-propose", None, about=META)
                while group.status().applied < index:
                    if loop.time() > deadline:
                        raise OutcomeUnknown("this node is behind in the meta group")
                    await asyncio.sleep(0.002)
                return
            except (ProposalError, Refused, Unanswered):
                if loop.time() > deadline:
                    raise NotLeader(None) from None
            await asyncio.sleep(_RETRY_S)

    async def _serve(self, peer: str, raw: Any) -> Any:
        try:
            group = self._group()
            return await (group.read_index() if raw is None else group.propose(raw))
        except ProposalError as error:
            raise Refused(type(error).__name__, str(error)) from None
