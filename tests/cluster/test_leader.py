"""The duties of a leader: timers, outboxes and attempts, across restarts and changes of leaders."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from holdfast.cluster.config import Config, HostPort
from holdfast.cluster.leading.leadership import Leadership, limits_of
from holdfast.cluster.node import Node
from holdfast.cluster.partition.machine import Waiter
from holdfast.log.errors import ProposalError
from holdfast.sdk.ids import InvocationId, PartitionNumber, partition_of
from holdfast.sdk.journal import Op
from holdfast.statemachine import queries
from holdfast.statemachine.commands import Command, Complete, Invoke, Mode
from holdfast.statemachine.effects import Status
from holdfast.statemachine.records import Meta
from tests.cluster.harness import FAST, PATIENCE_S, FakeEndpoint, Handled, World, echo, eventually, leads, world


def test_a_timer_keeps_its_deadline_over_a_restart(tmp_path: Path) -> None:
    async def sleeper(handled: Handled) -> None:
        if handled.length == 1:
            handled.wait_for(handled.step(Op.SLEEP, "0/sleep/1", [1500]))
        else:
            handled.output(b"awake")

    async def run() -> None:
        it = World(tmp_path)
        await it.start()
        await it.register({"greeter/sleep": sleeper})
        begun = time.monotonic()
        ident = await it.send("greeter/sleep")
        await it.reaches(ident, Status.SUSPENDED)

        await it.restart()

        assert await it.completed(ident) == [0, b"awake"]
        assert time.monotonic() - begun >= 1.49
        await it.stop()

    asyncio.run(run())


def test_a_timer_that_came_due_without_a_leader_fires_at_once(tmp_path: Path) -> None:
    async def sleeper(handled: Handled) -> None:
        if handled.length == 1:
            handled.wait_for(handled.step(Op.SLEEP, "0/sleep/1", [300]))
        else:
            handled.output(b"awake")

    async def run() -> None:
        it = World(tmp_path)
        await it.start()
        await it.register({"greeter/sleep": sleeper})
        ident = await it.send("greeter/sleep")
        await it.reaches(ident, Status.SUSPENDED)
        await it.kill()
        await asyncio.sleep(0.5)

        await it.start()

        assert await it.completed(ident) == [0, b"awake"]
        await it.stop()

    asyncio.run(run())


def test_many_timers_fire_each_once_and_none_early(tmp_path: Path) -> None:
    early: list[int] = []

    async def sleeper(handled: Handled) -> None:
        ms = int(handled.input)
        if handled.length == 1:
            handled.wait_for(handled.step(Op.SLEEP, "0/sleep/1", [ms]))
            return
        due_ms = handled.journal[1].argument[1]
        if handled.start.now_ms < due_ms:
            early.append(due_ms)
        handled.output(b"awake")

    async def run() -> None:
        async with world(tmp_path) as it:
            endpoint = await it.register({"greeter/sleep": sleeper})

            idents = [await it.send("greeter/sleep", b"%d" % (n * 7 % 500)) for n in range(400)]
            for ident in idents:
                assert await it.completed(ident) == [0, b"awake"]

            assert not early
            assert len(endpoint.starts) == 800

    asyncio.run(run())


def test_running_attempts_are_started_again_by_the_next_leader(tmp_path: Path) -> None:
    hold = asyncio.Event()

    async def held(handled: Handled) -> None:
        if handled.length == 1:
            handled.run("first", b"1")
        await hold.wait()
        handled.output(b"%d" % handled.epoch)

    async def run() -> None:
        it = World(tmp_path, partitions=2)
        await it.start()
        endpoint = await it.register({"greeter/go": held})
        idents = [await it.send("greeter/go") for _ in range(100)]
        await eventually(lambda: all((record := it.record(ident)) and record.length == 2 for ident in idents))

        await it.restart()
        await eventually(lambda: len(endpoint.starts) == 200)
        hold.set()

        for ident in idents:
            assert await it.completed(ident) == [0, b"2"]
        await it.stop()

    asyncio.run(run())


def test_messages_in_an_outbox_are_delivered_once_after_a_restart(tmp_path: Path) -> None:
    """The node is killed between the step that wrote the message and its delivery."""
    seen: dict[bytes, set[bytes]] = {}

    async def sender(handled: Handled) -> None:
        for number in range(20):
            handled.step(Op.SEND, f"0/send/{number}", ["kv", "put", f"key {number}", b"%d" % number, {}, 0])
        handled.output(b"sent")

    async def sink(handled: Handled) -> None:
        seen.setdefault(handled.input, set()).add(handled.id)  # An attempt may be repeated, an invocation not.
        handled.output(b"")

    async def run() -> None:
        it = World(tmp_path, partitions=4)
        await it.start()
        await it.register({"greeter/go": sender, "kv:object/put:exclusive": sink})
        for partition in it.node.partitions:
            leadership = partition.leadership
            assert isinstance(leadership, Leadership)
            leadership.flush = lambda target: None  # type: ignore[method-assign]
        ident = await it.send("greeter/go")
        await it.completed(ident)
        before = len(seen)
        assert before < 20, "some are for other partitions"
        waiting = 0
        for partition in it.node.partitions:
            with partition.state.read() as txn:
                waiting += sum(len(queries.outbox(txn, PartitionNumber(target), 0, 100)[1]) for target in range(4))
        assert waiting > 0

        await it.restart()

        await eventually(lambda: len(seen) == 20)
        await eventually(lambda: _outboxes_empty(it))
        assert {payload: len(idents) for payload, idents in seen.items()} == {b"%d" % n: 1 for n in range(20)}
        await it.stop()

    asyncio.run(run())


def _outboxes_empty(it: World) -> bool:
    for partition in it.node.partitions:
        with partition.state.read() as txn:
            if queries.outbox_targets(txn):
                return False
    return True


def test_a_leadership_that_ends_frees_everything(tmp_path: Path) -> None:
    """And the next one finds everything that waited for an endpoint in the state."""

    async def run() -> None:
        async with world(tmp_path, partitions=1) as it:
            endpoint = await it.register({"greeter/echo": echo})
            await endpoint.stop()
            idents = [await it.send("greeter/echo", b"%d" % number) for number in range(10)]
            (queue,) = it.node.ground.invoker.endpoints.values()
            assert len(queue.queue) == 10
            (partition,) = it.node.partitions
            it.node.serving.leaderships.resign(partition)
            assert not queue.queue and not it.node.ground.invoker.attempts

            it.node.serving.leaderships.lead_or_not(partition)
            await endpoint.start()

            for number, ident in enumerate(idents):
                assert await it.completed(ident) == [0, b"%d" % number]

    asyncio.run(run())


# -- three nodes -----------------------------------------------------------------------------------------------------------


class Cluster:
    """Three whole nodes in one process."""

    def __init__(self, path: Path, partitions: int) -> None:
        self.path = path
        self.partitions = partitions
        self.nodes: dict[str, Node] = {}
        self.failures: list[BaseException] = []
        names = ("n1", "n2", "n3")
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in names]
        self.ports = {name: each.getsockname()[1] for name, each in zip(names, sockets, strict=True)}
        for each in sockets:
            each.close()

    def _config(self, name: str) -> Config:
        free = HostPort("127.0.0.1", 0)
        places = {each: HostPort("127.0.0.1", port) for each, port in self.ports.items()}
        return Config(
            node=name,
            data=self.path / name,
            partitions=self.partitions,
            ingress=free,
            admin=free,
            peer=places.pop(name),
            peers=places,
            secret=b"a secret of the tests",
        )

    async def start(self) -> None:
        for name in self.ports:
            self.nodes[name] = Node(self._config(name), timing=FAST, on_fatal=self.failures.append)
        await asyncio.gather(*(node.start() for node in self.nodes.values()))

    async def stop(self) -> None:
        await asyncio.gather(*(node.stop() for node in self.nodes.values()))
        assert not self.failures, self.failures

    async def register(self, endpoint: FakeEndpoint) -> None:
        await endpoint.start()
        async with asyncio.timeout(PATIENCE_S):
            while True:
                leader = await eventually(
                    lambda: next((n for n in self.nodes.values() if n.ground.meta_group().is_leader), None)
                )
                try:
                    await leader.ground.registry.register(endpoint.uri)
                    break
                except ProposalError:
                    await asyncio.sleep(0.05)
        names = [(service, handler) for service, handler in endpoint.handlers]
        await eventually(
            lambda: all(node.ground.registry.find(*name) for node in self.nodes.values() for name in names),
            "the registry",
        )

    async def leader(self, partition: int) -> Node:
        def found() -> Node | None:
            return next((node for node in self.nodes.values() if leads(node.partitions[partition])), None)

        node: Node = await eventually(found, f"a leader of partition {partition}")
        return node

    async def submit(self, command: Invoke) -> Any:
        """Submit to the current leader, and again with the same id, as a forwarding ingress would."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                node = await self.leader(partition_of(command.id, self.partitions))
                try:
                    return await node.serving.router.submit(command.id, command, wait_s=0.1)
                except ProposalError:
                    await asyncio.sleep(0.01)

    def outcome(self, ident: InvocationId) -> Any:
        for node in self.nodes.values():
            with node.serving.router.partition(ident).state.read() as txn:
                outcome = queries.outcome(txn, ident)
            if outcome is not None:
                return outcome
        return None


