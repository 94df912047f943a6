"""Measures whole invocations: HTTP request to HTTP answer, through the log with fsync and a handler process.

    python bench/e2e.py [--nodes 1|3] [--spread] [--work empty,three,ten,counter] [--run-ahead] [--in-flight 1,64]
                        [--seconds s] [--rounds n] [--partitions n] [--waiting n]

Processes on one machine: the nodes, a handler endpoint (our SDK), and the load: raw HTTP/1.1 over keep-alive connections,
so that the generator is not what is measured. Everything shares the machine's cores, so rates mean little while anything
else runs on it. The processor time of each process per invocation is steadier: its sum shows what the cores could do.

With several nodes the first leads all partitions and gets all requests, so that it can be told what a leader costs and what
a follower does. With --spread each leads its share, and requests go to all of them in turn. Work:

    empty      a handler that returns
    three      three journaled steps, one after the other
    ten        ten of them
    counter    a virtual object: read, add, write, on 500 keys

three-ahead and ten-ahead are the same with `run_ahead=True`: the code goes on before its step is durable. --run-ahead
measures each of those right after its strict variant, so that both see the same machine.

With --waiting n, n invocations are begun that wait for an hour, and n more, and what they cost in memory is reported.

The parent speaks to node and endpoint in lines of JSON over their standard input and output. A child whose parent is gone ends.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import logging
import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import uvloop

from bench.pauses import Pauses
from holdfast.cluster.config import Config, HostPort
from holdfast.cluster.node import Node
from holdfast.sdk import Context, ObjectContext, Service, VirtualObject
from holdfast.sdk.loop import calm_collector
from holdfast.sdk.server import Server
from holdfast.statemachine import queries

KEYS: Final = 500
WARM_S: Final = 1.0
PATIENCE_S: Final = 60.0


# -- the handlers --------------------------------------------------------------------------------------------------------

bench = Service("bench")
counter = VirtualObject("counter")


def increase(number: int) -> int:
    return number + 1


async def increase_async(number: int) -> int:
    return number + 1


@bench.handler
async def empty(ctx: Context, number: int) -> int:
    return number


async def run_steps(ctx: Context, names: list[str], number: int) -> int:
    for name in names:
        number = await ctx.run(name, increase_async, number)
    return number


@bench.handler
async def three(ctx: Context, number: int) -> int:
    return await run_steps(ctx, ["a", "b", "c"], number)


@bench.handler(name="three-ahead", run_ahead=True)
async def three_ahead(ctx: Context, number: int) -> int:
    return await run_steps(ctx, ["a", "b", "c"], number)


TEN: Final = [f"s{step}" for step in range(10)]


@bench.handler
async def ten(ctx: Context, number: int) -> int:
    return await run_steps(ctx, TEN, number)


@bench.handler(name="ten-ahead", run_ahead=True)
async def ten_ahead(ctx: Context, number: int) -> int:
    return await run_steps(ctx, TEN, number)


@bench.handler
async def wait(ctx: Context, number: int) -> int:
    await ctx.sleep(hours=1)
    return number


@counter.handler
async def add(ctx: ObjectContext, number: int) -> int:
    total = (await ctx.get("total", int) or 0) + number
    ctx.set("total", total)
    return total


# -- children ------------------------------------------------------------------------------------------------------------


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def written_bytes() -> int:
    """Bytes that this process wrote to the disk."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/io").read_text().splitlines():
            if line.startswith("write_bytes:"):
                return int(line.split()[1])
    return 0


def private_bytes() -> int:
    """Anonymous memory of this process, without the pages of the database that it maps."""
    gc.collect()
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


