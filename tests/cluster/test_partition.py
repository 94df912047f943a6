"""The door of a partition, and its state across restarts of the node and of the machine."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from holdfast.cluster.partition.door import Bounds
from holdfast.cluster.partition.machine import PartitionMachine
from holdfast.log.errors import NoRoom, Overloaded, ProposalError, TooLarge
from holdfast.log.replica import Committed
from holdfast.sdk.ids import InvocationId
from holdfast.sdk.journal import Op
from holdfast.statemachine import queries
from holdfast.statemachine.commands import Purge, Redispatch
from holdfast.statemachine.effects import Result, Status
from tests.cluster.harness import Handled, World, echo, world


def test_commands_of_one_turn_become_one_batch(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path) as it:
            partition = it.node.partitions[0]
            batches, before = partition.batches, partition.group.status().last

            results = await asyncio.gather(
                *(partition.propose(Purge(InvocationId(os.urandom(16)))) for _ in range(500))
            )

            assert {result.code for result in results} == {404}
            assert partition.batches == batches + 1
            assert partition.group.status().last == before + 1

    asyncio.run(run())


def test_each_gets_the_answer_to_its_own_command(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path) as it:
            await it.register({"greeter/echo": echo})
            known = await it.send("greeter/echo")
            await it.completed(known)
            partition = it.node.serving.router.partition(known)

            unknown = partition.propose(Purge(InvocationId(b"0" * 16)))
            found = partition.propose(Purge(known))
            again = partition.propose(Purge(known))

            assert [(await each).code for each in (unknown, found, again)] == [404, 0, 404]

    asyncio.run(run())


def test_a_partition_reports_when_all_proposals_are_answered(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path) as it:
            partition = it.node.partitions[0]
            assert partition.landed(partition.entered)

            first = partition.propose(Purge(InvocationId(os.urandom(16))))
            mark = partition.entered
            assert not partition.landed(mark), "it is queued"
            await asyncio.sleep(0)
            second = partition.propose(Purge(InvocationId(os.urandom(16))))
            assert not partition.landed(mark), "it is proposed"

            await first
            assert partition.landed(mark)
            assert partition.landed(partition.entered) or not second.done()
            await second
            assert partition.landed(partition.entered) and partition.entered == mark + 1

    asyncio.run(run())


def test_a_flood_is_refused_and_accepted_commands_are_answered(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path) as it:
            partition = it.node.partitions[0]
            partition.bounds = Bounds(commands=100)

            answers = await asyncio.gather(
                *(partition.propose(Purge(InvocationId(os.urandom(16)))) for _ in range(1000)), return_exceptions=True
            )

            accepted = [answer for answer in answers if isinstance(answer, Result)]
            refused = [answer for answer in answers if isinstance(answer, Overloaded)]
            assert 90 <= len(accepted) <= 100 and len(accepted) + len(refused) == 1000
            assert partition.under_way == 0
            assert (await partition.propose(Purge(InvocationId(b"0" * 16)))).code == 404

    asyncio.run(run())


def test_bytes_are_bounded_too(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path) as it:
            await it.register({"greeter/echo": echo})
            it.node.ground.invoker.stopping = True  # No attempt should start here.
            for partition in it.node.partitions:
                partition.bounds = partition.bounds._replace(bytes=1_000_000)
            payload = b"x" * 200_000

            commands = [it.invoke("greeter/echo", payload) for _ in range(40)]
            answers = await asyncio.gather(
                *(it.node.serving.router.submit(command.id, command) for command in commands), return_exceptions=True
            )

            assert sum(isinstance(answer, Overloaded) for answer in answers) >= 30
            assert sum(isinstance(answer, Result) for answer in answers) >= 3
            for command, answer in zip(commands, answers, strict=True):
                assert (it.record(command.id) is not None) == isinstance(answer, Result)
            it.node.ground.invoker.stopping = False

    asyncio.run(run())


def test_a_command_that_is_too_large_or_cannot_be_written_harms_no_other(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path) as it:
            await it.register({"greeter/echo": echo})
            partition = it.node.partitions[0]

            fine = partition.propose(Purge(InvocationId(b"0" * 16)))
            large = partition.propose(it.invoke("greeter/echo", b"x" * 6_000_000))
            with pytest.raises(UnicodeEncodeError):
                partition.propose(it.invoke("greeter/echo")._replace(headers={"x": "\udcff"}))

            assert (await fine).code == 404
            with pytest.raises(TooLarge):
                await large

    asyncio.run(run())


def test_callers_get_an_unknown_outcome_when_the_node_stops(tmp_path: Path) -> None:
    async def run() -> None:
        it = World(tmp_path)
        node = await it.start()
        partition = node.partitions[0]
        waiting = [partition.propose(Purge(InvocationId(os.urandom(16)))) for _ in range(10)]
        await asyncio.sleep(0)

        await it.stop()

        for answer in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(answer, Result | ProposalError)

    asyncio.run(run())


def test_a_full_state_takes_no_new_invocations_and_heals_when_there_is_room(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, partitions=1) as it:
            await it.register({"greeter/echo": echo})
            (partition,) = it.node.partitions
            partition.bounds = partition.bounds._replace(state_bytes=300_000)
            idents = []
            with pytest.raises(NoRoom, match="state_bytes_max"):
                for _ in range(2000):
                    idents.append(await it.send("greeter/echo", b"x" * 2000))
            assert len(idents) > 20

            for ident in idents:
                await it.completed(ident)
            await asyncio.gather(*(partition.propose(Purge(ident)) for ident in idents))
            for _ in range(200):
                await partition.propose(Purge(InvocationId(b"0" * 16)))

            assert await it.call("greeter/echo", b"again") == [0, b"again"]

    asyncio.run(run())


async def sleeper(handled: Handled) -> None:
    if handled.length == 1:
        handled.run("before", b"1")
        handled.wait_for(handled.step(Op.SLEEP, "0/sleep/1", [1000]))
    else:
        handled.output(b"awake")


@pytest.mark.parametrize("how", ["kill", "stop", "power", "garbled", "gone"])
def test_accepted_work_continues_after_the_node_restarts(tmp_path: Path, how: str) -> None:
    """Killed process: the state is kept. Power loss: the state is rebuilt from the log, whatever is left of it."""

    async def run() -> None:
        it = World(tmp_path, partitions=2)
        await it.start()
        endpoint = await it.register({"greeter/sleep": sleeper, "greeter/echo": echo})
        suspended = [await it.send("greeter/sleep") for _ in range(20)]
        done = [await it.send("greeter/echo", b"%d" % number) for number in range(20)]
        for ident in suspended:
            await it.reaches(ident, Status.SUSPENDED)
        for ident in done:
            await it.completed(ident)

        await (it.stop() if how == "stop" else it.kill())
        state = tmp_path / "node" / "state"
        if how == "power":
            it.boot = "boot 2"
        elif how == "garbled":
            it.boot = "boot 2"
            for file in state.glob("*/data.mdb"):
                raw = bytearray(file.read_bytes())
                raw[8192:40960] = os.urandom(32768)
                file.write_bytes(raw[: len(raw) // 2])
        elif how == "gone":
            shutil.rmtree(state)
        if how == "stop":
            await endpoint.start()
        await it.start()

        for number, ident in enumerate(done):
            assert it.outcome(ident) == [0, b"%d" % number]
        for ident in suspended:
            assert await it.completed(ident) == [0, b"awake"]
        assert sum(len(start.journal) == 1 for start in endpoint.starts) == 40, "no journaled step ran twice"
        await it.stop()

    asyncio.run(run())


def _digests(it: World) -> list[bytes]:
    found = []
    for partition in it.node.partitions:
        with partition.state.read() as txn:
            found.append(queries.digest(txn))
    return found


def test_a_rebuilt_state_is_the_same_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest is taken at the entry where the first life ended, before the new leader announces itself."""
    ends: dict[int, int] = {}
    rebuilt: dict[int, bytes] = {}
    apply = PartitionMachine.apply

    def watched(self: PartitionMachine, entries: Sequence[Committed]) -> None:
        for entry in entries:
            apply(self, [entry])
            if entry.index == ends.get(self.number):
                with self.state.read() as txn:
                    rebuilt[self.number] = queries.digest(txn)

    async def run() -> None:
        it = World(tmp_path, partitions=2)
        await it.start()
        await it.register({"greeter/sleep": sleeper, "kv:object/put:exclusive": echo})
        for number in range(30):
            await it.call("kv/put", b"x" * number, key=f"k{number % 5}")
        it.node.ground.invoker.stopping = True
        for _ in range(5):
            await it.send("greeter/sleep")
        await asyncio.gather(
            *(partition.propose(Redispatch(InvocationId(b"0" * 16), 1)) for partition in it.node.partitions)
        )
        before = dict(enumerate(_digests(it)))
        ends.update({partition.number: partition.machine.applied[0] for partition in it.node.partitions})
        await it.kill()
        shutil.rmtree(tmp_path / "node" / "state")

        monkeypatch.setattr(PartitionMachine, "apply", watched)
        await it.start()

        assert rebuilt == before
        await it.stop()

    asyncio.run(run())
