"""The previous release runs beside this one, in a cluster under load that is upgraded node by node."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import lmdb
import pytest

from holdfast.chaos.oracle import load as read_oracle
from holdfast.chaos.replicas import compare
from holdfast.cluster.partition.state import read_schema
from holdfast.statemachine.levels import LEVEL, schema_of
from tests.ports import free_ports
from tests.previous import PREVIOUS_LEVEL, previous_release
from tests.promises.processes import PATIENCE_S, Node, Process, World, eventually

PARTITIONS = 3
KEYS = 4


class Endpoint(Process):
    """Handlers with the SDK of one of the two releases."""

    def __init__(self, path: Path, name: str, root: Path | None) -> None:
        super().__init__(name, path / f"{name}.log")
        (self.port,) = free_ports(1)
        self.root = root or self.root

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class ChaosHandlers(Endpoint):
    """The handlers of chaos runs: steps, calls between partitions, keyed state, timers."""

    def __init__(self, path: Path, name: str, offer: str, root: Path | None = None) -> None:
        super().__init__(path, name, root)
        self.oracle = path / "effects.jsonl"
        self.offer = offer

    def start(self) -> None:
        where = ["--host", "127.0.0.1", "--port", str(self.port), "--oracle", str(self.oracle)]
        self.launch(["-m", "holdfast.chaos.handlers", *where, "--offer", self.offer])


class RoughHandlers(Endpoint):
    def start(self) -> None:
        self.launch([str(Path(__file__).with_name("upgrade_handlers.py")), self.name, str(self.port)])


class Cluster(World):
    """Three nodes of the previous release; services of both SDKs, so that each meets nodes of both releases."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, 3, PARTITIONS)
        self.previous = previous_release(path)
        for node in self.nodes:
            node.root = self.previous
        self.endpoints = [
            ChaosHandlers(path, "older handlers", "flow,sleeper,counter", self.previous),
            ChaosHandlers(path, "newer handlers", "leaf,inbox,tree"),
            RoughHandlers(path, "rough1", self.previous),
            RoughHandlers(path, "rough2", None),
        ]
        self.others.extend(self.endpoints)

    async def start(self) -> None:
        for process in (*self.nodes, *self.endpoints):
            process.start()
        await self.ready()
        for endpoint in self.endpoints:
            await self.register(endpoint)  # type: ignore[arg-type]  # It has a url, and that is all.

    async def upgrade(self, node: Node, *, back: bool = False) -> None:
        assert await node.terminate() == 0, node.tail()
        node.root = self.previous if back else self.endpoints[1].root
        node.start()
        await self._answers(f"{node.url}/holdfast/health", node)

    async def idle(self) -> None:
        """Until all replicas have applied the same entries."""

        async def applied(http: aiohttp.ClientSession, node: Node) -> Any:
            async with http.get(f"{node.admin}/cluster") as response:
                return [each["applied"] for each in (await response.json())["partitions"]]

        deadline, before = time.monotonic() + PATIENCE_S, None
        async with aiohttp.ClientSession() as http:
            while True:
                shown = await asyncio.gather(*(applied(http, node) for node in self.nodes))
                if shown == before and shown[0] == shown[1] == shown[2]:
                    return
                assert time.monotonic() < deadline, f"replicas are at {shown}"
                before = shown
                await asyncio.sleep(0.3)