async def answer_lines(handlers: dict[str, Callable[..., Any]], first: object) -> None:
    """Speak first, then answer each line (a verb and its arguments) until the parent has ended."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    print(json.dumps(first), flush=True)
    while line := await reader.readline():
        verb, *arguments = line.decode().split()
        answer = handlers[verb](*arguments)
        print(json.dumps(await answer if asyncio.iscoroutine(answer) else answer), flush=True)


async def run_node(data: Path, name: str, partitions: int, ports: dict[str, int]) -> None:
    free = HostPort("127.0.0.1", 0)
    node = Node(
        Config(
            node=name,
            data=data / name,
            partitions=partitions,
            ingress=free,
            admin=free,
            peer=HostPort("127.0.0.1", ports[name]),
            peers={peer: HostPort("127.0.0.1", port) for peer, port in ports.items() if peer != name},
            secret=b"the secret of a benchmark" if len(ports) > 1 else None,
            attempts_max=10_000,
        ),
    )
    await node.start()
    calm_collector()  # As `holdfast serve` does.
    assert node.doors.ingress is not None

    def suspended() -> int:
        count = 0
        for partition in node.partitions:
            if partition.group.is_leader:
                with partition.state.read() as txn:
                    count += queries.statistics(txn).by_status["suspended"]
        return count

    def figures() -> dict[str, float]:
        counters = node.ground.log.counters()
        return {
            "cpu_s": cpu_s(),
            "fsyncs": counters.commits,
            "written": written_bytes(),
            "batches": sum(partition.batches for partition in node.partitions),
            "commands": sum(partition.commands for partition in node.partitions),
            "turns": counters.turns,
            "private": private_bytes(),
            "suspended": suspended(),
        }

    def lead(*names: str) -> bool:
        """Transfer partition p to the p-th of the names (they repeat), if we lead it. Returns whether all are in place."""
        wanted = [(each, names[each.number % len(names)]) for each in node.partitions]
        for partition, leader in wanted:
            if leader != name and partition.group.is_leader:
                partition.group.transfer(leader)
        return all(partition.group.leader == leader for partition, leader in wanted)

    pauses = Pauses()
    await answer_lines(
        {
            "figures": figures,
            "watch": pauses.begin,
            "pauses": pauses.take_longest,
            "admin": lambda: node.doors.admin.port if node.doors.admin is not None else None,
            "lead": lead,
            "register": lambda uri: asyncio.wait_for(_register(node, uri), PATIENCE_S),
            "knows": lambda: bool(node.ground.registry.state.deployments),
        },
        {"port": node.doors.ingress.port},
    )
    await node.stop()


async def _register(node: Node, uri: str) -> None:
    await node.ground.registry.register(uri)


async def run_endpoint() -> None:
    server = Server([bench, counter])
    await server.start(port=0)
    calm_collector()  # As `python -m holdfast.sdk` does.
    await answer_lines({"figures": lambda: {"cpu_s": cpu_s(), "private": private_bytes()}}, {"uri": server.uri})
    await server.stop(grace=0.1)


class Child:
    """A child process, and its lines."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def spawn(cls, *arguments: str) -> Child:
        process = await asyncio.create_subprocess_exec(
            sys.executable, __file__, *arguments, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")

    async def hear(self, patience_s: float = PATIENCE_S) -> Any:
        assert self._process.stdout is not None
        async with asyncio.timeout(patience_s):
            line = await self._process.stdout.readline()
        assert line, "a child ended early"
        return json.loads(line)

    async def ask(self, line: str) -> Any:
        self.tell(line)
        return await self.hear()

    def kill(self) -> None:
        self._process.kill()

    async def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(10):
                await self._process.wait()
                return
        self._process.kill()
        await self._process.wait()


# -- the load ------------------------------------------------------------------------------------------------------------


class Connection(asyncio.Protocol):
    """One request after the other, without a pause."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._buffer = b""
        self._sent_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport has the same interface.
        self._next()

    def _next(self) -> None:
        request = self._load.request()
        if request is None:
            self._transport.close()
            return
        self._sent_at = time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        at = head.lower().index(b"content-length:")
        length = int(head[at + 15 :].split(b"\r\n", 1)[0])
        if len(rest) < length:
            return
        self._buffer = rest[length:]
        self._load.answered(head[9:12], rest[:length], time.perf_counter() - self._sent_at)
        self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        self._load.closed()


class Load:
    def __init__(self, work: str, in_flight: int) -> None:
        self._work = work
        self._open = in_flight
        self._count = 0
        self._running = True
        self.most = 0  # Requests to make; 0: until it is stopped.
        self.latencies: list[float] = []
        self.errors = 0
        self.error = ""  # The last one.
        self.done = asyncio.get_running_loop().create_future()

    def request(self) -> bytes | None:
        if not self._running or (self.most and self._count >= self.most):
            return None
        self._count += 1
        path = f"/counter/k{self._count * 7919 % KEYS}/add" if self._work == "counter" else f"/bench/{self._work}"
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: 1\r\n\r\n1".encode()

    def answered(self, status: bytes, body: bytes, seconds: float) -> None:
        if status in (b"200", b"202"):
            self.latencies.append(seconds)
        else:
            self.errors += 1
            self.error = f"{status.decode()} {body[:300].decode(errors='replace')}"

    def closed(self) -> None:
        self._open -= 1
        if self._open == 0 and not self.done.done():
            self.done.set_result(None)

    def stop(self) -> None:
        self._running = False


async def run_load(ports: list[int], work: str, in_flight: int, seconds: float) -> None:
    """The load process. Reports when it is warm, and then its results."""
    loop = asyncio.get_running_loop()
    load = Load(work, in_flight)
    for number in range(in_flight):
        await loop.create_connection(lambda: Connection(load), "127.0.0.1", ports[number % len(ports)])
    if work.endswith("/send"):
        load.most = int(seconds)
        await load.done
        print(json.dumps(len(load.latencies)), flush=True)
        return
    await asyncio.sleep(WARM_S)
    print(json.dumps("warm"), flush=True)
    load.latencies.clear()
    begun, cpu = time.perf_counter(), cpu_s()
    await asyncio.sleep(seconds)
    took, latencies, cpu = time.perf_counter() - begun, sorted(load.latencies), cpu_s() - cpu
    print(
        json.dumps(
            {
                "count": len(latencies),
                "took": took,
                "p50": latencies[len(latencies) // 2] if latencies else 0,
                "p99": latencies[len(latencies) * 99 // 100] if latencies else 0,
                "worst": latencies[-1] if latencies else 0,
                "errors": load.errors,
                "error": load.error,
                "cpu_s": cpu,
            }
        ),
        flush=True,
    )
    load.stop()
    async with asyncio.timeout(PATIENCE_S):
        await load.done


# -- measuring -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    work: str
    in_flight: int
    per_s: float
    p50_ms: float
    p99_ms: float
    worst_ms: float
    nodes_us: list[float]  # processor time per invocation, like all names that end with _us
    endpoint_us: float
    load_us: float
    fsyncs: float  # per invocation, on the first node
    kib: float  # written per invocation by all nodes
    commands_per_batch: float
    errors: int

    @property
    def all_us(self) -> float:
        return sum(self.nodes_us) + self.endpoint_us + self.load_us


class Cluster(NamedTuple):
    nodes: list[Child]
    endpoint: Child
    ports: list[int]  # ports of the ingresses

    async def figures(self) -> list[dict[str, float]]:
        return [await child.ask("figures") for child in (*self.nodes, self.endpoint)]


async def measure(cluster: Cluster, work: str, in_flight: int, seconds: float) -> Row:
    ports = ",".join(map(str, cluster.ports))
    load = await Child.spawn("--load", ports, work, str(in_flight), str(seconds))
    await load.hear()
    before = await cluster.figures()
    seen = await load.hear()
    after = await cluster.figures()
    await load.end()
    if not seen["count"]:
        raise SystemExit(f"{work}: none of the requests succeeded; the last answer: {seen['error'] or 'none'}")
    spent = [{name: at[name] - earlier[name] for name in at} for at, earlier in zip(after, before, strict=True)]
    count = seen["count"]
    *nodes, endpoint = spent
    return Row(
        work,
        in_flight,
        seen["count"] / seen["took"],
        seen["p50"] * 1000,
        seen["p99"] * 1000,
        seen["worst"] * 1000,
        [node["cpu_s"] / count * 1e6 for node in nodes],
        endpoint["cpu_s"] / count * 1e6,
        seen["cpu_s"] / count * 1e6,
        nodes[0]["fsyncs"] / count,
        sum(node["written"] for node in nodes) / count / 1024,
        sum(node["commands"] for node in nodes) / max(sum(node["batches"] for node in nodes), 1),
        seen["errors"],
    )


def head(nodes: int) -> str:
    names = "".join(f"{f'n{number + 1} us':>8}" for number in range(nodes))
    return (
        f"{'work':12}{'in fl.':>7}{'inv/s':>8}{'p50 ms':>8}{'p99 ms':>8}{'worst':>8}"
        f"{names}{'endp us':>9}{'load us':>9}{'all us':>8}{'fsyncs':>8}{'KiB':>7}{'cmd/b':>7}{'err':>5}"
    )


def line(row: Row) -> str:
    return (
        f"{row.work:12}{row.in_flight:7d}{row.per_s:8.0f}{row.p50_ms:8.2f}{row.p99_ms:8.2f}{row.worst_ms:8.1f}"
        f"{''.join(f'{us:8.0f}' for us in row.nodes_us)}{row.endpoint_us:9.0f}{row.load_us:9.0f}{row.all_us:8.0f}"
        f"{row.fsyncs:8.2f}{row.kib:7.1f}{row.commands_per_batch:7.1f}{row.errors:5d}"
    )


AHEAD: Final = ("three", "ten")  # Works that also exist with run_ahead.

#: Requests/s at 64 in flight and p50 of single requests on 2 slow cores with everything on them: the peers in the best
#: configuration that was tried, and our goal with three nodes.
PEERS: Final = ("Restate 3 nodes, Python", "Restate 3 nodes, TypeScript", "DBOS, Postgres, no HA", "aim, 3 nodes")
TABLE: Final = {
    "empty": ("182/s, 8 ms", "1,150/s, 7 ms", "-", "2,500/s, 5 ms"),
    "three": ("220/s, 22 ms", "570/s, 16 ms", "49/s, 20 ms", "1,700/s, 10 ms"),
    "ten": ("109/s, 47 ms", "201/s, 45 ms", "-", "700/s, 25 ms"),
    "counter": ("549/s", "917/s", "-", "2,000/s"),
}


def compare(rows: list[Row]) -> list[str]:
    """The figures of this run beside those of the peers."""
    lines = [f"{'work':12}" + "".join(f"{name:>29}" for name in (*PEERS, "here", "2 cores, by processor time"))]
    for work, peers in TABLE.items():
        mine = [row for row in rows if row.work == work]
        full = sorted((row for row in mine if row.in_flight > 1), key=lambda row: row.all_us)
        alone = sorted((row for row in mine if row.in_flight == 1), key=lambda row: row.p50_ms)
        if not mine:
            continue
        here = [f"{row.per_s:,.0f}/s" for row in full[:1]] + [f"{row.p50_ms:.1f} ms" for row in alone[:1]]
        could = f"{2e6 / full[0].all_us:,.0f}/s" if full else "-"
        lines.append(f"{work:12}" + "".join(f"{text:>29}" for text in (*peers, ", ".join(here), could)))
    return lines


async def measure_waiting(cluster: Cluster, count: int) -> list[dict[str, float]]:
    """The cost of suspended invocations that wait for an hour: `count` of them, and then as many again.

    The first ones bring a process to its greatest size: it has some thousands of attempts in memory before they are
    suspended, and the allocator keeps those pages. The second round shows the cost of each further one.
    """
    return [await _measure_waiting(cluster, count, count * round_) for round_ in (1, 2)]


async def _measure_waiting(cluster: Cluster, count: int, suspended: int) -> dict[str, float]:
    node, endpoint = cluster.nodes[0], cluster.endpoint
    before, there = await node.ask("figures"), await endpoint.ask("figures")
    begun = time.perf_counter()
    load = await Child.spawn("--load", str(cluster.ports[0]), "wait/send", "64", str(count))
    await load.hear()
    await load.end()
    async with asyncio.timeout(10 * PATIENCE_S):
        while (await node.ask("figures"))["suspended"] < suspended:
            await asyncio.sleep(0.5)
    took = time.perf_counter() - begun
    await asyncio.sleep(2)
    after, there_after = await node.ask("figures"), await endpoint.ask("figures")
    return {
        "count": suspended,
        "took_s": took,
        "node_bytes_each": (after["private"] - before["private"]) / count,
        "endpoint_bytes_each": (there_after["private"] - there["private"]) / count,
    }


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


async def until_all(nodes: list[Child], question: str) -> None:
    """Repeat until all of them agree."""
    async with asyncio.timeout(PATIENCE_S):
        while not all([await node.ask(question) for node in nodes]):
            await asyncio.sleep(0.2)


async def start(cluster: Cluster, leaders: list[str]) -> None:
    for node in cluster.nodes:
        cluster.ports.append((await node.hear())["port"])
    uri = (await cluster.endpoint.hear())["uri"]
    await cluster.nodes[0].ask(f"register {uri}")
    await until_all(cluster.nodes, "knows")
    await until_all(cluster.nodes, f"lead {' '.join(leaders)}")
    await asyncio.sleep(0.5)


async def run(arguments: argparse.Namespace) -> None:
    data = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=arguments.data))
    names = [f"n{number + 1}" for number in range(arguments.nodes)]
    places = json.dumps(dict(zip(names, free_ports(len(names)), strict=True)))
    nodes = [await Child.spawn("--node", str(data), name, str(arguments.partitions), places) for name in names]
    cluster = Cluster(nodes, await Child.spawn("--endpoint"), [])
    rows: list[Row] = []
    waiting: list[dict[str, float]] = []
    try:
        await start(cluster, names if arguments.spread else names[:1])
        if not arguments.spread:
            del cluster.ports[1:]
        if not arguments.json:
            print(
                f"{platform.machine()}, {os.cpu_count()} cores, {arguments.partitions} partitions, {len(nodes)} nodes, "
                f"fsync on, load average {os.getloadavg()[0]:.1f}"
            )
            print(f"nodes {[node.pid for node in nodes]}, endpoint {cluster.endpoint.pid}")
            print(head(len(nodes)), flush=True)
        works = arguments.work
        if arguments.run_ahead:
            works = [each for work in works for each in ([work, f"{work}-ahead"] if work in AHEAD else [work])]
        for work in works * arguments.rounds:
            for in_flight in arguments.in_flight:
                row = await measure(cluster, work, in_flight, arguments.seconds)
                rows.append(row)
                if not arguments.json:
                    print(line(row), flush=True)
        if rows and not arguments.json:
            print("\n" + "\n".join(compare(rows)), flush=True)
        if arguments.waiting:
            waiting = await measure_waiting(cluster, arguments.waiting)
            if not arguments.json:
                for each in waiting:
                    print(
                        "{count} suspended after {took_s:.0f} s: {node_bytes_each:.0f} more bytes of memory for each in "
                        "the node, {endpoint_bytes_each:.0f} in the handler's process".format(**each)
                    )
    finally:
        await asyncio.gather(*(child.end() for child in (*nodes, cluster.endpoint)))
        shutil.rmtree(data, ignore_errors=True)
    if arguments.json:
        print(
            json.dumps({"rows": [{**asdict(row), "all_us": row.all_us} for row in rows], "waiting": waiting}, indent=1)
        )


def works(text: str) -> list[str]:
    """A list of works to measure; an empty one if only --waiting is of interest."""
    names = list(filter(None, text.split(",")))
    known = [*TABLE, *(f"{work}-ahead" for work in AHEAD)]
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"unknown work {', '.join(unknown)}; there are {', '.join(known)}")
    return names


def positive(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def positives(text: str) -> list[int]:
    return [positive(each) for each in text.split(",")]


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=works, default=list(TABLE), help=f"some of {','.join(TABLE)} (default: all)")
    parser.add_argument(
        "--run-ahead",
        action="store_true",
        help="also measure three and ten with run_ahead=True, each right after the strict one",
    )
    parser.add_argument(
        "--in-flight", type=positives, default=[1, 64], help="numbers of requests in flight (default 1,64)"
    )
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="duration of each measurement in seconds (default 5)"
    )
    parser.add_argument("--rounds", type=positive, default=1, help="number of repetitions (default 1)")
    parser.add_argument("--nodes", type=int, default=1, choices=(1, 3))
    parser.add_argument(
        "--spread", action="store_true", help="every node leads its share and gets its share of requests"
    )
    parser.add_argument("--partitions", type=positive, default=4)
    parser.add_argument("--waiting", type=int, default=0, help="measure the memory of this many waiting invocations")
    parser.add_argument("--data", help="parent of the node's directory")
    parser.add_argument("--json", action="store_true")
    return parser


def main() -> None:
    if sys.argv[1:2] == ["--node"]:
        logging.basicConfig(level=logging.WARNING)
        job: Coroutine[Any, Any, None] = run_node(
            Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), json.loads(sys.argv[5])
        )
    elif sys.argv[1:2] == ["--endpoint"]:
        logging.basicConfig(level=logging.WARNING)
        job = run_endpoint()
    elif sys.argv[1:2] == ["--load"]:
        job = run_load([*map(int, sys.argv[2].split(","))], sys.argv[3], int(sys.argv[4]), float(sys.argv[5]))
    else:
        job = run(parser().parse_args())
    uvloop.run(job)


if __name__ == "__main__":
    main()
