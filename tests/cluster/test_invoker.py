"""The way of an invocation through a node, with an endpoint that speaks raw frames."""

from __future__ import annotations

import asyncio
import gc
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from holdfast.cluster import node as cluster_node
from holdfast.cluster.handlers.dispatch import Limits
from holdfast.cluster.handlers.protocols.native.stream import Stream
from holdfast.cluster.leading import leadership as cluster_leader
from holdfast.cluster.partition.machine import Waiter
from holdfast.cluster.registry.machine import Target
from holdfast.log.errors import NotLeader, Overloaded
from holdfast.sdk.frames import (
    Completion,
    Credit,
    Goaway,
    Journal,
    Output,
    RetryRun,
    RunDone,
    RunFailed,
    Suspend,
    encode_batch,
)
from holdfast.sdk.journal import Op, unpack_step
from holdfast.statemachine import queries
from holdfast.statemachine.commands import Cancel, Command, Deliver, FailAttempt, Resume
from holdfast.statemachine.effects import Status
from tests.cluster.harness import PATIENCE_S, Handled, echo, eventually, world


async def three_steps(handled: Handled) -> None:
    for name in ("a", "b", "c")[handled.length - 1 :]:
        index = handled.run(name, name.encode())
        await handled.acks(index + 1)
    handled.output(b"done")


async def nothing(handled: Handled) -> None:
    """Takes the attempt and never says a word."""


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


def test_a_broken_stream_starts_its_attempts_again_behind_the_last_step(tmp_path: Path) -> None:
    stuck = asyncio.Event()

    async def stops_after_two(handled: Handled) -> None:
        if handled.epoch == 1:
            await handled.acks(handled.run("a", b"1") + 1)
            await handled.acks(handled.run("b", b"2") + 1)
            stuck.set()
            return
        await three_steps(handled)

    async def run() -> None:
        async with world(tmp_path) as it:
            endpoint = await it.register({"greeter/go": stops_after_two})
            ident = await it.send("greeter/go")
            await stuck.wait()

            endpoint.cut()

            assert await it.completed(ident) == [0, b"done"]
            first, second = endpoint.starts
            assert (first.epoch, second.epoch) == (1, 2)
            assert [unpack_step(raw).key for raw in second.journal[1:]] == ["0/a/1", "0/b/2"]
            record = it.record(ident)
            assert record is not None and record.failures_total == 0, "a broken stream is nobody's failure"

    asyncio.run(run())


def test_an_endpoint_that_is_down_is_waited_for_without_counting_failures(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path) as it:
            endpoint = await it.register({"greeter/echo": echo})
            await endpoint.stop()
            idents = [await it.send("greeter/echo", b"%d" % number) for number in range(20)]
            await asyncio.sleep(0.2)

            await endpoint.start()

            for number, ident in enumerate(idents):
                assert await it.completed(ident) == [0, b"%d" % number]
                record = it.record(ident)
                assert record is not None and record.failures_total == 0

    asyncio.run(run())


def test_a_dead_endpoint_does_not_slow_others(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path) as it:
            dead = await it.register({"dead/echo": echo})
            silent = await it.register({"silent/echo": nothing})
            silent.credit = 3
            await it.register({"alive/echo": echo})
            await dead.stop()
            for _ in range(50):
                await it.send("dead/echo")
                await it.send("silent/echo")

            for number in range(20):
                assert await it.call("alive/echo", b"%d" % number) == [0, b"%d" % number]

            assert len(silent.starts) >= 3

    asyncio.run(run())


def test_an_endpoint_gets_no_more_frames_than_it_can_take(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path) as it:
            endpoint = await it.register({"greeter/echo": nothing})
            endpoint.credit = 0
            idents = [await it.send("greeter/echo") for _ in range(5)]
            await eventually(lambda: endpoint.sockets)
            await asyncio.sleep(0.1)

            assert not endpoint.starts
            endpoint.handlers["greeter", "echo"] = echo
            await endpoint.say(encode_batch([Credit(100)]))

            for ident in idents:
                assert await it.completed(ident) == [0, b""]

    asyncio.run(run())


