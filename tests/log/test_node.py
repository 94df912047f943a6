"""Whole nodes in one process: real sockets, real LMDB, real fsync."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import uvloop

from holdfast.log.engine import Limits, Snapshot
from holdfast.log.environment import NodeConfig
from holdfast.log.errors import BadChange, NoSpace, NotLeader, OutcomeUnknown, ProposalError, Stopped, TooLarge
from holdfast.log.messages import GroupId
from holdfast.log.node import Group, LogNode
from holdfast.log.replica import Committed
from holdfast.log.sockets import Address

SECRET = b"a secret of the tests"
PATIENCE_S = 60.0


class ListMachine:
    """All its entries, in order."""

    def __init__(self) -> None:
        self.commands: list[bytes] = []
        self.applied = (0, 0)

    def apply(self, entries: Sequence[Committed]) -> None:
        for entry in entries:
            self.commands += entry.commands
        self.applied = (entries[-1].index, entries[-1].term)

    def snapshot(self) -> Snapshot | None:
        return None


class Cluster:
    def __init__(self, root: Path, names: Sequence[str]) -> None:
        self.root = root
        self.names = tuple(names)
        self.nodes: dict[str, LogNode] = {}
        self.machines: dict[tuple[str, int], ListMachine] = {}
        self.ports: dict[str, int] = {}
        self.failures: list[BaseException] = []

    async def start(self, name: str) -> LogNode:
        def open_machine(group: GroupId) -> ListMachine:
            machine = self.machines[name, group] = ListMachine()
            return machine

        config = NodeConfig(
            node=name,
            cluster="tests",
            data=self.root / name,
            listen=Address("127.0.0.1", self.ports.get(name, 0)),
            secret=SECRET,
        )
        node = LogNode(config, open_machine=open_machine, on_fatal=self.failures.append)
        await node.start()
        self.nodes[name] = node
        self.ports[name] = node.port
        for each in self.nodes.values():
            each.set_peers({n: Address("127.0.0.1", p) for n, p in self.ports.items() if n != each.config.node})
        return node

    async def stop(self, name: str) -> None:
        await self.nodes.pop(name).stop()

    async def leader(self, group: int = 1) -> Group:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for node in self.nodes.values():
                    if GroupId(group) in node.host.replicas and node.group(group).is_leader:
                        return node.group(group)
                await asyncio.sleep(0.01)

    async def write(self, command: bytes, group: int = 1) -> int:
        """Retry definite failures, at the current leader."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    return await (await self.leader(group)).propose(command)
                except ProposalError as error:
                    if not error.definite:
                        raise
                    await asyncio.sleep(0.01)

    async def settled(self, name: str, commands: list[bytes], group: int = 1) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while (name, group) not in self.machines or self.machines[name, group].commands != commands:
                await asyncio.sleep(0.01)

    async def __aenter__(self) -> Cluster:
        for name in self.names:
            await self.start(name)
        return self

    async def __aexit__(self, *_: object) -> None:
        for name in list(self.nodes):
            await self.nodes.pop(name).stop(handover_s=0)
        assert self.failures == []


def form(cluster: Cluster, *groups: int) -> None:
    for node in cluster.nodes.values():
        for group in groups or (1,):
            node.create_group(group, cluster.names)


