"""The log of the meta group, seen from any node: proposals go to its leader.

Every node applies the meta group, and a proposal carries the process it came from. So the answer never travels: the
proposer's own replica gives it when it applies the entry, and from then on this node knows the change. Proposing twice is
harmless: the first proposal that is applied answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from holdfast.cluster.peers.rpc import Refused, Rpc, Unanswered
from holdfast.log.errors import NotLeader, OutcomeUnknown, ProposalError, TooLarge
from holdfast.log.node import Group

WAIT_S: Final = 20.0
_RETRY_S: Final = 0.05
SHARED_WAIT_S: Final = 2.0  # For requests of clients: a client prefers to be told to come back.
REST_S: Final = 0.01  # Between two shared reads.
META: Final = -1  # Stands for the meta group in requests; partitions count from 0.


class MetaLog:
    def __init__(self, node: str, group: Callable[[], Group], rpc: Rpc) -> None:
        self._node = node
        self._group = group
        self._rpc = rpc
        #: Like `fresh`, but shared: a flood of questions from strangers costs a few reads.
        self.known = SharedRead(self.fresh)
        rpc.serve("meta-propose", self._serve)

    def stop(self) -> None:
        self.known.stop()

    async def propose(self, raw: bytes) -> None:
        """Returns when the entry is committed. Raises a ProposalError if no leader accepts it in time."""
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
        """Returns when this node knows every change that was acknowledged before the call. Raises a ProposalError."""
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


class SharedRead:
    """Linearizable reads of the meta group, shared by all callers on this node.

    Before this node says that something does not exist, it asks whether the cluster knows better. Strangers may ask for names
    that do not exist as often as they like, so only one read runs at a time. All callers that arrived before it began share
    it. Later callers wait for the next one: a read that began earlier could miss what was acknowledged before they asked.
    """

    def __init__(self, read: Callable[[], Awaitable[None]]) -> None:
        self._read = read
        self._next: asyncio.Future[None] | None = None  # For the callers that wait for the next read to begin.
        self._reading: asyncio.Task[None] | None = None

    async def __call__(self) -> None:
        """Returns when this node knows every change that was acknowledged before the call. Raises a ProposalError."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        if self._reading is None:
            self._reading = asyncio.get_running_loop().create_task(self._run())
        await asyncio.shield(self._next)  # A caller that gives up does not end the wait of the others.

    async def _run(self) -> None:
        try:
            while self._next is not None:
                waiting, self._next = self._next, None
                try:
                    async with asyncio.timeout(SHARED_WAIT_S):
                        await self._read()
                    waiting.set_result(None)
                except (ProposalError, TimeoutError):
                    _fail(waiting)
                except BaseException:
                    _fail(waiting)  # Even if this task is cancelled, no caller waits for ever.
                    raise
                await asyncio.sleep(REST_S)
        finally:
            self._reading = None
            if self._next is not None:
                _fail(self._next)
                self._next = None

    def stop(self) -> None:
        if self._reading is not None:
            self._reading.cancel()


def _fail(waiting: asyncio.Future[None]) -> None:
    waiting.set_exception(NotLeader(None))
    waiting.exception()  # The caller may be gone.
