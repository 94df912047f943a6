"""Calls and sends between handlers: across partitions, and to handlers that are unknown to the node or not registered."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from holdfast.cluster.partition.machine import Waiter
from holdfast.log.errors import NotLeader, Overloaded
from holdfast.sdk.frames import (
    Completion,
)
from holdfast.sdk.journal import Op, unpack_step
from holdfast.statemachine import queries
from holdfast.statemachine.commands import Command, FailAttempt
from holdfast.statemachine.effects import Status
from tests.cluster.harness import Handled, echo, eventually, world


def test_a_call_over_partitions_brings_the_callee_s_outcome(tmp_path: Path) -> None:
    async def caller(handled: Handled) -> None:
        indexes = [
            handled.step(Op.CALL, f"0/call/{n}", ["kv", "put", f"key {n}", b"%d" % n, {"h": "x"}]) for n in range(20)
        ]
        outcomes: dict[int, list[Any]] = {}
        while len(outcomes) < len(indexes):
            frame = await handled.receive()
            if type(frame) is Completion:
                outcomes[frame.index] = frame.outcome
        handled.output(b",".join(outcomes[index][1] for index in indexes))

    async def callee(handled: Handled) -> None:
        assert handled.start.key is not None
        handled.output(handled.start.key.encode())

    async def run() -> None:
        async with world(tmp_path, partitions=4) as it:
            await it.register({"caller/go": caller, "kv:object/put:exclusive": callee})

            outcome = await it.call("caller/go")

            assert outcome == [0, b",".join(b"key %d" % n for n in range(20))]

    asyncio.run(run())


def test_a_call_of_an_unknown_handler_fails_with_404_and_one_without_its_key_with_400(tmp_path: Path) -> None:
    async def caller(handled: Handled) -> None:
        arguments: tuple[list[Any], ...] = (["nobody", "here", None, b"", {}], ["kv", "put", None, b"", {}])
        for argument in arguments:
            index = handled.step(Op.CALL, f"0/call/{handled.length}", argument)
            outcome = await handled.completion(index)
            assert outcome[0] == 1
        handled.wait_for(1)

    async def again(handled: Handled) -> None:
        if handled.length == 1:
            await caller(handled)
        else:
            codes = [step.outcome[1] for step in handled.journal[1:] if step.outcome]
            handled.output(repr(codes).encode())

    async def run() -> None:
        async with world(tmp_path) as it:
            await it.register({"caller/go": again, "kv:object/put:exclusive": echo})

            assert await it.call("caller/go") == [0, b"[404, 400]"]

    asyncio.run(run())


def test_a_call_of_a_handler_unknown_to_the_node_waits_until_it_is_known(tmp_path: Path) -> None:
    """The meta group is read before the call fails with 404; the first read fails. Later frames of the attempt stay
    after the call."""

    async def caller(handled: Handled) -> None:
        index = handled.step(Op.CALL, "0/call/1", ["late", "say", None, b"there you are", {}])
        handled.step(Op.RUN, "0/run/2", ["two"], [0, b"2"])
        outcome = await handled.completion(index)
        handled.output(outcome[1])

    async def run() -> None:
        async with world(tmp_path) as it:
            await it.register({"caller/go": caller})
            asked = 0

            async def fresh() -> None:
                nonlocal asked
                asked += 1
                if asked == 1:
                    raise NotLeader(None)
                await it.register({"late/say": echo})

            it.node.ground.invoker.fresh = fresh

            ident = await it.send("caller/go")

            assert await it.completed(ident) == [0, b"there you are"]
            assert asked == 2
            with it.node.serving.router.partition(ident).state.read() as txn:
                steps = [unpack_step(raw) for raw in queries.journal(txn, ident, 1, 3)]
            assert [step.op for step in steps] == [Op.CALL, Op.RUN]
            assert it.node.ground.invoker.staging_bytes == 0

    asyncio.run(run())


def test_an_invocation_of_a_service_not_yet_known_to_the_node_is_not_reported_as_unserved(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path) as it:
            await it.register({"greeter/go": echo})
            asked, find = 0, it.node.ground.registry.find

            async def fresh() -> None:
                nonlocal asked
                asked += 1

            it.node.ground.registry.find = lambda *where: find(*where) if asked else None  # type: ignore[method-assign]
            it.node.ground.invoker.fresh = fresh

            ident = await it.send("greeter/go")

            assert await it.completed(ident) == [0, b""]
            assert asked == 1
            with it.node.serving.router.partition(ident).state.read() as txn:
                assert queries.last_failure(txn, ident) is None

    asyncio.run(run())


def test_a_send_starts_an_invocation_without_a_waiting_caller(tmp_path: Path) -> None:
    seen: list[bytes] = []

    async def sender(handled: Handled) -> None:
        handled.step(Op.SEND, "0/send/1", ["greeter", "sink", None, b"now", {}, 0])
        handled.step(Op.SEND, "0/send/2", ["greeter", "sink", None, b"later", {}, 50])
        handled.output(b"sent")

    async def sink(handled: Handled) -> None:
        seen.append(handled.input)
        handled.output(b"")

    async def run() -> None:
        async with world(tmp_path) as it:
            await it.register({"greeter/go": sender, "greeter/sink": sink})

            assert await it.call("greeter/go") == [0, b"sent"]

            await eventually(lambda: len(seen) == 2)
            assert seen == [b"now", b"later"]

    asyncio.run(run())


def test_a_send_to_an_unregistered_handler_is_retried_until_it_is_registered(tmp_path: Path) -> None:
    seen: list[bytes] = []

    async def sender(handled: Handled) -> None:
        handled.step(Op.SEND, "0/send/1", ["sink", "drop", None, b"now", {}, 0])
        handled.output(b"sent")

    async def sink(handled: Handled) -> None:
        seen.append(handled.input)
        handled.output(b"")

    async def run() -> None:
        async with world(tmp_path) as it:
            await it.register({"greeter/go": sender})
            ident = await it.send("greeter/go")
            record = await eventually(lambda: (found := it.record(ident)) and found.status != Status.RUNNING and found)

            assert record.status == Status.BACKING_OFF
            with it.node.serving.router.partition(ident).state.read() as txn:
                failure = queries.last_failure(txn, ident)
            assert failure is not None and "there is no handler sink/drop" in failure.message
            await it.register({"sink/drop": sink})
            assert await it.completed(ident) == [0, b"sent"]
            await eventually(lambda: seen)
            assert seen == [b"now"]

    asyncio.run(run())


def test_an_unserved_invocation_is_not_forgotten_when_its_log_is_busy(tmp_path: Path) -> None:
    async def sleeper(handled: Handled) -> None:
        handled.wait_for(handled.step(Op.SLEEP, "0/sleep/1", [200]))

    async def run() -> None:
        async with world(tmp_path) as it:
            await it.register({"greeter/go": sleeper})
            ident = await it.send("greeter/go")
            pinned = (await it.reaches(ident, Status.SUSPENDED)).deployment
            assert pinned is not None
            await it.node.ground.registry.remove(pinned, force=True)
            partition = it.node.serving.router.partition(ident)
            submit = partition.submit
            refused: list[Command] = []

            def busy(command: Command, waiter: Waiter | None = None) -> bool:
                if type(command) is FailAttempt and not refused:
                    refused.append(command)
                    if waiter is not None:
                        asyncio.get_running_loop().call_soon(waiter, Overloaded("too much under way"))
                    return False
                return submit(command, waiter)

            partition.submit = busy  # type: ignore[method-assign]

            await it.reaches(ident, Status.PAUSED)
            assert refused

    asyncio.run(run())
