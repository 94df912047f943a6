"""The path of an invocation through a node, with an endpoint that sends raw frames."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from holdfast.sdk.frames import (
    Completion,
    Journal,
    Output,
    RetryRun,
    RunDone,
    RunFailed,
)
from holdfast.sdk.journal import Op
from holdfast.statemachine import queries
from holdfast.statemachine.commands import Cancel
from holdfast.statemachine.effects import Status
from tests.cluster.harness import PATIENCE_S, Handled, echo, eventually, three_steps, world


def test_an_invocation_goes_to_its_handler_and_comes_back(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path) as it:
            await it.register({"greeter/echo": echo})

            assert await it.call("greeter/echo", b"hello") == [0, b"hello"]

    asyncio.run(run())


def test_steps_are_acknowledged_when_they_are_applied(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path) as it:
            endpoint = await it.register({"greeter/three": three_steps})

            outcome = await it.call("greeter/three")

            assert outcome == [0, b"done"]
            (start,) = endpoint.starts
            record = it.record(start.invocation)
            assert record is not None and record.length == 4

    asyncio.run(run())


def test_a_suspended_invocation_continues_when_its_sleep_is_over(tmp_path: Path) -> None:
    async def sleeper(handled: Handled) -> None:
        if handled.length == 1:
            handled.wait_for(handled.step(Op.SLEEP, "0/sleep/1", [200]))
        else:
            assert handled.journal[1].done
            handled.output(b"awake")

    async def run() -> None:
        async with world(tmp_path) as it:
            endpoint = await it.register({"greeter/sleep": sleeper})
            ident = await it.send("greeter/sleep")
            begun = time.monotonic()
            await it.reaches(ident, Status.SUSPENDED)
            assert not it.node.ground.invoker.attempts, "a suspended invocation is nothing in memory"

            assert await it.completed(ident) == [0, b"awake"]

            assert time.monotonic() - begun >= 0.15
            assert [start.epoch for start in endpoint.starts] == [1, 2]

    asyncio.run(run())


def test_a_running_attempt_gets_completions(tmp_path: Path) -> None:
    async def waiter(handled: Handled) -> None:
        outcome = await handled.completion(handled.step(Op.SLEEP, "0/sleep/1", [20]))
        handled.output(b"slept" if outcome[0] == 0 else b"failed")

    async def run() -> None:
        async with world(tmp_path) as it:
            endpoint = await it.register({"greeter/wait": waiter})

            assert await it.call("greeter/wait") == [0, b"slept"]

            assert len(endpoint.starts) == 1

    asyncio.run(run())


def test_acknowledgements_and_completions_come_in_the_order_of_the_log(tmp_path: Path) -> None:
    async def reader(handled: Handled) -> None:
        handled.step(Op.GET, "0/get/1", ["name"])
        handled.step(Op.VALUE, "0/now/1", ["now"], [0, b""])
        heard = [await handled.receive() for _ in range(3)]
        told = [(type(frame).__name__, frame.index if type(frame) is Completion else frame.length) for frame in heard]  # type: ignore[union-attr]
        handled.output(repr(told).encode())

    async def run() -> None:
        async with world(tmp_path) as it:
            await it.register({"kv:object/read:exclusive": reader})

            assert await it.call("kv/read", key="a") == [0, b"[('Ack', 2), ('Completion', 1), ('Ack', 3)]"]

    asyncio.run(run())


def test_a_failed_run_is_tried_again_by_the_live_attempt(tmp_path: Path) -> None:
    async def flaky(handled: Handled) -> None:
        index = handled.length
        handled.length += 1
        retry = [10, 2000, 1000, 5, 0, 0]
        handled.send(RunFailed(handled.id, handled.epoch, index, "0/r/1", "r", [1, 500, "boom", "E"], retry))
        while type(frame := await handled.receive()) is not RetryRun:
            pass
        assert frame.index == index
        handled.send(RunDone(handled.id, handled.epoch, index, [0, b"fine"]))
        handled.output(b"done")

    async def run() -> None:
        async with world(tmp_path) as it:
            await it.register({"greeter/go": flaky})

            assert await it.call("greeter/go") == [0, b"done"]

    asyncio.run(run())


def test_a_cancelled_invocation_is_informed(tmp_path: Path) -> None:
    async def waits(handled: Handled) -> None:
        outcome = await handled.completion(handled.step(Op.SLEEP, "0/sleep/1", [3_600_000]))
        handled.send(Output(handled.id, handled.epoch, outcome))

    async def run() -> None:
        async with world(tmp_path) as it:
            await it.register({"greeter/go": waits})
            ident = await it.send("greeter/go")
            await eventually(lambda: (record := it.record(ident)) is not None and record.pending)

            await it.node.serving.router.submit(ident, Cancel(ident))

            assert (await it.completed(ident))[3] == "Cancelled"

    asyncio.run(run())


def test_a_long_journal_arrives_whole(tmp_path: Path) -> None:
    sizes: list[int] = []

    async def long(handled: Handled) -> None:
        if handled.epoch == 1:
            for number in range(40):
                handled.run(f"s{number}", bytes([number]) * 100_000)
            handled.fail("again", retry_after_ms=1)
            return
        journal = list(handled.start.journal)
        more = handled.start.more
        while more:
            frame = await handled.receive()
            if type(frame) is Journal:
                journal += frame.journal
                more = frame.more
        sizes.extend(len(raw) for raw in journal)
        handled.output(b"%d" % len(journal))

    async def run() -> None:
        async with world(tmp_path) as it:
            await it.register({"greeter/go": long})

            assert await it.call("greeter/go") == [0, b"41"]
            assert sum(sizes) > 4_000_000

    asyncio.run(run())


def test_large_payloads_pass_both_ways(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path) as it:
            await it.register({"greeter/echo": echo})
            payload = b"x" * (4 * 1024 * 1024)

            assert await it.call("greeter/echo", payload) == [0, payload]

    asyncio.run(run())


def test_a_result_that_no_log_takes_pauses_the_invocation_with_a_reason(tmp_path: Path) -> None:
    async def huge(handled: Handled) -> None:
        handled.output(b"x" * (33 * 1024 * 1024))

    async def run() -> None:
        async with world(tmp_path) as it:
            await it.register({"greeter/go": huge})

            ident = await it.send("greeter/go")

            await it.reaches(ident, Status.PAUSED)
            with it.node.serving.router.partition(ident).state.read() as txn:
                failure = queries.last_failure(txn, ident)
            assert failure is not None and failure.kind == "TooLarge"

    asyncio.run(run())


def test_an_output_after_a_step_that_the_log_refuses_completes_nothing(tmp_path: Path) -> None:
    async def writes_too_much(handled: Handled) -> None:
        handled.step(Op.SET, "0/set/0", ["page", b"x" * (33 * 1024 * 1024)])
        handled.output(b"written")

    async def run() -> None:
        async with world(tmp_path) as it:
            await it.register({"book:object/write:exclusive": writes_too_much})

            ident = await it.send("book/write", key="one")
            record = await eventually(lambda: (found := it.record(ident)) and found.status != Status.RUNNING and found)

            assert record.status == Status.PAUSED
            with it.node.serving.router.partition(ident).state.read() as txn:
                failure = queries.last_failure(txn, ident)
            assert failure is not None and failure.kind == "TooLarge"

    asyncio.run(run())


def test_many_at_once_all_complete(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, partitions=4) as it:
            await it.register({"greeter/three": three_steps, "kv:object/put:exclusive": three_steps})

            async with asyncio.timeout(PATIENCE_S):
                outcomes = await asyncio.gather(
                    *(it.call("greeter/three") for _ in range(300)),
                    *(it.call("kv/put", key=f"k{number % 7}") for number in range(300)),
                )

            assert outcomes == [[0, b"done"]] * 600

    asyncio.run(run())
