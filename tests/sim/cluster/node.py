"""A whole node on a simulated machine: all of `cluster.node.Node` except its disk, its network and its doors."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from holdfast.cluster.clock import Clock
from holdfast.cluster.config import Config, HostPort
from holdfast.cluster.entropy import Entropy
from holdfast.cluster.environment import Environment, Event
from holdfast.cluster.handlers.dispatch import Timing
from holdfast.cluster.handlers.protocols.native.protocol import Native
from holdfast.cluster.handlers.protocols.table import Protocols
from holdfast.cluster.http.exchange import Exchange
from holdfast.cluster.node import Node
from holdfast.cluster.partition.machine import ORIGIN_BYTES, PartitionMachine
from holdfast.cluster.registry.offer import Offer
from holdfast.log import environment as log_environment
from holdfast.log.environment import LinkEvents, NodeConfig
from holdfast.log.replica import Committed
from holdfast.log.rows import Rows
from holdfast.sdk.ids import PartitionNumber
from holdfast.snapshots.stores import Store
from holdfast.statemachine.meta import NATIVE
from tests.sim.cluster.files import SimState
from tests.sim.cluster.loop import SimCondition, SimEvent

if TYPE_CHECKING:
    from tests.sim.cluster.world import Process, World

#: Commits of two or more groups make rows, and rows come and go, as in a node with many groups.
ROWS: Final = Rows(groups_min=2, recent_bytes=20_000, filed_every=4, kept_bytes=5_000, sparse=2, moved_max=16)
T0_MS: Final = 1_700_000_000_000
SERVICES: Final = (
    {"name": "tasks", "kind": "service", "handlers": [{"name": "play", "mode": "plain"}]},
    {
        "name": "objects",
        "kind": "object",
        "handlers": [{"name": "play", "mode": "exclusive"}, {"name": "look", "mode": "shared"}],
    },
    {"name": "flows", "kind": "workflow", "handlers": [{"name": "play", "mode": "main"}]},
)


class SimLinks:
    """The peer links of one process. The world decides which sessions exist."""

    def __init__(self, process: Process, events: LinkEvents) -> None:
        self._process = process
        self.events = events

    async def start(self) -> None: ...

    async def stop(self) -> None:
        self._process.world.break_links(self._process)

    def set_peers(self, peers: Mapping[str, object], removed: Collection[str] = ()) -> None:
        process = self._process
        for gone in sorted(process.peers - peers.keys()):
            process.world.network.break_session(process.name, gone)
        process.peers = set(peers)

    def send(self, peer: str, session: int, frame: bytes) -> None:
        self._process.world.network.transmit(self._process.name, peer, session, frame)

    def refuse(self, peer: str, session: int, reason: str) -> None:
        self._process.world.violate(f"{self._process.name} refuses {peer}: {reason}")

    def status(self) -> dict[str, Any]:
        sessions = self._process.world.network.sessions
        return {
            peer: SimpleNamespace(
                connected=frozenset((self._process.name, peer)) in sessions, last_error=None, refused=None
            )
            for peer in self._process.world.names
            if peer != self._process.name
        }


class SimWriter:
    """Commits to the simulated disk, with a delay."""

    commit_s = commit_s_max = 0.0

    no_space: str | None = None

    def __init__(self, process: Process, done: Callable[[], None]) -> None:
        self._process = process
        self._done = done

    def commit(self) -> None:
        self._process.begin_fsync(self._done)

    async def stop(self) -> None: ...


class SimLog(log_environment.Environment):
    """The simulated disk, links and random numbers of the log of a process."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def open_store(self, config: NodeConfig) -> Any:
        return self._process.disk

    def open_links(self, config: NodeConfig, store: Any, events: LinkEvents) -> Any:
        self._process.links = SimLinks(self._process, events)
        return self._process.links

    def start_writer(self, store: Any, *, on_committed: Callable[[], None], **_: Any) -> Any:
        return SimWriter(self._process, on_committed)

    def random(self) -> random.Random:
        return random.Random(self._process.world.rng.getrandbits(32))


class WatchedMachine(PartitionMachine):
    """The real machine, with an oracle that sees each command before it is applied."""

    def __init__(
        self, process: Process, number: PartitionNumber, state: Any, *, partitions: int, origin: bytes
    ) -> None:
        super().__init__(number, state, partitions=partitions, origin=origin)
        self._process = process

    def apply(self, entries: Sequence[Committed]) -> None:
        node = self._process.node
        if self._process.world.profile.deaf and node is not None and self.number in node.ground.replicas.every:
            node.ground.replicas.every[self.number].settle = _tell_nobody
        self._process.world.oracle.about_to_apply(self._process.name, self.number, entries)
        super().apply(entries)