@asynccontextmanager
async def cluster(path: Path, partitions: int = 2) -> AsyncIterator[Cluster]:
    made = Cluster(path, partitions)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


def invoke(ident: InvocationId, handler: str = "go", payload: bytes = b"") -> Invoke:
    return Invoke(ident, "greeter", handler, None, Mode.PLAIN, payload, {}, 0, None, -1, 3_600_000)


def test_another_node_continues_where_the_leader_was(tmp_path: Path) -> None:
    """Running attempts move with the leadership, with a higher epoch; the old leader's are aborted; no step runs twice."""
    hold = asyncio.Event()
    ran: list[bytes] = []

    async def held(handled: Handled) -> None:
        if handled.length == 1:
            ran.append(handled.id)
            await handled.acks(handled.run("first", b"1") + 1)
        if not hold.is_set():
            while not handled.aborted:
                await handled.receive()
            return
        handled.output(b"done")

    async def run() -> None:
        async with cluster(tmp_path) as it:
            endpoint = FakeEndpoint({"greeter/go": held})
            await it.register(endpoint)
            node = await it.leader(0)
            idents = [InvocationId(bytes([0, 0, 0, n]) + bytes(12)) for n in range(30)]
            for ident in idents:
                await it.submit(invoke(ident))
            await eventually(lambda: len(ran) == 30)
            state = node.partitions[0].state

            def journaled() -> bool:
                with state.read() as txn:
                    return all((record := queries.load(txn, ident)) and record.length == 2 for ident in idents)

            await eventually(journaled)
            other = next(name for name in it.nodes if name != node.config.node)
            await eventually(lambda: node.partitions[0].group.transfer(other) or not leads(node.partitions[0]))
            await eventually(lambda: not node.partitions[0].group.is_leader)
            hold.set()

            await eventually(lambda: all(it.outcome(ident) for ident in idents), "completion")

            assert {tuple(it.outcome(ident)) for ident in idents} == {(0, b"done")}
            assert sorted(ran) == idents, "what was journaled is not run again"
            assert not any(attempt.partition.number == 0 for attempt in node.ground.invoker.attempts.values())
            await endpoint.stop()

    asyncio.run(run())