def test_an_error_of_the_node_costs_an_attempt_and_not_an_invocation(tmp_path: Path) -> None:
    async def slow(handled: Handled) -> None:
        await asyncio.sleep(0.02)
        handled.output(b"done")

    async def caller(handled: Handled) -> None:
        if handled.length == 1:
            handled.wait_for(handled.step(Op.CALL, "0/call/1", ["kv", "put", handled.input.decode(), b"", {}]))
        else:
            handled.output(b"done")

    async def run() -> None:
        async with world(tmp_path, attempts_max=1) as it:
            await it.register({"greeter/go": slow, "caller/go": caller, "kv:object/put:exclusive": slow})
            invoker, router = it.node.invoker, it.node.router
            build, submit_to = invoker.build, router.submit_to
            failed: list[str] = []

            def cannot_build(*given: Any) -> Any:
                if len(failed) < 2 and invoker.started:
                    failed.append("build")
                    raise MemoryError
                return build(*given)

            async def cannot_submit(number: int, command: Command, **more: Any) -> Any:
                if type(command) is Deliver and failed.count("deliver") < 2:
                    failed.append("deliver")
                    raise MemoryError
                return await submit_to(number, command, **more)

            invoker.build = cannot_build  # type: ignore[method-assign, assignment]
            router.submit_to = cannot_submit  # type: ignore[method-assign]
            idents = [await it.send("greeter/go") for _ in range(4)]
            idents += [await it.send("caller/go", b"%d" % number) for number in range(4)]

            for ident in idents:
                assert await it.completed(ident) == [0, b"done"]
            assert sorted(failed) == ["build", "build", "deliver", "deliver"]

    asyncio.run(run())


def test_no_more_attempts_run_at_a_time_than_a_deployment_may_have(tmp_path: Path) -> None:
    most = 0
    running = 0

    async def counted(handled: Handled) -> None:
        nonlocal most, running
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        handled.output(b"")

    async def run() -> None:
        async with world(tmp_path, attempts_max=4) as it:
            await it.register({"greeter/go": counted})

            idents = [await it.send("greeter/go") for _ in range(40)]
            for ident in idents:
                await it.completed(ident)

            assert 1 <= most <= 4
            endpoint = next(iter(it.node.invoker.endpoints.values()))
            assert endpoint.running == 0 and not endpoint.waiting

    asyncio.run(run())


def test_what_passes_the_bound_of_the_queue_is_found_in_the_state_again(tmp_path: Path) -> None:
    """And looking for it costs the log little: an endpoint that is full is not offered the same work again and again."""
    hold = asyncio.Event()

    async def slow(handled: Handled) -> None:
        await hold.wait()
        handled.output(b"")

    async def run() -> None:
        async with world(tmp_path, attempts_max=2) as it:
            it.node.invoker.limits = it.node.invoker.limits._replace(waiting=3)
            await it.register({"greeter/go": slow})
            idents = [await it.send("greeter/go") for _ in range(60)]
            await asyncio.sleep(0.5)
            before = sum(partition.commands for partition in it.node.partitions)
            await asyncio.sleep(1.0)
            assert sum(partition.commands for partition in it.node.partitions) == before

            hold.set()

            for ident in idents:
                await it.completed(ident)

    asyncio.run(run())


def test_a_full_queue_of_a_dead_endpoint_does_not_keep_a_new_leader_from_finding_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_node, "Limits", partial(Limits, waiting=5))
    monkeypatch.setattr(cluster_leader, "SLICE", 4)
    monkeypatch.setattr(cluster_leader, "REDISPATCHES_MAX", 4)
    hold = asyncio.Event()

    async def slow(handled: Handled) -> None:
        await hold.wait()
        handled.output(b"alive")

    async def run() -> None:
        async with world(tmp_path) as it:
            dead = await it.register({"dead/echo": echo})
            alive = await it.register({"alive/go": slow})
            await dead.stop()
            waiting = [await it.send("dead/echo", b"%d" % number) for number in range(60)]
            running = [await it.send("alive/go") for _ in range(5)]
            await eventually(lambda: len(alive.starts) == 5)

            await it.restart()
            hold.set()

            for ident in running:
                assert await it.completed(ident) == [0, b"alive"]
            before = sum(partition.commands for partition in it.node.partitions)
            await asyncio.sleep(0.7)
            assert sum(partition.commands for partition in it.node.partitions) == before, "nothing is offered in vain"
            await dead.start()
            for number, ident in enumerate(waiting):
                assert await it.completed(ident) == [0, b"%d" % number]

    asyncio.run(run())


