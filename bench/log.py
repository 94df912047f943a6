"""Measures the replicated log: three real processes on loopback, fsync on, authenticated links, checksums on.

    python bench/log.py [--only throughput|idle|failover] [--seconds s] [--json]

The load runs inside the leader's process, as the rooms above will run: each of `in flight` workers proposes a command and
waits until it is committed and applied. Where several groups are measured, one node leads them all, so that the figures
compare one loop with one loop. An absolute figure means little on a shared machine: compare figures of one run.

The parent speaks to its nodes in lines of JSON over their standard input and output. A node whose parent is gone ends.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import resource
import secrets
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import uvloop

from holdfast.log.engine import Snapshot
from holdfast.log.environment import NodeConfig
from holdfast.log.errors import ProposalError
from holdfast.log.node import Group, LogNode
from holdfast.log.replica import Committed
from holdfast.log.sockets import Address

NAMES: Final = ("n1", "n2", "n3")
GROUPS: Final = (1, 24)
IN_FLIGHT: Final = (1, 16, 128, 512)
COMMAND_BYTES: Final = 200
SECTIONS: Final = ("throughput", "idle", "failover")
PATIENCE_S: Final = 60.0
FAILOVERS: Final = 30
QUIET_S: Final = 0.3  # Between two failovers: the next leader has contact with all nodes.


# -- one node ------------------------------------------------------------------------------------------------------------


class Counter:
    """A minimal machine, because the log's own cost is measured."""

    def __init__(self) -> None:
        self.applied = (0, 0)
        self.commands = 0

    def apply(self, entries: Sequence[Committed]) -> None:
        for entry in entries:
            self.commands += len(entry.commands)
        self.applied = (entries[-1].index, entries[-1].term)

    def snapshot(self) -> Snapshot | None:
        return None


class Bench:
    """A node, and the requests that the parent may send it."""

    def __init__(self, node: LogNode) -> None:
        self._node = node
        self._committed_at: list[float] = []
        self._pulse: asyncio.Task[None] | None = None

    async def answer(self, request: dict[str, Any]) -> object:
        handler: Callable[..., Any] = getattr(self, f"do_{request.pop('do')}")
        answer = handler(**request)
        return await answer if asyncio.iscoroutine(answer) else answer

    def do_peers(self, ports: dict[str, int]) -> None:
        self._node.set_peers({name: Address("127.0.0.1", port) for name, port in ports.items()})

    def do_create(self, groups: int) -> None:
        for group in range(1, groups + 1):
            self._node.create_group(group, NAMES)

    def do_led(self) -> list[int]:
        """The groups led here, with their first entry committed."""
        return [group for group, replica in self._node.host.replicas.items() if replica.engine.term_committed]

    def do_transfer(self, group: int, to: str) -> bool:
        return self._node.group(group).transfer(to)

    def do_connected(self) -> int:
        return sum(link.connected for link in self._node.links().values())

    def do_caught_up(self) -> dict[int, tuple[str | None, int, int]]:
        statuses = [self._node.group(group).status() for group in self._node.host.replicas]
        return {status.group: (status.leader, status.last, status.applied) for status in statuses}

    def do_usage(self) -> dict[str, float]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        counters = self._node.counters()
        return {
            "at": time.monotonic(),
            "cpu_s": used.ru_utime + used.ru_stime,
            "fsyncs": counters.commits,
            "turns": counters.turns,
            "entries": sum(replica.log.last_index for replica in self._node.host.replicas.values()),
        }

    async def do_load(self, in_flight: int, seconds: float) -> dict[str, float]:
        groups = [self._node.group(group) for group in self._node.host.replicas]
        latencies: list[float] = []
        clock = time.perf_counter
        began = clock()
        finish = began + seconds

        async def work(group: Group) -> None:
            command = secrets.token_bytes(COMMAND_BYTES)
            while (asked := clock()) < finish:
                await group.propose(command)
                latencies.append(clock() - asked)

        async with asyncio.TaskGroup() as tasks:
            for number in range(in_flight):
                tasks.create_task(work(groups[number % len(groups)]))
        took = clock() - began
        latencies.sort()
        return {
            "commits_per_s": len(latencies) / took,
            "p50_ms": quantile(latencies, 0.5) * 1e3,
            "p99_ms": quantile(latencies, 0.99) * 1e3,
        }

    def do_pulse(self) -> None:
        """Propose while this node leads, and record when each command was committed."""
        self._pulse = asyncio.create_task(self._propose_for_ever())

    async def _propose_for_ever(self) -> None:
        group = self._node.group(1)
        while True:
            if group.is_leader:
                with contextlib.suppress(ProposalError):
                    await group.propose(b"pulse")
                    self._committed_at.append(time.monotonic())
            await asyncio.sleep(0.001)

    def do_first_commit(self, since: float) -> float | None:
        return next((at for at in self._committed_at if at > since), None)