def test_calls_between_partitions_survive_moving_leaders(tmp_path: Path) -> None:
    """Leaderships move all the time; every call is carried out exactly once, and every caller gets its answer."""
    seen: dict[bytes, int] = {}

    async def caller(handled: Handled) -> None:
        if handled.length == 1:
            for number in range(5):
                handled.step(
                    Op.CALL, f"0/c/{number}", ["kv", "put", f"{handled.id.hex()} {number}", b"%d" % number, {}]
                )
        pending = [index for index in range(1, 6) if not (len(handled.journal) > index and handled.journal[index].done)]
        if pending:
            handled.wait_for(*pending)
        else:
            handled.output(b"".join(step.outcome[1] for step in handled.journal[1:] if step.outcome))

    async def callee(handled: Handled) -> None:
        seen[handled.id] = seen.get(handled.id, 0) + (handled.epoch == 1)
        handled.output(handled.input)

    async def run() -> None:
        async with cluster(tmp_path, partitions=3) as it:
            endpoint = FakeEndpoint({"greeter/go": caller, "kv:object/put:exclusive": callee})
            await it.register(endpoint)
            idents = [InvocationId(bytes([n * 5, 0, 0, n]) + bytes(12)) for n in range(50)]
            moving = True

            async def move() -> None:
                turn = 0
                while moving:
                    turn += 1
                    partition = turn % 3
                    node = await it.leader(partition)
                    names = [name for name in it.nodes if name != node.config.node]
                    node.partitions[partition].group.transfer(names[turn % 2])
                    await asyncio.sleep(0.1)

            mover = asyncio.create_task(move())
            for ident in idents:
                await it.submit(invoke(ident))
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.5)
            moving = False
            await mover

            await eventually(lambda: all(it.outcome(ident) for ident in idents), "completion")

            assert {tuple(it.outcome(ident)) for ident in idents} == {(0, b"01234")}
            assert len(seen) == 250 and set(seen.values()) <= {0, 1}
            await endpoint.stop()

    asyncio.run(run())


