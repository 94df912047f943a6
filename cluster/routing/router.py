"""Routes commands to the partition of an id, and to its leader, here or on another node.

`submit` hides leader changes and node failures. A command that certainly had no effect is submitted again. A command
whose outcome is unknown is repeated only if it is idempotent: an `Invoke` finds the first one by its id, a `Deliver` is
deduplicated by its sequence numbers. Otherwise the caller is told that the outcome is unknown.

A command for another leader goes over the peer link once, and that leader proposes it. If a client here waits for an
`Invoke`, the same message asks the leader to watch it for us.

Large values of a command are staged in its partition first, along the same path (`cluster/values/staging.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol

from holdfast.cluster.entropy import Entropy
from holdfast.cluster.partition.door import Partition
from holdfast.cluster.peers.rpc import (
    Refused,
    Rpc,
    RpcReply,
    Unanswered,
)
from holdfast.cluster.routing.replies import Replies
from holdfast.cluster.values.staging import Source, Stager
from holdfast.log import errors
from holdfast.log.errors import NoRoomHere, NotHosted, NotLeader, OutcomeUnknown, ProposalError, Superseded
from holdfast.sdk.ids import InvocationId, PartitionNumber, Route, partition_key, partition_of
from holdfast.statemachine.commands import (
    Command,
    CompletePromise,
    CompleteStep,
    Decide,
    Deliver,
    Invoke,
    KeepBlob,
    Kill,
    Pause,
    Purge,
    PutBlob,
    Redispatch,
    Ref,
    Restart,
    Resume,
    TouchBlob,
    decode_command,
    encode_command,
)
from holdfast.statemachine.effects import Code, Result
from holdfast.statemachine.levels import TooNew
from holdfast.statemachine.outbox import read_messages

#: Idempotent commands: the second finds what the first did. A Cancel is not, because it could hit the compensation that
#: the first one started. Nor is a SetState, which could undo what a handler wrote in between.
IDEMPOTENT: Final = frozenset(
    {
        Invoke, Deliver, Kill, Pause, Resume, Restart, Purge, Redispatch, CompletePromise, CompleteStep, TouchBlob,
        Decide,
        PutBlob, KeepBlob,
    }
)  # fmt: skip

WAIT_S: Final = 15.0  # How long a request is held while there is no leader.
#: Ids without a key go to one partition for a while, so that invocations of one turn share a batch.
SAME_PARTITION_IDS: Final = 256
_RETRY_S: Final = 0.02
#: How often a value is staged if it expires before the command that refers to it arrives.
_STAGINGS_MAX: Final = 3


class Leaders(Protocol):
    """Reaches the leader of an id's partition. `Router` is the implementation."""

    async def submit(self, route: Route, command: Command, /) -> Result: ...

    def mint(self, service: str, key: str | None, /) -> InvocationId: ...