def test_what_waits_for_a_dead_deployment_and_has_not_begun_goes_to_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_node, "Limits", partial(Limits, waiting=5))

    async def run() -> None:
        async with world(tmp_path) as it:
            dead = await it.register({"greeter/echo": echo})
            await dead.stop()
            idents = [await it.send("greeter/echo", b"%d" % number) for number in range(20)]

            alive = await it.register({"greeter/echo": echo})

            for number, ident in enumerate(idents):
                assert await it.completed(ident) == [0, b"%d" % number]
            assert len({start.invocation for start in alive.starts}) == 20

    asyncio.run(run())


def test_nothing_is_left_of_a_removed_deployment(tmp_path: Path) -> None:
    """Neither when nothing runs there, nor when something did."""
    hold = asyncio.Event()

    async def slow(handled: Handled) -> None:
        await hold.wait()
        handled.output(b"")

    async def run() -> None:
        async with world(tmp_path) as it:
            await it.register({"quiet/echo": echo})
            await it.call("quiet/echo")
            busy = await it.register({"busy/go": slow})
            ident = await it.send("busy/go")
            await eventually(lambda: busy.starts)
            assert len(it.node.invoker.endpoints) == 2

            for deployment in list(it.node.registry.state.deployments):
                await it.node.registry.remove(deployment, force=True)

            await eventually(lambda: len(it.node.invoker.endpoints) == 1, "the quiet one is gone")
            hold.set()
            assert await it.completed(ident) == [0, b""], "what runs may end"
            await eventually(lambda: not it.node.invoker.endpoints, "the busy one is gone")

    asyncio.run(run())


def test_a_suspended_invocation_goes_on_when_its_sleep_is_over(tmp_path: Path) -> None:
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
            assert not it.node.invoker.attempts, "a suspended invocation is nothing in memory"

            assert await it.completed(ident) == [0, b"awake"]

            assert time.monotonic() - begun >= 0.15
            assert [start.epoch for start in endpoint.starts] == [1, 2]

    asyncio.run(run())


def test_a_running_attempt_is_told_what_completes(tmp_path: Path) -> None:
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


def test_a_call_to_nobody_fails_with_404_and_a_call_without_its_key_with_400(tmp_path: Path) -> None:
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


def test_a_call_of_a_handler_that_a_node_has_yet_to_hear_of_waits_until_it_has(tmp_path: Path) -> None:
    """The meta group is read before the call is told that there is nobody: at first in vain. What the attempt says behind the
    call stays behind it."""

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

            it.node.invoker.fresh = fresh

            ident = await it.send("caller/go")

            assert await it.completed(ident) == [0, b"there you are"]
            assert asked == 2
            with it.node.router.partition(ident).state.read() as txn:
                steps = [unpack_step(raw) for raw in queries.journal(txn, ident, 1, 3)]
            assert [step.op for step in steps] == [Op.CALL, Op.RUN]
            assert it.node.invoker.staging_bytes == 0

    asyncio.run(run())


def test_an_invocation_whose_service_a_node_has_yet_to_hear_of_is_not_said_to_be_nobody_s(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path) as it:
            await it.register({"greeter/go": echo})
            asked, find = 0, it.node.registry.find

            async def fresh() -> None:
                nonlocal asked
                asked += 1

            it.node.registry.find = lambda *where: find(*where) if asked else None  # type: ignore[method-assign]
            it.node.invoker.fresh = fresh

            ident = await it.send("greeter/go")

            assert await it.completed(ident) == [0, b""]
            assert asked == 1
            with it.node.router.partition(ident).state.read() as txn:
                assert queries.last_failure(txn, ident) is None

    asyncio.run(run())


def test_a_send_begins_an_invocation_nobody_waits_for(tmp_path: Path) -> None:
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


