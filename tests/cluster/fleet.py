"""Real nodes that join and leave, by the commands of an operator, while clients count and faults strike.

Nodes are `python -m holdfast serve`, killed by process id. The cluster is operated by `holdfast cluster ...`, in
another process. `make grow SECONDS=n` plays random rounds of joining, draining, removing and replacing for that long.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

from holdfast.sdk import Client
from holdfast.sdk.client import CallFailed, Unreachable
from tests.ports import free_ports
from tests.promises.handlers import add, read
from tests.promises.processes import PATIENCE_S, Handlers, Node

PARTITIONS = 3
REPLICATION = 3
#: A short log, so that a new node needs a snapshot.
SETTINGS = {"HOLDFAST_SNAPSHOT_ENTRIES": "60", "HOLDFAST_SNAPSHOT_INTERVAL": "1s", "HOLDFAST_LOG_TAIL": "5"}

Shown = dict[str, Any]


class Fleet:
    def __init__(self, path: Path, founders: int = 3, partitions: int = PARTITIONS) -> None:
        self.path = path
        self.partitions = partitions
        self.oracle = path / "oracle"
        self.oracle.touch()
        self.handlers = Handlers(path, self.oracle)
        self.nodes: dict[str, Node] = {}
        self.gone: dict[str, Node] = {}  # Removed, or permanently dead.
        self.founders = [f"n{number + 1}" for number in range(founders)]
        self._born = 0
        ports = free_ports(3 * founders)
        self._first = dict(zip(self.founders, ports[::3], strict=True))
        for at in range(founders):
            self._make((ports[3 * at], ports[3 * at + 1], ports[3 * at + 2]))

    def _make(self, ports: tuple[int, int, int]) -> Node:
        self._born += 1
        name = f"n{self._born}"
        # A new node gets the addresses of the running nodes: founders may be gone by now.
        known = self._first if name in self._first else {each.name: each.peer_port for each in self.nodes.values()}
        node = Node(name, self.path, ports, {**known, name: ports[0]}, self.partitions)
        node.settings |= {"HOLDFAST_FOUNDERS": ",".join(self.founders), **SETTINGS}
        self.nodes[name] = node
        return node

    @property
    def running(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.running]

    async def start(self) -> None:
        for node in self.nodes.values():
            node.start()
        self.handlers.start()
        await self.until(lambda shown: all(each["leader"] for each in shown["partitions"]), "leaders of all partitions")
        async with aiohttp.ClientSession() as http:
            made = await _repeat(http, "POST", f"{self.running[0].admin}/deployments", {"uri": self.handlers.url})
            for node in self.running:  # The next command may go to any of them.
                await _repeat(http, "GET", f"{node.admin}/deployments/{made['id']}", None)

    def end(self) -> None:
        for process in (*self.nodes.values(), *self.gone.values(), self.handlers):
            process.kill()

    # -- what an operator does ---------------------------------------------------------------------------------------

    async def cli(self, *arguments: str, at: Node | None = None) -> tuple[int, str]:
        """The exit code, and the output."""
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "holdfast", *arguments, "--admin-url", (at or self.running[0]).admin),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        printed, _ = await child.communicate()
        assert child.returncode is not None
        return child.returncode, printed.decode()

    async def order(self, *arguments: str) -> str:
        """A command that must succeed. While leaders change, it is repeated, as the answer says."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            code, printed = await self.cli(*arguments)
            if code == 0:
                return printed
            again = "again" in printed or "no node answers" in printed or "503" in printed
            assert again and time.monotonic() < deadline, f"{' '.join(arguments)}: {printed}"
            await asyncio.sleep(0.1)

    async def join(self) -> Node:
        port, *doors = free_ports(3)
        node = self._make((port, doors[0], doors[1]))
        await self.order("cluster", "add", node.name, f"127.0.0.1:{port}")
        node.start()
        return node

    def lose(self, node: Node) -> None:
        """The machine is gone, with its process and disk."""
        node.kill()
        shutil.rmtree(node.data)
        self.gone[node.name] = self.nodes.pop(node.name)

    # -- what can be seen --------------------------------------------------------------------------------------------

    async def look(self) -> Shown | None:
        """The cluster as any answering node sees it."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as http:
            for node in self.running:
                with suppress(aiohttp.ClientError, TimeoutError, OSError):
                    async with http.get(f"{node.admin}/cluster") as response:
                        if response.status == 200:
                            shown: Shown = await response.json()
                            return shown
        return None

    async def until(self, condition: Callable[[Shown], Any], what: str) -> Shown:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            shown = await self.look()
            if shown is not None and condition(shown):
                return shown
            for node in self.nodes.values():
                assert node.status in (None, -9), f"{node.name} ended by itself:\n{node.tail()}"
            assert time.monotonic() < deadline, f"{what}: not within {PATIENCE_S:.0f} s: {json.dumps(shown)}"
            await asyncio.sleep(0.03)

    async def settled(self, *names: str) -> Shown:
        """Wait until these nodes hold everything, in equal shares, and no change is pending."""

        def holds(shown: Shown) -> bool:
            held = Counter(name for each in shown["partitions"] for name in each["members"])
            shares = [held[name] for name in names]
            return (
                set(held) == set(names)
                and all(len(each["members"]) == min(REPLICATION, len(names)) for each in shown["partitions"])
                and max(shares) - min(shares) <= 1
                and set(shown["meta"]["members"]) == set(names)
                and all(each["leader"] in names for each in shown["partitions"])
            )

        return await self.until(holds, f"replicas on {names}")

    async def changing(self, name: str) -> Shown:
        """A partition that is about to get `name` as a member, or already has it."""

        def holds(shown: Shown) -> bool:
            wanted = shown["changing"] is not None and shown["changing"].startswith("partition")
            return wanted or any(name in each["members"] for each in shown["partitions"])

        return await self.until(holds, f"a partition that moves to {name}")

    async def controller(self) -> Node:
        """The leader of the meta group."""
        shown = await self.until(lambda shown: shown["meta"]["leader"] in self.nodes, "a leader of the meta group")
        return self.nodes[shown["meta"]["leader"]]

    async def leader(self, partition: int) -> Node:
        shown = await self.until(
            lambda shown: shown["partitions"][partition]["leader"] in self.nodes, f"a leader of partition {partition}"
        )
        return self.nodes[shown["partitions"][partition]["leader"]]


async def _repeat(http: aiohttp.ClientSession, method: str, url: str, body: Any) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with suppress(aiohttp.ClientError, OSError):
            async with http.request(method, url, json=body) as response:
                text = await response.text()
                if response.status < 300:
                    return json.loads(text)
                assert time.monotonic() < deadline, text
        await asyncio.sleep(0.05)


class Counting:
    """Clients that add one to keys for ever. When a node dies, they continue at another one, with the same idempotency
    key."""

    def __init__(self, fleet: Fleet, clients: int = 6, keys: int = 4) -> None:
        self._fleet = fleet
        self._keys = [f"key {number}" for number in range(keys)]
        self._clients = clients
        self._over = False
        self.counts: dict[str, list[int]] = {key: [] for key in self._keys}

    async def __aenter__(self) -> Counting:
        self._tasks = [asyncio.ensure_future(self._count(number)) for number in range(self._clients)]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self._over = True
        if kind is not None:
            for task in self._tasks:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=kind is not None)

    @property
    def done(self) -> int:
        return sum(map(len, self.counts.values()))

    async def more(self, count: int = 30) -> None:
        goal, deadline = self.done + count, time.monotonic() + PATIENCE_S
        while self.done < goal:
            for task in self._tasks:
                assert not task.done(), task.exception()
            assert time.monotonic() < deadline, f"only {self.done} of {goal} requests were answered"
            await asyncio.sleep(0.02)

    async def _count(self, number: int) -> None:
        turn = 0
        while not self._over:
            turn += 1
            key, request = self._keys[(number + turn) % len(self._keys)], f"{number}-{turn}"
            self.counts[key].append(await self._add(key, request, number + turn))

    async def _add(self, key: str, request: str, first: int) -> int:
        deadline = time.monotonic() + PATIENCE_S
        for turn in range(first, first + 10_000):
            running = self._fleet.running
            try:
                async with Client(running[turn % len(running)].url, retry_for=1.0) as client:
                    return await client.call(add, request, key=key, idempotency_key=request)
            except (Unreachable, CallFailed) as error:
                again = isinstance(error, Unreachable) or error.code == 503
                assert again and time.monotonic() < deadline, f"{request}: {error!r}"
        raise AssertionError(f"{request}: nobody answers")

    async def check(self) -> None:
        """Every node reports the clients' answers, which are all numbers, each once."""
        for key, counts in self.counts.items():
            assert sorted(counts) == list(range(1, len(counts) + 1)), f"{key}: an addition was lost or doubled"
            for node in self._fleet.running:
                async with Client(node.url, retry_for=PATIENCE_S) as client:
                    assert await client.call(read, key=key) == len(counts), f"{key} at {node.name}"