class Router:
    def __init__(
        self,
        node: str,
        count: int,
        hosted: Mapping[PartitionNumber, Partition],
        rpc: Rpc,
        replies: Replies,
        *,
        watched: Callable[[InvocationId, str], None] = lambda *_: None,
        replicas: Callable[[PartitionNumber], Sequence[str]] = lambda _: (),
        can_move: Callable[[PartitionNumber], bool] = lambda _: False,
        stager: Stager | None = None,
        entropy: Entropy | None = None,
    ) -> None:
        self.node = node
        self.count = count
        self.hosted = hosted
        self._rpc = rpc
        self._replies = replies
        self._watched = watched
        self._replicas = replicas  # The nodes that have a partition, by the cluster's table.
        self._can_move = can_move  # Whether a node with free space could lead a partition whose leader has none.
        self._turn = 0
        self._entropy = entropy or Entropy()
        self.stager = stager or Stager()
        self._hints: dict[PartitionNumber, str] = {}  # Last known leaders of partitions that are not on this node.
        self._favourite = PartitionNumber(0)
        self._minted = 0
        rpc.serve_quickly("submit", self._serve_submit)
        rpc.serve("read-index", self._serve_read_index)

    # -- where -------------------------------------------------------------------------------------------------------

    def leader(self, number: PartitionNumber) -> str | None:
        """The leader of a partition, as far as this node knows."""
        partition = self.hosted.get(number)
        return partition.group.leader if partition is not None else self._hints.get(number)

    def hint(self, number: PartitionNumber, leader: str) -> None:
        """Remember a leader that a peer named. A wrong hint costs one refusal."""
        self._hints[number] = leader

    def forget_peer(self, peer: str) -> None:
        """The peer is unreachable: other nodes will soon lead its partitions."""
        for number in [number for number, leader in self._hints.items() if leader == peer]:
            del self._hints[number]

    def unhint(self, number: PartitionNumber, leader: str) -> None:
        if self._hints.get(number) == leader:
            del self._hints[number]

    def partition(self, route: Route) -> Partition:
        """The replica on this node of the partition that this id or key belongs to."""
        number = partition_of(route, self.count)
        if number not in self.hosted:
            raise NotHosted(f"partition {number} is not on {self.node}")
        return self.hosted[number]

    def leads(self, number: PartitionNumber) -> bool:
        partition = self.hosted.get(number)
        return partition is not None and partition.group.is_leader

    def led_here(self) -> list[Partition]:
        return [partition for partition in self.hosted.values() if partition.group.is_leader]

    def mint(self, service: str, key: str | None = None) -> InvocationId:
        """A new id. Without a key, it belongs to a partition that this node leads, if there is one."""
        entropy = self._entropy.bytes(16)
        if key is not None:
            return InvocationId(partition_key(service, key) + entropy[4:])
        count = self.count
        self._minted += 1
        if self._minted % SAME_PARTITION_IDS == 0 or not self.leads(self._favourite):
            later = [PartitionNumber((self._favourite + step) % count) for step in range(1, count + 1)]
            self._favourite = next((number for number in later if self.leads(number)), later[0])
        low = -(-(self._favourite << 32) // count)
        high = -(-((self._favourite + 1) << 32) // count)
        head = low + int.from_bytes(entropy[:4], "big") % (high - low)
        return InvocationId(head.to_bytes(4, "big") + entropy[4:])

    # -- asking ------------------------------------------------------------------------------------------------------

    async def submit(self, route: Route, command: Command, *, wait_s: float = WAIT_S) -> Result:
        """The result of a command. Raises a ProposalError. After Overloaded, the client should wait."""
        number = partition_of(route, self.count)
        if self.leads(number) and not self.stager.large(command):
            try:  # The shortest way, because every request goes it.
                return await self.hosted[number].propose(command)
            except ProposalError as error:
                first = error
            return await self._submit_again(number, command, first, wait_s)
        return await self.submit_to(number, command, wait_s=wait_s)

    async def submit_to(self, number: PartitionNumber, command: Command, *, wait_s: float = WAIT_S) -> Result:
        if self.stager.large(command):
            return await self._submit_large(number, command, wait_s)
        return await self._submit(number, command, wait_s)

    async def _submit_large(self, number: PartitionNumber, command: Command, wait_s: float) -> Result:
        put = partial(self._submit, number, wait_s=wait_s)
        for _ in range(_STAGINGS_MAX):
            light = await self.stager.detach(number, command, put, intake=type(command) is Invoke)
            result = await self._submit(number, light, wait_s)
            if result.code != Code.VALUE_MISSING:
                return result
        raise errors.Overloaded(f"partition {number} is too slow: staged values expire before they are used")

    async def stage(self, number: PartitionNumber, ref: Ref, source: Source) -> None:
        """Stage a value in another partition before a message that refers to it goes there.

        Raises ProposalError, and what `source` raises."""
        await self.stager.stage(number, ref, source, partial(self._submit, number))

    async def _submit(self, number: PartitionNumber, command: Command, wait_s: float = WAIT_S) -> Result:
        try:
            return await self._submit_once(number, command)
        except ProposalError as error:
            first = error
        return await self._submit_again(number, command, first, wait_s)

    async def _submit_again(
        self, number: PartitionNumber, command: Command, error: ProposalError, wait_s: float
    ) -> Result:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        unknown: OutcomeUnknown | None = None
        while loop.time() < deadline:
            if isinstance(error, OutcomeUnknown):
                unknown = error
            lost = isinstance(error, NotLeader | NotHosted | Superseded)
            lost = lost or (isinstance(error, NoRoomHere) and self._can_move(number))
            if not (lost or (isinstance(error, OutcomeUnknown) and type(command) in IDEMPOTENT)):
                break
            await asyncio.sleep(_RETRY_S)
            try:
                return await self._submit_once(number, command)
            except ProposalError as again:
                error = again
        raise unknown or error  # Once the outcome is unknown, a later attempt cannot change that.

    async def _submit_once(self, number: PartitionNumber, command: Command) -> Result:
        if self.leads(number):
            return await self.hosted[number].propose(command)
        leader = self.leader(number) or self._anybody(number)
        if leader is None or leader == self.node:
            raise NotLeader(None)
        watch = type(command) is Invoke and self._replies.is_waiting(command.id)
        try:
            about = number if type(command) in IDEMPOTENT else None
            answer = await self._ask(leader, number, "submit", (number, encode_command(command), watch), about=about)
        except Unanswered as error:
            raise OutcomeUnknown(str(error)) if error.sent else NotLeader(None) from None
        if watch:
            assert type(command) is Invoke
            self._watched(command.id, leader)
        return Result(*answer)

    async def _ask(self, leader: str, number: PartitionNumber, method: str, argument: Any, about: int | None) -> Any:
        """Call a leader. A refusal becomes the original error again; a node that does not lead names the leader."""
        try:
            answer = await self._rpc.ask(leader, method, argument, about=about)
        except Unanswered:
            self.unhint(number, leader)
            raise
        except Refused as refusal:
            self._hints.pop(number, None)
            if refusal.kind == "NotLeader":
                if refusal.detail is not None:
                    self.hint(number, refusal.detail)
                raise NotLeader(refusal.detail) from None
            raise _error(refusal) from None
        if number not in self.hosted:
            self._hints[number] = leader
        return answer

    def _anybody(self, number: PartitionNumber) -> str | None:
        """A replica of a remote partition, to ask for the leader: a different one with every call."""
        others = [name for name in self._replicas(number) if name != self.node] if number not in self.hosted else []
        self._turn += 1
        return others[self._turn % len(others)] if others else None

    async def ask_replica(self, number: PartitionNumber, method: str, argument: Any, *, wait_s: float = WAIT_S) -> Any:
        """Send a read-only query to any node that has the partition. Raises ProposalError."""
        deadline = asyncio.get_running_loop().time() + wait_s
        while True:
            name = self.leader(number) or self._anybody(number)
            try:
                if name is None or name == self.node:
                    raise NotLeader(None)
                return await self._rpc.ask(name, method, argument)
            except (Unanswered, Refused, NotLeader) as error:
                if name is not None:
                    self.unhint(number, name)
                if asyncio.get_running_loop().time() > deadline:
                    raise _error(error) if isinstance(error, Refused) else NotLeader(None) from None
            await asyncio.sleep(_RETRY_S)

    async def fresh(self, number: PartitionNumber, *, wait_s: float = WAIT_S) -> None:
        """Returns when the state here includes everything acknowledged anywhere before the call (Raft thesis §6.4)."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        partition = self.hosted.get(number)
        if partition is None:
            raise NotHosted(f"partition {number} is not on {self.node}")
        while True:
            try:
                if partition.group.is_leader:
                    await partition.group.read_index()
                    return
                leader = self.leader(number)
                if leader is None or leader == self.node:
                    raise NotLeader(None)
                index = await self._ask(leader, number, "read-index", number, about=number)
                while partition.machine.applied[0] < index:
                    if loop.time() > deadline or self.hosted.get(number) is not partition:  # Or it moved away.
                        raise OutcomeUnknown(f"this node lags behind in partition {number}")
                    await asyncio.sleep(0.002)
                return
            except (ProposalError, Unanswered) as error:
                if loop.time() > deadline or self.hosted.get(number) is not partition:
                    raise NotLeader(None) if isinstance(error, Unanswered) else error from None
            await asyncio.sleep(_RETRY_S)

    # -- being asked -------------------------------------------------------------------------------------------------

    def _serve_submit(self, peer: str, argument: Any, answer: RpcReply) -> None:
        try:
            number, raw, watch = argument
            command = decode_command(raw)
            if type(command) is Deliver:
                read_messages(
                    command.source, command.first, command.messages
                )  # An invalid message in the log would stop us.
        except (ValueError, TypeError, KeyError, IndexError, TooNew) as error:
            answer.refuse("Malformed", f"cannot decode a command from {peer}: {error}")
            return
        partition = self.hosted.get(number)
        if partition is None or not partition.group.is_leader:
            leader = self.leader(number)
            answer.refuse("NotLeader", f"{self.node} does not lead partition {number}", leader)
            return
        refusal = partition.refusal(command) if type(command) is not Deliver else None
        if refusal is not None:
            answer.refuse(type(refusal).__name__, str(refusal))
            return
        if watch and type(command) is Invoke:
            self._replies.watch(peer, command.id)
        partition.submit(command, partial(self._submitted, answer))

    @staticmethod
    def _submitted(answer: RpcReply, result: Result | ProposalError) -> None:
        if isinstance(result, ProposalError):
            detail = result.leader if isinstance(result, NotLeader) else None
            answer.refuse(type(result).__name__, str(result), detail)
        else:
            answer.say(result)

    async def _serve_read_index(self, peer: str, number: Any) -> Any:
        partition = self.hosted.get(number)
        if partition is None:
            raise Refused("NotLeader", f"partition {number} is not on {self.node}", self.leader(number))
        try:
            return await partition.group.read_index()
        except ProposalError as error:
            detail = error.leader if isinstance(error, NotLeader) else None
            raise Refused(type(error).__name__, str(error), detail) from None


def _error(refusal: Refused) -> ProposalError:
    """Recreate the error that the other node raised."""
    kind = getattr(errors, refusal.kind, None)
    if isinstance(kind, type) and issubclass(kind, ProposalError):
        return kind(refusal.message)
    if refusal.kind == "overloaded":
        return errors.Overloaded(refusal.message)
    # The command may have taken effect before the error occurred.
    return OutcomeUnknown(refusal.message)