def test_a_send_to_nobody_is_not_lost_but_tried_again_until_there_is_somebody(tmp_path: Path) -> None:
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
            with it.node.router.partition(ident).state.read() as txn:
                failure = queries.last_failure(txn, ident)
            assert failure is not None and "there is no handler sink/drop" in failure.message
            await it.register({"sink/drop": sink})
            assert await it.completed(ident) == [0, b"sent"]
            await eventually(lambda: seen)
            assert seen == [b"now"]

    asyncio.run(run())


def test_a_running_invocation_stays_on_its_deployment_and_new_ones_go_to_the_newest(tmp_path: Path) -> None:
    async def old(handled: Handled) -> None:
        if handled.length == 1:
            handled.wait_for(handled.step(Op.SLEEP, "0/sleep/1", [300]))
        else:
            handled.output(b"old")

    async def new(handled: Handled) -> None:
        handled.output(b"new")

    async def run() -> None:
        async with world(tmp_path) as it:
            await it.register({"greeter/go": old})
            ident = await it.send("greeter/go")
            await it.reaches(ident, Status.SUSPENDED)
            await it.register({"greeter/go": new})

            assert await it.call("greeter/go") == [0, b"new"]
            assert await it.completed(ident) == [0, b"old"]

    asyncio.run(run())


def test_an_invocation_whose_deployment_was_removed_waits_for_an_operator(tmp_path: Path) -> None:
    async def sleeper(handled: Handled) -> None:
        if handled.length == 1:
            handled.wait_for(handled.step(Op.SLEEP, "0/sleep/1", [50]))
        else:
            handled.output(b"moved")

    async def run() -> None:
        async with world(tmp_path) as it:
            await it.register({"greeter/go": sleeper})
            ident = await it.send("greeter/go")
            pinned = (await it.reaches(ident, Status.SUSPENDED)).deployment
            assert pinned is not None
            await it.register({"greeter/go": sleeper})
            await it.node.registry.remove(pinned, force=True)

            await it.reaches(ident, Status.PAUSED)
            newest = it.node.registry.resolve("greeter", "go").deployment
            await it.node.router.submit(ident, Resume(ident, newest))

            assert await it.completed(ident) == [0, b"moved"]

    asyncio.run(run())


def test_an_invocation_whose_deployment_a_node_has_yet_to_hear_of_waits_until_it_has(tmp_path: Path) -> None:
    """The meta group is read before anything is paused: at first in vain, because nobody leads it."""

    async def sleeper(handled: Handled) -> None:
        if handled.length == 1:
            handled.wait_for(handled.step(Op.SLEEP, "0/sleep/1", [50]))
        else:
            handled.output(b"woke")

    async def run() -> None:
        async with world(tmp_path) as it:
            await it.register({"greeter/go": sleeper})
            asked = 0
            target = it.node.registry.target

            async def fresh() -> None:
                nonlocal asked
                asked += 1
                if asked == 1:
                    raise NotLeader(None)

            def heard(deployment: str, service: str, handler: str) -> Target | None:
                return target(deployment, service, handler) if asked > 1 else None

            it.node.registry.target = heard  # type: ignore[method-assign]
            it.node.invoker.fresh = fresh

            ident = await it.send("greeter/go")

            assert await it.completed(ident) == [0, b"woke"]
            assert asked == 2

    asyncio.run(run())


def test_an_invocation_that_nobody_serves_is_not_forgotten_when_its_log_is_busy(tmp_path: Path) -> None:
    async def sleeper(handled: Handled) -> None:
        handled.wait_for(handled.step(Op.SLEEP, "0/sleep/1", [200]))

    async def run() -> None:
        async with world(tmp_path) as it:
            await it.register({"greeter/go": sleeper})
            ident = await it.send("greeter/go")
            pinned = (await it.reaches(ident, Status.SUSPENDED)).deployment
            assert pinned is not None
            await it.node.registry.remove(pinned, force=True)
            partition = it.node.router.partition(ident)
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


def test_a_failed_attempt_is_tried_again_after_its_backoff(tmp_path: Path) -> None:
    async def flaky(handled: Handled) -> None:
        if handled.epoch < 3:
            handled.fail("not yet", retry_after_ms=10)
        else:
            handled.output(b"at last")

    async def run() -> None:
        async with world(tmp_path) as it:
            await it.register({"greeter/go": flaky})

            assert await it.call("greeter/go") == [0, b"at last"]

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


