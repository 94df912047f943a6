"""The engine as shipped, under the mildest conditions: ordered connections, a perfect disk, losses only by resets.

It loses acknowledged writes nevertheless, as soon as a follower's backlog spans two messages. This is the first mutant:
a test method that does not see this sees nothing. The harness shares no code with the simulator of the hardened engine,
because the stock engine has no host, no sessions and no durable mark to drive.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any, Final
from unittest.mock import patch

from pysyncobj import SyncObj, SyncObjConf
from pysyncobj import syncobj as stock
from pysyncobj.journal import MemoryJournal
from pysyncobj.node import Node
from pysyncobj.transport import Transport

from tests.sim.oracle import Violation

NAMES: Final = ("a", "b", "c")
STEPS: Final = 3000
REGULAR: Final = stock._COMMAND_TYPE.REGULAR


class Peer(Node):  # type: ignore[misc]
    """The engine keeps its peers in sets: with a hash of their own, they iterate in the same order in every process."""

    def __hash__(self) -> int:
        return ord(self.id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Node) and bool(self.id == other.id)


class Wire(Transport):  # type: ignore[misc]
    """pysyncobj's transport over the queues of the world."""

    def __init__(self, world: StockWorld, name: str) -> None:
        super().__init__(None, None, None)
        self.world, self.name = world, name

    def send(self, node: Node, message: dict[str, Any]) -> bool:
        pair = (self.name, node.id)
        if pair not in self.world.connected:
            return False
        self.world.queues[pair].append(dict(message))
        return True

    def receive(self, sender: str, message: dict[str, Any]) -> None:
        self._onMessageReceived(Peer(sender), message)

    def connect(self, peer: str, *, up: bool) -> None:
        (self._onNodeConnected if up else self._onNodeDisconnected)(Peer(peer))

    def addNode(self, node: Node) -> None: ...  # noqa: N802


class Replicated(SyncObj):  # type: ignore[misc]
    """The stock engine; commands are bytes that are kept, not pickled calls."""

    def __init__(self, world: StockWorld, name: str) -> None:
        conf = SyncObjConf(
            autoTick=False,
            raftMinTimeout=0.4,
            raftMaxTimeout=1.4,
            connectionTimeout=3.5,
            leaderFallbackTimeout=2.0,
            appendEntriesPeriod=0.1,
            appendEntriesBatchSizeBytes=120,
            commandsWaitLeader=False,
        )
        self.wire = Wire(world, name)
        self.applied: list[bytes] = []
        others = [Peer(other) for other in NAMES if other != name]
        super().__init__(Peer(name), others, conf, transport=self.wire, nodeClass=Peer)

    def _SyncObj__doApplyCommand(self, command: bytes) -> None:  # noqa: N802
        if command[0] == REGULAR:
            self.applied.append(command[1:])

    def log(self) -> MemoryJournal:
        return self._SyncObj__raftLog