@asynccontextmanager
async def fleet(path: Path, founders: int = 3, partitions: int = PARTITIONS) -> AsyncIterator[Fleet]:
    here = Fleet(path, founders, partitions)
    try:
        await here.start()
        yield here
    finally:
        here.end()


# -- make grow ---------------------------------------------------------------------------------------------------------


class Rounds:
    """Random joins, departures and replacements, with a fault in the middle of each."""

    def __init__(self, here: Fleet, seed: int) -> None:
        self._here = here
        self._rng = random.Random(seed)
        self.happened: Counter[str] = Counter()

    async def play(self) -> None:
        here, rng = self._here, self._rng
        names = sorted(here.nodes)
        kind = rng.choice([*(["join"] if len(names) < 5 else []), *(["leave"] if len(names) > 3 else []), "replace"])
        self.happened[kind] += 1
        leaving = here.nodes[rng.choice(names)]
        if kind == "leave":
            await here.order("cluster", "drain", leaving.name, "--move")
        else:
            if kind == "replace":
                here.lose(leaving)
            joined = await here.join()
            await here.until(lambda shown: joined.name in shown["meta"]["members"], f"{joined.name} in the meta group")
            if kind == "replace":
                await here.order("cluster", "remove", leaving.name)
        await self.strike()
        if kind == "leave":
            await here.until(
                lambda shown: all(leaving.name not in each["members"] for each in shown["partitions"]),
                f"{leaving.name} holds nothing",
            )
            await here.order("cluster", "remove", leaving.name)
            here.gone[leaving.name] = here.nodes.pop(leaving.name)
        await here.settled(*here.nodes)
        if kind == "leave":
            leaving.kill()

    async def strike(self) -> None:
        """Kill the node that makes the change, the leader of the changed group, or any node, at a random moment."""
        here, rng = self._here, self._rng
        await asyncio.sleep(rng.uniform(0.0, 1.0))
        for _ in range(rng.choice((1, 1, 2))):
            what = rng.choice(("controller", "leader", "anybody", "newest"))
            shown = await here.look() or {}
            doing = str(shown.get("changing") or "")
            number = int(doing.split(":")[0].split()[1]) if doing.startswith("partition ") else None
            match what:
                case "controller":
                    victim = await here.controller()
                case "leader":
                    victim = await here.leader(rng.randrange(here.partitions) if number is None else number)
                case "newest":
                    victim = max(here.nodes.values(), key=lambda node: int(node.name[1:]))
                case _:
                    victim = rng.choice(list(here.nodes.values()))
            await asyncio.sleep(rng.uniform(0.0, 0.2))
            self.happened[f"{what} killed{' in a change' if doing else ''}"] += 1
            victim.kill()
            await asyncio.sleep(rng.uniform(0.0, 1.5))
            victim.start()


async def main(seconds: float, seed: int) -> None:
    print(f"seed {seed}")
    with tempfile.TemporaryDirectory(prefix="holdfast-grow-") as path:
        async with fleet(Path(path)) as here, Counting(here) as counting:
            rounds, began = Rounds(here, seed), time.monotonic()
            while time.monotonic() - began < seconds:
                await counting.more(20)
                await rounds.play()
                print(f"{time.monotonic() - began:4.0f} s: {', '.join(sorted(here.nodes))}, {counting.done} requests")
            await counting.more(20)
            counting._over = True
            await asyncio.gather(*counting._tasks)
            await counting.check()
    happened = ", ".join(f"{what}: {count}" for what, count in sorted(rounds.happened.items()))
    print(f"{counting.done} requests, none lost and none doubled. {happened}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    options = parser.parse_args()
    asyncio.run(main(options.seconds, options.seed))