def test_a_cancelled_invocation_hears_of_it(tmp_path: Path) -> None:
    async def waits(handled: Handled) -> None:
        outcome = await handled.completion(handled.step(Op.SLEEP, "0/sleep/1", [3_600_000]))
        handled.send(Output(handled.id, handled.epoch, outcome))

    async def run() -> None:
        async with world(tmp_path) as it:
            await it.register({"greeter/go": waits})
            ident = await it.send("greeter/go")
            await eventually(lambda: (record := it.record(ident)) is not None and record.pending)

            await it.node.router.submit(ident, Cancel(ident))

            assert (await it.completed(ident))[3] == "Cancelled"

    asyncio.run(run())


@pytest.mark.parametrize(
    "raw",
    [
        b"\xc1",
        encode_batch([]) + b"x",
        b"\x91\x91\xcc\xfa",
        b"text",
    ],
)
def test_nonsense_ends_the_stream_and_fails_its_attempts(tmp_path: Path, raw: bytes) -> None:
    async def once(handled: Handled) -> None:
        if handled.epoch > 1:
            handled.output(b"recovered")

    async def run() -> None:
        async with world(tmp_path) as it:
            endpoint = await it.register({"greeter/go": once})
            endpoint.options["greeter"] = {"retry": {"initial_ms": 20}}
            await it.node.registry.register(endpoint.uri, force=True)
            ident = await it.send("greeter/go")
            await eventually(lambda: endpoint.starts)

            await endpoint.say(raw)

            assert await it.completed(ident) == [0, b"recovered"]
            record = it.record(ident)
            assert record is not None and record.failures_total == 1

    asyncio.run(run())


def test_a_silent_handler_is_asked_to_suspend_and_then_given_up(tmp_path: Path) -> None:
    asked: list[int] = []

    async def silent(handled: Handled) -> None:
        while True:
            frame = await handled.receive()
            if type(frame) is Suspend:
                asked.append(frame.epoch)
                if frame.epoch == 2:
                    handled.output(b"woke up")
                    return

    async def run() -> None:
        async with world(tmp_path) as it:
            endpoint = await it.register({"greeter/go": silent})
            endpoint.options["greeter"] = {
                "inactivity_timeout_ms": 100,
                "abort_timeout_ms": 100,
                "retry": {"initial_ms": 10},
            }
            await it.node.registry.register(endpoint.uri, force=True)

            outcome = await it.call("greeter/go")

            assert outcome == [0, b"woke up"]
            assert asked == [1, 2]
            assert endpoint.attempts[endpoint.starts[0].invocation].epoch == 2
            record = it.record(endpoint.starts[0].invocation)
            assert record is not None and record.failures_total == 1

    asyncio.run(run())