def test_three_nodes_commit_and_apply_in_the_same_order(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Cluster(tmp_path, ["n1", "n2", "n3"]) as cluster:
            form(cluster)
            commands = [b"%d" % number for number in range(200)]

            leader = await cluster.leader()
            await cluster.write(commands[0])
            indices = await asyncio.gather(*[leader.propose(command) for command in commands[1:]])

            assert indices == sorted(indices)
            for name in cluster.names:
                await cluster.settled(name, commands)

    asyncio.run(scenario())


def test_a_node_works_on_uvloop_too(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Cluster(tmp_path, ["n1", "n2", "n3"]) as cluster:
            form(cluster)

            await cluster.write(b"before")
            leader = (await cluster.leader()).leader
            assert leader is not None
            await cluster.stop(leader)
            await cluster.write(b"after")

            for name in cluster.nodes:
                await cluster.settled(name, [b"before", b"after"])

    uvloop.run(scenario())


def test_proposals_of_one_turn_share_an_entry(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Cluster(tmp_path, ["n1"]) as cluster:
            form(cluster)
            leader = await cluster.leader()

            indices = await asyncio.gather(*[leader.propose(b"%d" % number) for number in range(100)])

            assert len(set(indices)) == 1

    asyncio.run(scenario())


def test_acknowledged_entries_survive_a_restart_of_all_nodes(tmp_path: Path) -> None:
    async def scenario() -> None:
        names = ["n1", "n2", "n3"]
        async with Cluster(tmp_path, names) as cluster:
            form(cluster)
            for number in range(20):
                await cluster.write(b"%d" % number)
        async with Cluster(tmp_path, names) as cluster:
            await cluster.write(b"last")
            for name in names:
                await cluster.settled(name, [b"%d" % number for number in range(20)] + [b"last"])

    asyncio.run(scenario())


def test_the_other_nodes_continue_when_the_leader_stops(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Cluster(tmp_path, ["n1", "n2", "n3"]) as cluster:
            form(cluster)
            await cluster.write(b"before")
            leader = (await cluster.leader()).leader
            assert leader is not None

            await cluster.stop(leader)
            await cluster.write(b"after")

            for name in cluster.nodes:
                await cluster.settled(name, [b"before", b"after"])

    asyncio.run(scenario())


def test_a_cancelled_caller_does_no_harm(tmp_path: Path) -> None:
    """Its future is cancelled when the answer arrives; the entry is applied once, and the node continues."""

    async def main() -> None:
        async with Cluster(tmp_path, ["n1"]) as cluster:
            form(cluster)
            group = await cluster.leader()
            gone, read = group.propose(b"a"), group.read_index()
            gone.cancel()
            read.cancel()
            await group.propose(b"b")
            await cluster.settled("n1", [b"a", b"b"])

    asyncio.run(main())


def test_a_follower_refuses_proposals_and_names_the_leader(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Cluster(tmp_path, ["n1", "n2", "n3"]) as cluster:
            form(cluster)
            await cluster.write(b"x")
            leader = await cluster.leader()
            follower = next(node.group(1) for name, node in cluster.nodes.items() if name != leader.leader)

            with pytest.raises(NotLeader) as refusal:
                await follower.propose(b"y")

            assert refusal.value.definite
            assert refusal.value.leader == leader.leader

    asyncio.run(scenario())


def test_a_read_sees_everything_acknowledged_before_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Cluster(tmp_path, ["n1", "n2", "n3"]) as cluster:
            form(cluster)
            written = await cluster.write(b"x")

            index = await (await cluster.leader()).read_index()

            assert index >= written

    asyncio.run(scenario())


def test_a_member_is_added_replaced_and_removed_while_clients_write(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Cluster(tmp_path, ["n1", "n2", "n3"]) as cluster:
            form(cluster)
            await cluster.start("n4")
            written: list[bytes] = []
            stop = asyncio.Event()

            async def keep_writing() -> None:
                while not stop.is_set():
                    command = b"%d" % len(written)
                    await cluster.write(command)
                    written.append(command)

            writer = asyncio.create_task(keep_writing())
            for members in (("n1", "n2", "n3", "n4"), ("n2", "n3", "n4"), ("n1", "n2", "n3"), ("n1", "n2")):
                done = len(written)
                async with asyncio.timeout(PATIENCE_S):
                    while (await cluster.leader()).status().members != members:
                        try:
                            await (await cluster.leader()).change_members(members)
                        except NotLeader:
                            await asyncio.sleep(0.01)
                    while len(written) < done + 5:
                        await asyncio.sleep(0.01)
            stop.set()
            await writer

            assert (await cluster.leader()).status().epoch == 4
            for name in ("n1", "n2"):
                await cluster.settled(name, written)

    asyncio.run(scenario())


def test_a_change_of_members_waits_until_the_leader_may_seal(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Cluster(tmp_path, ["n1", "n2", "n3"]) as cluster:
            form(cluster)
            await cluster.start("n4")
            await cluster.write(b"x")
            leader = await cluster.leader()
            asked, rested = asyncio.Event(), asyncio.Event()

            def may_seal() -> bool:
                asked.set()
                return rested.is_set()

            changing = leader.change_members(("n1", "n2", "n3", "n4"), PATIENCE_S, may_seal)
            async with asyncio.timeout(PATIENCE_S):
                await asked.wait()
            await cluster.write(b"y")
            assert not changing.done() and len(leader.status().members) == 3

            rested.set()
            leader.nudge()
            async with asyncio.timeout(PATIENCE_S):
                await changing

            assert len(leader.status().members) == 4

    asyncio.run(scenario())


def test_nodes_that_stop_together_hand_a_group_over_at_most_once_each(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Cluster(tmp_path, ["n1", "n2"]) as cluster:
            cluster.nodes["n1"].create_group(1, ("n1", "n2"))
            cluster.nodes["n2"].create_group(1, ("n1", "n2"))
            await cluster.write(b"x")
            groups = [node.group(1) for node in cluster.nodes.values()]
            term = max(group.term for group in groups)

            await asyncio.gather(*(cluster.stop(name) for name in list(cluster.nodes)))

            assert max(group.term for group in groups) <= term + 2

    asyncio.run(scenario())


def test_a_change_of_two_members_at_once_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Cluster(tmp_path, ["n1"]) as cluster:
            form(cluster)
            await cluster.write(b"x")

            with pytest.raises(BadChange):
                await (await cluster.leader()).change_members(("n1", "n2", "n3"))

    asyncio.run(scenario())


def test_an_oversized_command_is_refused_and_the_group_works_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Cluster(tmp_path, ["n1"]) as cluster:
            form(cluster)
            leader = await cluster.leader()

            with pytest.raises(TooLarge):
                await leader.propose(b"x" * (2 << 20))

            await cluster.write(b"small")

    asyncio.run(scenario())


def test_leadership_moves_on_request(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Cluster(tmp_path, ["n1", "n2", "n3"]) as cluster:
            form(cluster)
            await cluster.write(b"x")
            leader = await cluster.leader()
            to = next(name for name in cluster.names if name != leader.leader)

            assert leader.transfer(to)

            async with asyncio.timeout(PATIENCE_S):
                while not cluster.nodes[to].group(1).is_leader:
                    await asyncio.sleep(0.01)
            await cluster.write(b"y")

    asyncio.run(scenario())


def test_bytes_for_the_rooms_above_share_the_link_with_the_log(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Cluster(tmp_path, ["n1", "n2"]) as cluster:
            form(cluster)
            await cluster.write(b"x")
            got: list[tuple[str, bytes]] = []
            cluster.nodes["n2"]._on_message = lambda peer, payload: got.append((peer, payload))

            for number in range(10):
                assert cluster.nodes["n1"].send("n2", b"%d" % number)

            async with asyncio.timeout(PATIENCE_S):
                while len(got) < 10:
                    await asyncio.sleep(0.01)
            assert got == [("n1", b"%d" % number) for number in range(10)]

    asyncio.run(scenario())


def test_a_stopped_node_refuses_instead_of_waiting(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Cluster(tmp_path, ["n1"]) as cluster:
            form(cluster)
            await cluster.write(b"x")
            group = await cluster.leader()

            await cluster.stop("n1")

            for answer in (group.propose(b"y"), group.read_index(), group.change_members(("n1", "n2"))):
                with pytest.raises(Stopped) as refusal:
                    await asyncio.wait_for(answer, PATIENCE_S)
                assert refusal.value.definite

    asyncio.run(scenario())


def test_callers_get_an_unknown_outcome_when_the_node_fails(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Cluster(tmp_path, ["n1"]) as cluster:
            form(cluster)
            await cluster.write(b"x")
            group = await cluster.leader()
            machine = cluster.machines["n1", 1]

            def broken(entries: Sequence[Committed]) -> None:
                raise RuntimeError("a bug in the machine")

            machine.apply = broken  # type: ignore[method-assign]
            with pytest.raises(OutcomeUnknown):
                await asyncio.wait_for(group.propose(b"y"), PATIENCE_S)
            with pytest.raises(Stopped):
                await asyncio.wait_for(group.propose(b"z"), PATIENCE_S)

            (failure,) = cluster.failures
            assert isinstance(failure, RuntimeError)
            cluster.failures.clear()

    asyncio.run(scenario())


def test_callers_are_refused_at_once_on_a_full_disk_and_staged_writes_count_when_there_is_room(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with Cluster(tmp_path, ["n1"]) as cluster:
            form(cluster)
            await cluster.write(b"x")
            group = await cluster.leader()
            node, machine = cluster.nodes["n1"], cluster.machines["n1", 1]
            commit = node._store.commit

            def full() -> None:
                raise NoSpace(tmp_path, "the disk is full")

            node._store.commit = full  # type: ignore[method-assign]
            with pytest.raises(OutcomeUnknown, match="full"):
                await asyncio.wait_for(group.propose(b"y"), PATIENCE_S)
            assert "full" in str(node.no_space)
            assert machine.commands == [b"x"]
            node._store.commit = commit  # type: ignore[method-assign]
            async with asyncio.timeout(PATIENCE_S):
                await group.propose(b"z")

            assert not node.no_space
            assert machine.commands == [b"x", b"y", b"z"]

    asyncio.run(scenario())


def test_a_node_whose_port_is_in_use_cleans_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Cluster(tmp_path, ["n1"]) as cluster:
            threads = threading.active_count()
            config = NodeConfig(
                node="n2",
                cluster="tests",
                data=tmp_path / "n2",
                listen=Address("127.0.0.1", cluster.ports["n1"]),
                secret=SECRET,
            )

            with pytest.raises(OSError):
                await LogNode(config, open_machine=lambda _: ListMachine()).start()

            assert threading.active_count() == threads
            await cluster.start("n2")  # Its directory was released.

    asyncio.run(scenario())


def test_a_peer_that_comes_back_is_sent_more_than_a_frame_holds(tmp_path: Path) -> None:
    async def scenario() -> None:
        groups = range(1, 7)
        async with Cluster(tmp_path, ["n1", "n2", "n3"]) as cluster:
            form(cluster, *groups)
            for group in groups:
                await cluster.write(b"first", group)
                async with asyncio.timeout(PATIENCE_S):
                    while not cluster.nodes["n1"].group(group).is_leader:
                        (await cluster.leader(group)).transfer("n1")
                        await asyncio.sleep(0.05)
            await cluster.stop("n3")
            large = [bytes([number]) * 1_000_000 for number in range(9)]
            for group in groups:
                for command in large:
                    await cluster.write(command, group)
            frame_bytes_max = cluster.nodes["n1"].config.link_limits.frame_bytes_max
            assert len(groups) * Limits().window_bytes > frame_bytes_max, "in one turn, from one node"

            await cluster.start("n3")

            for group in groups:
                await cluster.settled("n3", [b"first", *large], group)

    asyncio.run(scenario())