async def run_node(name: str, data: Path, port: int, secret: bytes) -> None:
    listen = Address("127.0.0.1", port)
    config = NodeConfig(node=name, cluster="bench", data=data, listen=listen, secret=secret)
    node = LogNode(config, open_machine=lambda _: Counter())
    await node.start()
    bench = Bench(node)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    print(json.dumps(node.port), flush=True)
    while line := await reader.readline():
        print(json.dumps(await bench.answer(json.loads(line))), flush=True)
    await node.stop(handover_s=0)


# -- the parent ----------------------------------------------------------------------------------------------------------


class Process:
    """A node as its parent sees it."""

    def __init__(self, name: str, data: Path, secret: str) -> None:
        self.name = name
        self.port = 0
        self._data = data
        self._secret = secret
        self._child: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._child = await asyncio.create_subprocess_exec(
            sys.executable,
            __file__,
            *("--node", self.name, "--data", str(self._data), "--port", str(self.port)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "HOLDFAST_BENCH_SECRET": self._secret},
        )
        self.port = await self._line()

    async def ask(self, do: str, **arguments: object) -> Any:
        assert self._child is not None and self._child.stdin is not None
        self._child.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        return await self._line()

    async def _line(self) -> Any:
        assert self._child is not None and self._child.stdout is not None
        line = await asyncio.wait_for(self._child.stdout.readline(), PATIENCE_S)
        if not line:
            raise SystemExit(f"node {self.name} ended with status {await self._child.wait()}")
        return json.loads(line)

    def signal(self, signum: signal.Signals) -> None:
        assert self._child is not None
        self._child.send_signal(signum)

    async def kill(self) -> None:
        if self._child is not None and self._child.returncode is None:
            self._child.kill()
            await self._child.wait()