def test_an_endpoint_that_goes_away_keeps_what_it_has_and_gets_nothing_new(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def held(handled: Handled) -> None:
        await release.wait()
        handled.output(handled.input)

    async def run() -> None:
        async with world(tmp_path) as it:
            endpoint = await it.register({"greeter/go": held})
            first = await it.send("greeter/go", b"1")
            await eventually(lambda: endpoint.starts)

            await endpoint.say(encode_batch([Goaway("deploying")]))
            second = await it.send("greeter/go", b"2")
            await eventually(lambda: len(endpoint.sockets) == 2)
            release.set()

            assert await it.completed(first) == [0, b"1"]
            assert await it.completed(second) == [0, b"2"]
            assert [start.epoch for start in endpoint.starts] == [1, 1]

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
            with it.node.router.partition(ident).state.read() as txn:
                failure = queries.last_failure(txn, ident)
            assert failure is not None and failure.kind == "TooLarge"

    asyncio.run(run())


def test_an_output_behind_a_step_that_no_log_takes_completes_nothing(tmp_path: Path) -> None:
    async def writes_too_much(handled: Handled) -> None:
        handled.step(Op.SET, "0/set/0", ["page", b"x" * (33 * 1024 * 1024)])
        handled.output(b"written")

    async def run() -> None:
        async with world(tmp_path) as it:
            await it.register({"book:object/write:exclusive": writes_too_much})

            ident = await it.send("book/write", key="one")
            record = await eventually(lambda: (found := it.record(ident)) and found.status != Status.RUNNING and found)

            assert record.status == Status.PAUSED
            with it.node.router.partition(ident).state.read() as txn:
                failure = queries.last_failure(txn, ident)
            assert failure is not None and failure.kind == "TooLarge"

    asyncio.run(run())


# -- request and response ------------------------------------------------------------------------------------------------


async def one_run_per_request(handled: Handled) -> None:
    done = handled.length - 1
    if done < 3:
        handled.run(f"s{done}", b"%d" % done)
        handled.wait_for()
    else:
        handled.output(b"done")


def test_an_endpoint_without_streams_gets_requests(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path) as it:
            endpoint = await it.register({"greeter/go": one_run_per_request}, modes=("request-response",))

            assert await it.call("greeter/go") == [0, b"done"]

            assert endpoint.requests == 4 and not endpoint.sockets

    asyncio.run(run())


def test_an_endpoint_that_refuses_the_upgrade_gets_requests(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path) as it:
            endpoint = await it.register({"greeter/go": one_run_per_request})
            endpoint.stream_status = 404

            assert await it.call("greeter/go") == [0, b"done"]

            assert endpoint.requests == 4

    asyncio.run(run())


def test_requests_suspend_and_resume(tmp_path: Path) -> None:
    async def sleeper(handled: Handled) -> None:
        if handled.length == 1:
            handled.wait_for(handled.step(Op.SLEEP, "0/sleep/1", [50]))
        else:
            handled.output(b"awake")

    async def run() -> None:
        async with world(tmp_path) as it:
            await it.register({"greeter/go": sleeper}, modes=("request-response",))

            assert await it.call("greeter/go") == [0, b"awake"]

    asyncio.run(run())


def test_an_endpoint_that_says_503_is_left_alone_for_as_long_as_it_asks(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path) as it:
            endpoint = await it.register({"greeter/echo": echo}, modes=("request-response",))
            endpoint.invoke_status = [503]
            endpoint.headers = {"Retry-After": "1"}
            begun = time.monotonic()

            assert await it.call("greeter/echo", b"hi") == [0, b"hi"]

            assert time.monotonic() - begun >= 0.95
            assert endpoint.requests == 2
            record = it.record(endpoint.starts[0].invocation)
            assert record is not None and record.failures_total == 0

    asyncio.run(run())


def test_a_stream_refused_with_503_is_tried_again_as_late_as_it_asks(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path) as it:
            endpoint = await it.register({"greeter/echo": echo})
            endpoint.stream_status = 503
            endpoint.headers = {"Retry-After": "1"}
            begun = time.monotonic()
            ident = await it.send("greeter/echo", b"hi")
            await asyncio.sleep(0.2)
            endpoint.stream_status = 101

            assert await it.completed(ident) == [0, b"hi"]

            assert time.monotonic() - begun >= 0.95

    asyncio.run(run())


def test_an_endpoint_that_answers_500_fails_the_attempt(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path) as it:
            endpoint = await it.register({"greeter/echo": echo}, modes=("request-response",))
            endpoint.invoke_status = [500]

            assert await it.call("greeter/echo", b"hi") == [0, b"hi"]

            record = it.record(endpoint.starts[0].invocation)
            assert record is not None and record.failures_total == 1

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


def test_a_stream_that_is_ended_twice_says_goodbye_once(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """The second end comes at any moment of the first one, as when a node stops while an endpoint dies."""

    async def run() -> None:
        async with world(tmp_path) as it:
            await it.register({"greeter/echo": echo})
            for turns in range(8):
                await it.call("greeter/echo", b"1")
                (endpoint,) = it.node.invoker.endpoints.values()
                stream = endpoint.carrier
                assert isinstance(stream, Stream)
                stream._end("the first time")
                for _ in range(turns):
                    await asyncio.sleep(0)
                stream._end("the second time")
                await stream.close()
                assert stream._socket.closed

    asyncio.run(run())
    gc.collect()

    assert [str(warning.message) for warning in recwarn if "never awaited" in str(warning.message)] == []
