"""Measures snapshots where they matter: in real nodes, under load, with a large state.

    python -m bench.snapshots_in_node [--only cut|restart|catch-up] [--steps n] [--seconds s] [--directory d] [--json]

cut        A node with about 1 GiB of state (a million journal steps) and 64 invocations in flight: the longest pauses of its
           loop before, during and after a cut.
restart    The same node, until it answers a command: after a kill; after a loss of power, with the snapshot and the log behind
           it; after a loss of power without snapshots, with the whole log.
catch-up   Three nodes, a quarter of the steps. One is killed, the log is trimmed behind a snapshot, and it comes back:
           the latency of commands at the leader, before that and while the other fetches the snapshot from it.

The load is made inside the leading node, command by command through the partition's door: log with fsync, apply and answer
are what people run. There are no handlers: the effects of what is applied are dropped. A loss of power is played by another
boot id, which is what tells a node of one. Compare figures of one run with each other.

What a pause of the loop is, and when it is ours: `bench/pauses.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import uvloop

from bench.e2e import free_ports
from bench.pauses import Pauses
from holdfast.cluster.config import Config, HostPort
from holdfast.cluster.environment import Environment
from holdfast.cluster.node import Node
from holdfast.cluster.partition.door import Partition
from holdfast.log.errors import ProposalError
from holdfast.sdk.ids import DeploymentId, PartitionNumber, new_id
from holdfast.sdk.journal import Op
from holdfast.statemachine.commands import Command, Complete, Invoke, Mode, RecordStep

DP_1 = DeploymentId("dp_1")

SECTIONS: Final = ("cut", "restart", "catch-up")
STEPS: Final = 1_000_000
STEPS_EACH: Final = 10  # of one invocation
PAYLOAD: Final = os.urandom(420)  # Of a step: with its keys and tree overhead it takes about a kilobyte.
FILL_COMMANDS: Final = 2400  # in flight while a state is filled
IN_FLIGHT: Final = 64
CALM_IN_FLIGHT: Final = 8  # Latencies are measured on a node that is not saturated.
THINK_S: Final = 0.01
NOTABLE_S: Final = 0.05
PATIENCE_S: Final = 900.0
NEVER_S: Final = 366 * 86400
NEVER: Final = 1_000_000_000
CATCH_UP_TAIL: Final = 100


# -- a node ----------------------------------------------------------------------------------------------------------------


def invocation(steps: int) -> list[Command]:
    ident = new_id("bench", None, secrets.token_bytes(16))
    return [
        Invoke(ident, "bench", "work", None, Mode.PLAIN, PAYLOAD, {}, 0, None, -1, 86_400_000),
        *(RecordStep(ident, 1, step, Op.RUN, f"/{step}", ["work"], [0, PAYLOAD], DP_1) for step in range(1, steps + 1)),
        Complete(ident, 1, [0, PAYLOAD], DP_1),
    ]


def quantile(ascending: Sequence[float], share: float) -> float:
    return ascending[min(int(len(ascending) * share), len(ascending) - 1)] if ascending else 0.0


class Bench:
    """A node with one partition, and the requests that the parent may send it."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._load: list[asyncio.Task[None]] = []
        self._latencies: list[float] = []
        self._refused = 0
        self._pauses = Pauses()
        self._began = 0.0
        self._watch = asyncio.create_task(self._pauses.watch())

    @property
    def partition(self) -> Partition:
        (partition,) = self.node.partitions
        return partition

    def drop_effects(self) -> None:
        machine = self.partition.machine
        deliver = machine.deliver
        machine.deliver = lambda answers, term, _: deliver(answers, term, [])

    async def answer(self, request: dict[str, Any]) -> object:
        answer = getattr(self, f"do_{request.pop('do')}")(**request)
        return await answer if asyncio.iscoroutine(answer) else answer

    async def do_ready(self) -> None:
        """Wait until this node accepts and answers a command."""
        while True:
            with contextlib.suppress(ProposalError, ValueError):
                await self.partition.propose(invocation(0)[0])
                return
            await asyncio.sleep(0.002)

    def do_lead(self, to: str) -> bool:
        group = self.partition.group
        if group.is_leader and to != self.node.config.node:
            group.transfer(to)
        return group.leader == to

    async def do_fill(self, steps: int) -> dict[str, float]:
        """Add this many steps, or fewer if the leadership ends in the meantime."""
        self.drop_effects()
        start = time.perf_counter()
        filled = 0
        while filled < steps and self.partition.group.is_leader:
            waiting = [
                self.partition.propose(command)
                for _ in range(FILL_COMMANDS // STEPS_EACH)
                for command in invocation(STEPS_EACH)
            ]
            results = await asyncio.gather(*waiting, return_exceptions=True)
            if not any(isinstance(result, BaseException) for result in results):
                filled += FILL_COMMANDS
        seconds = time.perf_counter() - start
        return {"steps": filled, "seconds": seconds, "state_bytes": self.partition.state.bytes_used()}

    def do_load(self, in_flight: int, think_s: float) -> None:
        self.drop_effects()

        async def work() -> None:
            while True:
                for command in invocation(3):
                    asked = time.perf_counter()
                    try:
                        await self.partition.propose(command)
                        self._latencies.append(time.perf_counter() - asked)
                    except ProposalError:
                        self._refused += 1
                        await asyncio.sleep(THINK_S)
                    if think_s:
                        await asyncio.sleep(think_s)

        self._load = [asyncio.create_task(work()) for _ in range(in_flight)]

    async def do_unload(self) -> None:
        for task in self._load:
            task.cancel()
        await asyncio.gather(*self._load, return_exceptions=True)

    def do_begin(self) -> None:
        """Begin a phase of the measurement."""
        self._latencies, self._refused, self._pauses.seen, self._began = [], 0, [], time.perf_counter()

    def do_end(self) -> dict[str, float]:
        seconds, latencies = time.perf_counter() - self._began, sorted(self._latencies)
        pauses, ours = (sorted(pause[which] for pause in self._pauses.seen) for which in (0, 1))
        return {
            "seconds": seconds,
            "per_s": len(latencies) / seconds,
            "refused": self._refused,
            "p50_ms": quantile(latencies, 0.5) * 1e3,
            "p99_ms": quantile(latencies, 0.99) * 1e3,
            "pause_p99_ms": quantile(pauses, 0.99) * 1e3,
            "pause_worst_ms": quantile(pauses, 1.0) * 1e3,
            "own_pause_p99_ms": quantile(ours, 0.99) * 1e3,
            "own_pause_worst_ms": quantile(ours, 1.0) * 1e3,
            "own_pauses_over_50_ms": sum(pause > NOTABLE_S for pause in ours),
        }

    async def do_cut(self) -> dict[str, float]:
        start = time.perf_counter()
        router = self.node.serving.router
        cut = await self.node.ground.snapshots.create(PartitionNumber(0), partitions=router.count, leader=router.leader)
        return {"seconds": time.perf_counter() - start, "bytes": cut["bytes"], "index": cut["index"]}

    def do_progress(self) -> dict[str, float]:
        """Progress of the fetch and of applying here; none yet while the node starts."""
        keeper = next(iter(self.node.ground.snapshots.keepers.values()), None)
        status = self.partition.group.status() if self.node.partitions else None
        return {
            "installs": keeper.installs if keeper is not None else 0,
            "fetched": keeper.fetched_bytes if keeper is not None else 0,
            "applied": status.applied if status is not None else 0,
            "base": status.base if status is not None else 0,
        }


async def run_node(options: dict[str, Any]) -> None:
    name, ports = options["name"], options["ports"]
    free = HostPort("127.0.0.1", 0)
    config = Config(
        node=name,
        data=Path(options["data"]) / name,
        partitions=1,
        ingress=free,
        admin=free,
        peer=HostPort("127.0.0.1", ports[name]),
        peers={peer: HostPort("127.0.0.1", port) for peer, port in ports.items() if peer != name},
        secret=b"the secret of a benchmark" if len(ports) > 1 else None,
        snapshot_entries=NEVER,  # Cut on request,
        snapshot_bytes=1 << 40,
        snapshot_age=NEVER_S,
        log_tail=options["tail"],
    )
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    start = time.perf_counter()
    node = Node(config, Environment(boot=options["boot"]))
    starting = asyncio.create_task(node.start())
    bench = Bench(node)
    if not options["early"]:
        await starting
        if options["await_ready"]:
            await bench.do_ready()
    print(json.dumps(time.perf_counter() - start), flush=True)
    while line := await reader.readline():
        print(json.dumps(await bench.answer(json.loads(line))), flush=True)
    await starting
    await node.stop()


# -- the parent ------------------------------------------------------------------------------------------------------------


class Process:
    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self._child = child

    @classmethod
    async def start(cls, **options: object) -> tuple[Process, float]:
        """The node, and the time of its start without imports."""
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "bench.snapshots_in_node", "--node", json.dumps(options)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        process = cls(child)
        try:
            return process, await process._line()
        except BaseException:
            await process.kill()
            raise

    async def ask(self, do: str, **arguments: object) -> Any:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        return await self._line()

    async def _line(self) -> Any:
        assert self._child.stdout is not None
        line = await asyncio.wait_for(self._child.stdout.readline(), PATIENCE_S)
        if not line:
            raise SystemExit(f"a node ended with status {await self._child.wait()}")
        return json.loads(line)

    async def kill(self) -> None:
        if self._child.returncode is None:
            self._child.send_signal(signal.SIGKILL)
            await self._child.wait()


Report = dict[str, Any]


async def fill(nodes: Sequence[Process], steps: int) -> dict[str, float]:
    """Filled by the first node, which leads when it is done."""
    leader, filled, seconds = nodes[0], 0, 0.0
    while filled < steps:
        async with asyncio.timeout(PATIENCE_S):
            while not all([await node.ask("lead", to="n1") for node in nodes]):
                await asyncio.sleep(0.2)
        await leader.ask("ready")
        part = await leader.ask("fill", steps=steps - filled)
        filled += part["steps"]
        seconds += part["seconds"]
    return {"seconds": seconds, "state_bytes": part["state_bytes"]}


async def phase(node: Process, seconds: float) -> dict[str, float]:
    await node.ask("begin")
    await asyncio.sleep(seconds)
    result: dict[str, float] = await node.ask("end")
    return result


async def measure_alone(data: Path, steps: int, seconds: float, sections: Sequence[str]) -> Report:
    """Cut and restarts of one node."""
    options: dict[str, Any] = {"name": "n1", "ports": {"n1": 0}, "data": str(data), "tail": NEVER}
    options |= {"boot": "first", "early": False, "await_ready": True}
    report: Report = {}
    node, _ = await Process.start(**options)
    try:
        report["filled"] = await fill([node], steps)
        await node.ask("load", in_flight=IN_FLIGHT, think_s=0)
        await phase(node, 1.0)
        report["before the cut"] = await phase(node, seconds)
        await node.ask("begin")
        cut = await node.ask("cut")
        report["during the cut"] = await node.ask("end")
        report["cut"] = cut
        report["after the cut"] = await phase(node, seconds)
        await node.ask("unload")
        if "restart" in sections:
            for what, boot, prepare in (
                ("after a kill", "first", None),
                ("after a loss of power, with a snapshot", "second", None),
                ("after a loss of power, with the whole log", "third", data / "n1" / "snapshots"),
            ):
                await node.kill()
                if prepare is not None:
                    shutil.rmtree(prepare)
                node, took = await Process.start(**{**options, "boot": boot})
                report[f"restart {what}"] = {"seconds": took}
    finally:
        await node.kill()
    return report


async def measure_catch_up(data: Path, steps: int, seconds: float) -> Report:
    names = ("n1", "n2", "n3")
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    options: dict[str, Any] = {"ports": ports, "data": str(data), "tail": CATCH_UP_TAIL}
    options |= {"boot": "first", "early": False, "await_ready": False}
    report: Report = {}
    nodes = [node for node, _ in await asyncio.gather(*(Process.start(name=name, **options) for name in names))]
    try:
        leader, _, victim = nodes
        report["filled"] = await fill(nodes, steps)
        await leader.ask("load", in_flight=CALM_IN_FLIGHT, think_s=THINK_S)
        await phase(leader, 2.0)
        report["all three nodes up"] = await phase(leader, seconds)
        await victim.kill()
        report["one node down"] = await phase(leader, seconds)
        report["cut"] = cut = await leader.ask("cut")
        async with asyncio.timeout(PATIENCE_S):
            while (await leader.ask("progress"))["base"] < cut["index"] - CATCH_UP_TAIL:
                await asyncio.sleep(0.1)
        await phase(leader, 1.0)
        start = time.perf_counter()
        nodes[2], _ = await Process.start(name="n3", **{**options, "early": True})
        await leader.ask("begin")
        async with asyncio.timeout(PATIENCE_S):
            while not (seen := await nodes[2].ask("progress"))["installs"]:
                await asyncio.sleep(0.05)
        report["it fetches the snapshot"] = await leader.ask("end")
        report["from its start until it has the snapshot"] = {
            "seconds": time.perf_counter() - start,
            "bytes": seen["fetched"],
        }
        report["and has it"] = await phase(leader, seconds)
    finally:
        await asyncio.gather(*(node.kill() for node in nodes))
    return report


def show(title: str, report: Report) -> None:
    print(title)
    for what, figures in report.items():
        line = f"  {what:44}"
        if "p50_ms" in figures:
            line += (
                f"{figures['per_s']:8,.0f} commands/s   p50 {figures['p50_ms']:7.1f} ms   p99 {figures['p99_ms']:7.1f} ms   "
                f"pauses: p99 {figures['pause_p99_ms']:5.1f} ms, worst {figures['pause_worst_ms']:5.0f} ms; with a core at "
                f"hand: p99 {figures['own_pause_p99_ms']:5.1f} ms, worst {figures['own_pause_worst_ms']:5.0f} ms, "
                f"{figures['own_pauses_over_50_ms']:.0f} over 50 ms in {figures['seconds']:.0f} s"
            )
            line += f"; {figures['refused']:.0f} refused" if figures["refused"] else ""
        else:
            line += f"{figures['seconds']:8.2f} s"
            size = figures.get("bytes", figures.get("state_bytes"))
            line += f"   {size / 1e6:8,.0f} MB   {size / 1e6 / figures['seconds']:6,.0f} MB/s" if size else ""
        print(line)


async def run(options: argparse.Namespace) -> None:
    sections = options.only or SECTIONS
    reports: dict[str, Report] = {}
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=options.directory) as folder:
        if "cut" in sections or "restart" in sections:
            title = f"One node, {options.steps:,} journal steps, {IN_FLIGHT} in flight"
            reports[title] = await measure_alone(Path(folder) / "alone", options.steps, options.seconds, sections)
            shutil.rmtree(Path(folder) / "alone")
        if "catch-up" in sections:
            steps = options.steps // 4
            title = f"Three nodes, {steps:,} journal steps, {CALM_IN_FLIGHT} in flight"
            reports[title] = await measure_catch_up(Path(folder) / "three", steps, options.seconds)
    if options.json:
        print(json.dumps({"cores": os.cpu_count(), "load": os.getloadavg(), "reports": reports}, indent=2))
        return
    for title, report in reports.items():
        show(title, report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SECTIONS, action="append", help="a section (may be repeated); default: all")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"journal steps in the state (default {STEPS:,})")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long each phase of a load lasts (default 10)")
    parser.add_argument("--directory", type=Path, default=None, help="working directory; a temporary one by default")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--node", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.node is not None:
        logging.basicConfig(level=logging.WARNING)
        uvloop.run(run_node(json.loads(options.node)))
    else:
        asyncio.run(run(options))


if __name__ == "__main__":
    main()
