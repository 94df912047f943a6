"""Real processes for the promises: nodes, handlers, and an external oracle that sees every side effect.

A node is `python -m holdfast serve`, handlers are `python -m tests.promises.handlers`. Both are killed and stopped by
process id. The oracle is a file that handlers append to, one line per effect in one write: nothing in Holdfast can
change it.

Tests do not depend on the number of nodes. They kill the leader of an invocation's partition: a single node that
restarts, or one of three, whose work another node continues.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from holdfast.sdk import Client, SendHandle
from holdfast.sdk.ids import parse_id, partition_of
from tests.ports import free_ports

PATIENCE_S = 120.0
SECRET = "a secret of the promises' tests"


async def eventually(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {PATIENCE_S:.0f} s"
        await asyncio.sleep(0.02)
    return found


class Process(ABC):
    """A child with its log in a file; ended by its process id."""

    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        self.log = log
        self.root = Path(__file__).resolve().parents[2]  # The source tree that it runs.
        self._child: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def start(self) -> None: ...

    def launch(self, arguments: list[str], environment: dict[str, str] | None = None) -> None:
        assert not self.running, f"{self.name} runs already"
        root = str(self.root)
        with self.log.open("ab") as log:
            self._child = subprocess.Popen(
                [sys.executable, *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=root,
                env={**_clean(os.environ), "PYTHONPATH": root, **(environment or {})},
            )

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    @property
    def status(self) -> int | None:
        """Its exit status; None: it is running, or was never started."""
        return None if self._child is None else self._child.poll()

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Like a power cut: no signal handler, no clean-up. A stopped process dies too."""
        if self._child is not None and self.running:
            self._child.kill()
            self._child.wait()

    async def terminate(self) -> int:
        """SIGTERM, and its exit code."""
        assert self._child is not None
        self._child.terminate()
        code: int = await asyncio.to_thread(self._child.wait, PATIENCE_S)
        return code

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])


def _clean(environment: Iterable[str]) -> dict[str, str]:
    return {name: os.environ[name] for name in environment if not name.startswith("HOLDFAST_")}


class Node(Process):
    def __init__(
        self, name: str, path: Path, ports: tuple[int, int, int], peers: dict[str, int], partitions: int
    ) -> None:
        super().__init__(name, path / f"{name}.log")
        self.data = path / name
        self.peer_port, self.ingress_port, self.admin_port = ports
        secret = path / "secret"
        secret.write_text(SECRET)
        self.settings = {
            "HOLDFAST_NODE": name,
            "HOLDFAST_CLUSTER": "promises",
            "HOLDFAST_DATA": str(self.data),
            "HOLDFAST_PARTITIONS": str(partitions),
            "HOLDFAST_PEER": f"127.0.0.1:{self.peer_port}",
            "HOLDFAST_INGRESS": f"127.0.0.1:{self.ingress_port}",
            "HOLDFAST_ADMIN": f"127.0.0.1:{self.admin_port}",
            "HOLDFAST_SECRET_FILE": str(secret),
        }
        if len(peers) > 1:
            text = ",".join(f"{peer}=127.0.0.1:{port}" for peer, port in peers.items())
            self.settings["HOLDFAST_PEERS"] = text

    def start(self) -> None:
        self.launch(["-m", "holdfast", "serve"], self.settings)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ingress_port}"

    @property
    def admin(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}"