class Clients:
    """Requests that never stop, at any node that answers; resent with the same idempotency key until one does."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.over = False
        self.sent = 0
        self.answers: dict[str, Any] = {}

    async def __aenter__(self) -> Clients:
        self._http = aiohttp.ClientSession()
        kinds = (self._flow, self._count, self._count, self._nap, self._tree, self._rough)
        self._tasks = [asyncio.ensure_future(self._repeat(kind, at)) for at, kind in enumerate(kinds)]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.over = True
        if kind is not None:
            for task in self._tasks:
                task.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=kind is not None)
        finally:
            await self._http.close()

    async def more(self, count: int) -> None:
        goal = len(self.answers) + count

        def enough() -> bool:
            for task in self._tasks:
                assert not task.done(), task.exception()
            return len(self.answers) >= goal

        await eventually(enough, f"{count} more answers")

    async def _repeat(self, kind: Callable[[str], Any], at: int) -> None:
        while not self.over:
            self.sent += 1
            mark = f"{kind.__name__.strip('_')}-{self.sent}-{at}"
            path, body = kind(mark)
            self.answers[mark] = await self._ask(path, mark, body)

    @staticmethod
    def _flow(mark: str) -> tuple[str, Any]:
        return "flow/three", mark

    @staticmethod
    def _count(mark: str) -> tuple[str, Any]:
        return f"counter/{int(mark.split('-')[1]) % KEYS}/add", mark

    @staticmethod
    def _nap(mark: str) -> tuple[str, Any]:
        return "sleeper/nap", {"mark": mark, "seconds": 0.3}

    @staticmethod
    def _tree(mark: str) -> tuple[str, Any]:
        return "tree/branch", {"mark": mark, "leaves": ["a", "b", "c"], "inbox": "in"}

    @staticmethod
    def _rough(mark: str) -> tuple[str, Any]:
        return f"rough{1 + int(mark.split('-')[1]) % 2}/stumble", mark

    async def cancel(self, at: int) -> None:
        """Two invocations that wait for ever, one of each SDK, are cancelled and compensate."""
        for service in ("rough1", "rough2"):
            sent = await self._ask(f"{service}/forever/send", f"cancel-{at}-{service}", "x")
            id_ = sent["invocationId"]
            await self._cluster.ask("POST", f"/invocations/{id_}/cancel")
            deadline = time.monotonic() + PATIENCE_S
            while (shown := await self._cluster.ask("GET", f"/invocations/{id_}"))["status"] != "completed":
                assert time.monotonic() < deadline, shown
                await asyncio.sleep(0.05)
            assert "undone: 409" in json.dumps(shown["outcome"]), shown

    async def _ask(self, path: str, mark: str, body: Any) -> Any:
        deadline, turn = time.monotonic() + PATIENCE_S, self.sent
        while True:
            turn += 1
            node = self._cluster.nodes[turn % 3]
            problem = "it does not run"
            if node.running:
                try:
                    async with self._http.post(
                        f"{node.url}/{path}", json=body, headers={"Idempotency-Key": mark}
                    ) as response:
                        text = await response.text()
                        if response.status in (200, 202):
                            return json.loads(text)
                        assert response.status in (429, 503), f"{mark}: {response.status} {text}"
                        problem = text
                except aiohttp.ClientError as error:
                    problem = str(error)
            assert time.monotonic() < deadline, f"{mark} at {node.name}: {problem}"
            await asyncio.sleep(0.02)


@pytest.mark.slow("three nodes are upgraded one by one under load")
async def test_a_cluster_of_the_previous_release_is_upgraded_node_by_node_under_load(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    try:
        await cluster.start()
        async with Clients(cluster) as clients:
            await clients.more(12)
            assert (await cluster.ask("GET", "/cluster")).get("level", PREVIOUS_LEVEL) == PREVIOUS_LEVEL
            await cluster.upgrade(cluster.nodes[2])
            await clients.more(12)
            # While one node is not upgraded, going back is possible.
            await cluster.upgrade(cluster.nodes[2], back=True)
            await clients.more(12)  # The previous release notes SIGTERM only a moment after its first answer.
            # The leader of the meta group last, so that an older one checks newer ones for as long as possible.
            for at, node in enumerate(sorted(cluster.nodes, key=lambda node: node.name, reverse=True)):
                await asyncio.gather(cluster.upgrade(node), clients.cancel(at))
                lost = cluster.endpoints[at % 2]
                lost.kill()  # Its streams break, with attempts on them.
                lost.start()
                await clients.more(12)
            deadline = time.monotonic() + PATIENCE_S
            while (shown := await cluster.ask("GET", "/cluster"))["level"] != LEVEL:
                assert time.monotonic() < deadline, shown
                await asyncio.sleep(0.1)
            await clients.more(12)
        inbox = json.dumps((await cluster.ask("GET", "/services/inbox/in/state"))["state"]["messages"])
        await cluster.idle()
        for node in cluster.nodes:
            node.signal(signal.SIGKILL)
        await eventually(lambda: not any(node.running for node in cluster.nodes), "dead nodes")

        check_once(clients.answers, json.loads(inbox), tmp_path / "effects.jsonl")
        compared = compare({node.name: node.data for node in cluster.nodes})
        assert compared.wrong == [] and compared.equal == 3 * PARTITIONS
        schemas = set()
        for node in cluster.nodes:
            for path in (node.data / "state").iterdir():
                with lmdb.open(str(path), readonly=True, lock=False) as env, env.begin() as txn:
                    schemas.add(read_schema(txn))
        assert schemas == {schema_of(LEVEL)}, "the level rose in every partition"

        last = cluster.nodes[2]
        last.root = cluster.previous
        last.start()
        await eventually(lambda: not last.running, "the previous release refuses what the new one wrote")
        assert last.status == 1 and "Start the release that wrote it" in last.tail(), last.tail()
    except BaseException:
        print(cluster.tails())
        raise
    finally:
        cluster.stop()


def check_once(answers: dict[str, Any], inbox: list[str], oracle: Path) -> None:
    """Each request took effect once: counters have no gap, messages arrived once and in order, and the journal has
    every step that ran."""
    ran: dict[str, set[str]] = {}
    for effect in read_oracle(oracle):
        ran.setdefault(effect.mark, set()).add(effect.nonce)
    kept: list[str] = []
    counts: dict[int, list[int]] = {key: [] for key in range(KEYS)}
    for mark, answer in answers.items():
        kind, number, _ = mark.split("-")
        if kind == "count":
            counts[int(number) % KEYS].append(answer)
            continue
        if kind == "rough":
            assert answer == [f"not {mark}", "went well"], mark
            continue
        nonces = answer if kind == "flow" else answer["nonces"]
        assert {*nonces} <= ran[mark], f"{mark}: the journal holds what no step returned"
        kept += nonces
    assert len(set(kept)) == len(kept)
    for key, seen in counts.items():
        assert sorted(seen) == list(range(1, len(seen) + 1)), f"key {key}: an addition was lost or doubled"
    trees = [mark for mark in answers if mark.startswith("tree")]
    assert len(inbox) == 3 * len(trees)
    for mark in trees:
        assert [text for text in inbox if text.startswith(f"{mark} ")] == [f"{mark} {at}" for at in range(3)]
    sizes = sorted(size for mark in trees for size in answers[mark]["sizes"])
    assert sizes == sorted(3 * list(range(1, len(trees) + 1))), "each leaf grew once for each call"
