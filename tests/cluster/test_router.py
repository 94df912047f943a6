"""From ids to partitions, and commands that are resubmitted."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

from holdfast.cluster.peers.rpc import Rpc
from holdfast.log.errors import NotLeader, OutcomeUnknown, ProposalError
from holdfast.sdk.ids import InvocationId, PartitionNumber, partition_key, partition_of
from holdfast.statemachine.commands import (
    Cancel,
    Command,
    CompleteStep,
    DecideStep,
    Deliver,
    Invoke,
    SetState,
    encode_command,
)
from holdfast.statemachine.effects import Result
from tests.cluster.harness import echo, world

SOME = InvocationId(bytes(16))


def test_ids_without_a_key_reach_every_partition_and_share_batches(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, partitions=5) as it:
            router = it.node.serving.router

            idents = [router.mint("greeter") for _ in range(256 * 10)]

            numbers = [partition_of(ident, 5) for ident in idents]
            assert set(numbers) == {0, 1, 2, 3, 4}
            assert sum(one != other for one, other in itertools.pairwise(numbers)) <= 10
            assert len(set(idents)) == len(idents)

    asyncio.run(run())


def test_ids_with_a_key_lie_where_the_key_lies(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, partitions=5) as it:
            for number in range(50):
                ident = it.node.serving.router.mint("kv", f"k{number}")

                assert ident[:4] == partition_key("kv", f"k{number}")
                assert it.node.serving.router.partition(ident).number == partition_of(ident, 5)

    asyncio.run(run())


class Fickle:
    """A door that fails first, and reports whether the command took effect."""

    def __init__(self, real: object, errors: list[ProposalError], *, takes_effect: bool) -> None:
        self._propose = real
        self.errors = errors
        self.takes_effect = takes_effect
        self.calls = 0

    def __call__(self, command: Command) -> asyncio.Future[Result]:
        self.calls += 1
        if not self.errors:
            return self._propose(command)  # type: ignore[operator, no-any-return]
        if self.takes_effect:
            self._propose(command)  # type: ignore[operator]
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        future.set_exception(self.errors.pop(0))
        return future


@pytest.mark.parametrize("takes_effect", [False, True])
def test_an_invoke_with_an_unknown_outcome_is_resubmitted_and_runs_once(tmp_path: Path, takes_effect: bool) -> None:
    async def run() -> None:
        async with world(tmp_path, partitions=1) as it:
            endpoint = await it.register({"greeter/echo": echo})
            (partition,) = it.node.partitions
            errors: list[ProposalError] = [OutcomeUnknown("the leader changed"), NotLeader(None)]
            door = Fickle(partition.propose, errors, takes_effect=takes_effect)
            partition.propose = door  # type: ignore[method-assign]

            assert await it.call("greeter/echo", b"hi") == [0, b"hi"]

            assert door.calls == 3
            assert len(endpoint.starts) == 1

    asyncio.run(run())


@pytest.mark.parametrize(
    "command",
    [
        DecideStep(SOME, 1, [0, b""]),
        Cancel(SOME),
        SetState("counter", "k", {"total": b"1"}, False),
    ],
    ids=["DecideStep", "Cancel", "SetState"],
)
def test_a_command_that_cannot_be_repeated_reports_an_unknown_outcome(tmp_path: Path, command: Command) -> None:
    async def run() -> None:
        async with world(tmp_path, partitions=1) as it:
            (partition,) = it.node.partitions
            door = Fickle(partition.propose, [OutcomeUnknown("the leader changed")], takes_effect=True)
            partition.propose = door  # type: ignore[method-assign]

            with pytest.raises(OutcomeUnknown):
                await it.node.serving.router.submit(SOME, command)

            assert door.calls == 1

    asyncio.run(run())


def test_completing_an_awakeable_is_tried_again_when_its_fate_is_unknown(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, partitions=1) as it:
            (partition,) = it.node.partitions
            door = Fickle(partition.propose, [OutcomeUnknown("the leader changed")], takes_effect=True)
            partition.propose = door  # type: ignore[method-assign]
            command = CompleteStep(SOME, 1, [0, b""])

            assert (await it.node.serving.router.submit(command.id, command)).code == 404

            assert door.calls == 2

    asyncio.run(run())


def test_the_same_invocation_twice_at_once_is_one(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path) as it:
            endpoint = await it.register({"greeter/echo": echo})
            command: Invoke = it.invoke("greeter/echo", b"once")

            outcomes = await asyncio.gather(*(it.outcome_of(command) for _ in range(50)))

            assert outcomes == [[0, b"once"]] * 50
            assert len(endpoint.starts) == 1

    asyncio.run(run())


def test_a_delivery_with_a_message_that_cannot_be_read_is_refused_before_it_is_in_the_log(tmp_path: Path) -> None:
    """In the log it would stop every replica of the partition."""

    async def run() -> None:
        async with world(tmp_path) as it:
            said: list[Any] = []

            def send(peer: str, raw: bytes) -> bool:
                said.append(msgpack.unpackb(raw))
                return True

            rpc = Rpc(send)
            rpc.serve_quickly("submit", it.node.serving.router._serve_submit)
            before = it.node.serving.router.hosted[PartitionNumber(0)].group.status().last
            for raw in (encode_command(Deliver(PartitionNumber(1), 1, [b"\xc1"])), b"\x92\xcd\x03\xe7\x01", b"\x90"):
                rpc.receive("n2", msgpack.packb((0, 1, "submit", (0, raw, False))))

            assert [(answer[2], "cannot decode a command from n2" in answer[3]) for answer in said] == [
                ("Malformed", True)
            ] * 3
            assert it.node.serving.router.hosted[PartitionNumber(0)].group.status().last == before

    asyncio.run(run())


def test_a_read_ends_when_its_partition_moves_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its log is deleted here, so the awaited entry is never applied."""

    async def run() -> None:
        async with world(tmp_path) as it:
            router = it.node.serving.router
            behind = SimpleNamespace(
                group=SimpleNamespace(is_leader=False, leader="n2"), machine=SimpleNamespace(applied=(6, 1))
            )

            async def ask(*_: Any, **__: Any) -> int:
                return 7

            monkeypatch.setattr(router._rpc, "ask", ask)
            here = router.hosted
            router.hosted = {0: behind}  # type: ignore[dict-item]  # Of the router alone: the node works on.
            reading = asyncio.ensure_future(router.fresh(PartitionNumber(0)))
            await asyncio.sleep(0.05)
            assert not reading.done()

            router.hosted = here

            with pytest.raises(OutcomeUnknown):
                await asyncio.wait_for(reading, 5.0)

    asyncio.run(run())