class Cluster:
    def __init__(self, nodes: list[Process], groups: int) -> None:
        self.nodes = nodes
        self.groups = groups

    async def connect(self) -> None:
        for node in self.nodes:
            await node.ask("peers", ports={other.name: other.port for other in self.nodes if other is not node})

    async def leader(self, group: int = 1) -> Process:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for node in self.nodes:
                    if group in await node.ask("led"):
                        return node
                await asyncio.sleep(0.01)

    async def lead_all(self, leader: Process) -> None:
        """Have one node lead every group."""
        async with asyncio.timeout(PATIENCE_S):
            while len(await leader.ask("led")) < self.groups:
                for node in self.nodes:
                    for group in await node.ask("led"):
                        if node is not leader:
                            await node.ask("transfer", group=group, to=leader.name)
                await asyncio.sleep(0.2)

    async def settled(self) -> None:
        """Wait until all nodes are connected, follow one leader and hold one log, except for current proposals."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                views = [(await node.ask("caught_up"))["1"] for node in self.nodes]
                leaders = {leader for leader, _, _ in views}
                lasts = [last for _, last, _ in views]
                whole = all([await node.ask("connected") == len(self.nodes) - 1 for node in self.nodes])
                if whole and len(leaders) == 1 and None not in leaders and max(lasts) - min(lasts) < 50:
                    return
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def cluster_of(groups: int, root: Path) -> AsyncIterator[Cluster]:
    secret = secrets.token_hex(32)
    nodes = [Process(name, root / name, secret) for name in NAMES]
    try:
        await asyncio.gather(*(node.start() for node in nodes))
        cluster = Cluster(nodes, groups)
        await cluster.connect()
        for node in nodes:
            await node.ask("create", groups=groups)
        await cluster.leader()
        yield cluster
    finally:
        await asyncio.gather(*(node.kill() for node in nodes))
        shutil.rmtree(root, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Throughput:
    groups: int
    in_flight: int
    commits_per_s: float
    best_per_s: float  # Of several runs.
    p50_ms: float
    p99_ms: float
    entries_per_s: float
    fsyncs_per_s: float  # Of the leader.
    cpu_percent: list[float]  # Of one core, per node; the leader, which also makes the load, first.


async def usage_of(nodes: Sequence[Process]) -> list[dict[str, float]]:
    return [await node.ask("usage") for node in nodes]


def percent(before: dict[str, float], after: dict[str, float]) -> float:
    return 100 * (after["cpu_s"] - before["cpu_s"]) / (after["at"] - before["at"])


async def measure_throughput(rounds: int, seconds: float, root: Path, show: Callable[[str], None]) -> list[Throughput]:
    """One group and many groups take turns, a moment each, so that other work on the machine affects both."""
    runs: dict[tuple[int, int], list[Throughput]] = {}
    async with contextlib.AsyncExitStack() as stack:
        clusters = [await stack.enter_async_context(cluster_of(groups, root / f"{groups}")) for groups in GROUPS]
        for cluster in clusters:
            await cluster.lead_all(cluster.nodes[0])
            await cluster.nodes[0].ask("load", in_flight=64, seconds=0.5)  # Caches and buffers reach their size.
        for round_ in range(rounds):
            for in_flight in IN_FLIGHT:
                for cluster in clusters if round_ % 2 else reversed(clusters):
                    runs.setdefault((cluster.groups, in_flight), []).append(await load(cluster, in_flight, seconds))
    results = [summary(of_one_kind) for _, of_one_kind in sorted(runs.items())]
    show(f"{'groups':>6} {'in flight':>9} {'commits/s':>10} {'best':>10} {'p50 ms':>8} {'p99 ms':>8} {'entries/s':>10} "
         f"{'fsyncs/s':>9}   CPU % of a core: leader, followers")  # fmt: skip
    for result in results:
        cpu = ", ".join(f"{share:.0f}" for share in result.cpu_percent)
        show(f"{result.groups:6} {result.in_flight:9} {result.commits_per_s:10,.0f} {result.best_per_s:10,.0f} "
             f"{result.p50_ms:8.2f} {result.p99_ms:8.2f} {result.entries_per_s:10,.0f} "
             f"{result.fsyncs_per_s:9,.0f}   {cpu}")  # fmt: skip
    listed = ", ".join(f"{100 * share_of(runs, in_flight):.0f} % at {in_flight}" for in_flight in IN_FLIGHT)
    show(f"{GROUPS[-1]} groups reach, of one group's commits/s (the middle of {rounds} comparisons): {listed}")
    return results


def share_of(runs: dict[tuple[int, int], list[Throughput]], in_flight: int) -> float:
    """The throughput of many groups relative to one: moment by moment, because the machine's speed varies."""
    one, many = (runs[groups, in_flight] for groups in GROUPS)
    return statistics.median(b.commits_per_s / a.commits_per_s for a, b in zip(one, many, strict=True))


def summary(runs: Sequence[Throughput]) -> Throughput:
    """The median of the runs, figure by figure."""
    rates = [run.commits_per_s for run in runs]
    return Throughput(
        groups=runs[0].groups,
        in_flight=runs[0].in_flight,
        commits_per_s=statistics.median(rates),
        best_per_s=max(rates),
        p50_ms=statistics.median(run.p50_ms for run in runs),
        p99_ms=statistics.median(run.p99_ms for run in runs),
        entries_per_s=statistics.median(run.entries_per_s for run in runs),
        fsyncs_per_s=statistics.median(run.fsyncs_per_s for run in runs),
        cpu_percent=[statistics.median(shares) for shares in zip(*(run.cpu_percent for run in runs), strict=True)],
    )


async def load(cluster: Cluster, in_flight: int, seconds: float) -> Throughput:
    """The first node leads every group and makes the load."""
    before = await usage_of(cluster.nodes)
    load = await cluster.nodes[0].ask("load", in_flight=in_flight, seconds=seconds)
    after = await usage_of(cluster.nodes)
    took = after[0]["at"] - before[0]["at"]
    return Throughput(
        groups=cluster.groups,
        in_flight=in_flight,
        **load,
        best_per_s=load["commits_per_s"],
        entries_per_s=(after[0]["entries"] - before[0]["entries"]) / took,
        fsyncs_per_s=(after[0]["fsyncs"] - before[0]["fsyncs"]) / took,
        cpu_percent=[percent(*pair) for pair in zip(before, after, strict=True)],
    )