def test_a_node_of_three_alone_leads_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path) as it:
            endpoint = FakeEndpoint({"greeter/go": echo})
            await it.register(endpoint)
            survivor = it.nodes.pop("n1")
            await asyncio.gather(*(node.stop() for node in it.nodes.values()))
            it.nodes = {"n1": survivor}

            await eventually(lambda: not any(partition.group.is_leader for partition in survivor.partitions))

            await eventually(lambda: all(partition.leadership is None for partition in survivor.partitions))
            await endpoint.stop()

    asyncio.run(run())


def test_a_just_applied_invocation_is_not_mistaken_for_a_lost_one(tmp_path: Path) -> None:
    """A leader that scans the state between the apply of a command and its effects starts nothing twice."""

    async def run() -> None:
        async with world(tmp_path, partitions=1) as it:
            endpoint = await it.register({"greeter/echo": echo})
            partition = it.node.partitions[0]
            leadership = partition.leadership
            assert isinstance(leadership, Leadership)
            loop, deliver = asyncio.get_running_loop(), partition.machine.deliver

            def look_first(*what: Any) -> None:
                loop.call_soon(leadership.scan)
                deliver(*what)

            partition.machine.deliver = look_first
            for _ in range(5):
                assert (await it.call("greeter/echo", b"hello"))[1] == b"hello"

            assert [start.epoch for start in endpoint.starts] == [1] * 5

    asyncio.run(run())


def test_a_partition_keeps_the_limits_that_its_leader_is_configured_with(tmp_path: Path) -> None:
    async def run() -> None:
        it = World(tmp_path, partitions=1)
        await it.start()
        await it.register({"greeter/echo": echo})
        idents = [await it.send("greeter/echo") for _ in range(10)]
        for ident in idents:
            await it.completed(ident)

        it._settings["completed_max"] = 3
        await it.restart()

        # The oldest go, although their retention is a day.
        await eventually(lambda: sum(it.record(ident) is not None for ident in idents) <= 3, "only the newest are kept")
        with it.node.partitions[0].state.read() as txn:
            assert queries.meta(txn).completed_max == 3
        await it.stop()

    asyncio.run(run())


def test_the_limits_of_a_node_apply_to_a_new_partition_by_default() -> None:
    """So no command is proposed for them unless they differ."""
    assert limits_of(Config()) == limits_of(Meta())


def test_a_leader_is_at_rest_when_the_steps_of_its_attempts_are_applied(tmp_path: Path) -> None:
    """The end of the last attempt is too early: a log that is handed over then would refuse its last step."""

    async def run() -> None:
        async with world(tmp_path, partitions=1) as it:
            await it.register({"greeter/echo": echo})
            partition = it.node.partitions[0]
            leadership = partition.leadership
            assert isinstance(leadership, Leadership)
            submit, seen = partition.submit, list[tuple[bool, bool]]()

            def submitted(command: Command, waiter: Waiter | None = None) -> bool:
                accepted = submit(command, waiter)
                if isinstance(command, Complete):
                    leadership.hold()
                    seen.append((it.node.ground.invoker.runs(leadership), leadership.quiet()))
                return accepted

            partition.submit = submitted  # type: ignore[method-assign]
            assert (await it.call("greeter/echo", b"hello"))[1] == b"hello"

            assert seen == [(False, False)], "nothing runs any more, and its end is on its way"
            assert leadership.quiet()

    asyncio.run(run())