def _tell_nobody(*_: object) -> None: ...


class SimProtocol(Native):
    """The real protocol, with streams to the simulated handlers."""

    def __init__(self, process: Process) -> None:
        super().__init__()
        self._process = process

    def session(self, uri: str) -> Any:
        return self._process.world.handlers.session(self._process)

    async def discover(self, uri: str) -> Offer:
        return await self._process.world.discover(uri)


def config_of(process: Process) -> Config:
    world = process.world
    # Founders were configured before other nodes existed; a joining node is told of all.
    told = world.founders if process.name in world.founders else world.names
    others = {name: HostPort("sim", 1) for name in told if name != process.name}
    profile = world.profile
    return Config(
        node=process.name,
        cluster="sim",
        data=process.files.root,
        partitions=profile.partitions,
        peers=others,
        founders=tuple(world.founders),
        replication=profile.replication,
        secret=b"0123456789abcdef",
        snapshots=world.store.url if profile.store else "",
        blobs="store" if profile.stored else "log",
        snapshot_entries=profile.snapshot_entries,
        snapshot_interval=0.0,
        snapshot_rate_bytes=1 << 40,
        log_tail=profile.log_tail,
        attempts_max=profile.attempts_max,
        blob_threshold_bytes=profile.large,
    )


class SimClock(Clock):
    """Deadlines follow the clock of the machine. Times in output and files, and durations, follow the world's."""

    def __init__(self, process: Process) -> None:
        super().__init__(steady=lambda: process.now() * 1000, wall=process.wall_ms)
        self._world = process.world

    def wall_s(self) -> float:
        return T0_MS / 1000 + self._world.now

    def monotonic_s(self) -> float:
        return self._world.now + 1.0


class SimEntropy(Entropy):
    """Entropy that depends only on the seed."""

    def __init__(self, world: World) -> None:
        self._world = world

    def bytes(self, count: int) -> bytes:
        return self._world.nonces.randbytes(count)

    def bits(self, count: int) -> int:
        return self._world.nonces.getrandbits(count)

    def token(self, count: int) -> str:
        return self._world.tokens.randbytes(count).hex()

    def generator(self) -> random.Random:
        return random.Random(self._world.rng.getrandbits(32))


class SimEnvironment(Environment):
    """The environment of the node of a process."""

    def __init__(self, process: Process) -> None:
        super().__init__(
            clock=SimClock(process),
            entropy=SimEntropy(process.world),
            boot=process.boot_id,
            log=SimLog(process),
            rows=ROWS,
        )
        self._process = process

    def open_machine(
        self, number: PartitionNumber, path: Path, *, owner: str, restore: Callable[[Path], object], partitions: int
    ) -> PartitionMachine:
        process = self._process
        state = SimState.open(
            path, owner=owner, boot=self.boot, restore=restore, condition=lambda: SimCondition(process.world)
        )
        state.files, state.forget = process.files, lambda: process.states.pop(number)
        process.states[number] = state
        node = process.node
        if node is not None and node.ground.record.founding.restored:
            process.world.oracle.begins_with(process, number, state)
        return WatchedMachine(process, number, state, partitions=partitions, origin=self.entropy.bytes(ORIGIN_BYTES))

    def open_store(self, url: str, *, hasty: bool = False) -> Store:
        world = self._process.world
        return world.vault if url == world.vault.url else world.store

    def event(self) -> Event:
        return SimEvent(self._process.world)


def node_of(process: Process) -> Node:
    """The node of a process that has just started, on the loop of that process."""
    world, loop = process.world, process.loop
    assert loop is not None

    def ended(error: BaseException) -> None:
        if loop.alive:
            world.violate(f"{process.name} ends: {type(error).__name__}: {error}")

    return Node(
        config_of(process),
        SimEnvironment(process),
        timing=Timing(connect_s=1.0, backoff_s=0.01, backoff_max_s=0.5, sweep_s=0.5),
        log_timing=world.timing,
        protocols=lambda means: Protocols({NATIVE: SimProtocol(process)}),
        on_fatal=ended,
    )


async def start(process: Process, node: Node) -> None:
    """Like `Node.start`, without the doors: clients of the simulator do not use HTTP."""
    await node.open()
    process.linked = True
    for group in sorted(node.ground.log.host.hollow):
        process.world.oracle.is_hollow(process, group)
    serving = await node.join()
    process.door = Exchange(node.config, serving.clients, source="ingress")
    process.serving = True