class Handlers(Process):
    def __init__(self, path: Path, oracle: Path, version: str = "1", *, server: tuple[str, ...] = ()) -> None:
        """`settings`: only for the first node."""
        super().__init__(f"handlers {version}", path / f"handlers-{version}.log")
        (self.port,) = free_ports(1)
        self.oracle = oracle
        self.version = version
        self._server = server

    def start(self) -> None:
        arguments = ["--port", str(self.port), "--oracle", str(self.oracle), "--version", self.version]
        module = ["tests.promises.handlers_asgi", *self._server] if self._server else ["tests.promises.handlers"]
        self.launch(["-m", *module, *arguments])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class World:
    def __init__(self, path: Path, nodes: int, partitions: int, *, settings: dict[str, str] | None = None) -> None:
        """`settings`: of the first node alone."""
        self.path = path
        self.oracle_file = path / "oracle"
        self.oracle_file.touch()
        names = [f"n{number + 1}" for number in range(nodes)]
        ports = free_ports(3 * nodes)
        peers = dict(zip(names, ports[::3], strict=True))
        self.nodes = [
            Node(name, path, (ports[3 * at], ports[3 * at + 1], ports[3 * at + 2]), peers, partitions)
            for at, name in enumerate(names)
        ]
        self.node.settings.update(settings or {})
        self.partitions = partitions
        self.handlers = Handlers(path, self.oracle_file)
        self.others: list[Process] = []
        self.kills = 0  # of leaders

    @property
    def node(self) -> Node:
        return self.nodes[0]

    async def start(self) -> None:
        for node in self.nodes:
            node.start()
        self.handlers.start()
        await self.ready()
        await self.register(self.handlers)

    async def ready(self) -> None:
        for node in self.nodes:
            if node.running:
                await self._answers(f"{node.url}/holdfast/health", node)

    async def register(self, handlers: Handlers, *, force: bool = False) -> str:
        await self._answers(f"{handlers.url}/discover", handlers)
        answer = await self.ask("POST", "/deployments", {"uri": handlers.url, "force": force})
        text: str = answer["id"]
        for node in self.nodes:
            if node.running:
                await self._answers(f"{node.admin}/deployments/{text}", node)
        return text

    async def _answers(self, url: str, process: Process) -> None:
        deadline = time.monotonic() + PATIENCE_S
        async with aiohttp.ClientSession() as session:
            while True:
                try:
                    async with session.get(url, timeout=aiohttp.ClientTimeout(total=5)) as response:
                        if response.status == 200:
                            return
                except (aiohttp.ClientError, TimeoutError):
                    pass
                assert process.running, f"{process.name} ended:\n{process.tail()}"
                assert time.monotonic() < deadline, f"{url} does not answer:\n{process.tail()}"
                await asyncio.sleep(0.05)

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        """The admin API of any running node. While leaders change it may be unable to answer: then the request is
        repeated."""
        deadline = time.monotonic() + PATIENCE_S
        async with aiohttp.ClientSession() as session:
            while True:
                node = next((each for each in self.nodes if each.running), self.node)
                try:
                    async with session.request(method, node.admin + path, json=body) as response:
                        status, text = response.status, await response.text()
                except aiohttp.ClientError as error:
                    status, text = 503, str(error)
                if status < 400:
                    return json.loads(text)
                assert status == 503 and time.monotonic() < deadline, f"{method} {path}: {status} {text}"
                await asyncio.sleep(0.05)

    async def record(self, invocation: SendHandle[Any]) -> dict[str, Any]:
        answer: dict[str, Any] = await self.ask("GET", f"/invocations/{invocation.invocation_id}")
        return answer

    async def succeed(self, *, force: bool = False) -> str:
        """Another process with newer code takes over the handlers. Returns the id of its deployment."""
        self.others.append(self.handlers)
        self.handlers = Handlers(self.path, self.oracle_file, str(int(self.handlers.version) + 1))
        self.handlers.start()
        return await self.register(self.handlers, force=force)

    # -- kills -------------------------------------------------------------------------------------------------------

    async def leader(self, partition: int) -> Node:
        """The leader, as the running nodes report it."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            (shown,) = (
                each for each in (await self.ask("GET", "/cluster"))["partitions"] if each["partition"] == partition
            )
            for node in self.nodes:
                if node.name == shown["leader"] and node.running:
                    return node
            assert time.monotonic() < deadline, f"nobody leads partition {partition}: {shown}"
            await asyncio.sleep(0.02)

    def partition(self, invocation: SendHandle[Any]) -> int:
        return partition_of(parse_id(invocation.invocation_id), self.partitions)

    @asynccontextmanager
    async def without_leader(self, partition: int) -> AsyncIterator[Node]:
        """Kill the leader, and restart it at the end. Yields a node that runs in the meantime.

        A single node restarts at once, because no other could continue.
        """
        node = await self.leader(partition)
        node.kill()
        self.kills += 1
        try:
            if len(self.nodes) == 1:
                node.start()
            yield next(each for each in self.nodes if each.running)
        finally:
            if not node.running:
                node.start()
            await self.ready()

    async def kill_leader(self, invocation: SendHandle[Any], chance: random.Random) -> None:
        """At a random moment; it stays down for a while."""
        await asyncio.sleep(chance.uniform(0.0, 0.3))
        async with self.without_leader(self.partition(invocation)):
            await asyncio.sleep(chance.uniform(0.1, 0.6))

    async def kill_somebody(self, chance: random.Random) -> None:
        """Kill the handlers, or the leader of some partition."""
        await asyncio.sleep(chance.uniform(0.05, 0.5))
        if chance.random() < 0.5:
            self.handlers.kill()
            await asyncio.sleep(chance.uniform(0.0, 0.2))
            self.handlers.start()
        else:
            async with self.without_leader(chance.randrange(self.partitions)):
                await asyncio.sleep(chance.uniform(0.0, 0.5))

    def client(self, node: Node | None = None) -> Client:
        return Client((node or self.node).url, retry_for=PATIENCE_S)

    # -- the oracle --------------------------------------------------------------------------------------------------

    def effects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.oracle_file.read_text().splitlines()]

    def counts(self, **wanted: Any) -> Counter[str]:
        """How often each matching step took effect."""
        return Counter(
            effect["step"]
            for effect in self.effects()
            if all(effect.get(name) == value for name, value in wanted.items())
        )

    async def saw(self, step: str, times: int = 1, **wanted: Any) -> None:
        await eventually(lambda: self.counts(**wanted)[step] >= times, f"{times} x {step}")

    def gate(self, name: str) -> str:
        return str(self.path / f"gate-{name}")

    def open(self, name: str) -> None:
        Path(self.gate(name)).touch()

    async def heal(self) -> None:
        """Restart everything, for the next test."""
        for process in [*self.nodes, self.handlers]:
            if not process.running:
                process.start()
        await self.ready()

    def stop(self) -> None:
        for process in self.processes:
            process.kill()

    @property
    def processes(self) -> list[Process]:
        return [*self.nodes, self.handlers, *self.others]

    def tails(self) -> str:
        return "\n".join(
            f"--- the end of {each.name}'s log\n{each.tail() if each.log.exists() else ''}" for each in self.processes
        )


@asynccontextmanager
async def world(
    path: Path, *, nodes: int = 1, partitions: int = 2, settings: dict[str, str] | None = None
) -> AsyncIterator[World]:
    made = World(path, nodes, partitions, settings=settings)
    try:
        await made.start()
        yield made
    except BaseException:
        print(made.tails())
        raise
    finally:
        made.stop()