class StockWorld:
    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.now = 1000.0
        self.queues: defaultdict[tuple[str, str], deque[dict[str, Any]]] = defaultdict(deque)
        self.connected: set[tuple[str, str]] = set()
        self.disks = {name: MemoryJournal() for name in NAMES}
        self.nodes: dict[str, Replicated] = {}
        self.committed: dict[int, tuple[int, bytes]] = {}
        self.leaders: dict[int, str] = {}
        self.acknowledged: list[bytes] = []
        self.written = 0

    def boot(self, name: str) -> None:
        with patch.object(stock, "createJournal", lambda _: self.disks[name]):
            self.nodes[name] = Replicated(self, name)
        for peer in sorted(self.nodes):
            if peer != name:
                self.link(name, peer, up=True)

    def link(self, a: str, b: str, *, up: bool) -> None:
        if a not in self.nodes or b not in self.nodes:
            return
        for x, y in ((a, b), (b, a)):
            (self.connected.add if up else self.connected.discard)((x, y))
            if not up:
                self.queues[x, y].clear()
            self.nodes[x].wire.connect(y, up=up)

    def crash(self, name: str) -> None:
        for peer in NAMES:
            if peer != name:
                self.link(name, peer, up=False)
        del self.nodes[name]

    def deliver(self, a: str, b: str, count: int) -> None:
        queue = self.queues[a, b]
        while queue and count and b in self.nodes:
            self.nodes[b].wire.receive(a, queue.popleft())
            count -= 1
        self.look(b)

    def tick(self, name: str) -> None:
        if name in self.nodes:
            self.nodes[name].doTick(0)
            self.look(name)

    def write(self, node: Replicated) -> None:
        self.written += 1
        command = b"%d." % self.written + b"x" * 30
        node._applyCommand(command, self._answered(command), REGULAR)

    def _answered(self, command: bytes) -> Callable[[object, int], None]:
        return lambda _, error: None if error else self.acknowledged.append(command)

    def look(self, name: str) -> None:
        node = self.nodes.get(name)
        if node is None:
            return
        log = node.log()
        commit = min(node.raftCommitIndex, log[-1][1])
        for command, index, term in log[max(0, len(log) - 40) :]:
            if index <= commit and self.committed.setdefault(index, (term, command)) != (term, command):
                raise Violation(f"committed entry {index} differs on {name}")
        if node._isLeader() and self.leaders.setdefault(node.raftCurrentTerm, name) != name:
            raise Violation(f"two leaders in term {node.raftCurrentTerm}")

    def act(self) -> None:
        rng, draw = self.rng, self.rng.random()
        self.now += rng.uniform(0.002, 0.05)
        a, b = rng.sample(NAMES, 2)
        if draw < 0.30:
            self.tick(a)
        elif draw < 0.80:
            self.deliver(a, b, rng.choice((1, 1, 2, 3, 1000)))
        elif draw < 0.90:
            if a in self.nodes and self.nodes[a]._isLeader():
                for _ in range(rng.choice((1, 3, 6))):
                    self.write(self.nodes[a])
        elif draw < 0.94:
            self.link(a, b, up=False)
            if rng.random() < 0.6:
                self.link(a, b, up=True)
        elif draw < 0.985:
            self.link(a, b, up=True)
        elif draw < 0.992:
            if len(self.nodes) > 1 and a in self.nodes:
                self.crash(a)
        elif a not in self.nodes:
            self.boot(a)

    def heal(self) -> None:
        for name in NAMES:
            if name not in self.nodes:
                self.boot(name)
        for a, b in (("a", "b"), ("a", "c"), ("b", "c")):
            self.link(a, b, up=True)
        for turn in range(600):
            self.now += 0.03
            for name in NAMES:
                self.tick(name)
            for a in NAMES:
                for b in NAMES:
                    if a != b:
                        self.deliver(a, b, 1000)
            agreed = len({node.raftLastApplied for node in self.nodes.values()}) == 1
            if turn > 100 and agreed and any(node._isLeader() for node in self.nodes.values()):
                return
        raise Violation("no convergence")

    def conclude(self) -> None:
        states = [node.applied for node in self.nodes.values()]
        if any(state != states[0] for state in states):
            raise Violation("the states differ")
        lost = set(self.acknowledged) - set(states[0])
        if lost:
            raise Violation(f"{len(lost)} acknowledged writes are lost")


@contextmanager
def _virtual(world: StockWorld) -> Iterator[None]:
    """The stock engine gets time and randomness from the module; this replaces them by those of the world."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with patch.object(stock, "monotonicTime", lambda: world.now), patch.object(stock, "random", world.rng):
            yield
    finally:
        logging.disable(disabled)


def run_stock(seed: int) -> None:
    """The whole run of one seed. Raises Violation."""
    world = StockWorld(seed)
    with _virtual(world):
        for name in NAMES:
            world.boot(name)
        for _ in range(STEPS):
            world.act()
        world.heal()
        world.conclude()