async def measure_idle(seconds: float, root: Path, show: Callable[[str], None]) -> list[float]:
    async with cluster_of(GROUPS[-1], root) as cluster:
        await asyncio.sleep(2.0)  # Elections are over.
        before = await usage_of(cluster.nodes)
        await asyncio.sleep(seconds)
        after = await usage_of(cluster.nodes)
        shares = [percent(*pair) for pair in zip(before, after, strict=True)]
        listed = ", ".join(f"{share:.2f}" for share in shares)
        show(f"idle with {GROUPS[-1]} groups: {listed} % of a core per node")
        return shares


@dataclass(frozen=True, slots=True)
class Failover:
    """From the signal to the first commit of another leader."""

    manner: str
    times: int
    p50_ms: float
    worst_ms: float


async def measure_failover(times: int, root: Path, show: Callable[[str], None]) -> list[Failover]:
    results = []
    async with cluster_of(1, root) as cluster:
        for node in cluster.nodes:
            await node.ask("pulse")
        for manner, signum in (("broken", signal.SIGKILL), ("silent", signal.SIGSTOP)):
            gaps = sorted([await fail_over(cluster, signum) for _ in range(times)])
            result = Failover(manner, times, quantile(gaps, 0.5) * 1e3, gaps[-1] * 1e3)
            results.append(result)
            show(f"failover, connection {manner} ({signum.name} of the leader), {times} times: "
                 f"p50 {result.p50_ms:.0f} ms, worst {result.worst_ms:.0f} ms")  # fmt: skip
    return results


async def fail_over(cluster: Cluster, signum: signal.Signals) -> float:
    await cluster.settled()
    await asyncio.sleep(QUIET_S)
    victim = await cluster.leader()
    others = [node for node in cluster.nodes if node is not victim]
    struck = time.monotonic()
    victim.signal(signum)
    async with asyncio.timeout(PATIENCE_S):
        while not (commits := [at for node in others if (at := await node.ask("first_commit", since=struck))]):
            await asyncio.sleep(0.02)
    if signum is signal.SIGKILL:
        await victim.kill()
        await victim.start()
        await cluster.connect()
        await victim.ask("pulse")
    else:
        victim.signal(signal.SIGCONT)
    return float(min(commits)) - struck


def quantile(ascending: Sequence[float], share: float) -> float:
    return ascending[min(int(len(ascending) * share), len(ascending) - 1)]


async def run_all(sections: Sequence[str], rounds: int, seconds: float, times: int, *, as_json: bool) -> None:
    def show(line: str) -> None:
        print(line, file=sys.stderr if as_json else sys.stdout, flush=True)

    report: dict[str, object] = {"python": platform.python_version(), "cores": os.cpu_count(), "load": os.getloadavg()}
    show(f"3 processes, fsync, {COMMAND_BYTES}-byte commands; Python {report['python']}, {report['cores']} cores, "
         f"load average {os.getloadavg()[0]:.1f} before the start")  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as root:
        data = Path(root) / "data"
        if "throughput" in sections:
            results = await measure_throughput(rounds, seconds, data, show)
            report["throughput"] = [asdict(result) for result in results]
        if "idle" in sections:
            report["idle_cpu_percent"] = await measure_idle(max(seconds, 5.0), data, show)
        if "failover" in sections:
            report["failover"] = [asdict(result) for result in await measure_failover(times, data, show)]
    if as_json:
        print(json.dumps(report, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the replicated log on three real processes.")
    parser.add_argument("--only", choices=SECTIONS, action="append", help="a section (may be repeated); default: all")
    parser.add_argument("--rounds", type=int, default=30, help="of all loads; the middle of each counts (default 30)")
    parser.add_argument("--seconds", type=float, default=0.3, help="how long each load runs (default 0.3)")
    parser.add_argument("--times", type=int, default=FAILOVERS, help=f"failovers of each kind (default {FAILOVERS})")
    parser.add_argument("--json", action="store_true", help="the report as JSON on standard output, lines to stderr")
    node = parser.add_argument_group("internal: the arguments of a node")
    for name in ("--node", "--data", "--port"):
        node.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.node is not None:
        secret = bytes.fromhex(os.environ.pop("HOLDFAST_BENCH_SECRET"))
        uvloop.run(run_node(options.node, Path(options.data), int(options.port), secret))
    else:
        asyncio.run(
            run_all(options.only or SECTIONS, options.rounds, options.seconds, options.times, as_json=options.json)
        )


if __name__ == "__main__":
    main()
