"""A whole node over a simulated machine: everything of `cluster.node.Node` but its disk, its network and its doors."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, cast

from holdfast.cluster.clock import Clock
from holdfast.cluster.config import Config, Endpoint
from holdfast.cluster.groups import FIRST_PARTITION_GROUP
from holdfast.cluster.handlers.dispatch import Limits, Timing
from holdfast.cluster.handlers.invoker import Invoker
from holdfast.cluster.node import Node
from holdfast.cluster.partition.machine import PartitionMachine
from holdfast.log.messages import GroupId
from holdfast.log.node import LogNode, NodeConfig
from holdfast.log.replica import Committed
from holdfast.log.rows import Rows
from tests.sim.cluster.files import SimState
from tests.sim.cluster.loop import SimLoop

if TYPE_CHECKING:
    from tests.sim.cluster.world import Process

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
    """The peer links of one process. Which sessions there are is the world's to say."""

    def __init__(self, process: Process) -> None:
        self._process = process

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
    """Commits to the simulated disk: later, as a disk does."""

    commit_s = commit_s_max = 0.0

    no_space: str | None = None

    def __init__(self, process: Process, done: Callable[[], None]) -> None:
        self._process = process
        self._done = done

    def commit(self) -> None:
        self._process.begin_fsync(self._done)

    async def stop(self) -> None: ...


class SimLogNode(LogNode):
    """The real log node. Its disk, links, writer and dice are those of the process on whose loop it starts.

    Commits of two groups and more make rows, and rows come and go, as in a node of many groups.
    """

    def __init__(self, config: NodeConfig, **rest: Any) -> None:
        super().__init__(
            replace(
                config,
                rows=Rows(groups_min=2, recent_bytes=20_000, filed_every=4, kept_bytes=5_000, sparse=2, moved_max=16),
            ),
            **rest,
        )

    @property
    def _process(self) -> Process:
        return cast(SimLoop, self.loop).process

    def _open_store(self) -> Any:
        return self._process.disk

    def _open_links(self) -> Any:
        return SimLinks(self._process)

    def _start_writer(self) -> Any:
        return SimWriter(self._process, self._committed)

    def _rng(self) -> random.Random:
        return random.Random(self._process.world.rng.getrandbits(32))


class WatchedMachine(PartitionMachine):
    """The real machine, and an oracle that sees what it is about to apply."""

    def __init__(self, process: Process, number: int, state: Any, *, partitions: int) -> None:
        super().__init__(number, state, partitions=partitions)
        self._process = process

    def apply(self, entries: Sequence[Committed]) -> None:
        self._process.world.oracle.about_to_apply(self._process.name, self.number, entries)
        super().apply(entries)


class SimInvoker(Invoker):
    """The real invoker; its streams lead to the simulated handlers."""

    process: Process

    @property
    def session(self) -> Any:
        return self.process.world.handlers.session(self.process)


def config_of(process: Process) -> Config:
    world = process.world
    # Founders were set up before anybody thought of the rest; whoever joins is told of all.
    told = world.founders if process.name in world.founders else world.names
    others = {name: Endpoint("sim", 1) for name in told if name != process.name}
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
    )


class SimNode(Node):
    log_class = SimLogNode

    def __init__(self, process: Process) -> None:
        world = process.world
        loop = process.loop
        assert loop is not None

        def ended(error: BaseException) -> None:
            if loop.alive:
                world.violate(f"{process.name} ends: {type(error).__name__}: {error}")

        super().__init__(
            config_of(process),
            clock=Clock(steady=lambda: process.now() * 1000, wall=process.wall_ms),
            timing=Timing(connect_s=1.0, backoff_s=0.01, backoff_max_s=0.5, heartbeat_s=2.0, sweep_s=0.5),
            log_timing=world.timing,
            boot=process.boot_id,
            on_fatal=ended,
        )
        self.process = process
        self.stager.threshold = world.profile.large

    async def start(self) -> None:
        await self._make_rooms()
        await self.log.start()
        self.process.started_log()
        self._tidy()
        await self._join()
        self.clients = self._clients()
        self.registry.discover = self.process.world.discover  # type: ignore[method-assign]
        self._watch_store()
        self.process.serving = True

    def _new_machine(self, number: int) -> PartitionMachine:
        state = SimState.open(
            self.config.data / "state" / f"{number:04d}",
            owner=self.log.disk,
            boot=self._boot,
            restore=self.snapshots.restorer(GroupId(FIRST_PARTITION_GROUP + number)),
        )
        assert isinstance(state, SimState)
        state.files = self.process.files
        self.process.states[number] = state
        if self.founding.restored:
            self.process.world.oracle.begins_with(self.process, number, state)
        return WatchedMachine(self.process, number, state, partitions=self._count)

    def _close_partition(self, number: int) -> None:
        super()._close_partition(number)
        del self.process.states[number]

    async def _fill(self, number: int) -> None:
        self.process.world.oracle.is_hollow(self.process, FIRST_PARTITION_GROUP + number)
        await super()._fill(number)

    def _adopt(self, number: int) -> None:
        super()._adopt(number)
        if self.process.world.profile.deaf:
            self._every[number].settle = lambda *_: None

    def _invoker(self) -> Invoker:
        invoker = SimInvoker(
            self.registry,
            self.clock,
            limits=Limits(streamed=self.process.world.profile.attempts_max),
            timing=self._timing,
            rng=random.Random(self.process.world.rng.getrandbits(32)),
            stager=self.stager,
        )
        invoker.process = self.process
        return invoker
